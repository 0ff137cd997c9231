"""The format of llm.c and modded-nanogpt. Each shard is one file; all integers are little-endian::

    train_000000.bin    256 × i32  the header: magic, version, number of tokens T (below 2**31), then zeros;
                                   20240520 and 1 for tokens of u16, 20240801 and 7 for u32
                        T × u16 or u32; tokens of u8 are written as u16

The name begins with that of the split (train or val). modded-nanogpt and the C code of llm.c read only u16;
train_llama3.py of llm.c reads u32.

In this format EOS begins each document, and modded-nanogpt finds the documents by it. In a shard EOS ends each
document. So a file has an EOS in front of the shard's tokens, and lacks the shard's last EOS.

In an export in training order, the files are train_000000.bin and so on. They hold the first L tokens of each sample
back to back, because llm.c reads rows of L tokens that do not overlap. llm.c takes the first token of the next row as
the last target of a row. This target is wrong, because the next row is from another place of the data. modded-nanogpt
does not keep the order, because it begins rows at EOS.
"""

from __future__ import annotations

import numpy as np

from tokenizer.export.samples import ExportSamples
from tokenizer.export.source import ExportError, ExportSource
from tokenizer.export.target import Target
from tokenizer.shards.layout import REMEDY, ShardError

#: bytes of a token → (magic, version)
HEADS = {2: (20240520, 1), 4: (20240801, 7)}
#: first number that an i32 cannot hold
LIMIT = 1 << 31


class NanoGptWriter:
    """Writes a shard set, or the samples of a training, in the format of llm.c and modded-nanogpt: .bin files that
    begin with a header."""

    holds_loss = False

    def write(self, source: ExportSource, target: Target) -> None:
        infos = [source.info(number) for number in source.numbers]
        dtype = wide(source.dtype)
        headers = [header(info.body, info.tokens, dtype) for info in infos]                  # raises before all work
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

    def write_samples(self, samples: ExportSamples, target: Target) -> None:
        length, dtype = samples.sequence, wide(samples.dtype)
        for number, part in enumerate(samples.parts):
            name = f"train_{number:06d}.bin"
            with target.create(name) as file:
                file.write(header(name, (part.stop - part.begin) * length, dtype).data)
                for block in samples.blocks(part):
                    file.write(np.ascontiguousarray(block.tokens[:, :length], dtype).data)


def wide(dtype: np.dtype) -> np.dtype:
    """Return the type in which tokens of type `dtype` are written: u16 for u8, because the format has no tokens of 8
    bits, otherwise `dtype`."""
    return dtype if dtype.itemsize > 1 else np.dtype("<u2")


def header(name: str, tokens: int, dtype: np.dtype) -> np.ndarray:
    """Return the header of a file of tokens, i32 (256,). Raises ExportError, which names the file `name`, when the
    header cannot hold so large a number of tokens."""
    if tokens >= LIMIT:
        raise ExportError(f"{name}: a file of {tokens:,} tokens: --format nanogpt holds files of fewer than {LIMIT:,}; "
                          f"choose another format")
    fields = np.zeros(256, "<i4")
    fields[:3] = *HEADS[dtype.itemsize], tokens
    return fields
