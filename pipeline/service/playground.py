"""Answers which documents a dataset of a finished run would have if a threshold had another value or a filter were left
out.

No document is processed again. The run has stored signals, which are numbers computed for each document. The stages
(the code of the steps) judge these signals anew (`pipeline.passes.outcomes`). A fixed random sample is judged first,
which gives counts with intervals, and then all documents. `pipeline.service.signal_table` holds the signals in columns.
While a user drags one threshold, the page reads counts from the table that `pipeline.service.cube` makes.

Documents are followed only up to the first barrier (a step over all documents at once, such as deduplication) after the
first changed step. A document that reaches this barrier counts as kept, and the answer names the barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
from pydantic import ValidationError

from pipeline.passes.columnwise import for_all
from pipeline.passes.outcomes import ChangedSteps, Outcome
from pipeline.service.examples import examples
from pipeline.service.finished import PlaygroundError, check_thresholds, files_of, links_of, run_documents
from pipeline.service.replayed import OwnThreshold, Replayed, UnderChanges, summary
from pipeline.service.signal_table import DocumentTable
from pipeline.service.token_counts import token_counts
from pipeline.store.fs import Store
from pipeline.store.log import Log
from stages.cut import cut_name
from stages.stage import StageConfig, role_of

#: about how many documents the sample has, and how many a table in memory may have. Questions about a bigger dataset
#: are answered from the sample alone
SAMPLE, MOST = 20_000, 2_000_000
#: largest number that a threshold may be: signals are float64, which ends at about 1.8e308
LARGEST = 1e300


@dataclass(frozen=True)
class Changes:
    """Changes to the steps of a dataset that a user tries. `thresholds` maps the number of a step in the recipe to
    {decision key: new value}. A decision key is a setting that affects only which documents are kept. `off` holds the
    numbers of steps that are left out."""

    thresholds: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    off: frozenset[int] = frozenset()


class Playground:
    """Judges the documents of one dataset of a finished run under other thresholds. Its sample has about `sample`
    documents. If the dataset has more than `most` documents, only the sample is in memory."""

    def __init__(self, store: Store, run: str, dataset: str, sample: int = SAMPLE, most: int = MOST) -> None:
        self.store, self.run, self.dataset = store, run, dataset
        #: what `pipeline.service.drawing` has drawn from these documents
        self.drawn: dict[Any, Any] = {}
        self._wanted, self._most = sample, most
        plan, recipe = run_documents(store, run)
        self._plan = plan
        if dataset not in recipe.get("datasets", {}):
            raise PlaygroundError(f"the run '{run}' has no dataset '{dataset}'; it has "
                                  f"{', '.join(recipe.get('datasets', {}))}", "dataset")
        passes = [node for node in plan["nodes"] if node["kind"] == "pass" and node["dataset"] == dataset]
        #: the datasets of whose documents the run has made shards
        inputs = [shards["from"] for shards in recipe.get("shards", {}).values()]
        self.sharded = sorted({name for names in inputs for name in ([names] if isinstance(names, str) else names)})
        self.until_drop = recipe.get("run", {}).get("signals", "until-drop") == "until-drop"
        self.links = links_of(recipe["datasets"][dataset].get("steps") or [], passes)
        # documents that became too short by a barrier's cuts count as dropped by the barrier
        self._places = {(name(link.name), link.part): place for name in (cut_name, str)
                        for place, link in enumerate(self.links)}
        self.files = files_of(store, run, passes)
        check_thresholds(store, run, self.links, passes, self.files)
        self._lock = threading.RLock()

    # -- documents -----------------------------------------------------------------------------------------------
    @property
    def documents(self) -> int:
        return sum(file.info.rows for file in self.files)

    @property
    def share(self) -> float:
        return min(1.0, self._wanted / max(self.documents, 1))

    @property
    def in_memory(self) -> int:
        """The number of documents that are in memory: all documents of the dataset, or only a sample."""
        return self.documents if self.documents <= self._most else self._wanted

    @cached_property
    def table(self) -> DocumentTable:
        """The table of all documents of the dataset or, if they are too many for memory, of a random sample of them."""
        tokens = token_counts(self.store, self.run, self._plan, Log.read(self.store).get)
        return DocumentTable(self.store, self.files, self._place, len(self.links), self.share,
                             self.documents > self._most, tokens)

    def _sample(self) -> np.ndarray:
        with self._lock:
            return self.table.sample

    def _place(self, name: str, part: int) -> int:
        place = self._places.get((name, part))
        if place is None:
            raise PlaygroundError(f"documents were dropped by '{name}', which is no step of '{self.dataset}'", "run")
        return place

    # -- questions -----------------------------------------------------------------------------------------------
    def steps(self) -> list[dict[str, Any]]:
        """Return the steps of the dataset as JSON, each with the keys (settings) that a user may change. A key has its
        name, value, description and bounds, and:

        - `type`: the type of its value: number, integer, boolean, or json for anything else
        - `number`: whether the present value is a number
        - `optional`: whether null is valid
        - `drops`: on which side of the value documents are dropped: `less` (below it), `more` (above it), or "" if this
          is not known
        """
        steps: list[dict[str, Any]] = []
        for link in self.links:
            config = type(link.stage.config)
            values = link.stage.config.model_dump(mode="json")
            keys = [_key(config, name, values[name]) for name in config.model_fields
                    if role_of(config, name) == "decision"]
            steps.append({"step": link.number, "name": link.name, "own": link.opaque, "barrier": link.is_barrier,
                          "signals": list(link.stage.signals), "keys": keys,
                          "off": not (link.is_barrier or link.opaque)})
        return steps

    def moved(self, changes: Changes) -> ChangedSteps:
        """Apply changes to the steps of the dataset. Returns an object that holds the steps as the run had them and as
        they are after the changes. Raises PlaygroundError for a change that is not possible."""
        by_number = {link.number: place for place, link in enumerate(self.links)}
        wanted: dict[int, Mapping[str, Any] | None] = {}
        for number in sorted({*changes.thresholds, *changes.off}):
            if number not in by_number:
                raise PlaygroundError(f"'{self.dataset}' has steps 0 to {len(self.links) - 1}, not {number}", "step")
            place = by_number[number]
            self._check(place, number in changes.off, changes.thresholds.get(number, {}))
            wanted[place] = None if number in changes.off else changes.thresholds[number]
        try:
            moved = ChangedSteps(self.links, wanted, self.until_drop)
        except ValidationError as e:
            problem = e.errors()[0]
            raise PlaygroundError(str(problem["msg"]), ".".join(map(str, problem["loc"])) or "thresholds") from None
        except (ValueError, TypeError) as e:
            raise PlaygroundError(str(e), "thresholds") from None
        self._check_reads(moved)
        return moved

    def _check(self, place: int, off: bool, thresholds: Mapping[str, Any]) -> None:
        link = self.links[place]
        if sum(other.name == link.name and other.part == link.part for other in self.links) > 1:
            raise PlaygroundError(f"'{link.name}' stands twice in '{self.dataset}', and dropped documents do not say "
                                  f"which of the two it was; run the recipe with the change", "step")
        if off and (link.is_barrier or link.opaque):
            raise PlaygroundError(f"stored signals do not tell what '{self.dataset}' would be without '{link.name}'; "
                                  f"run the recipe with the change", "off")
        config = type(link.stage.config)
        for name, value in thresholds.items():
            number = _number(value)
            if number is not None and not abs(number) <= LARGEST:
                raise PlaygroundError(f"{name} cannot be as large as that; give a number up to {LARGEST:g}", name)
            if name not in config.model_fields or role_of(config, name) != "decision":
                keys = [n for n in config.model_fields if role_of(config, n) == "decision"]
                raise PlaygroundError(f"'{link.name}' has no threshold '{name}'; it has {', '.join(keys) or 'none'}",
                                      name)

    def _check_reads(self, moved: ChangedSteps) -> None:
        """Raise PlaygroundError when a step is left out although a later step needs its signals (numbers that it
        computes for each document). A recipe without the step would be refused for the same reason."""
        gone = [place for place, stage in moved.now.items() if stage is None]
        for place in gone:
            signals = set(self.links[place].stage.signals)
            for later in range(place + 1, len(self.links)):
                if later not in gone and (used := signals & self.links[later].stage.reads().keys()):
                    raise PlaygroundError(f"'{self.links[later].name}' needs the signal '{sorted(used)[0]}' of "
                                          f"'{self.links[place].name}'; leave out both", "off")

    def outcomes(self,
                 moved: ChangedSteps,
                 rows: np.ndarray | None = None,
                 own: OwnThreshold | None = None) -> Replayed:
        """Judge documents under the changed steps `moved`, and return their outcomes before and after the change.
        `rows` are the documents' rows in the table, in the order of the result (None: all documents). With `own`, each
        document is judged under a separate threshold; NotColumnwise is then raised if the step cannot judge many
        documents at once."""
        with self._lock:
            table = self.table
            table.need(moved.signals())
            every = np.arange(len(table)) if rows is None else rows
            labels: dict[Outcome, int] = {}
            before, after = np.zeros(len(every), np.int32), np.zeros(len(every), np.int32)
            for end, reason, places in table.alike(rows):
                before[places] = labels.setdefault(moved.before(end, reason), len(labels))
                judge = UnderChanges(moved, end, reason, own)
                results, codes = for_all(judge, table.columns, every[places], own is None)
                numbers = np.array([labels.setdefault(result, len(labels)) for result in results], np.int32)
                after[places] = numbers[codes]
            return Replayed(table, every, list(labels), before, after)

    def answer(self, changes: Changes, exact: bool) -> dict[str, Any]:
        """Return which documents the dataset would have after these changes, as JSON for a client. The counts come from
        the sample or, if `exact`, from all documents. Raises PlaygroundError for a change that is not possible, and if
        `exact` is set although not all documents are in memory."""
        if exact and self.documents > self._most:
            raise PlaygroundError(f"'{self.dataset}' has {self.documents:,} documents, and at most {self._most:,} are "
                                  f"counted exactly; take the sample, or run the recipe", "exact")
        moved = self.moved(changes)
        replayed = self.outcomes(moved, None if exact else self._sample())
        answer = summary(replayed, self.documents)
        answer["up_to"] = moved.barrier()
        answer["other_texts"] = moved.other_texts()
        answer["signals_all"] = not self.until_drop
        answer["examples"] = examples(self.store, moved, replayed, self.outcomes)
        return answer


def _number(value: Any) -> int | float | None:
    """Return the value of a setting as a number, or None if it is not a number. A recipe may give a number as text
    ("0.5")."""
    if isinstance(value, str):
        try:
            return float(value) if any(map(str.isdigit, value)) else None       # "nan" is the code of a language
        except ValueError:
            return None
    return value if isinstance(value, (int, float)) else None


def _dropped_side(extra: Any) -> str:
    """Return on which side of a threshold (a setting of a step) documents are dropped. The result is "less" if
    documents with a smaller signal (number computed for each document) are dropped, and "more" for a larger one.
    Returns "" if the setting does not say, or names both sides. `extra` is what the setting declares
    (`stages.stage.decision`)."""
    low, high = (bool(extra.get(name)) if isinstance(extra, dict) else False for name in ("at_least", "at_most"))
    return "" if low == high else "less" if low else "more"


def _key(config: type[StageConfig], name: str, value: Any) -> dict[str, Any]:
    """Return a setting of a step as `Playground.steps` lists it: its name, value, description, type and bounds, as
    JSON."""
    field = config.model_fields[name]
    types = {field.annotation} if get_origin(field.annotation) not in (Union, UnionType) else {
        *get_args(field.annotation)}
    kinds = types - {NoneType}
    kind = ("boolean" if kinds == {bool} else "integer" if kinds == {int} else "number" if kinds <= {int, float}
            else "json")
    least = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    most = next((m.le for m in field.metadata if hasattr(m, "le")), None)
    return {"key": name, "value": value, "help": field.description or "",
            "drops": _dropped_side(field.json_schema_extra),
            "number": isinstance(value, (int, float)) and not isinstance(value, bool), "type": kind,
            "optional": NoneType in types, "least": least, "most": most}
