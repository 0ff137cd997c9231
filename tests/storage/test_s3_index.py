"""Indexes of deduplications on S3: the store, the folder of the index and merged folders may all be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.index_folders import merge_folders, new_folder
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from tests.commands import command
from tests.e2e.test_incremental import CRAWLS, recipe, run
from tests.e2e.test_incremental import site as site


@pytest.fixture(scope="module")
def grown(site, tmp_path_factory) -> Path:
    """A store with three datasets, each compared with those before it."""
    store = tmp_path_factory.mktemp("grown")
    run(site / "3.yaml", store)
    return store


@pytest.mark.parametrize(("merged", "backend", "workers"), [
    pytest.param(False, "process", 2, marks=pytest.mark.slow), (True, "inline", 1)])
def test_an_index_on_s3_is_that_on_a_disk(site, grown, bucket, merged, backend, workers):
    [name] = [path.name for path in (grown / "runs").iterdir() if path.name.startswith("3-")]
    folders = [f"{bucket}/{crawl}.index" for crawl in CRAWLS[:2]]
    for crawl, folder in zip(CRAWLS, folders):
        done = command("pipeline.cli", "dedup", "index", name, f"new_{crawl}", "--out", folder, "--store", str(grown),
                       "--backend", "inline")
        assert done.returncode == 0, done.stderr
    if merged:
        merge_folders(folders, new_folder(f"{bucket}/both.index"))
        folders = [f"{bucket}/both.index"]
    against = f"against: [{', '.join(folders)}]"
    steps = f"[{{exact: {{by: both, {against}}}}}, {{minhash: {{{against}}}}}]"
    path = site / "on_s3.yaml"
    path.write_text(recipe({"new_three": f"{{from: three, steps: {steps}}}"}).partition("tokenizer")[0])
    expected = dataset_hash(Store(str(grown)), "new_three")
    run_recipe(load_recipe(path, []), f"{bucket}/store", make_backend=make_backend(backend, workers, None))
    assert dataset_hash(Store(f"{bucket}/store"), "new_three") == expected


@pytest.mark.slow
def test_crawls_are_added_to_a_store_on_s3(site, grown, bucket):
    for number in (2, 3):
        run(site / f"{number}.yaml", f"{bucket}/store")
    for crawl in CRAWLS:
        assert dataset_hash(Store(f"{bucket}/store"), f"new_{crawl}") == dataset_hash(Store(str(grown)),
                                                                                      f"new_{crawl}")
