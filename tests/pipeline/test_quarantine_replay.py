"""No document kills a process twice: its quarantine outlasts the driver, the partition and the stream in which it was
found.

Drivers and children are real processes. The stage or tokenizer that crashes writes a line to the file `deaths` first,
by which crashes are counted.
"""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest

from pipeline.recipe import load_recipe
from pipeline.run import RunSummary, make_backend, run_recipe
from pipeline.store.dataset import manifest
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from tests.commands import command
from tokenizer.shards.reader import ShardSet

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")

STAGE = """
    import ctypes, os, signal
    from stages.stage import Stage

    class Poison(Stage):
        '''Dies of what a document says.'''
        name = "poison"
        confined = False                    # its notes lie outside of a worker's folders

        def process(self, doc):
            if "segfault" in doc.text:
                if doc.text.startswith(os.environ["STAYS"]):
                    signal.pause()
                with open(os.environ["DEATHS"], "a") as f:
                    f.write(doc.text + "\\n")
                ctypes.string_at(0)
            return None
"""
#: imported by every child before anything else: a tokenizer that dies of, or fails on, what a text says
HOOK = """
    import ctypes, os
    import tokenizer.encode as encode

    notes = open({deaths!r}, "a")           # before the worker is confined

    real = encode.encode_masked

    def encode_masked(tokenizer, texts, spans):
        for text in texts:
            if "segfault" in text:
                print(text[:20], file=notes, flush=True)
                ctypes.string_at(0)
            if "raises" in text:
                raise ValueError("cannot encode the text of someone@mail.example.org")
        return real(tokenizer, texts, spans)

    encode.encode_masked = encode_masked
"""


def rows(folder: Path) -> list[dict]:
    parts = sorted(map(str, folder.glob("part-*.parquet")))
    return ds.dataset(parts).to_table().to_pylist() if parts else []


def deaths(path: Path) -> Counter:
    return Counter(path.read_text().splitlines()) if path.exists() else Counter()


# -- a driver is killed ----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_killed_driver_does_not_cost_another_child(tmp_path):
    """Killed once the verdict is durable, the next driver's children do not meet that document; killed before, they do
    (that is what the entry is worth). Either way the result is that of a run nobody disturbed."""
    module = f"poison_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(STAGE))
    with open(tmp_path / "in.jsonl", "w") as f:
        for i in range(200):
            f.write(json.dumps({"text": f"{i} {'segfault' if i in (30, 140) else 'is well'}"}) + "\n")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"version: 1\ncode: [{module}.py]\nsources: {{web: {{read: jsonl, path: in.jsonl}}}}\n"
                      f"datasets:\n  clean: {{from: web, steps: ['{module}:Poison']}}\n")

    def drive(store: str, kill: str) -> tuple[int, Counter]:
        (tmp_path / "deaths").unlink(missing_ok=True)
        done = command(
            "tests.pipeline.killed_driver", kill, "run", recipe, "--store", tmp_path / store, "--backend", "process",
            "--workers", "1", "--allow-custom-stages", "--quiet",
            # the child after those that died of document 30 waits at the next one for its driver to be killed: where
            # the disk is slow, it may get there first
            env={"DEATHS": str(tmp_path / "deaths"), "STAYS": "nowhere" if kill == "never" else "140 "})
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode, deaths(tmp_path / "deaths")

    def outcome(store: str) -> tuple:
        at = Store(tmp_path / store)
        [record] = [r for r in Log.read(at).records() if r.node == "clean"]
        lost = [{**row, "detail": None} for row in rows(at.local / "quarantine/clean")]
        return dataset_hash(at, "clean"), lost, record.quarantine, manifest(at, "clean").to_pylist()

    undisturbed = {"30 segfault": 2, "140 segfault": 2}          # in the partition, and alone
    outcomes = []
    for when, known in (("said", {}), ("written", {30: (0, "crash:SIGSEGV")})):
        assert drive(when, when) == (-signal.SIGKILL, {"30 segfault": 2})
        log = Log.read(Store(tmp_path / when))
        assert len(log) == 0                                     # nothing of the part was committed: as if it never ran
        assert drive(when, "never") == (0, {k: v for k, v in undisturbed.items() if k == "140 segfault" or not known})
        outcomes.append(outcome(when))
        assert log.quarantined_rows(outcomes[-1][-1][0]["key"]) == known
    assert outcomes[0] == outcomes[1] and [r["reason"] for r in outcomes[0][1]] == ["crash:SIGSEGV"] * 2


# -- a tokenizer dies, or fails --------------------------------------------------------------------------------------
@pytest.fixture
def stream(tmp_path, monkeypatch):
    """A function that runs a recipe with one stream. With `hooked`, it runs in children whose tokenizer crashes on some
    texts."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(textwrap.dedent(HOOK.format(deaths=str(tmp_path / "deaths"))))
    for i in range(600):                                                      # six files of a hundred
        word = {333: "segfault", 334: "raises", 590: "raises"}.get(i, "is well")
        with open(tmp_path / f"{i // 100}.jsonl", "a") as f:
            f.write(json.dumps({"text": f"Document {i} {word}, and says what number {i * 7} says."}) + "\n")
    (tmp_path / "r.yaml").write_text(
        "version: 1\nsources: {web: {read: jsonl, path: '*.jsonl'}}\n"
        "datasets:\n  clean: {from: web, steps: []}\n"
        "tokenizer: {train: {kind: bpe, vocab: 300, from: clean, sample: 10KB}}\n"
        "shards: {web: {from: clean, longest: 64, val: 10%}}\n")

    def run(store: str, *overrides: str, hooked: bool = True) -> RunSummary:
        recipe = load_recipe(str(tmp_path / "r.yaml"), list(overrides))
        with monkeypatch.context() as patch:
            if hooked:
                patch.syspath_prepend(str(tmp_path / "hook"))
            backend = make_backend("process" if hooked else "inline", 1, None)
            return run_recipe(recipe, str(tmp_path / store), make_backend=backend)

    return run


def tokens(store: Path) -> dict[str, tuple[str, list[int]]]:
    """Return the documents of the stream in their order, as {id: (split, tokens)}."""
    found = {}
    for split in ("train", "val"):
        shards = ShardSet(store / "shards/web" / f"split={split}")
        found |= {s.id: (split, np.asarray(shards.read(s.start, s.stop)).tolist())
                  for s in shards.documents(0, shards.tokens)}
    return found


def encoded(store: Path) -> list[PartRecord]:
    return [r for r in Log.read(Store(store)).records() if r.node == "shards:web/encode"]


@pytest.mark.slow
def test_texts_a_tokenizer_dies_of_or_fails_on_are_quarantined_once_and_for_all(stream, tmp_path):
    stream("well", hooked=False)
    whole = tokens(tmp_path / "well")
    assert rows(tmp_path / "well/quarantine/shards=web") == []
    assert manifest(Store(tmp_path / "well"), "shards=web", "quarantine").num_rows == 1

    summary = stream("store")
    assert deaths(tmp_path / "deaths") == {"Document 333 segfaul": 3}          # in its batch, one by one, alone
    lost = rows(tmp_path / "store/quarantine/shards=web")
    ids = {row["id"]: int(row["text"].split()[1]) for row in rows(tmp_path / "store/datasets/clean")}
    assert [(ids[r["id"]], r["record"], r["source"], r["file"], r["stage"], r["reason"]) for r in lost] == [
        (333, 33, "web", "3.jsonl", "encode", "crash:SIGSEGV"),
        (334, 34, "web", "3.jsonl", "encode", "error:ValueError"),
        (590, 90, "web", "5.jsonl", "encode", "error:ValueError")]
    assert [r["detail"] for r in lost] == ["", *["cannot encode the text of email@example.com"] * 2]
    gone = {r["id"] for r in lost}
    assert list(tokens(tmp_path / "store").items()) == [(k, v) for k, v in whole.items() if k not in gone]

    report = json.loads((tmp_path / "store/report.json").read_text())
    assert report["tokens"]["web"]["quarantined"] == {"crash:SIGSEGV": 1, "error:ValueError": 2}
    assert sorted(s["id"] for s in report["tokens"]["web"]["quarantine_samples"]) == sorted(gone)
    assert report["datasets"]["clean"]["quarantined"] == {}
    html = (tmp_path / "store/runs" / summary.run / "report.html").read_text()
    assert "crash:SIGSEGV" in html and "error:ValueError" in html and "someone@mail" not in html

    # another stream's tasks, and other parts: other keys, nobody dies
    for overrides in (["shards.web.where={source: [web]}"], ["run.partition=8kB"]):
        before = {r.key for r in encoded(tmp_path / "store")}
        stream("store", *overrides)
        assert {r.key for r in encoded(tmp_path / "store")} > before, "a new task should have run"
        assert deaths(tmp_path / "deaths") == {"Document 333 segfaul": 3}
        assert rows(tmp_path / "store/quarantine/shards=web") == lost
        assert list(tokens(tmp_path / "store").items()) == [(k, v) for k, v in whole.items() if k not in gone]
    assert len(encoded(tmp_path / "store")) > 4, "the input should have been cut"
