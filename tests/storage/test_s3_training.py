"""Training on a run in object storage: the same numbers as on a disk, from shards fetched once and checked."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pipeline.store.fs import Store
from tests.trainer.synthetic import TOKENIZER, make_run
from tests.trainer.test_explain import DOCUMENTS, dataset
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.shards.layout import Manifest
from trainer.__main__ import main


@pytest.fixture
def there(s3, bucket, tmp_path, monkeypatch) -> tuple[Path, str]:
    """(folder of a run on disk, URL of its copy in a bucket)."""
    monkeypatch.setenv("TOKENMILL_SHARDS", str(tmp_path / "copy"))
    run = make_run(tmp_path / "store")
    store = Store(f"{bucket}/deep/store")
    for path in Store(tmp_path / "store").list(""):
        store.write(path, (tmp_path / "store" / path).read_bytes())
    return run, f"{store.root}/runs/toy"


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
