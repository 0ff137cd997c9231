"""The format of datatrove and nanotron (TokenizedBytes). Each shard is these files; all integers are little-endian::

    00000.ds             u16 or u32 per token, documents back to back: the bytes of the shard's token file. Tokens of
                         u8 are written as u16, because datatrove does not read u8
    00000.ds.index       u64 per document: its exclusive end in tokens; the bytes of the shard's file of ends
    00000.ds.loss        u8 per token: 1 if the token is a target, else 0; only if the set has loss masks
    00000.ds.metadata    text, three lines without a newline at the end: TOKENIZER|BYTES, the number of tokens, and this
                         number in short form ("1.5M T"). BYTES is the size of a token (2 or 4)

If one shard has a loss mask, all get one, because datatrove wants a .loss file for each .ds file. datatrove needs BYTES
to merge files of u32.

TOKENIZER is `tokenizer-` and the first 12 hex characters of the tokenizer's sha256, as in the store. A shard set does
not know the tokenizer's name on a hub. nanotron loads the tokenizer by the name TOKENIZER, so for nanotron, replace it
by a name that nanotron can load.

In an export in training order, the samples of L + 1 tokens are back to back. With a sequence length of L, datatrove and
nanotron then read exactly these samples. A document that is cut at the end of a sample also ends there in the index.
Files are numbered from 0.
"""

from __future__ import annotations

import numpy as np

from pipeline.base.humanize import count
from tokenizer.export.samples import ExportSamples, each_token
from tokenizer.export.source import ExportSource
from tokenizer.export.target import Target
from tokenizer.shards.layout import ENDS


class DsWriter:
    """Writes a shard set, or the samples of a training, in the format of datatrove and nanotron. Where an existing file
    has the same bytes, the new file is a hard link to it, if possible."""

    holds_loss = True

    def write(self, source: ExportSource, target: Target) -> None:
        folder = source.shards.folder
        for number in source.numbers:
            info = source.info(number)
            stem = f"{info.index:05d}.ds"
            if source.dtype.itemsize == 1:
                target.write(stem, (tokens.astype("<u2") for tokens in source.tokens(number)))
            else:
                target.share(stem, folder / info.body, source.tokens(number))
            target.share(f"{stem}.index", folder / info.ends, (e.astype(ENDS) for e in source.ends(number)))
            if source.masked and info.loss:
                target.share(f"{stem}.loss", folder / info.loss, source.targets(number))
            elif source.masked:
                target.write(f"{stem}.loss", source.targets(number))
            write_metadata(target, stem, source.manifest.tokenizer, source.dtype, info.tokens)

    def write_samples(self, samples: ExportSamples, target: Target) -> None:
        width = samples.sequence + 1
        for number, part in enumerate(samples.parts):
            stem, tokens = f"{number:05d}.ds", (part.stop - part.begin) * width
            if samples.dtype.itemsize == 1:
                target.write(stem, (block.tokens.astype("<u2") for block in samples.blocks(part)))
            else:
                target.share(stem, samples.original(part, "tokens"), (block.tokens for block in samples.blocks(part)))
            target.write(f"{stem}.index", ((block.pieces(width)[1] + (block.first - samples.first_of(part)) * width)
                                           .astype(ENDS) for block in samples.blocks(part)))
            if samples.masked:
                target.write(f"{stem}.loss", (each_token(block.targets, width) for block in samples.blocks(part)
                                              if block.targets is not None))
            write_metadata(target, stem, samples.tokenizer.sha256, samples.dtype, tokens)


def write_metadata(target: Target, stem: str, tokenizer: str, dtype: np.dtype, tokens: int) -> None:
    text = f"tokenizer-{tokenizer[:12]}|{max(dtype.itemsize, 2)}\n{tokens}\n{count(tokens)} T"
    target.write(f"{stem}.metadata", [np.frombuffer(text.encode(), np.uint8)])
