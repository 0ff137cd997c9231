"""Measure the cost of the trainer's loader: CPU time and wall time per window, from a warm page cache and from the
disk.

    python -m benchmarks.loader                          # 1 GB of tokens: a few minutes
    python -m benchmarks.loader --tokens 20000000        # a quick look

Reads batches of 16 and 256 windows of 2,048 and 8,192 tokens (16 bit), in the order of a curriculum of three streams.
They are read by `trainer.data.batches.Data.step`, as in a training on one rank. A batch has int64 tensors of inputs,
targets and positions in documents, and the stream of each window. The same run also measures nanoGPT's method: random
windows of one flat file through `numpy.memmap`, inputs and targets as int64 tensors, and nothing else.

A stream has --shards N shards (default: measured with 3 and with 300), because a 10 TB corpus has thousands. Each
measurement is made twice:

  cold         the files are dropped from the page cache before (posix_fadvise); wall time, and the bytes that came from
               the disk according to /proc/self/io
  warm         every page has been read before; CPU time of the process
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenizer.mixture.resolve import resolve
from tokenizer.shards.layout import MANIFEST, Manifest, Shard, file_name, token_dtype
from tokenizer.shards.writer import ShardWriter
from trainer.data.batches import Data
from trainer.tools.loader_benchmark import disk_bytes

VOCAB, EOS, LONGEST = 50304, 0, 8192
MIX = {"web": 60, "code": 30, "wiki": 10}
#: mean number of tokens in a document
DOCUMENT = 800
#: most batches measured of each kind
BATCHES = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=500_000_000, help="of all streams together (default: 500M, 1 GB)")
    parser.add_argument("--shards", type=int, nargs="+", default=[3, 300], help="of a stream (default: 3 300)")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: the system's temporary one)")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[dict[str, Any]] = []
    print(f"{'':<14}{'windows':>16}{'warm, CPU':>14}{'tokens':>12}{'cold, wall':>14}{'from disk':>12}\n"
          f"{'':<14}{'of a batch':>16}{'µs a window':>14}{'M/s a core':>12}{'µs a window':>14}{'MB/MB':>12}")
    with tempfile.TemporaryDirectory(dir=options.folder) as top:
        flat = Path(top, "flat.bin")
        for shards in options.shards:
            store = Path(top, f"{shards}-shards")
            sets = {name: write(store / "shards" / name, name, options.tokens * share // 100, shards)
                    for name, share in MIX.items()}
            if not flat.exists():
                with open(flat, "wb") as f:
                    for body in sorted(store.rglob("*.tokens")):
                        f.write(body.read_bytes())
            for length in (2048, 8192):
                for batch in (16, 256):
                    data = open_data(store, sets, length, batch, options.tokens)
                    steps = data.curriculum.steps
                    figures.append({"of": f"{shards * len(MIX):,} shards", "length": length, "batch": batch, **measure(
                        lambda i, data=data, batch=batch: data.step(i * batch, batch, 0, 1), steps, batch,
                        sorted(store.rglob("*.tokens")) + sorted(store.rglob("*.ends")), 2 * length)})
                    print(line(figures[-1]))
        for length in (2048, 8192):
            for batch in (16, 256):
                rng, tokens = np.random.default_rng(0), np.memmap(flat, "<u2", "r")
                figures.append({"of": "numpy.memmap", "length": length, "batch": batch, **measure(
                    lambda i, rng=rng, tokens=tokens, batch=batch, length=length: plain(tokens, rng, batch, length),
                    len(tokens) // length // batch, batch, [flat], 2 * length)})
                print(line(figures[-1]))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1))
    return 0


def write(folder: Path, name: str, tokens: int, shards: int) -> dict[str, Any]:
    """Write the shard set of the stream `name`: about `tokens` random tokens, cut into documents of random length.
    Returns what describes the stream in the argument `shard_sets` of `tokenizer.mixture.resolve.resolve`."""
    target = folder / "split=train"
    target.mkdir(parents=True)
    rng, made = np.random.default_rng(len(name)), []
    for i in range(shards):
        lengths = rng.integers(DOCUMENT // 4, 7 * DOCUMENT // 4, max(2, tokens // shards // DOCUMENT))
        body = rng.integers(1, VOCAB, lengths.sum(), dtype=np.uint16)
        body[np.cumsum(lengths) - 1] = EOS
        parts = {kind: target / f"{kind}.tmp" for kind in ("body", "ends", "table", "blocks")}
        writer = ShardWriter(*map(str, parts.values()), VOCAB, EOS, lambda: "")
        writer.add(body, lengths, [f"{i:08x}{j:024x}" for j in range(len(lengths))], 0, np.arange(len(lengths)),
                   4 * lengths)
        facts = writer.close()
        sums = {kind: hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in parts.items()}
        names = {kind: file_name(i, kind, sums[kind]) for kind in parts}
        for kind, path in parts.items():
            path.rename(target / names[kind])
        made.append(Shard(index=i, **facts, **names, table_sha256=sums["table"]))
    found = Manifest(name, "train", token_dtype(VOCAB).name, "t" * 64, VOCAB, EOS, sum(s.tokens for s in made),
                     sum(s.documents for s in made), sum(s.text_bytes for s in made), tuple(made))
    found = replace(found, sha256=found.identity())
    (target / MANIFEST).write_text(found.dumps())
    return {"name": name, "tokenizer": "t" * 64, "dtype": "uint16", "val": None, "train": {
        "path": f"shards/{name}/split=train", "sha256": found.sha256, "tokens": found.tokens,
        "documents": found.documents, "bytes": found.text_bytes}}


def open_data(store: Path, sets: dict[str, Any], length: int, batch: int, tokens: int,
              mix: dict[str, int] = MIX) -> Data:
    phase = {"name": "all", "until": "100%", "sequence": length, "batch": length * batch, "mix": mix,
             "on_exhausted": "repeat"}
    recipe = {"curriculum": {"seed": 1, "total": tokens * 9 // 10, "phases": [phase]},
              "shards": {name: {"longest": LONGEST} for name in sets}}
    tokenizer = {"sha256": "t" * 64, "vocab_size": VOCAB, "eos": EOS, "path": "tokenizer.json"}
    return Data(resolve(recipe, sets, tokenizer)[0], store)


def plain(tokens: np.ndarray, rng: np.random.Generator, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch made as in nanoGPT's `get_batch`."""
    starts = rng.integers(0, len(tokens) - length - 1, batch).tolist()
    return (torch.stack([torch.from_numpy(tokens[i:i + length].astype(np.int64)) for i in starts]),
            torch.stack([torch.from_numpy(tokens[i + 1:i + 1 + length].astype(np.int64)) for i in starts]))


def measure(read: Callable[[int], Any], steps: int, batch: int, files: list[Path], size: int) -> dict[str, float]:
    """Read `steps` batches, at most BATCHES, first from the disk and then from the page cache. Returns medians per
    window of `size` bytes: wall seconds from the disk and CPU seconds from the cache. Also returns the bytes read from
    the disk per byte of the windows, and the tokens per CPU second."""
    count = max(1, min(BATCHES, steps))
    for path in files:
        with open(path, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, cold = disk_bytes(), []
    for i in range(count):
        began = time.perf_counter()
        read(i)
        cold.append(time.perf_counter() - began)
    disk = disk_bytes() - before
    for path in files:                                # the whole file, not only what was just read
        path.read_bytes()
    warm = []
    for i in range(count):
        began = time.process_time()
        read(i)
        warm.append(time.process_time() - began)
    seconds = statistics.median(warm) / batch
    return {"warm_cpu_s": seconds, "cold_wall_s": statistics.median(cold) / batch,
            "disk_share": disk / (count * batch * size), "tokens_per_core_s": size / 2 / seconds}


def line(found: dict[str, Any]) -> str:
    return (f"{found['of']:<14}{found['batch']:>6} × {found['length']:>7,}{1e6 * found['warm_cpu_s']:>14,.0f}"
            f"{found['tokens_per_core_s'] / 1e6:>12,.0f}{1e6 * found['cold_wall_s']:>14,.0f}"
            f"{found['disk_share']:>12.1f}")


if __name__ == "__main__":
    sys.exit(main())
