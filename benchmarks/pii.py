"""Measure how well personal data is found: precision and recall of every kind.

    python benchmarks/pii.py [--cases 2000] [--presidio FILE] [--text DIR] [--seed 0]

The texts are generated: --cases texts with one value of a kind, and as many with a lookalike (a wrong check digit,
version numbers, ISBNs, timestamps, hashes, DOIs, coordinates …). All kinds are enabled together, with the ids of all
countries. A value is found if all of it is replaced, as its kind. A hit is right if it has the kind of a value and
overlaps it, otherwise false.

`--presidio` takes a JSON file (or .gz) of texts with spans. `--text` takes a folder of texts (also .jsonl and .xml, .gz
and .bz2). Every hit in them is printed with the text around it, for a person to judge. The CPU time per text is that of
the texts in this folder, or of the generated ones if there is no folder.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pii_cases import Case, cases

from stages.scrub.find import Match
from stages.scrub.pii import KINDS, MODELLED, Pii, scrub_text

GENERATED = tuple(kind for kind in KINDS if kind not in MODELLED)
PRESIDIO = {
    "EMAIL_ADDRESS": "emails",
    "IP_ADDRESS": "ips",
    "CREDIT_CARD": "cards",
    "IBAN_CODE": "ibans",
    "US_SSN": "ids",
    "PHONE_NUMBER": "phones",
}
EVERYTHING = Pii(ipv6=True, cards=True, ibans=True, phones=True, ids=["all"], secrets=True, wallets=True)


def hits(text: str) -> list[Match]:
    return EVERYTHING._find(text)


def score(of: list[Case]) -> tuple[Counter[str], list[str]]:
    """Returns (counts, descriptions of the errors). The counts are `planted` and `found` values, and `right` and
    `false` hits."""
    n: Counter[str] = Counter()
    wrong: list[str] = []
    for case in of:
        found = hits(case.text)
        places = [(case.text.rindex(value), case.text.rindex(value) + len(value)) for value in case.values]
        for (start, end), value in zip(places, case.values):
            n["planted"] += 1
            # words before the value belong to its written form, not to the value
            first = max(start, end - max((m.end - m.start for m in found if m.end >= end - 2), default=0))
            ok = any(m.kind == case.kind and m.start <= first and m.end >= end and m.end - m.start >= 7 for m in found)
            n["found"] += ok
            if not ok:
                wrong.append(f"missed {value!r} in {case.text!r}")
        for match in found:
            right = match.kind == case.kind and any(match.start < end and match.end > start for start, end in places)
            n["right" if right else "false"] += 1
            if not right:
                wrong.append(f"false {match.kind} {match.rule} {case.text[match.start : match.end]!r} in {case.text!r}")
    return n, wrong


def ratio(a: int, b: int) -> str:
    return f"{a / b:.4f}" if b else "–"


def presidio(path: Path) -> None:
    raw = path.read_bytes()
    rows = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    planted: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for row in rows:
        got = hits(row["full_text"])
        for span in row["spans"]:
            kind = PRESIDIO.get(span["entity_type"])
            if kind == "phones" and not span["entity_value"].startswith(("+", "00")):
                continue  # local forms need a region
            if kind:
                planted[kind] += 1
                ok = any(
                    m.kind == kind and m.start <= span["start_position"] and m.end >= span["end_position"] for m in got
                )
                found[kind] += ok
                if not ok:
                    print(f"  missed {kind}: {span['entity_value']!r}")
        for m in got:
            if not any(
                PRESIDIO.get(s["entity_type"]) == m.kind and s["start_position"] < m.end and m.start < s["end_position"]
                for s in row["spans"]
            ):
                print(f"  false {m.kind} {m.rule}: {row['full_text'][m.start : m.end]!r}")
    for kind in sorted(planted):
        print(f"  {kind}: {found[kind]} of {planted[kind]}")


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else bz2.decompress(raw) if path.suffix == ".bz2" else raw
        text = raw.decode("utf-8", "replace")
        if ".jsonl" in path.name:
            yield from (
                (path.name, str(json.loads(line).get("text", ""))) for line in text.splitlines() if line.strip()
            )
        elif ".xml" in path.name:
            yield from ((path.name, page) for page in text.split("<page>"))
        else:
            yield path.name, text


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument(
        "--cases", type=int, default=2000, help="texts with a value, and as many lookalikes, of each kind"
    )
    parse.add_argument("--presidio", type=Path)
    parse.add_argument("--text", type=Path)
    parse.add_argument("--seed", type=int, default=0)
    asked = parse.parse_args()
    timed: list[str] = []
    print("| kind | texts | precision | recall |\n|---|---|---|---|")
    failures: list[str] = []
    for kind in GENERATED:
        of = cases(kind, asked.cases, asked.seed)
        n, wrong = score(of)
        timed += [case.text for case in of]
        failures += wrong
        print(
            f"| {kind} | {len(of)} | {ratio(n['right'], n['right'] + n['false'])} | {ratio(n['found'], n['planted'])} |"
        )
    for line in failures[:60]:
        print(" ", line)
    if asked.presidio:
        print("Presidio's synthetic set:")
        presidio(asked.presidio)
    if asked.text:
        timed, counts, size = [], Counter(), 0
        for name, text in texts(asked.text):
            timed.append(text)
            size += len(text)
            for m in hits(text):
                counts[m.kind] += 1
                before, after = text[max(0, m.start - 40) : m.start], text[m.end : m.end + 15]
                print(f"  {m.kind} {m.rule} {name[:20]}: {before!r} >>> {text[m.start : m.end]!r} <<< {after!r}")
        print(f"{size / 1e6:.1f} million characters, hits: {dict(counts)}")
    for label, scrub in (
        ("default", Pii()._scrubbed),
        ("everything", EVERYTHING._scrubbed),
        ("scrub_text", scrub_text),
    ):
        began = time.process_time()
        for text in timed:
            scrub(text)
        took = time.process_time() - began
        print(f"{label}: {1000 * took / len(timed):.3f} ms a text, {sum(map(len, timed)) / took / 1e6:.1f} MB/s")


if __name__ == "__main__":
    main()
