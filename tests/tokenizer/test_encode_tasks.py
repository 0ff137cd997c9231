"""From the parts of a dataset to published shards, with the real tasks: the bytes are equal however the dataset is
divided into parts."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.base.prf import prf
from pipeline.engine.task import CrashCursor, Skip, TaskSpec
from pipeline.engine.worker.attempt import run_attempt
from pipeline.passes import encode as encode_module
from pipeline.passes.encode import (
    _held_out,
    _near_held_out,
    assemble_drafts,
    encode_drafts,
)
from pipeline.passes.fit_tokenizer import _sample, load_draft, publish_tokenizer, tokenizer_draft, tokenizer_info
from pipeline.passes.part_tokens import TokensWriter
from pipeline.passes.publish_shards import ImportedShards, publish_shards
from pipeline.passes.rows import BATCH_BYTES, Selection, rows_of
from pipeline.store.content_keys import task_key
from pipeline.store.fs import Store, StoreError
from pipeline.store.parts import PartWriter, document_schema
from stages.barrier import PartRef, TaskResult
from stages.document import Document, document_id
from tests.tokenizer.test_tokenizers import corpus
from tokenizer.load import TokenizerError, load_tokenizer
from tokenizer.mixture.resolve import resolve
from tokenizer.shards.layout import MANIFEST
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.verify import verify

TRAIN = {"kind": "bpe", "vocab": 300, "sample": 20_000}


def documents(n: int = 240) -> list[Document]:
    texts = corpus(n)
    texts[7], texts[8] = "", texts[9] * 40                       # an empty one, and one longer than a shard
    texts[11] = "spells <|endoftext|> in the middle"
    out = []
    for i, text in enumerate(texts):
        meta = {"cluster": f"{i // 2:032x}"} if i % 3 == 0 else {}
        out.append(Document(document_id("web", "a.jsonl", "", i), text, source="web" if i % 4 else "wiki",
                            language="en", meta=meta, signals={"quality": i / n} if i % 5 else {}))
    return out


class Runner:
    """Runs task drafts as the engine does: each with a content key, as an attempt that writes its files to a store."""

    def __init__(self, root) -> None:
        self.store, self.root, self.records = Store(root / "store"), root, []

    def __call__(self, drafts, order=None) -> list[TaskResult]:
        out = {}
        for i in order if order is not None else range(len(drafts)):
            d = drafts[i]
            args = json.loads(json.dumps(d.args))
            spec = TaskSpec(task_key(d.task, args), d.task, "t", args, memory_mb=d.memory_mb)
            record = run_attempt(spec, self.store, "1", CrashCursor(), str(self.root))
            self.records.append(record)
            out[i] = TaskResult({n: f.ref() for n, f in record.files.items()}, record.counters)
        return [out[i] for i in range(len(drafts))]

    def parts(self, docs, size: int) -> list[PartRef]:
        made = []
        for a in range(0, len(docs), size):
            path = self.root / f"part-{size}-{a}.parquet"
            writer = PartWriter(str(path), document_schema(["quality"]))
            for doc in docs[a:a + size]:
                writer.write(doc)
            writer.close()
            ref = {"$ref": f"objects/p{size}-{a}", "content": writer.content, "bytes": path.stat().st_size,
                   "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "rows": writer.rows}
            self.store.upload(str(path), ref["$ref"])
            made.append(PartRef(f"{a:032x}", "deduped", 0, writer.rows, ref["bytes"], ref, None))
        return made


def encode(run: Runner, parts, config, shard_bytes: int, reverse: bool = False, name: str = "web") -> tuple[dict, dict]:
    [fitted] = run([tokenizer_draft(TRAIN, parts)])
    tokenizer = tokenizer_info(fitted)
    publish_tokenizer(run.store, tokenizer)
    drafts = encode_drafts(parts, tokenizer, config)
    encoded = run(drafts, range(len(drafts))[::-1] if reverse else None)
    shards = assemble_drafts(encoded, tokenizer, shard_bytes)
    return publish_shards(run.store, name, run(shards, range(len(shards))[::-1] if reverse else None), parts,
                          tokenizer), tokenizer


CONFIG = {"where": {}, "val": 0.2, "seed": 3}


@pytest.fixture
def run(tmp_path):
    return Runner(tmp_path)


def test_shards_hold_the_documents_in_order_and_equal_bytes_for_any_partition_size(tmp_path):
    docs, infos, bodies = documents(), [], []
    for size in (240, 31, 7):
        (tmp_path / str(size)).mkdir()
        run = Runner(tmp_path / str(size))
        info, tokenizer = encode(run, run.parts(docs, size), CONFIG, 3000, reverse=size == 7)
        infos.append(info)
        folder = run.store.local / "shards" / "web"
        bodies.append({p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*"))
                       if p.suffix in (".tokens", ".ends")})
    assert infos[0] == infos[1] == infos[2]
    assert bodies[0] == bodies[1] == bodies[2]
    assert len(bodies[0]) > 10
    tok = load_tokenizer(run.store.at(tokenizer["path"]))
    held_out = set()
    for split in ("train", "val"):
        folder = run.store.local / infos[0][split]["path"]
        assert verify(folder, infos[0][split]["sha256"]) == []
        shards = ShardSet(folder)
        spans = shards.documents(0, shards.tokens)
        assert len(spans) == shards.documents_count == infos[0][split]["documents"]
        wanted = [d for d in docs if d.id in {s.id for s in spans}]
        assert [s.id for s in spans] == [d.id for d in wanted]   # order of the dataset
        for span, doc in zip(spans, wanted):
            tokens = shards.read(span.start, span.stop)
            assert tokens[-1] == shards.eos
            assert tok.decode(tokens[:-1]) == doc.text
            assert span.n_bytes == len(doc.text.encode())
            assert docs[span.part * 7 + span.row].id == span.id  # the table leads back to the part
        step = 3000 // 2
        for shard, start in zip(shards.manifest.shards, shards.offsets):
            assert shard.index * step <= start < (shard.index + 1) * step
        held_out |= {s.id for s in spans} if split == "val" else set()
    assert 20 < len(held_out) < 80


def sides_of(run, info):
    """Return {id of a document: split that it was published in}."""
    out = {}
    for split in ("train", "val"):
        shards = ShardSet(run.store.local / info[split]["path"])
        out |= {span.id: split for span in shards.documents(0, shards.tokens)}
    return out


def test_growing_a_corpus_moves_nothing_between_the_splits(run):
    """Documents that come to a cluster may give it a smaller first id; those that were there stay where they were."""
    ids = [document_id("s", "f", "", i) for i in range(400)]

    def docs(count):
        clusters = [min(ids[i] for i in range(count) if i % 40 == c) for c in range(40)]
        return [Document(id, "some text here", source="s", meta={"cluster": clusters[i % 40]})
                for i, id in enumerate(ids[:count])]

    before, after = (sides_of(run, encode(run, run.parts(docs(count), 13), {"val": 0.2, "seed": 1}, 1 << 20)[0])
                     for count in (300, 400))
    assert len(before) == 300 and len(after) == 400 and set(before.values()) == {"train", "val"}
    assert {id: after[id] for id in before} == before


def test_near_duplicates_of_held_out_documents_leave_train_and_are_counted(run):
    val = {"val": 0.3, "seed": 1}
    ids = [document_id("s", "f", "", i) for i in range(100)]
    held = [_held_out(id, {"share": 0.3, "seed": 1}) for id in ids]
    docs = [Document(id, "some text here", source="s", meta={"near_duplicates": {ids[i ^ 1]: 0.6}} if i < 50 else {})
            for i, id in enumerate(ids)]
    leave = {id for i, id in enumerate(ids[:50]) if not held[i] and held[i ^ 1]}
    parts = run.parts(docs, 13)
    info, tokenizer = encode(run, parts, val, 1 << 20)
    sides = sides_of(run, info)
    assert leave and set(ids) - set(sides) == leave, "a held-out one stays, whatever it resembles"
    assert all(sides[id] == ("val" if h else "train") for id, h in zip(ids, held) if id not in leave)
    encoded = run(encode_drafts(parts, tokenizer, val))
    assert sum(r.counters["near_held_out"] for r in encoded) == len(leave)


def test_streams_by_source_tile_the_dataset(run):
    docs = documents()
    parts = run.parts(docs, 50)

    def ids(where):
        info, _ = encode(run, parts, {"where": where, "val": 0.0, "seed": 0}, 1 << 20)
        shards = ShardSet(run.store.local / info["train"]["path"], info["train"]["sha256"])
        assert info["val"] is None
        return {s.id for s in shards.documents(0, shards.tokens)}

    assert ids({"source": "wiki"}) == {d.id for d in docs if d.source == "wiki"}
    assert ids({"source": "wiki"}) | ids({"source": "web"}) == {d.id for d in docs}
    assert ids({"source": ["web"], "language": ["de"]}) == set()
    with pytest.raises(ValueError, match="unknown key 'lang'"):
        Selection({"lang": "en"})


def test_counters_add_up_and_name_sources(run):
    docs = documents()
    info, _ = encode(run, run.parts(docs, 50), {**CONFIG, "where": {"source": "web"}}, 3000)
    encoded = [r.counters for r in run.records if r.task == "encode_part"]
    assert sum(c["train"]["docs"] for c in encoded) == info["train"]["documents"]
    assert sum(c["train"]["tokens"] for c in encoded) == info["train"]["tokens"]
    assert sum(c["val"]["tokens"] for c in encoded) == info["val"]["tokens"]
    assert {s for c in encoded for s in c["sources"]} == {"web"}
    assert sum(c["skipped"] for c in encoded) == sum(d.source == "wiki" for d in docs)
    assembled = [r.counters for r in run.records if r.task == "assemble_shard"]
    assert sum(c["tokens"] for c in assembled) == info["train"]["tokens"] + info["val"]["tokens"]


def test_the_sample_and_the_tokenizer_do_not_follow_the_parts(run):
    docs = documents()
    shas = {tokenizer_info(run([tokenizer_draft(TRAIN, run.parts(docs, n), seed=4)])[0])["sha256"] for n in (240, 17)}
    assert len(shas) == 1
    bytes_read = [r.counters["bytes"] for r in run.records]
    assert max(bytes_read) <= TRAIN["sample"]
    assert min(bytes_read) > TRAIN["sample"] * 0.8
    other = tokenizer_info(run([tokenizer_draft(TRAIN, run.parts(docs, 30), seed=5)])[0])
    assert other["sha256"] not in shas


def test_a_sentencepiece_stream(run):
    docs = documents(120)
    parts = run.parts(docs, 40)
    train = {"kind": "sentencepiece", "model": "unigram", "vocab": 320, "sample": 50_000}
    [fitted] = run([tokenizer_draft(train, parts)])
    tokenizer = tokenizer_info(fitted)
    publish_tokenizer(run.store, tokenizer)
    assert tokenizer["path"].endswith(".model")
    encoded = run(encode_drafts(parts, tokenizer, {"val": 0.0}))
    info = publish_shards(run.store, "sp", run(assemble_drafts(encoded, tokenizer, 4000)), parts, tokenizer)
    folder = run.store.local / info["train"]["path"]
    assert verify(folder) == []
    shards, coder = ShardSet(folder), load_tokenizer(run.store.at(tokenizer["path"]))
    for doc, span in zip(docs, shards.documents(0, shards.tokens), strict=True):
        assert coder.decode(shards.read(span.start, span.stop - 1)) == doc.text


def test_a_given_tokenizer_comes_into_the_store(run, tmp_path):
    docs = documents(60)
    parts = run.parts(docs, 60)
    _, trained = encode(run, parts, CONFIG, 1 << 20)
    (tmp_path / "given").mkdir()
    path = tmp_path / "given" / "tokenizer.json"
    path.write_bytes((run.store.local / trained["path"]).read_bytes())
    draft = load_draft(str(path.parent))
    [loaded] = run([draft])
    assert {**tokenizer_info(loaded), "ref": 0} == {**trained, "ref": 0}
    assert str(tmp_path) not in json.dumps({k: v for k, v in draft.args["file"].items() if k != "root"})


def test_published_sets_stay_when_others_are_published_and_a_curriculum_pins_one(run):
    docs = documents()
    first, tokenizer = encode(run, run.parts(docs, 50), CONFIG, 3000)
    second, _ = encode(run, run.parts(docs[:-20], 50), {**CONFIG, "seed": 4}, 3000)
    assert first["train"]["sha256"] != second["train"]["sha256"]
    folder = run.store.local / "shards/web/split=train"
    assert ShardSet(folder).sha256 == second["train"]["sha256"]
    assert verify(folder, first["train"]["sha256"]) == []
    recipe = {"shards": {"web": {"longest": 32}}, "curriculum": {"total": 4096, "phases": [
        {"name": "all", "until": "100%", "sequence": 32, "batch": 128, "mix": {"web": 1}}]}}
    made, _ = resolve(recipe, {"web": first}, tokenizer)
    [stream] = made.streams
    shards = ShardSet(run.store.local / stream.train, stream.sha256)
    assert shards.tokens == stream.tokens
    assert np.dtype(stream.dtype) == shards.dtype


class Encode:
    """Encodes a part of forty documents with a tokenizer that raises an error for the texts in `fails`."""

    def __init__(self, run: Runner, monkeypatch) -> None:
        self.run, self.docs = run, documents(40)
        [self.part] = run.parts(self.docs, 40)
        [fitted] = run([tokenizer_draft(TRAIN, [self.part])])
        self.tokenizer = tokenizer_info(fitted)
        self.fails: dict[str, BaseException] = {}          # text → what the tokenizer does
        real = encode_module.encode_masked

        def encode_masked(tokenizer, texts, spans):
            for text in texts:
                if text in self.fails:
                    raise self.fails[text]
            return real(tokenizer, texts, spans)

        monkeypatch.setattr(encode_module, "encode_masked", encode_masked)

    def __call__(self, quarantined=lambda keys: [], where=None, **kw):
        [draft] = encode_drafts([self.part], self.tokenizer, {"val": 0.0, "where": where}, quarantined)
        spec = TaskSpec(task_key(draft.task, draft.args), draft.task, "t", draft.args)
        return run_attempt(spec, self.run.store, "1", CrashCursor(), str(self.run.root), **kw)

    def lost(self, record) -> list[dict]:
        return pq.read_table(self.run.store.at(record.files["quarantine.parquet"].path)).to_pylist()

    def ids(self, record) -> list[str]:
        return pq.read_table(self.run.store.at(record.files["train.parquet"].path))["id"].to_pylist()


@pytest.fixture
def encoding(run, monkeypatch):
    return Encode(run, monkeypatch)


def test_a_quarantined_document_is_left_out_and_logged_and_other_tasks_replay_it(encoding):
    docs = encoding.docs
    whole = encoding()
    assert (whole.files["quarantine.parquet"].rows, encoding.lost(whole)) == (0, [])
    record = encoding(skip=[Skip(5, 0, "crash")], batch_rows=1)
    assert record.counters["train"]["docs"] == 39
    assert record.counters["quarantined"] == {"crash": 1}
    assert [(q["row"], q["id"], q["stage"], q["reason"]) for q in record.quarantine] == \
        [(5, docs[5].id, "encode", "crash")]
    assert encoding.lost(record) == [{"id": docs[5].id, "source": docs[5].source, "file": "", "record": None,
                                      "stage": "encode", "reason": "crash", "detail": "", "bytes": None}]
    assert encoding.ids(record) == [d.id for d in docs if d is not docs[5]]

    # what the log then gives every task that encodes with this tokenizer, this end of text, these libraries
    said = {q["stage_key"]: {q["id"]: q} for q in record.quarantine}
    asked = []

    def quarantined(keys):
        asked.extend(keys)
        return [q for k in keys for q in said.get(k, {}).values()]

    again = encoding(quarantined)
    assert (again.key, asked) == (record.key, list(said)), "the list must not change the key"
    assert again.quarantine == []
    assert {n: f.content for n, f in again.files.items()} == {n: f.content for n, f in record.files.items()}
    assert again.counters == record.counters
    source = docs[5].source
    other = encoding(quarantined, where={"source": source})
    assert other.key != record.key
    assert encoding.lost(other) == encoding.lost(record)
    assert encoding.ids(other) == [d.id for d in docs if d is not docs[5] and d.source == source]
    away = encoding(quarantined, where={"source": {"web": "wiki", "wiki": "web"}[source]})
    assert encoding.lost(away) == [] and away.counters["quarantined"] == {}
    encoding.tokenizer = {**encoding.tokenizer, "eos": 1}
    [draft] = encode_drafts([encoding.part], encoding.tokenizer, {}, quarantined)
    assert draft.args["$volatile"] == {"quarantined": []}, "another end of text is another stage"


@pytest.mark.parametrize("batch_rows", [None, 1, 7])
def test_a_text_the_tokenizer_fails_on_is_quarantined_and_nothing_else_changes(encoding, batch_rows):
    docs, well = encoding.docs, encoding()
    encoding.fails = {docs[i].text: ValueError(f"cannot {i}: someone@mail.example.org") for i in (0, 13, 39)}
    record = encoding(batch_rows=batch_rows, skip=[Skip(20, 0, "memory")])
    assert [(r["id"], r["reason"]) for r in encoding.lost(record)] == [
        (docs[0].id, "error:ValueError"), (docs[13].id, "error:ValueError"), (docs[20].id, "memory"),
        (docs[39].id, "error:ValueError")]                 # in the order of the part, however it was cut into batches
    assert [r["detail"] for r in encoding.lost(record)] == [
        "cannot 0: email@example.com", "cannot 13: email@example.com", "", "cannot 39: email@example.com"]
    assert record.counters["quarantined"] == {"error:ValueError": 3, "memory": 1}
    assert record.counters["train"]["docs"] == 36
    gone = {0, 13, 20, 39}
    assert encoding.ids(record) == [d.id for i, d in enumerate(docs) if i not in gone]
    tokens, ends = (np.fromfile(encoding.run.store.at(well.files["train.tokens"].path), np.uint16),
                    pq.read_table(encoding.run.store.at(well.files["train.parquet"].path))["end"].to_numpy())
    left = np.concatenate([t for i, t in enumerate(np.split(tokens, ends[:-1].astype(int))) if i not in gone])
    assert np.array_equal(np.fromfile(encoding.run.store.at(record.files["train.tokens"].path), np.uint16), left)
    encoding.fails = {d.text: ValueError() for d in docs}
    assert encoding().counters["train"]["docs"] == 0


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "input/output error"), ModuleNotFoundError("fastokens"),
                                   TokenizerError("text encodes to its end-of-text token"), KeyboardInterrupt()])
def test_what_no_text_did_ends_the_task(encoding, error):
    encoding.fails = {encoding.docs[13].text: error}
    with pytest.raises(type(error)):
        encoding()
    encoding.fails = {encoding.docs[13].text: OSError("a decoder says so")}        # no errno: not the machine's
    assert encoding().counters["quarantined"] == {"error:OSError": 1}


def write_part(path, docs) -> str:
    writer = PartWriter(str(path), document_schema(["quality"]))
    for doc in docs:
        writer.write(doc)
    writer.close()
    return str(path)


def test_batches_are_bounded_in_bytes_and_stay_in_a_row_group(tmp_path):
    sizes = [3_000_000] * 12 + [100] * 700 + [2 * BATCH_BYTES] + [100] * 5
    docs = [Document(document_id("s", "f", "", i), "ab" * (n // 2), source="s", signals={"quality": i})
            for i, n in enumerate(sizes)]
    path = write_part(tmp_path / "part.parquet", docs)
    starts, at = [], 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            starts.append(at)
            at += file.metadata.row_group(group).num_rows
    assert len(starts) > 3
    every = {"source": sorted({d.source for d in docs})}
    for where in (Selection({}), Selection(every)):
        rows, ids = [], []
        for some in rows_of(path, where, ("text", "bytes")):
            texts = some.column("text")
            assert [len(t) for t in texts] == some.column("bytes")
            assert sum(map(len, texts)) <= BATCH_BYTES or len(texts) == 1
            first, last = int(some.rows[0]), int(some.rows[-1])
            assert not any(first < s <= last for s in starts)
            assert some.rows_read == len(texts) <= 256
            rows += some.rows.tolist()
            ids += some.ids
        assert rows == list(range(len(docs)))
        assert ids == [d.id for d in docs]


def test_sizes_are_read_without_the_texts(tmp_path):
    docs = [Document(document_id("s", "f", "", i), "\u00fc" * i, source="s") for i in range(9)]
    path = write_part(tmp_path / "part.parquet", docs)
    [some] = rows_of(path, Selection({}), ("bytes",))
    assert "text" not in some.batch.schema.names
    assert some.column("bytes") == [2 * i for i in range(9)]


def test_the_sample_is_the_longest_run_of_lowest_prfs_in_any_order(tmp_path):
    rng = np.random.default_rng(5)
    docs = [Document(document_id("s", "f", "", i), "x" * int(n), source="s")
            for i, n in enumerate(np.exp(rng.uniform(0, 8, 300)))]
    ranked = sorted(docs, key=lambda d: prf(7, "tokenizer", d.id))
    for size in (1, 500, 20_000, 10**9):
        expected, total = {}, 0
        for doc in ranked:
            total += len(doc.text)
            if expected and total > size:
                break
            expected[doc.id] = len(doc.text)
        for seed in range(4):
            order = np.random.default_rng(seed).permutation(len(docs))
            paths = [write_part(tmp_path / f"{size}-{seed}-{k}", [docs[i] for i in order[k::3]]) for k in range(3)]
            assert _sample(paths, Selection({}), size, 7) == expected


def test_an_upgraded_library_encodes_and_trains_again(run, monkeypatch):
    [part] = run.parts(documents(20), 20)
    tokenizer = {"ref": {"$ref": "objects/t", "content": "0" * 64, "bytes": 1}, "eos": 0}

    def keys() -> list[str]:
        drafts = [tokenizer_draft(TRAIN, [part]), *encode_drafts([part], tokenizer, CONFIG)]
        return [task_key(d.task, d.args) for d in drafts]

    before = keys()
    assert keys() == before
    real = metadata.version
    for name in ("tokenizers", "fastokens", "sentencepiece"):
        monkeypatch.setattr(metadata, "version", lambda n, name=name: "999" if n == name else real(n))
        assert not set(keys()) & set(before)

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert not set(keys()) & set(before)


def test_odd_metadata_holds_nothing_out():
    val = {"share": 0.5, "seed": 1}
    ids = [document_id("s", "f", "", i) for i in range(40)]
    for theirs in ("news", 7, None, [], ["a"]):
        assert not any(_near_held_out(id, json.dumps({"near_duplicates": theirs}), val) for id in ids)


def test_row_groups_of_the_table_do_not_show_the_batches(tmp_path):
    class Folder:
        def __init__(self, name: str) -> None:
            self.folder = tmp_path / name
            self.folder.mkdir()

        def path(self, name: str) -> str:
            return str(self.folder / name)

        def note(self, name: str, rows: int) -> None:
            assert rows == 47

    tables = []
    for step in (1, 7, 47):
        out = Folder(str(step))
        writer = TokensWriter(out, "train", table_rows=10)
        for a in range(0, 47, step):
            rows = np.arange(a, min(a + step, 47))
            writer.add([np.zeros(1, np.uint16)] * len(rows), [f"{r:032x}" for r in rows], rows, [3] * len(rows))
        writer.close()
        tables.append((out.folder / "train.parquet").read_bytes())
    assert tables[0] == tables[1] == tables[2]


def test_a_driver_that_was_taken_over_leaves_the_manifests_of_the_other_alone(run):
    info, tokenizer = encode(run, run.parts(documents(60), 30), CONFIG, 3000)
    before = {p: p.read_bytes() for p in run.store.local.joinpath("shards").rglob("*.json")}
    parts = run.parts(documents(50), 25)
    shards = run(assemble_drafts(run(encode_drafts(parts, tokenizer, CONFIG)), tokenizer, 3000))

    def fenced():
        raise StoreError("another driver")

    with pytest.raises(StoreError, match="another driver"):
        publish_shards(run.store, "web", shards, parts, tokenizer, check_lease=fenced)
    assert {p: p.read_bytes() for p in run.store.local.joinpath("shards").rglob("*.json")} == before
    assert publish_shards(run.store, "web", shards, parts, tokenizer)["train"]["sha256"] != info["train"]["sha256"]
    run.store.remove(shards[0].files["ends"]["$ref"])
    with pytest.raises(StoreError, match="ends is missing, although the log names it"):
        publish_shards(run.store, "other", shards, parts, tokenizer)


def test_imported_shards_are_not_replaced(run):
    parts = run.parts(documents(), 31)
    encode(run, parts, CONFIG, 3000)
    path = run.store.local / "shards" / "web" / "split=train" / MANIFEST
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "source": {"format": "ds", "files": ["a.ds"]}}))
    with pytest.raises(ImportedShards, match=r"were imported, and a run would replace them; give `shards\.web`"):
        encode(run, parts, CONFIG, 3000)
    path.write_text("damaged")
    encode(run, parts, CONFIG, 3000)
