"""Recipes: what they mean, and that each mistake is reported with its line, its key and the remedy."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.base.quantities import parse_bytes, parse_count, parse_share, parse_weight, percent
from pipeline.forecast.mixture import mixture
from pipeline.forecast.range import exactly
from pipeline.recipe import RecipeError, load_recipe, ready_recipes
from pipeline.recipe.code import import_code
from pipeline.recipe.marks import dump_yaml, parse_yaml
from stages.catalog import stage_class
from tokenizer.mixture.resolve import resolve

#: a recipe with every section
CONTRACT = """\
version: 1
sources:   {web: {read: warc, path: data/*.warc.gz}, wiki: {read: wiki, path: enwiki.xml.bz2}}
datasets:
  extracted: {from: web, steps: [{html: {engine: trafilatura}}]}
  clean:     {from: extracted, steps: [url, {language: {keep: [en], min: 0.65}}, gopher_repetition, gopher_quality, c4, fineweb, {pii: {}}]}
  deduped:   {from: [clean, wiki], steps: [{minhash: {verify: 0.75}}], priority: [wiki, clean]}
tokenizer: {train: {kind: bpe, vocab: 32000, from: deduped}}          # or {load: path}
shards:    {web: {from: deduped, where: {source: web}, longest: 16384}, wiki: {from: deduped, where: {source: wiki}, longest: 16384}}
curriculum:
  seed: 1
  total: 20B
  phases:
    - {name: stable, until: 70%, sequence: 2048, batch: 0.5M, mix: {web: 85, wiki: 15}}
    - {name: anneal, until: 100%, mix: {web: 60, wiki: 40}, max_epochs: {wiki: 4}, lr: decay}
train: {model: {preset: 135m}, optimizer: {kind: adamw}}
"""  # noqa: E501
SMALL = """\
version: 1
sources:
  web: {read: warc, path: a.warc.gz}
datasets:
  clean:
    from: web
    steps:
      - html
      - language:
          keep: [en]
          min: 0.65
      - c4
"""


@pytest.fixture
def load(tmp_path):
    """A function that loads a recipe from its text."""
    def load(text: str, *args, **kw):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return load_recipe(path, *args, **kw)

    return load


def problems(load, text: str, *args, **kw) -> list[str]:
    """Return the problems of a recipe, each as 'LINE KEY: MESSAGE'."""
    with pytest.raises(RecipeError) as caught:
        load(text, *args, **kw)
    return [f"{p.mark.line} {str(p).split(': ', 1)[1]}" for p in caught.value.problems]


# -- what a recipe means --------------------------------------------------------------------------------------------
def test_the_contracts_recipe_loads(load):
    recipe = load(CONTRACT)
    assert recipe.dataset_order() == ["extracted", "clean", "deduped"]
    assert recipe.datasets["deduped"].inputs == ["clean", "wiki"]
    assert recipe.sources_of("deduped") == ["web", "wiki"]
    assert [s.name for s in recipe.datasets["clean"].steps][:2] == ["url", "language"]
    assert recipe.datasets["clean"].steps[1].config["keep"] == ["en"]
    assert recipe.curriculum.total == 20_000_000_000
    assert recipe.curriculum.phases[0].batch == 500_000
    assert recipe.shards["web"].val == 0.005
    assert (recipe.run.partition, recipe.run.max_error_rate, recipe.run.signals) == (32_000_000, 0.01, "until-drop")
    assert recipe.warnings == []
    assert recipe.name == "recipe"


def test_steps_are_completed_with_their_stages_defaults(load):
    recipe = load(SMALL)
    html, language, c4 = recipe.datasets["clean"].steps
    assert html.config["engine"] == "mill"
    assert language.config.items() >= {"keep": ["en"], "min": 0.65, "model": None, "paragraphs": False}.items()
    assert c4.config                                              # whatever it has, written out


def test_all_spellings_of_a_step_mean_the_same(load):
    spellings = ["steps: [html, pii]", "steps: [{html: }, {pii: {}}]", "steps: [html: {}, pii: null]",
                 "steps:\n    - html:\n    - pii"]
    base = "version: 1\nsources: {web: {read: warc, path: x}}\ndatasets:\n  a:\n    from: web\n    "
    assert len({load(base + s).digest() for s in spellings}) == 1


def test_digest_ignores_places_and_spelling_but_not_settings(load, tmp_path):
    digest = load(CONTRACT).digest()
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "recipe.yaml"
    other.write_text(CONTRACT.replace("data/*.warc.gz", "/mnt/x.warc.gz").replace("20B", "20_000_000_000"))
    assert load_recipe(other).digest() == digest
    assert load(CONTRACT, ["datasets.clean.steps.language.min=0.65"]).digest() == digest
    assert load(CONTRACT, ["datasets.clean.steps.language.min=0.66"]).digest() != digest


def test_canonical_yaml_runs_from_anywhere(load, tmp_path):
    recipe = load(CONTRACT)
    kept = tmp_path / "far" / "away.yaml"
    kept.parent.mkdir()
    kept.write_text(recipe.canonical_yaml())
    again = load_recipe(kept)
    assert again.digest() == recipe.digest()
    assert again.sources["web"].path == [str(tmp_path / "data/*.warc.gz")]
    assert yaml.safe_load(recipe.canonical_yaml())["curriculum"]["phases"][0]["until"] == "70%"
    (tmp_path / "tok.json").write_text("{}")
    (tmp_path / "mine_elsewhere.py").write_text("")
    trained = CONTRACT[CONTRACT.index("tokenizer:"):].split("\n")[0]
    mine = load("code: [mine_elsewhere.py]\n" + CONTRACT.replace(trained, "tokenizer: {load: tok.json}"),
                allow_custom=True)
    kept.write_text(mine.canonical_yaml())
    again = load_recipe(kept, allow_custom=True)
    assert again.tokenizer.load == str(tmp_path / "tok.json") and again.code == mine.code


def test_canonical_yaml_resolves_leading_parent_folders(tmp_path):
    """The service refuses paths with `..`, also in a recipe that a run has kept."""
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    recipe = tmp_path / "real" / "deep" / "recipe.yaml"
    recipe.write_text(CONTRACT.replace("data/*.warc.gz", "../../data/a/../*.warc.gz"))
    for base in ("real/deep", "link"):
        kept = yaml.safe_load(load_recipe(tmp_path / base / "recipe.yaml").canonical_yaml())
        assert kept["sources"]["web"]["path"] == [f"{tmp_path}/data/a/../*.warc.gz"], base


def test_canonical_yaml_resolves_leading_parent_folders_of_steps(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "blocked.txt").write_text("example.org\n")
    text = ("version: 1\nsources: {docs: {read: text, path: docs}}\n"
            "datasets: {clean: {from: docs, steps: [{url: {domains: ../blocked.txt}}]}}\n")
    (tmp_path / "recipes" / "recipe.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "recipes" / "recipe.yaml")
    [step] = yaml.safe_load(recipe.canonical_yaml())["datasets"]["clean"]["steps"]
    assert step["url"]["domains"] == f"{tmp_path}/blocked.txt"
    (tmp_path / "kept.yaml").write_text(recipe.canonical_yaml())
    again = load_recipe(tmp_path / "kept.yaml")
    keys = [stage_class(s.name)(s.config).key() for r in (recipe, again) for s in r.datasets["clean"].steps]
    assert keys[0] == keys[1], "its results stay"


def test_scalars_follow_yaml_1_2(load):
    plain = "train: {optimizer: {groups: {lr: 1e-3, x: yes, t: 2026-01-01, z: 0x10, n: ~}}}"
    recipe = load(SMALL.replace("{read: warc,", "{read: jsonl, keep: [no, on, 'true'],") + plain)
    assert recipe.sources["web"].config["keep"] == ["no", "on", "true"]
    assert recipe.train["optimizer"]["groups"] == {"lr": 0.001, "x": "yes", "t": "2026-01-01", "z": 16, "n": None}


def test_anchors_and_merge_keys(load):
    recipe = load(SMALL.replace("  web:", "  old: &old {read: warc, path: old.gz}\n  web:")
                  .replace("{read: warc, path: a.warc.gz}", "{<<: *old, path: new.gz}"))
    assert (recipe.sources["web"].read, recipe.sources["web"].path) == ("warc", ["new.gz"])
    assert recipe.sources["old"].path == ["old.gz"]


def test_reader_settings_stand_beside_read_and_path(load):
    recipe = load("version: 1\nsources: {a: {read: jsonl, path: x.jsonl, text: body}}\ndatasets: {b: {from: a}}\n")
    assert recipe.sources["a"].config["text"] == "body"


# -- --set, --input, names -------------------------------------------------------------------------------------------
def test_set_overrides_by_key_step_name_and_number(load):
    recipe = load(CONTRACT, ["datasets.clean.steps.language.min=0.8", "datasets.clean.steps.5.fineweb={}",
                             "datasets.clean.steps.gopher_quality.min_doc_words=10", "curriculum.total=2M",
                             "curriculum.phases.anneal.mix={web: 1, wiki: 1}", "run.partition=4MB", "run.signals=all"])
    steps = {s.name: s.config for s in recipe.datasets["clean"].steps}
    assert steps["language"]["min"] == 0.8
    assert steps["gopher_quality"]["min_doc_words"] == 10
    assert recipe.curriculum.total == 2_000_000
    assert recipe.curriculum.phases[1].mix == {"web": 1, "wiki": 1}
    assert (recipe.run.partition, recipe.run.signals) == (4_000_000, "all")
    assert recipe.warnings == ["curriculum.phases[1].mix: weights sum to 2, not to 100; they were normalised"]


@pytest.mark.parametrize(("override", "said"), [
    ("datasets.clean.steps.langage.min=1", "there is no 'langage' here: did you mean 'language'?"),
    ("curriculum.totl=1", "unknown key 'totl': did you mean 'total'?"),
    ("curriculum.total", "write --set KEY=VALUE"),
    ("version.x=1", "a single value here, without keys"),
    ("run.partition=[", "not YAML"),
    ("run.partition=!!python/object:os.system x", "tag"),
])
def test_a_wrong_override_names_itself(load, override, said):
    with pytest.raises(RecipeError, match=re.escape(said)) as caught:
        load(CONTRACT, [override])
    assert str(caught.value).startswith(f"--set {override}")


def test_ready_recipes_take_their_input_from_the_command(tmp_path, monkeypatch):
    assert "fineweb" in ready_recipes()
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("fineweb", inputs=["crawl/*.warc.gz", "s3://bucket/x.warc.gz"])
    assert recipe.sources["web"].path == [str(tmp_path / "crawl/*.warc.gz"), "s3://bucket/x.warc.gz"]
    assert recipe.dataset_order() == ["extracted", "clean", "deduped"]
    with pytest.raises(RecipeError, match=r"sources.web: this recipe wants its input from you: add --input"):
        load_recipe("fineweb")
    with pytest.raises(RecipeError, match="did you mean 'fineweb'"):
        load_recipe("finweb")


def test_input_needs_to_know_its_source(load):
    two = SMALL.replace("  web:", "  other: {read: text, path: x}\n  web:")
    assert load(SMALL, inputs=["y.gz"]).sources["web"].path == [os.path.abspath("y.gz")]
    assert "which of the sources other, web is meant" in problems(load, two, inputs=["y.gz"])[0]
    assert load("input: web\n" + two, inputs=["y.gz"]).sources["web"].path == [os.path.abspath("y.gz")]


# -- what is wrong with it --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("old", "new", "expected"), [
    ("version: 1", "version: 2", "1 version: version 2 is not 1, the version of recipes this Tokenmill reads"),
    ("version: 1\n", "", "1 version: missing key 'version'; add `version: …`"),
    ("  clean:\n    from", "  clean:\n    form", "6 datasets.clean.form: unknown key 'form': did you mean 'from'?"),
    ("min: 0.65", "mim: 0.65", "11 datasets.clean.steps[1].language.mim: unknown key 'mim': did you mean 'min'?"),
    ("min: 0.65", "min: high", "11 datasets.clean.steps[1].language.min: must be a probability below 1, or one by"),
    ("- c4", "- c44", "12 datasets.clean.steps[2]: unknown step 'c44': did you mean 'c4'?"),
    ("read: warc", "read: wrac", "3 sources.web.read: unknown reader 'wrac': did you mean 'warc'?"),
    ("path: a.warc.gz", "path: a.warc.gz, max_byte: 1", "3 sources.web.max_byte: unknown key 'max_byte': did you mean"),
    ("path: a.warc.gz", "path: []", "3 sources.web.path: must not be empty"),
    (", path: a.warc.gz", "", "3 sources.web.path: missing key 'path'; add `path: …`"),
    ("from: web", "from: wbe", "6 datasets.clean.from: unknown source or dataset 'wbe': did you mean 'web'?"),
    ("- html", "- html: {engine: trafilatur}",
     "8 datasets.clean.steps[0].html.engine: 'trafilatur' is not one of trafilatura, resiliparse, justext, readab"),
    ("- html", "- html: {fast: true}",
     "8 datasets.clean.steps[0].html: fast: the engine 'mill' does not know this setting; name one that does (engine: "
     "trafilatura), or leave it out"),
    ("- html", "- html: [1]", "8 datasets.clean.steps[0]: the settings of 'html' must be a mapping"),
    ("- html", "- 7", "8 datasets.clean.steps[0]: a step is a name, or a name with settings"),
    ("- html", "- html: {}\n        pii: {}", "8 datasets.clean.steps[0]: a step has one name, this has 2 (html, pii)"),
    ("steps:\n", "steps: {}\n    priority:\n", "7 datasets.clean.steps: must be a list"),
    ("  web:", "  web/..:", "3 sources.web/..: 'web/..' is not a name; names become folders"),
    ("  clean:", "  web:", "5 datasets.web: 'web' is a source as well; give the dataset another name"),
    ("- c4", "- mine:Filter", "12 datasets.clean.steps[2]: 'mine:Filter' is a stage of your own; such code is"),
    ("- c4", "- quality: {model: none.bin}", "12 datasets.clean.steps[2].quality.model: no such file"),
    ("- c4", "- quality", "12 datasets.clean.steps[2].quality.model: missing key 'model'; add `model: …` ("),
])
def test_each_mistake_is_named(load, old, new, expected):
    assert old in SMALL
    found = problems(load, SMALL.replace(old, new, 1))
    assert any(line.startswith(expected) for line in found), "\n".join(found)


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("vocab: 32000", "vocab: 100", "7 tokenizer.train.vocab: a vocabulary of 100 is outside 257"),
    ("kind: bpe", "kind: bp", "7 tokenizer.train.kind: 'bp' is not one of bpe, sentencepiece; did you mean 'bpe'?"),
    ("{train: {kind: bpe, vocab: 32000, from: deduped}}", "{}", "7 tokenizer: give one of `train:`"),
    ("{train: {kind: bpe, vocab: 32000, from: deduped}}", "{load: x.json}", "7 tokenizer.load: no such file"),
    ("{train: {kind: bpe, vocab: 32000, from: deduped}}", "{load: my/x.tiktoken}", "7 tokenizer.load: no such file"),
    ("shards:    {web: {from: deduped", "shards:    {web: {from: web", "8 shards.web.from: 'web' is a source; name a"),
    ("where: {source: web}", "where: {source: wob}", "8 shards.web.where.source: unknown source 'wob': did you mean"),
    ("where: {source: web}", "where: {sorce: web}", "8 shards.web.where.sorce: 'sorce' is not one of source, language"),
    ("from: deduped, where: {source: wiki}", "from: clean, where: {source: wiki}",
     "8 shards.wiki.where.source: no document of 'wiki' gets into clean, which is made from web"),
    ("longest: 16384}}", "longest: 8192}}", "8 shards.wiki.longest: 8,192 differs from 16,384 of 'web'"),
    ("longest: 16384}}", "longest: 16384, val: 0.5}}", "8 shards.wiki.val: 0.5 is not a share; write it"),
    ("longest: 16384}}", "longest: 16384, val: 5%}}", "8 shards.wiki.val: 5% differs from 0.5% of 'web', so that"),
    ("wiki: {read: wiki, path: enwiki.xml.bz2}", "wiki: {read: jsonl, path: a.jsonl, keep: [url, cluster]}",
     "2 sources.wiki.keep[1]: 'cluster' in meta says which near-duplicates belong together; rename"),
    ("lr: decay", "lr: dacay", "14 curriculum.phases[1].lr: 'dacay' is not one of stable, constant, decay; did you m"),
    ("wiki: {read: wiki, path: enwiki.xml.bz2}", "wiki: {read: jsonl, path: a.jsonl, keep: 5}",
     "2 sources.wiki.keep: must be a valid tuple"),
    ("lr: decay", "lr: 0.001", "14 curriculum.phases[1].lr: 0.001 is not one of stable, constant, decay"),
    ("until: 100%, mix: {web: 60, wiki: 40}, max_epochs: {wiki: 4}, lr: decay}",
     "until: 90%, lr: decay}\n    - {name: end, until: 100%, lr: stable}",
     "15 curriculum.phases[2].lr: the learning rate has fallen to 0 before this phase"),
    ("optimizer: {kind: adamw}", "schedule: {kind: linear}", "14 curriculum.phases[1].lr: train.schedule.kind linear"),
    ("lr: decay", "lr: {to: 0}", "14 curriculum.phases[1].lr: to: unknown key; there are peak, warmup, shape, floor"),
    ("lr: decay", "lr: {peak: 0}", "14 curriculum.phases[1].lr: peak: the highest rate of the phase, a number above 0"),
    ("lr: decay", "lr: decay, extra: 1B", "14 curriculum.phases[1]: `until` says where in the total a phase ends"),
    ("until: 100%, mix", "extra: 1B, mix", "13 curriculum.phases[0].until: the last phase ends at 14,000,000,000"),
    ("until: 70%,", "extra: 1B,", "14 curriculum.phases[1].until: a phase before it is beyond the total; put"),
    ("lr: decay}", "lr: {peak: 2e-5}}\n    - {name: end, extra: 1B}", "15 curriculum.phases[2]: missing key 'lr'"),
    ("lr: decay", "rope_theta: 0", "14 curriculum.phases[1].rope_theta: must be greater than 1, got 0"),
    ("lr: decay", "rope_scaling: {kind: yarm, factor: 2}", "14 curriculum.phases[1].rope_scaling: give kind (linear,"),
    ("lr: decay", "rope_scaling: {kind: yarn, factor: 2, beta: 1}",
     "14 curriculum.phases[1].rope_scaling: unknown key 'beta': did you mean 'beta_"),
    ("lr: decay", "reset_optimizer: 3", "14 curriculum.phases[1].reset_optimizer: must be a valid boolean, got 3"),
    ("optimizer: {kind", "optimzer: {kind", "15 train.optimzer: unknown key 'optimzer': did you mean 'optimizer'?"),
    ("kind: adamw}", "kind: adamw, momentum: 0.9}", "15 train.optimizer.momentum: belongs to kind: muon, not to adamw"),
    ("preset: 135m", "preset: 135m, head: 8", "15 train.model.head: unknown key 'head': did you mean 'heads'?"),
    ("preset: 135m", "preset: 135M", "15 train.model.preset: unknown preset '135M': did you mean '135m'?"),
    ("{preset: 135m}", "demo", "15 train.model: must be a mapping, e.g. model: {preset: 135m}; got 'demo'"),
    ("sequence: 2048", "sequence: 2000", "13 curriculum.phases[0].sequence: 2,000 does not divide 16,384"),
    ("sequence: 2048, ", "", "13 curriculum.phases[0]: missing key 'sequence': the first phase has none to inherit"),
    ("batch: 0.5M", "batch: 1k", "13 curriculum.phases[0].batch: a batch of 1,000 tokens holds no sequence of 2,048"),
    ("batch: 0.5M", "batch: 1.5", "13 curriculum.phases[0].batch: 1.5 is not a whole number"),
    ("mix: {web: 85,", "mix: {wbe: 85,", "13 curriculum.phases[0].mix.wbe: unknown shards 'wbe': did you mean 'web'?"),
    ("mix: {web: 85, wiki: 15}", "mix: {web: 0}", "13 curriculum.phases[0].mix: all weights are 0"),
    ("mix: {web: 85, wiki: 15}", "mix: {all: {share: 1, streams: {wbe: 1}}}",
     "13 curriculum.phases[0].mix.all.streams.wbe: unknown shards 'wbe': did you mean 'web'?"),
    ("mix: {web: 85, wiki: 15}", "mix: {all: {share: 1, streams: {web: 0}}}",
     "13 curriculum.phases[0].mix.all.streams: all weights are 0"),
    ("mix: {web: 85, wiki: 15}", "mix: {all: {share: 85, streams: {web: 1, wiki: 1}}, web: 15}",
     "13 curriculum.phases[0].mix.web: the phase has stream 'web' twice"),
    ("mix: {web: 85, wiki: 15}", "mix: {all: {streams: {web: 1}}}", "13 curriculum.phases[0].mix.all.share: missing"),
    ("mix: {web: 85, wiki: 15}", "mix: {all: {share: 1, streams: {web: lots}}}",
     "13 curriculum.phases[0].mix.all.streams.web: 'lots' is not a weight"),
    ("mix: {web: 85, wiki: 15}", "mix: {all: {share: 1, steams: {web: 1}}}",
     "13 curriculum.phases[0].mix.all.steams: unknown key 'steams': did you mean 'streams'?"),
    ("mix: {web: 85, wiki: 15}", "mix: {all: {share: 1, streams: [web, wiky], alpha: 0.3}}",
     "13 curriculum.phases[0].mix.all.streams[1]: unknown shards 'wiky': did you mean 'wiki'?"),
    ("mix: {web: 85, wiki: 15}", "mix: {all: {share: 1, streams: {web: 1}, alpha: 0.3}}",
     "13 curriculum.phases[0].mix.all: the weights come from a mapping of streams, from `alpha`, from"),
    ("mix: {web: 85, wiki: 15}", "mix: {all: {share: 1, streams: [web], alhpa: 0.3}}",
     "13 curriculum.phases[0].mix.all.alhpa: unknown key 'alhpa': did you mean 'alpha'?"),
    ("mix: {web: 85, wiki: 15}", "mix: {all: {share: 1, streams: [web], unimax: 0}}",
     "13 curriculum.phases[0].mix.all.unimax: must be greater than 0, got 0"),
    ("web: 85", "web: lots", "13 curriculum.phases[0].mix.web: 'lots' is not a weight"),
    ("until: 70%", "until: 0%", "13 curriculum.phases[0].until: a phase that ends at 0% is empty"),
    ("until: 100%", "until: 70%", "14 curriculum.phases[1].until: '70%' is not after the phase before it"),
    ("until: 100%", "until: 15B", "14 curriculum.phases[1].until: the last phase ends at 15,000,000,000 of"),
    ("name: anneal", "name: stable", "14 curriculum.phases[1].name: two phases are called 'stable'"),
    ("max_epochs: {wiki: 4}", "max_epochs: {wikki: 4}", "14 curriculum.phases[1].max_epochs.wikki: unknown shards"),
    ("priority: [wiki, clean]", "priority: [wiki, web]", "6 datasets.deduped.priority[1]: unknown input of"),
    ("from: web, steps", "from: deduped, steps",
     "5 datasets.clean.from: a dataset cannot be made from itself: extracted ← deduped ← clean ← extracted"),
])
def test_each_mistake_beyond_the_documents_is_named(load, old, new, expected):
    assert old in CONTRACT
    found = problems(load, CONTRACT.replace(old, new, 1))
    if "itself" in expected:                                     # any node of the ring may be the one that is blamed
        assert "a dataset cannot be made from itself: extracted ← deduped ← clean ← extracted" in found[0]
    else:
        assert any(line.startswith(expected) for line in found), "\n".join(found)


def test_all_mistakes_come_at_once_in_file_order(load):
    text = SMALL.replace("version: 1", "version: 3").replace("path", "pth").replace("from:", "form:")
    lines = [int(p.split()[0]) for p in problems(load, text)]
    assert lines == sorted(lines)
    assert {1, 3, 6} <= set(lines)


@pytest.mark.parametrize(("text", "expected"), [
    ("version: 1\nversion: 1\n", "2 version: the key 'version' stands here twice (first on line 1); remove one"),
    ("a: !!python/object/apply:os.system [echo]\n", "1 a: the tag 'tag:yaml.org,2002:python/object/apply:os"),
    ("a: !!binary aGk=\n", "1 a: the tag 'tag:yaml.org,2002:binary' is refused"),
    ("a: b: c\n", "1 not YAML: mapping values are not allowed here; quote a value"),
    ("a: [1, 2\nb: 3\n", "2 not YAML"),
    ("\ta: 1\n", "1 not YAML"),
    ("- 1\n", "0 a recipe is a mapping that begins with `version: 1`"),
    ("", "0 a recipe is a mapping that begins with `version: 1`"),
    ("? [a, b]\n: 1\n", "1 a key must be a single word"),
    ("a: " + "[" * 60 + "]" * 60 + "\n", "1 a[0][0]"),
    ("a: " + "[" * 1500 + "\n", "0 nested deeper than 50 levels"),
    ("a: &a {x: *a}\n", "1 a.x"),
    ("a: &a {<<: *a}\n", "0 nested deeper than 50 levels"),
    ("x: &a [1,2,3,4,5,6,7,8,9]\n" + "".join(
        f"{c}: &{c}{c} [{', '.join(['*' + p] * 9)}]\n" for c, p in zip("bcdefgh", ["a", *[x + x for x in "bcdefg"]])),
     "more than 100,000 values once aliases are expanded"),
    ("a: &a {}\nb:\n" + "- <<: *a\n" * 1001, "1003 more than 1,000 aliases; write the values out"),
    ("x: &a {}\n" + "".join(f"{c}: &{c} {{<<: [{', '.join(['*' + p] * 9)}]}}\n" for c, p in zip("bcdefg", "abcdef")),
     "more than 1,000 merges ('<<'); write the keys out"),
])
def test_hostile_and_broken_yaml(load, text, expected):
    assert expected in problems(load, text)[0]


def test_files_that_cannot_be_read(tmp_path):
    for path, said in ((tmp_path / "no.yaml", "no such recipe file"), (tmp_path, "is a folder; name the file in it")):
        with pytest.raises(RecipeError, match=said):
            load_recipe(path)
    (tmp_path / "latin.yaml").write_bytes(b"version: 1 # caf\xe9\n")
    with pytest.raises(RecipeError, match=r"not UTF-8 text \(byte 16\)"):
        load_recipe(tmp_path / "latin.yaml")
    (tmp_path / "huge.yaml").write_text("# " + "x" * (1 << 20))
    with pytest.raises(RecipeError, match="a recipe has at most"):
        load_recipe(tmp_path / "huge.yaml")


def test_errors_name_the_file(load, tmp_path):
    with pytest.raises(RecipeError) as caught:
        load("version: 2\n")
    assert str(caught.value).startswith(f"{tmp_path / 'recipe.yaml'}:1:1: ")


# -- code of the user's own -------------------------------------------------------------------------------------------
def test_custom_stages_only_when_allowed(load, tmp_path):
    module = f"stages_of_{os.path.basename(tmp_path).replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent("""
        from stages.stage import Stage, StageConfig, decision

        class Short(Stage):
            name = "short"

            class Config(StageConfig):
                most: int = decision(10, "longest text kept, characters")

            def process(self, doc):
                return "long" if len(doc.text) > self.config.most else None
        """))
    text = SMALL.replace("- c4", f"- {module}:Short: {{most: 3}}".replace(f"{module}:Short", f"'{module}:Short'")) + \
        f"code: [./{module}.py]\n"
    recipe = load(text, allow_custom=True)
    assert recipe.datasets["clean"].steps[2].config == {"most": 3}
    assert recipe.code == [str(tmp_path / f"{module}.py")]
    refused = problems(load, text)
    assert any("code of your own is run only with --allow-custom-stages" in line for line in refused)
    wrong = problems(load, text.replace("most: 3", "mast: 3"), allow_custom=True)
    assert "unknown key 'mast': did you mean 'most'?" in wrong[0]
    assert "names no stage" in problems(load, text.replace(":Short", ":Long"), allow_custom=True)[0]
    assert "no such file" in problems(load, text.replace("./", "./no/"), allow_custom=True)[0]
    (tmp_path / "json.py").write_text("")
    shadow = problems(load, text.replace(f"./{module}.py", "json.py"), allow_custom=True)
    assert "a module called 'json' exists already; rename the file" in shadow[0]


def test_code_that_is_on_the_path_already_is_the_same_code(tmp_path, monkeypatch):
    (tmp_path / "my_stages_on_path.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_code([str(tmp_path / "my_stages_on_path.py")])
    assert sys.modules.pop("my_stages_on_path").X == 1


# -- quantities -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "value"), [
    ("20B", 20 * 10**9), ("0.5M", 500_000), ("2048", 2048), (2048, 2048), ("64k", 64_000), ("1_000", 1000),
    ("16_384_000", 16_384_000), (2e6, 2 * 10**6), ("1.5T", 15 * 10**11), (" 3 M ", 3 * 10**6), ("0.1k", 100),
    ("1,000", 1000), ("1,234,567.5k", 1234567500), ("2.01M", 2_010_000), ("20b", 20 * 10**9), ("1G", 10**9)])
def test_counts(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("text", [
    "", "B", "-1", "0", "1.5", "1e30", "1.2.3k", "nan", True, None, [1], "1MB", "٣k", "9" * 50, "1,5M", "10,00",
    ",100", "1/2", "0.0005k", "1_0_0", "1_", "1__000", "_1", "10_00", "1_000,000"])
def test_counts_refused(text):
    with pytest.raises(ValueError, match=r"write e\.g\."):
        parse_count(text)


def test_bytes_shares_and_weights():
    assert [parse_bytes(t) for t in ("32MB", "1GiB", "500", "0.5kB")] == [32 * 10**6, 1 << 30, 500, 500]
    assert [parse_share(t) for t in ("0.5%", "1%", "100%", 0)] == [0.005, 0.01, 1.0, 0.0]
    for wrong in (0.5, "0.5", "101%", "-1%", "x%", None, True):
        with pytest.raises(ValueError):
            parse_share(wrong)
    assert [parse_weight(w) for w in (85, 0.5, "85%", "12.5")] == [85, 0.5, 85, 12.5]


@given(st.decimals(min_value=0, max_value=100, places=4))
def test_shares_come_back_as_written(share):
    assert parse_share(percent(parse_share(f"{share:f}%"))) == parse_share(f"{share:f}%")


@given(st.integers(1, 2**63 - 1))
def test_every_whole_number_is_a_count(n):
    assert parse_count(n) == parse_count(str(n)) == n


# -- hostile text -----------------------------------------------------------------------------------------------------
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-10**6, 10**6) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), exclude_characters="\ufeff\u2028\u2029"),
              max_size=12),
    lambda inner: (st.lists(inner, max_size=4)
                   | st.dictionaries(st.text("abcxyz_", min_size=1, max_size=6), inner, max_size=4)),
    max_leaves=12)


@given(PLAIN)
def test_dumped_data_comes_back(data):
    assert parse_yaml(dump_yaml({"data": data}), "x")[0] == {"data": data}


@given(st.text(max_size=200) | st.lists(st.sampled_from(
    ["version: 1\n", "sources:", " {", "}", "[", "]", "- ", "&a", "*a", "<<: ", "!!str ", "a: ", "\n", "  ", ": ", "|",
     "%"]), max_size=30).map("".join))
def test_any_text_gives_plain_data_or_a_recipe_error(text):
    try:
        data, _ = parse_yaml(text, "x")
    except RecipeError:
        return
    assert data is None or isinstance(data, dict | list | str | int | float | bool)


@given(st.dictionaries(st.sampled_from(
    ["version", "sources", "datasets", "tokenizer", "shards", "curriculum", "train", "run", "code", "input", "extra"]),
    PLAIN, max_size=6))
def test_any_data_gives_a_recipe_error(tmp_path_factory, data):
    path = Path(tmp_path_factory.getbasetemp()) / "any.yaml"
    path.write_text(dump_yaml({"version": 1, **data}), encoding="utf-8")
    with pytest.raises(RecipeError) as caught:                   # none of these has both a source and a dataset
        load_recipe(path)
    assert caught.value.problems


# -- settings of phases and deduplications ----------------------------------------------------------------------------
def test_phases_of_their_own_reach_the_curriculum(load):
    """What a phase says of rate, positions and optimiser, and tokens beyond the total, as `tokenizer.mixture` resolves
    it."""
    long = "    - {name: long, extra: 1B, sequence: 16384, rope_theta: 2e6, rope_scaling: {kind: yarn, factor: 4, " \
           "original: 4096}, reset_optimizer: true, lr: {peak: 2e-5, warmup: 50M, shape: linear}}\n"
    recipe = load(CONTRACT.replace("\ntrain: {", "\n" + long + "train: {"))
    info = {"tokenizer": "t", "dtype": "uint16", "val": None}
    sets = {name: {**info, "train": {"path": name, "sha256": "", "tokens": 60 * 10**9}} for name in ("web", "wiki")}
    made, _ = resolve(recipe.plain(), sets, {"sha256": "t", "vocab_size": 32000, "eos": 0, "path": ""})
    last = made.phases[-1]
    assert last.lr == {"peak": 2e-5, "warmup": 50_000_000, "shape": "linear", "floor": 0.0}
    assert (last.extra, last.rope_theta, last.reset_optimizer, last.sequence) == (True, 2e6, True, 16384)
    assert last.rope_scaling == {"kind": "yarn", "factor": 4, "original": 4096}
    assert abs(last.tokens - 10**9) <= 2**19
    uses, _ = mixture(recipe, {"web": exactly(1e12), "wiki": exactly(1e12)})
    assert sum(use.needed for use in uses) == pytest.approx(21 * 10**9, rel=1e-4)


@pytest.mark.parametrize(("steps", "expected"), [
    ("[gopher_quality, pii, {exact: {prefer: ['signal:gopher_words']}}]", ""),
    ("[pii, gopher_quality, {exact: {prefer: ['signal:gopher_words']}}]",
     "steps[2].exact.prefer: the signal 'gopher_words' is read before the step 'pii'"),
    ("[pii, gopher_quality, exact, {minhash: {prefer: ['signal:gopher_words']}}]", ""),
    ("[{minhash: {prefer: ['signal:gopher_wrods']}}]", "no step before this one writes a signal 'gopher_wrods'"),
    ("[{exact: {by: [txt]}}]", "exact.by: 'txt' is nothing that documents can be compared by"),
    ("[{minhash: {recall: 0.9, rows: 3}}]", "remove bands and rows"),
    ("[{minhash: {containment: 0.8, verify: null}}]", "set verify: 0.75 or remove containment")])
def test_settings_of_deduplications(load, steps, expected):
    """A signal that a step writes after personal data was removed does not exist when documents are prepared."""
    text = f"""version: 1
sources:
  web: {{read: text, path: x}}
datasets:
  clean: {{from: web, steps: {steps}}}
"""
    if expected:
        assert any(expected in problem for problem in problems(load, text)), problems(load, text)
    else:
        load(text)


def test_a_deduplication_that_comes_first_reads_no_signal_that_its_input_writes_after_scrubbing(load):
    text = """version: 1
sources:
  web: {read: text, path: x}
datasets:
  clean: {from: web, steps: [STEPS]}
  deduped: {from: clean, steps: [{minhash: {prefer: ['signal:gopher_words']}}]}
"""
    assert "move 'gopher_quality' before 'pii'" in problems(load, text.replace("STEPS", "pii, gopher_quality"))[0]
    assert load(text.replace("STEPS", "gopher_quality, pii"))
