"""Evaluates tokenizers on text: how many tokens they need, how they split words, and whether decoding returns the same
text. All tokenizers see the same texts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import regex

from tokenizer.load import Tokenizer

#: a letter, also one such as ² or Ⅳ, with the marks that follow it, such as the vowel signs of Devanagari and Thai, and
#: with the invisible joiners that Indic and Persian words have
_LETTERS = r"(?:[\p{L}\p{Nl}\p{No}][\p{M}\u200c\u200d]*)+"
#: pattern of a word: letters with inner apostrophes or hyphens, or digits. In scripts without spaces, a "word" reaches
#: to the next space or punctuation mark, so it may be a clause. Compare tokenizers there by bytes per token instead
WORD = regex.compile(rf"{_LETTERS}(?:['’-]{_LETTERS})*|\d+")
#: order of the Rényi entropy: that with the best correlation with BLEU (Zouhar et al., arXiv 2306.16842)
ALPHA = 2.5
#: names of the group of English texts, against which parity is measured
ENGLISH = ("en", "eng", "eng_Latn", "English")


@dataclass
class Score:
    """The result of encoding some texts with a tokenizer: totals over the texts (bytes, words, tokens, …), and ratios
    computed from the totals, such as bytes per token. A ratio is 0 if there is nothing to divide by."""

    texts: int = 0
    bytes: int = 0                # UTF-8
    words: int = 0
    tokens: int = 0               # without EOS
    word_tokens: int = 0          # tokens of the words, each encoded alone after a space
    continued: int = 0            # words of more than one token
    unknown: int = 0              # tokens that stand for text the vocabulary lacks
    broken: int = 0               # texts with decode(encode(text)) != text
    seconds: float = 0.0          # CPU time of encoding the texts
    vocab_size: int = 0
    counts: Counter[int] = field(default_factory=Counter)      # how often each token occurs, by its id

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens if self.tokens else 0.0

    @property
    def fertility(self) -> float:
        """Mean number of tokens per word, called fertility (Rust et al., arXiv 2012.15613)."""
        return self.word_tokens / self.words if self.words else 0.0

    @property
    def continued_words(self) -> float:
        """Share of words split into more than one token (Rust et al., arXiv 2012.15613)."""
        return self.continued / self.words if self.words else 0.0

    @property
    def renyi(self) -> float:
        """Rényi efficiency (Zouhar et al., arXiv 2306.16842): the Rényi entropy of order ALPHA of the tokens'
        frequencies, divided by the largest entropy that the vocabulary allows. It is 1 if all tokens of the vocabulary
        occur equally often."""
        if self.tokens == 0 or self.vocab_size < 2:
            return 0.0
        shares = sorted(count / self.tokens for count in self.counts.values())
        return math.log(math.fsum(share ** ALPHA for share in shares)) / (1 - ALPHA) / math.log(self.vocab_size)

    def add(self, other: Score) -> None:
        for name in (spec.name for spec in fields(self) if spec.name not in ("vocab_size", "counts")):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.vocab_size = max(self.vocab_size, other.vocab_size)
        self.counts.update(other.counts)

    def to_json(self, english: Score | None = None) -> dict[str, Any]:
        """Return totals and ratios as {name: value}.

        `parity` is the number of tokens per text, divided by the same figure of English texts (Petrov et al., arXiv
        2305.15425). `english` is the tokenizer's Score on the English texts. Without it, or without any texts, `parity`
        is None. Parity is meaningful only if the texts are translations of the English ones.

        `mb_per_cpu_s` is the speed in megabytes of UTF-8 per second of CPU time. It is None if no time was measured."""
        totals = {spec.name: getattr(self, spec.name) for spec in fields(self)
                  if spec.name not in ("seconds", "counts")}
        parity = None
        if english is not None and english.tokens and self.texts:
            parity = round(self.tokens / self.texts / (english.tokens / english.texts), 4)
        return {**totals, "bytes_per_token": round(self.bytes_per_token, 4), "fertility": round(self.fertility, 4),
                "continued_words": round(self.continued_words, 4), "renyi": round(self.renyi, 4), "parity": parity,
                "mb_per_cpu_s": round(self.bytes / 1e6 / self.seconds, 2) if self.seconds else None}


def score(tokenizer: Tokenizer, texts: Sequence[str]) -> Score:
    """Return the Score of a tokenizer on `texts`. All texts and their tokens are in memory at the same time."""
    start = time.process_time()
    flat, sizes = tokenizer.encode_flat(texts)
    seconds = time.process_time() - start
    words = [word for text in texts for word in WORD.findall(text)]
    lengths = tokenizer.encode_flat([" " + word for word in words])[1] if words else np.empty(0, np.int64)
    ids, counts = np.unique(flat, return_counts=True)
    split = np.split(flat, np.cumsum(sizes)[:-1]) if len(texts) else []
    return Score(
        texts=len(texts), bytes=sum(len(text.encode("utf-8", "surrogatepass")) for text in texts), words=len(words),
        tokens=len(flat), word_tokens=int(lengths.sum()), continued=int((lengths > 1).sum()),
        unknown=0 if tokenizer.unknown is None else int((flat == tokenizer.unknown).sum()),
        broken=sum(tokenizer.decode(text_ids) != text for text_ids, text in zip(split, texts)),
        seconds=seconds, vocab_size=tokenizer.vocab_size, counts=Counter(dict(zip(ids.tolist(), counts.tolist()))))


def evaluate(tokenizers: Sequence[Tokenizer], texts: Iterable[tuple[str, str]],
             batch: int = 256) -> list[dict[str, Score]]:
    """Evaluate tokenizers on texts, given as pairs (group, text). A group is, for instance, a source or a language.

    Returns a mapping for each tokenizer: the Score of every group, sorted by the group's name, then the Score "all" of
    all groups together. At most `batch` texts are encoded in one call; all of them are of one group."""
    results: list[dict[str, Score]] = [{} for _ in tokenizers]
    waiting: dict[str, list[str]] = {}

    def flush(group: str) -> None:
        texts_of_group = waiting.pop(group)
        for tokenizer, scores in zip(tokenizers, results):
            scores.setdefault(group, Score()).add(score(tokenizer, texts_of_group))

    for group, text in texts:
        waiting.setdefault(group, []).append(text)
        if len(waiting[group]) >= batch:
            flush(group)
    for group in list(waiting):
        flush(group)
    for scores in results:
        total = Score()
        for group_score in scores.values():
            total.add(group_score)
        scores |= {group: scores.pop(group) for group in sorted(scores)} | {"all": total}
    return results


def rows_of(names: Sequence[str], results: Sequence[dict[str, Score]]) -> list[dict[str, Any]]:
    """Return the results of `evaluate` as rows {tokenizer, group, …figures}, group by group. `names` are the names of
    the tokenizers.

    `parity` compares each group with the English one, whose name is one of ENGLISH. It is None in the rows of "all",
    and in every row if no group is English."""
    rows = []
    for group in results[0] if results else ():
        for name, scores in zip(names, results):
            english = next((scores[key] for key in ENGLISH if key in scores), None)
            rows.append({"tokenizer": name, "group": group,
                         **scores[group].to_json(None if group == "all" else english)})
    return rows
