"""Reads from a run's report the graph of the run's plan, and the documents and costs of each node of the plan. A node
is, for example, a pass (a group of steps that run together), a deduplication or a token stream.
"""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from pipeline.base.visible import visible
from pipeline.report.schema import Lineage, PassCost, PlanOrder, StreamFigures
from pipeline.report.schema_documents import DatasetFigures, DuplicateFigures, FunnelRow, SourceFigures
from pipeline.report.schema_figures import Graph
from pipeline.service.problems import HttpProblem
from pipeline.service.runs import REPORT, run_file
from pipeline.store.fs import Store

#: documents that a node read, kept and dropped; None where the report does not count them
Documents = dict[str, int | None]


class Figures(BaseModel):
    """The sections of a run's report.json that describe the assets of the run (the nodes of its plan, with what they
    made). Pydantic checks these sections when it reads the file, and ignores all others."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    missing_records: int
    names: PlanOrder
    sources: dict[str, SourceFigures]
    funnel: dict[str, list[FunnelRow]]
    datasets: dict[str, DatasetFigures]
    graph: Graph
    duplicates: list[DuplicateFigures]
    tokens: dict[str, StreamFigures]
    passes: list[PassCost]
    lineage: list[Lineage]
    warnings: list[str]

    @model_validator(mode="after")
    def _names_agree(self) -> Figures:
        """Raise ValueError if a section of the report names something for which the report has no figures: a dataset, a
        node of the plan or a pass (group of steps)."""
        nodes = {node.name for node in self.graph.nodes}
        ends = {end for edge in self.graph.edges for end in (edge.from_, edge.to)}
        passes = {node.name for node in self.lineage if node.kind == "pass"}
        for kind, missing in (("dataset", set(self.names.datasets) - self.datasets.keys()), ("node", ends - nodes),
                              ("pass", passes - {cost.pass_ for cost in self.passes})):
            if missing:
                raise ValueError(f"no figures of the {kind} {visible(min(missing))[:80]!r}")
        return self


class KeptSize(BaseModel):
    """The number of documents that a run kept in a dataset, and the number of bytes of their texts."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    docs: int
    bytes: int


class KeptSizes(BaseModel):
    """The part of report.json that has the sizes of the datasets. All other parts of the file are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    datasets: dict[str, KeptSize]


def kept_sizes(at: Store, run: str) -> dict[str, KeptSize]:
    """Return {dataset: its size} for the datasets that a run made, as the run's report says. The dict is empty if the
    run has no report, or a damaged one."""
    try:
        return KeptSizes.model_validate_json(run_file(at, run, "report.json", REPORT)).datasets
    except (HttpProblem, ValidationError):
        return {}


def read_figures(at: Store, run: str) -> Figures:
    """Read the figures of a run's report. Raises HttpProblem when the run has no report.json, or a damaged one."""
    try:
        return Figures.model_validate_json(run_file(at, run, "report.json", REPORT))
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise HttpProblem(409, "Damaged report", f"runs/{run}/report.json: {place}: {first['msg']}", "run",
                          "tokenmill report writes it again") from None


def dataset_of(node: Lineage) -> str | None:
    """Return the name of the dataset to which a node of a run's plan belongs. Only passes (groups of a dataset's steps)
    and barriers (deduplications) belong to a dataset; the result for other nodes is None. The names of passes are
    DATASET, DATASET:NUMBER or DATASET:SOURCE, and those of barriers DATASET/STEP.NUMBER."""
    return re.split("[:/]", node.name, maxsplit=1)[0] if node.kind in ("pass", "barrier") else None


def entered(figures: Figures, dataset: str) -> int:
    """Return the number of documents that entered a dataset from sources and other datasets."""
    own = [node for node in figures.lineage if node.kind == "pass" and dataset_of(node) == dataset]
    names, read = {node.name for node in own}, {cost.pass_: cost.docs for cost in figures.passes}
    total = 0
    for node in own:
        if names.isdisjoint(node.deps):
            total += read[node.name]
        else:          # a later pass of the dataset: only what it reads from other datasets enters here
            total += sum(figures.datasets[dep].docs for dep in node.deps if dep in figures.datasets)
    return total


def documents_of(figures: Figures) -> dict[str, Documents]:
    """Return how many documents each node of the plan read, kept and dropped. A document that a barrier (a
    deduplication) removes counts as dropped by the barrier, not by the pass (group of steps) that leaves it out
    afterwards."""
    read = {cost.pass_: cost.docs for cost in figures.passes}
    barriers = {section.barrier: section for section in figures.duplicates}
    dropped = {node.name: node.dropped or 0 for node in figures.graph.nodes}
    out: dict[str, Documents] = {}
    for node in figures.lineage:
        docs_in = kept = lost = None
        if node.kind == "index":
            funnel = figures.funnel.get(node.name.removeprefix("index:"), [])
            kept = next((row.docs for row in funnel if row.step == "read"), None)
        elif node.kind == "barrier" and node.name in barriers:
            docs_in = sum(barriers[node.name].looked_at.values())
            lost = removed_by(barriers[node.name])
            kept = docs_in - lost
        elif node.kind == "pass":
            given = [edge.docs for edge in figures.graph.edges if edge.to == node.name and edge.from_ in barriers]
            docs_in = given[0] if given else read.get(node.name)
            kept, lost = _kept(figures, node), dropped.get(node.name)
        elif node.kind == "shards" and (stream := figures.tokens.get(node.name.removeprefix("shards:"))):
            counts = [edge.docs for edge in figures.graph.edges if edge.to == node.name and edge.docs is not None]
            imports = any(dep.startswith("index:") for dep in node.deps)     # then there is one edge for each source
            docs_in = None if not counts else sum(counts) if imports else counts[0]
            kept, lost = stream.docs + stream.val_docs, stream.near_held_out
        out[node.name] = {"in": docs_in, "kept": kept, "dropped": lost}
    return out


def _kept(figures: Figures, node: Lineage) -> int | None:
    """Return the number of documents that a pass (a group of consecutive steps) kept. For the last pass of a dataset,
    it is the number of documents in the dataset. For an earlier pass, it is the number of documents that the next node
    of the dataset reads from the pass."""
    dataset = dataset_of(node)
    if dataset == node.name and dataset in figures.datasets:
        return figures.datasets[dataset].docs
    following = {other.name for other in figures.lineage if dataset_of(other) == dataset}
    return next((edge.docs for edge in figures.graph.edges if edge.from_ == node.name and edge.to in following), None)



def removed_by(section: DuplicateFigures) -> int:
    """Return how many documents a deduplication removed from all sources together."""
    return sum(n for by_source in section.removed.values() for n in by_source.values())
