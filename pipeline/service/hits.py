"""Finds the documents that match a query, page by page, in the order of the files or sorted by a column. A hit is a
document that matches; it is given by its part (data file of a dataset) and its row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from pipeline.service.filters import Filter, SortOrder, column, keyset, where
from pipeline.service.reader import PartReader

#: most parts that a page in stored order reads at a time; it begins with one, then takes up to twice as many each time
AT_A_TIME = 64
#: times as many hits as a first sorted page needs are asked for, to see which parts can have documents of the page
SPARE = 2

#: the values in a cursor, which identify the document before a page; () for the first page
Place: TypeAlias = tuple[str | int | float | None, ...]


class QueryHit(NamedTuple):
    """A document that matches a query: the number of its part (data file of a dataset), its row in the part, and its
    place in the results (the values in a cursor). The next page continues after the place of the last hit. `id` is None
    if the document's id was not read."""

    part: int
    row: int
    place: Place
    id: str | None = None


class HitRun(NamedTuple):
    """Consecutive documents that match a query (hits), in the order of the query. `after` is the place in the results
    after which these hits come, or () if the results begin with them. If `last` is true, the query has no hits after
    these."""

    after: Place
    hits: list[QueryHit]
    last: bool

    def following(self, place: Place, most: int) -> list[QueryHit] | None:
        """Return the first `most` hits (matching documents) after the place `place` in the results. Returns None if
        some of these hits are not in this object."""
        if place == self.after:
            first = 0
        else:
            first = next((i + 1 for i, hit in enumerate(self.hits) if hit.place == place), -1)
        if first < 0 or (len(self.hits) - first < most and not self.last):
            return None
        return self.hits[first:first + most]


def where_clause(conditions: list[str]) -> str:
    """Return the SQL clause WHERE that demands all these conditions, or "" if there are none."""
    return "WHERE " + " AND ".join(conditions) if conditions else ""


def stored_hits(reader: PartReader, filter: Filter, most: int, first: int, place: Place) -> list[QueryHit]:
    """Return the first `most` documents that match a filter, in stored order, after the place `place` in the results.
    This place is in the part (data file) number `first`; () is the beginning of this part."""
    parts, at, size = reader.parts, first, 1
    hits: list[QueryHit] = []
    while at < len(parts) and len(hits) < most:
        numbers = range(at, min(at + size, len(parts)))
        known = {name for i in numbers for name in reader.columns[i]}
        conditions, values = where(filter, known)
        if at == first and place:
            conditions.append("(file_index > 0 OR file_row_number > ?)")
            values.append(place[1])
        with reader.source(numbers) as (source, bound):
            rows = reader.rows(f"SELECT file_index, file_row_number FROM {source} {where_clause(conditions)} "
                               f"ORDER BY file_index, file_row_number LIMIT ?",
                               [*bound, *values, most - len(hits)])
        hits += [QueryHit(at + r["file_index"], r["file_row_number"],
                          (parts[at + r["file_index"]].key, r["file_row_number"])) for r in rows]
        at, size = at + len(numbers), min(2 * size, AT_A_TIME)
        if hits:                                         # so many parts are enough if they have as many hits as these
            size = min(size, math.ceil((most - len(hits)) * (at - first) / len(hits)) + 1)
    return hits


def sorted_hits(reader: PartReader, filter: Filter, order: SortOrder, most: int, place: Place) -> list[QueryHit]:
    """Return the first `most` documents that match a filter, sorted by the column of `order`, after the place `place`
    in the results.

    If the documents are not sorted by id, two queries are run. The first one reads only the sorted column, and finds a
    bound: no returned document has a value beyond it. Thanks to this bound, the second query decodes the ids of few
    rows. Decoding all ids would take most of the time.

    For the first page, the first query also notes which parts (data files) hold the values up to the bound. If it has
    seen all of these values, the second query reads only these parts.
    """
    turn, behind, until = ("DESC", "<", ">=") if order.descending else ("ASC", ">", "<=")
    sql, bound = keyset(order, place[0], str(place[1])) if place else ("true", [])
    numbers: Sequence[int] = range(len(reader.parts))
    with reader.source(nan=order.by.startswith("signals.")) as (source, [files]):
        def select(columns: str, rest: str, bound: Sequence[Any]) -> list[dict[str, Any]]:
            """Return `columns` of the matching documents in the parts `numbers`. `rest` is the SQL after FROM."""
            known = {name for i in numbers for name in reader.columns[i]}
            conditions, values = where(filter, known)
            return reader.rows(f"SELECT {columns} FROM (SELECT {column(order.by, known)} AS v, id, file_index, "
                               f"file_row_number FROM {source} {where_clause(conditions)}) {rest}",
                               [[files[i] for i in numbers], *values, *bound])

        if order.by != "id" and place[:1] != (None,):
            # rows with the value of `place` may lie before it, so they cannot count for a bound
            after, start = (f"v {behind} ?", place[:1]) if place else ("v IS NOT NULL", ())
            asked = most if place else SPARE * most
            best = select("v, file_index", f"WHERE {after} ORDER BY v {turn} LIMIT {asked}", start)
            if len(best) >= most:
                last = best[most - 1]["v"]
                sql, bound = f"{sql} AND v {until} ?", [*bound, last]
                # NaN, which is unequal to itself here and equal to itself in DuckDB, leaves all parts to be read
                if not place and last == last and (len(best) < asked or last != best[-1]["v"]):
                    numbers = sorted({row["file_index"] for i, row in enumerate(best) if i < most or row["v"] == last})
        ranked = f"v {turn}" if order.by == "id" else f"v IS NULL, v {turn}, id"
        rows = select("v, id, file_index, file_row_number", f"WHERE {sql} ORDER BY {ranked} LIMIT {most}", bound)
    return [QueryHit(numbers[r["file_index"]], r["file_row_number"], (r["v"], r["id"]), r["id"]) for r in rows]
