"""Computes the order of training samples by pure functions, without an index: sample number → (stream, epoch, window).

A stream is the tokens of one source, language or bucket. A window is the consecutive tokens of one sample. An epoch is
one complete reading of a stream. Memory use is proportional to the number of streams. docs/contracts.md (Shards and
order) defines the order; it rests on three ideas:

* **Which stream** sample n is from is determined by apportionment (`tokenizer.mixture.apportion`). In every prefix and
  in every batch, each stream is therefore within a few samples of its share (`tokenizer.mixture.realised` gives the
  bounds), whatever the batch size and the number of ranks or workers.
* **Which window** of a stream the j-th sample from this stream reads is determined by a keyed permutation
  (`tokenizer.mixture.permutation`).
* **The sequence length may change** between phases (stretches of the training) without reading a token twice. An epoch
  of a stream is a permuted sequence of super-windows, i.e. blocks of `longest` tokens. A phase reserves the next
  super-windows that it needs, and permutes windows of its own length inside its reservation.

This module needs only the standard library and numpy, because the trainer imports it on machines where nothing else is
installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from tokenizer.mixture.apportion import Apportionment, CurriculumError
from tokenizer.mixture.permutation import KeyedPermutations, permutation_key, unpermute
from tokenizer.mixture.phases import Phase, Stream

#: number of samples that the order hash covers (docs/contracts.md: Identity)
HASHED = 10**6
#: largest number of epochs of a stream in a phase. An order keeps a few numbers for each epoch, so without this limit a
#: typing error in a weight or a size could fill the memory
MOST_EPOCHS = 10**5


@dataclass(frozen=True)
class Piece:
    """A reservation of one phase (a stretch of the training) in one epoch of a stream. It consists of super-windows,
    which are blocks of `longest` consecutive tokens. They are divided into windows (samples) of `length` tokens. The
    phase reads the windows of a piece in a permuted order."""

    stream: int
    epoch: int
    reservation: int              # index of the phase that reserved it
    first: int                    # position of the first super-window in the permuted epoch
    supers: int                   # number of super-windows
    length: int                   # tokens per window
    windows: int                  # supers × (longest // length)


@dataclass(frozen=True)
class Extent:
    """Which windows a range of samples reads. The samples are those that phase `phase` draws from one stream (data
    source), counted from 0. Samples [start, stop) read the windows of `piece` (a reservation of this or an earlier
    phase) in the piece's permuted order, from position `offset` on."""

    phase: int
    start: int
    stop: int
    piece: Piece
    offset: int


class Located(NamedTuple):
    """What a range of samples reads: phase (stretch of the training), stream (data source), epoch (reading of the
    stream) and window. A window is a range of consecutive tokens; in a packed stream, it is a packed row. The fields
    are int64 arrays with an entry per sample, in the order of the samples."""

    phase: np.ndarray
    stream: np.ndarray
    epoch: np.ndarray
    window: np.ndarray            # number of the window: tokens [w·L, w·L + L] of the stream
    sequence: np.ndarray          # L, tokens per window


class Mixture(Protocol):
    """The parts of a curriculum that determine the order of training samples."""

    @property
    def seed(self) -> int: ...

    @property
    def longest(self) -> int: ...

    @property
    def streams(self) -> tuple[Stream, ...]: ...

    @property
    def phases(self) -> tuple[Phase, ...]: ...

    @property
    def samples(self) -> int: ...


class Order:
    """The order of training samples that a curriculum defines. The object's size is O(phases × streams × epochs),
    whatever the number of samples."""

    def __init__(self, curriculum: Mixture) -> None:
        self.curriculum = curriculum
        self.longest = curriculum.longest
        self.names = [s.name for s in curriculum.streams]
        #: number of super-windows (blocks of `longest` tokens) of each stream; a shorter block at its end is never read
        self.supers = [s.supers(self.longest) for s in curriculum.streams]
        #: for each phase: from which stream each of its samples is drawn
        self.apportioned = [apportioned(phase, self.names) for phase in curriculum.phases]
        #: extents[phase][stream]: the ranges of samples that the phase reads from the stream, in order
        self.extents: list[list[list[Extent]]] = []
        #: used[phase][stream]: number of super-windows that all phases up to this one have reserved, over all epochs
        self.used: list[list[int]] = []
        self._reserve()

    @property
    def samples(self) -> int:
        return self.curriculum.samples

    def _reserve(self) -> None:
        used = [0] * len(self.names)
        # windows that a phase has reserved and does not read go to the next phase with the same sequence length, if the
        # stream is still in the same epoch
        unread: dict[tuple[int, int], tuple[Piece, int]] = {}
        for p, phase in enumerate(self.curriculum.phases):
            ratio = self.longest // phase.sequence
            needed, planned = (self.apportioned[p].counts(n) for n in (phase.samples, phase.reserved))
            row: list[list[Extent]] = []
            for s, name in enumerate(self.names):
                if needed[s] and not self.supers[s]:
                    raise CurriculumError(
                        f"stream '{name}' has fewer tokens ({self.curriculum.streams[s].tokens}) than one window of "
                        f"`longest` = {self.longest} needs: lower shards.*.longest, or leave '{name}' out of the mix")
                extents: list[Extent] = []
                draw = spare = 0
                earlier = unread.get((s, phase.sequence))
                if earlier is not None and earlier[0].epoch == (used[s] - 1) // self.supers[s]:
                    piece, offset = earlier
                    spare = piece.windows - offset
                    draw = min(spare, needed[s])
                    if draw:
                        extents.append(Extent(p, 0, draw, piece, offset))
                        unread[s, phase.sequence] = (piece, offset + draw)
                # a reservation keeps its planned size if the phase is cut short later: another size would permute its
                # windows differently, and change samples that have already been read
                supers_needed = -(-max(0, planned[s] - spare) // ratio)
                if needed[s] and supers_needed > MOST_EPOCHS * self.supers[s]:
                    raise CurriculumError(
                        f"phase '{phase.name}' would read stream '{name}' {supers_needed // self.supers[s]:,} times, "
                        f"more than {MOST_EPOCHS:,}: lower its weight, or leave '{name}' out of the mix")
                while draw < needed[s]:
                    epoch, first = divmod(used[s], self.supers[s])
                    size = min(supers_needed, self.supers[s] - first)
                    piece = Piece(s, epoch, p, first, size, phase.sequence, size * ratio)
                    draws = min(piece.windows, needed[s] - draw)
                    extents.append(Extent(p, draw, draw + draws, piece, 0))
                    unread[s, phase.sequence] = (piece, draws)
                    draw, used[s], supers_needed = draw + draws, used[s] + size, supers_needed - size
                row.append(extents)
            self.extents.append(row)
            self.used.append(list(used))

    @cached_property
    def _reads(self) -> list[_Reads]:
        return [_Reads(self, p) for p in range(len(self.curriculum.phases))]

    def locate(self, first_sample: int, stop_sample: int) -> Located:
        """Return what samples [first_sample, stop_sample) read: for each sample its phase (stretch of the training),
        stream (data source), epoch (reading of the stream) and window (range of tokens). Time and memory are
        proportional to the number of these samples, whether they are early or late in the run."""
        if not 0 <= first_sample <= stop_sample <= self.samples:
            raise CurriculumError(f"samples [{first_sample}, {stop_sample}) are outside the curriculum's "
                                  f"{self.samples} samples")
        out = Located(*(np.empty(stop_sample - first_sample, np.int64) for _ in Located._fields))
        for p, phase in enumerate(self.curriculum.phases):
            start, stop = max(first_sample - phase.start, 0), min(stop_sample - phase.start, phase.samples)
            if start >= stop:
                continue
            first, end = phase.start + start - first_sample, phase.start + stop - first_sample
            out.phase[first:end], out.sequence[first:end] = p, phase.sequence
            out.stream[first:end], draws = self.apportioned[p].draws(start, stop)
            out.epoch[first:end], out.window[first:end] = self._reads[p].windows(out.stream[first:end], draws)
        return out

    def samples_of(self, stream: int, first: int, stop: int,
                   phase: int | None = None) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return the samples that read super-windows [first, stop) of a stream (data source); a super-window is a block
        of `longest` tokens. `phase` limits the result to one phase (stretch of the training). This is the inverse of
        `locate`.

        Returns {phase: (sample numbers, windows, epochs)}, int64 arrays sorted by window, then epoch. A window appears
        once for each epoch in which a sample reads it. A phase that reads none of the windows is left out. With this,
        `materialize` reads each shard once, in the order of the file, and writes each window to the rows of its
        samples."""
        seed, name = self.curriculum.seed, self.names[stream]
        pieces: dict[Piece, list[Extent]] = {}
        for p, row in enumerate(self.extents):
            for extent in row[stream] if phase in (None, p) else ():
                pieces.setdefault(extent.piece, []).append(extent)
        rows_of_phase: dict[int, list[np.ndarray]] = {}
        supers = np.arange(first, stop, dtype=np.int64)
        places: dict[int, np.ndarray] = {}
        for piece, extents in pieces.items():
            if piece.epoch not in places:
                places[piece.epoch] = unpermute(supers, self.supers[stream],
                                                permutation_key(seed, name, piece.epoch, "super"))
            place = places[piece.epoch] - piece.first
            inside = (place >= 0) & (place < piece.supers)
            ratio = self.longest // piece.length
            window_in_super = np.arange(ratio, dtype=np.int64)
            window_places = (place[inside][:, None] * ratio + window_in_super).ravel()
            windows = (supers[inside][:, None] * ratio + window_in_super).ravel()
            index = unpermute(window_places, piece.windows, permutation_key(seed, name, piece.epoch, piece.reservation))
            for extent in extents:
                drawn = (index >= extent.offset) & (index < extent.offset + extent.stop - extent.start)
                draws = index[drawn] - extent.offset + extent.start
                if not draws.size:
                    continue
                start = self.curriculum.phases[extent.phase].start
                numbers = start + self.apportioned[extent.phase].sample_of(stream, draws)
                rows_of_phase.setdefault(extent.phase, []).append(
                    np.stack([numbers, windows[drawn], np.full(numbers.size, piece.epoch, np.int64)]))
        out = {}
        for p, rows in sorted(rows_of_phase.items()):
            table = np.concatenate(rows, axis=1)
            numbers, window, epoch = table[:, np.lexsort((table[2], table[1]))]
            out[p] = (numbers, window, epoch)
        return out

    def hash(self) -> str:
        """Return a hash of the order, in hex: blake2b over the numbers (stream, epoch, window) of the first 10⁶
        samples, or of all if there are fewer, as little-endian u64."""
        digest = hashlib.blake2b(digest_size=16)
        for start in range(0, min(HASHED, self.samples), 1 << 16):
            located = self.locate(start, min(start + (1 << 16), HASHED, self.samples))
            digest.update(np.stack([located.stream, located.epoch, located.window], axis=1).astype("<u8").tobytes())
        return digest.hexdigest()


class _Reads:
    """Computes which windows (training samples) one phase (a stretch of the training) reads, for all streams in one
    call."""

    def __init__(self, order: Order, phase: int) -> None:
        extents = [extent for row in order.extents[phase] for extent in row]
        pieces = [extent.piece for extent in extents]
        seed, names = order.curriculum.seed, order.names
        self._ratio = order.longest // order.curriculum.phases[phase].sequence
        # the draws of all streams, one stream after the other, are numbered through; each extent is a range of them
        drawn = np.array([row[-1].stop if row else 0 for row in order.extents[phase]])
        self._before = np.cumsum(drawn) - drawn
        self._starts = np.array([self._before[e.piece.stream] + e.start for e in extents], dtype=np.int64)
        self._offsets = np.array([e.offset for e in extents], dtype=np.int64)
        self._epochs = np.array([piece.epoch for piece in pieces], dtype=np.int64)
        self._firsts = np.array([piece.first for piece in pieces], dtype=np.int64)
        self._inside = KeyedPermutations([piece.windows for piece in pieces], [
            permutation_key(seed, names[piece.stream], piece.epoch, piece.reservation) for piece in pieces])
        self._supers = KeyedPermutations([order.supers[piece.stream] for piece in pieces], [
            permutation_key(seed, names[piece.stream], piece.epoch, "super") for piece in pieces])

    def windows(self, streams: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, numbers of windows): the windows (training samples) that some draws read. Draw i is number
        `draws[i]` from stream number `streams[i]`, counted from 0 in each phase and stream. Window w is tokens [w·L,
        w·L + L] of the stream, where L is the sequence length of the phase. All arrays are int64 (N,)."""
        drawn = self._before[streams] + draws
        extents = np.searchsorted(self._starts, drawn, side="right") - 1
        place = self._inside.permute(extents, drawn - self._starts[extents] + self._offsets[extents])
        rows = self._supers.permute(extents, self._firsts[extents] + place // self._ratio)
        return self._epochs[extents], rows * self._ratio + place % self._ratio


def apportioned(phase: Phase, names: Sequence[str]) -> Apportionment:
    """Return the Apportionment of a phase (a stretch of the training). It says from which of the streams `names` each
    sample of the phase is drawn."""
    number = {name: i for i, name in enumerate(names)}
    return Apportionment([phase.weights.get(name, 0) for name in names],
                         [[number[name] for name in group] for group in (phase.groups or {}).values()])
