"""Measure `packing: best-fit`: its padding, its time, and how it changes the loss of a small model.

    python -m benchmarks.packing                                     # synthetic lengths: seconds
    python -m benchmarks.packing --text FOLDER --out OUT --seeds 3   # also real text, and trainings on it: an hour

The synthetic documents have lognormal numbers of tokens, 740 on average. FOLDER has Wikipedia's dump
`enwiki-slice.xml.bz2`, folders of `*.jsonl.gz`, and books (`books/*.md.gz`). Most of these documents are longer than
the rows of the small model, so the model is trained on the paragraphs of the books. OUT keeps the shards and the
finished trainings.

For each seed, one training reads packed rows and one reads windows. Documents, model, initial values, batch size and
held-out windows are the same. The training with packed rows reads more samples, so that both learn from equally many
tokens: padding does not count.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import yaml

from pipeline.base.quantities import parse_count
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order
from tokenizer.mixture.resolve import resolve_phases
from tokenizer.shards.layout import ENDS
from tokenizer.shards.packing import pack
from tokenizer.shards.reader import ShardSet

SEQUENCE, BATCH = 256, 1024
RECIPE = f"""
version: 1
sources:
  wiki:  {{read: wiki, path: TEXT/enwiki-slice.xml.bz2}}
  lines: {{read: jsonl, path: TEXT/*/*.jsonl.gz}}
  books: {{read: text, path: TEXT/books/*.md.gz}}
  parts: {{read: jsonl, path: paragraphs.jsonl}}
datasets:
  whole:      {{from: [wiki, lines, books], steps: [exact]}}
  paragraphs: {{from: parts, steps: [exact]}}
tokenizer: {{train: {{kind: bpe, vocab: 4096, from: whole}}}}
shards:
  whole:      {{from: whole, longest: {SEQUENCE}, val: 8%}}
  paragraphs: {{from: paragraphs, longest: {SEQUENCE}, val: 8%, packing: best-fit}}
curriculum:
  total: 100k
  phases: [{{name: all, until: 100%, sequence: {SEQUENCE}, batch: {BATCH}, mix: {{paragraphs: 1}}}}]
"""
MODEL = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "qk_norm": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--documents", type=parse_count, nargs="+", default=[10**5, 10**6], help="synthetic ones")
    parser.add_argument("--text", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=parse_count, default=491_520, help="of a training")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for count in options.documents:
        lengths = np.maximum(2, np.random.default_rng(0).lognormal(6.0, 1.1, count)).astype(np.int64)
        for longest in (2048, 8192):
            measure(f"{count:,} synthetic", lengths, longest)
    if options.text is None:
        return
    base = prepare(options.out, options.text)
    for stream in base.streams:
        shards = ShardSet(options.out / stream.train)
        lengths = np.concatenate([np.diff(np.fromfile(shards.folder / info.ends, ENDS).astype(np.int64), prepend=0)
                                  for info in shards.manifest.shards])
        for longest in (SEQUENCE, 2048):
            measure(f"{len(lengths):,} {stream.name}", lengths, longest)
    losses = {packed: [trained(options.out, base, packed, options.tokens, seed) for seed in range(options.seeds)]
              for packed in (False, True)}
    for packed, found in losses.items():
        print(f"{'best-fit' if packed else 'windows':<12} held-out loss " + " ".join(f"{loss:.4f}" for loss in found)
              + f"  mean {statistics.mean(found):.4f}")
    if options.seeds > 1:
        each = [packed - plain for plain, packed in zip(losses[False], losses[True])]
        error = math.sqrt(sum(statistics.variance(found) for found in losses.values()) / options.seeds)
        print(f"best-fit − windows: {statistics.mean(each):+.4f}; standard error of the difference of means "
              f"{error:.4f}, paired by seed {statistics.stdev(each) / math.sqrt(options.seeds):.4f}")


def measure(name: str, lengths: np.ndarray, longest: int) -> None:
    """Pack documents of the given lengths into rows of `longest` targets. Prints the padding, the time that packing
    takes, and which share of the documents that fit into a row would be cut if windows were read instead."""
    ends = np.cumsum(lengths).astype(ENDS)
    with tempfile.NamedTemporaryFile() as file:
        began = time.perf_counter()
        facts = pack(file.name, ends, longest)
        seconds = time.perf_counter() - began
        numbers = np.fromfile(file.name, ENDS).astype(np.int64)[:2 * facts["pieces"]].reshape(-1, 2)
    stops, starts = ends.astype(np.int64), ends.astype(np.int64) - lengths
    fits = (lengths > 1) & (lengths <= longest + 1)
    whole = np.isin(stops[fits], numbers[np.isin(numbers[:, 0], starts), 1]).all()
    by_windows = np.count_nonzero(starts[fits] // longest != (stops[fits] - 1) // longest)
    print(f"{name:<20} rows of {longest:<6} padding {1 - facts['tokens'] / (facts['rows'] * (longest + 1)):.3%}, "
          f"{facts['rows']:,} rows, {facts['pieces'] / facts['rows']:.2f} pieces a row, {facts['longer']:,} documents "
          f"longer, others whole: {whole} (windows cut {by_windows / max(1, fits.sum()):.1%}), {seconds:.2f} s")


def prepare(out: Path, text: Path) -> Curriculum:
    """Return the curriculum of the run that makes the shards. If it does not exist yet, the run is made first."""
    done = out / "runs" / "base" / "curriculum.json"
    if not done.is_file():
        from pipeline.recipe import load_recipe
        from pipeline.run import make_backend, run_recipe

        out.mkdir(parents=True, exist_ok=True)
        lines = [line for book in sorted(text.glob("books/*.md.gz"))
                 for line in gzip.decompress(book.read_bytes()).decode().splitlines()]
        (out / "paragraphs.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines
                                                      if len(line) > 100))
        (out / "recipe.yaml").write_text(RECIPE.replace("TEXT", str(text.resolve())))
        run_recipe(load_recipe(out / "recipe.yaml", []), str(out), make_backend=make_backend("process", 1, None),
                   run="base")
    return Curriculum.load(done)


def trained(out: Path, base: Curriculum, packed: bool, tokens: int, seed: int) -> float:
    """Train a model, unless this has been done before, and return its held-out loss."""
    from trainer.loop.run import open_run
    from trainer.loop.train import train
    from trainer.observe.metrics import read
    from trainer.parallel.world import world

    [stream] = [stream for stream in base.streams if stream.packing]
    if packed:
        tokens = round(tokens / (1 - stream.padding(base.longest)))
    else:
        stream = replace(stream, packing=None, rows=0, filled=0)
    folder = out / "runs" / f"{'packed' if packed else 'windows'}-{tokens}-{seed}"
    if not (folder / "train" / "summary.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        phase: dict[str, Any] = {"name": "all", "until": "100%", "sequence": SEQUENCE, "batch": BATCH,
                                 "mix": {stream.name: 1}, "on_exhausted": "repeat"}
        phases = tuple(resolve_phases([phase], tokens, {stream.name: stream.tokens}, []))
        made = replace(base, seed=seed, streams=(stream,), phases=phases, order="")
        replace(made, order=Order(made).hash()).save(folder / "curriculum.json")
        section = {"model": MODEL, "optimizer": {"kind": "adamw", "lr": 0.003, "embedding_lr": 0.021}, "seed": seed,
                   "schedule": {"warmup": "5%", "decay": "30%"}, "log_every": 10**6, "sample": {"tokens": 0},
                   "evaluate": {"every": 10**6, "windows": 64}, "checkpoint": {"every": 10**6}}
        (folder / "recipe.yaml").write_text(yaml.safe_dump({"train": section}))
        with world("cpu") as here:
            train(open_run(str(folder), str(out), None, []), here, say=lambda text: None)
    lines = [line for line in read(folder / "train" / "metrics.jsonl") if line["event"] == "eval"]
    print(json.dumps({"packed": packed, "seed": seed, "tokens": tokens, "loss": lines[-1]["loss"]}), flush=True)
    return float(lines[-1]["loss"])


if __name__ == "__main__":
    main()
