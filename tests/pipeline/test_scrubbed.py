"""Whatever is shown or set aside of a document is scrubbed as deep as it goes, and stays what it was."""

from __future__ import annotations

import json

import pyarrow.dataset as ds

from pipeline.cli.look import mask
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe

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
