"""Exports in training order hold the samples of a run, each as a row of one length, with the ends of documents and the
loss masks."""

from __future__ import annotations

import csv
import gzip
import json
import os
import struct
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.cli.app import run_command
from tests.tokenizer.exports import tree
from tests.tokenizer.test_encode_tasks import Runner
from tests.tokenizer.test_materialize import curriculum, materialise, published, virtual, virtual_masks
from tests.tokenizer.test_shards import EOS
from tokenizer.export.export import FORMATS, export_samples
from tokenizer.export.source import ExportError
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.shards.layout import ShardError
from tokenizer.shards.rows import RowSet

#: the phases of `curriculum` with samples of 16 targets, of 32 and of 16 again
PHASES = {"a": (0, 60), "b": (60, 85), "c": (85, 136)}
MASKED = [name for name, format in FORMATS.items() if format.holds_loss]


class Sample(NamedTuple):
    """A sample as the trainer reads it from the shards."""

    stream: str
    window: int
    tokens: np.ndarray
    bounds: np.ndarray
    counts: np.ndarray            # whether each of tokens[1:] counts in the loss, by the loss masks


class Training(NamedTuple):
    """A run with its materialised rows. For comparison, `samples` were read from the shards, not from the rows."""

    store: Path
    rows: Path
    curriculum: Curriculum
    samples: list[Sample]
    masked: bool

    def export(self, name: str, out: Path, first: int, stop: int, drop_loss: bool = False):
        return export_samples(RowSet(self.rows), self.curriculum, name, out, first, stop, drop_loss)


@pytest.fixture(scope="module", params=[(200, False), (300, True), (300, False), (70_000, True)],
                ids=["u8", "u16 with masks", "u16", "u32 with masks"])
def training(request, tmp_path_factory) -> Training:
    vocab, masked = request.param
    run, rng = Runner(tmp_path_factory.mktemp("run")), np.random.default_rng(3)
    streams = [published(run.store.local, "big", [[int(x) for x in rng.integers(0, 60, n)] for n in (30, 1, 21)],
                         vocab),
               published(run.store.local, "small", [[5, 90, 0, 0, 31], [7, 9, 12, 40, 1]], vocab,
                         (1,) if masked else ())]
    c = curriculum(streams, vocab)
    _, folder = materialise(run, c, "bytes", 600, 700)
    samples = [Sample(stream, window, tokens, bounds, np.ones(length, bool) if counts is None else counts)
               for (stream, _, window, length, tokens, bounds), counts in zip(virtual(run, c), virtual_masks(run, c))]
    return Training(run.store.local, folder, c, samples, masked)


@pytest.fixture(params=[(0, 60), (60, 85), (3, 4), (11, 57), (90, 130)], ids="{0[0]}:{0[1]}".format)
def span(request) -> tuple[int, int]:
    return request.param


def wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which formats without u8 store tokens of type `dtype`."""
    return dtype if dtype.itemsize > 1 else np.dtype("<u2")


def pieces(sample: Sample, width: int) -> list[int]:
    """Return the exclusive ends of the pieces of documents in the first `width` tokens of a sample."""
    return [*(p for p in sample.bounds.tolist() if p < width), width]


def check_masks(training: Training, expected: list[Sample], masks: list[np.ndarray]) -> None:
    """Check that `masks`, which have a flag for each token of a row, agree with the samples."""
    for sample, mask in zip(expected, masks, strict=True):
        assert mask[0] == 1 and np.array_equal(mask[1:], sample.counts[:len(mask) - 1])


def test_ds_holds_samples_of_l_plus_1_tokens(training, span, tmp_path):
    result = training.export("ds", tmp_path / "out", *span)
    expected, out = training.samples[slice(*span)], tmp_path / "out"
    width, dtype = len(expected[0].tokens), wide(expected[0].tokens.dtype)
    files = sorted(path.name for path in out.glob("*.ds"))
    assert files == [f"{i:05d}.ds" for i in range(len(files))] and (len(files) > 1 or len(expected) < 30)
    rows, ends, masks = [], [], []
    for name in files:
        tokens = np.fromfile(out / name, dtype).reshape(-1, width)
        index = np.fromfile(out / f"{name}.index", "<u8").astype(np.int64)
        assert (out / f"{name}.metadata").read_text().splitlines()[1] == str(tokens.size) == str(index[-1])
        ends += [(index[(index > i * width) & (index <= (i + 1) * width)] - i * width).tolist()
                 for i in range(len(tokens))]
        rows += list(tokens)
        if (out / f"{name}.loss").exists():
            masks += list(np.fromfile(out / f"{name}.loss", np.uint8).reshape(-1, width))
    assert len(rows) == len(expected) == result.documents
    for row, end, sample in zip(rows, ends, expected):
        assert np.array_equal(row, sample.tokens) and end == pieces(sample, width)
    if masks:
        check_masks(training, expected, masks)
    assert bool(masks) or all(sample.counts.all() for sample in expected)


def test_megatron_has_a_sequence_for_each_sample(training, span, tmp_path):
    training.export("megatron", tmp_path / "out", *span, drop_loss=True)
    expected, rows = training.samples[slice(*span)], []
    dtype = {1: "<u1", 8: "<u2", 4: "<i4"}
    for path in sorted((tmp_path / "out").glob("*.idx")):
        data = path.read_bytes()
        version, code, count, documents = struct.unpack_from("<QBQQ", data, 9)
        lengths = np.frombuffer(data, "<i4", count, 34)
        pointers = np.frombuffer(data, "<i8", count, 34 + 4 * count)
        assert np.frombuffer(data, "<i8", -1, 34 + 12 * count).tolist() == list(range(count + 1))
        assert (data[:9], version, documents) == (b"MMIDIDX\0\0", 1, count + 1)
        body = path.with_suffix(".bin").read_bytes()
        rows += [np.frombuffer(body, dtype[code], n, p) for n, p in zip(lengths.tolist(), pointers.tolist())]
    assert [row.tolist() for row in rows] == [sample.tokens.tolist() for sample in expected]


def test_olmo_holds_the_first_l_tokens_with_pieces_of_documents(training, span, tmp_path):
    training.export("olmo", tmp_path / "out", *span)
    expected, out = training.samples[slice(*span)], tmp_path / "out"
    length = len(expected[0].counts)
    dtype = "u1" if training.curriculum.tokenizer.vocab_size <= 256 else expected[0].tokens.dtype
    rows, lines, masks = [], [], []
    for path in sorted(out.glob("part-*.npy")):
        first = len(rows)
        rows += list(np.fromfile(path, dtype).reshape(-1, length))
        text = gzip.decompress(path.with_suffix(".csv.gz").read_bytes()).decode()
        for start, end, *rest in csv.reader(text.splitlines()):
            lines.append([int(start) + first * length, int(end) + first * length, *rest])
        mask = out / path.name.replace("part", "labels_mask")
        if mask.exists():
            masks += list(np.fromfile(mask, np.uint8).reshape(-1, length))
    assert [row.tolist() for row in rows] == [sample.tokens[:-1].tolist() for sample in expected]
    begin, wanted = 0, []
    for number, sample in enumerate(expected):
        for end in pieces(sample, length):
            wanted.append([begin, number * length + end, str(span[0] + number), sample.stream, str(sample.window)])
            begin = number * length + end
    assert lines == wanted
    if masks:
        check_masks(training, expected, masks)
    assert bool(masks) or all(sample.counts.all() for sample in expected)


def test_nanogpt_holds_the_first_l_tokens(training, span, tmp_path):
    training.export("nanogpt", tmp_path / "out", *span, drop_loss=True)
    expected, tokens = training.samples[slice(*span)], []
    for number, path in enumerate(sorted((tmp_path / "out").iterdir())):
        assert path.name == f"train_{number:06d}.bin"
        header, body = np.fromfile(path, "<i4", 256), np.fromfile(path, wide(expected[0].tokens.dtype), offset=1024)
        assert header[2] == len(body) and header[0] in (20240520, 20240801)
        tokens += body.tolist()
    assert tokens == [token for sample in expected for token in sample.tokens[:-1].tolist()]


def test_parquet_has_the_columns_of_materialised_rows(training, span, tmp_path):
    training.export("parquet", tmp_path / "out", *span)
    expected = training.samples[slice(*span)]
    rows = [row for path in sorted((tmp_path / "out").iterdir()) for row in pq.read_table(path).to_pylist()]
    assert [row["sample"] for row in rows] == list(range(*span))
    for row, sample in zip(rows, expected, strict=True):
        assert (row["stream"], row["window"]) == (sample.stream, sample.window)
        assert row["input_ids"] == sample.tokens.tolist() and row["ends"] == sample.bounds.tolist()
        assert row.get("loss") == (None if sample.counts.all() else sample.counts.tolist())


def test_mds_holds_windows_of_a_fixed_size(training, span, tmp_path):
    training.export("mds", tmp_path / "out", *span)
    expected, rows = training.samples[slice(*span)], []
    width, dtype = len(expected[0].tokens), expected[0].tokens.dtype
    for shard in json.loads((tmp_path / "out" / "index.json").read_text())["shards"]:
        data = (tmp_path / "out" / shard["raw_data"]["basename"]).read_bytes()
        masked = "loss" in shard["column_names"]
        assert shard["column_sizes"] == [None, *([width - 1] * masked), 8, None, width * dtype.itemsize]
        assert shard["column_encodings"][-1] == f"ndarray:{dtype.name}:{width}"
        offsets = np.frombuffer(data, "<u4", shard["samples"] + 1, 4)
        for begin, end in pairwise(offsets.tolist()):
            sizes = struct.unpack_from("<2I", data, begin)
            parts = np.cumsum([begin + 8, sizes[0], *([width - 1] * masked), 8, sizes[1], width * dtype.itemsize])
            assert parts[-1] == end
            ends, *loss, number, stream, tokens = (data[a:b] for a, b in pairwise(parts))
            assert ends[0] >> 2 == 1 and ends[1] * 4 == len(ends) - 2
            rows.append((int.from_bytes(number, "little"), stream.decode(), np.frombuffer(tokens, dtype).tolist(),
                         np.frombuffer(ends[2:], "<u4").tolist(), loss and list(loss[0])))
    for number, (row, sample) in enumerate(zip(rows, expected, strict=True), span[0]):
        assert row[:4] == (number, sample.stream, sample.tokens.tolist(), pieces(sample, width))
        assert row[4] == sample.counts.tolist() if row[4] else sample.counts.all()


def test_litdata_has_an_item_for_each_sample(training, span, tmp_path):
    training.export("litdata", tmp_path / "out", *span, drop_loss=True)
    expected, blocks = training.samples[slice(*span)], []
    for chunk in json.loads((tmp_path / "out" / "index.json").read_text())["chunks"]:
        body = np.fromfile(tmp_path / "out" / chunk["filename"], expected[0].tokens.dtype,
                           offset=4 * (chunk["chunk_size"] + 2))
        assert len(body) == chunk["dim"]
        blocks += body.reshape(-1, len(expected[0].tokens)).tolist()           # as TokensLoader cuts a chunk
    assert blocks == [sample.tokens.tolist() for sample in expected]


# -- what other projects read ----------------------------------------------------------------------------------------
def test_datatrove_reads_the_samples_as_windows(training, span, tmp_path):
    """Seen with datatrove 0.10.1."""
    dataset = pytest.importorskip("datatrove.utils.dataset", exc_type=ImportError)
    training.export("ds", tmp_path / "out", *span)
    expected = training.samples[slice(*span)]
    length = len(expected[0].counts)
    windows = dataset.DatatroveFolderDataset(str(tmp_path / "out"), length, "*.ds", return_positions=True,
                                             token_size=wide(expected[0].tokens.dtype).itemsize)
    assert len(windows) == len(expected)
    for item, sample in zip(windows, expected):
        assert np.array_equal(item["input_ids"].numpy(), sample.tokens.astype(np.int64))
        begins = np.array([0, *pieces(sample, length + 1)[:-1]])
        positions = np.arange(length + 1)
        begun = begins[np.searchsorted(begins, positions, side="right") - 1]
        assert item["positions"].tolist() == (positions - begun).tolist()


def test_litdata_reads_the_samples_as_blocks(training, span, tmp_path):
    """Seen with litdata 0.2.76."""
    litdata = pytest.importorskip("litdata", exc_type=ImportError)
    training.export("litdata", tmp_path / "out", *span, drop_loss=True)
    expected = training.samples[slice(*span)]
    loader = litdata.TokensLoader(block_size=len(expected[0].tokens))
    dataset = litdata.StreamingDataset(str(tmp_path / "out"), item_loader=loader, shuffle=False)
    assert [np.asarray(dataset[k]).tolist() for k in range(len(dataset))] == [s.tokens.tolist() for s in expected]


def test_streaming_reads_the_samples(training, span, tmp_path):
    """Seen with mosaicml-streaming 0.13.0."""
    pytest.importorskip("streaming", exc_type=ImportError)
    from streaming.base.format import reader_from_json

    training.export("mds", tmp_path / "out", *span)
    expected = training.samples[slice(*span)]
    shards = [reader_from_json(str(tmp_path / "out"), None, shard)
              for shard in json.loads((tmp_path / "out" / "index.json").read_text())["shards"]]
    samples = [shard[k] for shard in shards for k in range(len(shard))]
    for number, (item, sample) in enumerate(zip(samples, expected, strict=True), span[0]):
        assert (item["sample"], item["stream"]) == (number, sample.stream)
        assert np.array_equal(item["tokens"], sample.tokens)
        assert item["ends"].tolist() == pieces(sample, len(sample.tokens))
        assert np.array_equal(item["loss"], sample.counts) if "loss" in item else sample.counts.all()


def test_the_windows_of_mds_are_those_of_the_project_s_own_writer(training, span, tmp_path):
    streaming = pytest.importorskip("streaming", exc_type=ImportError)
    training.export("mds", tmp_path / "out", *span)
    expected = training.samples[slice(*span)]
    names = json.loads((tmp_path / "out" / "index.json").read_text())["shards"][0]["column_names"]
    width = len(expected[0].tokens)
    columns = {"ends": "ndarray:uint32", "loss": f"ndarray:uint8:{width - 1}", "sample": "uint64", "stream": "str",
               "tokens": f"ndarray:{expected[0].tokens.dtype.name}:{width}"}
    with streaming.MDSWriter(out=str(tmp_path / "theirs"), columns={name: columns[name] for name in names},
                             size_limit=1 << 26) as writer:
        for number, sample in enumerate(expected, span[0]):
            item = {"ends": np.array(pieces(sample, width), np.uint32), "loss": sample.counts.astype(np.uint8),
                    "sample": np.uint64(number), "stream": sample.stream, "tokens": sample.tokens}
            writer.write({name: item[name] for name in names})
    assert tree(tmp_path / "out") == tree(tmp_path / "theirs")


def test_megatron_reads_the_samples_as_sequences(training, span, tmp_path):
    """Seen with megatron-core 0.16.1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    training.export("megatron", tmp_path / "out", *span, drop_loss=True)
    rows = []
    for path in sorted((tmp_path / "out").glob("*.bin")):
        dataset = indexed.IndexedDataset(str(path.with_suffix("")), mmap=True)
        rows += [dataset[k].tolist() for k in range(len(dataset))]
    assert rows == [sample.tokens.tolist() for sample in training.samples[slice(*span)]]


def test_olmo_core_reads_the_samples_as_instances(training, span, tmp_path):
    """Seen with ai2-olmo-core 3.0.0."""
    data = pytest.importorskip("olmo_core.data", exc_type=ImportError)
    training.export("olmo", tmp_path / "out", *span)
    expected = training.samples[slice(*span)]
    masks = sorted(map(str, (tmp_path / "out").glob("labels_mask-*.npy"))) or None
    dataset = data.NumpyFSLDatasetConfig(
        paths=sorted(map(str, (tmp_path / "out").glob("part-*.npy"))), label_mask_paths=masks,
        sequence_length=len(expected[0].counts), generate_doc_lengths=True, work_dir=str(tmp_path / "work"),
        tokenizer=data.TokenizerConfig(vocab_size=training.curriculum.tokenizer.vocab_size, eos_token_id=EOS,
                                       pad_token_id=EOS)).build()
    dataset.prepare()
    assert len(dataset) == len(expected)
    for k, sample in enumerate(expected):
        item, length = dataset[k], len(sample.counts)
        assert np.array_equal(item["input_ids"].numpy(), sample.tokens[:-1].astype(np.int64))
        assert item["doc_lens"].tolist() == np.diff([0, *pieces(sample, length)]).tolist()
        assert masks is None or np.array_equal(item["label_mask"].numpy()[1:], sample.counts[:-1])


def test_datasets_reads_the_samples(training, span, tmp_path):
    """Seen with datasets 5.2.0."""
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    training.export("parquet", tmp_path / "out", *span)
    read = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))["train"]
    for row, number in zip(read, range(*span), strict=True):
        sample = training.samples[number]
        assert row["sample"] == number and row["input_ids"] == sample.tokens.tolist()
        assert row["ends"] == sample.bounds.tolist()
        assert row.get("loss") == (None if sample.counts.all() else sample.counts.tolist())


# -- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FORMATS)
def test_samples_of_two_lengths_are_refused_and_nothing_is_left(training, tmp_path, name):
    with pytest.raises(ExportError, match="--phase"):
        training.export(name, tmp_path / "out", 59, 61, drop_loss=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", FORMATS)
def test_masks_are_refused_by_formats_without_them(training, tmp_path, name):
    if training.masked and name not in MASKED:
        with pytest.raises(ExportError, match="--drop-loss"):
            training.export(name, tmp_path / "out", 0, 60)
        assert os.listdir(tmp_path) == []
    training.export(name, tmp_path / "out", 0, 60, drop_loss=True)


@pytest.mark.parametrize("kind", ["tokens", "bounds"])
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_rows_are_named_and_nothing_is_left(training, tmp_path, name, kind):
    rows = tmp_path / "rows"
    rows.mkdir()
    for path in training.rows.iterdir():
        (rows / path.name).write_bytes(path.read_bytes())
    damaged = rows / RowSet(rows).manifest.files[1].files[kind]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x77")
    with pytest.raises(ShardError, match=damaged.name):
        export_samples(RowSet(rows), training.curriculum, name, tmp_path / "out", 0, 60, True)
    assert os.listdir(tmp_path) == ["rows"]


def test_ids_outside_the_vocabulary_are_refused(training, tmp_path):
    few = replace(training.curriculum, tokenizer=replace(training.curriculum.tokenizer, vocab_size=50))
    for name in FORMATS:
        with pytest.raises(ShardError, match="outside the vocabulary"):
            export_samples(RowSet(training.rows), few, name, tmp_path / "out", 0, 60, True)
    assert os.listdir(tmp_path) == []


def test_rows_of_another_order_are_refused(training, tmp_path):
    other = replace(training.curriculum, order="0" * len(training.curriculum.order))
    with pytest.raises(ShardError, match="materialize"):
        export_samples(RowSet(training.rows), other, "ds", tmp_path / "out", 0, 60)


@pytest.mark.parametrize("name", FORMATS)
def test_equal_rows_give_equal_bytes_and_progress_ends_at_the_total(training, tmp_path, name):
    seen: list[tuple[int, int]] = []
    for out in ("a", "b"):
        export_samples(RowSet(training.rows), training.curriculum, name, tmp_path / out, 0, 60, True,
                       lambda done, total: seen.append((done, total)))
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    size = 60 * 17 * training.samples[0].tokens.itemsize
    assert seen[-1] == (size, size) and sorted(seen[:len(seen) // 2]) == seen[:len(seen) // 2]


def test_files_with_the_bytes_of_rows_are_hard_links(training, tmp_path):
    for name, suffix in (("ds", ".ds"), ("megatron", ".bin")):
        result = training.export(name, tmp_path / name, 0, 60, drop_loss=True)
        linked = [path for path in (tmp_path / name).glob(f"*{suffix}") if path.stat().st_nlink > 1]
        widened = name == "ds" and training.samples[0].tokens.itemsize == 1
        assert sum(path.stat().st_size for path in linked) == result.linked
        assert (result.linked == 0) == widened
        assert training.export(name, tmp_path / f"{name}-part", 1, 2, drop_loss=True).linked == 0


# -- the command -----------------------------------------------------------------------------------------------------
@pytest.fixture
def line(training, tmp_path) -> list[str]:
    """The arguments of a command that exports the samples of a run."""
    run = training.store / "runs" / "r"
    run.mkdir(parents=True, exist_ok=True)
    training.curriculum.save(run / "curriculum.json")
    if not (run / "rows-bytes").exists():
        (run / "rows-bytes").symlink_to(training.rows)
    return ["shards", "export", "--order", "r", "--store", str(training.store), "--format", "parquet", "--out",
            str(tmp_path / "out")]


@pytest.mark.parametrize(("options", "span"), [(["--phase", "a"], (0, 60)), (["--samples", "61:70"], (61, 70)),
                                               (["--phase", "c", "--samples", "0:90"], (85, 90)),
                                               (["--phase", "c", "--samples", "100:9999"], (100, 136))])
def test_the_command_exports_a_phase_or_a_range(training, tmp_path, capsys, line, options, span):
    assert run_command([*line, *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    numbers = [n for path in sorted((tmp_path / "out").iterdir()) for n in pq.read_table(path)["sample"].to_pylist()]
    assert numbers == list(range(*span)) and said["samples"] == len(numbers) and "documents" not in said


@pytest.mark.parametrize(("options", "key"), [
    ([], "--phase"), (["--phase", "z"], "--phase"), (["--samples", "5"], "--samples"),
    (["--samples", "9:9"], "--samples"), (["--phase", "a", "--samples", "60:70"], "--samples"),
    (["somewhere"], "SHARDS"), (["--order", "z"], "z"), (["--samples", "-1:4"], "--samples")])
def test_errors_of_the_command_are_one_line(tmp_path, capsys, line, options, key):
    assert run_command([*line, *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and key in err
    assert os.listdir(tmp_path) == []


def test_a_run_without_rows_is_told_to_materialise(training, tmp_path, capsys, line):
    (training.store / "runs" / "r" / "rows-bytes").unlink()
    assert run_command([*line, "--phase", "a"]) == 2
    err = capsys.readouterr().err
    assert "tokenmill materialize r" in err and err.count("\n") == 1 and os.listdir(tmp_path) == []


@pytest.mark.parametrize("option", [["--phase", "a"], ["--samples", "0:4"]])
def test_samples_are_not_chosen_from_a_shard_set(training, tmp_path, capsys, option):
    folder = str(training.store / training.curriculum.streams[0].train)
    assert run_command(["shards", "export", folder, "--format", "ds", "--out", str(tmp_path / "out"), *option]) == 2
    assert option[0] in capsys.readouterr().err and os.listdir(tmp_path) == []
