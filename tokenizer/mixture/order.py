"""Computes the order of training samples by pure functions, without an index: sample number → (stream, epoch, window).

A stream is the tokens of one source, language or bucket, a window is the consecutive tokens of one sample, and an epoch
is one complete reading of a stream. Memory use is proportional to the number of streams. docs/contracts.md (Shards and
order) defines the order; it rests on three ideas:

* **Which stream** sample n is from is determined by Webster (Sainte-Laguë) apportionment. Draw k (from 0) of stream i,
  which has weight w_i, is due at time (2k + 1) / w_i. Samples are numbered in order of due time; of draws due at the
  same time, that of the lowest stream index comes first. Adding a sample never takes one away from a stream (a divisor
  method is house-monotone: Balinski & Young, *Fair Representation*, 1982). In every prefix and every batch each stream
  therefore has its share to about one sample (`realised` says how closely), whatever the batch size and the number of
  ranks or workers.
* **Which window** draw j of a stream reads is determined by a keyed permutation: a balanced Feistel network of 6 rounds
  with cycle walking (Black & Rogaway, CT-RSA 2002). The key is blake2b("v1/seed/stream/epoch/reservation"), read
  little-endian.
* **The sequence length may change** between phases (stretches of the training) without reading a token twice. An epoch
  of a stream is a permuted sequence of super-windows of `longest` tokens. A phase reserves the next super-windows that
  it needs, and permutes windows of its own length inside its reservation.

This module needs only the standard library and numpy, because the trainer imports it on nodes that have nothing else.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.base.errors import TokenmillError
from tokenizer.mixture.phases import Phase, Stream

ROUNDS = 6
#: number of samples that the order hash covers (docs/contracts.md: Identity)
HASHED = 10**6
_LOW = np.uint64(0xFFFFFFFF)


class CurriculumError(TokenmillError, ValueError):
    """A curriculum that cannot be read or used for a training; the message names the key and the remedy."""

    permanent = True


# -- permutation -------------------------------------------------------------------------------------------------
def round_keys(key: str) -> np.ndarray:
    """Return the round keys of the Feistel network that permutes numbers, uint64 (ROUNDS,). They are the blake2b hash
    of the text `key`, read as little-endian numbers on every machine."""
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(x: np.ndarray, k: np.uint64) -> np.ndarray:
    """The round function of a Feistel network: hash 32 bits of each uint64 value of `x` with the key `k`. The hash is
    two multiply-xorshift steps (constants of lowbias32 by C. Wellons, hash-prospector)."""
    with np.errstate(over="ignore"):
        x = (x ^ k) & _LOW
        x = (x * np.uint64(0x7FEB352D)) & _LOW
        x ^= x >> np.uint64(15)
        x = (x * np.uint64(0x846CA68B)) & _LOW
        x ^= x >> np.uint64(16)
    return x


def _walk(numbers: np.ndarray | int, n: int, key: str, forward: bool) -> np.ndarray:
    """Permute `numbers`, all below n, by the permutation of [0, n) that the text `key` determines, or by the inverse
    permutation if not `forward`. The Feistel network permutes a larger range than [0, n), so it is applied to a number
    again until the result is below n (cycle walking)."""
    if not 0 < n <= 1 << 62:
        raise ValueError(f"a permutation needs 1 <= n <= 2**62, not {n}")
    mapped = np.array(numbers, dtype=np.uint64, ndmin=1)
    if mapped.size and int(mapped.max()) >= n:
        raise ValueError(f"index {int(mapped.max())} outside a permutation of {n}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = round_keys(key)
    todo = np.arange(mapped.size)
    while todo.size:  # the domain is at most 4n: a number needs at most 4 passes on average
        values = mapped[todo]
        left, right = values >> shift, values & mask
        if forward:
            for round_key in keys:
                left, right = right, left ^ (_mix(right, round_key) & mask)
        else:
            for round_key in keys[::-1]:
                left, right = right ^ (_mix(left, round_key) & mask), left
        values = (left << shift) | right
        mapped[todo] = values
        todo = todo[values >= np.uint64(n)]
    return mapped.astype(np.int64)


def permute(numbers: np.ndarray | int, n: int, key: str) -> np.ndarray:
    """Map `numbers` by a bijection of [0, n) that the text `key` determines. Returns a flat int64 array."""
    return _walk(numbers, n, key, True)


def unpermute(numbers: np.ndarray | int, n: int, key: str) -> np.ndarray:
    """The inverse of `permute`: map `numbers`, all below n, back by the bijection of [0, n) that the text `key`
    determines."""
    return _walk(numbers, n, key, False)


def permutation_key(seed: int, stream: str, epoch: int, reservation: int | str) -> str:
    """Return the text that determines a permutation of an epoch's data. `reservation` is the index of the phase whose
    reserved windows are permuted, or "super" for the permutation of all super-windows (blocks of `longest` tokens) of
    the epoch."""
    return f"v1/{seed}/{stream}/{epoch}/{reservation}"


# -- Webster -----------------------------------------------------------------------------------------------------
def check_weights(weights: Sequence[int], n: int) -> None:
    """Raise CurriculumError if `weights` (of streams) are not integers >= 0 with a positive sum, or if they are too
    large for int64 arithmetic with `n` samples."""
    if not weights or min(weights) < 0 or sum(weights) <= 0 or any(weight != int(weight) for weight in weights):
        raise CurriculumError(f"weights must be integers >= 0 with a positive sum, not {list(weights)}")
    if (2 * n + 1) * max(weights) >= 1 << 62:
        raise CurriculumError(f"weights up to {max(weights)} over {n} samples overflow 64 bits: use smaller weights")


def counts(n: int, weights: Sequence[int]) -> list[int]:
    """Return how many of the first n samples are drawn from each stream (data source) by Webster apportionment;
    `weights` holds an integer weight per stream. The counts are exact for any n. The time is O(K log K) for K streams,
    whatever n is."""
    check_weights(weights, n)
    total = sum(weights)
    # after `total` samples every stream has given exactly its weight, and the sequence repeats
    rounds, remainder = divmod(n, total)
    live = [i for i, weight in enumerate(weights) if weight]
    draws = [0] * len(weights)
    # By time t a stream of weight w has had floor((w·t + 1)/2) draws. Let K be the number of streams with a weight. At
    # t = (2·remainder − K)/total all streams together have had at most `remainder` draws, and at least remainder − K.
    # The missing draws are added one by one.
    for i in live:
        draws[i] = max(0, (weights[i] * (2 * remainder - len(live)) + total) // (2 * total))
    due = [(Fraction(2 * draws[i] + 1, weights[i]), i) for i in live]
    heapq.heapify(due)
    for _ in range(remainder - sum(draws)):
        _, i = due[0]
        draws[i] += 1
        heapq.heapreplace(due, (Fraction(2 * draws[i] + 1, weights[i]), i))
    return [drawn + rounds * weight for drawn, weight in zip(draws, weights)]


def sample_of(stream: int, j: np.ndarray | int, weights: Sequence[int]) -> np.ndarray:
    """Return which sample is the j-th one (from 0) drawn from stream number `stream`, as an int64 array of sample
    numbers. `j` is one number or an array.

    Samples are drawn from streams in order of due time (Webster apportionment). Draw j of a stream with weight w is due
    at T = (2j+1)/w. It is preceded by j draws of its own stream and, for each other stream with weight v, by one draw
    for each odd number below T·v. A draw of another stream that is due at the same time precedes it only if that stream
    has a lower index.
    """
    j = np.array(j, dtype=np.int64, ndmin=1)
    check_weights(weights, int(j.max(initial=0)))
    weight = int(weights[stream])
    if weight == 0:
        raise CurriculumError(f"stream {stream} has weight 0 and gives no samples")
    numbers = j.copy()
    for other_stream, other_weight in enumerate(weights):
        if other_stream == stream or other_weight == 0:
            continue
        scaled = (2 * j + 1) * other_weight
        numbers += (scaled // weight + 1) // 2 if other_stream < stream else -(-scaled // weight) // 2
    return numbers


# -- reservations ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Piece:
    """The blocks of tokens that one phase (a stretch of the training) has reserved in one epoch of a stream. The blocks
    are super-windows of `longest` tokens. The windows (samples) of `length` tokens in the piece are permuted within
    it."""

    stream: int
    epoch: int
    reservation: int              # index of the phase that reserved it
    first: int                    # position of the first super-window in the permuted epoch
    supers: int                   # number of super-windows
    length: int                   # tokens per window
    windows: int                  # supers × (longest // length)


@dataclass(frozen=True)
class Extent:
    """A range of samples of one stream that read the windows of one piece (the blocks that a phase has reserved).
    Samples are counted per stream and phase: samples [start, stop) that phase `phase` draws from the stream read the
    windows at positions offset, offset + 1, … of the permuted piece."""

    phase: int
    start: int
    stop: int
    piece: Piece
    offset: int


class Located(NamedTuple):
    """What a range of samples reads: which window (range of consecutive tokens) of which stream, in which phase and
    epoch. The fields are int64 arrays of equal length, with an entry per sample, in the order of the samples."""

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
        self.supers = [max(0, s.tokens - 1) // self.longest for s in curriculum.streams]
        self.weights = [[p.weights.get(name, 0) for name in self.names] for p in curriculum.phases]
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
            needed, planned = counts(phase.samples, self.weights[p]), counts(phase.reserved, self.weights[p])
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

    def _windows(self, piece: Piece, index: np.ndarray) -> np.ndarray:
        """Return the numbers of the windows (samples) at positions `index` of the permuted piece. Numbers count windows
        from the start of the stream: window w is tokens [w·L, w·L + L], where L is the piece's `length`."""
        seed, name = self.curriculum.seed, self.names[piece.stream]
        ratio = self.longest // piece.length
        place = permute(index, piece.windows, permutation_key(seed, name, piece.epoch, piece.reservation))
        row = permute(piece.first + place // ratio, self.supers[piece.stream],
                      permutation_key(seed, name, piece.epoch, "super"))
        windows: np.ndarray = row * ratio + place % ratio
        return windows

    def locate(self, first_sample: int, stop_sample: int) -> Located:
        """Return which data samples [first_sample, stop_sample) read: phase, stream, epoch and window (range of tokens)
        of each. Time and memory are proportional to the number of these samples, whether they are early or late in the
        run."""
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
            draws_before, draws_after = counts(start, self.weights[p]), counts(stop, self.weights[p])
            for s, row in enumerate(self.extents[p]):
                for extent in row:
                    draws = np.arange(max(draws_before[s], extent.start), min(draws_after[s], extent.stop),
                                      dtype=np.int64)
                    if not draws.size:
                        continue
                    positions = first + sample_of(s, draws, self.weights[p]) - start
                    out.stream[positions], out.epoch[positions] = s, extent.piece.epoch
                    out.window[positions] = self._windows(extent.piece, draws - extent.start + extent.offset)
        return out

    def samples_of(self, stream: int, first: int, stop: int,
                   phase: int | None = None) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return the samples that read a given part of a stream: super-windows (blocks of `longest` tokens) [first,
        stop), in one phase, or in all phases if `phase` is None. This is the inverse of `locate`.

        Returns {phase: (sample numbers, windows, epochs)}, int64 arrays sorted by window, then epoch. A window appears
        once for each epoch in which a sample reads it. `materialize` uses this to read each shard once, in file order,
        and to write each window to its sample's row.
        """
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
                numbers = start + sample_of(stream, draws, self.weights[extent.phase])
                rows_of_phase.setdefault(extent.phase, []).append(
                    np.stack([numbers, windows[drawn], np.full(numbers.size, piece.epoch, np.int64)]))
        out = {}
        for p, rows in sorted(rows_of_phase.items()):
            table = np.concatenate(rows, axis=1)
            numbers, window, epoch = table[:, np.lexsort((table[2], table[1]))]
            out[p] = (numbers, window, epoch)
        return out

    def hash(self) -> str:
        """Return a hash of the order, in hex: blake2b over (stream, epoch, window) of the first 10⁶ samples, as
        little-endian u64."""
        digest = hashlib.blake2b(digest_size=16)
        for start in range(0, min(HASHED, self.samples), 1 << 16):
            located = self.locate(start, min(start + (1 << 16), HASHED, self.samples))
            digest.update(np.stack([located.stream, located.epoch, located.window], axis=1).astype("<u8").tobytes())
        return digest.hexdigest()
