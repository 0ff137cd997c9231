"""Files that other projects wrote are imported as shards and exported again: the result is equal byte by byte. A test
is skipped where the project is not installed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tokenizer.exports import tree
from tests.tokenizer.imports import imported
from tests.tokenizer.test_shards import EOS
from tokenizer.export.export import export
from tokenizer.shards.reader import ShardSet

Documents = list[np.ndarray]
Write = Callable[[Path, Documents], None]


def write_ds(out: Path, documents: Documents) -> None:
    """Write documents with datatrove (tested with 0.10.1)."""
    datatrove = pytest.importorskip("datatrove.pipeline.tokens.tokenizer", exc_type=ImportError)
    from datatrove.io import get_datafolder

    file = datatrove.TokenizedFile(get_datafolder(str(out)), "00000.ds", save_index=True, save_loss_metadata=True,
                                   token_size=documents[0].itemsize)
    for number, document in enumerate(documents):
        file.write(document.tolist(), [(number + place) % 3 > 0 for place in range(len(document))])
    file.close()


def write_megatron(out: Path, documents: Documents) -> None:
    """Write documents with megatron-core (tested with 0.16.1)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    import torch

    width = documents[0].itemsize
    builder = indexed.IndexedDatasetBuilder(str(out / "shard_00000.bin"), dtype=np.uint16 if width == 2 else np.int32)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(str(out / "shard_00000.idx"))


def write_mds(out: Path, documents: Documents) -> None:
    """Write documents with mosaicml-streaming (tested with 0.13.0)."""
    streaming = pytest.importorskip("streaming", exc_type=ImportError)
    columns = {"id": "str", "tokens": f"ndarray:{documents[0].dtype.name}"}
    with streaming.MDSWriter(out=str(out), columns=columns) as writer:
        for number, document in enumerate(documents):
            writer.write({"id": f"d{number}", "tokens": document})


def write_litdata(out: Path, documents: Documents) -> None:
    """Write documents with litdata (tested with 0.2.76)."""
    module = pytest.importorskip("litdata.streaming.writer", exc_type=ImportError)
    from litdata import TokensLoader

    writer = module.BinaryWriter(str(out), chunk_bytes=64_000_000, item_loader=TokensLoader(block_size=8))
    for number, document in enumerate(documents):
        writer[number] = document
    writer.done()
    writer.merge()


@pytest.mark.parametrize("vocab", [300, 70_000])
@pytest.mark.parametrize(("name", "write"), [("ds", write_ds), ("megatron", write_megatron), ("mds", write_mds),
                                             ("litdata", write_litdata)])
def test_files_of_a_project_s_own_writer_come_back(tmp_path, name: str, write: Write, vocab: int):
    rng = np.random.default_rng(vocab)
    documents = [np.append(rng.integers(4, vocab, length), EOS).astype("u2" if vocab < 65536 else "u4")
                 for length in rng.integers(0, 300, 40).tolist()]
    (tmp_path / "theirs").mkdir()
    write(tmp_path / "theirs", documents)
    result = imported(tmp_path / "theirs", name, vocab, tmp_path / "store", step=10**6)
    assert (result.documents, result.tokens) == (40, sum(map(len, documents)))
    export(ShardSet(result.path), name, tmp_path / "ours")
    theirs, ours = tree(tmp_path / "theirs"), tree(tmp_path / "ours")
    for files in (theirs, ours):
        files.pop("00000.ds.metadata", None)                    # it names the tokenizer, which a set does not know
    if name == "litdata":                                       # its index has a time, and settings of the writer
        chunks = [[{key: chunk[key] for key in ("filename", "chunk_bytes", "chunk_size", "dim")}
                   for chunk in json.loads(files.pop("index.json"))["chunks"]] for files in (theirs, ours)]
        assert chunks[0] == chunks[1]
    assert ours == theirs and theirs
