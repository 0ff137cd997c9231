"""`shards.NAME.from_phase` reserves a stream for a phase and the later ones: in recipes, in curricula and in edits of
them."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest

from pipeline.recipe import RecipeError, load_recipe
from tests.stages.test_mix_curriculum import SETS, TOKENIZER, info, recipe
from tokenizer.mixture.curriculum import Curriculum, CurriculumError, Stream, cut, edit
from tokenizer.mixture.resolve import resolve, resolve_phases
from trainer.tools.anneal import future

RECIPE = """
version: 1
sources: {{all: {{read: text, path: nowhere/*.txt}}}}
datasets: {{d: {{from: all, steps: [exact]}}}}
tokenizer: {{train: {{kind: bpe, vocab: 300, from: d, sample: 1MB}}}}
shards:
  web: {{from: d, longest: 4096}}
  math: {{from: d, longest: 4096, from_phase: {kept}}}
curriculum:
  total: 10M
  phases:
    - {{name: stable, until: 50%, sequence: 4096, batch: 65536, mix: {stable}}}
    - {{name: more, until: 80%}}
    - {{name: anneal, until: 100%, mix: {{web: 60, math: 40}}}}
train: {{model: {{preset: demo}}}}
"""


def loaded(tmp_path, kept: str = "anneal", stable: str = "{web: 1}"):
    (tmp_path / "r.yaml").write_text(RECIPE.format(kept=kept, stable=stable))
    return load_recipe(str(tmp_path / "r.yaml"))


def test_a_stream_may_be_read_from_its_phase_on(tmp_path):
    assert loaded(tmp_path).shards["math"].from_phase == "anneal"
    loaded(tmp_path, "stable", "{web: 1, math: 1}")
    loaded(tmp_path, stable="{all: {share: 1, streams: {web: 1, math: 0}}}")


@pytest.mark.parametrize(("mix", "key"), [
    ("{web: 1, math: 1}", "mix.math"), ("{all: {share: 1, streams: [web, math]}}", "mix.all"),
    ("{all: {share: 1, streams: {web: 1, math: 2}}}", "mix.all")])
def test_a_recipe_that_reads_it_earlier_is_refused(tmp_path, mix, key):
    with pytest.raises(RecipeError, match=rf"curriculum.phases\[0\].{key}: .* shards.math.from_phase .*'anneal'"):
        loaded(tmp_path, stable=mix)


def test_the_phase_must_exist(tmp_path):
    with pytest.raises(RecipeError, match=r"shards.math.from_phase: unknown curriculum.phases 'aneal': .*'anneal'"):
        loaded(tmp_path, "aneal")


def kept_recipe() -> dict:
    given = copy.deepcopy(recipe())
    given["shards"]["math"] = {"longest": 2048, "from_phase": "anneal"}
    given["curriculum"]["phases"][1]["mix"]["math"] = 10
    return given


def kept_curriculum() -> Curriculum:
    return resolve(kept_recipe(), {**SETS, "math": info("math", 400_000)}, TOKENIZER)[0]


def test_the_curriculum_says_so_and_only_where_a_stream_is_kept():
    made = kept_curriculum()
    streams = {stream["name"]: stream for stream in made.to_json()["streams"]}
    assert streams["math"]["from_phase"] == "anneal" and "from_phase" not in streams["web"]
    assert Curriculum.loads(made.dumps().encode(), "x") == made
    older = resolve(recipe(), SETS, TOKENIZER)[0]
    assert "from_phase" not in older.dumps()
    with pytest.raises(CurriculumError, match="missing keys"):
        Curriculum.from_json({**made.to_json(), "streams": [{"name": "math"}]})


def test_a_curriculum_that_reads_it_earlier_is_refused():
    given = kept_recipe()
    given["curriculum"]["phases"][0]["mix"]["math"] = 1
    with pytest.raises(CurriculumError, match=r"phase 'stable' reads stream 'math', .* shards\.math\.from_phase"):
        resolve(given, {**SETS, "math": info("math", 400_000)}, TOKENIZER)
    doc = json.loads(kept_curriculum().dumps())
    doc["phases"][0]["weights"]["math"] = 1
    doc.pop("sha256")
    with pytest.raises(CurriculumError, match="keeps for phase 'anneal'"):
        Curriculum.from_json(doc)


def edited(old: Curriculum, phases: list[dict], streams: tuple[Stream, ...] = ()) -> Curriculum:
    at = old.phases[0].batch * 40
    sizes = {stream.name: stream.tokens for stream in old.streams}
    return edit(old, at, resolve_phases(phases, old.tokens, sizes, [], existing=cut(old, at)), streams)


def test_an_edit_keeps_the_stream_too():
    old, mix = kept_curriculum(), {"web": 8, "math": 2}
    for phases in ([{"name": "new", "until": "60%", "mix": mix}, {"name": "anneal", "until": "100%"}],
                   [{"name": "late", "until": "100%", "mix": mix}]):
        with pytest.raises(CurriculumError, match=f"phase '{phases[0]['name']}' reads stream 'math'"):
            edited(old, phases)
    made = edited(old, [{"name": "anneal", "until": "60%", "mix": mix}, {"name": "after", "until": "100%"}])
    assert made.phases[2].weights["math"]
    assert edited(old, [{"name": "late", "until": "100%"}]).phases[1].weights == old.phases[0].weights


def test_train_anneal_may_try_the_kept_stream(tmp_path):
    old = kept_curriculum()
    base = SimpleNamespace(curriculum=old, store=tmp_path)
    mixes = {"m": {"mix": {"web": 1, "math": 1}}}
    step = old.phases[0].batch * old.phases[0].sequence
    made = future(base, old.phases[0].batch * 40, mixes, "m", 8 * step, 1, 1e-3)
    assert [phase.name for phase in made.phases] == ["stable", "order 1", "anneal"]
    assert made.phases[1].weights["math"] and all(stream.from_phase is None for stream in made.streams)
