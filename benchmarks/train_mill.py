"""Train `mill` (stages/extract/html/mill) on pages with gold text, and score each page by a model that never saw its
site.

    pip install "lightgbm==4.7.0"          # for training only: extraction needs only numpy and numba
    python -m benchmarks.train_mill --warc crawl.warc.gz --gold DIR --news DIR --out WEIGHTS.npz --folds FOLDS.npz

The gold is that of benchmarks/html_engines.py (WCXB, CC-BY-4.0) and the news pages of Fundus' tests (MIT): see
stages/extract/html/mill/ATTRIBUTION.md. `--folds` receives the model of each of five folds over registered domains, for
benchmarks/html_extraction.py; `--out` receives the model of all pages.

The model estimates for each block of a page the chance that it belongs to the main text.

- Labels: the words of the gold text (the main text, selected by people) are aligned with the words of the page, in
  order, and matches in a row count more. The label of a block is the share of its words that are aligned.
- Weights: a block counts by its share of the page's words, so that long and short pages count alike.
- Class words: words in class, id and similar attributes. A word that occurs on at least five sites gets a log-odds
  weight, to which each site contributes equally. The weights that describe a page in training are computed without its
  site.
- Two passes: the second one gets the chances that the first one gave. It is trained on those of first passes that were
  trained on other sites.
- Shifts: the choice of blocks (`stages.extract.html.mill.choice`) allows for errors of a page's chances, by shifting
  them. The distributions of shifts in GRID are tried. Two second passes are each trained on half of the sites, and the
  distribution that chooses best on the other halves is taken. News pages count as much as all other pages together.

So nothing in a fold's model depends on the sites on which it is tested, not even the shifts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np

from benchmarks.mill_gold import FOLDS, INNER, Gold, features_digest, folds_of, label, read, word_scores
from stages.extract.html.mill import choice, forest
from stages.extract.html.mill import features as f
from stages.extract.html.mill.engine import MillWeights, render
from stages.extract.html.mill.page import table, walk
from stages.extract.html.mill.second_pass import SECOND, second_features, structures

#: fewest sites on which a class word must occur
SITES = 5
PARAMETERS: dict[str, Any] = {
    "objective": "cross_entropy", "learning_rate": 0.1, "num_leaves": 20, "min_data_in_leaf": 100, "max_bin": 63,
    "feature_fraction": 0.3, "bagging_fraction": 0.5, "bagging_freq": 1, "lambda_l2": 5.0, "min_sum_hessian_in_leaf": 1,
    "seed": 1, "deterministic": True, "force_row_wise": True, "verbose": -1, "num_threads": 1}
TREES = {"first": 100, "second": 90}
#: weight of a news page relative to others, since news pages are twenty times fewer
NEWS = 3.0
#: shifts of a page's log-odds: seven equally likely values of a normal distribution
NORMAL = np.array([-1.465, -0.792, -0.366, 0.0, 0.366, 0.792, 1.465])
#: the pairs (mean, deviation) of shifts that are tried
GRID = [(mean, deviation) for deviation in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5) for mean in (-1.0, -0.75, -0.5, -0.25, 0.0)]


class Tokens:
    """The class words of some pages (words in class, id and similar attributes), and the weight of each. `weights` and
    `table` can leave the pages of one site out of the computation."""

    def __init__(self, pages: list[Gold]) -> None:
        sites: dict[str, dict[int, list[float]]] = {}
        for g in pages:
            mine = sites.setdefault(g.site, {})
            for w, yes, all_ in zip(g.words.tolist(), g.votes.tolist(), g.voters.tolist()):
                if all_ > 0:
                    mine.setdefault(w, []).append(yes / all_)
        counts = Counter(w for mine in sites.values() for w in mine)
        self.words = np.array(sorted(w for w, n in counts.items() if n >= SITES and w), np.uint32)
        at = {w: n for n, w in enumerate(self.words.tolist())}
        self.yes, self.n = np.zeros(len(at)), np.zeros(len(at))
        self.of: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for site, mine in sites.items():
            known = [(at[w], sum(v) / len(v)) for w, v in mine.items() if w in at]
            index, share = np.array([k for k, _ in known], int), np.array([v for _, v in known])
            self.of[site] = index, share
            self.yes[index] += share
            self.n[index] += 1
        keys, slots = table(self.words, np.arange(1, len(self.words) + 1, dtype=np.int32))
        self.keys, self.slots = keys, slots

    def weights(self, without: str | None = None) -> np.ndarray:
        yes, n = self.yes.copy(), self.n.copy()
        if without in self.of:
            index, share = self.of[without]
            yes[index] -= share
            n[index] -= 1
        odds = np.log((yes + 1.0) / (n - yes + 1.0))
        return np.where(n >= SITES - 1, np.round(64 * odds), 0).astype(np.int32)

    def table(self, without: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        return self.keys, np.concatenate([[0], self.weights(without)]).astype(np.int32)[self.slots]


def describe(g: Gold, tokens: tuple[np.ndarray, np.ndarray]) -> tuple[Any, np.ndarray]:
    arrays = walk(g.markup, tokens)
    assert arrays is not None
    out = np.empty((len(arrays.blocks), f.FEATURES), np.int32)
    f.describe(arrays.elements, len(arrays.elements), arrays.blocks, len(arrays.blocks), arrays.text, out)
    return arrays, out


def weight(g: Gold) -> np.ndarray:
    words = 1000 * np.minimum(g.sizes / (g.gold_words + 0.25 * g.sizes.sum()), 0.3) + 0.02
    return words * (NEWS if g.kind == "news" else 1.0)


def fit(rows: np.ndarray, labels: np.ndarray, weights: np.ndarray, trees: int) -> dict[str, np.ndarray]:
    """Fit trees, and return them as arrays of integers, as `stages.extract.html.mill.forest.scores` reads them."""
    # blocks of low weight are sampled at random, and those taken weigh more to make up: a third of the work, nearly the
    # same trees
    floor = np.quantile(weights, 0.8)
    taken = np.random.default_rng(len(rows)).random(len(rows)) * floor < weights
    data = lightgbm.Dataset(rows[taken], labels[taken], weight=np.maximum(weights[taken], floor), params=PARAMETERS)
    booster = lightgbm.train(PARAMETERS, data, trees)
    out: dict[str, list[int]] = {"roots": [], "feature": [], "threshold": [], "left": [], "right": [], "leaf": []}

    def grow(node: dict[str, Any]) -> int:
        if "split_feature" not in node:
            out["leaf"].append(round(node["leaf_value"] * 1024))
            return -len(out["leaf"])
        at = len(out["feature"])
        out["feature"].append(node["split_feature"])
        out["threshold"].append(min(math.floor(node["threshold"]), 2**31 - 1))
        out["left"].append(0)
        out["right"].append(0)
        out["left"][at] = grow(node["left_child"])
        out["right"][at] = grow(node["right_child"])
        return at

    for tree in booster.dump_model()["tree_info"]:
        out["roots"].append(grow(tree["tree_structure"]))
    return {name: np.array(values, np.int32) for name, values in out.items()}


def odds() -> np.ndarray:
    x = (np.arange(2 * forest.REACH // forest.STEP + 1) * forest.STEP - forest.REACH) / 1024
    return np.round(1000 / (1 + np.exp(-x))).astype(np.int32)


def look(trees: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    out = np.empty(len(rows), np.int32)
    forest.scores(rows, *(trees[n] for n in ("roots", "feature", "threshold", "left", "right", "leaf")), odds(), out)
    return out


def again(arrays: Any, first: np.ndarray) -> np.ndarray:
    out = np.empty((len(first), len(SECOND)), np.int32)
    second_features(arrays.elements, len(arrays.elements), arrays.blocks, len(arrays.blocks),
                    structures(arrays.elements, arrays.blocks), first, out)
    return out


def shifts(mean: float, deviation: float) -> np.ndarray:
    """Return the table of shifted chances for `choice.choose`, int16 [shifts, 1001]. Row i has shift number i applied
    to each chance from 0 to 1000 (in 1/1000). A shift adds a number to the log-odds; the numbers of all shifts are
    normally distributed with this mean and deviation."""
    chances = np.arange(1001)
    log_odds = np.log((chances + 0.5) / (1000.5 - chances))
    moved = log_odds[None] + mean + deviation * (NORMAL if deviation else NORMAL[:1])[:, None]
    return np.round(1000 / (1 + np.exp(-moved))).astype(np.int16)


def settle(pages: list[Gold], chances: list[np.ndarray]) -> tuple[float, float]:
    """Return the pair (mean, deviation) of GRID with which `choice.choose` chooses the best blocks, given the model's
    `chances` for each page. A choice is scored by the labels of the blocks."""
    news = np.array([g.kind == "news" for g in pages])
    blocks = [walk(g.markup) for g in pages]
    best = (-1.0, GRID[0])
    for setting in GRID:
        moved = shifts(*setting).astype(np.int64)
        scores = []
        for g, arrays, chance in zip(pages, blocks, chances):
            assert arrays is not None
            chosen, _ = choice.choose(arrays.blocks, chance, moved)
            scores.append(2 * (g.sizes * g.labels)[chosen].sum() / (g.sizes[chosen].sum() + g.gold_words))
        parts = [np.mean(np.array(scores)[of]) for of in (news, ~news) if of.any()]
        best = max(best, (float(np.mean(parts)), setting))
    return best[1]


def train(pages: list[Gold], inner: dict[str, int]) -> dict[str, np.ndarray]:
    """Train the model on some pages, and return its arrays. `inner` divides the sites into folds, so that the second
    pass is trained on predictions of first passes that have not seen the page's site."""
    tokens = Tokens(pages)
    described = [describe(g, tokens.table(without=g.site)) for g in pages]
    rows = np.concatenate([r for _, r in described])
    labels, weights = np.concatenate([g.labels for g in pages]), np.concatenate([weight(g) for g in pages])
    fold = np.concatenate([np.full(len(g.labels), inner[g.site]) for g in pages])
    said = np.zeros(len(rows), np.int32)
    for k in range(INNER):
        part = fit(rows[fold != k], labels[fold != k], weights[fold != k], TREES["first"])
        said[fold == k] = look(part, rows[fold == k])
    first = fit(rows, labels, weights, TREES["first"])
    ends = np.cumsum([len(g.labels) for g in pages])
    more = np.concatenate([again(a, said[e - len(g.labels):e]) for (a, _), g, e in zip(described, pages, ends)])
    both = np.concatenate([rows, more], 1)
    second = fit(both, labels, weights, TREES["second"])
    halves = folds_of([g.site for g in pages], 2, "mid")
    half = np.concatenate([np.full(len(g.labels), halves[g.site]) for g in pages])
    unseen = np.zeros(len(rows), np.int32)
    for k in range(2):
        unseen[half == k] = look(fit(both[half != k], labels[half != k], weights[half != k], TREES["second"]),
                                 both[half == k])
    setting = settle(pages, [unseen[e - len(g.labels):e] for g, e in zip(pages, ends)])
    print(f"shifts: mean {setting[0]}, deviation {setting[1]}", flush=True)
    known = tokens.weights()
    keep = known != 0
    return {"token": tokens.words[keep], "token_weight": known[keep].astype(np.int16), "odds": odds().astype(np.int16),
            "shifts": shifts(*setting), "features": np.frombuffer(features_digest(), np.uint8),
            **{f"{name}_{key}": values.astype(np.int16) if key == "feature" else values
               for name, trees in (("first", first), ("second", second)) for key, values in trees.items()}}


def evaluate(arrays: dict[str, np.ndarray], pages: list[Gold]) -> list[float]:
    model = MillWeights(arrays)
    out = []
    for g in pages:
        page = walk(g.markup, model.tokens)
        assert page is not None
        chosen, _ = choice.choose(page.blocks, model.chances(page), model.shifts)
        out.append(word_scores(render(page, chosen), g.text)[0])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warc", type=Path, required=True)
    parser.add_argument("--gold", type=Path, required=True)
    parser.add_argument("--news", type=Path, help="the folder of Fundus' test pages")
    parser.add_argument("--out", type=Path, help="the model of all pages")
    parser.add_argument("--folds", type=Path, help="the models of five folds, named fold0 … fold4 in one npz")
    parser.add_argument("--only", type=int, nargs="*", default=list(range(FOLDS)), help="train these folds")
    args = parser.parse_args()
    began = time.monotonic()
    pages = [g for g in read(args.warc, args.gold, args.news) if label(g)]
    upper = []
    for g in pages:
        page = walk(g.markup)
        upper.append(word_scores(render(page, g.labels >= 0.5), g.text)[0])
    print(f"{len(pages)} pages of {len({g.site for g in pages})} sites, {sum(len(g.labels) for g in pages)} blocks; "
          f"word F1 of the labels themselves {np.mean(upper):.4f}; {time.monotonic() - began:.0f} s", flush=True)
    outer, inner = folds_of([g.site for g in pages], FOLDS, "outer"), folds_of([g.site for g in pages], INNER, "inner")
    models: dict[str, np.ndarray] = {}
    scores: dict[str, list[float]] = {}
    for k in args.only:
        seen = [g for g in pages if outer[g.site] != k]
        model = train(seen, inner)
        models |= {f"fold{k}_{name}": values for name, values in model.items()}
        unseen = [g for g in pages if outer[g.site] == k]
        tested = evaluate(model, unseen)
        for g, score in zip(unseen, tested):
            scores.setdefault(g.kind, []).append(score)
        print(f"fold {k}: word F1 {np.mean(tested):.4f} of unseen sites, {np.mean(evaluate(model, seen)):.4f} of seen; "
              f"{time.monotonic() - began:.0f} s", flush=True)
        if args.folds:
            np.savez_compressed(args.folds, **models)
    for kind, values in sorted(scores.items()):
        print(f"{kind:15} {len(values):5} {np.mean(values):.4f}")
    if scores:
        print(f"{'all':15} {sum(map(len, scores.values())):5} {np.mean([v for s in scores.values() for v in s]):.4f}")
    if args.out:
        np.savez_compressed(args.out, **train(pages, inner))


if __name__ == "__main__":
    main()
