"""The interface of the classes that write token files in the formats of other projects."""

from __future__ import annotations

from typing import Protocol

from tokenizer.export.samples import ExportSamples
from tokenizer.export.source import ExportSource
from tokenizer.export.target import Target


class ExportFormat(Protocol):
    """Writes token files in the format of another project. The docstring of the module of each format gives the layout
    of its files."""

    #: whether the format can say which tokens are targets
    holds_loss: bool

    def write(self, source: ExportSource, target: Target) -> None:
        """Write all documents of `source`, in their order. Equal shard sets give files of equal bytes. If the format
        cannot hold the shard set, ExportError is raised as early as possible."""

    def write_samples(self, samples: ExportSamples, target: Target) -> None:
        """Write samples of a training, in their order, as rows of one length. A row has all L + 1 tokens of a sample,
        or only the first L if programs that read the format expect so. Equal samples give files of equal bytes."""
