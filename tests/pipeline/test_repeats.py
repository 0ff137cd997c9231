"""The step `repeats` in whole runs: what is cut equals brute force, and a changed limit runs no task of the step."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.recipe import load_recipe
from pipeline.report.margins import COLUMNS, Margins
from pipeline.run import make_backend, run_recipe
from pipeline.service.playground import Changes, Playground
from pipeline.store.dataset import iter_rows
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from pipeline.store.log import Log
from stages.dedup.repeats import RepeatedPassages
from tests.corpus import sentences
from tests.stages.dedup_fragment import Doc
from tests.stages.test_dedup_repeats import brute_force

RECIPE = """
version: 1
sources:
  web: {{read: jsonl, path: web/*.jsonl}}
  wiki: {{read: jsonl, path: wiki.jsonl}}
  chats: {{read: sft, path: chats.jsonl}}
datasets:
  clean: {{from: web, steps: [pii]}}
  deduped:
    from: [clean, wiki]
    priority: [wiki, clean]
    steps:
      - exact
      - repeats: {{unit: {unit}, min_chars: {min_chars}}}
      - where: {{source: [web, wiki]}}
  talk: {{from: chats, steps: [{{repeats: {{unit: line, min_chars: 0}}}}]}}
run: {{partition: 8KB}}
"""


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    """A folder with pages that share footers and paragraphs and have e-mail addresses, and with chats that share a
    line."""
    top, rng, prose = tmp_path_factory.mktemp("repeats"), random.Random(2), sentences()
    (top / "web").mkdir()
    shared = [f"{rng.choice(prose)} Schöne Grüße, mail to someone{i}@example.org 😀" for i in range(12)]

    def page(i: int) -> dict[str, str]:
        body = [rng.choice(shared) if rng.random() < 0.5 else f"{rng.choice(prose)} ({i})"
                for _ in range(rng.randint(1, 7))]
        return {"text": "\n\n".join([*body, "Contact: the.owner@example.org, all rights reserved."])}

    for n in range(4):
        (top / "web" / f"{n}.jsonl").write_text("".join(json.dumps(page(i)) + "\n" for i in range(n, 80, 4)))
    (top / "wiki.jsonl").write_text("".join(json.dumps(page(i + 100)) + "\n" for i in range(15)))
    (top / "chats.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"Frage {i}?\nPlease answer in a few short sentences."},
        {"role": "assistant", "content": f"Antwort Nummer {i}: é.\nI hope that this answer is of help!!"}]}) + "\n"
        for i in range(20)))
    return top


def run(top: Path, store: Path, unit: str = "paragraph", min_chars: int = 60, make: Any = InlineBackend,
        *overrides: str) -> Any:
    (top / "recipe.yaml").write_text(RECIPE.format(unit=unit, min_chars=min_chars))
    return run_recipe(load_recipe(top / "recipe.yaml", list(overrides)), str(store), make_backend=make)


@pytest.fixture(scope="module")
def finished(top, tmp_path_factory) -> Path:
    store = tmp_path_factory.mktemp("finished") / "store"
    run(top, store)
    return store


def rows(store: Path, name: str) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in iter_rows(Store(store), name)}


@pytest.mark.parametrize("unit", ["paragraph", "line", "sentence"])
def test_texts_equal_brute_force_over_the_stored_texts(top, tmp_path, unit):
    run(top, tmp_path / "cut", unit)
    (top / "whole.yaml").write_text((top / "recipe.yaml").read_text().replace(
        f"      - repeats: {{unit: {unit}, min_chars: 60}}\n", ""))
    run_recipe(load_recipe(top / "whole.yaml"), str(tmp_path / "whole"), make_backend=InlineBackend)
    whole, cut = rows(tmp_path / "whole", "datasets/deduped"), rows(tmp_path / "cut", "datasets/deduped")
    docs = [Doc(row["text"], row["source"], id) for id, row in whole.items()]
    expected = brute_force(docs, RepeatedPassages(unit=unit).config)
    kept = {id: text for id, text in expected.items() if text == whole[id]["text"] or len(text.strip()) >= 60}
    assert {id: row["text"] for id, row in cut.items()} == kept
    dropped = rows(tmp_path / "cut", "dropped/deduped")
    assert {id for id, row in dropped.items() if row["reason"] == "too_short"} == expected.keys() - kept.keys() != set()
    assert any(kept[id] != whole[id]["text"] for id in kept)


def test_loss_spans_of_chats_hold_what_is_left_of_the_answers(finished):
    answers = []
    for row in rows(finished, "datasets/talk").values():
        data = row["text"].encode()
        answers += ["".join(data[s["start"]:s["end"]].decode() for s in row["loss_spans"])]
    assert sum("I hope" in answer for answer in answers) == 1
    assert sorted(int(answer.split()[2].rstrip(":")) for answer in answers) == list(range(20))
    assert all(answer.startswith("Antwort Nummer") for answer in answers)


def test_the_report_counts_cuts_by_reason(finished):
    report = json.loads((finished / "report.json").read_text())
    section = next(s for s in report["duplicates"] if s["step"] == "repeats" and s["dataset"] == "deduped")
    entries = [(row["source"], entry) for kind in ("datasets", "dropped")
               for row in rows(finished, f"{kind}/deduped").values()
               if (entry := json.loads(row["meta"]).get("repeats_cut"))]
    by_source: Counter[str] = Counter()
    for source, entry in entries:
        by_source[source] += entry["bytes"]["repeated_paragraph"]
    alarms = section["cut"].pop("alarms")
    assert section["cut"] == {"docs": len(entries), "sources": by_source, **{name: {"repeated_paragraph": sum(
        entry[name]["repeated_paragraph"] for _, entry in entries)} for name in ("cuts", "bytes")}}
    assert all(alarm["cut"] == by_source[alarm["source"]] > alarm["of"] / 2 for alarm in alarms)
    assert len(entries) > 50


def test_another_limit_runs_only_the_cutting_pass_and_replays_it(top, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "store")
    had = {r.key for r in Log.read(Store(tmp_path / "store")).records()}
    run(top, tmp_path / "store", "paragraph", 200)
    ran = [r for r in Log.read(Store(tmp_path / "store")).records() if r.key not in had]
    assert {r.node for r in ran} == {"deduped"}
    assert sum(r.counters["replayed"]["docs"] for r in ran) > 20
    run(top, tmp_path / "new", "paragraph", 200)
    assert dataset_hash(Store(tmp_path / "store"), "deduped") == dataset_hash(Store(tmp_path / "new"), "deduped")
    assert dataset_hash(Store(tmp_path / "store"), "deduped") != dataset_hash(Store(finished), "deduped")


@pytest.mark.slow
def test_children_and_other_partitions_give_the_same(top, finished, tmp_path):
    run(top, tmp_path / "store", "paragraph", 60, make_backend("process", 2, None), "run.partition=60KB")
    for name in ("deduped", "talk"):
        assert dataset_hash(Store(tmp_path / "store"), name) == dataset_hash(Store(finished), name)


def test_the_playground_claims_nothing_about_documents_that_other_cuts_would_reach(finished):
    [name] = [path.name for path in (finished / "runs").iterdir()]
    ground = Playground(Store(finished), name, "deduped")
    assert {outcome.reason for outcome in ground.outcomes(ground.moved(Changes({1: {"min_chars": 0}}))).outcomes
            if outcome.side == "unknown"} == {"barrier"}
    unchanged = ground.outcomes(ground.moved(Changes()))
    dropped = sum(row["stage"] == "repeats_cut" for row in rows(finished, "dropped/deduped").values())
    places = [o for o in unchanged.outcomes if o.side == "dropped" and o.reason == "too_short"]
    assert dropped and [o.stage for o in places] == ["repeats"]


def test_a_dropped_document_names_the_limit_that_it_missed(finished):
    margins = Margins([{"repeats": {"min_chars": 60}}])
    short = [row for row in rows(finished, "dropped/deduped").values() if row["stage"] == "repeats_cut"]
    batch = pa.RecordBatch.from_pylist([{name: row[name] for name in COLUMNS} for row in short])
    margins.distances(batch)
    for row in short:
        decided = margins.decided(row)
        assert decided is not None
        assert (decided["key"], decided["threshold"]) == ("repeats_cut.min_chars", 60)
        assert decided["value"] == len(row["text"].strip())
