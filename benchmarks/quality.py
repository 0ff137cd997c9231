"""Check whether a classifier trained on weak labels agrees with people about which web documents are good.

    python benchmarks/quality.py DATA

DATA holds text/, quality/ and bench/.

Training, as for GPT-3's and DCLM's filters: carefully made texts count as good (WikiText-2, books, StackExchange), and
the extracted text of a crawl as the rest (bench/realweb.warc.gz). No test document is in these texts. Nothing was
chosen on the test: settings are the defaults of `tokenmill classifier train`. WikiText's spaces around punctuation are
removed first, because the classifier would recognise WikiText by them alone.

Test: all 246 web documents of DCLM's development set, which people voted to keep or to drop
(quality/dclm_human_dev.jsonl.gz). The classifier's score is the mean log-odds over `--seeds` trainings, which differ in
the division of the texts and in the initial values. It is compared with the length of a text, with single rule filters
(Gopher quality and repetition, C4, FineWeb: a document passes or fails), and with the number of filters that a document
passes. Some of these measures are also combined: the ranks of a document are added, or one measure decides and another
one breaks ties. All are compared by ROC-AUC; differences come from a paired bootstrap over the documents, 2,000
resamples.

Also printed: the classifier's own held-out figures, and MB/s of scoring on one core.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stages.document import Document
from stages.extract.html.step import Html
from stages.filter.c4 import C4
from stages.filter.fineweb import FineWeb
from stages.filter.gopher_quality import GopherQuality
from stages.filter.gopher_repetition import GopherRepetition
from stages.models.classifier import GOOD, REST, Classifier
from stages.models.examples import near_duplicates
from stages.models.measure import Ranking, bootstrap, interval
from stages.models.train_quality import train
from stages.read.reader import Slice
from stages.read.warc import Warc
from stages.scoring.models import FastText

#: characters of the passages into which books, articles and pages are cut
PASSAGE = 2_000
#: changes that WikiText's tokeniser made to a text, and patterns that undo them
_JOINED, _BEFORE, _AFTER = re.compile(r" @(\W)@ "), re.compile(r" ([.,;:!?)\]%]|'s\b|n't\b)"), re.compile(r"([(\[$]) ")
_QUOTED = re.compile(r'" (.*?) "')


def lines(path: Path) -> Iterator[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as f:
        yield from map(json.loads, f)


def passages(text: str) -> list[str]:
    """Cuts a text into pieces of about `PASSAGE` characters that end at a line end."""
    found, held = [], ""
    for line in text.split("\n"):
        held += line + "\n"
        if len(held) >= PASSAGE:
            found, held = [*found, held], ""
    return [piece for piece in (*found, held) if len(piece.strip()) >= 200]


def wikitext(data: Path) -> Iterator[str]:
    for name in ("valid", "test"):
        with gzip.open(data / "text" / "wikitext-2" / f"{name}.txt.gz", "rt", encoding="utf-8") as f:
            text = _QUOTED.sub(r'"\1"', _JOINED.sub(r"\1", f.read()))
            plain = _AFTER.sub(r"\1", _BEFORE.sub(r"\1", text)).replace("<unk>", "it").replace(" = \n", "\n")
            yield from passages(plain)


def books(data: Path) -> Iterator[str]:
    for path in sorted((data / "text" / "books").glob("*.md.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as f:
            yield from passages(f.read())


def stack_exchange(data: Path) -> Iterator[str]:
    for name in ("stack_exchange", "redpajama-pile-stackexchange-refined"):
        for row in lines(data / "text" / "data-juicer" / f"{name}.jsonl.gz"):
            yield from passages(row["text"])


def raw_web(data: Path) -> Iterator[str]:
    """The text of every page of the crawl, good or bad, as a filter would get it. A page gives at most two passages."""
    extract = Html(engine="resiliparse")
    extract.setup()
    for doc in Warc().read(str(data / "bench" / "realweb.warc.gz"), Slice("web", "realweb.warc.gz")):
        if isinstance(doc, Document) and extract.process(doc) is None:
            yield from passages(doc.text)[:2]                 # so that long pages do not outweigh the others


def rules(texts: list[str]) -> dict[str, np.ndarray]:
    """Returns {filter: whether each text passes it, bool[texts]}."""
    found = {}
    for stage in (GopherQuality(), GopherRepetition(), C4(), FineWeb()):
        stage.setup()
        found[stage.name] = np.array([stage.process(Document(str(i), text)) is None for i, text in enumerate(texts)])
    return found


def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value as float64[n]: 0.5 for the smallest value, 1.5 for the next. Equal values share their mean
    rank."""
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values) + np.searchsorted(ordered, values, side="right")) / 2


def classifier(labelled: list[tuple[str, str]], texts: list[str], seeds: int) -> tuple[np.ndarray, list[dict]]:
    """Train a classifier for each seed. Returns (mean score of each text over the trainings, the card of each training,
    which describes the model)."""
    total, cards = np.zeros(len(texts)), []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            out = Path(folder) / f"{seed}.bin"
            cards.append(train(labelled, out, seed=seed))
            model = Classifier(FastText(out), "binary", cards[-1]["labels"], GOOD)
            raw = model.raw(texts).values()
            total += np.log(raw + 1e-6) - np.log(1 - raw + 1e-6)
        if seeds:
            began = time.process_time()
            model.raw(texts * 5)
            size = 5 * sum(len(text.encode()) for text in texts)
            print(f"scoring: {size / 1e6 / (time.process_time() - began):.1f} MB per CPU-s")
    return total / seeds, cards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--resamples", type=int, default=2000)
    args = parser.parse_args()
    judged = list(lines(args.data / "quality" / "dclm_human_dev.jsonl.gz"))
    texts, good = [row["text"] for row in judged], np.array([row["label"] == 1 for row in judged])
    print(f"{len(texts)} documents, {good.sum()} of them good")

    weak = {"wikitext": list(wikitext(args.data)), "books": list(books(args.data)),
            "stack exchange": list(stack_exchange(args.data))}
    web = list(raw_web(args.data))
    print("trained on " + ", ".join(f"{len(part):,} of {name}" for name, part in weak.items())
          + f"; against {len(web):,} of raw web")
    roots = near_duplicates([*texts, *(t for part in weak.values() for t in part), *web])
    print(f"near-duplicates of a test document among them: {int((roots[len(texts):] < len(texts)).sum())}")

    scores: dict[str, np.ndarray] = {}
    sets = {"classifier, all three": [t for part in weak.values() for t in part]}
    sets |= {f"classifier, {name} alone": part for name, part in weak.items()}
    for name, part in sets.items():
        labelled = [(GOOD, text) for text in part] + [(REST, text) for text in web]
        scores[name], cards = classifier(labelled, texts, args.seeds)
        held = [q for card in cards for q in card["measured"]["questions"]]
        print(f"{name}: on its own held-out texts ROC-AUC {np.mean([q['roc_auc'] for q in held]):.3f}, calibration "
              f"error {np.mean([q['calibration_error'] for q in held]):.3f} (before "
              f"{np.mean([q.get('calibration_error_before', np.nan) for q in held]):.3f})")
    scores["length, characters"] = np.array([len(text) for text in texts], float)
    passed = rules(texts)
    scores |= {f"rules: {name}": found.astype(float) for name, found in passed.items()}
    scores["rules passed, 0 to 4"] = np.sum(list(passed.values()), axis=0).astype(float)
    first, length, count = (ranks(scores[name]) for name in (
        "classifier, all three", "length, characters", "rules passed, 0 to 4"))
    scores["rules passed, then length"] = count + length / 1e6
    scores["rules passed, then classifier"] = count + first / 1e6
    scores["classifier and length"] = first + length
    scores["classifier, rules and length"] = first + count + length

    ranked = {name: Ranking(values, good) for name, values in scores.items()}
    drawn = bootstrap({name: r.auc for name, r in ranked.items()}, len(texts), 1, args.resamples)
    first = next(iter(scores))
    print(f"\n| score | ROC-AUC | 95 % | {first} minus it, 95 % | average precision |\n|---|---|---|---|---|")
    for name, r in ranked.items():
        low, high = interval(drawn[name])
        a, b = interval(drawn[first] - drawn[name])
        less = "–" if name == first else f"{ranked[first].auc() - r.auc():+.3f} [{a:+.3f}, {b:+.3f}]"
        print(f"| {name} | {r.auc():.3f} | [{low:.3f}, {high:.3f}] | {less} | {r.average_precision():.3f} |")


if __name__ == "__main__":
    main()
