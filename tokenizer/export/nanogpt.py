"""The format of llm.c and modded-nanogpt. Each shard is one file; all integers are little-endian::

    train_000000.bin    256 × i32  the header: magic, version, number of tokens T (below 2**31), then zeros;
                                   20240520 and 1 for tokens of u16, 20240801 and 7 for u32
                        T × u16 or u32; tokens of u8 are written as u16

The name is that of the split (train or val). In this format an end-of-text token begins each document, and
modded-nanogpt finds the documents by this token. In a shard EOS ends each document. So the file begins with EOS, and
the last EOS of the shard is left out: the text of each document has the same tokens, with EOS in front of it instead of
behind it.
modded-nanogpt and the C code of llm.c read u16 alone; train_llama3.py of llm.c reads u32.
"""

from __future__ import annotations

import numpy as np

from tokenizer.export.source import ExportError, Source
from tokenizer.export.target import Target
from tokenizer.shards.layout import REMEDY, Shard, ShardError

#: magic and version, by the bytes of a token
HEADS = {2: (20240520, 1), 4: (20240801, 7)}
#: first number that an i32 cannot hold
LIMIT = 1 << 31


class NanoGptWriter:
    """Writes .bin files with a header."""

    holds_loss = False

    def write(self, source: Source, target: Target) -> None:
        dtype = source.dtype if source.dtype.itemsize > 1 else np.dtype("<u2")
        headers = [header(source.info(number), dtype) for number in source.numbers]   # raises before all work
        for number, head in zip(source.numbers, headers):
            info = source.info(number)
            with target.create(f"{source.manifest.split}_{info.index:06d}.bin") as file:
                file.write(head.data)
                held = np.array([source.eos], dtype)
                for block in (tokens.astype(dtype, copy=False) for tokens in source.tokens(number)):
                    file.write(held.data)
                    file.write(block[:-1].data)
                    held = block[-1:]
                if int(held[0]) != source.eos:
                    raise ShardError(f"{source.shards.folder / info.body}: the last document does not end in EOS "
                                     f"({source.eos}): {REMEDY}")


def header(info: Shard, dtype: np.dtype) -> np.ndarray:
    """Return the header of a shard's file. Raises ExportError when the shard has too many tokens for it."""
    if info.tokens >= LIMIT:
        raise ExportError(f"{info.body}: a shard of {info.tokens:,} tokens: --format nanogpt holds files of fewer than "
                          f"{LIMIT:,}; choose another format")
    fields = np.zeros(256, "<i4")
    fields[:3] = *HEADS[dtype.itemsize], info.tokens
    return fields
