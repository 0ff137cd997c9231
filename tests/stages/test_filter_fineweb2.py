"""FineWeb-2's filters: equal to datatrove's in each compared language, thresholds from files, and languages by any of
their names."""

from __future__ import annotations

import copy
import json

import pytest

from stages.catalog import stage_class
from stages.document import Document
from stages.filter.fineweb2 import FineWeb2
from stages.filter.fineweb2_limits import LanguageLimits, read_limits, table
from stages.text.languages import installed, splitter
from tests.conftest import shared_data

#: two texts of each kind of language: Latin letters with elision, Cyrillic, right to left, special cases with spaces
SEEDS = {
    "fra_Latn": "La maison est au bout de la rue, et l'on n'y va plus. Il en reste un mur d'enceinte. Qu'importe! ",
    "rus_Cyrl": "Дом стоит в конце улицы, и никто туда не ходит. От него осталась стена (в т.ч. ворота). ",
    "arb_Arab": "البيت في آخر الشارع، ولا يذهب إليه أحد. بقي من الدار جدار مع باب. ",
    "spa_Latn": "La casa de los EE. UU. está en la calle, y a ella no va nadie. ¿Qué queda del muro? ",
    "hun_Latn": "A ház az utca végén áll, és oda nem megy senki. Egy fal volt, hogy 5-kor is álljon. ",
}

#: a text that is kept
KEPT = """La maison se dresse au bout d'une longue route, et personne n'y a vécu depuis des années.
Son propriétaire, un médecin de la ville voisine, ne s'en souciait guère : il était parti en 1999.
On venait parfois la voir avec des projets, une école, un jardin ou un petit magasin, mais rien ne se faisait.
À la fin, le vent et la pluie firent ce que nul autre n'aurait voulu faire, pierre après pierre, sans bruit.
Il en reste aujourd'hui un mur couvert de lierre, que les enfants du village escaladent en été."""


def shaped(seed: str) -> list[str]:
    """Return texts near the thresholds of every rule, made from a text that is kept."""
    words = seed.split()
    numbered = [f"{seed}{' '.join(words[i % len(words):])} {i}." for i in range(14)]
    body = "\n".join(numbered)
    return ["", " \n ", seed, seed * 2, seed * 30, body, body + "\n" + "\n".join(numbered[:5]),
            "\n".join(line.rstrip(".!? 0123456789") for line in numbered), "\n".join(body.split()),
            "- " + body.replace("\n", "\n- "), body.replace(". ", " ... "), body + " 12 34" * 70, body + " #" * 60,
            body + " i" * 400, body + "\n" + "x" * 3000, ("\n".join(numbered[:3]) + "\n") * 4,
            " ".join(word[::-1] + word for word in body.split()), body.replace(" ", "\u00a0")]


def theirs(limits: LanguageLimits, name: str):
    from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter

    return [
        GopherRepetitionFilter(language=name, dup_para_frac=0, dup_line_char_frac=0, dup_para_char_frac=0,
                               dup_line_frac=limits.dup_line_frac, top_n_grams=limits.top_n_grams,
                               dup_n_grams=limits.dup_n_grams),
        FineWebQualityFilter(language=name, short_line_thr=999, char_duplicates_ratio=0.1,
                             line_punct_thr=limits.line_punct_thr, new_line_ratio=limits.new_line_ratio),
        GopherQualityFilter(language=name, max_avg_word_length=limits.max_avg_word_length,
                            min_avg_word_length=limits.min_avg_word_length, stop_words=list(limits.stopwords),
                            max_non_alpha_words_ratio=limits.max_non_alpha_words_ratio, min_stop_words=2)]


def their_reason(filters, text: str) -> str | None:
    from datatrove.data import Document as Theirs

    for block in filters:
        result = block.filter(Theirs(text=text, id="id"))
        if result is not True:
            return result[1] if isinstance(result, tuple) else "dropped"
    return None


@pytest.mark.parametrize("name", SEEDS)
def test_equal_to_datatrove(name):
    stage = FineWeb2(languages=[name])
    stage.setup()
    filters = theirs(stage.limits()[name], name)
    reasons = set()
    for text in shaped(SEEDS[name]):
        doc = Document("id", text, language=name)
        # datatrove's repetition filter divides by the length of an empty text
        expected = their_reason(filters, text) if text else "empty"
        assert stage.process(doc) == expected, text[:80]
        assert stage.verdict(Document("", language=name, signals=doc.signals)) == expected
        reasons.add(expected)
    assert len(reasons) >= 5


def real_texts(name: str) -> list[str]:
    """Return texts in a language: sentences of lingua's test set, joined in several ways."""
    path = next((p for p in sorted(shared_data("lid", "lingua-sentences").glob("*.txt"))
                 if (found := splitter(p.stem)) is not None and found.language == name), None)
    if path is None:
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    texts = ["\n".join(lines[i:i + n]) for n, i in ((4, 0), (9, 60), (25, 0))]
    return [*texts, "\n".join(" ".join(lines[:12]).split()), " ".join(lines[:12]), ("\n".join(lines[:4]) + "\n") * 3,
            "\n".join(line.rstrip(".!?") for line in lines[:12])]


@pytest.mark.slow
def test_equal_to_datatrove_on_sentences_of_every_language():
    stage, compared = FineWeb2(), []
    for name, limits in stage.limits().items():
        texts = real_texts(name)
        filters = theirs(limits, name)
        for text in texts:
            assert stage.process(Document("id", text, language=name)) == their_reason(filters, text), (name, text[:80])
        compared += [name] * bool(texts)
    assert len(compared) == 34, sorted(set(stage.limits()) - set(compared))


def fundus() -> list[tuple[str, str]]:
    """Return (language, text) of the news pages with a gold text. The language is taken from the country."""
    root = shared_data("html", "fundus")
    languages = {"at": "deu_Latn", "ch": "deu_Latn", "de": "deu_Latn", "es": "spa_Latn", "gl": "dan_Latn",
                 "id": "ind_Latn", "il": "heb_Hebr", "isl": "isl_Latn", "it": "ita_Latn", "li": "deu_Latn",
                 "lt": "lit_Latn", "lu": "deu_Latn", "my": "zsm_Latn", "na": "deu_Latn", "no": "nob_Latn",
                 "pt": "por_Latn", "py": "deu_Latn", "ru": "rus_Cyrl", "se": "swe_Latn", "tz": "swh_Latn"}
    found = []
    for path in sorted(root.rglob("*.json")):
        language = languages.get(path.relative_to(root).parts[0])
        if language is None:
            continue
        for page in json.loads(path.read_text(encoding="utf-8")).values():
            body = page.get("body") if isinstance(page, dict) else None
            if body:
                parts = [*body.get("summary", []), *(p for s in body["sections"]
                                                     for p in (*s.get("headline", []), *s["paragraphs"]))]
                found.append((language, "\n".join(parts)))
    return found


@pytest.mark.slow
def test_equal_to_datatrove_on_news_pages():
    stage, compared = FineWeb2(), set()
    for language, text in fundus():
        if language not in stage.limits():
            continue
        filters = theirs(stage.limits()[language], language)
        assert stage.process(Document("id", text, language=language)) == their_reason(filters, text), text[:80]
        compared.add(language)
    assert len(compared) >= 10, compared


def test_languages_by_any_name():
    stage = FineWeb2(languages=["fra_Latn", "srp_Cyrl"])
    text = KEPT
    for label in ("fr", "fra", "fra_Latn", "FR"):
        assert stage.process(Document("id", text, language=label)) is None
    for label in ("", "de", "deu_Latn", "zz", "srp_Latn"):
        doc = Document("id", text, language=label)
        assert stage.process(doc) == stage.verdict(doc) == "no_thresholds"
        assert not doc.signals
    assert stage.reads() == {"language": "languages"}
    # without a list: all whose words need no package
    assert FineWeb2().process(Document("id", text, language="de")) != "no_thresholds"
    assert FineWeb2().process(Document("id", text, language="ko")) == "no_thresholds"


def test_thresholds_may_be_changed_and_replayed():
    text = KEPT
    plain = FineWeb2(languages=["fra_Latn"])
    strict = FineWeb2(languages=["fra_Latn"], change={"fra_Latn": {"max_avg_word_length": 3.0}})
    doc = Document("id", text, language="fr")
    assert plain.process(doc) is None
    assert strict.verdict(Document("", language="fr", signals=doc.signals)) == "gopher_above_avg_threshold"
    assert plain.key(("signal",)) == strict.key(("signal",))
    assert plain.key() != strict.key()
    assert set(doc.signals) <= set(stage_class("fineweb2").signals)


def test_replay_asks_each_chain_under_its_own_thresholds():
    """The engine copies a stage and gives the copy the thresholds of then (`pipeline.passes.replay`)."""
    doc = Document("id", KEPT, language="fr")
    for change in ({"min_doc_words": 1000}, {"change": {"fra_Latn": {"max_avg_word_length": 3.0}}}):
        now = FineWeb2(languages=["fra_Latn"])
        now.setup()
        assert now.process(doc) is None
        then = copy.copy(now)
        then.config = type(now.config).model_validate({**now.config.model_dump(), **change})
        row = Document("id", language="fr", signals=doc.signals)
        said = [(now.verdict(row), then.verdict(row)) for _ in range(2)]
        assert said == [(None, FineWeb2(then.config).verdict(row))] * 2 and said[0][1] is not None


FRENCH = """dup_line_frac: 0.264
dup_n_grams:
- - 5
  - 0.15
language_score: 0.824
line_punct_thr: 0.1
max_avg_word_length: 11
max_non_alpha_words_ratio: 0.812
min_avg_word_length: 2
new_line_ratio: 0.185
stopwords: [de, la, le, "\\xE0"]
top_n_grams:
- - 2
  - 0.161
"""


def test_thresholds_from_files(tmp_path):
    one = tmp_path / "fra_Latn.yml"
    one.write_text(FRENCH)
    limits = read_limits(one)["fra_Latn"]
    assert limits.stopwords == ("de", "la", "le", "à")
    assert limits.top_n_grams == ((2, 0.161),)
    several = tmp_path / "all.yml"
    several.write_text("".join(f"{name}:\n" + "".join(f"  {line}\n" for line in FRENCH.splitlines())
                               for name in ("fra_Latn", "oci_Latn")))
    assert set(read_limits(several)) == {"fra_Latn", "oci_Latn"}
    stage = FineWeb2(thresholds=str(several), languages=["oci_Latn"])
    stage.setup()
    assert not stage.problems()
    assert stage.resource_files() == {"thresholds": str(several)}
    assert "oci_Latn" in stage.limits()
    assert FineWeb2(thresholds=str(one)).key() != FineWeb2().key()
    # a file of one language says by its name which
    other = tmp_path / "oci_Latn.yml"
    other.write_text(FRENCH)
    assert FineWeb2(thresholds=str(other)).key() != FineWeb2(thresholds=str(one)).key()
    assert FineWeb2(thresholds=str(other)).key(("signal",)) == FineWeb2(thresholds=str(one)).key(("signal",))


@pytest.mark.parametrize(("text", "said"), [
    ("", "neither one of FineWeb-2's configs"), ("- a\n", "neither"), ("fra_Latn: 3\n", "neither"),
    (FRENCH.replace("0.264", "much"), r"dup_line_frac.*number"), (FRENCH + "unknown: 1\n", "unknown"),
    (FRENCH.replace("line_punct_thr: 0.1\n", ""), "line_punct_thr"), (FRENCH.replace("[de, la", "[no, la"), "quotes"),
    (FRENCH.replace("- - 5", "- - 4"), "no such n: 4"), ("{", "no YAML"),
    (FRENCH.replace("- - 2", "- 2"), "top_n_grams|no YAML"),
    ("!!python/object/apply:os.system [true]\n", "no YAML")])
def test_broken_files_are_refused_by_name(tmp_path, text, said):
    path = tmp_path / "fra_Latn.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as e:
        read_limits(path)
    assert "fra_Latn.yml" in str(e.value)
    assert "thresholds" in FineWeb2(thresholds=str(path)).problems()


def test_unknown_languages_and_missing_packages_are_said():
    assert "no thresholds for xx_Latn" in FineWeb2(languages=["xx_Latn"]).problems()["languages"]
    assert "no thresholds for deu" in FineWeb2(change={"deu": {"new_line_ratio": 0.1}}).problems()["change"]
    with pytest.raises(ValueError, match="fineweb2: languages: no thresholds"):
        FineWeb2(languages=["xx_Latn"]).setup()
    for name in ("kor_Hang", "cmn_Hani"):
        package = splitter(name).needs
        if not installed(package):
            assert f"pip install {package}" in FineWeb2(languages=[name]).problems()["languages"]


def test_setup_leaves_nothing_to_documents(monkeypatch, tmp_path):
    """Rules are exported and kernels compiled before the first document; a file of languages that all need packages
    is refused."""
    import stages.text.cache as export

    stage = FineWeb2(languages=["fra_Latn", "deu_Latn"])
    stage.setup()
    monkeypatch.setattr(export.subprocess, "run", lambda *a, **k: pytest.fail("exported for a document"))
    for language in ("fr", "de"):
        assert stage.process(Document("id", KEPT, language=language)) in (None, "gopher_enough_stop_words")
    korean = tmp_path / "kor_Hang.yml"
    korean.write_text(FRENCH)
    assert "name the languages" in FineWeb2(thresholds=str(korean)).problems()["languages"]


def test_words_of_another_package(monkeypatch):
    """A language whose words a package finds: the package's words are judged."""
    import stages.filter.fineweb2 as module

    monkeypatch.setattr(module, "split_words", lambda name: lambda text: [c for c in text if not c.isspace()])
    monkeypatch.setattr(module, "installed", lambda package: package == "jieba")
    stage = FineWeb2(languages=["cmn_Hani"])
    stage.libraries = ()
    doc = Document("id", "他在月中是人。" * 3, language="zh")
    assert stage.process(doc) == "top_2_gram"
    assert doc.signals["gopher_words"] == 18
    monkeypatch.setattr(module, "split_words", lambda name: lambda text: [])
    assert stage.process(Document("id", "他。", language="zh")) == "empty"


def test_the_table_is_whole():
    known = table()
    assert len(known) == 40
    for name, limits in known.items():
        assert splitter(name) is not None, name
        assert len(limits.stopwords) >= 8
        assert [n for n, _ in limits.top_n_grams] == [2, 3, 4]
        assert [n for n, _ in limits.dup_n_grams] == [5, 6, 7, 8, 9, 10]
        assert sorted(limits.dup_n_grams, key=lambda pair: -pair[1]) == list(limits.dup_n_grams)
        assert 0 < limits.dup_line_frac < 0.5
        assert 0.6 < limits.max_non_alpha_words_ratio <= 0.9
        assert limits.min_avg_word_length < limits.max_avg_word_length <= 21


def test_rules_that_are_off_set_no_bounds():
    off = FineWeb2(min_doc_words=0, max_doc_words=0, min_stop_words=0, char_duplicates_ratio=0)
    assert {b.key for b in off.bounds()} == {"short_line_thr", "char_duplicates_ratio"}
    assert {b.key for b in FineWeb2().bounds()} >= {"min_doc_words", "max_doc_words", "min_stop_words"}
