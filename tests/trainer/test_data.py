"""Batches: they have the right contents for any number of ranks, and memory does not grow with the data."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.conftest import alone
from tests.trainer import synthetic
from tests.trainer.synthetic import EOS, TOKENIZER, VOCAB, make_run
from tokenizer.mixture.curriculum import Curriculum, CurriculumError
from tokenizer.mixture.resolve import resolve
from tokenizer.shards.layout import ENDS, MANIFEST, Manifest, Shard, ShardError, file_name
from tokenizer.shards.page_cache import PageCache
from tokenizer.shards.reader import ShardSet, WindowBounds
from tokenizer.shards.sums import BLOCK, SUMS, CheckedFile
from trainer.base.config import ConfigError
from trainer.data.batches import AHEAD, Data, Prefetch, collate, padding, runs
from trainer.data.rows import windows
from trainer.loop.run import open_run
from trainer.model.loss import IGNORE


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(str(make_run(tmp_path_factory.mktemp("store"), documents=200)), None, None, [])


@pytest.fixture(scope="module")
def data(run):
    return Data(run.curriculum, run.store)


def row_key(batch, i: int) -> tuple:
    return (*batch.tokens[i].tolist(), *batch.targets[i].tolist(), *batch.positions[i].tolist(), int(batch.stream[i]))


def test_targets_and_positions_follow_the_document_table(data):
    """Against the plainest reading of the text: token by token, EOS ends a document (it occurs nowhere else here)."""
    batch = data.step(0, 5, 0, 1)
    assert batch.tokens.shape == (5, 32)
    attended = 0
    for i in range(5):
        tokens, position, length = batch.tokens[i].tolist(), 0, 0
        for t, token in enumerate(tokens):
            assert batch.positions[i, t] == position
            if t + 1 < 32:
                assert batch.targets[i, t] == (IGNORE if token == EOS else tokens[t + 1])
            elif token == EOS:
                assert batch.targets[i, t] == IGNORE
            else:
                assert 0 <= batch.targets[i, t] < VOCAB
            length += 1
            position = 0 if token == EOS else position + 1
            if token == EOS or t == 31:
                attended, length = attended + length ** 2, 0
    assert batch.attended == attended
    assert batch.valid() == int((batch.targets != IGNORE).sum()) < batch.targets.numel()


def test_boundaries_come_from_the_table_and_not_from_eos():
    window = np.array([5, EOS, 6, 7, 8])                  # an EOS inside a document: text that spells it, or a chat
    inside = collate([(window, np.array([], np.int64), 0)], 4)
    assert inside.positions.tolist() == [[0, 1, 2, 3]]
    assert inside.targets.tolist() == [[EOS, 6, 7, 8]]
    ended = collate([(window, np.array([2, 4]), 1)], 4)
    assert ended.positions.tolist() == [[0, 1, 0, 1]]
    assert ended.targets.tolist() == [[EOS, IGNORE, 7, IGNORE]]
    assert ended.attended == 8


def test_a_short_window_is_filled_with_what_does_not_count():
    batch = collate([(np.array([5, 6, 7]), np.array([1]), 0)], 4)
    assert batch.tokens.tolist() == [[5, 6, 0, 0]]
    assert batch.targets.tolist() == [[IGNORE, 7, IGNORE, IGNORE]]
    assert batch.positions[0, :2].tolist() == [0, 0]


@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize("first", [0, 5, 120])
def test_ranks_share_a_step_without_loss_or_repetition(run, data, world, first):
    batch = run.curriculum.phases[run.curriculum.phase_at(first)].batch
    whole = data.step(first, batch, 0, 1)
    parts = [data.step(first, batch, rank, world) for rank in range(world)]
    assert {p.rows for p in parts} == {-(-batch // world)}           # all ranks do the same number of micro-batches
    rows = [row_key(p, i) for rank, p in enumerate(parts) for i in range(len(range(rank, batch, world)))]
    assert sorted(rows) == sorted(row_key(whole, i) for i in range(batch))
    assert sum(p.valid() for p in parts) == whole.valid()
    assert sum(p.attended for p in parts) == whole.attended


def test_a_step_is_its_samples(run, data):
    first = run.curriculum.phases[1].start
    whole, single = data.step(first, 3, 0, 1), [data.samples([n]) for n in (first, first + 1, first + 2)]
    assert [row_key(whole, i) for i in range(3)] == [row_key(s, 0) for s in single]
    scattered = data.samples([first, first + 2])
    assert [row_key(scattered, i) for i in range(2)] == [row_key(single[0], 0), row_key(single[2], 0)]
    assert list(runs([3, 4, 5, 9])) == [(3, 6), (9, 10)]


def test_micro_batches_are_the_batch(data):
    batch = data.step(0, 5, 0, 1)
    for rows in (1, 2, 3, 5):
        parts = list(batch.micro(rows, torch.device("cpu")))
        assert {p.rows for p in parts} == {rows}
        assert torch.equal(torch.cat([p.tokens for p in parts])[:5], batch.tokens)
        assert sum(p.valid() for p in parts) == batch.valid()
    assert padding(2, 8).valid() == 0


def test_a_set_of_two_bytes_a_token_that_older_versions_wrote_is_read_beside_sets_of_one(run, data, tmp_path):
    write, wide = synthetic.write_shards, mock.Mock(return_value=np.dtype("<u2"))

    def as_before(folder: Path, name: str, *rest: Any) -> dict[str, Any]:
        if name != "code":
            return write(folder, name, *rest)
        with mock.patch("tokenizer.shards.writer.token_dtype", wide), \
                mock.patch("tests.trainer.synthetic.token_dtype", wide):
            return write(folder, name, *rest)

    with mock.patch("tests.trainer.synthetic.write_shards", as_before):
        opened = open_run(str(make_run(tmp_path, documents=200)), None, None, [])
    mixed = Data(opened.curriculum, opened.store)
    assert sorted(mixed.train[i].dtype.itemsize for i in range(2)) == [1, 2]
    for step in run.steps():
        rank = [made.step(step.first, step.stop - step.first, 0, 1) for made in (data, mixed)]
        assert all(torch.equal(getattr(rank[0], kind), getattr(rank[1], kind))
                   for kind in ("tokens", "targets", "positions", "stream"))


def test_every_token_is_a_target_at_most_once_an_epoch(tmp_path):
    """Over one epoch of a stream, windows overlap in one token and no target repeats."""
    opened = open_run(str(make_run(tmp_path, documents=60, total=1280, phases=[
        {"name": "a", "until": "50%", "sequence": 32, "batch": 64, "mix": {"web": 1}},
        {"name": "b", "until": "100%", "sequence": 64, "batch": 64}])), None, None, [])
    made = Data(opened.curriculum, opened.store)
    web = made.streams.index("web")
    seen = np.zeros(made.train[web].tokens, int)
    for step in opened.steps():
        at = made.order.locate(step.first, step.stop)
        for window, length in zip(at.window.tolist(), at.sequence.tolist()):
            seen[window * length + 1:window * length + length + 1] += 1
    assert seen.sum() == opened.curriculum.tokens
    assert seen.max() == 1


def test_prefetch_gives_every_step_in_order(run, data):
    got = [(step.number, row_key(batch, 0)) for step, batch in Prefetch(data, run.steps(), 1, 2)]
    want = [(step.number, row_key(data.step(step.first, step.batch, 1, 2), 0)) for step in run.steps()]
    assert got == want
    assert [number for number, _ in got] == list(range(run.curriculum.steps))


def test_steps_can_start_anywhere(run):
    everything = list(run.steps())
    assert [s.number for s in everything] == list(range(44))
    assert everything[-1].stop == run.curriculum.samples
    assert everything[30].tokens == 24 * 160 + 6 * 192
    for k in (0, 1, 24, 30, 43):
        assert list(run.steps(everything[k].first)) == everything[k:]
    assert list(run.steps(run.curriculum.samples)) == []
    with pytest.raises(ConfigError, match="inside a step"):
        next(run.steps(3))


def test_held_out_rows_cover_the_split(data):
    for s, shards in enumerate(data.heldout):
        rows = data.heldout_rows(s, 32, 10_000)
        targets = np.concatenate([row[0][1:] for row in rows])
        assert np.array_equal(targets, shards.read(1, shards.tokens))
        counted = collate(rows, 32).valid()
        assert counted == shards.tokens - shards.documents_count       # all but the first token of each document
        few = data.heldout_rows(s, 32, 5)
        assert len(few) == 5
        assert np.array_equal(few[0][0], rows[0][0])


def test_other_data_than_the_pinned_is_refused(run):
    stream = replace(run.curriculum.streams[0], sha256="0" * 64)
    with pytest.raises(ShardError, match="pinned"):
        Data(replace(run.curriculum, streams=(stream, run.curriculum.streams[1])), run.store)
    with pytest.raises(ConfigError, match="another tokenizer"):
        Data(replace(run.curriculum, tokenizer=replace(run.curriculum.tokenizer, sha256="d" * 64)), run.store)


def sparse_curriculum(store: Path, tokens: int) -> Curriculum:
    """Write a stream of `tokens` zeros as sparse files, and return a curriculum that reads nearly all of it."""
    folder = store / "shards" / "big" / "split=train"
    folder.mkdir(parents=True)
    per_shard = 1 << 28
    made = []
    for i, start in enumerate(range(0, tokens, per_shard)):
        n = min(per_shard, tokens - start)
        body, ends, table = (file_name(i, kind, "b") for kind in ("body", "ends", "table"))
        with open(folder / body, "wb") as f:
            f.truncate(2 * n)
        marks = np.arange(n // 8, n + 1, n // 8, dtype="<u8")
        marks.tofile(folder / ends)
        assert 2 * n % BLOCK == 0
        sums = np.append(np.full(2 * n // BLOCK, zlib.crc32(bytes(BLOCK))), zlib.crc32(marks.tobytes())).astype(SUMS)
        digest = hashlib.sha256(sums.tobytes()).hexdigest()
        blocks = file_name(i, "blocks", digest)
        sums.tofile(folder / blocks)
        made.append(Shard(i, n, 8, n, body, ends, table, "b", "b", "i", "b", blocks, digest))
    found = Manifest("big", "train", "uint16", TOKENIZER["sha256"], VOCAB, EOS, tokens, 8 * len(made), tokens,
                     tuple(made))
    found = replace(found, sha256=found.identity())
    (folder / MANIFEST).write_text(found.dumps())
    info = {"path": "shards/big/split=train", "sha256": found.sha256, "tokens": tokens}
    sets = {"big": {"tokenizer": TOKENIZER["sha256"], "dtype": "uint16", "train": info, "val": None}}
    phases = [{"name": "only", "until": "100%", "sequence": 256, "batch": 2048, "mix": {"big": 1}}]
    recipe = {"curriculum": {"seed": 1, "total": int(0.9 * tokens), "phases": phases}}
    return resolve(recipe, sets, TOKENIZER)[0]


def test_steps_located_ahead_are_those_of_each_alone(tmp_path):
    """Samples are located many steps ahead; a jump back, over the end of what is known, and a rank read the same."""
    curriculum = sparse_curriculum(tmp_path, 1 << 24)
    made = Data(curriculum, tmp_path)
    last = curriculum.samples - 8
    for first in (0, 8, AHEAD - 8, AHEAD - 4, AHEAD, AHEAD + 8, 3 * AHEAD, 16, last, 0):
        alone = made.order.locate(first, first + 8)
        assert all(np.array_equal(x, y) for x, y in zip(made.located(first, first + 8), alone)), first
    with pytest.raises(CurriculumError, match="outside the curriculum"):
        made.located(last, last + 16)


@mock.patch("tokenizer.mixture.kernels.ENOUGH", sys.maxsize)
def measured_peaks(folder: Path) -> dict[int, int]:
    """Return the most bytes that Python allocates for three steps of each of two runs, by tokens of the run."""
    peaks = {}
    for tokens in (1 << 24, 1 << 31):                # without numba, which one of them would import
        curriculum = sparse_curriculum(folder / str(tokens), tokens)
        middle = curriculum.samples // 2 // 8 * 8
        tracemalloc.start()
        loader = Data(curriculum, folder / str(tokens))
        for first in (0, middle, curriculum.samples - 8):
            loader.step(first, 8, 0, 2)
        peaks[tokens] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peaks


def test_memory_is_constant_in_total_tokens(tmp_path):
    """SmolLM3's second mystery: an index proportional to the run. Here a run 128 times as long costs the same."""
    peaks = alone(measured_peaks, tmp_path)
    small, big = peaks[1 << 24], peaks[1 << 31]
    assert big < small + 100_000, peaks


def test_what_does_not_count_is_no_target():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, 1000)
    tokens[[99, 500, 999]] = EOS
    counts = rng.random(1000) < 0.3

    class Shards:
        offsets, vocab_size, packed, dtype = [0, 1000], VOCAB, None, np.dtype(np.int64)

        page_cache = PageCache()

        def prefetch(self, ranges):
            pass

        def unchecked(self, starts, count):
            return [0]

        def samples(self, windows, length, into, rows, compiled):
            into[rows] = [tokens[w * length:w * length + length + 1] for w in windows]
            bounds = [[end - w * length for end in (100, 501, 1000) if 1 <= end - w * length <= length]
                      for w in windows]
            return [WindowBounds(rows, np.array(list(map(len, bounds))), np.concatenate(bounds).astype(np.int64))]

        def counts(self, start, stop):
            return counts[start:stop]

    length = 64
    with mock.patch("trainer.data.rows.refuse_short"):
        rows = windows([Shards()], [(0, w) for w in range(15)], length)
    batch = collate(rows, length)
    for w in range(15):
        for i in range(length):
            at = w * length + i
            learned = counts[at + 1] and tokens[at] != EOS
            assert batch.targets[w, i] == (tokens[at + 1] if learned else IGNORE)
    plain = collate([(*row[:3], None) for row in rows], length)
    assert plain.valid() == 15 * length - 2 > batch.valid() > 100
    assert torch.equal(plain.positions, batch.positions) and torch.equal(plain.tokens, batch.tokens)


@pytest.fixture
def copied(run, tmp_path):
    """A copy of the run's data: (data, entry of the first shard of a stream, folder of its set)."""
    shutil.copytree(run.store, tmp_path / "store")
    data = Data(run.curriculum, tmp_path / "store")
    return data, data.train[0].manifest.shards[0], data.train[0].folder


def read_all(data: Data) -> list[Any]:
    return [*(tensor.numpy() for tensor in data.samples(range(0, 40)).tensors()), *data.heldout_rows(0, 32, 100)]


def map_files(shards: ShardSet) -> None:
    """Map the files of the first shard into memory, as a reader does that has read from it."""
    shards.read(0, 1)
    shards.bounds(0, 32)


@pytest.fixture
def sums_hold(monkeypatch):
    """Makes all checks of block checksums pass, as if the set had been written with the bytes that a test puts into
    it."""
    monkeypatch.setattr(CheckedFile, "check", lambda *_: None)


def patch(path: Path, at: int, value: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(value)


def test_a_token_beyond_the_vocabulary_is_an_error_that_names_file_and_offset(copied, sums_hold):
    data, info, folder = copied
    read_all(data)
    for place in range(0, info.tokens, 7):                        # wherever the order begins
        patch(folder / info.body, 2 * place, VOCAB.to_bytes(2, "little"))
    with pytest.raises(ShardError, match=rf"split=train/{info.body}: token 97 at offset [\d,]+ \(byte [\d,]+\), the "
                                         rf"vocabulary has 97: damaged: run `tokenmill"):
        read_all(data)
    patch(folder / info.body, 0, bytes(2 * info.tokens))          # token 0 is one
    read_all(data)


def test_the_offset_is_that_in_the_shard(copied, sums_hold):
    data, _, folder = copied
    shards, second = data.train[0], data.train[0].manifest.shards[1]
    window = -(-shards.offsets[1] // 32)                          # the first whole one of the second shard
    place = window * 32 + 5 - shards.offsets[1]
    patch(folder / second.body, place, b"\xff")
    with pytest.raises(ShardError, match=rf"{second.body}: token 255 at offset {place} "):
        windows(data.train, [(0, window)], 32)


def test_heldout_data_is_looked_at_too(copied, sums_hold):
    data = copied[0]
    shards = data.heldout[0]
    patch(shards.folder / shards.manifest.shards[0].body, 5, b"\xff")
    with pytest.raises(ShardError, match=r"split=val/\S+: token 255 at offset 5 "):
        data.heldout_rows(0, 32, 100)


@pytest.mark.parametrize("kind", ["body", "ends"])
def test_a_shard_that_is_cut_while_it_is_read_is_an_error(copied, kind):
    """A page beyond the end of a mapped file would end the process by SIGBUS."""
    data, info, folder = copied
    map_files(data.train[0])
    path = folder / getattr(info, kind)
    size = path.stat().st_size
    with open(path, "r+b") as f:
        f.truncate(size // 2)
    with pytest.raises(ShardError, match=rf"{path.name}: {size // 2} bytes, the manifest says {size}: cut"):
        read_all(data)


@pytest.mark.parametrize("kind", ["body", "ends"])
def test_a_shard_that_is_removed_is_read_on_where_it_is_open_and_is_an_error_elsewhere(copied, run, tmp_path, kind,
                                                                                       monkeypatch):
    data, info, folder = copied
    expected, other = read_all(Data(run.curriculum, run.store)), Data(run.curriculum, tmp_path / "store")
    map_files(data.train[0])
    map_files(other.train[0])
    (folder / getattr(info, kind)).unlink()
    np.testing.assert_equal(read_all(data), expected)
    monkeypatch.setattr("tokenizer.shards.set_files.HAS_DESCRIPTOR", False)            # as in Python 3.13
    with pytest.raises(ShardError, match=rf"{getattr(info, kind)}: gone"):
        read_all(other)


def test_ends_that_do_not_increase_are_an_error(copied, sums_hold):
    data, info, folder = copied
    every = [(0, w) for w in range(info.tokens // 32)]
    windows(data.train, every, 32)
    ends = np.fromfile(folder / info.ends, ENDS)
    ends[1::2] = ends[0::2][:len(ends) // 2]
    patch(folder / info.ends, 0, ends.tobytes())
    with pytest.raises(ShardError, match=rf"{info.ends}: ends (of documents near token [\d,]+ of the stream )?do not"):
        windows(data.train, every, 32)


def test_a_flipped_bit_of_a_shard_is_an_error_that_names_file_and_place(copied):
    data, info, folder = copied
    read_all(data)
    patch(folder / info.body, 2, bytes(2 * info.tokens - 2))
    with pytest.raises(ShardError, match=rf"split=train/{info.body}: damaged at byte [\d,]+: run `tokenmill"):
        read_all(data)
