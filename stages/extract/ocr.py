"""Text of a page's picture by an OCR engine: tesseract by its command, or rapidocr in a process of its own.

The engine gets one grey picture and a budget of CPU time and memory for it, enforced by the kernel. What ends the text
are counts (pixels here, pages in the `pdf` stage); who exceeds the budget all the same raises `OcrLimit`, and the
document goes to quarantine: no clock decides about text. An engine that is not at hand is a sentence with a remedy.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stages.extract.pdf_chars import UNIT, PageChars, Piece, is_rtl

#: pictures are drawn at DPI dots to the inch, larger pages at less, so that no picture has more than PIXELS
DPI, PIXELS = 200, 10_000_000
_LIBC = ctypes.CDLL(None, use_errno=True)


class OcrLimit(RuntimeError):
    """A page took more CPU time or memory than its budget."""


class Engine(NamedTuple):
    command: tuple[str, ...]          # reads a PGM picture, writes words as tesseract's TSV
    files: dict[str, str]             # that decide about its output, by what they are
    libraries: tuple[str, ...]        # distributions that do


class Word(NamedTuple):
    line: tuple[str, str, str]        # block, paragraph, line
    left: int                         # pixels, y downwards
    top: int
    right: int
    bottom: int
    confidence: int                   # 0 to 100
    text: str


@functools.lru_cache(maxsize=8)
def engine(name: str, languages: str) -> Engine | str:
    """The engine `tesseract` (with its languages, "eng+deu") or `rapidocr`, or what is missing and what to do."""
    if name == "rapidocr":
        if importlib.util.find_spec("rapidocr_onnxruntime") is None:
            return "rapidocr is not installed: pip install 'tokenmill[ocr]'"
        script = Path(__file__).with_name("ocr_rapid.py")
        return Engine((sys.executable, "-P", str(script)), {}, ("onnxruntime", "rapidocr_onnxruntime"))
    binary = shutil.which("tesseract")
    if binary is None:
        return "tesseract is not at hand: apt install tesseract-ocr, or use rapidocr (pip install 'tokenmill[ocr]')"
    told = subprocess.run([binary, "--list-langs"], capture_output=True, text=True, errors="replace")
    listed = told.stdout or told.stderr
    folder = re.search(r'"([^"]+)"', listed)
    known = set(listed.split("\n")[1:])
    if folder is None:
        return "tesseract does not say where its languages are: version 5 does"
    missing = [language for language in languages.split("+") if language not in known]
    if missing:
        return f"tesseract has no language {', '.join(missing)}: apt install " + " ".join(
            f"tesseract-ocr-{language.replace('_', '-').lower()}" for language in missing)
    models = [*languages.split("+"), *(["osd"] if "osd" in known else [])]
    files = {f"tesseract {m}": str(Path(folder[1]) / f"{m}.traineddata") for m in models}
    command = (binary, "stdin", "stdout", "-l", languages, "--dpi", str(DPI), "--psm", "1" if "osd" in known else "3",
               "-c", "tessedit_create_tsv=1")
    return Engine(command, {"tesseract": os.path.realpath(binary), **files}, ())


def words_of(engine: Engine, image: np.ndarray, cpu_s: int, memory_mb: int) -> list[Word]:
    """Words of a picture (height, width) uint8, black on white, in the order the engine reads them. Raises OcrLimit
    when it takes more than `cpu_s` seconds of CPU time or `memory_mb` of private memory, RuntimeError when it fails."""
    height, width = image.shape
    picture = b"P5 %d %d 255\n" % (width, height) + np.ascontiguousarray(image).tobytes()
    env = {"PATH": os.environ.get("PATH", ""), "OMP_THREAD_LIMIT": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    env |= {k: os.environ[k] for k in ("TESSDATA_PREFIX", "LD_LIBRARY_PATH") if k in os.environ}
    ran = subprocess.run(engine.command, input=picture, capture_output=True, env=env,
                         preexec_fn=functools.partial(_limit, cpu_s, memory_mb << 20, os.getpid()))
    if ran.returncode == 0:
        return list(_words(ran.stdout.decode("utf-8", "replace")))
    if ran.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise OcrLimit(f"a page of {width} by {height} pixels took more than {cpu_s} CPU seconds of OCR (`ocr_cpu_s`)")
    last = ran.stderr.decode("utf-8", "replace").strip()[-300:]
    if ran.returncode == -signal.SIGABRT or "bad_alloc" in last or "MemoryError" in last or "allocate" in last:
        raise OcrLimit(f"a page of {width} by {height} pixels took more than {memory_mb} MB of OCR (`ocr_memory_mb`)")
    raise RuntimeError(f"{engine.command[0]} ended with {ran.returncode}: {last}")


def _limit(cpu_s: int, memory: int, parent: int) -> None:
    """In the child, before the engine runs: it dies with its parent, or at its budget."""
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)                              # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _words(table: str) -> list[Word]:
    """Words (level 5) of tesseract's TSV: level page block par line word left top width height conf text."""
    out = []
    for row in table.split("\n"):
        cells = row.rstrip("\r").split("\t")
        if len(cells) == 12 and cells[0] == "5" and (text := " ".join(cells[11].split())):
            left, top, width, height = map(int, cells[6:10])
            out.append(Word((cells[2], cells[3], cells[4]), left, top, left + width, top + height,
                            max(0, min(100, int(float(cells[10])))), text))
    return out


def page_of(words: list[Word], width: int, height: int, dpi: int) -> tuple[PageChars, int]:
    """(a page as the text layer would give it, confidence 0 to 99: the mean over its characters).

    `width`, `height` in pixels. The page is turned so that lines run to the right: their words tell where they run.
    Heights of lines are made equal where they differ by what letters happen to reach above and below.
    """
    turn = _turn(words)
    turned = [word._replace(**dict(zip(("left", "top", "right", "bottom"), _turned(word, turn, width, height))))
              for word in words]
    if turn % 2:
        width, height = height, width
    groups: list[list[Word]] = []
    for word in turned:
        before = groups[-1][-1] if groups else None
        high = max(word.bottom - word.top, before.bottom - before.top) if before else 0
        if before is None or before.line != word.line or 2 * max(word.left - before.right,
                                                                 before.left - word.right) > 3 * high:
            groups.append([])
        groups[-1].append(word)
    heights = sorted(max(w.bottom for w in g) - min(w.top for w in g) for g in groups)
    usual = heights[len(heights) // 2] if heights else 0
    pieces = []
    for group in groups:
        top, bottom = min(w.top for w in group), max(w.bottom for w in group)
        if 6 * usual < 10 * (bottom - top) < 16 * usual:
            top, bottom = (top + bottom - usual) // 2, (top + bottom + usual) // 2
        box = (min(w.left for w in group), top, max(w.right for w in group), bottom)
        text = " ".join(w.text for w in group)
        pieces.append(Piece(*(v * 72 * UNIT // dpi for v in box), text, 0, is_rtl(text)))
    chars = sum(len(w.text) for w in words)
    sure = sum(len(w.text) * w.confidence for w in words) // max(1, chars)
    size = (width * 72 * UNIT // dpi, height * 72 * UNIT // dpi)
    return PageChars(pieces, *size, chars, len(words), 0, 0), min(99, sure)


def _turn(words: list[Word]) -> int:
    """Quarter turns, clockwise, of the picture's text: 0 upright, 1 lines run downwards, 2 to the left, 3 upwards."""
    votes: Counter[int] = Counter()
    for a, b in pairwise(words):
        if a.line == b.line and not (is_rtl(a.text) or is_rtl(b.text)):
            x, y = b.left + b.right - a.left - a.right, b.top + b.bottom - a.top - a.bottom
            votes[(0 if x > 0 else 2) if abs(x) >= abs(y) else (1 if y > 0 else 3)] += 1
    return max(range(4), key=lambda k: (votes[k], -k))


def _turned(word: Word, turn: int, width: int, height: int) -> tuple[int, int, int, int]:
    left, top, right, bottom = word[1:5]
    return ((left, top, right, bottom), (top, width - right, bottom, width - left),
            (width - right, height - bottom, width - left, height - top),
            (height - bottom, left, height - top, right))[turn]
