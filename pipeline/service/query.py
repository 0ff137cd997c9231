"""Answers questions about the published documents of a dataset with DuckDB: pages of documents, counts, histograms.

A dataset is stored in parts (Parquet files), and every query reads the list of parts anew. A page of documents comes
with a cursor, `next`, from which the next page continues. The cursor is a position, not a number of documents to skip.
So documents that are published between two pages do not shift others onto a page that was already read.

There are two kinds of order:

- *stored* order, that of the parts and of the rows in them. A page reads only the parts that it needs. Its cursor is a
  part and a row. If this part is not published any more, the client must start again at the first page
- sorted by id or by another column. A page reads this column of all parts. Its cursor is a value of the column and an
  id. A document that stays published while a client reads all pages is seen exactly once
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.visible import visible
from pipeline.service.answer_memory import AnswerMemory
from pipeline.service.duck import Busy, QueryError, QueryLimits, Stop
from pipeline.service.filters import (
    HOST,
    SORTED_BY,
    STORED,
    Filter,
    SortOrder,
    check_columns,
    column,
    cursor,
    fingerprint,
    read_cursor,
    wanted_columns,
    where,
)
from pipeline.service.hits import HitRun, Place, QueryHit, sorted_hits, stored_hits, where_clause
from pipeline.service.parts import Changed, Checked, published
from pipeline.service.reader import PartReader
from pipeline.service.turns import Turns
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from stages.scrub.rows import MARGIN

T = TypeVar("T")
#: rows of a page; groups of a count; bins of a histogram
PAGE_ROWS, GROUPS, BINS = 200, 1000, 400
#: columns that a page can show; of the text only its beginning
SHOWN = ("id", "url", "source", "language", "date", "reason", "stage", "signals", "meta", "locator", "text", "file",
         "record", "detail", "bytes")
#: columns by which documents can be counted
COUNTED_BY = ("source", "reason", "stage", "language", "domain")
#: characters of a URL or another short field, and of metadata; longer metadata is left out
FIELD, META = 2000, 20_000
#: characters around a place where the text holds what was searched for
AROUND = 600
#: hits that the second page of a sorted query reads ahead, so that the next pages read no column of all parts again
AHEAD = 400
#: WAITING × `QueryLimits.at_once` queries may run or wait in all; a waiting query holds a thread of the server
WAITING = 4
#: how often a query is tried when parts are replaced while it runs
TRIES = 3


class PlaceGone(QueryError):
    """Raised when the part (data file of a dataset) in which the previous page ended is not published any more."""

    status = 410
    title = "The dataset was published anew"


class Replaced(Busy):
    """Raised when a dataset is published anew so often that a query cannot read it."""

    title = "The dataset is being published"


class DocumentKind(NamedTuple):
    """Names the documents that a query reads: those of one `kind` (kept, dropped or quarantined) of a dataset in a
    store."""

    store: Store
    kind: str
    dataset: str


@dataclass(frozen=True)
class ResultPage:
    """One page of the documents that match a query, in order. Each row is a dict of the requested columns. `next` is
    the cursor (position) at which the following page begins, None on the last page. `parts` and `documents` are the
    numbers of parts (data files) and documents in the whole dataset."""

    rows: list[dict[str, Any]]
    next: str | None
    parts: int
    documents: int


class Queries:
    """Runs queries on datasets, within limits of time, memory and concurrency. One object serves all requests of a
    server. Its attribute `checked` provides the paths of data files whose hashes were verified."""

    def __init__(self, limits: QueryLimits | None = None, clock: Clock = SYSTEM) -> None:
        self.limits, self._clock = limits or QueryLimits(), clock
        self.checked = Checked(self.limits)
        self._memory = AnswerMemory()
        self._turns = Turns(self.limits.at_once, (WAITING - 1) * self.limits.at_once)

    def stop(self) -> Stop:
        """Return an object that tells a query when to end. The time limit of the query begins with this call."""
        return Stop(self.limits.seconds, self._clock)

    def turn(self, stop: Stop) -> AbstractContextManager[None]:
        """A context manager that lets only a few requests work at a time. Other requests wait until one ends. Raises
        Busy when too many others wait already, or when the wait takes too long."""
        return self._turns.turn(min(self.limits.wait_s, stop.left))

    # -- pages ---------------------------------------------------------------------------------------------------
    def page(self, of: DocumentKind, filter: Filter, order: SortOrder, limit: int, stop: Stop, after: str = "",
             show: Sequence[str] = ("id",), chars: int = 0) -> ResultPage:
        """Return one page of documents. If `show` contains 'text', each row has the first `chars` characters of the
        document's text. Its key `chars` then has the length of the whole text. If the filter searches in texts, each
        row has `match`, an excerpt around the first occurrence of what was searched for."""
        if not 1 <= limit <= PAGE_ROWS:
            raise QueryError(f"a page has 1 to {PAGE_ROWS} documents", "limit", "give a number in this range")
        if of.kind == "quarantined" and order.by != STORED:
            raise QueryError("quarantined documents cannot be sorted: several may have one id", "sort",
                             f"use {STORED}")
        if order.by not in (STORED, *SORTED_BY) and not order.by.startswith("signals."):
            raise QueryError("documents cannot be sorted by this", "sort",
                             f"use {STORED}, {', '.join(SORTED_BY)} or signals.NAME")
        if odd := [name for name in show if name not in SHOWN]:
            raise QueryError(f"there is no column '{visible(odd[0])[:80]}' to show", "show", f"use {', '.join(SHOWN)}")
        query = fingerprint(of.kind, of.dataset, filter, order)

        def work(reader: PartReader) -> ResultPage:
            wanted = wanted_columns(filter) | ({order.by: "sort"} if order.by != STORED else {})
            if reader.parts:
                check_columns(wanted, reader.known, of.kind)
            find = self._stored if order.by == STORED else self._sorted
            hits = find(reader, filter, order, limit + 1, query, after)
            more, hits = len(hits) > limit, hits[:limit]
            question = ("rows", [hit[:2] for hit in hits], tuple(show), filter.text, chars)
            rows = self._memory.get(reader.parts_hash, question)
            if rows is None:
                rows = self._fetch(reader, hits, show, filter.text, chars)
                self._memory.put(reader.parts_hash, question, rows)
            return ResultPage(rows, cursor(query, *hits[-1].place) if more else None, len(reader.parts),
                              sum(part.rows for part in reader.parts))

        return self._over(of, stop, work)

    def _stored(self, reader: PartReader, filter: Filter, order: SortOrder, most: int, query: str,
                after: str) -> list[QueryHit]:
        parts, first = reader.parts, 0
        place: Place = ()
        if order.descending:
            raise QueryError("stored order goes one way only", "descending", "leave it out, or sort by a column")
        if after:
            place = tuple(read_cursor(after, query, (str, int)))
            first = next((i for i, part in enumerate(parts) if part.key == place[0]), -1)
            if first < 0:
                raise PlaceGone("the part that the page before ended in is not published any more", "after",
                                "begin again with the first page, or sort by id, which goes on after a publication")
        known: HitRun | None = self._memory.get(reader.parts_hash, ("stored", query))
        hits = known.following(place, most) if known else None
        if hits is None:
            hits = stored_hits(reader, filter, most, first, place)
            self._memory.put(reader.parts_hash, ("stored", query), HitRun(place, hits, len(hits) < most))
        else:
            reader.check(range(first, len(parts) if len(hits) < most else hits[-1].part + 1))
        return hits

    def _sorted(self, reader: PartReader, filter: Filter, order: SortOrder, most: int, query: str,
                after: str) -> list[QueryHit]:
        place: Place = ()
        if after:
            place = tuple(read_cursor(after, query, ((str, float, type(None)), str)))
            if place[0] is not None and isinstance(place[0], float) != order.by.startswith("signals."):
                raise QueryError("this is not a place in the results of this query", "after",
                                 "take it from `next` of the page before")
        if not reader.parts:
            return []
        known: HitRun | None = self._memory.get(reader.parts_hash, ("sorted", query))
        hits = known.following(place, most) if known else None
        if hits is None:
            wanted = most + (AHEAD if place else 0)              # who asks for the second page will ask for more
            read = sorted_hits(reader, filter, order, wanted, place)
            self._memory.put(reader.parts_hash, ("sorted", query), HitRun(place, read, len(read) < wanted))
            hits = read[:most]
        else:
            reader.check()
        return hits

    def _fetch(self, reader: PartReader, hits: list[QueryHit], show: Sequence[str], text: str, chars: int
               ) -> list[dict[str, Any]]:
        """Read the documents of `hits`, and return them in the same order. A hit is the part (data file) and the row of
        a document. A returned row has `id` and those of the columns `show` that the part has. The document's text is
        cut to `chars` characters. If `text` (what was searched for) is not empty, `match` is an excerpt around its
        first occurrence. If the hits have ids, the ids are not read again."""
        by_part: dict[int, list[int]] = {}
        for hit in hits:
            by_part.setdefault(hit.part, []).append(hit.row)
        if not hits:
            return []
        names = ("id", *show) if any(hit.id is None for hit in hits) else [name for name in show if name != "id"]
        selects: list[tuple[str, list[Any]]] = []
        with reader.files(list(by_part)) as files:
            for file, (i, wanted) in zip(files, by_part.items()):
                items, values = _shown(names, reader.columns[i], text, chars)
                columns = ", ".join(['file_row_number AS "#"', *items])
                selects.append((f"SELECT {columns} FROM read_parquet(?) "
                                f"WHERE file_row_number IN ({', '.join('?' * len(wanted))})", [*values, file, *wanted]))
            rows = {(i, row.pop("#")): row for i, part in zip(by_part, reader.rows_of_each(selects)) for row in part}
        return [{**({} if hit.id is None else {"id": hit.id}), **rows[hit.part, hit.row]} for hit in hits]

    def by_ids(self, of: DocumentKind, ids: Sequence[str], stop: Stop, show: Sequence[str], chars: int
               ) -> list[dict[str, Any]]:
        """Return the documents with these ids, in stored order (that of the files and their rows). `show` are the
        columns to return; a text is cut to `chars` characters."""
        def work(reader: PartReader) -> list[dict[str, Any]]:
            if not reader.parts or not ids:
                return []
            with reader.source() as (source, bound):
                rows = reader.rows(f"SELECT file_index, file_row_number FROM {source} WHERE id IN (SELECT unnest(?)) "
                                   f"ORDER BY file_index, file_row_number", [*bound, list(ids)])
            return self._fetch(reader, [QueryHit(row["file_index"], row["file_row_number"], ()) for row in rows], show,
                               "", chars)

        return self._over(of, stop, work)

    # -- sums ----------------------------------------------------------------------------------------------------
    def counts(self, of: DocumentKind, filter: Filter, by: Sequence[str], stop: Stop) -> dict[str, Any]:
        """Count the documents, and the bytes of their texts, for each value (or pair of values) of the columns `by`.
        Returns the GROUPS groups with the most documents, the number of all groups (`of`), and the number of all
        documents."""
        if not 1 <= len(by) <= 2 or len(set(by)) != len(by) or any(name not in COUNTED_BY for name in by):
            raise QueryError("documents cannot be counted by this", "by", f"name one or two of {', '.join(COUNTED_BY)}")

        def work(reader: PartReader) -> dict[str, Any]:
            if not reader.parts:
                return {"by": list(by), "groups": [], "of": 0, "documents": 0}
            known = reader.known
            check_columns(wanted_columns(filter) | {"url" if b == "domain" else b: "by" for b in by}, known, of.kind)
            conditions, values = where(filter, known)
            keys = [HOST if name == "domain" else column(name, known) for name in by]
            numbered = ", ".join(f"k{i}" for i in range(len(by)))
            with reader.source() as (source, bound):
                rows = reader.rows(
                    f"SELECT {', '.join(f'{key} AS k{i}' for i, key in enumerate(keys))}, count(*) AS documents, "
                    f"sum({column('signals.bytes', known)})::BIGINT AS bytes, count(*) OVER () AS groups, "
                    f"sum(count(*)) OVER ()::BIGINT AS total FROM {source} {where_clause(conditions)} "
                    f"GROUP BY {numbered} ORDER BY documents DESC, {numbered} LIMIT {GROUPS}", [*bound, *values])
            return {"by": list(by), "of": rows[0]["groups"] if rows else 0,
                    "documents": rows[0]["total"] if rows else 0,
                    "groups": [{**{name: row[f"k{i}"] for i, name in enumerate(by)}, "documents": row["documents"],
                                "bytes": row["bytes"]} for row in rows]}

        return self._over(of, stop, lambda reader: self._once(reader, ("counts", filter, tuple(by)), work))

    def histogram(self, of: DocumentKind, filter: Filter, signal: str, bins: int, stop: Stop,
                  least: float | None = None, most: float | None = None) -> dict[str, Any]:
        """Count the documents by their value of a signal (a number computed for each document), in `bins` bins of equal
        width from `least` to `most` (default: the smallest and the largest value). The last bin includes its upper end.

        Four more counts are returned. `missing` counts documents for which the signal was not computed, and `odd` those
        with infinity or NaN. `below` and `above` count those with a value outside the bins.
        """
        if not 1 <= bins <= BINS:
            raise QueryError(f"a histogram has 1 to {BINS} bins", "bins", "give a number in this range")
        for key, value in (("least", least), ("most", most)):
            if value is not None and not math.isfinite(value):
                raise QueryError("a bound must be a finite number", key, "leave it out")

        def work(reader: PartReader) -> dict[str, Any]:
            if not reader.parts:
                return {"signal": signal, "documents": 0, "missing": 0, "odd": 0, "least": least, "most": most,
                        "below": 0, "above": 0, "counts": []}
            known = reader.known
            check_columns(wanted_columns(filter) | {f"signals.{signal}": "signal"}, known, of.kind)
            conditions, values = where(filter, known)
            with reader.source() as (source, bound):
                inner = (f"(SELECT {column(f'signals.{signal}', known)}::DOUBLE AS v FROM {source} "
                         f"{where_clause(conditions)})")
                [sums] = reader.rows(
                    f"SELECT count(*) AS documents, count(*) - count(v) AS missing, count(*) FILTER (v IS NOT NULL AND "
                    f"NOT isfinite(v)) AS odd, min(v) FILTER (isfinite(v)) AS least, max(v) FILTER (isfinite(v)) AS "
                    f"most FROM {inner}", [*bound, *values])
                low = sums["least"] if least is None else least
                high = sums["most"] if most is None else most
                result = {**sums, "signal": signal, "least": low, "most": high, "below": 0, "above": 0, "counts": []}
                if low is None or high is None:                   # no document has a value
                    return result
                if high < low:
                    raise QueryError("the range ends before it begins", "most", "give a larger one")
                if not math.isfinite(high - low):
                    raise QueryError("the range is too wide for bins of equal width", "most",
                                     "give both ends, nearer to each other")
                width = (high - low) / bins
                # the tests compute a bin's number with this expression, because another one could round differently
                place = "0" if not width else f"least(floor((v - ?) / ?), {bins - 1})::INTEGER"
                rows = reader.rows(
                    f"SELECT CASE WHEN v < ? THEN -1 WHEN v > ? THEN {bins} ELSE {place} END AS bin, count(*) AS n "
                    f"FROM {inner} WHERE isfinite(v) GROUP BY bin",
                    [low, high, *([low, width] if width else []), *bound, *values])
            by_bin = {row["bin"]: row["n"] for row in rows}
            return {**result, "below": by_bin.get(-1, 0), "above": by_bin.get(bins, 0),
                    "counts": [by_bin.get(i, 0) for i in range(bins)]}

        question = ("histogram", filter, signal, bins, least, most)
        return self._over(of, stop, lambda reader: self._once(reader, question, work))

    # -- around a query ------------------------------------------------------------------------------------------
    def columns(self, of: DocumentKind, stop: Stop) -> list[str]:
        """Return the names of all columns that any of the parts (data files) of a dataset has. A signal (a number
        computed for each document) is named 'signals.NAME'."""
        return self._over(of, stop, lambda reader: list(dict.fromkeys(n for part in reader.columns for n in part)))

    def _once(self, reader: PartReader, question: tuple[Any, ...], work: Callable[[PartReader], dict[str, Any]]
              ) -> dict[str, Any]:
        """Return the answer to a question about all parts (data files) of a dataset. If the answer is in memory, it is
        returned; otherwise `work` is called, and its result is kept in memory. Raises DamagedFile for a damaged part,
        even if the answer was in memory."""
        answer: dict[str, Any] | None = self._memory.get(reader.parts_hash, question)
        if answer is None:
            answer = work(reader)
            self._memory.put(reader.parts_hash, question, answer)
        else:
            reader.check()
        return answer

    def _over(self, of: DocumentKind, stop: Stop, work: Callable[[PartReader], T]) -> T:
        """Call `work` with a reader of the published parts (data files) of a dataset, and return its result. Parts
        without rows are left out. If the parts are replaced while `work` runs, `work` is called again with the new
        parts. Raises Replaced when this happens TRIES times."""
        with self.turn(stop):
            parts = [part for part in published(*of) if part.rows]
            for last in (*[False] * (TRIES - 1), True):
                try:
                    columns = self.checked.columns(of.store, parts, stop)
                    with PartReader(self.checked, self.limits, of.store, parts, columns, stop) as reader:
                        return work(reader)
                except (DamagedFile, Changed) as e:
                    now = [part for part in published(*of) if part.rows]
                    if isinstance(e, DamagedFile) and now == parts:
                        raise
                    if last:
                        raise Replaced("its parts are replaced faster than they can be read", "dataset",
                                       "try again in a moment") from e
                    parts = now
            raise AssertionError("the last try returns or raises")


def _shown(names: Sequence[str], columns: Collection[str], text: str, chars: int) -> tuple[list[str], list[Any]]:
    """Return the SQL expressions of the columns `names`, and the values to bind in them. The text of a document is cut
    to `chars` characters. If `text` (what was searched for) is not empty, one expression is an excerpt around its first
    occurrence."""
    items: list[str] = []
    values: list[Any] = []
    for name in dict.fromkeys(names):
        if name == "text" and "text" in columns:
            items.append("substring(text, 1, ?::BIGINT) AS text, length(text) AS chars")
            values.append(chars)
        elif name == "meta" and "meta" in columns:
            items.append(f"CASE WHEN length(meta) <= {META} THEN meta END AS meta")
        elif name in ("url", "language", "date", "detail", "file") and name in columns:
            items.append(f"substring({name}, 1, {FIELD + MARGIN}) AS {name}")
        elif name in columns:
            items.append(column(name, columns))
    if text and "text" in columns:
        items.append("substring(text, greatest(1, strpos(text, ?) - ?), ?) AS match")
        values += [text, AROUND, len(text) + 2 * AROUND]
    return items, values
