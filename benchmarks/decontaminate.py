"""Measure the step `decontaminate`: megabytes of text per CPU second, for each dialect, with 13 evaluation sets.

    python benchmarks/decontaminate.py DATA

DATA is the folder of real data that tests use: the sets are in DATA/evals, the texts in DATA/text/books and
DATA/text/wikitext-2. Each text is searched once and five times. The rate is the slope between both, so that loading,
compiling and building the index do not count.
"""

from __future__ import annotations

import argparse
import gzip
import os
import tempfile
import time
from pathlib import Path

FIELDS = {
    "ai2_arc_ARC-Challenge": {"question": "question"}, "ai2_arc_ARC-Easy": {"question": "question"},
    "boolq_none": {"question": "question", "passage": "passage"},
    "gsm8k": {"question": "context", "answer": "chain_of_thought"},
    "hellaswag_none": {"question": "ctx", "answer": "endings"},
    "human_eval": {"question": "prompt", "answer": "canonical_solution"}, "lambada_openai": {"question": "context"},
    "openbookqa_main": {"question": "question_stem"}, "piqa_plain_text": {"question": "goal", "answer": "sol1"},
    "sciq_none": {"question": "question", "passage": "support"}, "svamp": {"question": "context"},
    "tau_commonsense_qa_none": {"question": "question"}, "winogrande_winogrande_xl": {"question": "sentence"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    from stages.decontaminate.step import Decontaminate
    from stages.document import Document

    texts = [gzip.decompress(path.read_bytes()).decode() for folder in ("books", "wikitext-2")
             for path in sorted((data / "text" / folder).glob("*.gz"))]
    texts = [text[at:at + 5000] for text in texts for at in range(0, len(text), 5000)]
    size = sum(len(text.encode()) for text in texts)
    sets = {name: str(data / "evals" / f"{name}_500.jsonl.gz") for name in FIELDS}
    print(f"{len(texts):,} documents of 5,000 characters, {size / 1e6:.1f} MB, {len(sets)} sets")
    for dialect in ("ngram", "idf"):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TOKENMILL_CACHE"] = cache
            began = time.process_time()
            stage = Decontaminate(sets=sets, fields=FIELDS, dialect=dialect)
            stage.setup()
            stage.process(Document("", texts[0]))
            built, taken = time.process_time() - began, []
            for times in (1, 5):
                began = time.process_time()
                found = [doc for _ in range(times) for text in texts
                         if (doc := Document("", text)) and stage.process(doc)]
                taken.append(time.process_time() - began)
            index = next(Path(cache).rglob("*.npy")).stat().st_size
        rate = 4 * size / (taken[1] - taken[0]) / 1e6
        print(f"{dialect:6} {rate:6.1f} MB a CPU second, {len(found) // 5} documents with hits; start {built:.1f} s, "
              f"index {index / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
