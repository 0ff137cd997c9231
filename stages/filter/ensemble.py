"""The step `ensemble`: combines several quality scores of a document into one bucket (0 … 19) and one tier (low to
high)."""

from __future__ import annotations

import bisect
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from pydantic import field_validator

from stages.stage import Stage, StageConfig, signal

if TYPE_CHECKING:
    from stages.document import Document


class Ensemble(Stage):
    """Combine the buckets of several classifiers' scores into one (Nemotron-CC, arXiv 2412.02595, section 2.2).

    The step `buckets` must come first: it puts each score into one of twenty buckets by the percentiles of that score.
    By default (`combine: max`), this step takes the largest of a document's buckets. A document that any of the
    classifiers rates highly thus gets a high bucket, so more good documents are found than by a single classifier.

    The step writes two signals (numbers stored with the document). `ensemble_bucket` is the combined bucket, 0 … 19;
    with `combine: mean` it need not be a whole number. `ensemble_tier` is the number of lower bounds in the setting
    `tiers` that the bucket reaches. The default tiers are those of the paper: 0 low (buckets 0-6), 1 medium-low (7-11),
    2 medium (12-17), 3 medium-high (18), 4 high (19). `where: {signals: {ensemble_tier: [4]}}` selects the documents of
    one tier for a separate dataset. Scores that a document lacks are ignored; a document without any score gets no
    signal. The step drops nothing.
    """

    name = "ensemble"
    version = 2
    cost_ms = 0.005
    signals = ("ensemble_bucket", "ensemble_tier")

    class Config(StageConfig):
        of: tuple[str, ...] = signal(..., "signals to combine, e.g. [quality_score_bucket, edu_score_bucket]",
                                     min_length=1)
        combine: Literal["max", "min", "mean"] = signal("max", "how the signals are combined")
        tiers: tuple[float, ...] = signal((7, 12, 18, 19), "lowest bucket of every tier above the lowest, ascending")

        @field_validator("tiers")
        @classmethod
        def _ascending(cls, value: tuple[float, ...]) -> tuple[float, ...]:
            if any(low >= high for low, high in pairwise(value)):
                raise ValueError(f"must ascend, each is the lowest bucket of a tier; got {list(value)}")
            return value

    def reads(self) -> dict[str, str]:
        return dict.fromkeys(self.config.of, "of")

    def process(self, doc: Document) -> str | None:
        values = [value for name in self.config.of if (value := doc.signals.get(name)) is not None]
        for name in self.signals:                                  # an earlier dataset may have stored a value
            doc.signals.pop(name, None)
        if not values:
            return None
        how = self.config.combine
        bucket = max(values) if how == "max" else min(values) if how == "min" else sum(values) / len(values)
        doc.signals["ensemble_bucket"] = bucket
        doc.signals["ensemble_tier"] = bisect.bisect_right(self.config.tiers, bucket)
        return None
