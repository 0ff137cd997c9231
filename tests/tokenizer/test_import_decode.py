"""Token files of other projects are turned back into the texts that they were made from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.app import run_command
from stages.read.jsonl import Jsonl
from stages.read.reader import Slice
from tests.tokenizer.test_shards import write_set
from tokenizer.export.export import FORMATS, export
from tokenizer.imports.decode import Decoded, decode_tokens
from tokenizer.imports.source import Coding, TokenFileError, WrongTokenizer
from tokenizer.load import Tokenizer, byte_tokenizer, load_tokenizer
from tokenizer.shards.reader import ShardSet
from tokenizer.train import train_bpe

TEXTS = ["the quick fox", "lines\nand \"quotes\"", "naïve 狐狸 \U0001f98a", " spaces  kept ", "a" * 500]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(["the quick brown fox jumps over the lazy dog"] * 9, 300, path)
    return load_tokenizer(path)


def token_files(folder: Path, name: str, tokenizer: Tokenizer, texts: list[str], masked: tuple[int, ...] = ()) -> Path:
    """Write texts as token files of the format `name`. Returns their folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.tokenizer.test_shards.EOS", tokenizer.eos)
        write_set(folder / "set", [tokenizer.encode_batch(texts)], tokenizer.vocab_size, masked=masked)
    export(ShardSet(folder / "set"), name, folder / "in")
    return folder / "in"


def decoded(path: Path, name: str, tokenizer: Tokenizer, out: Path, **options: int) -> Decoded:
    coding = Coding(tokenizer.sha256, tokenizer.vocab_size, tokenizer.eos)
    return decode_tokens(path, name, coding, tokenizer.decode, out, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_the_texts_come_back_and_the_jsonl_reader_reads_them(tmp_path, tokenizer, name):
    source = token_files(tmp_path, name, tokenizer, TEXTS)
    result = decoded(source, name, tokenizer, tmp_path / "out", file_bytes=100)
    paths = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in paths] == [f"{i:05d}.jsonl" for i in range(result.files)] and len(paths) > 1
    read = [doc for path in paths for doc in Jsonl().read(str(path), Slice("old", path.name))]
    assert [doc.text for doc in read] == TEXTS
    assert len({doc.meta["id"] for doc in read}) == len(TEXTS)
    assert (result.documents, result.damaged) == (len(TEXTS), 0)
    assert result.tokens == sum(map(len, tokenizer.encode_batch(TEXTS))) + len(TEXTS)
    assert result.bytes == sum(path.stat().st_size for path in paths)


def test_bytes_that_are_no_text_are_counted(tmp_path, tokenizer):
    ids = tokenizer.encode("狐")
    assert len(ids) == 3
    (tmp_path / "a.ds").write_bytes(np.array([*ids[:2], tokenizer.eos, *ids, tokenizer.eos], "<u2").tobytes())
    (tmp_path / "a.ds.index").write_bytes(np.array([3, 7], "<u8").tobytes())
    result = decoded(tmp_path / "a.ds", "ds", tokenizer, tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "00000.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (result.documents, result.damaged) == (2, 1) and "\ufffd" in rows[0]["text"]
    assert rows[1] == {"id": "a.ds#1", "text": "狐"}


def test_loss_masks_are_refused_and_nothing_is_left(tmp_path, tokenizer):
    source = token_files(tmp_path, "ds", tokenizer, TEXTS, masked=(0,))
    with pytest.raises(TokenFileError, match="loss mask"):
        decoded(source, "ds", tokenizer, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "set"]


def test_the_command_says_what_it_wrote_and_damage_is_one_line(tmp_path, tokenizer, capsys):
    source = token_files(tmp_path, "megatron", tokenizer, TEXTS)
    line = ["shards", "decode", str(source), "--format", "megatron", "--tokenizer", tokenizer.path, "--out"]
    assert run_command([*line, str(tmp_path / "out"), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["documents"], row["damaged"], row["path"]) == (len(TEXTS), 0, str(tmp_path / "out"))
    body = source / "shard_00000.bin"
    body.write_bytes(body.read_bytes()[:-2])
    assert run_command([*line, str(tmp_path / "other")]) == 1
    err = capsys.readouterr().err
    assert "shard_00000" in err and err.count("\n") == 1 and not (tmp_path / "other").exists()


@pytest.mark.parametrize("wrong", [False, True])
def test_texts_with_many_unreadable_characters_are_of_another_tokenizer(tmp_path, wrong):
    """Bytes in place of tokens decode to many bytes that are not valid UTF-8. Few of them are no reason to stop."""
    sound = byte_tokenizer()
    texts = ["plain text " * 9, *(["\u72d0" * 100] * 5)]
    source = token_files(tmp_path, "ds", sound, texts)
    if wrong:                                                   # no sequence of UTF-8 begins with 0x80
        body = source / "00000.ds"
        tokens = np.fromfile(body, "<u2")
        tokens[(tokens >= 128) & (tokens != sound.eos)] = 0x80
        tokens.tofile(body)
        with pytest.raises(WrongTokenizer, match=r"00000\.ds"):
            decoded(source, "ds", sound, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    else:
        assert decoded(source, "ds", sound, tmp_path / "out").damaged == 0


def test_a_few_documents_without_eos_are_damage_and_a_majority_is_another_tokenizer(tmp_path, tokenizer):
    def files(name: str, ends: list[int]) -> Path:
        (tmp_path / name).write_bytes(np.array([token for end in ends for token in (5, end)], "<u2").tobytes())
        (tmp_path / f"{name}.index").write_bytes((np.arange(1, len(ends) + 1) * 2).astype("<u8").tobytes())
        return tmp_path / name

    for number, (ends, kind) in enumerate([([tokenizer.eos] * 3 + [7], TokenFileError), ([7] * 3, TokenFileError),
                                           ([7] * 4, WrongTokenizer), ([tokenizer.eos] + [7] * 4, WrongTokenizer)]):
        with pytest.raises(TokenFileError) as error:
            decoded(files(f"{number}.ds", ends), "ds", tokenizer, tmp_path / "out")
        assert type(error.value) is kind
