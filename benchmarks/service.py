"""How fast does the service show documents, and with how much memory?

Publishes generated documents (`service_corpus.py`) into a temporary folder, serves them in a process of its own, and
asks it over HTTP:

    python benchmarks/service.py                     # 10,000,000 small documents, 1,000,000 of 2 kB: 1.7 GB of disk
    python benchmarks/service.py --documents 100000 --texts 10000

Each question is asked in three ways:

    cold    the first request of a fresh server, which compares every part that it reads with its hash. The files are
            in the page cache, as they have just been written
    new     requests of the same kind with other values: the server knows the parts, but not the answer. Median of
            --repeat requests
    again   the first request again, which the server remembers. Median of --repeat requests

Exit code 1 when a wanted figure is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.service_corpus import EVERY, RARE, SOURCES, write_dataset  # noqa: E402

SERVER = """
import sys, uvicorn
from pipeline.service.app import create_app
from pipeline.service.settings import ServiceSettings
uvicorn.run(create_app(ServiceSettings({"bench": sys.argv[1]}, rate=1e6, burst=10**6)), host="127.0.0.1", port=0,
            log_level="info", access_log=False)
"""
#: question → (dataset, parameters, parameters of the i-th new request, seconds wanted cold, seconds wanted otherwise)
QUESTIONS: dict[str, tuple[str, dict[str, Any], Callable[[int], dict[str, Any]], float | None, float | None]] = {
    "page, two filters, stored order": ("many/kept", {"source": "web", "signal": "quality:4:"},
                                        lambda i: {"signal": f"quality:4.{i + 1}:"}, 1.5, 0.3),
    "page, rare value": ("many/kept", {"source": "law", "language": "it", "signal": "quality:4.9999:"},
                         lambda i: {"source": SOURCES[i]}, 1.5, 0.3),
    "page, one domain": ("many/kept", {"domain": "site77.example", "show": "url"},
                         lambda i: {"domain": f"site{78 + i}.example"}, None, 0.3),
    "page, sorted by a signal": ("many/kept", {"source": "web", "sort": "signals.quality", "descending": "true"},
                                 lambda i: {"source": SOURCES[i + 1]}, None, 0.3),
    "page, sorted by id": ("many/kept", {"source": "web", "sort": "id"}, lambda i: {"source": SOURCES[i + 1]}, None,
                           0.3),
    "counts by source and language": ("many/kept/counts", {"by": ["source", "language"]},
                                      lambda i: {"source": SOURCES[i]}, None, None),
    "histogram": ("many/kept/histogram", {"of": "quality"}, lambda i: {"bins": 41 + i}, None, None),
    "search in texts of 2 kB": ("texts/kept", {"text": RARE, "limit": 200}, lambda i: {"text": RARE[:-1 - i]}, None,
                                2.0),
}
#: bytes of memory that the server may take
MEMORY = 1 << 30


@contextmanager
def served(store: Path) -> Iterator[tuple[int, str]]:
    """Start a server for a store. Yields (process id, address), and ends the server afterwards."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(store)], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                yield process.pid, found[1]
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def ask(address: str, path: str, parameters: dict[str, Any]) -> tuple[float, Any]:
    """Seconds that a request took, and its answer."""
    url = f"{address}/api/v1/stores/bench/datasets/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
    begun = time.perf_counter()
    try:
        with urllib.request.urlopen(url, timeout=120) as answer:
            data = answer.read()
    except urllib.error.HTTPError as e:
        raise SystemExit(f"{path} {parameters}: {e.read().decode()}") from None
    return time.perf_counter() - begun, json.loads(data)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) << 10  # type: ignore[index]


def documents_of(answer: Any) -> int:
    return len(answer["documents"]) if isinstance(answer["documents"], list) else answer["documents"]


def measure(store: Path, repeat: int) -> list[dict[str, Any]]:
    rows = []
    for name, (path, parameters, other, cold_wanted, warm_wanted) in QUESTIONS.items():
        with served(store) as (pid, address):
            with urllib.request.urlopen(f"{address}/api/v1/stores") as answer:
                answer.read()                                                      # imports are not the question

            def timed(requests: Sequence[dict[str, Any]], pid: int = pid, address: str = address, path: str = path,
                      ) -> tuple[float, float, Any]:
                """Median seconds and CPU seconds of some requests, and the last answer."""
                seconds, before = [], cpu_seconds(pid)
                for request in requests:
                    taken, answer = ask(address, path, request)
                    seconds.append(taken)
                return statistics.median(seconds), (cpu_seconds(pid) - before) / len(requests), answer

            cold, cold_cpu, answer = timed([parameters])
            new, new_cpu, _ = timed([{**parameters, **other(i)} for i in range(repeat)])
            again, again_cpu, _ = timed([parameters] * repeat)
            rows.append({"question": name, "documents": documents_of(answer), "cold_s": cold, "cold_cpu_s": cold_cpu,
                         "new_s": new, "new_cpu_s": new_cpu, "again_s": again, "again_cpu_s": again_cpu,
                         "peak": peak_bytes(pid), "missed": any(
                             wanted is not None and taken > wanted for taken, wanted in
                             ((cold, cold_wanted), (new, warm_wanted), (again, warm_wanted)))})
    return rows


def memory_of_all(store: Path) -> int:
    """The peak memory, in bytes, of one server that answers all questions, four at a time."""
    from concurrent.futures import ThreadPoolExecutor

    with served(store) as (pid, address), ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(ask, address, path, parameters) for path, parameters, *_ in QUESTIONS.values()] * 2:
            done.result()
        return peak_bytes(pid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000, help="small documents")
    parser.add_argument("--parts", type=int, default=200, help="their parts")
    parser.add_argument("--texts", type=int, default=1_000_000, help="documents of 2 kB")
    parser.add_argument("--repeat", type=int, default=5, help="new requests, and repeated ones; at most 7")
    parser.add_argument("--store", type=Path, help="use and keep the store in this folder; make it if it is missing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="service-benchmark-") as scratch:
        store = options.store or Path(scratch, "store")
        if not (store / "datasets").exists():
            for name, rows, parts, size in (("many", options.documents, options.parts, 12),
                                            ("texts", options.texts, max(1, options.parts // 3), 300)):
                on_disk = write_dataset(store, name, rows, parts, size)
                print(f"{name}: {rows:,} documents in {parts} parts, {on_disk / 1e6:,.0f} MB")
        rows_of = measure(store, options.repeat)
        peak = memory_of_all(store)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'question':34} {'documents':>10} {'cold s':>8} {'CPU s':>7} {'new s':>8} {'CPU s':>7} {'again s':>8} "
          f"{'CPU s':>7} {'peak MB':>8}")
    for row in rows_of:
        print(f"{row['question']:34} {row['documents']:>10,} {row['cold_s']:>8.2f} {row['cold_cpu_s']:>7.2f} "
              f"{row['new_s']:>8.2f} {row['new_cpu_s']:>7.2f} {row['again_s']:>8.3f} {row['again_cpu_s']:>7.3f} "
              f"{row['peak'] / 1e6:>8.0f}"
              f"{'  missed' if row['missed'] else ''}")
    wanted = options.texts // EVERY
    print(f"peak with four requests at a time: {peak / 1e6:.0f} MB")
    if options.texts >= EVERY and rows_of[-1]["documents"] != wanted:
        raise SystemExit(f"the search should have found {wanted} documents")
    return int(any(row["missed"] for row in rows_of) or peak > MEMORY)


if __name__ == "__main__":
    sys.exit(main())
