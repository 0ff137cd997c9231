"""Partitions are planned from the inputs alone, and adding a file only changes neighbouring partitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.plan.file_list import SourceFile
from pipeline.plan.inputs import InputError, list_source
from pipeline.plan.split import MAX_FILES, OVERFULL, partitions


def files(n: int, size: int = 10_000) -> list[SourceFile]:
    return [SourceFile(f"d{i % 7}/f{i:05d}.html", "/r", size + i % 100, "1") for i in range(n)]


def plan(given: list[SourceFile], target: int = 200_000, indexes=None):
    given = sorted(given)
    return list(partitions("s", given, lambda path: 1.0, target, indexes or {}))


def slices_of(parts) -> list[tuple[str, ...]]:
    return [tuple(s["$file"] for s in p.slices) for p in parts]


def test_partitions_cover_every_file_once_in_path_order():
    given = files(1000)
    flat = [path for p in slices_of(plan(given)) for path in p]
    assert flat == sorted(f.path for f in given)


def test_partitions_are_bounded_by_bytes_and_files():
    parts = plan(files(3000))
    assert max(p.weight for p in parts) <= OVERFULL * 200_000 + 1
    assert 3000 * 10_000 / 200_000 * 0.5 < len(parts) < 3000 * 10_000 / 200_000 * 2.5
    assert max(len(p.slices) for p in plan(files(5000, size=1))) <= MAX_FILES


@pytest.mark.parametrize("at", ["d0/a.html", "d3/f00500x.html", "d9/z.html"])
def test_adding_a_file_disturbs_only_its_neighbours(at):
    given = files(2000)
    before, after = set(slices_of(plan(given))), set(slices_of(plan([*given, SourceFile(at, "/r", 9_000, "1")])))
    assert len(after - before) <= 4, "a new file re-partitioned strangers"


@pytest.mark.parametrize("at", [0, 7000, 19_000])
def test_so_do_tiny_files_of_which_a_partition_could_hold_any_number(at):
    given = [SourceFile(f"{i:06d}.txt", "/r", 1000, "1") for i in range(20_000)]
    before = slices_of(plan(given, 256 << 20))
    after = slices_of(plan([*given, SourceFile(f"{at:06d}.and.txt", "/r", 1000, "1")], 256 << 20))
    assert max(map(len, before)) <= MAX_FILES and len(before) < 20_000 / MAX_FILES * 1.6
    assert len(set(after) - set(before)) <= 8, "a new file re-partitioned strangers"
    assert len(slices_of(plan(given[:MAX_FILES // 2], 256 << 20))) == 1


def test_a_big_file_becomes_one_partition_a_split():
    given = [SourceFile(f"{name}.gz", "/r", size, "1") for name, size in (("a", 10), ("b", 9_000_000), ("c", 10))]
    splits = [{"start": 0, "stop": 5, "ordinal": 0, "records": 3, "bytes": 500},
              {"start": 5, "stop": None, "ordinal": 3, "records": 4, "bytes": 600}]
    parts = plan(given, 1000, {"b.gz": splits})
    assert [p.slices[0]["$file"] for p in parts] == ["a.gz", "b.gz", "b.gz", "c.gz"]
    assert parts[2].slices[0]["ordinal"] == 3 and "stop" not in parts[2].slices[0]


def test_identity_of_a_file_is_its_path_below_the_root(tmp_path: Path):
    for root in ("one", "two"):
        (tmp_path / root / "x").mkdir(parents=True)
        (tmp_path / root / "x" / "a.txt").write_text("same")
    one = list_source("s", ["one/**/*.txt"], base=str(tmp_path))
    two = list_source("s", [str(tmp_path / "two")], suffixes=(".txt",))
    assert [f.path for f in one] == [f.path for f in two] == ["x/a.txt"]


def test_a_missing_input_names_source_pattern_and_remedy(tmp_path: Path):
    with pytest.raises(InputError, match=r"source 'web'.*nothing\*\.gz.*--input"):
        list_source("web", ["nothing*.gz"], base=str(tmp_path))
