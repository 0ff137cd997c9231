"""Measure shuffled tokens per second that one process gets from the trainer's loader, litdata and MosaicML streaming.

    python -m benchmarks.delivery [--peer litdata=PYTHON] [--peer mds=PYTHON] [--tokens N] [--repeat N]

Writes a shard set of random documents and exports it as `tokenmill shards export` does. Then all loaders read from a
warm page cache in turn, --repeat times:

- The trainer's loader (`Data.step`) gives inputs, targets, positions and document boundaries of windows, and verifies
  checksums.
- Each peer's loader, in an environment of its own (`benchmarks/peer_delivery.py`), gives inputs and targets.
- In the rows `raw`, a peer's tokens are counted as its loader gives them, without making inputs and targets.
- In the row `masks`, litdata's blocks are turned into all that the trainer's loader gives.

A window has 2,048 tokens, a batch 256 windows.

The table shows medians of MB per second and per CPU second. A token counts as 2 bytes, its size in the shards, however
large the tensors are. On a busy machine, only the figures per CPU second and their ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.loader import EOS, open_data, write
from tokenizer.export.export import export
from tokenizer.shards.reader import ShardSet
from trainer.data.batches import Data

LENGTH, BATCH, ITEM = 2048, 256, 2
PEERS = ("litdata", "mds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="litdata or mds")
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=5, help="of one measurement")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be used (default: the system's temporary one)")
    options = parser.parse_args()
    peers = dict(peer.split("=", 1) for peer in options.peer)
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--peer {', '.join(unknown)}: there are {', '.join(PEERS)}")
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {"ours": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as top:
        store = Path(top, "store")
        sets = {"web": write(store / "shards" / "web", "web", options.tokens, options.shards)}
        for name in peers:
            export(ShardSet(store / "shards" / "web" / "split=train"), name, Path(top, name))
        data = open_data(store, sets, LENGTH, BATCH, options.tokens, {"web": 100})
        for _ in range(options.repeat):
            found["ours"].append(ours(data, options.seconds))
            for name, python in peers.items():
                for extra in ("", "raw", "masks") if name == "litdata" else ("", "raw"):
                    found.setdefault(f"{name} {extra}".strip(), []).append(
                        theirs(python, name, Path(top, name), options.seconds, extra))
    print(f"load {os.getloadavg()[0]:.1f}\n{'':<22}{'MB/s':>10}{'MB/CPU-s':>10}{'ours is faster by, CPU':>26}")
    base = statistics.median(one["tokens_per_cpu_s"] for one in found["ours"])
    for name, rates in found.items():
        wall, cpu = (statistics.median(one[key] for one in rates) for key in ("tokens_per_s", "tokens_per_cpu_s"))
        print(f"{name + ' ' + str(rates[0].get('version', '')):<22}{wall * ITEM / 1e6:>10.0f}{cpu * ITEM / 1e6:>10.0f}"
              f"{base / cpu:>26.1f}")
    return 0


def theirs(python: str, name: str, folder: Path, seconds: int, extra: str) -> dict[str, float]:
    """Read an export for `seconds` seconds with a peer's own loader, in the peer's environment. Returns its rates."""
    command = [python, str(Path(__file__).with_name("peer_delivery.py")), name, str(folder), str(LENGTH), str(BATCH),
               str(seconds), *([extra, str(EOS)] if extra else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    if done.returncode:
        raise SystemExit(f"{name}:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def ours(data: Data, seconds: float) -> dict[str, float]:
    """Read batches with the trainer's loader for `seconds` seconds, after some batches to warm up. Returns its
    rates."""
    steps = data.curriculum.steps
    for step in range(20):
        data.step(step * BATCH, BATCH, 0, 1)
    tokens, step, began, cpu = 0, 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        tokens += data.step(step % steps * BATCH, BATCH, 0, 1).tokens.numel()
        step += 1
    return {"tokens_per_s": tokens / (time.perf_counter() - began),
            "tokens_per_cpu_s": tokens / (time.process_time() - cpu)}


if __name__ == "__main__":
    sys.exit(main())
