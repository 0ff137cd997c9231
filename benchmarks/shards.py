"""What does it cost to turn documents into shards, here and with datatrove's tokenizer and merger?

    python benchmarks/shards.py --tokenizer tokenizer.json TEXTS... [--sizes 20 60] [--repeat 3] [--work DIR]

TEXTS are text files of a kind that the tokenizer was not trained on. Documents of about 4 kB are made from their
paragraphs, with one word of ten replaced by a word that never occurred. For each of --sizes, there are documents of so
many MB in all. Both sides read the same Parquet files, which a run of Tokenmill has published, and end with shards:

* here: `tokenmill run` of a recipe whose dataset is finished, so that it only encodes and assembles, with one worker;
* datatrove: ParquetReader, DocumentTokenizer and DocumentTokenizerMerger without shuffling, with one worker.

The cost is the CPU time (user and system, of all processes) of the larger size minus that of the smaller one, per MB of
text. So start-up, which both sizes have, does not count. The tokens of both sides are compared. All figures are
medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tokenizer.load import load_tokenizer  # noqa: E402
from tokenizer.shards.reader import ShardSet  # noqa: E402

_WORD = re.compile(r"\b[A-Za-z]{3,}\b")
DOCUMENT = 4000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXTS")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json with an end-of-text token")
    parser.add_argument("--sizes", nargs=2, type=int, default=[20, 60], metavar="MB")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--work", type=Path, help="scratch folder (default: a temporary one)")
    parser.add_argument("--datatrove", nargs=3, metavar=("FOLDER", "OUT", "TOKENIZER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.datatrove:
        return datatrove(*options.datatrove)
    if not options.texts or options.tokenizer is None:
        parser.error("give --tokenizer FILE and text files")
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1",
                   "PYTHONPATH": str(ROOT)}
    work = options.work or Path(tempfile.mkdtemp(prefix="shards-"))
    cpu: dict[str, list[float]] = {}
    for size in options.sizes:
        site = Site(work / str(size), options.texts, options.tokenizer.resolve(), size)
        for side, run in (("here", site.ours), ("datatrove", site.theirs)):
            seconds = [run() for _ in range(options.repeat)]
            cpu.setdefault(side, []).append(statistics.median(seconds))
            print(f"{side:10} {size:4} MB  {cpu[side][-1]:7.2f} s of CPU", flush=True)
        print(f"tokens of both sides: {site.compare():,}, equal")
    more = options.sizes[1] - options.sizes[0]
    slope = {side: (large - small) / more for side, (small, large) in cpu.items()}
    for side, seconds in slope.items():
        print(f"{side:10} {1e3 * seconds:7.2f} ms of CPU per MB of text, {1 / seconds:6.1f} MB per CPU second, "
              f"start-up {cpu[side][0] - seconds * options.sizes[0]:.1f} s")
    print(f"ratio      {slope['datatrove'] / slope['here']:.1f}")
    return 0


class Site:
    """A published dataset of `size` MB of text in the folder `work`, and the shards that both sides make of it."""

    def __init__(self, work: Path, texts: list[Path], tokenizer: Path, size: int) -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        self.work, self.tokenizer = work, tokenizer
        with open(work / "texts.jsonl", "w", encoding="utf-8") as file:
            for text in documents(texts, size * 10**6):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        self.recipe = {"version": 1, "sources": {"texts": {"read": "jsonl", "path": str(work / "texts.jsonl")}},
                       "datasets": {"clean": {"from": "texts"}}}
        self.run(self.recipe)
        self.recipe |= {"tokenizer": {"load": str(tokenizer)},
                        "shards": {"web": {"from": "clean", "longest": 2048, "val": "0%"}}}

    def run(self, recipe: dict[str, object]) -> float:
        path = self.work / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return measured([sys.executable, "-m", "pipeline.cli", "run", str(path), "--store", str(self.work / "store"),
                         "--backend", "process", "--workers", "1", "--quiet"])

    def ours(self) -> float:
        """Make shards with Tokenmill. Returns CPU seconds."""
        copy = self.work / "before"
        if not copy.exists():                    # the store without shards, to which each repetition goes back
            shutil.copytree(self.work / "store", copy, copy_function=os.link)
        shutil.rmtree(self.work / "store")
        shutil.copytree(copy, self.work / "store", copy_function=shutil.copy2)
        return self.run(self.recipe)

    def theirs(self) -> float:
        """Make shards with datatrove. Returns CPU seconds."""
        shutil.rmtree(self.work / "theirs", ignore_errors=True)
        return measured([sys.executable, __file__, "--datatrove", str(self.work / "store" / "datasets" / "clean"),
                         str(self.work / "theirs"), str(self.tokenizer)])

    def compare(self) -> int:
        """Compare the tokens of both sides. Returns their number."""
        shards = ShardSet(self.work / "store" / "shards" / "web" / "split=train")
        mine = shards.read(0, shards.tokens)
        files = sorted((self.work / "theirs" / "merged").glob("*.ds"))
        their = np.concatenate([np.fromfile(path, shards.dtype) for path in files])
        if not np.array_equal(mine, their):
            raise SystemExit(f"the tokens differ: {len(mine):,} here, {len(their):,} from datatrove")
        return len(mine)


def documents(texts: list[Path], size: int) -> Iterator[str]:
    """Yield documents of about 4 kB from paragraphs of `texts`, `size` bytes in all."""
    rng = random.Random(0)
    paragraphs = [part for path in texts for part in path.read_text(encoding="utf-8", errors="replace").split("\n\n")
                  if len(part) > 200]
    written = 0
    while written < size:
        document = ""
        while len(document) < DOCUMENT:
            document += rng.choice(paragraphs) + "\n\n"
        document = _WORD.sub(lambda word: word[0] if rng.random() > 0.1 else "".join(
            rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in word[0]), document)
        written += len(document.encode())
        yield document


def measured(command: list[str]) -> float:
    """Run a command. Returns its CPU seconds, those of its children included."""
    before = os.times()
    result = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    if result.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{result.stderr[-3000:]}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def datatrove(folder: str, out: str, tokenizer: str) -> int:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger

    added = json.loads(Path(tokenizer).read_text(encoding="utf-8"))["added_tokens"]
    eos = next(token["content"] for token in added if token["id"] == load_tokenizer(Path(tokenizer)).eos)
    LocalPipelineExecutor(pipeline=[
        ParquetReader(folder, glob_pattern="part-*.parquet"),
        DocumentTokenizer(f"{out}/tokens", tokenizer, local_working_dir=f"{out}/local", eos_token=eos,
                          shuffle_documents=False, save_filename="web")], tasks=1, workers=1,
        logging_dir=f"{out}/logs").run()
    LocalPipelineExecutor(pipeline=[
        DocumentTokenizerMerger(f"{out}/tokens", f"{out}/merged", "web", shuffle=False)], tasks=1, workers=1,
        logging_dir=f"{out}/logs-merge").run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
