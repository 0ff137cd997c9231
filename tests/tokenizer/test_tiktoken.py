"""A .tiktoken file gives the same ids as tiktoken. The reference here is tiktoken's algorithm in plain form. All
patterns were also compared with the package tiktoken 0.14 itself, on the 151,643 ranks of Qwen's vocabulary (3,495
texts, 779,163 characters, no difference)."""

from __future__ import annotations

import base64
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer.test_tokenizers import corpus
from tokenizer.byte_level import alphabet
from tokenizer.load import PROBES, HuggingFace, TokenizerError, file_contents, load_tokenizer
from tokenizer.tiktoken import PATTERNS
from tokenizer.train import train_bpe

regex = pytest.importorskip("regex")

#: patterns as tiktoken 0.14 has them, for the engine that its own patterns are written for
THEIRS = {
    "r50k": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
              r"|\s*[\r\n]|\s+(?!\S)|\s",
    "o200k": "|".join([
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])}
THEIRS["p50k"] = THEIRS["r50k"]


def reference(ranks: dict[bytes, int], pattern: str, text: str) -> list[int]:
    """Encode a text: merge the neighbouring pair that is the token of lowest rank, among equal ones the first, until no
    pair is a token."""
    ids = []
    for piece in regex.findall(pattern.replace("$", r"\Z"), text):
        data = piece.encode()
        parts = [data] if data in ranks else [bytes([byte]) for byte in data]
        while len(parts) > 1:
            found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not found:
                break
            _, i = min(found)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A .tiktoken file with the tokens of a trained BPE, and with some tokens that no merge of two other tokens makes.
    With it, {token: rank}."""
    folder = tmp_path_factory.mktemp("tiktoken")
    train_bpe([*corpus(), " " * 40, "=" * 30, "abababa aab aba " * 9], 600, folder / "bpe.json")
    doc = json.loads((folder / "bpe.json").read_text())
    byte_of = {char: byte for byte, char in enumerate(alphabet())}
    tokens = [bytes(byte_of[char] for char in token) for token in sorted(doc["model"]["vocab"], key=doc["model"][
        "vocab"].__getitem__) if token != "<|endoftext|>"]
    tokens = [bytes([byte]) for byte in range(256)] + [token for token in tokens if len(token) > 1] + [b"xyzzy", b"00"]
    path = folder / "own.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path, {token: rank for rank, token in enumerate(tokens)}


TEXTS = [*PROBES, *corpus(30), *(ch * n for ch in " =a0\n" for n in range(1, 50)), "xyzzy xyzzyx a\n b", "x \n",
         "a  \n\n "]


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_ids_are_those_of_tiktoken(file, name):
    path, ranks = file
    tokenizer = load_tokenizer(path, pattern=name)
    assert tokenizer.eos not in ranks.values()
    assert tokenizer.eos_token == "<|endoftext|>"
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert ids == reference(ranks, THEIRS[name], text), text
        assert tokenizer.decode(ids) == text


@given(text=st.one_of(st.text(max_size=40), st.text("ab 0='\n\t", max_size=40)))
@settings(max_examples=2 * settings.default.max_examples)
def test_hostile_text_has_the_ids_of_tiktoken(file, loaded, text):
    assert loaded.encode(text).tolist() == reference(file[1], THEIRS["cl100k"], text)
    assert loaded.decode(loaded.encode(text)) == text


@pytest.fixture(scope="module")
def loaded(file):
    return load_tokenizer(file[0], pattern="cl100k")


def test_the_file_becomes_a_tokenizer_json_that_others_read(file):
    path, ranks = file
    data = file_contents(path, pattern="r50k")
    other = HuggingFace(data.decode())
    assert other.encode_flat(TEXTS)[0].tolist() == [i for t in TEXTS for i in reference(ranks, THEIRS["r50k"], t)]
    assert file_contents(path, pattern="r50k") == data


def test_an_end_of_text_token_in_a_text_is_text(file):
    for pattern in ("cl100k", r".+|\n"):              # the second does not split the token's name
        tokenizer = load_tokenizer(file[0], pattern=pattern)
        assert tokenizer.eos not in tokenizer.encode("a<|endoftext|>b <|endoftext|>\n<|endoftext|>")


def test_the_pattern_comes_from_the_name_of_the_file(file, tmp_path):
    copy = tmp_path / "cl100k_base.tiktoken"
    copy.write_bytes(file[0].read_bytes())
    assert load_tokenizer(copy).sha256 == load_tokenizer(file[0], pattern="cl100k").sha256
    assert load_tokenizer(tmp_path).sha256 == load_tokenizer(copy).sha256
    with pytest.raises(TokenizerError, match=r"own.tiktoken: .* set tokenizer.pattern"):
        load_tokenizer(file[0])
    assert set(THEIRS) < set(PATTERNS)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda lines: [*lines[:300], b"!!!! 300", *lines[301:]], "line 301: not a token"),
    (lambda lines: [*lines[:300], lines[300][:-4], *lines[301:]], "line 301: "),
    (lambda lines: [*lines[:300], lines[299], *lines[301:]], "line 301: the token is empty, or it or"),
    (lambda lines: lines[:100], "156 of the 256 bytes are no tokens"),
    (lambda lines: [], "256 of the 256 bytes are no tokens")])
def test_a_damaged_file_is_named_with_the_line(file, tmp_path, damage, message):
    path = tmp_path / "cl100k.tiktoken"
    path.write_bytes(b"\n".join(damage(file[0].read_bytes().splitlines())))
    with pytest.raises(TokenizerError, match=f"cl100k.tiktoken: {message}"):
        load_tokenizer(path)
