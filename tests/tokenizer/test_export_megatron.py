"""Exports for Megatron-LM: compared byte by byte, and read by megatron.core where it is installed (tested with
0.16.1)."""

from __future__ import annotations

import os
import struct
import warnings
from dataclasses import replace

import numpy as np
import pytest

from tests.tokenizer.exports import VOCABS, Corpus, corpus
from tokenizer.export.export import export
from tokenizer.export.megatron import lengths
from tokenizer.export.source import ExportError
from tokenizer.shards.layout import MANIFEST
from tokenizer.shards.reader import ShardSet


@pytest.fixture(params=VOCABS)
def shard_set(request, tmp_path) -> Corpus:
    shard_set = corpus(tmp_path / "set", request.param)
    export(ShardSet(shard_set.folder), "megatron", tmp_path / "out")
    return shard_set


def test_bytes_are_those_of_the_layout(shard_set, tmp_path):
    size = np.dtype(shard_set.manifest.dtype).itemsize
    for number, info in enumerate(shard_set.manifest.shards):
        documents = [shard_set.documents[i].tolist() for i in shard_set.of_shard(number)]
        index = (tmp_path / "out" / f"shard_{number:05d}.idx").read_bytes()
        head = struct.unpack_from("<9sQBQQ", index)
        assert head == (b"MMIDIDX\0\0", 1, {1: 1, 2: 8, 4: 4}[size], len(documents), len(documents) + 1)
        n = len(documents)
        assert len(index) == 34 + 4 * n + 8 * n + 8 * (n + 1)
        sizes = struct.unpack_from(f"<{n}i", index, 34)
        begins = struct.unpack_from(f"<{n}q", index, 34 + 4 * n)
        assert struct.unpack_from(f"<{n + 1}q", index, 34 + 12 * n) == tuple(range(n + 1))
        body = (tmp_path / "out" / f"shard_{number:05d}.bin").read_bytes()
        assert len(body) == size * sum(sizes)
        for begin, tokens, document in zip(begins, sizes, documents):
            assert struct.unpack_from(f"<{tokens}{'_BH_i'[size]}", body, begin) == tuple(document)
        assert os.path.samefile(tmp_path / "out" / f"shard_{number:05d}.bin", shard_set.folder / info.body)
    assert len(os.listdir(tmp_path / "out")) == 2 * 3


def test_a_vocabulary_beyond_i32_is_refused(tmp_path):
    shard_set = corpus(tmp_path / "set", 70_000)
    for vocab, fits in ((2**31, True), (2**31 + 1, False)):
        manifest = replace(shard_set.manifest, vocab_size=vocab)
        (shard_set.folder / MANIFEST).write_text(replace(manifest, sha256=manifest.identity()).dumps())
        if fits:
            export(ShardSet(shard_set.folder), "megatron", tmp_path / "out")
            continue
        with pytest.raises(ExportError, match="vocab_size"):
            export(ShardSet(shard_set.folder), "megatron", tmp_path / "large")
    assert sorted(os.listdir(tmp_path)) == ["out", "set"]


def test_a_document_beyond_i32_is_refused():
    assert lengths(np.array([0]), np.array([2**31 - 1]), "x-tokens").tolist() == [2**31 - 1]
    with pytest.raises(ExportError, match="x-tokens"):
        lengths(np.array([0, 5]), np.array([5, 5 + 2**31]), "x-tokens")


def test_megatron_reads_the_same_documents(shard_set, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    for number in range(3):
        prefix = str(tmp_path / "out" / f"shard_{number:05d}")
        assert indexed.IndexedDataset.exists(prefix)
        dataset = indexed.IndexedDataset(prefix, mmap=True)
        documents = [shard_set.documents[i] for i in shard_set.of_shard(number)]
        assert len(dataset) == len(documents)
        assert dataset.document_indices.tolist() == list(range(len(documents) + 1))
        for k, document in enumerate(documents):
            assert np.array_equal(dataset[k].astype(np.int64), document)
            assert np.array_equal(dataset.get(k, offset=len(document) // 2), document[len(document) // 2:])
