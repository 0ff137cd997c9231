"""Several barriers one after the other. The pass between two barriers writes a row set (a list of removed rows) instead
of the texts. The result equals that of passes that write the texts.

The reference is the same recipe with a step that does nothing between the barriers, so that the pass there has to write
the texts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.engine.task import CrashCursor, Skip, TaskSpec
from pipeline.engine.worker.attempt import run_attempt
from pipeline.passes.replay import without_zeros
from pipeline.plan.estimate import survey_recipe
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import iter_rows
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from pipeline.store.garbage import remove_unnamed
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from pipeline.store.verify import verify_store
from tests.corpus import sentences

STAGES = """
    from stages.dedup.minhash import MinHash
    from stages.dedup.signature import MinHashSignature
    from stages.stage import Stage

    class Idle(Stage):
        '''Does nothing, in a pass that therefore writes text.'''
        name = "idle"

        def process(self, doc):
            return None

    class FussySignature(MinHashSignature):
        '''Fails on some documents and drops some others, which no prepare stage of ours does.'''
        name = "fussy_signature"

        def process(self, doc):
            if "FAILS" in doc.text:
                raise ValueError("no signature")
            return super().process(doc) or ("odd" if "ODD" in doc.text else None)

    class Fussy(MinHash):
        name = "Fussy"

        def prepare(self):
            return f"{__name__}:FussySignature", super().prepare()[1]
"""
RECIPE = """
version: 1
code: [{module}.py]
sources:
  web: {{read: jsonl, path: web/*.jsonl}}
  notes: {{read: jsonl, path: notes/*.jsonl}}
datasets:
  clean: {{from: web, steps: [pii]}}
  deduped: {{from: [clean, notes], priority: [notes, clean], steps: [{steps}]}}
run: {{partition: 60KB, max_error_rate: 50%}}
"""
MINHASH = "{minhash: {verify: 0.75}}"
#: steps of `deduped`; IDLE stands where the reference has a step
CHAINS = {
    "two": f"exact, IDLE {MINHASH}",
    "two and a filter": f"exact, IDLE {MINHASH}, gopher_quality",
    "three": f"{{exact: {{by: url}}}}, IDLE {MINHASH}, IDLE exact, pii",
    "fussy": "exact, IDLE 'MODULE:Fussy'",
}
SECTIONS = ("sources", "funnel", "names", "datasets", "duplicates")


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    """A folder with sources that have equal and similar documents, within and across sources."""
    top = tmp_path_factory.mktemp("row_sets")
    (top / "barriers.py").write_text(textwrap.dedent(STAGES))
    rng, prose = random.Random(3), sentences()
    texts: list[str] = []
    for i in range(240):
        match rng.randrange(6):
            case 0 if texts:
                text = rng.choice(texts)
            case 1 if texts:
                text = rng.choice(texts) + " " + rng.choice(prose)
            case _:
                text = " ".join(rng.sample(prose, rng.randint(4, 24)))
        texts.append(text + {5: " FAILS", 9: " ODD"}.get(i % 29, ""))
    for i, text in enumerate(texts):
        path = top / ("notes" if i % 3 == 0 else "web") / f"{i // 40}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with open(path, "a") as f:
            f.write(json.dumps({"text": text, "url": f"https://example.org/{i % 200}"}) + "\n")
    # files whose documents are all gone after the first barrier, or after the second
    (top / "web" / "copies.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[:60:3]))
    (top / "web" / "alike.jsonl").write_text("".join(json.dumps({"text": f"{t} Yes."}) + "\n" for t in texts[:60:3]))
    return top


def recipe(top: Path, steps: str, *overrides: str, idle: bool = False):
    steps = steps.replace("IDLE", "'barriers:Idle'," if idle else "").replace("MODULE", "barriers")
    path = top / f"{'idle' if idle else 'plain'}.yaml"
    path.write_text(RECIPE.format(module="barriers", steps=steps))
    return load_recipe(path, list(overrides), allow_custom=True)


def run(top: Path, store: Path, steps: str, *overrides: str, idle: bool = False, report: bool = False,
        make: Callable[[Store], Any] = InlineBackend):
    return run_recipe(recipe(top, steps, *overrides, idle=idle), str(store), make_backend=make, report=report)


def documents(store: Path) -> dict[str, Any]:
    """Return all documents of a run: kept, dropped and quarantined."""
    at = Store(store)
    return {**{name: dataset_hash(at, name) for name in ("clean", "deduped")},
            **{kind: sorted(json.dumps(row, sort_keys=True) for row in iter_rows(at, f"{kind}/deduped"))
               for kind in ("dropped", "quarantine")}}


def figures(store: Path) -> dict[str, Any]:
    """Return everything that readers of a store see of a run, except times and the step `Idle` of the reference, which
    does nothing."""
    report = json.loads((store / "report.json").read_text())
    return {**documents(store), **{section: report[section] for section in SECTIONS},
            "passes": [(p["docs"], p["bytes"], p["tasks"]) for p in report["passes"]],
            "stages": [(s["stage"], s["in"], s["dropped"]) for s in report["stages"] if s["stage"] != "Idle"]}


def records(store: Path, node: str) -> list[PartRecord]:
    return [r for r in Log.read(Store(store)).records() if r.node == node]


def keys(store: Path) -> Counter[str]:
    """Return {node: number of its keys in the log}."""
    return Counter(r.node for r in Log.read(Store(store)).records())


def copied(store: Path, to: Path) -> Path:
    shutil.copytree(store, to)
    return to


@pytest.fixture(scope="module")
def finished(top, tmp_path_factory) -> Path:
    """The store of a run with two barriers and a filter."""
    store = tmp_path_factory.mktemp("finished") / "store"
    run(top, store, CHAINS["two and a filter"], report=True)
    return store


#: another setting of the filter of `finished`
STRICTER = "datasets.deduped.steps.gopher_quality.min_doc_words=110"


@pytest.fixture(scope="module")
def stricter(top, tmp_path_factory) -> Path:
    """The store of the same recipe as `finished`, with another threshold for the filter."""
    store = tmp_path_factory.mktemp("stricter") / "store"
    run(top, store, CHAINS["two and a filter"], STRICTER)
    return store


@pytest.mark.parametrize("name", ["two and a filter", "three", "fussy"])
def test_documents_drops_and_report_are_those_of_passes_that_write_text(top, finished, tmp_path, name):
    if name != "two and a filter":                        # the chain of `finished`
        run(top, tmp_path / "plain", CHAINS[name], report=True)
    run(top, tmp_path / "idle", CHAINS[name], idle=True, report=True)
    plain = figures(finished if name == "two and a filter" else tmp_path / "plain")
    idle = figures(tmp_path / "idle")
    assert plain == idle
    assert plain["dropped"] and all(dup["removed"] and dup["pairs"] for dup in plain["duplicates"][:2])
    judged = sorted((dup["step"], sum(dup["looked_at"].values()),
                     sum(n for by_source in dup["removed"].values() for n in by_source.values()))
                    for dup in plain["duplicates"])
    assert sorted(row for row in plain["stages"] if row[0] in ("exact", "minhash", "Fussy")) == judged
    lost = {row["reason"] for row in map(json.loads, plain["quarantine"])}
    assert lost == ({"error:ValueError"} if name == "fussy" else set())
    assert any('"reason": "odd"' in row for row in plain["dropped"]) == (name == "fussy")


def test_no_text_is_written_between_barriers(top, tmp_path):
    run(top, tmp_path, CHAINS["three"])
    between = {n: records(tmp_path, n) for n in ("deduped:2", "deduped:3")}
    assert all(any(r.files["gone.parquet"].rows for r in of) for of in between.values())
    for record in (r for of in between.values() for r in of):
        assert "kept.parquet" not in record.files
        part = pq.read_table(tmp_path / record.files["gone.parquet"].path).to_pylist()
        gone = {row["row"] for row in part if row["reason"]}
        [side] = [i for name, i in record.files.items() if name.startswith("side.")]
        rows = pq.read_table(tmp_path / side.path)["row"].to_pylist()
        assert rows == sorted(rows) and not gone & set(rows)
        assert len(rows) == sum(n["docs"] for n in record.counters["kept"].values())
    assert all("kept.parquet" in r.files for r in records(tmp_path, "deduped"))


def test_a_document_survives_every_place_where_a_run_can_stop(top, tmp_path):
    """The driver ends before a task of each node in turn; the run that goes on repeats nothing."""
    run(top, tmp_path / "whole", CHAINS["two"], report=True)
    wanted, nodes = figures(tmp_path / "whole"), keys(tmp_path / "whole")

    class Stopping(InlineBackend):
        stop = ""

        def submit(self, assignment):
            if assignment.spec.node == self.stop:
                raise KeyboardInterrupt
            super().submit(assignment)

    stops = [n for n in nodes if n.startswith("deduped") and n != "deduped:notes"]
    assert len(stops) > 6
    executed = 0
    for node in stops:
        Stopping.stop = node
        with pytest.raises(KeyboardInterrupt):
            run(top, tmp_path / "store", CHAINS["two"], make=Stopping)
    executed = run(top, tmp_path / "store", CHAINS["two"], report=True).executed
    assert figures(tmp_path / "store") == wanted and keys(tmp_path / "store") == nodes and executed


def test_another_threshold_of_the_second_barrier_reruns_what_follows_it(top, finished, tmp_path):
    change = "datasets.deduped.steps.minhash.verify=0.95"
    steps = CHAINS["two and a filter"]
    planned = survey_recipe(recipe(top, steps, change), str(finished))
    assert set(planned["reruns"]) == {"deduped/minhash.2"}
    store = copied(finished, tmp_path / "store")
    before = keys(store)
    run(top, store, steps, change, report=True)
    ran = keys(store) - before
    assert set(ran) == {"deduped/minhash.2/verify", "deduped/minhash.2/slices", "deduped"}
    run(top, tmp_path / "new", steps, change, report=True)
    assert figures(store) == figures(tmp_path / "new")
    assert documents(store) != documents(finished)


def test_another_file_reruns_only_parts_with_other_removals(top, tmp_path):
    """A copy of one text: the row sets of parts that lose nothing to it stay."""
    mine = tmp_path / "top"
    shutil.copytree(top, mine)
    run(mine, tmp_path / "store", CHAINS["two"])
    before = keys(tmp_path / "store")
    (mine / "notes" / "zz.jsonl").write_text(json.dumps({"text": " ".join(sentences()[:30])}) + "\n")
    run(mine, tmp_path / "store", CHAINS["two"], report=True)
    ran = keys(tmp_path / "store") - before
    between = next(n for n in before if n.startswith("deduped:") and n[8:].isdigit())
    assert ran[between] < before[between] and ran["deduped"] < before["deduped"]
    run(mine, tmp_path / "new", CHAINS["two"], report=True)
    assert figures(tmp_path / "store") == figures(tmp_path / "new")


def test_replayed_verdicts_behind_two_barriers_are_those_of_a_new_run(top, finished, stricter, tmp_path):
    store = copied(finished, tmp_path / "store")
    had = {r.key for r in records(store, "deduped")}
    run(top, store, CHAINS["two and a filter"], STRICTER)
    replayed = {r.key: r for r in records(store, "deduped") if r.key not in had}
    assert replayed and any(r.counters["replayed"]["docs"] for r in replayed.values())
    for record in records(stricter, "deduped"):
        again = replayed[record.key]
        assert {n: i.sha256 for n, i in again.files.items()} == {n: i.sha256 for n, i in record.files.items()}
        for counters in (again.counters, record.counters):
            counters.pop("replayed", None)
            for stats in counters["stages"].values():
                stats.pop("cpu_s")
        assert without_zeros(again.counters) == without_zeros(record.counters)


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
@pytest.mark.parametrize("name", ["gone.parquet", "kept.parquet"])
def test_a_damaged_row_set_or_the_part_under_it_is_made_anew(top, finished, stricter, tmp_path, name, harm):
    store = copied(finished, tmp_path / "store")
    node = "deduped:2" if name == "gone.parquet" else "clean"
    record = next(r for r in records(store, node) if r.files[name].rows)
    path = store / record.files[name].path
    if harm == "flip":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.unlink()                                     # published files are links to it
        path.write_bytes(data)
    elif harm == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    run(top, store, CHAINS["two and a filter"], STRICTER)
    again = Log.read(Store(store)).get(record.key)
    assert again is not None and again.attempt != record.attempt
    assert again.files[name].content == record.files[name].content
    assert documents(store)["deduped"] == documents(stricter)["deduped"]


def test_garbage_collection_keeps_the_parts_under_row_sets(top, finished, tmp_path):
    store = copied(finished, tmp_path / "store")
    change, steps = "datasets.deduped.steps.minhash.verify=0.95", CHAINS["two and a filter"]
    other = run(top, store, steps, change).run
    for folder in (store / "runs").iterdir():
        if folder.name != other:
            shutil.rmtree(folder)
    log = Log.open(Store(store), run="gc")
    try:
        assert remove_unnamed(Store(store), log).records
    finally:
        log.close()
    assert not verify_store(Store(store), Log.read(Store(store))).damaged
    assert run(top, store, steps, change).executed == 0


def test_how_rows_are_batched_is_not_to_be_seen_in_a_row_set(top, tmp_path):
    specs: list[TaskSpec] = []

    class Noting(InlineBackend):
        def submit(self, assignment):
            specs.append(assignment.spec)
            super().submit(assignment)

    run(top, tmp_path / "store", CHAINS["fussy"], make=Noting)
    between = [s for s in specs if s.args.get("rewrites") is False]
    after = [s for s in specs if s.node == "deduped" and s.args["part"]["gone"]]
    assert between and after

    def attempt(spec: TaskSpec, **how: Any) -> dict[str, Any]:
        record = run_attempt(spec, Store(tmp_path / "store"), "1-1", CrashCursor(), str(tmp_path), **how)
        return {name: (info.sha256, info.rows, info.content) for name, info in record.files.items()}

    for spec in (*between, *after):
        whole = attempt(spec)
        assert all(attempt(spec, batch_rows=rows) == whole for rows in (1, 7))
    for spec in between:
        text = tmp_path / "store" / spec.args["part"]["text"]["$ref"]
        [skipped] = random.Random(1).sample(range(pq.read_metadata(text).num_rows), 1)
        some = [attempt(spec, batch_rows=rows, skip=[Skip(skipped, 0, "memory")]) for rows in (None, 1)]
        assert some[0] == some[1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2])
def test_children_give_the_same(top, finished, tmp_path, workers):
    run(top, tmp_path / "store", CHAINS["two and a filter"], report=True,
        make=make_backend("process", workers, None))
    assert figures(tmp_path / "store") == figures(finished)
