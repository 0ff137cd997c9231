"""Defines the schema of report.json: every field with its type, its unit and its meaning.

The functions of this folder make the report as plain JSON. The models of this module describe the content of that JSON,
with those of `schema_documents` and `schema_figures` for some of its sections. Tests validate real reports against the
models, and `make docs` prints them into docs/report.md (`pipeline.report.reference`). A field that no model declares,
or that is missing, is an error; only a field whose meaning says "left out" may be missing. With every change of a
field, `pipeline.report.collect.VERSION` is raised.
"""

from __future__ import annotations

from typing import Any, Literal

from pipeline.report.schema_base import Counts, Excerpt, Nested, ReportPart, fact, maybe
from pipeline.report.schema_documents import (
    DatasetFigures,
    DuplicateFigures,
    FunnelRow,
    QuarantineSample,
    SourceFigures,
    Totals,
)
from pipeline.report.schema_figures import ClusterFigures, Course, Domains, Graph, LossFigures, OrderQuality, Signals


class ReadyRecipe(ReportPart):
    """The ready recipe that the run follows (docs/recipes.md)."""

    name: str = fact("name of the ready recipe")
    version: int = fact("version of the ready recipe")
    title: str = fact("title of the ready recipe, one line")
    after: list[str] = fact("papers and code that the ready recipe follows")
    changed: list[str] | None = fact("keys whose values differ from the ready recipe; null where there is none of this "
                                     "name and version to compare with")


class Made(ReportPart):
    """How the run was made. Date, host and author are those of the run's latest attempt. Secrets and personal data
    are masked."""

    at: str | None = fact("when the attempt began", "UTC, ISO 8601")
    host: str | None = fact("name of the machine of the run's driver")
    author: str | None = fact("who started the run: `TOKENMILL_AUTHOR`, else `GIT_AUTHOR_NAME`, else git's "
                              "`user.name`; null where none is set")
    version: str | None = fact("version of Tokenmill")
    python: str | None = fact("version of Python")
    name: str | None = fact("name of the recipe's file, without its ending")
    store: str = fact("folder or URL of the store")
    recipe: str | None = fact("the recipe as it ran, with defaults filled in", "YAML")


class PlanOrder(ReportPart):
    """The names of sources, datasets and token streams in the order of the plan, because the keys of a JSON object have
    no order."""

    sources: list[str] = fact("sources")
    datasets: list[str] = fact("datasets")
    final: list[str] = fact("datasets that no other dataset is made from")
    streams: list[str] = fact("streams of tokens")


class SourceTokens(ReportPart):
    """How many documents and tokens of a token stream come from one source."""

    docs: int = fact("documents, training and held out", "documents")
    tokens: int = fact("tokens, training and held out", "tokens")


class PackingFigures(ReportPart):
    """The rows (training samples of one length) that the training documents of a stream are packed into."""

    rows: int = fact("rows", "rows")
    pieces: int = fact("pieces in the rows: whole documents, and the full rows and rests into which longer documents "
                       "are cut", "pieces")
    documents: int = fact("documents packed", "documents")
    longer: int = fact("documents that were cut because they are longer than a row", "documents")
    tokens: int = fact("tokens in the rows; the last token of a full row is also the first of the next piece", "tokens")
    padding: int = fact("places of the rows without a token", "tokens")


class SplitStream(ReportPart):
    """One of the streams into which an entry of `shards:` is split by labels (`by:`)."""

    tokens: int = fact("training tokens", "tokens")
    val_tokens: int = fact("held-out tokens", "tokens")
    read: int = fact("tokens that the curriculum reads of the stream, in all phases", "tokens")


class StreamFigures(ReportPart):
    """A token stream: its documents and tokens for training, and those held out for evaluation. If the documents are
    split by labels, these are the sums of all its streams."""

    docs: int = fact("training documents", "documents")
    tokens: int = fact("training tokens", "tokens")
    targets: int = fact("training tokens that count for the loss", "tokens")
    val_docs: int = fact("held-out documents", "documents")
    val_tokens: int = fact("held-out tokens", "tokens")
    val_targets: int = fact("held-out tokens that count for the loss", "tokens")
    near_held_out: int = fact("training documents left out because they resemble a held-out one", "documents")
    sources: dict[str, SourceTokens] = fact("source → documents and tokens of the stream that come from it")
    packing: PackingFigures | None = maybe("packed rows of the stream; left out if the stream is not packed")
    streams: dict[str, SplitStream] | None = maybe("stream of the curriculum → its figures; left out if the documents "
                                                   "are not split by labels")
    quarantined: Counts = fact("reason → documents that could not be encoded", "documents")
    quarantine_samples: list[QuarantineSample] = fact("at most 3 for each stage and reason")


class MixtureRow(ReportPart):
    """What one phase of the curriculum reads of one token stream, as planned and as the order of samples realises it.
    """

    phase: str = fact("the phase")
    stream: str = fact("the stream")
    planned: float = fact("windows of the phase that the stream's weight gives it", "windows")
    realised: int = fact("windows of the phase that the order of samples gives it", "windows")
    tokens: int = fact("tokens in the realised windows", "tokens")
    padding: int | None = maybe("about how many tokens in the realised windows are padding; left out if the stream is "
                                "not packed", "tokens")
    epochs: float = fact("how often the stream has been read by the end of the phase", "epochs")
    repeats_from: int | None = fact("first sample that reads the stream a second time; null if none", "sample")


class TaskScore(ReportPart):
    """The score of a checkpoint on a benchmark task by one measure."""

    task: str = fact("name of the task")
    measure: str = fact("name of the measure: bpb (bits per byte, less is better), cf.raw, mcf and so on")
    step: int = fact("step of the checkpoint", "step")
    value: float = fact("the score: bits per byte, a share of items, or nats")
    stderr: float | None = fact("standard error of the score over the items of the task")
    chance: float | None = fact("what guessing would score; null if the measure is no share of right answers")


class TrainingFigures(ReportPart):
    """The training of a model on the tokens of the run, from the trainer's summary. Fields that the summary lacks are
    null."""

    parameters: int | None = fact("parameters of the model", "parameters")
    parameters_without_embeddings: int | None = fact("parameters of the model without embeddings", "parameters")
    steps: int | None = fact("optimiser steps", "steps")
    tokens: int | None = fact("tokens trained on", "tokens")
    seconds: float | None = fact("wall time", "seconds")
    tokens_per_s: float | None = fact("speed", "tokens per second")
    train_loss_last: float | None = fact("loss of the last steps", "nats per token")
    heldout_loss_before: float | None = fact("held-out loss before training", "nats per token")
    heldout_loss: float | None = fact("held-out loss after training", "nats per token")
    unigram_entropy: float | None = fact("entropy of single tokens of the held-out text", "nats per token")
    ratio: float | None = fact("`heldout_loss` divided by `unigram_entropy`")
    gap: float | None = fact("held-out loss minus training loss", "nats per token")
    streams: dict[str, dict[str, Any]] | None = fact("stream → its held-out figures, as the trainer names them")
    sample: str | None = fact("text that the model generated, masked")
    sample_skipped: str | None = fact("why there is no sample")
    curve: str | None = fact("loss and learning rate over tokens", "SVG")
    tasks: list[TaskScore] | None = maybe("scores of the last scored checkpoint on each task; left out if none was "
                                          "scored")
    task_curves: str | None = maybe("scores on tasks over tokens; left out if no checkpoint was scored", "SVG")


class PassCost(ReportPart):
    """The cost of a pass (steps that run together, document by document)."""

    pass_: str = fact("name of the pass", alias="pass")
    tasks: int = fact("tasks", "tasks")
    docs: int = fact("documents that entered", "documents")
    bytes: int = fact("size of the documents that entered", "bytes")
    cpu_s: float = fact("CPU time", "seconds")
    wall_s: float = fact("wall time of all tasks together; each has one core", "seconds")
    docs_per_core_s: float | None = fact("documents divided by wall time", "documents per second and core")
    max_rss_mb: float = fact("largest memory of a task", "MB")


class StageCost(ReportPart):
    """The cost of a stage (one step) in a pass (steps that run together, document by document)."""

    pass_: str = fact("name of the pass", alias="pass")
    stage: str = fact("name of the stage, or `read and write`")
    in_: int = fact("documents that entered", "documents", alias="in")
    dropped: int = fact("documents dropped", "documents")
    cpu_s: float = fact("CPU time", "seconds")
    share: float = fact("share of the CPU time of all stages, 0 to 1")
    docs_per_cpu_s: float | None = fact("speed", "documents per CPU second")


class TaskCost(ReportPart):
    """The cost of a node of the plan (a pass, a deduplication, the shards of a stream …)."""

    node: str = fact("name of the node")
    kind: str = fact("kind of the node: index, pass, barrier, …")
    tasks: int = fact("tasks", "tasks")
    cpu_s: float = fact("CPU time", "seconds")
    wall_s: float = fact("wall time of all tasks together", "seconds")
    max_rss_mb: float = fact("largest memory of a task", "MB")


class Lineage(ReportPart):
    """A node of the plan (a pass, a deduplication …), and what its output was made from."""

    name: str = fact("name of the node")
    kind: str = fact("kind of the node")
    deps: list[str] = fact("nodes and datasets that the node reads")
    steps: list[str] = fact("names of the steps of the node, in order")
    tasks: int = fact("tasks with a record", "tasks")
    bytes: int = fact("bytes that the tasks of the node wrote", "bytes")
    cpu_s: float = fact("CPU time", "seconds")
    content: str = fact("hash of the contents of the parts that the node wrote, whatever their order and the "
                        "attempts that wrote them", "hex")


class Report(ReportPart):
    """The whole report.json."""

    version: Literal[6] = fact("version of this schema")
    run: str = fact("name of the run")
    recipe: str = fact("hash of the recipe without paths", "hex")
    about: ReadyRecipe | None = fact("the ready recipe that the run follows; null if the recipe has no `about:`")
    made: Made = fact("when, where, by whom and with which versions the run was made")
    missing_records: int = fact("tasks without a record in the log; above 0 the figures are incomplete", "tasks")
    names: PlanOrder = fact("names in plan order")
    sources: dict[str, SourceFigures] = fact("source → its files, and the records read from them")
    totals: Totals = fact("sums over the sources")
    funnel: dict[str,
                 list[FunnelRow]] = fact("source → how many of its documents are left after each step, from reading to "
                                         "tokens")
    datasets: dict[str, DatasetFigures] = fact("dataset → the documents it kept and dropped")
    samples: dict[str, list[Excerpt]] = fact("dataset → kept documents: of each of the 12 largest sources the 2 with "
                                             "the smallest ids")
    licences: dict[str, Nested] = fact("dataset → source → licence (identifier of the Hugging Face hub, or `other`) → "
                                       "kept documents that state it; documents that state none are not counted",
                                       "documents")
    signals: dict[str, Signals] = fact("dataset → histograms of its signals, with thresholds")
    domains: dict[str, Domains] = fact("dataset → its largest domains")
    graph: Graph = fact("the plan as a graph")
    duplicates: list[DuplicateFigures] = fact("deduplications in plan order")
    clusters: list[ClusterFigures] = fact("groups of duplicates, in plan order")
    tokens: dict[str, StreamFigures] = fact("stream → documents and tokens in it")
    mixture: list[MixtureRow] = fact("planned and realised mixture, by phase and stream")
    order: str | None = fact("hash of the order of all samples; null without a curriculum", "hex")
    course: Course | None = fact("planned and realised mixture over tokens; null without a curriculum")
    order_quality: OrderQuality | None = fact("how well the order mixes; null without a curriculum")
    losses: LossFigures | None = fact("losses over tokens; null if there was no training")
    training: TrainingFigures | None = fact("a training on this run; null if there was none")
    passes: list[PassCost] = fact("cost of every pass; measured")
    stages: list[StageCost] = fact("cost of every stage; measured")
    tasks: list[TaskCost] = fact("cost of every node; measured")
    lineage: list[Lineage] = fact("nodes of the plan in order")
    warnings: list[str] = fact("warnings that the run printed, and warnings that follow from its figures")
