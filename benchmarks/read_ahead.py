"""How fast are rows read from a bucket, and with how many requests: windows, and packed rows of several documents?

    python -m benchmarks.read_ahead [--tokens N ...] [--rows N] [--steps N] [--latency SECONDS]

Writes shard sets of random documents (800 tokens on average), packs them, and reads random rows of 2,048 tokens from a
folder that behaves like a bucket: each request waits for the latency and for its bytes at 30 MB/s. Rows are requested
16 steps ahead, as a training does. Each set is read twice: with a request for each range of blocks, and with ranges
that are near each other joined into one request.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import numpy as np

from benchmarks.loader import write
from tests.tokenizer.packs import write_packing
from trainer.data import read_ahead
from trainer.data.read_ahead import STEPS, RemoteShardSet, request_threads
from trainer.data.rows import token_ranges, windows

LENGTH, BYTES_PER_S = 2048, 30e6


class SlowFile:
    """A file of the bucket. The size of each request is appended to `requests`."""

    def __init__(self, file: BinaryIO, latency: float, requests: list[int]) -> None:
        self.file, self.latency, self.requests = file, latency, requests

    def size(self) -> int:
        return Path(self.file.name).stat().st_size

    def read_at(self, size: int, start: int) -> bytes:
        self.requests.append(size)
        time.sleep(self.latency + size / BYTES_PER_S)
        with open(self.file.name, "rb") as file:
            file.seek(start)
            return file.read(size)


class SlowBucket:
    def __init__(self, latency: float) -> None:
        self.latency, self.requests = latency, list[int]()

    def open_input_file(self, path: str) -> SlowFile:
        return SlowFile(open(path, "rb"), self.latency, self.requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000_000, 100_000_000, 1_000_000_000])
    parser.add_argument("--rows", type=int, default=256, help="of a step")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--latency", type=float, default=0.03)
    options = parser.parse_args()
    print(f"{'tokens':>14} {'':<10}{'':<12}{'rows/s':>10}{'requests a row':>16}{'bytes read':>12}")
    for tokens in options.tokens:
        with tempfile.TemporaryDirectory() as top:
            info: dict[str, Any] = write(Path(top), "web", tokens, max(1, tokens // 50_000_000))
            folder = Path(top, "split=train")
            for packing in (None, write_packing(folder, LENGTH)["sha256"]):
                for name, near in (("each alone", -1 << 40), ("together", read_ahead.NEAR)):
                    bucket = SlowBucket(options.latency)
                    with request_threads() as pool, mock.patch.object(read_ahead, "NEAR", near):
                        shards = RemoteShardSet(folder, info["train"]["sha256"], bucket, str(folder), pool, packing)
                        rate = read(shards, options.rows, options.steps)
                    rows = options.rows * options.steps
                    print(f"{tokens:>14,} {'packed' if packing else 'windows':<10}{name:<12}{rate:>10.0f}"
                          f"{len(bucket.requests) / rows:>16.2f}{sum(bucket.requests) / (2 * LENGTH * rows):>11.1f}×")
    return 0


def read(shards: RemoteShardSet, rows: int, steps: int) -> float:
    """Read random rows, in steps that are requested in advance. Returns rows per second."""
    count = shards.windows(LENGTH) if shards.packed is None else len(shards.packed)
    chosen = np.random.default_rng(0).integers(0, count, (steps, rows)).tolist()
    began = time.perf_counter()
    for step in range(steps + STEPS):
        if step < steps:
            shards.prefetch([piece for row in chosen[step] for piece in token_ranges(shards, row, LENGTH)])
        if step >= STEPS:
            windows([shards], [(0, row) for row in chosen[step - STEPS]], LENGTH)
    return rows * steps / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
