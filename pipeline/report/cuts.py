"""Explains and counts the passages that deduplications cut out of documents (steps such as `repeats` and `substring`):
`tokenmill dedup explain` and `tokenmill dedup stats`.

Such a step notes its cuts in the metadata of the document (`stages.cut`). The text that was cut is in no published
folder. It is read from the files of the pass before the cut, as long as the store has them.
"""

from __future__ import annotations

import heapq
import json
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow.compute as pc

from pipeline.base.domain import domain_of
from pipeline.plan.changes import latest_run, run_recipe_of
from pipeline.report.collect import nodes_of
from pipeline.report.samples import find, masked_address, rows_at, text_files
from pipeline.store.dataset import iter_batches
from pipeline.store.errors import StoreError
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.temp import MOST_KEYS, scratch_database
from stages.cut import cut_name
from stages.scrub.pii import scrub_part

#: a domain raises an alarm if it has at least LEAST documents and lost more than the share MUCH of their text
LEAST, MUCH = 20, 0.5
#: characters shown of a passage, and characters on both sides of them in which personal data is searched
BEGINNING, MARGIN = 160, 400


def noted_cuts(meta: str | None, steps: list[str]) -> dict[str, dict[str, Any]]:
    """Return the notes about cut passages in the metadata `meta` of a document: {step: {cuts, bytes, passages}}. Each
    of the `steps` that cut passages out of the document has left a note. A value under the name of a note that does not
    have its form is ignored: it comes from the input data, which may use the same name."""
    if not meta or '_cut"' not in meta:
        return {}
    values = json.loads(meta)
    entries = {step: values.get(cut_name(step)) for step in steps}
    return {step: entry for step, entry in entries.items()
            if isinstance(entry, dict) and all(isinstance(entry.get(name), dict) for name in ("cuts", "bytes"))
            and isinstance(entry.get("passages"), list)}


def steps_of(store: Store, dataset: str) -> list[str]:
    """Return the names of the steps of a dataset, in the recipe of the latest run; [] if this run did not make it."""
    run = latest_run(store)
    recipe = run_recipe_of(store, run) if run else {}
    steps = recipe.get("datasets", {}).get(dataset, {}).get("steps") or []
    return [step if isinstance(step, str) else next(iter(step), "") for step in steps]


# -- one document ----------------------------------------------------------------------------------------------------
def explain_cuts(store: Store, dataset: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Describe the passages that deduplications cut out of one document. `row` is the document's row in a published
    folder of `dataset`.

    The result has an entry for each step that cut: {step, passages, bytes, listed}. `listed` describes the passages
    that the step noted: {reason, start, bytes, beginning, kept}. `start` is the byte at which the passage begins in the
    text before the cuts. `beginning` is the beginning of the passage without personal data, or None if the store no
    longer has the text before the cuts.

    `kept` is the document that keeps the passage, {id, source, url}, or None if the step named no such document. Its
    source and url are None if the dataset neither keeps nor dropped it."""
    notes = noted_cuts(row["meta"], steps_of(store, dataset))
    wanted = {passage["match"] for note in notes.values() for passage in note["passages"] if passage.get("match")}
    keepers = dict(_places(store, dataset, wanted)) if wanted else {}
    result = []
    for step, note in notes.items():
        text = text_before(store, dataset, step, row["id"])
        listed = []
        for passage in note["passages"]:
            start, end, match = passage["start"], passage["end"], passage.get("match")
            source, url = keepers.get(match, (None, None))
            listed.append({"reason": passage["reason"], "start": start, "bytes": end - start,
                           "beginning": beginning(text, start, end) if text is not None else None,
                           "kept": {"id": match, "source": source, "url": url and masked_address(url)}
                           if match else None})
        result.append({"step": step, "passages": sum(note["cuts"].values()), "bytes": sum(note["bytes"].values()),
                       "listed": listed})
    return result


def _places(store: Store, dataset: str, ids: set[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (id, (source, url)) for each of the documents `ids` that the dataset kept or dropped."""
    for kind in ("dropped", "datasets"):
        for batch in iter_batches(store, f"{kind}/{dataset}", ["id", "source", "url"]):
            for id, source, url in zip(*(batch.column(name).to_pylist() for name in ("id", "source", "url"))):
                if id in ids:
                    yield id, (source or "", url or "")


def text_before(store: Store, dataset: str, step: str, id: str) -> bytes | None:
    """Return the text that a document had before `step` cut it, in UTF-8. It is read from the files that the latest run
    made or used. The result is None if they are gone."""
    run = latest_run(store)
    if run is None:
        return None
    _, nodes = nodes_of(store, run, Log.read(store).get)
    cutting = next((node for node in nodes if node.kind == "pass" and node.dataset == dataset
                    and cut_name(step) in node.steps), None)
    if cutting is None:
        return None
    files = [file for before in nodes if before.kind == "pass" and before.name in cutting.deps
             for file in text_files(before, nodes)]
    try:
        rows = rows_at(store, files, find(store, files, {id}).values(), ["id", "text"])
    except (OSError, StoreError):
        return None
    return next((row["text"].encode("utf-8", "surrogatepass") for row in rows.values()), None)


def beginning(text: bytes, start: int, end: int) -> str:
    """Return the beginning of a passage of a UTF-8 text, on one line. Personal data is masked, even if only a part of
    it lies in the passage. `start` and `end` count bytes."""
    before = text[max(0, start - 4 * MARGIN):start].decode("utf-8", "ignore")[-MARGIN:]
    shown = text[start:min(end, start + 4 * BEGINNING)].decode("utf-8", "ignore")[:BEGINNING]
    stop = start + len(shown.encode())
    after = text[stop:stop + 4 * MARGIN].decode("utf-8", "ignore")[:MARGIN]
    line = " ".join(scrub_part(before + shown + after, len(before), len(before) + len(shown)).split())
    return line + " …" if stop < end else line


# -- all documents of a dataset --------------------------------------------------------------------------------------
def cut_stats(store: Store, dataset: str, step: str | None = None, *, most: int = 20) -> dict[str, Any] | None:
    """Count the passages that deduplications cut out of documents of `dataset`; with `step`, only those that this step
    cut. Returns None if there are none.

    The result is {docs, passages, bytes, by_reason, sources, pairs, unknown, domains, alarms, keepers}. All sizes are
    in bytes of UTF-8. The lists `sources`, `pairs`, `domains`, `alarms` and `keepers` have at most `most` entries.

    * `sources` and `domains` list the sources and domains that lost the most bytes, as {its name, docs, bytes, of}.
      `docs` is the number of its documents that were cut, and `bytes` is what they lost. `of` is the bytes, before the
      cuts, of all its documents that were kept or cut.
    * `alarms` lists, in the same form, sources and domains that lost more than half of their bytes. A domain needs at
      least LEAST documents to be listed.
    * `pairs` counts passages and bytes by two sources: that of the cut document, and that of the document that keeps
      the passage.
    * `unknown` is the number of cut bytes for which the second source is not known. Either the document that keeps the
      passage is gone, or the cut document's metadata does not list the passage. It lists only the first 32.
    * `keepers` lists the documents that keep the most bytes.
    """
    steps = [name for name in steps_of(store, dataset) if step in (None, name)]
    reasons: dict[tuple[str, str], list[int]] = {}
    by: dict[str, dict[str, list[int]]] = {"source": {}, "domain": {}}       # [documents, bytes, documents cut, cut]
    db = scratch_database()
    db.execute("CREATE TABLE cut (kept TEXT, source TEXT, passages INTEGER, bytes INTEGER, PRIMARY KEY (kept, source)) "
               "WITHOUT ROWID")
    docs = 0
    for kind in ("datasets", "dropped"):
        for batch in iter_batches(store, f"{kind}/{dataset}", ["source", "url", "meta", "text"]):
            sizes = pc.binary_length(batch.column("text")).to_pylist()
            for source, url, meta, size in zip(*(batch.column(name).to_pylist() for name in ("source", "url", "meta")),
                                               sizes, strict=True):
                notes = noted_cuts(meta, steps)
                if kind == "dropped" and not notes:
                    continue
                lost = sum(sum(note["bytes"].values()) for note in notes.values())
                docs += bool(notes)
                for what, name in (("source", source or ""), ("domain", domain_of(url))):
                    counts = by[what].setdefault(name, [0, 0, 0, 0])
                    for i, n in enumerate((1, (size or 0) + lost, bool(notes), lost)):
                        counts[i] += n
                for name, note in notes.items():
                    _count(db, reasons, name, note, source or "")
    if not docs:
        return None
    by["domain"].pop("", None)
    pairs = _pairs(db, store, dataset)
    size = sum(n for _, n in reasons.values())
    alarms = [_entry(what, name, by) for what in by for name, (n, of, _, lost) in by[what].items()
              if lost > MUCH * of and (what == "source" or n >= LEAST)]
    return {
        "docs": docs, "passages": sum(n for n, _ in reasons.values()), "bytes": size,
        "by_reason": [{"step": name, "reason": reason, "passages": n, "bytes": lost}
                      for (name, reason), (n, lost) in sorted(reasons.items())],
        "sources": _largest(by, "source", most),
        "pairs": [{"cut": one, "kept": other, "passages": n, "bytes": lost} for (one, other), (n, lost) in
                  sorted(pairs.items(), key=lambda pair: (-pair[1][1], pair[0]))[:most]],
        "unknown": size - sum(lost for _, lost in pairs.values()),
        "domains": _largest(by, "domain", most),
        "alarms": sorted(alarms, key=lambda entry: (-entry["bytes"], json.dumps(entry)))[:most],
        "keepers": _keepers(db, store, dataset, most)}


def _count(db: sqlite3.Connection, reasons: dict[tuple[str, str], list[int]], step: str, note: dict[str, Any],
           source: str) -> None:
    """Add the cuts of one document, from the source `source`, to two sums. `note` is an entry of `noted_cuts`.
    `reasons` sums them up as {(step, reason): [passages, bytes]}. The table `cut` of the database has the passages and
    bytes by the document that keeps them and by `source`."""
    for reason, n in note["cuts"].items():
        counts = reasons.setdefault((step, reason), [0, 0])
        counts[0] += n
        counts[1] += note["bytes"].get(reason, 0)
    db.executemany("INSERT INTO cut VALUES (?, ?, 1, ?) ON CONFLICT DO UPDATE SET passages = passages + 1, "
                   "bytes = bytes + excluded.bytes",
                   [(passage["match"], source, passage["end"] - passage["start"]) for passage in note["passages"]
                    if passage.get("match")])


def _entry(what: str, name: str, by: dict[str, dict[str, list[int]]]) -> dict[str, Any]:
    _, of, docs, lost = by[what][name]
    return {what: masked_address(name) if what == "domain" else name, "docs": docs, "bytes": lost, "of": of}


def _largest(by: dict[str, dict[str, list[int]]], what: str, most: int) -> list[dict[str, Any]]:
    """Return at most `most` sources or domains: those that lost the most bytes to cuts. `what` is "source" or "domain".
    """
    cut = [name for name, counts in by[what].items() if counts[3]]
    return [_entry(what, name, by) for name in heapq.nsmallest(most, cut, key=lambda name: (-by[what][name][3], name))]


def _pairs(db: sqlite3.Connection, store: Store, dataset: str) -> dict[tuple[str, str], list[int]]:
    """Return {(source of the cut document, source of the document that keeps the passage): [passages, bytes]} for all
    passages that were cut out of documents of the dataset."""
    pairs: dict[tuple[str, str], list[int]] = {}
    for kind in ("datasets", "dropped"):
        for batch in iter_batches(store, f"{kind}/{dataset}", ["id", "source"]):
            origin = dict(zip(batch.column("id").to_pylist(), batch.column("source").to_pylist(), strict=True))
            ids = list(origin)
            for first in range(0, len(ids), MOST_KEYS):
                chunk = ids[first:first + MOST_KEYS]
                for kept, source, n, lost in db.execute("SELECT kept, source, passages, bytes FROM cut WHERE kept IN "
                                                        f"({', '.join('?' * len(chunk))})", chunk):
                    counts = pairs.setdefault((source, origin[kept] or ""), [0, 0])
                    counts[0], counts[1] = counts[0] + n, counts[1] + lost
    return pairs


def _keepers(db: sqlite3.Connection, store: Store, dataset: str, most: int) -> list[dict[str, Any]]:
    """Return at most `most` documents: those that keep the most bytes of passages that were cut out of other documents.
    """
    rows = db.execute("SELECT kept, sum(passages), sum(bytes) AS n FROM cut GROUP BY kept ORDER BY n DESC, kept "
                      "LIMIT ?", (most,)).fetchall()
    places = dict(_places(store, dataset, {kept for kept, _, _ in rows}))
    return [{"id": kept, "source": places.get(kept, (None, None))[0],
             "url": masked_address(places[kept][1]) if kept in places else None, "passages": n, "bytes": lost}
            for kept, n, lost in rows]
