"""Packing in a run, from parts to packed rows to materialised samples: the bytes are equal however the work is divided
and ordered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.passes.encode import assemble_drafts, encode_drafts
from pipeline.passes.fit_tokenizer import publish_tokenizer, tokenizer_draft, tokenizer_info
from pipeline.passes.materialize import map_drafts, publish_rows, reduce_drafts
from pipeline.passes.pack import pack_drafts, publish_packed
from pipeline.passes.publish_shards import publish_shards
from tests.tokenizer.packs import slow_rows, slow_sample, write_packing
from tests.tokenizer.test_encode_tasks import CONFIG, TRAIN, Runner, documents
from tests.tokenizer.test_materialize import published
from tests.tokenizer.test_shards import EOS
from tokenizer.mixture.curriculum import Curriculum, CurriculumError, Order, Phase, Stream, TokenizerRef
from tokenizer.mixture.realised import plan, plan_text
from tokenizer.mixture.resolve import resolve
from tokenizer.shards.layout import ENDS, ShardError
from tokenizer.shards.packed import MANIFEST
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.rows import RowSet
from tokenizer.shards.verify import verify

LONGEST = 32


def packed_set(run: Runner, parts, shard_bytes: int, reverse: bool = False) -> tuple[dict, dict]:
    """Encode, assemble, pack and publish a stream. Returns (description of the stream `web`, tokenizer)."""
    [fitted] = run([tokenizer_draft(TRAIN, parts)])
    tokenizer = tokenizer_info(fitted)
    publish_tokenizer(run.store, tokenizer)
    encoded = run(encode_drafts(parts, tokenizer, CONFIG))
    drafts = assemble_drafts(encoded, tokenizer, shard_bytes)
    assembled = run(drafts)
    info = publish_shards(run.store, "web", assembled, parts, tokenizer)
    packing = pack_drafts([(draft.args["split"], draft.args["index"]) for draft in drafts], assembled, LONGEST)
    packed = run(packing, range(len(packing))[::-1] if reverse else None)
    info["train"] |= publish_packed(run.store, info["train"], LONGEST, packed)
    return info, tokenizer


def test_packed_rows_have_equal_bytes_for_any_partition_size_and_order(tmp_path):
    infos, files = [], []
    for size in (240, 31):
        (tmp_path / str(size)).mkdir()
        run = Runner(tmp_path / str(size))
        infos.append(packed_set(run, run.parts(documents(), size), 3000, reverse=size == 31)[0])
        folder = run.store.local / "shards/web/split=train"
        files.append({p.name: p.read_bytes() for p in sorted(folder.glob("*packed*"))})
    assert infos[0] == infos[1] and files[0] == files[1]
    assert len(files[0]) > 4
    shards = ShardSet(folder, packing=infos[0]["train"]["packing"]["sha256"])
    assert shards.packed.longest == LONGEST and len(shards.packed) == infos[0]["train"]["packing"]["rows"]
    assert verify(folder) == []


def test_a_driver_that_was_taken_over_publishes_no_rows(tmp_path):
    run = Runner(tmp_path)
    info, _ = packed_set(run, run.parts(documents(60), 60), 3000)

    def fenced():
        raise ShardError("another driver")

    (run.store.local / info["train"]["path"] / MANIFEST).unlink()
    with pytest.raises(ShardError, match="another driver"):
        publish_packed(run.store, info["train"], LONGEST, [], fenced)
    assert not run.store.exists(f"{info['train']['path']}/{MANIFEST}")


def test_without_packing_the_latest_rows_are_not_named_any_more_and_older_curricula_still_find_theirs(tmp_path):
    run = Runner(tmp_path)
    info, _ = packed_set(run, run.parts(documents(60), 60), 3000)
    folder, packing = run.store.local / info["train"]["path"], info["train"].pop("packing")
    assert publish_packed(run.store, info["train"], LONGEST, []) == {}
    assert not (folder / MANIFEST).exists()
    assert len(ShardSet(folder, packing=packing["sha256"]).packed) == packing["rows"]


def recipe(sequence: int = LONGEST, total: int = 640) -> dict:
    return {"curriculum": {"seed": 4, "total": total, "phases": [
        {"name": "a", "until": "50%", "sequence": sequence, "batch": 5 * sequence, "mix": {"web": 1}},
        {"name": "b", "until": "100%", "lr": "decay"}]}, "shards": {"web": {"longest": LONGEST}}}


def test_a_curriculum_counts_rows_and_says_how_much_of_them_is_padding(tmp_path):
    run = Runner(tmp_path)
    info, tokenizer = packed_set(run, run.parts(documents(), 240), 3000)
    curriculum, warnings = resolve(recipe(), {"web": info}, tokenizer)
    [stream] = curriculum.streams
    shards = ShardSet(run.store.local / stream.train, packing=stream.packing)
    pieces = [shards.packed.pieces(row, row + 1)[0] for row in range(stream.rows)]
    assert stream.filled == sum(int((p[:, 1] - p[:, 0]).sum()) - 1 for p in pieces)
    assert Order(curriculum).supers == [stream.rows] == [len(pieces)]
    assert Curriculum.loads(curriculum.dumps().encode(), "x") == curriculum
    padding = 1 - stream.filled / (LONGEST * stream.rows)
    assert padding > 0.01 and any("shards.web.packing" in w and f"{padding:.1%}" in w for w in warnings)
    assert {row["padding"] for row in plan(curriculum)} == {round(320 * padding)}
    assert "padding" in plan_text(curriculum)
    plain = replace(stream, packing=None, rows=0, filled=0)
    unpacked = replace(curriculum, streams=(plain,))
    assert "packing" not in unpacked.dumps() and "padding" not in plan_text(unpacked)
    with pytest.raises(CurriculumError, match=r"sequence = 16.*longest = 32"):
        resolve(recipe(16), {"web": info}, tokenizer)


@pytest.fixture(params=[300, 70_000], ids=["u16", "u32"])
def mixed(request, tmp_path):
    """A packed stream and one that is not packed. If tokens have two bytes, the packed stream has a loss mask."""
    run, rng, vocab = Runner(tmp_path), np.random.default_rng(3), request.param
    lengths = [[int(x) for x in rng.integers(0, 80, n)] for n in (30, 1, 41)]
    packed = published(run.store.local, "packed", lengths, vocab, (0,) if vocab == 300 else ())
    facts = write_packing(run.store.local / packed.train, LONGEST)
    packed = replace(packed, packing=facts["sha256"], rows=facts["rows"], filled=facts["filled"])
    plain = published(run.store.local, "plain", [[5, 90, 0, 0, 31], [7, 9, 12, 40, 1]], vocab)
    return run, mixed_curriculum((packed, plain), vocab)


def mixed_curriculum(streams: tuple[Stream, ...], vocab: int) -> Curriculum:
    """Return a curriculum with two phases that read the streams more than once, and between them a phase with another
    sequence length, which only reads the stream that is not packed."""
    def phase(name, start, samples, sequence, batch, weights):
        return Phase(name, start, samples, samples, sequence, batch, weights, "stable", {}, "repeat")

    made = Curriculum(7, TokenizerRef("t" * 64, vocab, EOS, "t.json"), LONGEST, streams, (
        phase("a", 0, 60, LONGEST, 4, {"packed": 3, "plain": 1}), phase("b", 60, 25, 16, 5, {"plain": 1}),
        phase("c", 85, 150, LONGEST, 3, {"packed": 2, "plain": 1})), "")
    made.validate()
    return replace(made, order=Order(made).hash())


@pytest.mark.parametrize("format", ["bytes", "parquet"])
def test_materialised_rows_equal_the_slow_ones(mixed, format):
    run, c = mixed
    drafts = map_drafts(run.store, c, 900, 3000)
    assert len(drafts) > 7
    mapped = run(drafts, range(len(drafts))[::-1])
    reducing = reduce_drafts(c, mapped, format, 3000)
    publish_rows(run.store, "rows", c, reducing, run(reducing))
    rows, shards = RowSet(run.store.local / "rows"), ShardSet(run.store.local / c.streams[0].train)
    pieces = []
    for number, info in enumerate(shards.manifest.shards):
        ends, offset = np.fromfile(shards.folder / info.ends, ENDS).astype(np.int64), shards.offsets[number]
        pieces += [[(a + offset, b + offset) for a, b in row]
                   for row in slow_rows(np.diff(ends, prepend=0).tolist(), LONGEST)]
    at, seen = Order(c).locate(0, c.samples), 0
    assert len(rows) == c.samples
    for n in np.flatnonzero(at.stream == 0).tolist():
        row, slow = rows.row(n), slow_sample(shards, pieces[int(at.window[n])], LONGEST)
        assert (row.stream, row.epoch, row.window) == ("packed", at.epoch[n], at.window[n])
        counts = np.ones(LONGEST, bool) if row.counts is None else row.counts
        begins = {int(b) for b in row.bounds}
        assert row.tokens[:-1].tolist() == slow["inputs"]
        assert begins - {LONGEST} == {p for p in range(1, LONGEST) if slow["positions"][p] == 0}
        assert [int(row.tokens[i + 1]) if counts[i] and i + 1 not in begins else None
                for i in range(LONGEST)] == slow["targets"]
        seen += row.counts is not None
    assert seen > 10


def test_rows_that_were_replaced_stop_materialize(mixed):
    run, c = mixed
    stream = c.streams[0]
    path = run.store.local / stream.train / f"packed-{stream.packing[:16]}.json"
    path.write_text(path.read_text().replace('"longest": 32', '"longest": 31'))
    with pytest.raises(Exception, match=r"packed-"):
        map_drafts(run.store, c, 900, 3000)
