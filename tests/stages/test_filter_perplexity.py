"""Perplexity: the normalisation of each dialect, CCNet's formula, the stage's thresholds, and the commands that make
models."""

from __future__ import annotations

import json
import re
import sys
import types
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.app import run_command
from pipeline.recipe import RecipeError, load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import iter_rows
from pipeline.store.fs import Store
from stages.document import Document
from stages.filter.perplexity import Perplexity
from stages.text.ccnet import _PUNCTUATION, TextModel, _lines, ccnet, datatrove, train_model, train_pieces
from stages.text.kneser_ney import save, train
from stages.text.ngram_lm import BadModel
from tests.corpus import GERMAN, sentences
from tests.stages.texts import AWKWARD, random_texts, real_texts

#: what the tables are about, so that chance finds it
STRANGE = st.text(st.sampled_from("aÉé\u0301Ünİß .,\n\t\x00\x1f\x7f\x851٣１९½²…—–“”»«►％．：日本語\u3000\u200b0129") |
                  st.characters(exclude_categories=("Cs",)), max_size=40)


def plain_ccnet(text: str) -> str:
    """Normalise a text by the rule of CCNet, in the same steps as the paper's code."""
    text = text.strip()
    text = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    text = re.sub(r"\d", "0", text)
    text = "".join(_PUNCTUATION.get(c, c) for c in text)
    return "".join(c for c in text if not (ord(c) < 32 or 127 <= ord(c) < 160))


@given(STRANGE)
def test_normalisation_is_the_dialects(text):
    from datatrove.utils.perplexity import KenlmModel

    assert ccnet(text) == plain_ccnet(text)
    assert datatrove(text) == KenlmModel("", "").normalize(text)


def test_normalisation_of_real_and_awkward_texts():
    from datatrove.utils.perplexity import KenlmModel

    theirs = KenlmModel("", "")
    for text in [*AWKWARD, *random_texts(60, seed=3), *real_texts(40)]:
        assert ccnet(text) == plain_ccnet(text)
        assert datatrove(text) == theirs.normalize(text)
    assert ccnet(" Né en 1984:\n“Été” — 3,5 %… ") == 'ne en 0000:"ete"  -  0,0 %...'
    assert datatrove(" Né en 1984:\n“Été” — 3,5 %… ") == 'ne en 0:"ete"  -  0 %...'


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{dialect: path} of small models of English."""
    folder, texts, out = tmp_path_factory.mktemp("lm"), sentences()[:400], {}
    for dialect in ("ccnet", "datatrove", "none"):
        pieces = train_pieces(texts, 300, dialect)
        out[dialect] = folder / f"{dialect}.lm"
        save(train_model(texts, pieces, normalize=dialect, order=4), out[dialect], normalize=dialect, pieces=pieces)
    return out


@pytest.mark.parametrize("dialect", ["ccnet", "datatrove", "none"])
def test_perplexity_equals_datatroves_formula_over_its_pieces(models, dialect, monkeypatch):
    """datatrove's own `get_perplexity`, with this model in the place of KenLM's."""
    from datatrove.utils.perplexity import KenlmModel, SentencePiece
    from sentencepiece import SentencePieceProcessor

    model = TextModel(models[dialect])

    class Scores:
        def score(self, line: str) -> float:
            return model.lm.score(model.lm.ids(line.split()))

    monkeypatch.setitem(sys.modules, "kenlm", types.ModuleType("kenlm"))
    theirs = KenlmModel("", "")
    theirs._model, theirs._tokenizer = Scores(), SentencePiece("", "")
    theirs._tokenizer._model = SentencePieceProcessor(model_proto=model.lm.pieces)
    theirs.normalize = model.normalize
    for text in [*AWKWARD, *random_texts(40, seed=4), *sentences()[390:420], "Ωμέγα ☃ snow ☃", "line\nline", " "]:
        if dialect == "none" and "\n" in text:
            continue                                # there every line is a sentence
        assert model.perplexity(text) == theirs.get_perplexity(text), text


def test_prose_is_nearer_than_noise(models):
    model = TextModel(models["ccnet"])
    prose = [model.perplexity(s) for s in sentences()[400:450]]
    noise = [model.perplexity("".join(np.random.default_rng(i).permutation(list(s))))
             for i, s in enumerate(sentences()[400:450])]
    foreign = model.perplexity(GERMAN)
    assert max(np.median(prose) * 2, np.percentile(prose, 90)) < np.median(noise)
    assert foreign > np.median(prose) * 1.5


def test_words_that_sentencepiece_does_not_know_the_model_may(tmp_path):
    """KenLM is asked by the characters of an unknown piece."""
    texts = sentences()[:200]
    pieces = train_pieces(texts, 200, "ccnet")
    estimate = train_model([*texts, *["snow ☃ snow"] * 50], pieces, order=3)
    assert "☃" in estimate.words
    save(estimate, tmp_path / "a.lm", normalize="ccnet", pieces=pieces)
    model = TextModel(tmp_path / "a.lm")
    assert model.perplexity("snow ☃ snow") < model.perplexity("snow ☂ snow") / 1.3


# -- the stage ---------------------------------------------------------------------------------------------------------
def test_thresholds(models):
    stage = Perplexity(models={"en": str(models["ccnet"])}, max={"en": 100.0}, min=2)
    stage.setup()
    said = {}
    for name, text, language in (("prose", sentences()[3], "en"), ("noise", "qzx jvk wqp " * 9, "en"),
                                 ("other", sentences()[3], "de"), ("empty", "", "en")):
        doc = Document("0" * 32, text, language=language)
        said[name] = stage.process(doc), doc.signals.get("perplexity")
        assert stage.verdict(Document("", signals=doc.signals, language=language)) == said[name][0]
    assert said["prose"][0] is None and 2 < said["prose"][1] < 100
    assert said["noise"][0] == "high_perplexity" and said["noise"][1] > 100
    assert said["other"] == said["empty"] == (None, None)
    assert all(round(v, 1) == v for _, v in said.values() if v)
    low = Perplexity(model=str(models["ccnet"]), min=1e6)
    low.setup()
    assert low.process(Document("0" * 32, sentences()[3], language="de")) == "low_perplexity"
    assert stage.reads() == {"language": "max"} and low.reads() == {}


def test_a_score_of_another_models_is_not_taken_for_ones_own(models):
    stage = Perplexity(models={"en": str(models["ccnet"])}, max=2)
    stage.setup()
    doc = Document("0" * 32, sentences()[3], language="de", signals={"perplexity": 9.0})
    assert stage.process(doc) is None and not doc.signals


def test_lines_of_a_book_that_is_one_line():
    book = " ".join(["wörter", "x" * 70, "日本語", "y"] * 200)
    lines = list(_lines([book], str, 60))
    assert "".join(lines).replace(" ", "") == book.replace(" ", "")
    assert max(len(line.encode()) for line in lines) <= 60 and not any(line.startswith(" ") for line in lines)
    assert "x" * 60 in lines and len(lines) < 1000


def test_only_the_beginning_of_a_long_text_is_looked_at(models):
    stage, whole = Perplexity(model=str(models["ccnet"]), max_chars=40), TextModel(models["ccnet"])
    stage.setup()
    doc = Document("0" * 32, sentences()[5] + " qzx" * 1000)
    stage.process(doc)
    assert doc.signals["perplexity"] == whole.perplexity(doc.text[:40])


def test_keys_take_the_content_of_models(models, tmp_path):
    (tmp_path / "copy.lm").write_bytes(models["ccnet"].read_bytes())

    def key(**kw):
        return Perplexity(**kw).key()

    one = key(models={"en": str(models["ccnet"])})
    assert one == key(models={"en": str(tmp_path / "copy.lm")})
    assert one != key(models={"de": str(models["ccnet"])}) != key(models={"de": str(models["none"])})
    assert one != key(model=str(models["ccnet"]))
    stage = Perplexity(model=str(models["none"]), models={"en": str(models["ccnet"])})
    assert stage.resource_files() == {"model": str(models["none"]), "models.en": str(models["ccnet"])}


def test_models_that_cannot_score_texts_are_refused(tmp_path):
    save(train([["a", "b"]], order=2), tmp_path / "bare.lm")
    with pytest.raises(BadModel, match="no SentencePiece model"):
        TextModel(tmp_path / "bare.lm")
    save(train([["a", "b"]], order=2), tmp_path / "odd.lm", normalize="upper", pieces=b"x")
    with pytest.raises(BadModel, match="'upper'"):
        TextModel(tmp_path / "odd.lm")
    save(train([["a", "b"]], order=2), tmp_path / "bad.lm", normalize="none", pieces=b"x")
    with pytest.raises(BadModel, match="no SentencePiece model"):
        TextModel(tmp_path / "bad.lm")
    with pytest.raises(ValueError, match="needs a model"):
        Perplexity()


# -- commands and a recipe ---------------------------------------------------------------------------------------------
def test_a_model_is_trained_compiled_and_used_in_a_recipe(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    with open(tmp_path / "in" / "a.jsonl", "w") as f:
        for i, text in enumerate(sentences()[:300]):
            f.write(json.dumps({"text": text, "language": "xx" if i % 10 == 9 else "en"}) + "\n")
    train_line = ["lm", "train", str(tmp_path / "in"), "--language", "en", "--vocab", "250", "--order", "3"]
    assert run_command([*train_line, "--out", str(tmp_path / "en.lm"), "--arpa", str(tmp_path / "en.arpa"),
                        "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tokens"] > 1000 and len(said["ngrams"]) == 3 and said["held_out"]["texts"] == 5
    assert run_command([*train_line, "--out", str(tmp_path / "again.lm")]) == 0
    assert (tmp_path / "again.lm").read_bytes() == (tmp_path / "en.lm").read_bytes()
    (tmp_path / "sp.model").write_bytes(TextModel(tmp_path / "en.lm").lm.pieces)
    assert run_command(["lm", "compile", str(tmp_path / "en.arpa"), "--sentencepiece", str(tmp_path / "sp.model"),
                        "--out", str(tmp_path / "compiled.lm")]) == 0
    a, b = TextModel(tmp_path / "en.lm"), TextModel(tmp_path / "compiled.lm")
    assert all(a.perplexity(s) == b.perplexity(s) for s in sentences()[:50])
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "Qzx jvk wqp.", "language": "en"}\n' * 5)
    (tmp_path / "r.yaml").write_text("""
version: 1
sources: {web: {read: jsonl, path: in, language: language}}
datasets: {d: {from: web, steps: [{perplexity: {models: {en: en.lm}, max: 60}}]}}
""")
    run_recipe(load_recipe(tmp_path / "r.yaml", []), str(tmp_path / "s"), make_backend=make_backend("inline", 1, None),
               report=False)
    store = Store(str(tmp_path / "s"))
    kept = [(r["language"], r["signals"]["perplexity"])
            for r in iter_rows(store, "datasets/d", ["language", "signals"])]
    dropped = [r["reason"] for r in iter_rows(store, "dropped/d", ["reason"])]
    assert set(dropped) == {"high_perplexity"} and 5 <= len(dropped) <= 40
    assert all((p is None) == (language == "xx") for language, p in kept)
    with pytest.raises(RecipeError, match=r"models\.en: no such file: .*de\.lm"):
        load_recipe(tmp_path / "r.yaml", ["datasets.d.steps.0.perplexity.models.en=de.lm"])


@pytest.mark.parametrize(("line", "said"), [
    (["lm", "train", "{at}/none", "--out", "{at}/x"], "no such file"),
    (["lm", "train", "{at}", "--language", "de", "--out", "{at}/x"], "no document of language de"),
    (["lm", "train", "{at}", "--normalize", "cc-net", "--out", "{at}/x"], "did you mean 'ccnet'"),
    (["lm", "compile", "{at}/a.jsonl", "--out", "{at}/x"], "is no ARPA file"),
    (["lm", "compile", "{at}/none.arpa", "--out", "{at}/x"], "no such file"),
    (["lm", "train", "{at}", "--sentencepiece", "{at}/a.jsonl", "--out", "{at}/x"], "no SentencePiece model"),
])
def test_commands_name_what_is_wrong(tmp_path, capsys, line, said):
    (tmp_path / "a.jsonl").write_text('{"text": "one two", "language": "en"}\n')
    assert run_command([part.format(at=tmp_path) for part in line]) in (1, 2)
    assert said in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_a_model_stays_where_another_cannot_be_made(tmp_path, capsys, models):
    (tmp_path / "good.lm").write_bytes(models["ccnet"].read_bytes())
    (tmp_path / "bad.arpa").write_text("no model")
    (tmp_path / "bad.arpa.gz").write_bytes(b"\x1f\x8b\x08\0garbagegarbage")
    (tmp_path / "fine.arpa").write_text("\\data\\\n\n\\1-grams:\n-1\ta\n\n\\end\\\n")
    for line, said in ((["bad.arpa"], "no ARPA file"), (["bad.arpa.gz"], "damaged .gz"), (
            ["fine.arpa", "--sentencepiece", str(tmp_path / "bad.arpa")], "no SentencePiece model")):
        line = ["lm", "compile", str(tmp_path / line[0]), *line[1:], "--out", str(tmp_path / "good.lm")]
        assert run_command(line) == 2
        assert said in capsys.readouterr().err
        assert (tmp_path / "good.lm").read_bytes() == models["ccnet"].read_bytes()
