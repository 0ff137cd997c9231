"""Loads a tokenizer from a Hugging Face `tokenizer.json`, a SentencePiece `.model` or a `.tiktoken` file. All become
the class `Tokenizer`.

Text that spells a special token (for instance "<|endoftext|>" in a web page) is encoded as ordinary text, never as the
token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tokenizer.byte_level import EOS, ByteLevel, alphabet, byte_level_json
from tokenizer.errors import TokenizerError
from tokenizer.tiktoken import convert, is_tiktoken, pattern_of

#: usual names of an end-of-text token, most specific first. They are tried if neither the recipe nor the tokenizer's
#: files name the token
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>",
             "[EOS]")
#: short texts on which implementations of byte-level BPE differ: whitespace runs, scripts without spaces, combining
#: marks, emoji with joiners, digits, control characters, spelled-out special tokens
PROBES = (
    "", " ", "\n\n  \n", "Hello, world! It's 12345678 o'clock.", "  def f(x):\n\t\treturn x**2  # 3.14159\r\n",
    "Größenwahn naïve cafe\u0301 \ufb01 \u00a0\u2003x", "東京都は日本の首都です。中文字符测试",
    "ภาษาไทย हिन्दी नमस्ते العربية עברית",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea zero\u200bwidth",
    "\x00\x01\x7f\x85\u2028\ufeff", "a" * 700, "<|endoftext|></s><s><pad> <0x0A> [UNK]",
    "http://x.y/z?a=b&c=%20d'll WE'LL we\u2019ll", "1/2 ½ ² \u2167 \u0661\u0662",
    "1 12 1234 1234567 1,234,567.89 0x12345 " + "1234567890" * 11, " ".join(" " * n + "x" for n in range(40)),
    "\U0001d54f\U0010ffff")


class CodingLibrary(Protocol):
    """A library that turns texts into token ids and ids into texts, as `Tokenizer` uses it. The ids that it returns are
    below `vocab_size`."""

    name: str
    vocab_size: int

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts back to back (uint32), and the number of ids of each text (int64). No special
        tokens are added."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def token(self, id: int) -> str | None: ...

    def unknown_id(self) -> int | None:
        """Return the id that stands for text that no token of the vocabulary spells, or None if there is no such id."""


class Tokenizer:
    """A tokenizer as the pipeline uses it. `backend` is the library that encodes, and the attribute of this name is the
    library's name: tokenizers, fastokens, sentencepiece or bytes. `kind` is the kind of the tokenizer's file, json or
    model. `eos` is the token that ends documents, or its id. Raises a TokenizerError that names `path` when the
    tokenizer has no such token."""

    def __init__(self, backend: CodingLibrary, kind: str, sha256: str, eos: str | int, path: str) -> None:
        id = backend.token_id(eos) if isinstance(eos, str) else eos
        token = None if id is None else backend.token(id)
        if id is None or token is None:
            raise TokenizerError(f"{path}: has no token '{eos}' to end documents with: set tokenizer.eos to one it has")
        self._backend, self.kind, self.sha256, self.eos_token, self.path = backend, kind, sha256, token, path
        self.eos = int(id)
        self.vocab_size = backend.vocab_size
        #: id of the token for text that the vocabulary lacks, or None
        self.unknown = backend.unknown_id()

    @property
    def backend(self) -> str:
        return self._backend.name

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32. No EOS is added."""
        flat, lengths = self.encode_flat(texts)
        return np.split(flat, np.cumsum(lengths)[:-1]) if len(texts) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts back to back, uint32 (sum,), and the number of ids of each text, int64 (n,). No
        EOS is added."""
        return self._backend.encode_flat(texts)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def spelled(self) -> list[bytes]:
        """Return for each id the bytes that its token stands for; b"" for an id without a token. The tokenizer must be
        byte-level: each character of a token stands for one byte. A token with any other character is one that was
        added to the vocabulary as plain text, such as a special token. For it, its UTF-8 bytes are returned."""
        byte = {char: number for number, char in enumerate(alphabet())}
        names = [self._backend.token(id) or "" for id in range(self.vocab_size)]
        return [bytes(map(byte.__getitem__, name)) if byte.keys() >= set(name) else name.encode() for name in names]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._backend.decode([int(i) for i in ids])


def load_tokenizer(path: str | os.PathLike[str], eos: str | int | None = None,
                   pattern: str | None = None) -> Tokenizer:
    """Load the tokenizer in a file or a folder. In a folder, the first of these files that exists is loaded:
    `tokenizer.json`, the first `.model` by name, the first `.tiktoken` by name.

    `eos` is the token that ends documents, or its id. If it is None, the token is found in this order:

    * the token that tokenizer_config.json in the folder declares (this file is not read if `path` is a file)
    * of a `.model`, its end-of-sentence piece
    * of a tokenizer.json, the first of the usual names (EOS_NAMES) that is a special token of the tokenizer
    * of a tokenizer.json, its only special token

    Raises TokenizerError when there is no such token, or when the tokenizer cannot be loaded.

    A `.tiktoken` file is converted to a tokenizer.json in memory, and the tokenizer's sha256 is that of this
    tokenizer.json. Such a file does not say how text is split; `pattern` says it (`tokenizer.tiktoken`), or else the
    file's name. The file has no special tokens, so the token `eos` is added to it, by default `<|endoftext|>`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")   # a worker has one core; parallelism comes from processes
    path = Path(path)
    if path.is_dir():
        files = [file for file in (path / "tokenizer.json", *sorted(path.glob("*.model")),
                                   *sorted(path.glob("*.tiktoken"))) if file.is_file()]
        if not files:
            raise TokenizerError(f"{path}: holds neither tokenizer.json nor a SentencePiece .model nor a .tiktoken "
                                 f"file")
        eos = _declared_eos(path / "tokenizer_config.json") if eos is None else eos
        path = files[0]
    data = file_contents(path, eos if isinstance(eos, str) else None, pattern)
    sha256 = hashlib.sha256(data).hexdigest()
    if data == byte_level_json().encode():
        return byte_tokenizer(str(path), EOS if eos is None else eos)
    if data.lstrip()[:1] == b"{":
        backend, eos = _huggingface(data, path, eos)
        return Tokenizer(backend, "json", sha256, eos, str(path))
    return _sentencepiece(data, path, eos, sha256)


def byte_tokenizer(path: str = "bytes", eos: str | int = EOS) -> Tokenizer:
    """Return the tokenizer whose tokens are the bytes of UTF-8 (`tokenizer.byte_level`). `path` is named in errors."""
    return Tokenizer(ByteLevel(), "json", hashlib.sha256(byte_level_json().encode()).hexdigest(), eos, path)


def file_contents(path: Path, eos: str | None = None, pattern: str | None = None) -> bytes:
    """Return the contents of a tokenizer.json or a .model. For a .tiktoken file, return a tokenizer.json with the same
    tokens and ids."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise TokenizerError(f"{path}: cannot be read ({e.strerror})") from e
    if is_tiktoken(data, path.name):
        return convert(data, path, pattern_of(str(path), pattern), eos)
    return data


def _declared_eos(path: Path) -> str | None:
    """Return the end-of-text token that a tokenizer_config.json declares as `eos_token`, or None if it declares none or
    does not exist. The value in the file is a string or a mapping with `content`. Raises TokenizerError when the file
    is damaged or has another value."""
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError, RecursionError) as e:
        raise TokenizerError(f"{path}: no JSON mapping ({e}): fetch the file again, or set tokenizer.eos") from e
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str | None):
        raise TokenizerError(f"{path}: eos_token is {str(token)[:80]!r}, not the text of a token: set tokenizer.eos")
    return token


# -- tokenizer.json ----------------------------------------------------------------------------------------------
class HuggingFace:
    """Encodes and decodes with the library `tokenizers`, which defines what a tokenizer.json means."""

    name = "tokenizers"

    def __init__(self, text: str) -> None:
        from tokenizers import Tokenizer as Native

        self._native = Native.from_str(text)
        self._native.no_truncation()
        self._native.no_padding()
        self._native.encode_special_tokens = True              # encode the spelling of a special token as text
        self.vocab_size = max(self._native.get_vocab(with_added_tokens=True).values()) + 1

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [encoding.ids for encoding in self._native.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter((id for text_ids in ids for id in text_ids), np.uint32, int(lengths.sum())), lengths

    def decode(self, ids: Sequence[int]) -> str:
        return self._native.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self._native.token_to_id(token)

    def token(self, id: int) -> str | None:
        return self._native.id_to_token(id)

    def unknown_id(self) -> int | None:
        token = getattr(self._native.model, "unk_token", None)
        return None if token is None else self._native.token_to_id(token)


class Fast(HuggingFace):
    """Encodes with the library fastokens, which is faster than the library `tokenizers`. Everything except encoding is
    done with `tokenizers`."""

    name = "fastokens"

    def __init__(self, text: str) -> None:
        super().__init__(text)
        from fastokens import Tokenizer as Native

        self._fast = Native.from_json_str(text)
        self._fast.no_truncation()
        self._fast.no_padding()

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = self._fast.encode_batch_flat(list(texts), split_special_tokens=True)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))


def _huggingface(data: bytes, path: Path, eos: str | int | None) -> tuple[HuggingFace, str | int]:
    """Return the fastest backend (library that encodes) for the tokenizer.json with contents `data`, and the
    end-of-text token. `path` is named in error messages."""
    try:
        doc = json.loads(data)
        special = [token["content"] for token in doc.get("added_tokens") or [] if token.get("special")]
        slow = HuggingFace(data.decode())
    except Exception as e:                                       # tokenizers raises plain Exception
        raise TokenizerError(f"{path}: no tokenizer.json that `tokenizers` reads ({e})") from e
    if eos is None:
        eos = next((name for name in EOS_NAMES if name in special), special[0] if len(special) == 1 else None)
        if eos is None:
            raise TokenizerError(f"{path}: does not say which of its special tokens ends a document "
                                 f"({', '.join(special[:8]) or 'it has none'}): set tokenizer.eos")
    return fastest(data.decode(), slow, (*PROBES, *(f"a{token} {token}{token}b" for token in special[:64]))), eos


def fastest(text: str, slow: HuggingFace, probes: Sequence[str]) -> HuggingFace:
    """Return the fastest backend for the tokenizer.json with contents `text`. That is fastokens if it is installed,
    supports the tokenizer, and encodes every text of `probes` exactly as `tokenizers` does. Otherwise it is `slow`, the
    backend with `tokenizers`."""
    try:
        fast = Fast(text)
        fast_output, slow_output = fast.encode_flat(probes), slow.encode_flat(probes)
        equal = all(map(np.array_equal, fast_output, slow_output))
    except Exception:                                            # not installed, or it does not support this tokenizer
        return slow
    return fast if equal else slow


# -- SentencePiece -----------------------------------------------------------------------------------------------
class SentencePiece:
    """Encodes and decodes with the library `sentencepiece`, which never encodes text as a control symbol (a special
    token such as EOS)."""

    name = "sentencepiece"

    def __init__(self, data: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self.native: Any = SentencePieceProcessor(model_proto=data)
        self.vocab_size = self.native.vocab_size()

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = self.native.encode(list(texts), out_type=int, num_threads=1)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter((id for text_ids in ids for id in text_ids), np.uint32, int(lengths.sum())), lengths

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.native.decode(list(ids))
        return text

    def token_id(self, token: str) -> int | None:
        id = self.native.piece_to_id(token)
        return None if id == self.native.unk_id() and token != self.native.id_to_piece(id) else id

    def token(self, id: int) -> str | None:
        return self.native.id_to_piece(id) if 0 <= id < self.vocab_size else None

    def unknown_id(self) -> int | None:
        return int(self.native.unk_id())


def _sentencepiece(data: bytes, path: Path, eos: str | int | None, sha256: str) -> Tokenizer:
    try:
        backend = SentencePiece(data)
    except Exception as e:                                       # sentencepiece raises RuntimeError
        raise TokenizerError(f"{path}: neither a tokenizer.json nor a SentencePiece model ({e})") from e
    if eos is None:
        if backend.native.eos_id() < 0:
            raise TokenizerError(f"{path}: this SentencePiece model has no end-of-sentence piece: set tokenizer.eos")
        eos = backend.native.id_to_piece(backend.native.eos_id())
    return Tokenizer(backend, "model", sha256, eos, str(path))
