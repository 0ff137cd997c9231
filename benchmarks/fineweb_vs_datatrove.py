"""Compare the FineWeb rules here and in datatrove 0.10.1 on the same WARC file: agreement and cost.

    python benchmarks/fineweb_vs_datatrove.py [--input WARC] [--work DIR] [--pages N]
                                              [--engines trafilatura trafilatura-fast resiliparse mill]
                                              [--parts agreement cost quality] [--repeat N]

Agreement: datatrove extracts the texts. Both sides then judge the *same* texts, each filter alone on every text, and as
a chain up to `clean`. The number of differences is printed for each filter, and the first 20 of them. These are
expected:
  * language: the score is rounded to 4 digits before it is compared, so a text within 0.00005 of 0.65 may change sides.
    datatrove's language filter gives no reason; ours (`language`, `language_score`) both count as equal to it.
  * a text with the word IS_ALPHA: datatrove's spaCy raises an error when the word occurs a second time in a process.
Personal data is replaced by made-up data. datatrove takes the next replacement for every document of a process, and we
begin again with each document. So that the texts can be compared, datatrove's formatter is created anew for each one.

Cost: the whole chain from WARC to files, one worker each. It runs on the file F, and then on F followed by a copy of F.
In the copy, one word of ten is replaced by a word that never occurred. CPU time is user + system of all processes of
the side. The cost of a page is the CPU time of the second run minus that of the first, divided by the number of pages.
What is left of the first run is start-up. Memory is the largest sum of the proportional set sizes of the side's
processes. Figures are medians of --repeat runs.

Quality of extraction: mean F1 of words against the gold texts of the folder of real data.

datatrove runs in its own virtual environment (benchmarks/peer-datatrove.txt), built at first use in WORK/peer. The
default input is bench/realweb.warc.gz in the folder of real data: `make bench DATA=FOLDER`.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
#: folder of real data
DATA = Path(os.environ.get("TOKENMILL_TEST_DATA") or ROOT / ".cache" / "data")
FILTERS = ("url", "language", "gopher_repetition", "gopher_quality", "c4", "fineweb")
_TEXT = re.compile(rb"(<(?:script|style)\b.*?</(?:script|style)>)|>([^<>]+)<", re.DOTALL | re.IGNORECASE)
_WORD = re.compile(rb"\b[A-Za-z]{3,}\b")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, default=DATA / "bench" / "realweb.warc.gz", help="WARC file")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "fineweb_vs_datatrove", help="scratch folder")
    parser.add_argument("--engines", nargs="+", default=["trafilatura", "trafilatura-fast", "resiliparse", "mill"],
                        help="extraction on our side; trafilatura favours precision, as datatrove's does")
    parser.add_argument("--parts", nargs="+", default=["agreement", "cost", "quality"])
    parser.add_argument("--repeat", type=int, default=1, help="runs of each side and size")
    parser.add_argument("--pages", type=int, help="only so many pages, for cost")
    parser.add_argument("--model", type=Path, help="lid.176.ftz; default: where `tokenmill fetch lid176` puts it")
    options = parser.parse_args()
    if not options.input.is_file():
        parser.error(f"{options.input}: no such file; name one with --input")
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0",
                   "HF_HOME": str(options.work / "hf"), "PYTHONPATH": str(ROOT)}
    sys.path.insert(0, str(ROOT))
    from stages.scoring.models import lid176

    bench = Bench(options.input.resolve(), options.work.resolve(), str((options.model or lid176()).resolve()))
    if options.pages:
        bench.warc = bench.work / f"{options.input.name.removesuffix('.warc.gz')}.first-{options.pages}.warc.gz"
        write_pages(options.input, bench.warc, (False,), options.pages)
    print(f"{options.input.name}: {options.input.stat().st_size / 1e6:.1f} MB; load {os.getloadavg()[0]:.1f}")
    result: dict[str, object] = {"input": options.input.name}
    if "agreement" in options.parts:
        result["agreement"] = bench.agreement()
    if "cost" in options.parts:
        result["cost"] = bench.cost(options.engines, options.repeat)
    if "quality" in options.parts:
        result["quality"] = bench.quality(options.engines)
    (options.work / "result.json").write_text(json.dumps(result, indent=1))
    return 0


class Bench:
    def __init__(self, warc: Path, work: Path, model: str) -> None:
        self.warc, self.work, self.model = warc, work, model
        self.peer = peer_python(work)

    def theirs(self, *args: object) -> dict[str, float]:
        return measured([self.peer, str(HERE / "peer_datatrove.py"), *map(str, args)], self.work / "peer.log")

    def ours(self, *args: object) -> dict[str, float]:
        return measured([sys.executable, str(HERE / "our_fineweb.py"), *map(str, args)], self.work / "ours.log")

    # -- agreement -----------------------------------------------------------------------------------------------
    def agreement(self) -> dict[str, object]:
        """Let both sides judge the texts that datatrove extracts. Prints the differences, and returns their number by
        filter."""
        texts = self.work / "texts.peer.jsonl"
        self.theirs("texts", self.warc, texts)
        self.theirs("judge", texts, self.work / "judged.peer.jsonl", self.model)
        self.ours("judge", texts, self.work / "judged.ours.jsonl", self.model)
        pairs = list(zip(rows(texts), rows(self.work / "judged.peer.jsonl"), rows(self.work / "judged.ours.jsonl")))
        total = len(pairs)
        print(f"\nagreement on {total} texts, each filter alone on every text:")
        out: dict[str, object] = {"texts": total}
        for name in FILTERS:
            reasons: Counter[str] = Counter()
            wrong = []
            for text, peer, own in pairs:
                a, b = (reason(name, side["alone"][name]) for side in (peer, own))
                reasons[a or "kept"] += 1
                if a != b:
                    wrong.append((text, f"{name}: datatrove {a or 'keeps'}, ours {b or 'keeps'}, language "
                                        f"{peer['alone']['language_found']} / {own['alone']['language_found']}"))
                elif name == "c4" and peer["alone"]["c4_text"] != own["alone"]["c4_text"]:
                    wrong.append((text, "c4: edited text differs"))
            out[name] = self.show(name, total, wrong, ", ".join(f"{k} {n}" for k, n in reasons.most_common()))
        out["pii"] = self.show("pii text", total, [(t, "text differs") for t, p, o in pairs
                                                   if p["alone"]["pii_text"] != o["alone"]["pii_text"]], "")
        wrong = [(t, f"datatrove {p['chain']}, ours {o['chain']}") for t, p, o in pairs
                 if chained(p["chain"]) != chained(o["chain"]) or p["text"] != o["text"]]
        kept = sum(p["chain"] is None for _, p, _ in pairs)
        out["chain"] = self.show("chain, text", total, wrong, f"{kept} kept")
        return out

    def show(self, name: str, total: int, wrong: list, note: str) -> dict[str, object]:
        share = 1 - len(wrong) / max(1, total)
        print(f"  {name:18s} {100 * share:8.3f} %  {len(wrong)} differ   {note}")
        for text, what in wrong[:20]:
            print(f"      {what}   {text['url'][:90]}")
        return {"share": share, "differ": len(wrong)}

    # -- cost ----------------------------------------------------------------------------------------------------
    def cost(self, engines: list[str], repeat: int) -> dict[str, object]:
        """Measure CPU time per page, start-up time, time per stage and memory of both sides."""
        double = self.work / f"{self.warc.name.removesuffix('.warc.gz')}.double.warc.gz"
        if not double.exists():
            write_pages(self.warc, double, (False, True))
        pages = sum(1 for _ in pages_of(self.warc))
        print(f"\ncost of {pages} pages; CPU seconds, one worker a side")
        out: dict[str, object] = {"pages": pages}
        sides = {"datatrove": lambda warc, folder: self.theirs("run", warc, folder, self.model)}
        for engine in engines:
            sides[f"ours, {engine}"] = lambda warc, folder, engine=engine: self.ours("run", warc, folder, self.model,
                                                                                     engine)
        for side, call in sides.items():
            once, twice = [], []
            for number in range(repeat):
                for warc, found in ((self.warc, once), (double, twice)):
                    folder = self.work / "runs" / f"{side.replace(', ', '-')}-{warc.name}-{number}"
                    subprocess.run(["rm", "-rf", str(folder)], check=True)
                    found.append(call(warc, folder))
                    last = folder
            one, two = (statistics.median(r["cpu"] for r in runs) for runs in (once, twice))
            page = (two - one) / pages
            stages = (datatrove_stages if side == "datatrove" else our_stages)(last, 2 * pages)
            out[side] = {"cpu": one, "cpu_double": two, "page_ms": 1e3 * page, "startup": one - pages * page,
                         "peak_mb": max(r["peak_mb"] for r in twice), "stages_ms": stages,
                         "wall": statistics.median(r["wall"] for r in once)}
            ratio = out["datatrove"]["page_ms"] / out[side]["page_ms"]
            print(f"  {side:20s} {one:7.1f} s, double {two:7.1f} s -> {1e3 * page:6.2f} ms a page, start-up "
                  f"{one - pages * page:5.1f} s, peak {out[side]['peak_mb']:5.0f} MB, ratio {ratio:.2f}")
            print("      " + ", ".join(f"{name} {ms:.2f}" for name, ms in stages.items()) + "  (ms a page, double)")
        return out

    # -- quality of extraction -----------------------------------------------------------------------------------
    def quality(self, engines: list[str]) -> dict[str, float]:
        gold = {}
        for path in sorted((DATA / "html" / "wcxb-dev" / "gold-in-bench").glob("*.json.gz")):
            row = json.loads(gzip.decompress(path.read_bytes()))
            gold[row["url"]] = row["ground_truth"]["main_content"]
        if not gold:
            print("\nno gold texts at hand: quality of extraction not measured")
            return {}
        files = {"datatrove": self.work / "texts.peer.jsonl"}
        if not files["datatrove"].exists():
            self.theirs("texts", self.warc, files["datatrove"])
        for engine in engines:
            files[f"ours, {engine}"] = self.work / f"texts.{engine}.jsonl"
            self.ours("texts", self.warc, files[f"ours, {engine}"], engine)
        print(f"\nextraction against {len(gold)} gold texts, mean F1 of words:")
        out = {}
        for side, path in files.items():
            found = {row["url"]: row["text"] for row in rows(path)}
            out[side] = statistics.fmean(word_f1(found.get(url, ""), text) for url, text in gold.items())
            print(f"  {side:20s} {out[side]:.4f}")
        return out


def reason(name: str, value: str | None) -> str | None:
    return "dropped" if name == "language" and value is not None else value


def chained(value: str | None) -> str | None:
    return "language" if value is not None and value.startswith("language:") else value


def rows(path: Path) -> list[dict]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def word_f1(found: str, gold: str) -> float:
    a, b = Counter(found.split()), Counter(gold.split())
    common = sum((a & b).values())
    return 2 * common / (a.total() + b.total()) if common else float(not a and not b)


def peer_python(work: Path) -> str:
    """The Python of datatrove's environment, which is built if it is missing."""
    python = work / "peer" / "bin" / "python"
    if not (work / "peer" / "complete").exists():
        print("building datatrove's own environment ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(work / "peer")], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qq", "-r", str(HERE / "peer-datatrove.txt")], check=True,
                       env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
        (work / "peer" / "complete").touch()
    return str(python)


def measured(command: list[str], log: Path) -> dict[str, float]:
    """Run a command. Returns its CPU seconds (with all its children), wall seconds and peak memory (sum of PSS, MB)."""
    env = dict(os.environ)
    if "peer_datatrove.py" in command[1]:
        env.pop("PYTHONPATH")
    before, begun = os.times(), time.monotonic()
    peak = 0.0
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        while process.poll() is None:
            peak = max(peak, sum(map(pss, descendants(process.pid))))
            time.sleep(0.25)
    after = os.times()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"cpu": cpu, "wall": time.monotonic() - begun, "peak_mb": peak}


def descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found.extend(map(int, (task / "children").read_text().split()))
        except OSError:
            continue
    return found


def pss(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("Pss:")), 0.0)


def datatrove_stages(folder: Path, pages: int) -> dict[str, float]:
    """Milliseconds per page of each block, from datatrove's own statistics (wall time inside the block)."""
    stats = json.loads((folder / "logs" / "stats.json").read_text())
    return {re.sub(r"[^ -~]+", "", block["name"]).strip(" -"): 1e3 * block["time_stats"]["total"] / pages
            for block in stats}


def our_stages(folder: Path, pages: int) -> dict[str, float]:
    """CPU milliseconds per page of each stage."""
    stages = json.loads((folder / "stages.json").read_text())
    return {name: 1e3 * seconds / pages for name, seconds in stages["seconds"].items()}


def pages_of(warc: Path):
    """Yields the response records of a WARC as (headers, HTTP content type, body)."""
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    with open(warc, "rb") as f:
        for record in ArchiveIterator(f, record_types=WarcRecordType.response, parse_http=True):
            yield (dict(record.headers), record.http_headers.get("Content-Type", "text/html"),
                   record.reader.read())


def write_pages(warc: Path, out: Path, copies: tuple[bool, ...], pages: int | None = None) -> None:
    """Write the pages of `warc` to `out` once for each item of `copies`: unchanged (False), or with every tenth word of
    the text replaced by one that never occurred (True). `pages` limits the number of pages."""
    rng = random.Random(0)

    def invent(match: re.Match[bytes]) -> bytes:
        if rng.random() >= 0.1:
            return match[0]
        letters = "".join(rng.choice("bcdfglmnprst" if i % 2 == 0 else "aeiou") for i in range(len(match[0])))
        return letters.encode()

    def edit(match: re.Match[bytes]) -> bytes:
        return match[0] if match[1] else b">" + _WORD.sub(invent, match[2]) + b"<"

    part = out.with_suffix(".part")
    with open(part, "wb") as f:
        for copy in copies:
            for number, (headers, kind, body) in enumerate(itertools.islice(pages_of(warc), pages)):
                if copy:
                    body = _TEXT.sub(edit, body)
                http = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind.encode(), len(body))
                head = (f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:{int(copy):08d}-0000-4000-8000-"
                        f"{number:012d}>\r\nWARC-Target-URI: {headers['WARC-Target-URI']}\r\n"
                        f"WARC-Date: {headers['WARC-Date']}\r\nContent-Type: application/http; msgtype=response\r\n"
                        f"Content-Length: {len(http) + len(body)}\r\n\r\n")
                f.write(gzip.compress(head.encode() + http + body + b"\r\n\r\n", 6, mtime=0))
    os.replace(part, out)


if __name__ == "__main__":
    sys.exit(main())
