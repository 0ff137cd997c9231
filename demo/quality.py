"""Trains the demo's quality classifier, which tells encyclopaedia and documentation from web pages of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stages.document import Document
from stages.extract.html.step import Html
from stages.models.classifier import GOOD, REST
from stages.models.train_quality import train as train_classifier
from stages.read.files import TextFiles
from stages.read.reader import Reader, Slice
from stages.read.warc import Warc
from stages.read.wiki import Wiki

#: characters of a passage. Texts are cut into passages, so that one long article does not outweigh a hundred pages.
PASSAGE = 2_000
#: about the most passages of each of the two classes
MOST = 2_500


def train(data: Path) -> str:
    """Train `models/quality.bin` on the files fetched into `data`. Returns a one-line summary."""
    good = [*_texts(Wiki(), data / "wiki", "*.bz2"), *_texts(TextFiles(), data / "docs", "**/*.txt")]
    bad = list(_texts(Warc(), data / "web", "pages.warc.gz", Html(engine="resiliparse")))
    labelled = [(label, passage) for label, side in ((GOOD, good), (REST, bad)) for passage in _passages(side)]
    card = train_classifier(labelled, data / "models" / "quality.bin", seed=1, held_out=0.1)
    trained, right = card["examples"]["train"], card["measured"]["accuracy"]
    return f"{trained[GOOD]:,} good and {trained[REST]:,} other passages, {right:.0%} judged right"


def _texts(reader: Reader, folder: Path, pattern: str, extract: Html | None = None) -> Iterator[str]:
    """Yield the texts that `reader` reads from the files in `folder` that match `pattern`, in the order of their paths.
    With `extract`, texts are extracted from HTML. Records that are not documents, and pages without text, are
    skipped."""
    for path in sorted(folder.glob(pattern)):
        for doc in reader.read(str(path), Slice("demo", path.relative_to(folder).as_posix())):
            if isinstance(doc, Document) and (extract is None or extract.process(doc) is None):
                yield doc.text


def _passages(texts: list[str]) -> list[str]:
    cut = [text[i: i + PASSAGE] for text in texts for i in range(0, len(text), PASSAGE)]
    step = max(1, len(cut) // MOST)
    return [passage for passage in cut[::step] if passage.strip()]
