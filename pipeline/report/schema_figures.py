"""Defines the schema of the report's sections `signals`, `domains`, `graph`, `clusters`, `course`, `losses` and
`order_quality`."""

from __future__ import annotations

from typing import Literal

from pipeline.report.schema_base import Counts, Excerpt, ReportPart, fact, maybe


class ReadExtent(ReportPart):
    """How many of the documents were read to compute figures, and whether the figures are therefore exact or estimates.
    """

    docs: int = fact("documents read", "documents")
    of: int = fact("documents in all", "documents")
    exact: bool = fact("whether all were read; if not, the figures are estimates")
    uncovered: int | None = maybe("documents that the figures leave out, because no part of their kind was read (a "
                                  "kind: kept documents, or those that one pass dropped); left out if there are none",
                                  "documents")


class Try(ReportPart):
    """A threshold that is tried on a signal, and how many documents it would let pass if nothing else changed."""

    value: float = fact("the threshold")
    docs: int = fact("documents that the threshold lets pass, of all that have a value", "documents")
    kept: int = fact("documents that the threshold lets pass, of those that the dataset keeps", "documents")


class StepThreshold(ReportPart):
    """A threshold of a step that is compared with a signal (a number per document), and other values that are tried for
    it."""

    key: str = fact("setting of the step")
    side: Literal["min", "max", "above", "below"] = fact(
        "whether kept documents have at least this value (min), at most this value (max), more than it (above) or less "
        "than it (below)")
    value: float = fact("the threshold of the recipe")
    at: list[Try] = fact("this threshold and others around it that a recipe may have, in ascending order")


class Bins(ReportPart):
    """A histogram of a signal (a number per document), for kept and for dropped documents. Bins are numbered as in
    `scores` of a dataset."""

    kept: Counts = fact("bin → documents kept in the end", "documents")
    dropped: Counts = fact("bin → documents dropped by any step", "documents")


class Signal(ReportPart):
    """The distribution of a signal (a number that a step computed for each document) over the documents that reached
    its step."""

    signal: str = fact("name of the signal")
    step: str = fact("the step that computed the signal")
    docs: int = fact("documents with a value", "documents")
    kept: int = fact("documents with a value that the dataset keeps", "documents")
    bins: Bins = fact("the histogram")
    bounds: list[StepThreshold] = fact("thresholds that are compared with the signal")


class Signals(ReportPart):
    """The distributions of the signals of a dataset (numbers that its steps computed for each document)."""

    read: ReadExtent = fact("how many documents were read for these figures")
    signals: list[Signal] = fact("signals in the order of the recipe, at most 80")
    left_out: int = fact("number of signals that are not listed", "signals")


class GraphNode(ReportPart):
    """A node of the plan's graph, such as a source, a pass, a deduplication or a token stream."""

    name: str = fact("name of the node")
    kind: str = fact("index (a source), pass, barrier, …, folder (an index of earlier documents) or curriculum")
    steps: list[str] = fact("steps of the node; for the curriculum its phases")
    tasks: int = fact("tasks of the node", "tasks")
    dropped: int | None = maybe("documents dropped there; left out if none", "documents")


class Edge(ReportPart):
    """The documents or tokens that one node of the plan passes on to another."""

    from_: str = fact("name of the first node", alias="from")
    to: str = fact("name of the second node")
    docs: int | None = maybe("documents passed on; left out where they are not counted", "documents")
    tokens: int | None = maybe("tokens of a stream that a curriculum may read; left out for documents", "tokens")
    against: Literal[True] | None = maybe("the second node is a deduplication that only compares its documents with "
                                          "those of the first; left out for other edges")


class Graph(ReportPart):
    """The plan as a graph, from sources to tokens."""

    nodes: list[GraphNode] = fact("nodes in plan order")
    edges: list[Edge] = fact("edges between the nodes")


class RemovedDocument(Excerpt):
    """A document of a group of duplicates that was removed."""

    diff: list[list[str]] | None = fact("the removed text compared with the kept text, as a list of [kind, words]. The "
                                        "kind says which text has the words: `both`, `kept` or `removed`; `cut` marks "
                                        "words that are left out. Null if the kept text was not found")


class DuplicateGroup(ReportPart):
    """A group of duplicates: a kept document, and the documents that were removed because of it."""

    kept_id: str = fact("id of the kept document")
    size: int = fact("documents, the kept one included", "documents")
    kept: Excerpt | None = fact(
        "the kept document; null if it was not found: its part was not read, or a later step dropped it")
    removed: list[RemovedDocument] = fact("at most 2 removed documents")


class SourcePair(ReportPart):
    """The number of documents of one source that were removed because of kept documents of another (or the same)
    source."""

    removed: str = fact("source of the removed documents")
    kept: str = fact("source of the kept ones")
    docs: int = fact("documents removed", "documents")


class ClusterFigures(ReportPart):
    """The groups of duplicates that a deduplication found."""

    barrier: str = fact("name of the deduplication's node in the plan")
    step: str = fact("name of the deduplication's step")
    read: ReadExtent = fact("how many removed documents were read for these figures")
    groups: int = fact("groups of duplicates among the documents read", "groups")
    sizes: Counts = fact("n → groups of 2ⁿ to 2ⁿ⁺¹ − 1 documents", "groups")
    components: Counts | None = maybe("n → connected components of the candidates, of 2ⁿ to 2ⁿ⁺¹ − 1 documents; left "
                                      "out for exact deduplication", "clusters")
    largest: list[DuplicateGroup] = fact("at most 4 groups, the largest first")
    pairs: list[SourcePair] = fact("at most 40 pairs of sources, the most documents first")
    unknown: int = fact("removed documents whose kept document was not found: its part was not read, or a later step "
                        "dropped it", "documents")


class CoursePhase(ReportPart):
    """A phase of the curriculum, with the tokens at which it begins and ends."""

    name: str = fact("the phase")
    from_: int = fact("where the phase begins", "tokens", alias="from")
    to: int = fact("where the phase ends", "tokens")


class CourseStream(ReportPart):
    """The tokens that are read of one token stream, for each stretch of the training (`at` of the course)."""

    planned: list[float] = fact("tokens of each stretch that the weight gives the stream", "tokens")
    realised: list[int] = fact("tokens of each stretch that the order of samples gives the stream", "tokens")


class Course(ReportPart):
    """The mixture of token streams over the course of the training. The curriculum is divided into stretches, each of
    which lies in one phase."""

    at: list[int] = fact("positions at which the stretches end; the first entry is 0", "tokens")
    phases: list[CoursePhase] = fact("phases in order")
    streams: dict[str, CourseStream] = fact("stream → the tokens that are read of it")


class LossPoint(ReportPart):
    """The losses of a training at one step or in one evaluation."""

    tokens: float = fact("tokens that the model had been trained on", "tokens")
    loss: float = fact("loss", "nats per token")
    streams: dict[str, float] = fact("stream → its loss, as far as the trainer gives it", "nats per token")
    lr: float | None = maybe("learning rate; left out for evaluations")


class LossFigures(ReportPart):
    """The losses of a training. If it has many steps or evaluations, only every n-th of them is in the report."""

    steps: list[LossPoint] = fact("losses of steps, on training data")
    evals: list[LossPoint] = fact("losses of evaluations, on held-out data")


class Domain(ReportPart):
    """A domain (host of URLs), and how many of its documents a dataset keeps."""

    domain: str = fact("host of the documents' URLs, without `www.`, masked")
    kept: int = fact("documents kept", "documents")
    dropped: int = fact("documents dropped", "documents")


class Domains(ReportPart):
    """The domains from which the documents of a dataset come."""

    read: ReadExtent = fact("how many documents were read for these figures")
    domains: int = fact("different domains of the documents read", "domains")
    without: int = fact("documents without a domain", "documents")
    top: list[Domain] = fact("at most 30 domains, those with the most documents first")


class StreamOrder(ReportPart):
    """How well the windows (training samples) of one stream are spread over the order of training. The figures are
    about the samples that were examined."""

    windows: int = fact("windows of the stream that were examined", "windows")
    neighbours: int = fact("pairs of examined windows in one step that follow each other in the stream", "pairs")
    expected: float = fact("number of such pairs to expect in a random order of the whole stream", "pairs")
    spread: float = fact("mean distance in the stream of windows that follow each other in the order, divided by the "
                         "mean distance in a random order")


class Lag(ReportPart):
    """Pairs of windows (training samples) of one step that are a given number of samples apart. In a perfect shuffle,
    the shares `stream` and `document` are on average as large as `stream_expected` and `document_expected`."""

    lag: int = fact("how far apart the two windows of a pair are in the order", "samples")
    pairs: int = fact("number of pairs at this distance", "pairs")
    stream: float = fact("share of the pairs whose windows are of one stream, 0 to 1")
    stream_expected: float = fact("the share `stream` in a perfect shuffle, 0 to 1")
    document: float | None = fact("share of the pairs whose windows have a document in common, 0 to 1; null if the "
                                  "shards are not on a disk")
    document_expected: float | None = fact("the share `document` in a perfect shuffle, 0 to 1; null if `document` is")


class LongestRun(ReportPart):
    """The longest run of windows (training samples) of one stream within a step."""

    windows: int = fact("length of the run", "windows")
    stream: str = fact("the stream")
    expected: float = fact("estimate of the longest run in a perfect shuffle", "windows")


class Repeats(ReportPart):
    """Pairs of windows (training samples) of one step that have a document in common."""

    pairs: int = fact("number of pairs", "pairs")
    expected: float = fact("number of pairs to expect in a perfect shuffle of each stream", "pairs")


class OrderQuality(ReportPart):
    """Whether batches have the planned mixture, and how the order of training compares with a perfect shuffle. In a
    perfect shuffle, the windows (training samples) of a step are in random order, and are drawn at random from all
    windows of their streams."""

    steps: int = fact("steps examined", "steps")
    of: int = fact("steps of the curriculum", "steps")
    samples: int = fact("samples of these steps", "samples")
    deviation: float = fact("largest difference between the number of windows that a stream has in a step and the "
                            "number that its weight gives it", "windows")
    streams: dict[str, StreamOrder] = fact("stream → how well its windows are spread")
    lags: list[Lag] = fact("pairs of windows at several distances")
    run: LongestRun = fact("the longest run of one stream")
    repeats: Repeats | None = fact("documents that are in two windows of a step; null if the shards are not on a disk")
