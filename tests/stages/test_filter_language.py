"""Languages: their names, the scripts of texts, and the stage that identifies, keeps, cuts and routes documents by
language."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path

import pytest

from stages.document import Document
from stages.filter.language import Language
from stages.scoring.models import LID176, FastText, labels_of, lid176
from stages.scoring.word_sums import UnknownFormat, WordSums
from stages.text.language_codes import TWO_LETTERS, meet, names, scripts_of, short, tag
from stages.text.scripts import CODES, NUMBERS, fits, letters_by_script, main_script
from tests.stages.lid import lid176_model
from tests.stages.texts import AWKWARD, PROSE, random_texts, real_texts

GERMAN = "Das Haus stand am Ende einer langen Straße,\nund seit Jahren hatte niemand darin gewohnt."
FRENCH = "La maison se trouvait au bout d'une longue rue et personne n'y habitait depuis des années."
RUSSIAN = "Дом стоял в конце длинной улицы, и уже много лет никто в нём не жил."
SERBIAN = "Kuća je stajala na kraju duge ulice i već godinama niko nije živeo u njoj, a zimi je bila prazna."
SERBIAN_CYRILLIC = "Кућа је стајала на крају дуге улице и већ годинама нико није живео у њој, а зими је била празна."
CHINESE = "那座房子在一条长街的尽头，多年来没有人住在里面。"
JAPANESE = "その家は長い通りの端にあり、何年も誰も住んでいなかった。"
MIXED = f"{PROSE.strip()}\n\n{FRENCH}\n\nKurz.\n{RUSSIAN}\n{GERMAN}"


def loaded(**config) -> Language:
    stage = Language(**{"model": str(lid176_model()), **config})
    stage.setup()
    return stage


def seen(stage: Language, text: str) -> tuple[str, str | None, dict[str, float]]:
    doc = Document("id", text)
    reason = stage.process(doc)
    assert stage.verdict(Document("", signals=doc.signals, language=doc.language)) == reason
    assert set(doc.signals) <= set(stage.signals)
    return doc.language, reason, doc.signals


TRAIN = """
from fasttext.FastText import train_supervised
kinds = {"softmax": {"minn": 1, "maxn": 3}, "hs": {"minn": 2, "maxn": 4, "loss": "hs"}, "words": {"maxn": 0},
        "bigrams": {"wordNgrams": 2}, "pruned": {"minn": 2, "maxn": 4, "loss": "hs"}}
for name, kind in kinds.items():
    model = train_supervised("train.txt", dim=8, epoch=30, lr=0.8, bucket=4000, thread=1, verbose=0, **kind)
    if name == "pruned":
        model.quantize(input="train.txt", cutoff=700, qnorm=True, dsub=3, thread=1, verbose=0)
    model.save_model(name + ".bin")
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Small models with labels like GlotLID's, trained on the sentences above. They tell languages apart by their
    words."""
    folder = tmp_path_factory.mktemp("glot")
    rows, draw = [], random.Random(5)
    for label, text in (("deu_Latn", GERMAN), ("fra_Latn", FRENCH), ("rus_Cyrl", RUSSIAN), ("srp_Latn", SERBIAN),
                        ("srp_Cyrl", SERBIAN_CYRILLIC), ("cmn_Hani", CHINESE), ("zxx_Zzzz", "(:;) [:;] {:;} |:;|")):
        words = text.split() if label != "cmn_Hani" else list(text)
        rows += [f"__label__{label} {' '.join(draw.sample(words, min(4, len(words))))}" for _ in range(60)]
    draw.shuffle(rows)
    (folder / "train.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
    # in a process of its own, whose allocator hands out zeros: fastText trusts it to (see `train_quality`)
    subprocess.run([sys.executable, "-c", TRAIN], cwd=folder, check=True, timeout=600,
                   env={**os.environ, "MALLOC_PERTURB_": "255", "MALLOC_MMAP_THRESHOLD_": "131072"})
    return {"lid176": str(lid176_model())} | {path.stem: str(path) for path in folder.glob("*.bin")}


@pytest.fixture(scope="module")
def glot(models) -> str:
    return models["softmax"]


# -- names ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("wanted", "label", "script", "same"), [
    ("fr", "fr", "", True), ("fr", "fra_Latn", "", True), ("fra", "fr", "", True), ("fra_Latn", "fr", "", True),
    ("FR-latn", "fra_Latn", "", True), ("fra_Latn", "fr", "Cyrl", False), ("fr", "fr", "Cyrl", True),
    ("srp_Latn", "sr", "Latn", True), ("srp_Latn", "sr", "Cyrl", False), ("srp_Latn", "srp_Cyrl", "Latn", False),
    ("sr", "srp_Cyrl", "", True), ("zh", "cmn_Hani", "", True), ("zh", "yue_Hani", "", False), ("zh", "zh", "", True),
    ("zho_Hans", "cmn_Hani", "", True), ("cmn", "zh", "", True), ("ar", "arb_Arab", "", True),
    ("ar", "arz", "", False), ("fa", "fas_Arab", "", True), ("pes_Arab", "fa", "Arab", True), ("nb", "no", "", True),
    ("no", "nob_Latn", "", True), ("no", "nno_Latn", "", False), ("et", "ekk_Latn", "", True),
    ("jpn_Jpan", "ja", "Hani", True), ("jpn_Jpan", "ja", "Latn", False), ("kor_Hang", "ko", "Hang", True),
    ("als", "als", "", True), ("als", "als_Latn", "", False), ("sq", "als_Latn", "", True),
    ("gsw_Latn", "als", "", True), ("english", "en", "", False), ("english", "english", "", True),
    ("en", "", "", False), ("", "", "", True), ("xx", "xx", "", True), ("eng_Latin", "eng_Latn", "", False)])
def test_names_of_languages(wanted, label, script, same):
    assert names(wanted, label, script) is same


@pytest.mark.parametrize(("one", "other", "may"), [
    ("fr", "fra_Latn", True), ("srp_Latn", "sr", True), ("srp_Latn", "srp_Cyrl", False), ("fr", "de", False),
    ("ja", "jpn_Hani", True), ("zho_Hans", "zho_Hant", True), ("english", "english", True), ("english", "en", False)])
def test_names_that_can_mean_the_same_text(one, other, may):
    assert meet(one, other) is meet(other, one) is may


def test_datasets_of_different_names_for_one_language_are_not_apart():
    from stages.filter.where import Where

    def apart(one: str, other: str) -> bool:
        return Where.disjoint_configs(Where(language=one).config, Where(language=other).config)

    assert [apart("fr", "fra_Latn"), apart("fr", "de"), apart("srp_Latn", "srp_Cyrl"), apart("sr", "srp_Cyrl")] == [
        False, True, True, False]


@pytest.mark.parametrize(("keep", "english"), [("en", True), ("eng", True), ("eng_Latn", True), ("deu", False)])
def test_lint_knows_english_by_any_name(tmp_path, keep, english):
    from pipeline.plan.lint import lint
    from pipeline.recipe import load_recipe

    (tmp_path / "x").touch()
    (tmp_path / "r.yaml").write_text("version: 1\nsources: {a: {read: text, path: x}}\ndatasets:\n"
                                     f"  b: {{from: a, steps: [language: {{keep: {keep}}}, gopher_quality]}}\n")
    said = "\n".join(map(str, lint(load_recipe(tmp_path / "r.yaml", []))))
    assert ("made for English" in said) is not english, said


def test_codes_of_two_and_three_letters_are_the_same_names():
    assert len(TWO_LETTERS) == len(set(TWO_LETTERS.values())) == 184
    for two, three in TWO_LETTERS.items():
        assert names(two, three) and names(three, two)
        assert short(three) == two or (two, short(three)) in {("nb", "no")} or two in {"bh"}
    assert [short(s) for s in ("fra_Latn", "cmn_Hani", "yue_Hani", "nob_Latn", "als_Latn", "als", "english", "")] == [
        "fr", "zh", "yue", "no", "sq", "gsw", "english", ""]


def test_every_label_of_lid176_is_a_name_of_its_own_with_a_script():
    labels = labels_of(lid176_model())
    assert len(labels) == 176 == len({tag(label) for label in labels})
    assert all(scripts_of(label) and set(scripts_of(label)) <= {*NUMBERS, "Kore"} for label in labels)
    assert (scripts_of("sr"), scripts_of("ara_Arab"), scripts_of("zxx_Zzzz"), scripts_of("xx")) == (
        ("Cyrl", "Latn"), ("Arab",), (), ())


# -- scripts --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "script", "share"), [
    ("hello", "Latn", 1.0), ("hello мир", "Latn", 5 / 8), ("", "", 0.0), ("12 … ¿? 😀", "", 0.0),
    (JAPANESE, "Jpan", 1.0), (CHINESE, "Hani", 1.0), ("漢字", "Hani", 1.0), ("漢字" * 20 + "の", "Hani", 40 / 41),
    ("漢字" * 2 + "の", "Jpan", 1.0), ("カタカナーー", "Jpan", 1.0), ("한국어 텍스트 漢", "Hang", 6 / 7),
    ("𠮷野", "Hani", 1.0), ("Größe é ﬁ", "Latn", 1.0), ("ab аб", "Latn", 0.5), ("αβ аб", "Grek", 0.5),
    ("\ud800a", "Latn", 1.0), ("हिन्दी", "Deva", 1.0), ("µ ª", "Latn", 1.0), ("naïve\u0301", "Latn", 1.0),
    ("สวัสดี", "Thai", 1.0), ("𞤀𞤁 ab\n", "Adlm", 0.5)])
def test_main_script(text, script, share):
    assert main_script(text) == (script, share)


def test_scripts_are_those_of_unicode():
    """Against the package `regex`, whose Unicode may be older: letters that it knows."""
    regex = pytest.importorskip("regex")
    letter, common = regex.compile(r"\p{L}"), regex.compile(r"[\p{Common}\p{Inherited}]")
    known, wrong, script = 0, [], {code: regex.compile(rf"\p{{Script={code}}}") for code in ("Latn", "Cyrl", "Arab")}
    rare = {code: regex.compile(rf"\p{{Script={code}}}") for code in ("Hani", "Hira", "Kana", "Thai", "Deva", "Grek",
            "Hebr", "Ethi", "Geor", "Armn", "Adlm", "Nshu", "Tibt", "Hang", "Khmr", "Cans", "Yiii", "Copt", "Beng")}
    for point in [*range(0x3400), *range(0xA000, 0xAC10), *range(0xD700, 0xD800), *range(0xF900, 0x12000),
                  *range(0x1B100, 0x1B300), *range(0x1E000, 0x1F000), 0x3400, 0x4E00, 0x9FFF, 0x20000, 0x2A6DF]:
        c = chr(point)
        if unicodedata.category(c) == "Cn":
            continue
        found = letters_by_script(c)
        if not letter.match(c) or common.match(c):
            wrong += [point] if found else []
            continue
        [code] = found or {"none": 0}
        known += 1
        pattern = (script | rare).get(code) or regex.compile(rf"\p{{Script={code}}}" if code in NUMBERS else "$")
        wrong += [] if pattern.match(c) else [point]
    assert (wrong, known > 9000) == ([], True)


def test_numbers_of_scripts():
    assert (NUMBERS["Latn"], NUMBERS["Cyrl"], NUMBERS["Hani"], NUMBERS["Jpan"]) == (215, 220, 500, 413)
    assert all(CODES[number] == code and 0 < number < 1000 for code, number in NUMBERS.items())
    assert fits("Hani", "Hant") and fits("Hani", "Jpan") and not fits("Jpan", "Hani") and fits("Hang", "Kore")


# -- the stage: datatrove's dialect -----------------------------------------------------------------------------------
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
    from fasttext.FastText import _FastText

    model = lid.FT176LID()
    model._model = _FastText(str(lid176_model()))
    stage = loaded()
    for text in [GERMAN, RUSSIAN, JAPANESE, *AWKWARD, *real_texts(80)]:
        (label, score), _ = model.predict(Theirs(text=text, id="id"))
        language, reason, signals = seen(stage, text)
        assert language == label
        assert signals["language_score"] == pytest.approx(score, abs=5.1e-5)
        assert (reason is None) is (score > 0.65)


def test_language_of_glotlid_equals_datatrove(glot, monkeypatch):
    from datatrove.data import Document as Theirs
    from datatrove.pipeline.filters import LanguageFilter
    from fasttext.FastText import _FastText

    # it looks for a distribution of that name; ours has another
    monkeypatch.setattr("datatrove.pipeline.base.check_required_dependencies", lambda *_: None)
    monkeypatch.setattr("datatrove.utils.lid.check_required_dependencies", lambda *_: None)
    theirs = LanguageFilter(backend="glotlid", language_threshold=0.5)
    theirs.model._model = _FastText(glot)
    stage = loaded(model=glot, min=0.5)
    for text in (GERMAN, FRENCH, RUSSIAN, SERBIAN, SERBIAN_CYRILLIC, PROSE, "ab", "123 4"):
        their = Theirs(text=text, id="id")
        kept = theirs.filter(their)
        language, reason, signals = seen(stage, text)
        assert language == f"{their.metadata['language']}_{their.metadata['language_script']}"
        assert signals["language_score"] == pytest.approx(their.metadata["language_score"], abs=5.1e-5)
        assert (reason is None) is kept


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


@pytest.mark.parametrize("kept", [1 << 20, 2000, 0])
@pytest.mark.parametrize("kind", ["lid176", "softmax", "hs", "words", "pruned"])
def test_sums_of_words_answer_as_the_library_does(models, kind, kept):
    """Whatever is kept of the words seen before; every text is asked twice, in both orders."""
    theirs, ours = FastText(models[kind]), WordSums(models[kind], kept)
    assert ours.labels() == theirs.labels()
    texts = ["", " ", "\n", "a", "é", "日", "𠮷 𠮷x", "a </s> Дом стоял", "</s>", "</s>x x</s>", "__label__fra_Latn",
             "__label__en hello there", "x\0y\tz\rw\vq\fr\x1cs\x85t\u3000u", "Haus " * 500, "x" * 3000, "<Haus> Haus <",
             "die die", GERMAN, FRENCH, RUSSIAN, SERBIAN, SERBIAN_CYRILLIC, CHINESE, JAPANESE, MIXED, *AWKWARD,
             *random_texts(60, seed=3), *real_texts(30)]
    for text in [*texts, *reversed(texts)]:
        [(label, score)] = theirs.predict(text) or [("", 0.0)]
        [(mine, sure)] = ours.predict(text) or [("", 0.0)]
        assert sure == pytest.approx(score, abs=2e-5), text
        assert mine == label or theirs.predict(text, 2)[1][1] == pytest.approx(score, abs=2e-5), text
    again = WordSums(models[kind], kept)
    assert [again.predict(text) for text in reversed(texts)] == [ours.predict(text) for text in reversed(texts)]


def test_models_that_only_the_library_reads(models, tmp_path):
    with pytest.raises(UnknownFormat, match="without word n-grams"):
        WordSums(models["bigrams"])
    stage = loaded(model=models["bigrams"], min=0.0)
    assert seen(stage, FRENCH)[0] == FastText(models["bigrams"]).predict(FRENCH)[0][0]
    data = Path(models["softmax"]).read_bytes()
    for size in (0, 3, 80, 100, 2000, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.bin").write_bytes(data[:size])
        with pytest.raises(UnknownFormat):
            WordSums(tmp_path / "cut.bin")


def test_words_are_hashed_anew_in_each_model(glot):
    """Nobody can write words that take the place of others, or that all meet in one place."""
    one, other = WordSums(glot), WordSums(glot)
    assert [model.predict(GERMAN) for model in (one, other)] == [one.predict(GERMAN)] * 2
    for table in (lambda model: model._vocabulary[0], lambda model: model._cache[2]):
        first, second = (set(table(model).tolist()) - {0} for model in (one, other))
        assert first and not first & second


def test_a_model_whose_matrix_is_too_small_is_none(models, tmp_path):
    """No kernel may read behind it: n-grams without buckets, words without rows."""
    data = bytearray(Path(models["softmax"]).read_bytes())
    for bucket in (0, -7):
        data[40:44] = struct.pack("<i", bucket)
        (tmp_path / "small.bin").write_bytes(data)
        with pytest.raises(UnknownFormat, match="rows for"):
            WordSums(tmp_path / "small.bin")
    data, theirs = Path(models["words"]).read_bytes(), WordSums(models["words"])
    rows, dim = theirs._rows.shape
    at = data.index(struct.pack("<2q", rows, dim))
    cut = data[:at] + struct.pack("<2q", rows - 3, dim) + data[at + 16 + 3 * 4 * dim:]
    (tmp_path / "small.bin").write_bytes(cut)
    with pytest.raises(UnknownFormat, match="rows for"):
        WordSums(tmp_path / "small.bin")


# -- languages by name, thresholds, scripts ----------------------------------------------------------------------------
@pytest.mark.parametrize("keep", ["fr", "fra", "fra_Latn", "FR"])
def test_any_name_of_a_language_keeps_it_with_either_model(glot, keep):
    for model, label in ((str(lid176_model()), "fr"), (glot, "fra_Latn")):
        stage = loaded(model=model, keep=[keep], min=0.3)
        assert seen(stage, FRENCH)[:2] == (label, None)
        assert seen(stage, GERMAN)[1] == "language"


def test_a_script_asked_of_a_model_that_names_none_is_that_of_the_letters():
    stage = loaded(keep=["srp_Cyrl", "hrv", "srp_Latn"], min=0.0)
    assert seen(stage, SERBIAN_CYRILLIC)[:2] == ("sr", None)
    stage = loaded(keep=["srp_Latn"], min=0.0)
    assert seen(stage, SERBIAN_CYRILLIC)[:2] == ("sr", "language")


def test_a_label_s_script_is_wanted_or_not(glot):
    stage = loaded(model=glot, keep=["srp_Latn"], min=0.0)
    assert seen(stage, SERBIAN)[:2] == ("srp_Latn", None)
    assert seen(stage, SERBIAN_CYRILLIC)[:2] == ("srp_Cyrl", "language")
    assert seen(loaded(model=glot, keep=["sr"], min=0.0), SERBIAN_CYRILLIC)[1] is None


def test_thresholds_by_language():
    texts = [GERMAN, FRENCH, RUSSIAN]
    scores = [seen(loaded(min=0.0), text)[2]["language_score"] for text in texts]
    least = {"default": scores[0], "fra_Latn": scores[1] - 0.001, "fr": 0.99999, "ru": scores[2]}
    assert [seen(loaded(min=least), text)[1] for text in texts] == ["language_score", None, "language_score"]
    assert loaded(min={"fr": 0.2}).min_score("de", "Latn") == 0.65
    assert loaded(min={"sr": 0.2, "srp_Latn": 0.3}).min_score("sr", "Latn") == 0.3
    assert loaded(min={"sr": 0.2, "srp_Latn": 0.3}).min_score("sr", "Cyrl") == 0.2


def test_thresholds_are_those_of_the_stage_that_is_asked():
    """A replay asks a copy of a stage under the thresholds of then, and shares what it holds."""
    import copy

    now = loaded(min=0.5, keep=["en"])
    doc = Document("", language="de", signals={"language_score": 0.6, "script": 215, "script_share": 1.0})
    assert now.verdict(doc) == "language"
    then = copy.copy(now)
    then.config = Language.Config(min={"de": 0.61, "fr": 0.2}, keep=None)
    assert [(then.verdict(doc), now.verdict(doc)) for _ in range(2)] == [("language_score", "language")] * 2


def test_a_script_no_text_in_the_language_has_drops_it():
    odd = RUSSIAN.translate(str.maketrans("абвгдеёжзийклмнопрстуфхцчшщъыьэюя", "abvgdeejziyklmnoprstufhccss'y'eua"))
    language, reason, signals = seen(loaded(min=0.0, script=True), odd)
    assert (CODES[int(signals["script"])], reason) == ("Latn", None if "Latn" in scripts_of(language) else
                                                       "language_script")
    stage = loaded(min=0.0, script=True)
    for language, script, reason in (("ru", "Latn", "language_script"), ("ru", "Cyrl", None), ("sr", "Latn", None),
                                     ("ja", "Hani", None), ("ko", "Hang", None), ("zh", "Jpan", "language_script"),
                                     ("rus_Cyrl", "Latn", "language_script"), ("zxx_Zzzz", "Latn", None),
                                     ("tlh", "Latn", None), ("ru", "", None)):
        doc = Document("", language=language, signals={"language_score": 0.9, "script": NUMBERS.get(script, 0),
                                                       "script_share": 0.9})
        assert stage.verdict(doc) == reason, (language, script)
        assert loaded(min=0.0).verdict(doc) is None
    assert seen(loaded(min=0.0, min_script_share=0.9), RUSSIAN + " and some English words")[1] == "script_share"


# -- paragraphs -----------------------------------------------------------------------------------------------------

def test_paragraphs_are_identified_by_themselves():
    stage = loaded(paragraphs=True, min=0.0)
    language, reason, signals = seen(stage, MIXED)
    lines = [line for line in MIXED.split("\n") if len(line) >= 40]
    single = [seen(loaded(min=0.5), line) for line in lines]
    sure = [(label, len(line)) for (label, why, _), line in zip(single, lines) if why is None]
    assert (language, reason) == ("en", None)
    assert signals["language_paragraphs"] == len(sure) >= 5
    assert signals["languages"] == len({label for label, _ in sure}) == 4
    assert signals["language_share"] == sum(n for label, n in sure if label == "en") / sum(n for _, n in sure)
    assert signals["language_cut"] == 0
    assert seen(loaded(paragraphs=True, min=0.0, min_share=0.99), MIXED)[1] == "language_share"
    assert seen(loaded(paragraphs=True, min=0.0, max_languages=3), MIXED)[1] == "languages"
    assert seen(loaded(paragraphs=True, min=0.0, max_languages=4, min_share=0.1), MIXED)[1] is None
    empty = seen(loaded(paragraphs=True, min_share=0.9, min=-1.0), "short")[2]
    assert "language_share" not in empty and empty["language_paragraphs"] == empty["languages"] == 0


def test_foreign_paragraphs_and_letters_are_marked():
    text = MIXED
    stage = loaded(paragraphs=True, min=0, min_share=0.9)
    doc = Document("0" * 32, text)
    reason = stage.process(doc)
    assert (reason, doc.language) == ("language_share", "en")
    fresh = Language(model=str(lid176_model()), paragraphs=True)
    for shown in (stage, fresh):
        spans = shown.matches(Document("", text, language="en"), reason)
        assert [text[a:b] for a, b in spans] == [FRENCH, RUSSIAN, *GERMAN.split("\n")]
    assert fresh.matches(Document("", text, language="en"), "language") == []
    for text, parts in ((f"A few words. {RUSSIAN[:13]} ok", [RUSSIAN[:13].strip()]), (JAPANESE + " Haus", ["Haus"]),
                        ("no other", []), ("", []), ("12 = 12", [])):
        assert [text[a:b] for a, b in fresh.matches(Document("", text), "script_share")] == parts


def test_foreign_paragraphs_are_cut_and_counted():
    stage = loaded(paragraphs=True, drop_foreign=True, min=0.0)
    doc = Document("id", MIXED)
    assert stage.process(doc) is None
    german = [line for line in GERMAN.split("\n") if len(line) >= 40]
    assert doc.text == f"{PROSE.strip()}\n\nKurz."
    assert doc.signals["language_cut"] == len(FRENCH) + len(RUSSIAN) + sum(map(len, german))
    again = Document("id", doc.text)
    assert stage.process(again) is None
    assert (again.text, again.signals["language_cut"], again.signals["language_share"]) == (doc.text, 0, 1.0)
    dropped = Document("id", MIXED)
    assert loaded(paragraphs=True, drop_foreign=True, keep=["de"]).process(dropped) == "language"
    assert dropped.text == MIXED, "a document that goes keeps its text"


# -- errors, keys ---------------------------------------------------------------------------------------------------
def test_language_errors_say_what_to_do(tmp_path, monkeypatch, glot):
    with pytest.raises(ValueError, match="keep: the model knows no language english; it has 176, such as "):
        loaded(keep=["english"])
    with pytest.raises(ValueError, match="min: the model knows no language tlh_Latn"):
        loaded(min={"default": 0.6, "tlh_Latn": 0.3})
    with pytest.raises(ValueError, match=r"no language hau, rus_Latn; it has 7, such as rus_Cyrl; languages"):
        loaded(model=glot, keep=["fr", "rus_Latn", "hau"])
    with pytest.raises(ValueError, match="max_languages: asks for paragraphs"):
        loaded(max_languages=2)
    with pytest.raises(ValueError, match="drop_foreign: asks for paragraphs"):
        loaded(drop_foreign=True)
    for wrong in ("much", {"de": "much"}, True, 1.5, float("nan"), {"default": None}):
        with pytest.raises(ValueError, match=r"must be a probability below 1, or .*such as \{default: 0.65"):
            Language(min=wrong)
    assert Language(keep="fr").config.keep == ("fr",)
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
    kept = Language().key(("signal", "resource"))
    assert kept == Language(min={"de": 0.5}, keep=["fr"], script=True, min_share=0.1).key(("signal", "resource"))
    assert kept != Language(paragraphs=True).key(("signal", "resource"))
    copy.write_bytes(b"another model")
    assert Language().key() != Language(model=str(model)).key()


def test_settings_are_held_against_the_model_where_it_is_at_hand(monkeypatch, tmp_path):
    lid = lid176_model()
    assert "knows no language tlh" in Language(keep=["en", "tlh"], model=str(lid)).problems()["keep"]
    assert Language(keep=["en", "de", "fra_Latn"], model=str(lid)).problems() == {}
    assert Language(model=str(lid)).problems() == {}
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Language(keep=["xx"]).problems() == {}, "no model at hand: set-up will say"
    (tmp_path / LID176).write_bytes(lid.read_bytes())
    assert "xx" in Language(keep=["xx"]).problems()["keep"]
    assert Language().resource_files() == {"model": str(tmp_path / LID176)}


def test_memory_is_that_of_the_model(tmp_path):
    big = tmp_path / "big.bin"
    with open(big, "wb") as file:
        file.truncate(1_600 << 20)
    assert Language(model=str(big)).memory_mb >= 1_600 + 250 > Language(model=str(lid176_model())).memory_mb >= 250


def test_a_worker_whose_default_model_is_another_file_refuses(monkeypatch, tmp_path):
    """Its scores would be committed under the key of the driver's model."""
    from pipeline.engine.task import ChangedInput
    from pipeline.passes.chain import load_chain

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


# -- by a recipe ----------------------------------------------------------------------------------------------------
RECIPE = """
version: 1
sources: {{web: {{read: jsonl, path: in.jsonl}}}}
datasets:
  identified: {{from: web, steps: [{{language: {{model: {model}, min: {least}, paragraphs: true}}}}]}}
  french:     {{from: identified, steps: [{{where: {{language: fra_Latn}}}}]}}
  german:     {{from: identified, where: {{language: [{german}]}}}}
  serbian:    {{from: identified, steps: [{{where: {{language: [srp_Latn, hr]}}}}]}}
  cyrillic:   {{from: identified, steps: [{{where: {{signals: {{script: [220]}}}}}}]}}
"""


@pytest.mark.parametrize(("labels", "german"), [("lid176", "deu_Latn"), ("glot", "de")])
def test_datasets_are_routed_by_a_language_identified_once(tmp_path, monkeypatch, glot, labels, german):
    from pipeline.passes.rows import Selection, rows_of
    from pipeline.recipe import load_recipe
    from pipeline.run import make_backend, run_recipe
    from pipeline.store.dataset import iter_rows
    from pipeline.store.fs import Store
    from pipeline.store.log import Log

    texts = {"french": FRENCH, "german": GERMAN, "serbian": SERBIAN, "russian": RUSSIAN, "cyrillic": SERBIAN_CYRILLIC}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"{text}\n{i}"}) + "\n" for i in range(5)
                                               for text in texts.values()), encoding="utf-8")
    model = str(lid176_model()) if labels == "lid176" else glot

    def run(least: str) -> Store:
        (tmp_path / "r.yaml").write_text(RECIPE.format(model=model, least=least, german=german), encoding="utf-8")
        run_recipe(load_recipe(tmp_path / "r.yaml", []), str(tmp_path / "store"),
                   make_backend=make_backend("inline", 1, None), report=False)
        return Store(str(tmp_path / "store"))

    def held(store: Store, name: str) -> list[str]:
        found = [row["text"].rpartition("\n")[0] for row in iter_rows(store, f"datasets/{name}", ["text"])]
        return sorted({next(k for k, v in texts.items() if v == text) for text in found}) if found else []

    store = run("0.1")
    identified = [r for r in Log.read(store).records() if any("language" in s for s in r.counters.get("stages", {}))]
    assert {r.node for r in identified} == {"identified"}, "nobody identifies again"
    assert {name: held(store, name) for name in ("french", "german", "serbian", "cyrillic")} == {
        "french": ["french"], "german": ["german"], "serbian": ["serbian"], "cyrillic": ["cyrillic", "russian"]}
    rows = list(iter_rows(store, "datasets/identified", ["language", "signals"]))
    assert {row["language"] for row in rows} >= ({"de", "fr", "ru"} if labels == "lid176" else {
        "deu_Latn", "fra_Latn", "rus_Cyrl", "srp_Latn", "srp_Cyrl"})
    assert {row["signals"]["language_paragraphs"] for row in rows} <= {0.0, 1.0, 2.0}
    # a stream of shards picks by the same names
    [part] = (tmp_path / "store" / "datasets" / "identified").glob("part-*.parquet")
    for wanted, docs in (("srp_Cyrl", 5), ("deu_Latn", 5), ("de", 5), ("rus_Cyrl", 5), ("rus_Latn", 0), ("ces", 0)):
        assert sum(len(r.rows) for r in rows_of(str(part), Selection({"language": wanted}), ("bytes",))) == docs, wanted

    # another threshold asks the model of those alone whose verdict it changes
    known = {r.key for r in Log.read(store).records()}
    ask, asked = WordSums.predict, []
    monkeypatch.setattr(WordSums, "predict", lambda self, text: asked.append(text) or ask(self, text))
    store = run("{default: 0.1, fr: 0.9999}")
    [again] = [r for r in Log.read(store).records() if r.key not in known and r.node == "identified"]
    assert again.counters["replayed"]["docs"] == 20
    asked.remove("")                                       # a worker's set-up compiles with it
    assert asked and all(text.startswith(FRENCH) for text in asked)
    assert held(store, "french") == []
