"""Cuts tokens of another project into documents: at the ends that an index gives, or at EOS.

Tokens are read in blocks of BLOCK_TOKENS, or one document if that is longer, so memory does not grow with the size of a
file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tokenizer.imports.source import AGAIN, OTHER, ImportSource, TokenFile, TokenFileError

#: tokens that are read at a time
BLOCK_TOKENS = 1 << 22
#: most tokens of a document, 1 GiB of four bytes each. A document is read whole. A longer one probably means that the
#: ends of documents were not found, and it would fill the memory
LONGEST = 1 << 28


class ImportedDocuments(NamedTuple):
    """Consecutive documents of a file, with their tokens back to back, in the type of the shard set and each with EOS
    at its end."""

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
    byte: int                     # at which they begin
    width: int                    # bytes of a token in the file
    tokens: np.ndarray


def cut_at_ends(source: ImportSource,
                name: str,
                body: TokenFile,
                dtype: np.dtype,
                index: Iterable[Ends],
                index_path: object,
                loss: TokenFile | None = None) -> Iterator[ImportedDocuments]:
    """Yield the documents of the file `name`, opened as `body`, which has nothing but tokens of type `dtype`. `index`
    gives the ends of all documents; error messages name it as `index_path`. `loss` is the file with the loss mask: a u8
    for each token, 1 if the token is a target and else 0. Raises TokenFileError when these files do not agree, or when
    a document does not end in EOS."""
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
            last = max(first + 1, int(np.searchsorted(ends, begin + BLOCK_TOKENS, side="right")))
            stop = int(ends[last - 1])
            if stop - begin > LONGEST:
                raise TokenFileError(f"{index_path}: document {number:,} has {stop - begin:,} tokens, more than "
                                     f"{LONGEST:,}: no index of documents, or damaged: {AGAIN}")
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


def targets_of(loss: TokenFile, begin: int, stop: int) -> np.ndarray:
    """Read the flags of tokens [begin, stop) from a loss mask."""
    flags = loss.array(begin, stop - begin, np.dtype("u1"))
    if int(flags.max()) > 1:
        wrong = int(np.flatnonzero(flags > 1)[0])
        raise TokenFileError(f"{loss.path}: byte {begin + wrong:,} is {int(flags[wrong])}; a loss mask has 0 and 1: "
                             f"{AGAIN}")
    return flags


def cut_at_eos(source: ImportSource, pieces: Iterable[TokenRange]) -> Iterator[ImportedDocuments]:
    """Yield the documents of consecutive pieces of tokens. Each EOS ends a document, and a document may go on in the
    next piece. A document that reaches into the next file belongs to the file in which it begins. Raises TokenFileError
    when the last piece does not end in EOS, or when a document has more than about LONGEST tokens."""
    eos = source.coding.eos
    begun: list[TokenRange] = []                       # pieces of the document whose end was not found yet
    waiting = 0                                   # number of tokens in `begun`
    file, number = "", 0
    for piece in pieces:
        if not len(piece.tokens):
            continue
        source.progress(len(piece.tokens) * piece.width)
        ends = np.flatnonzero(piece.tokens == eos) + 1
        if not len(ends):
            begun.append(piece)
            waiting += len(piece.tokens)
            if waiting > LONGEST:
                raise endless(source, begun[0])
            continue
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
        raise endless(source, begun[0])


def endless(source: ImportSource, piece: TokenRange) -> TokenFileError:
    """Return the error for a document that does not end in EOS. `piece` holds the beginning of the document."""
    return TokenFileError(f"{source.folder / piece.file}: no EOS (token id {source.coding.eos}) after byte "
                          f"{piece.byte:,}, so the end of the document there cannot be found; {OTHER}, or see that no "
                          f"file is missing or truncated")
