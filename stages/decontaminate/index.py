"""Builds and reads the index of evaluation sets, by which the step `decontaminate` finds their items in documents. An
item is a question, answer or passage of a set. The index is one file, which processes share. It holds every sequence of
words by which a text can be recognised to contain an item.

An *entry* is a text that is looked for, such as a question. Equal texts of several rows or sets are one entry. A long
entry is looked up by its n-grams (sequences of n words), and a short one as a whole.

Some n-grams say nothing about an item, and the index leaves them out:

- n-grams in which less than half of the words have a letter (tables);
- n-grams of more than COMMON entries (phrases of a template, "which of the following");
- n-grams of at least COMMON documents of a sample of the corpus, if a sample is given.

GPT-3 ignores 13-grams of more than 10 documents of its whole corpus (arXiv 2005.14165, appendix C). To count in the
whole corpus, all texts would have to be read before the first decision, and new files would change old results. With a
sample, the result for a document depends only on the sets, the sample and the document.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from array import array
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from pipeline.base.files import file_sha256, replacing
from stages.decontaminate.scan import KeyTable, ScannedWords, find, key_table, keys_of, words_of
from stages.decontaminate.sets import Part, SetError, read_set
from stages.stage import python_version
from stages.text.cache import cache_dir, cached

#: words of an n-gram: GPT-3's (arXiv 2005.14165, appendix C), and decon's
LENGTHS = {"ngram": 13, "idf": 5}
#: dialect idf: entries of fewer words have too few n-grams to compare
SHORT = 8
#: an n-gram is common if more entries than this have it, or at least this many documents of the sample
COMMON = 10
#: increased when `build` gives another result, so that files that older code made are not used
_VERSION = 7
#: unit in which weights (inverse document frequencies) are stored, so that their sums are exact
_WEIGHT = 1000
#: ranges of keys, a power of two, that are sorted one after the other
_RANGES = 16


class ItemPart(NamedTuple):
    """Where a text of an evaluation set comes from: the set's name, the row's number, and the part of the row
    (question, answer or passage)."""

    set: str
    row: int
    part: Part


class EvaluationIndex:
    """An index of evaluation sets, as arrays read from a file. An entry is a text that is looked for.

    `members(e)` says which items of the sets have the text of entry e. `words[e]` is its number of words, `grams[e]`
    the number of its different n-grams in the index, and `totals[e]` the sum of their weights. If `whole[e]` is 1,
    entry e is looked up as a whole, not by its n-grams. `stretches[e]` is the largest number of words from the start of
    one of its n-grams to the start of the next. It is 1 unless the index leaves out n-grams in between.

    The entries that have n-gram g are `postings[offsets[g]:offsets[g + 1]]`. An n-gram that n entries have has the
    weight `weights[n]`.
    """

    def __init__(self, path: Path) -> None:
        data: Any = np.load(path, mmap_mode="r")
        header = int(data[0])
        about = json.loads(data[1:1 + header].tobytes())
        arrays, at = {}, 1 + header
        for name, kind, count in about["arrays"]:
            size = -(-count * np.dtype(kind).itemsize // 8)
            arrays[name] = data[at:at + size].view(kind)[:count]
            at += size
        self.sets: dict[str, dict[str, int]] = about["sets"]
        self._names = list(self.sets)
        self.table = KeyTable(*(np.asarray(arrays[n]) for n in KeyTable._fields))
        self.lengths, self.offsets, self.postings = (np.asarray(arrays[n]) for n in ("lengths", "offsets", "postings"))
        self.weights, self.words, self.grams, self.totals, self.whole, self.stretches = (
            np.asarray(arrays[n]) for n in ("weights", "words", "grams", "totals", "whole", "stretches"))
        self._firsts, self._members = np.asarray(arrays["firsts"]), np.asarray(arrays["members"]).reshape(-1, 3)

    def members(self, entry: int) -> list[ItemPart]:
        parts: tuple[Part, ...] = ("question", "answer", "passage")
        return [ItemPart(self._names[s], row, parts[part])
                for s, row, part in self._members[self._firsts[entry]:self._firsts[entry + 1]].tolist()]

    def short_questions(self, words: int) -> dict[str, int]:
        """Return {name of a set: the number of its questions that have fewer than `words` words}."""
        short = np.repeat(self.words < words, np.diff(self._firsts)) & (self._members[:, 2] == 0)
        counts = np.bincount(self._members[short, 0], minlength=len(self._names))
        return dict(zip(self._names, counts.tolist()))

    def hits(self, words: ScannedWords) -> np.ndarray:
        """Find all sequences of words of the index in a text, whose words are `words`. Returns an array as `scan.find`
        does."""
        return find(words, self.lengths, self.table)

    def entries(self, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the entries in which the n-grams `grams` occur, as two arrays. They have an element for each pair of
        an n-gram and an entry that has it: (the position of the n-gram in `grams`, the entry)."""
        begins = self.offsets[grams].astype(np.int64)
        sizes = self.offsets[grams + 1] - begins
        which = np.repeat(np.arange(len(grams)), sizes)
        inside = np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return which, self.postings[begins[which] + inside].astype(np.int64)

    def weight(self, grams: np.ndarray) -> int:
        """Return the sum of the weights of the given n-grams. The fewer entries have an n-gram, the more it weighs."""
        return int(self.weights[self.offsets[grams + 1] - self.offsets[grams]].sum())


def index_file(sets: Mapping[str, str], fields: Mapping[str, Mapping[Part, str]], dialect: str, common: str | None
               ) -> Path:
    """Return the path of the file with the index of some evaluation sets. The index is built when it is first needed.
    The file is cached under a hash of the settings and of the contents of the sets and the sample `common`."""
    about = [_VERSION, python_version(), dialect, {name: dict(fields[name]) for name in sets},
             {name: file_sha256(path) for name, path in sets.items()}, file_sha256(common) if common else None]
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]

    def write(path: Path) -> None:
        _save(path, *_Builder(LENGTHS[dialect], dialect == "ngram").build(sets, fields, common))

    return cached(cache_dir() / "decontaminate" / f"{name}.npy", write)


class _Builder:
    """Builds an index of evaluation sets, with n-grams of `length` words. With `long_whole`, all entries (texts that
    are looked for) of fewer than `length` words are looked up as a whole; otherwise only those of fewer than SHORT
    words.

    Sets may have millions of items, so the facts about them are kept in arrays of numbers.
    """

    def __init__(self, length: int, long_whole: bool) -> None:
        self.length = length
        self.shortest = length if long_whole else SHORT
        #: hash of an entry's keys → its number
        self.numbers: dict[bytes, int] = {}
        #: by entry: the number of its keys, that of its words, and whether it is looked up whole
        self.sizes, self.words, self.whole = array("q"), array("q"), array("B")
        #: the keys of all entries, in order, and their places in the texts
        self.keys, self.places = array("Q"), array("I")
        #: (entry, number of the set, row, number of the part) of each text, in order
        self.members = array("q")

    def build(self, sets: Mapping[str, str], fields: Mapping[str, Mapping[Part, str]], common: str | None
              ) -> tuple[dict[str, dict[str, int]], dict[str, np.ndarray]]:
        """Read the evaluation sets. Returns ({set: its counts}, {name: array of `EvaluationIndex`}). The counts are
        `rows` and `common`, the number of questions that cannot be found because the index keeps none of their
        n-grams."""
        about: dict[str, dict[str, int]] = {}
        questions: list[array[int]] = []
        for number, (name, path) in enumerate(sorted(sets.items())):
            about[name] = {"rows": 0, "common": 0}
            questions.append(array("q"))
            for row in read_set(Path(path), dict(fields[name])):
                about[name]["rows"] += 1
                for text in row:
                    entry = self._enter(number, text.row, text.part, text.text, f"{path}: row {text.row}")
                    if text.part == "question" and entry is not None:
                        questions[-1].append(entry)
        if not self.sizes:
            raise SetError("sets", f"the sets have no question, and no answer or passage of {self.shortest} words; "
                                   f"name other fields under `fields`")
        arrays = self._arrays(self._common_keys(common))
        for name, entries in zip(about, questions):
            about[name]["common"] = int(np.sum(arrays["grams"][entries] == 0))
        return about, arrays

    def _enter(self, number: int, row: int, part: Part, text: str, place: str) -> int | None:
        """Add a text of an evaluation set to the index: the part `part` of row `row` of the set number `number`.
        Returns the number of its entry. Returns None for a text that is not looked for: an answer or passage without
        letters, or too short for n-grams. Raises SetError, which names `place`, if no word of a question has a
        letter."""
        words = words_of(unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass"))
        size = len(words.starts)
        if part == "question" and not words.letters.any():
            raise SetError("fields", f"{place} has a question without words; name another field, or take the row out")
        whole = size < self.shortest
        if (whole and part != "question") or not words.letters.any():
            return None                          # a short answer or passage stands in many unrelated texts
        keys, places = keys_of(words, size if whole else self.length), np.array([0])
        if not whole:
            sums = np.concatenate([[0], np.cumsum(words.letters, dtype=np.int64)])
            places = np.flatnonzero(2 * (sums[self.length:] - sums[:-self.length]) >= self.length)
            keys = keys[places]
        digest = xxhash.xxh3_128_digest(keys.tobytes() + bytes([whole]))
        entry = self.numbers.setdefault(digest, len(self.sizes))
        if entry == len(self.sizes):
            self.sizes.append(len(keys))
            self.words.append(size)
            self.whole.append(whole)
            self.keys.frombytes(keys.tobytes())
            self.places.frombytes(places.astype(np.uint32).tobytes())
        self.members.extend((entry, number, row, ("question", "answer", "passage").index(part)))
        return entry

    def _common_keys(self, common: str | None) -> np.ndarray:
        """Return the keys (hashes of sequences of words) that at least COMMON documents of a sample of the corpus have.
        `common` is the file of the sample, with the texts of documents in the field `text`."""
        if common is None:
            return np.empty(0, np.uint64)
        keys = np.unique(np.asarray(self.keys))
        counts = np.zeros(len(keys), np.int64)
        lengths, table = self._lengths(), key_table(keys)
        try:
            for sample in chain.from_iterable(read_set(Path(common), {"passage": "text"})):
                hits = find(words_of(sample.text.encode("utf-8", "surrogatepass")), lengths, table)
                counts[np.unique(hits[:, 2])] += 1
        except SetError as error:
            raise SetError("common", str(error)) from None
        return keys[counts >= COMMON]

    def _lengths(self) -> np.ndarray:
        return np.unique(np.append(np.asarray(self.words)[np.asarray(self.whole) == 1], self.length))

    def _arrays(self, common: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of `EvaluationIndex`, by name. `common` holds keys to leave out. The keys are sorted range
        by range, so that sorting needs little additional memory."""
        count, all_keys = len(self.sizes), np.asarray(self.keys)
        entry_of = np.repeat(np.arange(count, dtype=np.uint32), np.asarray(self.sizes))
        weights = np.array([0, *(round(_WEIGHT * math.log(1 + count / n)) for n in range(1, COMMON + 1))], np.int64)
        present = np.zeros(len(all_keys), bool)           # whether the index keeps a key
        grams, totals = np.zeros(count, np.int64), np.zeros(count, np.int64)
        keys, numbers, postings = [], [], []
        for part in range(_RANGES):
            inside = np.flatnonzero(all_keys >> np.uint64(64 - _RANGES.bit_length() + 1) == part)
            order = inside[np.argsort(all_keys[inside], kind="stable")]      # by key, then by entry
            key, entry = all_keys[order], entry_of[order]
            is_new = np.r_[True, key[1:] != key[:-1]][:len(key)]
            is_first = is_new | np.r_[True, entry[1:] != entry[:-1]][:len(key)]   # not the same key of one entry again
            gram = np.cumsum(is_new) - 1
            entries = np.bincount(gram[is_first])
            kept = (entries <= COMMON) & ~np.isin(key[is_new], common)
            present[order] = kept[gram]
            posted = is_first & kept[gram]
            keys.append(key[is_new][kept])
            numbers.append(entries[kept].astype(np.uint8))
            postings.append(entry[posted])
            grams += np.bincount(entry[posted], minlength=count)
            np.add.at(totals, entry[posted], weights[entries[gram[posted]]])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(numbers), dtype=np.int64)])
        if offsets[-1] >= 2**32:
            raise SetError("sets", "the sets have more than 4 billion n-grams; name fewer fields, or divide the sets "
                                   "among several steps")
        members = np.asarray(self.members).reshape(-1, 4)
        members = members[np.argsort(members[:, 0], kind="stable")]
        return {**key_table(np.concatenate(keys))._asdict(), "lengths": self._lengths(),
                "offsets": offsets.astype(np.uint32), "postings": np.concatenate(postings), "weights": weights,
                "words": np.asarray(self.words), "whole": np.asarray(self.whole), "grams": grams, "totals": totals,
                "stretches": self._stretches(entry_of[present], np.asarray(self.places)[present]),
                "firsts": np.searchsorted(members[:, 0], np.arange(count + 1)), "members": members[:, 1:].ravel()}

    def _stretches(self, entries: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return, for each entry, the largest number of words from the start of one of its n-grams to the start of the
        next. `entries` and `places` hold the entry and the position of each n-gram that the index keeps, in order."""
        stretches = np.ones(len(self.sizes), np.int64)
        apart = np.flatnonzero((entries[1:] == entries[:-1]) & (places[1:] > places[:-1] + 1))
        np.maximum.at(stretches, entries[apart], places[apart + 1].astype(np.int64) - places[apart])
        return stretches


def _save(path: Path, about: dict[str, dict[str, int]], arrays: dict[str, np.ndarray]) -> None:
    """Write an index to the file `path`: the size of the header in units of 8 bytes, the header (JSON), and the arrays.
    The header and each array are filled up to a multiple of 8 bytes."""
    layout = [[name, column.dtype.str, len(column)] for name, column in arrays.items()]
    header = json.dumps({"sets": about, "arrays": layout}).encode()
    header += b" " * (-len(header) % 8)
    words = 1 + len(header) // 8 + sum(-(-column.nbytes // 8) for column in arrays.values())
    with replacing(path) as part, open(part, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": (words,)})
        file.write((len(header) // 8).to_bytes(8, "little") + header)
        for column in arrays.values():
            file.write(np.ascontiguousarray(column).data)
            file.write(bytes(-column.nbytes % 8))
