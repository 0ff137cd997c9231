"""Tokenizes exactly as spaCy (https://spacy.io/usage/linguistic-features#how-tokenizer-works), without importing it.

The rules of a language are data, exported once per install (`stages.text.spacy_export`). The algorithm is that of
`spacy.Tokenizer`:

1. A text is cut into chunks at white space.
2. Prefixes and suffixes are peeled off a chunk from both sides.
3. What remains is split by a special case (a string with a fixed split into tokens), or else at infixes. A URL, or a
   string that matches the language's pattern of whole tokens, is not split.
4. A last pass applies special cases to the sequence of tokens.

This module caches nothing; `stages.text.words` does.

The one difference from spaCy is that a chunk of more than LONGEST characters is one token. The time to peel off
prefixes and suffixes and to find a URL grows with the square of the chunk's length: a chunk of 200,000 characters takes
minutes. Without this limit, a time limit could decide whether a text is kept.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

_SPACE_RUN = re.compile(r"(\s+)")
#: longest chunk that is split, characters; no word or URL of a readable text is longer
LONGEST = 2000


class SpacyRules:
    """spaCy's tokenizer for one language, without spaCy. It splits whole texts, and chunks (runs without white space),
    into tokens."""

    def __init__(self, rules: dict[str, Any]) -> None:
        self.specials: dict[str, tuple[str, ...]] = {chunk: tuple(parts) for chunk, parts in rules["specials"].items()}
        #: tokens after which a sentence ends
        self.sentence_ends: frozenset[str] = frozenset(rules["sentence_ends"])
        self._prefix = re.compile(rules["prefix"]).search
        self._suffix = re.compile(rules["suffix"]).search
        self._infixes = re.compile(rules["infix"]).finditer
        self._url = re.compile(rules["url"]).match
        #: matches chunks that stay one token whatever they look like (French, Hungarian and Turkish have such a
        #: pattern)
        self._token = re.compile(rules["token"]).match if rules["token"] else None
        #: True if no letter is a prefix, suffix or infix, and a full stop after an ASCII letter is a suffix. It is set
        #: for English alone, for which the export checks it
        self.plain_letters: bool = rules["plain_letters"]
        self._window: int | None = rules["suffix_window"]
        # special cases that affix rules may split; `merge` finds them in the sequence of tokens (spaCy's PhraseMatcher)
        self._sequences: dict[str, list[tuple[str, ...]]] = {}
        #: pairs of tokens that stand next to each other in one of these special cases
        self.pairs: set[tuple[str, str]] = set()
        #: special cases of several chunks ("EE. UU." in Spanish)
        self.spaced: list[str] = sorted(chunk for chunk in self.specials if " " in chunk.strip())
        for chunk in self.specials:
            if self._prefix(chunk) or self._suffix(chunk) or next(self._infixes(chunk), None) or " " in chunk:
                sequence = tuple(self._split(chunk, special=False)[0])
                self._sequences.setdefault(sequence[0], []).append(sequence)
                self.pairs.update(itertools.pairwise(sequence))

    def quiet(self, letter: str) -> bool:
        """Return whether no rule for prefixes, suffixes or infixes applies to `letter` in a word of letters. A word
        that consists only of such letters is a single token."""
        return not (self._prefix(letter) or self._suffix(letter) or self._suffix("a" + letter)
                    or next(self._infixes(f"a{letter}a"), None))

    # -- one chunk -----------------------------------------------------------------------------------------------
    def affixes(self, chunk: str, special: bool = True) -> list[str]:
        """Split a chunk (a run without white space, or a run of white space) into tokens by spaCy's rules for prefixes,
        suffixes and infixes, as spaCy's `_tokenize` does. A URL, or a string that the language's pattern for whole
        tokens matches, is not split at infixes. A chunk of more than LONGEST characters is one token.

        A special case is a string with a fixed split into tokens. It is applied if it equals the chunk, or what remains
        of the chunk after some prefixes and suffixes were split off. With `special=False`, none is applied. `merge`
        applies special cases to sequences of tokens.
        """
        if len(chunk) > LONGEST:
            return [chunk]
        specials: dict[str, tuple[str, ...]] = self.specials if special else {}
        if chunk in specials:
            return list(specials[chunk])
        before: list[str] = []
        after: list[str] = []
        size = 0
        while chunk and len(chunk) != size:
            if chunk in specials or (self._token and self._token(chunk)):
                break
            size = len(chunk)
            match = self._prefix(chunk)
            head = match.end() - match.start() if match else 0
            if head and chunk[head:] in specials:
                before.append(chunk[:head])
                chunk = chunk[head:]
                break
            tail = self._suffix_length(chunk[head:] if head else chunk)
            if tail and chunk[:-tail] in specials:
                after.append(chunk[-tail:])
                chunk = chunk[:-tail]
                break
            if head:
                before.append(chunk[:head])
            if tail:
                after.append(chunk[-tail:])
            chunk = chunk[head:len(chunk) - tail]
        if chunk:
            if chunk in specials:
                before.extend(specials[chunk])
            elif ("." in chunk and self._url(chunk)) or (self._token and self._token(chunk)):
                before.append(chunk)                     # only with a full stop can it be a host name
            else:
                before.extend(self._split_infixes(chunk))
        before.extend(reversed(after))
        return before

    def _suffix_length(self, chunk: str) -> int:
        start = 0 if self._window is None else max(0, len(chunk.rstrip(".")) - self._window)
        match = self._suffix(chunk, start)
        return match.end() - match.start() if match else 0

    def _split_infixes(self, chunk: str) -> list[str]:
        tokens: list[str] = []
        start = 0
        for match in self._infixes(chunk):
            first, last = match.span()
            if first == 0:
                continue
            if first != start:
                tokens.append(chunk[start:first])
            if first != last:
                tokens.append(chunk[first:last])
            start = last
        if start < len(chunk):
            tokens.append(chunk[start:])
        return tokens

    def merge(self, tokens: Sequence[str], breaks: Sequence[bool]) -> list[str]:
        """Apply the special cases that match a sequence of tokens, and return the new tokens. A special case is a
        string with a fixed split into tokens. This method does what spaCy's last pass, `_apply_special_cases`, does.

        `breaks[i]` is true if a space precedes token i. A match is applied only if its tokens, joined with their
        spaces, spell a special case. Of overlapping matches, only the longest is tried, and of equally long ones the
        leftmost.
        """
        matches = [(i, i + len(sequence)) for i, token in enumerate(tokens)
                   for sequence in self._sequences.get(token, ()) if tuple(tokens[i:i + len(sequence)]) == sequence]
        if not matches:
            return list(tokens)
        # longest first, then leftmost; a match blocks those that it overlaps, even if it is blocked itself
        covered: set[int] = set()
        chosen: dict[int, int] = {}
        for start, stop in sorted(matches, key=lambda span: (span[0] - span[1], span[0])):
            if start not in covered and stop - 1 not in covered:
                chosen[start] = stop
            covered.update(range(start, stop))
        out: list[str] = []
        i = 0
        while i < len(tokens):
            stop = chosen.get(i, i + 1)
            parts = None
            if i in chosen:
                spelling = tokens[i] + "".join(" " * breaks[j] + tokens[j] for j in range(i + 1, stop))
                parts = self.specials.get(spelling)
            out.extend(parts if parts is not None else tokens[i:stop])
            i = stop
        return out

    # -- whole texts ---------------------------------------------------------------------------------------------
    def tokens(self, text: str) -> list[str]:
        """Return all tokens of a text, white space included, like spaCy's `[t.text for t in tokenizer(text)]`."""
        return self.merge(*self._split(text))

    def _split(self, text: str, special: bool = True) -> tuple[list[str], list[bool]]:
        """Split a text into tokens, chunk by chunk (a chunk is a run without white space). Returns (tokens, for each
        token whether a space precedes it). The special cases that match a sequence of tokens are left to `merge`."""
        tokens: list[str] = []
        breaks: list[bool] = []
        space = False
        for number, run in enumerate(_SPACE_RUN.split(text)):
            if not run:
                continue
            if number % 2:
                # white space is a token, except one plain space after a word
                chunk = run[1:] if run[0] == " " and tokens else run
                space = run[0] == " " and bool(tokens)
                if not chunk:
                    continue
            else:
                chunk = run
            chunk_tokens = self.affixes(chunk, special)
            tokens.extend(chunk_tokens)
            breaks.extend([space] + [False] * (len(chunk_tokens) - 1))
            space = False
        return tokens, breaks

    def words(self, text: str) -> list[str]:
        """Return the tokens of a text that are not white space, as datatrove's `split_into_words` does."""
        return [word for token in self.tokens(text) if (word := token.strip())]


def is_punctuation(token: str) -> bool:
    """Return whether every character of a token is in one of Unicode's punctuation categories P* (as spaCy's
    `is_punct`)."""
    return all(unicodedata.category(c).startswith("P") for c in token)


@cache
def spacy_rules(language: str = "en") -> SpacyRules:
    """Return spaCy's tokenizer for a language, given as spaCy's code. One object is made per language and process."""
    from stages.text.cache import rules_path

    return SpacyRules(json.loads(rules_path(language).read_bytes()))
