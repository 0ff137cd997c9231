"""Training on packed rows: what a batch holds, for any history of phases, edits, ranks and resumes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from tests.conftest import rest_slow
from tests.tokenizer.packs import slow_rows, slow_sample, write_packing
from tests.trainer.synthetic import EOS, TOKENIZER, language, make_run, write_shards
from tokenizer.mixture.curriculum import Curriculum, CurriculumError, Order, Phase, Stream, TokenizerRef, edit
from tokenizer.mixture.steps import steps
from tokenizer.shards.find import window_documents
from tokenizer.shards.layout import ENDS, ShardError
from tokenizer.shards.reader import ShardSet
from trainer.base.config import ConfigError
from trainer.data.batches import Data
from trainer.data.remote import damaged, fetch_shards, shard_set
from trainer.loop.run import open_run
from trainer.model.loss import IGNORE
from trainer.tools.curriculum_edit import new_streams
from trainer.tools.explain import explain
from trainer.tools.verify import readers, spans

PHASES = [{"name": "a", "until": "50%", "sequence": 64, "batch": 192, "mix": {"web": 70, "code": 30}},
          {"name": "b", "until": "100%", "lr": "decay", "batch": 320}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a packed stream `web` and a stream `code` that is not packed."""
    made = make_run(tmp_path_factory.mktemp("store"), phases=PHASES, documents=200, packed=("web",))
    return open_run(str(made), None, None, [])


def pieces_of(shards: ShardSet, longest: int) -> list[list[tuple[int, int]]]:
    rows = []
    for number, info in enumerate(shards.manifest.shards):
        ends, offset = np.fromfile(shards.folder / info.ends, ENDS).astype(np.int64), shards.offsets[number]
        rows += [[(a + offset, b + offset) for a, b in row]
                 for row in slow_rows(np.diff(ends, prepend=0).tolist(), longest)]
    return rows


def test_a_batch_equals_rows_built_token_by_token(run):
    data, curriculum = Data(run.curriculum, run.store), run.curriculum
    web = curriculum.streams[1]
    assert web.name == "web" and curriculum.streams[0].packing is None
    rows, at = pieces_of(data.train[1], 64), Order(curriculum).locate(0, curriculum.samples)
    assert len(rows) == web.rows
    padded = documents = 0
    for step in steps(curriculum):
        batch = data.step(step.first, step.batch, 0, 1)
        for i in range(step.batch):
            if at.stream[step.first + i] == 1:
                slow = slow_sample(data.train[1], rows[int(at.window[step.first + i])], 64)
                assert batch.tokens[i].tolist() == slow["inputs"]
                assert batch.positions[i].tolist() == slow["positions"]
                assert [None if t == IGNORE else t for t in batch.targets[i].tolist()] == slow["targets"]
                padded += slow["targets"][-1] is None
                documents += slow["positions"].count(0)
    assert padded > 5 and documents > 2 * curriculum.samples // 2


def test_ranks_share_a_step_of_packed_rows(run):
    data = Data(run.curriculum, run.store)
    whole = data.step(0, 3, 0, 1)
    parts = [data.step(0, 3, rank, 2) for rank in range(2)]
    assert [p.tokens[i].tolist() for i, p in ((0, parts[0]), (0, parts[1]), (1, parts[0]))] == whole.tokens.tolist()
    assert sum(p.valid() for p in parts) == whole.valid()


def test_a_document_is_found_by_the_samples_that_read_it(run):
    order, data = Order(run.curriculum), Data(run.curriculum, run.store)
    shards = shard_set(run, run.curriculum.streams[1])
    at = order.locate(0, order.samples)
    rows = pieces_of(data.train[1], 64)
    names = [d.id for d in shards.documents(0, shards.tokens)]
    seen = 0
    for _, begin, end in spans(shards, names[::9]):
        slow = [n for n in range(order.samples) if at.stream[n] == 1
                and any(a < end and b > begin for a, b in rows[int(at.window[n])])]
        assert sorted(readers(order, 1, begin, end, shards.packed).tolist()) == slow
        seen += len(slow)
    assert seen > 5


def test_explain_names_the_documents_of_packed_rows(run):
    result = explain(run, 1)
    data = Data(run.curriculum, run.store)
    rows = [r for r in result["rows"] if r["stream"] == "web"]
    assert rows
    for r in rows:
        [batch] = [data.samples([r["sample"]])]
        starts = (batch.positions[0] == 0).nonzero().flatten().tolist()
        assert sorted(d["tokens"][0] for d in r["documents"]) == starts[:len(r["documents"])]
        assert len(starts) - len(r["documents"]) in (0, 1)            # padding begins like a document


def test_rows_that_are_not_the_curriculums_are_refused(run):
    c = run.curriculum
    wrong = replace(c, streams=(c.streams[0], replace(c.streams[1], rows=c.streams[1].rows + 1)))
    with pytest.raises(ConfigError, match="stream web"):
        Data(wrong, run.store)


def test_files_of_rows_that_are_cut_while_they_are_read_are_named(run, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(run.store, store)
    data = Data(run.curriculum, store)
    data.step(0, 3, 0, 1)
    for path in (store / run.curriculum.streams[1].train).glob("*.packed"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ShardError, match=r"packed: \d+ bytes, the manifest says \d+: cut"):
        data.step(0, 3, 0, 1)


def test_a_packed_stream_is_added_to_a_run_as_it_was_published(run, tmp_path):
    store = tmp_path / "store"
    info = {split: write_shards(store / "shards/web" / f"split={split}", "web", split, language(1, 40), 2)
            for split in ("train", "val")}
    facts = write_packing(store / info["train"]["path"], 64)
    others = replace(run.curriculum, streams=run.curriculum.streams[:1])
    [stream] = new_streams([{"mix": {"web": 1}}], others, store)
    assert (stream.packing, stream.rows, stream.filled) == (facts["sha256"], facts["rows"], facts["filled"])
    with pytest.raises(ConfigError, match=r"web.*rows of 64.*longest = 128"):
        new_streams([{"mix": {"web": 1}}], replace(others, longest=128), store)


def test_packed_rows_are_fetched_with_their_shards(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENMILL_SHARDS", str(tmp_path))
    store = fetch_shards(f"file://{run.store}", run.curriculum, lambda text: None)
    fetched, local = Data(run.curriculum, store), Data(run.curriculum, run.store)
    assert fetched.train[1].folder != local.train[1].folder
    assert fetched.step(0, 3, 0, 1).tokens.equal(local.step(0, 3, 0, 1).tokens)


def test_rows_in_a_bucket_are_looked_up_without_a_copy(run):
    stream, bucket = run.curriculum.streams[1], SubTreeFileSystem(str(run.store), LocalFileSystem())
    remote = ShardSet(stream.train, stream.sha256, bucket, stream.packing)
    local = shard_set(run, stream)
    for row in range(0, stream.rows, 7):
        assert window_documents(remote, row, 64) == window_documents(local, row, 64)
    assert damaged(remote) == []


# -- any history -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with three streams, each with packed rows of 16 and of 32 tokens: (folder, {(name, length): (stream,
    stream with packed rows)})."""
    folder, streams = tmp_path_factory.mktemp("store"), {}
    for seed, name in enumerate("abc"):
        info = write_shards(folder / "shards" / name / "split=train", name, "train", language(seed, 90, mean=12), 2)
        for longest in (16, 32):
            plain = Stream(name, info["path"], None, info["sha256"], None, info["tokens"], 0, "uint16")
            facts = write_packing(folder / info["path"], longest)
            streams[name, longest] = plain, replace(plain, packing=facts["sha256"], rows=facts["rows"],
                                                    filled=facts["filled"])
    return folder, streams


def random_history(rng: np.random.Generator, streams) -> tuple[Curriculum, list[tuple[Curriculum, int]]]:
    """Return a random curriculum after up to two edits, and the list of (curriculum before an edit, sample at which it
    was edited)."""
    longest = int(rng.choice([16, 32]))
    names = list("abc"[:rng.integers(1, 4)])
    packed = {name: bool(rng.integers(2)) for name in names}
    chosen = tuple(streams[name, longest][packed[name]] for name in names)

    def phase(number: int, start: int) -> Phase:
        mixed = [n for n in names if rng.integers(3)] or names[:1]
        whole = any(packed[n] for n in mixed) or rng.integers(2)
        batch, length = int(rng.integers(1, 7)), longest if whole else longest // 2
        samples = batch * int(rng.integers(1, 9))
        return Phase(f"p{number}", start, samples, samples, length, batch,
                     {n: int(rng.integers(1, 9)) for n in mixed}, "stable", {}, "repeat")

    phases = [phase(0, 0)]
    phases += [phase(1, phases[0].stop)] if rng.integers(2) else []
    curriculum = Curriculum(int(rng.integers(99)), TokenizerRef(TOKENIZER["sha256"], 97, EOS, "t"), longest, chosen,
                            tuple(phases), "")
    curriculum.validate()
    before = []
    for number in range(rng.integers(0, 3)):
        cut = int(rng.choice([s.stop for s in steps(curriculum)]))
        before.append((curriculum, cut))
        curriculum = edit(curriculum, cut, [phase(10 + number, 0)])
    return curriculum, before


@pytest.mark.parametrize("seed", rest_slow(10, range(40)))
def test_any_history_reads_the_planned_rows_in_order(store, seed):
    """Over random phases, edits, batch sizes, ranks and resumes, with packing on and off: the samples that the ranks
    read are those of the plan, built token by token; edits change no earlier sample; within an epoch a stream is read
    at most once."""
    folder, streams = store
    rng = np.random.default_rng(seed)
    for _ in range(25):
        curriculum, before = random_history(rng, streams)
        order = Order(curriculum)
        at = order.locate(0, order.samples)
        for number, (earlier, _) in enumerate(before):           # a later edit may cut what an earlier one added
            kept = min(sample for _, sample in before[number:])
            assert all((a == b[:kept]).all() for a, b in zip(Order(earlier).locate(0, kept), at))
        check_disjoint(curriculum, at)
        rows = {s: pieces_of(ShardSet(folder / stream.train), curriculum.longest)
                for s, stream in enumerate(curriculum.streams) if stream.packing}
        planned = list(steps(curriculum))
        resumes = sorted({0, *rng.integers(0, len(planned), rng.integers(0, 3)).tolist(), len(planned)})
        for first, stop in pairwise(resumes):                    # a resumed training has a loader and ranks of its own
            ranks, data = int(rng.integers(1, 5)), Data(curriculum, folder)
            for step in list(steps(curriculum, planned[first].first))[:stop - first]:
                parts = [data.step(step.first, step.batch, rank, ranks) for rank in range(ranks)]
                for i in range(step.batch):
                    n, part = step.first + i, parts[i % ranks]
                    got = {"inputs": part.tokens[i // ranks].tolist(), "positions": part.positions[i // ranks].tolist(),
                           "targets": [None if t == IGNORE else t for t in part.targets[i // ranks].tolist()]}
                    assert got == planned_sample(data, rows, at, n)


def planned_sample(data: Data, rows: dict[int, list], at, n: int) -> dict:
    stream, window, length = int(at.stream[n]), int(at.window[n]), int(at.sequence[n])
    shards = data.train[stream]
    if stream in rows:
        return slow_sample(shards, rows[stream][window], length)
    start, ends = window * length, set(np.cumsum([
        n for info in shards.manifest.shards for n in np.diff(np.fromfile(shards.folder / info.ends, ENDS).astype(
            np.int64), prepend=0).tolist()]).tolist())
    cuts = [start, *[p for p in range(start + 1, start + length + 1) if p in ends], start + length + 1]
    return slow_sample(shards, list(pairwise(cuts)), length)


def check_disjoint(curriculum: Curriculum, at) -> None:
    """Check that no token of a stream is read twice in an epoch."""
    for s in range(len(curriculum.streams)):
        for epoch in set(at.epoch[at.stream == s].tolist()):
            chosen = (at.stream == s) & (at.epoch == epoch)
            spans = sorted((int(w) * int(n), (int(w) + 1) * int(n))
                           for w, n in zip(at.window[chosen], at.sequence[chosen]))
            assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_another_sequence_length_is_refused_for_a_packed_stream(store):
    _, streams = store
    phase = Phase("p", 0, 4, 4, 16, 2, {"a": 1}, "stable", {}, "error")
    c = Curriculum(0, TokenizerRef(TOKENIZER["sha256"], 97, EOS, "t"), 32, (streams["a", 32][1],), (phase,), "")
    with pytest.raises(CurriculumError, match="'p' has sequence = 16"):
        c.validate()
