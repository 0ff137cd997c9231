"""Defines the schema of report.json: every field with its type, its unit and its meaning.

The functions of this folder make the report as plain JSON. The models of this module describe the content of that JSON.
Tests validate real reports against the models, and `make docs` prints them into docs/report.md
(`pipeline.report.reference`). A field that no model declares, or that is missing, is an error; only a field whose
meaning says "left out" may be missing. With every change of a field, `pipeline.report.collect.VERSION` is raised.
"""

from __future__ import annotations

from typing import Any, Literal

from pipeline.report.schema_base import Counts, Excerpt, Nested, ReportPart, fact, maybe
from pipeline.report.schema_figures import ClusterFigures, Course, Domains, Graph, LossFigures, OrderQuality, Signals


class ReadyRecipe(ReportPart):
    """The ready recipe that the run follows (docs/recipes.md)."""

    name: str = fact("name of the ready recipe")
    version: int = fact("its version")
    title: str = fact("its title, one line")
    after: list[str] = fact("papers and code it follows")
    changed: list[str] | None = fact("keys whose values differ from the ready recipe; null where there is none of this "
                                     "name and version to compare with")


class Made(ReportPart):
    """How the run was made. Date, host and author are those of the run's latest attempt. Secrets and personal data
    are masked."""

    at: str | None = fact("when the attempt began", "UTC, ISO 8601")
    host: str | None = fact("name of the machine of its driver")
    author: str | None = fact("who started it: `TOKENMILL_AUTHOR`, else `GIT_AUTHOR_NAME`, else git's `user.name`; "
                              "null where none is set")
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


class BadFile(ReportPart):
    """An input file that could not be read, whole or in part."""

    file: str = fact("its path, masked")
    reasons: Counts = fact("reason → unread bytes", "bytes")


class UnreadFiles(ReportPart):
    """The quarantined input files of a source."""

    files: int = fact("quarantined files, whole or in part", "files")
    bytes: int = fact("their unread bytes", "bytes")
    listed: list[BadFile] = fact("the first 100 of them")


class SourceFigures(ReportPart):
    """A source of documents: its files, and the records that were read from them."""

    files: int = fact("input files", "files")
    bytes: int = fact("their size, as stored", "bytes")
    records: int = fact("records read, the unreadable and skipped ones included", "records")
    skipped: Counts = fact("reason → records that the reader leaves out on purpose", "records")
    bad: Counts = fact("reason → records that could not be read", "records")
    lost: Nested | None = maybe("column → reason → values that documents could not keep; left out for readers without "
                                "columns", "values")
    bad_files: UnreadFiles = fact("quarantined input files")


class FunnelRow(ReportPart):
    """A row of a funnel: how many documents of a source are left after reading, after a dataset, or in a token stream.
    Rows of token streams have `tokens`, all other rows have `bytes`."""

    step: str = fact("`read`, the name of a dataset, or `tokens (STREAM)`")
    docs: int = fact("documents left", "documents")
    bytes: int | None = maybe("raw bytes in the first row if a step extracts the text, else bytes of UTF-8 text; left "
                              "out for tokens", "bytes")
    tokens: int | None = maybe("training and held-out tokens; left out for documents", "tokens")


class TotalStep(FunnelRow):
    """A row of the funnel over all sources: how many documents are left after reading, after a dataset, or in a token
    stream."""

    sources: int = fact("sources whose documents reach this step", "sources")


class SourceTotals(ReportPart):
    """The figures of one source of documents: its files and records, and the documents and tokens that were made from
    them."""

    files: int = fact("input files", "files")
    bytes: int = fact("their size, as stored", "bytes")
    records: int = fact("records read", "records")
    read: int = fact("documents that entered the first step", "documents")
    kept: int = fact("documents in the final datasets", "documents")
    kept_bytes: int = fact("their text", "bytes of UTF-8")
    dropped: int = fact("documents dropped, by all datasets together; one that two datasets drop counts twice",
                        "documents")
    tokens: int = fact("tokens in all streams, training and held out", "tokens")


class Totals(SourceTotals):
    """The sums over all sources: their files and records, and the documents and tokens that were made from them."""

    skipped: Counts = fact("reason → records that readers left out on purpose", "records")
    unreadable: Counts = fact("reason → records that could not be read", "records")
    bad_files: int = fact("quarantined input files", "files")
    quarantined: int = fact("records and documents quarantined", "records")
    steps: list[TotalStep] = fact("the funnel over all sources")
    by_source: dict[str, SourceTotals] = fact("source → its part of the sums")


class QuarantineSample(ReportPart):
    """A quarantined record: it could not be read, or a step failed on it. Personal data is masked."""

    id: str = fact("id of the document, may be empty")
    source: str = fact("its source")
    file: str = fact("its input file")
    record: int | None = fact("number of the record in the file")
    stage: str = fact("the stage that failed; empty for a reader")
    reason: str = fact("why it was quarantined")
    detail: str = fact("the error message")


class Reason(ReportPart):
    """Documents that a stage dropped for one reason."""

    stage: str = fact("the stage")
    reason: str = fact("the reason")
    docs: int = fact("documents dropped", "documents")
    sources: Counts = fact("source → documents dropped", "documents")
    samples: list[Excerpt] = fact("at most 3 of them, those with the smallest ids")


class Size(ReportPart):
    """A number of documents, and the size of their text."""

    docs: int = fact("documents", "documents")
    bytes: int = fact("their text", "bytes of UTF-8")


class PdfPages(ReportPart):
    """Counts of the PDFs of a dataset and of their pages, by the way in which the pages were read."""

    docs: int = fact("PDFs read", "documents")
    unread: int = fact("PDFs with pages that are not blank but could not be read", "documents")
    confidence: Counts = fact("confidence in tenths → pages with text", "pages")
    pages: Counts = fact("route (`text_layer`, `ocr`, `empty` …) → pages", "pages")


class Contamination(ReportPart):
    """The items of one evaluation set that the step `decontaminate` found in documents."""

    dropped: int = fact("documents dropped that hold items of the set", "documents")
    cut: int = fact("documents from which items were cut", "documents")
    items: Nested = fact("part (`question`, `answer`, `passage`) → row of the set, from 0 → documents that hold it",
                         "documents")


class DatasetFigures(ReportPart):
    """A dataset: the documents that it kept, and the reasons for which others were dropped or quarantined."""

    docs: int = fact("documents kept", "documents")
    bytes: int = fact("their text", "bytes of UTF-8")
    parts: int = fact("tasks of its last pass; each writes at most one part", "parts")
    kept: dict[str, Size] = fact("source → documents kept")
    reasons: list[Reason] = fact("why documents were dropped, the most frequent reason first")
    quarantined: Counts = fact("reason → records and documents quarantined", "records")
    quarantine_samples: list[QuarantineSample] = fact("at most 3 for each stage and reason")
    languages: Nested = fact("source → language → documents kept; '' where none was identified", "documents")
    lengths: Nested = fact("source → n → documents kept with 2ⁿ to 2ⁿ⁺¹ − 1 characters", "documents")
    dropped_languages: Nested = fact("stage → language → documents dropped", "documents")
    dropped_lengths: Nested = fact("source → n → documents dropped with 2ⁿ to 2ⁿ⁺¹ − 1 characters", "documents")
    scores: Nested = fact("signal → bin → documents scored, kept or dropped; `pipeline.passes.tally.bin_edges` gives "
                          "the edges of a bin", "documents")
    pii: Counts = fact("signal `pii_KIND` → values found in kept documents", "values")
    pdf: PdfPages | None = fact("pages of the PDFs read; null where there was none")
    contamination: dict[str, Contamination] | None = maybe("evaluation set → what was found of it; left out if no "
                                                           "document holds an item")


class Pair(ReportPart):
    """A document that a deduplication removed, and the kept document that it resembles."""

    similarity: float | None = fact("0 to 1; null if not verified")
    removed: Excerpt = fact("the removed document; its excerpt begins shortly before the first difference")
    kept: Excerpt = fact("the kept document; its excerpt begins shortly before the first difference")


class Alarm(ReportPart):
    """A source that lost more than half of its documents to a deduplication."""

    source: str = fact("the source")
    removed: int = fact("documents removed", "documents")
    of: int = fact("documents compared", "documents")


class CutAlarm(ReportPart):
    """A source that lost more than half of its text to the cuts of a deduplication."""

    source: str = fact("the source")
    cut: int = fact("text cut", "bytes")
    of: int = fact("text of the documents compared", "bytes")


class CutFigures(ReportPart):
    """The passages that a deduplication cut out of documents, whether the documents were then kept or dropped."""

    docs: int = fact("documents that were cut", "documents")
    cuts: Counts = fact("reason → passages cut", "passages")
    bytes: Counts = fact("reason → text cut", "bytes")
    sources: Counts = fact("source → text cut", "bytes")
    alarms: list[CutAlarm] = fact("sources that lost more than half of their text")


class DuplicateFigures(ReportPart):
    """The documents that one deduplication compared, and those that it removed."""

    barrier: str = fact("name of its node in the plan")
    step: str = fact("name of its step, e.g. `minhash`")
    dataset: str = fact("dataset it belongs to")
    looked_at: Counts = fact("source → documents compared", "documents")
    removed: Nested = fact("reason → source → documents removed", "documents")
    candidates: int | None = maybe("documents that share a band of their MinHash signature with another document; "
                                   "left out for exact deduplication", "documents")
    clusters: int | None = maybe("connected components of the candidates; left out for exact deduplication", "clusters")
    max_cluster: int | None = maybe("documents in the largest of them; left out for exact deduplication", "documents")
    cut: CutFigures | None = maybe("passages that it cut out of documents; left out if it only removes documents")
    similarity: Counts = fact("bin (a twentieth of 0 to 1) → documents removed, by similarity to the kept one",
                              "documents")
    pairs: list[Pair] = fact("at most 4 pairs")
    alarms: list[Alarm] = fact("sources that lost more than half of their documents")


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
    read: int = fact("tokens that the curriculum reads of it, in all phases", "tokens")


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
    sources: dict[str, SourceTokens] = fact("source → its documents and tokens")
    packing: PackingFigures | None = maybe("its packed rows; left out if it is not packed")
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
    padding: int | None = maybe("about how many of these tokens are padding; left out if the stream is not packed",
                                "tokens")
    epochs: float = fact("how often the stream has been read by the end of the phase", "epochs")
    repeats_from: int | None = fact("first sample that reads the stream a second time; null if none", "sample")


class TaskScore(ReportPart):
    """The score of a checkpoint on a benchmark task by one measure."""

    task: str = fact("name of the task")
    measure: str = fact("name of the measure: bpb (bits per byte, less is better), cf.raw, mcf and so on")
    step: int = fact("step of the checkpoint", "step")
    value: float = fact("the score: bits per byte, a share of items, or nats")
    stderr: float | None = fact("its standard error over the items of the task")
    chance: float | None = fact("what guessing would score; null if the measure is no share of right answers")


class TrainingFigures(ReportPart):
    """The training of a model on the tokens of the run, from the trainer's summary. Fields that the summary lacks are
    null."""

    parameters: int | None = fact("parameters of the model", "parameters")
    parameters_without_embeddings: int | None = fact("those without embeddings", "parameters")
    steps: int | None = fact("optimiser steps", "steps")
    tokens: int | None = fact("tokens trained on", "tokens")
    seconds: float | None = fact("wall time", "seconds")
    tokens_per_s: float | None = fact("speed", "tokens per second")
    train_loss_last: float | None = fact("loss of the last steps", "nats per token")
    heldout_loss_before: float | None = fact("held-out loss before training", "nats per token")
    heldout_loss: float | None = fact("held-out loss after training", "nats per token")
    unigram_entropy: float | None = fact("entropy of single tokens of the held-out text", "nats per token")
    ratio: float | None = fact("held-out loss divided by this entropy")
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
    bytes: int = fact("their size", "bytes")
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
    deps: list[str] = fact("nodes and datasets it reads")
    steps: list[str] = fact("names of its steps, in order")
    tasks: int = fact("tasks with a record", "tasks")
    bytes: int = fact("bytes that its tasks wrote", "bytes")
    cpu_s: float = fact("CPU time", "seconds")
    content: str = fact("hash of the contents of its parts; it depends neither on their order nor on the attempts "
                        "that wrote them", "hex")


class Report(ReportPart):
    """The whole report.json."""

    version: Literal[4] = fact("version of this schema")
    run: str = fact("name of the run")
    recipe: str = fact("hash of the recipe without paths", "hex")
    about: ReadyRecipe | None = fact("the ready recipe it follows; null if the recipe has no `about:`")
    made: Made = fact("when, where, by whom and with what it was made")
    missing_records: int = fact("tasks without a record in the log; above 0 the figures are incomplete", "tasks")
    names: PlanOrder = fact("names in plan order")
    sources: dict[str, SourceFigures] = fact("source → files and records that its reader read")
    totals: Totals = fact("sums over the sources")
    funnel: dict[str,
                 list[FunnelRow]] = fact("source → how many of its documents are left after each step, from reading to "
                                         "tokens")
    datasets: dict[str, DatasetFigures] = fact("dataset → what it kept and dropped")
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
    tokens: dict[str, StreamFigures] = fact("stream → its tokens")
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
    warnings: list[str] = fact("warnings of the run, and those that follow from its figures")
