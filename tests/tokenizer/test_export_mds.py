"""Exports for MosaicML streaming: compared byte by byte, and equal to what its own writer writes, where it is installed
(tested with mosaicml-streaming 0.13.0)."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tokenizer.exports import VOCABS, Corpus, corpus, tree
from tokenizer.export.chunks import check_size, offsets_of, pack
from tokenizer.export.export import export
from tokenizer.export.mds import MdsWriter
from tokenizer.export.source import ExportError, ExportSource
from tokenizer.export.target import FolderTarget, appearing
from tokenizer.shards.reader import ShardSet

#: less than the longest document, so that it gets a file of its own
LIMIT = 20_000


@pytest.fixture(params=VOCABS)
def shard_set(request, tmp_path) -> Corpus:
    return corpus(tmp_path / "set", request.param, masked=(0, 2))


def write(shard_set: Corpus, out: Path, limit: int) -> None:
    with appearing(out, "--out") as folder:
        target = FolderTarget(folder)
        MdsWriter(limit).write(ExportSource(ShardSet(shard_set.folder), False, lambda size: None), target)


def read(folder: Path) -> list[dict[str, Any]]:
    """Read the samples of an MDS folder by the layout of its files, without the library."""
    index, samples = json.loads((folder / "index.json").read_text()), []
    assert index["version"] == 2
    for number, shard in enumerate(index["shards"]):
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert (shard["raw_data"]["basename"], shard["raw_data"]["bytes"]) == (f"shard.{number:05d}.mds", len(data))
        [count] = struct.unpack_from("<I", data)
        assert count == shard["samples"] > 0
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        config = json.loads(data[4 + 4 * (count + 1):offsets[0]])
        assert config == {k: v for k, v in shard.items() if k not in ("samples", "raw_data", "zip_data")}
        assert config["column_names"] == sorted(config["column_names"])
        assert offsets[-1] == len(data)
        for a, b in pairwise(offsets):
            width = len(config["column_names"])
            sizes = struct.unpack_from(f"<{width}I", data, a)
            at, sample = a + 4 * width, {}
            for name, encoding, size in zip(config["column_names"], config["column_encodings"], sizes):
                sample[name] = decode(encoding, data[at:at + size])
                at += size
            assert at == b
            samples.append(sample)
    return samples


def decode(encoding: str, data: bytes) -> Any:
    if encoding == "str":
        return data.decode()
    kind, dtype = encoding.split(":")
    assert kind == "ndarray" and data[0] >> 2 == 1
    width = 1 << (data[0] & 3)
    values = np.frombuffer(data[1 + width:], np.dtype(dtype).newbyteorder("<"))
    assert len(values) == int.from_bytes(data[1:1 + width], "little")
    return values


@pytest.mark.parametrize("limit", [LIMIT, 1 << 26])
def test_samples_are_the_documents(shard_set, tmp_path, limit):
    write(shard_set, tmp_path / "out", limit)
    samples = read(tmp_path / "out")
    assert [s["id"] for s in samples] == shard_set.ids
    for sample, document, targets in zip(samples, shard_set.documents, shard_set.targets, strict=True):
        assert sample["tokens"].dtype == document.dtype and np.array_equal(sample["tokens"], document)
        assert sample["loss"].dtype == np.uint8 and np.array_equal(sample["loss"], targets)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.mds")}
    larger = [name for name, size in sizes.items() if size > limit]
    assert len(larger) == (1 if limit == LIMIT else 0)
    assert (len(sizes) >= 3) is (limit == LIMIT)


def test_a_set_without_masks_has_no_column_of_them(tmp_path):
    plain = corpus(tmp_path / "set", 300)
    export(ShardSet(plain.folder), "mds", tmp_path / "out")
    assert {tuple(sample) for sample in read(tmp_path / "out")} == {("id", "tokens")}


def test_files_are_packed_up_to_the_limit_and_offsets_stay_below_four_gib():
    assert list(pack([b"ab", b"c", b"defghijk", b"l", b"m"], 8, 19)) == [[b"ab", b"c"], [b"defghijk"], [b"l", b"m"]]
    assert offsets_of([2**31, 2**31 - 17], 0).tolist() == [16, 16 + 2**31, 2**32 - 1]
    with pytest.raises(ExportError, match="4 GiB"):
        offsets_of([2**31, 2**31 - 16], 0)
    check_size(2**32 - 1, "document 5")
    with pytest.raises(ExportError, match="document 5"):
        check_size(2**32, "document 5")


@pytest.mark.parametrize("limit", [LIMIT * 4, 1 << 26])
def test_the_bytes_are_those_of_the_project_s_own_writer(shard_set, tmp_path, limit):
    """Its writer makes an empty file before a sample that is larger than the limit, so here none is."""
    streaming = pytest.importorskip("streaming", exc_type=ImportError)
    small = corpus(tmp_path / "small", shard_set.manifest.vocab_size, shards=([30] * 90, [0, 900, 3000] * 20),
                   masked=(1,))
    write(small, tmp_path / "out", limit)
    columns = {"tokens": f"ndarray:{small.documents[0].dtype.name}", "id": "str", "loss": "ndarray:uint8"}
    with streaming.MDSWriter(out=str(tmp_path / "theirs"), columns=columns, size_limit=limit) as writer:
        for id, document, targets in zip(small.ids, small.documents, small.targets):
            writer.write({"id": id, "tokens": document, "loss": targets.astype(np.uint8)})
    assert tree(tmp_path / "out") == tree(tmp_path / "theirs")
    assert (len(tree(tmp_path / "out")) > 3) is (limit < 1 << 26)


@pytest.mark.parametrize("limit", [LIMIT, 1 << 26])
def test_streaming_reads_the_same_documents(shard_set, tmp_path, limit):
    pytest.importorskip("streaming", exc_type=ImportError)
    from streaming.base.format import reader_from_json

    write(shard_set, tmp_path / "out", limit)
    shards = [reader_from_json(str(tmp_path / "out"), None, shard)
              for shard in json.loads((tmp_path / "out" / "index.json").read_text())["shards"]]
    samples = [shard[k] for shard in shards for k in range(len(shard))]
    assert [sample["id"] for sample in samples] == shard_set.ids
    for sample, document, targets in zip(samples, shard_set.documents, shard_set.targets, strict=True):
        assert np.array_equal(sample["tokens"], document)
        assert np.array_equal(sample["loss"], targets)
