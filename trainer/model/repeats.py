"""Finds spans of text in which a short n-gram repeats many times. The tokens of such a span are not used as targets of
the training, because they would teach only repetition.

OLMo 2 (arXiv 2501.00656 §3.1) traced many loss spikes to training samples with long runs of repeated n-grams. OLMo 2
leaves out a whole sample that has a span of 32 or more repetitions of 1 to 13 tokens. This module leaves out only the
span itself; the rest of the sample still counts. The spans are a pure function of the sample's tokens.
"""

from __future__ import annotations

import numpy as np


def repeated(tokens: np.ndarray, ngram: int, times: int) -> np.ndarray:
    """Find the spans in which a sequence of 1 to `ngram` tokens repeats at least `times` times. Returns bool (N,):
    which of `tokens` (N,) are in such a span.

    Let p be the number of tokens in the sequence. A span then is a maximal stretch in which every token i equals token
    i − p, and the p tokens before it.
    """
    in_span = np.zeros(len(tokens), bool)
    for period in range(1, min(ngram, len(tokens) // times) + 1):
        least = (times - 1) * period                     # number of equal pairs in `times` repetitions
        same = tokens[period:] == tokens[:-period]
        if np.count_nonzero(same) < least:               # nearly every window of real text ends here
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist()):
            if stop - start >= least:
                in_span[start:stop + period] = True
    return in_span
