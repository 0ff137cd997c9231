"""Declares sources of token files: documents that another project has already turned into tokens."""

from __future__ import annotations

from typing import Literal

from stages.read.reader import Reader
from stages.stage import StageConfig, resource, signal


class Tokens(Reader):
    """Token files of another project, which `shards:` takes as they are. They are no documents, so no dataset reads
    them: they have no text that a step could work on. The task `ImportTokens` reads them instead of this class.

    The formats are those of `tokenmill shards import`, the keys of `tokenizer.imports.imports.FORMATS`.
    """

    name = "tokens"
    collection = True
    holds_tokens = True

    class Config(StageConfig):
        format: Literal["ds", "megatron", "olmo", "nanogpt", "parquet", "mds", "litdata"] = signal(
            ..., "format of the files, as for `tokenmill shards import`")
        tokenizer: str = resource(
            "", "tokenizer with which the tokens were made; it must be that of the recipe. '' to trust that it is")
