"""The overhead of the engine: documents through a pass, against the same work in a plain process pool.

    python benchmarks/engine_overhead.py [--docs 1000000 3000000] [--workers 2] [--backend process] [--repeat 1]
                                         [--scratch DIR]

Both sides read the same Parquet files of 1 KB documents, give every document its id, and take it through the stages
`url` and `pii`. These are exact and cheap (16 µs a document), so that overhead shows. Both sides hash every row and
every file with sha256, and write the same columns as zstd Parquet with the same options.

* pool: `multiprocessing.Pool`, one task per file; the code one would write by hand (`by_hand`). It uses nothing of
  `pipeline`: it keeps no log and no counters, and a crash or an error ends it.
* engine: `run_recipe` with the process (or inline) backend, from the recipe to the published dataset. With the inline
  backend, which has one worker, the pool has one, too.

Each side runs in a process of its own, with each number of documents of --docs. The cost per document is the difference
in time between the largest and the smallest number, divided by the difference of these numbers. So start-up, imports
and planning do not count.

Prints CPU seconds (user and system, all processes), wall seconds, and the ratio of both sides' costs. Compares the
numbers of kept documents and their texts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILE_DOCS, GROUP_DOCS, TEXT_BYTES = 50_000, 10_000, 1024
#: number of distinct files; the others are links to them under other names (ids depend on names)
DISTINCT = 4
STEPS = ("url", "pii")
LIMIT = 1.10


# -- input -----------------------------------------------------------------------------------------------------------
def make_file(path: Path, seed: int, docs: int) -> None:
    """Write a Parquet file of `docs` documents of 1 KB: lines of words, with an e-mail address in one document of
    fifty."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.geometric(0.22, 8000), 2, 12)
    letters = rng.integers(ord("a"), ord("z") + 1, int(lengths.sum()), dtype=np.uint8).tobytes().decode()
    ends = np.cumsum(lengths)
    words = [letters[b - n:b] for b, n in zip(ends.tolist(), lengths.tolist())]
    texts, urls = [], []
    for i in range(docs):
        # a few words are frequent, so that the text compresses like real text
        said = [words[k] for k in (8000 * rng.random(240) ** 3).astype(int).tolist()]
        if i % 50 == 0:
            said[20] = f"{said[21]}@{said[22]}.example.com"
        text = "\n".join(" ".join(said[k:k + 12]).capitalize() + "." for k in range(0, 240, 12))
        texts.append(text[:TEXT_BYTES].ljust(TEXT_BYTES, "."))
        urls.append(f"https://www.{said[0]}-{said[1]}.com/{said[2]}/{i}.html")
    pq.write_table(pa.table({"id": [f"{seed}-{i}" for i in range(docs)], "text": texts, "url": urls,
                             "date": ["2026-11-21T00:00:00Z"] * docs}), path, compression="zstd",
                   row_group_size=GROUP_DOCS)


def make_inputs(root: Path, docs: int) -> Path:
    """Make a folder of files with `docs` documents in total."""
    folder = root / f"in-{docs}"
    folder.mkdir()
    for n, start in enumerate(range(0, docs, FILE_DOCS)):
        rows = min(FILE_DOCS, docs - start)
        base = root / f"base-{n % DISTINCT}-{rows}.parquet"
        if not base.exists():
            make_file(base, n % DISTINCT, rows)
        os.link(base, folder / f"{n:05d}.parquet")
    return folder


# -- the same work by hand -------------------------------------------------------------------------------------------
_SIGNALS = ("bytes",)
LOCATOR = pa.struct([("file", pa.string()), ("offset", pa.int64()), ("record", pa.int64()), ("sub", pa.string())])
_stages: list[Any] = []


def by_hand(task: tuple[str, str]) -> dict[str, Any]:
    """Take one file through the stages by a plain loop, and write the result. `task` is (path of the file, folder to
    write to). Returns the numbers of rows and the hashes of the written files."""
    from stages.catalog import stage_class
    from stages.document import Document, document_id

    path, folder = task
    if not _stages:
        for name in STEPS:
            _stages.append(stage_class(name)({}))
            _stages[-1].setup()
            _stages[-1].warm()
    name = os.path.basename(path)
    fields = [("id", pa.string()), ("text", pa.large_string()), ("url", pa.string()), ("source", pa.string()),
              ("language", pa.string()), ("date", pa.string()), ("locator", LOCATOR),
              ("signals", pa.struct([(s, pa.float64()) for s in _SIGNALS])), ("meta", pa.string()),
              ("loss_spans", pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64())])))]
    kept = pa.schema(fields)
    outputs = {"kept": kept, "dropped": pa.schema([*fields, ("reason", pa.string()), ("stage", pa.string())])}
    files = {k: os.path.join(folder, f"{k}-{name}") for k in outputs}
    writers = {k: pq.ParquetWriter(files[k], schema, compression="zstd", compression_level=3, version="2.6",
                                   data_page_version="1.0", use_dictionary=["source", "language", "locator.file"],
                                   write_statistics=["id", "source", "language", "date", "locator.offset",
                                                     "locator.record", "signals.bytes"])
               for k, schema in outputs.items()}
    rows: dict[str, list[Any]] = {k: [] for k in outputs}
    digests: dict[str, list[tuple[str, bytes]]] = {k: [] for k in outputs}
    held = dict.fromkeys(outputs, 0)

    def flush(to: str) -> None:
        if rows[to]:
            id, text, url, date, record, group, size, meta, *fate = zip(*rows[to])
            n = len(id)
            columns = [
                pa.array(id), pa.array(text, pa.large_string()), pa.array(url), pa.array(["web"] * n),
                pa.array([""] * n), pa.array(date, pa.string()),
                pa.StructArray.from_arrays([pa.array([name] * n), pa.array(group, pa.int64()),
                                            pa.array(record, pa.int64()), pa.array([""] * n)], fields=list(LOCATOR)),
                pa.StructArray.from_arrays([pa.array(size, pa.float64())], names=list(_SIGNALS)),
                pa.array(meta), pa.nulls(n, fields[-1][1]), *map(pa.array, fate)]
            writers[to].write_table(pa.Table.from_arrays(columns, schema=outputs[to]), row_group_size=n)
            rows[to], held[to] = [], 0

    record = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(256, row_groups=[group]):
                for given, text, url, date in zip(*(batch.column(c).to_pylist()
                                                    for c in ("id", "text", "url", "date"))):
                    doc = Document(document_id("web", name, "", record), text, source="web", url=url, date=date)
                    stage = reason = None
                    for stage in _stages:
                        reason = stage.process(doc)
                        if reason is not None:
                            break
                    to = "kept" if reason is None else "dropped"
                    meta = json.dumps({"id": given})
                    data = doc.text.encode()
                    h = hashlib.sha256(f"{doc.id}\0{doc.url}\0{date}\0{group}\0{record}\0{meta}\0{reason}\0".encode())
                    h.update(data)
                    digests[to].append((doc.id, h.digest()))
                    rows[to].append((doc.id, doc.text, doc.url, date, record, group, len(data), meta,
                                     *(() if reason is None else (reason, stage.name))))
                    held[to] += len(data) + 200
                    if held[to] > 16 << 20:
                        flush(to)
                    record += 1
    out: dict[str, Any] = {}
    for k, writer in writers.items():
        flush(k)
        writer.close()
        content = hashlib.sha256(b"".join(d for _, d in sorted(digests[k]))).hexdigest()
        with open(files[k], "rb") as f:
            sha256 = hashlib.file_digest(f, "sha256").hexdigest()
        with open(files[k], "rb+") as f:
            os.fsync(f.fileno())
        out[k] = {"rows": len(digests[k]), "content": content, "sha256": sha256}
    return out


def run_pool(folder: Path, out: Path, workers: int) -> None:
    out.mkdir()
    files = sorted(str(p) for p in folder.iterdir())
    with multiprocessing.get_context("spawn").Pool(workers, pa.set_cpu_count, (1,)) as pool:
        list(pool.imap_unordered(by_hand, [(f, str(out)) for f in files]))
        pool.close()
        pool.join()


# -- the engine ------------------------------------------------------------------------------------------------------
def run_engine(folder: Path, out: Path, workers: int, backend: str) -> None:
    from pipeline.recipe.load import load_recipe
    from pipeline.run import make_backend, run_recipe

    recipe = out.with_suffix(".yaml")
    recipe.write_text(f"version: 1\nsources: {{web: {{read: parquet, path: {folder.name}/*.parquet}}}}\n"
                      f"datasets: {{clean: {{from: web, steps: [{', '.join(STEPS)}]}}}}\n")
    run_recipe(load_recipe(str(recipe)), str(out), make_backend=make_backend(backend, workers, None), report=False)


# -- measuring -------------------------------------------------------------------------------------------------------
def measure(side: str, folder: Path, out: Path, workers: int) -> dict[str, float]:
    """Run one side in a process of its own. Returns CPU seconds of it and all its descendants, and wall seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, __file__, "--side", side, "--folder", str(folder), "--out", str(out),
                    "--workers", str(workers)], check=True,
                   env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"cpu_s": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
            "wall_s": time.monotonic() - began}


def texts_of(files: list[Path]) -> tuple[int, str]:
    """Return the number of documents in some files, and a sha256 of their ids and texts that does not depend on their
    order."""
    digests = []
    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["id", "text"]):
                digests += [hashlib.sha256(f"{i}\0{t}".encode()).digest()
                            for i, t in zip(batch.column("id").to_pylist(), batch.column("text").to_pylist())]
    return len(digests), hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def main() -> int:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--docs", type=int, nargs="+", default=[1_000_000, 3_000_000])
    args.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    args.add_argument("--backend", choices=["process", "inline"], nargs="+", default=["process"])
    args.add_argument("--repeat", type=int, default=1,
                      help="runs of each side and number, in turn; the least disturbed one counts")
    args.add_argument("--scratch", default=None, help="folder for about 2 GB a million documents")
    for internal in ("--side", "--folder", "--out"):
        args.add_argument(internal, help=argparse.SUPPRESS)
    given = args.parse_args()
    if given.side:
        folder, out = Path(given.folder), Path(given.out)
        if given.side == "pool":
            run_pool(folder, out, given.workers)
        else:
            run_engine(folder, out, given.workers, given.side)
        return 0
    docs = sorted(given.docs)
    result: dict[str, Any] = {"docs": docs, "runs": {}}
    with tempfile.TemporaryDirectory(prefix="overhead-", dir=given.scratch) as root:
        folders = {n: make_inputs(Path(root), n) for n in docs}
        for backend in given.backend:
            workers = 1 if backend == "inline" else given.workers
            runs: dict[str, dict[int, list[dict[str, float]]]] = {s: {n: [] for n in docs} for s in ("pool", backend)}
            for repeat in range(given.repeat):
                for n in docs:
                    for side in runs:
                        out = Path(root) / f"{side}-{n}-{repeat}"
                        runs[side][n].append(measure(side, folders[n], out, workers))
                        print(f"{side:8s} {n:9,d} documents, {workers} workers: {runs[side][n][-1]['cpu_s']:7.2f} s of "
                              f"CPU, {runs[side][n][-1]['wall_s']:7.2f} s", flush=True)
                    compare(Path(root), backend, n, repeat)
            result["runs"][backend] = report(runs, backend, docs)
    print(json.dumps(result, indent=1))
    return 0


def compare(root: Path, backend: str, docs: int, repeat: int) -> None:
    """Check that both sides wrote the same documents, then delete their output."""
    theirs, ours = root / f"pool-{docs}-{repeat}", root / f"{backend}-{docs}-{repeat}"
    a = texts_of(sorted(theirs.glob("kept-*.parquet")))
    b = texts_of(sorted((ours / "datasets" / "clean").glob("part-*.parquet")))
    if a != b:
        raise SystemExit(f"the sides disagree: {a[0]} documents by hand, {b[0]} by the engine")
    subprocess.run(["rm", "-r", str(theirs), str(ours)], check=True)


def report(runs: dict[str, dict[int, list[dict[str, float]]]], backend: str, docs: list[int]) -> dict[str, Any]:
    few, many = docs[0], docs[-1]
    out: dict[str, Any] = {}
    for what in ("cpu_s", "wall_s"):
        slope = {side: (min(r[what] for r in by[many]) - min(r[what] for r in by[few])) / max(many - few, 1) * 1e6
                 for side, by in runs.items()}
        out[what] = {**{f"{side}_us_a_document": round(s, 2) for side, s in slope.items()},
                     "ratio": round(slope[backend] / slope["pool"], 3)}
        print(f"{backend}: {what[:-2]:4s} {slope['pool']:6.1f} µs a document by hand, {slope[backend]:6.1f} µs by the "
              f"engine: {slope[backend] / slope['pool']:.3f} x (at most {LIMIT} wanted)", flush=True)
    return out


if __name__ == "__main__":
    sys.exit(main())
