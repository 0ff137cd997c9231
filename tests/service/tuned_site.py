"""A site whose documents are partly dropped by every kind of filter that needs no model, and its runs."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from tests.corpus import sentences
from tests.stages.lid import lid176_model

NO_GRAMS = {**{f"top_{n}_gram": None for n in (2, 3, 4)}, **{f"dup_{n}_gram": None for n in range(5, 11)}}
#: chains in which every step decides about some documents
CHAINS: dict[str, list[Any]] = {
    "english": [{"gopher_repetition": {"dup_line_frac": 0.1, "dup_line_char_frac": 0.1, **NO_GRAMS}},
                {"gopher_quality": {"min_doc_words": 60}}, {"c4": {"min_num_sentences": 8}},
                {"fineweb": {"short_line_thr": 0.3}}, {"pii": {}}],
    "lines": [{"rights": {"respect": ["reserved"]}}, {"dclm_quality": {}}, {"dclm_repetition": {}},
              {"c4_paragraphs": {"min_paragraph_len": 150}}, {"refinedweb_lines": {}}, {"dclm_lines": {}}],
    "signals": [{"gopher_quality": {"min_doc_words": 40}}, {"where": {"language": ["en", "de"]}},
                {"pii": {"drop": ["ips"]}}, {"gopher_repetition": {"dup_line_frac": 0.4}},
                {"fineweb": {"line_punct_exclude_zero": True}}],
    "deduped": [{"gopher_quality": {"min_doc_words": 60}}, {"exact": {}}, {"fineweb": {}}],
    "passes": [{"gopher_repetition": {"dup_line_frac": 0.1, **NO_GRAMS}}, {"language": {"keep": ["en"], "min": 0.9}},
               {"gopher_quality": {"min_doc_words": 60}}, {"fineweb": {}}],
    "last": [{"gopher_repetition": {}}, {"fineweb": {}}, {"gopher_quality": {"min_doc_words": 60}}],
}


def texts(n: int = 120) -> list[str]:
    """Return texts of many lengths. Many have faults that rules look for."""
    rng, prose = random.Random(11), sentences()
    made: list[str] = []
    for i in range(n):
        picked = rng.sample(prose, rng.randint(2, 26))
        match rng.randrange(12):
            case 0:
                picked += [picked[0]] * rng.randint(1, 9)
            case 1:
                picked = [s.rstrip(".") + "..." if rng.random() < 0.4 else s for s in picked]
            case 2:
                picked = ["- " + s if rng.random() < 0.8 else s for s in picked]
            case 3:
                picked = [" ".join(s.split()[:4]) if rng.random() < 0.7 else s for s in picked]
            case 4:
                picked[0] += " { lorem ipsum"
            case 5:
                picked[0] += f" Ask someone{i}@mail.example.org or 8.8.4.{i % 250}."
            case 6:
                picked = made[-1].split("\n") if made else picked
            case 7:
                picked = ["Sign-in", *picked, "12 likes", "Read more..."]
            case 8:
                picked[-1] += " © 2019 Somebody. All rights reserved."
            case 9:
                picked = [" ".join(picked)]
        made.append("\n".join(picked))
    return [*made, "", "+ + +", "\u202e<script>alert(1)</script> " + made[0]]


def make_site(top: Path, name: str, mode: str) -> Path:
    for source in ("web", "docs"):
        (top / source).mkdir(parents=True)
    rng = random.Random(3)
    for i, text in enumerate(texts()):
        source = "docs" if i % 3 == 0 else "web"
        with open(top / source / f"{i // 30}.jsonl", "a") as file:
            file.write(json.dumps({"text": text, "url": f"https://a.example/{i}",
                                   "lang": rng.choice(["en", "en", "de", "fr"])}) + "\n")
    write_recipe(top, CHAINS[name], mode)
    run(top, top / "store")
    return top


def write_recipe(top: Path, steps: list[Any], mode: str, to: str = "r.yaml") -> None:
    read, steps = "read: jsonl, language: lang", copy.deepcopy(steps)
    for step in steps:
        if "language" in step:
            step["language"]["model"] = str(lid176_model())
    (top / to).write_text(
        f"version: 1\nsources:\n  web: {{{read}, path: web}}\n  docs: {{{read}, path: docs}}\ndatasets:\n"
        f"  clean:\n    from: [web, docs]\n    steps: {json.dumps(steps)}\n"
        f"run: {{partition: 60KB, signals: {mode}, max_error_rate: 50%}}\n")


def run(top: Path, store: Path, recipe: str = "r.yaml", custom: bool = False) -> None:
    run_recipe(load_recipe(top / recipe, allow_custom=custom), str(store), run="r", report=False,
               make_backend=make_backend("inline", 1, None))


def sides(store: Path) -> dict[str, tuple[str, str, str]]:
    """Return where each document of `clean` ended, as {id: (kept, dropped or quarantined; stage; reason)}."""
    found: dict[str, tuple[str, str, str]] = {}
    for folder, side in (("datasets", "kept"), ("dropped", "dropped"), ("quarantine", "quarantined")):
        for path in sorted((store / folder / "clean").glob("*.parquet")):
            table: pa.Table = pq.read_table(path)
            for row in table.select([c for c in ("id", "stage", "reason") if c in table.column_names]).to_pylist():
                assert row["id"] not in found
                found[row["id"]] = (side, row.get("stage") or "", row.get("reason") or "")
    return found
