"""Randomly changed PDFs: each gives a text or a counted reason, in bounded time and memory, and none kills the process.

CI tries 30 files, `make fuzz` 2,000, in a process with the limits of a worker. A failing file is named by its number,
from which it can be made again (`mutated(seed)`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import settings

from stages.extract.pdf.step import Pdf
from tests.conftest import real_files
from tests.stages.fuzzing import Worker, mutate
from tests.stages.test_extract_pdf import lines, pdf

TOKENS = [b"/Length 99999999", b"<<", b">>", b"[", b"]", b"endobj", b"stream\n", b"endstream", b"0 0 R", b"1 0 R",
          b"-2147483648", b"99999999999999999999", b"/Kids[2 0 R]", b"/Count 1000000", b"/Rotate 90", b"/FlateDecode",
          b"0.00000001 0 0 0.00000001 0 0 cm", b"1e38 0 0 1e38 0 0 cm", b"BT", b"ET", b"(", b")", b"\x00", b"\xff" * 40,
          b"/Type/Page", b"/MediaBox[0 0 1e9 1e9]", b"/MediaBox[5 5 5 5]", b"xref", b"trailer", b"startxref\n0"]
REASONS = {None, "not_pdf", "pdf_too_large", "pdf_encrypted", "pdf_damaged", "pdf_too_many_pages",
           "pdf_too_many_chars", "pdf_no_text"}
#: memory: what the stage declares, and what interpreter and libraries reserve before any work
CPU_S, MEMORY = 10.0, (Pdf.memory_mb + 150) << 20
FILES = 30 if settings.default.max_examples <= 100 else 2_000              # hypothesis' profile `fuzz`

CODE = """
import hashlib, time
from stages.document import Document
from stages.extract.pdf.step import Pdf

stage = Pdf(max_inflated=100_000_000)
stage.setup()


def answer(data):
    said = []
    for _ in range(2):
        doc, begun = Document("id", raw=data), time.process_time()
        reason = stage.process(doc)
        cpu, text = time.process_time() - begun, doc.text.encode()
        said.append((reason, hashlib.sha256(text).hexdigest(), json.dumps([doc.meta, doc.signals], sort_keys=True)))
    return {"reason": reason, "bytes": len(text), "cpu": cpu, "same": said[0] == said[1],
            "signals": all(value == value for value in doc.signals.values())}
"""


@cache
def originals() -> list[bytes]:
    table = b"".join(b"BT /F 9 Tf %d %d Td (cell %d) Tj ET\n" % (40 + 90 * c, 700 - 14 * r, c * r)
                     for r in range(20) for c in range(5))
    own = [pdf(lines("A line of text.", "Another one that is longer."), table),
           pdf(*[lines(f"Page {i}.") for i in range(9)]),
           pdf(b"q 0 1 -1 0 300 100 cm\n" + lines("Turned text on a page.") + b"Q\n" + table)]
    hard = real_files("*.pdf", "pdf", "hard")
    return own + [p.read_bytes() for p in hard if p.stat().st_size < 100_000]


def mutated(seed: int) -> bytes:
    draw = random.Random(seed)
    data = bytearray(draw.choice(originals()))
    for _ in range(draw.choice((1, 1, 2, 4, 8, 32))):
        if draw.random() < 0.15:                                           # other numbers: lengths, places, references
            at = draw.randrange(len(data) + 1)
            digits = [k for k in range(at, min(len(data), at + 4096)) if 48 <= data[k] <= 57]
            for k in digits[:draw.choice((1, 3, 9))]:
                data[k] = 48 + draw.randrange(10)
        else:
            mutate(draw, data, originals(), TOKENS)
    return bytes(data)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    process = Worker(CODE, MEMORY)
    process.ask(originals()[0])                                            # compiles, for which no file is to blame
    yield process
    process.close()


@pytest.mark.hypothesis
def test_mutated_files_end_as_text_or_reason(worker):
    wrong = []
    for seed in range(FILES):
        told = worker.ask(mutated(seed))
        if not (told["reason"] in REASONS and (told["bytes"] > 0) == (told["reason"] is None) and told["same"]
                and told["signals"] and told["cpu"] < CPU_S):
            wrong.append((seed, told))
    assert wrong == [] and worker.peak() < 1 << 30, "bytes"


def test_the_same_seed_makes_the_same_file():
    assert mutated(7) == mutated(7) != mutated(8)
