"""Tokenises prompts, and combines those that begin alike.

Context and continuation are encoded together, and divided after as many tokens as the context alone has. So the tokens
are those of lm-evaluation-harness (`TemplateLM._encode_pair`). Where the tokenizer makes one token of the end of the
context and the beginning of the continuation, lm-evaluation-harness divides at the wrong place without a word; here
this is an error.
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


class MergedBoundary(ValueError):
    """Raised if a token stands for the end of a context and the beginning of its continuation."""


@dataclass(frozen=True)
class Query:
    """Tokens of a context and a continuation. Asked for is the log-likelihood of tokens[start:]. `start` is at least 1,
    because the first token has no prediction. An empty continuation has no tokens."""

    tokens: np.ndarray
    start: int


def encode_prompts(groups: Iterable[Sequence[Prompt]], coder: TextCoder,
                   start: int) -> Iterator[list[Query] | MergedBoundary]:
    """Yield the queries of each group of prompts, or MergedBoundary for a group that cannot be divided. A context
    without text is the token `start`."""
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
    """Divide the tokens of a prompt. Whitespace at the end of the context belongs to the continuation, because most
    tokenizers encode it together with the word that follows; but not if the tokenizer encodes it with what precedes."""
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
    """Queries with a common beginning, as one row of tokens that a model reads once.

    The row holds the common prefix, then the rest of each query without its last token, which predicts nothing. A token
    attends to itself and to those tokens before it that have the branch 0 (the prefix) or its own. Its position is the
    one that it has in its query. So the model computes for each query what it would compute for the query alone.
    `asked` has a line (place in the row, token that is to be predicted there, number of the query) for each predicted
    token.
    """

    tokens: np.ndarray
    positions: np.ndarray
    branches: np.ndarray
    asked: np.ndarray

    @property
    def branched(self) -> bool:
        """Whether attention differs from causal attention over the row."""
        return bool((self.branches > 1).any())


def shared_rows(queries: Sequence[Query], most: int) -> Iterator[SharedRow]:
    """Combine `queries` into rows of up to `most` tokens. A query that is longer makes a row of its own. Queries
    without a common beginning are not combined, because a longer row costs more memory for attention."""
    prefix = common_prefix(queries)
    batch: list[int] = []
    size = prefix
    for number, query in enumerate(queries):
        rest = len(query.tokens) - 1 - prefix
        if batch and (prefix == 0 or size + rest > most):
            yield _row(queries, batch, prefix)
            batch, size = [], prefix
        batch.append(number)
        size += rest
    if batch:
        yield _row(queries, batch, prefix)


def common_prefix(queries: Sequence[Query]) -> int:
    """Return how many tokens all queries begin with. The last token of a query does not count."""
    shortest = min(len(q.tokens) for q in queries) - 1
    first = queries[0].tokens[:shortest]
    differs = np.zeros(shortest, bool)
    for query in queries[1:]:
        differs |= query.tokens[:shortest] != first
    return int(differs.argmax()) if differs.any() else shortest


def _row(queries: Sequence[Query], numbers: Sequence[int], prefix: int) -> SharedRow:
    if len(numbers) == 1:
        prefix = 0
    parts = [queries[numbers[0]].tokens[:prefix]]
    positions, branches = [np.arange(prefix)], [np.zeros(prefix, np.int32)]
    asked = []
    offset = prefix
    for branch, number in enumerate(numbers, 1):
        query = queries[number]
        rest = query.tokens[prefix:-1]
        parts.append(rest)
        positions.append(np.arange(prefix, prefix + len(rest)))
        branches.append(np.full(len(rest), branch, np.int32))
        before = np.arange(query.start - 1, len(query.tokens) - 1)       # places, in the query, that predict
        places = np.where(before < prefix, before, before - prefix + offset)
        asked.append(np.stack([places, query.tokens[query.start:], np.full(len(places), number)], 1))
        offset += len(rest)
    return SharedRow(np.concatenate(parts), np.concatenate(positions).astype(np.int32), np.concatenate(branches),
                     np.concatenate(asked).astype(np.int32))
