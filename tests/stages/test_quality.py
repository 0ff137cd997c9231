"""The step `quality`: fastText's score, rounded to a grid, calibrated by a table of integers, for one label or as a
grade."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.document import Document
from stages.filter.quality import Quality
from stages.models.classifier import companion_path
from stages.models.train_quality import FastTextSettings, train
from stages.scoring.calibration import CalibrationError, Table
from stages.scoring.models import FastText
from tests.stages.labelled import GOOD, GRADED, LABELLED, POOR


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the models quality.bin (labels hq, lq), grades.bin (0 … 3) and topics.bin (three words)."""
    at = tmp_path_factory.mktemp("models")
    small = FastTextSettings(dim=8, epochs=10, rate=0.5, buckets=1 << 12)
    train(LABELLED, at / "quality.bin", seed=3, settings=small, held_out=0.6)
    train(GRADED, at / "grades.bin", seed=3, settings=small, held_out=0.6)
    topics = [(("rivers", "bags", "pills")[int(n) % 3], text) for n, text in GRADED]
    train(topics, at / "topics.bin", settings=small, held_out=0)
    return at


def loaded(path, **config) -> Quality:
    stage = Quality(model=str(path), **config)
    stage.setup()
    return stage


def test_good_text_scores_above_poor_text(folder):
    stage = loaded(folder / "quality.bin")
    good, poor = Document("a", "The river Rhine runs\nthrough many countries."), Document("b", "buy cheap win now!!!")
    assert stage.process(good) is None and stage.process(poor) == "quality"
    assert good.signals["quality_score"] > 0.5 > poor.signals["quality_score"]
    for doc in (good, poor):
        assert doc.signals["quality_score"] == round(doc.signals["quality_score"], 6)
        assert stage.verdict(Document("", signals=doc.signals)) == stage.process(doc)
    assert Quality(model=str(folder / "quality.bin"), min=good.signals["quality_score"]).verdict(good) is None


def test_the_score_is_that_of_fasttext(folder):
    stage, model = loaded(folder / "quality.bin"), FastText(folder / "quality.bin")
    for text in (*GOOD[::20], *POOR[::20], "und the\nи", "x" * 5000):
        assert stage.score(text) == pytest.approx(dict(model.predict(text, k=-1))["hq"], abs=1.1e-5)
    # the end of a line is a word to fastText: no text is without any
    assert 0 <= stage.score("") <= 1


def test_calibration_is_the_table_on_the_rounded_score(folder):
    path = folder / "quality.bin"
    file = companion_path(path, "calibration.json")
    raw, calibrated = loaded(path), loaded(path, calibration=str(file))
    table = Table(json.loads(file.read_text())["labels"]["hq"])
    pairs = sorted((raw.score(text), calibrated.score(text)) for text in (*GOOD, *POOR))
    assert all(calibrated == table(round(score * 1e6)) / 1e6 for score, calibrated in pairs)
    assert [c for _, c in pairs] == sorted(c for _, c in pairs), "no two documents change places"
    assert [c for _, c in pairs] != [r for r, _ in pairs]


def test_calibration_of_another_model_is_refused(folder, tmp_path):
    file = str(companion_path(folder / "quality.bin", "calibration.json"))
    with pytest.raises(CalibrationError, match="made for another model"):
        loaded(folder / "grades.bin", label="1", calibration=file)
    wrong = Quality(model=str(folder / "grades.bin"), label="1", calibration=file)
    assert "another model" in wrong.problems()["calibration"]
    assert Quality(model=str(folder / "quality.bin"), calibration=file).problems() == {}
    no_table = tmp_path / "c.json"
    no_table.write_text(json.dumps(json.loads(Path(file).read_text()) | {"labels": {}}))
    with pytest.raises(CalibrationError, match="holds no table for label 'hq'"):
        loaded(folder / "quality.bin", calibration=str(no_table))


def test_key_counts_model_and_calibration_not_the_threshold(folder, tmp_path):
    path = folder / "quality.bin"
    copies = {name: tmp_path / name for name in ("m.bin", "c.json")}
    copies["m.bin"].write_bytes(path.read_bytes())
    copies["c.json"].write_bytes(companion_path(path, "calibration.json").read_bytes())
    one = Quality(model=str(path), calibration=str(companion_path(path, "calibration.json")))
    other = Quality(model=str(copies["m.bin"]), calibration=str(copies["c.json"]))
    assert one.key() == other.key() != Quality(model=str(path)).key()
    assert set(one.resource_files()) == {"model", "calibration"}
    stricter = Quality({**other.config.model_dump(), "min": 0.9})
    assert one.key(("signal", "resource")) == stricter.key(("signal", "resource"))


def test_grades_are_expected(folder):
    stage, model = loaded(folder / "grades.bin", grade=True, min=1.5), FastText(folder / "grades.bin")
    for _, text in GRADED[::30]:
        said = model.predict(text, k=-1)
        mean = sum(float(label) * p for label, p in said) / sum(p for _, p in said)
        assert stage.score(text) == pytest.approx(mean, abs=1e-6)
    best, worst = Document("a", GRADED[-1][1]), Document("b", GRADED[0][1])
    assert (stage.process(best), stage.process(worst)) == (None, "quality")
    file = companion_path(folder / "grades.bin", "calibration.json")
    calibrated = loaded(folder / "grades.bin", grade=True, calibration=str(file))
    assert 0 <= calibrated.score(GRADED[0][1]) < 1.5 < calibrated.score(GRADED[-1][1]) <= 3


def test_several_models_write_several_signals(folder):
    doc = Document("a", GOOD[0])
    first, second = loaded(folder / "quality.bin"), loaded(folder / "topics.bin", label="rivers", signal="rivers_score")
    assert (first.signals, second.signals) == (("quality_score",), ("rivers_score",))
    first.process(doc)
    second.process(doc)
    assert set(doc.signals) == {"quality_score", "rivers_score"}
    with pytest.raises(ValueError, match="signal"):
        Quality(model="m.bin", signal="No Name")


def test_wrong_labels_are_named_with_those_there_are(folder):
    for field, config, said in (("label", {"label": "good"}, "has no label 'good'; it has hq, lq"),
                                ("grade", {"grade": True}, "labels that are no numbers: hq, lq")):
        with pytest.raises(ValueError, match=said):
            loaded(folder / "quality.bin", **config)
        assert said in Quality(model=str(folder / "quality.bin"), **config).problems()[field]
    assert Quality(model=str(folder / "nowhere.bin")).problems() == {}
    with pytest.raises(FileNotFoundError, match=r"nowhere\.bin"):
        loaded(folder / "nowhere.bin")
