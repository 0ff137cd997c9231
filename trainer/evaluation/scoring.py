"""Computes log-likelihoods of texts by a model. Rows of similar length form a batch. The number of tokens in a batch is
limited, so the model needs the same memory for any number of benchmark items. Logits are computed only at the places
that predict a token of a continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.base.config import TrainingError
from trainer.evaluation.queries import SharedRow
from trainer.model.attention import DocMask
from trainer.model.transformer import Transformer

#: largest number of logits that are computed at a time: on a CPU 2 MB in float32, which its caches hold, and on a GPU,
#: which needs larger matrices, 256 MB
_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 26}
#: number of tokens of the vocabulary whose logits are computed at a time
_TOKENS = {"cpu": 1 << 10, "cuda": 1 << 30}


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log-likelihood of a continuation in nats (`nats`), its number of tokens, and whether greedy generation would
    give exactly this continuation (`greedy`)."""

    nats: float
    tokens: int
    greedy: bool


@dataclass(frozen=True)
class Likelihoods:
    """The likelihoods of all queries (contexts with continuations), as arrays indexed by the number of a query. Arrays
    need much less memory than an object for each query."""

    nats: np.ndarray
    tokens: np.ndarray
    greedy: np.ndarray

    def __getitem__(self, number: int) -> Likelihood:
        return Likelihood(float(self.nats[number]), int(self.tokens[number]), bool(self.greedy[number]))

    def add(self, numbers: np.ndarray, nats: np.ndarray, greedy: np.ndarray) -> None:
        """Add the results of single tokens to those of their queries (contexts with continuations). The three arrays
        have an entry per token: `numbers` the number of its query, `nats` its log-likelihood, `greedy` whether it is
        the likeliest token."""
        np.add.at(self.nats, numbers, nats)
        np.add.at(self.tokens, numbers, 1)
        np.logical_and.at(self.greedy, numbers, greedy)


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Divide rows of the given lengths into batches of similar length, longest first. Yields the indices of the rows of
    each batch. Padded to its longest row, a batch has at most `most` tokens, or is a single row. A batch with more than
    an eighth of `most` tokens is large enough to keep a processor busy; it also ends before more than a 32nd of it is
    padding."""
    batch: list[int] = []
    padding = 0
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch:
            longest = lengths[batch[0]]
            padding += longest - lengths[number]
            padded = (len(batch) + 1) * longest
            if padded > most or (padded > most // 8 and 32 * padding > padded):
                yield batch
                batch, padding = [], 0
        batch.append(number)
    if batch:
        yield batch


class NotFinite(TrainingError):
    """Raised if a model computes NaN or infinity, as after a training that has diverged."""


@torch.no_grad()
def likelihoods(model: Transformer, rows: Sequence[SharedRow], most: int,
                progress: Callable[[int], None] = lambda _rows: None) -> Likelihoods:
    """Compute the likelihoods of all queries in `rows` (rows that combine queries; a query is a context with a
    continuation). A batch has at most `most` tokens, or is a single row. `progress` is called after every batch with
    the number of its rows. Raises NotFinite when a log-likelihood is NaN or infinite."""
    count = 1 + max((int(row.asked[:, 2].max()) for row in rows), default=-1)
    results = Likelihoods(np.zeros(count), np.zeros(count, np.int32), np.ones(count, bool))
    for batch in batches([len(row.tokens) for row in rows], most):
        _batch([rows[i] for i in batch], model, results)
        progress(len(batch))
    return results


def _batch(rows: Sequence[SharedRow], model: Transformer, results: Likelihoods) -> None:
    weight = model.embed.weight
    length = max(len(row.tokens) for row in rows)

    def padded(arrays: Sequence[np.ndarray], fill: int = 0) -> Tensor:
        out = np.full((len(rows), length), fill, np.int64)
        for line, array in zip(out, arrays):
            line[:len(array)] = array
        return torch.from_numpy(out).to(weight.device)

    positions = padded([row.positions for row in rows])
    dense = None
    if any(row.branched for row in rows):
        dense = tree_mask(padded([row.ends for row in rows]), weight.dtype)
    hidden = model.hidden(padded([row.tokens for row in rows]), DocMask(positions, dense, None, length))
    # several queries may ask at the same place: its logits are computed once
    asked = [row.asked[:, 0].astype(np.int64) + i * length for i, row in enumerate(rows)]
    places, index = np.unique(np.concatenate(asked), return_inverse=True)
    targets = np.concatenate([row.asked[:, 1] for row in rows]).astype(np.int64)
    nats, greedy = predictions(model, hidden.flatten(0, 1)[torch.from_numpy(places).to(weight.device)], index, targets)
    results.add(np.concatenate([row.asked[:, 2] for row in rows]), nats, greedy)


def tree_mask(ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive attention mask [B, 1, T, T] for B rows that combine queries (see `SharedRow`): 0 where a token
    attends to another, else -inf. `ends` [B, T] are the `ends` of the rows, with 0 for padding. Padding attends to
    itself, because a softmax over nothing is NaN."""
    place = torch.arange(ends.shape[1], device=ends.device)
    hidden = (ends[:, None, None, :] <= place[:, None]) | (place > place[:, None])
    hidden &= place != place[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=ends.device).masked_fill_(hidden, float("-inf"))


def predictions(model: Transformer, hidden: Tensor, index: np.ndarray,
                targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each target token its log-likelihood (float64), and whether it is the likeliest token. `hidden` [N, d]
    are the model's last vectors at N places. `index` says for each target which of the N places predicts it. Raises
    NotFinite when a log-likelihood is NaN or infinite."""
    nats, greedy = np.empty(len(targets)), np.empty(len(targets), bool)
    width = min(model.vocab, _TOKENS[hidden.device.type])
    chunk = max(1, _LOGITS[hidden.device.type] // width)
    order = np.argsort(index, kind="stable")
    for start in range(0, len(hidden), chunk):
        own = order[np.searchsorted(index[order], start):np.searchsorted(index[order], start + chunk)]
        places, tokens = (torch.from_numpy(a).to(hidden.device) for a in (index[own] - start, targets[own]))
        asked, best, normaliser = _asked_logits(model, hidden[start:start + chunk], places, tokens, width)
        nats[own] = (asked - normaliser[places]).cpu().numpy()
        greedy[own] = best.cpu().numpy()
    if not np.isfinite(nats).all():
        raise NotFinite("the model's log-likelihoods are NaN or infinite, so it cannot be scored; evaluate an earlier "
                        "step")
    return nats, greedy


def _asked_logits(model: Transformer, hidden: Tensor, places: Tensor, tokens: Tensor,
                  width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute logits at the N places whose vectors are `hidden` [N, d]. `tokens` are tokens to look up, each at its
    place in `places`. Returns three tensors: the logit of each of `tokens` (float64); whether it is the highest logit
    at its place (of equal logits, the first one is); and for each place the logarithm of Σ exp(logit) over the
    vocabulary (float64).

    Logits of `width` tokens of the vocabulary are computed at a time. argmax is slow on a CPU, so it is called only
    where one of `tokens` may be the likeliest.
    """
    highest = torch.full((len(hidden),), float("-inf"), device=hidden.device)
    total = torch.zeros_like(highest)
    asked = torch.empty(len(tokens), dtype=torch.float64, device=hidden.device)
    best = torch.empty(len(tokens), dtype=torch.bool, device=hidden.device)
    for first in range(0, model.vocab, width):
        logits = model.logits(hidden, slice(first, first + width)).float()
        top = logits.amax(-1)
        here = ((tokens >= first) & (tokens < first + width)).nonzero().squeeze(1)
        if len(here):
            at, token = places[here], tokens[here] - first
            own = logits[at, token]
            asked[here] = own.double()
            first_best = (own == top[at]) & (own > highest[at])
            if first_best.any():
                first_best &= logits[at].argmax(-1) == token
            best[here] = first_best
        before, highest = highest, torch.maximum(highest, top)
        # the smallest −log p is log Σ exp(logit − top): a vectorised log_softmax is the fastest way to it
        total = total * (before - highest).exp() + (top - highest - logits.log_softmax(-1).amax(-1)).exp()
    best &= asked == highest[places].double()
    return asked, best, total.log().double() + highest.double()
