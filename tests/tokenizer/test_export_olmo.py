"""Exports for OLMo-core and dolma: compared byte by byte, and read by olmo_core where it is installed (tested with
ai2-olmo-core 3.0.0)."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest

from tests.tokenizer.exports import VOCABS, Corpus, corpus
from tests.tokenizer.test_shards import EOS
from tokenizer.export.export import export
from tokenizer.shards.reader import ShardSet


@pytest.fixture(params=VOCABS)
def shard_set(request, tmp_path) -> Corpus:
    shard_set = corpus(tmp_path / "set", request.param, masked=(0, 2))
    export(ShardSet(shard_set.folder), "olmo", tmp_path / "out")
    return shard_set


def size_of(vocab: int) -> int:
    return 1 if vocab <= 256 else 2 if vocab <= 65536 else 4


def test_bytes_are_those_of_the_layout(shard_set, tmp_path):
    size = size_of(shard_set.manifest.vocab_size)
    for number, info in enumerate(shard_set.manifest.shards):
        stem = str(tmp_path / "out" / f"part-0-{number:05d}")
        documents = [shard_set.documents[i].tolist() for i in shard_set.of_shard(number)]
        with open(f"{stem}.npy", "rb") as file:                 # no header: the first byte is the first token's
            assert file.read() == b"".join(t.to_bytes(size, "little") for d in documents for t in d)
        with gzip.open(f"{stem}.csv.gz", "rt") as file:
            lines = file.read().splitlines()
        end = 0
        for line, document, i in zip(lines, documents, shard_set.of_shard(number), strict=True):
            start, end = end, end + len(document)
            assert line == f"{start},{end},{shard_set.ids[i]},web,{i + 1}"
        with open(tmp_path / "out" / f"labels_mask-0-{number:05d}.npy", "rb") as file:
            assert file.read() == b"".join(bytes(shard_set.targets[i].tolist()) for i in shard_set.of_shard(number))
        assert os.path.samefile(f"{stem}.npy", shard_set.folder / info.body)
    assert len(os.listdir(tmp_path / "out")) == 3 * 3


def test_the_compressed_lines_hold_neither_time_nor_name(shard_set, tmp_path):
    """RFC 1952: flags, time and the name follow the two bytes of magic and the method."""
    head = (tmp_path / "out" / "part-0-00000.csv.gz").read_bytes()[:10]
    assert head[:8] == b"\x1f\x8b\x08\x00\x00\x00\x00\x00"


def test_a_set_without_masks_has_no_mask_files(tmp_path):
    plain = corpus(tmp_path / "set", 300)
    export(ShardSet(plain.folder), "olmo", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(f"part-0-{i:05d}.{s}" for i in range(3)
                                                          for s in ("npy", "csv.gz"))


def test_olmo_core_reads_the_same_windows_masks_and_documents(shard_set, tmp_path):
    data = pytest.importorskip("olmo_core.data", exc_type=ImportError)
    from olmo_core.data.utils import get_labels, iter_document_indices

    length, vocab = 32, shard_set.manifest.vocab_size
    paths = [str(tmp_path / "out" / f"part-0-{i:05d}.npy") for i in range(3)]
    masks = [str(tmp_path / "out" / f"labels_mask-0-{i:05d}.npy") for i in range(3)]
    config = data.NumpyFSLDatasetConfig(
        paths=paths, label_mask_paths=masks, sequence_length=length, work_dir=str(tmp_path / "work"),
        tokenizer=data.TokenizerConfig(vocab_size=vocab, eos_token_id=EOS, pad_token_id=EOS))
    dataset = config.build()                                    # it chooses the width of tokens by the vocabulary
    dataset.prepare()
    seen = 0
    for number in range(3):
        flat = np.concatenate([shard_set.documents[i] for i in shard_set.of_shard(number)]).astype(np.int64)
        counted = np.concatenate([shard_set.targets[i] for i in shard_set.of_shard(number)])
        for start in range(0, len(flat) // length * length, length):
            item = dataset[seen]
            tokens, mask = flat[start:start + length], counted[start:start + length]
            assert np.array_equal(item["input_ids"].numpy(), tokens)
            assert np.array_equal(item["label_mask"].numpy(), mask)
            labels = get_labels({k: item[k].unsqueeze(0) for k in ("input_ids", "label_mask")})[0].numpy()
            assert np.array_equal(labels[:-1], np.where(mask, tokens, -100)[1:])
            seen += 1
        ends = np.cumsum([len(shard_set.documents[i]) for i in shard_set.of_shard(number)]).tolist()
        spans = list(zip([0, *ends], ends))
        width = np.dtype(f"u{size_of(vocab)}").type
        assert list(iter_document_indices(paths[number], use_array_if_local=False, dtype=width)) == spans
        assert list(iter_document_indices(paths[number], eos_token_id=EOS, dtype=width)) == spans
    assert seen == len(dataset)
