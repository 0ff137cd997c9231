"""Batches that grow within a phase: whole steps, the same order of samples, edits, and what a recipe may say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.stages.test_mix_curriculum import TOKENIZER, info
from tokenizer.mixture.curriculum import Curriculum, CurriculumError, Order, edit
from tokenizer.mixture.resolve import resolve

PHASES = [{"name": "a", "until": "80%", "sequence": 16, "batch": 640, "mix": {"web": 3, "code": 1}},
          {"name": "b", "until": "100%", "mix": {"web": 1, "code": 1}}]


def resolved(batch, **keys):
    phases = [{**PHASES[0], "batch": batch, **keys}, PHASES[1]]
    recipe = {"curriculum": {"seed": 3, "total": 64_000, "phases": phases},
              "shards": {"web": {"longest": 64}, "code": {"longest": 64}}}
    return resolve(recipe, {"web": info("web", 90_000), "code": info("code", 90_000)}, TOKENIZER)[0]


def test_a_batch_that_grows_changes_no_sample():
    plain, grown = resolved(640), resolved({0: 160, 5_000: 320, "20k": 640})
    a = grown.phases[0]
    # from 5,000 tokens = 312.5 samples on 20 a step, at the next multiple of 20; from 1,250 on 40
    assert (a.ramp, a.batch) == ([[320, 10], [1240, 20]], 40)
    assert a.stretches == [(0, 320, 10), (320, 1240, 20), (1240, 3200, 40)]
    assert a.steps == 32 + 46 + 49 and a.has_whole_steps
    assert [a.batch_at(n) for n in (0, 319, 320, 1239, 1240, 3199)] == [10, 10, 20, 20, 40, 40]
    assert grown.samples == plain.samples and grown.order == plain.order
    assert grown.phases[1] == plain.phases[1]                      # it goes on with the last, and does not grow again
    assert grown.steps == a.steps + grown.phases[1].steps


def test_batches_that_do_not_divide_one_another_are_whole_steps_too():
    a = resolved({0: 48, 1_000: 112, 9_000: 640}).phases[0]
    assert [batch for *_, batch in a.stretches] == [3, 7, 40] and a.has_whole_steps
    assert abs(a.stretches[1][0] * 16 - 1_000) <= 48 and abs(a.tokens - 51_200) <= 640


def test_the_file_has_it_only_where_there_is_one(tmp_path):
    grown = resolved({0: 160, 5_000: 640})
    grown.save(tmp_path / "c.json")
    assert Curriculum.load(tmp_path / "c.json") == grown
    assert ["ramp" in p for p in grown.to_json()["phases"]] == [True, False]


def test_an_edit_may_cut_a_phase_while_its_batch_grows():
    grown = resolved({0: 160, 5_000: 320, 20_000: 640})
    later = replace(grown.phases[1], samples=400, reserved=400)
    for sample in (150, 320, 340):
        made = edit(grown, sample, [later])
        assert made.phases[0].stop == sample and made.phases[0].has_whole_steps
        at, was = Order(made).locate(0, sample), Order(grown).locate(0, sample)
        assert (at.window == was.window).all() and (at.stream == was.stream).all()
    with pytest.raises(CurriculumError, match=r"sample 330 falls inside a step of phase 'a' \(20 samples a step\)"):
        edit(grown, 330, [later])


@pytest.mark.parametrize(("batch", "message"), [
    ({5_000: 640}, r"phases\[0\]\.batch: a batch that grows begins at 0"),
    ({0: 640, 5_000: 320}, "batches grow"),
    ({0: 320, 60_000: 640}, r"before its end at 51,200"),
    ({0: 320, "soon": 640}, "'soon' is not a count"),
    ({}, "begins at 0"),
])
def test_errors(batch, message):
    with pytest.raises(CurriculumError, match=message):
        resolved(batch)


@pytest.mark.parametrize("ramp", [[[10, 40]], [[0, 10]], [[20, 10], [10, 20]], [[15, 10]], [[9999, 10]]])
def test_a_file_with_another_ramp_is_refused(ramp):
    plain = resolved(640)
    broken = replace(plain, phases=(replace(plain.phases[0], ramp=ramp), plain.phases[1]))
    with pytest.raises(CurriculumError, match=r"must rise to the batch of 40|no whole number of batches"):
        broken.validate()


def test_a_recipe_says_so_before_anything_runs():
    from pydantic import ValidationError

    from pipeline.recipe.token_models import PhaseSettings

    assert PhaseSettings(name="a", until="100%", batch={
        "0": "64k",
        "1M": "0.5M"
    }).batch == {
        0: 64_000,
        1_000_000: 500_000
    }
    for bad in ({"1M": "64k"}, {0: "64k", "1M": "32k"}, {0: "x"}):
        with pytest.raises(ValidationError, match=r"begins at token 0|not a count"):
            PhaseSettings(name="a", until="100%", batch=bad)
