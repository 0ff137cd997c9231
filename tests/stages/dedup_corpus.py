"""Synthetic documents with planted near-duplicates, and the removals that brute force over all pairs expects."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable

from stages.dedup.minhash import MinHash
from stages.dedup.signature import MinHashSignature
from stages.text.normalize import simplify
from tests.stages.dedup_fragment import Doc

#: Han and kana characters one by one, everything else by spaces
_WORD = re.compile("[{0}]|[^ {0}]+".format("\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff66-\uff9f"))
_SYLLABLES = [a + b for a in "bcdfghklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "or")]


def vocabulary(rng: random.Random, n: int = 4000) -> list[str]:
    return ["".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 4))) for _ in range(n)]


def edited(rng: random.Random, words: list[str], share: float, names: list[str]) -> list[str]:
    """Return a copy of `words` in which about `share` of the words are replaced."""
    out = list(words)
    for _ in range(round(len(out) * share)):
        out[rng.randrange(len(out))] = rng.choice(names)
    return out


def corpus(seed: int, families: int = 60, datasets: tuple[str, ...] = ("web", "wiki", "books")) -> list[Doc]:
    """Return families of documents, from identical to barely similar, in several datasets and in random order."""
    rng = random.Random(seed)
    names = vocabulary(rng)
    docs = []
    for _ in range(families):
        base = [rng.choice(names) for _ in range(rng.randint(4, 250))]
        for _ in range(rng.choice([1, 1, 2, 3, 6])):
            words = edited(rng, base, rng.choice([0, 0.005, 0.02, 0.03, 0.05, 0.1]), names)
            if rng.random() < 0.3:
                words = words[:round(len(words) * rng.uniform(0.7, 1))]
            docs.append(Doc(" ".join(words), rng.choice(datasets), f"{rng.getrandbits(128):032x}"))
    rng.shuffle(docs)
    return docs


def grams(text: str, n: int) -> set[tuple[str, ...]]:
    words = _WORD.findall(simplify(text))
    return {tuple(words[i:i + n]) for i in range(len(words) - n + 1)}


def ngrams(barrier: MinHash, text: str) -> set:
    """Return the shingles of a text, as strings."""
    n = barrier.config.ngram
    if barrier.config.shingles == "characters":
        plain = simplify(text)
        return {plain[i:i + n] for i in range(len(plain) - n + 1)}
    return grams(text, n)


def expected(barrier: MinHash, docs: list[Doc], ranks: dict[str, int],
             place_of: Callable[[Doc], tuple] | None = None) -> tuple[dict, dict]:
    """Compute by comparing all pairs in plain Python: ({removed id: (reason, kept id, similarity, cluster)}, {id in a
    cluster: cluster})."""
    c = barrier.config
    stage = MinHashSignature(barrier.prepare()[1])
    bands: dict[str, list[tuple]] = {}
    for d in docs:
        signature = stage.signature(d.text)
        if signature is not None:
            values = signature.tolist()
            bands[d.name] = [(b, *values[b * c.rows:(b + 1) * c.rows]) for b in range(c.bands)]
    texts = {d.name: d for d in docs}
    shared: dict[str, dict[str, int]] = defaultdict(dict)
    for a in bands:
        for b in bands:
            if a != b and (n := len(set(bands[a]) & set(bands[b]))):
                shared[a][b] = n
    clusters: dict[str, str] = {}
    for start in sorted(shared):                              # ascending: the first member found is the smallest
        if start not in clusters:
            stack = [start]
            while stack:
                at = stack.pop()
                if at not in clusters:
                    clusters[at] = start
                    stack.extend(shared[at])
    place_of = place_of or (lambda d: (ranks.get(d.dataset, 0), -len(d.text), d.id))
    order = sorted(clusters, key=lambda i: place_of(texts[i]))
    removed: dict[str, tuple] = {}
    place = {i: n for n, i in enumerate(order)}
    for i in order:
        kept = [j for j in order[:place[i]] if j not in removed and clusters[j] == clusters[i]]
        if not c.verify or c.verify == "record":
            if kept:
                a, b = ngrams(barrier, texts[i].text), ngrams(barrier, texts[kept[0]].text)
                removed[i] = ("minhash", kept[0], len(a & b) / len(a | b) if c.verify else None, clusters[i])
            continue
        for j in sorted((j for j in kept if j in shared[i]), key=lambda j: (-shared[i][j], place[j])):
            a, b = ngrams(barrier, texts[i].text), ngrams(barrier, texts[j].text)
            similarity = len(a & b) / len(a | b)
            inside = c.containment is not None and len(a) <= len(b) and len(a & b) / len(a) >= c.containment
            if similarity >= c.verify or inside:
                removed[i] = ("minhash" if similarity >= c.verify else "minhash_contained", j, similarity, clusters[i])
                break
    return removed, clusters
