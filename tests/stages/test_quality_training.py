"""Training a classifier: on which texts it is trained and judged, and what its card says about it."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import yaml

from stages.filter.quality import Quality
from stages.models import drift, model_card
from stages.models.classifier import Classifier, Scores, companion_path, kind_of
from stages.models.examples import Example, gather, near_duplicates, sample
from stages.models.train_quality import FastTextSettings, train
from stages.scoring.models import FastText
from tests.stages.labelled import GOOD, GRADED, LABELLED, POOR, own_word, shaped
from tests.stages.lid import lid176_model

SMALL = FastTextSettings(dim=8, epochs=10, rate=0.5, buckets=1 << 12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(path of a model that was trained with all options, its card)"""
    out = tmp_path_factory.mktemp("trained") / "sub" / "quality.bin"
    card = train(LABELLED, out, seed=3, settings=SMALL, held_out=0.6, reference=[t for _, t in LABELLED], keep=0.1,
                 data=[{"label": "hq", "file": "a|b.parquet", "documents": 120, "bytes": 9, "sha256": "f" * 64}],
                 intended_use="To sort rivers\nfrom shops.", license="CC0-1.0")
    return out, card


def test_a_text_and_its_near_duplicates_are_on_one_side():
    rng = random.Random(4)
    vocabulary = [own_word(i) for i in range(3000)]
    families = []
    for _ in range(120):
        words = [rng.choice(vocabulary) for _ in range(120)]
        changed = [*words[:70], "changed", *words[71:]]
        families.append([" ".join(words), " ".join(words).upper() + "!", " ".join(changed), " ".join(words[:105])])
    texts = [(("hq", "lq")[f % 2], text) for f, family in enumerate(families) for text in family]
    found = gather(texts, seed=1, held_out=0.5)
    side = {e.text: s for e, s in zip(found.kept, found.sides)}
    assert [len({side[text] for text in family if text in side}) for family in families] == [1] * 120
    assert found.clusters == 120 and found.largest == 4
    counts = {s: sum(side[family[0]] == s for family in families) for s in ("train", "calibrate", "test")}
    assert 40 < counts["train"] < 80 and 15 < counts["calibrate"] < 45 and 15 < counts["test"] < 45
    assert sorted(set(near_duplicates([t for _, t in texts]))) == list(range(0, 480, 4)), "no two families are one"


def test_what_a_text_is_decides_its_side():
    one = gather(LABELLED, seed=1, held_out=0.4)
    again = gather(reversed(LABELLED), seed=1, held_out=0.4)
    assert (one.kept, one.sides) == (again.kept, again.sides)
    other = gather(LABELLED, seed=2, held_out=0.4)
    assert one.kept == other.kept and one.sides != other.sides
    fewer = gather(LABELLED[:200], seed=1, held_out=0.4)
    known = {e.key: s for e, s in zip(one.kept, one.sides)}
    assert all(known[e.key] == s for e, s in zip(fewer.kept, fewer.sides)), "more texts move none of these"


def test_repeated_and_contradicted_texts():
    found = gather([("hq", "a b c"), ("hq", "A  b\nc"), ("hq", "one"), ("lq", "ONE "), ("lq", "two"), ("hq", "one"),
                    ("lq", " \n"), ("lq", "")], seed=0, held_out=0)
    assert [(e.label, e.text) for e in found.kept] == sorted([("hq", "a b c"), ("lq", "two")], key=lambda p: next(
        e.key for e in found.kept if e.text == p[1]))
    assert (found.repeated, found.contradicted) == (2, 1)
    assert set(found.sides) == {"train"}


def test_most_draws_by_content_alone():
    one = gather(LABELLED, seed=5, held_out=0, most=30)
    again = gather(reversed(LABELLED), seed=5, held_out=0, most=30)
    assert one.kept == again.kept and len(one.kept) == 60
    assert one.surplus == {"hq": 90, "lq": 90} == again.surplus
    assert {e.key for e in gather(LABELLED, seed=5, held_out=0, most=10).kept} < {e.key for e in one.kept}


def test_spellings_and_contradictions_do_not_depend_on_the_order():
    labelled = [("hq", f"text {i}") for i in range(20)] + [("lq", f"other {i}") for i in range(20)]
    labelled += [("lq", f"text {i}") for i in range(5)] + [("hq", "Text  3"), ("hq", "OTHER 7"), ("lq", "Other 8")] * 2
    found = []
    for order in (labelled, labelled[::-1], labelled[30:] + labelled[:30], labelled[11:] + labelled[:11]):
        for most in (None, 10):
            found.append((most, gather(order, seed=2, held_out=0.3, most=most)))
    for most in (None, 10):
        first, *others = [e for m, e in found if m == most]
        assert all(e == first for e in others) and first.contradicted == 6
        assert not {e.text for e in first.kept} & {"text 3", "Text  3", "other 7", "OTHER 7"}


def test_files_are_equal_whatever_the_order(trained, tmp_path):
    out, card = trained
    again = train(reversed(LABELLED), tmp_path / "quality.bin", seed=3, settings=SMALL, held_out=0.6, keep=0.1,
                  reference=[t for _, t in reversed(LABELLED)], data=card["data"], intended_use=card["intended_use"],
                  license=card["license"])
    assert again == card
    files = ["quality.bin", "quality.calibration.json", "quality.card.json", "quality.card.md"]
    assert sorted(p.name for p in out.parent.iterdir()) == files
    for name in files:
        assert (out.parent / name).read_bytes() == (tmp_path / name).read_bytes(), name
    train(LABELLED, tmp_path / "other.bin", seed=4, settings=SMALL, held_out=0)
    assert (tmp_path / "other.bin").read_bytes() != out.read_bytes()
    calibration_file = companion_path(tmp_path / "other.bin", "calibration.json")
    assert not calibration_file.exists(), "nothing was held out to calibrate on"


def test_thresholds_of_the_curve_are_scores_of_the_step(trained):
    at = [point["threshold"] for q in trained[1]["measured"]["questions"] for point in q["curve"]]
    assert at and all(value == round(round(value / Quality.grid) * Quality.grid, 10) for value in at)


def test_training_again_without_calibration_leaves_none_of_before(tmp_path, monkeypatch):
    """It imports nothing from the current folder either."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    companion_path(tmp_path / "q.bin", "calibration.json").write_text("{}")
    train(LABELLED, tmp_path / "q.bin", settings=SMALL, held_out=0)
    assert not companion_path(tmp_path / "q.bin", "calibration.json").exists()


def test_who_is_stopped_leaves_no_model_without_its_table(tmp_path, monkeypatch):
    out = tmp_path / "q.bin"
    out.write_bytes(b"the model before")

    def stopped(path, text):
        raise KeyboardInterrupt

    monkeypatch.setattr("stages.models.train_quality._write", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(LABELLED, out, settings=SMALL, held_out=0.6)
    assert [p.name for p in tmp_path.iterdir()] == ["q.bin"] and out.read_bytes() == b"the model before"


def test_the_card_tells_what_was_done(trained):
    out, card = trained
    assert card == model_card.read(companion_path(out, "card.json"))
    assert (card["kind"], card["labels"], card["target"]) == ("binary", ["hq", "lq"], "hq")
    e = card["examples"]
    assert sum(sum(e[side].values()) for side in ("train", "calibrate", "test")) == len(LABELLED)
    [q] = card["measured"]["questions"]
    assert q["roc_auc"] > 0.95 and q["roc_auc_95"][0] <= q["roc_auc"] <= q["roc_auc_95"][1]
    assert q["calibration_error"] < 0.2 and card["calibration"]["method"] == "platt"
    t = card["threshold"]
    held_out = gather(LABELLED, 3, 0.6)
    scores = [stage_score(out, e.text) for e, side in zip(held_out.kept, held_out.sides) if side != "train"]
    assert (t["documents"], t["left_out"], t["trained_on"]) == (len(scores), sum(e["train"].values()), 0)
    assert t["kept"] == round(sum(s >= t["min"] for s in scores) / len(scores), 4) <= 0.1
    page = companion_path(out, "card.md").read_text()
    for said in ("ROC-AUC", "CC0-1.0", "To sort rivers", "a\\|b.parquet", f"min: {model_card.decimal(t['min'])}",
                 card["model"]["sha256"], "Calibration: platt"):
        assert said in page, said


def stage_score(out, text):
    stage = Quality(model=str(out), calibration=str(companion_path(out, "calibration.json")))
    if not hasattr(stage_score, "of") or stage_score.of[0] != out:
        stage.setup()
        stage_score.of = (out, stage)
    return stage_score.of[1].score(text)


def test_the_card_shows_words_but_no_document(trained, tmp_path):
    private = [("hq", shaped(f"Write to ann.smith@mail.example or call 0171234567 Gundolf {'river ' * (i % 3 + 1)}", i))
               for i in range(9)]
    card = train([*LABELLED, *private], tmp_path / "q.bin", settings=SMALL, held_out=0)
    assert "river" in [word for word, _, _ in card["features"]["hq"]]
    assert {"cheap", "BUY"} & {word for word, _, _ in card["features"]["lq"]}
    files = [companion_path(tmp_path / "q.bin", ending) for ending in ("card.json", "card.md")]
    whole = "".join(file.read_text() for file in files)
    assert not re.search(r"ann\.smith|0171234567|Gundolf", whole)
    assert all(n >= model_card.FEWEST_OCCURRENCES and word.isalpha()
               for words in card["features"].values() for word, _, n in words)


@pytest.mark.parametrize(("labels", "kind"), [
    (["hq", "lq"], ("binary", "hq")), (["0", "1"], ("binary", "1")), (["-1", "10", "9"], ("grades", None)),
    (["a", "b"], ("labels", None)), (["a", "b", "1"], ("labels", None)), (["nan", "1"], ("labels", None))])
def test_labels_say_what_kind_of_classifier_it_is(labels, kind):
    assert kind_of(labels) == kind


def test_grades_and_labels(tmp_path):
    card = train(GRADED, tmp_path / "g.bin", settings=SMALL, held_out=0.6)
    assert card["kind"] == "grades" and [q["question"] for q in card["measured"]["questions"]] == [
        "grade >= 1", "grade >= 2", "grade >= 3"]
    assert card["calibration"]["method"] == "isotonic" and card["measured"]["mean_absolute_error"] < 0.8
    assert all(q["roc_auc"] > 0.8 for q in card["measured"]["questions"])
    topics = [(("b", "c", "a")[int(n) % 3], t) for n, t in GRADED]
    card = train(topics, tmp_path / "t.bin", settings=SMALL, held_out=0.4, reference=[t for _, t in topics])
    assert card["labels"] == ["a", "b", "c"] and len(card["measured"]["questions"]) == 3
    assert "threshold" not in card and sum(card["profiles"]["reference"]["labels"].values()) == len(topics)
    assert "a choice of labels" in companion_path(tmp_path / "t.bin", "card.md").read_text()


def test_words_that_look_like_labels_teach_nothing(tmp_path):
    poisoned = [(label, f"__label__evil {text} __label__lq a\n__label__b </s> tail __label__c")
                for label, text in LABELLED]
    train(poisoned, tmp_path / "q.bin", settings=SMALL, held_out=0)
    model = FastText(tmp_path / "q.bin")
    assert sorted(model.labels()) == ["hq", "lq"]
    words = set(model.matrices()[0])
    assert "tail" not in words and "a" in words
    assert Example("", "hq", "x__label__y __label__z\v</s>\ttail").line == "x__label__y \v"
    assert Example("", "hq", "a </s>b\r\nc").line == "a </s>b  c"


def test_errors_say_what_is_missing(tmp_path):
    out = tmp_path / "q.bin"
    with pytest.raises(ValueError, match="two texts or more of each label to train on, 'hq' has 1"):
        train([("hq", "one"), ("lq", "two"), ("lq", "three")], out, held_out=0)
    with pytest.raises(ValueError, match="there are texts of hq"):
        train([("hq", "one"), ("hq", "two")], out)
    with pytest.raises(ValueError, match="there are texts of none"):
        train([], out)
    for label in ("a b", "", "x" * 101, "a\u00a0b", "a\x00"):
        with pytest.raises(ValueError, match="a label is one word"):
            train([(label, "one"), ("lq", "two")], out)
    with pytest.raises(ValueError, match="same number"):
        train([("1", "one"), ("1.0", "two")], out)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    out.with_suffix(".card.json").write_text('{"format": "no"}')
    with pytest.raises(ValueError, match="no model card"):
        model_card.read(out.with_suffix(".card.json"))


# -- drift -----------------------------------------------------------------------------------------------------------
def scores_of(values) -> Scores:
    steps = np.asarray(values * 1e6, np.int64)
    return Scores(["hq", "lq"], np.stack([steps, 10**6 - steps], axis=1), steps)


@pytest.fixture
def no_language_model(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


def test_drift_is_told_from_chance(no_language_model):
    rng = np.random.Generator(np.random.PCG64(1))
    texts = ["x" * int(n) for n in rng.lognormal(6, 1, 2000)]
    was = drift.profile(texts, scores_of(rng.beta(1, 4, 2000)))
    assert "languages" not in was
    for n in (150, 1000, 2000):
        for _ in range(20):
            again = drift.compare(was, ["x" * int(c) for c in rng.lognormal(6, 1, n)], scores_of(rng.beta(1, 4, n)))
            assert again["verdict"] == "same", again
    moved = drift.compare(was, texts, scores_of(rng.beta(2, 2, 2000)))
    assert moved["scores"]["verdict"] == moved["verdict"] == "drift" and moved["lengths"]["verdict"] == "same"
    slightly = drift.compare(was, texts, scores_of(rng.beta(1.4, 4, 2000)))
    assert slightly["scores"]["verdict"] == "watch"
    longer = drift.compare(was, ["x" * int(c) for c in rng.lognormal(7, 1, 2000)], scores_of(rng.beta(1, 4, 2000)))
    assert longer["lengths"]["verdict"] == longer["verdict"] == "drift" and longer["scores"]["verdict"] == "same"
    few = drift.compare(was, texts[:99], scores_of(rng.beta(9, 1, 99)))
    assert few["verdict"] == few["scores"]["verdict"] == few["lengths"]["verdict"] == "too_few"
    assert json.loads(json.dumps(was)) == was


def test_drift_of_languages_and_of_labels(monkeypatch):
    monkeypatch.setenv("TOKENMILL_MODELS", str(lid176_model().parent))
    english, german = [GOOD[i] for i in range(100)], ["Der Fluss fließt durch das lange Tal nach Norden."] * 100
    same = scores_of(np.linspace(0, 1, 100))
    was = drift.profile(english, same)
    assert was["languages"] == {"en": 100}
    found = drift.compare(was, german, same)
    assert found["languages"]["verdict"] == "drift" and ["de", 0.0, 1.0] in found["languages"]["moved"]
    chosen = [Scores(["a", "b"], np.array([[1, 0]] * n + [[0, 1]] * (200 - n)), None) for n in (100, 110, 190)]
    was = drift.profile(POOR + GOOD[:80], chosen[0])
    assert was["labels"] == {"a": 100, "b": 100} and "scores" not in was
    assert drift.compare(was, POOR + GOOD[:80], chosen[1])["labels"]["verdict"] == "same"
    assert drift.compare(was, POOR + GOOD[:80], chosen[2])["labels"]["verdict"] == "drift"


def test_a_classifier_says_what_the_step_says(trained):
    out, card = trained
    table = json.loads(companion_path(out, "calibration.json").read_text())
    classifier = Classifier(FastText(out), card["kind"], card["labels"], card["target"], table)
    texts = [text for _, text in LABELLED[::9]]
    assert classifier.scores(texts).values().tolist() == [stage_score(out, text) for text in texts]
    assert len(classifier.scores([])) == 0 and classifier.scores([]).best() == []


def test_a_reference_is_judged_by_what_was_not_trained_on(tmp_path):
    seen = [text for _, text in LABELLED]
    few = train(LABELLED, tmp_path / "few.bin", settings=SMALL, held_out=0, reference=[*seen, "one more text", " "])
    assert {k: few["threshold"][k] for k in ("documents", "left_out", "trained_on")} == {
        "documents": 241, "left_out": 0, "trained_on": 240}
    assert "240 of them were trained on" in companion_path(tmp_path / "few.bin", "card.md").read_text()
    new = [shaped(text, 7000 + i) for i, text in enumerate(GOOD)]
    card = train(LABELLED, tmp_path / "new.bin", settings=SMALL, held_out=0, reference=[*seen, *new], keep=0.5)
    assert card["threshold"]["documents"] == 120 and card["threshold"]["left_out"] == 240
    assert card["profiles"]["reference"]["documents"] == 120
    assert sample([*new, "", *seen], 1, 50) == sample([*seen, *new], 1, 50) and len(sample(new, 1, 50)) == 50
    assert set(sample(new, 1, 10)) < set(sample(new, 1, 50))


@pytest.mark.parametrize(("score", "said"), [
    (0.139876, "0.139876"), (2.345678, "2.345678"), (1e-6, "0.000001"), (3.0, "3"), (0.5, "0.5"), (0.0, "0"),
    (-1.25, "-1.25"), (120.0, "120")])
def test_a_threshold_is_written_with_all_its_digits(score, said):
    assert model_card.decimal(score) == said and yaml.safe_load(said) == score
