"""Reads the text in the picture of a PDF page with an OCR engine: the command tesseract, or rapidocr.

Each page is read in a process of its own, so that a hostile picture harms no other page. The process draws the picture
and then replaces itself with the OCR engine (exec). It has one thread, and ends with its parent. The kernel enforces
its limits of CPU time and memory, and may kill it. `words_of` then raises ProcessDied, and the program that runs the
recipe decides whether the document is to blame. Whether a page is read depends on counts (pixels, letters, pages),
never on time.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.base import process
from pipeline.base.compiled import njit
from pipeline.base.process import ProcessDied
from stages.extract.pdf.chars import UNIT, PageChars, TextPiece, is_rtl
from stages.scoring.models import MissingModel

#: dots per inch at which pictures are drawn
DPI = 200
#: distributions whose versions affect an engine's output
LIBRARIES = {"none": (), "tesseract": (), "rapidocr": ("onnxruntime", "opencv-python", "rapidocr_onnxruntime")}
#: programs that an engine starts
PROGRAMS: dict[str, tuple[str, ...]] = {"none": (), "tesseract": ("tesseract",), "rapidocr": (sys.executable,)}
#: shared libraries of tesseract that affect its output: recognition, and the conversion of grey to black and white
_PARTS = ("libtesseract", "liblept")
#: A picture with more letters is not read. tesseract takes about a millisecond of CPU time per letter (4.1 s for 6,300,
#: 17.8 s for 17,800), and more for letters of 4 points; rapidocr takes four milliseconds.
GLYPHS = {"tesseract": 12_000, "rapidocr": 4_000}
#: exit statuses of a process whose picture is blank, and of one whose picture has too many letters
_BLANK, _DENSE = 119, 118
#: characters of scripts without spaces between words
_WIDE = re.compile("[\u2e80-\u9fff\ua000-\uabff\uf900-\uffef]")


class MissingEngine(MissingModel):
    """Raised when an OCR engine, or one of its languages, is not installed. The message names the setting and says how
    to install what is missing."""


class OcrEngine(NamedTuple):
    command: tuple[str, ...]          # reads a PGM picture and writes words as tesseract's TSV
    files: dict[str, str]             # the files that affect its output: name → path
    glyphs: int = GLYPHS["tesseract"]


class Word(NamedTuple):
    line: tuple[str, str, str]        # block, paragraph, line
    left: int                         # pixels, y downwards
    top: int
    right: int
    bottom: int
    confidence: int                   # 0 to 100
    text: str


def engine(name: str, languages: str) -> OcrEngine:
    """Returns the installed OCR engine: `tesseract` with its languages ("eng+deu"), or `rapidocr`.

    Raises:
        MissingEngine: the engine, or one of its languages, is not installed.
    """
    if sys.platform != "linux":
        raise MissingEngine(f"pdf: `ocr: {name}` needs Linux, to hold it to its budget")
    return _rapidocr() if name == "rapidocr" else _tesseract(languages)


def _rapidocr() -> OcrEngine:
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or spec.origin is None:
        raise MissingEngine("pdf: `ocr: rapidocr` is not installed: pip install 'tokenmill[ocr]'")
    models = sorted(Path(spec.origin).parent.rglob("*.onnx"))
    script = Path(__file__).with_name("ocr_rapid.py")
    return OcrEngine((sys.executable, "-P", str(script)), {f"rapidocr {m.stem}": str(m) for m in models},
                     GLYPHS["rapidocr"])


def languages_of_tesseract() -> tuple[str, str, set[str]]:
    """Returns (path of the program tesseract; folder of its models; names of the languages that have a model there).
    Raises MissingEngine if tesseract is not installed or does not name the folder."""
    binary = shutil.which("tesseract")
    if binary is None:
        raise MissingEngine("pdf: `ocr: tesseract` is not installed: apt install tesseract-ocr on every node, or use "
                            "`ocr: rapidocr` (pip install 'tokenmill[ocr]')")
    listing = subprocess.run([binary, "--list-langs"], capture_output=True, text=True, errors="replace")
    listed = listing.stdout or listing.stderr
    folder = re.search(r'"([^"]+)"', listed)
    if folder is None:
        raise MissingEngine(f"pdf: `ocr: tesseract`: {binary} does not say where its languages are; version 5 does")
    return binary, folder[1], {name for name in listed.split("\n")[1:] if name}


def _tesseract(languages: str) -> OcrEngine:
    binary, folder, installed = languages_of_tesseract()
    missing = [language for language in languages.split("+") if language not in installed]
    if missing:
        raise MissingEngine(
            f"pdf: `ocr_languages: {languages}`: tesseract has no {', '.join(missing)} in {folder}; apt install "
            + " ".join(f"tesseract-ocr-{language.replace('_', '-').replace('/', '-').lower()}" for language in missing)
            + f" on every node, or name others: {', '.join(sorted(installed - {'osd'}))}")
    models = [*languages.split("+"), *(["osd"] if "osd" in installed else [])]
    files = {"tesseract": os.path.realpath(binary), **_parts(binary),
             **{f"tesseract {m}": str(Path(folder) / f"{m}.traineddata") for m in models}}
    return OcrEngine((binary, "stdin", "stdout", "-l", languages, "--dpi", str(DPI), "--psm",
                      "1" if "osd" in installed else "3", "-c", "tessedit_create_tsv=1"), files)


def _parts(binary: str) -> dict[str, str]:
    """Returns {name: path} of the shared libraries that affect the output of the program `binary`. They matter because
    nearly all of tesseract's code is in libraries, and hardly any in the program itself."""
    # does what ldd does; ldd itself is a script and needs a shell
    libraries = subprocess.run([binary], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                               env={**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}).stdout
    result = {Path(path).name.split(".so")[0]: os.path.realpath(path) for path in re.findall(r"=> (/\S+)", libraries)}
    return {name: path for name, path in result.items() if name.startswith(_PARTS)}


def words_of(engine: OcrEngine, draw: Callable[[], np.ndarray], cpu_s: int, memory_mb: int) -> list[Word] | None:
    """Returns the words that OCR recognises in a picture, in the order in which the OCR engine reads them. Returns None
    for a blank picture, and [] for a picture with more than `engine.glyphs` letters, which is not read.

    `draw` is called in the process of the OCR engine and returns the picture: (height, width) uint8, black on white.

    Raises:
        ProcessDied: the process took more than `cpu_s` seconds of CPU time, crashed (perhaps because it needed more
            than `memory_mb` MB of private memory), or was killed from outside.
        RuntimeError: the OCR engine ended with an error.
    """
    env = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_THREAD_LIMIT": "1",
           "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env |= {k: os.environ[k] for k in ("TESSDATA_PREFIX", "LD_LIBRARY_PATH") if k in os.environ}
    become = functools.partial(_become, draw, engine.glyphs, cpu_s, memory_mb << 20, os.getpid())
    completed = subprocess.run(engine.command, stdin=subprocess.DEVNULL, capture_output=True, env=env,
                               preexec_fn=become)
    if completed.returncode == 0:
        return list(_words(completed.stdout.decode("utf-8", "replace")))
    if completed.returncode in (_BLANK, _DENSE):
        return None if completed.returncode == _BLANK else []
    last = completed.stderr.decode("utf-8", "replace").strip()[-300:]
    if completed.returncode > 0:
        raise RuntimeError(f"{engine.command[0]} ended with {completed.returncode}: {last}")
    raise ProcessDied(f"OCR of a page died of {signal.Signals(-completed.returncode).name} (`ocr_cpu_s: {cpu_s}`, "
                      f"`ocr_memory_mb: {memory_mb}`): {last}", completed.returncode)


def _become(draw: Callable[[], np.ndarray], most: int, cpu_s: int, memory: int, parent: int) -> None:
    """Prepares a new process that is about to become the OCR engine (exec). Sets its limits of CPU time and memory,
    draws the picture, and makes the picture its standard input. Ends the process if the picture is blank or has more
    than `most` letters."""
    process.die_with_parent(parent)
    faulthandler.disable()                                               # it would write into the parent's log
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        process.no_core()
        process.limit_data(process.data_bytes() + memory)  # until the engine starts, the parent's memory counts, too
        image = draw()
        if not is_inked(image):
            os._exit(_BLANK)
        if glyphs(image) > most:
            os._exit(_DENSE)
        page = os.memfd_create("page")
        with open(page, "wb", closefd=False) as out:
            out.write(b"P5 %d %d 255\n" % image.shape[::-1] + image.tobytes())
        os.lseek(page, 0, os.SEEK_SET)
        os.dup2(page, 0)
        process.limit_data(memory)
    except MemoryError:
        os.abort()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def is_inked(image: np.ndarray) -> bool:
    """Whether the picture is not blank: more than one pixel in 50,000 is dark."""
    return 50_000 * int((image < 128).sum()) > image.size


@njit(cache=True, nogil=True)
def glyphs(image):
    """Returns the number of letters in a picture ((height, width) uint8): connected dark areas that are 4 to 200 pixels
    high."""
    height, width = image.shape
    parent = np.zeros(1024, np.int64)
    top = np.zeros(1024, np.int64)
    low = np.zeros(1024, np.int64)
    starts = np.zeros((2, width // 2 + 1), np.int64)  # of the runs of dark pixels in this row and the one before
    ends = np.zeros((2, width // 2 + 1), np.int64)
    names = np.zeros((2, width // 2 + 1), np.int64)
    count, before = 0, 0
    for y in range(height):
        now, was = y % 2, 1 - y % 2
        n, x, k = 0, 0, 0
        while x < width:
            if image[y, x] >= 128:
                x += 1
                continue
            begin = x
            while x < width and image[y, x] < 128:
                x += 1
            name = -1
            while k < before and ends[was, k] < begin:
                k += 1
            q = k
            while q < before and starts[was, q] <= x:                    # touches it, if only at a corner
                root = names[was, q]
                while parent[root] != root:
                    parent[root] = parent[parent[root]]
                    root = parent[root]
                if name < 0:
                    name = root
                elif root != name:
                    parent[root] = name
                    top[name] = min(top[name], top[root])
                q += 1
            if name < 0:
                if count == parent.shape[0]:
                    parent = np.append(parent, np.zeros(count, np.int64))
                    top = np.append(top, np.zeros(count, np.int64))
                    low = np.append(low, np.zeros(count, np.int64))
                name = count
                parent[name], top[name] = name, y
                count += 1
            low[name] = y
            starts[now, n], ends[now, n], names[now, n] = begin, x, name
            n += 1
        before = n
    letters = 0
    for name in range(count):
        root = name
        while parent[root] != root:
            root = parent[root]
        low[root] = max(low[root], low[name])
    for name in range(count):
        letters += parent[name] == name and 4 <= low[name] - top[name] + 1 <= 200
    return letters


def _words(table: str) -> list[Word]:
    """Returns the words in tesseract's TSV output, whose columns are: level page block par line word left top width
    height conf text. The rows with level 5 are words."""
    out = []
    for row in table.split("\n"):
        cells = row.rstrip("\r").split("\t")
        if len(cells) == 12 and cells[0] == "5" and (text := " ".join(cells[11].split())):
            left, top, width, height = map(int, cells[6:10])
            out.append(Word((cells[2], cells[3], cells[4]), left, top, left + width, top + height,
                            max(0, min(100, int(float(cells[10])))), text))
    return out


def page_of(words: list[Word], width: int, height: int, dpi: int) -> tuple[PageChars, int]:
    """Turns the words that OCR recognised in the picture of a page into `PageChars`, so that they are laid out like the
    text layer of a PDF. Returns (this page; the confidence of the OCR, 0 to 99). The confidence is the mean of the OCR
    engine's own confidence over all letters and digits.

    `width` and `height` of the picture are in pixels. The page is turned so that its lines run to the right. The
    positions of successive words show in which direction they run. A line of nearly the usual height gets exactly this
    height, since the difference comes from letters without ascenders or descenders.
    """
    turn = _quarter_turns(words)
    turned = [_rotated_word(word, turn, width, height) for word in words]
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
        left, right = min(w.left for w in group), max(w.right for w in group)
        text = group[0].text
        for before, word in pairwise(group):
            text += word.text if _WIDE.match(before.text[-1]) and _WIDE.match(word.text[0]) else " " + word.text
        pieces.append(TextPiece(left * 72 * UNIT // dpi, top * 72 * UNIT // dpi, right * 72 * UNIT // dpi,
                                bottom * 72 * UNIT // dpi, text, 0, is_rtl(text)))
    chars = sum(len(w.text) for w in words)
    # OCR confidence is low for dot leaders, so only letters and digits count
    letters = [sum(map(str.isalnum, w.text)) for w in words]
    sure = sum(n * w.confidence for n, w in zip(letters, words)) // max(1, sum(letters))
    size = (width * 72 * UNIT // dpi, height * 72 * UNIT // dpi)
    return PageChars(pieces, *size, chars, len(words), 0, 0), min(99, sure)


def _quarter_turns(words: list[Word]) -> int:
    """Returns by how many clockwise quarter turns the text of a picture is turned: 0 for upright text; 1, 2, 3 for
    lines that run downwards, to the left, upwards."""
    votes: Counter[int] = Counter()
    for a, b in pairwise(words):
        if a.line == b.line and not (is_rtl(a.text) or is_rtl(b.text)):
            x, y = b.left + b.right - a.left - a.right, b.top + b.bottom - a.top - a.bottom
            votes[(0 if x > 0 else 2) if abs(x) >= abs(y) else (1 if y > 0 else 3)] += 1
    return max(range(4), key=lambda k: (votes[k], -k))


def _rotated_word(word: Word, turn: int, width: int, height: int) -> Word:
    left, top, right, bottom = word[1:5]
    left, top, right, bottom = ((left, top, right, bottom), (top, width - right, bottom, width - left),
                                (width - right, height - bottom, width - left, height - top),
                                (height - bottom, left, height - top, right))[turn]
    return word._replace(left=left, top=top, right=right, bottom=bottom)
