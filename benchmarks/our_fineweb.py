"""Our side of fineweb_vs_datatrove.py: the stages driven by a plain loop in one process, without the engine.

    python our_fineweb.py run   WARC OUT MODEL ENGINE   the FineWeb chain from WARC to Parquet; ENGINE as in `html`, or
                                                        trafilatura-fast
    python our_fineweb.py texts WARC OUT.jsonl ENGINE   id, URL and extracted text of every page
    python our_fineweb.py judge TEXTS OUT.jsonl MODEL   each filter alone on every text, and the chain
    python our_fineweb.py filters TEXTS OUT.json MODEL NAME...   the cost of these filters as a chain (filters.py)
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

from pipeline.store.parts import PartWriter, document_schema
from stages.catalog import stage_class
from stages.document import BadRecord, Document
from stages.read.reader import Slice
from stages.read.warc import Warc
from stages.stage import Stage

NAMES = ("url", "language", "gopher_repetition", "gopher_quality", "c4", "fineweb", "pii")


def filters(model: str, names: tuple[str, ...] = NAMES) -> dict[str, Stage]:
    """The chain of pipeline/recipes/fineweb.yaml up to `clean`."""
    config = {"language": {"keep": ["en"], "min": 0.65, "model": model}}
    stages = {name: stage_class(name)(config.get(name, {})) for name in names}
    for stage in stages.values():
        stage.setup()
        stage.warm()
    return stages


def html(engine: str) -> Stage:
    config = {"trafilatura": {"engine": "trafilatura", "favor": "precision"},
              "trafilatura-fast": {"engine": "trafilatura", "fast": True}}.get(engine, {"engine": engine})
    stage = stage_class("html")(config)
    stage.setup()
    stage.warm()
    return stage


def run(warc: str, out: str, model: str, engine: str) -> None:
    # the URL step comes before extraction, as in datatrove: a listed URL costs no extraction
    stages = filters(model)
    chain = {"url": stages.pop("url"), "html": html(engine), **stages}
    signals = {name for stage in chain.values() for name in stage.signals}
    Path(out).mkdir(parents=True, exist_ok=True)
    kept = PartWriter(f"{out}/kept.parquet", document_schema(signals))
    dropped = PartWriter(f"{out}/dropped.parquet", document_schema(signals, dropped=True))
    seconds = dict.fromkeys(("read", *chain, "write"), 0.0)
    count = dict.fromkeys(("read", *chain), 0)
    clock = time.process_time
    last = clock()
    for doc in Warc().read(warc, Slice("web", Path(warc).name)):
        last, begun = clock(), last
        seconds["read"] += last - begun
        if isinstance(doc, BadRecord):
            continue
        count["read"] += 1
        reason = None
        for name, stage in chain.items():
            reason = stage.process(doc)
            last, begun = clock(), last
            seconds[name] += last - begun
            if reason is not None:
                break
            count[name] += 1
        doc.raw = None
        if reason is None:
            kept.write(doc)
        else:
            dropped.write(doc, reason=reason, stage=name)
        last, begun = clock(), last
        seconds["write"] += last - begun
    kept.close()
    dropped.close()
    seconds["write"] += clock() - last
    Path(out, "stages.json").write_text(json.dumps({"seconds": seconds, "kept": count}))


def texts(warc: str, out: str, engine: str) -> None:
    stage = html(engine)
    with open(out, "w", encoding="utf-8") as f:
        for doc in Warc().read(warc, Slice("web", Path(warc).name)):
            if not isinstance(doc, BadRecord) and stage.process(doc) is None:
                f.write(json.dumps({"id": doc.id, "url": doc.url, "text": doc.text}) + "\n")


def judge(path: str, out: str, model: str) -> None:
    stages = filters(model)
    pii = stages.pop("pii")
    with open(path, encoding="utf-8") as lines, open(out, "w", encoding="utf-8") as f:
        for line in lines:
            row = json.loads(line)
            alone: dict[str, object] = {}
            for name, stage in stages.items():
                doc = Document(row["id"], row["text"], url=row["url"])
                alone[name] = stage.process(doc)
                if name == "c4":
                    alone["c4_text"] = hashlib.sha256(doc.text.encode()).hexdigest()
                if name == "language":
                    alone["language_found"] = doc.language, doc.signals["language_score"]
            doc = Document(row["id"], row["text"])
            pii.process(doc)
            alone["pii_text"] = hashlib.sha256(doc.text.encode()).hexdigest()
            doc, chain = Document(row["id"], row["text"], url=row["url"]), None
            for name, stage in stages.items():
                reason = stage.process(doc)
                if reason is not None:
                    chain = f"{name}: {reason}"
                    break
            pii.process(doc)
            text = doc.text if chain is None else ""
            f.write(json.dumps({"id": row["id"], "alone": alone, "chain": chain,
                                "text": hashlib.sha256(text.encode()).hexdigest()}) + "\n")


def judged(path: str, out: str, model: str, *names: str) -> None:
    """Measure the named filters as a chain: each text passes through them until one drops it. All texts pass twice, at
    first with an empty cache of words. Writes the CPU seconds of each pass over all texts, the CPU seconds before, and
    the verdicts."""
    begun = time.process_time()
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    chain = list(filters(model, names).items())
    for _, stage in chain:
        stage.process(Document("", "It is said.", url="https://example.org/"))
    ready = time.process_time()
    seconds = []
    for _ in range(2):
        begun_pass, verdicts = time.process_time(), []
        for row in rows:
            doc = Document(row["id"], row["text"], url=row["url"])
            reason = None
            for name, stage in chain:
                reason = stage.process(doc)
                if reason is not None:
                    reason = f"{name}: {reason}"
                    break
            verdicts.append((reason, doc.text if reason is None else ""))
        seconds.append(time.process_time() - begun_pass)
    with open(out, "w") as f:
        json.dump({"setup": ready - begun, "seconds": seconds,
                   "verdicts": [(reason, hashlib.sha256(text.encode()).hexdigest()) for reason, text in verdicts]}, f)


if __name__ == "__main__":
    {"run": run, "texts": texts, "judge": judge, "filters": judged}[sys.argv[1]](*sys.argv[2:])
