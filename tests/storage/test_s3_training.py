"""Training a run that is in object storage: the same losses as on a disk, from shards that are fetched once and
checked."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from pipeline.store.fs import Store
from tests.trainer.synthetic import TOKENIZER, make_run
from tests.trainer.test_explain import DOCUMENTS, dataset
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.steps import steps as mixture_steps
from tokenizer.shards.layout import Manifest, ShardError
from trainer.__main__ import main
from trainer.data.batches import Batch, Data, Prefetch
from trainer.data.read_ahead import STEPS, RemoteShardSet
from trainer.data.remote import fetch_shards


@pytest.fixture
def there(s3, bucket, tmp_path, monkeypatch) -> tuple[Path, str]:
    """(the folder of a run on disk, the URL of its copy in a bucket)"""
    monkeypatch.setenv("TOKENMILL_SHARDS", str(tmp_path / "copy"))
    return make_run(tmp_path / "store"), uploaded(tmp_path / "store", bucket)


def uploaded(folder: Path, bucket: str) -> str:
    """Copy a store into a bucket. Returns the URL of its run."""
    store = Store(f"{bucket}/deep/store")
    for path in Store(folder).list(""):
        store.write(path, (folder / path).read_bytes())
    return f"{store.root}/runs/toy"


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_the_same_losses_and_one_download(there, s3_server, tmp_path, capsys):
    run, url = there
    assert main(["run", str(run), "--device", "cpu", "--stop-at", "6", "--out", str(tmp_path / "a")]) == 0
    root, _, name = url.rpartition("/runs/")
    for out, place in ((tmp_path / "b", [url]), (tmp_path / "c", [name, "--store", root])):
        s3_server.trouble(None)
        assert main(["run", *place, "--device", "cpu", "--stop-at", "6", "--out", str(out)]) == 0
        assert losses(out) == losses(tmp_path / "a") != []
        bodies = [r for r in s3_server.requests if r.method == "GET" and r.path.split("?")[0].endswith(".tokens")]
        assert len(bodies) == (8 if out.name == "b" else 0), "the second training finds them there"
    said = capsys.readouterr().out
    assert said.count("fetching 26 files of shards") == 1
    assert main(["plan", url]) == 0 and "stable" in capsys.readouterr().out


def train(place: str, out: Path, *settings: str) -> int:
    return main(["run", place, "--device", "cpu", "--stop-at", "6", "--out", str(out), *settings])


def bodies_asked(server, method: str = "GET") -> list[Any]:
    return [r for r in server.requests if r.method == method and r.path.split("?")[0].endswith(".tokens")]


def test_tokens_read_ahead_give_the_losses_of_tokens_copied(there, s3_server, tmp_path, capsys):
    run, url = there
    assert train(str(run), tmp_path / "a") == 0
    s3_server.trouble(None)
    assert train(url, tmp_path / "b", "--set", "fetch=ahead") == 0
    assert losses(tmp_path / "b") == losses(tmp_path / "a") != []
    assert not list((tmp_path / "copy").rglob("split=train/*.tokens")), "the tokens to train on stay in the bucket"
    assert list((tmp_path / "copy").rglob("split=val/*.tokens"))
    assert "stay in s3://" in capsys.readouterr().out
    assert main(["soak", url, "--out", str(tmp_path / "c"), "--steps", "4", "--set", "fetch=ahead"]) == 0


def test_tokens_are_read_ahead_where_the_disk_is_too_small_for_them(there, tmp_path, monkeypatch, capsys):
    _, url = there
    monkeypatch.setattr("trainer.data.remote.shutil.disk_usage", lambda p: type("Usage", (), {"free": 40_000})())
    assert train(url, tmp_path / "a", "--set", "fetch=all") == 2
    assert "train.fetch to ahead" in capsys.readouterr().err
    assert train(url, tmp_path / "a") == 0
    assert not list((tmp_path / "copy").rglob("split=train/*.tokens"))


def remote_data(run: Path, url: str, tmp_path: Path) -> tuple[Data, Data]:
    """Return the training data of a run on disk, and that of its copy in a bucket, whose tokens are read from there."""
    curriculum = Curriculum.load(run / "curriculum.json")
    root = url.rpartition("/runs/")[0]
    store = fetch_shards(root, curriculum, lambda _text: None, "ahead")
    return Data(curriculum, run.parent.parent), Data(curriculum, store, source=root)


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name))
               for name in ("tokens", "targets", "positions", "stream"))


@pytest.mark.parametrize("masked", [(), ("web",)])
def test_packed_rows_read_ahead_equal_those_on_a_disk(s3, bucket, s3_server, tmp_path, monkeypatch, masked):
    monkeypatch.setenv("TOKENMILL_SHARDS", str(tmp_path / "copy"))
    phases = [{"name": "a", "until": "50%", "sequence": 64, "batch": 320, "mix": {"web": 70, "code": 30}},
              {"name": "b", "until": "100%", "batch": 192}]
    run = make_run(tmp_path / "store", phases=phases, total=3840, documents=200, masked=masked, packed=("web",))
    url = uploaded(tmp_path / "store", bucket)
    here, there = remote_data(run, url, tmp_path)
    assert [shards.packed is not None for shards in there.train] == [False, True]
    assert there.reads_ahead and not list((tmp_path / "copy").rglob("split=train/*.tokens"))
    for size in (1, 2):
        for rank in range(size):
            steps, documents = list(mixture_steps(here.curriculum)), 0
            for step, batch in Prefetch(there, steps, rank, size):
                assert batch is not None and equal(batch, here.step(step.first, step.batch, rank, size))
                documents += int((batch.positions == 0).sum()) - batch.rows
            assert documents > 0
            assert not any(shards._coming for shards in there.train), "all that was requested has been read"
    assert train(url, tmp_path / "a", "--set", "fetch=ahead") == train(str(run), tmp_path / "b") == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != []


@pytest.mark.slow
@pytest.mark.parametrize("masked", [(), ("web",)])
def test_every_range_of_tokens_is_requested_once_and_then_forgotten(s3, bucket, s3_server, tmp_path, monkeypatch,
                                                                      masked):
    monkeypatch.setenv("TOKENMILL_SHARDS", str(tmp_path / "copy"))
    run = make_run(tmp_path / "store", masked=masked)
    url = uploaded(tmp_path / "store", bucket)
    here, there = remote_data(run, url, tmp_path)
    for size in (1, 2):
        for rank in range(size):
            s3_server.trouble(None)
            steps = list(mixture_steps(here.curriculum))
            for step, batch in Prefetch(there, steps, rank, size):
                assert batch is not None and equal(batch, here.step(step.first, step.batch, rank, size))
                requested = sum(len(shards._coming) for shards in there.train)
                assert requested <= (STEPS + 2) * 2 * 2 * step.batch
            assert not any(shards._coming for shards in there.train), "all that was requested has been read"
            rows = sum(len(range(rank, step.batch, size)) for step in steps)
            assert len(bodies_asked(s3_server)) <= rows + 2 * sum(len(s.manifest.shards) for s in there.train)


def test_requests_for_skipped_steps_and_before_a_rewind_are_not_kept(there, tmp_path):
    here, data = remote_data(there[0], there[1], tmp_path)
    steps = list(mixture_steps(here.curriculum))
    batches = iter(Prefetch(data, steps, 0, 1, lambda number: "bad" if number == 3 else None))
    read = [next(batches) for _ in range(4)]
    assert [batch is None for _, batch in read] == [False, False, True, False]
    batches.close()
    for step, batch in Prefetch(data, steps[1:], 0, 1):
        assert batch is not None and equal(batch, here.step(step.first, step.batch, 0, 1))
    assert not any(shards._coming for shards in data.train)


def test_a_damaged_range_is_requested_again_and_then_refused_by_its_byte(there, tmp_path, monkeypatch):
    here, data = remote_data(there[0], there[1], tmp_path)
    [step, *_] = mixture_steps(here.curriculum)
    request, calls = RemoteShardSet._request, []

    def flipped(times: int):
        def damaged(self, wanted):
            bytes_read = request(self, wanted)
            calls.append(wanted[:3])                                    # a request may be for several samples
            return bytes([bytes_read[0] ^ 1]) + bytes_read[1:] if calls.count(wanted[:3]) <= times else bytes_read
        return damaged

    monkeypatch.setattr(RemoteShardSet, "_request", flipped(1))
    assert equal(data.step(step.first, step.batch, 0, 1), here.step(step.first, step.batch, 0, 1))
    rows = {wanted: calls.count(wanted) - 1 for wanted in calls}        # samples in the same blocks ask for them again
    assert all(1 <= count <= step.batch for count in rows.values()) and 1 in rows.values()
    calls.clear()
    monkeypatch.setattr(RemoteShardSet, "_request", flipped(2))
    with pytest.raises(ShardError, match=r"\.tokens: damaged at byte"):
        data.step(step.first, step.batch, 0, 1)


def test_a_bucket_that_fails_ends_the_training_with_a_line(there, s3_server, tmp_path, capsys):
    _, url = there
    assert train(url, tmp_path / "a", "--set", "fetch=ahead") == 0
    store = Store(url.rpartition("/runs/")[0])
    for body in [p for p in store.list("shards") if p.endswith(".tokens") and "split=train" in p]:
        data = store.read(body)
        store.write(body, data[:len(data) // 2])
    assert train(url, tmp_path / "b", "--set", "fetch=ahead") != 0
    error = capsys.readouterr().err
    assert "the manifest says" in error and "Traceback" not in error
    for body in [p for p in store.list("shards") if p.endswith(".tokens") and "split=train" in p]:
        store.remove(body)
    assert train(url, tmp_path / "c", "--set", "fetch=ahead") != 0
    error = capsys.readouterr().err
    assert ".tokens: missing" in error and "Traceback" not in error


def test_its_documents_are_looked_up_and_its_data_verified_where_they_lie(s3, bucket, s3_server, tmp_path, monkeypatch,
                                                                          capsys):
    """`explain` and `verify` say of a URL what they say of the folder it is a copy of, and fetch no shards for it."""
    monkeypatch.setenv("TOKENMILL_SHARDS", str(tmp_path / "copy"))
    run = make_run(tmp_path / "store", documents=DOCUMENTS, total=1280)
    tokenizer = tmp_path / "store" / TOKENIZER["path"]
    tokenizer.parent.mkdir(parents=True)
    tokenizer.write_text("{}")
    made = json.loads((run / "curriculum.json").read_text())
    made["tokenizer"]["sha256"] = hashlib.sha256(b"{}").hexdigest()
    dataset(tmp_path / "store", "web", ("ab" * 32,))
    for manifest in (tmp_path / "store").rglob("shards.json"):
        found = Manifest.from_json(json.loads(manifest.read_text()), "x")
        found = replace(found, tokenizer=made["tokenizer"]["sha256"])
        found = replace(found, sha256=found.identity())
        manifest.write_text(found.dumps())
        for stream in made["streams"]:
            if stream["name"] == found.stream:
                stream["sha256" if found.split == "train" else "val_sha256"] = found.sha256
    del made["sha256"]
    Curriculum.from_json(made).save(run / "curriculum.json")
    store = Store(f"{bucket}/deep/store")
    for path in Store(tmp_path / "store").list(""):
        store.write(path, (tmp_path / "store" / path).read_bytes())
    url, out = f"{store.root}/runs/toy", ("--out", str(tmp_path / "out"))
    assert main(["run", str(run), *out, "--device", "cpu", "--stop-at", "4", "--quiet"]) == 0
    capsys.readouterr()

    def said(status: int, command: str, *more: str) -> str:
        assert main([command, url, *more, *out]) == status
        there = capsys.readouterr().out
        assert main([command, str(run), *more, *out]) == status
        here = capsys.readouterr().out
        assert there.replace(url.rpartition("/runs/")[0].removeprefix("s3://"), str(tmp_path / "store")) == here
        return there

    s3_server.trouble(None)
    found = json.loads(said(0, "explain", "3", "--worst", "5", "--json"))
    assert any(d.get("dataset") == "web-clean" and d["text"] and d["signals"]
               for r in found["rows"] for d in r["documents"])
    listed = tmp_path / "ids.txt"
    listed.write_text(found["rows"][0]["documents"][0]["id"])
    said(0, "explain", "3")
    assert not [r for r in s3_server.requests if r.path.split("?")[0].endswith((".tokens", ".ends"))]
    assert not list((tmp_path / "copy").rglob("*.tokens"))
    assert "hash chain" in said(0, "verify")
    assert "every byte" in said(0, "verify", "--shards")
    assert "SEEN" in said(1, "verify", "--against", str(listed))

    body = next(p for p in store.list("shards") if p.endswith(".tokens") and "split=train" in p)
    data = store.read(body)
    store.write(body, bytes([data[0] ^ 1]) + data[1:])
    assert main(["verify", url, "--shards", *out]) == 1
    assert f"{body.rpartition('/')[2]}: sha256 differs" in capsys.readouterr().out
    store.remove(body)
    assert main(["verify", url, "--shards", *out]) == 1
    assert f"{body.rpartition('/')[2]}: missing" in capsys.readouterr().out
    for path in [p for p in store.list("shards") if p.endswith(".parquet")]:
        store.remove(path)
    assert main(["explain", url, "3", *out]) == 1 and ".parquet: missing" in capsys.readouterr().err


def test_what_cannot_be_trained_on_says_why(there, s3, tmp_path, capsys, monkeypatch):
    _, url = there
    store = Store(url.rpartition("/runs/")[0])

    def refused(*args: str) -> str:
        assert main(["run", *args, "--device", "cpu", "--stop-at", "1"]) == 2
        return capsys.readouterr().err
    assert "has no place for checkpoints; give one with --out" in refused(url)
    assert "checkpoints and metrics need a file system" in refused(url, "--out", "s3://bucket/out")
    out = ("--out", str(tmp_path / "out"))
    assert "/runs/nothing/curriculum.json: no such file" in refused(url.replace("toy", "nothing"), *out)
    assert "give STORE/runs/RUN" in refused("s3://bucket/toy", *out)
    body = next(p for p in store.list("shards") if p.endswith(".tokens"))
    data = store.read(body)
    store.write(body, bytes([data[0] ^ 1]) + data[1:])
    assert f"{body}: damaged, its sha256" in refused(url, *out)
    store.remove(body)
    assert "a shard set the curriculum pins is not there" in refused(url, *out)
    store.write(body, data)
    with monkeypatch.context() as m:
        m.setattr("trainer.data.remote.shutil.disk_usage", lambda p: type("Usage", (), {"free": 10, "total": 10})())
        m.setenv("TOKENMILL_SHARDS", str(tmp_path / "empty"))          # the other folder may have some files already
        assert "set TOKENMILL_SHARDS to a folder on a larger disk" in refused(url, *out)
    assert main(["run", url, *out, "--device", "cpu", "--stop-at", "1"]) == 0


def test_a_copy_that_lost_its_end_is_fetched_again(there, tmp_path, capsys):
    """What a power cut leaves of a file that was not yet on disk."""
    _, url = there
    out = ("--out", str(tmp_path / "out"), "--device", "cpu", "--stop-at", "1")
    assert main(["run", url, *out]) == 0
    body = next((tmp_path / "copy").rglob("*.tokens"))
    data = body.read_bytes()
    body.write_bytes(data[:-100])
    capsys.readouterr()
    assert main(["run", url, *out]) == 0, capsys.readouterr().err
    assert body.read_bytes() == data and "fetching 1 files of shards" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["../../escaped", "/escaped"])
def test_a_curriculum_of_a_stranger_writes_nothing_outside_the_copy(there, tmp_path, capsys, path):
    _, url = there
    root, _, name = url.rpartition("/runs/")
    store = Store(root)
    made = Curriculum.loads(store.read(f"runs/{name}/curriculum.json"), "x").to_json()
    place = path if path.startswith("..") else f"{tmp_path}/escaped"
    for key in ("tokenizer", "streams"):
        changed = json.loads(json.dumps(made))
        if key == "tokenizer":
            changed["tokenizer"]["path"] = place
        else:
            changed["streams"][0]["train"] = place
        store.write(f"runs/{name}/curriculum.json", Curriculum.from_json(changed).dumps().encode())
        assert main(["run", url, "--device", "cpu", "--stop-at", "1", "--out", str(tmp_path / "out")]) == 2
        assert "names a file outside its store" in capsys.readouterr().err
    assert not list(tmp_path.rglob("escaped*"))


@pytest.mark.parametrize("place", [["s3://AKIA:hush/it@bucket/store/runs/r"], ["r", "--store", "s3://me@bucket/hush"]])
def test_secrets_in_a_url_are_refused_and_not_repeated(capsys, place):
    for command, *more in (["plan"], ["run", "--out", "here"], ["run"], ["slurm"]):
        assert main([command, *place, *more]) == 2
        said = capsys.readouterr().err
        assert "hush" not in said and ("leave name and password out" in said or "give one with --out" in said)


def test_its_folder_is_one_the_pipeline_can_use(tmp_path, monkeypatch):
    import os

    from pipeline.base.scratch import user_folder
    from trainer.data.remote import _local

    monkeypatch.delenv("TOKENMILL_SHARDS", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(0o002)                       # of users with a group of their own
    try:
        assert _local("s3://bucket/store").is_dir()
        assert user_folder().stat().st_mode & 0o077 == 0
    finally:
        os.umask(before)
