"""The warnings about recipes that can run but look wrong."""

from __future__ import annotations

import pytest

from pipeline.plan.lint import lint
from stages.catalog import READERS
from tests.pipeline import test_recipe
from tests.pipeline.test_recipe import CONTRACT, SMALL, problems

load = test_recipe.load  # a fixture


def test_lint_is_silent_about_the_contracts_recipe(load):
    assert lint(load(CONTRACT)) == []


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("steps: [url, ", "steps: [gopher_repetition, url, ",
     "'url' is cheaper than 'gopher_repetition' before it; put it first"),
    ("steps: [{html: {engine: trafilatura}}]", "steps: [html, url]", "'url' needs no text; put it before 'html'"),
    ("steps: [{html: {engine: trafilatura}}]", "steps: []", "source 'web' gives raw pages (warc) and no step makes"),
    ("{language: {keep: [en], min: 0.65}}, ", "", "'gopher_quality' is made for English, but documents of other"),
    ("keep: [en]", "keep: [en, de]", "'gopher_quality' is made for English, but documents of other"),
    ("from: [clean, wiki], steps", "from: [clean], steps", "sources.wiki: no dataset is made from it"),
    ("where: {source: wiki}, ", "", "shards.wiki: documents of deduped are in shards 'web' too"),
])
def test_lint_warns(load, old, new, expected):
    assert old in CONTRACT
    text = CONTRACT.replace(old, new, 1)
    if "no dataset is made from it" in expected:
        text = text.replace(", priority: [wiki, clean]", "").replace("where: {source: wiki}", "where: {language: de}")
    warnings = lint(load(text))
    assert any(expected in line for line in warnings), warnings


@pytest.mark.parametrize(("reader", "step", "fits"), [
    ("warc", "html", True), ("warc", "pdf", True), ("pdf", "pdf", True), ("html", "html", True),
    ("text", "latex", True), ("html", "pdf", False), ("pdf", "html", False), ("pdf", "latex", False)])
def test_lint_knows_which_extractor_fits(load, reader, step, fits):
    warnings = lint(load(f"version: 1\nsources: {{a: {{read: {reader}, path: x}}}}\n"
                      f"datasets: {{b: {{from: a, steps: [{step}]}}}}\n"))
    assert any("no step makes text" in line for line in warnings) != fits


def test_lint_names_shards_nobody_mixes(load):
    text = CONTRACT.replace("wiki: 15}", "wiki: 15}").replace(", wiki: 15}", "}").replace(", wiki: 40}", "}")
    assert any("shards.wiki: no phase" in line for line in lint(load(text.replace("max_epochs: {wiki: 4}, ", ""))))


def test_every_reader_may_be_named(load):
    for name in READERS:
        if name not in ("datatrove", "tokens"):                  # need the block it wraps, the format of the files
            load(SMALL.replace("read: warc", f"read: {name}"))


def test_a_missing_package_names_the_extra(load, monkeypatch):
    """As on a machine without the extras: the stage's own module cannot be imported."""
    from pipeline.recipe import check

    def missing(name):
        raise ModuleNotFoundError("No module named 'trafilatura'", name="trafilatura")

    monkeypatch.setattr(check, "stage_class", missing)
    errors = problems(load, SMALL)
    assert errors[0].startswith("8 datasets.clean.steps[0]: the step 'html' needs the package 'trafilatura', which is "
                                "not installed; pip install 'tokenmill[pipeline]'")


def clean_steps(steps: str) -> str:
    """Return the recipe CONTRACT with other steps for the dataset `clean`."""
    start = CONTRACT.index("steps: [url")
    return CONTRACT[:start] + f"steps: [{steps}]" + CONTRACT[CONTRACT.index("}\n", start):]


STEPS = "url, {language: {keep: [en], min: 0.65}}, gopher_quality, pii"


@pytest.mark.parametrize(("text", "line", "expected"), [
    (clean_steps(f"{STEPS}, {{language: {{keep: [de]}}}}"), 5, "no document passes: steps before it keep only en"),
    (clean_steps("{language: {keep: [en]}}, fineweb, fineweb, pii"), 5, "'fineweb' ran before with the same settings"),
    (clean_steps("url, {language: {keep: [en], min: 0.65}}, {language: {keep: [en], min: 0.5}}, pii"), 5,
     "'language' cannot drop anything: an earlier one was stricter (min 0.65 before, 0.5 here)"),
    (clean_steps("{language: {keep: [en]}}, {language: {keep: [en, de]}}, pii"), 5, "keep en before, en, de here"),
    (clean_steps("url, {language: {keep: [en]}}, gopher_quality"), 6, "pages of 'web' reach it with e-mail and IP"),
    (clean_steps("url, pii"), 6, "pages of 'web' reach it in any language"),
    (clean_steps("{language: {keep: [en]}}, exact, gopher_quality, pii"), 5, "'exact' compares documents that 'gopher"),
    (clean_steps("{language: {keep: [en]}}, pii, repeats, exact"), 5, "'repeats' before 'exact' cuts copies"),
    (CONTRACT.replace("max_epochs: {wiki: 4}", "max_epochs: {wiki: 9}"), 14, "9 epochs of 'wiki': beyond 4 a repeated"),
    (CONTRACT.replace("datasets:", "datasets:\n  spare: {from: wiki, steps: [exact]}"), 4,
     "datasets.spare: no dataset, tokenizer or shards read it"),
    (CONTRACT.replace("wiki: {from: deduped, where: {source: wiki}", "wiki: {from: deduped, where: {source: web}")
     .replace("vocab: 32000, from: deduped", "vocab: 32000, from: deduped, where: {source: wiki}"),
     7, "the tokenizer is trained on 'deduped', but the mixture reads none of it"),
    (CONTRACT.replace("  deduped:   {from: [clean, wiki]", "  german: {from: clean, where: {language: de}}\n"
                      "  deduped:   {from: [clean, wiki]"), 6, "no document is left: steps before it keep only en"),
])
def test_lint_names_line_and_remedy(load, text, line, expected):
    warnings = lint(load(text))
    assert any(expected in warning for warning in warnings), warnings
    assert any(f"recipe.yaml:{line}:" in warning for warning in warnings if expected in warning), warnings


@pytest.mark.parametrize("steps", [
    STEPS, "url, {language: {keep: [en], min: 0.5}}, {language: {keep: [en], min: 0.65}}, pii",
    "{language: {keep: [en, de]}}, {language: {keep: [en]}}, gopher_quality, pii",
    "{language: {keep: [en]}}, gopher_quality, c4, gopher_quality, pii",      # c4 takes lines out of a text
    "{language: {keep: [en]}}, gopher_quality, pii, exact, minhash, repeats, {repeats: {unit: line}}",
])
def test_lint_is_silent_about_what_makes_sense(load, steps):
    assert lint(load(clean_steps(steps))) == []


def test_lint_takes_measured_speeds(load):
    recipe = load(clean_steps("gopher_repetition, {language: {keep: [en]}}, pii"))
    assert not any("cheaper" in warning for warning in lint(recipe))
    warnings = lint(recipe, {"gopher_repetition": 1e5, "language": 1e8})
    assert any("'language' is cheaper than 'gopher_repetition' before it" in line for line in warnings)


@pytest.mark.parametrize("steps", [
    "{language: {keep: [en]}}, gopher_quality, pii, exact, c4, exact",          # c4 makes texts alike, and so does pii
    "{language: {keep: [en]}}, gopher_quality, exact, pii, exact"])
def test_lint_knows_what_makes_texts_alike(load, steps):
    assert not any("ran before" in warning for warning in lint(load(clean_steps(steps))))


def test_lint_lets_two_datasets_be_compared_after_each_was_with_itself(load):
    text = CONTRACT.replace("datasets:", "datasets:\n  lone: {from: wiki, steps: [exact]}").replace(
        "gopher_quality, c4, fineweb, {pii: {}}]", "gopher_quality, c4, fineweb, {pii: {}}, exact]").replace(
        "from: [clean, wiki], steps: [{minhash: {verify: 0.75}}], priority: [wiki, clean]", "from: [clean, lone], "
        "steps: [exact, {minhash: {verify: 0.75}}]")
    assert "from: [clean, lone], steps: [exact, " in text and "{pii: {}}, exact]" in text
    assert lint(load(text)) == []
    twice = text.replace("tokenizer:", "  again: {from: deduped, steps: [exact]}\ntokenizer:", 1).replace(
        "from: deduped}}          #", "from: again}}          #")
    assert any("'exact' ran before with the same settings" in warning for warning in lint(load(twice)))


def test_lint_claims_nothing_about_ways_it_has_not_followed(load):
    """Seventy languages, of which the last was never filtered."""
    names = [f"l{i:02d}" for i in range(70)]
    sources = "\n".join(f"  s{n}: {{read: jsonl, path: {n}.jsonl}}" for n in names)
    single = "\n".join(f"  {n}: {{from: s{n}, steps: [{'' if n == 'l69' else 'url'}]}}" for n in names)
    text = (f"version: 1\nsources:\n{sources}\ndatasets:\n{single}\n"
            f"  every: {{from: [{', '.join(names)}], steps: []}}\n  end: {{from: every, steps: [url]}}\n")
    assert not any("ran before" in warning for warning in lint(load(text)))
    assert any("ran before" in warning for warning in lint(load(text.replace("every: {from: [" + ", ".join(names),
                                                                       "every: {from: [" + ", ".join(names[:60])))))


def test_lint_does_not_say_both_orders_are_wrong(load):
    """A fast barrier and a slow filter, as a store may have measured them."""
    speeds = {"exact": 5e8, "gopher_repetition": 1e6}
    for steps in ("exact, gopher_repetition", "gopher_repetition, exact"):
        recipe = load(clean_steps(f"{{language: {{keep: [en]}}}}, {steps}, pii"))
        assert not any("cheaper" in line or "compares documents" in line for line in lint(recipe, speeds)), steps
    recipe = load(clean_steps("{language: {keep: [en]}}, minhash, exact, pii"))
    assert any("'exact' is cheaper than 'minhash'" in warning for warning in lint(recipe, {"minhash": 1e6}))
    assert not any("cheaper" in warning for warning in lint(recipe))


def test_lint_knows_the_filters_of_other_projects(load):
    [english] = [s for s in lint(load(clean_steps("dclm_quality, pii"))) if "English" in s]
    assert "'dclm_quality' is made for English" in english
    twice = "{language: {keep: [en]}}, c4_paragraphs, dclm_links, c4_paragraphs"
    assert not any("ran before" in s for s in lint(load(clean_steps(twice + ", pii")))), "it sees another text"
    assert any("'c4_paragraphs' ran before" in s for s in lint(load(clean_steps(twice.replace("dclm_links, ", "")))))
    assert any("'c4_paragraphs' is cheaper than 'c4'" in s for s in lint(load(clean_steps("c4, c4_paragraphs, pii"))))


def test_lint_names_files_that_own_code_imports(load, tmp_path):
    (tmp_path / "word_lists.py").write_text("WORDS = ['a']\n")
    (tmp_path / "own_stage_x.py").write_text(
        "import json\nfrom stages.stage import Stage\n\ndef words():\n    from word_lists import WORDS\n"
        "    return WORDS\n\nclass Own(Stage):\n    name = 'own_x'\n")
    text = SMALL.replace("version: 1\n", "version: 1\ncode: [own_stage_x.py]\n") + "      - own_stage_x:Own\n"
    warnings = [s for s in lint(load(text, allow_custom=True)) if "imports" in s]
    assert len(warnings) == 1 and "own_stage_x.py imports 'word_lists' (word_lists.py beside it)" in warnings[0]
    assert "recipe.yaml:2:" in warnings[0]
    both = text.replace("[own_stage_x.py]", "[word_lists.py, own_stage_x.py]")
    assert not any("imports" in s for s in lint(load(both, allow_custom=True)))
