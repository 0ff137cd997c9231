"""Defines the schema of the report's sections on documents: `sources`, `totals`, `funnel`, `datasets` and `duplicates`.
"""

from __future__ import annotations

from pipeline.report.schema_base import Counts, Excerpt, Nested, ReportPart, fact, maybe


class BadFile(ReportPart):
    """An input file that could not be read, whole or in part."""

    file: str = fact("path of the file, masked")
    reasons: Counts = fact("reason → unread bytes", "bytes")


class UnreadFiles(ReportPart):
    """The quarantined input files of a source."""

    files: int = fact("quarantined files, whole or in part", "files")
    bytes: int = fact("unread bytes of these files", "bytes")
    listed: list[BadFile] = fact("the first 100 quarantined files")


class SourceFigures(ReportPart):
    """A source of documents: its files, and the records that were read from them."""

    files: int = fact("input files", "files")
    bytes: int = fact("size of the input files, as stored", "bytes")
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
    bytes: int = fact("size of the input files, as stored", "bytes")
    records: int = fact("records read", "records")
    read: int = fact("documents that entered the first step", "documents")
    kept: int = fact("documents in the final datasets", "documents")
    kept_bytes: int = fact("text of the documents kept", "bytes of UTF-8")
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
    by_source: dict[str, SourceTotals] = fact("source → the sums over its files alone")


class QuarantineSample(ReportPart):
    """A quarantined record: it could not be read, or a step failed on it. Personal data is masked."""

    id: str = fact("id of the document, may be empty")
    source: str = fact("source of the record")
    file: str = fact("input file of the record")
    record: int | None = fact("number of the record in the file")
    stage: str = fact("the stage that failed; empty for a reader")
    reason: str = fact("why the record was quarantined")
    detail: str = fact("the error message")


class Reason(ReportPart):
    """Documents that a stage dropped for one reason."""

    stage: str = fact("the stage")
    reason: str = fact("the reason")
    docs: int = fact("documents dropped", "documents")
    sources: Counts = fact("source → documents dropped", "documents")
    samples: list[Excerpt] = fact("at most 3 of the dropped documents, those with the smallest ids")
    unmarked: str | None = maybe("why no passage is marked in samples, although the step can name passages; left out "
                                 "otherwise")


class Size(ReportPart):
    """A number of documents, and the size of their text."""

    docs: int = fact("number of documents", "documents")
    bytes: int = fact("text of the documents", "bytes of UTF-8")


class PdfPages(ReportPart):
    """Counts of the PDFs of a dataset and of their pages, by the way in which the pages were read."""

    docs: int = fact("PDFs read", "documents")
    unread: int = fact("PDFs with pages that are not blank but could not be read", "documents")
    confidence: Counts = fact("confidence in tenths → pages with text", "pages")
    pages: Counts = fact("route (`text_layer`, `ocr`, `empty` …) → pages", "pages")


class Contamination(ReportPart):
    """The items of one evaluation set that the step `decontaminate` found in documents."""

    dropped: int = fact("documents dropped that hold items of the set", "documents")
    cut: int = fact("documents with items of the set that were cut", "documents")
    noted: int = fact("documents whose items of the set all have fewer than `min_words` words, and thus neither drop "
                      "nor cut a document", "documents")
    items: Nested = fact("part (`question`, `answer`, `passage`) → row of the set, from 0 → documents that were "
                         "dropped or cut because of this item", "documents")


class DatasetFigures(ReportPart):
    """A dataset: the documents that it kept, and the reasons for which others were dropped or quarantined."""

    docs: int = fact("documents kept", "documents")
    bytes: int = fact("text of the documents kept", "bytes of UTF-8")
    parts: int = fact("tasks of the dataset's last pass; each writes at most one part", "parts")
    kept: dict[str, Size] = fact("source → documents kept")
    reasons: list[Reason] = fact("why documents were dropped, the most frequent reason first")
    quarantined: Counts = fact("reason → records and documents quarantined", "records")
    quarantine_samples: list[QuarantineSample] = fact("at most 3 for each stage and reason")
    languages: Nested = fact("source → language → documents kept; '' where none was identified", "documents")
    lengths: Nested = fact("source → n → documents kept with 2ⁿ to 2ⁿ⁺¹ − 1 characters", "documents")
    dropped_languages: Nested = fact("stage → language → documents dropped", "documents")
    dropped_lengths: Nested = fact("source → n → documents dropped with 2ⁿ to 2ⁿ⁺¹ − 1 characters", "documents")
    dropped_licences: Nested | None = maybe(
        "source → licence (as in `licences`; '' for none) → documents dropped; left out if an older version, which did "
        "not count them, dropped some", "documents")
    scores: Nested = fact("signal → bin → documents scored, kept or dropped; `pipeline.passes.tally.bin_edges` gives "
                          "the edges of a bin", "documents")
    pii: Counts = fact("signal `pii_KIND` → values found in kept documents", "values")
    dropped_pii: Counts | None = maybe(
        "signal `pii_KIND` → values found in dropped documents; in those that an earlier step dropped, none were "
        "looked for; left out like `dropped_licences`", "values")
    pdf: PdfPages | None = fact("pages of the PDFs read; null where there was none")
    contamination: dict[str, Contamination] | None = maybe("evaluation set → what was found of it; left out if no "
                                                           "document holds an item")


class Pair(ReportPart):
    """A document that a deduplication removed, and the kept document that it resembles."""

    similarity: float | None = fact("similarity of the two documents, 0 to 1; null if the texts were not compared")
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

    barrier: str = fact("name of the deduplication's node in the plan")
    step: str = fact("name of the deduplication's step, e.g. `minhash`")
    dataset: str = fact("dataset whose documents the deduplication compares")
    looked_at: Counts = fact("source → documents compared", "documents")
    removed: Nested = fact("reason → source → documents removed", "documents")
    candidates: int | None = maybe("documents that share a band of their MinHash signature with another document; "
                                   "left out for exact deduplication", "documents")
    clusters: int | None = maybe("connected components of the candidates; left out for exact deduplication", "clusters")
    max_cluster: int | None = maybe("documents in the largest cluster; left out for exact deduplication", "documents")
    cut: CutFigures | None = maybe("passages that were cut out of documents; left out if the deduplication only "
                                   "removes documents")
    similarity: Counts = fact("bin (a twentieth of 0 to 1) → documents removed, by similarity to the kept one",
                              "documents")
    pairs: list[Pair] = fact("at most 4 pairs")
    alarms: list[Alarm] = fact("sources that lost more than half of their documents")
