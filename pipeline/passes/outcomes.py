"""Predicts what would become of a document of a finished run under other thresholds, or if a step were left out. The
prediction uses the stored signals of the document (numbers that the steps computed).

The stages (the code of the steps) derive their verdicts from the signals (`pipeline.passes.verdicts`). This module
decides which verdict counts. It never guesses: if the verdict of a step cannot be known, the outcome is `unknown`, with
the reason. REASONS lists all reasons. These are the main ones:

* A step dropped the document and would now let it pass. The later steps of the same pass have not seen it, so their
  signals are missing, unless the run had `signals: all`. The steps of later passes have not seen it in any case.
* The later steps would see another text or language than in the run. This is so if a step that edits the text or sets
  the language is left out. It is also so if an editing step dropped the document and would now edit it.
* A barrier (a step over all documents at once, such as deduplication) would see or remove other documents. This is so
  if the barrier is changed, or if steps before and after it are changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.passes.verdicts import overwritten, stored_verdicts, with_thresholds
from stages.barrier import Barrier
from stages.document import Document
from stages.stage import Stage

#: why an outcome is unknown, and what one can do
REASONS = {
    "signals": "later steps have not seen this document; a run with `signals: all` computes what they need",
    "pass": "the next pass has not seen this document, and `signals: all` reaches no further than a pass; run the "
            "recipe with the change",
    "edit": "a step would edit the text in another way, and later steps would see another text; run the recipe with "
            "the change",
    "barrier": "a step over all documents at once would see other documents; run the recipe with the change",
    "verdict": "the step does not decide by stored signals alone; run the recipe with the change",
    "overwritten": "a later step may have overwritten a signal that the verdict needs; run the recipe with the change",
    "own": "the step is not one of Tokenmill's, or its files are not on this machine, so it is not loaded; run the "
           "recipe with the change",
}


class Outcome(NamedTuple):
    """What would become of a document.

    * `side`: kept, dropped or unknown
    * `stage`: the step that drops the document, or the first step whose verdict is unknown
    * `reason`: why the step drops the document, or for an unknown outcome a key of REASONS
    """

    side: str
    stage: str = ""
    reason: str = ""


KEPT = Outcome("kept")


@dataclass(frozen=True)
class Link:
    """A step of a dataset, with its stage (the code of the step).

    * `number`: its place in the recipe's list of steps
    * `part`: the number of the pass that runs it
    * `foreign`: the step is a user's own
    * `opaque`: its code is not loaded, and `stage` is a blank Stage
    """

    name: str
    number: int
    part: int
    stage: Stage
    foreign: bool = False
    opaque: bool = False

    @property
    def is_barrier(self) -> bool:
        return isinstance(self.stage, Barrier)

    def lets_pass(self) -> bool:
        """Whether the step keeps every document, whatever the document's signals are (numbers stored beside it)."""
        stage = self.stage
        return (not self.foreign and not stage.drops and type(stage).verdict is not Stage.verdict
                and stored_verdicts(Document(""), stage) == (None,))


class ChangedSteps:
    """The steps of a dataset with changed thresholds or left-out steps, for predicting the outcome of documents.
    `changes` maps the place of a step to its new thresholds, or to None to leave the step out. `until_drop` is false if
    the run had `signals: all`, so that steps also computed signals of dropped documents.

    Documents are followed up to `end`, the place of the first barrier (such as deduplication) after the first change.
    If there is none, `end` is the number of steps. A document that reaches `end` counts as kept. If the barrier or a
    step after it is changed, `all_unknown` is true, and nothing is known about documents that reach the barrier.
    """

    def __init__(self, links: Sequence[Link], changes: Mapping[int, Mapping[str, Any] | None],
                 until_drop: bool) -> None:
        self.links, self.until_drop = links, until_drop
        self.now: dict[int, Stage | None] = {
            place: None if new is None else with_thresholds(links[place].stage, new) for place, new in changes.items()}
        self.first = min(self.now, default=len(links))
        self.end = next((i for i in range(self.first, len(links)) if links[i].is_barrier), len(links))
        self.all_unknown = any(place >= self.end for place in self.now)
        self._pass_all = [link.lets_pass() for link in links]
        self._spoiled = [overwritten(links, place) for place in range(len(links))]
        #: place of the step that dropped a document → place of the last step that the document went through
        self._last = [place if until_drop else max(i for i, other in enumerate(links) if other.part == link.part)
                      for place, link in enumerate(links)] + [len(links)]

    def other_texts(self) -> list[str]:
        """Return the names of the left-out steps that edit texts. Without these steps, kept documents may have other
        texts."""
        return [self.links[place].name for place, new in sorted(self.now.items())
                if new is None and self.links[place].stage.edits]

    def barrier(self) -> str:
        """Return the name of the barrier (such as deduplication) up to which documents are followed. It is "" if they
        are followed to the end of the dataset."""
        return self.links[self.end].name if self.end < len(self.links) else ""

    def signals(self) -> set[str]:
        """Return the names of the signals (numbers stored beside a document) on which outcomes may depend."""
        places = self.now if self.until_drop else range(self.first, self.end)
        return {name for place in places if place < self.end for stage in (self.links[place].stage, self.now.get(place))
                if stage is not None for name in (*stage.signals, *stage.reads())} - {"language"}

    def before(self, end: int, reason: str) -> Outcome:
        """Return what became of a document in the run, seen from the place `self.end`: a document that was dropped
        there or later counts as kept. The step at place `end` dropped it for `reason`; `end` is the number of steps if
        no step dropped it."""
        return KEPT if end >= self.end else Outcome("dropped", self.links[end].name, reason)

    def outcome(self, doc: Any, end: int, reason: str) -> Outcome:
        """Return what would become of a document with the changed steps. In the run, the step at place `end` dropped it
        for `reason`; `end` is the number of steps if no step dropped it. `doc` has the document's signals, language and
        source."""
        last = self._last[end]
        if end >= self.end and self.all_unknown:
            return Outcome("unknown", self.barrier(), "barrier")
        end, walk = min(end, self.end), _Walk()
        if end < self.first:
            return self.before(end, reason)
        for place in range(self.first, min(end + 1, self.end)):
            if (result := self._again(walk, doc, place, end, reason, last)) is not None:
                return result
        for place in range(end + 1, self.end):
            if (result := self._behind(walk, doc, place, end, last)) is not None:
                return result
        return KEPT

    def _again(self, walk: _Walk, doc: Any, place: int, end: int, reason: str, last: int) -> Outcome | None:
        """Return what would become of a document at the step `place`, or None if the step would let it pass. The
        document went through this step in the run.

        The step at `end` dropped it for `reason`; `end` is greater than `place` if that was later or never. Signals
        were computed up to the step at `last`. The step may change `walk`, the document's state.
        """
        link = self.links[place]
        if walk.edited and not self._pass_all[place]:
            return Outcome("unknown", link.name, "edit")
        if walk.left_out and link.foreign:
            return Outcome("unknown", link.name, "own")
        unchanged = Outcome("dropped", link.name, reason) if place == end else None
        if place not in self.now:
            return unchanged
        new = self.now[place]
        if new is None:
            walk.leave_out(link.stage)
            return None
        spoiled = self._spoiled[place]
        if spoiled is not None and spoiled <= last:
            return Outcome("unknown", link.name, "overwritten")
        verdicts = stored_verdicts(doc, link.stage, new)
        if verdicts is None:
            return Outcome("unknown", link.name, "verdict")
        before, after = verdicts
        recorded = reason if place == end else None
        if before == after and not (link.foreign and before != recorded):
            return unchanged
        if before != recorded:
            return Outcome("unknown", link.name, "verdict")
        if after is not None:
            return Outcome("dropped", link.name, after)
        walk.edited = walk.edited or link.stage.edits        # it dropped the document instead of editing it
        return None

    def _behind(self, walk: _Walk, doc: Any, place: int, end: int, last: int) -> Outcome | None:
        """Return what would become of a document at the step `place`, or None if the step would let it pass. In the
        run, an earlier step, at `end`, dropped the document; with the changed steps, it lets the document pass.

        Signals were computed up to the step at `last`. The step may change `walk`, the document's state.
        """
        link, new = self.links[place], self.now.get(place, self.links[place].stage)
        if new is None:
            walk.leave_out(link.stage)
            return None
        if self._pass_all[place] and place not in self.now:
            return None
        why = self._unseen(walk, place, end, last)
        if not why:
            missing = any(name not in doc.signals for name in link.stage.reads() if name != "language")
            if missing or (link.stage.signals and not any(name in doc.signals for name in link.stage.signals)):
                why = "signals"
        verdicts = None if why else stored_verdicts(doc, link.stage, new)
        if verdicts is None:
            return Outcome("unknown", link.name, why or "signals")
        before, after = verdicts
        if after is not None:
            return Outcome("dropped", link.name, after)
        walk.edited = walk.edited or (before is not None and link.stage.edits)
        return None

    def _unseen(self, walk: _Walk, place: int, end: int, last: int) -> str:
        """Return why the stored signals of a document cannot tell the verdict of the step `place`, as a key of REASONS;
        "" if they may tell it. In the run, an earlier step, at `end`, dropped the document. Signals were computed up to
        the step at `last`. `walk` is the document's state."""
        link, spoiled = self.links[place], self._spoiled[place]
        if link.foreign:
            return "own"
        if link.part != self.links[end].part:
            return "pass"
        if self.until_drop or link.stage.extracts:          # no extractor gives a verdict on stored signals
            return "signals"
        if walk.edited:
            return "edit"
        if spoiled is not None and spoiled <= last:
            return "overwritten"
        return "" if link.stage.verdict_is_whole else "verdict"


@dataclass
class _Walk:
    """What is known about one document while its outcome is computed step by step. `edited`: the steps that follow
    would see another text or language than in the run. `left_out`: one of the steps so far is left out."""

    edited: bool = False
    left_out: bool = False

    def leave_out(self, stage: Stage) -> None:
        self.left_out, self.edited = True, self.edited or stage.edits or stage.sets_language
