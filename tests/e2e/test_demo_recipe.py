"""The demo's own recipe over its real input: the result is the same for any backend, number of workers, order of tasks,
hash seed and number of threads, and after kills.

Slow: a whole run over seven sources (the first call fetches about 210 MB from the package registry).
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.test_same_bytes import ROOT, command, commits
from tests.frozen import hold_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo")]


@pytest.fixture(scope="module")
def recipe() -> Path:
    done = command("-m", "demo.fetch")
    if done.returncode:
        pytest.skip(f"the demo's input cannot be fetched: {done.stderr.strip()}")
    return ROOT / "demo" / "recipe.yaml"


def args(recipe: Path, store: Path, *extra: str) -> list[str]:
    return ["run", str(recipe), "--store", str(store), "--quiet", *extra]


@pytest.fixture(scope="module")
def store(recipe, tmp_path_factory) -> Path:
    """The store of a run that was killed in a partition, then killed while it read exchange files, and then finished on
    Ray. Backend, number of workers, order, hash seed and number of threads differ from those of the frozen run."""
    at = tmp_path_factory.mktemp("demo")
    env = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}
    for point, nth in (("partition", 400), ("reduce", 1)):
        died = command("-m", "tests.e2e.kill", point, str(nth), *args(recipe, at, "--backend", "inline"), **env)
        assert died.returncode == -signal.SIGKILL, f"{point}: was not killed: {died.stdout}{died.stderr}"
    done = command("-m", "pipeline.cli", *args(recipe, at, "--backend", "ray", "--workers", "2", "--dispatch-seed",
                                               "1"), **env)
    assert done.returncode == 0, done.stderr
    return at


def test_nothing_was_committed_twice(store):
    assert set(commits(store).values()) == {1}


def test_the_bytes_are_those_of_one_worker(store):
    """The frozen figures are of one undisturbed process."""
    hold_run("demo", store)


def test_the_sources_keep_enough(store):
    """At least four sources keep 200 documents and 0.3 M tokens each, the web source 100 documents."""
    import duckdb

    rows = duckdb.sql(f"select source, count(*) from '{store}/datasets/deduped/part-*.parquet' group by 1").fetchall()
    docs = dict(rows)
    tokens = {name: sum(json.loads(p.read_text())["tokens"] for p in store.glob(f"shards/{name}/split=*/shards.json"))
              for name in docs}
    big = [name for name in docs if docs[name] >= 200 and tokens[name] >= 300_000]
    assert len(big) >= 4, (docs, tokens)
    assert docs["web"] >= 100
    print(docs, tokens, file=sys.stderr)
