"""What a forecast gives: the output of the recipe, and the cost of each node of its plan and of the whole run.

`pipeline.forecast.cost` computes these from a sample run, and `pipeline.forecast.show` formats them as lines of text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipeline.forecast.mixture import StreamUse
from pipeline.forecast.range import Range, exactly
from pipeline.forecast.sample import SourceSample

NOTHING = exactly(0.0)


@dataclass(frozen=True)
class Amount:
    documents: Range
    text_bytes: Range


@dataclass(frozen=True)
class DatasetForecast(Amount):
    dataset: str
    sources: dict[str, Amount]


@dataclass(frozen=True)
class StreamForecast:
    stream: str
    tokens: Range
    held_out: Range


@dataclass(frozen=True)
class ExpectedDuplicates:
    """Says how many documents of one source a deduplication is expected to remove. `documents`: how many documents of
    the source it compares. `in_sample`: the share of documents that it removed in the sample. `removed`: how many
    documents it will remove from the whole input."""

    node: str
    source: str
    documents: float
    in_sample: float
    removed: Range


@dataclass(frozen=True)
class NodeCost:
    """The forecast cost of one node of the plan (such as a pass over the documents or a deduplication). When `kind` is
    "read", it is the cost of reading a source."""

    name: str
    kind: str
    cpu_s: Range
    disk_bytes: Range = NOTHING
    exchange_bytes: Range = NOTHING
    published_bytes: Range = NOTHING
    memory_mb: float = 0.0
    tasks: int = 1

    @property
    def longest_s(self) -> float:
        return self.cpu_s.value / self.tasks


@dataclass(frozen=True)
class TotalCost:
    cores: int
    cpu_hours: Range
    wall_s: Range
    disk_bytes: Range
    published_bytes: Range
    exchange_bytes: Range
    memory_mb_per_worker: float
    price_per_core_hour: float | None
    cost: Range | None


@dataclass(frozen=True)
class CostForecast:
    sample: dict[str, SourceSample]
    sample_wall_s: float
    datasets: list[DatasetForecast]
    streams: list[StreamForecast]
    mixture: list[StreamUse]
    duplicates: list[ExpectedDuplicates]
    nodes: list[NodeCost]
    total: TotalCost
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        sample = {name: {**asdict(s), "scale": round(s.scale, 3)} for name, s in self.sample.items()}
        return {**asdict(self), "sample": sample}
