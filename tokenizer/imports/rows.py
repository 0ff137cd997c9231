"""Turns rows of one length into documents of a shard set and into packed rows of it (`tokenizer.shards.packed`). The
rows are training samples of another project, or of an export in training order.

A row has L + 1 tokens, or L in formats that leave out the last one. It consists of pieces of documents, back to back,
and perhaps padding. Each piece becomes a document. In a shard set every document must end in EOS. So a piece that was
cut at the end of its row, and does not end in EOS, gets an EOS behind it. This EOS is no target and belongs to no row.

Padding does not become a document, because padding is added again when a packed row that is too short is read. Padding
is recognised by the loss mask. In files without a loss mask it becomes a document like any other piece. In both cases,
the packed rows have the same tokens as the rows of the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tokenizer.imports.documents import ImportedDocuments
from tokenizer.imports.format import ImportFormat
from tokenizer.imports.source import ImportSource, TokenFileError
from tokenizer.shards.rows import RowOrigin


class RowPieces(NamedTuple):
    """Consecutive whole rows (training samples) of a file. Each piece of a row is a document that ends in EOS."""

    documents: ImportedDocuments
    sizes: np.ndarray             # tokens of each document that belong to its row: all, or all but an added EOS
    counts: np.ndarray            # number of documents of each row
    masked: bool                  # whether the files have loss masks


def piece_ids(origins: Iterable[RowOrigin], counts: np.ndarray) -> list[str]:
    """Make ids for the pieces of rows (training samples) from the origins of the rows, and return them. `counts` has
    the number of pieces of each row."""
    return [origin.id(piece) for origin, count in zip(origins, counts.tolist()) for piece in range(count)]


def blocks_of(source: ImportSource, reader: ImportFormat,
              names: list[str]) -> Iterator[tuple[ImportedDocuments, RowPieces | None]]:
    """Yield the documents of the files `names`, block by block, as (documents, None). If the files have rows (training
    samples) instead, each block has whole rows and is yielded as (the pieces of documents in them, the rows). The
    errors are those of `ImportFormat.documents` and `rows_of`."""
    blocks = reader.documents(source, names)
    if not source.sequence:
        for block in blocks:
            yield block, None
        return
    for rows in rows_of(source, blocks, source.sequence + int(reader.keeps_rows)):
        yield rows.documents, rows


def rows_of(source: ImportSource, blocks: Iterable[ImportedDocuments], width: int) -> Iterator[RowPieces]:
    """Yield the rows (training samples) of files, block by block. A row has `width` tokens. `blocks` are the pieces of
    documents in the rows. Raises TokenFileError when a piece reaches over the end of a row, or when a file ends inside
    a row."""
    held: list[ImportedDocuments] = []                    # pieces of a row whose end was not found yet
    file, number = "", 0
    for block in blocks:
        if held and held[0].file != block.file:
            raise wrong_length(source, held[0].file, width)
        if block.file != file:
            file, number = block.file, 0
        joined = join([*held, block])
        ends = np.cumsum(joined.lengths)
        marks = np.arange(width, int(ends[-1]) + 1, width)
        lasts = np.searchsorted(ends, marks)              # number of the last piece of each row
        if not np.array_equal(ends[lasts], marks):
            raise wrong_length(source, file, width)
        stop = int(lasts[-1]) + 1 if len(lasts) else 0
        rest = part_of(joined, stop, len(ends))
        held = [rest] if len(rest.lengths) else []
        if stop:
            pieces = part_of(joined, 0, stop)._replace(first=number)
            number += stop
            yield as_documents(pieces, np.diff(lasts, prepend=-1), source.coding.eos)
    if held:
        raise wrong_length(source, file, width)


def wrong_length(source: ImportSource, file: str, width: int) -> TokenFileError:
    return TokenFileError(f"{source.folder / file}: is no file of rows of {width:,} tokens (sequence {source.sequence}"
                          f"); see that the number is right, or leave it out to import documents")


def join(blocks: list[ImportedDocuments]) -> ImportedDocuments:
    first = blocks[0]
    if len(blocks) == 1:
        return first
    return first._replace(
        tokens=np.concatenate([block.tokens for block in blocks]),
        lengths=np.concatenate([block.lengths for block in blocks]),
        ids=None if first.ids is None else [id for block in blocks for id in block.ids or []],
        targets=None if first.targets is None else np.concatenate([block.targets for block in blocks
                                                                   if block.targets is not None]))


def part_of(documents: ImportedDocuments, first: int, stop: int) -> ImportedDocuments:
    """Return a slice of consecutive documents: those with indices in [first, stop)."""
    ends = np.concatenate(([0], np.cumsum(documents.lengths)))
    tokens = slice(int(ends[first]), int(ends[stop]))
    return documents._replace(
        tokens=documents.tokens[tokens], lengths=documents.lengths[first:stop],
        ids=None if documents.ids is None else documents.ids[first:stop],
        targets=None if documents.targets is None else documents.targets[tokens])


def as_documents(pieces: ImportedDocuments, counts: np.ndarray, eos: int) -> RowPieces:
    """Turn the pieces of rows (training samples) into documents that end in EOS, without padding. `counts` has the
    number of pieces of each row."""
    is_padding, masked = padding_in(pieces, counts, eos), pieces.targets is not None
    if is_padding.any():
        kept = np.repeat(~is_padding, pieces.lengths)
        pieces = pieces._replace(
            tokens=pieces.tokens[kept], lengths=pieces.lengths[~is_padding],
            ids=None if pieces.ids is None else [id for id, gone in zip(pieces.ids, is_padding.tolist()) if not gone],
            targets=None if pieces.targets is None else pieces.targets[kept])
        counts = counts - is_padding[np.cumsum(counts) - 1]
    ends = np.cumsum(pieces.lengths)
    is_cut = pieces.tokens[ends - 1] != eos
    tokens, targets = pieces.tokens, pieces.targets
    if is_cut.any():
        targets = np.insert(np.ones(len(tokens), np.uint8) if targets is None else targets, ends[is_cut], 0)
        tokens = np.insert(tokens, ends[is_cut], eos)
    return RowPieces(pieces._replace(tokens=tokens, lengths=pieces.lengths + is_cut, targets=targets), pieces.lengths,
                     counts, masked)


def padding_in(pieces: ImportedDocuments, counts: np.ndarray, eos: int) -> np.ndarray:
    """Return for each piece whether it is padding: the last of several pieces of a row (training sample), with nothing
    but EOS tokens that are no targets. Without a loss mask, no piece is padding."""
    is_padding = np.zeros(len(pieces.lengths), bool)
    if pieces.targets is not None:
        is_padding[(np.cumsum(counts) - 1)[counts > 1]] = True
        starts = np.cumsum(pieces.lengths) - pieces.lengths
        is_padding &= np.add.reduceat((pieces.tokens == eos) & (pieces.targets == 0), starts,
                                      dtype=np.int64) == pieces.lengths
    return is_padding
