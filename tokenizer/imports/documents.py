"""Cuts tokens of another project into documents: at the ends that an index gives, or at EOS.

Tokens are read in blocks (`ImportLimits.block_tokens`), or one document if that is longer, so memory does not grow with
the size of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tokenizer.imports.source import AGAIN, OTHER, ImportSource, TokenFile, TokenFileError, WrongTokenizer

#: number of tokens without an EOS that shows that the tokenizer has another one
TELLING = 10_000


class ImportedDocuments(NamedTuple):
    """Consecutive documents of a file, with their tokens back to back, in the type of the shard set. Each ends in EOS.
    If the files hold training samples (`ImportSource.sequence`), these are pieces of documents, which need not end in
    EOS."""

    file: str                     # relative to the folder of the files
    first: int                    # number of the first of them in the file, from 0
    tokens: np.ndarray
    lengths: np.ndarray           # tokens of each document, int64
    ids: list[str] | None         # None: the format has no ids
    targets: np.ndarray | None    # whether each token is a target, u8; None: all are


class Ends(NamedTuple):
    """Consecutive entries of an index: the exclusive ends of documents in tokens of the file, int64, and their ids."""

    ends: np.ndarray
    ids: list[str] | None = None


class TokenRange(NamedTuple):
    """Consecutive tokens of a file, checked and in the dtype of the shard set. The range may begin and end inside a
    document."""

    file: str
    byte: int                     # byte of the file at which they begin
    width: int                    # bytes of a token in the file
    tokens: np.ndarray


def cut_at_ends(source: ImportSource,
                name: str,
                body: TokenFile,
                dtype: np.dtype,
                index: Iterable[Ends],
                index_path: object,
                loss: TokenFile | None = None) -> Iterator[ImportedDocuments]:
    """Yield the documents of a file of tokens, cut where an index says. `name` is the file's name and `body` the open
    file, which consists of tokens of type `dtype`. `index` yields the ends of all documents of the file, in order.
    `index_path` is the name of the index in error messages. `loss` is the file of the loss mask: a u8 per token, 1 if
    it is a target, else 0.

    Raises TokenFileError in these cases: the index or the loss mask does not fit `body`, a document is longer than the
    limits of `source` allow, or a document does not end in EOS. If the files hold training samples (`source.sequence`),
    a document may be a piece of a sample, and need not end in EOS."""
    total, begin, number = body.count(dtype), 0, 0
    if loss is not None and loss.size != total:
        raise TokenFileError(f"{loss.path}: {loss.size:,} bytes, one a token would be {total:,}: {AGAIN}")

    for ends, ids in index:
        if not len(ends):
            continue
        if int(ends.min()) < 0 or int(ends.max()) > total or int(np.diff(ends, prepend=begin).min()) < 1:
            raise TokenFileError(f"{index_path}: documents from number {number:,} on do not follow one another within "
                                 f"the {total:,} tokens of {body.path}: truncated, or damaged: {AGAIN}")
        first = 0
        while first < len(ends):
            last = max(first + 1, int(np.searchsorted(ends, begin + source.limits.block_tokens, side="right")))
            stop = int(ends[last - 1])
            if stop - begin > source.limits.longest:
                raise TokenFileError(f"{index_path}: document {number:,} has {stop - begin:,} tokens, more than "
                                     f"{source.limits.longest:,}: no index of documents, or damaged: {AGAIN}")
            place = body.place(begin * dtype.itemsize, dtype.itemsize)
            tokens = source.checked(body.array(begin * dtype.itemsize, stop - begin, dtype), place)
            local = ends[first:last] - begin
            source.check_ends(tokens, local, place)
            yield ImportedDocuments(name, number, tokens, np.diff(local,
                                                                  prepend=0), None if ids is None else ids[first:last],
                                    None if loss is None else targets_of(loss, begin, stop))
            source.progress((stop - begin) * dtype.itemsize)
            begin, number, first = stop, number + last - first, last
    if begin != total:
        raise TokenFileError(f"{index_path}: its documents end at token {begin:,} of {total:,} in {body.path}: "
                             f"truncated, or of another file: {AGAIN}")


def cut_rows_at_eos(source: ImportSource, rows: ImportedDocuments) -> ImportedDocuments:
    """Divide rows (training samples) into pieces of documents, each of which ends at an EOS or where its row ends.
    Raises TokenFileError when a row does not have L + 1 tokens."""
    width = source.sequence + 1
    if len(wrong := np.flatnonzero(rows.lengths != width)):
        raise TokenFileError(f"{source.folder / rows.file}: row {rows.first + int(wrong[0]):,} has "
                             f"{int(rows.lengths[wrong[0]]):,} tokens, not the {width:,} of sequence "
                             f"{source.sequence}; see that the number is right, or write rows of one length")
    return rows._replace(lengths=row_pieces(None, rows.tokens, width, source.coding.eos)[0])


def cut_flat_rows(source: ImportSource, name: str, body: TokenFile, dtype: np.dtype,
                  start: int = 0) -> Iterator[ImportedDocuments]:
    """Yield the pieces of documents in rows (training samples) of L = `source.sequence` tokens. The rows follow one
    another in the file `name`, opened as `body`, from byte `start` to its end. Each piece ends at an EOS or where its
    row ends. Raises TokenFileError when the file ends inside a row."""
    width, tokens = source.sequence, body.count(dtype, start)
    if tokens % width:
        raise TokenFileError(f"{body.path}: {tokens:,} tokens are no whole number of rows of {width:,} tokens "
                             f"(sequence {width}); see that the number is right")
    step = max(1, source.limits.block_tokens // width) * width
    for first in range(0, tokens, step):
        byte = start + first * dtype.itemsize
        block = body.array(byte, min(step, tokens - first), dtype)
        block = source.checked(block, body.place(byte, dtype.itemsize))
        lengths, _ = row_pieces(None, block, width, source.coding.eos)
        yield ImportedDocuments(name, first // width, block, lengths, None, None)
        source.progress(len(block) * dtype.itemsize)


def row_pieces(ends: np.ndarray | None, tokens: np.ndarray, width: int, eos: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide rows (training samples) of `width` tokens into pieces of documents. Returns (length of each piece, number
    of pieces of each row). `ends` are the exclusive ends of pieces in `tokens`, int64; if it is None, each EOS ends a
    piece. The end of a row always ends a piece."""
    is_end = tokens == eos if ends is None else np.zeros(len(tokens), bool)
    if ends is not None:
        is_end[ends - 1] = True
    is_end[width - 1::width] = True
    return np.diff(np.flatnonzero(is_end), prepend=-1), is_end.reshape(-1, width).sum(1)


def targets_of(loss: TokenFile, begin: int, stop: int) -> np.ndarray:
    """Read the flags of tokens [begin, stop) from the file of a loss mask: whether each token counts in the loss.
    Raises TokenFileError for a flag other than 0 and 1."""
    flags = loss.array(begin, stop - begin, np.dtype("u1"))
    if int(flags.max()) > 1:
        wrong = int(np.flatnonzero(flags > 1)[0])
        raise TokenFileError(f"{loss.path}: byte {begin + wrong:,} is {int(flags[wrong])}; a loss mask has 0 and 1: "
                             f"{AGAIN}")
    return flags


def cut_at_eos(source: ImportSource, pieces: Iterable[TokenRange]) -> Iterator[ImportedDocuments]:
    """Yield the documents of consecutive pieces of tokens. Each EOS ends a document, and a document may go on in the
    next piece. A document that reaches into the next file belongs to the file in which it begins. Raises TokenFileError
    when the last piece does not end in EOS, or when a document has more than about `ImportLimits.longest` tokens."""
    eos = source.coding.eos
    begun: list[TokenRange] = []                       # pieces of the document whose end was not found yet
    waiting = 0                                   # number of tokens in `begun`
    file, number, seen = "", 0, False
    for piece in pieces:
        if not len(piece.tokens):
            continue
        source.progress(len(piece.tokens) * piece.width)
        ends = np.flatnonzero(piece.tokens == eos) + 1
        if not len(ends):
            begun.append(piece)
            waiting += len(piece.tokens)
            if waiting > source.limits.longest:
                raise endless(source, begun[0], waiting, seen)
            continue
        seen = True
        owner, start = begun[0].file if begun else piece.file, 0
        if owner != file:
            file, number = owner, 0
        if owner != piece.file:                   # only the end of the document is in this piece
            start = int(ends[0])
            head = np.concatenate([*(part.tokens for part in begun), piece.tokens[:start]])
            yield ImportedDocuments(file, number, head, np.array([len(head)]), None, None)
            begun, ends, file, number = [], ends[1:], piece.file, 0
        if len(ends):
            tokens = np.concatenate([*(part.tokens for part in begun), piece.tokens[start:ends[-1]]])
            lengths = np.diff(ends, prepend=start)
            lengths[0] += sum(len(part.tokens) for part in begun)
            yield ImportedDocuments(file, number, tokens, lengths, None, None)
            number, start = number + len(lengths), int(ends[-1])
        rest = piece._replace(byte=piece.byte + start * piece.width, tokens=piece.tokens[start:])
        begun, waiting = ([rest] if len(rest.tokens) else []), len(rest.tokens)
    if begun:
        raise endless(source, begun[0], waiting, seen)


def endless(source: ImportSource, piece: TokenRange, tokens: int, seen: bool) -> TokenFileError:
    """Return the error for a document that has no EOS among the `tokens` tokens read of it. `piece` holds its
    beginning. If the document is long, and no EOS was `seen` before, the tokenizer of the files probably has another
    EOS. The error is then a WrongTokenizer, otherwise a TokenFileError."""
    kind = WrongTokenizer if not seen and tokens >= TELLING else TokenFileError
    return kind(f"{source.folder / piece.file}: no EOS (token id {source.coding.eos}) after byte {piece.byte:,}, so "
                f"the end of the document there cannot be found; {OTHER}, or see that no file is missing or truncated")
