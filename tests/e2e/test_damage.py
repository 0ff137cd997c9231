"""Damage in a store is seen where it is read, changes no output, and what was derived comes back to the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from pipeline.engine.task import PartRecord
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import dataset_hash, iter_rows
from pipeline.store.errors import DamagedFile, StoreError
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.corpus import sentences, write_warcs
from tests.e2e.test_same_bytes import RECIPE


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path, dict[str, str]]:
    """(a site with its recipe, the store of a finished run, the hashes of what it made)"""
    top = tmp_path_factory.mktemp("damage")
    write_warcs(top / "crawl", 80, 2)
    (top / "docs").mkdir()
    rng, prose = random.Random(5), sentences()
    texts: list[str] = []
    for i in range(24):
        texts.append(texts[-1] + " One more sentence." if i % 4 == 3 else " ".join(rng.sample(prose, 25)))
        (top / "docs" / f"d{i:02d}.txt").write_text(texts[-1])
    (top / "recipe.yaml").write_text(RECIPE.replace("total: 60k", "total: 20k"))
    return top, top / "store", run(top, top / "store")


def run(site: Path, store: Path, *overrides: str) -> dict[str, str]:
    """Run the recipe; hashes of everything it promises to be equal."""
    at = Store(store)
    name = run_recipe(load_recipe(site / "recipe.yaml", list(overrides)), str(store),
                      make_backend=make_backend("inline", 1, None)).run
    curriculum = json.loads(at.read(f"runs/{name}/curriculum.json"))
    return {**{d: dataset_hash(at, d) for d in ("extracted", "clean", "deduped")},
            **{s["name"]: f"{s['sha256']}/{s['val_sha256']}" for s in curriculum["streams"]},
            "order": curriculum["order"], "tokenizer": curriculum["tokenizer"]["sha256"]}


def copy(store: Path, to: Path) -> Path:
    """A store of its own, in which published names are links again."""
    shutil.copytree(store, to, copy_function=os.link)
    for path in to.rglob("*"):                       # files of the other store must not be touched through links
        if path.is_file() and path.stat().st_nlink > 1:
            aside = path.with_name(path.name + "~")
            shutil.copyfile(path, aside)
            os.replace(aside, path)
    return to


def flip(path: Path, seed: int = 0) -> None:
    data = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def outputs(store: Path, task: str, name: str) -> list[PartRecord]:
    return [r for r in Log.read(Store(store)).records() if r.task.endswith(task) and name in r.files
            and r.files[name].rows]


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_damaged_part_is_made_anew_while_a_new_step_reads_it(finished, tmp_path, harm):
    """The store is finished; a changed step reads a part that has been damaged since."""
    top, store, _ = finished
    changed = "datasets.clean.steps=[gopher_quality, pii]"
    wanted = run(top, copy(store, tmp_path / "wanted"), changed)
    harmed = copy(store, tmp_path / "harmed")
    record = outputs(harmed, ":DocumentPass", "kept.parquet")[0]
    path = harmed / record.files["kept.parquet"].path
    if harm == "flip":
        flip(path)
    elif harm == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    assert run(top, harmed, changed) == wanted
    again = Log.read(Store(harmed)).get(record.key)
    assert again.attempt != record.attempt and again.files["kept.parquet"].content == record.files[
        "kept.parquet"].content


def test_published_files_are_links_to_what_was_made_anew(finished, tmp_path):
    top, store, expected = finished
    harmed = copy(store, tmp_path / "harmed")
    body = next(p for p in sorted((harmed / "shards").rglob("*.tokens")))
    [record] = [r for r in outputs(harmed, ":AssembleShard", "body") if r.files["body"].sha256[:12] in body.name]
    (harmed / record.files["body"].path).unlink()
    flip(body)
    assert run(top, harmed) == expected
    made = Log.read(Store(harmed)).get(record.key).files["body"]
    assert os.path.samefile(harmed / made.path, body)


def test_a_flipped_bit_in_a_published_part_is_told_where_it_is_read(finished, tmp_path):
    _, store, _ = finished
    harmed = copy(store, tmp_path / "harmed")
    part = next((harmed / "datasets" / "deduped").glob("part-*.parquet"))
    flip(part)
    for read in (lambda: dataset_hash(Store(harmed), "deduped"), lambda: list(iter_rows(Store(harmed),
                                                                                         "datasets/deduped"))):
        with pytest.raises(DamagedFile, match=rf"datasets/deduped/{part.name} is damaged"):
            read()


def test_a_store_that_keeps_losing_files_is_given_up(finished, tmp_path, monkeypatch):
    """A failing disk must not keep a driver busy for ever."""
    top, store, _ = finished
    harmed = copy(store, tmp_path / "harmed")
    monkeypatch.setattr("pipeline.run.MOST_MENDED", 0)
    for record in outputs(harmed, ":DocumentPass", "kept.parquet"):
        flip(harmed / record.files["kept.parquet"].path)
    with pytest.raises(StoreError, match="its disk, or somebody who writes there, is at fault"):
        run(top, harmed, "datasets.clean.steps=[gopher_quality, pii]")
