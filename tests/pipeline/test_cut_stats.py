"""`tokenmill dedup explain` lists the passages that were cut out of a document, and `dedup stats` counts them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.recipe import load_recipe
from pipeline.report.cuts import BEGINNING, beginning
from pipeline.run import run_recipe
from pipeline.store.dataset import iter_rows
from pipeline.store.fs import Store

RECIPE = """
version: 1
sources:
  books: {read: jsonl, path: books.jsonl}
  shop: {read: jsonl, path: shop.jsonl}
  web: {read: jsonl, path: web.jsonl}
datasets:
  deduped:
    from: [books, shop, web]
    priority: [books, shop, web]
    steps:
      - repeats: {unit: line, min_unit_chars: 60, min_chars: 60}
      - substring: {length: 80, min_chars: 60, merge: 1}
"""
PASSAGE = ("Jane Roe <jane.roe@example.org> wrote these words, which stand in a book and on many pages of the web, "
           "naïve as they are.")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    top, draw = tmp_path_factory.mktemp("cuts"), random.Random(3)

    def own(words: int) -> str:
        return " ".join(f"w{draw.randrange(10**6)}é" for _ in range(words))

    def page(n: int) -> dict[str, str]:
        text = f"{own(3 + n % 2 * 12)}\n{PASSAGE * 3}" if n % 3 else f"{own(12)} {PASSAGE} {own(12)}"
        return {"text": text if n else f"{PASSAGE}", "url": f"https://shop.example/{n}"}

    (top / "books.jsonl").write_text("".join(json.dumps(
        {"text": f"{own(30)}\n{PASSAGE * 3}\n{own(30)}", "url": "https://books.example/1"}) + "\n"))
    (top / "shop.jsonl").write_text("".join(json.dumps(page(n)) + "\n" for n in range(24)))
    (top / "web.jsonl").write_text("".join(
        json.dumps({"text": own(40), "url": f"https://fine.example/{n}"}) + "\n" for n in range(30)))
    (top / "recipe.yaml").write_text(RECIPE)
    run_recipe(load_recipe(top / "recipe.yaml"), str(top / "store"), make_backend=InlineBackend)
    return top / "store"


def documents(store: Path) -> list[dict[str, Any]]:
    return [{**row, "kind": kind, "meta": json.loads(row["meta"])} for kind in ("datasets", "dropped")
            for row in iter_rows(Store(store), f"{kind}/deduped")]


def cut(store: Path, kind: str, step: str) -> dict[str, Any]:
    return next(d for d in documents(store) if d["kind"] == kind and f"{step}_cut" in d["meta"])


@pytest.mark.parametrize(("kind", "step"), [("datasets", "repeats"), ("datasets", "substring"),
                                            ("dropped", "substring"), ("dropped", "repeats")])
def test_explain_lists_the_passages_cut_out_of_a_document(store, kind, step, tmp_path, tokenmill):
    document = cut(store, kind, step)
    page = tmp_path / "page.html"
    done = tokenmill("dedup", "explain", document["id"], "--store", store, "--json", "--html", page)
    assert done.code == 0, done.err
    shown = json.loads(done.out)
    entry = next(entry for entry in shown["cuts"] if entry["step"] == step)
    noted = document["meta"][f"{step}_cut"]
    assert entry["bytes"] == sum(noted["bytes"].values()) and entry["passages"] == sum(noted["cuts"].values())
    by_id = {d["id"]: d for d in documents(store)}
    for passage, note in zip(entry["listed"], noted["passages"], strict=True):
        assert (passage["reason"], passage["bytes"]) == (note["reason"], note["end"] - note["start"])
        assert "wrote these words" in passage["beginning"] and "jane.roe" not in passage["beginning"]
        keeper = by_id[note["match"]]
        assert passage["kept"] == {"id": keeper["id"], "source": keeper["source"], "url": keeper["url"]}
        assert keeper["id"] in page.read_text()
    assert shown["reason"] == ("too_short" if kind == "dropped" else None)
    assert "jane.roe" not in page.read_text() and "wrote these words" in page.read_text()
    plain = tokenmill("dedup", "explain", document["id"][:12], "--store", store)
    assert plain.code == 0 and "wrote these words" in plain.out and "jane.roe" not in plain.out
    assert noted["passages"][0]["match"] in plain.out


def test_explain_of_a_document_without_cuts_says_so(store, tokenmill):
    whole = next(d for d in documents(store) if not any(name.endswith("_cut") for name in d["meta"]))
    done = tokenmill("dedup", "explain", whole["id"], "--store", store)
    assert done.code == 1 and "was kept in deduped, and no deduplication" in done.err
    assert len(done.err.splitlines()) == 1


def test_stats_equal_a_count_over_all_documents(store, tokenmill):
    done = tokenmill("dedup", "stats", "deduped", "--store", store, "--json", "-n", "0")
    assert done.code == 0, done.err
    cuts = json.loads(done.out)["cuts"]
    all_documents = documents(store)
    source = {d["id"]: d["source"] for d in all_documents}
    lost: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    keepers: Counter[str] = Counter()
    docs = 0
    for document in all_documents:
        notes = [document["meta"][name] for name in ("repeats_cut", "substring_cut") if name in document["meta"]]
        docs += bool(notes)
        for note in notes:
            lost[document["source"]] += sum(note["bytes"].values())
            for passage in note["passages"]:
                pairs[document["source"], source[passage["match"]]] += passage["end"] - passage["start"]
                keepers[passage["match"]] += passage["end"] - passage["start"]
    assert docs > 15 and cuts["docs"] == docs and cuts["bytes"] == sum(lost.values())
    assert {entry["source"]: entry["bytes"] for entry in cuts["sources"]} == lost
    assert {(pair["cut"], pair["kept"]): pair["bytes"] for pair in cuts["pairs"]} == pairs and not cuts["unknown"]
    assert {entry["id"]: entry["bytes"] for entry in cuts["keepers"]} == keepers
    assert cuts["keepers"][0]["bytes"] == max(keepers.values())
    assert [entry.get("source") or entry["domain"] for entry in cuts["alarms"]] == ["shop.example", "shop"]
    assert all(entry["bytes"] > entry["of"] / 2 for entry in cuts["alarms"])
    only = json.loads(tokenmill("dedup", "stats", "deduped", "--store", store, "--json", "--step", "repeats").out)
    assert {row["step"] for row in only["cuts"]["by_reason"]} == {"repeats"}
    plain = tokenmill("dedup", "stats", "deduped", "--store", store).out
    assert f"{docs:,} documents cut" in plain and "ALARM: lost more than half of their text to cuts" in plain


def test_the_report_warns_of_a_source_that_lost_most_of_its_text(store):
    report = json.loads((store / "report.json").read_text())
    section = next(section for section in report["duplicates"] if section["step"] == "repeats")
    lost = sum(sum(d["meta"]["repeats_cut"]["bytes"].values()) for d in documents(store)
               if d["source"] == "shop" and "repeats_cut" in d["meta"])
    whole = sum(len(d["text"].encode()) + sum(sum(d["meta"][name]["bytes"].values()) for name in (
        "repeats_cut", "substring_cut") if name in d["meta"]) for d in documents(store) if d["source"] == "shop")
    assert section["cut"]["alarms"] == [{"source": "shop", "cut": lost, "of": whole}] and lost > whole / 2
    assert any(f"cut {lost:,} of {whole:,} bytes of source 'shop'" in warning for warning in report["warnings"])
    [run] = (store / "runs").iterdir()
    assert "% of the text of shop" in (run / "report.md").read_text()
    assert re.search(r"shop lost 59\S* ?% of its text here", (run / "report.html").read_text())


def test_the_beginning_of_a_passage_that_starts_within_an_address_is_masked():
    text = b"Ask for it: jane.roe@mail.acme.com or somebody else, and wait. " * 30
    place = text.index(b"roe@")
    shown = beginning(text, place, len(text))
    assert "acme" not in shown and "roe" not in shown and shown.endswith("…")
    assert "jane" not in beginning(text, 0, text.index(b"@") + 1)
    assert beginning("é漢".encode() * 200, 0, 1000).startswith("é漢") and len(shown) < 2 * BEGINNING
