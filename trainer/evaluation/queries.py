"""Tokenises prompts, and combines prompts that begin alike into rows that a model reads once.

Context and continuation are encoded together, and divided after as many tokens as the context alone has. So the tokens
are those of lm-evaluation-harness (`TemplateLM._encode_pair`). The tokenizer may make one token of the end of the
context and the beginning of the continuation. lm-evaluation-harness then divides at the wrong place without a warning;
here this is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.tokenizer import TextCoder
from trainer.evaluation.items import Prompt

#: number of groups of prompts that are encoded in one call
_BATCH = 256
#: reading a token of a small model costs about as much as its attention to this many tokens
_WORTH = 1024


class MergedBoundary(ValueError):
    """Raised if the tokenizer makes one token of the end of a context and the beginning of its continuation."""


@dataclass(frozen=True)
class Query:
    """The tokens of a context, then those of its continuation, which begins at index `start`. The log-likelihood of
    tokens[start:] is to be computed. `start` is at least 1, because the first token is not predicted."""

    tokens: np.ndarray
    start: int

    @property
    def context(self) -> list[int]:
        return self.tokens[:self.start].tolist()

    @property
    def continuation(self) -> list[int]:
        return self.tokens[self.start:].tolist()


def encode_prompts(groups: Iterable[Sequence[Prompt]], coder: TextCoder,
                   start: int) -> Iterator[list[Query] | MergedBoundary]:
    """Tokenise groups of prompts. Yields for each group the queries of its prompts, or a MergedBoundary if a prompt of
    the group cannot be divided into context and continuation. The token `start` stands for a context without text."""
    waiting = iter(groups)
    while part := list(itertools.islice(waiting, _BATCH)):
        texts = dict.fromkeys(text for group in part for p in group
                              for text in (p.context, p.context.rstrip(), p.context + p.continuation))
        coded = dict(zip(texts, coder.encode_batch(list(texts))))
        for group in part:
            try:
                yield [_query(p, coded, start) for p in group]
            except MergedBoundary as merged:
                yield merged


def _query(prompt: Prompt, coded: Mapping[str, list[int]], start: int) -> Query:
    """Divide the tokens of a prompt into those of its context and those of its continuation. `coded` has the tokens of
    the texts. Whitespace at the end of the context goes to the continuation, because most tokenizers encode it together
    with the next word. If the tokenizer encodes it with the text before, it stays with the context. Raises
    MergedBoundary when a token spans the border."""
    whole = coded[prompt.context + prompt.continuation]
    for context in (coded[prompt.context.rstrip()], coded[prompt.context]):
        if whole[:len(context)] == context:
            break
    else:
        raise MergedBoundary
    begin = context or [start]
    return Query(np.array([*begin, *whole[len(context):]], np.int32), len(begin))


@dataclass(frozen=True)
class SharedRow:
    """Several queries (each a context with its continuation) as one row of tokens, which a model reads once. Tokens
    with which several queries begin are in the row only once. The model computes for each query what it would compute
    for that query alone.

    The row is a tree of tokens in depth-first order. Each query, without its last token (which predicts nothing), is a
    path from the root. A token attends to itself and to its ancestors. All arrays are int32.

        positions  for each token, its position in its queries
        ends       for each token, the index after its last descendant. The ancestors of a token are the earlier tokens
                   whose `ends` is after it
        asked      [M, 3], for each token to predict: (index in the row that predicts it, the token, number of its
                   query)
    """

    tokens: np.ndarray
    positions: np.ndarray
    ends: np.ndarray
    asked: np.ndarray

    @property
    def branched(self) -> bool:
        """Whether the row holds queries that differ, so that it needs another attention mask than the causal one."""
        return bool((self.ends < len(self.tokens)).any())


def shared_rows(queries: Sequence[Query], numbers: Sequence[int], most: int) -> Iterator[SharedRow]:
    """Combine `queries` (contexts with continuations) that begin alike into rows of at most `most` tokens, and yield
    the rows. A longer query is a row of its own. `numbers` are the queries' numbers, which the rows refer to.

    In a row, a common beginning is read only once. However, attention between different queries is computed, too, and
    then masked. A query therefore starts a new row when this attention would cost more than the row saves.
    """
    order = sorted(range(len(queries)), key=lambda i: queries[i].tokens[:-1].astype(">i4").tobytes())
    batch: list[tuple[int, int]] = []                            # (number of a query, tokens that it shares)
    size = 0
    for number in order:
        length = len(queries[number].tokens) - 1
        shared = common_prefix(queries[batch[-1][0]], queries[number]) if batch else 0
        new = length - shared
        if batch and (size + new > most or size * new > _WORTH * shared):
            yield _row(queries, numbers, batch)
            batch, size, shared, new = [], 0, 0, length
        batch.append((number, shared))
        size += new
    if batch:
        yield _row(queries, numbers, batch)


def common_prefix(first: Query, second: Query) -> int:
    """Return the number of tokens that two queries (contexts with continuations) have in common at their beginning. The
    last token of each query is not compared."""
    shortest = min(len(first.tokens), len(second.tokens)) - 1
    differs = first.tokens[:shortest] != second.tokens[:shortest]
    return int(differs.argmax()) if differs.any() else shortest


def _row(queries: Sequence[Query], numbers: Sequence[int], batch: Sequence[tuple[int, int]]) -> SharedRow:
    """Make a row of several queries (contexts with continuations), which a model reads once. `batch` has pairs (index
    of a query, number of tokens that it has in common with the beginning of the query before it), sorted by the
    queries' tokens."""
    tokens, positions, asked = [], [], []
    ends = np.full(sum(len(queries[i].tokens) - 1 - shared for i, shared in batch), -1, np.int32)
    path = np.empty(0, np.int64)                                 # places in the row of the tokens of a query
    size = 0
    for i, shared in batch:
        query = queries[i]
        ends[path[shared:]] = size
        stop = size + len(query.tokens) - 1 - shared
        path = np.concatenate([path[:shared], np.arange(size, stop)])
        tokens.append(query.tokens[shared:-1])
        positions.append(np.arange(shared, len(path)))
        places = path[query.start - 1:]                          # places that predict the continuation
        asked.append(np.stack([places, query.tokens[query.start:], np.full(len(places), numbers[i])], 1))
        size = stop
    ends[path] = size
    return SharedRow(np.concatenate(tokens), np.concatenate(positions).astype(np.int32), ends,
                     np.concatenate(asked).astype(np.int32))
