"""Shows documents to people, in lists and one at a time. A single document is shown with its verdict (why it was
dropped), its entries in quarantine and its places in the shards. For a duplicate, the document that was kept in its
place is shown, too. Personal data is masked unless the caller says otherwise."""

from __future__ import annotations

import json
import math
from itertools import accumulate
from typing import Any

from pipeline.base.word_diff import only, pieces, rows, shortened
from pipeline.service.duck import QueryError, Stop
from pipeline.service.filters import Filter, SortOrder
from pipeline.service.parts import NoDataset
from pipeline.service.query import FIELD, DocumentKind, Queries
from pipeline.service.shard_sets import find, set_names
from pipeline.store.dataset import stream_quarantine
from pipeline.store.fs import Store
from stages.scrub.pii import scrub_text
from stages.scrub.rows import MARGIN, mask

#: characters of two texts that are compared; characters shown around a search's match
COMPARED, CONTEXT = 20_000, 160
#: most levels of metadata that are shown as JSON; a serialiser gives up at a few hundred
DEEPEST = 40
DOCUMENT = ("url", "source", "language", "date", "reason", "stage", "signals", "meta", "locator", "text")
ENTRY = ("source", "file", "record", "stage", "reason", "detail", "bytes")


class NoDocument(QueryError):
    """Raised when the dataset has no such document."""

    status = 404
    title = "No such document"


def shown(row: dict[str, Any], masked: bool, chars: int, searched: str = "") -> dict[str, Any] | None:
    """Return a document's row in the form in which the server may send it. The text is cut to `chars` characters and,
    with `masked`, personal data is masked.

    Returns None if the text `searched`, by which the client has found the document, occurs only in masked data.
    Otherwise the client could learn personal data by searching for it.
    """
    row = dict(row)
    length, match = row.get("chars"), row.pop("match", None)
    if masked:
        _mask(row, chars)
    elif row.get("text") is not None:
        row["text"] = row["text"][:chars]
    if length is not None:
        row["chars"] = length
    for name in ("url", "language", "date", "detail", "file"):
        if isinstance(row.get(name), str):
            row[name] = row[name][:FIELD]
    if isinstance(row.get("meta"), str):
        row["meta"] = _parsed(row["meta"])
    if row.get("signals"):
        row["signals"] = {name: v if v is None or math.isfinite(v) else str(v) for name, v in row["signals"].items()}
    if match is not None and searched:
        match = scrub_text(match) if masked else match
        if (at := match.find(searched)) < 0:
            return None
        row["match"] = match[max(0, at - CONTEXT):at + len(searched) + CONTEXT]
    return row


def _mask(row: dict[str, Any], chars: int) -> None:
    meta = row.get("meta")
    try:
        mask(row, chars)
    except (ValueError, RecursionError):                  # metadata that is no JSON, or nests too deep to be scrubbed
        row["meta"] = None
        mask(row, chars)
        row["meta"] = None if meta is None else "(cannot be shown)"


def _parsed(meta: str) -> Any:
    """Parse stored metadata into JSON values that any parser reads; NaN and infinity become strings. Text that is no
    JSON, or nests deeper than DEEPEST, is returned unchanged."""
    try:
        value = json.loads(meta, parse_constant=str, parse_float=lambda s: v if math.isfinite(v := float(s)) else s)
    except (ValueError, RecursionError):
        return meta
    level = [value]
    for _ in range(DEEPEST):
        level = [v for item in level for v in (item.values() if isinstance(item, dict) else
                                               item if isinstance(item, list) else ())]
    return meta if level else value


def document(queries: Queries, store: Store, dataset: str, id: str, masked: bool, chars: int,
             stop: Stop) -> dict[str, Any]:
    """Return everything that the service shows about the document whose id is `id` or begins with it. Raises QueryError
    when there is no such document, or more than one."""
    if not id:
        raise QueryError("no id", "id", "give the id of a document, or its beginning")
    kind, row = _find(queries, store, dataset, id, chars, stop)
    if kind == "quarantined":
        return {"kind": kind, "id": row["id"], "document": None, "verdict": None, "twin": None, "windows": [],
                "quarantine": _entries(queries, store, dataset, row["id"], masked, stop)}
    facts: dict[str, Any] = {"kind": kind, "id": row["id"], "document": shown(row, masked, chars)}
    verdict = _verdict(row)
    facts["verdict"] = verdict
    facts["twin"] = _twin(queries, store, dataset, row, verdict["kept"], masked, stop) if verdict and verdict.get(
        "kept") else None
    facts["windows"] = find(queries, store, row["id"], stop, exact=True)["places"] if kind == "kept" else []
    # a document that belongs to no stream of split shards is quarantined under the name of the entry in `shards:`
    entries = sorted({name for stream in set_names(store)
                      for name in accumulate(stream.stream.split("."), "{}.{}".format)})
    lost = [] if kind != "kept" else [entry for name in entries for entry in _entries(
        queries, store, stream_quarantine(name), row["id"], masked, stop)]
    return {**facts, "quarantine": lost}


def locate(queries: Queries, store: Store, dataset: str, id: str, stop: Stop) -> dict[str, Any]:
    """Return {id, source, locator} of a kept or dropped document, as they are stored. The locator is the document's
    place in the source. Raises QueryError when the dataset has no such document, or more than one, and for a
    quarantined record, which has no text."""
    kind, row = _find(queries, store, dataset, id, 0, stop)
    if kind == "quarantined":
        raise NoDocument("a quarantined record has no text", "id", "its entry names its file and record")
    return {name: row[name] for name in ("id", "source", "locator")}


def _find(queries: Queries, store: Store, dataset: str, id: str, chars: int, stop: Stop) -> tuple[str, dict[str, Any]]:
    known = False
    for kind in ("kept", "dropped", "quarantined"):
        try:
            page = queries.page(DocumentKind(store, kind, dataset), Filter(id=id), SortOrder(), 2, stop,
                                show=DOCUMENT if kind != "quarantined" else ENTRY, chars=chars + MARGIN)
        except NoDataset:
            if kind == "kept":
                raise
            continue
        known = True
        ids = sorted({row["id"] for row in page.rows})
        exact = [row for row in page.rows if row["id"] == id]
        if len(ids) > 1 and not exact:
            raise QueryError(f"several documents have an id that begins so: {', '.join(ids)}, …", "id",
                             "give more of its characters")
        if page.rows:
            return kind, (exact or page.rows)[0]
    assert known
    raise NoDocument("no kept, dropped or quarantined document has this id", "id",
                     "see the pages of documents for the ids of this dataset")


def _verdict(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return why a document was dropped. For a duplicate, the result also has the id of the document that was kept in
    its place, and the similarity of the two. Returns None for a kept document."""
    if "reason" not in row:
        return None
    meta = _parsed(row["meta"] or "{}")
    note = meta.get(row["stage"]) if isinstance(meta, dict) else None
    note = note if isinstance(note, dict) and isinstance(note.get("kept"), str) else {}
    return {"stage": row["stage"], "reason": row["reason"], "kept": note.get("kept"),
            "similarity": note.get("similarity")}


def _twin(queries: Queries, store: Store, dataset: str, row: dict[str, Any], id: str, masked: bool,
          stop: Stop) -> dict[str, Any]:
    """Return the document that was kept in place of a duplicate, and as `difference` how the first COMPARED characters
    of the two texts differ. A later step may have removed the kept document. `kind` says what it is now: kept, dropped,
    quarantined, or None if no file has it. If `kind` is quarantined or None, `difference` is None and `document` is
    left out."""
    try:
        kind, twin = _find(queries, store, dataset, id, max(COMPARED, len(row["text"] or "")), stop)
    except NoDocument:
        return {"id": id, "kind": None, "difference": None}
    if kind == "quarantined":
        return {"id": id, "kind": kind, "difference": None}
    # scrubbed before the comparison, which cuts texts into words: there, personal data would not be recognised
    texts = [(scrub_text(r["text"]) if masked else r["text"])[:COMPARED] for r in (row, twin)]
    twin = {k: v for k, v in twin.items() if k != "text"}
    return {"id": id, "kind": kind, "document": shown(twin, masked, 0), "difference": difference(*texts)}


def difference(removed: str, kept: str) -> dict[str, Any]:
    """Return how the text of a removed document differs from the text that was kept, as a list of rows:

    - {left_out}: a number of paragraphs that are equal in both texts
    - {removed, kept, pieces}: a paragraph of each text, and how they differ

    A piece is [what, from, to, from, to]. `what` is equal, delete, insert or replace. The numbers are two ranges of
    characters, first in the removed paragraph and then in the kept one.
    """
    pairs = rows(removed, kept)
    lost, new = only(pairs)
    return {"only_removed": lost, "only_kept": new, "characters": COMPARED, "rows": [
        {"left_out": row} if isinstance(row, int) else
        {"removed": row.left, "kept": row.right,
         "pieces": [] if row.same else [[what, *a, *b] for what, a, b in pieces(row)]} for row in shortened(pairs)]}


def _entries(queries: Queries, store: Store, dataset: str, id: str, masked: bool, stop: Stop) -> list[dict[str, Any]]:
    """Return the entries about a document in the quarantine of a dataset. An entry says why the document was put aside,
    and where it is in the input."""
    try:
        page = queries.page(DocumentKind(store, "quarantined", dataset),
                            Filter(id=id),
                            SortOrder(),
                            20,
                            stop,
                            show=ENTRY)
    except NoDataset:
        return []
    return [{"dataset": dataset, **entry} for row in page.rows if row["id"] == id
            and (entry := shown(row, masked, 0)) is not None]
