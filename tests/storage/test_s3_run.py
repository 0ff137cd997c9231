"""A run on S3 is the run on a disk: same documents, tokens and order, read from S3, stored on S3, killed in between."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import iter_rows, manifest
from pipeline.store.fs import Store
from tests.corpus import sentences, write_warcs
from tests.e2e.test_same_bytes import RECIPE, result

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A crawl of 150 pages in 2 WARC files, 24 text files, a recipe."""
    top = tmp_path_factory.mktemp("site")
    write_warcs(top / "crawl", 150, 2)
    rng, prose = random.Random(5), sentences()
    (top / "docs").mkdir()
    for i in range(24):
        (top / "docs" / f"d{i:02d}.txt").write_text(" ".join(rng.sample(prose, 25)))
    (top / "recipe.yaml").write_text(RECIPE)
    return top


@pytest.fixture(scope="module")
def expected(site, tmp_path_factory) -> dict[str, str]:
    store = tmp_path_factory.mktemp("expected")
    run_recipe(load_recipe(site / "recipe.yaml", []), str(store), make_backend=make_backend("inline", 1, None))
    return result(store)


@pytest.fixture
def remote_site(site, bucket) -> str:
    """The same inputs in a bucket; returns its URL."""
    from_here = Store(bucket)
    for path in [*sorted((site / "crawl").iterdir()), *sorted((site / "docs").iterdir())]:
        from_here.write(f"in/{path.parent.name}/{path.name}", path.read_bytes())
    return bucket


def remote_recipe(site: Path, bucket: str, to: Path) -> Path:
    """The recipe with its sources in the bucket."""
    to.write_text((site / "recipe.yaml").read_text().replace("crawl/*", f"{bucket}/in/crawl/*")
                  .replace("path: docs", f"path: {bucket}/in/docs"))
    return to


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_everything_on_s3_equals_everything_on_disk(site, expected, remote_site, tmp_path, backend):
    recipe = load_recipe(remote_recipe(site, remote_site, tmp_path / "recipe.yaml"), [])
    store = f"{remote_site}/runs/a"
    run_recipe(recipe, store, make_backend=make_backend(backend, 2, None))
    assert result(store) == expected
    at = Store(store)
    for dataset in ("extracted", "clean", "deduped"):
        for kind in ("datasets", "dropped", "quarantine"):
            rows = sum(manifest(at, dataset, kind)["rows"].to_pylist())
            assert rows == sum(1 for _ in iter_rows(at, f"{kind}/{dataset}", ["id"]))
    again = run_recipe(recipe, store, make_backend=make_backend("inline", 1, None))
    assert again.executed == 0 and again.reused > 10
    assert result(store) == expected
