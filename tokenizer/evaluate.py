"""Evaluates a tokenizer on text: how many tokens it needs, and whether decoding returns the same text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tokenizer.load import Tokenizer

#: pattern of a word: letters with inner apostrophes or hyphens, or digits. In scripts without spaces it finds "words"
#: that are much too long; compare tokenizers on such scripts by bytes per token instead
WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|\d+")


@dataclass
class Score:
    """The result of encoding some texts with a tokenizer: totals over the texts (bytes, words, tokens, …), and ratios
    computed from the totals, such as bytes per token."""

    texts: int = 0
    bytes: int = 0                # UTF-8
    words: int = 0
    tokens: int = 0               # without EOS
    word_tokens: int = 0          # tokens of the words, each encoded alone after a space
    continued: int = 0            # words of more than one token
    broken: int = 0               # texts with decode(encode(text)) != text

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens if self.tokens else 0.0

    @property
    def fertility(self) -> float:
        """Tokens per word (Rust et al., arXiv 2012.15613)."""
        return self.word_tokens / self.words if self.words else 0.0

    @property
    def continued_words(self) -> float:
        """Share of words split into more than one token (Rust et al., arXiv 2012.15613)."""
        return self.continued / self.words if self.words else 0.0

    def add(self, other: Score) -> None:
        for key, value in asdict(other).items():
            setattr(self, key, getattr(self, key) + value)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_per_token": round(self.bytes_per_token, 4),
                "fertility": round(self.fertility, 4), "continued_words": round(self.continued_words, 4)}


def score(tokenizer: Tokenizer, texts: list[str]) -> Score:
    """Return the Score of a tokenizer on `texts`. All texts and their tokens are in memory at the same time."""
    ids = tokenizer.encode_batch(texts)
    words = [word for text in texts for word in WORD.findall(text)]
    lengths = tokenizer.encode_flat([" " + word for word in words])[1] if words else np.empty(0, np.int64)
    return Score(len(texts), sum(len(text.encode("utf-8", "surrogatepass")) for text in texts), len(words),
                 sum(map(len, ids)), int(lengths.sum()), int((lengths > 1).sum()),
                 sum(tokenizer.decode(text_ids) != text for text_ids, text in zip(ids, texts)))


def evaluate(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]], batch: int = 256) -> dict[str, Score]:
    """Evaluate a tokenizer on `texts`, pairs (group, text), in batches of `batch` texts. Returns a Score for each group
    (source or language), and for "all"."""
    out: dict[str, Score] = {}
    waiting: dict[str, list[str]] = {}

    def flush(group: str) -> None:
        out.setdefault(group, Score()).add(score(tokenizer, waiting.pop(group)))

    for group, text in texts:
        waiting.setdefault(group, []).append(text)
        if len(waiting[group]) >= batch:
            flush(group)
    for group in list(waiting):
        flush(group)
    total = Score()
    for group_score in out.values():
        total.add(group_score)
    return {**dict(sorted(out.items())), "all": total}
