"""Returns labels of tasks in the form in which they may be shown. A label names the input of its task, and the address
of an input may hold secrets and personal data. These are masked."""

from __future__ import annotations

from functools import lru_cache

from pipeline.base.redact import redact
from pipeline.engine.task import TaskSpec


def label_of(spec: TaskSpec) -> str:
    """Return the masked label of a task, or the task's key if it has no label."""
    return masked_label(spec.label) or spec.key


@lru_cache(maxsize=1024)
def masked_label(label: str) -> str:
    """Return the label of a task with secrets and personal data masked."""
    from stages.scrub.pii import scrub_text

    return scrub_text(redact(label))
