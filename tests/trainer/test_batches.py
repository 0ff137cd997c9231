"""Batches, for which many samples are read at once, equal batches that are made one sample at a time."""

from __future__ import annotations

import itertools
import mmap
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer.test_kernels import WITH
from tests.tokenizer.test_shards import some_documents, write_set
from tokenizer.shards.kernels import crc32, crc_tables
from tokenizer.shards.layout import ENDS, ShardError
from tokenizer.shards.page_cache import REQUESTED
from tokenizer.shards.reader import CHECKED, ShardSet
from tokenizer.shards.sums import BLOCK, CheckedFile
from trainer.data.batches import TOGETHER, Batch, collate
from trainer.data.rows import refuse_unknown, refuse_unordered, windows
from trainer.model.loss import IGNORE


def plain_windows(sets, places, length):
    """Read the rows of a batch one at a time."""
    rows = [(sets[s].read(w * length, w * length + length + 1), sets[s].ends(w * length + 1, w * length + length + 1)
             - w * length, s, sets[s].counts(w * length + 1, w * length + length + 1)) for s, w in places]
    for (s, w), (tokens, bounds, *_) in zip(places, rows):
        refuse_unknown(sets[s], w * length, tokens)
        refuse_unordered(sets[s], w * length, bounds, length)
    return rows


def plain_collate(rows, length) -> Batch:
    """Make a batch row by row."""
    tokens, targets, positions = (np.empty((len(rows), length), np.int64) for _ in range(3))
    attended = 0
    for row, (window, bounds, _, *masks) in enumerate(rows):
        size = len(window) - 1
        tokens[row, :size], targets[row, :size] = window[:-1], window[1:]
        tokens[row, size:], targets[row, size:] = 0, IGNORE
        targets[row, bounds - 1] = IGNORE
        for counts in masks:
            if counts is not None:
                targets[row, :size][~counts] = IGNORE
        begins = np.concatenate(([0], bounds[bounds < size], [size]))
        lengths = np.diff(begins)
        positions[row] = np.arange(length)
        positions[row, :size] -= np.repeat(begins[:-1], lengths)
        attended += int(lengths @ lengths)
    stream = torch.tensor([r[2] for r in rows], dtype=torch.int64)
    return Batch(*map(torch.from_numpy, (tokens, targets, positions)), stream, attended)


def assert_equal(made: Batch, plain: Batch) -> None:
    for mine, theirs in zip(made.tensors(), plain.tensors(), strict=True):
        assert mine.dtype == theirs.dtype == torch.int64 and mine.is_contiguous() and torch.equal(mine, theirs)
    assert made.attended == plain.attended and type(made.attended) is int


@pytest.fixture(scope="module", params=[300, 70_000])
def sets(request, tmp_path_factory):
    """Shard sets of several shards, with and without loss masks. Some shards have only one document."""
    rng, made = np.random.default_rng(request.param), []
    for masked, cuts in (((), [0, 40, 41, 90]), ((0, 2), [0, 5, 6, 70, 71, 120]), ((), [0, 300])):
        folder = tmp_path_factory.mktemp("set")
        docs = some_documents(rng, cuts[-1], request.param)
        write_set(folder, [docs[a:b] for a, b in itertools.pairwise(cuts)], request.param, masked=masked)
        made.append(ShardSet(folder))
    return made


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 200), st.integers(0, 3 * TOGETHER))
def test_batches_equal_those_of_one_sample_at_a_time(sets, data, length, count):
    places = []
    for _ in range(count):
        stream = data.draw(st.sampled_from([s for s in range(3) if sets[s].windows(length)]))
        places.append((stream, data.draw(st.integers(0, sets[stream].windows(length) - 1))))
    plain = plain_windows(sets, places, length)
    for chosen in WITH.values():
        with chosen:
            rows = windows(sets, places, length)
            for mine, theirs in zip(rows, plain, strict=True):
                assert mine[0].dtype == theirs[0].dtype and np.array_equal(mine[0], theirs[0])
                assert mine[1].dtype == theirs[1].dtype and np.array_equal(mine[1], theirs[1])
                assert mine[2] == theirs[2] and (mine[3] is theirs[3] is None or np.array_equal(mine[3], theirs[3]))
            assert_equal(collate(rows, length), plain_collate(plain, length))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(1, 41), st.sets(st.integers(1, 40)), st.booleans(), st.booleans()),
                max_size=2 * TOGETHER + 3), st.integers(0, 2**16))
def test_rows_of_any_length_are_filled_like_one_at_a_time(samples, seed):
    rng, rows = np.random.default_rng(seed), []
    for size, bounds, masked, wide in samples:
        mask = (rng.random(size - 1) < 0.5,) if masked else (None,) * bool(size % 2)
        rows.append((rng.integers(0, 60_000, size).astype(np.uint32 if wide else np.uint16),
                     np.array(sorted(b for b in bounds if b < size), np.int64), len(rows) % 3, *mask))
    whole = [row for row in rows if len(row[0]) == 41]
    for chosen in WITH.values():
        with chosen:
            assert_equal(collate(rows, 40), plain_collate(rows, 40))
            assert_equal(collate(whole, 40), plain_collate(whole, 40))


def test_a_loss_mask_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    """A page beyond the end of a mapped file would end the process by SIGBUS."""
    write_set(tmp_path, [some_documents(np.random.default_rng(0), 400, 300)], 300, masked=(0,))
    shards = ShardSet(tmp_path)
    [info] = shards.manifest.shards
    shards.counts(0, 33)                                                # maps the file
    with open(tmp_path / info.loss, "r+b") as file:
        file.truncate(100)
    with pytest.raises(ShardError, match=rf"{info.loss}: 100 bytes, the manifest says {info.tokens}: cut"):
        windows([shards], [(0, info.tokens // 32 - 1)], 32)


@pytest.mark.parametrize("wrong", ["token", "ends"])
def test_what_is_impossible_in_one_of_many_samples_is_named_as_if_it_were_read_alone(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(CheckedFile, "check", lambda *_: None)          # as if it had been written like this
    write_set(tmp_path, [some_documents(np.random.default_rng(0), 400, 300)], 300)
    info = ShardSet(tmp_path).manifest.shards[0]
    with open(tmp_path / (info.body if wrong == "token" else info.ends), "r+b") as file:
        if wrong == "token":
            file.seek(2 * 40 * 100)
            file.write(b"\xff\xff")
        else:
            ends = np.fromfile(tmp_path / info.ends, ENDS)
            inside = int(np.searchsorted(ends, 40 * 100))
            ends[inside + 1] = ends[inside]
            file.write(ends.tobytes())
    shards, length = ShardSet(tmp_path), 200
    places = [(0, w) for w in range(shards.windows(length))]
    said = []
    for read in (windows, plain_windows):
        with pytest.raises(ShardError) as raised:
            read([shards], places, length)
        said.append(str(raised.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("size", [1, 7, 8, 1023, BLOCK - 1, BLOCK])
def test_compiled_checksums_are_those_of_zlib(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert crc32(data, crc_tables()) == zlib.crc32(data)
    assert crc32(np.zeros(size, np.uint8), crc_tables()) == zlib.crc32(bytes(size))


@pytest.mark.parametrize("chosen", WITH.values(), ids=WITH)
def test_a_damaged_byte_of_any_window_of_a_batch_is_an_error(tmp_path, chosen):
    write_set(tmp_path, [some_documents(np.random.default_rng(0), 400, 300) for _ in range(2)], 300)
    shards, length = ShardSet(tmp_path), 200
    places = [(0, w) for w in range(shards.windows(length))]
    with chosen:
        windows([shards], places, length)
        for info in shards.manifest.shards:
            for byte in (0, BLOCK - 1, BLOCK, info.tokens - 2 * length):
                with open(tmp_path / info.body, "r+b") as file:
                    file.seek(byte)
                    right = file.read(1)
                    file.seek(byte)
                    file.write(bytes([right[0] ^ 1]))
                    file.flush()
                    with pytest.raises(ShardError, match=f"{info.body}: damaged at byte {byte // BLOCK * BLOCK:,}:"):
                        windows([shards], places, length)
                    file.seek(byte)
                    file.write(right)
        windows([shards], places, length)


def test_pages_are_requested_only_while_batches_come_from_the_disk(tmp_path, monkeypatch):
    write_set(tmp_path, [some_documents(np.random.default_rng(0), 40, 300)], 300)
    shards, read, asked = ShardSet(tmp_path), itertools.count(), []

    class Map(mmap.mmap):
        def madvise(self, option, start, length):
            asked.append(option)

    def is_requested(has_read: bool) -> bool:
        monkeypatch.setattr("trainer.data.rows.read_from_disk", lambda: next(read) * has_read)
        asked.clear()
        windows([shards], [(0, 1)], 32)
        return bool(asked)

    monkeypatch.setattr("tokenizer.shards.mapped.mmap.mmap", Map)
    assert [is_requested(True) for _ in range(3)] == [True] * 3, "the disk is slower than the request"
    assert [is_requested(False) for _ in range(3)] == [True, False, False]
    assert not is_requested(True), "nobody knows before"
    assert [is_requested(False) for _ in range(REQUESTED + 1)] == [True] * REQUESTED + [False]


def test_the_files_of_a_shard_are_not_asked_for_their_size_for_every_batch(tmp_path, monkeypatch):
    write_set(tmp_path, [some_documents(np.random.default_rng(0), 40, 300) for _ in range(3)], 300)
    shards, now = ShardSet(tmp_path), [0.0]
    monkeypatch.setattr("tokenizer.shards.reader.time", SimpleNamespace(monotonic=lambda: now[0]))
    first, second, _ = shards.offsets[1:]
    assert shards.unchecked(np.array([0, second]), 1) == [0, 2]
    now[0] = CHECKED / 2
    assert shards.unchecked(np.array([first - 1, second - 1]), 2) == [1], "windows that end in the next shard"
    now[0] = 1.2 * CHECKED
    assert shards.unchecked(np.array([0]), len(shards)) == [0, 2]
