"""Exports for litdata: compared byte by byte, and read by litdata where it is installed (tested with 0.2.76)."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.tokenizer.exports import VOCABS, Corpus, corpus
from tokenizer.export.litdata import LitDataWriter
from tokenizer.export.source import ExportSource
from tokenizer.export.target import FolderTarget, appearing
from tokenizer.shards.reader import ShardSet

#: less than the longest document, so that it gets a file of its own
LIMIT = 20_000


@pytest.fixture(params=VOCABS)
def shard_set(request, tmp_path) -> Corpus:
    return corpus(tmp_path / "set", request.param)


def write(shard_set: Corpus, out: Path, limit: int = LIMIT) -> None:
    with appearing(out, "--out") as folder:
        target = FolderTarget(folder)
        LitDataWriter(limit).write(ExportSource(ShardSet(shard_set.folder), False, lambda size: None), target)


@pytest.mark.parametrize("limit", [LIMIT, 64_000_000])
def test_bytes_are_those_of_the_layout(shard_set, tmp_path, limit):
    write(shard_set, tmp_path / "out", limit)
    size = np.dtype(shard_set.manifest.dtype).itemsize
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["config"]["data_format"] == [f"no_header_numpy:{[0, 4, 5, 0, 6][size]}"]
    assert index["updated_at"] == shard_set.manifest.sha256
    documents = []
    for number, chunk in enumerate(index["chunks"]):
        assert chunk["filename"] == f"chunk-0-{number}.bin"
        data = (tmp_path / "out" / chunk["filename"]).read_bytes()
        [count] = struct.unpack_from("<I", data)
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        assert (offsets[0], offsets[-1]) == (4 + 4 * (count + 1), len(data))
        assert (chunk["chunk_size"], chunk["chunk_bytes"]) == (count, len(data))
        assert chunk["dim"] == (len(data) - offsets[0]) // size
        assert len(data) <= limit or count == 1
        documents += [struct.unpack(f"<{(b - a) // size}{'_BH_I'[size]}", data[a:b])
                      for a, b in pairwise(offsets)]
    assert documents == [tuple(document.tolist()) for document in shard_set.documents]
    assert (len(index["chunks"]) >= 3) is (limit == LIMIT)


@pytest.mark.parametrize("block", [32, 65])
def test_litdata_reads_the_same_blocks(shard_set, tmp_path, block):
    pytest.importorskip("litdata", exc_type=ImportError)
    from litdata import StreamingDataset, TokensLoader

    write(shard_set, tmp_path / "out")
    dataset = StreamingDataset(str(tmp_path / "out"), item_loader=TokensLoader(block_size=block), shuffle=False)
    expected, at = [], 0
    for chunk in json.loads((tmp_path / "out" / "index.json").read_text())["chunks"]:
        tokens = np.concatenate(shard_set.documents[at:at + chunk["chunk_size"]])
        at += chunk["chunk_size"]
        expected += [tokens[k:k + block] for k in range(0, len(tokens) - block + 1, block)]
    assert len(dataset) == len(expected) > 100
    for k, tokens in enumerate(expected):
        assert np.array_equal(dataset[k], tokens)
