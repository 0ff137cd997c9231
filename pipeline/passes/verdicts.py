"""Asks a stage for its verdict on stored signals under other thresholds.

Signals are numbers that stages store beside a document; thresholds are the `decision` fields of their configs. Replay
(`pipeline.passes.replay`) decides with these functions which documents a pass processes again. The playground of the
service decides with the same functions which documents would change sides.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stages.document import Document
from stages.stage import Stage


class Judge(Protocol):
    """The attributes of a loaded stage that `overwritten` needs, as `pipeline.passes.chain.LoadedStage` has them.
    `foreign`: it is a user's own stage."""

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> Stage: ...
    @property
    def foreign(self) -> bool: ...


def with_thresholds(stage: Stage, thresholds: Mapping[str, Any]) -> Stage:
    """Returns a copy of a stage with other thresholds. The two share the models that the stage has loaded."""
    other = copy.copy(stage)
    other.config = type(stage.config).model_validate({**stage.config.model_dump(), **thresholds})
    return other


def stored_verdicts(doc: Document, *stages: Stage) -> tuple[str | None, ...] | None:
    """The verdict of each stage on a document, from its stored signals. None where one cannot be given: the stage has
    no `verdict` method, or a signal was not computed. Then only `process` can decide."""
    try:
        return tuple(stage.verdict(doc) for stage in stages)
    except MemoryError:
        raise
    except Exception:
        return None


def overwritten(steps: Sequence[Judge], place: int) -> int | None:
    """The place of the first later stage that may overwrite a signal on which the verdict of the stage at `place`
    depends; None when no stage may. For a document that has been through that later stage, the stored value is not the
    one that decided the verdict."""
    stage = steps[place].stage
    used = {*stage.signals, *stage.reads()}
    return next((number for number, later in enumerate(steps[place + 1:], place + 1)
                 if later.foreign or used & set(later.stage.signals) or later.name == steps[place].name
                 or ("language" in used and later.stage.sets_language)), None)
