"""Measure the MinHash signatures of `minhash`, and compare their CPU time with datatrove's in the same run.

    python benchmarks/dedup.py [--texts FILE.jsonl.gz] [--peer-texts N]

Each side computes the signatures of the same texts: words, shingles, minima, and ours also the band keys. The cost is a
slope: the CPU seconds for all texts, less those for the first half, divided by the bytes of the second half. Imports,
compiled kernels and the first use of each character thus do not count. Texts are shuffled by a fixed seed. datatrove
takes so long that it gets only the first N texts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.dedup.minhash import MinHashSignature
from stages.document import Document

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("TOKENMILL_TEST_DATA") or ROOT / ".cache" / "data")


def ours(**config: Any) -> Callable[[str], None]:
    stage = MinHashSignature(**config)
    return lambda text: (stage.process(Document("0" * 32, text, language="eng_Latn")), None)[1]


def datatrove(function: str) -> Callable[[str], None]:
    """Return datatrove's computation of a signature, without its files."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.hashing import HashConfig, create_hash_func
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    config = MinhashConfig(hash_config=HashConfig(hash_fc=function, precision=64))
    peer = MinhashDedupSignature.__new__(MinhashDedupSignature)        # no output folder
    peer.config, peer.num_hashes, peer._parameters = config, 14 * 8, None
    digest = create_hash_func(config.hash_config, bytes)
    peer._hash_func = lambda text: digest(text.encode())
    peer.word_tokenizer = load_word_tokenizer("eng")

    def sign(text: str) -> None:
        shingles = peer.get_shingles(text)
        if shingles.size:
            peer.get_signature(shingles)

    return sign


def seconds(sign: Callable[[str], None], texts: list[str]) -> float:
    begun = time.process_time()
    for text in texts:
        sign(text)
    return time.process_time() - begun


def slope(sign: Callable[[str], None], texts: list[str], repeats: int) -> tuple[float, float]:
    """Return (bytes per CPU second, CPU seconds per text) of the second half of the texts, as the median of some
    repeats."""
    half = texts[len(texts) // 2:]
    seconds(sign, texts)
    costs = [seconds(sign, texts) - seconds(sign, texts[:len(texts) // 2]) for _ in range(repeats)]
    cost = statistics.median(costs)
    return sum(len(text.encode()) for text in half) / cost, cost / len(half)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, default=DATA / "dedup" / "scancode_rules_dev.jsonl.gz",
                        help="gzipped JSON lines with a key `text`")
    parser.add_argument("--peer-texts", type=int, default=400, help="texts that datatrove gets")
    options = parser.parse_args()
    with gzip.open(options.texts, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    random.Random(0).shuffle(texts)
    print(f"{len(texts)} texts, {sum(len(t.encode()) for t in texts) / 1e6:.1f} MB")
    print(f"{'':28s}{'MB/CPU-s':>10s}{'us/text':>10s}{'of datatrove':>14s}")
    for function in ("sha1", "xxhash"):
        peer = slope(datatrove(function), texts[:options.peer_texts], 1)
        sides = {f"datatrove, {function}": peer,
                 f"dialect datatrove, {function}": slope(ours(dialect="datatrove", hash=function), texts, 3),
                 "dialect tokenmill": slope(ours(), texts, 5)}
        for name, (speed, each) in sides.items():
            print(f"{name:28s}{speed / 1e6:10.2f}{each * 1e6:10.1f}{speed / peer[0]:13.1f}x", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
