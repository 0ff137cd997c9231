"""Measure CPU milliseconds of every step for a document of 5 kB, on one core: the source of the steps' `cost_ms`.

    python -m benchmarks.step_costs [NAME ...]

Documents are made up (English prose, seeded); an extractor gets them as the bytes it reads. The figure is the median of
five rounds over the same documents, after one round that warms caches. Steps that need a model or a list are not
measured; their names are printed. Ratios between steps carry over to other machines better than the figures themselves.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable

from stages.barrier import Barrier
from stages.catalog import STAGES, load, stage_class
from stages.document import Document
from stages.stage import Stage
from tests.corpus import _html, sentences

#: bytes of text per document; documents per round; rounds
SIZE, DOCUMENTS, ROUNDS = 5000, 100, 5


def texts() -> list[str]:
    rng, prose, found = random.Random(1), sentences(), []
    for _ in range(DOCUMENTS):
        text = ""
        while len(text) < SIZE:
            text += rng.choice(prose) + ("\n" if rng.random() < 0.2 else " ")
        found.append(text)
    return found


def documents(stage: Stage) -> list[Document]:
    raw = {"html": lambda text: _html("Title", text.split("\n")).encode(),
           "latex": lambda text: f"\\begin{{document}}\n{text}\n\\end{{document}}".encode()}
    made = []
    for i, text in enumerate(texts()):
        doc = Document(f"{i:032x}", text, source="s", url=f"https://site{i % 9}.example/{i}", language="en")
        if stage.name in raw:
            doc = Document(f"{i:032x}", "", source="s", raw=raw[stage.name](text), mime="text/html")
        made.append(doc)
    return made


def run(stage: Stage) -> float:
    """The CPU seconds of the step over fresh documents."""
    docs = documents(stage)
    started = time.process_time()
    if stage.batched:
        stage.process_batch(docs)
    else:
        for doc in docs:
            stage.process(doc)
    return time.process_time() - started


def cost(make: Callable[[], Stage]) -> float:
    stage = make()
    stage.setup()
    run(stage)
    return 1000 / DOCUMENTS * statistics.median(run(stage) for _ in range(ROUNDS))


def main(names: list[str]) -> None:
    for name in names or STAGES:
        try:
            stage = stage_class(name)()
            if isinstance(stage, Barrier):
                target, config = stage.prepare()
                stage = load(target)(config)
            print(f"{name:20} {cost(lambda stage=stage: stage):9.3f} ms", flush=True)
        except Exception as e:
            print(f"{name:20} left out: {str(e).splitlines()[0][:90] if str(e) else type(e).__name__}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
