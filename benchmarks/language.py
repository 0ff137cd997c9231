"""Measure how often language identifiers name the language of a text correctly, by language, and their speed.

    python benchmarks/language.py --sentences DIR --udhr udhr-html.zip [--model FILE]... [--peers PYTHON] [--table]

Models: lid.176.ftz as fetched by `tokenmill fetch lid176`, and every fastText model given with --model (lid.176.bin,
GlotLID, OpenLID, …). With --peers, the Python of an environment with `peer-language.txt`, other identifiers are added.
Each runs in a process of its own and sees the same texts:

  sentences   DIR/xx.txt, one sentence a line (lingua's test data: 75 languages, 150 each)
  documents   ten consecutive sentences each, one per line
  UDHR        the first 20 paragraphs of 40 characters or more of each of 532 translations of the Universal
              Declaration of Human Rights, by ISO 639-3 and script

An answer is correct when it names the language (`stages.text.language_codes.names`: zh for cmn, no for nob). bs, hr and
sr are three languages, and id and ms two. If an identifier has one label for all of them, this label is correct. The
label with the highest score counts, however low the score is.

Micro is the share of texts answered correctly; macro is the mean over languages, so that rare ones count alike.
`common` are the languages that every identifier gets right at least once. MB/s is UTF-8 bytes per CPU second of this
one process, without loading. `--table` adds a line for each language. For fastText models, one more figure is printed:
the share of texts in languages without a label that would pass `min: 0.65`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from html import unescape
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from peer_language import PEERS

from stages.filter.language import DEFAULT
from stages.scoring.models import default_lid176
from stages.text.language_codes import names, tag
from stages.text.scripts import main_script

#: outdated or private codes that identifiers return
ALIASES = {"iw": "he", "in": "id", "ji": "yi", "jw": "jv", "mo": "ro", "fil": "tl"}
#: labels that stand for several languages, for identifiers without labels of their own for these (heliport)
GROUPS = {"hbs": ("bos", "hrv", "srp", "cnr"), "msa": ("ind", "zsm")}


class Text(NamedTuple):
    """A text and its language: an ISO 639-1 or -3 code, with the script of the text."""

    gold: str
    text: str


def sentences(folder: Path) -> tuple[list[Text], list[Text]]:
    """Return (sentences, documents of ten consecutive sentences) from the files of a folder. There is a file for each
    language."""
    one, ten = [], []
    for path in sorted(folder.glob("*.txt")):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        gold = f"{path.stem}_{main_script(' '.join(lines))[0]}"
        one += [Text(gold, line) for line in lines]
        ten += [Text(gold, "\n".join(lines[i:i + 10])) for i in range(0, len(lines), 10)]
    return one, ten


def udhr(path: Path) -> list[Text]:
    found = []
    with zipfile.ZipFile(path) as archive:
        for name in sorted(n for n in archive.namelist() if n.endswith(".html")):
            page = archive.read(name).decode("utf-8")
            code = re.search(r'data-iso6393="([a-z]{3})"', page)
            paragraphs = [unescape(re.sub(r"<[^>]*>", "", p)).strip()
                          for p in re.findall(r"<p\b[^>]*>(.*?)</p>", page, re.DOTALL)]
            script = main_script("\n".join(paragraphs))[0]
            if code is not None and script:
                found += [Text(f"{code[1]}_{script}", p) for p in paragraphs if len(p) >= 40][:20]
    return found


def ask(name: str, python: str, texts: dict[str, list[Text]]) -> dict[str, Any] | None:
    """Returns the output of `peer_language.py`; prints a message and returns None when it fails."""
    print(f"{name} …", file=sys.stderr, flush=True)
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "in.json"), Path(folder, "out.json")
        given.write_text(json.dumps({k: [t.text for t in v] for k, v in texts.items()}), encoding="utf-8")
        done = subprocess.run([python, str(root / "benchmarks" / "peer_language.py"), name, str(given), str(out)],
                              env={**os.environ, "PYTHONPATH": str(root)} if name not in PEERS else None,
                              capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return None
        return json.loads(out.read_text(encoding="utf-8"))


def right(gold: str, label: str) -> bool:
    label = label if tag(label) else label.partition("-")[0]                    # such as sr-ME
    return names(gold, ALIASES.get(label, label)) or tag(gold).language in GROUPS.get(label, ())


def by_language(texts: list[Text], labels: list[str]) -> dict[str, float]:
    """Returns {language of the texts: share of its texts whose label is right}."""
    found = defaultdict(list)
    for text, label in zip(texts, labels, strict=True):
        found[text.gold].append(right(text.gold, label))
    return {gold: mean(said) for gold, said in sorted(found.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--udhr", type=Path)
    parser.add_argument("--model", action="append", default=[], metavar="FILE")
    parser.add_argument("--peers", metavar="PYTHON")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    one, ten = sentences(args.sentences)
    texts = {"sentences": one, "documents": ten} | ({"UDHR": udhr(args.udhr)} if args.udhr else {})
    models = [str(path) for path in (default_lid176(), *map(Path, args.model)) if path is not None]
    asked = {Path(m).name: ask(m, sys.executable, texts) for m in models}
    asked |= {name: ask(name, args.peers, texts) for name in PEERS if args.peers}
    said = {name: found for name, found in asked.items() if found is not None}
    shares = {name: {key: by_language(texts[key], found["sets"][key]["labels"]) for key in texts}
              for name, found in said.items()}
    common = {key: [gold for gold in next(iter(shares.values()))[key] if all(s[key][gold] for s in shares.values())]
              for key in texts}
    for key in texts:
        size = sum(len(t.text.encode()) for t in texts[key])
        print(f"\n{key}: {len(texts[key]):,} texts of {size / len(texts[key]):,.0f} bytes, "
              f"{len({t.gold for t in texts[key]})} languages, {len(common[key])} common\n")
        print("| identifier | micro | macro | languages above 0.9 | macro, common | MB/s | peak MB |")
        print("|---" * 7 + "|")
        for name, found in said.items():
            share, result = shares[name][key], found["sets"][key]
            micro = mean(right(t.gold, label) for t, label in zip(texts[key], result["labels"]))
            print(f"| {name} | {micro:.3f} | {mean(share.values()):.3f} | {sum(s > 0.9 for s in share.values())} | "
                  f"{mean(share[g] for g in common[key]):.3f} | {size / 1e6 / result['cpu']:.1f} | {found['mb']:.0f} |")
        for name, found in said.items():
            if found["labels"] is not None:
                unknown(name, texts[key], found["labels"], found["sets"][key])
    if args.table:
        table(texts, shares)


def unknown(name: str, texts: list[Text], labels: list[str], result: dict[str, Any]) -> None:
    """Print how many texts in languages that a model does not know would pass the step `language`, because the model
    gives another language a high score. For comparison, print how many of the texts whose language it names rightly
    would pass."""
    known = {found.language for found in map(tag, labels) if found is not None}
    strange = [score for t, score in zip(texts, result["scores"]) if tag(t.gold).language not in known]
    own = [score for t, score, label in zip(texts, result["scores"], result["labels"]) if right(t.gold, label)]
    if strange:
        print(f"\n{name}: of {len(strange):,} texts in languages it does not know "
              f"{mean(s > DEFAULT for s in strange):.1%} pass `min: {DEFAULT}`; of those it names rightly "
              f"{mean(s > DEFAULT for s in own):.1%}")


def table(texts: dict[str, list[Text]], shares: dict[str, dict[str, dict[str, float]]]) -> None:
    for key in texts:
        print(f"\n{key}, by language\n\n| | {' | '.join(shares)} |\n|---|{'---|' * len(shares)}")
        for gold in next(iter(shares.values()))[key]:
            print(f"| {gold} | {' | '.join(f'{share[key][gold]:.2f}' for share in shares.values())} |")


if __name__ == "__main__":
    main()
