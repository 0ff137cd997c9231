"""Toxicity, by a classifier that knows a few invented words: for whole documents and sentence by sentence."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import yaml
from pydantic import ValidationError

from pipeline.recipe import RecipeError, load_recipe
from pipeline.run import make_backend, run_recipe
from stages.document import Document
from stages.filter.toxicity import Toxicity, sentences

RUDE, KIND = ("grobble", "snarg", "flumpit"), ("thank", "lovely", "agree")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A fastText model with the labels toxic and non_toxic."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("model")
    lines = [f"__label__{label} you are a {rng.choice(words)} {rng.choice(words)} one ."
             for _ in range(300) for label, words in (("toxic", RUDE), ("non_toxic", KIND))]
    (folder / "train.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    code = ("import sys, fasttext; fasttext.train_supervised(sys.argv[1], dim=8, epoch=10, lr=0.5, bucket=1, thread=1, "
            "minCount=1, verbose=0).save_model(sys.argv[2])")
    # fastText trains on memory as it finds it: stages/models/train_quality.py says why
    zeroed = dict(os.environ, MALLOC_PERTURB_="255", MALLOC_MMAP_THRESHOLD_="131072")
    subprocess.run([sys.executable, "-c", code, str(folder / "train.txt"), str(folder / "model.bin")], env=zeroed,
                   check=True)
    return str(folder / "model.bin")


NICE, NASTY = "You are a lovely thank one. ", "You are a grobble snarg one! "


def look(model: str, text: str, **config) -> tuple[str | None, Document]:
    stage, doc = Toxicity(model=model, **config), Document("0" * 32, text)
    stage.setup()
    reason = stage.process(doc)
    assert set(doc.signals) == set(stage.signals)
    # drawn again from signals alone
    assert stage.verdict(Document("0" * 32, "", signals=doc.signals)) == reason
    return reason, doc


def test_documents_above_the_limit_are_dropped(model):
    reason, doc = look(model, NASTY.lower() * 3)
    assert reason == "toxicity" and doc.signals["toxicity"] > 0.9
    reason, doc = look(model, NICE.lower() * 3)
    assert reason is None and doc.signals["toxicity"] < 0.1 and doc.text == NICE.lower() * 3
    assert look(model, NASTY.lower() * 3, max=None)[0] is None


def test_sentences_above_the_limit_are_cut(model):
    nice, nasty = NICE.lower(), NASTY.lower()
    text = f"{nice}{nasty}\n\n{nice}{nasty}{nice.strip()}"
    reason, doc = look(model, text, max=None, max_sentence=0.4)
    assert reason is None and doc.text == f"{nice}{nice}{nice.strip()}"
    assert doc.signals["toxicity_cut"] == pytest.approx(1 - len(nice * 3) / len(text), abs=0.02)
    reason, doc = look(model, nice * 2, max=None, max_sentence=0.4)
    assert doc.text == nice * 2 and doc.signals["toxicity_cut"] == 0, "what has nothing to cut stays as it is"
    reason, doc = look(model, nasty * 2, max=None, max_sentence=0.4)
    assert (reason, doc.text, doc.signals["toxicity_cut"]) == ("toxicity_all", nasty * 2, 1.0)


def test_what_made_a_document_toxic_is_marked(model, monkeypatch):
    nice, nasty, worse = NICE.lower(), NASTY.lower(), "grobble snarg flumpit! "
    text = f"{nice}{nasty}\n\n{worse}{nice}"

    def marked(text: str, reason: str, **config) -> list[str]:
        return [text[a:b] for a, b in Toxicity(model=model, **config).matches(Document("", text), reason)]

    assert marked(text, "toxicity") == [worse.strip()], "the sentence with the highest score"
    assert marked(text, "nsfw", signal="nsfw", max=0.9) == [worse.strip()]
    assert marked(nice * 2, "toxicity") == [], "what is above the threshold lies behind the part that is searched"
    assert marked(nasty * 2, "toxicity_all", max=None, max_sentence=0.4) == [nasty.strip()] * 2
    assert marked(text, "toxicity", max=None) == []
    monkeypatch.setattr("stages.filter.toxicity.MOST_CHECKED_BYTES", 10)
    with pytest.raises(ValueError, match="too many to be loaded for a report"):
        marked(text, "toxicity")


def test_several_models_have_signals_of_their_own(model):
    reason, doc = look(model, NASTY.lower(), signal="nsfw")
    assert reason == "nsfw" and set(doc.signals) == {"nsfw"}
    with pytest.raises(ValidationError):
        Toxicity(model=model, signal="Not a name")


def test_sentences_are_the_text():
    text = 'One. "Two!" Three… (four?) v1.2.3 is 4.5\n\n - six\nそうです。「はい！」いいえ？ end'
    assert list(sentences(text)) == ["One. ", '"Two!" ', "Three… ", "(four?) ", "v1.2.3 is 4.5\n\n ", "- six\n",
                                     "そうです。", "「はい！」", "いいえ？ ", "end"]
    for of in ("", "a", "\n\n", "." * 1000, ". " * 1000, "。" * 100):
        assert "".join(sentences(of)) == of


def test_rows_of_marks_take_time_in_proportion():
    """Looked at from each of its marks, a row of 300,000 would take a quarter of an hour."""
    for mark in ".!?…。":
        text = mark * 300_000 + "a b" + mark + " c"
        pieces = list(sentences(text))
        assert "".join(pieces) == text and pieces[-1] == "c"
    assert list(sentences('A…"  B.. "C"?! ..D... . E')) == ['A…"  ', "B.. ", '"C"?! ', "..D... ", ". ", "E"]


def test_what_a_threshold_changes(model):
    key = {"max": 0.3}, {"max": 0.6}
    one, two = (Toxicity(model=model, **config) for config in key)
    assert one.key(("signal", "resource")) == two.key(("signal", "resource")) and one.key() != two.key()
    assert one.key(("signal",)) != Toxicity(model=model, max_sentence=0.4).key(("signal",))


def test_from_a_recipe(model, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(
        json.dumps({"text": text.lower()}) + "\n" for text in (NICE * 4, NASTY * 4, NICE * 4 + NASTY)))
    recipe = {"version": 1, "sources": {"docs": {"read": "jsonl", "path": "in.jsonl"}}, "datasets": {"clean": {
        "from": "docs", "steps": [{"toxicity": {"model": model, "max": 0.9, "max_sentence": 0.4}}]}}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(str(tmp_path / "r.yaml"), []), str(tmp_path / "store"),
               make_backend=make_backend("inline", 1, None))
    said = json.loads((tmp_path / "store" / "report.json").read_text())["datasets"]["clean"]
    assert (said["docs"], [(r["reason"], r["docs"]) for r in said["reasons"]]) == (2, [("toxicity", 1)])
    recipe["datasets"]["clean"]["steps"][0]["toxicity"]["label"] = "hateful"
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(RecipeError, match="no label 'hateful'; it has non_toxic, toxic"):
        load_recipe(str(tmp_path / "r.yaml"), [])
