"""Two real drivers of one store: the first stands still at its most delicate moments (SIGSTOP), the second takes the
store over with other settings and finishes; when the first goes on, it ends and nothing of the second's has changed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import duckdb
import pytest

from pipeline.base.files import UNFINISHED
from pipeline.store.dataset import manifest
from pipeline.store.fs import Store
from tests.corpus import sentences

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP and /proc")
ROOT = Path(__file__).resolve().parents[2]

RECIPE = """
version: 1
sources: {docs: {read: text, path: docs}}
datasets:
  clean: {from: docs, steps: [{gopher_quality: {min_doc_words: 50}}]}
tokenizer: {train: {kind: bpe, vocab: 300, from: clean}}
shards: {docs: {from: clean, longest: 64}}
run: {partition: 4KB}
"""
#: a driver that stops itself when it calls MODULE:NAME with something about PART (any call: "") for the first time
STOPS = """
    import importlib, os, signal, sys

    place, part = sys.argv.pop(1), sys.argv.pop(1)
    module, name = place.split(":")
    owner = importlib.import_module(module)
    for outer in name.split(".")[:-1]:
        owner = getattr(owner, outer)
    name = name.rpartition(".")[2]
    real, stopped = getattr(owner, name), []

    def call(*args, **kw):
        if not stopped and part in " ".join(map(str, args)):
            stopped.append(1)
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args, **kw)

    setattr(owner, name, call)
    from pipeline.cli import main
    main()
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
    """Files of a store, without those of the run `but`, and without what carries the first epoch, which is garbage.
    What was only being written is no file: the first driver may have been stopped in the middle of that, too."""
    return {p.relative_to(store).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(store.rglob("*")) if p.is_file() and f"/{but}/" not in str(p)
            and "/00000001-" not in str(p) and p.name != "00000001.json" and ".publish" not in str(p)
            and not p.name.endswith(UNFINISHED)}


def stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(("place", "part"), [
    pytest.param("pipeline.store.dataset:ManifestWriter.add", "clean", marks=pytest.mark.slow),      # while it links
    ("pipeline.store.dataset:os.rename", "datasets/clean"),              # it has asked, and is about to show its folder
    pytest.param("pipeline.passes.encode:link_committed", "split=train", marks=pytest.mark.slow),  # then manifests
    ("pipeline.report.collect:collect", "")])                            # the report of the store
def test_the_first_driver_goes_on_and_changes_nothing(site, tmp_path, place, part):
    store = tmp_path / "store"
    arguments = ["run", str(site / "recipe.yaml"), "--store", str(store), "--backend", "inline", "--quiet"]
    first = subprocess.Popen([sys.executable, "-c", textwrap.dedent(STOPS), place, part, *arguments, "--name", "first"],
                             cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        while not stands_still(first.pid):
            assert first.poll() is None, first.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        second = subprocess.run([sys.executable, "-m", "pipeline.cli", *arguments, "--name", "second", "--takeover",
                                 "--set", "datasets.clean.steps.gopher_quality.min_doc_words=200"], cwd=ROOT, text=True,
                                capture_output=True, timeout=600)
        assert second.returncode == 0, second.stderr
        before = tree(store, "first")
        first.send_signal(signal.SIGCONT)
        said = first.communicate(timeout=300)[1]
    finally:
        first.kill()
    assert first.returncode == 1
    assert "run 'second'" in said and "took the store over" in said and "Traceback" not in said
    after = tree(store, "first")
    # shards are named by their contents, and read by manifests: one that no manifest names is garbage
    assert {k: v for k, v in after.items() if k in before or not k.startswith("shards/docs/split=train/0")} == before
    rows = sum(manifest(Store(store), "clean")["rows"].to_pylist())
    [(found,)] = duckdb.connect().execute(f"select count(*) from '{store}/datasets/clean/part-*.parquet'").fetchall()
    assert 0 < found == rows < 24
    assert not [p for p in (store / ".publish/datasets").iterdir() if len(os.listdir(p)) and "clean~" not in p.name]
