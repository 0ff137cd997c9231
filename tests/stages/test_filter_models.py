"""Language and quality: fastText classifiers as stages."""

from __future__ import annotations

import hashlib
import threading

import pytest

from stages.document import Document
from stages.filter.language import Language
from stages.filter.models import LID176, lid176
from stages.filter.quality import Quality, train_quality
from tests.stages.lid import lid176_model
from tests.stages.texts import AWKWARD, PROSE, real_texts

GERMAN = "Das Haus stand am Ende einer langen Straße,\nund seit Jahren hatte niemand darin gewohnt."


def loaded(**config) -> Language:
    stage = Language(model=str(lid176_model()), **config)
    stage.setup()
    return stage


def test_language_keeps_what_is_wanted_and_sure():
    stage = loaded(keep=["en"])
    for text, language, reason in ((PROSE, "en", None), (GERMAN, "de", "language"), ("ok", "", None), ("", "", None)):
        doc = Document("id", text)
        found = stage.process(doc)
        if language:
            assert (doc.language, found) == (language, reason)
        assert doc.signals["language_score"] == round(doc.signals["language_score"], 4)
        assert found == stage.verdict(Document("", signals=doc.signals, language=doc.language))
    assert loaded(min=0.999999).process(Document("id", "und the и")) == "language_score"


def test_language_equals_datatrove():
    from datatrove.data import Document as Theirs
    from datatrove.utils import lid

    model = lid.FT176LID()
    from fasttext.FastText import _FastText

    model._model = _FastText(str(lid176_model()))
    stage = loaded()
    for text in [GERMAN, *AWKWARD, *real_texts(80)]:
        (label, score), _ = model.predict(Theirs(text=text, id="id"))
        doc = Document("id", text)
        stage.process(doc)
        assert doc.language == label
        assert doc.signals["language_score"] == pytest.approx(score, abs=5.1e-5)


def test_language_of_threads_is_that_of_one():
    stage, texts = loaded(), [GERMAN, PROSE, *real_texts(40)] * 3
    one, many = [Document(str(i), text) for i, text in enumerate(texts)], [Document("", text) for text in texts]
    for doc in one:
        stage.process(doc)
    threads = [threading.Thread(target=lambda k=k: [stage.process(doc) for doc in many[k::4]]) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(doc.language, doc.signals) for doc in one] == [(doc.language, doc.signals) for doc in many]


def test_language_errors_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="knows no language english"):
        loaded(keep=["english"])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path / "models"))
    with pytest.raises(FileNotFoundError, match="tokenmill fetch lid176"):
        Language().setup()
    with pytest.raises(FileNotFoundError, match="tokenmill fetch lid176"):
        Language().key()
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ftz"):
        Language(model=str(tmp_path / "nowhere.ftz")).setup()


def test_language_key_counts_the_model_not_its_place(tmp_path, monkeypatch):
    model = lid176_model()
    copy = tmp_path / "lid.176.ftz"
    copy.write_bytes(model.read_bytes())
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path))
    assert lid176() == copy
    assert Language().key() == Language(model=str(model)).key()
    assert Language(min=0.5).key(("signal", "resource")) == Language().key(("signal", "resource"))
    copy.write_bytes(b"another model")
    assert Language().key() != Language(model=str(model)).key()


GOOD = [f"The river {word} runs through the valley, and people have lived beside it for {i} hundred years."
        for i in range(2, 42) for word in ("Elbe", "Thames", "Danube")]
POOR = [f"BUY {i} cheap {word} now!!! click here best {word} price $$$ win win" for i in range(2, 42)
        for word in ("pills", "watches", "bags")]


def test_quality_is_trained_and_sorts(tmp_path):
    model = tmp_path / "sub" / "quality.bin"
    report = train_quality(GOOD, POOR, model, seed=3, epochs=10, rate=0.5, dim=8, buckets=1 << 12)
    assert report["accuracy"] == 1.0
    assert report["positives"] + report["negatives"] + report["held_out"] == len(GOOD) + len(POOR)
    stage = Quality(model=str(model))
    stage.setup()
    good, poor = Document("a", "The river Rhine runs\nthrough many countries."), Document("b", "buy cheap win now!!!")
    assert stage.process(good) is None
    assert stage.process(poor) == "quality"
    assert good.signals["quality_score"] > 0.5 > poor.signals["quality_score"]
    assert good.signals["quality_score"] == round(good.signals["quality_score"], 4)
    assert stage.verdict(Document("", signals=good.signals)) is None
    assert stage.process(Document("c", "")) in (None, "quality")
    assert [p.name for p in model.parent.iterdir()] == ["quality.bin"]


def test_quality_training_is_deterministic(tmp_path):
    def digest(name: str, **kw) -> str:
        train_quality(GOOD, POOR, tmp_path / name, dim=8, buckets=1 << 12, **kw)
        return hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()

    first = digest("a", seed=1)
    assert digest("b", seed=1) == first
    assert digest("c", seed=2) != first
    a, b = (Quality(model=str(tmp_path / name)) for name in "ab")
    assert a.key() == b.key() != Quality(model=str(tmp_path / "c")).key()


def test_quality_errors(tmp_path):
    with pytest.raises(ValueError, match="two texts or more"):
        train_quality(["one"], POOR, tmp_path / "model.bin")
    train_quality(GOOD, POOR, tmp_path / "model.bin", dim=4, buckets=1 << 10)
    with pytest.raises(ValueError, match="has no label 'good'; it has hq, lq"):
        Quality(model=str(tmp_path / "model.bin"), label="good").setup()


def test_settings_are_held_against_the_model_where_it_is_at_hand(monkeypatch, tmp_path):
    lid = lid176_model()
    named = Language(keep=["en", "xx"], model=str(lid))
    assert "knows no language xx" in named.problems()["keep"]
    assert Language(keep=["en", "de"], model=str(lid)).problems() == {}
    assert Language(model=str(lid)).problems() == {}
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Language(keep=["xx"]).problems() == {}, "no model at hand: set-up will say"
    (tmp_path / LID176).write_bytes(lid.read_bytes())
    assert "xx" in Language(keep=["xx"]).problems()["keep"]
    assert Language().resource_files() == {"model": str(tmp_path / LID176)}


def test_a_worker_whose_default_model_is_another_file_refuses(monkeypatch, tmp_path):
    """Its scores would be committed under the key of the driver's model."""
    from pipeline.engine.task import ChangedInput
    from pipeline.tasks.chain import load_chain

    lid = lid176_model()
    entry = {"name": "language", "key": "0" * 32, "$volatile": {
        "target": "stages.filter.language:Language", "config": {"keep": None, "min": 0.5, "model": None},
        "resources": {"model": hashlib.sha256(lid.read_bytes()).hexdigest()}}}
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path))
    (tmp_path / "lid.176.ftz").write_bytes(lid.read_bytes())
    assert load_chain([entry])[0].name == "language"
    (tmp_path / "lid.176.ftz").write_bytes(lid.read_bytes() + b"\0")
    entry["key"] = "1" * 32                                # another process: nothing is loaded yet
    with pytest.raises(ChangedInput, match=r"lid\.176\.ftz is not the file this run was planned with"):
        load_chain([entry])
