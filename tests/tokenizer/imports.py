"""Helpers for the tests of imports: shard sets as a run would write them, and short ways to import files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tokenizer.exports import Corpus, corpus
from tests.tokenizer.test_shards import EOS
from tokenizer.imports.imports import Imported, import_tokens
from tokenizer.imports.source import Coding, ImportLimits, TokenFileError
from tokenizer.shards.layout import token_dtype
from tokenizer.shards.reader import ShardSet

#: number of tokens of a shard
STEP = 1500


def cut(lengths: list[int]) -> list[list[int]]:
    """Divide documents among shards as a run does. `lengths` are their numbers of tokens without EOS. Returns the
    lengths for each shard."""
    starts = np.cumsum([0, *[length + 1 for length in lengths[:-1]]]) // STEP
    shards = [[length for length, shard in zip(lengths, starts) if shard == index] for index in range(starts[-1] + 1)]
    assert all(shards)
    return shards


def like_a_run(folder: Path, vocab: int, masked: tuple[int, ...] = ()) -> Corpus:
    """Write a set of random documents, divided among shards as a run divides them."""
    rng = np.random.default_rng(vocab)
    return corpus(folder, vocab, shards=cut([3, *rng.integers(0, 60, 70).tolist(), 0, 0,
                                             *rng.integers(0, 900, 12).tolist()]), masked=masked)


def imported(path: Path, format: str, vocab: int, store: Path, name: str = "web", step: int = STEP,
             is_held_out: Callable[[str], bool] | None = None, eos: int = EOS, **limits: int) -> Imported:
    """Import files as shards of `step` tokens. `limits` are fields of `ImportLimits`."""
    (store / "shards").mkdir(parents=True, exist_ok=True)
    return import_tokens(path, format, Coding("t" * 64, vocab, eos), store / "shards" / name, name,
                         lambda file, number: f"{file}#{number}", shard_bytes=step * token_dtype(vocab).itemsize,
                         is_held_out=is_held_out, limits=ImportLimits(**limits))


def documents_of(folder: Path) -> list[tuple[str, list[int], list[bool]]]:
    """Return (id, tokens, whether each token is a target) for each document of a set."""
    shards = ShardSet(folder)
    result = []
    for span in shards.documents(0, shards.tokens):
        counts = shards.counts(span.start, span.stop)
        targets = [True] * (span.stop - span.start) if counts is None else counts.tolist()
        result.append((span.id, shards.read(span.start, span.stop).tolist(), targets))
    return result


def refused(path: Path, format: str, *words: str, vocab: int = 300, **limits: int) -> str:
    """Import files that must be refused. Checks that the error message is one line and contains all of `words`, and
    that nothing was written. Returns the message."""
    store = path.parent / f".store-{path.name}"
    with pytest.raises(TokenFileError) as error:
        imported(path, format, vocab, store, **limits)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert list((store / "shards").iterdir()) == []
    return message
