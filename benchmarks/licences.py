"""Measure how well licences of texts are recognised: precision and recall, over scancode-toolkit's rules.

    python -m benchmarks.licences RULES.jsonl.gz LICENSES

RULES holds one record a line with `id`, `cluster` (the key of its licence) and `text`. LICENSES is the folder
licensedcode/data/licenses of scancode-toolkit, which gives the SPDX identifier and the category of each key.

The limits of missing and added words are chosen by cross-validation, with five folds of clusters. For each fold, all
settings are tried on the other four. Settings are left out if more than 1 % of the texts that they name as permissive
are not. Of the rest, the one with the most correct answers is chosen. All printed figures are of the held-out folds.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from stages.read import licence_texts
from stages.read.licence import licence

FOLDS = 5
FREE = ("Permissive", "Public Domain")
#: labels whose texts are word for word those of another licence
SAME = {"bsd-x11": "BSD-3-Clause", "bsd-original-uc": "BSD-4-Clause"}
GRID = [{"MISSING": a, "GAP": b, "RUN": c} for a, b, c in itertools.product((0.06, 0.1), (6, 8, 12), (12, 20))]


def read(rules: Path, licences: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """Returns (records, SPDX identifiers of permissive licences). To each record are added `spdx` (the SPDX identifier
    of its licence), `free` (whether the licence is permissive) and `fold` (0 to 4)."""
    facts: dict[str, dict[str, Any]] = {}
    for path in licences.glob("*.LICENSE"):
        text = path.read_text("utf-8") + "\n"
        entry = yaml.safe_load(re.split(r"^---[ \t]*\n", text, maxsplit=2, flags=re.MULTILINE)[1])
        facts[entry["key"]] = entry
    with gzip.open(rules, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    for row in rows:
        fact = facts[row["cluster"]]
        row["spdx"] = SAME.get(row["cluster"]) or fact.get("spdx_license_key", "")
        row["free"] = fact["category"] in FREE
        row["fold"] = hashlib.sha256(row["cluster"].encode()).digest()[0] % FOLDS
    return rows, {f["spdx_license_key"] for f in facts.values() if f["category"] in FREE and "spdx_license_key" in f}


def counts(rows: list[dict[str, Any]], named: dict[str, str], free: set[str], known: set[str]) -> Counter[str]:
    out: Counter[str] = Counter()
    for row in rows:
        label = named[row["id"]]
        out["of"] += row["spdx"] in known
        if label in free:
            out["named"] += 1
            out["right"] += label == row["spdx"]
            out["other"] += label != row["spdx"]
            out["not permissive"] += not row["free"]
    return out


def show(name: str, c: Counter[str]) -> None:
    print(f"{name:22} {c['of']:6} {c['named']:6} {c['right']:6} {c['other']:6} {c['not permissive']:6}   "
          f"{c['not permissive'] / max(1, c['named']):7.2%} {c['other'] / max(1, c['named']):7.2%} "
          f"{c['right'] / max(1, c['of']):7.2%}")


def main(rules: Path, licences: Path) -> None:
    rows, free = read(rules, licences)
    known = {form.licence for form in licence_texts.forms()[0]}
    tried = []
    for setting in GRID:
        for name, value in setting.items():
            setattr(licence_texts, name, value)
        tried.append((setting, {row["id"]: licence(row["text"]) for row in rows}))
    print(f"{'':22} {'texts':>6} {'named':>6} {'right':>6} {'other':>6} {'unfree':>6}   unfree   other  recall")
    held: dict[str, str] = {}
    for fold in range(FOLDS):
        learn = [row for row in rows if row["fold"] != fold]
        judged = [(setting, named, counts(learn, named, free, known)) for setting, named in tried]
        allowed = [j for j in judged if 100 * j[2]["not permissive"] <= j[2]["named"]] or judged
        setting, named, _ = max(allowed, key=lambda j: (j[2]["right"], -j[2]["other"]))
        test = [row for row in rows if row["fold"] == fold]
        held |= {row["id"]: named[row["id"]] for row in test}
        show(f"fold {fold} {' '.join(map(str, setting.values()))}", counts(test, held, free, known))
    show("all folds", counts(rows, held, free, known))
    for name in sorted(known):
        theirs = [row for row in rows if name in (row["spdx"], held[row["id"]])]
        if theirs:
            labels = {row["id"]: held[row["id"]] if held[row["id"]] == name else "" for row in theirs}
            show(f"  {name}", counts(theirs, labels, free, {name}))
    start = time.process_time()
    for row in rows:
        licence(row["text"])
    print(f"{1000 * (time.process_time() - start) / len(rows):.1f} ms a text")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
