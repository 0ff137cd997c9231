"""Reads and writes the state of a page that lists documents: the kind of documents, the filter, the order and the
position. The state is the query of the page's URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl

from starlette.datastructures import QueryParams

from pipeline.service.filters import STORED
from pipeline.service.html import query_text

#: columns for which a filter may have several values, and columns for which it has one
MANY, ONE = ("source", "reason", "stage", "language"), ("domain", "text", "id")
#: the field with which a form sends the conditions that were chosen before, as URL-encoded pairs. They are encoded
#: because an input cannot hold every character, and because a condition may be an empty value
CHOSEN = "chosen"


@dataclass(frozen=True)
class BrowseView:
    """The state of a page that lists documents. `values` are the (column, value) pairs of its filter, in the order in
    which they were chosen. `signals` are the filter's ranges of signals (numbers computed for each document), as the
    API takes them: NAME:LEAST:MOST. `after` is the position at which the page begins."""

    kind: str = "kept"
    values: tuple[tuple[str, str], ...] = ()
    signals: tuple[str, ...] = ()
    sort: str = STORED
    descending: bool = False
    after: str = ""

    @classmethod
    def read(cls, query: QueryParams) -> BrowseView:
        """Return the view (state of the page) that the query of a URL describes. The query may come from a link or from
        the page's form. Empty fields of the form are ignored."""
        before = [pair for text in query.getlist(CHOSEN) for pair in parse_qsl(text, keep_blank_values=True)]
        view = cls()
        for name, value in before:
            view = view._with(name, value)
        typed = {name: value for name, value in query.multi_items() if name in ("signal_name", "least", "most")}
        for name, value in query.multi_items():
            if name not in typed and (value or CHOSEN not in query):
                view = view._with(name, value)
        if any(typed.get(bound, "").strip() for bound in ("least", "most")):
            view = view._with("signal", ":".join(typed.get(n, "").strip() for n in ("signal_name", "least", "most")))
        return view

    def _with(self, name: str, value: str) -> BrowseView:
        if name in MANY:
            return self if (name, value) in self.values else replace(self, values=(*self.values, (name, value)))
        if name in ONE:
            rest = tuple(pair for pair in self.values if pair[0] != name)
            return replace(self, values=(*rest, (name, value)) if value else rest)
        if name == "signal":
            return self if value in self.signals else replace(self, signals=(*self.signals, value))
        if name == "kind":
            return replace(self, kind=value)
        if name == "sort":
            return replace(self, sort=value)
        if name == "after":
            return replace(self, after=value)
        return replace(self, descending=value == "descending") if name == "order" else self

    def of(self, column: str) -> list[str]:
        """Return the values of one column that the view's filter accepts."""
        return [value for name, value in self.values if name == column]

    def one(self, column: str) -> str:
        return next(iter(self.of(column)), "")

    # -- links -------------------------------------------------------------------------------------------------------
    def query(self, **change: Any) -> str:
        """Return the query of this view's URL, after the fields in `change` are replaced. The URL leads to the first
        page of documents, unless `change` contains `after` (a position)."""
        view = replace(self, **{"after": "", **change})
        pairs = [("kind", view.kind), *view.values, *(("signal", range) for range in view.signals)]
        if view.sort != STORED or view.descending:
            pairs += [("sort", view.sort), ("order", "descending" if view.descending else "ascending")]
        return query_text([*pairs, ("after", view.after)] if view.after else pairs)

    def only(self, column: str, value: str) -> str:
        """Return the query of this view's URL, with a filter that accepts only `value` in the column `column`.
        Conditions on other columns stay."""
        return self.query(values=(*(pair for pair in self.values if pair[0] != column), (column, value)))

    def chips(self) -> list[tuple[str, str, str]]:
        """Return (name, value, query) for every condition in the view's filter. A URL with this query leads to the same
        view without the condition."""
        chips = [(name, value, self.query(values=tuple(pair for pair in self.values if pair != (name, value))))
                 for name, value in self.values]
        return chips + [("signal", _in_words(text), self.query(signals=tuple(s for s in self.signals if s != text)))
                        for text in self.signals]


def _in_words(range: str) -> str:
    """Return a range such as `quality:0.5:` (NAME:LEAST:MOST) as people write it: `0.5 ≤ quality`."""
    name, *bounds = range.rsplit(":", 2)
    if len(bounds) != 2:
        return range
    least, most = bounds
    return f"{least} ≤ " * bool(least) + name + f" ≤ {most}" * bool(most)


def filter_parameters(view: BrowseView) -> Mapping[str, Any]:
    """Return the filter of a view (the state of a page that lists documents) as query parameters of the API."""
    return {**{name: view.of(name) for name in MANY}, **{name: view.one(name) for name in ONE},
            "signal": list(view.signals)}
