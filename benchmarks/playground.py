"""Measure time and memory of the playground on generated documents.

    python benchmarks/playground.py --documents 1000000 --parts 200

Writes a store as a finished run leaves it, and asks the questions that a page of the playground asks while thresholds
are moved. Their answers need signals but no texts, so the texts are short. Every round is a process of its own, and the
files are in the page cache. The figures are median CPU seconds of the process, followed by the least wall clock
seconds, which say little on a busy machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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

from pipeline.base.parquet import parquet_writer
from pipeline.passes.replay import THRESHOLDS
from pipeline.recipe import load_recipe
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.parts import document_schema
from pipeline.store.records import FileInfo, PartRecord
from pipeline.store.runs import write_tasks
from stages.filter.fineweb import FineWeb
from stages.filter.gopher_quality import GopherQuality
from stages.filter.gopher_repetition import GopherRepetition

STEPS = ["gopher_repetition", "gopher_quality", "fineweb"]
STAGES = [GopherRepetition(), GopherQuality(), FineWeb()]
SIGNALS = sorted({name for stage in STAGES for name in stage.signals})
RECIPE = ("version: 1\nsources: {web: {read: jsonl, path: in}}\ndatasets:\n  clean: {from: web, steps: "
          "[gopher_repetition, gopher_quality, fineweb]}\nrun: {signals: MODE}\n")


def generate(top: Path, documents: int, parts: int, mode: str) -> None:
    """Write a store with a finished run named `r`, of `documents` documents in `parts` parts."""
    (top / "in").mkdir(parents=True)
    (top / "r.yaml").write_text(RECIPE.replace("MODE", mode))
    recipe = load_recipe(top / "r.yaml")
    store, keys = Store(str(top / "store")), []
    log = Log.open(store, run="r")
    for part in range(parts):
        key = hashlib.blake2b(str(part).encode(), digest_size=16).hexdigest()
        files = _part(store, key, part, documents // parts, mode)
        log.append(PartRecord(key, "documents", "clean", "a", files, {}))
        keys.append(key)
    log.close()
    store.write("runs/r/recipe.yaml", recipe.canonical_yaml().encode())
    store.write("runs/r/plan.json", json.dumps({"nodes": [{
        "name": "clean", "kind": "pass", "dataset": "clean", "deps": [], "steps": STEPS, "publishes": True,
        "tasks": parts}]}).encode())
    write_tasks(store, "r", [("clean", keys)])


def _part(store: Store, key: str, number: int, rows: int, mode: str) -> dict[str, FileInfo]:
    """Write kept.parquet and dropped.parquet of a part. Signals are drawn at random around the thresholds, and the
    stages derive the verdicts from them, as in a run."""
    from pipeline.passes.columnwise import DocumentColumns, for_all

    rng = np.random.default_rng(number)
    values = {name: np.round(rng.gamma(2, 0.03, rows), 6) for name in SIGNALS}
    values |= {"gopher_words": np.floor(rng.lognormal(5.5, 1.2, rows)),
               "gopher_stop_words": rng.integers(0, 9, rows) * 1.0,
               "gopher_mean_word_length": rng.normal(4.6, 0.5, rows), "gopher_alpha_words_ratio": rng.beta(40, 3, rows),
               "fineweb_line_punct_ratio": rng.beta(4, 4, rows), "fineweb_short_line_ratio": rng.beta(2, 6, rows),
               "fineweb_char_dup_ratio": rng.gamma(0.3, 0.01, rows), "fineweb_list_ratio": rng.gamma(1, 0.05, rows)}
    for name in values:
        if name.startswith("gopher_rep_"):
            values[name] = rng.gamma(1, 0.02, rows)
    columns = DocumentColumns(rows, dict(values))
    ends, reasons = np.full(rows, len(STAGES)), np.full(rows, "", object)
    for place, stage in enumerate(STAGES):
        verdicts, codes = for_all(stage.verdict, columns, np.arange(rows))
        reason = np.array([v or "" for v in verdicts], object)[codes]
        fresh = (reason != "") & (ends == len(STAGES))
        ends[fresh], reasons[fresh] = place, reason[fresh]
    if mode != "all":
        for place, stage in enumerate(STAGES):
            for name in stage.signals:
                values[name] = np.where(ends < place, np.nan, values[name])
    values["bytes"] = np.floor(values["gopher_words"] * 6) if mode == "all" else np.floor(rng.lognormal(7.3, 1, rows))
    ids = [hashlib.blake2b(f"{number}/{i}".encode(), digest_size=16).hexdigest() for i in range(rows)]
    columns_ = {"id": np.array(ids, object), "source": rng.choice(["web", "books", "code", "wiki"], rows),
                "language": rng.choice(["en", "de", "fr", "es", "it", "zh", "ja", ""], rows)}
    files = {}
    for name, mask in (("kept.parquet", ends == len(STAGES)), ("dropped.parquet", ends < len(STAGES))):
        path = f"objects/{key}/a.{name}"
        files[name] = _write(store, path, {k: v[mask] for k, v in columns_.items()},
                             {k: v[mask] for k, v in values.items()}, ends[mask], reasons[mask], "dropped" in name)
    return files


def _write(store: Store, path: str, columns: dict[str, Any], signals: dict[str, Any], ends: Any, reasons: Any,
           dropped: bool) -> FileInfo:
    schema = document_schema(SIGNALS, dropped)
    rows = len(ends)
    struct = schema.field("signals").type
    arrays: dict[str, Any] = {name: pa.array(values.tolist(), pa.string()) for name, values in columns.items()}
    arrays["text"] = pa.array(["A text of the length that texts are not."] * rows, pa.large_string())
    arrays["signals"] = pa.StructArray.from_arrays(
        [pa.array(signals[f.name], pa.float64(), from_pandas=True) for f in struct], fields=list(struct))
    arrays["meta"] = pa.array(["{}"] * rows)
    if dropped:
        arrays["stage"] = pa.array([STEPS[end] for end in ends.tolist()], pa.string())
        arrays["reason"] = pa.array(reasons.tolist(), pa.string())
    else:
        from stages.stage import role_of

        thresholds = [{f: v for f, v in s.config.model_dump(mode="json").items()
                       if role_of(type(s.config), f) == "decision"} for s in STAGES]
        schema = schema.with_metadata({THRESHOLDS: json.dumps(thresholds, sort_keys=True).encode()})
    table = pa.table([arrays.get(f.name, pa.nulls(rows, f.type)) for f in schema], schema=schema)
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        with parquet_writer(file.name, schema, compression_level=3) as writer:
            writer.write_table(table)
        data = Path(file.name).read_bytes()
    store.write(path, data)
    digest = hashlib.sha256(data).hexdigest()
    return FileInfo(path, len(data), digest, digest, rows)


def measure(top: Path) -> dict[str, Any]:
    """Ask what a page of the playground asks while somebody moves thresholds. Returns {question: [CPU seconds, wall
    seconds]}, and the largest resident memory."""
    from pipeline.service.cube import make_cube
    from pipeline.service.playground import Changes, Playground

    figures: dict[str, Any] = {}

    def timed(name: str, ask: Any) -> Any:
        began, cpu = time.perf_counter(), time.process_time()
        answer = ask()
        figures[name] = [round(time.process_time() - cpu, 3), round(time.perf_counter() - began, 3)]
        return answer

    def ask(step: int, key: str, value: Any, exact: bool) -> Any:
        return game.answer(Changes({step: {key: value}}), exact)

    game = timed("the run's files found", lambda: Playground(Store(str(top / "store")), "r", "clean"))
    timed("first answer (sample), nothing in memory", lambda: ask(1, "min_doc_words", 60, False))
    figures["rss_mb after it"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    timed("the threshold moved (sample)", lambda: ask(1, "min_doc_words", 80, False))
    timed("the threshold moved (exact)", lambda: ask(1, "min_doc_words", 80, True))
    timed("the same key again (exact)", lambda: ask(1, "min_doc_words", 90, True))
    timed("laxer (exact)", lambda: ask(1, "min_doc_words", 20, True))
    timed("a key of another step, columns unread (exact)", lambda: ask(2, "line_punct_thr", 0.2, True))
    timed("the same key again (exact), other step", lambda: ask(2, "line_punct_thr", 0.25, True))
    timed("a step left out (exact)", lambda: game.answer(Changes(off=frozenset({2})), True))
    cube = timed("cube", lambda: make_cube(game, Changes(), 1, "min_doc_words"))
    timed("a move of the cube", lambda: cube.at(77))
    figures["cube_kb"] = len(json.dumps(cube.to_json())) // 1024
    figures["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=200)
    parser.add_argument("--mode", choices=("until-drop", "all"), default="until-drop")
    parser.add_argument("--keep", metavar="FOLDER", help="write the store here, and leave it")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(Path(options.measure))))
        return
    with tempfile.TemporaryDirectory() as folder:
        top = Path(options.keep or folder)
        if not (top / "store").exists():
            generate(top, options.documents, options.parts, options.mode)
        rounds = [json.loads(subprocess.run(
            [sys.executable, __file__, "--measure", str(top)], capture_output=True, check=True,
            text=True, env=os.environ.copy()).stdout) for _ in range(options.repeat)]
    for name in rounds[0]:
        cpu, wall = zip(*(r[name] if isinstance(r[name], list) else (r[name], "") for r in rounds))
        print(f"{name:50} {sorted(cpu)[len(cpu) // 2]:>8}   {min(wall)}")


if __name__ == "__main__":
    main()
