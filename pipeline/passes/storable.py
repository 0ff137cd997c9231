"""Checks that documents can be stored, and removes personal data from the rows that people see.

A stage or reader of a user may write any value. All columns are therefore checked after each such stage or reader. A
wrong type is an error of one document, with a message that names the column; it does not fail the whole part (file of
documents). Rows of dropped and quarantined documents are meant to be read by people. Personal data is therefore removed
from every field of them that may hold text of the page.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

from stages.document import BadRecord, Document
from stages.read.reader import Reader
from stages.scrub.pii import scrub_text, scrub_value

#: the form of a language that may be a key of counters: short and plain, because people read counters and because
#: counters are merged over all parts
_LANGUAGE = re.compile(r"[A-Za-z0-9_-]{0,16}", re.ASCII)
OTHER = "other"
_ID = re.compile(r"[0-9a-f]{32}")
#: longest reason of a verdict, in characters (a reason is also a key of counters)
LONGEST_REASON = 200


def language_label(language: str) -> str:
    """Return the language under which a document is counted. A string that does not look like the code of a language
    becomes OTHER, because a user's column may hold any string."""
    return language if _LANGUAGE.fullmatch(language) else OTHER


def scrub_row(doc: Document) -> None:
    """Remove personal data from the fields of a dropped document, because people read them. The id, the source and the
    signals hold no personal data and stay."""
    doc.text, doc.url, doc.language = scrub_text(doc.text), scrub_text(doc.url), scrub_text(doc.language)
    if doc.date is not None:
        doc.date = scrub_text(doc.date)
    doc.locator, doc.meta = scrub_value(doc.locator), scrub_value(doc.meta, keys=True)


#: fields of a document that stages replace and never change in place, so that `state_of` need not copy their values
_FIELDS = ("id", "source", "url", "language", "date", "raw", "mime", "charset")
State = tuple[Any, ...]


def state_of(doc: Document) -> State:
    """Returns a copy of everything in a document that stages may change. `restore` undoes all later changes with it."""
    meta = dict(doc.meta) if _flat(doc.meta) else copy.deepcopy(doc.meta)
    return (doc.text, dict(doc.locator), meta, dict(doc.signals), dict(doc.side),
            *(getattr(doc, name) for name in _FIELDS), copy.deepcopy(doc.loss_spans))


def _flat(meta: dict[str, Any]) -> bool:
    """Whether a document's metadata can be copied without copying its values. All keys must be strings, and all values
    immutable and stored unchanged by JSON."""
    return all(type(k) is str and isinstance(v, (str, int, float, type(None))) for k, v in meta.items())


def restore(doc: Document, state: State) -> None:
    doc.text, doc.locator, doc.meta, doc.signals, doc.side, *fields, doc.loss_spans = state
    for name, value in zip(_FIELDS, fields):
        setattr(doc, name, value)


def checked(reader: Reader, records: Iterator[Any]) -> Iterator[Document | BadRecord]:
    """Yields the records of a reader. If the reader is a user's, a record that cannot be stored becomes a bad
    record."""
    if type(reader).__module__.partition(".")[0] == "stages":
        yield from records
        return
    for record in records:
        if isinstance(record, BadRecord):
            yield record
            continue
        try:
            _check_read(record, reader.signals)
        except (TypeError, ValueError) as e:
            is_document = isinstance(record, Document)
            has_id = is_document and isinstance(record.id, str)
            yield BadRecord(f"error:{type(e).__name__}", id=record.id if has_id else "", detail=str(e),
                            locator=record.locator if is_document and type(record.locator) is dict else None)
        else:
            yield record


def _check_read(doc: Any, signals: tuple[str, ...]) -> None:
    if not isinstance(doc, Document):
        raise TypeError(f"the reader gave {_shown(doc)}, it must give documents (stages.document.Document) and bad "
                        f"records")
    if not isinstance(doc.id, str) or not _ID.fullmatch(doc.id):
        raise ValueError("the reader gave a document whose id is not 32 hexadecimal characters; make it with "
                         "stages.document.document_id")
    for name in ("source", "mime", "charset"):
        if not isinstance(value := getattr(doc, name), str):
            raise TypeError(f"the reader set {name} to {_shown(value)}, it must be a string")
    if not (doc.raw is None or isinstance(doc.raw, bytes)):
        raise TypeError(f"the reader set raw to {_shown(doc.raw)}, it must be bytes or None")
    _check_columns(doc, "reader")
    if unknown := sorted(doc.signals.keys() - set(signals)):
        raise ValueError(f"the reader set a signal '{unknown[0]}' that its `signals` do not name")
    _check_places(doc, "reader")


def check(doc: Document, reason: Any, before: State) -> None:
    """Raise TypeError or ValueError if a document, as a stage left it, or the stage's verdict `reason` cannot be
    stored. `before` is the document's state before the stage (`state_of`).

    Changes two things in place. Signals become floats. Metadata with nested values becomes its JSON round trip, in
    which keys are strings and sorted.
    """
    if reason is not None and not (isinstance(reason, str) and 0 < len(reason) <= LONGEST_REASON):
        raise TypeError(f"the stage returned {_shown(reason)}: None keeps a document, a reason (a string of at most "
                        f"{LONGEST_REASON} characters) drops it")
    if (doc.id, doc.source) != before[5:7]:
        raise ValueError("the stage changed the id or the source of the document, by which the document is identified")
    _check_columns(doc, "stage")
    _check_places(doc, "stage")
    check_spans(doc, before[0], before[-1])


def _check_columns(doc: Document, who: str) -> None:
    """Raise TypeError or ValueError if the text, url, language, date, metadata or signals of a document cannot be
    stored. `who` (stage or reader) set them and is named in the message. Signals are converted to floats."""
    for name in ("text", "url", "language"):
        if not isinstance(value := getattr(doc, name), str):
            raise TypeError(f"the {who} set {name} to {_shown(value)}, it must be a string")
    if doc.date is not None and not isinstance(doc.date, str):
        raise TypeError(f"the {who} set date to {_shown(doc.date)}, it must be a string or None")
    if type(doc.meta) is not dict:
        raise TypeError(f"the {who} set meta to {_shown(doc.meta)}, it must be a dict")
    stored = json.dumps(doc.meta, sort_keys=True)
    if not _flat(doc.meta):
        doc.meta = json.loads(stored)
    if type(doc.signals) is not dict:
        raise TypeError(f"the {who} set signals to {_shown(doc.signals)}, it must be a dict")
    for name, value in doc.signals.items():
        doc.signals[name] = float(value)


def _check_places(doc: Document, who: str) -> None:
    """Raise TypeError if the locator or the `loss_spans` of a document have a wrong form. The locator is {file: string,
    sub: string, offset: 64-bit integer, record: 64-bit integer}, all optional; `loss_spans` is None or a list of
    {start, end}. `who` (stage or reader) set them and is named in the message."""
    if type(doc.locator) is not dict:
        raise TypeError(f"the {who} set locator to {_shown(doc.locator)}, it must be a dict")
    for name, kind in (("file", str), ("sub", str), ("offset", int), ("record", int)):
        value = doc.locator.get(name)
        if value is not None and not (isinstance(value, str) if kind is str else
                                      type(value) is int and -2**63 <= value < 2**63):
            raise TypeError(f"the {who} set locator.{name} to {_shown(value)}, it must be {kind.__name__}")
    if doc.loss_spans is not None and not (type(doc.loss_spans) is list and all(
            type(s) is dict and s.keys() == {"start", "end"} and all(type(v) is int and 0 <= v < 2**63
                                                                     for v in s.values()) for s in doc.loss_spans)):
        raise TypeError(f"the {who} set loss_spans to something else than None or a list of {{start, end}}")


def check_spans(doc: Document, text: str, spans: list[dict[str, int]] | None) -> None:
    """Raise ValueError if a stage changed the text of a document but not its `loss_spans`. Text outside of these spans
    does not count for the loss. In a changed text, old spans would mark wrong passages. `text` and `spans` are the
    values before the stage."""
    if spans and doc.text != text and doc.loss_spans == spans:
        raise ValueError("the stage changed a text of which only spans count for the loss, and left the spans where "
                         "they were: set doc.loss_spans, or use the stage before the text is rendered")


def _shown(value: Any) -> str:
    """Returns the form in which an error message shows a wrong value. If the value may hold text of the document, this
    is only its type."""
    return f"{value!r}" if isinstance(value, (bool, int, float)) or value is None else f"a {type(value).__name__}"
