"""Runs for the tests of `tokenmill report --compare`: two in one store, and two in other stores. What a run published
is read right after it, by DuckDB, because a later run publishes the datasets anew."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from pipeline.recipe import load_recipe
from pipeline.report.compare import FinishedRun
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store
from tests.corpus import sentences

RECIPE = """
version: 1
sources:
  web: {read: jsonl, path: web/*.jsonl}
  docs: {read: jsonl, path: docs/*.jsonl}
datasets:
  clean: {from: web, steps: [gopher_quality, {where: {signals: {gopher_words: {max: 400}}}}, "compare_stages:Picky"]}
  deduped: {from: [clean, docs], steps: [{exact: {}}, {minhash: {verify: 0.7, bands: 16}}], priority: [docs, clean]}
run: {partition: 8KB, max_error_rate: 50%}
code: [./compare_stages.py]
"""
STAGES = '''
from stages.stage import Stage, StageConfig, decision


class Picky(Stage):
    """Drops texts that say PICKY and fails on those that say FRAGILE."""

    name = "picky"

    class Config(StageConfig):
        word: str = decision("PICKY", "word that drops")

    def process(self, doc):
        if "FRAGILE" in doc.text:
            raise ValueError(doc.text)
        return "picky" if self.config.word in doc.text else None
'''
SECRETS = ("text.person@leak.example", "url.person@leak.example", "failed.person@leak.example")
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"
ODD = "\x1b]0;owned\x07 \u202eesrever\u202c \u2066hidden\u2069"
#: settings of the second run: it keeps some documents that the first run drops, and drops some that the first keeps
SECOND = ["datasets.clean.steps.gopher_quality.min_doc_words=80",
          "datasets.clean.steps.gopher_quality.min_stop_words=6",
          "datasets.clean.steps.where.signals.gopher_words.max=300", "datasets.deduped.steps.minhash.verify=0.9"]


@dataclass(frozen=True)
class Made:
    """A run and what it published: {dataset: {document id: row}}. A row has the keys fate, stage, reason, source, text
    and words (the signal gopher_words)."""

    store: Path
    name: str
    rows: Mapping[str, Mapping[str, dict[str, Any]]]

    @property
    def run(self) -> FinishedRun:
        return FinishedRun.open(Store(self.store), self.name)

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.store / "runs" / self.name / "report.json").read_text())


def published(store: Path, dataset: str) -> dict[str, dict[str, Any]]:
    """Return the rows of the published parts of a dataset, by id."""
    out: dict[str, dict[str, Any]] = {}
    for fate, folder, columns in (("kept", "datasets", "'', '', source, text, signals"),
                                  ("dropped", "dropped", "stage, reason, source, text, signals"),
                                  ("quarantined", "quarantine", "stage, reason, source, detail, null")):
        parts = f"{store}/{folder}/{dataset}/part-*.parquet"
        for id, stage, reason, source, text, signals in duckdb.sql(
                f"select id, {columns} from read_parquet('{parts}', union_by_name=true)").fetchall():
            if id:
                assert id not in out
                out[id] = {"fate": fate, "stage": stage, "reason": reason, "source": source, "text": text,
                           "words": (signals or {}).get("gopher_words")}
    return out


def documents() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the records of both sources: short and long texts, near-duplicates and hostile texts."""
    rng, prose = random.Random(7), sentences()
    web = [{"text": f"Page {i}. " + " ".join(rng.sample(prose, rng.randrange(2, 16))), "url": f"https://w.example/{i}"}
           for i in range(120)]
    for page in [page for page in web if 100 < len(page["text"].split()) < 250][:12]:
        words = page["text"].split()
        for third in (1, 2, 3):
            words[len(words) * third // 4] = "replaced"
        web.append({"text": " ".join(words), "url": page["url"].replace("w.", "twin.")})
    for i in range(8):
        web.append({"text": f"{SCRIPT} {ODD} write to {SECRETS[0]} " + " ".join(rng.sample(prose, 2 + i)),
                    "url": f"https://evil.example/?{SECRETS[1]}&{SCRIPT}{i}"})
    web += [{"text": f"PICKY {i} " + " ".join(rng.sample(prose, 9)), "url": ""} for i in range(4)]
    web += [{"text": f"FRAGILE {i} {SECRETS[2]} " + " ".join(rng.sample(prose, 9)), "url": ""} for i in range(3)]
    docs = [{"text": " ".join(rng.sample(prose, 20)), "url": f"https://d.example/{i}"} for i in range(20)]
    return web, docs


def write(top: Path, web: list[dict[str, str]], docs: list[dict[str, str]], recipe: str = RECIPE) -> None:
    for name, records in (("web", web), ("docs", docs)):
        shutil.rmtree(top / name, ignore_errors=True)
        (top / name).mkdir(parents=True)
        for at in range(0, len(records), 30):
            (top / name / f"{at:03d}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records[at:at + 30]))
    (top / "recipe.yaml").write_text(recipe)
    (top / "compare_stages.py").write_text(STAGES)


def run(top: Path, store: Path, name: str, *settings: str) -> Made:
    """Run the recipe in `top`."""
    recipe = load_recipe(top / "recipe.yaml", list(settings), allow_custom=True)
    run_recipe(recipe, str(store), make_backend=make_backend("inline", 1, None), run=name, show="quiet")
    return Made(store, name, {d: published(store, d) for d in recipe.datasets})
