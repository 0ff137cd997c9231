"""Documents of which only spans count in the loss: the mask stays with the tokens from the text to the targets of the
trainer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from stages.document import Document, document_id
from tests.tokenizer.test_encode_tasks import CONFIG, Runner, documents, encode
from tokenizer.encode import encode_documents, encode_masked
from tokenizer.load import TokenizerError, load_tokenizer
from tokenizer.shards.layout import ShardError
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.verify import verify


def conversation(i: int) -> Document:
    """Return a dialogue with two answers that count. The text of every third dialogue ends with the second answer."""
    text, spans = "", []
    for said, learned in ((f"User: größe {i}?\n\nAssistant: ", False), (f"About {i} – or less.", True),
                          ("\n\nUser: sure?\n\nAssistant: ", False), (f"Yes, {i}!" * (1 + i % 4), True),
                          ("" if i % 3 == 0 else "\n", False)):
        start = len(text.encode())
        text += said
        if learned:
            spans.append({"start": start, "end": len(text.encode())})
    return Document(document_id("sft", "a.jsonl", "", i), text, source="sft", loss_spans=spans)


def mixed(n: int = 80) -> list[Document]:
    """Return ordinary documents, then dialogues, then a document of which nothing counts."""
    docs = [*documents(n), *(conversation(i) for i in range(n))]
    return [*docs, Document("f" * 32, "Nothing of this is learned.", source="sft", loss_spans=[])]


def learned(doc: Document) -> list[str]:
    data = doc.text.encode()
    return [doc.text] if doc.loss_spans is None else [data[s["start"]:s["end"]].decode() for s in doc.loss_spans]


def test_tokens_of_spans_are_whole_and_the_rest_is_as_it_was(tmp_path):
    run, docs = Runner(tmp_path), mixed(40)
    _, info = encode(run, run.parts(docs, 100), CONFIG, 1 << 20)
    tokenizer = load_tokenizer(run.store.at(info["path"]))
    texts = [d.text for d in docs]
    tokens, lengths, counts = encode_masked(tokenizer, texts, [d.loss_spans for d in docs])
    ends = np.cumsum(lengths)
    assert ends[-1] == len(tokens) == len(counts) and (tokens[ends - 1] == tokenizer.eos).all()
    for doc, stop, n in zip(docs, ends, lengths):
        mine, mask = tokens[stop - n:stop], counts[stop - n:stop].astype(bool)
        assert tokenizer.decode(mine[:-1]) == doc.text
        assert tokenizer.decode(mine[:-1][mask[:-1]]) == "".join(learned(doc))
        whole = doc.loss_spans is None or any(s["end"] == len(doc.text.encode()) for s in doc.loss_spans)
        assert mask[-1] == whole, "the end of a text counts when what is learned ends there"
    plain = [d.text for d in docs if d.loss_spans is None]
    same = encode_documents(tokenizer, plain)
    again = encode_masked(tokenizer, plain, [None] * len(plain))
    assert again[2] is None and all(np.array_equal(a, b) for a, b in zip(same, again))
    a = encode_masked(tokenizer, texts[-3:], [d.loss_spans for d in docs[-3:]])
    assert np.array_equal(a[0], tokens[-len(a[0]):]) and np.array_equal(a[2], counts[-len(a[0]):])


def test_spans_of_another_text_cost_their_document(tmp_path):
    wrong = [[{"start": 0, "end": 99}], [{"start": 3, "end": 3}], [{"start": 4, "end": 2}], [{"start": 2, "end": 5}],
             [{"start": 0, "end": 4}, {"start": 3, "end": 5}], [{"start": 4, "end": 5}, {"start": 0, "end": 2}]]
    run = Runner(tmp_path)
    sound = [*documents(60), conversation(1)]
    lost = [Document(f"e{i:031x}", "aößü b", source="sft", loss_spans=spans) for i, spans in enumerate(wrong)]
    info, _ = encode(run, run.parts([*sound, *lost], 100), CONFIG, 1 << 20)
    held = {s.id for split in ("train", "val") for shards in [ShardSet(run.store.local / info[split]["path"])]
            for s in shards.documents(0, shards.tokens)}
    assert held == {d.id for d in sound}
    reasons = [r.counters.get("quarantined", {}) for r in run.records]
    assert sum(n for counts in reasons for n in counts.values()) == len(wrong)
    assert {reason for counts in reasons for reason in counts} <= {"error:ValueError", "error:UnicodeDecodeError"}


def test_a_tokenizer_that_puts_something_in_front_is_refused():
    class Prefixing:
        path, eos, vocab_size = "x.model", 0, 300

        def encode_flat(self, texts):
            return np.arange(len(texts), dtype=np.uint32) + 1, np.ones(len(texts), np.int64)

        def decode(self, ids):
            return " " + " ".join("abcd"[i - 1] for i in ids)

    with pytest.raises(TokenizerError, match="add_prefix_space"):
        encode_masked(Prefixing(), ["ab"], [[{"start": 0, "end": 1}]])


def test_the_mask_is_the_same_for_any_partition_size(tmp_path):
    docs, found = mixed(), []
    for size in (500, 31, 9):
        (tmp_path / str(size)).mkdir()
        run = Runner(tmp_path / str(size))
        info, tokenizer = encode(run, run.parts(docs, size), CONFIG, 3000, reverse=size == 9)
        folder = run.store.local / "shards" / "web"
        files = {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*"))
                 if p.suffix in (".tokens", ".ends", ".loss")}
        found.append((info, files))
    assert found[0] == found[1] == found[2]
    tok, by_id = load_tokenizer(run.store.at(tokenizer["path"])), {d.id: d for d in docs}
    for split in ("train", "val"):
        path = run.store.local / info[split]["path"]
        assert verify(path, info[split]["sha256"]) == []
        shards = ShardSet(path, info[split]["sha256"])
        masked = [bool(s.loss) for s in shards.manifest.shards]
        assert any(masked) and (split == "val" or not all(masked)), "shards of ordinary documents have no mask"
        counts = shards.counts(0, shards.tokens)
        for span in shards.documents(0, shards.tokens):
            tokens, mask = shards.read(span.start, span.stop), counts[span.start:span.stop]
            assert tok.decode(tokens[:-1][mask[:-1]]) == "".join(learned(by_id[span.id]))
        for a, b in ((0, 1), (5, shards.tokens // 2), (1400, 1600), (shards.tokens - 1, shards.tokens)):
            assert np.array_equal(shards.counts(a, b), counts[a:b])
    with pytest.raises(IndexError, match="of"):
        shards.counts(0, shards.tokens + 1)


def test_a_damaged_mask_is_found_and_sets_without_one_look_as_before(tmp_path):
    run = Runner(tmp_path)
    info, _ = encode(run, run.parts(mixed(), 50), CONFIG, 1 << 20)
    path = run.store.local / info["train"]["path"]
    shards = ShardSet(path)
    [mask] = [path / s.loss for s in shards.manifest.shards]
    mask.chmod(0o644)
    data = mask.read_bytes()
    mask.unlink()
    mask.write_bytes(bytes([1 - data[0]]) + data[1:])
    assert any("sha256" in line and mask.name in line for line in verify(path))
    mask.write_bytes(data[:-1])
    assert any(mask.name in line for line in verify(path))
    with pytest.raises(ShardError, match="damaged"):
        ShardSet(path).counts(0, 5)
    (tmp_path / "plain").mkdir()
    other = Runner(tmp_path / "plain")
    info, _ = encode(other, other.parts(documents(), 50), CONFIG, 3000)
    folder = other.store.local / info["train"]["path"]
    said = json.loads((folder / "shards.json").read_text())
    assert "loss" not in said["shards"][0] and not list(folder.glob("*.loss"))
    assert ShardSet(folder).counts(0, 10) is None
