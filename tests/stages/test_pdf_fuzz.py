"""Mutated PDFs: text or a counted reason for every one, in bounded time and memory, and never the end of the process.

`make fuzz` tries thirty times as many. They run in a process of their own, which has what a worker has: the stage, a
limit of memory, a kernel that counts its CPU time. A finding is its number: the same file is made of it again.
"""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import SHARED
from tests.stages.test_extract_pdf import lines, pdf

TOKENS = [b"/Length 99999999", b"<<", b">>", b"[", b"]", b"endobj", b"stream\n", b"endstream", b"0 0 R", b"1 0 R",
          b"-2147483648", b"99999999999999999999", b"/Kids[2 0 R]", b"/Count 1000000", b"/Rotate 90", b"/FlateDecode",
          b"0.00000001 0 0 0.00000001 0 0 cm", b"1e38 0 0 1e38 0 0 cm", b"BT", b"ET", b"(", b")", b"\x00", b"\xff" * 40,
          b"/Type/Page", b"/MediaBox[0 0 1e9 1e9]", b"/MediaBox[5 5 5 5]", b"xref", b"trailer", b"startxref\n0"]
CPU_S, WALL_S, MEMORY = 10.0, 120.0, 1 << 30


def bases() -> list[bytes]:
    table = b"".join(b"BT /F 9 Tf %d %d Td (cell %d) Tj ET\n" % (40 + 90 * c, 700 - 14 * r, c * r)
                     for r in range(20) for c in range(5))
    own = [pdf(lines("A line of text.", "Another one that is longer."), table),
           pdf(*[lines(f"Page {i}.") for i in range(9)]),
           pdf(b"q 0 1 -1 0 300 100 cm\n" + lines("Turned text on a page.") + b"Q\n" + table)]
    hard = sorted((SHARED / "pdf" / "hard").rglob("*.pdf")) if (SHARED / "pdf" / "hard").exists() else []
    return own + [p.read_bytes() for p in hard if p.stat().st_size < 100_000]


def mutated(seed: int, originals: list[bytes]) -> bytes:
    draw = random.Random(seed)
    data = bytearray(draw.choice(originals))
    for _ in range(draw.choice((1, 1, 2, 4, 8, 32))):
        at, size = draw.randrange(len(data) + 1), draw.choice((1, 2, 8, 64, 1024))
        match draw.randrange(7):
            case 0:
                for k in range(at, min(len(data), at + size)):
                    data[k] = draw.randrange(256)
            case 1:
                del data[at:at + size]
            case 2:
                data[at:at] = data[at:at + size]
            case 3:
                data[at:at] = draw.choice(TOKENS)
            case 4:
                digits = [k for k in range(at, min(len(data), at + 4096)) if 48 <= data[k] <= 57]
                for k in digits[:draw.choice((1, 3, 9))]:
                    data[k] = 48 + draw.randrange(10)
            case 5:
                other = draw.choice(originals)
                start = draw.randrange(len(other))
                data[at:at + size] = other[start:start + size]
            case _:
                if draw.random() < 0.2:
                    del data[at:]
    return bytes(data)


WORKER = f"""
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY}, resource.getrlimit(resource.RLIMIT_DATA)[1]))
from stages.document import Document
from stages.extract.pdf import Pdf
stage = Pdf(max_inflated=100_000_000)
while head := sys.stdin.buffer.readline():
    doc, begun = Document("id", raw=sys.stdin.buffer.read(int(head))), time.process_time()
    reason = stage.process(doc)
    doc.text.encode(); json.dumps(doc.meta)
    told = {{"reason": reason, "text": len(doc.text), "cpu": time.process_time() - begun,
            "signals": all(v == v for v in doc.signals.values())}}
    print(json.dumps(told), flush=True)
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               cwd=Path(__file__).parents[2])
    yield process
    process.kill()
    process.wait()


ORIGINALS = bases()


@settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, (1 << 32) - 1))
def test_mutated_files_end_as_text_or_reason(worker, seed):
    data = mutated(seed, ORIGINALS)
    assert worker.poll() is None, "an earlier file ended the process"
    worker.stdin.write(b"%d\n" % len(data) + data)
    worker.stdin.flush()
    assert select.select([worker.stdout], [], [], WALL_S)[0], f"seed {seed}: no end"
    answer = worker.stdout.readline()
    assert answer, f"seed {seed}: the process ended with {worker.wait()}"
    told = json.loads(answer)
    assert (told["reason"] is None) == (told["text"] > 0) and told["signals"] and told["cpu"] < CPU_S, (seed, told)


def test_memory_of_the_worker_stayed_small(worker):
    assert worker.poll() is None
    peak = next(int(line.split()[1]) for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines()
                if line.startswith("VmHWM:"))
    assert peak < 1_000_000, "kB"


def test_the_same_seed_makes_the_same_file():
    assert mutated(7, ORIGINALS) == mutated(7, ORIGINALS) != mutated(8, ORIGINALS)
