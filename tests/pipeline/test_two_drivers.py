"""Two drivers of one store. The first stands still at a critical moment; the second takes the store over with other
settings and finishes. When the first goes on, it ends and changes nothing of the second. Tests with real processes and
SIGSTOP are in tests/chaos/test_drivers.py."""

from __future__ import annotations

import hashlib
import os
import pkgutil
import random
from pathlib import Path

import duckdb
import pytest

from pipeline.base.files import UNFINISHED
from pipeline.cli.app import run_command
from pipeline.store.dataset import manifest
from pipeline.store.fs import Store
from tests.corpus import sentences

RECIPE = """
version: 1
sources: {docs: {read: text, path: docs}}
datasets:
  clean: {from: docs, steps: [{gopher_quality: {min_doc_words: 50}}]}
tokenizer: {train: {kind: bpe, vocab: 300, from: clean}}
shards: {docs: {from: clean, longest: 64}}
run: {partition: 4KB}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("drivers")
    (top / "docs").mkdir()
    rng, prose = random.Random(11), sentences()
    for i in range(24):
        (top / "docs" / f"d{i:02d}.txt").write_text("\n".join(rng.sample(prose, 4 + i)))
    (top / "recipe.yaml").write_text(RECIPE)
    return top


def tree(store: Path, but: str) -> dict[str, str]:
    """Return {path: sha256} for the files of a store, except those of the run `but` and the files of the first epoch,
    which are garbage. Unfinished files are left out, too, because the first driver may have been stopped while it wrote
    one."""
    return {p.relative_to(store).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(store.rglob("*")) if p.is_file() and f"/{but}/" not in str(p)
            and "/00000001-" not in str(p) and p.name != "00000001.json" and ".publish" not in str(p)
            and not p.name.endswith(UNFINISHED)}


@pytest.mark.parametrize(("place", "part"), [
    ("pipeline.store.dataset.ManifestWriter.add", "clean"),              # while it links
    ("pipeline.store.dataset.os.rename", "datasets/clean"),              # it has asked, and is about to show its folder
    ("pipeline.passes.publish_shards.link_committed", "split=train"),    # then manifests
    ("pipeline.report.collect.collect", "")])                            # the report of the store
def test_the_first_driver_goes_on_and_changes_nothing(site, tmp_path, monkeypatch, capsys, place, part):
    """It stands still when it first calls `place` with something about `part`."""
    store, before = tmp_path / "store", {}

    def run(name: str, *more: str) -> int:
        return run_command(["run", str(site / "recipe.yaml"), "--store", str(store), "--backend", "inline", "--quiet",
                            "--name", name, *more])

    real = pkgutil.resolve_name(place)

    def stand_still(*arguments, **options):
        if part in " ".join(map(str, arguments)):
            monkeypatch.undo()
            assert run("second", "--takeover", "--set", "datasets.clean.steps.gopher_quality.min_doc_words=200") == 0
            before.update(tree(store, "first"))
        return real(*arguments, **options)

    monkeypatch.setattr(place, stand_still)
    assert run("first") == 1
    said = capsys.readouterr().err
    assert "run 'second'" in said and "took the store over" in said and "Traceback" not in said
    after = tree(store, "first")
    # shards are named by their contents, and read by manifests: one that no manifest names is garbage
    assert before and {k: v for k, v in after.items()
                       if k in before or not k.startswith("shards/docs/split=train/0")} == before
    rows = sum(manifest(Store(store), "clean")["rows"].to_pylist())
    [(found,)] = duckdb.connect().execute(f"select count(*) from '{store}/datasets/clean/part-*.parquet'").fetchall()
    assert 0 < found == rows < 24
    assert not [p for p in (store / ".publish/datasets").iterdir() if len(os.listdir(p)) and "clean~" not in p.name]
