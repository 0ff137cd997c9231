"""Prepares labelled texts for training a classifier. Each text is used once, either for training, for calibration or
for the test.

Texts are identified by their content: the hash of their words in lower case. A text that occurs twice under one label
counts once. A text under two labels teaches nothing and is left out. Near-duplicates (an article and its reprint) form
a cluster, and the whole cluster has one use.

Clusters are found by MinHash over word 5-grams, with 20 bands of 5 hashes. Each text is paired with the first text that
has an equal band. Texts of a pair belong to one cluster if they agree in at least half of the 100 hashes.

What a cluster is used for is a pseudo-random function of the seed and the smallest content hash in the cluster. The use
therefore does not depend on the order of texts or on the names of files, and added texts seldom change it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from pipeline.base.prf import prf

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: the three uses of a text
SIDES = ("train", "calibrate", "test")
_BANDS, _ROWS, _AGREE = 20, 5, 50
#: _SPACE: characters that fastText treats as white space. _LABEL: words that it treats as labels. _END: the word at
#: which it stops reading a text, with everything after it.
_SPACE = " \n\r\t\v\f\0"
_LABEL = re.compile(rf"(?<![^{_SPACE}])__label__[^{_SPACE}]*")
_END = re.compile(rf"(?<![^{_SPACE}])</s>(?![^{_SPACE}]).*", re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A text with its label, from which a classifier learns or by which it is judged. `key` (32 hex characters)
    identifies the text by its words: texts that differ only in spacing and case have equal keys."""

    key: str
    label: str
    text: str

    @property
    def line(self) -> str:
        """Return the text as a line of fastText's training file. Words that fastText would read as labels are removed,
        and the text is cut before a word `</s>`, where fastText's prediction stops reading. Training therefore sees the
        same words of a text as prediction."""
        return _END.sub("", _LABEL.sub("", self.text.replace("\n", " "))).replace("\r", " ")


@dataclass
class Examples:
    """The examples for a classifier, sorted by key. `sides` says what each example is used for (train, calibrate or
    test). Counters say how many texts were left out."""

    kept: list[Example]
    sides: list[str]
    repeated: int = 0                # texts that occurred again under the same label
    contradicted: int = 0            # texts that occurred under more than one label
    surplus: Counter[str] = field(default_factory=Counter)        # beyond `most` of a label
    clusters: int = 0                # clusters of near-duplicates with two texts or more
    largest: int = 1                 # texts of the largest cluster

    def of(self, side: str) -> list[Example]:
        return [example for example, own_side in zip(self.kept, self.sides) if own_side == side]


def content_key(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(" ".join(text.split()).lower().encode("utf-8", "surrogatepass"))


def gather(labelled: Iterable[tuple[str, str]], seed: int, held_out: float, most: int | None = None) -> Examples:
    """Draw at most `most` examples per label from (label, text) pairs, and divide them into texts for training,
    calibration and test.

    Near-duplicate texts form clusters. A share `held_out` (0 … 1) of the clusters is kept from training: half of these
    for calibration and half for the test. The draw depends on the content of the texts, not on the order of the pairs.
    A text under two labels counts in the draw for both, and is then left out. Texts without a word are skipped. Up to
    `most` texts per label are held in memory.
    """
    labels: dict[str, tuple[str, ...]] = {}           # key → the labels of its text
    single: dict[str, tuple[str]] = {}                # label → (label,): one tuple, shared by all texts of the label
    heaps: dict[str, list[tuple[int, str]]] = {}      # label → heap of (-draw, key): the smallest draws stay
    texts_by_label: dict[str, dict[str, str]] = {}    # label → its texts in the heap, by key
    repeated, surplus = 0, Counter[str]()
    for label, text in labelled:
        if not text or text.isspace():
            continue
        key = content_key(text)
        heap, own_texts = heaps.setdefault(label, []), texts_by_label.setdefault(label, {})
        earlier_labels = labels.get(key)
        if earlier_labels is not None and label in earlier_labels:
            repeated += 1
            if key in own_texts:
                own_texts[key] = max(own_texts[key], text)      # which spelling stays must not depend on the order
            continue
        labels[key] = single.setdefault(label, (label,)) if earlier_labels is None else (*earlier_labels, label)
        own_texts[key] = text
        heappush(heap, (-prf(seed, "classifier/draw", key), key))
        if most is not None and len(heap) > most:
            surplus[label] += 1
            del own_texts[heappop(heap)[1]]
    contradicted = sum(len(labels_of_text) > 1 for labels_of_text in labels.values())
    examples = sorted((Example(key, label, text) for label, own_texts in texts_by_label.items()
                       for key, text in own_texts.items() if len(labels[key]) == 1), key=lambda example: example.key)
    del heaps, texts_by_label
    roots = near_duplicates([example.text for example in examples])
    sizes = np.bincount(roots, minlength=1)
    sides = [_side(seed, examples[root].key, held_out) for root in roots]
    return Examples(examples, sides, repeated, contradicted, surplus,
                    int((sizes > 1).sum()), int(sizes.max(initial=1)))


def _side(seed: int, key: str, held_out: float) -> str:
    draw = prf(seed, "classifier/split", key) / 2**64
    return "test" if draw < held_out / 2 else "calibrate" if draw < held_out else "train"


def sample(texts: Iterable[str], seed: int, most: int) -> list[tuple[str, str]]:
    """Draw at most `most` texts at random. The draw depends only on the seed and the content of the texts. Returns
    (content key, text), sorted by key. Texts without a word are skipped."""
    heap: list[tuple[int, str, str]] = []
    for text in texts:
        if text and not text.isspace():
            key = content_key(text)
            item = (-prf(seed, "classifier/reference", key), key, text)
            if len(heap) < most:
                heappush(heap, item)
            else:
                heapreplace(heap, max(item, heap[0]))
    return sorted((key, text) for _, key, text in heap)


def near_duplicates(texts: list[str]) -> NDArray[np.int64]:
    """Find clusters of near-duplicate texts. Returns int64[n]: for each text, the smallest index of a text in its
    cluster. A text without near-duplicates is a cluster of its own."""
    from stages.dedup.hashing import band_keys
    from stages.dedup.lsh import components
    from stages.dedup.signature import MinHashSignature

    stage = MinHashSignature(bands=_BANDS, rows=_ROWS)
    roots = np.arange(len(texts))
    places, signatures, bands = [], [], []
    for place, text in enumerate(texts):
        signature = stage.signature(text)
        if signature is not None:                     # None: fewer than 5 words; equal texts were merged before
            places.append(place)
            signatures.append((signature >> np.uint64(32)).astype(np.uint32))
            bands.append(band_keys(signature, _BANDS, _ROWS))
    if len(places) < 2:
        return roots
    place_of, hashes, keys = np.array(places), np.stack(signatures), np.stack(bands)
    pairs = []
    for band in range(_BANDS):
        order = np.argsort(keys[:, band], kind="stable")
        sorted_keys = keys[order, band]
        new = np.r_[True, sorted_keys[1:] != sorted_keys[:-1]]
        bucket_first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
        firsts, seconds = bucket_first[~new], order[~new]       # each text paired with the first of its bucket
        agreeing = (hashes[firsts] == hashes[seconds]).sum(axis=1) >= _AGREE
        pairs.append((place_of[firsts[agreeing]], place_of[seconds[agreeing]]))
    firsts = np.concatenate([pair[0] for pair in pairs]).astype(np.uint64)
    seconds = np.concatenate([pair[1] for pair in pairs]).astype(np.uint64)
    if len(firsts):
        nodes, smallest = components(firsts, seconds)
        roots[nodes.astype(np.int64)] = smallest.astype(np.int64)
    return roots
