"""Tokenizers are trained, loaded and compared: equal files, no text is lost, special tokens in a text stay text, and
the fast library agrees with the slow one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer.encode import encode_documents
from tokenizer.evaluate import evaluate
from tokenizer.load import PROBES, Fast, HuggingFace, TokenizerError, fastest, load_tokenizer
from tokenizer.train import EOS, _runs, train_bpe, train_sentencepiece

TEXT = ("the quick brown fox jumps over the lazy dog while counting 1234 sheep, naïvely; über-Größe 東京 "
        "def function(x): return x + 1\n\tprint('hello')\n")
WORDS = TEXT.split(" ")


def corpus(n: int = 300) -> list[str]:
    rng = np.random.default_rng(5)
    return [" ".join(rng.choice(WORDS, rng.integers(5, 60))) for _ in range(n)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizers")
    train_all(made)
    return made


KINDS = ("bpe.json", "unigram.model", "bpe.model")


def train_all(folder: Path) -> None:
    train_bpe(corpus(), 400, folder / "bpe.json")
    train_sentencepiece(corpus(), 330, folder / "unigram.model", "unigram")
    train_sentencepiece(corpus(), 400, folder / "bpe.model", "bpe")


def test_equal_text_gives_equal_files_in_another_process_with_other_threads(folder, tmp_path):
    code = ("import sys; sys.path.insert(0, '.'); from pathlib import Path\n"
            f"from tests.tokenizer.test_tokenizers import train_all; train_all(Path({str(tmp_path)!r}))")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=600,
                   env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "2",
                        "OMP_NUM_THREADS": "2"})
    for name in KINDS:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize("name", KINDS)
def test_everything_comes_back(folder, name):
    tokenizer = load_tokenizer(folder / name)
    texts = [*PROBES, *corpus(20)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts)):
        assert tokenizer.decode(ids) == text
        assert (ids < tokenizer.vocab_size).all()
        assert ids.dtype == np.uint32
    assert tokenizer.encode_batch([]) == []


@pytest.fixture(scope="module")
def both(folder):
    """The fast tokenizer, and the reference that it must equal."""
    tokenizer = load_tokenizer(folder / "bpe.json")
    assert tokenizer.backend == "fastokens"
    return tokenizer, HuggingFace((folder / "bpe.json").read_text())


@given(st.text(max_size=60))
@settings(max_examples=3 * settings.default.max_examples)
def test_bpe_is_lossless_and_fast_equals_reference(both, text):
    tokenizer, reference = both
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.tolist() == reference.encode_flat([text])[0].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_text_that_spells_a_special_token_stays_text(folder, name):
    tokenizer = load_tokenizer(folder / name)
    text = f"before{tokenizer.eos_token}after {tokenizer.eos_token}{tokenizer.eos_token}"
    ids = tokenizer.encode(text)
    assert tokenizer.eos not in ids
    assert tokenizer.decode(ids) == text
    tokens, lengths = encode_documents(tokenizer, [text, "", text])
    assert np.flatnonzero(tokens == tokenizer.eos).tolist() == (np.cumsum(lengths) - 1).tolist()


def test_special_tokens_of_a_foreign_tokenizer_stay_text_and_ids_keep_their_places(folder, tmp_path):
    doc = json.loads((folder / "bpe.json").read_text())
    first = max(doc["model"]["vocab"].values()) + 1
    for i, (token, special) in enumerate((("<|im_start|>", True), ("<tool>", False), ("<|im_end|>", True))):
        doc["added_tokens"].append({"id": first + i, "content": token, "special": special, "single_word": False,
                                    "lstrip": False, "rstrip": False, "normalized": False})
    doc["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "t.json").write_text(json.dumps(doc))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.vocab_size, tokenizer.eos_token) == (first + 3, EOS)
    ids = tokenizer.encode("<|im_start|>user <tool> <|im_end|><|endoftext|>")
    assert set(ids.tolist()) & {first, first + 2, tokenizer.eos} == set()
    assert first + 1 in ids                                      # an added token that is not special is vocabulary
    assert len(ids) > 4                                          # nothing is cut off
    assert load_tokenizer(tmp_path / "t.json", "<|im_end|>").eos == first + 2


def test_the_reference_is_used_when_the_fast_one_differs(folder):
    text = (folder / "bpe.json").read_text()
    slow = HuggingFace(text)
    assert isinstance(fastest(text, slow, PROBES), Fast)

    class Other(HuggingFace):                                    # a reference the fast one does not agree with
        def encode_flat(self, texts):
            ids, lengths = super().encode_flat(texts)
            return ids + 1, lengths

    other = Other(text)
    assert fastest(text, other, PROBES) is other


def test_documents_are_flat_u16_or_u32_with_one_eos_each(folder):
    tokenizer = load_tokenizer(folder / "bpe.json")
    texts = ["one two", "", "three"]
    tokens, lengths = encode_documents(tokenizer, texts)
    assert tokens.dtype == np.uint16
    at = 0
    for text, n in zip(texts, lengths):
        assert tokenizer.decode(tokens[at:at + n - 1]) == text
        assert tokens[at + n - 1] == tokenizer.eos
        at += n
    assert at == len(tokens)
    assert encode_documents(tokenizer, [])[0].size == 0


def test_eos_that_text_can_spell_is_refused(folder):
    tokenizer = load_tokenizer(folder / "bpe.json", "Ġthe")
    with pytest.raises(TokenizerError, match=r"encodes to its end-of-text token 'Ġthe': name another"):
        encode_documents(tokenizer, ["over the top"])


def test_scores(folder):
    tokenizer = load_tokenizer(folder / "bpe.json")
    [scores] = evaluate([tokenizer], [("a", "the the fox"), ("b", "zyzzyva qqqq"), ("a", "")], batch=1)
    assert set(scores) == {"a", "b", "all"}
    assert (scores["a"].texts, scores["a"].words, scores["a"].bytes) == (2, 3, 11)
    assert scores["a"].fertility == 1.0
    assert scores["a"].continued_words == 0.0
    assert scores["b"].continued_words == 1.0
    assert scores["all"].tokens == scores["a"].tokens + scores["b"].tokens
    assert scores["all"].broken == 0
    assert scores["all"].bytes_per_token == 23 / scores["all"].tokens
    assert json.dumps(scores["all"].to_json())


@pytest.mark.parametrize(("content", "message"), [
    (b"{\"x\": 1}", "no tokenizer.json that"), (b"junk", "neither a tokenizer.json nor a SentencePiece"),
    (None, "cannot be read")])
def test_errors_name_the_file(tmp_path, content, message):
    if content is not None:
        (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=f"t.json: .*{message}"):
        load_tokenizer(tmp_path / "t.json")


def test_errors_of_settings(folder, tmp_path):
    with pytest.raises(TokenizerError, match=r"has no token '<no>' to end documents with: set tokenizer.eos"):
        load_tokenizer(folder / "bpe.json", "<no>")
    with pytest.raises(TokenizerError, match="holds neither"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="below 257"):
        train_bpe([], 100, tmp_path / "x")
    with pytest.raises(TokenizerError, match=r"cannot make 50000 pieces: .*lower it or train on more text"):
        train_sentencepiece(corpus(20), 50000, tmp_path / "x")
    doc = json.loads((folder / "bpe.json").read_text())
    doc["added_tokens"] = []
    (tmp_path / "t.json").write_text(json.dumps(doc))
    with pytest.raises(TokenizerError, match="does not say which of its special tokens ends a document"):
        load_tokenizer(tmp_path / "t.json")


def test_a_folder_says_its_eos(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "bpe.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token == "!"
    assert load_tokenizer(tmp_path / "tokenizer.json", tokenizer.eos).eos_token == "!"     # what a task is given
    assert load_tokenizer(folder / "bpe.model", 5).eos == 5
    for name in ("bpe.json", "bpe.model"):
        with pytest.raises(TokenizerError, match="has no token '9999'"):
            load_tokenizer(folder / name, 9999)


@pytest.mark.parametrize("contents", [b'{"eos_token": ', b"[]", b"\xff\xfe{", b'{"eos_token": ["a"]}', b"[" * 100_000])
def test_a_damaged_tokenizer_config_is_an_error_that_names_the_file(folder, tmp_path, contents):
    (tmp_path / "tokenizer.json").write_bytes((folder / "bpe.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes(contents)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: .*tokenizer\.eos"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, EOS).eos_token == EOS


def test_very_long_lines_train(tmp_path):
    train_sentencepiece(["ab cd " * 5000, "é" * 9000, *corpus(50)], 330, tmp_path / "m.model", "bpe")
    assert load_tokenizer(tmp_path / "m.model").vocab_size == 330


def test_runs_without_a_space_do_not_hold_up_bpe(tmp_path):
    """Half a million letters in a row would take minutes if the trainer saw them as one word."""
    letters = np.random.default_rng(0).choice(list("ACGT"), 500_000)
    code = ("import resource, sys\n"
            "from tokenizer.train import train_bpe; from tests.tokenizer.test_tokenizers import corpus\n"
            "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"              # of it a busy machine takes no more
            "train_bpe([*corpus(50), open(sys.argv[1], encoding='utf-8').read(), ' ' * 300_000], 400, sys.argv[2])")
    (tmp_path / "genome.txt").write_text("".join(letters), encoding="utf-8")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "genome.txt"), str(tmp_path / "t.json")], check=True,
                   timeout=1200, cwd=Path(__file__).resolve().parents[2])
    assert load_tokenizer(tmp_path / "t.json").vocab_size == 400


def test_runs_are_cut_and_nothing_is_lost():
    texts = ["", "ab cd", "x" * 2500, "a " * 3000, " " * 1024, "word " + "y" * 1030 + " end"]
    pieces = list(_runs(texts))
    assert "".join(pieces) == "".join(texts)
    assert "ab cd" in pieces
    assert "a " * 3000 in pieces                                 # a run ends at every space
    assert max(len(word) for piece in pieces for word in piece.split()) == 1024
