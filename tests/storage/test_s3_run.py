"""A run on S3 gives the same documents, tokens and order as a run on a disk: with sources read from S3, with the store
on S3, and with kills in between."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path

import pytest

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import iter_rows, manifest
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from pipeline.store.s3 import S3
from tests.commands import command
from tests.corpus import sentences, write_warcs
from tests.e2e.test_same_bytes import RECIPE, result
from tests.hurried import HurriedClock


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with a crawl of 150 pages in 2 WARC files, 24 text files and a recipe."""
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
    """The URL of a bucket with the same inputs."""
    from_here = Store(bucket)
    for path in [*sorted((site / "crawl").iterdir()), *sorted((site / "docs").iterdir())]:
        from_here.write(f"in/{path.parent.name}/{path.name}", path.read_bytes())
    return bucket


def remote_recipe(site: Path, bucket: str, to: Path) -> Path:
    """Write the recipe with its sources in the bucket."""
    to.write_text((site / "recipe.yaml").read_text().replace("crawl/*", f"{bucket}/in/crawl/*")
                  .replace("path: docs", f"path: {bucket}/in/docs"))
    return to


@pytest.mark.slow
def test_everything_on_s3_equals_everything_on_disk(site, expected, remote_site, tmp_path):
    recipe = load_recipe(remote_recipe(site, remote_site, tmp_path / "recipe.yaml"), [])
    store = f"{remote_site}/runs/a"
    run_recipe(recipe, store, make_backend=make_backend("process", 2, None))
    assert result(store) == expected
    at = Store(store)
    for dataset in ("extracted", "clean", "deduped"):
        for kind in ("datasets", "dropped", "quarantine"):
            rows = sum(manifest(at, dataset, kind)["rows"].to_pylist())
            assert rows == sum(1 for _ in iter_rows(at, f"{kind}/{dataset}", ["id"]))
    again = run_recipe(recipe, store, make_backend=make_backend("inline", 1, None))
    assert again.executed == 0 and again.reused > 10
    assert result(store) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("point", "nth"), [("commit", 7), ("copy", 3)])
def test_killed_on_s3_and_run_again(site, expected, remote_site, tmp_path, point, nth):
    store = f"{remote_site}/killed"
    args = ["run", str(remote_recipe(site, remote_site, tmp_path / "recipe.yaml")), "--store", store,
            "--backend", "inline", "--quiet"]
    died = command("tests.e2e.kill", point, str(nth), *args)
    assert died.returncode == -signal.SIGKILL, f"was not killed: {died.stdout}{died.stderr}"
    again = command("pipeline.cli", *args)
    assert again.returncode == 0, again.stderr
    assert result(store) == expected
    at = Store(store)
    keys = [r["key"] for p in at.list("log") if re.fullmatch(r"log/0\d+\.json", p)
            for r in json.loads(at.read(p))["body"].get("records", ())]
    assert len(keys) == len(set(keys)), "a key was committed twice"
    for dataset in ("extracted", "clean", "deduped"):
        for kind in ("datasets", "dropped"):
            named = manifest(at, dataset, kind)["part"].to_pylist()
            there = [p.rpartition("/")[2] for p in at.list(f"{kind}/{dataset}")]
            assert sorted(there) == sorted([*named, ".manifest"])


@pytest.mark.slow
def test_the_commands_take_a_url(site, remote_site, tmp_path):
    """run, plan, list, report, inspect, shards: as a user would, from another process than the one that made it."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
version: 1
sources: {{docs: {{read: text, path: {remote_site}/in/docs}}}}
datasets: {{clean: {{from: docs, steps: [gopher_quality, pii]}}}}
""")
    store = f"{remote_site}/cli"
    ran = command("pipeline.cli", "run", str(recipe), "--store", store, "--backend", "inline", "--name", "first")
    assert ran.returncode == 0, ran.stderr
    assert f"report: {store}/runs/first/report.html" in ran.stdout
    for said, *args in ((r"first +done +\d+/\d+ tasks", "list"), (r"clean +\d+ kept", "inspect"),
                        ("", "plan", str(recipe)), ("text", "inspect", "clean", "-n", "1", "--json"),
                        (re.escape(f"{store}/runs/first/report.html"), "report", "first"),
                        (re.escape(f"{store}/runs/first/report.html"), "report", f"{store}/runs/first")):
        rest = () if args[-1].startswith("s3://") else ("--store", store)
        done = command("pipeline.cli", *args, *rest)
        assert done.returncode == 0 and re.search(said, done.stdout), (args, done.stdout, done.stderr)
    nothing = command("pipeline.cli", "inspect", "--store", "s3://no-such-bucket-at-all/x")
    assert nothing.returncode == 1 and "Traceback" not in nothing.stderr
    assert "see that the bucket exists" in nothing.stderr


@pytest.mark.slow
def test_a_run_survives_a_bad_day(s3_server, bucket, tmp_path, monkeypatch):
    """Every seventh request fails, each in another way; the run does not notice."""
    monkeypatch.setattr(S3, "clock", HurriedClock())
    rng, prose, source = random.Random(5), sentences(), Store(f"{bucket}/in")
    for i in range(12):
        source.write(f"d{i:02d}.txt", " ".join(rng.sample(prose, 25)).encode())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
version: 1
sources: {{docs: {{read: text, path: {bucket}/in}}}}
datasets: {{clean: {{from: docs, steps: [gopher_quality]}}}}
run: {{partition: 5KB}}
""")
    hashes = []
    ways = ["503", "drop", "cut", "lost reply", "slow down"]
    for trouble in (None, lambda method, path, n: ways[n // 7 % 5] if n % 7 == 6 else None):
        store = f"{bucket}/{'bad' if trouble else 'good'}"
        s3_server.trouble(trouble)
        run_recipe(load_recipe(recipe, []), store, make_backend=make_backend("inline", 1, None))
        requests = len(s3_server.requests)
        s3_server.trouble(None)
        hashes.append(dataset_hash(Store(store), "clean"))
    assert hashes[0] == hashes[1] and requests > 70
