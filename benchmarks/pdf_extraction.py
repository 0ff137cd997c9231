"""Compare PDF engines: text against its source, olmOCR's unit tests, scans through OCR, pages per CPU-second.

    python benchmarks/pdf_extraction.py DATA [--work DIR] [--engines ours,pypdf] [--scans N [--ocr tesseract,rapidocr]]

DATA holds `debian-pairs` (NAME.LANG.pdf with NAME.LANG.txt.gz of the same source) and optionally `olmocr-bench`
(`dataset.jsonl`, `pdfs`). Engines: ours (the `pdf` stage), pdftotext (Debian: `apt install poppler-utils`; left out if
not installed), and pdfminer.six, pdfplumber, pypdf, which get an environment of their own in WORK/peer
(`peer-pdf.txt`).

- F1: harmonic mean of precision and recall over the bags of words (`\\w+`) of a manual and its source, in NFKC. For
  Japanese, Chinese and Korean, whose words have no reliable spaces, the bags hold bigrams of the letters. Case is kept,
  because it is content.
- 4-grams: the same over four words in a row (eight letters). This also detects wrong order, lost headings and cut
  words.
- olmOCR's tests, after `olmocr/bench/tests.py`: `present` and `absent` look for a string with at most `max_diffs`
  edits. `order` wants two strings in this order. `table` wants a cell with its neighbours or headings in a Markdown
  table. `math` wants rendered formulas, which no text layer has, so these tests are counted but never passed.
- scans: N pages of the English manuals are drawn at 200 dpi, without their text, and read by OCR. F1 is measured
  against the text layer.
- CPU: user + system of the process (and its children) for all pages of the pairs.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pypdfium2

from stages.document import Document
from stages.extract.pdf.ocr import GLYPHS, OcrEngine
from stages.extract.pdf.step import Pdf

HERE = Path(__file__).parent
PEERS = ("pdfminer.six", "pdfplumber", "pypdf")
#: {file: {"pages": texts, "cpu": seconds}}
Found = dict[str, dict[str, Any]]


# -- engines ---------------------------------------------------------------------------------------------------------
def ours(files: list[str]) -> Found:
    stage, found = Pdf(), {}
    stage.setup()
    stage.process(Document("warm", raw=Path(files[0]).read_bytes()))        # compiles the kernels
    for file in files:
        doc = Document(file, raw=Path(file).read_bytes())
        begun = time.process_time()
        reason = stage.process(doc)
        found[file] = {"pages": [doc.text], "cpu": time.process_time() - begun, "error": reason}
    return found


def pdftotext(files: list[str]) -> Found:
    found = {}
    for file in files:
        before = os.times()
        ran = subprocess.run(["pdftotext", "-enc", "UTF-8", file, "-"], capture_output=True)
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        found[file] = {"pages": ran.stdout.decode("utf-8", "replace").split("\f")[:-1], "cpu": cpu}
    return found


def peer(engine: str, files: list[str], work: Path) -> Found:
    out = work / f"{engine}.json"
    command = [peer_python(work), str(HERE / "peer_pdf.py"), engine, str(out), *files]
    subprocess.run(command, check=True, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
                   stderr=subprocess.DEVNULL)
    return json.loads(out.read_text(encoding="utf-8"))


def peer_python(work: Path) -> str:
    """The Python of the other engines' environment, which is built if it is missing."""
    python = work / "peer" / "bin" / "python"
    if not (work / "peer" / "complete").exists():
        print("building the environment of the other engines ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(work / "peer")], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qq", "-r", str(HERE / "peer-pdf.txt")], check=True)
        (work / "peer" / "complete").touch()
    return str(python)


# -- text against its source -----------------------------------------------------------------------------------------
def bag(text: str, language: str, n: int = 1) -> Counter[tuple[str, ...]]:
    """Return how often each run of `n` words occurs in a text. In ja, zh and ko, whose manuals break words anywhere,
    runs of 2 * `n` letters are counted instead."""
    text = unicodedata.normalize("NFKC", text)
    if language in ("ja", "zh", "ko"):
        words, n = [c for c in text if c.isalnum()], 2 * n
    else:
        words = re.findall(r"\w+", text)
    return Counter(zip(*[words[k:] for k in range(n)]))


def f1(found: str, gold: str, language: str, n: int = 1) -> float:
    a, b = bag(found, language, n), bag(gold, language, n)
    return 2 * (a & b).total() / max(1, a.total() + b.total())


def pairs(data: Path) -> list[tuple[str, str, str]]:
    """Returns (file, language, text of the source) of each pair."""
    out = []
    for file in sorted((data / "debian-pairs").glob("*.pdf")):
        gold = gzip.decompress(file.with_suffix(".txt.gz").read_bytes()).decode()
        out.append((str(file), file.stem.rsplit(".", 1)[1].split("-")[0], gold))
    return out


# -- olmOCR's unit tests ---------------------------------------------------------------------------------------------
_SAME = str.maketrans({"‘": "'", "’": "'", "‚": "'", "“": '"', "”": '"', "„": '"', "＿": "_", "–": "-", "—": "-",
                       "‑": "-", "‒": "-", "−": "-", "\u00a0": " ", "\u00ad": None})


def plain(text: str) -> str:
    text = re.sub(r"<br/?>", " ", unicodedata.normalize("NFC", text))
    return re.sub(r"\s+", " ", text.translate(_SAME)).strip()


def near(text: str, wanted: str, edits: int) -> np.ndarray:
    """The positions in `text` at which a substring ends that is at most `edits` edits away from `wanted` (Sellers
    1980)."""
    if edits == 0:
        return np.asarray([m.end() for m in re.finditer(f"(?={re.escape(wanted)})", text)], np.int64) + len(wanted)
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    steps = np.arange(len(codes) + 1)
    row = np.zeros(len(codes) + 1, np.int64)
    for c in wanted:
        new = row + 1
        new[1:] = np.minimum(new[1:], row[:-1] + (codes != ord(c)))
        row = np.minimum.accumulate(new - steps) + steps
    return np.flatnonzero(row <= edits)


def passes(test: dict[str, Any], text: str) -> bool:
    kind, edits = test["type"], int(test.get("max_diffs", 0))
    if kind in ("present", "absent"):
        text, wanted = plain(text), plain(test["text"])
        if not test.get("case_sensitive", True):
            text, wanted = text.lower(), wanted.lower()
        if "first_n" in test or "last_n" in test:
            text = text[:test.get("first_n", 0)] + (text[-test["last_n"]:] if test.get("last_n") else "")
        return (len(near(text, wanted, edits)) > 0) == (kind == "present")
    if kind == "order":
        before, after = (near(plain(text), plain(test[side]), edits) for side in ("before", "after"))
        starts = [ends - len(test[side]) for ends, side in ((before, "before"), (after, "after"))]
        return bool(len(before) and len(after) and starts[0].min() < starts[1].max())
    if kind == "table":
        return any(_table(test, rows) for rows in tables(text))
    return False


def tables(text: str) -> Iterable[list[list[str]]]:
    rows: list[list[str]] = []
    for line in [*text.split("\n"), ""]:
        line = line.strip()
        if line.startswith("|"):
            if not re.fullmatch(r"[|:\s-]+", line):
                rows.append([plain(cell) for cell in line.strip("|").split("|")])
        elif rows:
            yield rows
            rows = []


def _table(test: dict[str, Any], rows: list[list[str]]) -> bool:
    def like(a: str, key: str) -> bool:
        wanted = plain(test[key])
        return bool(a) and len(near(a, wanted, int(test.get("max_diffs", 0)))) > 0 and len(a) <= 2 * len(wanted)

    def at(r: int, c: int) -> str:
        return rows[r][c] if 0 <= r < len(rows) and 0 <= c < len(rows[r]) else ""

    for r, row in enumerate(rows):
        for c, cell in enumerate(row):
            if like(cell, "cell"):
                sides = {"up": at(r - 1, c), "down": at(r + 1, c), "left": at(r, c - 1), "right": at(r, c + 1)}
                fits = [like(other, side) for side, other in sides.items() if side in test]
                if "top_heading" in test:
                    fits.append(any(like(at(q, c), "top_heading") for q in range(r)))
                if "left_heading" in test:
                    fits.append(any(like(at(r, q), "left_heading") for q in range(c)))
                if all(fits):
                    return True
    return False


def unit_tests(data: Path) -> list[dict[str, Any]]:
    listed = data / "olmocr-bench" / "dataset.jsonl"
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
    tests = [json.loads(line) for line in lines if line.strip()]
    return [test for test in tests if (data / "olmocr-bench" / "pdfs" / test["pdf"]).exists()]


# -- tables ----------------------------------------------------------------------------------------------------------
def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("data", type=Path)
    ask.add_argument("--work", type=Path, default=Path(".cache/pdf_extraction"))
    ask.add_argument("--engines", default=f"ours,pdftotext,{','.join(PEERS)}")
    ask.add_argument("--failed", action="store_true", help="name the olmOCR tests that do not pass")
    ask.add_argument("--scans", type=int, default=0, metavar="N", help="pages read by OCR")
    ask.add_argument("--ocr", default="tesseract,rapidocr")
    told = ask.parse_args()
    told.work.mkdir(parents=True, exist_ok=True)
    gold, tests = pairs(told.data), unit_tests(told.data)
    bench = {test["pdf"]: str(told.data / "olmocr-bench" / "pdfs" / test["pdf"]) for test in tests}
    files = [file for file, _, _ in gold] + sorted(set(bench.values()))
    if not gold:
        ask.error(f"{told.data}: holds no debian-pairs/*.pdf; name the folder that does")
    scores: dict[str, dict[str, float]] = {}
    for engine in filter(None, told.engines.split(",")):
        if engine == "pdftotext" and not shutil.which("pdftotext"):
            print("pdftotext is not at hand: apt install poppler-utils")
            continue
        found = {"ours": ours, "pdftotext": pdftotext}[engine](files) if engine not in PEERS else \
            peer(engine, files, told.work)
        row = scores[engine] = {}
        for file, language, text in gold:
            read, name = "\n".join(found[file]["pages"]), f"{Path(file).stem.split('.')[0]} {language}"
            row[name], row[f"{name}, 4-grams"] = f1(read, text, language), f1(read, text, language, 4)
        kinds: dict[str, list[bool]] = defaultdict(list)
        for test in tests:
            pages = found[bench[test["pdf"]]]["pages"]
            text = pages[test["page"] - 1] if engine != "ours" and len(pages) >= test["page"] else "\n".join(pages)
            kinds[test["type"]].append(passes(test, text))
            if told.failed and not kinds[test["type"]][-1]:
                print(engine, json.dumps({k: v for k, v in test.items() if k != "id"}, ensure_ascii=False))
        for kind, results in kinds.items():
            row[f"{kind} of {len(results)}"] = sum(results)
        count = sum(pages_of(file) for file, _, _ in gold)
        row["pages a CPU-s"] = count / sum(found[file]["cpu"] for file, _, _ in gold)
    if scores:
        print("| |", " | ".join(scores), "|\n|---|" + "---|" * len(scores))
        for name in next(iter(scores.values())):
            values = [row[name] for row in scores.values()]
            print(f"| {name} |", " | ".join(f"{v:.4f}" if 0 < v < 1 else f"{v:.0f}" for v in values), "|")
    for engine in told.ocr.split(",") if told.scans else ():
        scans([file for file, language, _ in gold if language == "en"], told.scans, engine, told.work)


def pages_of(file: str) -> int:
    opened = pypdfium2.PdfDocument(file)
    try:
        return len(opened)
    finally:
        opened.close()


# -- scans -----------------------------------------------------------------------------------------------------------
def scans(files: list[str], count: int, engine: str, work: Path) -> None:
    """Draw pages of the files, evenly spread, at 200 dpi and read them with an OCR engine."""
    every = [(file, number) for file in files for number in range(pages_of(file))]
    stage, plain_text = Pdf(ocr=engine), Pdf()
    if engine == "rapidocr":
        script = HERE.parent / "stages" / "extract" / "ocr_rapid.py"
        stage._engine = OcrEngine((peer_python(work), "-P", str(script)), {}, GLYPHS["rapidocr"])
    found, gold, sure, before = [], [], [], os.times()
    for file, number in every[::max(1, len(every) // count)][:count]:
        one, picture = page_and_picture(file, number)
        source, seen = Document("text", raw=one), Document("scan", raw=picture)
        if plain_text.process(source) is None:
            stage.process(seen)
            gold.append(source.text)
            found.append(seen.text)
            sure.append(seen.signals["pdf_confidence"])
    after = os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    by_page = sorted(f1(a, b, "en") for a, b in zip(found, gold))
    print(f"scans, {engine}: F1 {f1(' '.join(found), ' '.join(gold), 'en'):.4f} over {len(gold)} pages, worst "
          f"{by_page[0]:.3f}, median {by_page[len(by_page) // 2]:.3f}; confidence {sum(sure) / len(sure):.3f}; "
          f"{cpu / len(gold):.1f} CPU-s a page")


def page_and_picture(file: str, number: int) -> tuple[bytes, bytes]:
    """Returns one page as a PDF with its text, and as a PDF that holds only its picture."""
    source, one, made = pypdfium2.PdfDocument(file), pypdfium2.PdfDocument.new(), pypdfium2.PdfDocument.new()
    one.import_pages(source, [number])
    size = source[number].get_size()
    image = pypdfium2.PdfImage.new(made)
    image.set_bitmap(source[number].render(scale=200 / 72, grayscale=True))
    image.set_matrix(pypdfium2.PdfMatrix().scale(*size))
    page = made.new_page(*size)
    page.insert_obj(image)
    page.gen_content()
    out = []
    for document in (one, made):
        buffer = io.BytesIO()
        document.save(buffer)
        out.append(buffer.getvalue())
    return out[0], out[1]


if __name__ == "__main__":
    main()
