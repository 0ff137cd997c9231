"""Short trainings that are compared: mixtures annealed from one checkpoint, changed settings, and the confidence
intervals of both."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.processes import forked_arms
from tests.trainer.synthetic import language, make_run, write_shards
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order
from trainer.__main__ import main
from trainer.checkpoint import checkpoints as ckpt
from trainer.loop.run import open_run
from trainer.observe.metrics import read
from trainer.tools.anneal import with_candidates
from trainer.tools.arm_statistics import contrasts, quantile
from trainer.tools.arm_table import ALL, BITS, NATS, RUN, lines, measured, table

SEQUENCE = {"sequence": 32, "batch": 160}
PHASES = [{"name": "stable", "until": "100%", **SEQUENCE, "mix": {"web": 50, "code": 50}}]


# -- the interval ------------------------------------------------------------------------------------------------------
def test_with_two_arms_it_is_the_paired_t_test():
    a, b = [3.0, 3.4, 2.9, 3.3], [2.8, 3.1, 2.8, 3.0]
    d = np.array(b) - np.array(a)
    study = contrasts([a, b])
    nothing, delta = study.deltas
    assert nothing == 0 and delta == pytest.approx(d.mean())
    assert study.half == pytest.approx(quantile(0.975, 3) * d.std(ddof=1) / 2)
    assert study.sd == pytest.approx(d.std(ddof=1))


def test_what_seeds_do_to_all_arms_is_not_noise_and_one_seed_tells_nothing():
    same = contrasts([[1.0, 5.0, 9.0], [2.0, 6.0, 10.0]])
    assert same.deltas == [0, pytest.approx(1.0)] and same.half == pytest.approx(0.0, abs=1e-9) and same.p == [0.0]
    one = contrasts([[1.0], [2.0]])
    assert one.deltas == [0.0, 1.0] and one.half is None and one.p == []


@pytest.mark.parametrize(("arms", "seeds"), [(2, 2), (3, 2), (4, 3), (2, 30)])
def test_the_interval_holds_the_truth_in_95_of_100_cases(arms, seeds):
    rng = np.random.default_rng(arms * 100 + seeds)
    values = rng.normal(0, 0.3, (4000, arms, seeds)) + rng.normal(0, 5, (4000, 1, seeds)) \
        + np.arange(arms)[None, :, None]
    hits = [abs(study.deltas[1] - 1) <= study.half for study in map(contrasts, values)]
    assert 0.935 < np.mean(hits) < 0.965


def test_the_table_names_what_exceeds_the_noise():
    results = {"a": [{ALL: 3.0, "web": 1.0}, {ALL: 3.1, "web": 1.1}],
               "b": [{ALL: 2.0, "web": 1.05, "math": 4.0}, {ALL: 2.11, "web": 1.04, "math": 4.0}]}
    study = table(results)
    assert list(study["sources"]) == [ALL, "web"]                     # what all arms have
    assert study["sources"][ALL]["arms"]["b"]["beyond_noise"] and study["sources"][ALL]["arms"]["b"]["delta"] < 0
    assert not study["sources"]["web"]["arms"]["b"]["beyond_noise"]
    said = "\n".join(lines(study))
    assert "-0.9950*" in said and "-0.0050 " in said
    assert "one seed" in "\n".join(lines(table({n: r[:1] for n, r in results.items()})))


def test_losses_of_several_streams_are_weighted_by_their_text():
    streams = {"a": {"loss": 2.0, "targets": 300, "bits_per_byte": 1.0},
               "b": {"loss": 4.0, "targets": 100, "bits_per_byte": 4.0}}
    sources = {"both": ["a", "b"], "b": ["b"]}
    assert measured(streams, sources, NATS) == {"both": 2.5, "b": 4.0}
    bits = {"a": 600 / math.log(2), "b": 400 / math.log(2)}
    assert measured(streams, sources, BITS) == pytest.approx(
        {"both": sum(bits.values()) / (bits["a"] / 1.0 + bits["b"] / 4.0), "b": 4.0})


# -- anneal ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def annealed(tmp_path_factory):
    """A training of 40 steps with checkpoints of steps 20 and 40, and two mixtures that are annealed from step 20.
    (run, arguments of the command)"""
    top = tmp_path_factory.mktemp("anneal")
    run = make_run(top, phases=PHASES, total=6400, documents=300,
                   train={"checkpoint": {"every": 20, "keep": 3}, "schedule": {"warmup": "5%"}})
    for split, n in (("train", 100), ("val", 12)):
        write_shards(top / "shards" / "math" / f"split={split}", "math", split, language(77 + n, n, chain=5), 1)
    assert main(["run", str(run), "--quiet", "--device", "cpu"]) == 0
    (top / "web.yaml").write_text("{web: 100}")
    (top / "more-math.yaml").write_text("mix: {web: 50, math: 50}\nmax_epochs: {math: 4}\non_exhausted: error")
    command = ["anneal", str(run), "--from", "20", "--mixes", str(top / "web.yaml"), str(top / "more-math.yaml"),
               "--tokens", "3200", "--seeds", "2", "--device", "cpu"]
    with forked_arms():
        assert main(command) == 0
    return run, command


def arms_of(run: Path, kind: str) -> dict[str, Path]:
    return {p.parent.name: p.parent for p in run.glob(f"train/{kind}/**/summary.json")}


def test_arms_go_on_from_the_checkpoint_to_a_rate_of_nothing(annealed):
    run, _ = annealed
    arms = arms_of(run, "anneal")
    assert sorted(arms) == ["more-math-seed0", "more-math-seed1", "web-seed0", "web-seed1"]
    for out in arms.values():
        history = read(out / "metrics.jsonl")
        assert history[0]["event"] == "resume" and history[0]["step"] == 20
        steps = [line for line in history if line["event"] == "step"]
        assert [line["step"] for line in steps] == list(range(21, 41))
        assert steps[-1]["tokens"] == 6400                             # equal tokens, whatever the seed
        assert steps[0]["lr"] == pytest.approx(0.01, rel=0.05) and steps[-1]["lr"] == pytest.approx(0.01 / 38, rel=0.1)
        rates = [line["lr"] for line in steps]
        assert rates == sorted(rates, reverse=True)


def test_the_table_tells_which_data_helped_what(annealed, capsys):
    run, command = annealed
    before = {name: (out / "metrics.jsonl").read_bytes() for name, out in arms_of(run, "anneal").items()}
    assert main([*command, "--json"]) == 0
    study = json.loads(capsys.readouterr().out)
    assert study["arms"] == ["web", "more-math"] and study["seeds"] == 2
    math_ = study["sources"]["math"]["arms"]["more-math"]              # measured in both arms, trained in one
    assert math_["delta"] < -0.5 and math_["beyond_noise"]
    assert study["sources"]["web"]["arms"]["more-math"]["delta"] > 0
    assert list(study["sources"]) == [RUN, "code", "web", "math"]
    losses = study["sources"][RUN]["arms"]["more-math"]                # what the run reads decides
    parts = [study["sources"][name]["arms"]["more-math"]["delta"] for name in ("web", "code")]
    assert min(parts) <= losses["delta"] <= max(parts), "the text of a candidate counts for nothing"
    assert main(command) == 0
    text = capsys.readouterr().out
    assert re.search("^more-math is (worse|not told apart).* on the run: ", text, re.MULTILINE)
    assert not re.search("^more-math is .* on (web|code|math|all): ", text, re.MULTILINE)
    assert before == {name: (out / "metrics.jsonl").read_bytes() for name, out in arms_of(run, "anneal").items()}


def test_seeds_read_the_same_stretch_in_another_order(annealed):
    run, _ = annealed
    seen = {}
    for name, out in arms_of(run, "anneal").items():
        [last] = ckpt.complete(out / "checkpoints")                    # of phases that ended before none is left
        curriculum = Curriculum.from_json(last.meta["curriculum"])
        start = sum(p.samples for p in curriculum.phases if p.name == "stable")
        assert start == 100 and curriculum.samples == 200
        at = Order(curriculum).locate(start, curriculum.samples)
        seen[name] = [(s, w) for s, w in zip(at.stream.tolist(), at.window.tolist())]
    for mix in ("web", "more-math"):
        first, second = seen[f"{mix}-seed0"], seen[f"{mix}-seed1"]
        assert first != second
        assert len(set(first) & set(second)) > 0.8 * len(first)


def test_the_training_it_came_from_is_as_it_was(annealed):
    run, _ = annealed
    assert [c.step for c in ckpt.complete(run / "train" / "checkpoints")] == [20, 40]
    assert main(["run", str(run), "--quiet", "--device", "cpu"]) == 0        # nothing to do


@pytest.mark.parametrize(("change", "said"), [
    ({"--from": "30"}, "checkpoints of steps 20, 40"), ({"--tokens": "200"}, "a step has 160 tokens"),
    ({"--tokens": "many"}, "--tokens: 'many' is not a count"),
    ({"--mixes": "nowhere.yaml"}, "nowhere.yaml: No such file")])
def test_what_cannot_be_annealed_is_said(annealed, capsys, change, said):
    _, command = annealed
    command = list(command)
    for flag, value in change.items():
        command[command.index(flag) + 1] = value
    assert main(command) == 2
    assert said in capsys.readouterr().err


def test_a_mixture_may_differ_in_its_data_alone(annealed, tmp_path, capsys):
    _, command = annealed
    (tmp_path / "x.yaml").write_text("{mix: {web: 1}, lr: decay}")
    command = list(command)
    command[command.index("--mixes") + 1] = str(tmp_path / "x.yaml")
    assert main(command) == 2 and "differ in their data alone" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "name", "mix"), [
    ("math", "math", {"web": 20, "code": 20, "math": 60}),
    ("web", "web", {"web": 80, "code": 20}),
    ("both=math:2,new:1", "both", {"web": 20, "code": 20, "math": 40, "new": 20})])
def test_a_candidate_gets_60_percent_and_the_run_the_rest(annealed, word, name, mix):
    base = open_run(str(annealed[0]), None, None, [])
    mixes = with_candidates(base, 100, [word], "60%")
    assert list(mixes) == ["base", name] and mixes["base"]["mix"] == {"web": 1, "code": 1}
    assert mixes[name]["mix"] == pytest.approx(mix)
    alone = with_candidates(base, 100, ["math"], "100%")["math"]["mix"]
    assert alone == {"math": 100}


def test_a_candidate_is_annealed_beside_the_mixture_of_the_run(annealed, capsys, forked_arms):
    run, command = annealed
    command = [*command[:command.index("--mixes")], "--candidates", "math", "--tokens", "1600", "--seeds", "1",
               "--device", "cpu", "--json"]
    assert main(command) == 0
    study = json.loads(capsys.readouterr().out)
    assert study["arms"] == ["base", "math"] and study["sources"]["math"]["arms"]["math"]["delta"] < -0.3
    assert {name: cost["tokens"] for name, cost in study["costs"].items()} == {"base": 1600, "math": 1600}
    curriculum = Curriculum.load(run / "train" / "anneal" / "from20" / "math-seed0" / "curriculum.json")
    at = Order(curriculum).locate(100, curriculum.samples)
    names = [stream.name for stream in curriculum.streams]
    assert np.bincount(at.stream, minlength=3)[names.index("math")] == pytest.approx(0.6 * 50, abs=1)


@pytest.mark.slow
def test_halving_counts_the_steps_of_the_anneal_alone(annealed, tmp_path, capsys, forked_arms):
    """Of the steps from 20 to 30: a quarter ends at step 23."""
    run, command = annealed
    shutil.copytree(run.parents[1], tmp_path / "store", ignore=shutil.ignore_patterns("anneal"))
    run = tmp_path / "store" / run.relative_to(run.parents[1])
    command = ["anneal", str(run), *command[2:command.index("--mixes")], "--candidates", "left=math", "mixed=math,web",
               "right=math:3,code", "--tokens", "1600", "--seeds", "1", "--device", "cpu", "--halving", "--json"]
    assert main(command) == 0
    study = json.loads(capsys.readouterr().out)
    assert study["arms"][0] == "base" and len(study["arms"]) == 2
    assert [one["share"] for one in study["ended"]] == [0.25, 0.25]
    for one in study["ended"]:
        history = read(run / "train" / "anneal" / "from20" / f"{one['arm']}-seed0" / "metrics.jsonl")
        assert [line["step"] for line in history if line["event"] == "step"] == [21, 22, 23]
    assert main(command) == 0 and json.loads(capsys.readouterr().out) == study


@pytest.mark.parametrize(("words", "said"), [
    (["--candidates", "math", "--share", "0%"], "share above 0"), (["--candidates", "math", "math"], "twice"),
    (["--candidates", "../x=math"], "name of a folder"), (["--candidates", "..=math"], "name of a folder"),
    (["--candidates", "x=math:much"], "not a weight"), (["--candidates", "x="], "write a stream"),
    ([], "Give --mixes"), (["--data", "r.yaml"], "needs the pipeline")])
def test_candidates_that_cannot_be_mixed_are_refused(annealed, capsys, words, said):
    _, command = annealed
    assert main([*command[:command.index("--mixes")], *words, "--tokens", "3200"]) == 2
    assert said in capsys.readouterr().err


# -- ablate ------------------------------------------------------------------------------------------------------------
def test_a_setting_that_learns_nothing_is_found_out_at_equal_tokens(tmp_path, capsys, forked_arms):
    run = make_run(tmp_path, phases=PHASES, total=9600, documents=400)
    command = ["ablate", str(run), "--arm", "frozen", "optimizer.lr=1e-6", "--arm", "clip", "clip=0.5", "--tokens",
               "1650", "--seeds", "2", "--device", "cpu", "--json"]
    assert main(command) == 0
    study = json.loads(capsys.readouterr().out)
    of = study["sources"][ALL]["arms"]
    assert study["arms"] == ["base", "frozen", "clip"]
    assert of["frozen"]["delta"] > 0.1 and of["frozen"]["beyond_noise"]
    assert abs(of["clip"]["delta"]) < of["frozen"]["delta"]
    outs = arms_of(run, "ablate")
    assert sorted(outs) == sorted(f"{a}-seed{s}" for a in ("base", "frozen", "clip") for s in (0, 1))
    losses = {}
    for name, out in outs.items():
        steps = [line for line in read(out / "metrics.jsonl") if line["event"] == "step"]
        assert steps[-1]["tokens"] == 1600                             # whole steps within 1650
        losses[name] = steps[0]["loss"]
    assert losses["base-seed0"] == losses["frozen-seed0"] != losses["base-seed1"]      # paired: one start, one order
    before = {name: (out / "metrics.jsonl").read_bytes() for name, out in outs.items()}
    assert main(command) == 0 and json.loads(capsys.readouterr().out) == study         # nothing is done again
    assert before == {name: (out / "metrics.jsonl").read_bytes() for name, out in outs.items()}


def test_an_arm_of_another_call_is_refused_before_the_first_is_trained(tmp_path, capsys, forked_arms):
    """Not after the hours of those that come first."""
    run = make_run(tmp_path, phases=PHASES, total=3200, documents=100)
    steps = ["--tokens", "320", "--seeds", "1", "--device", "cpu"]
    assert main(["ablate", str(run), "--arm", "x", "clip=0.5", *steps]) == 0
    (run / "train" / "ablate" / "base-seed0").rename(tmp_path / "away")
    assert main(["ablate", str(run), "--arm", "x", "clip=0.7", *steps]) == 2
    said = capsys.readouterr().err
    assert "train.clip: checkpoint 0.5, now 0.7" in said and "another name, or delete that folder" in said
    assert not (run / "train" / "ablate" / "base-seed0").exists()


def test_arms_without_held_out_data_are_refused_before_they_are_trained(tmp_path, capsys):
    run = make_run(tmp_path, phases=PHASES, total=3200, documents=100)
    curriculum = Curriculum.load(run / "curriculum.json")
    streams = tuple(replace(s, val=None, val_sha256=None, val_tokens=0) for s in curriculum.streams)
    replace(curriculum, streams=streams).save(run / "curriculum.json")
    assert main(["ablate", str(run), "--arm", "x", "clip=0.5"]) == 2
    assert "no held-out data" in capsys.readouterr().err and not (run / "train").exists()


@pytest.mark.parametrize(("arguments", "said"), [
    (["--arm", "a/b", "clip=1"], "letters, digits"), (["--arm", "x"], "in what does it differ"),
    (["--arm", "base", "clip=1"], "each its own"), (["--arm", "x", "clipp=1"], "did you mean 'clip'"),
    (["--arm", "x", "clip=2", "--tokens", "10"], "--tokens 10: the first step alone has 160 tokens")])
def test_what_cannot_be_ablated_is_said(tmp_path, capsys, arguments, said):
    run = make_run(tmp_path, phases=PHASES, total=3200, documents=100)
    assert main(["ablate", str(run), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (run / "train").exists()
