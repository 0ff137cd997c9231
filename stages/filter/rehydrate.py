"""The step `rehydrate`: says how often training is to read a document that had duplicates (FineWeb-2, arXiv
2506.20920)."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from stages.barrier import COUNT
from stages.stage import Stage, StageConfig, signal

if TYPE_CHECKING:
    from stages.document import Document

#: FineWeb-2's weights: smallest number of duplicates → how often the document is read
FINEWEB2 = {1: 1, 2: 2, 3: 3, 5: 5, 100: 8, 1000: 1}
_Weight = Annotated[int, Field(ge=0, le=1000)]


class Rehydrate(Stage):
    """Write how often training is to read a document, as the signal `rehydrate`. The number depends on how many
    duplicates the document stands for.

    Pages that were copied a few times are on average better than single ones, and those with thousands of copies worse.
    FineWeb-2 therefore repeats a document 2, 3, 5 or 8 times by the size of its cluster of duplicates. This step
    repeats no text. It only writes how often the document is to be read. In the recipe, `shards:` are split by this
    number into streams (`by: signal.rehydrate`), and the mixture reads each stream that often: `{by: signal.rehydrate,
    upsample: {'2': 2, '3': 3, '5': 5, '8': 8}}`.

    The number of duplicates, with the document itself, is the signal `dup_count`. The steps `exact` and `minhash` write
    it when a later step such as this one reads it. A document without `dup_count` gets no `rehydrate`.
    """

    name = "rehydrate"
    version = 1
    cost_ms = 0.005
    reads_text = False
    signals = ("rehydrate",)

    class Config(StageConfig):
        weights: Literal["fineweb2"] | dict[Annotated[int, Field(ge=1)], _Weight] = signal(
            "fineweb2", "smallest `dup_count` → how often such documents are read; the table begins at 1")

        @field_validator("weights")
        @classmethod
        def _whole(cls, weights: str | dict[int, int]) -> str | dict[int, int]:
            if isinstance(weights, dict) and 1 not in weights:
                raise ValueError("the table says nothing about documents without duplicates; add 1: 1")
            return weights

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        weights = FINEWEB2 if self.config.weights == "fineweb2" else self.config.weights
        self._from, self._weights = zip(*sorted(weights.items()))

    def reads(self) -> dict[str, str]:
        return {COUNT: "weights"}

    def process(self, doc: Document) -> str | None:
        doc.signals.pop("rehydrate", None)               # an earlier dataset may have stored a value
        count = doc.signals.get(COUNT)
        if count is not None and count >= 1:
            doc.signals["rehydrate"] = self._weights[bisect_right(self._from, count) - 1]
        return None
