"""Measure the step `decontaminate` with 13 evaluation sets, for each of its dialects, beside datatrove's filter.

    python benchmarks/decontaminate.py speed DATA       megabytes of text per CPU second
    python benchmarks/decontaminate.py recall DATA      which share of planted questions is found, by benchmark
    python benchmarks/decontaminate.py hits DATA        what is found in texts in which nothing was planted
    python benchmarks/decontaminate.py index DATA       CPU time, memory and size of an index of many items

DATA is the folder of real data that tests use: the sets are in DATA/evals, the texts in DATA/text. datatrove's filter
is `NGramsDecontFilter` with the 13-grams of the same questions.

`speed` measures one pass over books and WikiText-2, and then five passes. The rate comes from the difference, so that
loading, compiling and building the index do not count. datatrove's filter searches the first 200 texts.

`recall` draws 200 questions for each of three seeds, about equally many of each benchmark. Each question is planted
into a book twice: as a paragraph of its own, and inside a sentence. Each time it has three forms: verbatim, with other
case and spaces, and with one number changed. Questions without a number have no third form. datatrove's filter gets the
questions of the first seed, verbatim, as paragraphs.

`index` builds the index of a set of 1,000,000 random questions of 25 words (--items N) in a process of its own.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.stages.test_decontaminate import EVALS as FIELDS  # noqa: E402

#: seeds of `recall`; no threshold or rule of the step was chosen by what they draw
SEEDS = (2811, 2812, 2813)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "recall", "hits", "index"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--items", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TOKENMILL_CACHE"] = cache
        if options.what == "index":
            index(options.items, Path(cache))
        else:
            {"speed": speed, "recall": recall, "hits": hits}[options.what](options.data, Path(cache))


def stage_of(data: Path, **settings: Any) -> Any:
    """Return the step, ready to search for the 13 sets."""
    from stages.decontaminate.step import Decontaminate

    stage = Decontaminate(sets={name: str(data / "evals" / f"{name}_500.jsonl.gz") for name in FIELDS}, fields=FIELDS,
                          **settings)
    stage.setup()
    return stage


def peer_of(questions: Iterable[str], folder: Path) -> Callable[[str], bool]:
    """Return a function that says whether datatrove's filter finds a 13-gram of the questions in a text. The index is
    written to `folder` in the format of datatrove's `NGramsDecontIndexer`, which itself is not used because it needs
    lighteval."""
    import numpy as np
    from datatrove.data import Document as PeerDocument
    from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
    from datatrove.utils.text import ngrams, simplify_text

    peer = NGramsDecontFilter(str(folder), NGramsDecontConfig(n_grams=13, find_query_ngrams=True))
    digest = peer.hash_func
    peer.hash_func = lambda gram: digest(gram.encode())              # type: ignore  # xxhash 4 takes no str
    grams = {peer.hash_func(" ".join(gram)) for question in questions for gram in ngrams(
        peer.tokenizer.word_tokenize(simplify_text(question, peer.config.norm_config)), 13)}
    np.array(sorted(grams), peer.config.hash_config.np_descr).tofile(folder / "sets.index.hashes")
    return lambda text: peer.filter(PeerDocument(text=text, id="")) is not True


def questions_of(data: Path) -> dict[str, list[Any]]:
    from stages.decontaminate.sets import read_set

    return {name: [text for row in read_set(data / "evals" / f"{name}_500.jsonl.gz", {"question": f["question"]})
                   for text in row]
            for name, f in FIELDS.items()}


def plain_texts(data: Path, *folders: str) -> list[str]:
    return [gzip.decompress(path.read_bytes()).decode() for folder in folders
            for path in sorted((data / "text" / folder).glob("*.gz"))]


def speed(data: Path, cache: Path) -> None:
    from stages.document import Document

    texts = [text[at:at + 5000] for text in plain_texts(data, "books", "wikitext-2")
             for at in range(0, len(text), 5000)]
    size = sum(len(text.encode()) for text in texts)
    print(f"{len(texts):,} documents of 5,000 characters, {size / 1e6:.1f} MB, {len(FIELDS)} sets")
    for dialect in ("ngram", "idf"):
        began, before = time.process_time(), set(cache.rglob("*.npy"))
        stage = stage_of(data, dialect=dialect)
        stage.process(Document("", texts[0]))
        built, taken = time.process_time() - began, []
        for times in (1, 5):
            began = time.process_time()
            marked = [doc for _ in range(times) for text in texts if (doc := Document("", text)) and stage.process(doc)]
            taken.append(time.process_time() - began)
        (index,) = set(cache.rglob("*.npy")) - before
        rate = 4 * size / (taken[1] - taken[0]) / 1e6
        print(f"{dialect:6} {rate:6.1f} MB a CPU second, {len(marked) // 5} documents with hits; start {built:.1f} s, "
              f"index {index.stat().st_size / 1e6:.1f} MB")
    peer = peer_of((item.text for texts in questions_of(data).values() for item in texts), cache)
    peer(texts[0])
    began = time.process_time()
    for text in texts[:200]:
        peer(text)
    rate = sum(len(text.encode()) for text in texts[:200]) / (time.process_time() - began) / 1e6
    print(f"datatrove, 13-grams {rate:6.2f} MB a CPU second")


def index(items: int, cache: Path) -> None:
    from stages.decontaminate.index import index_file

    draw, path = random.Random(1), cache / "items.jsonl"
    names = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
    with open(path, "w") as file:
        for _ in range(items):
            file.write(json.dumps({"question": " ".join(draw.choices(names, k=25))}) + "\n")
    for dialect in ("ngram", "idf"):
        sys.stdout.flush()
        if child := os.fork():
            _, status, used = os.wait4(child, 0)
            assert status == 0
            (built,) = cache.glob(f"{dialect}/decontaminate/*.npy")
            print(f"{dialect:6} {items:,} items: {used.ru_utime + used.ru_stime:.0f} s of CPU time, peak "
                  f"{used.ru_maxrss / 1e3:,.0f} MB, index {built.stat().st_size / 1e6:,.0f} MB", flush=True)
            continue
        os.environ["TOKENMILL_CACHE"] = str(cache / dialect)
        index_file({"items": str(path)}, {"items": {"question": "question"}}, dialect, None)
        os._exit(0)


def recall(data: Path, cache: Path) -> None:
    from stages.document import Document

    books, questions = plain_texts(data, "books"), questions_of(data)
    same: dict[tuple[str, str], set[tuple[str, int]]] = defaultdict(set)
    for name, texts in questions.items():
        for item in texts:
            same[name, item.text].add((name, item.row))
    for dialect in ("ngram", "idf"):
        stage = stage_of(data, dialect=dialect)
        detected: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        dropped: Counter[str] = Counter()
        for seed in SEEDS:
            draw = random.Random(seed)
            for number, name in enumerate(FIELDS):
                for item in draw.sample(questions[name], 16 if number < 5 else 15):
                    for where, kind, text in planted(item.text, draw.choice(books), draw):
                        doc = Document("", text)
                        reason = stage.process(doc)
                        rows = {(hit["set"], hit["row"]) for hit in doc.meta.get("contamination", ())}
                        detected[where, kind, name].append(bool(rows & same[name, item.text]))
                        dropped[name] += (where, kind) == ("paragraph", "verbatim") and reason is not None
        show(dialect, detected)
        print(f"dropped, of those that were planted verbatim as paragraphs: {dict(dropped)}")
    peer, draw = peer_of((item.text for texts in questions.values() for item in texts), cache), random.Random(SEEDS[0])
    sample = [item.text for number, name in enumerate(FIELDS)
              for item in draw.sample(questions[name], 16 if number < 5 else 15)]
    hits = [peer(f"{book[:2000]}\n\n{question}\n\n{book[2000:4000]}")
            for question in sample for book in (draw.choice(books),)]
    print(f"\ndatatrove's 13-grams: {sum(hits)} of {len(hits)} verbatim as paragraphs (seed {SEEDS[0]})")


def planted(question: str, book: str, draw: random.Random) -> list[tuple[str, str, str]]:
    """Plant a question into about 20,000 characters of a book, once for each place and each form. Returns [(place,
    form, text), …]."""
    kinds = {"verbatim": question, "case, spaces": re.sub(
        r"\s+", lambda _: draw.choice(["  ", "\n", "\t", "\u00a0"]),
        "".join(c.upper() if draw.random() < 0.5 else c.lower() for c in question))}
    if numbers := list(NUMBER.finditer(question)):
        number = draw.choice(numbers)
        kinds["number"] = question[:number.start()] + str(draw.randint(0, 99999)) + question[number.end():]
    line = draw.choice([m.start() for m in re.finditer("\n", book)])
    gap = draw.choice([m.start() for m in re.finditer(r"(?<=[a-z]) (?=[a-z])", book)])
    return [(where, kind, f"{book[max(at - 10000, 0):at]}{mark}{text}{mark}{book[at:at + 10000]}")
            for where, at, mark in (("paragraph", line, "\n\n"), ("sentence", gap, " "))
            for kind, text in kinds.items()]


def show(title: str, detected: dict[tuple[str, str, str], list[int]]) -> None:
    columns = [(where, kind) for where in ("paragraph", "sentence") for kind in ("verbatim", "case, spaces", "number")]
    print(f"\n{title}\n| benchmark | {' | '.join(f'{where}, {kind}' for where, kind in columns)} |")
    for name in [*FIELDS, ""]:
        cells = []
        for where, kind in columns:
            each = [hit for (w, k, n), hits in detected.items() if (w, k) == (where, kind) and name in ("", n)
                    for hit in hits]
            cells.append(f"{sum(each)}/{len(each)}" if each else "–")
        print(f"| {name or 'all'} | {' | '.join(cells)} |")


def hits(data: Path, _: Path) -> None:
    """Print what is found in the texts of DATA/text: books, WikiText-2, Wikipedia's wiki text, web pages and papers."""
    from stages.document import Document

    texts = {folder: plain_texts(data, folder) for folder in ("books", "wikitext-2")}
    for folder in ("data-juicer", "dolma-cc"):
        texts[folder] = [json.loads(line)["text"] for file in plain_texts(data, folder) for line in file.splitlines()]
    wiki = bz2.decompress((data / "text" / "enwiki-slice.xml.bz2").read_bytes()).decode()
    texts["enwiki-slice"] = re.findall(r"<text[^>]*>(.*?)</text>", wiki, re.S)
    for folder, each in texts.items():
        print(f"{folder}: {len(each):,} texts, {sum(len(text.encode()) for text in each) / 1e6:.2f} MB")
    for dialect in ("ngram", "idf"):
        stage = stage_of(data, dialect=dialect)
        for folder, each in texts.items():
            count: Counter[tuple[str, int, str, int, str]] = Counter()
            for text in each:
                stage.process(doc := Document("", text))
                for hit in doc.meta.get("contamination", ()):
                    place = text.encode()[hit["start"]:min(hit["end"], hit["start"] + 150)].decode(errors="replace")
                    count[hit["set"], hit["row"], hit["part"], hit["words"], place] += 1
            for hit, times in count.items():
                print(f"{dialect}, {folder}: {hit} × {times}")


if __name__ == "__main__":
    main()
