"""Measure what the start of a driver costs when the commit log is long.

    python benchmarks/log_replay.py [--records 2000000] [--segments 100000] [--delay 0.03]

Two logs are made. Most of their segments are in packs (`pipeline.store.snapshot`).

The first log has many records of the usual size, with hashes as random as real ones, on the local disk. Measured are
the time and memory to read it (`Log.read`) in a process of its own. Then the time to get one record is measured, in the
order of commits and in random order.

The second log has many segments, the newest of which are not in packs yet. It is in an object store in memory, which
answers every request, and every page of a listing, after a delay. Measured is the time until a driver has its lease:
first while all segments exist, then after the segments that are in packs were removed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.engine.messages import Assignment  # noqa: E402
from pipeline.engine.task import TaskSpec  # noqa: E402
from pipeline.store import snapshot  # noqa: E402
from pipeline.store.fs import Store  # noqa: E402
from pipeline.store.lease import heartbeat_name, identity  # noqa: E402
from pipeline.store.listing import RemoteObject  # noqa: E402
from pipeline.store.log import Log  # noqa: E402
from pipeline.store.remote import InMemory  # noqa: E402
from pipeline.store.segment import FORMAT, encode_record, encode_segment, segment_name  # noqa: E402

IN_SEGMENT = 1000         # records of a segment, in the log of many records
TAIL = 700                # segments behind the last pack
PAGE = 1000               # names in a page of a listing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--segments", type=int, default=100_000)
    parser.add_argument("--delay", type=float, default=0.03)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(options.read)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        size = many_records(Store(folder), options.records)
        done = subprocess.run([sys.executable, __file__, "--read", folder], check=True, capture_output=True, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        print(f"{options.records:,} records, packs of {size / 1e6:,.0f} MB: read in {result['read_s']:.1f} s, "
              f"{result['cpu_s']:.1f} s of CPU, peak {result['peak_mb']:.0f} MB (before: {result['before_mb']:.0f} "
              f"MB); a record {result['next_us']:.0f} µs in order, {result['any_us']:.0f} µs in any order", flush=True)
    store = Slow(options.delay)
    many_segments(store, options.segments)
    for what in ("all segments there", "most of them removed"):
        began, cpu = time.monotonic(), time.process_time()
        with Log.open(store, run=what, threaded=False) as log:
            print(f"{options.segments:,} segments, {store.delay * 1000:.0f} ms a request, {what}: lease taken in "
                  f"{time.monotonic() - began:.1f} s, {time.process_time() - cpu:.1f} s of CPU, {len(log):,} records",
                  flush=True)
        for number in range(2, options.segments - TAIL + 1):
            with contextlib.suppress(FileNotFoundError):
                store.remote.fs.rm_file(store.at(segment_name(number)))
    return 0


def generated(segments: int, in_segment: int) -> Iterator[bytes]:
    """Yield the contents of the segments of a log. The first segment opens an epoch, the others hold records."""
    from benchmarks.driver_memory import record

    key, rng = "f" * 32, random.Random(1)
    spec = TaskSpec(key, "documents", "clean", {}, label="")
    example = record(Assignment(1, spec, "00000001-00000001", {}))
    for info in example.files.values():
        info.sha256 = info.content = "?" * 64
    parts = re.split(rb"(f{32}|\?{64})", encode_record(example))
    head = {"format": FORMAT, "epoch": 1}
    yield encode_segment({**head, "kind": "epoch", "nonce": "", "holder": identity("first")})
    for number in range(1, segments):
        records = []
        for _ in range(in_segment):
            name = rng.randbytes(16).hex().encode()
            records.append(b"".join(name if part[:32] == b"f" * 32 else rng.randbytes(32).hex().encode()
                                    if part[:1] == b"?" else part for part in parts))
        yield encode_segment({**head, "kind": "records", "nonce": str(number), "records": records, "quarantined": []})


def many_records(store: Store, records: int) -> int:
    """Write a log of `records` records. All segments but the first are in packs, as in a store after `store gc`.
    Returns the bytes of the packs."""
    size, first = 0, b""

    def segments() -> Iterator[bytes]:
        nonlocal first
        for data in generated(1 + -(-records // IN_SEGMENT), IN_SEGMENT):
            first = first or data
            yield data

    for pack, data in snapshot.build(1, segments(), store):
        store.write(pack.path, data)
        size += len(data)
    store.write(segment_name(1), first)
    store.write(heartbeat_name(1), b'{"closed":true}')
    return size


def read(folder: str) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began, cpu = time.monotonic(), time.process_time()
    view = Log.read(Store(folder))
    result = {"read_s": time.monotonic() - began, "cpu_s": time.process_time() - cpu, "before_mb": before,
              "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    began, keys = time.perf_counter(), []
    for key in (r.key for r, _ in zip(view.records(), range(20_000))):
        keys.append(key)
    result["next_us"] = (time.perf_counter() - began) / len(keys) * 1e6
    sampled = keys[::20]                             # each lies in another block than the one before
    random.Random(0).shuffle(sampled)
    began = time.perf_counter()
    for key in sampled:
        view.get(key)
    result["any_us"] = (time.perf_counter() - began) / len(sampled) * 1e6
    return result


class SlowMemory(InMemory):
    delay = 0.0

    def _ask(self, what: str, path: str, call: Any) -> Any:
        time.sleep(self.delay)
        return super()._ask(what, path, call)

    def list(self, prefix: str, after: str = "") -> Iterator[RemoteObject]:
        for n, entry in enumerate(super().list(prefix, after), 1):
            if n % PAGE == 0:
                time.sleep(self.delay)
            yield entry


class Slow(Store):
    """An object store in memory. Once `many_segments` has filled it, every request takes `delay` seconds."""

    def __init__(self, delay: float) -> None:
        super().__init__(f"memory://replay-{os.getpid()}")
        self.remote = SlowMemory(self.root)
        self.fs, self.delay = self.remote.fs, delay


def many_segments(store: Slow, segments: int) -> None:
    for number, data in enumerate(generated(segments, 1), 1):
        store.write(segment_name(number), data)
    for _ in snapshot.take(store, 1, segments - TAIL):
        pass
    store.write(heartbeat_name(1), b'{"closed":true}')
    store.remote.delay = store.delay


if __name__ == "__main__":
    sys.exit(main())
