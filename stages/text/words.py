"""Splits a text into words, once for all stages that process it.

Words are those of datatrove: spaCy's tokens without white space, by the English rules unless another language is named.
Tokenisation works chunk by chunk (a chunk is a run without white space). The same chunks occur again and again in real
text, so a table of limited size (`stages.text.chunks`) holds the words of known chunks, as numbers. Only chunks that
the table lacks are split by rules. The content of the table never changes a result, because the number of a word is
only a name for it. A chunk of more than 2,000 characters is one word (`stages.text.spacy_rules`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stages.text.characters import SYMBOLS
from stages.text.chunks import LINE_SENTENCES, Chunks, room, utf8
from stages.text.ngrams import distinct_words, hash_words, sha1_shingles, word_counts
from stages.text.spacy_rules import LONGEST, SpacyRules, is_punctuation, spacy_rules

#: most chunks and words, and most bytes of them (`Vocabulary.bytes`), before the vocabulary is emptied (about 150 MB)
CAPACITY, CAPACITY_BYTES = 1_000_000, 64 << 20
#: longest chunk that is cached, characters: longer ones hardly recur, and one text may be full of them
CACHED_LONGEST = 256

#: single marks that spaCy always peels off the end of a word (a full stop: only after lower-case letters)
_END_MARKS = frozenset(",;:!?)")


class Vocabulary:
    """Gives the words of one language numbers, and keeps properties of each word in arrays that are indexed by the
    word's number.

    `lengths` (int32) is in characters. `kinds` (uint8) has flag 1 if the word is not made of symbols alone, and flag 2
    if it holds a letter. `hashes` and `powers` (uint64) are the polynomial hash of the word's bytes and base**size.
    `offsets` (int64) and `sizes` (int32) locate the word's UTF-8 bytes in `blob`.
    """

    def __init__(self, language: SpacyRules | None = None) -> None:
        self.language = language or spacy_rules()
        self.words: list[str] = []
        self.numbers: dict[str, int] = {}
        self.chunks = Chunks()
        #: Chunks in which a special case (a token sequence with a rule of its own) is applied: number of the chunk →
        #: its first and last token before the special case is applied. A neighbouring chunk may prevent it
        self.unsure: dict[int, tuple[str, str]] = {}
        size = 1 << 12
        self.lengths = np.zeros(size, np.int32)
        self.kinds = np.zeros(size, np.uint8)
        self.hashes = np.zeros(size, np.uint64)
        self.powers = np.zeros(size, np.uint64)
        self.offsets = np.zeros(size, np.int64)
        self.sizes = np.zeros(size, np.int32)
        self.blob = np.zeros(1 << 16, np.uint8)
        #: number of words that the columns describe, and their bytes in blob
        self._described = self._filled = 0

    @property
    def bytes(self) -> int:
        """Return an estimate of the memory used: the bytes of all words and chunks (runs without white space), plus
        eight bytes for each chunk and for each word of a chunk."""
        return self._filled + self.chunks.bytes + 8 * (self.chunks.count + self.chunks.words)

    def number(self, word: str) -> int:
        """Return the number of a word; a new word gets the next number. Call `describe` afterwards to compute the
        properties (length, hash …) of new words."""
        number = self.numbers.get(word)
        if number is None:
            number = self.numbers[word] = len(self.words)
            self.words.append(word)
        return number

    def describe(self) -> None:
        """Compute the properties (`lengths`, `kinds` …) of the words that `number` has added since the last call."""
        first, last = self._described, len(self.words)
        if first == last:
            return
        added = self.words[first:]
        for column in ("lengths", "kinds", "hashes", "powers", "offsets", "sizes"):
            setattr(self, column, room(getattr(self, column), last))
        # letters are no symbols
        self.kinds[first:last] = [3 if word.isalpha() else (0 if SYMBOLS.issuperset(word) else 1)
                                  | (2 if any(map(str.isalpha, word)) else 0) for word in added]
        data = [word.encode("utf-8", "surrogatepass") for word in added]
        joined = b"".join(data)
        self.blob = room(self.blob, self._filled + len(joined))
        self.blob[self._filled:self._filled + len(joined)] = np.frombuffer(joined, np.uint8)
        self.lengths[first:last] = list(map(len, added))
        self.sizes[first:last] = sizes = np.fromiter(map(len, data), np.int64, last - first)
        self.offsets[first:last] = self._filled + np.cumsum(sizes) - sizes
        hash_words(self.hashes, self.powers, self.offsets, self.sizes, self.blob, first, last)
        self._described, self._filled = last, self._filled + len(joined)

    def learn(self, chunks: Iterable[str]) -> None:
        """Split new chunks (runs of characters without white space) into words, and add them to the table of chunks."""
        specials, ends = self.language.specials, self.language.sentence_ends
        plain = self.language.plain_letters
        data: list[bytes] = []
        words: list[int] = []
        counts: list[int] = []
        steps: list[tuple[int, int, int, int]] = []
        unsure: list[bool] = []
        number = self.number
        for chunk in chunks:
            data.append(chunk.encode("utf-8", "surrogatepass"))
            if plain and chunk not in specials:
                head, mark = chunk[:-1], chunk[-1]
                if chunk.isalpha():
                    words.append(number(chunk))
                    counts.append(1)
                    steps.append((0, 0, 1, 0))
                    unsure.append(False)
                    continue
                if ((mark in _END_MARKS or (mark == "." and len(head) > 2 and head.isascii() and head[1:].islower()))
                        and len(head) < LONGEST and head.isalpha() and head not in specials):
                    closed = 1 if mark in ends else 0
                    words += number(head), number(mark)
                    counts.append(2)
                    steps.append((0, closed, 1, closed))
                    unsure.append(False)
                    continue
            raw = self.language.affixes(chunk)
            tokens = self.language.merge(raw, [False] * len(raw))
            if tokens != raw:
                self.unsure[len(self.chunks) + len(data) - 1] = raw[0], raw[-1]
            words += map(number, tokens)
            counts.append(len(tokens))
            steps.append((*self._sentence_step(tokens, 0), *self._sentence_step(tokens, 1)))
            unsure.append(tokens != raw)
        self.describe()
        self.chunks.extend(data, words, counts, steps, unsure)

    def _sentence_step(self, tokens: list[str], ended: int) -> tuple[int, int]:
        """Count the sentences that begin in `tokens`, as spaCy's sentencizer does. After an end mark, a sentence begins
        at the first token that is not punctuation. `ended` is 1 if an end mark precedes the tokens and no sentence has
        begun since. Returns (number of sentences begun, the value of `ended` for the tokens that follow)."""
        begun = 0
        for token in tokens:
            mark = token in self.language.sentence_ends
            if mark:
                ended = 1
            elif ended and not is_punctuation(token):
                begun += 1
                ended = 0
        return begun, ended

    def _contested(self, data: np.ndarray, chunks: np.ndarray, spans: np.ndarray) -> list[tuple[int, int]]:
        """Find the runs of consecutive chunks of a text that must be split into words together. A chunk is a piece of
        text without white space. Returns (first, one past the last) of each run.

        Chunks are normally split one by one. But spaCy has special cases: sequences of tokens that have a rule of their
        own. A special case that spans two chunks may prevent a shorter special case inside one of them. It can span
        them only if a single space separates them, and if two neighbouring tokens of the special case equal the last
        token of the first chunk and the first token of the second. Other chunks can be split separately.
        """
        runs, last = [], len(chunks) - 1
        stop = 0
        for i in np.flatnonzero(self.chunks.rows["unsure"][chunks]).tolist():
            if i >= stop:
                first, stop = i, i + 1
                while first and self._may_span(data, chunks, spans, first):
                    first -= 1
                while stop <= last and self._may_span(data, chunks, spans, stop):
                    stop += 1
                if stop - first > 1:
                    runs.append((first, stop))
        return runs

    def _may_span(self, data: np.ndarray, chunks: np.ndarray, spans: np.ndarray, i: int) -> bool:
        """Return whether one of spaCy's special cases (a sequence of tokens with a rule of its own) may extend from
        chunk number i - 1 of the text into chunk number i. A chunk is a run without white space."""
        end, start = spans[i - 1, 1], spans[i, 0]
        return (start - end == 1 and data[end] == 32
                and (self._edge(chunks[i - 1], 1), self._edge(chunks[i], 0)) in self.language.pairs)

    def _words_together(self, data: np.ndarray, spans: np.ndarray) -> list[str]:
        """Return the words of several chunks (runs without white space) that are separated by single spaces. The chunks
        are split together, so that spaCy's special cases may span them."""
        tokens: list[str] = []
        breaks: list[bool] = []
        for start, stop in spans.tolist():
            chunk_tokens = self.language.affixes(_chunk(data, start, stop))
            tokens += chunk_tokens
            breaks += [True] + [False] * (len(chunk_tokens) - 1)
        return self.language.merge(tokens, breaks)

    def _edge(self, chunk: int, side: int) -> str:
        """Return the first token (`side` 0) or last token (`side` 1) of a chunk (a run without white space), before
        spaCy's special cases are applied."""
        chunk = int(chunk)
        if chunk in self.unsure:
            return self.unsure[chunk][side]
        return self.words[self.chunks.edge(chunk, side)]

    def _find_chunks(self, data: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int] | None]:
        """Find the chunks (runs without white space) of a text, and add those that the table lacks. Returns the number
        of each chunk, the start and end of each chunk in `data`, and the size of the table before long chunks were
        added.

        Long chunks do not stay in the table. After use, the caller passes the third value to `_forget`, which removes
        them. The value is None if no long chunks were added.
        """
        chunks, spans, unknown = self.chunks.scan(data)
        if not unknown:
            return chunks, spans, None
        missing = {_chunk(data, start, stop) for start, stop in spans[chunks < 0].tolist()}
        # sorted, so that two runs give words the same numbers: this changes no result, but helps debugging
        long = sorted(chunk for chunk in missing if len(chunk) > CACHED_LONGEST)
        if len(long) < len(missing):
            self.learn(sorted(missing.difference(long)))
        before = self.chunks.count, self.chunks.bytes, self.chunks.words
        if long:
            self.learn(long)
        chunks, spans, _ = self.chunks.scan(data)
        return chunks, spans, before if long else None

    def _forget(self, before: tuple[int, int, int] | None) -> None:
        """Remove the long chunks of a text from the table of chunks, after the text was split. `before` is the third
        value that `_find_chunks` returned for the text; if it is None, there is nothing to remove."""
        if before is not None:
            for chunk in range(before[0], self.chunks.count):
                self.unsure.pop(chunk, None)
            self.chunks.forget(*before)

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Split a text into words. Returns (the numbers of the words, int32; facts about the lines, int32[n, 4]).

        There is a row for each line that is not blank: the position of its first byte, the position after its last byte
        (both without white space), its number of chunks (runs without white space), and its number of sentences (-1:
        unknown).
        """
        data = utf8(text)
        chunks, spans, before = self._find_chunks(data)
        ids, lines, unsure = self.chunks.fold(data, chunks, spans)
        if any(special in text for special in self.language.spaced):
            ids = np.array([self.number(word) for word in self.language.words(text)], np.int32)
            lines[:, LINE_SENTENCES] = -1
            self.describe()
        elif unsure and (runs := self._contested(data, chunks, spans)):
            ends = np.cumsum(self.chunks.rows["count"][chunks], dtype=np.int64)
            pieces: list[np.ndarray] = []
            place = 0
            for first, stop in runs:
                words = self._words_together(data, spans[first:stop])
                pieces += ids[place:ends[first - 1] if first else 0], np.array(list(map(self.number, words)), np.int32)
                place = ends[stop - 1]
            ids = np.concatenate([*pieces, ids[place:]])
            self.describe()
        self._forget(before)
        return ids, lines

    def count_sentences(self, line: str) -> int:
        """Count the sentences of a line, as spaCy's sentencizer does. An empty line is one sentence. After an end mark,
        white space other than a single space also begins a sentence."""
        data = utf8(line)
        chunks, spans, before = self._find_chunks(data)
        if (any(special in line for special in self.language.spaced)
                or (len(self.unsure) and self._contested(data, chunks, spans))):
            count = 1 + self._sentence_step(self.language.tokens(line), 0)[0]
        else:
            count = self.chunks.sentences(data, chunks, spans)
        self._forget(before)
        return count


def _chunk(data: np.ndarray, start: int, stop: int) -> str:
    return data[start:stop].tobytes().decode("utf-8", "surrogatepass")


class Words:
    """The words of one text, in order, as numbers of a vocabulary (`ids`), and facts about its lines.

    `lines`, int32[n, 4], has a row for every line (of `str.splitlines`) that is not blank, with these columns:

    1. position of the line's first byte that is not white space
    2. position after the last such byte
    3. number of chunks (`str.split`)
    4. number of sentences; -1 if unknown, so that `count_sentences` must be called
    """

    __slots__ = ("_counts", "ids", "lines", "vocabulary")

    def __init__(self, ids: np.ndarray, vocabulary: Vocabulary, lines: np.ndarray | None = None) -> None:
        self.ids, self.vocabulary, self.lines = ids, vocabulary, lines
        self._counts: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, words: Iterable[str]) -> Words:
        """Return a `Words` object for a text that was split elsewhere, given its words. The object has no facts about
        lines: its `lines` is None."""
        vocabulary = VOCABULARIES.of()
        ids = np.array([vocabulary.number(word) for word in words], np.int32)
        vocabulary.describe()
        return cls(ids, vocabulary)

    def __len__(self) -> int:
        return len(self.ids)

    def strings(self) -> list[str]:
        return list(map(self.vocabulary.words.__getitem__, self.ids.tolist()))

    def _count(self) -> tuple[int, int, int]:
        if self._counts is None:
            self._counts = word_counts(self.ids, self.vocabulary.lengths, self.vocabulary.kinds)
        return self._counts

    @property
    def plain(self) -> int:
        """Return the number of words that do not consist of symbols alone (Gopher's word count)."""
        return self._count()[0]

    @property
    def mean_length(self) -> float:
        """Return the mean length in characters of the words that `plain` counts; nan if there are none."""
        plain, characters, _ = self._count()
        return characters / plain if plain else float("nan")

    @property
    def with_letter(self) -> int:
        """Return the number of words of the text that hold a letter."""
        return self._count()[2]

    def distinct(self, words: Iterable[str]) -> int:
        """Return how many of `words` occur in the text. No word may occur twice in `words`."""
        numbers = [number for word in words if (number := self.vocabulary.numbers.get(word)) is not None]
        return int(distinct_words(self.ids, np.array(numbers, np.int32))) if numbers else 0


class Vocabularies:
    """Keeps one vocabulary (numbered words and chunks) for each language, within a limit of memory. When all
    vocabularies together hold more than `capacity` chunks and words, or more than `capacity_bytes`, all are dropped,
    and new ones are begun. A `Words` object keeps the vocabulary with which it was made."""

    def __init__(self, capacity: int = CAPACITY, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.capacity, self.capacity_bytes = capacity, capacity_bytes
        self._by_language: dict[str, Vocabulary] = {}

    def of(self, language: str = "en") -> Vocabulary:
        vocabularies = self._by_language.values()
        if (sum(len(v.chunks) + len(v.words) for v in vocabularies) > self.capacity
                or sum(v.bytes for v in vocabularies) > self.capacity_bytes):
            self._by_language.clear()
        vocabulary = self._by_language.get(language)
        if vocabulary is None:
            vocabulary = self._by_language[language] = Vocabulary(spacy_rules(language))
        return vocabulary


#: the vocabularies of this process
VOCABULARIES = Vocabularies()


def load_rules() -> None:
    """Load the tokenizer rules. Stages call this function in `setup`, because a process that exports the rules of an
    installation for the first time starts a program."""
    spacy_rules()


def warm() -> None:
    """Load the compiled functions. Stages call this function in `Stage.warm`, so that the time for it does not count as
    processing time of the first document."""
    words = words_of("It (and all of this) is said. a b c d e f g h")
    words.plain  # noqa: B018
    words.distinct(["it"])
    count_sentences("It is said.")


def words_of(text: str, language: str = "en", vocabularies: Vocabularies = VOCABULARIES) -> Words:
    """Return the words of a text, split by spaCy's rules for `language`. The words equal those of datatrove's
    `split_into_words` for the languages that datatrove splits by spaCy's rules (`stages.text.languages`). The time is
    proportional to the number of chunks (runs without white space)."""
    vocabulary = vocabularies.of(language)
    ids, lines = vocabulary.encode(text)
    return Words(ids, vocabulary, lines)


def count_sentences(line: str) -> int:
    """Return the number of sentences of a line, counted as in datatrove's C4 filter:
    `len(split_into_sentences(line))`."""
    return VOCABULARIES.of().count_sentences(line)


def shingle_sha1(words: list[str] | Words, n: int = 5) -> np.ndarray:
    """Return the hash of every run of n words, as datatrove computes it with `hash_fc="sha1"` and 64 bits: the first 8
    bytes of SHA-1 over the words joined by spaces."""
    words = _as_words(words)
    vocabulary = words.vocabulary
    return sha1_shingles(words.ids, vocabulary.offsets, vocabulary.sizes, vocabulary.blob, n)


def shingle_xxhash(words: list[str] | Words, n: int = 5) -> np.ndarray:
    """Return the hash of every run of n words, as datatrove computes it by default (`hash_fc="xxhash"`, 64 bits): xxh64
    over the words joined by spaces."""
    import xxhash

    strings = words if isinstance(words, list) else words.strings()
    digest = xxhash.xxh64_intdigest
    return np.fromiter((digest(" ".join(strings[i:i + n]).encode()) for i in range(len(strings) - n + 1)), np.uint64)


def _as_words(words: list[str] | Words) -> Words:
    return words if isinstance(words, Words) else Words.of(words)
