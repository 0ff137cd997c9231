"""Computes the loss on held-out data for each stream (the data of one source, language or bucket). For comparison, also
computes the unigram entropy of the held-out tokens: the loss of a model that predicts from token frequencies alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenizer.shards.reader import ShardSet
from trainer.data.batches import Batch, Data, collate
from trainer.model.loss import IGNORE
from trainer.model.transformer import Transformer
from trainer.parallel.world import World, reshard


@dataclass(frozen=True)
class Total:
    """The loss of one stream (data source), kept as two numbers: how many targets count in the loss, and the sum of
    their negative log-likelihoods."""

    nll: float
    targets: int

    @property
    def loss(self) -> float:
        """Mean loss of the stream (data source) in nats per token."""
        return self.nll / self.targets


@torch.no_grad()
def losses(model: Transformer, batch: Batch, streams: int, micro_rows: int, dtype: torch.dtype, chunk: int,
           world: World) -> list[Total]:
    """Compute the loss of the rows of `batch` separately for each of `streams` streams (data sources). Returns the sums
    for each stream. Every rank must call this with the same `batch`; each computes a share of the rows, and all get the
    same result."""
    rows = list(range(world.data_rank, batch.rows, world.data_size))
    share = -(-batch.rows // world.data_size)
    # padded, because every rank must take part in every forward: parameters are sharded
    own = batch.each(lambda x: x[rows]).padded(share)
    sums = torch.zeros(2, streams, dtype=torch.float64, device=world.device)
    for part in own.micro(min(micro_rows, share), world.device):
        _, nll, _ = model(part.tokens, part.mask(dtype, model.config.masking), part.targets, chunk=chunk)
        sums[0].index_add_(0, part.stream, nll.double().sum(1))
        sums[1].index_add_(0, part.stream, (part.targets != IGNORE).double().sum(1))
    reshard(model)
    nll, targets = world.sum(sums).tolist()
    return [Total(a, int(b)) for a, b in zip(nll, targets)]


def unigram_entropy(targets: Sequence[np.ndarray]) -> float:
    """Return the entropy, in nats, of the empirical distribution of the given tokens."""
    _, counts = np.unique(np.concatenate(targets), return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())


def text_bytes(shards: ShardSet, start: int, stop: int) -> float:
    """Return how many UTF-8 bytes of text the targets among tokens [start, stop) encode. The bytes of a document are
    divided evenly among its tokens, also those outside the range. The first token in the range of each document is left
    out, because it is not a target."""
    begin, end, size = shards.spans(start, stop)
    counted = np.minimum(end, stop) - np.maximum(begin, start) - 1   # first tokens are not targets
    return float((size * counted / (end - begin)).sum())


class Heldout:
    """The held-out samples on which a run is evaluated, each of `length` tokens, at most `windows` per stream (data
    source). The samples are chosen once, so every evaluation, on any number of ranks, uses the same ones."""

    def __init__(self, data: Data, length: int, windows: int) -> None:
        self.data, self.length, self.windows = data, length, windows
        self.longer: dict[int, Heldout] = {}
        rows = [row for index in range(len(data.streams)) for row in data.heldout_rows(index, length, windows)]
        self.batch = collate(rows, length) if rows else None
        if self.batch is not None and not self.batch.valid():           # all targets are masked out
            self.batch = None
        #: entropy of the targets, of each stream and of all together
        self.entropy: dict[str, float] = {}
        self.whole_entropy = 0.0
        if self.batch is not None:
            counted = [t[t != IGNORE].numpy() for t in self.batch.targets]
            self.whole_entropy = unigram_entropy(counted)
            for index, name in enumerate(data.streams):
                own = [t for t, stream in zip(counted, self.batch.stream.tolist()) if stream == index]
                if any(map(len, own)):
                    self.entropy[name] = unigram_entropy(own)
        #: for each stream, the UTF-8 bytes that its targets encode. None if only spans of its documents count in the
        #: loss, because the bytes of spans are not recorded
        self.bytes = [None if shards is None or shards.counts(0, 0) is not None else
                      sum(text_bytes(shards, *window) for window in data.heldout_windows(index, length, windows))
                      for index, shards in enumerate(data.heldout)]

    def at(self, length: int) -> Heldout:
        """Return held-out samples of `length` tokens, for phases (stretches of the training) with that sequence length.
        They have about as many tokens in all as the samples of this object."""
        if length not in self.longer:
            self.longer[length] = Heldout(self.data, length, max(1, self.windows * self.length // length))
        return self.longer[length]

    def evaluate(self, model: Transformer, micro_rows: int, dtype: torch.dtype, chunk: int,
                 world: World) -> dict[str, Any]:
        """Evaluate the model on the held-out samples. Returns {"loss", "unigram_entropy", "targets", "streams"}; {} if
        there is no held-out target that counts in the loss. The first three values are over all streams (data sources)
        together. "streams" has for each stream's name the three values of that stream, and "bits_per_byte".

        Losses and entropies are in nats per token. Bits per byte, which is comparable between tokenizers, is the loss
        in bits divided by the UTF-8 bytes that the targets encode. It is None for a stream in which only spans of
        documents count in the loss. Streams without held-out targets are left out.
        """
        if self.batch is None:
            return {}
        totals = losses(model, self.batch, len(self.data.streams), micro_rows, dtype, chunk, world)
        streams = {}
        for name, size, total in zip(self.data.streams, self.bytes, totals):
            if total.targets:
                streams[name] = {"loss": total.loss, "targets": total.targets, "unigram_entropy": self.entropy[name],
                                 "bits_per_byte": total.nll / math.log(2) / size if size else None}
        targets = sum(t.targets for t in totals)
        return {"loss": sum(t.nll for t in totals) / targets, "targets": targets,
                "unigram_entropy": self.whole_entropy, "streams": streams}

    def gap(self, heldout: dict[str, Any], model: Transformer, samples: int, windows: int, micro_rows: int,
            dtype: torch.dtype, chunk: int, world: World) -> dict[str, Any]:
        """Compare the held-out loss with the loss of the same model on data that it was trained on. Returns {"train",
        "heldout", "gap"} in nats per token, or {} when no stream (data source) has both losses. `heldout` is the result
        of `evaluate`.

        The training data are up to `windows` samples, evenly spaced over the first `samples` samples of the training,
        also those of skipped steps. Only samples with the sequence length of this object are used. The streams are
        weighted in the training loss as in the held-out data.
        """
        curriculum = self.data.curriculum
        spread = sorted({i * samples // windows for i in range(windows)}) if samples else []
        numbers = [n for n in spread if curriculum.phases[curriculum.phase_at(n)].sequence == self.length]
        if not numbers or not heldout:
            return {}
        totals = losses(model, self.data.samples(numbers), len(self.data.streams), micro_rows, dtype, chunk, world)
        both = [(heldout["streams"][name], total) for name, total in zip(self.data.streams, totals)
                if name in heldout.get("streams", {}) and total.targets]
        weight = sum(values["targets"] for values, _ in both)
        if not weight:
            return {}
        train = sum(total.loss * values["targets"] for values, total in both) / weight
        loss = sum(values["loss"] * values["targets"] for values, _ in both) / weight
        return {"train": train, "heldout": loss, "gap": loss - train}
