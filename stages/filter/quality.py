"""A fastText classifier as quality filter, and how one is trained."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.filter.models import FastText, labels_of
from stages.stage import Stage, StageConfig, decision, resource, signal

if TYPE_CHECKING:
    from stages.document import Document


class Quality(Stage):
    """Score documents by a fastText classifier and keep the good ones (DCLM-baseline, arXiv 2406.11794, section 4.4).

    The score is the probability of `label`, rounded to 4 digits before it is compared and stored. DCLM keeps the best
    tenth, which its model reached at 0.018112: a threshold belongs to a model, so choose it by the report's histogram.
    """

    name = "quality"
    version = 1
    exact = False
    grid = 1e-4
    libraries = ("fasttext-numpy2",)
    signals = ("quality_score",)

    class Config(StageConfig):
        model: str = resource(..., "fastText classifier, e.g. one made by `tokenmill classifier train`")
        label: str = signal("hq", "the label whose probability is the score, without __label__")
        min: float = decision(0.5, "keep documents that score at least this")

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        size = Path(self.config.model).stat().st_size if Path(self.config.model).is_file() else 0
        self.memory_mb = 150 + 2 * (size >> 20)          # fastText reads a model into memory, buffers beside it

    def problems(self) -> dict[str, str]:
        known = labels_of(self.config.model)
        return {"label": f"{self.config.model} has no label '{self.config.label}'; it has {', '.join(sorted(known))}"} \
            if known is not None and self.config.label not in known else {}

    def setup(self) -> None:
        self._model = FastText(self.config.model)
        labels = self._model.labels()
        if self.config.label not in labels:
            raise ValueError(f"quality: label: {self.config.model} has no label '{self.config.label}'; "
                             f"it has {', '.join(sorted(labels))}")

    def process(self, doc: Document) -> str | None:
        score = dict(self._model.predict(doc.text, k=-1)).get(self.config.label, 0.0)
        doc.signals["quality_score"] = self.round(score)
        return self.verdict(doc)

    def verdict(self, doc: Document) -> str | None:
        return None if doc.signals["quality_score"] >= self.config.min else "quality"


def train_quality(positive_texts: Iterable[str], negative_texts: Iterable[str], out: str | os.PathLike[str], *,
                  seed: int = 0, dim: int = 32, epochs: int = 5, rate: float = 0.1, word_ngrams: int = 2,
                  buckets: int = 1 << 18, held_out: float = 0.1) -> dict[str, Any]:
    """Train a classifier with labels `hq` and `lq` and write it to `out` (about `buckets` * `dim` * 4 bytes).

    Deterministic: one thread, seeded, the order of lines drawn from `seed` alone, so equal texts in equal order give
    equal bytes on one kind of CPU. A share `held_out` of either side is not trained on but judged.

    Returns:
        {"positives", "negatives": texts trained on; "held_out": texts judged; "accuracy": share judged right;
        "threshold": the score that keeps half of the judged good texts}

    Raises:
        ValueError: fewer than two texts on a side.
        RuntimeError: fastText failed; holds its error output.
    """
    rng = random.Random(seed)
    train: list[tuple[str, str]] = []
    judge: list[tuple[str, str]] = []
    counts = {}
    for label, texts in (("hq", positive_texts), ("lq", negative_texts)):
        lines = [" ".join(text.split()) for text in texts]
        if len(lines) < 2:
            raise ValueError(f"a quality classifier needs two texts or more of each side, '{label}' has {len(lines)}")
        rng.shuffle(lines)
        cut = min(int(len(lines) * held_out), len(lines) - 1)
        judge.extend((label, line) for line in lines[:cut])
        train.extend((label, line) for line in lines[cut:])
        counts[label] = len(lines) - cut
    rng.shuffle(train)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".quality.") as scratch:
        path = Path(scratch) / "train.txt"
        with open(path, "w", encoding="utf-8") as f:
            f.writelines(f"__label__{label} {line}\n" for label, line in train)
        settings = {"dim": dim, "epoch": epochs, "lr": rate, "wordNgrams": word_ngrams, "bucket": buckets,
                    "minCount": 1, "thread": 1, "seed": seed, "verbose": 0}
        _fit(path, settings, Path(scratch) / "model.bin")
        os.replace(Path(scratch) / "model.bin", out)
    judged = FastText(out)
    scores = [(label, dict(judged.predict(line, k=-1)).get("hq", 0.0)) for label, line in judge]
    good = sorted(score for label, score in scores if label == "hq")
    right = sum((score >= 0.5) == (label == "hq") for label, score in scores)
    return {"positives": counts["hq"], "negatives": counts["lq"], "held_out": len(scores),
            "accuracy": round(right / len(scores), 4) if scores else None,
            "threshold": round(good[len(good) // 2], 4) if good else None}


def _fit(lines: Path, settings: dict[str, Any], model: Path) -> None:
    """Run fastText's training in a process of its own, whose allocator hands out zeroed memory.

    With one thread fastText initialises the first tenth of its matrix only (DenseMatrix::uniform fills 10 blocks, one
    a thread) and leaves the rest as the allocator gave it: recycled memory there makes training random, up to NaN.
    glibc fills what it allocates with the complement of MALLOC_PERTURB_.
    """
    environment = dict(os.environ, MALLOC_PERTURB_="255", MALLOC_MMAP_THRESHOLD_="131072")
    code = ("import json, sys, fasttext; "
            "fasttext.train_supervised(sys.argv[1], **json.loads(sys.argv[2])).save_model(sys.argv[3])")
    done = subprocess.run([sys.executable, "-c", code, str(lines), json.dumps(settings), str(model)], env=environment,
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"training a fastText classifier failed:\n{done.stderr[-2000:]}")
