"""Tells how many tokens the documents of a run have: counted for documents in shards, and estimated for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.passes.encode import SPLITS, EncodePart
from pipeline.service.sampling import id_bytes
from pipeline.store.fs import Store
from pipeline.store.records import PartRecord
from pipeline.store.runs import RunTasks

#: a source with fewer documents in shards than this gets the range of all sources
FEW = 40
#: the range of tokens per byte: it begins and ends at these quantiles of the documents
RANGE = (0.025, 0.975)


@dataclass(frozen=True)
class TokenColumns:
    """The numbers of tokens of documents, as arrays with one value for each document. `counted` is true for documents
    in shards, whose tokens are known. `estimate` is the number of tokens, which lies between `low` and `high`. All
    three are equal for a counted document."""

    counted: np.ndarray
    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray


def with_estimates(tokens: np.ndarray, sizes: np.ndarray, sources: np.ndarray) -> TokenColumns:
    """Estimate the numbers of tokens of the documents that are in no shard. For each document, `tokens` has the number
    of tokens (NaN: not known), `sizes` the number of bytes, and `sources` the number that stands for its source.

    The estimate for a document is its bytes times a rate, the tokens per byte of all documents of its source that are
    in shards. `low` and `high` are its bytes times the lowest and the highest rate of a single document, without the
    2.5 % most extreme documents at each end.

    If a source has fewer than FEW documents in shards, the range of all sources is used. If it has none, the rate of
    all sources is used, too.

    The range covers the differences between single documents, not only the error of a mean. Dropped documents are no
    random sample, so their mean may differ, too.
    """
    counted = ~np.isnan(tokens)
    sizes = np.nan_to_num(sizes)
    usable = counted & (sizes > 0)
    columns = [np.nan_to_num(tokens) for _ in range(3)]
    if usable.any():
        whole = _rates(tokens[usable], sizes[usable])
        for source in np.unique(sources[~counted]):
            known, unknown = usable & (sources == source), ~counted & (sources == source)
            rates = _rates(tokens[known], sizes[known]) if known.any() else whole
            if known.sum() < FEW:
                rates = rates[0], min(rates[0], whole[1]), max(rates[0], whole[2])
            for column, rate in zip(columns, rates):
                column[unknown] = np.rint(sizes[unknown] * rate)
    return TokenColumns(counted, *columns)


def _rates(tokens: np.ndarray, sizes: np.ndarray) -> tuple[float, float, float]:
    """Return three numbers of tokens per byte. The first is that of all given documents together. The others are the
    ends of the range in which single documents lie (RANGE). `tokens` and `sizes` (bytes) have a value for each
    document."""
    rate = float(tokens.sum() / sizes.sum())
    low, high = np.quantile(tokens / sizes, RANGE).tolist()
    return rate, min(low, rate), max(high, rate)


class TokenCounts:
    """A table of the numbers of tokens of the documents in a run's shards, by document id. The end-of-text token is
    counted. A document may be in several streams (separate sets of shards). It has the same number of tokens in each,
    because a run has one tokenizer."""

    def __init__(self, ids: np.ndarray, tokens: np.ndarray) -> None:
        """Make the table. `ids`, of shape (documents, 2) and type uint64, holds the two halves of each document's id;
        `tokens`, of shape (documents,), holds the numbers of tokens."""
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
    """Read the numbers of tokens of the documents in a run's shards, from the results of the run's tasks. `get` returns
    the commit record of the task with a given key. Returns None if the run has made no shards."""
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
    """Split each document id of 128 bits into two halves of type uint64. Returns an array of shape (documents, 2)."""
    return np.frombuffer(id_bytes(ids), ">u8").astype(np.uint64).reshape(-1, 2)
