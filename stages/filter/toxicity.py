"""The filter `toxicity`: detects toxic or obscene text by a classifier, and drops whole documents or cuts single
sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.filter.quality import Quality
from stages.scoring.models import MOST_CHECKED_BYTES
from stages.stage import Bound, Stage, StageConfig, decision, resource
from stages.stage import signal as setting
from stages.text.marks import MOST, Span

if TYPE_CHECKING:
    from stages.document import Document

#: where a sentence ends: after its punctuation mark (and quotes) or at the end of a line. A run of marks is matched
#: only from its beginning, so that a long run is not searched again from each of its marks.
_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]]{0,3}\s+|[。！？]+[」』”’]{0,3}\s*|\n\s*")


class Toxicity(Stage):
    """Score documents by a fastText classifier for toxic text. Documents that score above `max` are dropped, and
    sentences that score above `max_sentence` are cut.

    The classifier is read and calibrated as in the step `quality`; but there, low scores are dropped, and here, high
    ones. Dolma (arXiv 2402.00159, section 5) scores sentences by two models trained on the Jigsaw comments (labels
    `toxic` and `nsfw`) and removes sentences above 0.4. To do the same, use this step once for each model, each time
    with `{model: …, max: null, max_sentence: 0.4}` and another `signal`. This step differs from Dolma in two points. A
    sentence ends at a punctuation mark followed by white space, at an East Asian mark or at the end of a line (Dolma
    uses a splitter for English). And the white space after a sentence is cut with the sentence.

    Signals (numbers stored with the document): `toxicity` is the score of the document before any cut. With
    `max_sentence`, `toxicity_cut` is the share of the document's characters in sentences to be cut; it is 1 if only
    white space would be left. If the setting `signal` gives another name, that name replaces `toxicity` in both.
    Reasons: `toxicity` (above `max`), and `toxicity_all` when nothing is left.

    Such classifiers flag dialects and texts about minorities more often than others (Dodge et al., arXiv 2104.08758):
    inspect the dropped samples before you trust a threshold.
    """

    name = "toxicity"
    version = 1
    cost_ms = 0.5
    drops = True
    edits = True
    exact = False
    grid = Quality.grid
    libraries = Quality.libraries
    signals: tuple[str, ...] = ("toxicity",)

    class Config(StageConfig):
        model: str = resource(..., "fastText classifier, e.g. Dolma's, or one of `tokenmill classifier train`")
        calibration: str | None = resource(None, "the file MODEL.calibration.json made with it")
        label: str = setting("toxic", "the label whose probability is the score, without __label__")
        signal: str = setting("toxicity", "name of the signal, where several models are asked",
                              pattern=r"^[a-z][a-z0-9_]{0,58}$")
        max: float | None = decision(0.5, "drop documents that score more than this; null: none")
        max_sentence: float | None = setting(None, "cut sentences that score more than this; null: none (Dolma: 0.4)")

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        config = self.config
        self._quality = Quality(model=config.model, calibration=config.calibration, label=config.label)
        self.memory_mb = self._quality.memory_mb
        self._cut = f"{config.signal}_cut"
        self.signals = (config.signal,) if config.max_sentence is None else (config.signal, self._cut)

    def problems(self) -> dict[str, str]:
        return self._quality.problems()

    def setup(self) -> None:
        self._quality.setup()

    @classmethod
    def may_drop(cls, config: Mapping[str, Any]) -> bool:
        return config.get("max") is not None

    def process(self, doc: Document) -> str | None:
        doc.signals[self.config.signal] = self._quality.score(doc.text)
        if self.config.max_sentence is None:
            return self.verdict(doc)
        pieces, limit = list(sentences(doc.text)), self.config.max_sentence
        kept = [piece for piece in pieces if not piece.strip() or self._quality.score(piece) <= limit]
        edited = "".join(kept).strip() if len(kept) < len(pieces) else doc.text
        cut = sum(map(len, pieces)) - sum(map(len, kept))
        doc.signals[self._cut] = cut / len(doc.text) if edited.strip() else float(cut > 0)
        reason = self.verdict(doc)
        if reason is None:
            doc.text = edited
        return reason

    def matches(self, doc: Document, reason: str) -> list[Span]:
        """Return the sentences above `max_sentence` if nothing was left of the document. Otherwise return the sentence
        that the model scores highest, if its score is above `max`. (fastText scores a text by the mean of its words'
        vectors, so a text above a threshold nearly always has a sentence above it.)

        Raises ValueError for a model of more than MOST_CHECKED_BYTES bytes: it would take much memory of the process
        that writes the report."""
        config = self.config
        if Path(config.model).stat().st_size > MOST_CHECKED_BYTES:
            raise ValueError(f"{config.model} has more than {MOST_CHECKED_BYTES >> 20} MB, too many to be loaded for a "
                             f"report")
        limit = {config.signal: config.max, f"{config.signal}_all": config.max_sentence}.get(reason)
        if limit is None:
            return []
        if not hasattr(self._quality, "_model"):
            self.setup()
        scored, begin = [], 0
        for sentence in sentences(doc.text):
            if sentence.strip():
                scored.append((self._quality.score(sentence), (begin, begin + len(sentence.rstrip()))))
            begin += len(sentence)
        above = [entry for entry in scored if entry[0] > limit]
        if reason == config.signal:
            above = [max(above, key=lambda entry: entry[0])] if above else []
        return [span for _, span in above[:MOST]]

    def bounds(self) -> list[Bound]:
        return [] if self.config.max is None else [Bound(self.config.signal, "max", "max", self.config.max)]

    def verdict(self, doc: Document) -> str | None:
        config, signals = self.config, doc.signals
        if config.max is not None and signals[config.signal] > config.max:
            return config.signal
        return f"{config.signal}_all" if signals.get(self._cut) == 1.0 else None


def sentences(text: str) -> Iterator[str]:
    """Split a text into sentences. Each item is a sentence with the white space after it, so the joined items are the
    text."""
    start = 0
    for end in _END.finditer(text):
        yield text[start:end.end()]
        start = end.end()
    if start < len(text):
        yield text[start:]
