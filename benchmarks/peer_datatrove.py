"""datatrove's side of fineweb_vs_datatrove.py; runs in datatrove's own environment and imports nothing of this project.

The settings make the results reproducible. Trafilatura runs without `deduplicate`, whose result depends on the
documents before, and with a timeout that no page reaches (the default is one second of wall time). Public suffixes are
those of tldextract's snapshot, and lid.176.ftz is read from a file.

    python peer_datatrove.py run   WARC OUT MODEL    the FineWeb chain by LocalPipelineExecutor, one worker
    python peer_datatrove.py texts WARC OUT.jsonl    id, URL and extracted text of every page
    python peer_datatrove.py judge TEXTS OUT.jsonl MODEL   each filter alone on every text, and the chain
    python peer_datatrove.py filters TEXTS OUT.json MODEL NAME...   the cost of these filters as a chain (filters.py)
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import datatrove.utils.lid
import trafilatura  # noqa: F401  datatrove imports it page by page and skips every page when that fails
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    LanguageFilter,
    URLFilter,
)
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import WarcReader
from datatrove.pipeline.writers.jsonl import JsonlWriter


def blocks(model: str) -> dict[str, Any]:
    """The filters of FineWeb (examples/fineweb.py), with English required as in the paper."""
    from tldextract import TLDExtract

    datatrove.utils.lid.cached_asset_path_or_download = lambda *args, **kw: model
    url = URLFilter()
    url.tldextractor = TLDExtract(suffix_list_urls=(), cache_dir=None)
    return {"url": url, "language": LanguageFilter(languages="en"), "gopher_repetition": GopherRepetitionFilter(),
            "gopher_quality": GopherQualityFilter(), "c4": C4QualityFilter(filter_no_terminal_punct=False),
            "fineweb": FineWebQualityFilter()}


def reader(warc: str) -> WarcReader:
    folder, _, name = warc.rpartition("/")
    return WarcReader(folder or ".", glob_pattern=name)


def run(warc: str, out: str, model: str) -> None:
    filters = blocks(model)
    chain = [reader(warc), filters.pop("url"), Trafilatura(favour_precision=True, timeout=600, deduplicate=False),
             *filters.values(), PIIFormatter(), JsonlWriter(f"{out}/clean")]
    LocalPipelineExecutor(pipeline=chain, tasks=1, workers=1, logging_dir=f"{out}/logs").run()


def texts(warc: str, out: str) -> None:
    extractor = Trafilatura(favour_precision=True, timeout=600, deduplicate=False)
    with open(out, "w", encoding="utf-8") as f:
        for doc in extractor.run(reader(warc).run()):
            f.write(json.dumps({"id": doc.id, "url": doc.metadata["url"], "text": doc.text}) + "\n")


def verdict(block: Any, doc: Document) -> str | None:
    try:
        result = block.filter(doc)
    except Exception as e:
        return f"error: {type(e).__name__}"
    kept, reason = result if isinstance(result, tuple) else (result, None)
    return None if kept else reason or "dropped"


def judge(path: str, out: str, model: str) -> None:
    filters = blocks(model)
    with open(path, encoding="utf-8") as lines, open(out, "w", encoding="utf-8") as f:
        for line in lines:
            row = json.loads(line)

            def fresh(row: dict[str, str] = row) -> Document:
                return Document(text=row["text"], id=row["id"], metadata={"url": row["url"]})

            alone: dict[str, Any] = {}
            for name, block in filters.items():
                doc = fresh()
                alone[name] = verdict(block, doc)
                if name == "c4":
                    alone["c4_text"] = hashlib.sha256(doc.text.encode()).hexdigest()
                if name == "language":
                    alone["language_found"] = doc.metadata["language"], doc.metadata["language_score"]
            alone["pii_text"] = hashlib.sha256(PIIFormatter().format(row["text"]).encode()).hexdigest()
            doc, chain = fresh(), None
            for name, block in filters.items():
                reason = verdict(block, doc)
                if reason is not None:
                    chain = f"{name}: {reason}"
                    break
            text = PIIFormatter().format(doc.text) if chain is None else ""
            f.write(json.dumps({"id": row["id"], "alone": alone, "chain": chain,
                                "text": hashlib.sha256(text.encode()).hexdigest()}) + "\n")


def filters(path: str, out: str, model: str, *names: str) -> None:
    """Measure the named filters as a chain: each text passes through them until one drops it. All texts pass twice.
    Writes the CPU seconds of each pass over all texts, the CPU seconds before, and the verdicts. The formatter, which
    replaces personal data, is created anew for each document, as in `judge`."""
    begun = time.process_time()
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    made = blocks(model)
    chain = [(name, made.get(name)) for name in names]
    for _, block in chain:                          # the first document loads models and lists
        if block is not None:
            verdict(block, Document(text="It is said.", id="", metadata={"url": "https://example.org/"}))
    ready = time.process_time()
    seconds = []
    for _ in range(2):
        begun_pass, verdicts = time.process_time(), []
        for row in rows:
            doc = Document(text=row["text"], id=row["id"], metadata={"url": row["url"]})
            reason = None
            for name, block in chain:
                if block is None:
                    doc.text = PIIFormatter().format(doc.text)
                elif (reason := verdict(block, doc)) is not None:
                    reason = f"{name}: {reason}"
                    break
            verdicts.append((reason, doc.text if reason is None else ""))
        seconds.append(time.process_time() - begun_pass)
    with open(out, "w") as f:
        json.dump({"setup": ready - begun, "seconds": seconds,
                   "verdicts": [(reason, hashlib.sha256(text.encode()).hexdigest()) for reason, text in verdicts]}, f)


if __name__ == "__main__":
    {"run": run, "texts": texts, "judge": judge, "filters": filters}[sys.argv[1]](*sys.argv[2:])
