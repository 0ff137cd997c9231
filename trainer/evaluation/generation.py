"""Generates greedy continuations of many prompts at once. The keys and values of earlier tokens are kept, so a new
token costs a pass over one token per prompt. The likelihood of the right answer after the same prompt is computed from
the same keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.data.tokenizer import TextCoder
from trainer.evaluation.scoring import Likelihood, batches, predictions
from trainer.evaluation.task_file import GenerateConfig
from trainer.model.attention import DocMask, KeyValues
from trainer.model.transformer import Transformer


@dataclass(frozen=True)
class OpenPrompt:
    """A prompt, as tokens, for which the model generates text. `answer` are tokens whose likelihood after the prompt is
    to be computed, too; it is empty if none is."""

    tokens: Sequence[int]
    answer: Sequence[int] = ()


@dataclass(frozen=True)
class Continuation:
    """The text generated after a prompt, and the likelihood of the prompt's `answer` (None if the prompt has no
    answer)."""

    text: str
    answer: Likelihood | None


@torch.no_grad()
def continuations(model: Transformer, prompts: Sequence[OpenPrompt], config: GenerateConfig, coder: TextCoder,
                  eos: int, most: int, progress: Callable[[int], None] = lambda _rows: None) -> list[Continuation]:
    """Generate the greedy continuation of each prompt. A text ends before EOS, before a stop text, or after
    `config.tokens` tokens. A batch has at most `most` tokens, or is a single prompt. Room is counted for the tokens of
    a prompt and for those to be generated (or those of its answer, if these are more). `progress` is called after every
    batch with the number of its prompts. Raises NotFinite when the likelihood of an answer is NaN or infinite."""
    results: dict[int, Continuation] = {}
    for batch in batches([len(p.tokens) + max(config.tokens, len(p.answer)) for p in prompts], most):
        results |= zip(batch, _batch(model, [prompts[i] for i in batch], config, coder, eos))
        progress(len(batch))
    return [results[i] for i in range(len(prompts))]


def _batch(model: Transformer, prompts: Sequence[OpenPrompt], config: GenerateConfig, coder: TextCoder,
           eos: int) -> list[Continuation]:
    device, longest = model.embed.weight.device, max(len(p.tokens) for p in prompts)
    lengths = torch.tensor([len(p.tokens) for p in prompts], device=device)
    tokens = torch.tensor([[*p.tokens, *[eos] * (longest - len(p.tokens))] for p in prompts], device=device)
    seen = [KeyValues() for _ in model.blocks]
    positions = torch.arange(longest, device=device).expand(len(prompts), longest)
    # padding follows the prompt, so causal attention hides it from the prompt
    hidden = model.hidden(tokens, DocMask(positions, None, None, longest), seen)
    last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    answers = _answers(model, [p.answer for p in prompts], last, lengths, seen)
    for layer in seen:
        layer.length = longest                                   # forget the answers
    texts = _decoded(model, last, lengths, seen, config, coder, eos)
    return [Continuation(text, answer) for text, answer in zip(texts, answers)]


def _hidden_padding(lengths: Tensor, longest: int, more: int, dtype: torch.dtype) -> Tensor:
    """Return an additive attention mask [B, 1, 1, longest + more] that hides padding. The B prompts have the given
    lengths, and are padded to `longest`; `more` tokens follow each. The mask is -inf at the padding, else 0."""
    mask = torch.zeros(len(lengths), 1, 1, longest + more, dtype=dtype, device=lengths.device)
    padding = torch.arange(longest, device=lengths.device) >= lengths[:, None]
    mask[..., :longest].masked_fill_(padding[:, None, None], float("-inf"))
    return mask


def _answers(model: Transformer, answers: Sequence[Sequence[int]], last: Tensor, lengths: Tensor,
             seen: Sequence[KeyValues]) -> list[Likelihood | None]:
    """Return the likelihood of each answer after its prompt; None for an empty answer. `last` [B, d] are the vectors at
    the last tokens of the prompts, which predict the first tokens of the answers. `lengths` are the lengths of the
    prompts, and `seen` the keys and values of their tokens."""
    more = max(map(len, answers)) - 1                            # the last token of an answer predicts nothing
    if more < 0:
        return [None] * len(answers)
    vectors = last[:, None]
    if more > 0:
        device, longest = last.device, seen[0].length
        tokens = torch.tensor([[*a[:-1], *[0] * (more - len(a[:-1]))] for a in answers], device=device)
        later = torch.full((more, more), float("-inf"), dtype=last.dtype, device=device).triu(1)
        mask = _hidden_padding(lengths, longest, more, last.dtype).expand(-1, 1, more, -1).clone()
        mask[..., longest:] = later
        positions = lengths[:, None] + torch.arange(more, device=device)
        vectors = torch.cat((vectors, model.hidden(tokens, DocMask(positions, mask, None, more), seen)), 1)
    sizes = [len(a) for a in answers]
    asked = torch.tensor([[i < size for i in range(more + 1)] for size in sizes], device=last.device)
    targets = np.array([token for a in answers for token in a], np.int64)
    nats, greedy = predictions(model, vectors[asked], np.arange(len(targets)), targets)
    ends = np.cumsum(sizes)
    return [Likelihood(float(nats[end - size:end].sum()), size, bool(greedy[end - size:end].all())) if size else None
            for size, end in zip(sizes, ends)]


def _decoded(model: Transformer, last: Tensor, lengths: Tensor, seen: Sequence[KeyValues], config: GenerateConfig,
             coder: TextCoder, eos: int) -> list[str]:
    """Generate texts greedily after a batch of prompts, and return them. A prompt leaves the batch when its text has
    ended. The tensors are those of `_answers`."""
    longest, count = seen[0].length, len(lengths)
    mask = _hidden_padding(lengths, longest, config.tokens, last.dtype)
    ids: list[list[int]] = [[] for _ in range(count)]
    texts: list[str | None] = [None] * count
    rows = list(range(count))                                    # numbers of the rows that are left
    for step in range(config.tokens):
        best = model.logits(last).argmax(-1)
        for row, token in zip(rows, best.tolist()):
            texts[row] = _extended(ids[row], token, config, coder, eos)
        left = [place for place, row in enumerate(rows) if texts[row] is None]
        if not left or step == config.tokens - 1:
            break
        if len(left) < len(rows):
            rows = [rows[place] for place in left]
            index = torch.tensor(left, device=last.device)
            best, lengths, mask = best[index], lengths[index], mask[index]
            for layer in seen:
                layer.keep(index)
        at = DocMask((lengths + step)[:, None], mask[..., :longest + step + 1], None, 1)
        last = model.hidden(best[:, None], at, seen)[:, 0]
    return [coder.decode(ids[i]) if text is None else text for i, text in enumerate(texts)]


def _extended(ids: list[int], token: int, config: GenerateConfig, coder: TextCoder, eos: int) -> str | None:
    """Append the generated `token` to `ids`, the tokens generated so far for a prompt. If the text ends here, at EOS or
    at a stop text, returns the text before that, else None."""
    if token == eos:
        return coder.decode(ids)
    ids.append(token)
    text = coder.decode(ids)
    ends = [text.index(stop) for stop in config.stop if stop in text]
    return text[:min(ends)] if ends else None
