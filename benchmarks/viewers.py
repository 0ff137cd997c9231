"""What do 200 viewers of one running run cost the service?

    python benchmarks/viewers.py [--viewers 200] [--seconds 60]

Serves a store with a run whose progress changes every second. A quarter of the viewers have the page of the run open,
which reloads itself every few seconds. A quarter poll the API with the ETag of the last answer. Half follow the stream
of events.

Prints the times of the requests, how late the streams get a change, errors, and the CPU time and memory of the server.
The exit code is 0 if there is no error, if 99 % of the requests of each kind take less than 500 ms, and if the server
needs at most a quarter of one core; otherwise it is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.service import cpu_seconds, served  # noqa: E402
from pipeline.store.fs import Store  # noqa: E402
from pipeline.store.log import Log  # noqa: E402

RUN = "runs/live"
#: seconds between two requests of a page (static/live.js) and of a poll of the API
PAGE_S, POLL_S = 2.0, 2.0
#: tasks done → when this progress began to be written
WRITTEN: dict[int, float] = {}


@dataclass
class Seen:
    """What all viewers have seen: seconds of requests by kind, seconds that a change took to reach a stream, and
    errors."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"page": [], "poll": []})
    late: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0,
                        help="each viewer stays so long, and until it has seen one answer, or one change of the stream")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, stop = Store(folder), threading.Event()
        write(store, 0)
        writer = threading.Thread(target=go_on, args=(store, stop), daemon=True)
        # the lease of the log, without which the run would count as dead
        with Log.open(store, run="live"), served(Path(folder)) as (pid, address):
            writer.start()
            seen, server = asyncio.run(watch(address, pid, options.viewers, options.seconds))
            stop.set()
            writer.join()
    share, memory = server
    missed = bool(seen.errors) or share > 0.25
    for kind, seconds in seen.seconds.items():
        p99 = statistics.quantiles(seconds, n=100)[98] if len(seconds) > 1 else float("nan")
        missed |= not p99 < 0.5
        print(f"{kind:<7}{len(seconds):>6} requests, median {median_ms(seconds)} ms, p99 {1000 * p99:.0f} ms")
    print(f"stream {len(seen.late):>6} changes, median {median_ms(seen.late)} ms late, at most "
          f"{1000 * max(seen.late, default=float('nan')):.0f} ms")
    print(f"server {share:.0%} of one core, memory {', '.join(f'{m / 1e6:.0f}' for m in memory)} MB (before, halfway, "
          f"at the end); {len(seen.errors)} errors{': ' + seen.errors[0] if seen.errors else ''}")
    return int(missed)


def median_ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds or [float('nan')]):.0f}"


def write(store: Store, done: int) -> None:
    """Write the files of a run as its driver does."""
    WRITTEN[done] = time.monotonic()
    store.write(f"{RUN}/run.json", json.dumps({"run": "live", "attempt": 1, "how": "job"}).encode())
    nodes = {f"node{i}": {"tasks": 1000, "done": min(1000, done), "docs": 1000 * done} for i in range(20)}
    store.write(f"{RUN}/progress.json", json.dumps(
        {"state": "running", "attempt": 1, "parts": 20_000, "done": done, "docs": done, "nodes": nodes,
         "at": time.time()}).encode())


def go_on(store: Store, stop: threading.Event) -> None:
    done = 0
    while not stop.wait(1.0):
        done += 1
        write(store, done)


async def watch(address: str, pid: int, viewers: int, seconds: float) -> tuple[Seen, tuple[float, list[int]]]:
    """Let viewers follow the run for some seconds. Returns (what they saw, figures of the server). The figures are its
    share of one core, and its resident memory in bytes at the beginning, in the middle and at the end."""
    seen, end = Seen(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=30.0, trust_env=False) as client:
        looks: list[Coroutine[Any, Any, None]] = []
        for n in range(viewers):
            delay = 2.0 * n / viewers                            # viewers do not come all at once
            looks.append(stream(client, seen, end, delay) if n % 2 else poll(client, seen, end, delay, n % 4 == 0))
        before, cpu, memory = time.monotonic(), cpu_seconds(pid), [resident(pid)]
        going = asyncio.gather(*looks)
        await asyncio.sleep(seconds / 2)
        memory.append(resident(pid))
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        share = (cpu_seconds(pid) - cpu) / (time.monotonic() - before)
        memory.append(resident(pid))
        await going
    return seen, (share, memory)


async def poll(client: httpx.AsyncClient, seen: Seen, end: float, delay: float, page: bool) -> None:
    path = "/stores/bench/runs/live" if page else "/api/v1/stores/bench/runs/live"
    headers = {"Accept": "text/html"} if page else {}
    await asyncio.sleep(delay)
    while True:
        begun = time.monotonic()
        try:
            answer = await client.get(path, headers=headers)
            seen.seconds["page" if page else "poll"].append(time.monotonic() - begun)
            if answer.status_code not in (200, 304):
                seen.errors.append(f"{path}: {answer.status_code}")
            if not page and "etag" in answer.headers:
                headers["If-None-Match"] = answer.headers["etag"]
        except httpx.HTTPError as e:
            seen.errors.append(f"{path}: {type(e).__name__} {e}")
        if time.monotonic() > end:
            return
        await asyncio.sleep(max(0.0, (PAGE_S if page else POLL_S) - (time.monotonic() - begun)))


async def stream(client: httpx.AsyncClient, seen: Seen, end: float, delay: float) -> None:
    await asyncio.sleep(delay)
    states = 0
    try:
        async with client.stream("GET", "/api/v1/stores/bench/runs/live/events") as answer:
            if answer.status_code != 200:
                seen.errors.append(f"events: {answer.status_code}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    done = json.loads(line.removeprefix("data: "))["done"]
                    states += 1
                    if states > 1:                               # the first state may be old when a viewer comes
                        seen.late.append(time.monotonic() - WRITTEN[done])
                if line == "event: end":
                    seen.errors.append("events: the run has ended")
                if time.monotonic() > end and states > 1:
                    return
    except httpx.HTTPError as e:
        seen.errors.append(f"events: {type(e).__name__} {e}")


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
