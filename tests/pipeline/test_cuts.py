"""A barrier that cuts passages out of documents, in whole runs. The barrier of these tests cuts passages in [[…]] out
of documents whose part has another document with such a passage. It reads texts only in its `prepare` stage."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.recipe import load_recipe
from pipeline.run import run_recipe
from pipeline.service.playground import Changes, Playground
from pipeline.store.dataset import iter_rows
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from pipeline.store.log import Log
from stages.barrier import SLICE_SCHEMA

STAGES = '''
    import json
    import re

    import pyarrow as pa

    from pipeline.base.parquet import read_table
    from stages.barrier import CUT_SCHEMA, Barrier, TaskDraft, Wave, write_slice
    from stages.cut import CutConfig
    from stages.stage import Stage


    class Brackets(Stage):
        name = "brackets"
        side = pa.schema([("places", pa.string())])

        def process(self, doc):
            places = [[len(doc.text[:m.start()].encode()), len(doc.text[:m.end()].encode())]
                      for m in re.finditer(r"\\[\\[.*?\\]\\]", doc.text)]
            doc.side[self.name] = {"places": json.dumps(places)}


    class Unbracket(Barrier):
        name = "Unbracket"
        edits = True
        Config = CutConfig

        def prepare(self):
            return f"{__name__}:Brackets", {}

        def waves(self, parts):
            def tasks(done):
                for part in parts:
                    yield TaskDraft(f"{__name__}:BracketSlices", {"side": part.side}, part.bytes)
            return [Wave("slices", tasks)]

        def slices(self, parts, results):
            return [result.files.get("slice.parquet") for result in results["slices"]]


    class BracketSlices:
        name = "bracket_slices"
        version = 1

        @staticmethod
        def run(inputs, cursor, out):
            rows = [{"row": row["row"], "reason": "", "cuts": [
                        {"start": a, "end": b, "reason": "bracket", "match": "f" * 32}
                        for a, b in json.loads(row["places"])]}
                    for row in read_table(inputs.fetch(inputs.args["side"])).to_pylist() if row["places"] != "[]"]
            if rows:
                write_slice(out, "slice.parquet", pa.Table.from_pylist(rows, CUT_SCHEMA))
            return {"documents": len(rows)}
'''
RECIPE = """
version: 1
code: [brackets.py]
sources:
  web: {{read: jsonl, path: web/*.jsonl}}
  chats: {{read: sft, path: chats/*.jsonl}}
datasets:
  clean: {{from: web, steps: [{{pii: {{audit: true}}}}]}}
  cut: {{from: [clean, chats], steps: [{steps}]}}
run: {{partition: 6KB, max_error_rate: 50%}}
"""
CUT = "{'brackets:Unbracket': {min_chars: 20}}"
#: a filter that keeps nearly all documents of these tests
FILTER = "{gopher_quality: {min_doc_words: 3, min_stop_words: 0, min_avg_word_length: 1, max_non_alpha_words_ratio: 0}}"
BRACKETS = re.compile(r"\[\[.*?\]\]")


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("cuts")
    (top / "brackets.py").write_text(textwrap.dedent(STAGES))
    (top / "web").mkdir()
    (top / "chats").mkdir()
    texts = [f"Grüße {i}, write to me{i}@example.org or [[skip 漢字 {i % 5} of x{i}@example.org]] to no one, 😀 "
             f"{'word ' * (i % 30)}{'[[again]] and mail z@example.org' if i % 3 else ''}" for i in range(90)]
    texts += [f"[[{'only this ' * i}]] short" for i in range(1, 8)] + [f"no bracket {i}" for i in range(9)] * 2
    for n in range(3):
        (top / "web" / f"{n}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[n::3]))
    (top / "chats" / "a.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"What is [[not]] {i}?"}, {"role": "assistant", "content": f"It's é{i} [[é nö]]."},
        {"role": "user", "content": "More [[x]]"}, {"role": "assistant", "content": "[[gone]]" if i % 2 else "Rest."}]})
        + "\n" for i in range(30)))
    return top


def run(top: Path, store: Path, steps: str, *overrides: str, make: Any = InlineBackend, report: bool = False) -> Any:
    path = top / "recipe.yaml"
    path.write_text(RECIPE.format(steps=steps))
    recipe = load_recipe(path, list(overrides), allow_custom=True)
    return run_recipe(recipe, str(store), make_backend=make, report=report)


def rows(store: Path, name: str) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in iter_rows(Store(store), name)}


def meta(row: dict[str, Any]) -> dict[str, Any]:
    return json.loads(row["meta"])


@pytest.fixture(scope="module")
def stores(top, tmp_path_factory) -> tuple[Path, Path]:
    """The stores of two runs, without the barrier and with it."""
    folder = tmp_path_factory.mktemp("stores")
    run(top, folder / "whole", "{where: {source: [web, chats]}}")
    run(top, folder / "cut", f"{CUT}, {FILTER}", report=True)
    return folder / "whole", folder / "cut"


def learned(row: dict[str, Any]) -> list[str] | None:
    data = row["text"].encode()
    return row["loss_spans"] and [data[s["start"]:s["end"]].decode() for s in row["loss_spans"]]


def before(store: Path) -> dict[str, dict[str, Any]]:
    """Return all documents that reached the barrier."""
    kept = rows(store, "datasets/cut")
    return kept | rows(store, "dropped/cut")


def test_kept_documents_lack_what_the_barrier_named_and_loss_spans_move_along(stores):
    whole, cut = before(stores[0]), rows(stores[1], "datasets/cut")
    assert len(cut) > 60
    for id, row in cut.items():
        assert row["text"] == BRACKETS.sub("", whole[id]["text"])
        spans = learned(whole[id])
        assert learned(row) == (spans and [left for s in spans if (left := BRACKETS.sub("", s))])
        places = meta(row).get("pii", [])
        data = row["text"].encode()
        assert all(data[p["start"]:p["end"]].decode() in ("email@example.com", "firstname.lastname@example.org")
                   or b"@" in data[p["start"]:p["end"]] for p in places)
        assert len(places) == row["text"].count("@")
    assert any(row["loss_spans"] for row in cut.values()) and any(meta(row).get("pii") for row in cut.values())


def test_cuts_are_recorded_in_metadata_signals_and_the_report(stores):
    whole, cut = before(stores[0]), before(stores[1])
    report = json.loads((stores[1] / "report.json").read_text())
    counted = {"docs": 0, "cuts": 0, "bytes": 0}
    for id, row in cut.items():
        passages = BRACKETS.findall(whole[id]["text"])
        entry = meta(row).get("Unbracket_cut")
        assert (entry is not None) == bool(passages)
        if entry is None:
            assert row["signals"]["Unbracket_cut_bytes"] is None
            continue
        data = whole[id]["text"].encode()
        assert [data[p["start"]:p["end"]].decode() for p in entry["passages"]] == passages
        assert {(p["reason"], p["match"]) for p in entry["passages"]} == {("bracket", "f" * 32)}
        size = sum(len(p.encode()) for p in passages)
        assert row["signals"]["Unbracket_cut_bytes"] == size == entry["bytes"]["bracket"]
        for name, n in (("docs", 1), ("cuts", len(passages)), ("bytes", size)):
            counted[name] += n
    [section] = report["duplicates"]
    figures = section["cut"]
    assert (figures["docs"], figures["cuts"], figures["bytes"]) == (
        counted["docs"], {"bracket": counted["cuts"]}, {"bracket": counted["bytes"]})
    assert sum(figures["sources"].values()) == counted["bytes"]
    assert "Unbracket" in next((stores[1] / "runs").glob("*/report.html")).read_text()


def test_documents_that_become_too_short_are_dropped_with_a_reason_of_their_own(stores):
    whole, dropped = before(stores[0]), rows(stores[1], "dropped/cut")
    short = {id for id, row in whole.items()
             if (left := BRACKETS.sub("", row["text"])) != row["text"] and len(left.strip()) < 20}
    assert short == {id for id, row in dropped.items() if row["stage"] == "Unbracket_cut"}
    assert len(short) == 7
    assert {row["reason"] for id, row in dropped.items() if id in short} == {"too_short"}
    report = json.loads((stores[1] / "report.json").read_text())
    reasons = {(r["stage"], r["reason"]): r["docs"] for r in report["datasets"]["cut"]["reasons"]}
    assert reasons["Unbracket_cut", "too_short"] == 7


def test_another_limit_replays_the_cutting_pass_and_runs_no_task_of_the_barrier(top, stores, tmp_path):
    shutil.copytree(stores[1], tmp_path / "store")
    had = {r.key for r in Log.read(Store(tmp_path / "store")).records()}
    changed = f"{CUT.replace('20', '90')}, {FILTER}"
    run(top, tmp_path / "store", changed, report=True)
    ran = [r for r in Log.read(Store(tmp_path / "store")).records() if r.key not in had]
    assert {r.node for r in ran} == {"cut"}
    assert sum(r.counters["replayed"]["docs"] for r in ran) > 60
    run(top, tmp_path / "new", changed, report=True)
    for name in ("datasets/cut", "dropped/cut"):
        assert rows(tmp_path / "store", name) == rows(tmp_path / "new", name)
    assert rows(tmp_path / "store", "datasets/cut").keys() < rows(stores[1], "datasets/cut").keys()
    new, old = (json.loads((store / "report.json").read_text()) for store in (tmp_path / "new", tmp_path / "store"))
    assert new["duplicates"] == old["duplicates"] and new["datasets"] == old["datasets"]


@pytest.mark.parametrize("steps", ["exact, " + CUT, CUT + ", exact", CUT + ", {minhash: {verify: null}}, exact",
                                   "exact, " + CUT + ", " + CUT.replace("brackets:Unbracket", "exact")
                                   .replace("{min_chars: 20}", "{by: url}")])
def test_barriers_before_and_behind_see_the_texts_that_a_step_between_them_would_see(top, tmp_path, steps):
    """`where` keeps every document, but has the texts written."""
    run(top, tmp_path / "plain", steps)
    run(top, tmp_path / "idle", ", {where: {source: [web, chats]}}, ".join(re.split(", (?=[{e])", steps)))
    plain, idle = ({kind: rows(tmp_path / name, f"{kind}/cut") for kind in ("datasets", "dropped")}
                   for name in ("plain", "idle"))
    assert plain == idle
    assert {row["stage"] for row in plain["dropped"].values()} >= {"exact", "Unbracket_cut"}
    if steps.startswith(CUT):                    # documents that the cuts made equal are duplicates now
        assert all("[[" not in row["text"] for kind in plain.values() for row in kind.values())


def test_the_pass_between_two_barriers_writes_documents_only_behind_an_editing_one(top, tmp_path):
    run(top, tmp_path / "a", f"exact, {CUT}")
    run(top, tmp_path / "b", f"{CUT}, exact")
    between = {name: {n for r in Log.read(Store(tmp_path / name)).records()
                      if r.node.startswith("cut:") and r.node[4:].isdigit() for n in r.files} for name in "ab"}
    assert "gone.parquet" in between["a"] and "kept.parquet" not in between["a"]
    assert "kept.parquet" in between["b"] and "gone.parquet" not in between["b"]


def test_results_do_not_depend_on_partitions_or_where_a_run_stopped(top, stores, tmp_path):
    class Stopping(InlineBackend):
        left = 6

        def submit(self, assignment):
            Stopping.left -= 1
            if Stopping.left < 0:
                raise KeyboardInterrupt
            super().submit(assignment)

    steps = f"{CUT}, {FILTER}"
    with pytest.raises(KeyboardInterrupt):
        run(top, tmp_path / "store", steps, make=Stopping)
    run(top, tmp_path / "store", steps)
    run(top, tmp_path / "other", steps, "run.partition=60KB")
    for name in ("store", "other"):
        assert dataset_hash(Store(tmp_path / name), "cut") == dataset_hash(Store(stores[1]), "cut")


def test_slices_without_cuts_have_the_columns_that_they_always_had(top, tmp_path):
    run(top, tmp_path, "exact")
    slices = [info for r in Log.read(Store(tmp_path)).records() if r.node.endswith("/slices")
              for name, info in r.files.items() if name.startswith("slice.")]
    assert slices
    for info in slices:
        with Store(tmp_path).parquet(info.path, info.sha256) as file:
            assert file.schema_arrow.equals(SLICE_SCHEMA)


def test_the_playground_knows_documents_before_the_cuts_and_nothing_behind_another_limit(stores):
    store = Store(stores[1])
    [run_name] = [path.name for path in (stores[1] / "runs").iterdir()]
    ground = Playground(store, run_name, "cut")
    steps = {step["name"]: step for step in ground.steps()}
    assert not steps["Unbracket"]["off"]
    behind = ground.outcomes(ground.moved(Changes({1: {"min_doc_words": 9}})))
    assert {o.stage for o in behind.outcomes if o.side == "dropped"} >= {"Unbracket"}
