"""The two inner loops of the order of samples, compiled with numba where it is installed. A kernel is a function that
numba compiles.

`tokenizer.mixture.permutation` and `tokenizer.mixture.apportion` compute the same numbers with numpy where numba is
missing. They also use numpy at first, because importing numba takes longer than computing a few numbers.
"""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import has_numba, njit

#: how many numbers a process computes with numpy before it imports numba; the import takes about as long
ENOUGH = 1 << 21
#: how many numbers are permuted at a time, so that they stay in the processor's cache
BLOCK = 1024

_computed = 0


def is_compiled(numbers: int) -> bool:
    """Return whether a kernel should compute the next `numbers` numbers. This is so once all calls in this process have
    asked for more than ENOUGH numbers together, so that a process that computes little does not import numba. Where
    numba is not installed, the result is always False."""
    global _computed
    _computed += numbers
    return _computed > ENOUGH and has_numba()


@njit(cache=True)
def walk(which: np.ndarray, numbers: np.ndarray, sizes: np.ndarray, halves: np.ndarray, keys: np.ndarray,
         backward: bool, mapped: np.ndarray) -> int:
    """Map each `numbers[i]` by the keyed permutation number `which[i]` and write the result to `mapped[i]`. With
    `backward`, apply the inverse permutation. If `which` has one entry, it is for all numbers. `sizes`, `halves` and
    `keys` are those of `permutation.KeyedPermutations`. Returns -1, or the index of the first number outside its
    permutation; `mapped` is then incomplete."""
    rounds = keys.shape[0]
    left, right, mask = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    own, place = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for start in range(0, numbers.size, BLOCK):
        waiting = min(BLOCK, numbers.size - start)
        for i in range(waiting):
            value = numbers[start + i]
            own[i], place[i] = which[start + i] if which.size > 1 else which[0], start + i
            if not 0 <= value < np.int64(sizes[own[i]]):
                return start + i
            half = np.int64(halves[own[i]])
            mask[i] = (1 << half) - 1
            left[i], right[i] = value >> half, value & mask[i]
        while waiting:
            if backward:
                left, right = right, left
            for step in range(rounds):
                row = keys[rounds - 1 - step if backward else step]
                for i in range(waiting):             # in 32 bits, so that the processor does many at once
                    x = np.uint32(right[i] ^ row[own[i]])
                    x = np.uint32(x * np.uint32(0x7FEB352D))
                    x = np.uint32(x ^ (x >> np.uint32(15)))
                    x = np.uint32(x * np.uint32(0x846CA68B))
                    x = np.uint32(x ^ (x >> np.uint32(16)))
                    left[i] ^= x & mask[i]
                left, right = right, left
            if backward:
                left, right = right, left
            outside = 0                              # numbers that are mapped once more
            for i in range(waiting):
                value = np.int64(left[i]) << np.int64(halves[own[i]]) | np.int64(right[i])
                mapped[place[i]] = value
                own[outside], place[outside], mask[outside] = own[i], place[i], mask[i]
                left[outside], right[outside] = left[i], right[i]
                outside += int(value >= np.int64(sizes[own[i]]))
            waiting = outside
    return -1


@njit(cache=True)
def draw(counts: np.ndarray, weights: np.ndarray, children: np.ndarray, streams: np.ndarray, draws: np.ndarray) -> None:
    """Draw consecutive samples from a tree of streams (data sources). The stream of each sample is written to
    `streams`, and the number of its draw from that stream to `draws`.

    `weights` and `children` are those of `apportion.Apportionment`, by child and node. The last node is the root, and
    all other nodes have two children. `counts` says how many samples each child of the root has before the first one to
    be drawn; the new samples are added to it."""
    most, root = weights.shape[0], weights.shape[1] - 1
    for i in range(streams.size):
        best = -1                                    # the child of the root whose next draw is due first
        for k in range(most):
            if weights[k, root] and (best < 0 or (2 * counts[k] + 1) * weights[best, root]
                                     < (2 * counts[best] + 1) * weights[k, root]):
                best = k
        number, node = counts[best], children[best, root]
        counts[best] += 1
        while node >= 0:                             # sample `number` of the node
            first, both = 2 * weights[0, node], 2 * (weights[0, node] + weights[1, node])
            due = number * first + both // 2
            drawn = due // both                      # how many of the first `number` samples the first child has
            if due - drawn * both + first >= both:   # the next sample is the first child's
                number, node = drawn, children[0, node]
            else:
                number, node = number - drawn, children[1, node]
        streams[i], draws[i] = ~node, number
