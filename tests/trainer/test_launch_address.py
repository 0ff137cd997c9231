"""The option `--address` of a training: to which clusters it connects, and what it says about others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.gcs import gcs
from tests.trainer.synthetic import make_run
from trainer.__main__ import main, parser
from trainer.launch.start import forwarded

TOKEN = "the-token-of-the-cluster"


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run to train on, in an environment without a token for Ray."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")                     # to be put back, whatever `use_token` makes of it
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return make_run(tmp_path, documents=60, total=960)


def test_without_a_size_the_remedy_is_named(run, capsys):
    assert main(["run", str(run), "--address", "auto"]) == 2
    assert "--address needs --gpus N" in capsys.readouterr().err
    assert main(["run", str(run), "--insecure-local"]) == 2
    assert "need --address" in capsys.readouterr().err


@pytest.mark.parametrize(("wants", "ours", "said"), [
    (None, TOKEN, "anybody who reaches it can run code on it"), (TOKEN, None, "this shell has none"),
    (TOKEN, "another-one-than-that", "does not accept our token")])
def test_a_cluster_that_is_not_to_be_trusted_gets_nothing(run, monkeypatch, capsys, wants, ours, said):
    """Neither the training nor, where it does not ask for one, our token."""
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("attached"))
    monkeypatch.setattr("pipeline.cluster.jobs.CONNECT_S", 300.0)         # it answers from this very process
    if ours is not None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", ours)
    with gcs(wants) as (address, there):
        assert main(["run", str(run), "--address", address, "--ranks", "1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and (ours or "another-one") not in err
    assert there.seen == ([None] if wants is None or ours is None else [None, f"Bearer {ours}"])


@pytest.mark.parametrize(("address", "said"), [("http://h:8265", "is a job server"), ("ray://h:10001", "Ray Client"),
                                               ("head", "give HOST:6379"), ("127.0.0.1:1", "nothing answers there")])
def test_what_is_no_cluster_is_named(run, capsys, address, said):
    assert main(["run", str(run), "--address", address, "--ranks", "1"]) == 1
    assert said in capsys.readouterr().err


def test_without_ray_the_remedy_is_named(run, monkeypatch, capsys):
    import pipeline.cluster

    monkeypatch.delitem(sys.modules, "pipeline.cluster.jobs", raising=False)
    monkeypatch.delattr(pipeline.cluster, "jobs", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with gcs(TOKEN) as (address, _):
        assert main(["run", str(run), "--address", address, "--ranks", "1"]) == 1
    assert "pip install 'tokenmill[pipeline]'" in capsys.readouterr().err


@pytest.mark.parametrize("remote", [False, True])
def test_a_rank_gets_the_settings_and_paths_that_hold_on_any_node(tmp_path, monkeypatch, remote):
    """…and none of the options that choose the cluster."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    store = "s3://bucket/store" if remote else "store"
    options = parser("run").parse_args([
        "run", f"{store}/runs/r" if remote else "run", "--store", store, "--out", "out", "--address", "h:1",
        "--gpus", "4", "--least", "2", "--ship-code",
        "--set", "optimizer.lr=0.1", "--set", "seed=2", "--stop-at", "7", "--quiet"])
    assert forwarded(options) == [
        "run", f"{store}/runs/r" if remote else str(tmp_path / "run"), "--device", "cuda",
        "--store", store if remote else str(tmp_path / "store"), "--out", str(tmp_path / "out"),
        "--set", "optimizer.lr=0.1", "--set", "seed=2", "--stop-at", "7", "--quiet"]
    assert forwarded(parser("run").parse_args(["run", "r", "--address", "h:1", "--ranks", "2"])) == [
        "run", "r", "--device", "auto"]


@pytest.mark.parametrize("command", [["run"], ["slurm", "--nodes", "2", "--gpus-per-node", "4"]])
def test_checkpoints_of_a_run_in_object_storage_need_a_folder(command, capsys):
    assert main([command[0], "s3://bucket/store/runs/r", *command[1:]]) == 2
    assert "give one with --out, a folder that" in capsys.readouterr().err
