"""Explains why a document was removed as a near-duplicate: compares its text with the text of the document that was
kept.

`tokenmill dedup explain` prints the explanation for a row of the folder `dropped/`. The column `kept` of the row names
the document that was kept.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.dedup.hashing import band_keys
from stages.dedup.minhash import MinHash
from stages.dedup.signature import MinHashSignature
from stages.dedup.units import same_text
from stages.text.normalize import simplify

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Explanation:
    """What two texts, a removed and a kept one, have in common, measured as the step `minhash` measures it."""

    similarity: float              # Jaccard similarity of their sets of word n-grams
    threshold: float | None        # the setting `verify`; None: the similarity is not checked, shared bands decide
    containment: float | None      # the setting `containment`
    boilerplate: float | None      # the setting `boilerplate`; None: whole texts are compared
    recorded_similarity: float | None      # what the run noted; with `boilerplate`, of the texts without it
    contained: float               # share of the removed text's n-grams that the kept text also has
    removed_ngrams: int            # distinct n-grams of the removed text, of the kept text, and of both
    kept_ngrams: int
    common_ngrams: int
    shared_bands: int              # how many of the `bands` are equal; one is enough to compare the texts
    bands: int
    detection: float               # chance that a pair of this similarity shares a band: 1 - (1 - s^rows)^bands
    equal_text: bool               # whether the texts differ at most in white space and case (`exact` removes one)
    only_removed: tuple[str, ...]  # stretches of simplified words that no common n-gram covers, longest first
    only_kept: tuple[str, ...]

    @property
    def confirmed(self) -> bool | None:
        """Return whether the two texts justify the removal under the settings of the step `minhash`. With
        `boilerplate`, the similarity that the run recorded decides, because two texts alone do not show what is
        boilerplate. If the run recorded none, the result is None (unknown)."""
        similarity = self.similarity if self.boilerplate is None else self.recorded_similarity
        if similarity is None:
            return None
        inside = (self.containment is not None and self.removed_ngrams <= self.kept_ngrams
                  and self.contained >= self.containment)
        return self.shared_bands > 0 and (not self.threshold or similarity >= self.threshold or inside)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "confirmed": self.confirmed}


def explain(removed: str, kept: str, config: Mapping[str, Any] | None = None, *, languages: tuple[str, str] = ("", ""),
            recorded: float | None = None, excerpts: int = 5, words: int = 40) -> Explanation:
    """Compare a removed text with a kept one as the recipe step `minhash` does with the settings `config`. `languages`
    holds the languages of the two texts, and `recorded` is the similarity that the run noted. The result quotes, from
    each text, at most `excerpts` stretches that no common word n-gram covers, with at most `words` words each.

    `shared_bands` may differ from what it was in the run, because the run computed signatures before it scrubbed
    personal data, and here they are computed from stored texts, which are scrubbed.
    """
    barrier = MinHash(dict(config or {}))
    c = barrier.config
    stage = MinHashSignature(barrier.prepare()[1])
    both_texts = list(zip((removed, kept), languages))
    hashes = [stage.shingles(*text)[0] for text in both_texts]
    a, b = (np.unique(shingles) for shingles in hashes)
    common = np.intersect1d(a, b, assume_unique=True)
    similarity = len(common) / union if (union := len(a) + len(b) - len(common)) else 0.0
    signatures = [stage.signature(*text) for text in both_texts]
    shared = 0
    if signatures[0] is not None and signatures[1] is not None:
        keys = [band_keys(signature, c.bands, c.rows) for signature in signatures]
        shared = int((keys[0] == keys[1]).sum())
    return Explanation(
        similarity=similarity, threshold=None if c.verify == "record" else c.verify or None, containment=c.containment,
        boilerplate=c.boilerplate, recorded_similarity=recorded, contained=len(common) / len(a) if len(a) else 0.0,
        removed_ngrams=len(a), kept_ngrams=len(b), common_ngrams=len(common), shared_bands=shared, bands=c.bands,
        detection=1 - (1 - similarity**c.rows) ** c.bands, equal_text=same_text(removed) == same_text(kept),
        only_removed=_uncovered_stretches(stage, *both_texts[0], hashes[0], common, excerpts, words),
        only_kept=_uncovered_stretches(stage, *both_texts[1], hashes[1], common, excerpts, words))


def _uncovered_stretches(stage: MinHashSignature, text: str, language: str, hashes: NDArray[np.uint64],
                         common: NDArray[np.uint64], excerpts: int, most_words: int) -> tuple[str, ...]:
    """Return at most `excerpts` stretches of a text's words that no common word n-gram covers. `hashes` holds the
    hashes of the text's n-grams in order, and `common` the hashes of n-grams that the other text also has. The longest
    stretches come first; equally long ones stay in the order of the text. Of a stretch, at most the first `most_words`
    words are returned."""
    simplified = simplify(text[:stage.config.max_chars])
    words, gap = stage.units(simplified, language)
    covered = np.zeros(len(words) + 1, np.int64)
    positions = np.flatnonzero(np.isin(hashes, common))
    np.add.at(covered, positions, 1)
    np.add.at(covered, positions + stage.config.ngram, -1)
    uncovered = np.r_[False, np.cumsum(covered[:-1]) == 0, False]
    edges = np.flatnonzero(uncovered[1:] != uncovered[:-1])
    stretches = sorted(zip(edges[::2].tolist(), edges[1::2].tolist()), key=lambda span: (span[0] - span[1], span[0]))
    return tuple(gap.join(words[start:min(stop, start + most_words)]) + (" …" if stop - start > most_words else "")
                 for start, stop in stretches[:excerpts])
