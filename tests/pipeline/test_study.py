"""The data of a study. Variants of a recipe run as one plan: what several of them need is run once, and each variant
gives what it gives when it runs alone."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import yaml

from pipeline.cli.training import forward, with_data
from pipeline.recipe import load_recipe
from pipeline.recipe.errors import RecipeError
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.runs import RunTasks
from pipeline.study.data import candidate_data, make_data, study_data
from pipeline.study.variants import StudyError, named_variants
from tests.corpus import sentences
from tokenizer.mixture.apportion import CurriculumError
from tokenizer.mixture.curriculum import Curriculum, Stream
from tokenizer.mixture.order import Order
from tokenizer.shards.layout import Shard
from tokenizer.shards.reader import ShardSet
from trainer.__main__ import parser

RECIPE = """
version: 1
sources:
  docs:  {read: text, path: docs}
  other: {read: text, path: other}
datasets:
  raw:   {from: docs, steps: [pii]}
  clean: {from: raw, steps: [{gopher_quality: {min_doc_words: 20}}]}
  last:  {from: clean, steps: [exact]}
  judge: {from: other, steps: [pii]}
tokenizer: {train: {kind: bpe, vocab: 300, from: clean}}
shards: {text: {from: last, longest: 32}}
curriculum:
  total: 4k
  phases: [{name: all, until: 100%, sequence: 32, batch: 128, mix: {text: 1}, on_exhausted: repeat}]
train: {model: {preset: tiny}}
run: {partition: 4KB}
"""
#: keys that a variant changes, by its name
VARIED = {"strict": "datasets.clean.steps.gopher_quality.min_doc_words=60", "whole": "shards.text.from=raw"}
VARY = [[name, change] for name, change in VARIED.items()]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    top, rng, prose = tmp_path_factory.mktemp("study"), random.Random(3), sentences()
    for folder, documents in (("docs", 30), ("other", 10)):
        (top / folder).mkdir()
        for i in range(documents):
            (top / folder / f"d{i:02d}.txt").write_text(" ".join(rng.sample(prose, 1 + i % 15)))
    (top / "recipe.yaml").write_text(RECIPE)
    return top


def study(site: Path, vary=VARY, held_out=("judge",), **options):
    return study_data(named_variants([f"base={site / 'recipe.yaml'}"], vary), held_out, name="s", **options)


def inline(store: Store):
    return make_backend("inline", 1, None)(store)


@pytest.fixture(scope="module")
def made(site) -> tuple[Path, list]:
    store = site / "store"
    return store, make_data(study(site), str(store), make_backend=inline)


def tasks(store: Path, run: str) -> list[str]:
    return list(RunTasks(Store(str(store)), run).all())


def curriculum(store: Path, variant: str) -> Curriculum:
    return Curriculum.load(store / "runs" / f"s@{variant}" / "curriculum.json")


def shards(store: Path, stream: Stream) -> tuple[Shard, ...]:
    return ShardSet(store / stream.train, stream.sha256).manifest.shards


def test_what_variants_share_runs_once(made):
    store, summaries = made
    wanted = {variant: tasks(store, f"s@{variant}") for variant in ("base", *VARIED)}
    executed = summaries[0].executed
    assert executed == len(set().union(*wanted.values())) < sum(map(len, wanted.values()))
    nodes = Counter(record.node for record in Log.read(Store(str(store))).records())
    passes = {variant: [list(RunTasks(Store(str(store)), f"s@{variant}").keys(node)) for node in ("raw", "judge")]
              for variant in wanted}
    assert passes["base"] == passes["strict"] == passes["whole"]
    assert nodes["raw"] == len(passes["base"][0]) > 1 and nodes["judge"] == len(passes["base"][1])
    assert nodes["tokenizer:"] == 1 and nodes["shards:held-out/assemble"] == 1
    clean = {variant: RunTasks(Store(str(store)), f"s@{variant}") for variant in wanted}
    assert nodes["clean:1"] == 2 * len(list(clean["base"].keys("clean:1")))          # of base and of strict


@pytest.mark.parametrize("variant", ["base", *VARIED])
def test_a_variant_is_what_its_recipe_makes_alone(site, made, tmp_path, variant):
    store, _ = made
    changes = [VARIED[variant]] if variant in VARIED else []
    alone = load_recipe(site / "recipe.yaml", [*changes, "curriculum.total=4000"])
    run_recipe(alone, str(tmp_path), make_backend=inline, run="alone", report=False)
    for dataset in ("raw", "clean", "last", "judge"):
        assert dataset_hash(Store(str(store)), f"{dataset}@{variant}") == dataset_hash(Store(str(tmp_path)), dataset)
    if variant != "strict":                       # which would train another tokenizer than the study's
        mine, theirs = curriculum(store, variant), Curriculum.load(tmp_path / "runs" / "alone" / "curriculum.json")
        assert [shard.sha256 for shard in shards(store, mine.streams[1])] \
            == [shard.sha256 for shard in shards(tmp_path, theirs.streams[0])]
        windows = [Order(c).locate(0, c.samples).window.tolist() for c in (mine, theirs)]
        assert windows[0] == windows[1] and len(windows[0]) == 4000 // 128 * 4


def test_a_recipe_that_is_run_after_its_study_finds_its_tasks_done(site, made):
    store, _ = made
    alone = load_recipe(site / "recipe.yaml", [VARIED["whole"]])
    assert run_recipe(alone, str(store), make_backend=inline, run="alone", report=False).executed == 0


def test_variants_have_one_tokenizer_and_are_judged_by_the_same_tokens(made):
    store, _ = made
    base, strict, whole = (curriculum(store, variant) for variant in ("base", *VARIED))
    assert base.tokenizer == strict.tokenizer == whole.tokenizer
    assert base.streams[0] == strict.streams[0] == whole.streams[0]
    assert base.streams[0].name == "held-out" and base.streams[0].tokens == 0 and base.streams[0].val_tokens > 100
    assert base.tokens == strict.tokens == whole.tokens
    assert base.streams[1].sha256 != strict.streams[1].sha256
    assert {p.name for p in (store / "shards").glob("*@*")} == {
        "text@base", "text@strict", "text@whole", "held-out@base"}


def test_a_second_call_runs_nothing_and_changes_nothing(site, made):
    store, _ = made
    before = {p: p.read_bytes() for p in store.glob("runs/s@*/curriculum.json")}
    again = make_data(study(site), str(store), make_backend=inline)
    assert again[0].executed == 0 and {p: p.read_bytes() for p in before} == before
    [document] = (json.loads(p.read_text()) for p in store.glob("studies/*/study.json"))
    assert [v["run"] for v in document["variants"]] == ["s@base", "s@strict", "s@whole"]
    assert document["variants"][1]["changes"] == [VARIED["strict"]]


def test_a_study_takes_another_variant_but_not_another_recipe_of_a_name(site, made):
    store, _ = made
    more = study(site, [*VARY, ["raw", "shards.text.from=raw", "datasets.raw.steps=[]"]])
    assert len(make_data(more, str(store), make_backend=inline)) == 4
    other = study(site, [["strict", "datasets.clean.steps.gopher_quality.min_doc_words=90"]])
    with pytest.raises(StudyError, match="strict"):
        make_data(other, str(store), make_backend=inline)


def test_each_variant_may_have_a_tokenizer_of_its_own(site, tmp_path):
    make_data(study(site, [VARY[0]], tokenizers=True), str(tmp_path), make_backend=inline)
    base, strict = (curriculum(tmp_path, variant) for variant in ("base", "strict"))
    assert base.tokenizer.sha256 != strict.tokenizer.sha256
    assert base.streams[0].val == "shards/held-out@base/split=val" != strict.streams[0].val


def test_files_may_be_held_out(site, tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": s}) + "\n" for s in sentences()[:20]))
    make_data(study(site, [VARY[1]], held_out=[str(tmp_path / "x.jsonl")]), str(tmp_path / "store"),
              make_backend=inline)
    base, whole = (curriculum(tmp_path / "store", variant) for variant in ("base", "whole"))
    assert base.streams[0] == whole.streams[0] and base.streams[0].val_tokens > 100


def test_candidates_for_a_training_have_its_tokenizer_and_no_curriculum(site, made):
    store, _ = made
    tokenizer = curriculum(store, "base").tokenizer
    variants = named_variants([f"one={site / 'recipe.yaml'}"], [["other", VARIED["strict"]]])
    data = candidate_data(variants, {"load": str(store / tokenizer.path)}, name="candidates")
    summaries = make_data(data, str(store), make_backend=inline)
    for variant, summary in zip(("one", "other"), summaries):
        manifest = json.loads((store / "shards" / f"text@{variant}" / "split=train" / "shards.json").read_text())
        assert manifest["tokenizer"] == tokenizer.sha256 and manifest["tokens"] == summary.shards["text"] > 0
        assert not (store / "runs" / f"candidates@{variant}" / "curriculum.json").exists()
    whole = json.loads((store / "shards" / "text@base" / "split=train" / "shards.json").read_text())
    one = json.loads((store / "shards" / "text@one" / "split=train" / "shards.json").read_text())
    assert [shard["sha256"] for shard in one["shards"]] == [shard["sha256"] for shard in whole["shards"]]


def test_variants_are_named_by_file_or_by_change(site):
    found = named_variants(["a.yaml", "other=x/b.yaml"], [["datasets.clean.steps.language.min=0.8"], ["n", "a.b=[1]"]])
    assert [(v.name, v.file) for v in found] == [("a", "a.yaml"), ("other", "x/b.yaml"), ("min-0.8", "a.yaml"),
                                                 ("n", "a.yaml")]


@pytest.mark.parametrize(("source", "change", "options"), [
    ("raw", "shards.text.from=more", {}), ("other", "datasets.last.steps.exact.against=[more]", {}),
    ("raw", "tokenizer.train.from=more", {"tokenizers": True})])
def test_a_variant_may_add_a_dataset_that_is_read(site, source, change, options):
    loaded = study(site, [["x", f"datasets.more={{from: {source}, steps: [exact]}}", change]], **options)
    assert "more" in loaded.recipes[1].datasets and "more" not in loaded.recipes[0].datasets


def test_an_unknown_key_of_a_variant_names_the_nearest_one(site):
    with pytest.raises(RecipeError) as caught:
        study(site, [["x", "datasets.clean.steps.gopher_quality.min_words=3"]])
    [problem] = caught.value.problems
    assert "did you mean 'min_doc_words'" in problem.message and problem.mark.file.startswith("--vary x ")


@pytest.mark.parametrize(("vary", "held_out", "said"), [
    (VARY, (), "--held-out"), (VARY, ("docs.txt",), "neither a dataset"), (VARY, ("judg",), "did you mean 'judge'"),
    (VARY, ("raw",), "'docs'"), ([], ("judge",), "compared with nothing"),
    ([["x", "train.clip=2"]], ("judge",), "--arm"), ([["x"]], ("judge",), "keys in which"),
    ([["a/b", "run.partition=8MB"]], ("judge",), "name of a variant"),
    ([["base", "run.partition=8MB"]], ("judge",), "two variants"),
    ([["x", "train="]], ("judge",), "--arm"), ([["x", "curriculum.total=2k"]], ("judge",), "--tokens"),
    ([["x", "datasets.claen.from=raw"]], ("judge",), "nothing would read it.*'clean'"),
    ([["x", "tokenizer.train.vocab=280"]], ("judge",), "--tokenizers")])
def test_what_cannot_be_compared_is_refused_before_anything_runs(site, vary, held_out, said):
    with pytest.raises((StudyError, RecipeError), match=said) as caught:
        study(site, vary, held_out)
    assert caught.value.exit_code == 2


# -- the command line --------------------------------------------------------------------------------------------------
def test_the_trainer_gets_the_runs_and_the_options_about_trainings(site, made, capsys):
    store, _ = made
    words = ["ablate", "--data", f"base={site / 'recipe.yaml'}", "--vary", *VARY[0], "--held-out", "judge", "--store",
             str(store), "--name", "s", "--workers", "1", "--seeds", "3", "--jobs", "2", "--tokens", "4k", "--widths",
             "32,64", "--set", "clip=0.5", "--device", "cpu", "--json"]
    passed = with_data(words)
    runs = [f"{store}/runs/s@{variant}" for variant in ("base", "strict")]
    assert passed[:3] == ["ablate", *runs]
    options = parser("ablate").parse_args(passed)
    assert (options.runs, options.on, options.out) == (runs, "held-out", f"{store}/studies/s")
    assert (options.seeds, options.jobs, options.tokens, options.widths) == (3, 2, None, "32,64")
    assert options.json and options.overrides == ["clip=0.5"] and not options.data


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory) -> Path:
    """The folder of a training of the run s@base, with checkpoints of each fifth step."""
    out = tmp_path_factory.mktemp("trained")
    assert forward(["run", f"{made[0]}/runs/s@base", "--out", str(out), "--device", "cpu", "--quiet", "--set",
                    "checkpoint.every=5", "--set", "checkpoint.keep=99", "--set", "sample.tokens=0"]) == 0
    return out


@pytest.mark.parametrize(("words", "said"), [
    (["--widths", "abc"], "--widths abc"), (["--tokens", "100"], "first step alone has 128"),
    (["--widths", "100"], "a width is a multiple of"), (["--gpus", "1"], "need --address"),
    (["--by", "tasks"], "have no evaluate.tasks"),
    (["--set", "evaluate.tasks={every: 1000, tasks: [boolq], data: nowhere}"], "nowhere is no folder"),
    (["--set", "evaluate.tasks={every: 1000, tasks: [boolq], data: .}"], "no data of the task boolq")])
def test_options_about_trainings_are_checked_before_a_study_makes_data(site, tmp_path, capfd, words, said):
    store = tmp_path / "new"
    assert forward(["ablate", "--data", f"base={site / 'recipe.yaml'}", "--vary", *VARY[0], "--held-out", "judge",
                    "--store", str(store), *words]) == 2
    assert_one_line(capfd.readouterr().err, said)
    assert not store.exists()


@pytest.mark.parametrize(("words", "said"), [
    (["--from", "7"], "--from 7"), (["--from", "31"], "learning rate has fallen to 0"), (["--share", "0%"], "--share"),
    (["--share", "x"], "--share x"), (["--tokens", "200"], "--tokens 200"), (["--by", "tasks"], "evaluate.tasks"),
    (["--data", "base=RECIPE"], "'base' stands there twice")])
def test_options_about_trainings_are_checked_before_candidates_are_made(site, made, trained, capfd, words, said):
    store, _ = made
    before = sorted((store / "runs").iterdir())
    capfd.readouterr()
    given = [word.replace("RECIPE", str(site / "recipe.yaml")) for word in words]
    assert forward(["anneal", f"{store}/runs/s@base", "--out", str(trained), "--from", "5", "--tokens", "2k",
                    "--name", "refused", "--data", f"two={site / 'recipe.yaml'}", *given]) == 2
    assert_one_line(capfd.readouterr().err, said)
    assert sorted((store / "runs").iterdir()) == before and not (store / "studies" / "refused").exists()


def test_candidates_get_the_tokenizer_of_the_run_and_weights_by_their_tokens(site, made, trained, capsys):
    store, _ = made
    words = ["anneal", f"{store}/runs/s@base", "--out", str(trained), "--from", "5", "--tokens", "2k", "--data",
             f"one={site / 'recipe.yaml'}", "--name", "c", "--workers", "1", "--share", "50%", "--json"]
    passed = parser("anneal").parse_args(with_data(words))
    manifest = json.loads((store / "shards" / "text@one" / "split=train" / "shards.json").read_text())
    assert passed.candidates == [f"one=text@one:{manifest['tokens']}"] and passed.share == "50%" and passed.step == 5
    assert manifest["tokenizer"] == curriculum(store, "base").tokenizer.sha256


@pytest.mark.parametrize(("words", "said"), [
    (["--set", "optimizer.lrr=1"], "did you mean 'lr'"),
    (["--by", "tasks"], "--by tasks: the settings have no evaluate.tasks"),
    (["--by", "tasks", "--set", "checkpoint.every=1000", "--set", "evaluate.tasks={every: 1000, tasks: [TASK], "
      "data: DATA}"], "--by tasks: each arm scores 1 of its checkpoints on tasks, and 3 are needed"),
    (["--set", "evaluate.tasks={every: 200, tasks: [arc_eazy], data: .}"], "did you mean 'arc_easy'"),
    (["--set", "evaluate.tasks={every: 200, tasks: [arc_easy], data: typo}"], "evaluate.tasks.data: typo is no folder"),
    (["--set", "checkpoint.every=5", "--set", "evaluate.tasks={every: 7, tasks: [sciq], data: .}"],
     "let it be a multiple of checkpoint.every")])
def test_a_mistake_in_the_settings_is_found_before_data_is_made(site, tmp_path, capfd, words, said):
    base = ["ablate", "--data", f"base={site / 'recipe.yaml'}", "--vary", *VARY[0], "--held-out", "judge", "--store",
            str(tmp_path / "new")]
    (tmp_path / "sciq.jsonl").write_text("{}\n")
    words = [word.replace("TASK", "sciq").replace("DATA", str(tmp_path)) for word in words]
    assert forward([*base, *words]) == 2
    assert_one_line(capfd.readouterr().err, said)
    assert not (tmp_path / "new").exists()


def test_a_variant_without_text_is_named(site, tmp_path):
    with pytest.raises(CurriculumError, match=r"s@empty: .*'text'"):
        make_data(study(site, [["empty", "datasets.clean.steps.gopher_quality.min_doc_words=90000"]]),
                  str(tmp_path / "store"), make_backend=inline)


def test_candidates_take_no_other_tokenizer_than_that_of_the_run(site):
    variants = named_variants([str(site / "recipe.yaml")], [["x", "tokenizer.train.vocab=280"]])
    with pytest.raises(StudyError, match="tokenizer of the run"):
        candidate_data(variants, {"load": "x"})


def test_candidates_need_no_tokenizer_of_their_own(site):
    recipe = yaml.safe_load((site / "recipe.yaml").read_text())
    for section in ("tokenizer", "curriculum", "train"):
        del recipe[section]
    (site / "shards.yaml").write_text(yaml.safe_dump(recipe))
    variants = named_variants([f"one={site / 'shards.yaml'}"], [["other", VARIED["strict"]]])
    for loaded in candidate_data(variants, {"load": "x"}).recipes:
        assert loaded.tokenizer is not None and str(loaded.tokenizer.load).endswith("x")


def test_other_commands_of_the_trainer_are_left_alone():
    for words in (["run", "x"], ["ablate", "x", "--arm", "a", "clip=1"], ["ablate", "--data", "x", "--help"], []):
        assert with_data(words) == words


@pytest.mark.parametrize(("words", "said"), [
    (["ablate", "RUN", "--data", "x.yaml"], "leave out RUN"),
    (["ablate", "--data", "x.yaml", "--arm", "a", "clip=1"], "leave out RUN"),
    (["ablate", "--vary", "a", "b=1"], "name it with --data"),
    (["ablate", "--data", "x.yaml", "--store", "s3://b/store"], "give a folder with --out"),
    (["anneal", "RUN", "--from", "1", "--tokens", "9", "--data", "x.yaml", "--mixes", "m.yaml"], "--mixes")])
def test_options_that_contradict_each_other_are_refused(words, said, capfd):
    assert forward(words) == 2
    assert_one_line(capfd.readouterr().err, said)


def assert_one_line(err, said):
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err


def test_an_error_in_a_recipe_is_one_line_without_a_traceback(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("version: 1\nsources: {a: {read: jsonl, path: a.jsonl}}\ndatasets: {b: {from: a}}"
                                     "\nstore: x\n")
    assert forward(["ablate", "--data", "r.yaml", "a=r.yaml", "--held-out", "a.jsonl"]) == 2
    assert_one_line(capfd.readouterr().err, "r.yaml:4:1: store: unknown key")
