"""What a document may hold to be stored, and what of it may be shown.

Stages and readers that are not ours write what they like: every column is checked after each of them, so that a wrong
type is the error of that document, by name, and not of the part it stands in. Rows of dropped and quarantined documents
are made to be looked at: everything a page could have written into them passes the scrubber.
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

#: what counts as the name of a language in counters, which are seen by people and merged over all parts
_LANGUAGE = re.compile(r"[A-Za-z0-9_-]{0,16}", re.ASCII)
OTHER = "other"
_ID = re.compile(r"[0-9a-f]{32}")
#: longest reason of a verdict, characters: reasons are keys of counters, too
LONGEST_REASON = 200


def language_label(language: str) -> str:
    """The language as counters call it: a column of the input may hold anything."""
    return language if _LANGUAGE.fullmatch(language) else OTHER


def scrub_row(doc: Document) -> None:
    """Take personal data out of everything a dropped document shows (its id, source and signals hold none)."""
    doc.text, doc.url, doc.language = scrub_text(doc.text), scrub_text(doc.url), scrub_text(doc.language)
    if doc.date is not None:
        doc.date = scrub_text(doc.date)
    doc.locator, doc.meta = scrub_value(doc.locator), scrub_value(doc.meta, keys=True)


#: what of a document is replaced and not changed: everything else that is stored, and what an extractor reads
_FIELDS = ("id", "source", "url", "language", "date", "raw", "mime", "charset")
State = tuple[Any, ...]


def state_of(doc: Document) -> State:
    """What `restore` needs to undo all that a stage does to a document."""
    meta = dict(doc.meta) if _flat(doc.meta) else copy.deepcopy(doc.meta)
    return (doc.text, dict(doc.locator), meta, dict(doc.signals), dict(doc.side),
            *(getattr(doc, name) for name in _FIELDS), copy.deepcopy(doc.loss_spans))


def _flat(meta: dict[str, Any]) -> bool:
    """Whether it holds nothing that could be changed in place, or is not stored as it is."""
    return all(type(k) is str and isinstance(v, (str, int, float, type(None))) for k, v in meta.items())


def restore(doc: Document, state: State) -> None:
    doc.text, doc.locator, doc.meta, doc.signals, doc.side, *rest, doc.loss_spans = state
    for name, value in zip(_FIELDS, rest):
        setattr(doc, name, value)


def checked(reader: Reader, records: Iterator[Any]) -> Iterator[Document | BadRecord]:
    """The records of a reader. What one of the user's own gives and cannot be stored becomes a bad record."""
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
            given = isinstance(record, Document)
            known = given and isinstance(record.id, str)
            yield BadRecord(f"error:{type(e).__name__}", id=record.id if known else "", detail=str(e),
                            locator=record.locator if given and type(record.locator) is dict else None)
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
    """Raises TypeError or ValueError for what a stage made of a document, and its verdict, when that cannot be stored.
    Signals become floats, and metadata what will be read back: keys are strings in JSON, and sort as such."""
    if reason is not None and not (isinstance(reason, str) and 0 < len(reason) <= LONGEST_REASON):
        raise TypeError(f"the stage returned {_shown(reason)}: None keeps a document, a reason (a string of at most "
                        f"{LONGEST_REASON} characters) drops it")
    if (doc.id, doc.source) != before[5:7]:
        raise ValueError("the stage changed the id or the source of the document, which are what it is known by")
    _check_columns(doc, "stage")
    _check_places(doc, "stage")
    check_spans(doc, before[0], before[-1])


def _check_columns(doc: Document, who: str) -> None:
    """Text, metadata and signals, and what is stored beside them."""
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
    """Locator ({file, sub: string, offset, record: 64-bit integer}, or less) and spans ([{start, end}])."""
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
    """Raises ValueError for a stage that changed `text`, of which only `spans` count, and left those where they were:
    something else would be learned."""
    if spans and doc.text != text and doc.loss_spans == spans:
        raise ValueError("the stage changed a text of which only spans count for the loss, and left the spans where "
                         "they were: set doc.loss_spans, or use the stage before the text is rendered")


def _shown(value: Any) -> str:
    """A wrong value by its type: what it holds may be the document."""
    return f"{value!r}" if isinstance(value, (bool, int, float)) or value is None else f"a {type(value).__name__}"
