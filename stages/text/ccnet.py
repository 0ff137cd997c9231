"""Computes the perplexity of texts as CCNet does (Wenzek et al., arXiv 1911.00359; facebookresearch/cc_net at 1341eec).

A text is normalised, cut into pieces by SentencePiece, and scored as *one* sentence by a 5-gram model over the pieces:

    perplexity = 10 ** (-score / (pieces + 1)), rounded to one decimal place

A lower perplexity means that a text is closer to the texts on which the model was trained (Wikipedia, in the paper).
Each model states how its texts are normalised:

  * `ccnet`: cc_net's `text_normalizer.normalize`: strip, lower case, NFD without accents (Mn), every digit replaced by
    0, 34 punctuation marks replaced by ASCII, control characters deleted. Line feeds are control characters, so lines
    are joined without a space between them, as in cc_net.
  * `datatrove`: `datatrove.utils.perplexity.KenlmModel.normalize` of 0.10.1: like `ccnet`, but a whole number with
    its decimals becomes a single 0, and the text is stripped after the accents are removed.
  * `none`: the text stays unchanged.
"""

from __future__ import annotations

import io
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from stages.text.kneser_ney import Estimate, train
from stages.text.ngram_lm import BadModel, NgramLM

_PUNCTUATION = {
    "，": ",", "。": ".", "、": ",", "„": '"', "”": '"', "“": '"', "«": '"', "»": '"', "１": '"', "」": '"', "「": '"',
    "《": '"', "》": '"', "´": "'", "∶": ":", "：": ":", "？": "?", "！": "!", "（": "(", "）": ")", "；": ";",
    "–": "-", "—": " - ", "．": ". ", "～": "~", "’": "'", "…": "...", "━": "-", "〈": "<", "〉": ">", "【": "[",
    "】": "]", "％": "%", "►": "-"}
_CONTROL = [*range(32), *range(127, 160)]
#: translation of the bytes of an ASCII text: to lower case and digits to 0; control characters are deleted
_ASCII = bytes(ord("0") if chr(c).isdecimal() else ord(chr(c).lower()) if c < 128 else c for c in range(256))
_ASCII_GONE = bytes(c for c in _CONTROL if c < 128)
#: most characters of text that a SentencePiece model is learned from, and most bytes of a line
PIECES_CHARS, PIECES_LINE = 20_000_000, 4000


class _Table(dict[int, Any]):
    """A table for `str.translate`, which maps code points to replacements. A character without an entry stays
    unchanged. At its first look-up, it gets an entry, so that the next look-up is quick."""

    def __missing__(self, code: int) -> int:
        self[code] = code
        return code


def _table(*, digits: bool, marks: bool, accents: bool) -> _Table:
    out = _Table()
    if marks:
        out.update({ord(c): to for c, to in _PUNCTUATION.items()})
        out.update(dict.fromkeys(_CONTROL))
    for code in range(0x110000) if digits or accents else ():
        if accents and unicodedata.category(chr(code)) == "Mn":
            out[code] = None
        elif digits and chr(code).isdecimal():
            out[code] = "0"                    # even the full-width 1, which is in the list of punctuation
    return out


_tables: dict[str, _Table] = {}


def _cached(name: str, **kw: bool) -> _Table:
    if name not in _tables:
        _tables[name] = _table(**kw)
    return _tables[name]


def ccnet(text: str) -> str:
    """Normalise a text as cc_net's `text_normalizer.normalize` does with its default settings."""
    text = text.strip()
    if text.isascii():
        return text.encode().translate(_ASCII, _ASCII_GONE).decode()
    return unicodedata.normalize("NFD", text.lower()).translate(_cached("ccnet", digits=True, marks=True, accents=True))


def datatrove(text: str) -> str:
    """Normalise a text as datatrove's `KenlmModel.normalize` does."""
    import regex

    text = regex.sub(r"\p{Nd}+([.,،٫⎖⎗⎘]{1}\p{Nd}+)?", "0", text.lower())
    text = unicodedata.normalize("NFD", text).translate(_cached("accents", digits=False, marks=False, accents=True))
    return text.strip().translate(_cached("marks", digits=False, marks=True, accents=False))


NORMALIZE: dict[str, Callable[[str], str]] = {"ccnet": ccnet, "datatrove": datatrove, "none": str}


class TextModel:
    """Computes the perplexity of texts by an n-gram model whose words are SentencePiece pieces. The n-gram model and
    the SentencePiece model, which cuts texts into pieces, are read from one file.

    Raises BadModel if the file has no SentencePiece model, or names a normalisation that this version does not know.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.lm = NgramLM(path)
        if not self.lm.pieces:
            raise BadModel(f"{path} holds no SentencePiece model, so it says nothing of texts; compile it with "
                           f"--sentencepiece FILE")
        if self.lm.normalize not in NORMALIZE:
            raise BadModel(f"{path} is for texts normalised by '{self.lm.normalize}', which this version does not "
                           f"know; it knows {', '.join(NORMALIZE)}")
        self.normalize = NORMALIZE[self.lm.normalize]
        self._pieces = processor(self.lm.pieces, str(path))
        pieces = [self._pieces.id_to_piece(i) for i in range(self._pieces.get_piece_size())]
        self._ids = self.lm.ids(pieces)
        # KenLM splits the pieces at white space. Their ids can be used directly only if no piece holds white space
        self._unknown = self._pieces.unk_id()
        self._plain = all(len(piece.split()) == 1 for piece in pieces)

    def ids(self, text: str) -> np.ndarray:
        """Normalise a text, cut it into SentencePiece pieces, and return the number of each piece in the vocabulary of
        the n-gram model, int64."""
        text = self.normalize(text)
        piece_ids = np.array(self._pieces.encode(text), np.int64)
        ids, unknown = self._ids[piece_ids], np.flatnonzero(piece_ids == self._unknown)
        if self._plain and not len(unknown):
            return ids
        pieces = self._pieces.encode(text, out_type=str)
        # pieces that SentencePiece does not know may be words of the model
        unknown_pieces = [pieces[i] for i in unknown]
        if self._plain and all(len(piece.split()) == 1 for piece in unknown_pieces):
            ids[unknown] = self.lm.ids(unknown_pieces)
            return ids
        return self.lm.ids(" ".join(pieces).split())

    def perplexity(self, text: str) -> float:
        """Return the perplexity of a text as CCNet computes it, rounded to one decimal place. The closer the text is to
        the texts on which the model was trained, the lower is the perplexity."""
        ids = self.ids(text)
        return round(10.0 ** min(-self.lm.score(ids) / (len(ids) + 1), 300.0), 1)      # a float holds no more


def processor(model: bytes, name: str) -> Any:
    """Return the SentencePiece model that is stored in the given bytes. Raises BadModel, whose message begins with
    `name`, if the bytes are no such model."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=model)
    except RuntimeError as e:
        raise BadModel(f"{name}: no SentencePiece model ({e})") from None


# -- training ----------------------------------------------------------------------------------------------------------
def train_pieces(texts: Iterable[str], vocab: int, normalize: str) -> bytes:
    """Train a SentencePiece model with cc_net's settings (unigram, coverage 0.9995) on the first `PIECES_CHARS`
    characters of the texts, and return the bytes of the model.

    Training uses one thread, so that equal texts give equal bytes. If the texts are too few for a vocabulary of `vocab`
    pieces, the vocabulary is smaller. Raises ValueError if the texts are too few for any vocabulary.
    """
    from sentencepiece import SentencePieceTrainer

    out = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(texts, NORMALIZE[normalize]), model_writer=out, vocab_size=vocab,
            hard_vocab_limit=False, character_coverage=0.9995, model_type="unigram", num_threads=1,
            max_sentence_length=PIECES_LINE + 100, minloglevel=2)
    except RuntimeError as e:
        raise ValueError(f"the texts are too few to learn pieces from ({e})") from None
    return out.getvalue()


def _lines(texts: Iterable[str], normalize: Callable[[str], str], most: int = PIECES_LINE) -> Iterator[str]:
    """Yield texts, normalised, in lines of at most `most` bytes for the training of a SentencePiece model. Lines are
    cut at spaces where there are any. The generator ends after `PIECES_CHARS` characters in total."""
    remaining = PIECES_CHARS
    for text in texts:
        line, at = re.sub(r"\s+", " ", normalize(text)[:remaining]).strip(), 0
        remaining -= len(line)
        while at < len(line):
            part = line[at:at + most + 1]           # only this much is encoded: a book may be one line
            cut, data = len(part), part.encode()
            if len(data) > most:
                cut = len(data[:most].decode(errors="ignore"))
                cut = max(part.rfind(" ", 1, cut), 0) or cut
            yield part[:cut]
            at += cut + line.startswith(" ", at + cut)
        if remaining <= 0:
            return


def train_model(texts: Iterable[str], pieces: bytes, *, normalize: str = "ccnet", order: int = 5,
                most: int = 20_000_000) -> Estimate:
    """Train an n-gram model whose words are the SentencePiece pieces of the texts, and return it. `pieces` holds the
    bytes of the SentencePiece model. Each text is normalised and cut into pieces in the same way as later, when the
    model scores texts."""
    cutter, clean = processor(pieces, "--sentencepiece"), NORMALIZE[normalize]

    def words() -> Iterator[Sequence[str]]:
        for text in texts:
            yield " ".join(cutter.encode(clean(text), out_type=str)).split()

    return train(words(), order=order, most=most)
