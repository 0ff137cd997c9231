"""Translates the filter and the order of a query about documents into SQL. A user's value becomes a bound parameter,
never part of the SQL text. A column is named in the SQL only if the files have it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.base.visible import visible
from pipeline.service.duck import QueryError

#: most characters of a value in a filter, and most values of a column
LONGEST, MOST = 1000, 100
#: the host of a URL in small letters; '' when the URL has none. The first pattern matches most URLs; DuckDB needs six
#: times as long for the second one, which may have to read a place several times
HOST = (r"""coalesce(nullif(regexp_extract(url, '^https?://([a-z0-9.-]+)(?:[/?#]|$)', 1), ''), """
        r"""lower(regexp_extract(url, '^[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#]*@)?(\[[^\]]*\]|[^/?#:]*)', 1)))""")
#: the order of documents by parts (files of the dataset), and by rows in a part
STORED = "stored"
#: columns, beside signals, by which documents can be sorted
SORTED_BY = ("id", "source", "language", "date", "reason", "stage")


@dataclass(frozen=True)
class SignalRange:
    """A filter for documents whose value of a signal (a number computed for each document) lies between `least` and
    `most`, inclusive. None means no bound."""

    signal: str
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Filter:
    """The conditions that a document must fulfil, all of them. If several values of a column are given, the document
    must have one of them. `domain` includes its subdomains. `text` must occur in the document's text exactly as
    written. `id` is the beginning of the document's id."""

    source: tuple[str, ...] = ()
    reason: tuple[str, ...] = ()
    stage: tuple[str, ...] = ()
    language: tuple[str, ...] = ()
    domain: str = ""
    signals: tuple[SignalRange, ...] = ()
    text: str = ""
    id: str = ""


@dataclass(frozen=True)
class SortOrder:
    """The order of a query's documents. `by` is 'stored' (the order in the files), a column of SORTED_BY, or
    'signals.NAME'. Documents without a value come last, and documents with equal values are sorted by id."""

    by: str = STORED
    descending: bool = False


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def column(name: str, columns: Collection[str]) -> str:
    """Return the SQL expression of a column; 'signals.NAME' names a signal. `columns` are the columns that the files
    have. For a column that the files do not have, the expression is NULL."""
    if name not in columns:
        return "NULL"
    first, dot, signal = name.partition(".")
    return f"{quoted(first)}.{quoted(signal)}" if dot else quoted(first)


def checked(value: str, key: str) -> str:
    """Return `value` unchanged if it can be bound to a query. Raises QueryError, which names the parameter `key`, if
    the value is too long or has a lone surrogate."""
    if len(value) > LONGEST:
        raise QueryError(f"the value has {len(value):,} characters, and the limit is {LONGEST:,}", key, "shorten it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise QueryError("the value holds a lone surrogate, which no stored text has", key, "leave it out") from None
    return value


def check_columns(wanted: dict[str, str], columns: Collection[str], kind: str) -> None:
    """Raise QueryError for a column that a query needs and no file has. `wanted` maps each needed column to the
    parameter of the query that names it."""
    for name, key in wanted.items():
        if name not in columns:
            known = sorted(c for c in columns if c.startswith("signals.") == name.startswith("signals."))
            raise QueryError(f"{kind} documents have no column '{visible(name)[:80]}'", key,
                             f"they have: {', '.join(visible(c) for c in known)[:1000]}")


def wanted_columns(filter: Filter) -> dict[str, str]:
    """Return the columns that a filter reads, as {column: parameter of the query that names it}."""
    wanted = {name: name for name in ("source", "reason", "stage", "language", "text", "id") if getattr(filter, name)}
    if filter.domain:
        wanted["url"] = "domain"
    return wanted | {f"signals.{r.signal}": "signal" for r in filter.signals}


def where(filter: Filter, columns: Collection[str]) -> tuple[list[str], list[Any]]:
    """Return the SQL conditions of a filter, and the values to bind in these conditions. `columns` are the columns that
    the files have."""
    conditions: list[str] = []
    values: list[Any] = []

    def add(condition: str, *bound: Any) -> None:
        conditions.append(condition)
        values.extend(bound)

    for name in ("source", "reason", "stage", "language"):
        if allowed := getattr(filter, name):
            if len(allowed) > MOST:
                raise QueryError(f"{len(allowed)} values, and the limit is {MOST}", name, "give fewer")
            add(f"{column(name, columns)} IN ({', '.join('?' * len(allowed))})", *(checked(v, name) for v in allowed))
    for r in filter.signals:
        signal = column(f"signals.{r.signal}", columns)
        for sign, bound in ((">=", r.least), ("<=", r.most)):
            if bound is not None:
                if not math.isfinite(bound):
                    raise QueryError("a bound must be a finite number", "signal", "leave a bound out instead")
                add(f"{signal} {sign} ?", bound)
        add(f"{signal} IS NOT NULL AND NOT isnan({signal}::DOUBLE)")
    if filter.id:
        add(f"starts_with({column('id', columns)}, ?)", checked(filter.id, "id"))
    if filter.domain:
        host = checked(filter.domain, "domain").lower().strip(".")
        # the first condition is implied by the second, and ten times as fast
        add(f"contains(lower(url), ?) AND ends_with('.' || {HOST}, ?)", host, "." + host)
    if filter.text:
        add(f"contains({column('text', columns)}, ?)", checked(filter.text, "text"))
    return conditions, values


# -- places between two pages ----------------------------------------------------------------------------------------
def fingerprint(*of: Any) -> str:
    """Return a hash of a query. Every cursor (a position in a query's results) contains it, so that a cursor that was
    made for another query is recognised and refused."""
    doc = json.dumps([asdict(o) if isinstance(o, (Filter, SortOrder)) else o for o in of], sort_keys=True)
    return hashlib.blake2b(doc.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def cursor(query: str, *place: str | int | float | None) -> str:
    """Encode a position in the results of a query as text for a URL. `query` is the hash of the query. `place` holds
    the values that identify the last document before this position."""
    packed = [v if not isinstance(v, float) else {"f": v.hex()} for v in place]
    return base64.urlsafe_b64encode(json.dumps([query, *packed], separators=(",", ":")).encode()).decode().rstrip("=")


def place_value(text: str) -> Any:
    """Return the first of the values that `cursor` has encoded into a position. The text of a position is not
    encrypted, so every client that gets the text can read this value."""
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))[1]


def read_cursor(text: str, query: str, kinds: Sequence[type | tuple[type, ...]]) -> list[Any]:
    """Return the values that `cursor` has encoded into the text of a position. Raises QueryError if the text is not a
    position in the results of this query."""
    place: list[Any] = []
    try:
        if len(text) > 8 * LONGEST:
            raise ValueError
        origin, *place = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True))
        place = [float.fromhex(v["f"]) if isinstance(v, dict) else v for v in place]
        sound = len(place) == len(kinds) and all(isinstance(v, kind) for v, kind in zip(place, kinds))
        for value in place:
            if isinstance(value, str):
                value.encode()
            elif isinstance(value, int) and not 0 <= value < 1 << 62:
                raise ValueError
    except (ValueError, TypeError, KeyError, LookupError, OverflowError, RecursionError):
        origin, sound = None, False
    if origin != query or not sound:
        raise QueryError("this is not a place in the results of this query", "after",
                         "take it from `next` of the page before, and change nothing else")
    return place


def keyset(order: SortOrder, value: Any, id: str) -> tuple[str, list[Any]]:
    """Return the SQL condition for documents that come, in this order, after the document with this value of the sorted
    column and this id. Also returns the values to bind in the condition. In the SQL, the sorted column is called `v`.
    """
    if order.by == "id":
        return f"v {'<' if order.descending else '>'} ?", [id]
    if value is None:
        return "v IS NULL AND id > ?", [id]
    return (f"(v {'<' if order.descending else '>'} ? OR (v = ? AND id > ?) OR v IS NULL)", [value, value, id])
