"""Everything that is shown or set aside of a document is scrubbed at every depth, and is otherwise unchanged."""

from __future__ import annotations

import json

import pyarrow.dataset as ds
import pytest

from pipeline.passes.storable import language_label
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store
from pipeline.store.log import Log
from stages.scrub.rows import mask

MAIL, MASK = "me@home.org", "email@example.com"
META = {"title": "Of\nme@home.org", "people": [{"mail": "you@home.org"}, "8.8.8.8"], "n": [1, None]}
SCRUBBED = {"title": "Of\nemail@example.com", "people": [{"mail": "email@example.com"}, "22.214.171.124"],
            "n": [1, None]}


def test_meta_of_a_dropped_document(tmp_path):
    row = {"text": "Write to me@home.org.", "url": "http://x.org/ me@home.org", **META}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (tmp_path / "r.yaml").write_text(
        "version: 1\nsources: {web: {read: jsonl, path: in.jsonl, keep: [title, people, n]}}\n"
        "datasets:\n  clean: {from: web, steps: [{gopher_repetition: {}}, gopher_quality]}\n", encoding="utf-8")
    run_recipe(load_recipe(str(tmp_path / "r.yaml"), []), str(tmp_path / "store"),
               make_backend=make_backend("inline", 1, None), report=False)
    parts = sorted(map(str, (tmp_path / "store/dropped/clean").glob("part-*.parquet")))
    [found] = ds.dataset(parts).to_table().to_pylist()
    assert (found["text"], found["url"]) == ("Write to email@example.com.", "http://x.org/ email@example.com")
    assert json.loads(found["meta"]) == SCRUBBED


def test_inspected_meta_is_json_still():
    row = {"text": "", "meta": json.dumps(META, sort_keys=True), "url": "mailto:me@home.org", "detail": None,
           "locator": {"file": "of me@home.org.jsonl", "record": 3}}
    mask(row)
    assert json.loads(row["meta"]) == SCRUBBED
    assert row["locator"] == {"file": "of email@example.com", "record": 3}
    assert row["url"] == "mailto:email@example.com"


def test_every_column_of_a_dropped_or_quarantined_document(tmp_path):
    """Date, language, the name of its file, and what meta calls things; the counters never hold what a column said."""
    folder = tmp_path / f"of {MAIL}"
    folder.mkdir()
    row = {"text": "Too short.", "date": f"today, {MAIL}", "lang": MAIL, "facts": {MAIL: 1, "deep": [{MAIL: 2}]}}
    (folder / f"{MAIL}.jsonl").write_text(f"{json.dumps(row)}\nno JSON at all\n", encoding="utf-8")
    (tmp_path / "r.yaml").write_text(
        "version: 1\nsources: {web: {read: jsonl, path: '*/*.jsonl', language: lang, keep: [facts]}}\n"
        "datasets:\n  all: {from: web, steps: []}\n  clean: {from: all, steps: [gopher_quality]}\n", encoding="utf-8")
    run_recipe(load_recipe(str(tmp_path / "r.yaml"), []), str(tmp_path / "store"),
               make_backend=make_backend("inline", 1, None))
    store = tmp_path / "store"
    [found] = ds.dataset(sorted(map(str, (store / "dropped/clean").glob("part-*.parquet")))).to_table().to_pylist()
    assert (found["date"], found["language"]) == (f"today, {MASK}", MASK)
    assert found["locator"]["file"].startswith(f"of {MASK}") and MAIL not in found["locator"]["file"]
    assert json.loads(found["meta"]) == {"facts": {MASK: 1, "deep": [{MASK: 2}]}}
    [lost] = ds.dataset(sorted(map(str, (store / "quarantine/all").glob("part-*.parquet")))).to_table().to_pylist()
    assert lost["file"] == found["locator"]["file"] and lost["reason"] == "bad_json"
    [kept] = [r for r in Log.read(Store(store)).records() if r.node == "all"]
    assert kept.counters["languages"] == {"web": {"other": 1}}
    assert MAIL not in (store / "report.json").read_text()


@pytest.mark.parametrize(("language", "label"), [
    ("en", "en"), ("", ""), ("zh-Hant_TW", "zh-Hant_TW"), ("x" * 16, "x" * 16), ("x" * 17, "other"), ("en us", "other"),
    ("é", "other"), ("a@b.org", "other"), ("en\n", "other")])
def test_languages_as_counters_call_them(language, label):
    assert language_label(language) == label
