"""Computes MinHash signatures of documents: the stage that the barrier `minhash` (`stages.dedup.minhash`) runs first.

A document's signature consists of the minimum of each of many hash functions over the document's shingles (stretches of
a few words, characters or tokens). The minima are divided into groups of equal size, called bands. Each band is hashed
to a band key. Two similar documents probably share a band key.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import field_validator, model_validator

from stages.dedup.hashing import (
    Permutations,
    band_keys,
    character_shingles,
    split_words,
    token_shingles,
    word_shingles,
    word_shingles_of_texts,
)
from stages.dedup.survivor import COLUMN, DEFAULT, checked, order_bytes, signals, stored
from stages.stage import SettingsError, Stage, StageConfig, resource, signal
from stages.text.cache import rules_paths
from stages.text.chunks import utf8
from stages.text.language_codes import tag
from stages.text.languages import rule_names, splitter
from stages.text.normalize import simplified_texts, simplified_utf8
from stages.text.words import Words, shingle_sha1, shingle_xxhash, words_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.dedup.part_texts import Texts
    from stages.document import Document


class SignatureConfig(StageConfig):
    bands: int = signal(14, "bands of the signature; more find more candidates", ge=1, le=256)
    rows: int = signal(8, "hashes in a band; more demand more similarity", ge=1, le=64)
    ngram: int = signal(5, "words (characters, tokens) in a shingle; with shingles: characters the default is 24",
                        ge=1, le=64)
    seed: int = signal(1, "seed of the hash functions", ge=0, lt=2**32)
    max_chars: int = signal(500_000, "characters at the beginning of a text that are compared; the signatures of "
                                     "longer texts tell little", ge=1)
    dialect: Literal["tokenmill", "datatrove", "datasketch"] = signal(
        "tokenmill", "project whose way to split words and to hash is followed (stages.dedup.hashing)")
    hash: Literal["sha1", "xxhash"] = signal("sha1", "shingle hash of dialect datatrove (FineWeb-2: xxhash)")
    words: Literal["english", "language"] = signal(
        "english", "language whose rules split texts into words in dialect datatrove: English, or that of each "
                   "document (FineWeb-2)")
    shingles: Literal["words", "characters", "tokens"] = signal(
        "words", "what a shingle is a run of: words, characters of the simplified text (NeMo), or tokens", added=True)
    tokenizer: str | None = resource(None, "for shingles: tokens, the tokenizer, a file tokenizer.json", added=True)
    prefer: tuple[str, ...] = signal(
        DEFAULT, "which of similar documents is kept: priority, newest, signal:NAME (largest value), longest; the "
                 "first by which the documents differ decides, and at last the smallest id", added=True)

    _checked = field_validator("prefer")(checked)

    @model_validator(mode="before")
    @classmethod
    def _usual_ngram(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("shingles") == "characters" and "ngram" not in given:
            return {**given, "ngram": 24}
        return given

    @model_validator(mode="after")
    def _shingles_of_a_dialect(self) -> SignatureConfig:
        if self.shingles != "words" and self.dialect != "tokenmill":
            raise ValueError(f"shingles: {self.shingles} is for dialect: tokenmill; leave one of the two out")
        if (self.shingles == "tokens") != (self.tokenizer is not None):
            raise ValueError("shingles: tokens and tokenizer: FILE belong together; give both, or neither")
        return self

    @model_validator(mode="after")
    def _words_of_a_dialect(self) -> SignatureConfig:
        if self.words == "language" and self.dialect != "datatrove":
            raise ValueError("words: language is for dialect: datatrove; the words of other dialects are the same in "
                             "all languages: leave it out, or set dialect: datatrove")
        if self.hash == "xxhash" and self.dialect != "datatrove":
            raise ValueError(f"hash: xxhash is for dialect: datatrove; dialect: {self.dialect} has a hash of its own: "
                             "leave it out, or set dialect: datatrove")
        return self


class MinHashSignature(Stage):
    """Compute the band keys of a document, by which the step `minhash` finds candidates for near-duplicates. A band key
    is a 64-bit hash of one band of the MinHash signature (Broder 1997).

    The stage writes a row of a side table for each document, with these columns:

    - `bands`: the band keys as little-endian uint64. It is empty for a text of fewer than `ngram` words: such a text
      has no near-duplicates, and the step `exact` finds its duplicates.
    - `chars`: the number of characters of the whole text.
    - `words`: the number of words of its first `max_chars` characters. With `shingles: characters` or `tokens`,
      characters or tokens are counted here and in `ngram`.
    - `language`: the document's language, whose rules split the text into words. Only with `words: language`.
    - `order`: the dates and signals that `prefer` compares, if any (`stages.dedup.survivor`).
    """

    name = "minhash_signature"
    version = 1
    cost_ms = 0.04
    side = pa.schema([("bands", pa.binary()), ("chars", pa.uint32()), ("words", pa.uint32())])
    Config = SignatureConfig

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        settings = self.config
        # `simplify` depends on the Unicode version of regex (\p{Nd})
        self.libraries = ("regex", "spacy") if settings.dialect == "datatrove" else ("regex",)
        if settings.words == "language":
            self.libraries += ("datatrove",)                       # for its table of languages
            self.side = self.side.append(pa.field("language", pa.string()))
        if stored(settings.prefer):
            self.side = self.side.append(COLUMN)
        if settings.shingles == "tokens":
            self.libraries += ("tokenizers",)
        self._tokenizer: Any = None
        self._permute = Permutations(settings.bands * settings.rows, settings.seed, settings.dialect)

    def reads(self) -> dict[str, str]:
        return signals_read(self.config)

    def setup(self) -> None:
        if self.config.tokenizer is not None:
            self._tokenizer = load_tokenizer(self.config.tokenizer)
        if self.config.dialect == "datatrove":
            # the export of rules starts a program, which a confined process may not do for a document
            rules_paths(["en"] if self.config.words == "english" else rule_names())

    def warm(self) -> None:
        shingles, _ = self.shingles_of(np.frombuffer(b"a b " * self.config.ngram, np.uint8))
        band_keys(self._permute(shingles), self.config.bands, self.config.rows)

    def shingles(self, text: str, language: str = "") -> tuple[NDArray[np.uint64], int]:
        """Return (the hash of every n-gram in order, the number of words) of the first `max_chars` characters of a
        text. An n-gram is a run of `ngram` words. With `shingles: characters` (or `tokens`), n-grams are runs of
        characters (tokens), and these are counted instead of words."""
        return self.shingles_of(utf8(text), language)

    def shingles_of(self, text: NDArray[np.uint8], language: str = "") -> tuple[NDArray[np.uint64], int]:
        """Return what `shingles` returns, for a text given as UTF-8: (the hash of every n-gram in order, the number of
        words)."""
        text, ngram = beginning(text, self.config.max_chars), self.config.ngram
        if self.config.dialect == "tokenmill" and self.config.shingles == "words":
            return word_shingles(simplified_utf8(text, gaps=True), ngram)
        simplified = simplified_utf8(text)
        if self.config.shingles == "characters":
            return character_shingles(simplified, ngram)
        plain = simplified.tobytes().decode("utf-8", "surrogatepass")
        if self.config.shingles == "tokens":
            return token_shingles(self.tokens(plain), ngram)
        words = self.words_of(plain, language)
        hash_shingles = shingle_sha1 if self.config.hash == "sha1" else shingle_xxhash
        return hash_shingles(words, self.config.ngram), len(words)

    def shingles_of_texts(self, texts: Texts,
                          languages: Sequence[str] | None = None) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Hash the n-grams of many texts, each as `shingles_of` does. Returns (the hashes of all texts, one text after
        another; the number of hashes of each text)."""
        data, starts, stops = texts
        if self.config.shingles == "words" and self.config.dialect == "tokenmill":
            stops = stops.copy()
            for n in np.flatnonzero(stops - starts > self.config.max_chars).tolist():
                stops[n] = starts[n] + len(beginning(data[starts[n]:stops[n]], self.config.max_chars))
            return word_shingles_of_texts(*simplified_texts(data, starts, stops, gaps=True), self.config.ngram)
        each = [self.shingles_of(data[start:stop], language)[0]
                for start, stop, language in zip(starts.tolist(), stops.tolist(), languages or repeat(""))]
        return np.concatenate([np.zeros(0, np.uint64), *each]), np.array([len(one) for one in each], np.int64)

    def tokens(self, simplified: str) -> NDArray[np.int64]:
        """Return the tokens of a simplified text (lower case, no punctuation, single spaces) as numbers,
        int64[tokens]."""
        if self._tokenizer is None:
            self.setup()
        return np.asarray(self._tokenizer.encode(simplified, add_special_tokens=False).ids, np.int64)

    def words_of(self, simplified: str, language: str) -> Words:
        """Return the words of a simplified text (lower case, no punctuation, single spaces), split by the rules of the
        stage's dialect, which is `datatrove` or `datasketch`."""
        if self.config.dialect == "datasketch":
            return Words.of(split_words(simplified))
        if self.config.words == "english":
            return words_of(simplified)
        rules = _rules(language)
        return words_of(simplified, rules) if rules is not None else Words.of(split_words(simplified))

    def units(self, simplified: str, language: str) -> tuple[list[str], str]:
        """Return (the units of a simplified text, the string that joins units to a text). Units are words, characters,
        or tokens (given as numbers), whichever the shingles consist of. `tokenmill dedup explain` prints units."""
        if self.config.shingles == "characters":
            return list(simplified), ""
        if self.config.shingles == "tokens":
            return list(map(str, self.tokens(simplified).tolist())), " "
        if self.config.dialect == "datatrove":
            return self.words_of(simplified, language).strings(), " "
        return split_words(simplified), " "

    def signature(self, text: str, language: str = "") -> NDArray[np.uint64] | None:
        """Return the MinHash signature of a text, uint64[bands * rows], or None if the text has fewer than `ngram`
        words (characters, tokens)."""
        shingles, _ = self.shingles(text, language)
        return self._permute(shingles) if len(shingles) else None

    def process(self, doc: Document) -> str | None:
        shingles, words = self.shingles_of(np.frombuffer(doc.utf8, np.uint8), doc.language)
        keys = b""
        if len(shingles):
            keys = band_keys(self._permute(shingles), self.config.bands, self.config.rows).astype("<u8").tobytes()
        doc.side[self.name] = {"bands": keys, "chars": len(doc.text), "words": words}
        if self.config.words == "language":
            doc.side[self.name]["language"] = doc.language
        if stored(self.config.prefer):
            doc.side[self.name]["order"] = order_bytes(doc, self.config.prefer)
        return None


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer in the file `path`, a `tokenizer.json`. Raises SettingsError if the file holds no
    tokenizer."""
    from tokenizers import Tokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")       # a worker has one core
    try:
        return Tokenizer.from_file(path)
    except Exception as e:                                         # the library raises no more specific class
        raise SettingsError(f"{path} is no tokenizer.json ({e}); name the file of a tokenizer that is trained") from e


def signals_read(config: SignatureConfig) -> dict[str, str]:
    """Return what the stage reads of a document besides its text, as {"language" or the name of a signal: the setting
    that needs it}."""
    return {**({"language": "words"} if config.words == "language" else {}),
            **dict.fromkeys(signals(config.prefer), "prefer")}


def beginning(text: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """Return the first `most` characters of a text in UTF-8."""
    if len(text) <= most:
        return text
    starts = np.flatnonzero(text & 0xC0 != 0x80)                   # where characters begin
    return text[:starts[most]] if len(starts) > most else text


@lru_cache(maxsize=4096)
def _rules(language: str) -> str | None:
    """Return the name of spaCy's rules that split texts in a language into words. The language may be given by any of
    its codes or names.

    The result is None for unknown languages, and for languages whose rules need a further package (Chinese, Japanese,
    Thai …). Texts in such languages are split as in the dialect `tokenmill`, even if the package is installed.
    """
    word_splitter, parsed = splitter(language), tag(language)
    if word_splitter is None and parsed is not None:
        word_splitter = splitter(f"{parsed.language}_{parsed.script}" if parsed.script else parsed.language)
    return word_splitter.rules if word_splitter is not None else None
