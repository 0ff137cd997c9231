"""Finds the documents that match a query, page by page, in the order of the files or sorted by a column. A hit is a
document that matches; it is given by its part (data file of a dataset) and its row.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from pipeline.service.filters import Filter, SortOrder, column, keyset, where
from pipeline.service.reader import PartReader

#: most parts that a page in stored order reads at a time; it begins with one, then takes twice as many each time
AT_A_TIME = 64

#: the values in a cursor, which identify the document before a page; () for the first page
Place: TypeAlias = tuple[str | int | float | None, ...]


class QueryHit(NamedTuple):
    """A document that matches a query: the number of its part (data file of a dataset), its row in the part, and its
    place in the results (the values in a cursor). The next page continues after the place of the last hit."""

    part: int
    row: int
    place: Place


class HitRun(NamedTuple):
    """Consecutive documents that match a query (hits), in the order of the query. `after` is the place in the results
    just before the first of these hits, or () if the results begin with them. If `last` is true, the query has no hits
    after these."""

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
    return hits


def sorted_hits(reader: PartReader, filter: Filter, order: SortOrder, most: int, place: Place) -> list[QueryHit]:
    """Return the first `most` documents that match a filter, sorted by the column of `order`, after the place `place`
    in the results.

    If the documents are not sorted by id, two queries are run. The first one reads only the sorted column, and finds a
    bound: no returned document has a value beyond it. Thanks to this bound, the second query decodes the ids of few
    rows. Decoding all ids would take most of the time.
    """
    turn, behind, until = ("DESC", "<", ">=") if order.descending else ("ASC", ">", "<=")
    conditions, values = where(filter, reader.known)
    sql, bound = keyset(order, place[0], str(place[1])) if place else ("true", [])
    with reader.source() as (source, files):
        inner = (f"(SELECT {column(order.by, reader.known)} AS v, id, file_index, file_row_number FROM {source} "
                 f"{where_clause(conditions)})")
        if order.by != "id" and place[:1] != (None,):
            # rows with the value of `place` may lie before it, so they cannot count for a bound
            after, start = (f"v {behind} ?", place[:1]) if place else ("v IS NOT NULL", ())
            for row in reader.rows(f"SELECT v FROM {inner} WHERE {after} ORDER BY v {turn} LIMIT 1 OFFSET ?",
                                   [*files, *values, *start, most - 1]):
                sql, bound = f"{sql} AND v {until} ?", [*bound, row["v"]]
        ranked = f"v {turn}" if order.by == "id" else f"v IS NULL, v {turn}, id"
        rows = reader.rows(f"SELECT v, id, file_index, file_row_number FROM {inner} WHERE {sql} "
                           f"ORDER BY {ranked} LIMIT ?", [*files, *values, *bound, most])
    return [QueryHit(r["file_index"], r["file_row_number"], (r["v"], r["id"])) for r in rows]
