"""Measure CPU time and quality of the `html` stage in several modes. A mode is an engine with settings (MODES).

    python benchmarks/html_engines.py --warc crawl.warc.gz --gold DIR [--every 1] [--plain]

Quality is the mean word F1 (bags of lower-case words, as WCXB scores) against the main text in DIR. DIR holds a JSON
file (.gz) for each page, with `url` and `ground_truth.main_content`. The page itself is in the WARC under this URL. If
the JSON file is in a folder `gold`, the page may instead be the file of the same name in the folder `html` beside it.

CPU time is user + system of this process, for decoding and extraction. The modes take turns page by page, so that other
load on the machine slows all of them alike. `--plain` adds the unchanged trafilatura in a process of its own, called as
its documentation says, and counts the pages whose text differs. The model of `mill` was trained on these pages, so its
quality is measured by html_extraction.py.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from stages.document import Document
from stages.extract.html.step import Html
from stages.read.reader import Slice
from stages.read.warc import Warc

MODES: dict[str, dict[str, Any]] = {
    "mill (default)": {}, "mill markdown": {"format": "markdown"}, "mill, no meta": {"metadata": False},
    **{f"trafilatura{name}": {"engine": "trafilatura", **config} for name, config in {
        "": {}, " fast": {"fast": True}, " precision": {"favor": "precision"},
        " precision fast": {"favor": "precision", "fast": True}, " recall": {"favor": "recall"},
        " markdown": {"format": "markdown"}, ", no meta": {"metadata": False}}.items()},
    "resiliparse": {"engine": "resiliparse"}, "resiliparse markdown": {"engine": "resiliparse", "format": "markdown"},
    "resiliparse, no meta": {"engine": "resiliparse", "metadata": False},
    "justext": {"engine": "justext"}, "readability": {"engine": "readability"},
}
WORD = re.compile(r"\w+")


def load(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def pages(warc: Path | None, gold: Path | None) -> Iterator[tuple[bytes, str, str | None]]:
    """Yields (bytes, declared charset, gold text) of every page in the WARC, and of every page file in the gold
    folder."""
    truths: dict[str, str] = {}
    for file in sorted(gold.rglob("*.json*")) if gold else ():
        told = json.loads(load(file))
        text = told["ground_truth"]["main_content"]
        page = next(iter((file.parent.parent / "html").glob(f"{file.name.split('.')[0]}.html*")), None)
        if page is not None and file.parent.name == "gold":
            yield load(page), "", text
        else:
            truths[told["url"]] = text
    for item in Warc().read(str(warc), Slice("web", warc.name)) if warc else ():
        if isinstance(item, Document) and item.raw is not None:
            yield item.raw, item.charset, truths.get(item.url)


def word_f1(found: str, gold: str) -> float:
    a, b = (Counter(WORD.findall(t.lower())) for t in (found, gold))
    common = (a & b).total()
    return 2 * common / (a.total() + b.total()) if common else 0.0


def plain(arguments: list[str]) -> None:
    """Run the same pages through an unmodified `trafilatura.extract`. Prints a line for each page: CPU milliseconds,
    and a digest of the text."""
    import logging

    from trafilatura import extract

    from stages.text.encoding import decode

    logging.disable(logging.CRITICAL)
    args = parse(arguments)
    for n, (raw, charset, _) in enumerate(pages(args.warc, args.gold)):
        if n % args.every:
            continue
        began = time.process_time()
        text = extract(decode(raw, charset)[0], include_comments=False) or ""
        print(json.dumps([(time.process_time() - began) * 1e3, hashlib.sha256(text.strip().encode()).hexdigest()]))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warc", type=Path, help="WARC file of pages")
    parser.add_argument("--gold", type=Path, help="folder of gold texts")
    parser.add_argument("--every", type=int, default=1, help="take every n-th page")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--plain", action="store_true", help="compare with trafilatura as it is")
    return parser.parse_args(arguments)


def main() -> None:
    if sys.argv[1:2] == ["plain"]:
        return plain(sys.argv[2:])
    args = parse(sys.argv[1:])
    stages = {name: Html(**MODES[name]) for name in args.modes}
    for stage in stages.values():
        stage.setup()
        stage.warm()
    cpu: dict[str, list[float]] = defaultdict(list)
    scores: dict[str, list[float]] = defaultdict(list)
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    digests: list[str] = []
    for n, (raw, charset, truth) in enumerate(pages(args.warc, args.gold)):
        if n % args.every:
            continue
        for name, stage in stages.items():
            doc = Document("", raw=raw, mime="text/html", charset=charset)
            began = time.process_time()
            reason = stage.process(doc)
            cpu[name].append((time.process_time() - began) * 1e3)
            outcomes[name][reason or "text"] += 1
            if truth:
                scores[name].append(word_f1(doc.text, truth))
            if name == "trafilatura":
                digests.append(hashlib.sha256(doc.text.encode()).hexdigest())
    seen = sum(outcomes[args.modes[0]].values())
    print(f"{'mode':28} {'ms/page':>8} {'median':>7} {'p99':>7} {'word F1':>8}  outcomes of {seen} pages")
    for name, times in cpu.items():
        ordered = sorted(times)
        f1 = f"{mean(scores[name]):8.4f}" if scores[name] else f"{'':8}"
        median, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
        print(f"{name:28} {mean(times):8.2f} {median:7.2f} {p99:7.1f} {f1}  {dict(outcomes[name].most_common())}")
    if args.plain and "trafilatura" in args.modes:
        ran = subprocess.run([sys.executable, __file__, "plain", *sys.argv[1:]], capture_output=True, text=True,
                             check=True)
        rows = [json.loads(line) for line in ran.stdout.splitlines()]
        print(f"{'trafilatura.extract':28} {mean(r[0] for r in rows):8.2f}; texts that differ from ours: "
              f"{sum(a != b for (_, a), b in zip(rows, digests))} of {len(rows)}")


if __name__ == "__main__":
    main()
