"""The inner loop of `trainer.data.batches.collate`, compiled with numba where it is installed."""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit
from trainer.model.loss import IGNORE


@njit(cache=True, nogil=True)
def fill(windows: np.ndarray, bounds: np.ndarray, counts: np.ndarray, tokens: np.ndarray, targets: np.ndarray,
         positions: np.ndarray) -> int:
    """Fill the rows of a batch, L tokens each, from `windows`, an array of L + 1 tokens for each row. `bounds` has the
    positions in [1, L] at which documents begin: the increasing positions of the first row, then those of the next.
    `counts` says how many positions each row has. Writes `tokens`, `targets` and `positions`, and returns the sum of
    length² over all pieces of documents."""
    length, attended, place = tokens.shape[1], 0, 0
    for row in range(tokens.shape[0]):
        # one array at a time, so that the processor copies many numbers at once
        token, target, position, window = tokens[row], targets[row], positions[row], windows[row]
        for i in range(length):
            token[i] = window[i]
        for i in range(length):
            target[i] = window[i + 1]
        begin = 0
        for number in range(counts[row] + 1):
            stop = length if number == counts[row] else bounds[place + number]
            piece = position[begin:stop]
            for i in range(piece.size):
                piece[i] = i
            if number < counts[row]:
                target[stop - 1] = IGNORE
            attended += (stop - begin) ** 2
            begin = stop
        place += counts[row]
    return attended
