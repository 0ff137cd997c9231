"""The doctor lets sound trainings pass and names what is wrong with others, on real ranks."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch

from tests.trainer.processes import Forked
from tests.trainer.ranks import MODEL, one_global_seed
from tests.trainer.synthetic import make_run
from trainer.__main__ import main
from trainer.base.config import build
from trainer.loop.run import open_run
from trainer.model.config import ModelConfig
from trainer.model.transformer import Transformer
from trainer.parallel.world import shard
from trainer.tools import doctor


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("store"), model={**MODEL, "layers": 3})


@pytest.mark.slow
def test_a_sound_machine_passes(run, capfd, monkeypatch):
    monkeypatch.setattr("trainer.launch.local.subprocess.Popen", Forked)
    assert main(["doctor", str(run), "--device", "cpu", "--set", "parallel.tensor=2"]) == 0
    said = capfd.readouterr().out
    lines = {line[8:30].strip(): line for line in said.splitlines()[:-1]}
    assert list(lines) == ["torch", "devices", "shards", "checkpoint folder", "memory", "disk space", "initial values",
                           "shards differ", "copies agree", "batches", "losses", "gradient norms", "checkpoint"]
    assert all(line.startswith("ok ") for line in lines.values()), said
    assert "24 parameters, identical on 1 and 2 ranks" in lines["initial values"]      # of two of the three layers
    assert "3 steps of 2 layers" in lines["losses"]
    assert said.endswith("all 13 checks passed\n")
    assert [path.name for path in (run / "train").iterdir()] == []                     # nothing is left behind


@pytest.fixture
def seen(run, tmp_path):
    """The results that ranks write in a sound training. A test changes one of them."""
    steps = {"loss": [4.0, 3.9, 3.8, 3.7], "grad_norm": [1.0, 1.1, 1.2, 1.3]}
    base = {"init": {"embed.weight": "a1", "norm.weight": "b2"}, "twins": [], "unequal": [],
            "batches": {"0": "c3", "1": "d4"}, "steps": steps}
    return {"rank.1.0": {**base, "resumed": 3.7}, "rank.2.0": {**base, "batches": {"0": "c3"}},
            "rank.2.1": {**base, "batches": {"1": "d4"}, "steps": {"loss": [], "grad_norm": []}}}


def compared(seen, tmp_path, capsys) -> list[str]:
    """Run the comparison over the results `seen`, and return the names of the checks that fail."""
    for name, found in seen.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    options = mock.Mock(ranks=2, arguments=["doctor", "cpu"], device="cpu")             # a run of this name
    checks = doctor.Checks()
    with mock.patch("trainer.launch.local.launch", return_value=0) as launch:
        doctor.compare(checks, options, tmp_path, "cpu", "fp32")
    assert all(call.args[0][:4] == ["doctor", "cpu", "--device", "cpu"] for call in launch.call_args_list)
    failed = [line[8:30].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("failed")]
    assert (checks.done, checks.failed) == (7, len(failed))
    return failed


@pytest.mark.parametrize(("who", "what", "value", "failed"), [
    ("rank.2.1", None, None, []),
    ("rank.2.1", "init", {"embed.weight": "a1", "norm.weight": "ff"}, ["initial values"]),
    ("rank.2.1", "init", {"embed.weight": "a1"}, ["initial values"]),
    ("rank.2.0", "twins", ["embed.weight"], ["shards differ"]),
    ("rank.2.1", "unequal", ["norm.weight"], ["copies agree"]),
    ("rank.2.1", "batches", {"1": "ee"}, ["batches"]),
    ("rank.2.1", "batches", {}, ["batches"]),                                # a sample that nobody reads
    ("rank.2.1", "batches", {"1": "d4", "0": "ee"}, ["batches"]),            # one that two ranks read differently
    ("rank.2.0", "steps", {"loss": [4.0, 3.9, 3.801], "grad_norm": [1.0, 1.1, 1.2]}, ["losses"]),
    ("rank.2.0", "steps", {"loss": [4.0, 3.9, 3.8], "grad_norm": [2.0, 2.2, 2.4]}, ["gradient norms"]),
    ("rank.2.0", "steps", {"loss": [4.0], "grad_norm": [1.0]}, ["losses", "gradient norms"]),
    ("rank.1.0", "resumed", 3.9, ["checkpoint"])])
def test_what_differs_is_named(seen, tmp_path, capsys, who, what, value, failed):
    if what:
        seen[who] = {**seen[who], what: value}
    assert compared(seen, tmp_path, capsys) == failed


def test_ranks_that_end_with_an_exit_code_are_a_failure(tmp_path, capsys):
    options, checks = mock.Mock(ranks=2, arguments=["doctor", "run"]), doctor.Checks()
    with mock.patch("trainer.launch.local.launch", return_value=3):
        doctor.compare(checks, options, tmp_path, "cpu", "fp32")
    assert (checks.done, checks.failed) == (1, 1)
    said = capsys.readouterr().out
    assert said.startswith("failed  2 ranks ") and "ended with code 3" in said


def test_a_folder_that_cannot_be_written_and_one_without_hard_links(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    checks = doctor.Checks()
    assert doctor.output(checks, open_run(str(run), None, str(tmp_path / "file" / "out"), [])) is None
    with mock.patch("os.link", side_effect=PermissionError(1, "Operation not permitted")):
        assert doctor.output(checks, open_run(str(run), None, str(tmp_path / "links"), [])).is_dir()
    assert (checks.done, checks.failed) == (2, 2)
    said = capsys.readouterr().out
    assert "name one you may write to with --out" in said
    assert "take a file system that has them" in said


def test_too_little_memory_is_said_before_it_is_wanted(run, capsys):
    checks = doctor.Checks()
    large = ["model={preset: 8b, layers: 1000}", "micro_batch=16384"]
    doctor.memory(checks, open_run(str(run), None, None, large), 1, "cpu")
    assert checks.failed >= 1
    assert "train.parallel.checkpointing" in capsys.readouterr().out


def test_one_rank_has_no_twins_but_equal_matrices_are_not_mistaken(run, alone):
    with torch.device("meta"):
        model = Transformer(build(ModelConfig, MODEL, "model"), 97)
    shard(model, alone, torch.float32, False)
    one_global_seed(model, model.config, 1)
    assert doctor.copies_and_twins(model, alone) == {"twins": [], "unequal": []}
