"""Log-likelihoods computed in batches, with shared prefixes and with logits at few places equal those of a separate
forward for each query."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.evaluation import EOS, SMALL, VOCAB, Bytes, alone, model_of
from trainer.evaluation import scoring
from trainer.evaluation.generation import OpenPrompt, continuations
from trainer.evaluation.items import Prompt
from trainer.evaluation.queries import MergedBoundary, Query, encode_prompts, shared_rows
from trainer.evaluation.scoring import batches, likelihoods
from trainer.evaluation.task_file import GenerateConfig
from trainer.model.config import ModelConfig, RopeScaling
from trainer.model.transformer import Transformer

MODELS = {"gqa": SMALL, "untied, qk-norm": replace(SMALL, tie=False, qk_norm=True),
          "nope": replace(SMALL, nope_every=2), "capped, mup": replace(SMALL, softcap=5.0, mup=24),
          "partial": replace(SMALL, rotary=0.5),
          "yarn": replace(SMALL, head_dim=16, rope_scaling=RopeScaling("yarn", 4.0, 16)),
          "biases": replace(SMALL, qkv_bias=True)}


def one_by_one(model: Transformer, query: Query) -> tuple[float, bool]:
    """Return (log-likelihood, whether the continuation is the greedy one), computed by a forward over this query
    alone."""
    logs = alone(model, query.tokens[:-1])
    asked = torch.from_numpy(query.tokens[query.start:].astype(np.int64))
    logs = logs[query.start - 1:]
    return float(logs.gather(1, asked[:, None]).double().sum()), bool((logs.argmax(-1) == asked).all())


def draw_groups(seed: int, count: int) -> list[list[Query]]:
    """Draw groups of queries. Most queries of a group begin alike, as the answers to one question do."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(count):
        prefix = rng.integers(1, VOCAB, rng.integers(1, 40))
        group = []
        for _ in range(rng.integers(1, 6)):
            own = np.concatenate([prefix if rng.random() < 0.9 else prefix[1:], rng.integers(1, VOCAB,
                                                                                          rng.integers(1, 12))])
            own = np.concatenate([[EOS], own]).astype(np.int32)
            group.append(Query(own, int(rng.integers(1, len(own)))))
        groups.append(group)
    return groups


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_batches_with_shared_prefixes_give_what_single_forwards_give(config: ModelConfig):
    model = model_of(config)
    groups = draw_groups(1, 12)
    queries = [query for group in groups for query in group]
    rows = list(shared_rows(queries, range(len(queries)), 100))
    assert len(rows) < len(queries) and any(row.branched for row in rows)
    results = likelihoods(model, rows, 300)
    assert len(results.nats) == len(queries)
    for number, query in enumerate(queries):
        nats, greedy = one_by_one(model, query)
        assert results[number].nats == pytest.approx(nats, rel=1e-5, abs=1e-5)
        assert results[number].tokens == len(query.tokens) - query.start
        assert results[number].greedy == greedy


def test_the_greedy_continuation_is_known_as_such():
    model = model_of()
    prompt = [EOS, *Bytes().encode("Once upon")]
    tokens = list(prompt)
    for _ in range(4):
        tokens.append(int(alone(model, tokens)[-1].argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % VOCAB]
    group = [Query(np.array(t, np.int32), len(prompt)) for t in (tokens, other)]
    result = likelihoods(model, list(shared_rows(group, (0, 1), 100)), 100)
    assert result[0].greedy and not result[1].greedy


@pytest.mark.parametrize("width", [3, 64, VOCAB])
def test_of_equally_likely_tokens_the_first_is_the_greedy_one(width: int, monkeypatch: pytest.MonkeyPatch):
    """Also if their logits are computed apart."""
    model = model_of()
    tokens = [EOS, *Bytes().encode("Once")]
    best = int(alone(model, tokens)[-1].argmax())
    other = (best + VOCAB // 2) % VOCAB
    with torch.no_grad():
        model.embed.weight[other] = model.embed.weight[best]
    monkeypatch.setitem(scoring._TOKENS, "cpu", width)
    group = [Query(np.array([*tokens, token], np.int32), len(tokens)) for token in (best, other)]
    results = likelihoods(model, list(shared_rows(group, (0, 1), 100)), 100)
    assert results[0].nats == pytest.approx(results[1].nats, rel=1e-6)
    assert [results[0].greedy, results[1].greedy] == [best < other, other < best]


@given(st.integers(0, 2**32), st.integers(20, 200))
@settings(max_examples=60, deadline=None)
def test_rows_hold_every_query_once_within_the_limit(seed: int, most: int):
    for group in draw_groups(seed, 3):
        group += group[:1]                                       # equal queries share all
        rows = list(shared_rows(group, range(7, 7 + len(group)), most))
        numbers = [n for row in rows for n in np.unique(row.asked[:, 2])]
        assert sorted(numbers) == list(range(7, 7 + len(group)))
        for row in rows:
            assert len(row.tokens) <= max(most, *(len(q.tokens) - 1 for q in group))
            own = [group[number - 7] for number in np.unique(row.asked[:, 2])]
            for number, query in zip(np.unique(row.asked[:, 2]), own):
                asked = row.asked[row.asked[:, 2] == number]
                assert asked[:, 1].tolist() == query.continuation
                # what its last place attends to, in its order, is the query without its last token
                last = asked[-1, 0]
                places = np.arange(len(row.tokens))
                seen = places[(places <= last) & (row.ends > last)]
                assert row.tokens[seen].tolist() == query.tokens[:-1].tolist()
                assert row.positions[seen].tolist() == list(range(len(seen)))
                assert asked[:, 0].tolist() == seen[query.start - 1:].tolist()
            # no beginning is in the row twice
            beginnings = {tuple(query.tokens[:n]) for query in own for n in range(1, len(query.tokens))}
            assert len(row.tokens) == len(beginnings)


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 1000))
@settings(deadline=None)
def test_batches_are_bounded_and_hold_each_row_once(lengths: list[int], most: int):
    found = list(batches(lengths, most))
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= most
    longest = [max(lengths[i] for i in batch) for batch in found]
    assert longest == sorted(longest, reverse=True)


def test_logits_are_computed_only_where_a_token_is_predicted(monkeypatch):
    """Five letters after one context: one place, so one line of logits."""
    model, lines = model_of(), []
    whole = Transformer.logits
    monkeypatch.setattr(Transformer, "logits", lambda self, x, *rest: (lines.append(len(x)), whole(self, x, *rest))[1])
    context = Bytes().encode("Question: which one?\nAnswer:")
    group = [Query(np.array([*context, 1 + ord(letter)], np.int32), len(context)) for letter in "ABCDE"]
    likelihoods(model, list(shared_rows(group, range(5), 1000)), 1000)
    assert lines == [1]


def test_a_batch_computes_a_shared_prefix_once(monkeypatch):
    model, sizes = model_of(), []
    hidden = Transformer.hidden
    monkeypatch.setattr(Transformer, "hidden",
                        lambda self, tokens, *rest: (sizes.append(tokens.numel()), hidden(self, tokens, *rest))[1])
    context = Bytes().encode("c" * 400)
    group = [Query(np.array([*context, *Bytes().encode(answer)], np.int32), 400) for answer in ("one", "two", "three")]
    likelihoods(model, list(shared_rows(group, range(3), 2000)), 2000)
    # the last token of an answer predicts nothing, and "two" and "three" begin alike, too
    assert sizes == [400 + 2 + 2 + 3]


@given(st.text("ab \n", max_size=20), st.text("ab c\n", min_size=1, max_size=8))
@settings(deadline=None)
def test_context_and_continuation_are_divided_as_lm_eval_does(context: str, continuation: str):
    """The rule of TemplateLM._encode_pair (lm-evaluation-harness 0.4.13), written out."""
    coder = Bytes()
    (queries,) = encode_prompts([[Prompt(context, continuation)]], coder, EOS)
    spaces = len(context) - len(context.rstrip())
    moved = context[len(context) - spaces:] + continuation
    head = context[:len(context) - spaces]
    whole, before = coder.encode(head + moved), coder.encode(head)
    assert isinstance(queries, list)
    (query,) = queries
    assert query.tokens[query.start:].tolist() == whole[len(before):]
    assert query.tokens[:query.start].tolist() == (before or [EOS])


def test_a_token_over_the_boundary_is_noticed():
    prompts = [[Prompt("Q: yes", "no")], [Prompt("Q: yes", " no")]]
    first, second = encode_prompts(prompts, Bytes("sn"), EOS)
    assert isinstance(first, MergedBoundary)
    assert isinstance(second, list)


def test_whitespace_that_is_one_token_with_the_context_stays_there():
    """As in code: many tokenizers have a token of quotes and the line feed after them."""
    prompt = Prompt('def f():\n    """\n', "    return 1")
    ((query,),) = encode_prompts([[prompt]], Bytes('"\n'), EOS)
    assert Bytes().decode([int(i) for i in query.tokens[query.start:]]) == prompt.continuation
    ((query,),) = encode_prompts([[prompt]], Bytes(), EOS)
    assert Bytes().decode([int(i) for i in query.tokens[query.start:]]) == "\n    return 1"


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_generation_in_batches_is_that_of_whole_forwards(config: ModelConfig):
    """Without a cache, one prompt after the other; prompts of different lengths share a batch."""
    model, coder = model_of(config), Bytes()
    prompts = [[EOS, *coder.encode("ab" * n)] for n in (1, 9, 4, 20, 2)]
    settings = GenerateConfig(tokens=12, stop=())
    answers = [coder.encode("answer"[:n]) for n in (0, 1, 6, 3, 2)]
    opened = [OpenPrompt(prompt, answer) for prompt, answer in zip(prompts, answers)]
    for prompt, answer, result in zip(prompts, answers, continuations(model, opened, settings, coder, EOS, 200)):
        tokens = list(prompt)
        for _ in range(12):
            token = int(alone(model, tokens)[-1].argmax())
            if token == EOS:
                break
            tokens.append(token)
        assert result.text == coder.decode(tokens[len(prompt):])
        assert (result.answer is None) == (not answer)
        if result.answer is not None:
            nats, greedy = one_by_one(model, Query(np.array([*prompt, *answer], np.int32), len(prompt)))
            assert result.answer.nats == pytest.approx(nats, rel=1e-5)
            assert (result.answer.tokens, result.answer.greedy) == (len(answer), greedy)


def test_generation_ends_before_a_stop_text():
    model, coder = model_of(), Bytes()
    prompts = [OpenPrompt([EOS, n]) for n in (5, 6, 7, 5)]
    whole = [r.text for r in continuations(model, prompts, GenerateConfig(tokens=100, stop=()), coder, EOS, 999)]
    stop = next(pair for i in range(98) if (pair := whole[0][i:i + 2]) not in whole[1])
    stopped = continuations(model, prompts, GenerateConfig(tokens=100, stop=(stop,)), coder, EOS, 999)
    # rows that end early leave the batch, and the others go on as before
    assert [r.text for r in stopped] == [text.partition(stop)[0] for text in whole]
    assert len(stopped[1].text) > len(stopped[0].text)
