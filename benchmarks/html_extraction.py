"""Measure quality and CPU time of every engine on the main text of HTML pages, per page type.

    python -m benchmarks.train_mill --warc W --gold DIR --news DIR --folds FOLDS.npz       (once)
    python -m benchmarks.html_extraction --warc W --gold DIR --news DIR --folds FOLDS.npz [--every 1] [--json OUT]

`mill` extracts each page with the model of the fold that never saw its site. Each page type is shown as a whole and by
size: the smaller and the larger half of its pages by bytes. The columns are means over pages:

    F1, prec, recall  word F1, precision and recall: bags of lower-case words (as WCXB scores)
    head              F1 against the gold text with the page's headline put before it, because most gold leaves it out
    with              of the snippets that must occur in the text, the share that does
    w/o               of the snippets that must not occur in the text, the share that does

White space is normalised before snippets are compared. CPU time is user + system of this process for text → main text.
Engines take turns page by page, so that other load slows all of them alike. Engines are compared by the difference in
word F1 of each page, with a bootstrap over sites (10,000 draws, seeded).
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.mill_gold import FOLDS, WORD, Gold, folds_of, read, word_scores
from stages.extract.html.mill.engine import SIGNAL, Mill, MillWeights

DRAWS = 10_000


def peers() -> dict[str, Callable[[str], str | None]]:
    """The engines of the `html` stage other than `mill`: trafilatura in two modes, the others with their defaults."""
    from stages.extract.html.step import Html

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    modes = {f"trafilatura {favor}": {"engine": "trafilatura", "favor": favor} for favor in ("precision", "balanced")}
    kinds = Html.Config.model_fields["engine"].annotation.__args__
    modes |= {name: {"engine": name} for name in kinds if name not in ("trafilatura", "mill")}
    out: dict[str, Callable[[str], str | None]] = {}
    for name, config in modes.items():
        stage = Html(**config)
        stage.setup()
        out[name] = stage._engine.text
    return out


def squeeze(text: str) -> str:
    return " ".join(text.split()).lower()


def snippets(g: Gold, text: str) -> tuple[float, float]:
    """Return two shares: of the snippets that must occur in the text, those that do; and of the snippets that must not
    occur, those that do. A share is NaN if the page has no such snippets."""
    body = squeeze(text)
    rates = []
    for key in ("with", "without"):
        wanted = [squeeze(s) for s in g.truth.get(key) or () if s.strip()]
        rates.append(float(np.mean([s in body for s in wanted])) if wanted else float("nan"))
    return rates[0], rates[1]


def headlined(g: Gold) -> str:
    """The gold text with the page's headline put first."""
    title = WORD.findall((g.truth.get("title") or "").lower())
    return g.text if WORD.findall(g.text.lower())[:len(title)] == title else f"{g.truth['title']}\n{g.text}"


def bootstrap(difference: np.ndarray, sites: list[str]) -> tuple[float, float, float]:
    """Return the mean of the pages' differences, and the 2.5 % and 97.5 % quantiles of this mean over bootstrap
    samples. Sites are drawn with replacement, not pages, because pages of one site are similar."""
    names = {s: n for n, s in enumerate(dict.fromkeys(sites))}
    of = np.array([names[s] for s in sites])
    total, count = np.bincount(of, weights=difference), np.bincount(of)
    rng = np.random.default_rng(1)
    drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=DRAWS)
    means = drawn @ total / np.maximum(drawn @ count, 1)
    return float(difference.mean()), float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warc", type=Path, required=True)
    parser.add_argument("--gold", type=Path, required=True)
    parser.add_argument("--news", type=Path, help="the folder of Fundus' test pages")
    parser.add_argument("--folds", type=Path, required=True, help="models of five folds (train_mill.py --folds)")
    parser.add_argument("--every", type=int, default=1, help="take every n-th page")
    parser.add_argument("--json", type=Path, help="write the scores of all pages here")
    args = parser.parse_args()
    pages = read(args.warc, args.gold, args.news)
    fold = folds_of([g.site for g in pages], FOLDS, "outer")
    pages = pages[::args.every]
    arrays = dict(np.load(args.folds, allow_pickle=False))
    mills = [Mill(model=MillWeights({key.removeprefix(f"fold{k}_"): value for key, value in arrays.items()
                                     if key.startswith(f"fold{k}_")})) for k in range(FOLDS)]
    engines = {"mill": lambda page: None, **peers()}
    rows: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    expected: list[float] = []
    for mill in mills:
        mill.text(pages[0].page)                                           # compiles the kernels
    for g in pages:
        engines["mill"] = mills[fold[g.site]].text
        for name, extract in engines.items():
            began = time.process_time()
            text = extract(g.page) or ""
            took = (time.process_time() - began) * 1e3
            if name == "mill":
                expected.append(mills[fold[g.site]].signals.get(SIGNAL, 0.0))
            rows[name].append((*word_scores(text, g.text), word_scores(text, headlined(g))[0], *snippets(g, text),
                               took))
    table = {name: np.array(values) for name, values in rows.items()}
    kinds = np.array([g.kind for g in pages])
    sites = [g.site for g in pages]
    sizes = np.array([len(g.page.encode("utf-8", "replace")) for g in pages])
    megabytes = sizes.sum() / 1e6
    print(f"{len(pages)} pages, {len(set(sites))} sites, {megabytes:.0f} MB of HTML")
    head = f"{'F1':>7} {'prec':>6} {'recall':>6} {'head':>6} {'with':>6} {'w/o':>6} {'median':>7} {'p99 ms':>7}"
    for kind in ("wcxb", *sorted(set(kinds))):
        of_kind = kinds == kind if kind != "wcxb" else kinds != "news"
        large = sizes > np.median(sizes[of_kind])
        for label, rows_of in ((kind, of_kind), (f"{kind}, small", of_kind & ~large),
                               (f"{kind}, large", of_kind & large)):
            print(f"\n{label + f' ({rows_of.sum()})':28} {head}")
            for name, values in table.items():
                v = values[rows_of]
                means = [np.nanmean(v[:, c]) if not np.isnan(v[:, c]).all() else np.nan for c in range(6)]
                print(f"{name:28} {means[0]:7.4f} " + " ".join(f"{x:6.3f}" for x in means[1:])
                      + f" {np.median(v[:, 6]):7.2f} {np.quantile(v[:, 6], 0.99):7.1f}")
    cpu = {name: values[:, 6].sum() for name, values in table.items()}
    print("\nCPU: " + "; ".join(f"{name} {megabytes / ms * 1e3:.1f} MB/s ({ms / cpu['mill']:.1f} × mill's time)"
                                for name, ms in cpu.items()))
    for rival in (name for name in table if name != "mill"):
        difference = table["mill"][:, 0] - table[rival][:, 0]
        parts = []
        for kind in ("wcxb", *sorted(set(kinds))):
            of = [n for n in range(len(pages)) if kind == kinds[n] or (kind == "wcxb" and kinds[n] != "news")]
            mean, low, high = bootstrap(difference[of], [sites[n] for n in of])
            parts.append(f"{kind} {mean:+.4f} [{low:+.4f}, {high:+.4f}]")
        print(f"\nmill − {rival}, word F1, 95 % interval: " + "; ".join(parts))
    if args.json:
        args.json.write_text(json.dumps({"url": [g.url for g in pages], "kind": kinds.tolist(),
                                         "site": sites, "bytes": sizes.tolist(), "expected": expected,
                                         **{n: v.tolist() for n, v in table.items()}}))


if __name__ == "__main__":
    main()
