"""What does the order of training samples cost?

    python benchmarks/tokens.py [--streams 3 30 200 1000] [--block 65536] [--batch 1024]

Makes curricula of 10^13 tokens with five phases and this many streams of unequal weights, once flat and once in ten
groups. Measures `Order.locate`, which says which stream, epoch and window each sample reads: with numpy alone, and with
the kernels that numba compiles. It is called for blocks of samples, as the trainer locates them ahead, and for single
batches. These figures are medians of --repeat calls at random places.

Also prints the time and the memory of setting up an order with its tables. The memory is traced by Python.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tokenizer.mixture import kernels  # noqa: E402
from tokenizer.mixture.curriculum import Curriculum, Phase, Stream, TokenizerRef  # noqa: E402
from tokenizer.mixture.order import Order  # noqa: E402

TOKENS, SEQUENCE, PHASES, GROUPS = 10**13, 2048, 5, 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", type=int, default=[3, 30, 200, 1000])
    parser.add_argument("--block", type=int, default=1 << 16)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=31)
    options = parser.parse_args()
    for streams in options.streams:
        for grouped in (False, True)[:1 + (streams > GROUPS)]:
            measure(curriculum(streams, grouped), grouped, options)
    return 0


def curriculum(streams: int, grouped: bool) -> Curriculum:
    rng = random.Random(streams)
    names = [f"s{i:04}" for i in range(streams)]
    samples = TOKENS // SEQUENCE // PHASES
    phases = []
    for number in range(PHASES):
        weights = {name: rng.randint(1, 1000) for name in names}
        groups = {f"g{i}": names[i::GROUPS] for i in range(GROUPS)} if grouped else None
        phases.append(Phase(f"p{number}", number * samples, samples, samples, SEQUENCE, 1, weights, "stable", {},
                            "repeat", groups=groups))
    return Curriculum(1, TokenizerRef("0" * 64, 1000, 0, "t"), SEQUENCE, tuple(
        Stream(name, name, None, "0" * 64, None, 3 * TOKENS // streams, 0, "uint16") for name in names),
        tuple(phases), "")


def measure(made: Curriculum, grouped: bool, options: argparse.Namespace) -> None:
    tracemalloc.start()
    began = time.perf_counter()
    order = Order(made)
    order.locate(0, 1)
    first, memory = time.perf_counter() - began, tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"{len(made.streams):>5} streams{f' in {GROUPS} groups' if grouped else '':<13}: set up in {first:.2f} s "
          f"(traced), {memory / 1e6:.1f} MB", flush=True)
    for name, enough in (("numpy", sys.maxsize), ("numba", 0)):
        kernels.ENOUGH = enough
        took = {size: median(order, size, options.repeat) for size in (options.block, options.batch)}
        print(f"      {name}: {options.block / took[options.block] / 1e6:6.2f} M windows/s in blocks of "
              f"{options.block:,}; a batch of {options.batch:,} {1000 * took[options.batch]:.2f} ms", flush=True)


def median(order: Order, size: int, repeat: int) -> float:
    rng, times = random.Random(size), []
    for _ in range(repeat):
        start = rng.randrange(order.samples - size)
        began = time.perf_counter()
        order.locate(start, start + size)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
