"""Exports for llm.c and modded-nanogpt: compared byte by byte, and read by the same steps as in their loaders, which
are not available as packages: `_load_data_shard` of modded-nanogpt (commit f411b3d, for u16) and of train_llama3.py in
llm.c (commit 01bc4c6, for u32)."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tokenizer.exports import VOCABS, Corpus, corpus
from tests.tokenizer.test_shards import EOS
from tokenizer.export.export import export
from tokenizer.export.nanogpt import header
from tokenizer.export.source import ExportError
from tokenizer.shards.layout import MANIFEST, ShardError
from tokenizer.shards.reader import ShardSet


@pytest.fixture(params=VOCABS)
def shard_set(request, tmp_path) -> Corpus:
    shard_set = corpus(tmp_path / "set", request.param)
    export(ShardSet(shard_set.folder), "nanogpt", tmp_path / "out")
    return shard_set


def test_bytes_are_those_of_the_layout(shard_set, tmp_path):
    wide = shard_set.manifest.vocab_size > 65536
    for number in range(3):
        data = (tmp_path / "out" / f"train_{number:06d}.bin").read_bytes()
        magic, version, tokens, *rest = struct.unpack_from("<256i", data)
        assert (magic, version) == ((20240801, 7) if wide else (20240520, 1))
        assert not any(rest)
        assert len(data) == 1024 + tokens * (4 if wide else 2)
        flat = struct.unpack_from(f"<{tokens}{'I' if wide else 'H'}", data, 1024)
        expected = [t for i in shard_set.of_shard(number) for t in (EOS, *shard_set.documents[i][:-1].tolist())]
        assert list(flat) == expected
    assert len(os.listdir(tmp_path / "out")) == 3


def test_a_loader_finds_the_documents_at_their_first_token(shard_set, tmp_path):
    load = load_u16 if shard_set.manifest.vocab_size <= 65536 else load_u32
    for number in range(3):
        tokens = load(tmp_path / "out" / f"train_{number:06d}.bin")
        starts = np.flatnonzero(tokens == EOS).tolist()         # as modded-nanogpt's BOSFinder
        assert starts[0] == 0
        documents = [tokens[a:b].tolist() for a, b in zip(starts, [*starts[1:], len(tokens)])]
        assert documents == [[EOS, *shard_set.documents[i][:-1].tolist()] for i in shard_set.of_shard(number)]


def load_u16(path: Path) -> np.ndarray:
    head = torch.from_file(str(path), False, 256, dtype=torch.int32)
    assert head[0] == 20240520 and head[1] == 1
    count = int(head[2])
    with path.open("rb", buffering=0) as file:
        tokens = torch.empty(count, dtype=torch.uint16)
        file.seek(256 * 4)
        assert file.readinto(tokens.numpy()) == 2 * count
    return tokens.numpy()


def load_u32(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        head = np.frombuffer(file.read(256 * 4), np.int32)
        assert head[0] == 20240801 and head[1] == 7
        tokens = np.frombuffer(file.read(), np.uint32)
    assert len(tokens) == head[2]
    return tokens


def test_a_file_beyond_i32_is_refused():
    assert header("a.bin", 2**31 - 1, np.dtype("<u2"))[2] == 2**31 - 1
    with pytest.raises(ExportError, match=r"a\.bin"):
        header("a.bin", 2**31, np.dtype("<u2"))


def test_files_are_named_by_split(tmp_path):
    shard_set = corpus(tmp_path / "set", 300)
    manifest = replace(shard_set.manifest, split="val")
    (shard_set.folder / MANIFEST).write_text(replace(manifest, sha256=manifest.identity()).dumps())
    export(ShardSet(shard_set.folder), "nanogpt", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [f"val_{i:06d}.bin" for i in range(3)]


def test_a_shard_that_does_not_end_in_eos_is_refused(tmp_path):
    shard_set = corpus(tmp_path / "set", 300)
    manifest = replace(shard_set.manifest, eos=5)
    (shard_set.folder / MANIFEST).write_text(replace(manifest, sha256=manifest.identity()).dumps())
    with pytest.raises(ShardError, match="EOS"):
        export(ShardSet(shard_set.folder), "nanogpt", tmp_path / "out")
