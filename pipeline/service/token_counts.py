"""Looks up how many tokens a document has in the shards that a run made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeline.passes.encode import SPLITS, EncodePart
from pipeline.service.sampling import id_bytes
from pipeline.store.fs import Store
from pipeline.store.records import PartRecord
from pipeline.store.runs import RunTasks


class TokenCounts:
    """The number of tokens of each document in the shards of a run, including the end-of-text token. A document may be
    in several streams (separate sets of shards). It has the same number of tokens in each, because a run has one
    tokenizer."""

    def __init__(self, ids: np.ndarray, tokens: np.ndarray) -> None:
        """`ids` (documents, 2) uint64 holds the two halves of each id, and `tokens` (documents,) the numbers of
        tokens."""
        order = np.lexsort((ids[:, 1], ids[:, 0]))
        self._high, self._low, self._tokens = ids[order, 0], ids[order, 1], tokens[order]

    def of(self, ids: list[str]) -> np.ndarray:
        """Return the numbers of tokens of the documents with these ids; NaN for a document that is in no shard."""
        result = np.full(len(ids), np.nan)
        if len(self._high):
            halves = _halves(ids)
            at = np.minimum(np.searchsorted(self._high, halves[:, 0]), len(self._high) - 1)
            there = (self._high[at] == halves[:, 0]) & (self._low[at] == halves[:, 1])
            result[there] = self._tokens[at[there]]
        return result


def token_counts(store: Store, run: str, plan: Mapping[str, Any],
                 get: Callable[[str], PartRecord | None]) -> TokenCounts | None:
    """Read the token counts of a run from the results of its tasks; `get` returns the record of a task. Returns None if
    the run has made no shards."""
    tasks, ids, counts = RunTasks(store, run), [], []
    for node in plan["nodes"]:
        for key in tasks.keys(node["name"]) if node["kind"] == "shards" else ():
            record = get(key)
            if record is None or record.task != EncodePart.name:
                continue
            for split in SPLITS:
                info = record.files[f"{split}.parquet"]
                if info.rows:
                    with store.parquet(info.path, info.sha256) as parquet:
                        table = parquet.read(columns=["id", "end"], use_threads=False)
                    ids.append(_halves(table["id"].to_pylist()))
                    counts.append(np.diff(table["end"].to_numpy().astype(np.float64), prepend=0.0))
    return TokenCounts(np.concatenate(ids), np.concatenate(counts)) if ids else None


def _halves(ids: list[str]) -> np.ndarray:
    """Return the two halves of each id as uint64, of shape (documents, 2)."""
    return np.frombuffer(id_bytes(ids), ">u8").astype(np.uint64).reshape(-1, 2)
