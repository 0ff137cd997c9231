"""Strata of a balanced sample of texts: groups of documents, such as those of one source or language, each with a share
of the sample's bytes. The settings are those of `tokenizer.train.sample` in a recipe (`pipeline.recipe.model`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from pipeline.passes.rows import Rows


class Strata:
    """Says of which stratum (group of documents by source, language or both) a document is, and how many bytes of a
    sample each stratum gets. Without settings, there is one stratum, whose key is 0."""

    def __init__(self, settings: Mapping[str, Any] | None) -> None:
        settings = settings or {}
        self._weights = {name: settings[name] for name in ("source", "language") if settings.get(name)}
        self._alpha = settings.get("alpha") or 0.0
        #: columns whose values make a stratum
        self.columns = tuple(name for name in ("source", "language")
                             if name in self._weights or name in (settings.get("by") or ()))
        self._names: dict[int, tuple[str, ...]] = {} if self.columns else {0: ()}

    def keys(self, rows: Rows) -> list[int]:
        """Return the key of each row's stratum: a number below 2^64 that depends only on the row's source, language or
        both."""
        if not self.columns:
            return [0] * len(rows.batch)
        values = list(zip(*([value or "" for value in rows.column(name)] for name in self.columns)))
        for names in set(values):
            self._names[_key(names)] = names
        return [_key(names) for names in values]

    def dumps(self, keys: np.ndarray, sizes: np.ndarray) -> str:
        """Return, as JSON, the result of `Strata.sizes` for some documents: the names and total bytes of their strata.
        `keys` has the stratum key of each document, and `sizes` the bytes of each document."""
        unique, places = np.unique(keys, return_inverse=True)
        totals = np.zeros(len(unique), np.uint64)
        np.add.at(totals, places, sizes)
        return json.dumps(self.sizes(dict(zip(map(str, unique.tolist()), totals.tolist()))), sort_keys=True)

    def sizes(self, totals: Mapping[str, int]) -> dict[str, Any]:
        """Return {key of a stratum: {"names": [source, language], "bytes": its bytes}}. If strata are made by only one
        of source and language, "names" has only this one. `totals` maps the key of each stratum to its bytes."""
        return {key: {"names": list(self._names[int(key)]), "bytes": total} for key, total in totals.items()}

    def shares(self, files: Iterable[Mapping[str, Any]], size: int) -> dict[int, int]:
        """Return {key of a stratum: how many of the `size` bytes of the sample it gets}. `files` are results of
        `Strata.sizes` for different documents. The bytes of a stratum are added up over them. If a stratum has less
        text than its share, the other strata get the rest, in proportion to their weights. Strata of weight 0 are left
        out."""
        totals: dict[int, int] = {}
        names: dict[int, list[str]] = {}
        for file in files:
            for key, stratum in file.items():
                totals[int(key)] = totals.get(int(key), 0) + stratum["bytes"]
                names[int(key)] = stratum["names"]
        if not self.columns:
            return dict.fromkeys(totals, size)
        weights = {key: self._weight(names[key], total) for key, total in sorted(totals.items()) if total}
        weights = {key: weight for key, weight in weights.items() if weight}
        shares: dict[int, int] = {}
        while weights:
            left, total = size - sum(shares.values()), sum(weights.values())
            small = [key for key, weight in weights.items() if totals[key] <= left * weight / total]
            if not small:
                return shares | {key: int(left * weight / total) for key, weight in weights.items()}
            for stratum_key in small:
                shares[stratum_key] = totals[stratum_key]
                del weights[stratum_key]
        return shares

    def _weight(self, names: list[str], total: int) -> float:
        weight = float(total) ** self._alpha
        for column, name in zip(self.columns, names):
            if column in self._weights:
                weight *= self._weights[column].get(name, 0)
        return weight


@cache
def _key(names: tuple[str, ...]) -> int:
    data = json.dumps(names, ensure_ascii=True).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class Cut:
    """Decides which documents of a list are in the sample. The list is sorted by rising rank (a pseudo-random number).
    Each stratum gets its documents in this order, until the next one would exceed its share of bytes. If this leaves
    the sample empty, it consists of a single document: the one of the lowest rank in the strata that have a share."""

    def __init__(self, shares: Mapping[int, int]) -> None:
        self._left = dict(shares)                                # bytes, of the strata that have not ended
        self.documents = self.bytes = 0
        #: rank of the last document of each stratum, by its key
        self.last: dict[int, int] = {}
        self._first: tuple[int, int, int] | None = None          # rank, bytes, stratum of the lowest rank with a share

    @property
    def ended(self) -> bool:
        return not self._left

    def add(self, ranks: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Add the next documents of the list: their ranks, bytes and stratum keys. Returns which of them are in the
        sample, as a bool array."""
        chosen = np.zeros(len(ranks), bool)
        shared = np.flatnonzero(np.isin(keys, np.array(list(self._left), np.uint64)))
        if self._first is None and len(shared):
            i = shared[0]
            self._first = int(ranks[i]), int(sizes[i]), int(keys[i])
        for key in list(self._left):
            places = np.flatnonzero(keys == np.uint64(key))
            total = np.cumsum(sizes[places])
            n = int(np.searchsorted(total, np.uint64(self._left[key]), "right"))
            chosen[places[:n]] = True
            if n:
                self.last[key] = int(ranks[places[n - 1]])
                self._left[key] -= int(total[n - 1])
            if n < len(places):
                del self._left[key]
        if self.ended and not self.documents and not chosen.any() and self._first is not None:
            rank, self.bytes, key = self._first
            self.last, self.documents = {key: rank}, 1
            return (ranks == np.uint64(rank)) & (keys == np.uint64(key))
        self.documents += int(chosen.sum())
        self.bytes += int(sizes[chosen].sum())
        return chosen
