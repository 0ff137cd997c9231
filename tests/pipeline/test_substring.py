"""The step `substring` in whole runs: the same documents however the work is divided, one copy of each passage remains,
and loss spans still cover the words of the assistant."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.recipe import load_recipe
from pipeline.run import run_recipe
from pipeline.store.dataset import iter_rows
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from tokenizer.byte_level import byte_level_json

RECIPE = """
version: 1
sources:
  books: {{read: jsonl, path: books/*.jsonl}}
  chats: {{read: sft, path: chats/*.jsonl}}
datasets:
  cut:
    from: [books, chats]
    priority: [books, chats]
    steps: [{{substring: {{length: 60, min_chars: 30, merge: {merge}}}}}]
run: {{partition: {partition}}}
"""
WORDS = ["licence", "all", "rights", "of", "this", "work", "naïve", "漢字", "are", "reserved", "by", "the", "society"]
PASSAGES = [" ".join(random.Random(i).choices(WORDS, k=30)) for i in range(6)]


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    top, draw = tmp_path_factory.mktemp("substring"), random.Random(5)
    for name in ("books", "chats"):
        (top / name).mkdir()

    def own(words: int) -> str:
        return " ".join(f"w{draw.randrange(10**6)}é" for _ in range(words))

    for n in range(4):
        (top / "books" / f"{n}.jsonl").write_text("".join(json.dumps({"text": "\n".join(
            [own(20), draw.choice(PASSAGES), own(draw.randrange(1, 9)), draw.choice(PASSAGES)])}) + "\n"
            for _ in range(15)))
    (top / "chats" / "a.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"{own(4)} {draw.choice(PASSAGES)}"},
        {"role": "assistant", "content": f"{n:03}ANSWER {own(3)} {draw.choice(PASSAGES)} {own(3)} END{n:03}"}]}) + "\n"
        for n in range(20)))
    return top


def rows(top: Path, store: str, partition: str = "1MB", merge: float = 1) -> tuple[list[dict], str]:
    (top / "recipe.yaml").write_text(RECIPE.format(partition=partition, merge=merge))
    at = Store(top / store)
    run_recipe(load_recipe(top / "recipe.yaml"), str(top / store), make_backend=InlineBackend)
    return list(iter_rows(at, "datasets/cut")), dataset_hash(at, "cut")


def test_one_copy_of_every_passage_stays(top):
    documents, _ = rows(top, "one")
    text = "\n".join(d["text"] for d in documents)
    assert [text.count(passage) for passage in PASSAGES] == [1] * len(PASSAGES)
    chats = [d for d in documents if d["source"] == "chats"]
    assert chats and not any(passage in d["text"] for d in chats for passage in PASSAGES)        # books come first
    for d in chats:
        learnt = b"".join(d["text"].encode()[s["start"]:s["end"]] for s in d["loss_spans"]).decode()
        assert re.fullmatch(r"(\d{1,3})ANSWER w[w\dé ]{20,60} END\d*\1<.im_end.>\n?", learnt), learnt
    cut = [json.loads(d["meta"])["substring_cut"] for d in documents if "substring_cut" in d["meta"]]
    assert len(cut) > 40 and all(entry["passages"][0]["match"] for entry in cut)


def test_the_division_of_the_work_changes_nothing(top):
    _, expected = rows(top, "one")
    for number, partition in enumerate(("2KB", "9KB")):
        assert rows(top, f"part{number}", partition)[1] == expected


def test_another_share_to_merge_runs_only_the_last_wave_again(top):
    rows(top, "merge")
    before = Store(top / "merge")
    done = set(before.list("objects"))
    documents, _ = rows(top, "merge", merge=0.5)
    written = [path for path in set(before.list("objects")) - done if path.endswith(".seg")]
    assert documents and not written                                        # no exchange file is written again


def test_tokens_that_are_bytes_are_cut_as_bytes_are(top):
    """The whole run with `unit: tokens`, by the tokenizer whose tokens are the bytes."""
    _, expected = rows(top, "one")
    (top / "bytes.json").write_text(byte_level_json())
    (top / "tokens.yaml").write_text(RECIPE.format(partition="9KB", merge=1).replace(
        "{length: 60,", "{length: 60, unit: tokens, tokenizer: bytes.json,"))
    run_recipe(load_recipe(top / "tokens.yaml"), str(top / "tokens"), make_backend=InlineBackend)
    assert dataset_hash(Store(top / "tokens"), "cut") == expected
