"""The same input and recipe give the same documents, tokens and order, whatever runs the tasks, divides or orders them,
or kills the run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import duckdb
import pytest

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from tests import commands
from tests.corpus import sentences, write_warcs
from tests.frozen import hold_run

ROOT = Path(__file__).resolve().parents[2]

RECIPE = """
version: 1
sources:
  web: {read: warc, path: crawl/*.warc.gz}
  docs: {read: text, path: docs}
datasets:
  extracted: {from: web, steps: [{html: {engine: resiliparse}}]}
  clean: {from: extracted, steps: [gopher_repetition, gopher_quality, pii]}
  deduped: {from: [clean, docs], steps: [{exact: {}}, {minhash: {verify: 0.75}}], priority: [docs, clean]}
tokenizer: {train: {kind: bpe, vocab: 800, from: deduped, sample: 200KB}}
shards:
  web: {from: deduped, where: {source: web}, longest: 512, val: 5%}
  docs: {from: deduped, where: {source: docs}, longest: 512, val: 5%}
curriculum:
  seed: 3
  total: 60k
  phases:
    - {name: stable, until: 70%, sequence: 128, batch: 1024, mix: {web: 80, docs: 20}, on_exhausted: repeat}
    - {name: anneal, until: 100%, sequence: 256, mix: {web: 50, docs: 50}, lr: decay}
run: {partition: 150KB}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A crawl of 300 pages in 3 WARC files, 40 text files some of which are near-duplicates of each other, a recipe."""
    top = tmp_path_factory.mktemp("site")
    write_warcs(top / "crawl", 300, 3)
    rng, prose = random.Random(5), sentences()
    (top / "docs").mkdir()
    texts: list[str] = []
    for i in range(40):
        near = texts and rng.random() < 0.3
        text = rng.choice(texts) + " One more sentence." if near else " ".join(rng.sample(prose, 25))
        texts.append(text)
        (top / "docs" / f"d{i:02d}.txt").write_text(text)
    (top / "recipe.yaml").write_text(RECIPE)
    return top


def result(store: Path | str) -> dict[str, str]:
    """Return hashes of everything that must be the same in every run: of the datasets, the shards, the order of samples
    and the tokenizer."""
    at = Store(str(store))
    [run] = {p.split("/")[1] for p in at.list("runs")}
    curriculum = json.loads(at.read(f"runs/{run}/curriculum.json"))
    return {**{d: dataset_hash(at, d) for d in sorted({p.split("/")[1] for p in at.list("datasets")})},
            **{s["name"]: f"{s['sha256']}/{s['val_sha256']}" for s in curriculum["streams"]},
            "order": curriculum["order"], "tokenizer": curriculum["tokenizer"]["sha256"]}


@pytest.fixture(scope="module")
def whole(site, tmp_path_factory) -> Path:
    """The store of an undisturbed run in this process."""
    store = tmp_path_factory.mktemp("whole")
    run_recipe(load_recipe(site / "recipe.yaml"), str(store), make_backend=make_backend("inline", 1, None))
    return store


@pytest.fixture(scope="module")
def expected(whole) -> dict[str, str]:
    hashes = result(whole)
    assert len(set(hashes.values())) == len(hashes)
    return hashes


def test_the_bytes_are_the_frozen_ones(whole):
    hold_run("same bytes", whole)


def command(*args: str, **env: str) -> subprocess.CompletedProcess:
    """Run Python with these arguments in a process of its own. `env` are variables that must be set when Python starts,
    such as the hash seed."""
    return subprocess.run([sys.executable, *args], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True,
                          timeout=1800)


@pytest.mark.parametrize(("workers", "seed", "partition", "env"), [
    (2, 1, "40KB", {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}),
    pytest.param(1, 2, "10MB", {"PYTHONHASHSEED": "0"}, marks=pytest.mark.slow)])
def test_same_bytes_however_it_runs(site, expected, tmp_path, workers, seed, partition, env):
    """Workers, order of dispatch, partition size, hash seed and threads differ all at once."""
    done = command("-m", "pipeline.cli", "run", str(site / "recipe.yaml"), "--store", str(tmp_path), "--quiet",
                   "--backend", "process", "--workers", str(workers), "--dispatch-seed", str(seed),
                   "--set", f"run.partition={partition}", **env)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path) == expected


def commits(store: Path) -> Counter:
    """Count how often each key is in the log."""
    found: Counter = Counter()
    for path in sorted((store / "log").glob("0*.json")):
        found.update(r["key"] for r in json.loads(path.read_text())["body"].get("records", ()))
    return found


def test_same_bytes_after_kills(site, expected, tmp_path):
    """Killed at four points one after another, then finished by the command."""
    args = ["run", str(site / "recipe.yaml"), "--store", str(tmp_path), "--backend", "inline", "--quiet"]
    before: Counter = Counter()
    for point, nth in (("partition", 60), ("reduce", 1), ("commit", 1), ("publish", 2)):
        died = commands.command("tests.e2e.kill", point, str(nth), *args)
        assert died.returncode == -signal.SIGKILL, f"{point}: was not killed: {died.stdout}{died.stderr}"
        now = commits(tmp_path)
        assert before.keys() <= now.keys(), f"{point}: something committed was lost"
        before = now
    again = commands.command("pipeline.cli", *args)
    assert again.returncode == 0, again.stderr
    assert result(tmp_path) == expected
    after = commits(tmp_path)
    assert set(after.values()) == {1}, "a key was committed twice"
    assert before.keys() <= after.keys(), "something committed was lost"
    for dataset in ("extracted", "clean", "deduped"):
        for folder in ("datasets", "dropped"):
            at = tmp_path / folder / dataset
            [rows] = duckdb.sql(f"select count(*) from '{at}/part-*.parquet'").fetchall()[0]
            [said] = duckdb.sql(f"select sum(rows) from read_parquet('{at}/.manifest')").fetchall()[0]
            assert rows == said
    referenced = {i["path"] for p in (tmp_path / "log").glob("0*.json")
                  for r in json.loads(p.read_text())["body"].get("records", ()) for i in r["files"].values()}
    left = {p.relative_to(tmp_path).as_posix() for p in (tmp_path / "objects").rglob("*")
            if p.is_file() and p.parent.name != "lists"}
    assert left == referenced, "files of dead attempts were not collected"


def test_nothing_is_done_twice(site, whole, expected):
    summary = run_recipe(load_recipe(site / "recipe.yaml"), str(whole), make_backend=make_backend("inline", 1, None))
    assert summary.executed == 0 and summary.reused > 10
    assert result(whole) == expected
