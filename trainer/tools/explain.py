"""`tokenmill train explain`: shows the documents of a step, and compares its loss with the losses of neighbouring
steps. With `--task`, it explains scores instead (`trainer.tools.explain_task`).

The documents of a step need not be logged in training. The curriculum determines which tokens a step reads. The shards'
document table says which documents these tokens belong to, and in which part (file) and row of the store's published
datasets each document is. URLs, signals (numbers that filters computed) and texts are read from there. Only the losses
of single rows (samples) have to be recorded in training: worst_rows.jsonl has the rows with the highest loss in each
interval between two printed lines or checkpoints.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pipeline.base.visible import json_text, visible
from trainer.base.arguments import of_a_run, positive

if TYPE_CHECKING:
    from trainer.loop.run import Run

#: number of files (document tables, parts of datasets) read in parallel, because a bucket answers each request slowly
READERS = 16


def add_parser(commands: Any) -> None:
    explain = commands.add_parser(
        "explain", parents=[of_a_run()], description="Show the documents a step consisted of, those of its worst rows "
        "first, and its loss beside that of nearby steps. Texts and URLs are shown as the store holds them.",
        epilog="example: tokenmill train explain store/runs/first 371 --worst 3")
    explain.add_argument("step", metavar="STEP", type=positive, help="number of the step, as printed (from 1)")
    which = explain.add_mutually_exclusive_group()
    which.add_argument("--row", type=positive, metavar="N",
                       help="only row N of the step (from 1), with signals and texts from about where it reads them")
    which.add_argument("--worst", type=positive, metavar="N",
                       help="only the N rows with the highest loss, with signals and texts as with --row")
    which.add_argument("--task", metavar="NAME|FILE", help="instead, show the items of this benchmark task that were "
                                                           "won and lost, and the documents nearest to them")
    explain.add_argument("--against", metavar="STEP|FOLDER", help="with --task: an earlier step, or another training, "
                                                                  "to compare with (default: the first scored step)")
    explain.add_argument("--data", metavar="FOLDER", help="with --task: the folder with the tasks' data (default: that "
                                                          "of evaluate.tasks)")
    explain.add_argument("--items", type=positive, metavar="N", help="with --task: show N won and N lost items "
                                                                     "(default: 3)")
    explain.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    from trainer.base.config import ConfigError
    from trainer.data.remote import reading
    from trainer.loop.run import open_run

    if options.task:
        from trainer.tools import explain_task

        return explain_task.show(options)
    if options.against or options.data or options.items:
        raise ConfigError("--against, --data and --items are for --task NAME; give it, or leave them out")
    opened = open_run(options.run, options.store, options.out, options.overrides)
    with reading(opened):
        explanation = explain(opened, options.step, options.row, options.worst)
    print(json_text(explanation) if options.json else visible(text(explanation)))
    return 0


def explain(run: Run, number: int, row: int | None = None, worst: int | None = None) -> dict[str, Any]:
    """Return everything about step `number` (from 1) that the command prints. With `row`, only that row (sample) of the
    step is included; with `worst`, only the `worst` rows with the highest recorded loss, or its first rows if none is
    recorded. Raises ConfigError for a step or row that does not exist."""
    from tokenizer.shards.find import window_documents
    from tokenizer.shards.origin import EXCERPT, LIGHT, WHOLE, add_origins
    from trainer.data.remote import place, shard_set
    from trainer.observe import explain as observe
    from trainer.tools.published import datasets, part

    store, top = place(run)

    def add_documents(rows: list[dict[str, Any]]) -> str | None:
        sets = {s.name: shard_set(run, s) for s in run.curriculum.streams if any(r["stream"] == s.name for r in rows)}
        with ThreadPoolExecutor(READERS) as pool:
            for r, documents in zip(rows, pool.map(
                    lambda r: window_documents(sets[r["stream"]], r["window"], r["tokens"]), rows)):
                r["documents"] = documents
            everything = [d for r in rows for d in r["documents"]]
            missing = add_origins(everything, datasets(store, top), lambda path: part(store, path),
                                  LIGHT if row is None and worst is None else WHOLE, EXCERPT, pool)
        return (f"{missing} of {len(everything)} documents are not in {top}/datasets (any more): of them only what the "
                f"shards know is shown; look into the store the shards were made in") if missing else None

    result = observe.explain(run.curriculum, run.out, run.config.stability.window, number, add_documents, row, worst)
    for r in result["rows"]:
        for d in r["documents"]:
            del d["key"], d["at"]
    return result


# -- as text ---------------------------------------------------------------------------------------------------------
def text(step: dict[str, Any]) -> str:
    """Format `step`, the result of `explain`, as text for a terminal."""
    from tokenizer.shards.origin import document_lines

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


def cell(x: float | None) -> str:
    return f"{'–':>10}" if x is None else f"{x:>10.4f}"
