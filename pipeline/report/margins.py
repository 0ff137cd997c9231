"""Finds how close a dropped document was to being kept. The distance is the difference between the signal that decided
(a number stored beside the document) and its threshold, relative to the threshold.

No table says which signal a threshold belongs to, because such a copy of a stage's rules would become wrong when the
stage changes. This module finds out by trial, with the stage's method `verdict`, which judges stored signals under any
config. It moves a threshold to the value of a signal. With a threshold just beyond the value, the document must be
kept; with one just before it, the document must be dropped for the same reason. If so, this signal and this threshold
decided. Such a pair is a *rule*. It is learned from a few documents, and then measures whole batches without calling
the stage again.

The distance is unknown (NaN) if the verdict does not follow from one stored signal and one number of the recipe.
Examples are lists of languages, thresholds inside a stage's own table, ratios of two signals, and stages whose verdict
cannot be derived from stored signals. The distance is also unknown for stages that a recipe imports from its own code,
because a comparison never runs such code.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.passes.verdicts import stored_verdicts
from stages.barrier import Barrier
from stages.catalog import stage_class
from stages.cut import CutPassages, cut_name, cut_settings
from stages.document import Document
from stages.stage import Stage, StageConfig, role_of

log = logging.getLogger("tokenmill")

#: after this many documents of one (stage, reason, language) from which no rule could be learned, no more are tried
TRIES = 16
#: the columns of a dropped part that `Margins.distances` needs
COLUMNS = ("id", "source", "language", "signals", "meta", "reason", "stage")
#: the setting of a barrier that is the threshold for similarity, and the key of a removed document's similarity
SIMILAR, SIMILARITY = "verify", "similarity"

KeyPath = tuple[str, ...]
Key = tuple[str, str, str]                   # stage, reason, language


class ThresholdRule(NamedTuple):
    """A threshold of a stage, and the signal (a number stored beside a document) that is compared with it. `key` is the
    path of the threshold in the stage's config. If `below` is true, documents with a value below the threshold are
    dropped, otherwise those with a value above it."""

    key: KeyPath
    threshold: float
    signal: str
    below: bool

    def distances(self, values: np.ndarray) -> np.ndarray:
        """Return how far each value lies on the dropped side of the threshold, relative to the threshold (absolute if
        the threshold is 0). The result is NaN for null, and for values on the kept side."""
        beyond = self.threshold - values if self.below else values - self.threshold
        return np.where(beyond >= 0, beyond / (abs(self.threshold) or 1.0), np.nan)


class Margins:
    """Measures how close the dropped documents of a dataset were to being kept. `steps` are the steps of the dataset in
    the recipe: [{name: config}, …]."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self._stages: dict[str, list[Stage]] = {}
        for step in steps:
            for name, config in step.items() if isinstance(step, dict) else ():
                if ":" not in name:                      # the recipe's own code, which is not run
                    for stage in _loaded(name, config):
                        self._stages.setdefault(name, []).append(stage)
                        if isinstance(stage, Barrier) and stage.edits:
                            self._stages.setdefault(cut_name(name), []).append(
                                CutPassages(cut_settings(name, stage.config)))
        self._rules: dict[Key, list[ThresholdRule]] = {}
        self._tried: dict[Key, int] = {}

    def distances(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return the distance of every dropped document to the threshold that decided, as float64; NaN where it is
        unknown. `batch` has the columns COLUMNS."""
        out = np.full(batch.num_rows, np.nan)
        columns = [batch.column(name).to_pylist() for name in ("stage", "reason", "language")]
        groups: dict[Key, list[int]] = {}
        for row, key in enumerate(zip(*columns)):
            groups.setdefault(tuple(value or "" for value in key), []).append(row)  # type: ignore[arg-type]
        for key, rows in groups.items():
            stages = self._stages.get(key[0], [])
            if any(isinstance(stage, Barrier) for stage in stages):
                out[rows] = self._similarities(key[0], batch, rows)
            elif stages:
                out[rows] = self._measured(key, batch, rows)
        return out

    def decided(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the threshold that decided about a dropped document as {key, threshold, signal, value, distance}, or
        None if it is unknown. If several thresholds gave the document its reason, the document would be kept only if
        all of them moved. Therefore the one with the largest distance is returned."""
        key = (row["stage"] or "", row["reason"] or "", row["language"] or "")
        threshold, value = self._similarity(key[0], row["meta"])
        if threshold is not None and value is not None:
            return {"key": f"{key[0]}.{SIMILAR}", "threshold": threshold, "signal": SIMILARITY, "value": value,
                    "distance": float(ThresholdRule((), threshold, "", False).distances(np.array([value]))[0])}
        signals = row["signals"] or {}
        measured = [(float(rule.distances(np.array([signals[rule.signal]], float))[0]), rule)
                    for rule in self._rules.get(key, []) if signals.get(rule.signal) is not None]
        applicable = [(distance, rule) for distance, rule in measured if not math.isnan(distance)]
        if not applicable:
            return None
        distance, rule = max(applicable)
        return {"key": ".".join((key[0], *rule.key)), "threshold": rule.threshold, "signal": rule.signal,
                "value": signals[rule.signal], "distance": distance}

    # -- barriers ------------------------------------------------------------------------------------------------
    def _similarities(self, barrier: str, batch: pa.RecordBatch, rows: list[int]) -> np.ndarray:
        metas = batch.column("meta").take(pa.array(rows)).to_pylist()
        pairs = [self._similarity(barrier, meta) for meta in metas]
        return np.array([np.nan if threshold is None or value is None else
                         (value - threshold) / threshold if value >= threshold else np.nan
                         for threshold, value in pairs])

    def _similarity(self, barrier: str, meta: str | None) -> tuple[float | None, float | None]:
        """Return (threshold, similarity) of a document that a barrier (such as deduplication) removed. The threshold is
        None if the barrier has none, and the similarity is None if it was not recorded."""
        for stage in self._stages.get(barrier, []):
            threshold = getattr(stage.config, SIMILAR, None)
            if isinstance(stage, Barrier) and threshold:
                verdict = json.loads(meta or "{}").get(barrier)
                value = verdict.get(SIMILARITY) if isinstance(verdict, dict) else None
                return threshold, value if isinstance(value, (int, float)) else None
        return None, None

    # -- stages --------------------------------------------------------------------------------------------------
    def _measured(self, key: Key, batch: pa.RecordBatch, rows: list[int]) -> np.ndarray:
        out = self._by_rules(key, batch, rows)
        for place in np.flatnonzero(np.isnan(out)).tolist():
            if self._tried.get(key, 0) >= TRIES:
                break
            if not math.isnan(out[place]):               # a rule learned from an earlier row measures this one
                continue
            rules = [rule for rule in self._learn(key, batch.slice(rows[place], 1).to_pylist()[0])
                     if rule not in self._rules.get(key, [])]
            if rules:
                self._rules.setdefault(key, []).extend(rules)
                out = self._by_rules(key, batch, rows)
            else:
                self._tried[key] = self._tried.get(key, 0) + 1
        return out

    def _by_rules(self, key: Key, batch: pa.RecordBatch, rows: list[int]) -> np.ndarray:
        out = np.full(len(rows), np.nan)
        signals = batch.column("signals")
        for rule in self._rules.get(key, []):
            if signals.type.get_field_index(rule.signal) >= 0:
                values = pc.struct_field(signals, rule.signal).take(pa.array(rows))
                out = np.fmax(out, rule.distances(values.to_numpy(zero_copy_only=False).astype(float)))
        return out

    def _learn(self, key: Key, row: Mapping[str, Any]) -> Iterator[ThresholdRule]:
        """Yield the rules (pairs of a threshold and a signal, a number per document) that made a stage drop the
        document in `row`. `key` is (stage, reason, language) of the document. The rules are found by trial
        (`_decides`)."""
        signals = {name: value for name, value in (row["signals"] or {}).items() if value is not None}
        document = Document(row["id"], source=row["source"] or "", language=key[2], signals=signals)
        for stage in self._stages[key[0]]:
            if _verdict(stage, stage.config, document) != key[1]:
                continue
            names = [name for name in dict.fromkeys((*stage.signals, *stage.reads())) if name in signals]
            for path, threshold in _thresholds(stage.config):
                for name in names:
                    for below in (True, False):
                        rule = ThresholdRule(path, float(threshold), name, below)
                        if self._decides(stage, rule, document, key):
                            yield rule

    def _decides(self, stage: Stage, rule: ThresholdRule, document: Document, key: Key) -> bool:
        """Return whether `rule` (a threshold and a signal) is why a stage dropped the document for its reason,
        `key[1]`. Three trials must succeed:

        * With the threshold just before the value of the signal, the stage still drops the document for the reason.
        * With the threshold just beyond the value, the stage keeps the document, or drops it only for reasons that
          known rules explain (`_keeps`).
        * With the threshold just beyond the value, and the signal still further beyond, the stage drops the document
          for the reason again.
        """
        value = document.signals[rule.signal]
        if math.isnan(rule.distances(np.array([value]))[0]):
            return False
        before, after = _beside(value, rule)
        # not asked if the value equals the threshold: the number just before would then be beyond the threshold
        config = _with_number(stage.config, rule.key, before)
        if value != rule.threshold and _verdict(stage, config, document) != key[1]:
            return False
        config = _with_number(stage.config, rule.key, after)
        if not self._keeps(stage, config, document, key[2], rule.key):
            return False
        further = value - abs(value) - 1 if rule.below else value + abs(value) + 1
        moved = Document(document.id, source=document.source, language=document.language,
                         signals={**document.signals, rule.signal: further})
        return _verdict(stage, config, moved) == key[1]

    def _keeps(self, stage: Stage, config: StageConfig, document: Document, language: str, moved: KeyPath) -> bool:
        """Return whether a stage would keep a document under `config`, apart from thresholds that are already known to
        drop such documents. While the stage drops the document, the thresholds of the known rules for its reason are
        moved beyond the document's values. The threshold at the key path `moved` stays as it is. Returns False if the
        stage drops the document for a reason that no known rule explains."""
        given_way = {moved}
        while (reason := _verdict(stage, config, document)) is not None:
            rules = [rule for rule in self._rules.get((stage.name, reason, language), []) if rule.key not in given_way
                     and document.signals.get(rule.signal) is not None]
            if not rules:
                return False
            for rule in rules:
                given_way.add(rule.key)
                config = _with_number(config, rule.key, _beside(document.signals[rule.signal], rule)[1])
        return True


def _loaded(name: str, config: Any) -> Iterator[Stage]:
    """Yield the stage of a step of the recipe, without loading its models. Yields nothing if this installation does not
    know the step or refuses its config. This may happen because the run was made by another version or with other
    packages."""
    try:
        stage = stage_class(name)(dict(config or {}))
    except Exception as e:                    # a plug-in's stage may raise anything
        log.info("step %s cannot be set up here, so no distance to its thresholds is known: %s", name, e)
        return
    yield stage


def _verdict(stage: Stage, config: StageConfig, document: Document) -> str | None:
    """Return the verdict of a stage on a document under a config: the reason to drop it, or None to keep it. None is
    also returned when the stage cannot give a verdict from stored signals (numbers per document)."""
    judge = copy.copy(stage)
    judge.config = config
    verdicts = stored_verdicts(document, judge)
    return None if verdicts is None else verdicts[0]


def _beside(value: float, rule: ThresholdRule) -> tuple[float, float]:
    """Return the two floating-point numbers next to `value`: first the one towards the rule's threshold, then the one
    away from it. For a count, these are fractions. Whole numbers are not used, because the next one may be 0, and some
    stages take a threshold of 0 as "no limit"."""
    towards = math.inf if rule.below else -math.inf
    return math.nextafter(value, towards), math.nextafter(value, -towards)


def _thresholds(config: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, float]]:
    """Yield (key path, number) for each threshold in a config: the numbers in its `decision` fields, also those inside
    mappings and nested settings."""
    if isinstance(config, StageConfig):
        for name in type(config).model_fields:
            if path or role_of(type(config), name) == "decision":
                yield from _thresholds(getattr(config, name), (*path, name))
    elif isinstance(config, Mapping):
        for name, value in config.items():
            yield from _thresholds(value, (*path, str(name)))
    elif isinstance(config, (int, float)) and not isinstance(config, bool) and math.isfinite(config):
        yield path, config


def _with_number(config: Any, path: KeyPath, value: float) -> Any:
    """Return a copy of a config with another number at a key path. The number is not validated, so it may lie outside
    the bounds of the field."""
    if not path:
        return value
    if isinstance(config, StageConfig):
        return config.model_copy(update={path[0]: _with_number(getattr(config, path[0]), path[1:], value)})
    return {**config, path[0]: _with_number(config[path[0]], path[1:], value)}
