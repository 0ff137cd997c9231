"""Exports for datatrove and nanotron: read by datatrove, and compared byte by byte."""

from __future__ import annotations

import os

import numpy as np
import pytest
from datatrove.io import get_datafolder
from datatrove.pipeline.tokens.merger import DocumentTokenizerMerger, load_doc_ends
from datatrove.utils.dataset import DatatroveFolderDataset

from tests.tokenizer.exports import VOCABS, Corpus, corpus
from tokenizer.export.export import export
from tokenizer.shards.reader import ShardSet


@pytest.fixture(params=VOCABS)
def shard_set(request, tmp_path) -> Corpus:
    return corpus(tmp_path / "set", request.param, masked=(0, 2))


def test_bytes_are_those_of_the_layout(shard_set, tmp_path):
    result = export(ShardSet(shard_set.folder), "ds", tmp_path / "out")
    size = 2 if shard_set.manifest.vocab_size <= 65536 else 4
    linked = 0
    for number, info in enumerate(shard_set.manifest.shards):
        stem = tmp_path / "out" / f"{number:05d}.ds"
        documents = [shard_set.documents[i] for i in shard_set.of_shard(number)]
        assert stem.read_bytes() == b"".join(int(t).to_bytes(size, "little") for d in documents for t in d)
        ends = np.cumsum([len(d) for d in documents]).tolist()
        assert (stem.parent / f"{stem.name}.index").read_bytes() == b"".join(e.to_bytes(8, "little") for e in ends)
        targets = b"".join(bytes(shard_set.targets[i].tolist()) for i in shard_set.of_shard(number))
        assert (stem.parent / f"{stem.name}.loss").read_bytes() == targets
        first, count, people = (stem.parent / f"{stem.name}.metadata").read_text().split("\n")
        tokenizer, width = first.split("|")                     # nanotron wants exactly two
        assert (tokenizer, int(width), int(count)) == (f"tokenizer-{'t' * 12}", size, ends[-1])
        assert people.endswith(" T")
        for name, kind in (("", "body"), (".index", "ends"), (".loss", "loss")):
            if kind == "body" and shard_set.manifest.dtype == "uint8":     # written as u16, which datatrove reads
                continue
            if getattr(info, kind):
                assert os.path.samefile(stem.parent / f"{stem.name}{name}", shard_set.folder / getattr(info, kind))
                linked += (shard_set.folder / getattr(info, kind)).stat().st_size
    assert result.linked == linked
    assert len(os.listdir(tmp_path / "out")) == 4 * 3


def test_datatrove_reads_the_same_windows_and_positions(shard_set, tmp_path):
    export(ShardSet(shard_set.folder), "ds", tmp_path / "out")
    length = 30
    dataset = DatatroveFolderDataset(str(tmp_path / "out"), length, "*.ds", return_positions=True,
                                     token_size=2 if shard_set.manifest.vocab_size <= 65536 else 4)
    expected = []
    for number in range(3):
        flat = np.concatenate([shard_set.documents[i] for i in shard_set.of_shard(number)])
        place = np.concatenate([np.arange(len(shard_set.documents[i])) for i in shard_set.of_shard(number)])
        for start in range(0, len(flat) - length, length + 1):
            positions = place[start:start + length + 1]
            begun = np.flatnonzero(positions == 0)
            # the document that reaches into the window is counted from the beginning of the window
            until = int(begun[0]) if len(begun) else length + 1
            expected.append((flat[start:start + length + 1], np.append(np.arange(until), positions[until:])))
    assert len(dataset) == len(expected) > 100
    for item, (tokens, positions) in zip(dataset, expected):
        assert np.array_equal(item["input_ids"].numpy(), tokens.astype(np.int64))
        assert np.array_equal(item["positions"].numpy(), positions)


def test_datatrove_merges_the_files_with_their_masks(shard_set, tmp_path):
    """Its merger takes the size of a token from the metadata, and two bytes without it."""
    export(ShardSet(shard_set.folder), "ds", tmp_path / "out")
    DocumentTokenizerMerger(str(tmp_path / "out"), str(tmp_path / "merged"), "all", save_loss_metadata=True,
                            shuffle=False).run(None, 0, 1)
    merged = get_datafolder(str(tmp_path / "merged"))
    ends = load_doc_ends(merged.open("000_all.ds.index", "rb"))
    dtype = np.promote_types(shard_set.documents[0].dtype, np.uint16)
    tokens = np.fromfile(tmp_path / "merged" / "000_all.ds", dtype)
    loss = np.fromfile(tmp_path / "merged" / "000_all.ds.loss", np.uint8)
    found = sorted((t.tobytes(), m.tobytes()) for t, m in zip(np.split(tokens, ends)[:-1], np.split(loss, ends)[:-1]))
    expected = zip(shard_set.documents, shard_set.targets)
    assert found == sorted((t.astype(dtype).tobytes(), m.tobytes()) for t, m in expected)
