"""Builds the index of evaluation sets. One file, which processes share, holds every sequence of words that shows that a
text contains an item of a set.

An *entry* is a text that is looked for, such as a question. Equal texts of several rows or sets are one entry. A long
entry has n-grams, sequences of n words; a short one is looked up whole.

The index leaves out n-grams that say nothing: those of which less than half of the words have a letter (tables), those
of more than COMMON entries (phrases of a template, "which of the following"), and those of at least COMMON documents of
a sample of the corpus, if one is given. GPT-3 ignores 13-grams of more than 10 documents of its whole corpus (arXiv
2005.14165, appendix C). Here the sample is a file, so the result for a document depends on the sets, the sample and the
document alone, for any number of workers. Frequencies in the whole corpus would need a reading of all texts before the
first decision, and new files would change old results.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.base.compiled import njit
from pipeline.base.files import file_sha256, replacing
from stages.decontaminate.scan import ScannedWords, find, keys_of, words_of
from stages.decontaminate.sets import Part, SetError, read_set
from stages.stage import python_version
from stages.text.cache import cache_dir, cached

#: words of an n-gram: GPT-3's (arXiv 2005.14165, appendix C), and decon's
LENGTHS = {"ngram": 13, "idf": 5}
#: An entry of fewer words is an everyday phrase inside a sentence. It is found only where it is between two borders.
BORDERED = 8
#: an n-gram is common if more entries than this have it, or at least this many documents of the sample
COMMON = 10
#: increased when `build` gives another result, so that files that older code made are not used
_VERSION = 4
#: unit in which weights (inverse document frequencies) are stored, so that their sums are exact
_WEIGHT = 1000


class ItemPart(NamedTuple):
    """Where a text of an evaluation set comes from: the set's name, the row's number, and the part of the row
    (question, answer or passage)."""

    set: str
    row: int
    part: Part


class EvaluationIndex:
    """The arrays of an index, read from a file. An entry is a text that is looked for, and `members(e)` says in which
    sets it is. Entry e has `words[e]` words and `grams[e]` different n-grams, whose weights have the sum `totals[e]`.
    If `whole[e]` is 1, the entry is looked up whole, not by its n-grams. From the start of one of its n-grams to the
    start of the next are at most `stretches[e]` words; this is more than one if n-grams between them are left out.
    N-gram g is in the entries `postings[offsets[g]:offsets[g + 1]]` and has the weight `weights[g]`."""

    def __init__(self, path: Path) -> None:
        data: Any = np.load(path, mmap_mode="r")
        header = int(data[0])
        about = json.loads(data[1:1 + header].tobytes())
        arrays, at = {}, 1 + header
        for name, kind, size in about["arrays"]:
            arrays[name] = data[at:at + size].view(kind)
            at += size
        self.sets: dict[str, dict[str, int]] = about["sets"]
        self._names = list(self.sets)
        self.filter, self.slots, self.values = (np.asarray(arrays[n]) for n in ("filter", "slots", "values"))
        self.lengths, self.offsets, self.postings = (np.asarray(arrays[n]) for n in ("lengths", "offsets", "postings"))
        self.weights, self.words, self.grams, self.totals, self.whole, self.stretches = (
            np.asarray(arrays[n]) for n in ("weights", "words", "grams", "totals", "whole", "stretches"))
        self._firsts, self._members = np.asarray(arrays["firsts"]), np.asarray(arrays["members"]).reshape(-1, 3)

    def members(self, entry: int) -> list[ItemPart]:
        parts: tuple[Part, ...] = ("question", "answer", "passage")
        return [ItemPart(self._names[s], row, parts[part])
                for s, row, part in self._members[self._firsts[entry]:self._firsts[entry + 1]].tolist()]

    def hits(self, words: ScannedWords) -> np.ndarray:
        """Return the places in a text at which the index has a sequence of words, in the form that `scan.find`
        returns."""
        return find(words, self.lengths, self.filter, self.slots, self.values)


def index_file(sets: Mapping[str, str], fields: Mapping[str, Mapping[Part, str]], dialect: str, min_words: int,
               common: str | None) -> Path:
    """Return the file of an index. It is built when it is first needed, and cached under the content of all files."""
    about = [_VERSION, python_version(), dialect, min_words, {name: dict(fields[name]) for name in sets},
             {name: file_sha256(path) for name, path in sets.items()}, file_sha256(common) if common else None]
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]

    def write(path: Path) -> None:
        _save(path, *_Builder(LENGTHS[dialect], dialect == "ngram", min_words).build(sets, fields, common))

    return cached(cache_dir() / "decontaminate" / f"{name}.npy", write)


class _Builder:
    """Builds an index of n-grams of `length` words. With `long_whole`, all entries of fewer words are looked up whole;
    otherwise only those of fewer than BORDERED words."""

    def __init__(self, length: int, long_whole: bool, min_words: int) -> None:
        self.length, self.min_words = length, min_words
        self.shortest = length if long_whole else BORDERED
        #: (keys as bytes) → number of the entry; per entry: its keys in order, their places in the text, the number of
        #: its words, whether it is looked up whole, and its members
        self.numbers: dict[bytes, int] = {}
        self.keys: list[np.ndarray] = []
        self.places: list[np.ndarray] = []
        self.words: list[int] = []
        self.whole: list[bool] = []
        self.members: list[list[tuple[int, int, int]]] = []

    def build(self, sets: Mapping[str, str], fields: Mapping[str, Mapping[Part, str]], common: str | None
              ) -> tuple[dict[str, dict[str, int]], dict[str, np.ndarray]]:
        """Return ({set: counts}, the arrays of `EvaluationIndex` by name). The counts are `rows`, `short` (questions
        that are too short to be looked for) and `common` (questions that have only common n-grams)."""
        about: dict[str, dict[str, int]] = {}
        questions: list[list[int]] = []
        for number, (name, path) in enumerate(sorted(sets.items())):
            about[name] = {"rows": 0, "short": 0, "common": 0}
            questions.append([])
            for text in read_set(Path(path), dict(fields[name])):
                about[name]["rows"] = text.row + 1
                entry = self._enter(number, text.row, text.part, text.text, f"{path}: row {text.row}")
                if text.part == "question":
                    about[name]["short"] += entry is None
                    questions[-1] += [] if entry is None else [entry]
        if not self.keys:
            raise SetError("sets", f"no text of the sets has {self.min_words} words; name other fields under `fields`, "
                                   f"or set min_words: 1")
        arrays = self._arrays(self._common_keys(common))
        for name, entries in zip(about, questions):
            about[name]["common"] = int(np.sum(arrays["grams"][entries] == 0))
        return about, arrays

    def _enter(self, number: int, row: int, part: Part, text: str, place: str) -> int | None:
        """Add a text of row `row` of the set with the number `number`. Returns its entry; None if it is too short."""
        words = words_of(unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass"))
        size = len(words.starts)
        if part == "question" and not words.letters.any():
            raise SetError("fields", f"{place} has a question without words; name another field, or take the row out")
        whole = size < self.shortest
        if size < (self.min_words if part == "question" else self.shortest) or not words.letters.any():
            return None                          # a short answer or passage is in many texts that hold no test
        keys, places = keys_of(words, size if whole else self.length), np.array([0])
        if not whole:
            sums = np.concatenate([[0], np.cumsum(words.letters, dtype=np.int64)])
            places = np.flatnonzero(2 * (sums[self.length:] - sums[:-self.length]) >= self.length)
            keys = keys[places]
        entry = self.numbers.setdefault(keys.tobytes() + bytes([whole]), len(self.keys))
        if entry == len(self.keys):
            self.keys.append(keys)
            self.places.append(places)
            self.words.append(size)
            self.whole.append(whole)
            self.members.append([])
        self.members[entry].append((number, row, ("question", "answer", "passage").index(part)))
        return entry

    def _common_keys(self, common: str | None) -> np.ndarray:
        """Return the keys that are common in the sample of the corpus, whose documents are the texts in `text`."""
        if common is None:
            return np.empty(0, np.uint64)
        keys = np.unique(np.concatenate(self.keys))
        counts = np.zeros(len(keys), np.int64)
        lengths = self._lengths()
        table = _table(keys)
        try:
            for sample in read_set(Path(common), {"passage": "text"}):
                hits = find(words_of(sample.text.encode("utf-8", "surrogatepass")), lengths, *table)
                counts[np.unique(hits[:, 2])] += 1
        except SetError as error:
            raise SetError("common", str(error)) from None
        return keys[counts >= COMMON]

    def _lengths(self) -> np.ndarray:
        return np.unique(np.array([self.length, *(w for w, whole in zip(self.words, self.whole) if whole)], np.int64))

    def _arrays(self, common: np.ndarray) -> dict[str, np.ndarray]:
        different = [np.unique(keys) for keys in self.keys]
        entries = np.repeat(np.arange(len(self.keys)), [len(keys) for keys in different])
        keys, numbers, counts = np.unique(np.concatenate(different), return_inverse=True, return_counts=True)
        kept = (counts <= COMMON) & ~np.isin(keys, common)
        entries, numbers = entries[kept[numbers]], (np.cumsum(kept) - 1)[numbers[kept[numbers]]]
        keys, counts = keys[kept], counts[kept]
        order = np.lexsort((entries, numbers))
        weights = np.array([round(_WEIGHT * math.log(1 + len(self.keys) / n)) for n in range(1, COMMON + 1)], np.int64)[
            counts - 1]
        filter_bits, slots, values = _table(keys)
        return {"filter": filter_bits, "slots": slots, "values": values, "lengths": self._lengths(),
                "offsets": np.concatenate([[0], np.cumsum(counts)]), "postings": entries[order], "weights": weights,
                "words": np.array(self.words, np.int64), "whole": np.array(self.whole, np.int64),
                "grams": np.bincount(entries, minlength=len(self.keys)),
                "stretches": self._stretches(keys),
                "totals": np.bincount(entries, weights[numbers], minlength=len(self.keys)).astype(np.int64),
                "firsts": np.cumsum([0, *map(len, self.members)]),
                "members": np.array([m for members in self.members for m in members], np.int64).ravel()}

    def _stretches(self, kept: np.ndarray) -> np.ndarray:
        """Return for each entry the most words from one of its n-grams in `kept` (sorted keys) to the next."""
        sizes = [len(keys) for keys in self.keys]
        keys = np.concatenate(self.keys)
        present = np.isin(keys, kept)
        entries, places = np.repeat(np.arange(len(sizes)), sizes)[present], np.concatenate(self.places)[present]
        stretches = np.ones(len(sizes), np.int64)
        same = entries[1:] == entries[:-1]
        np.maximum.at(stretches, entries[1:][same], np.diff(places)[same])
        return stretches


def _table(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a hash table of sorted `keys` for `scan.find`, whose values are their numbers: (filter bits, slots,
    values)."""
    size = 1 << max(2 * len(keys), 32).bit_length()
    filter_bits = np.zeros(size, np.uint8)                        # 16 to 32 bits for each key
    bits = keys & np.uint64(8 * size - 1)
    np.bitwise_or.at(filter_bits, (bits >> np.uint64(3)).astype(np.int64),
                     np.uint8(1) << (bits & np.uint64(7)).astype(np.uint8))
    slots, values = np.zeros(size, np.uint64), np.zeros(size, np.int64)
    _fill(keys, slots, values)
    return filter_bits, slots, values


@njit(cache=True, nogil=True)
def _fill(keys: Any, slots: Any, values: Any) -> None:
    places = np.uint64(len(slots) - 1)
    for number in range(len(keys)):
        at = (keys[number] >> np.uint64(32)) & places
        while slots[np.int64(at)] != 0:
            at = (at + np.uint64(1)) & places
        slots[np.int64(at)], values[np.int64(at)] = keys[number], number


def _save(path: Path, about: dict[str, dict[str, int]], arrays: dict[str, np.ndarray]) -> None:
    """Write an index: the number of 8-byte words of its header, the header (JSON), and the arrays."""
    columns = {name: np.ascontiguousarray(array).view(np.uint64) for name, array in arrays.items()}
    layout = [[name, arrays[name].dtype.str, len(column)] for name, column in columns.items()]
    header = json.dumps({"sets": about, "arrays": layout}).encode()
    header += b" " * (-len(header) % 8)
    words = [np.array([len(header) // 8], np.uint64), np.frombuffer(header, np.uint64), *columns.values()]
    with replacing(path) as part, open(part, "wb") as file:
        np.save(file, np.concatenate(words))
