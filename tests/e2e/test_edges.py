"""Where features meet: priorities of sources behind filters, names that could collide, inputs that change during a run,
and documents that must be counted once."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import fsspec
import pytest

from pipeline.engine.driver.endings import TaskFailed
from pipeline.plan.inputs import InputError
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import iter_rows, manifest
from pipeline.store.fs import Store
from pipeline.store.log import Fenced, Log

STAGES = '''
from stages.stage import Stage


class Drop(Stage):
    """Drops every second document."""

    name = "drop"

    def process(self, doc):
        return "odd" if int(doc.id[-1], 16) % 2 else None


class Fail(Stage):
    """Fails on every third document, and says too much."""

    name = "fail"

    def process(self, doc):
        if int(doc.id[-2], 16) % 3 == 0:
            raise ValueError("cannot do " + "x" * 480 + " somebody.private@mail.example.org")


class Odd(Stage):
    """Writes what no file can hold."""

    name = "odd_facts"

    def process(self, doc):
        if int(doc.id[-1], 16) % 2:
            doc.meta["what"] = object()
'''


@pytest.fixture(autouse=True)
def fresh_modules():
    """Forget the module with stages after each test, because every test writes its own stages to a file of the same
    name."""
    yield
    sys.modules.pop("stages_of_mine", None)


def texts(folder: Path, n: int, seed: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for i in range(n):
        words = (rng.choice(["alpha", "beta", "gamma", "delta"]) + str(rng.randrange(99)) for _ in range(60))
        (folder / f"t{i:02d}.txt").write_text(" ".join(words))


def go(at: Path, recipe: str, **kw) -> Store:
    code = ""
    if "stages_of_mine" in recipe:
        (at / "stages_of_mine.py").write_text(STAGES)
        code = "code: [./stages_of_mine.py]\n"
    (at / "r.yaml").write_text(f"version: 1\n{code}{recipe}")
    run_recipe(load_recipe(at / "r.yaml", [], allow_custom=True), str(at / "store"),
               make_backend=kw.get("backend") or make_backend("inline", 1, None))
    return Store(str(at / "store"))


def test_priority_holds_behind_a_filter(tmp_path):
    texts(tmp_path / "a", 10)
    texts(tmp_path / "b", 10)
    store = go(tmp_path, """
sources: {web: {read: text, path: a}, books: {read: text, path: b}}
datasets:
  x: {from: web, steps: []}
  y: {from: books, steps: []}
  d: {from: [x, y], steps: [pii, exact], priority: [y, x]}
""")
    assert Counter(r["source"] for r in iter_rows(store, "datasets/d", ["source"])) == {"books": 10}


def test_one_source_through_two_inputs_is_refused(tmp_path):
    texts(tmp_path / "a", 3)
    with pytest.raises(InputError, match=r"dataset 'd': 'x' and 'y' both hold documents of 'web'.*where"):
        go(tmp_path, """
sources: {web: {read: text, path: a}}
datasets:
  x: {from: web, steps: []}
  y: {from: web, steps: []}
  d: {from: [x, y], steps: []}
""")


@pytest.mark.parametrize("signals", ["all", "until-drop"])
def test_every_document_ends_in_one_place(tmp_path, signals):
    texts(tmp_path / "a", 24)
    store = go(tmp_path, f"""
sources: {{a: {{read: text, path: a}}}}
datasets: {{d: {{from: a, steps: ['stages_of_mine:Drop', 'stages_of_mine:Fail', 'stages_of_mine:Odd']}}}}
run: {{signals: {signals}, max_error_rate: 100%}}
""")
    rows = {k: sum(manifest(store, "d", k)["rows"].to_pylist()) for k in ("datasets", "dropped", "quarantine")}
    assert sum(rows.values()) == 24 and rows["dropped"] and rows["quarantine"]
    assert all("private" not in r["detail"] for r in iter_rows(store, "quarantine/d"))
    report = json.loads(store.read("report.json"))
    first = next(s for s in report["stages"] if s["stage"] == "Fail")
    assert first["in"] == 24 - rows["dropped"], "a dropped document is in nobody's funnel"


def test_a_dataset_may_be_called_like_a_node_and_a_tokenizer_loaded(tmp_path):
    texts(tmp_path / "a", 12)
    recipe = """
sources: {a: {read: text, path: a}}
datasets: {tokenizer: {from: a, steps: []}}
tokenizer: {train: {kind: bpe, vocab: 300, from: tokenizer}}
shards: {a: {from: tokenizer, longest: 32, val: 10%}}
"""
    store = go(tmp_path, recipe)
    [trained] = [p for p in store.list("shards") if "/tokenizer-" in p]
    (tmp_path / "own.json").write_bytes(store.read(trained))
    load = recipe.replace("{train: {kind: bpe, vocab: 300, from: tokenizer}}", "{load: own.json}")
    assert [p for p in go(tmp_path, load).list("shards") if "/tokenizer-" in p] == [trained]


def test_an_input_that_changes_after_planning_is_refused(tmp_path):
    texts(tmp_path / "a", 3)

    class Later:
        """The inline backend, before whose first task somebody touches a file: after the plan was made."""

        def __init__(self, store):
            self.inner = make_backend("inline", 1, None)(store)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def start(self, *args):
            os.utime(tmp_path / "a" / "t01.txt", (1, 1))
            self.inner.start(*args)

    with pytest.raises(TaskFailed, match=r"t01\.txt .* changed since the run was planned"):
        go(tmp_path, "sources: {a: {read: text, path: a}}\ndatasets: {d: {from: a, steps: []}}\n", backend=Later)


def test_who_is_taken_over_while_it_tells_its_metrics_leaves_the_progress_alone(tmp_path):
    """Between the look at the log and the write there is nothing that may take its time."""
    texts(tmp_path / "a", 3)
    theirs = []

    class TakenOver:
        """The inline backend of a driver that another driver takes the store from while it writes its metrics."""

        def __init__(self, store):
            self.inner = make_backend("inline", 1, None)(store)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def emit(self, run, snapshot):
            if not theirs:
                theirs.append(Log.open(Store(tmp_path / "store"), run=run, takeover=True))
                Store(tmp_path / "store").write(f"runs/{run}/progress.json", b"of the other one")

    with pytest.raises(Fenced):
        go(tmp_path, "sources: {a: {read: text, path: a}}\ndatasets: {d: {from: a, steps: []}}\n", backend=TakenOver)
    theirs[0].close()
    [progress] = (tmp_path / "store" / "runs").glob("*/progress.json")
    assert progress.read_bytes() == b"of the other one"


def test_remote_files_whose_names_look_alike(tmp_path):
    fs = fsspec.filesystem("memory")
    fs.pipe("memory://alike/in/a/b.txt", b"first first first")
    fs.pipe("memory://alike/in/a_b.txt", b"second second second")
    store = go(tmp_path, "sources: {a: {read: text, path: 'memory://alike/in'}}\ndatasets: {d: {from: a, steps: []}}\n")
    assert {r["text"].split()[0] for r in iter_rows(store, "datasets/d", ["text"])} == {"first", "second"}
