"""An error in the configuration names the file and the key, and suggests the key that was probably meant."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import trainer.optim
from pipeline.base.quantities import parse_count
from pipeline.recipe.token_models import PhaseSettings
from tests.trainer.synthetic import make_run
from tokenizer.mixture import curriculum, resolve
from trainer.__main__ import main
from trainer.base.config import ConfigError, build, count, keys_of, names, override, read_train
from trainer.loop.config import TrainConfig
from trainer.loop.run import open_run, unequal
from trainer.optim.config import kinds
from trainer.optim.schedule import Schedule, ScheduleConfig

MODEL = {"preset": "tiny"}


@pytest.mark.parametrize(("text", "value"), [("16k", 16000), ("0.5M", 500_000), ("20B", 20 * 10**9), (7, 7),
                                             ("4096", 4096), ("1e3", 1000), ("1.5T", 1_500_000_000_000),
                                             ("2.01M", 2_010_000), ("20b", 20 * 10**9), ("1G", 10**9), ("0", 0),
                                             ("1,000", 1000)])
def test_counts(text, value):
    assert count(text) == value


@pytest.mark.parametrize("text", ["16q", "", "1.5", True, "-3", 0.5])
def test_what_is_no_count(text):
    with pytest.raises(ValueError, match=r"count|number"):
        count(text)


@pytest.mark.parametrize(("train", "message"), [
    ({"modle": MODEL}, r"train\.modle: unknown key; did you mean 'model'\?"),
    ({"model": MODEL, "optimizer": {"learning_rate": 1}},
     r"train\.optimizer\.learning_rate: unknown key.*known keys: kind, lr"),
    ({"model": {"preset": "135M"}}, r"train\.model\.preset: unknown preset '135M'; did you mean '135m'\?"),
    ({"model": {"preset": "tiny", "layers": "two"}}, r"train\.model\.layers: expected a whole number, got 'two'"),
    ({"model": {"preset": "tiny", "layers": 2.5}}, r"train\.model\.layers: expected a whole number"),
    ({"model": {"preset": "tiny", "tie": "yes"}}, r"train\.model\.tie: expected true or false"),
    ({"model": {"preset": "tiny", "heads": 3}}, r"train\.model: heads \(3\) must be a multiple of kv_heads"),
    ({"model": {"layers": 2}}, r"train\.model: width, heads must be given"),
    ({"model": MODEL, "optimizer": {"kind": ["adam"]}}, r"optimizer\.kind: \['adam'\] is not one of"),
    ({"model": MODEL, "optimizer": {"kind": "adam"}},
     r"optimizer\.kind: 'adam' is not one of adafactor, adamw, .*; did you mean 'adamw'\?"),
    ({"model": MODEL, "optimizer": {"betas": [0.9]}}, r"optimizer\.betas: expected 2 values, got 1"),
    ({"model": MODEL, "optimizer": {"lr": 0}}, r"train\.optimizer: lr"),
    ({"model": MODEL, "optimizer": {"lr": "nan"}}, r"train\.optimizer\.lr: expected a number .*, got 'nan'"),
    ({"model": MODEL, "clip": math.nan}, r"train\.clip: expected a number \(20% is 0\.2\), got nan"),
    ({"model": MODEL, "optimizer": {"lr": math.inf}}, r"train\.optimizer\.lr: expected a number .*, got inf"),
    ({"model": MODEL, "schedule": {"warmup": "fast"}}, r"train\.schedule: warmup: 'fast' is not a count"),
    ({"model": MODEL, "schedule": {"shape": "sqrt"}}, r"shape: 'sqrt' is not one of.*did you mean '1-sqrt'\?"),
    ({"model": MODEL, "micro_batch": "16q"}, r"train\.micro_batch: '16q' is not a count"),
    ({"model": MODEL, "precision": "fp16"}, r"train\.precision: 'fp16' is not one of 'auto', 'fp32', 'bf16'"),
    ({"model": 3}, r"train\.model: expected a mapping"),
    ({}, r"train: model must be given"),
])
def test_errors(train, message):
    with pytest.raises(ConfigError, match=message):
        build(TrainConfig, train, "recipe.yaml: train")


def test_presets_yield_to_other_keys_and_numbers_may_be_strings():
    text = "{model: {preset: tiny, layers: 5}, optimizer: {lr: 1e-3}, micro_batch: 8k}"
    config = build(TrainConfig, yaml.safe_load(text), "r")
    assert (config.model.layers, config.model.width) == (5, 64)
    assert config.optimizer.lr == 1e-3          # YAML 1.1 gives '1e-3' as text
    assert config.micro_batch == 8000


def test_overrides():
    train: dict = {"model": {"preset": "tiny"}}
    override(train, "model.layers=7")
    override(train, "train.optimizer.lr=0.5")
    assert train == {"model": {"preset": "tiny", "layers": 7}, "optimizer": {"lr": 0.5}}
    for bad in ("nonsense", "=3", "model.preset.x=1", "a=[1"):
        with pytest.raises(ConfigError, match="--set"):
            override(train, bad)


def test_command_line_says_what_is_wrong(tmp_path, capsys):
    run = make_run(tmp_path, documents=60, total=960)
    cases = [
        (["run", str(tmp_path / "nowhere")], "curriculum.json: no such file"),
        (["run", str(run), "--set", "model.layerz=3"], "train.model.layerz: unknown key; did you mean 'layers'?"),
        (["run", str(run), "--gpus", "2"], "need --address"),
        (["run", str(run), "--device", "cuda"], "torch sees no CUDA device"),
        (["plan", str(run), "--set", "schedule.kind=cosine"], "use kind: wsd"),
    ]
    for arguments, message in cases:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert main(["fly"]) == 2
    recipe = run / "recipe.yaml"
    for none in ("sources: {}", "train: {}"):                        # the second is how a run keeps a recipe without
        recipe.write_text(none)
        assert main(["plan", str(run)]) == 2
        assert "recipe.yaml: no `train:` section" in capsys.readouterr().err
    (run / "curriculum.json").write_text('{"version": 9}')
    assert main(["plan", str(run)]) == 2
    assert "curriculum.json" in capsys.readouterr().err


def test_what_is_switched_on_or_off_at_a_resume_is_named():
    old, new = {"stability": {"rewind": None}}, {"stability": {"rewind": {"skip": 4}}}
    assert "train.stability.rewind.skip: checkpoint None, now 4" in unequal(old, new)
    assert "train.stability.rewind.skip: checkpoint 4, now None" in unequal(new, old)
    assert unequal(new, new) == []


@pytest.mark.parametrize(("gpus", "kind", "told"), [
    (8, "cuda", "one of 8 GPUs is used; --ranks 8 uses all of them\n"), (1, "cuda", ""), (8, "cpu", "")])
def test_who_leaves_gpus_idle_is_told(tmp_path, monkeypatch, capsys, gpus, kind, told):
    run = make_run(tmp_path, documents=60, total=960)
    here = SimpleNamespace(size=1, first=True, device=torch.device(kind))
    monkeypatch.setattr("trainer.parallel.world.world", lambda _device: contextlib.nullcontext(here))
    monkeypatch.setattr("trainer.loop.train.train", lambda *_args, **_named: {})
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert main(["run", str(run)]) == 0
    assert capsys.readouterr().out == told


def test_run_by_name_in_a_store_and_plan(tmp_path, capsys):
    make_run(tmp_path, documents=60, total=960)
    assert open_run("toy", str(tmp_path), None, []).out == tmp_path / "runs" / "toy" / "train"
    assert main(["plan", "toy", "--store", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "anneal" in text
    assert "12,588 parameters" in text
    assert "never gets to the peak" not in text and "sequences" not in text
    assert main(["plan", "toy", "--store", str(tmp_path), "--ranks", "3"]) == 0
    assert "phase stable: a batch of 5 sequences does not divide by 3: ranks with 2 are waited for, 17% of the time " \
        in capsys.readouterr().out
    assert main(["plan", "toy", "--store", str(tmp_path), "--ranks", "16"]) == 0
    assert "phase stable: a batch of 5 sequences leaves 11 ranks idle" in capsys.readouterr().out
    keys = ("parallel.tensor=2", "model.heads=2", "model.kv_heads=2", "model.ffn=64")
    divided = [x for key in keys for x in ("--set", key)]
    assert main(["plan", "toy", "--store", str(tmp_path), *divided]) == 2             # by more than there are ranks
    assert "train.parallel.tensor: 2 does not divide 1 ranks" in capsys.readouterr().err
    assert main(["plan", "toy", "--store", str(tmp_path), "--set", "schedule.warmup=1M"]) == 0
    assert "warm-up 1M tokens: longer than the training, which never gets to the peak" in capsys.readouterr().out
    assert not (tmp_path / "runs" / "toy" / "train").exists()        # a plan writes nothing


def test_the_demo_recipe_and_its_promises():
    """At most 3 M parameters beside the embedding and 2 M tokens, every key of its `train:` known."""
    recipe = Path(__file__).resolve().parents[2] / "demo" / "recipe.yaml"
    config = build(TrainConfig, read_train(recipe), "demo/recipe.yaml: train")
    document = yaml.safe_load(recipe.read_text())
    vocab = document["tokenizer"]["train"]["vocab"]
    assert config.model.parameters(vocab) - vocab * config.model.width <= 3e6
    assert count(document["curriculum"]["total"]) <= 2e6


@pytest.mark.parametrize("content", [b"train: {model: \xff}", b"train: [1", b"a: b: c"])
def test_a_recipe_that_is_not_yaml_is_named_in_one_line(tmp_path, content):
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="not YAML") as caught:
        read_train(tmp_path / "recipe.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["2.01M", "20b", "0.5m", "1G", "1,000", "1_000", " 3 M ", "1e3", 7, 2e6, "1,5M", "1.5",
                                  "", "1/2", "1e99", "16q", True, None, -1, "0.0005k", "9" * 50])
def test_recipe_curriculum_and_trainer_read_the_same_numbers(text):
    def read(parse, *more):
        try:
            return parse(text, *more)
        except ValueError:
            return None

    assert read(count) == read(parse_count) == read(resolve.parse_count, "key")


def test_keys_of_a_config_are_those_of_the_mappings_in_it_too():
    known = keys_of(TrainConfig, "train")
    assert "log_every" in known["train"]
    assert known["train.model"][0] == "preset"
    assert "async" in known["train.checkpoint"]                          # the field is async_
    assert known["train.stability.rewind.trigger"] == ["skips", "within", "loss_above", "for"]
    assert set(known["train.optimizer"]) == {key for kind in kinds().values() for key in names(kind.load())}


def test_an_optimiser_is_one_file_of_its_folder(tmp_path, monkeypatch):
    """Settings, presence in the recipe's check and the optimiser itself, from a file that no table names."""
    (tmp_path / "sign.py").write_text("""
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from trainer.optim.config import OptimizerConfig


@dataclass(frozen=True)
class SignConfig(OptimizerConfig):
    note: ClassVar[str] = "no setting"
    kind: Literal["sign"] = "sign"
    slack: float = 0.5

    def build(self, groups, device):
        return torch.optim.SGD(groups, lr=self.lr)
""")
    monkeypatch.setattr(trainer.optim, "__path__", [*trainer.optim.__path__, str(tmp_path)])
    kinds.cache_clear()
    try:
        assert "slack" in keys_of(TrainConfig, "train")["train.optimizer"]
        config = build(TrainConfig, {"model": MODEL, "optimizer": {"kind": "sign", "slack": 1}}, "r").optimizer
        assert (config.kind, config.slack) == ("sign", 1.0)
        with pytest.raises(ConfigError, match=r"r\.optimizer\.slack: belongs to kind: sign, not to adamw"):
            build(TrainConfig, {"model": MODEL, "optimizer": {"slack": 1}}, "r")
    finally:
        kinds.cache_clear()


def test_phases_may_have_the_rates_that_the_schedule_knows():
    for lr in curriculum.RATES:
        assert PhaseSettings(name="p", lr=lr).lr == lr
        Schedule(ScheduleConfig(), [SimpleNamespace(name="p", lr=lr, tokens=100, extra=False)], 1e-3)
    with pytest.raises(ConfigError, match="lr: 'cosine' is not known"):
        Schedule(ScheduleConfig(), [SimpleNamespace(name="p", lr="cosine", tokens=100, extra=False)], 1e-3)


def test_steps_to_pass_over_lie_in_the_curriculum(tmp_path):
    run = make_run(tmp_path, documents=60, total=960)
    steps = open_run(str(run), None, None, []).curriculum.steps
    assert open_run(str(run), None, None, [f"skip=[[{steps}, {steps + 9}]]"]).config.skip == ((steps, steps + 9),)
    with pytest.raises(ConfigError, match=rf"train\.skip: \[{steps + 1}, 99\]: the curriculum has {steps} steps"):
        open_run(str(run), None, None, [f"skip=[[{steps + 1}, 99]]"])
