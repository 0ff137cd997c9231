"""The filter `where`: keeps documents by their language, their source, and signals (numbers that earlier steps
stored)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from stages.stage import Bound, Stage, StageConfig, decision
from stages.text.language_codes import meet, names
from stages.text.scripts import CODES

if TYPE_CHECKING:
    from stages.document import Document


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _condition(value: Any) -> Any:
    """Return a condition in its full form: the short forms `18` and `[18, 19]` become {"any": [18]} and {"any": [18,
    19]}. Other values are returned unchanged."""
    if isinstance(value, (list, tuple)):
        return {"any": value}
    return {"any": [value]} if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class Condition(StageConfig):
    """A condition on a signal (a number stored with a document): min <= value < max, or the value is one of `any`.
    Since `max` itself is excluded, no document meets both of two conditions where the `max` of one is the `min` of the
    other."""

    min: float | None = decision(None, "smallest value that is kept")
    max: float | None = decision(None, "only values below this are kept")
    any: tuple[float, ...] | None = decision(None, "values that are kept; short form: the list alone")

    @model_validator(mode="after")
    def _satisfiable(self) -> Condition:
        values = [value for value in (self.min, self.max, *(self.any or ())) if value is not None]
        if not values:
            raise ValueError("takes no document, or says nothing: give {min: …}, {max: …}, both, or a list of values")
        if not all(math.isfinite(value) for value in values):
            raise ValueError("must hold finite numbers; leave `min` or `max` out where there is no bound")
        if self.any is not None and (self.min, self.max) != (None, None):
            raise ValueError("give either a list of values or {min, max}, not both")
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError(f"takes no document: min {self.min:g} is not below max {self.max:g} (min <= value < max)")
        return self

    def holds(self, value: float) -> bool:
        """Return whether the value of a signal (a number stored with a document) meets the condition."""
        if self.any is not None:
            return value in self.any
        return (self.min is None or value >= self.min) and (self.max is None or value < self.max)

    def disjoint(self, other: Condition) -> bool:
        """Return whether no value can meet both this condition and the condition `other`."""
        for first, second in ((self, other), (other, self)):
            if first.any is not None:
                return not any(second.holds(value) for value in first.any)
        lows, highs = (self.min, other.min), (self.max, other.max)
        low = max((value for value in lows if value is not None), default=-math.inf)
        return low >= min((value for value in highs if value is not None), default=math.inf)


class Where(Stage):
    """Keep documents by their language, their source, and signals (numbers that earlier steps stored).

    ``where: {language: [de, fr], signals: {quality_score: {min: 0.3, max: 0.6}, ensemble_bucket: [18, 19]}}`` keeps
    documents that meet all conditions; a range means min <= value < max. The step reads only what earlier steps stored,
    in this dataset or in the datasets that it is made from, and never the text. The step is therefore a cheap way to
    put documents of one language or bucket into a separate dataset. A recipe is refused if it names a signal that no
    earlier step writes.

    The reason for a drop names the condition that was not met: `where_language`, `where_source` or `where_SIGNAL`.
    `where_no_SIGNAL` means that the document lacks the signal (for example, because its language has no model).
    """

    name = "where"
    version = 1
    cost_ms, drops, keeps = 0.005, True, "language"

    class Config(StageConfig):
        language: Annotated[tuple[str, ...] | None, BeforeValidator(_as_tuple)] = decision(
            None, "languages kept, by any of their names (fr, fra, fra_Latn)", min_length=1)
        source: Annotated[tuple[str, ...] | None, BeforeValidator(_as_tuple)] = decision(
            None, "sources kept", min_length=1)
        signals: dict[str, Annotated[Condition, BeforeValidator(_condition)]] = decision(
            {}, "signal → {min, max}, a value or a list of values")

        @model_validator(mode="before")
        @classmethod
        def _nested(cls, data: Any) -> Any:
            strange = sorted(set(data) - set(cls.model_fields)) if isinstance(data, dict) else []
            if strange:
                raise ValueError(f"unknown key '{strange[0]}'; conditions are `language:`, `source:`, and, for numbers "
                                 f"that earlier steps stored, `signals: {{{strange[0]}: {{min: …, max: …}}}}`")
            return data

        @model_validator(mode="after")
        def _something(self) -> Where.Config:
            if self.language is None and self.source is None and not self.signals:
                raise ValueError("without a condition it keeps everything; give `language:`, `source:` or `signals:`")
            return self

        def refuses(self, source: str, language: str | None, script: float | None) -> str:
            """Return which condition a document with this source and language does not meet: "source" or "language", or
            "" if it meets both. `script` is the ISO 15924 number of the document's script, if known."""
            if self.source is not None and source not in self.source:
                return "source"
            code = CODES.get(int(script or 0), "")
            if self.language is not None and not any(names(name, language or "", code) for name in self.language):
                return "language"
            return ""

    @classmethod
    def may_drop(cls, config: Mapping[str, Any]) -> bool:
        """Return False, although the step drops documents. Lint warns of work on documents that a later step may drop.
        The documents that this step drops usually go to another dataset, so the work of earlier steps on them is not
        wasted."""
        return False

    def reads(self) -> dict[str, str]:
        return {**dict.fromkeys(self.config.signals, "signals"), **({"language": "language"} if self.config.language
                                                                    else {})}

    def bounds(self) -> list[Bound]:
        sides: tuple[tuple[str, Literal["min", "below"]], ...] = (("min", "min"), ("max", "below"))
        return [Bound(name, f"signals.{name}.{field}", side, value) for name, condition in self.config.signals.items()
                for field, side in sides if (value := getattr(condition, field)) is not None]

    def process(self, doc: Document) -> str | None:
        return self.verdict(doc)

    def verdict(self, doc: Document) -> str | None:
        if refused := self.config.refuses(doc.source, doc.language, doc.signals.get("script")):
            return f"where_{refused}"
        for name, condition in self.config.signals.items():
            value = doc.signals.get(name)
            if value is None:
                return f"where_no_{name}"
            if not condition.holds(value):
                return f"where_{name}"
        return None

    @staticmethod
    def disjoint_configs(first: Config, second: Config) -> bool:
        """Return whether no document can meet the conditions of both `first` and `second`, the settings of two `where`
        steps."""
        if first.source is not None and second.source is not None and set(first.source).isdisjoint(second.source):
            return True
        if first.language is not None and second.language is not None and not any(
                meet(first_name, second_name) for first_name in first.language for second_name in second.language):
            return True
        shared = first.signals.keys() & second.signals.keys()
        return any(first.signals[name].disjoint(second.signals[name]) for name in shared)
