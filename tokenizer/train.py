"""Trains a tokenizer: byte-level BPE with the library `tokenizers`, or BPE or unigram with SentencePiece. Training runs
in one thread, so that equal texts give an equal file."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizer.load import TokenizerError

EOS = "<|endoftext|>"
#: pattern that splits text before BPE merges: that of Llama 3 (cl100k with digits in groups of up to three). There is
#: no normaliser
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
#: longest line for SentencePiece, which silently skips lines that are too long; longer ones are cut, at spaces
LINE_BYTES = 4096
#: a run of characters without white space (base64, genomes, lines of dashes), or of white space only, is cut after this
#: many characters, because the BPE trainer's time is quadratic in the length of a run (200,000 letters took 36 s)
RUN = 1024
_RUN = re.compile(rf"\S{{{RUN}}}|\s{{{RUN}}}")


def train_bpe(texts: Iterable[str], vocab: int, path: str | os.PathLike[str]) -> None:
    """Train a byte-level BPE tokenizer (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2) on `texts` and write it
    to `path` as a Hugging Face `tokenizer.json`.

    The vocabulary always has the 256 bytes and EOS (id 0), so that decoding returns every text unchanged. `vocab` is
    the size of the vocabulary, including these 257. The vocabulary becomes smaller if the texts have no more pairs to
    merge.
    """
    if vocab < 257:
        raise TokenizerError(f"tokenizer.train.vocab: {vocab} is below 257 (256 bytes and one end-of-text token)")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    native = Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    native.decoder = decoders.ByteLevel()
    native.train_from_iterator(_runs(texts), trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[AddedToken(EOS, special=True, normalized=False)], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    Path(path).write_text(native.to_str(), encoding="utf-8")


def train_sentencepiece(texts: Iterable[str], vocab: int, path: str | os.PathLike[str], model: str = "unigram") -> None:
    """Train a SentencePiece tokenizer (Kudo & Richardson, arXiv 1808.06226) on `texts` and write its `.model` to
    `path`.

    The settings are chosen so that encoding loses no text: identity normalisation, white space kept, byte fallback, a
    piece for the newline. `vocab` is the number of pieces; `model` is unigram or bpe.
    """
    if model not in ("unigram", "bpe"):
        raise TokenizerError(f"tokenizer.train.model: '{model}' is neither unigram nor bpe")
    from sentencepiece import SentencePieceTrainer

    out = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(texts), model_writer=out, vocab_size=vocab, model_type=model, num_threads=1,
            byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, split_digits=True,
            character_coverage=0.9995, max_sentence_length=LINE_BYTES * 2, user_defined_symbols=["\n"],
            unk_id=0, eos_id=1, bos_id=-1, pad_id=-1, eos_piece="</s>", minloglevel=2)
    except Exception as e:  # RuntimeError, whose message begins with a C++ source line
        allowed = re.search(r"<= (\d+)", str(e))
        hint = f"these texts allow at most {allowed[1]}" if allowed else str(e).strip().splitlines()[-1]
        raise TokenizerError(f"tokenizer.train.vocab: SentencePiece cannot make {vocab} pieces: {hint}; lower it or "
                             f"train on more text") from e
    Path(path).write_bytes(out.getvalue())


def _runs(texts: Iterable[str]) -> Iterator[str]:
    """Cut the texts into pieces for the BPE trainer, which is slow on long runs. A run is RUN characters without white
    space, or RUN characters of white space only; a piece ends after it."""
    for text in texts:
        start = 0
        for run in _RUN.finditer(text):
            yield text[start:run.end()]
            start = run.end()
        if start < len(text):
            yield text[start:]


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the texts. Lines of more than LINE_BYTES bytes are cut, at spaces where possible."""
    for text in texts:
        for line in text.split("\n"):
            while len(line) * 4 > LINE_BYTES and len(line.encode()) > LINE_BYTES:
                cut = line.rfind(" ", 1, LINE_BYTES // 4)
                cut = cut if cut > 0 else LINE_BYTES // 4
                yield line[:cut]
                line = line[cut:]
            if line:
                yield line
