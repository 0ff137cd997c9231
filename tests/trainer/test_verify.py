"""`verify` computes the hash chain again and gets the same value, also over skipped steps and for old checkpoints.
Whatever was changed is named. The documents that it says the model has seen are those that it was trained on."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.trainer import synthetic
from tests.trainer.synthetic import make_run, quiet
from tokenizer.mixture.order import Order
from tokenizer.mixture.steps import TrainingStep
from tokenizer.shards.reader import ShardSet
from trainer.__main__ import main
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.ledger import Ledger
from trainer.data.provenance import GENESIS, chain, code
from trainer.loop.run import Run, changes, open_run
from trainer.loop.train import train
from trainer.tools import verify

SKIP = (9, 13)
SET = ["evaluate.every=1000", "log_every=1000", "checkpoint.every=6", "checkpoint.keep=99",
       f"skip=[[{SKIP[0]},{SKIP[1]}]]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with a tokenizer in its store, trained for 30 of its 44 steps; four of them were skipped."""
    from trainer.parallel.world import world

    store = tmp_path_factory.mktemp("store")
    file = store / "tokenizers" / "none" / "tokenizer.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synthetic.TOKENIZER, "sha256", hashlib.sha256(b"{}").hexdigest())
        made = make_run(store, documents=200)
    with world("cpu") as here:
        train(open_run(str(made), None, None, SET), here, 30, quiet)
    return made


@pytest.fixture(scope="module")
def run(folder) -> Run:
    return open_run(str(folder), None, None, [])


def said(capsys, *arguments: str) -> tuple[int, str]:
    status = main(["verify", *arguments])
    both = capsys.readouterr()
    return status, both.out + both.err


def fed(run: Run, steps: int) -> list[tuple[int, int, int, int]]:
    """Return (step, stream, first token, length) of every window that the performed steps read, taken from the order of
    samples alone."""
    order, out = Order(run.curriculum), []
    for step in run.steps():
        number = step.number + 1
        if number <= steps and not SKIP[0] <= number < SKIP[1]:
            at = order.locate(step.first, step.stop)
            out += [(number, int(s), int(w * length), int(length))
                    for s, w, length in zip(at.stream, at.window, at.sequence)]
    return out


def test_everything_holds(folder, run, capsys):
    status, text = said(capsys, str(folder), "--shards")
    assert status == 0, text
    assert "DIFFERS" not in text and "step 30, 138 samples" in text and "every byte" in text
    assert "of 26 steps" in text and "not seen: steps 9 to 12 were skipped (train.skip)" in text
    windows = fed(run, 30)
    for s, stream in enumerate(run.curriculum.streams):
        tokens = sum(length for _, t, _, length in windows if t == s)
        assert f"  {stream.name:<20}{tokens:>18,} tokens{tokens / stream.tokens:>9.3f} epochs" in text
    status, text = said(capsys, str(folder), "--step", "12")
    assert status == 0 and "of 8 steps" in text
    status, text = said(capsys, str(folder), "--step", "13")
    assert status == 2 and "there are 6, 12, 18, 24, 30" in text


def test_the_chain_is_what_its_definition_says(folder, run):
    """Against the plainest reading of the definition, one step after another."""
    order, h = Order(run.curriculum), bytes(16)
    for step in run.steps():
        number = step.number + 1
        if number <= 30 and not SKIP[0] <= number < SKIP[1]:
            at = order.locate(step.first, step.stop)
            rows = b"".join(struct.pack("<3Q", *map(int, row)) for row in zip(at.stream, at.epoch, at.window))
            h = hashlib.blake2b(h + struct.pack("<3Q", number, step.first, step.batch)
                                + hashlib.blake2b(rows, digest_size=16).digest(), digest_size=16).digest()
        found = {c.step: c.meta["chain"] for c in ckpt.complete(folder / "train" / "checkpoints")}
        assert found.get(number, h.hex()) == h.hex()
    steps = list(run.steps())[:20]
    at_once, one_by_one = chain(order, steps), GENESIS
    for step in steps:
        one_by_one = chain(order, [step], one_by_one)
    assert at_once == one_by_one != chain(order, steps, passed=lambda n: "why" if n == 7 else None)
    assert chain(order, [TrainingStep(0, 0, 0, 5, 0)]) != chain(order, [TrainingStep(0, 0, 0, 4, 0)])


def test_other_data_is_noticed(folder, run, capsys, tmp_path):
    """Another seed, another mixture of the past, a skip that was not, one that was: the chain is another."""
    meta = ckpt.latest(run.out / "checkpoints").meta
    ledger = Ledger.read(run.out)
    assert verify.data(run, meta, ledger)[0] == []
    first, *rest = run.curriculum.phases
    for other in (replace(run.curriculum, seed=2),
                  replace(run.curriculum, phases=(replace(first, weights={"web": 1, "code": 1}), *rest))):
        assert "hash chain" in verify.data(replace(run, curriculum=other), meta, ledger)[0][0]
        assert verify.curriculum(replace(run, curriculum=other), meta)[0]
    forged = Ledger(run.out, ledger.lines)
    for steps in ([], [[9, 14]]):
        forged.lines = [{**ledger.lines[0], "steps": steps}]
        forged._find()
        assert "the model has seen other data" in verify.data(run, meta, forged)[0][0]
    ahead = Ledger(run.out, [{**ledger.lines[0], "steps": [*ledger.lines[0]["steps"], [31, 40]]}])
    assert verify.data(run, meta, ahead)[0] == []                   # what lies ahead has not been seen


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the run's last checkpoint and ledger."""
    import shutil

    out = tmp_path / "out"
    shutil.copytree(folder / "train" / "checkpoints" / "step_00000030", out / "checkpoints" / "step_00000030")
    shutil.copy(folder / "train" / "ledger.jsonl", out)
    return out


def test_what_was_tampered_with_is_named(folder, run, copy, capsys):
    found = ckpt.latest(copy / "checkpoints")
    body = next(found.folder.glob("*.distcp"))
    data = bytearray(body.read_bytes())
    data[len(data) // 2] ^= 1
    body.write_bytes(data)
    (found.folder / "more.bin").write_bytes(b"x")
    status, text = said(capsys, str(folder), "--out", str(copy))
    assert status == 1
    assert f"files      DIFFERS  {body.name}: sha256 is not what COMPLETE says" in text
    assert "more.bin: COMPLETE does not name it" in text and "data       ok" in text
    (copy / "ledger.jsonl").unlink()
    status, text = said(capsys, str(folder), "--out", str(copy))
    assert status == 1 and "the checkpoint of step 30 knows of" in text


def test_a_running_training_may_delete_what_is_looked_at(folder, copy, capsys, monkeypatch):
    found = ckpt.survey(copy / "checkpoints")
    monkeypatch.setattr(ckpt, "survey", lambda _: found)
    (found[0][-1].folder / "meta.json").unlink()
    status, text = said(capsys, str(folder), "--out", str(copy))
    assert status == 1 and "meta.json: gone meanwhile; a training that is running deletes" in text


def test_shards_are_read_where_asked(folder, run, capsys):
    shards = ShardSet(run.store / run.curriculum.streams[1].train)
    body = shards.folder / shards.manifest.shards[0].body
    data = body.read_bytes()
    try:
        body.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        assert said(capsys, str(folder))[0] == 0
        status, text = said(capsys, str(folder), "--shards")
        assert status == 1 and f"shards     DIFFERS  {run.curriculum.streams[1].name}: {body.name}: sha256" in text
    finally:
        body.write_bytes(data)
    file = run.store / run.curriculum.tokenizer.path
    try:
        file.write_text("[]")
        status, text = said(capsys, str(folder))
        assert status == 1 and "tokenizer  DIFFERS" in text
    finally:
        file.write_text("{}")


def test_against_a_list_says_which_documents_the_model_has_seen(folder, run, capsys, tmp_path):
    """For every document of every stream: seen in exactly the steps in which a window with one of its tokens was."""
    windows = fed(run, 30)
    expected: dict[tuple[str, str], tuple[int, ...]] = {}
    for s, stream in enumerate(run.curriculum.streams):
        begin = 0
        shards = ShardSet(run.store / stream.train)
        for info, offset in zip(shards.manifest.shards, shards.offsets):
            table = pq.read_table(shards.folder / info.table, columns=["id", "end"]).to_pylist()
            for row in table:
                end = row["end"] + offset
                expected[stream.name, row["id"], begin] = tuple(sorted({
                    n for n, t, first, length in windows if t == s and first < end and first + length > begin}))
                begin = end
    ids = sorted({name for _, name, _ in expected})
    hits = verify.against(run, 138, Ledger.read(run.out), ids)
    assert len(hits) == len(expected)
    got = sorted((h.stream, h.id, h.steps) for h in hits)
    assert got == sorted((stream, name, steps) for (stream, name, _), steps in expected.items())
    seen = {name for (_, name, _), steps in expected.items() if steps}
    clean = sorted(set(ids) - seen)
    assert 0 < len(clean) < len(ids)

    listed = tmp_path / "ids.txt"
    listed.write_text("# evaluation set\n" + "\n".join([*clean, "f" * 32]) + "\n")
    status, text = said(capsys, str(folder), "--against", str(listed))
    assert status == 0 and f"{len(clean) + 1:,} ids" in text and ", 0 seen" in text
    name = sorted(seen)[0]
    listed.write_text(f"{name} some-benchmark\n")
    status, text = said(capsys, str(folder), "--against", str(listed))
    first = next(steps for (_, n, _), steps in expected.items() if n == name and steps)[0]
    assert status == 1 and re.search(rf"SEEN {name} \(stream \w+\) in steps? (\d+, )*{first}\b", text)
    twice = next(n for n in ids if len({s for s, other, _ in expected if other == n}) > 1)
    listed.write_text(f"{twice}\n")                                # in both streams, and one document all the same
    assert "1 ids, 1 of them in the shards" in said(capsys, str(folder), "--against", str(listed))[1]
    status, text = said(capsys, str(folder), "--against", str(tmp_path / "none"))
    assert status == 2 and "files" not in text                            # said before anything is read


@pytest.mark.parametrize("text", ["[]", "{", "cut", "flipped", '{"version": 1, "tokenizer": 3}', "\0\0", "3"])
def test_a_damaged_curriculum_is_named(folder, capsys, text):
    path = folder / "curriculum.json"
    before = path.read_text()
    try:
        path.write_text({"cut": before[:-10], "flipped": before.replace('"seed": 1', '"seed": 3')}.get(text, text))
        assert path.read_text() != before
        status, said_ = said(capsys, str(folder))
        assert status == 2 and said_.count(f"{path}: ") == 1
    finally:
        path.write_text(before)


def test_a_damaged_document_table_is_named(folder, run, capsys, tmp_path):
    listed = tmp_path / "ids.txt"
    listed.write_text("0" * 32)
    shards = ShardSet(run.store / run.curriculum.streams[0].train)
    path = shards.folder / shards.manifest.shards[0].table
    before = path.read_bytes()
    try:
        for damaged in (before[:100], before[:4] + b"x" * (len(before) // 2) + before[4 + len(before) // 2:]):
            path.write_bytes(damaged)
            status, text = said(capsys, str(folder), "--against", str(listed))
            assert status == 1 and f"error: {path}: cannot be read (" in text
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(("commit", "meta"), [("{}", "{}"), ("", "{}"), ("[]", "{}"),
                                              ('{"attempt": "a", "files": {}, "sha256": {}}', "{}"),
                                              ('{"attempt": "a", "files": {"meta.json": 7}, "sha256": '
                                               '{"meta.json": "0"}}', "no json")])
def test_a_damaged_commit_is_named(tmp_path, commit, meta):
    (tmp_path / "step_00000001" / "a").mkdir(parents=True)
    (tmp_path / "step_00000001" / "COMPLETE").write_text(commit)
    (tmp_path / "step_00000001" / "a" / "meta.json").write_text(meta)
    with pytest.raises(ckpt.CheckpointError, match=r"step_00000001/.* damaged.* delete .*step_00000001 and"):
        ckpt.complete(tmp_path)


def test_provenance_of_a_checkpoint(folder, run):
    meta = ckpt.latest(run.out / "checkpoints").meta
    assert meta["phase"] == "mid" and meta["world"] == 1 and meta["device"] == "cpu" and meta["python"].count(".") == 2
    assert meta["code"] == code() and len(meta["code"]["sha256"]) == 64
    pinned = {s.name: s.sha256 for s in run.curriculum.streams}
    assert {s["name"]: s["sha256"] for s in meta["curriculum"]["streams"]} == pinned
    assert meta["curriculum"]["tokenizer"]["sha256"] == run.curriculum.tokenizer.sha256
    assert np.isfinite(meta["probe"]["loss"])


def test_a_resume_says_what_is_another(folder, run):
    meta = ckpt.latest(run.out / "checkpoints").meta
    here = {k: meta[k] for k in ("torch", "python", "device")}
    same = open_run(str(folder), None, None, SET)
    assert changes(meta, same, 1, here) == []
    other = open_run(str(folder), None, None, [*SET, "micro_batch=64", "checkpoint.async=true", "parallel.shard=grad"])
    assert changes({**meta, "code": {**meta["code"], "sha256": "0" * 64, "commit": "abc"}}, other, 4,
                   {**here, "torch": "9.9"}) == [
        f"torch: checkpoint {meta['torch']!r}, now '9.9'", "world: checkpoint 1, now 4",
        "train.checkpoint.async: checkpoint False, now True", "train.micro_batch: checkpoint 16384, now 64",
        "train.parallel.shard: checkpoint 'full', now 'grad'",
        f"code: checkpoint abc (00000000), now {(code()['commit'] or code()['package'])[:12]} ({code()['sha256'][:8]})"]


def test_listed_ids_are_read_as_people_write_them(tmp_path):
    file = tmp_path / "ids"
    file.write_text("# why\n\nbbb from GSM8K\naaa\nbbb\n")
    assert verify.read_ids(Path(file)) == ["aaa", "bbb"]
