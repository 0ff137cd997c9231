"""`tokenmill train explain`: shows the documents of a step, and compares its loss with that of neighbouring steps.

The documents of a step need not be logged in training. The curriculum determines which tokens a step reads. The shards'
document table says which documents these tokens belong to, and in which part (file) and row of the store's published
datasets each document is. From there come URLs, signals (numbers that filters computed) and texts. Only the losses of
single rows (samples) have to be recorded in training: worst_rows.jsonl has the highest of each interval between two
printed lines.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

from pipeline.base.visible import json_text, visible
from trainer.base.arguments import of_a_run, positive

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from trainer.checkpoint.ledger import Ledger
    from trainer.data.step import Step
    from trainer.loop.run import Run

#: steps shown before and after the requested one
AROUND = 5
#: minimum of steps for a meaningful standard deviation
TELLING = 5
#: number of files (document tables, parts of datasets) read in parallel, because a bucket answers each request slowly
READERS = 16
#: characters of a document's text that are shown
EXCERPT = 400
#: fields of a phase that determine which samples its steps read
DECIDE = ("name", "sequence", "batch", "ramp", "weights")
LIGHT = ("id", "url", "locator", "source", "language")
#: control characters that a terminal would execute instead of showing
CONTROL = dict.fromkeys((*range(32), *range(127, 160), *range(0x200B, 0x2010), *range(0x2028, 0x202F),
                         *range(0x2066, 0x206A)), " ")


def add_parser(commands: Any) -> None:
    explain = commands.add_parser(
        "explain", parents=[of_a_run()], description="Show the documents a step consisted of, those of its worst rows "
        "first, and its loss beside its neighbours'. Texts and URLs are shown as the store holds them.",
        epilog="example: tokenmill train explain store/runs/first 371 --worst 3")
    explain.add_argument("step", metavar="STEP", type=positive, help="number of the step, as printed (from 1)")
    which = explain.add_mutually_exclusive_group()
    which.add_argument("--row", type=positive, metavar="N", help="only row N of the step (from 1), with signals and "
                                                                 "texts from about where it reads them")
    which.add_argument("--worst", type=positive, metavar="N", help="only the N rows with the highest loss, likewise")
    explain.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    from trainer.data.remote import reading
    from trainer.loop.run import open_run

    opened = open_run(options.run, options.store, options.out, options.overrides)
    with reading(opened):
        explanation = explain(opened, options.step, options.row, options.worst)
    print(json_text(explanation) if options.json else visible(text(explanation)))
    return 0


def explain(run: Run, number: int, row: int | None = None, worst: int | None = None) -> dict[str, Any]:
    """Return everything that the command `tokenmill train explain` prints about step `number` (from 1). With `row`,
    only that row (sample) of the step is included; with `worst`, only the `worst` rows with the highest loss. Raises
    ConfigError for a step or row that does not exist."""
    from tokenizer.mixture.order import Order
    from trainer.base.config import ConfigError
    from trainer.checkpoint.ledger import Ledger
    from trainer.data.remote import place, shard_set
    from trainer.loop.high_loss import NAME as WORST
    from trainer.loop.high_loss import read_high_loss
    from trainer.loop.metrics_buffer import finite

    curriculum = run.curriculum
    step = next(islice(run.steps(), number - 1, number), None)
    if step is None:
        raise ConfigError(f"explain: there is no step {number}; the curriculum has {curriculum.steps}")
    if row is not None and row > step.batch:
        raise ConfigError(f"--row {row}: step {number} has {step.batch} rows")
    ledger = Ledger.read(run.out)
    comparison, stale = beside(run, step, ledger)
    losses = {line["sample"]: math.inf if line["loss"] is None else line["loss"]
              for line in (() if stale else read_high_loss(run.out, number, ledger.why(number) is not None))}
    at = Order(curriculum).locate(step.first, step.stop)
    rows = [{"row": i + 1, "sample": step.first + i, "stream": curriculum.streams[stream].name, "epoch": epoch,
             "window": window, "tokens": length, "loss": losses.get(step.first + i)}
            for i, (stream, epoch, window, length) in enumerate(zip(*(x.tolist() for x in (
                at.stream, at.epoch, at.window, at.sequence))))]
    rows.sort(key=lambda r: (-math.inf if r["loss"] is None else r["loss"], -r["row"]), reverse=True)
    unranked = None
    if worst is not None and not losses:
        unranked = f"none of its rows is among the worst of its interval ({WORST}): these are the first, not the worst"
    if row is not None:
        rows = [r for r in rows if r["row"] == row]
    elif worst is not None:
        rows = [r for r in rows if r["loss"] is not None][:worst] or rows[:worst]
    sets = {s.name: shard_set(run, s) for s in curriculum.streams if any(r["stream"] == s.name for r in rows)}
    with ThreadPoolExecutor(READERS) as pool:
        for entry, contents in zip(rows, pool.map(lambda r: documents(sets[r["stream"]], r["window"], r["tokens"]),
                                                  rows)):
            entry["documents"] = contents
        absent = look_up(*place(run), [document for entry in rows for document in entry["documents"]],
                         row is not None or worst is not None, pool)
    for entry in rows:
        for document in entry["documents"]:
            del document["key"], document["at"]
        entry["loss"] = finite(entry["loss"])
    return {"step": number, "steps": curriculum.steps, "phase": curriculum.phases[step.phase].name,
            "samples": [step.first, step.stop], "skip_reason": ledger.why(number),
            "stale": stale, **comparison, "unranked": unranked, "rows": rows, "not_at_hand": absent}


def documents(shards: Any, window: int, length: int) -> list[dict[str, Any]]:
    """Return the documents of a sample, which reads a window of `length` + 1 consecutive tokens of a stream; `window`
    is the window's number in the stream. The documents with the most tokens in the window come first. The key `tokens`
    of a document is its range [first, stop) of positions in the window. The last position of a window is only a target,
    so a document that begins there is left out."""
    start = window * length
    result = []
    for span in shards.documents(start, start + length + 1):
        first, stop = max(span.start - start, 0), min(span.stop - start, length + 1)
        if first < length:
            result.append({"id": span.id, "tokens": [first, stop], "begins": max(start - span.start, 0),
                          "of": span.stop - span.start, "bytes": span.n_bytes,
                          "key": shards.manifest.parts[span.part] if shards.manifest.parts else None, "at": span.row})
    return sorted(result, key=lambda d: d["tokens"][0] - d["tokens"][1])


def look_up(store: FileSystem, top: str, documents: list[dict[str, Any]], details: bool, pool: Executor) -> str | None:
    """Add to each of `documents` what the published datasets (folders below `top`/datasets) say about it: url, locator,
    source and language; with `details` also signals, meta and an excerpt of the text. Returns a message if some
    documents are missing from the datasets, else None."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import fs

    from pipeline.base.parquet import read_table

    by_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for document in documents:
        by_key[document["key"]].append(document)
    missing = {key for key in by_key if key}
    names = sorted(f.path for f in store.get_file_info(fs.FileSelector(f"{top}/datasets", allow_not_found=True))
                   if f.type == fs.FileType.Directory)
    for folder in names if missing else ():
        try:
            with store.open_input_file(f"{folder}/.manifest") as source:
                table = read_table(source, ["part", "key"])
        except FileNotFoundError:
            continue
        table = table.filter(pc.is_in(table["key"], pa.array(sorted(missing), pa.string())))
        keys, parts = table["key"].to_pylist(), [f"{folder}/{part}" for part in table["part"].to_pylist()]
        missing -= {key for key, there in zip(keys, pool.map(
            lambda key, part, name=folder: read_rows(store, part, name.rpartition("/")[2], by_key[key], details),
            keys, parts)) if there}
    absent = [document for document in documents if "dataset" not in document]
    if not absent:
        return None
    return (f"{len(absent)} of {len(documents)} documents are not in {top}/datasets (any more): of them only what the "
            f"shards know is shown; look into the store the shards were made in")


def read_rows(store: FileSystem, part: str, dataset: str, documents: list[dict[str, Any]], details: bool) -> bool:
    """Add to each of `documents` the columns of its row in the Parquet file `part`. The key `at` of a document is the
    number of its row. If the id in this row differs from the document's, the dataset has changed since the shards were
    made, and nothing is added. Returns whether the file exists."""
    import pyarrow as pa

    from pipeline.base.parquet import open_parquet
    from trainer.base.config import ConfigError

    try:
        source = store.open_input_file(part)
    except FileNotFoundError:
        return False
    try:
        file = open_parquet(source)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{part}: damaged ({error}); run the recipe that writes {dataset} again") from None
    with source, file:
        wide = ("signals", "meta", "text") if details else ()
        columns = [c for c in (*LIGHT, *wide) if c in file.schema_arrow.names]
        start = 0
        for group in range(file.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            here = [document for document in documents if start <= document["at"] < stop]
            start, first = stop, start
            if not here:
                continue
            table = file.read_row_group(group, columns=columns)
            for document in here:
                [values] = table.slice(document["at"] - first, 1).to_pylist()
                if values.pop("id") != document["id"]:
                    continue
                if "text" in values:                   # the place is approximate, as token lengths vary
                    text = values["text"] or ""
                    begins = len(text) * document["begins"] // document["of"]
                    values["text"] = text[begins:begins + EXCERPT]
                if "signals" in values:
                    values["signals"] = {k: v for k, v in (values["signals"] or {}).items() if v is not None}
                document.update(values, dataset=dataset, verdict="kept")
    return True


def beside(run: Run, step: Step, ledger: Ledger) -> tuple[dict[str, Any], str | None]:
    """Return (metrics, None), where the metrics compare a step with its neighbours. If the curriculum has been edited
    since the step was performed, so that the step now has other samples, the second value is a text that says so, and
    the metrics are left out.

    `around` has metrics of the neighbouring steps. `loss` and `norm` have the step's value, the mean and standard
    deviation over the steps before it that were not skipped, and the step's distance from the mean in standard
    deviations. If training went back to a checkpoint in order to skip this step, the metrics are those from before the
    last such return."""
    from trainer.observe.metrics import TURNS, scan, standing

    number, most = step.number + 1, run.config.stability.window
    near = range(number - 8 * most, number + AROUND + 1)         # enough to contain `most` accepted steps
    lines = list(scan(run.out / "metrics.jsonl",
                      lambda event, at, _: event in TURNS or (event == "step" and at in near)))
    back = max((i for i, line in enumerate(lines)
                if line["event"] == "rewind" and line["steps"][0] <= number < line["steps"][1]), default=len(lines))
    lines = standing(lines[:back])
    stale = edited(run, number, lines, ledger)
    lines = [line for line in lines if line["event"] == "step" and not stale]
    own = next((line for line in lines if line["step"] == number), None)
    before = [line for line in lines if line["step"] < number and not line.get("skipped")]
    result: dict[str, Any] = {"skipped": own.get("why") if own and own.get("skipped") else None, "around": [
        {key: line.get(key) for key in ("step", "loss", "grad_norm", "why")} for line in lines
        if abs(line["step"] - number) <= AROUND]}
    for name, key in (("loss", "loss"), ("norm", "grad_norm")):
        values = [line[key] for line in before if line[key] is not None][-most:]
        value = own[key] if own else None
        comparison: dict[str, Any] = {"value": value, "mean": None, "sigma": None, "distance": None,
                                      "steps": len(values)}
        if value is not None and len(values) > 1:
            mean, sigma = statistics.fmean(values), statistics.stdev(values)
            comparison |= {"mean": mean, "sigma": sigma,
                     "distance": (value - mean) / sigma if sigma and len(values) >= TELLING else None}
        result[name] = comparison
    return result, stale


def edited(run: Run, number: int, lines: list[dict[str, Any]], ledger: Ledger) -> str | None:
    """Check whether `lines` of metrics.jsonl still describe step `number`. They do not if the curriculum was edited
    after the step was performed, so that the step now has other samples. Returns None if they do, else a text that says
    why not."""
    begun = next((line for line in reversed(lines) if line["event"] in ("start", "resume")), None)
    first = None
    if begun is not None and "phases" in begun:
        steps = 0
        for old, phase in zip_longest(begun["phases"], run.curriculum.phases):
            now = phase and {key: getattr(phase, key) for key in DECIDE}
            then = now and old and {key: old.get(key, value) for key, value in now.items()}
            if not now or then != now or old["steps"] != phase.steps:      # a cut phase is the same up to the cut
                first = steps + (min(old["steps"], phase.steps) if now and then == now else 0)
                break
            steps += phase.steps
    if first is None:                           # training resumed after the edit, so the ledger has it
        rewinds = [i for i, line in enumerate(ledger.lines) if line["event"] == "rewind"
                   and line["steps"][0] <= number < line["steps"][1]]
        first = min((line["step"] for line in ledger.lines[rewinds[-1]:] if line["event"] == "edit"), default=None) \
            if rewinds else None
    if first is None or number <= first or not any(line["step"] == number for line in lines):
        return None
    return f"it was performed before the curriculum was edited from step {first:,} on, with other samples than these"


# -- as text ---------------------------------------------------------------------------------------------------------
def text(step: dict[str, Any]) -> str:
    """Format `step`, the result of `explain`, for a terminal."""
    first, stop = step["samples"]
    lines = [f"step {step['step']:,} of {step['steps']:,}, phase {step['phase']}: samples {first:,} to {stop - 1:,}"]
    if step["stale"]:
        lines.append(f"  {step['stale']}: its losses of then are left out")
    if step["skip_reason"]:
        before = "; before that it was like this" if step["loss"]["value"] is not None else ""
        lines.append(f"  was skipped ({step['skip_reason']}){before}")
    elif step["skipped"]:
        lines.append(f"  changed nothing: {step['skipped']}")
    for name in ("loss", "norm"):
        x = step[name]
        if x["mean"] is not None:
            lines.append(f"  {name} {x['value']:.4g}, before it {x['mean']:.4g} ± {x['sigma']:.2g} ({x['steps']} steps)"
                         + (f": {x['distance']:+.1f} σ" if x["distance"] is not None else ""))
    if step["around"]:
        lines.append(f"\n    {'step':>8}{'loss':>10}{'norm':>10}")
    for line in step["around"]:
        mark = "→" if line["step"] == step["step"] else " "
        lines.append(f"  {mark} {line['step']:>8,}{cell(line['loss'])}{cell(line['grad_norm'])}  "
                     f"{line['why'] or ''}".rstrip())
    if step["unranked"]:
        lines.append(f"\n{step['unranked']}")
    for row in step["rows"]:
        loss = "" if row["loss"] is None else f"  loss {row['loss']:.4f}"
        lines.append(f"\nrow {row['row']} (sample {row['sample']:,}){loss}  {row['stream']}, epoch {row['epoch']}, "
                     f"window {row['window']:,} ({row['tokens']:,} tokens)")
        for d in row["documents"]:
            lines += document_lines(d)
    if step["not_at_hand"]:
        lines.append(f"\n{step['not_at_hand']}")
    return "\n".join(lines)


def document_lines(document: dict[str, Any]) -> list[str]:
    """Format a document that a step has read as lines of text for a terminal. `document` is an entry of the result of
    `documents`, to which `look_up` has added what the datasets say."""
    first, stop = document["tokens"]
    of_total = "" if stop - first >= document["of"] else f" of {document['of']:,}"
    place = document.get("url") or (document.get("locator") or {}).get("file")     # documents from files have no URL
    labels = [document.get("source"), document.get("language"), place] if "dataset" in document else []
    out = [f"  {stop - first:>6,}{of_total} tokens from {document['begins']:,}  {document['id']}  "
           f"{'  '.join(str(x) for x in labels if x)}"]
    if document.get("signals"):
        out.append(f"         kept in {document['dataset']}: "
                   + "  ".join(f"{key}={value:.4g}" for key, value in document["signals"].items()))
    if document.get("meta") not in (None, "", "{}"):
        out.append(f"         {document['meta']}")
    if document.get("text"):
        out.append(f"         {'… ' * (document['begins'] > 0)}{document['text']}"
                   + (" …" if len(document["text"]) == EXCERPT else ""))
    return [line.translate(CONTROL).rstrip() for line in out]


def cell(x: float | None) -> str:
    return f"{'–':>10}" if x is None else f"{x:>10.4f}"
