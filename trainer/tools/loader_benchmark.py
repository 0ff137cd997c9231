"""`tokenmill train soak RUN`: tests, before training, whether the loader (which reads batches from shards) will be fast
enough until the end of the run.

The loader is run, without a model, over the last steps of the run. Late steps reveal an index that grows during a run,
storage that has evicted shards, and memory leaks. (The first two were SmolLM3's first problems, in a training of
trillions of tokens on 384 GPUs.)

By default the loader reads as fast as possible, and its throughput is measured. With `--rate` it reads at the pace of a
training with that many tokens per second, and the command measures how long such a training would wait. `--ranks N`
runs N loaders in N processes on this machine. The exit code is 1 if the loader is too slow for `--rate`, or if its
memory grows, else 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from trainer.base.arguments import of_a_run, positive

if TYPE_CHECKING:
    from trainer.loop.run import Run

#: largest share of the time that a training may wait for data
BEARABLE = 0.01
#: after the first tenth of the steps, a rank's memory may grow by this share, or by this many bytes if that is more
GROWTH, NOISE = 0.1, 64 << 20


def add_parser(commands: Any) -> None:
    soak = commands.add_parser("soak", parents=[of_a_run()],
                               description="Run the loader alone over the last steps of the plan.",
                               epilog="example: tokenmill train soak store/runs/first --rate 2.5M --ranks 8")
    soak.add_argument("--steps", type=positive, default=1000, metavar="N", help="read the last N steps (default: 1000)")
    soak.add_argument("--rate", type=positive, default=0, metavar="TOKENS",
                      help="tokens per second of all ranks together, e.g. 2.5M (default: as fast as possible)")
    soak.add_argument("--ranks", type=positive, default=1, metavar="N", help="N loaders on this machine (default: 1)")
    soak.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    soak.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    from trainer.data.remote import fetch_shards
    from trainer.loop.run import open_run

    opened = open_run(options.run, options.store, options.out, options.overrides)
    if options.rank is not None:                                     # one of several processes; the parent reads this
        print(json.dumps(load(opened, options.steps, options.rate, options.rank, options.ranks)))
        return 0
    if opened.source:
        fetch_shards(opened.source, opened.curriculum, lambda text: print(text, file=sys.stderr), opened.config.fetch)
    ranks = several(options.arguments, options.ranks) if options.ranks > 1 else \
        [load(opened, options.steps, options.rate, 0, 1)]
    report = together(ranks, options.rate)
    print(json.dumps(report) if options.json else text(report))
    return 0 if report["sound"] else 1


def several(arguments: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """Run the loader (which reads batches from shards) in each of `ranks` processes, and return the measurements of
    each. Raises TrainingError when a process fails."""
    from trainer.launch.local import end_with_parent
    from trainer.loop.run import TrainingError

    processes = [subprocess.Popen([sys.executable, "-m", "trainer", *arguments, "--rank", str(rank)],
                                  stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent)
                 for rank in range(ranks)]
    try:
        result = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise TrainingError(f"the loader of rank {failed[0]} failed; its error stands above")
    return [json.loads(text) for text in result]


def load(run: Run, steps: int, rate: float, rank: int, ranks: int) -> dict[str, Any]:
    """Read the part of the last `steps` steps of a run that belongs to rank `rank` of `ranks`. Returns measurements of
    speed, waits and memory. `rate` is the pace in tokens per second of all ranks together; 0 means to read without
    pauses."""
    from trainer.data.batches import Data, Prefetch

    total = run.curriculum.steps
    first = max(0, total - steps)
    data = Data(run.curriculum, run.store, run.config.loss.repeats, run.source)
    widths = [shards.dtype.itemsize for shards in data.train]
    batches = Prefetch(data, run.steps(run.sample_at(first)), rank, ranks)
    waits, tokens, bytes_read = [], 0, 0
    before, disk = 0, disk_bytes()
    began = time.perf_counter()
    for step, batch in batches:
        if batch is None:                                            # cannot happen: no step is skipped here
            continue
        length = batch.tokens.shape[1]
        waits.append(batches.waited)
        tokens += step.batch * length
        bytes_read += sum((length + 1) * widths[stream] for stream in batch.stream.tolist())
        if step.number - first <= (total - first) // 10:
            before = memory()
        if rate:                                                     # the time that a training takes for the step
            time.sleep(step.batch * length / rate)
    seconds = time.perf_counter() - began
    marks = quantiles(waits, n=100, method="inclusive") if len(waits) > 1 else waits * 99
    return {"first_step": first + 1, "steps": total - first, "tokens": tokens, "seconds": seconds,
            "wait_p50_ms": 1e3 * marks[49], "wait_p99_ms": 1e3 * marks[98], "wait_max_ms": 1e3 * max(waits),
            # the first wait is left out, because the prefetch starts in it
            "wait_share": sum(waits[1:]) / seconds, "bytes": bytes_read, "disk_bytes": disk_bytes() - disk,
            "memory_before": before, "memory_after": memory()}


def together(ranks: Sequence[Mapping[str, Any]], rate: float) -> dict[str, Any]:
    """Combine the measurements of all loaders, one per rank, into one report. It has the longest waits, the rates of
    all ranks together, and the memory of the rank that grew most. `problems` are texts about what is wrong, and `sound`
    is whether there are none. `rate` is the pace in tokens per second of all ranks together (0: as fast as
    possible)."""
    seconds = max(rank["seconds"] for rank in ranks)
    worst = max(ranks, key=lambda rank: rank["memory_after"] - rank["memory_before"])
    report = {"ranks": len(ranks), "first_step": ranks[0]["first_step"], "steps": ranks[0]["steps"],
              "rate": rate or None, "seconds": round(seconds, 3), "tokens_per_s": ranks[0]["tokens"] / seconds,
              **{key: max(rank[key] for rank in ranks) for key in ("wait_p50_ms", "wait_p99_ms", "wait_max_ms",
                                                             "wait_share")},
              "mb_per_s": sum(rank["bytes"] for rank in ranks) / seconds / 1e6,
              "disk_mb_per_s": sum(rank["disk_bytes"] for rank in ranks) / seconds / 1e6,
              "memory_before": worst["memory_before"], "memory_after": worst["memory_after"]}
    problems = []
    if rate and report["wait_share"] > BEARABLE:
        problems.append(f"at {rate:,.0f} tokens/s {report['wait_share']:.1%} of the time is spent waiting for data "
                        f"(bearable: {BEARABLE:.0%}): put the shards on local disks, or use fewer ranks per node")
    grown = worst["memory_after"] - worst["memory_before"]
    if grown > max(NOISE, GROWTH * worst["memory_before"]):
        problems.append(f"memory of a rank has grown by {grown / 1e6:,.0f} MB in {report['steps']:,} steps")
    return {**report, "problems": problems, "sound": not problems}


def text(report: Mapping[str, Any]) -> str:
    """Format `report`, the result of `together`, as text for a terminal."""
    rate = f"at {report['rate']:,.0f} tokens/s" if report["rate"] else "as fast as it goes"
    lines = [f"loader     steps {report['first_step']:,} to {report['first_step'] + report['steps'] - 1:,} (the last "
             f"{report['steps']:,}) on {report['ranks']} rank{'s' if report['ranks'] > 1 else ''}, {rate}: "
             f"{report['seconds']:.1f} s",
             f"speed      {report['tokens_per_s']:,.0f} tokens/s, {report['mb_per_s']:.1f} MB/s, of which from disk "
             f"{report['disk_mb_per_s']:.1f} MB/s (the rest was in the page cache)",
             f"{'wait' if report['rate'] else 'a batch':<11}p50 {report['wait_p50_ms']:.2f} ms, p99 "
             f"{report['wait_p99_ms']:.2f} ms, longest {report['wait_max_ms']:.1f} ms"
             + (f"; {report['wait_share']:.1%} of the time" if report["rate"] else ""),
             f"memory     {report['memory_before'] / 1e6:,.0f} MB after a tenth, "
             f"{report['memory_after'] / 1e6:,.0f} MB at the end (of the rank that grew most)"]
    if report["problems"]:
        lines += [f"verdict    {problem}" for problem in report["problems"]]
    else:
        lines.append("verdict    it keeps up" if report["rate"] else
                     "verdict    memory does not grow; a training that needs fewer tokens/s than this will not wait")
    return "\n".join(lines)


def memory() -> int:
    """Return the bytes of resident memory of this process, without pages of memory-mapped files, which the system may
    load and evict at any time. On systems that do not report the two separately, all resident memory counts."""
    from trainer.observe.hardware import host_memory

    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except (OSError, UnicodeDecodeError):
        pass
    return host_memory()


def disk_bytes() -> int:
    """Return how many bytes were read from disk for this process; 0 where the system does not report it."""
    try:
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except (OSError, UnicodeDecodeError):
        pass
    return 0
