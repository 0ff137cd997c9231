"""Shard sets for the tests of exports, with their documents in plain form for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.tokenizer.test_shards import EOS, write_set
from tokenizer.shards.layout import Manifest, token_dtype
from tokenizer.shards.reader import ShardSet

#: sizes of vocabularies: tokens of one byte (in OLMo-core), two bytes, the largest for two, the smallest for four, four
VOCABS = [200, 300, 65_536, 65_537, 200_000]


class Corpus(NamedTuple):
    """A shard set with its documents. `targets` has a flag for each token of each document: whether the loss counts
    it."""

    folder: Path
    manifest: Manifest
    ids: list[str]
    documents: list[np.ndarray]
    targets: list[np.ndarray]
    #: number of documents of each shard
    sizes: list[int]

    def of_shard(self, number: int) -> range:
        first = sum(self.sizes[:number])
        return range(first, first + self.sizes[number])


def corpus(folder: Path, vocab: int, shards: Sequence[Sequence[int]] | None = None, masked: tuple[int, ...] = (),
           stray: int | None = None) -> Corpus:
    """Write a shard set of random documents. `shards` has the lengths of the documents of each shard, without EOS. With
    `stray`, one token has this id, which is to be outside the vocabulary. The shards `masked` get a loss mask."""
    rng = np.random.default_rng(vocab)
    if shards is None:
        shards = [rng.integers(0, 60, 70).tolist(), [0], [*rng.integers(0, 900, 40).tolist(), 70_000]]
    documents = [[rng.integers(4, vocab, length) for length in lengths] for lengths in shards]
    if documents:
        documents[0][0] = np.array([vocab - 1, 4, vocab - 1])
        if stray is not None:
            documents[-1][-1][0] = stray
    manifest = write_set(folder, documents, vocab, masked=masked)
    flat = [np.append(document, EOS).astype(token_dtype(vocab)) for shard in documents for document in shard]
    ends = np.cumsum([len(document) for document in flat])
    counts = ShardSet(folder).counts(0, manifest.tokens)
    targets = np.ones(manifest.tokens, bool) if counts is None else counts
    return Corpus(folder, manifest, [f"{i:032x}" for i in range(len(flat))], flat, np.split(targets, ends)[:-1],
                  [len(shard) for shard in shards])


def tree(folder: Path) -> dict[str, bytes]:
    """Return {relative path: contents} for the files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
