"""Trains a tokenizer: byte-level BPE with the library `tokenizers`, or BPE or unigram with SentencePiece. Training runs
in one thread, so that equal texts in equal order give an equal file."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizer.byte_level import EOS
from tokenizer.errors import TokenizerError
from tokenizer.special import special_tokens

#: pattern for digits, by the setting `digits`: one by one; groups of three counted from the first digit (as in GPT-4
#: and Llama 3); or groups of three counted from the last digit, as people write thousands. From the last digit, the
#: pattern looks at most 51 digits ahead, because a look ahead over a whole long number takes quadratic time. In a
#: longer number, groups are counted from the first digit until at most 51 are left
DIGITS = {"single": r"\p{N}", "left3": r"\p{N}{1,3}",
          "right3": r"\p{N}{1,3}(?=(?:\p{N}{3}){0,16}(?!\p{N}))|\p{N}{3}"}
#: longest line for SentencePiece, which silently skips lines that are too long. Longer ones are cut into pieces of at
#: most a quarter as many characters, at a space if there is one
LINE_BYTES = 4096
#: a run of characters without white space (base64, genomes, lines of dashes), or of white space only, is cut after this
#: many characters, because the BPE trainer's time is quadratic in the length of a run
RUN = 1024
_RUN = re.compile(rf"\S{{{RUN}}}|\s{{{RUN}}}")


def split_pattern(digits: str) -> str:
    """Return the regular expression that splits text before BPE merges. It is that of Llama 3 (cl100k without its
    possessive quantifiers), with digits split as the setting `digits` says. Text is not normalised."""
    return (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + DIGITS[digits] +
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def train_tokenizer(texts: Iterable[str], settings: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Train a tokenizer on `texts` and write it to `path`. `settings` are those under `tokenizer.train` in a recipe:
    `kind` (bpe or sentencepiece), `vocab`, and optionally `model`, `digits`, `space_runs` and `special`. Raises
    TokenizerError when two settings contradict each other, when `vocab` is too small for the tokens that it must have,
    or when SentencePiece cannot make `vocab` pieces of the texts."""
    options = {key: settings[key] for key in ("digits", "space_runs", "special") if settings.get(key)}
    if settings["kind"] == "bpe":
        train_bpe(texts, settings["vocab"], path, **options)
    else:
        train_sentencepiece(texts, settings["vocab"], path, settings.get("model") or "unigram", **options)


def train_bpe(texts: Iterable[str], vocab: int, path: str | os.PathLike[str], *, digits: str = "left3",
              space_runs: int = 0, special: Mapping[str, Any] | None = None) -> None:
    """Train a byte-level BPE tokenizer (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2) on `texts` and write it
    to `path` as a Hugging Face `tokenizer.json`.

    `vocab` is the number of all tokens. They are, in the order of their ids: EOS (id 0) and the special tokens of
    `special`, the 256 bytes, the merged tokens, and the tokens for runs of 2 to `space_runs` spaces. Decoding returns
    every text unchanged, because each byte is a token. There are fewer tokens if the texts have no more pairs to merge.
    `digits` is a key of DIGITS. Raises TokenizerError when `vocab` is too small for the tokens that it must have."""
    tokens, runs = special_tokens(special or {}, EOS), [" " * n for n in range(2, space_runs + 1)]
    if vocab < (least := 256 + len(tokens) + len(runs)):
        others = f", {len(runs)} runs of spaces" if runs else ""
        raise TokenizerError(f"tokenizer.train.vocab: {vocab} is below {least} (256 bytes, {len(tokens)} special "
                             f"token{'s' * (len(tokens) > 1)}{others}); raise it, or ask for fewer tokens")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    native = Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split_pattern(digits)), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    native.decoder = decoders.ByteLevel()
    if runs:                       # encoding cuts texts at these tokens, so merges are learned from cut texts
        texts = (part for text in texts for part in re.split(" {2,}", text) if part)
    native.train_from_iterator(_runs(texts), trainers.BpeTrainer(
        vocab_size=vocab - len(runs), show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    native.add_tokens([AddedToken(run, special=False, normalized=False) for run in runs])
    Path(path).write_text(native.to_str(), encoding="utf-8")


def train_sentencepiece(texts: Iterable[str], vocab: int, path: str | os.PathLike[str], model: str = "unigram", *,
                        digits: str = "single", space_runs: int = 0, special: Mapping[str, Any] | None = None) -> None:
    """Train a SentencePiece tokenizer (Kudo & Richardson, arXiv 1808.06226) on `texts` and write its `.model` to
    `path`.

    The settings are chosen so that encoding loses no text: identity normalisation, white space kept, byte fallback, a
    piece for the newline. `vocab` is the number of pieces; `model` is unigram or bpe. Special tokens become control
    symbols, so that SentencePiece never encodes text as one of them. Raises TokenizerError when `model` is another,
    when `digits` is not single, or when SentencePiece cannot make `vocab` pieces of these texts."""
    if model not in ("unigram", "bpe"):
        raise TokenizerError(f"tokenizer.train.model: '{model}' is neither unigram nor bpe")
    if digits != "single":
        raise TokenizerError(f"tokenizer.train.digits: SentencePiece splits numbers into single digits alone, not "
                             f"'{digits}'; leave it out, or take `kind: bpe`")
    tokens = special_tokens(special or {}, "</s>")[1:]
    runs = ["\u2581" * n for n in range(2, space_runs + 1)]                  # SentencePiece writes a space as U+2581
    if vocab < (least := 259 + len(tokens) + len(runs)):
        raise TokenizerError(f"tokenizer.train.vocab: {vocab} is below {least} (256 bytes, <unk>, </s>, the newline, "
                             f"{len(tokens)} special tokens, {len(runs)} runs of spaces); raise it, or ask for fewer "
                             f"tokens")
    from sentencepiece import SentencePieceTrainer

    out = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(texts), model_writer=out, vocab_size=vocab, model_type=model, num_threads=1,
            byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, split_digits=True,
            character_coverage=0.9995, max_sentence_length=LINE_BYTES * 2, user_defined_symbols=["\n", *runs],
            control_symbols=tokens, unk_id=0, eos_id=1, bos_id=-1, pad_id=-1, eos_piece="</s>", minloglevel=2)
    except Exception as e:  # RuntimeError, whose message begins with a C++ source line
        if needed := re.search(r"required_chars\. \d+ vs (\d+)", str(e)):
            raise TokenizerError(f"tokenizer.train.vocab: SentencePiece cannot make {vocab} pieces: the characters of "
                                 f"these texts need at least {needed[1]}; raise it") from e
        allowed = re.search(r"value <= (\d+)", str(e))
        hint = f"these texts allow at most {allowed[1]}" if allowed else str(e).strip().splitlines()[-1]
        raise TokenizerError(f"tokenizer.train.vocab: SentencePiece cannot make {vocab} pieces: {hint}; lower it or "
                             f"train on more text") from e
    Path(path).write_bytes(out.getvalue())


def _runs(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts in pieces. A run of characters without white space is cut after every RUN characters, and so is a
    run of white space. Without this, the BPE trainer's time would be quadratic in the length of a run."""
    for text in texts:
        start = 0
        for run in _RUN.finditer(text):
            yield text[start:run.end()]
            start = run.end()
        if start < len(text):
            yield text[start:]


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the texts, without empty ones. Lines of more than LINE_BYTES bytes are cut into pieces of at
    most LINE_BYTES // 4 characters, at a space where there is one."""
    for text in texts:
        for line in text.split("\n"):
            while len(line) * 4 > LINE_BYTES and len(line.encode()) > LINE_BYTES:
                cut = line.rfind(" ", 1, LINE_BYTES // 4)
                cut = cut if cut > 0 else LINE_BYTES // 4
                yield line[:cut]
                line = line[cut:]
            if line:
                yield line
