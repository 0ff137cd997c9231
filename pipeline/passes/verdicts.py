"""Asks a stage for its verdict on stored signals under other thresholds.

Signals are numbers that stages store beside a document; thresholds are the `decision` fields of the stages' configs.
Replay (`pipeline.passes.replay`) uses these functions to decide which documents a pass processes again. The service's
playground uses them to decide which documents would be kept instead of dropped, or dropped instead of kept.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stages.document import Document
from stages.stage import Stage


class Judge(Protocol):
    """What the function `overwritten` needs to know of a loaded stage (`pipeline.passes.chain.LoadedStage`). `foreign`
    is true for a user's own stage."""

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> Stage: ...
    @property
    def foreign(self) -> bool: ...


def with_thresholds(stage: Stage, thresholds: Mapping[str, Any]) -> Stage:
    """Returns a copy of a stage with other thresholds. The stage and its copy share the models that the stage has
    loaded."""
    other = copy.copy(stage)
    other.config = type(stage.config).model_validate({**stage.config.model_dump(), **thresholds})
    return other


def stored_verdicts(doc: Document, *stages: Stage) -> tuple[str | None, ...] | None:
    """Return the verdict of each stage on a document, computed from the document's stored signals. Returns None if any
    stage cannot give a verdict in this way, because it has no `verdict` method or a signal was not computed. Only the
    stage's method `process` can then decide."""
    try:
        return tuple(stage.verdict(doc) for stage in stages)
    except MemoryError:
        raise
    except Exception:
        return None


def overwritten(steps: Sequence[Judge], place: int) -> int | None:
    """Return the place of the first stage after `place` that may overwrite a signal on which the verdict at `place`
    depends; None if there is none. After that stage, the stored value of the signal may not be the one that decided the
    verdict."""
    stage = steps[place].stage
    used = {*stage.signals, *stage.reads()}
    return next((number for number, later in enumerate(steps[place + 1:], place + 1)
                 if later.foreign or used & set(later.stage.signals) or later.name == steps[place].name
                 or ("language" in used and later.stage.sets_language)), None)
