"""Measure what it costs to compute perplexities as CCNet does: normalising, cutting into pieces, scoring. Also measures
KenLM, if it is installed.

    python benchmarks/perplexity.py MODEL DATA... [--arpa MODEL.arpa] [--limit 2000]

MODEL is a model of `tokenmill lm train`, DATA the texts that it accepts. Each part runs alone over all texts, three
times; the fastest counts, as MB of text per CPU-second of one process.

`peer` does what datatrove's `KenlmModel` does, with kenlm.Model of --arpa. It uses datatrove's normalisation if that is
the model's, makes pieces as strings, and lets KenLM score the joined line. The perplexities of both sides are compared.
`train` estimates a model of the first 200,000 pieces, once.

Needs sentencepiece. kenlm (an sdist that compiles, LGPL) is needed only for the peer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.cli.texts import texts
from stages.text.ccnet import TextModel, train_model


def best(work: Callable[[], Any], repeat: int = 3) -> tuple[float, Any]:
    """Call `work` several times. Returns (CPU seconds of the fastest call, result)."""
    took, out = [], None
    for _ in range(repeat):
        began = time.process_time()
        out = work()
        took.append(time.process_time() - began)
    return min(took), out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--arpa", type=Path)
    parser.add_argument("--limit", type=int, default=2000)
    options = parser.parse_args()
    began = time.process_time()
    model = TextModel(options.model)
    ready = time.process_time() - began
    found = [t for t in islice(texts(options.data), options.limit) if t]
    size = sum(len(t.encode()) for t in found) / 1e6
    model.perplexity(found[0])                                       # compiles kernels and makes tables
    print(f"{len(found):,} texts, {size:.1f} MB; a worker is ready after {ready:.2f} CPU-s")

    def say(name: str, seconds: float, note: str = "") -> None:
        print(f"{name:<42} {size / seconds:8.2f} MB/CPU-s  {note}")

    seconds, clean = best(lambda: [model.normalize(t) for t in found])
    say("normalise", seconds)
    seconds, _ = best(lambda: [model._pieces.encode(t) for t in clean])
    say("cut into pieces (SentencePiece)", seconds)
    ids = [model.ids(t) for t in found]
    tokens = sum(map(len, ids))
    seconds, _ = best(lambda: [model.lm.score(i) for i in ids])
    say("score", seconds, f"{tokens / seconds / 1e6:.2f} million pieces a second")
    seconds, ours = best(lambda: [model.perplexity(t) for t in found])
    say("perplexity, all of it", seconds)
    if options.arpa is not None:
        peer(options.arpa, model, found, ours, say)
    cut = list(islice(found, max(1, len(found) * 200_000 // tokens)))
    seconds, made = best(lambda: train_model(cut, model.lm.pieces, normalize=model.lm.normalize), 1)
    print(f"train: {made.tokens:,} pieces, {seconds / made.tokens * 1e6:.1f} µs each with cutting")


def peer(arpa: Path, model: TextModel, found: list[str], ours: list[float], say: Callable[..., None]) -> None:
    try:
        import kenlm
    except ImportError:
        print("kenlm is not installed: no peer")
        return
    theirs, normalize = kenlm.Model(str(arpa)), model.normalize
    if model.lm.normalize == "datatrove":
        from datatrove.utils.perplexity import KenlmModel

        normalize = KenlmModel("", "").normalize

    def perplexity(text: str) -> float:
        line = " ".join(model._pieces.encode(normalize(text), out_type=str))
        return round(10.0 ** (-theirs.score(line) / (len(line.split()) + 1)), 1)

    lines = [" ".join(model._pieces.encode(model.normalize(t), out_type=str)) for t in found]
    seconds, _ = best(lambda: [theirs.score(line) for line in lines])
    say("peer: score (KenLM, pieces as one line)", seconds)
    seconds, said = best(lambda: [perplexity(t) for t in found])
    say("peer: perplexity, all of it", seconds)
    equal = sum(a == b for a, b in zip(ours, said))
    off = max(abs(a - b) / b for a, b in zip(ours, said))
    print(f"perplexities equal to the digit: {equal:,} of {len(ours):,}; the others differ by {off:.1e} at most "
          f"(KenLM sums in float32)")


if __name__ == "__main__":
    main()
