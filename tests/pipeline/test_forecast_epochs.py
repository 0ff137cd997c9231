"""`tokenmill plan --tokens`: epochs, streams that run out, and the value of repeated data, before any token exists."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from pipeline.cli.app import run_command
from pipeline.forecast.epochs import BadTokens, given_tokens, phase_uses, worth
from pipeline.forecast.mixtures import load_mixture, ready_mixtures
from pipeline.recipe import load_recipe

RECIPE = """
version: 1
sources: {all: {read: text, path: nowhere/*.txt}}
datasets: {d: {from: all, steps: [exact]}}
tokenizer: {train: {kind: bpe, vocab: 300, from: d, sample: 1MB}}
shards:
  web: {from: d, longest: 4096}
  code: {from: d, longest: 4096}
  math: {from: d, longest: 4096}
curriculum:
  total: 10T
  phases:
    - {name: stable, until: 80%, sequence: 4096, batch: 4096k, mix: {web: 90, code: 10}, max_epochs: {code: 2}}
    - {name: more, until: 90%, mix: {web: 60, code: 40}}
    - {name: anneal, until: 100%, mix: {math: 100}, on_exhausted: repeat}
train: {model: {preset: demo}}
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE.replace("4096k", "4194304"))
    return load_recipe(str(tmp_path / "r.yaml"))


def test_epochs_limits_and_worth_by_phase(recipe):
    uses, notes = phase_uses(recipe, given_tokens(["web=8T,code=500B", "math=100B"], recipe))
    by_place = {(u.phase, u.stream): u for u in uses}
    assert list(by_place) == [("stable", "code"), ("stable", "web"), ("more", "code"), ("more", "web"),
                              ("anneal", "math")]
    assert by_place["stable", "web"].epochs == pytest.approx(0.9, rel=1e-3)
    assert by_place["stable", "code"].epochs == pytest.approx(1.6, rel=1e-3)
    assert by_place["more", "code"].epochs == pytest.approx(2.4, rel=1e-3)
    assert by_place["anneal", "math"].epochs == pytest.approx(10, rel=1e-3)
    assert [u.allowed for u in uses] == [2, 1, 2, 1, None]
    assert [key for key, use in by_place.items() if use.exhausted] == [("more", "code")]
    assert by_place["stable", "web"].worth == 1
    assert by_place["anneal", "math"].worth == pytest.approx(worth(10), rel=1e-3)
    assert any("'math' would be read about 10.0 times" in note for note in notes)
    assert any("by the end of phase 'more' stream 'code' has too few tokens" in note for note in notes)


def test_four_epochs_are_worth_almost_as_much_as_new_tokens():
    # arXiv 2305.16264: up to 4 epochs are almost as good as new data, and no repetition adds more than R* times as much
    assert worth(0.5) == worth(1) == 1
    assert worth(4) == pytest.approx((1 + 15.387756 * (1 - math.exp(-3 / 15.387756))) / 4)
    assert 0.9 < worth(4) < 1
    assert worth(1e6) * 1e6 == pytest.approx(16.387756)


@pytest.mark.parametrize(("given", "said"), [
    (["web=8T"], "give the tokens of code, math, too, such as code=1T"),
    (["wbe=8T"], "no shards 'wbe': did you mean 'web'?"),
    (["web=8X,code=1,math=1"], "--tokens web=8X: '8X'"),
    (["web", "code=1"], "--tokens web:"),
    (["web=1,web=2"], "'web' is named twice")])
def test_numbers_that_do_not_fit_are_refused(recipe, given, said):
    with pytest.raises(BadTokens, match=said.replace("?", r"\?")):
        given_tokens(given, recipe)


def test_the_command_reads_no_input(recipe, tmp_path, tokenmill):
    path = str(tmp_path / "r.yaml")
    shown = tokenmill("plan", path, "--tokens", "web=8T,code=500B,math=100B")
    assert shown.code == 0, shown.err
    assert "  2.40    97%  too few tokens: max_epochs is 2" in shown.out
    assert "note: curriculum: stream 'math' would be read about 10.0 times" in shown.out
    document = json.loads(tokenmill("plan", path, "--tokens", "web=8T,code=500B,math=100B", "--json").out)
    assert [row["exhausted"] for row in document["mixture"]] == [False, False, True, False, False]
    refused = tokenmill("plan", path, "--tokens", "web=8T")
    assert refused.code == 1
    assert "give the tokens of code, math" in refused.err
    assert not (tmp_path / "store").exists()


def test_a_stream_of_almost_nothing_is_planned_like_any_other(recipe):
    uses, _ = phase_uses(recipe, given_tokens(["web=8T,code=500B,math=5k"], recipe))
    assert uses[-1].epochs == pytest.approx(2e8, rel=1e-3)
    assert uses[-1].worth < 1e-6


def test_a_thousand_languages_at_eleven_trillion_tokens_take_seconds(tmp_path):
    names = [f"l{i:03}" for i in range(1000)]
    shards = "\n".join(f"  {name}: {{from: d, longest: 4096}}" for name in names)
    mix = f"{{all: {{share: 100, streams: [{', '.join(names)}], unimax: 4}}}}"
    (tmp_path / "r.yaml").write_text(f"""
version: 1
sources: {{all: {{read: text, path: nowhere/*.txt}}}}
datasets: {{d: {{from: all, steps: [exact]}}}}
tokenizer: {{train: {{kind: bpe, vocab: 300, from: d, sample: 1MB}}}}
shards:
{shards}
curriculum:
  total: 11T
  phases: [{{name: all, until: 100%, sequence: 4096, batch: 4194304, mix: {mix}, on_exhausted: repeat}}]
""")
    recipe = load_recipe(str(tmp_path / "r.yaml"))
    tokens = {name: int(6e12 / (i + 1) ** 1.5) for i, name in enumerate(names)}
    uses, _ = phase_uses(recipe, tokens)
    assert len(uses) == 1000
    assert sum(use.tokens for use in uses) == pytest.approx(11e12, rel=1e-3)
    small = [use.epochs for use in uses if use.tokens < 0.9 * max(use.tokens for use in uses)]
    assert small and max(abs(epochs - 4) for epochs in small) < 0.1, "what is below the equal part is read 4 times"


def test_tokens_may_come_from_a_table(recipe, tmp_path):
    table = tmp_path / "counts.csv"
    table.write_text("stream,tokens\nweb,8T\ncode\t500B\n\nmath 100B\n")
    want = given_tokens(["web=8T,code=500B,math=100B"], recipe)
    assert given_tokens([str(table)], recipe) == want
    table.write_text("web 8T\ncode 500B\n")
    assert given_tokens([str(table), "math=100B"], recipe) == want
    for text, said in (("web 8T\ncode\n", "csv:2: a line has"), ("web 8T\nweb 1T\n", "csv:2: 'web' is named twice"),
                       ("wep 8T\n", "csv:1: .* did you mean 'web'"), ("web many\n", "csv:1: ")):
        table.write_text(text)
        with pytest.raises(BadTokens, match=said):
            given_tokens([str(table)], recipe)
    with pytest.raises(BadTokens, match="neither STREAM=COUNT nor a table"):
        given_tokens([str(tmp_path / "nothing")], recipe)


def test_the_mixture_of_llama_has_the_epochs_that_its_paper_prints():
    mixture = load_mixture("llama")
    uses, _ = phase_uses(mixture.recipe, given_tokens([], mixture.recipe, mixture.tokens))
    assert {use.stream: round(use.epochs, 2) for use in uses} == {
        "common_crawl": 1.10, "c4": 1.06, "github": 0.64, "wikipedia": 2.45, "books": 2.23, "arxiv": 1.06,
        "stackexchange": 1.03}


def test_smollm3_has_three_stages_of_11_trillion_tokens():
    mixture = load_mixture("smollm3")
    tokens = given_tokens(["web=8T,multilingual=1.5T,stackexchange=20B,code=1T,math=300B"], mixture.recipe)
    uses, notes = phase_uses(mixture.recipe, tokens)
    total = {name: sum(use.tokens for use in uses if use.phase == name) for name in ("stage1", "stage2", "stage3")}
    assert [round(n / 1e12, 2) for n in total.values()] == [8.14, 1.76, 1.23]
    assert {(use.phase, use.stream) for use in uses if use.exhausted} >= {("stage1", "code"), ("stage2", "math")}
    assert len(notes) == 3


@pytest.mark.parametrize("name", ready_mixtures())
def test_a_known_mixture_is_printed_as_yaml_that_can_be_copied_into_a_recipe(tmp_path, tokenmill, name):
    done = tokenmill("plan", "--mixture", name)
    document = yaml.safe_load(done.out)
    assert document["about"]["name"] == name and document["about"]["version"] and document["about"]["after"]
    streams = sorted(load_mixture(name).recipe.shards)
    recipe = {**yaml.safe_load(RECIPE.replace("4096k", "4194304")), "curriculum": document["curriculum"],
              "shards": {stream: {"from": "d", "longest": 8192} for stream in streams}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    own = load_recipe(str(tmp_path / "own.yaml"))
    assert own.plain()["curriculum"] == load_mixture(name).recipe.plain()["curriculum"]
    assert ("# phase  stream" in done.out) == (set(document.get("tokens", {})) == set(streams))


def test_an_unknown_mixture_and_a_plan_of_nothing_are_refused(tokenmill):
    with pytest.raises(BadTokens, match="did you mean 'gpt3'"):
        load_mixture("gpt4")
    for arguments in ((), ("recipe.yaml", "--mixture", "gpt3")):
        assert tokenmill("plan", *arguments).code == 2


SPLIT = """
version: 1
sources: {web: {read: jsonl, path: "*.jsonl", language: lang}}
datasets: {all: {from: web}}
tokenizer: {load: tokenizer.json}
shards: {web: {from: all, by: language, longest: 4096}}
curriculum:
  total: 8T
  phases:
    - {name: all, until: 100%, sequence: 4096, batch: 4194304, on_exhausted: repeat, mix: MIX}
"""


@pytest.fixture
def split_recipe(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")

    def load(mix: str):
        (tmp_path / "split.yaml").write_text(SPLIT.replace("MIX", mix))
        return load_recipe(tmp_path / "split.yaml")
    return load


def test_split_shards_are_planned_by_the_tokens_of_their_streams(split_recipe):
    loaded = split_recipe("{web: {share: 100, by: language, unimax: 4}}")
    uses, _ = phase_uses(loaded, given_tokens(["web.en=5T,web.de=1T", "web.is=10B"], loaded))
    assert {use.stream: round(use.epochs, 2) for use in uses} == {"web.en": 0.8, "web.de": 3.98, "web.is": 4.0}


def test_split_shards_may_be_planned_as_a_whole(split_recipe):
    loaded = split_recipe("{web: {share: 100, by: language, unimax: 4}}")
    [use], _ = phase_uses(loaded, given_tokens(["web=4T"], loaded))
    assert (use.stream, round(use.epochs, 2)) == ("web", 2.0)


@pytest.mark.parametrize("given", ["web=1T,web.en=1T", "webs.en=1T", ""])
def test_tokens_of_split_shards_that_do_not_fit_are_refused(split_recipe, given):
    loaded = split_recipe("{web: {share: 100, by: language}}")
    with pytest.raises(BadTokens):
        given_tokens([given], loaded)


def test_a_stream_that_the_mixture_names_needs_tokens(split_recipe):
    loaded = split_recipe("{web.en: 60, web.fr: 40}")
    with pytest.raises(BadTokens, match=r"web\.fr"):
        phase_uses(loaded, given_tokens(["web.en=1T"], loaded))


def test_a_mixture_that_comes_with_tokenmill_has_no_recipe_to_name(capsys):
    assert run_command(["plan", "--mixture", "smollm3", "--tokens", "web=8T,wbe=1T"]) == 1
    assert "--tokens wbe=1T: there are no shards 'wbe': did you mean 'web'?" in capsys.readouterr().err
