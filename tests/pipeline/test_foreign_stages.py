"""A user's stages may write anything: a document with something that cannot be stored is quarantined with the name of
the stage, and nothing else is lost."""

from __future__ import annotations

import json
import textwrap

import pyarrow.dataset as ds
import pytest

from pipeline.engine.task import CrashCursor
from pipeline.passes.chain import Chain, LoadedStage
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from stages.catalog import stage_class
from stages.document import Document

STAGE = """
    from stages.stage import Stage

    class Wild(Stage):
        name = "wild"
        signals = ("score",)

        def process(self, doc):
            doc.signals["score"] = 1
            kind = doc.text.split()[-1]
            return getattr(self, kind)(doc) if kind in WRONG else None

        def verdict_true(self, doc): return True
        def verdict_empty(self, doc): return ""
        def verdict_long(self, doc): return "x" * 1000
        def text_none(self, doc): doc.text = None
        def text_bytes(self, doc): doc.text = b"x"
        def url_int(self, doc): doc.url = 7
        def language_none(self, doc): doc.language = None
        def date_int(self, doc): doc.date = 2026
        def id_other(self, doc): doc.id = "mine"
        def source_int(self, doc): doc.source = 3
        def locator_none(self, doc): doc.locator = None
        def locator_str(self, doc): doc.locator["record"] = "first"
        def locator_big(self, doc): doc.locator["offset"] = 2 ** 63
        def meta_list(self, doc): doc.meta = []
        def meta_object(self, doc): doc.meta["x"] = object()
        def meta_mixed(self, doc): doc.meta["x"] = {1: 2, "a": 3}
        def signals_str(self, doc): doc.signals["score"] = "high"
        def signals_none(self, doc): doc.signals = None
        def spans_str(self, doc): doc.loss_spans = "all"
        def spans_open(self, doc): doc.loss_spans = [{"start": 1}]

    WRONG = [name for name in vars(Wild) if "_" in name[1:-1] and not name.startswith("_")]

    class WildBatch(Wild):
        name = "wild_batch"
        batched = True

        def process_batch(self, docs):
            return [Wild.process(self, doc) for doc in docs]
"""
WRONG = ["verdict_true", "verdict_empty", "verdict_long", "text_none", "text_bytes", "url_int", "language_none",
         "date_int", "id_other", "source_int", "locator_none", "locator_str", "locator_big", "meta_list",
         "meta_object", "meta_mixed", "signals_str", "signals_none", "spans_str", "spans_open"]


@pytest.mark.parametrize("mode", ["until-drop", "all"])
@pytest.mark.parametrize("cls", ["Wild", "WildBatch"])
def test_each_wrong_type_costs_exactly_its_document(tmp_path, cls, mode):
    module = f"wild_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(STAGE))
    with open(tmp_path / "in.jsonl", "w") as f:
        for i, kind in enumerate(x for name in WRONG for x in ("well", name)):
            f.write(json.dumps({"text": f"Document {i} ends with {kind}"}) + "\n")
    (tmp_path / "r.yaml").write_text(
        f"version: 1\ncode: [{module}.py]\nsources: {{web: {{read: jsonl, path: in.jsonl}}}}\n"
        f"datasets:\n  clean: {{from: web, steps: ['{module}:{cls}']}}\n"
        f"run: {{max_error_rate: 100%, signals: {mode}}}\n")
    run_recipe(load_recipe(str(tmp_path / "r.yaml"), [], allow_custom=True), str(tmp_path / "store"),
               make_backend=make_backend("inline", 1, None), report=False)

    def rows(kind: str) -> list[dict]:
        parts = sorted(map(str, (tmp_path / "store" / kind / "clean").glob("part-*.parquet")))
        return ds.dataset(parts).to_table().to_pylist()

    lost = {row["record"]: row for row in rows("quarantine")}
    assert sorted(lost) == list(range(1, 2 * len(WRONG), 2))
    assert {row["reason"] for row in lost.values()} <= {"error:TypeError", "error:ValueError"}
    assert all(row["source"] == "web" and row["file"] == "in.jsonl" and len(row["id"]) == 32 for row in lost.values())
    said = {WRONG[record // 2]: row["detail"] for record, row in lost.items()}
    assert "returned True" in said["verdict_true"] and "set text to None" in said["text_none"]
    assert "set url to 7" in said["url_int"] and "language" in said["language_none"]
    kept = rows("datasets")
    assert [row["locator"]["record"] for row in kept] == list(range(0, 2 * len(WRONG), 2))
    assert all(row["signals"]["score"] == 1.0 and row["text"].endswith("well") for row in kept)


def test_what_a_failed_stage_did_is_undone():
    from pipeline.passes.storable import restore, state_of

    doc = Document("i" * 32, "text", source="s", url="u", language="en", date="d", locator={"file": "f"},
                   meta={"a": 1, "tags": ["t"]}, signals={"x": 1.0}, loss_spans=[{"start": 0, "end": 1}], raw=b"raw",
                   mime="text/html", charset="utf-8")
    before = state_of(doc)
    doc.loss_spans[0]["end"] = 7
    doc.text, doc.id, doc.source, doc.url, doc.language, doc.date, doc.loss_spans = None, 1, 2, 3, 4, 5, 6
    doc.meta["b"], doc.locator["file"], doc.signals["x"] = object(), None, "high"
    doc.meta["tags"].append("seen")
    doc.raw, doc.mime, doc.charset = None, 7, 8
    restore(doc, before)
    assert state_of(doc) == before == ("text", {"file": "f"}, {"a": 1, "tags": ["t"]}, {"x": 1.0}, {}, "i" * 32, "s",
                                       "u", "en", "d", b"raw", "text/html", "utf-8", [{"start": 0, "end": 1}])


def test_a_stage_that_shifts_what_counts_for_the_loss_costs_its_document():
    from pipeline.passes.storable import check, state_of

    doc = Document("i" * 32, "User: q\n\nAssistant: a", loss_spans=[{"start": 20, "end": 21}])
    before = state_of(doc)
    doc.text = doc.text.upper()
    with pytest.raises(ValueError, match="loss_spans"):
        check(doc, None, before)
    doc.loss_spans = None
    check(doc, None, before)
    doc.text, doc.loss_spans = before[0], before[-1]
    check(doc, None, before)


TAGS = """
    from stages.stage import Stage

    class Tags(Stage):
        '''Adds to a list in place, of a whole batch, and fails on one of it.'''
        name = "tags"
        batched = True

        def process_batch(self, docs):
            for doc in docs:
                doc.meta["tags"].append(len(doc.text))
                if "bad" in doc.text:
                    raise ValueError("no")
            return [None] * len(docs)
"""


def test_a_document_that_fails_changes_nothing_of_the_others_in_its_batch(tmp_path):
    module = f"tags_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(TAGS))
    with open(tmp_path / "in.jsonl", "w") as f:
        for word in ("one", "two", "bad", "four"):
            f.write(json.dumps({"text": f"Document {word}", "tags": ["given"]}) + "\n")
    (tmp_path / "r.yaml").write_text(
        f"version: 1\ncode: [{module}.py]\nsources: {{web: {{read: jsonl, path: in.jsonl, keep: [tags]}}}}\n"
        f"datasets:\n  clean: {{from: web, steps: ['{module}:Tags']}}\nrun: {{max_error_rate: 100%}}\n")
    run_recipe(load_recipe(str(tmp_path / "r.yaml"), [], allow_custom=True), str(tmp_path / "store"),
               make_backend=make_backend("inline", 1, None), report=False)
    kept = ds.dataset(sorted(map(str, (tmp_path / "store/datasets/clean").glob("part-*.parquet")))).to_table()
    assert [json.loads(meta)["tags"] for meta in kept["meta"].to_pylist()] == [["given", 12], ["given", 12],
                                                                              ["given", 13]]


@pytest.mark.parametrize("name", ["c4", "book"])
def test_a_stage_of_ours_that_does_not_move_spans_costs_its_document_and_no_other(name):
    said = ("Title\n\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\nUser asks something here today.\n\n"
            "It is answered in full.")
    start = said.index("It is")
    docs = [Document("a" * 32, said), Document("b" * 32, said, loss_spans=[{"start": start, "end": len(said)}])]
    stage = stage_class(name)(**({"min_num_sentences": 1} if name == "c4" else {}))
    counters = {"stages": {"0": {"in": 0, "bytes_in": 0, "bytes_out": 0, "cpu_s": 0.0, "dropped": {}}},
                "dropped_bytes": {}}
    chain = Chain(CrashCursor(), counters, True)
    _, failures = chain.through([LoadedStage(name, "k" * 32, "0", stage)], list(enumerate(docs)))
    assert list(failures) == [1] and failures[1][1] == "error:ValueError" and "loss_spans" in failures[1][2]
    assert docs[0].text != said, "the stage does change this text"
