"""The tokenizer whose tokens are bytes: other libraries read its file and agree with it, and its tokens go through
shards and exports."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizer.test_encode_tasks import CONFIG, Runner, documents
from tokenizer.byte_level import EOS, byte_level_json
from tokenizer.encode import encode_documents, encode_masked
from tokenizer.export.export import FORMATS, export
from tokenizer.imports.imports import import_tokens
from tokenizer.imports.source import Coding
from tokenizer.load import PROBES, HuggingFace, load_tokenizer
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.verify import verify


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    path.write_text(byte_level_json(), encoding="utf-8")
    return load_tokenizer(path)


@given(st.text(max_size=50))
def test_tokens_are_the_bytes_of_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert bytes(ids.tolist()) == text.encode()
    assert 0xFF not in ids
    assert tokenizer.decode(ids) == text


def test_the_library_tokenizers_reads_the_same_from_the_file(tokenizer):
    other = HuggingFace(byte_level_json())
    assert (tokenizer.backend, tokenizer.vocab_size, other.vocab_size) == ("bytes", 256, 256)
    assert (tokenizer.eos, tokenizer.eos_token, other.token_id(EOS)) == (255, EOS, 255)
    assert other.encode_flat(PROBES)[0].tolist() == tokenizer.encode_flat(PROBES)[0].tolist()
    for ids in ([72, 255, 105], [255], [], [0xE6, 0x9D, 0xB1]):
        assert other.decode(ids) == tokenizer.decode(ids)
    assert [other.token(id) for id in range(256)] == [tokenizer._backend.token(id) for id in range(256)]


def test_documents_and_masks_have_one_byte_a_token(tokenizer):
    tokens, lengths = encode_documents(tokenizer, ["aé", "", EOS])
    assert tokens.dtype == np.uint8
    assert tokens.tobytes() == b"a\xc3\xa9\xff\xff" + EOS.encode() + b"\xff"
    assert lengths.tolist() == [4, 1, len(EOS) + 1]
    _, _, counts = encode_masked(tokenizer, ["Q: é A: b"], [[{"start": 8, "end": 10}]])
    assert counts.tolist() == [0] * 8 + [1, 1, 1]


@pytest.fixture
def shards(tmp_path):
    from pipeline.passes.encode import assemble_drafts, encode_drafts
    from pipeline.passes.fit_tokenizer import byte_draft, publish_tokenizer, tokenizer_info
    from pipeline.passes.publish_shards import publish_shards

    run = Runner(tmp_path)
    parts = run.parts(documents(), 31)
    [made] = run([byte_draft()])
    info = tokenizer_info(made)
    publish_tokenizer(run.store, info)
    encoded = run(encode_drafts(parts, info, CONFIG))
    stream = publish_shards(run.store, "web", run(assemble_drafts(encoded, info, 3000)), parts, info)
    return run.store.local / stream["train"]["path"], run.store.at(info["path"])


def test_a_run_writes_bodies_that_are_the_text(shards):
    folder, path = shards
    shard_set = ShardSet(folder)
    assert verify(folder) == []
    assert shard_set.manifest.dtype == "uint8"
    texts = {doc.id: doc.text for doc in documents()}
    spans = shard_set.documents(0, shard_set.tokens)
    body = b"".join((folder / shard.body).read_bytes() for shard in shard_set.manifest.shards)
    assert len(shard_set.manifest.shards) > 1
    assert body == b"".join(texts[span.id].encode() + b"\xff" for span in spans)
    assert load_tokenizer(path).sha256 == shard_set.manifest.tokenizer


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_every_format_gives_the_tokens_back(shards, tmp_path, format):
    folder, path = shards
    tokenizer = load_tokenizer(path)
    export(ShardSet(folder), format, tmp_path / "out")
    (tmp_path / "again").mkdir()
    import_tokens(tmp_path / "out", format, Coding(tokenizer.sha256, 256, 255), tmp_path / "again" / "web", "web",
                  lambda file, number: f"{file}#{number}", lambda done, total: None)
    again, before = ShardSet(tmp_path / "again/web/split=train"), ShardSet(folder)
    assert again.manifest.dtype == "uint8"
    assert np.array_equal(again.read(0, again.tokens), before.read(0, before.tokens))
