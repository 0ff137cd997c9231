"""Runs a deduplication on documents of a test: writes parts to disk, runs the waves in this process, and reads the
removal slices back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.base.parquet import write_table
from pipeline.engine.task import CrashCursor, TaskSpec
from pipeline.engine.worker.attempt import run_attempt
from pipeline.store.content_keys import content_key, task_key
from pipeline.store.fs import Store
from pipeline.store.lists import ListFiles, writes_to
from pipeline.store.records import merge_counters
from stages.barrier import Barrier, PartRef, TaskResult, Wave
from stages.catalog import load
from stages.dedup.index import DedupIndex
from stages.document import Document, document_id, storable_text


@dataclass(frozen=True)
class Doc:
    text: str
    dataset: str = "web"
    id: str = ""
    url: str = ""
    language: str = ""
    date: str | None = None
    signals: tuple[tuple[str, float], ...] = ()
    meta: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return self.id or document_id(self.dataset, "f", "", int.from_bytes(self.text.encode()[:64], "big"))


@dataclass
class Outcome:
    removed: dict[str, tuple[str, str, float | None, str]]     # id → reason, kept, similarity, cluster
    clusters: dict[str, str]                                   # id → cluster, for every document in a slice
    counters: dict[str, Any]
    results: dict[str, list[TaskResult]]
    slices: list[Any]
    content: list[str | None]
    keys: dict[str, list[str]]                                 # content keys of the tasks of each wave
    index: DedupIndex | None = None


def write_parts(barrier: Barrier, docs: list[Doc], store: Store, *, part_rows: int = 10,
                ranks: dict[str, int] | None = None, row_group: int = 4) -> list[PartRef]:
    """Write documents, in their order, as parts of their datasets, with the side tables that the barrier's prepare
    stage makes."""
    target, config = barrier.prepare()
    stage = load(target)(config)
    parts: list[PartRef] = []
    for dataset in dict.fromkeys(d.dataset for d in docs):
        mine = [d for d in docs if d.dataset == dataset]
        for start in range(0, len(mine), part_rows):
            rows = mine[start:start + part_rows]
            sides = []
            for row, d in enumerate(rows):
                document = Document(d.name, d.text, source=dataset, url=d.url, language=d.language,
                                    date=d.date, signals=dict(d.signals), meta=dict(d.meta))
                assert stage.process(document) is None
                sides.append({"row": row, "id": d.name, **document.side[stage.name]})
            texts = pa.array([storable_text(d.text) for d in rows], pa.large_string())
            text = pa.table({"id": [d.name for d in rows], "text": texts})
            side = pa.Table.from_pylist(sides, pa.schema([("row", pa.uint32()), ("id", pa.string()), *stage.side]))
            refs = []
            for name, table in (("kept", text), ("side", side)):
                path = Path(store.at(f"in/{dataset}-{start}.{name}.parquet"))
                path.parent.mkdir(parents=True, exist_ok=True)
                write_table(table, str(path), row_group_size=row_group, use_dictionary=False)       # as parts are
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                refs.append({"$ref": f"in/{path.name}", "bytes": path.stat().st_size, "rows": len(rows),
                             "content": digest, "sha256": digest})
            key = content_key("part", 1, [d.name for d in rows])
            parts.append(PartRef(key, dataset, (ranks or {}).get(dataset, 0), len(rows), refs[0]["bytes"], *refs))
    return parts


def run_fragment(barrier: Barrier, parts: list[PartRef], store: Store, *, shuffle: int | None = None,
                 against: Sequence[DedupIndex] = (), ranks: int | None = None) -> Outcome:
    """Run the waves of the barrier over the parts. With `shuffle`, the tasks of a wave finish in a random order. With
    `ranks` (the number of priorities), also make an index."""
    counters: dict[str, Any] = {}
    keys: dict[str, list[str]] = {}
    done = _run_waves(barrier.waves(parts, against) if against else barrier.waves(parts), store, shuffle, counters,
                      keys)
    slices = list(barrier.slices(parts, done))
    outcome = _read_slices(parts, slices, store, done, counters, keys)
    if ranks is not None:
        made = _run_waves(barrier.index_waves(parts, slices, done), store, shuffle, counters, keys)
        outcome.index = barrier.index(parts, made, ranks)
    return outcome


def _run_waves(waves: list[Wave], store: Store, shuffle: int | None, counters: dict[str, Any],
               keys: dict[str, list[str]]) -> dict[str, list[TaskResult]]:
    done: dict[str, list[TaskResult]] = {}
    lists = ListFiles(writes_to(store))
    todo = list(waves)
    while todo:
        wave = todo.pop(0)
        drafts = list(wave.tasks(done))
        order = list(range(len(drafts)))
        if shuffle is not None:
            random.Random(f"{shuffle}/{wave.name}").shuffle(order)
        results: dict[int, TaskResult] = {}
        args = [lists.fold(d.args) for d in drafts]
        mine = [task_key(d.task, a) for d, a in zip(drafts, args)]
        keys[wave.name] = keys.get(wave.name, []) + mine
        for i in order:
            d = drafts[i]
            record = run_attempt(TaskSpec(mine[i], d.task, wave.name, args[i]), store, "a0", CrashCursor())
            results[i] = TaskResult({n: f.ref() for n, f in record.files.items()}, record.counters)
            merge_counters(counters.setdefault(wave.name, {}), record.counters)
        done[wave.name] = [results[i] for i in range(len(drafts))]
        if wave.again(done):
            todo.insert(0, wave)
    return done


def _read_slices(parts: list[PartRef], slices: list[Any], store: Store, done: dict[str, list[TaskResult]],
                 counters: dict[str, Any], keys: dict[str, list[str]]) -> Outcome:
    removed, clusters = {}, {}
    for part, ref in zip(parts, slices, strict=True):
        if ref is None:
            continue
        with store.open(part.text["$ref"]) as text, store.open(ref["$ref"]) as said:
            ids = pq.read_table(text, columns=["id"])["id"].to_pylist()
            rows = pq.read_table(said).to_pylist()
        assert [r["row"] for r in rows] == sorted({r["row"] for r in rows})
        assert ref["rows"] == len(rows)
        for r in rows:
            clusters[ids[r["row"]]] = r["cluster"]
            if r["reason"]:
                removed[ids[r["row"]]] = (r["reason"], r["kept"], r["similarity"], r["cluster"])
            else:
                assert r["kept"] is None
                assert r["similarity"] is None
    return Outcome(removed, clusters, counters, done, slices, [s and s["content"] for s in slices], keys)
