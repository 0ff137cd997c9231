"""Checks a step against test vectors, which are files of JSON Lines. Each line gives a text and the result that the
step should have for it.

tests/conformance/README.md describes the format. `tokenmill steps NAME --check FILE` checks any step against a file,
including steps of installed packages. Tokenmill's own tests check its steps against every file in tests/conformance,
with the functions of this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from stages.catalog import stage_class
from stages.document import Document
from stages.stage import Stage, role_of

KEYS = {"name", "text", "url", "language", "date", "meta", "html", "before", "config", "reason", "text_after",
        "language_after", "meta_after", "signals"}


def read_vectors(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a file of test vectors. Returns (its header, its cases). The header is an optional first line that has
    neither `text` nor `html`; each further line is a case. The header's `stage` is by default the file's name without
    ending. The header's `config` is added to the config of each case, but the case's own settings win.

    Raises:
        ValueError: there is no case, a line is not a JSON object, or a key is unknown or missing. The message names
            file and line.
    """
    head: dict[str, Any] = {"stage": path.stem}
    cases = []
    # only at line feeds, since texts hold other line breaks
    for number, line in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"), 1):
        try:
            record = json.loads(line)
        except ValueError as e:
            raise ValueError(f"{path.name}:{number}: not JSON: {e}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path.name}:{number}: not an object")
        if number == 1 and "text" not in record and "html" not in record:
            head.update(record)
            continue
        unknown, missing = sorted(set(record) - KEYS), sorted({"reason"} - set(record))
        if unknown or missing or not ("text" in record or "html" in record):
            raise ValueError(f"{path.name}:{number}: unknown keys {unknown}, missing {missing or 'none'}; "
                             f"'text' or 'html' must be there")
        if "config" in head:
            record["config"] = {**head["config"], **record.get("config", {})}
        cases.append(record)
    if not cases:
        raise ValueError(f"{path.name}: no case in it")
    return head, cases


def expand(text: str | list[Any]) -> str:
    """Return the text of a case (a line of a file of test vectors) as one string. In the file, the text may be a list
    of pieces. A piece is a string, or [string, n] for n repetitions of the string."""
    if isinstance(text, str):
        return text
    return "".join(piece if isinstance(piece, str) else piece[0] * piece[1] for piece in text)


def document(case: dict[str, Any]) -> Document:
    """Return the document that a case (a line of a file of test vectors) describes, in its state before the stage
    processes it."""
    html = case.get("html")
    return Document("0" * 32, expand(case.get("text", "")), url=case.get("url", ""), language=case.get("language", ""),
                    date=case.get("date"), meta=dict(case.get("meta", {})), signals=dict(case.get("before", {})),
                    raw=None if html is None else html.encode(), mime="" if html is None else "text/html",
                    charset="" if html is None else "utf-8")


@cache
def stage_of(name: str, config: str, folder: Path) -> Stage:
    """Return the stage `name` with a config given as JSON, set up and ready to run. Resource paths in the config are
    relative to `folder`, the folder of the test vectors."""
    cls = stage_class(name)
    settings = json.loads(config)
    for field, value in settings.items():
        if field in cls.Config.model_fields and role_of(cls.Config, field) == "resource":
            settings[field] = {name: str(folder / path) for name, path in value.items()} if isinstance(value, dict) \
                else str(folder / value) if isinstance(value, str) else value
    stage: Stage = cls(**settings)
    stage.setup()
    return stage


def outcome(stage: Stage, case: dict[str, Any]) -> tuple[str | None, Document]:
    """Run the stage on the document of a case (a line of a file of test vectors). Returns (reason for dropping the
    document, or None if it is kept; the document after the stage)."""
    doc = document(case)
    return stage.process_batch([doc])[0] if stage.batched else stage.process(doc), doc


def differences(stage: Stage, case: dict[str, Any]) -> list[str]:
    """Return the differences between a stage's result for a case (a line of a file of test vectors) and the result that
    the case states, each as 'WHAT: ACTUAL instead of EXPECTED'. For the signals of a numeric stage, a difference of up
    to the stage's `grid` is allowed."""
    before = document(case).text
    reason, doc = outcome(stage, case)
    pairs: list[tuple[str, Any, Any]] = [
        ("reason", reason, case["reason"]), ("text", doc.text, expand(case.get("text_after", before)))]
    if "language_after" in case:
        pairs.append(("language", doc.language, case["language_after"]))
    pairs += [(f"meta.{key}", doc.meta.get(key), value) for key, value in case.get("meta_after", {}).items()]
    for name, value in case.get("signals", {}).items():
        score = doc.signals.get(name)
        near = value is not None and score is not None and not stage.exact and abs(score - value) <= stage.grid
        pairs.append((f"signals.{name}", value if near else score, value))
    return [f"{label}: {actual!r} instead of {expected!r}" for label, actual, expected in pairs if actual != expected]


def replay_differences(stage: Stage, case: dict[str, Any], others: Iterable[Stage]) -> list[str]:
    """Return messages about the results that a replay of a stage would give wrongly for a case (a line of a file of
    test vectors). `others` are instances of the stage with other thresholds.

    A replay follows a change of thresholds: it calls `verdict` on the stored signals instead of running `process`. If
    the verdict is the same under both configs, the replay keeps the earlier result. `process` must then give equal
    results under both configs; every difference between these results gives a message.
    """
    reason, doc = outcome(stage, case)
    before, lines = _result_parts(reason, doc), []
    for other in others:
        other_reason, other_doc = outcome(other, case)
        try:
            if stored_verdict(stage, doc) != stored_verdict(other, doc):
                continue
        except Exception:  # no `verdict` method, or it lacks a signal: a replay runs `process`
            continue
        fields = [field for field in type(stage.config).model_fields
                  if getattr(stage.config, field) != getattr(other.config, field)]
        under = ", ".join(f"{field} {getattr(other.config, field)!r}" for field in sorted(fields))
        start = f"replay under {under}: verdict gives {stored_verdict(other, doc)!r} as before"
        lines += [f"{start}, but {part} is {now!r} instead of {was!r}"
                  for part, was, now in zip(_RESULT_PARTS, before, _result_parts(other_reason, other_doc))
                  if repr(was) != repr(now)]
    return lines


_RESULT_PARTS = ("reason", "text", "language", "meta", "signals", "side table")


def _result_parts(reason: str | None, doc: Document) -> tuple[Any, ...]:
    """Return what a stage decides and writes for a document, as values in the order of the names in `_RESULT_PARTS`."""
    return reason, doc.text, doc.language, doc.meta, dict(sorted(doc.signals.items())), doc.side


def by_thresholds(stages: Iterable[Stage]) -> dict[Stage, list[Stage]]:
    """Return, for each stage, those of the other stages that differ from it only in thresholds (config fields with the
    role `decision`)."""
    keys = {stage: stage.key(("signal", "resource")) for stage in dict.fromkeys(stages)}
    return {stage: [other for other in keys if other.config != stage.config and keys[other] == key]
            for stage, key in keys.items()}


def stored_verdict(stage: Stage, doc: Document) -> str | None:
    """Return the verdict that the stage derives from the stored signals, language and source of a document, without its
    text. The verdict is None to keep the document, or a reason to drop it."""
    return stage.verdict(Document(doc.id, "", source=doc.source, language=doc.language, signals=dict(doc.signals)))


def failures(name: str, path: Path) -> list[str]:
    """Return the differences between a step's actual and expected results for all cases of a file of test vectors, each
    as 'FILE: CASE: WHAT: ACTUAL instead of EXPECTED'. If the step raises an error for a case, the error is listed, too.
    Raises ValueError if the file is not valid (see `read_vectors`), or if the step does not accept the settings."""
    out = []
    cases = read_vectors(path)[1]
    stages = [stage_of(name, json.dumps(case.get("config", {}), sort_keys=True), path.parent) for case in cases]
    others = by_thresholds(stages)
    for number, (case, stage) in enumerate(zip(cases, stages), 1):
        try:
            lines = differences(stage, case) + replay_differences(stage, case, others[stage])
        except Exception as e:  # an error of the step, for which a run would quarantine the document
            lines = [f"raised {type(e).__name__}: {e}"]
        out += [f"{path.name}: {case.get('name') or f'case {number}'}: {line}" for line in lines]
    return out
