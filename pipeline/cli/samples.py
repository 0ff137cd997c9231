"""`tokenmill shards explain` and `tokenmill shards realised`: show which documents the samples of a training read, and
count how much of each stream the training reads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.base.visible import json_text, visible
from pipeline.cli.errors import BadUsage
from pipeline.cli.options import JsonOpt, RunArg, StoreOpt, resolve_run

if TYPE_CHECKING:
    from pipeline.store.fs import Store
    from tokenizer.mixture.curriculum import Curriculum

#: parts of datasets that are read at a time
READERS = 4


def explain(run: RunArg,
            step: Annotated[int | None, typer.Option(
                min=1, metavar="N", help="Number of a step, as the training prints it (from 1).")] = None,
            sample: Annotated[int | None, typer.Option(min=0, metavar="N", help="Number of a sample (from 0).")] = None,
            store: StoreOpt = "store", json_lines: JsonOpt = False) -> None:
    """Show which documents a step or a sample of a training reads.

    They follow from the run's curriculum, so the training need not have run. For a document that its dataset has
    dropped since, the reason is shown, and for a duplicate also the document that is kept in its place. Personal data
    is masked.

    \b
    Example:
      tokenmill shards explain store/runs/first --step 371
    """
    at, name = resolve_run(run, store)
    curriculum = curriculum_of(at, name)
    result = explanation(at, curriculum, step, sample)
    typer.echo(json_text({"run": name, **result}) if json_lines else visible(text(result)))


def curriculum_of(store: Store, run: str) -> Curriculum:
    """Return the curriculum of a run. Raises BadUsage when it has none."""
    from pipeline.report.tokens import curriculum_of as read

    curriculum = read(store, run)
    if curriculum is None:
        raise BadUsage(f"the run '{run}' has no curriculum; name a run whose recipe has the section `curriculum`")
    return curriculum


def explanation(store: Store, curriculum: Curriculum, step: int | None, sample: int | None) -> dict[str, Any]:
    """Return the rows of a training step's batch, or the row of one sample, with the documents in each row, as JSON.
    Raises BadUsage unless exactly one of `step` and `sample` is given, and when the curriculum has no such step or
    sample."""
    from pipeline.store.shard_set import StoredSet, add_dropped, dataset_parts, manifest_of
    from stages.scrub.rows import MARGIN, mask
    from tokenizer.mixture.steps import rows_of, step_at, step_of
    from tokenizer.shards.find import window_documents
    from tokenizer.shards.origin import EXCERPT, WHOLE, add_origins

    if (step is None) == (sample is None):
        raise BadUsage("give one of --step and --sample")
    if sample is not None and sample >= curriculum.samples:
        raise BadUsage(f"--sample {sample}: the curriculum has the samples 0 to {curriculum.samples - 1}")
    training_step = step_at(curriculum, step if sample is None else step_of(curriculum, sample))     # type: ignore[arg-type]
    if training_step is None:
        raise BadUsage(f"--step {step}: the curriculum has {curriculum.steps} steps")
    rows = [row for row in rows_of(curriculum, training_step) if sample in (None, row["sample"])]
    streams = {stream.name: stream for stream in curriculum.streams}
    sets: dict[str, StoredSet] = {}
    for row in rows:
        stream = streams[row["stream"]]
        if stream.name not in sets:
            manifest = manifest_of(store, stream.train, stream.sha256)
            sets[stream.name] = StoredSet(store, stream.train, manifest, stream.packing)
        row["documents"] = window_documents(sets[stream.name], row["window"], row["tokens"])
    documents = [document for row in rows for document in row["documents"]]
    with ThreadPoolExecutor(READERS) as pool:
        missing = add_origins(documents, dataset_parts(store), store.parquet, WHOLE, EXCERPT + MARGIN, pool)
    if missing:
        missing = add_dropped(store, [document for document in documents if "dataset" not in document])
    for document in documents:
        del document["key"], document["at"]
        mask(document)
        if "text" in document:
            document["text"] = (document["text"] or "")[:EXCERPT]
    return {"step": training_step.number + 1, "steps": curriculum.steps,
            "phase": curriculum.phases[training_step.phase].name,
            "samples": [training_step.first, training_step.stop], "rows": rows, "not_at_hand": (
                f"{missing} of {len(documents)} documents are not in the datasets of the store any more; only their "
                f"places in the shards are shown") if missing else None}


def text(step: dict[str, Any]) -> str:
    """Format the documents that a training step reads, the result of `explanation`, as text for a terminal."""
    from tokenizer.shards.origin import document_lines

    first, stop = step["samples"]
    lines = [f"step {step['step']:,} of {step['steps']:,}, phase {step['phase']}: samples {first:,} to {stop - 1:,}"]
    for row in step["rows"]:
        lines.append(f"\nrow {row['row']} (sample {row['sample']:,})  {row['stream']}, epoch {row['epoch']}, window "
                     f"{row['window']:,} ({row['tokens']:,} tokens)")
        for document in row["documents"]:
            lines += document_lines(document)
    return "\n".join([*lines, *([f"\n{step['not_at_hand']}"] if step["not_at_hand"] else [])])


def realised(run: RunArg,
             training: Annotated[Path | None, typer.Option(
                 metavar="DIR", help="Count only the steps that the training in this folder has performed, say "
                                     "STORE/runs/RUN/train.")] = None,
             rows: Annotated[bool, typer.Option("--rows", help="Also count by source, language and bucket of the "
                                                               "documents, which reads their tables.")] = False,
             share: Annotated[str, typer.Option(
                 metavar="PERCENT", help="With --rows: estimate from this share of each stream, evenly spaced.")] =
             "100%",
             store: StoreOpt = "store", json_lines: JsonOpt = False) -> None:
    """Count what a training reads of each stream, and compare it with the plan.

    Counts the whole curriculum, or with --training the steps that were performed, without those that were skipped or
    undone. With --rows, also counts tokens and targets by source, language and bucket of the documents. With --json,
    figures about how well the order of the samples is mixed are included.

    \b
    Examples:
      tokenmill shards realised store/runs/first
      tokenmill shards realised store/runs/first --training store/runs/first/train --rows --share 10%
    """
    from pipeline.report.document_counts import count_documents
    from pipeline.report.order import order_quality
    from tokenizer.mixture.realised import realised_in
    from tokenizer.mixture.steps import step_at
    from trainer.observe.performed import performed

    at, name = resolve_run(run, store)
    curriculum = curriculum_of(at, name)
    fraction = _share(share)
    ranges, done = [(0, curriculum.samples)], None
    if training is not None:
        done = performed(training)
        if done.last > curriculum.steps:
            raise BadUsage(f"--training {training}: has performed {done.last} steps, and the curriculum of '{name}' "
                           f"has {curriculum.steps}; name the training of this run")
        steps = [(step_at(curriculum, first), step_at(curriculum, stop - 1)) for first, stop in done.ranges]
        ranges = [(first.first, last.stop) for first, last in steps if first and last]
    result: dict[str, Any] = {"run": name, "samples": sum(stop - first for first, stop in ranges),
                              "training": None if done is None else asdict(done),
                              "mixture": realised_in(curriculum, ranges), "documents": None}
    if rows:
        if at.local is None:
            raise BadUsage(f"--rows reads the shards of {at.root} from a disk; copy the store, or leave --rows out")
        result["documents"] = count_documents(at, curriculum, ranges, fraction)
    typer.echo(json_text({**result, "order_quality": order_quality(curriculum, at)}) if json_lines else
               visible(realised_text(result)))


def _share(percent: str) -> float:
    try:
        share = float(percent.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise BadUsage(f"--share {percent}: give a percentage above 0 and up to 100, as in 10%")
    return share


def realised_text(result: dict[str, Any]) -> str:
    """Format the counts of what a training reads, the result of `realised`, as text for a terminal."""
    lines = [f"{result['samples']:,} samples"]
    if done := result["training"]:
        skipped = sum(stop - first for first, stop in done["skipped"])
        lines.append(f"up to step {done['last']:,}: {skipped:,} steps skipped, {done['unchanged']:,} read without an "
                     f"update, {done['abandoned']:,} undone")
    lines += table([("phase", "stream", "planned", "windows", "off by", "tokens"), *(
        (row["phase"], row["stream"], f"{row['planned']:,.1f}", f"{row['realised']:,}",
         f"{row['realised'] - row['planned']:+.2f}", f"{row['tokens']:,}") for row in result["mixture"])])
    documents = result["documents"]
    for label in dict.fromkeys(row["label"] for row in documents["rows"]) if documents else ():
        cells = [row for row in documents["rows"] if row["label"] == label]
        sizes = {phase: sum(row["tokens"] for row in cells if row["phase"] == phase)
                 for phase in dict.fromkeys(row["phase"] for row in cells)}
        lines += ["", *table([("phase", label, "share", "tokens", "targets", "±"), *(
            (row["phase"], row["value"] or "–", f"{row['tokens'] / sizes[row['phase']]:.2%}", f"{row['tokens']:,}",
             f"{row['targets']:,}", f"{row['error']:,}") for row in cells)])]
    if documents:
        lines.append("\nall rows were counted" if documents["exact"] else
                     f"\nestimated from {documents['read']:.1%} of the tokens; ± is half the width of the 95 % "
                     f"interval")
        if documents["missing"]:
            lines.append(f"{documents['missing']:,} documents are in no dataset of the store any more; their labels "
                         f"are shown as –")
    return "\n".join(lines)


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Format a table for a terminal. `rows` are rows of cells; the result has a line for each row. The first two
    columns are flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]
