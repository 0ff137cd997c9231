"""Files that are written whole or not at all."""

from __future__ import annotations

import pytest

from pipeline.base.files import replacing


def test_a_file_is_replaced_when_the_body_ends(tmp_path):
    path = tmp_path / "folder" / "model.bin"
    path.parent.mkdir()
    for text in ("old", "new"):
        with replacing(path) as part:
            part.write_text(text)
            assert part.parent == path.parent
            assert [p.name for p in path.parent.glob("*.bin")] == (["model.bin"] if text == "new" else [])
            assert not path.exists() or path.read_text() == "old"
    assert path.read_text() == "new"
    assert [p.name for p in path.parent.iterdir()] == ["model.bin"]


def test_the_old_file_stays_when_the_body_raises(tmp_path):
    path = tmp_path / "model.bin"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as part:
            part.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model.bin"]


def test_a_part_that_cannot_be_removed_hides_no_error(tmp_path):
    def fail() -> None:
        with replacing(tmp_path / "model.bin") as part:
            part.mkdir()                                  # unlink refuses a folder
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
