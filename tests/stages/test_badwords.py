"""Bad words: lists in every format, words separated as each language writes them, and verdicts by their share of the
text.

The words in these tests are invented or innocent, such as `tulip`. LDNOOBW's own lists are read from the folder of real
data, if it is there.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from functools import partial

import pytest

from pipeline import fetch as registry
from pipeline.base.files import file_sha256
from pipeline.fetch import Download, FetchError, Package
from stages.document import Document
from stages.filter.badwords import LISTS, Badwords
from stages.scoring.models import MissingModel
from stages.text.badwords import EVERYDAY, BadWords, count_lists, language_of, normal
from stages.text.wordlists import ANY, read_lists
from tests.conftest import shared_data


def tgz(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


# -- lists ----------------------------------------------------------------------------------------------------------
def test_every_form_of_a_list(tmp_path):
    npm = tgz(tmp_path / "a.tgz", {"package/en.json": b'["tulip", "tulip", " red rose "]',
                                   "package/package.json": b"{}", "package/fr-CA.json": b'["lis"]',
                                   "package/README.md": b"no list", "package/index.js": b"x"})
    assert read_lists(npm) == {"en": ("tulip", "red rose"), "fr-CA": ("lis",)}
    repository = tmp_path / "b.zip"
    with zipfile.ZipFile(repository, "w") as archive:
        archive.writestr("LDNOOBW-master/en", "tulip\r\nred rose\r\n")
        archive.writestr("LDNOOBW-master/de.txt", "\ufeff# flowers\nTulpe\n\n")
        archive.writestr("LDNOOBW-master/LICENSE", "…")
    assert read_lists(repository) == {"en": ("tulip", "red rose"), "de": ("Tulpe",)}
    (tmp_path / "c.json").write_text('{"en": ["tulip"], "": ["lily"]}')
    assert read_lists(tmp_path / "c.json") == {"en": ("tulip",), ANY: ("lily",)}
    (tmp_path / "d.json").write_text('["lily"]')
    (tmp_path / "e.txt").write_text("lily\n# rose\n")
    assert read_lists(tmp_path / "d.json") == read_lists(tmp_path / "e.txt") == {ANY: ("lily",)}


@pytest.mark.parametrize(("name", "data", "said"), [
    ("a.tgz", b"nothing", "no archive"), ("a.zip", b"nothing", "no archive"), ("a.json", b"{", "no JSON"),
    ("a.json", b"3", "neither an array"), ("a.json", b'{"en": "tulip"}', "'en' holds no array"),
    ("a.json", b'{"en": [1]}', "'en' holds no array"), ("a.json", b"{}", "no list"), ("a.txt", b"# only\n", "no list")])
def test_what_is_no_list_says_so(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=said):
        read_lists(tmp_path / name)


def test_what_a_list_is_its_content_says(tmp_path):
    """Keys know contents, not names: what would be read as something else under another name is refused there."""
    archive = tgz(tmp_path / "a.tgz", {"en": b"tulip"})
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as packed:
        packed.writestr("en", "tulip")
    for data, suffix in ((archive.read_bytes(), "tar.gz"), ((tmp_path / "b.zip").read_bytes(), "zip"),
                         (b'\xef\xbb\xbf{"en": ["tulip"]}', "json"), (b'["tulip",\n"lily"]\n', "json")):
        (tmp_path / "list.txt").write_bytes(data)
        with pytest.raises(ValueError, match=rf"list\.txt is no text .* rename it to \*\.{suffix}"):
            read_lists(tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text("[tulip]\n8\n{")
    assert read_lists(tmp_path / "list.txt") == {ANY: ("[tulip]", "8", "{")}


def test_archives_that_are_too_much_are_refused(tmp_path):
    read = partial(read_lists, max_files=3, max_bytes=1000)
    files = {"en": b"tulip", "de": b"Tulpe", "README": b"x" * 900}
    assert set(read(tgz(tmp_path / "a.tgz", files))) == {"en", "de"}
    for more in ({"fr": b"lis"}, {"README": b"x" * 1001}):
        with pytest.raises(ValueError, match=r"a\.tgz holds more than 3 files or"):
            read(tgz(tmp_path / "a.tgz", files | more))
        with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as packed:
            for name, data in (files | more).items():
                packed.writestr(name, data)
        with pytest.raises(ValueError, match=r"b\.zip holds more than 3 files or"):
            read(tmp_path / "b.zip")


def test_a_damaged_archive_is_named(tmp_path):
    words = "\n".join(str(n**3) for n in range(10_000)).encode()
    data = bytearray(tgz(tmp_path / "a.tgz", {"en": words}).read_bytes())
    data[9000:] = b"\xff" * (len(data) - 9000)
    (tmp_path / "a.tgz").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.tgz is no archive that can be read"):
        read_lists(tmp_path / "a.tgz")


def test_entries_of_nothing_visible_are_none():
    found, words = BadWords("en", ["\u200b", "\xad\ufeff", "tulip"]).count("a tulip\u200b")
    assert found == {"tulip": 1} and words == 2


def test_a_list_of_an_archive_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"package/en\.json holds no array"):
        read_lists(tgz(tmp_path / "a.tgz", {"package/en.json": b'{"a": 1}'}))


# -- words ----------------------------------------------------------------------------------------------------------
def test_the_longest_entry_counts_once():
    bad = BadWords("en", ["tulip", "tulip bulb", "bulb", "tulip bulb fair"])
    found, words = bad.count("tulip bulb, tulip bulb fair!")
    assert dict(found) == {"tulip bulb": 1, "tulip bulb fair": 1} and words == 5
    assert dict(BadWords("zh", ["郁金", "郁金香", "金香花"]).count("郁金香花 郁金")[0]) == {"郁金香": 1, "郁金": 1}


def test_a_tone_mark_goes_on_with_the_syllable():
    assert BadWords("th", ["ดอกไม"]).count("มีดอกไม้สวย")[0].total() == 0


def test_entries_that_mostly_mean_something_else():
    assert BadWords("ja", ["女の子", "ボスク"]).count("女の子がボスク")[0].total() == 1
    assert BadWords("zh", ["女の子"]).count("女の子")[0].total() == 1, "only in the language it is left out in"
    for language, entries in EVERYDAY.items():
        assert len(set(entries)) == len(entries)
        assert BadWords(language, entries)._begins is None and not BadWords(language, entries)._words


@pytest.mark.parametrize(("code", "language"), [
    ("en", "en"), ("en-US", "en"), ("eng_Latn", "en"), ("nb", "no"), ("nno", "no"), ("cmn_Hani", "zh"),
    ("zh-Hant", "zh"), ("tl", "fil"), ("pes_Arab", "fa"), ("kab", "kab"), ("sw", "sw")])
def test_languages_by_any_code(code, language):
    assert language_of(code) == language


def test_lists_of_regions_and_of_any_language():
    lists = {"fr": ("lis",), "fr-CA": ("trille",), ANY: ("lily",), "de": ("Tulpe",)}
    fr, sw = count_lists(lists, "fr"), count_lists(lists, "sw")
    assert fr is not None and fr.count("lis trille lily tulpe")[0].total() == 3
    assert sw is not None and sw.count("lis trille lily tulpe")[0].total() == 1
    assert count_lists({"fr": ("lis",)}, "sw") is None


def test_words_are_counted_where_nothing_sets_them_apart():
    assert BadWords("en", ["x"]).count("one two, three's")[1] == 4
    assert BadWords("zh", ["郁金香"]).count("一二三四五六。")[1] == 3
    assert BadWords("th", ["ดอกบัว"]).count("กกกกกกกก")[1] == 2


def test_hostile_texts_take_time_in_proportion():
    bad = BadWords("en", ["a a a a a a b", "a"])
    assert bad.count("a " * 50_000)[0].total() == 50_000
    assert BadWords("zh", ["花" * 30 + "园", "花园"]).count("花" * 20_000)[0].total() == 0


# -- the stage ------------------------------------------------------------------------------------------------------
@pytest.fixture
def lists(tmp_path):
    (tmp_path / "lists.json").write_text(json.dumps({"en": ["tulip", "rose"], "de": ["Tulpe"]}))
    return str(tmp_path / "lists.json")


def test_without_signals_a_document_is_kept(lists):
    assert Badwords(lists=lists).verdict(Document("0" * 32, "")) is None


def test_the_lists_take_part_in_the_key(lists, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path / "models"))
    with pytest.raises(MissingModel, match="tokenmill fetch badwords"):
        Badwords().key()
    (tmp_path / "models").mkdir()
    tgz(tmp_path / "models" / LISTS, {"package/en.json": b'["tulip"]'})
    first = Badwords().key()
    assert first == Badwords(lists=str(tmp_path / "models" / LISTS)).key() != Badwords(lists=lists).key()
    assert Badwords().resource_files() == {"lists": str(tmp_path / "models" / LISTS)}
    assert Badwords().key(("signal",)) == Badwords(max_rate=0.5).key(("signal",))


# -- fetching -------------------------------------------------------------------------------------------------------
def npm(folder, archive):
    """Write a program called npm that packs one package, and knows no other."""
    folder.mkdir()
    (folder / "npm").write_text(f'#!/bin/sh\n[ "$1" = pack ] && [ "$6" = naughty-words@1.2.0 ] || exit 1\n'
                                f'cp "{archive}" "$5/"\n')
    (folder / "npm").chmod(0o755)


def test_lists_are_fetched_by_npm_and_checked(tmp_path, monkeypatch):
    archive = tgz(tmp_path / LISTS, {"package/en.json": b'["tulip"]'})
    npm(tmp_path / "bin", archive)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path / "models"))
    with pytest.raises(FetchError, match="another checksum"):
        registry.fetch("badwords")
    assert not (tmp_path / "models" / LISTS).exists()
    sha = file_sha256(archive)
    package = Package("naughty-words", "1.2.0", LISTS, sha, archive.stat().st_size, registry="npm")
    models = {"badwords": Download(package, "", LISTS, sha)}
    assert registry.fetch("badwords", models) == tmp_path / "models" / LISTS
    (tmp_path / "bin" / "npm").unlink()
    assert read_lists(registry.fetch("badwords", models)) == {"en": ("tulip",)}, "fetched once"


def test_without_npm_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path / "models"))
    with pytest.raises(FetchError, match=r"npm, which is not installed; install it, or put naughty-words-1\.2\.0\.tgz"):
        registry.fetch("badwords")


# -- the real lists -------------------------------------------------------------------------------------------------
def ldnoobw():
    return {path.stem: tuple(json.loads(path.read_text(encoding="utf-8")))
            for path in sorted(shared_data("lists", "naughty-words").glob("*.json"))}


def test_the_real_lists_find_their_own_words():
    lists = ldnoobw()
    assert len(lists) == 28
    for code, entries in lists.items():
        language = language_of(code)
        bad = count_lists(lists, language)
        assert bad is not None
        left_out = {normal(e, language) for e in EVERYDAY.get(language, ())}
        short = [e for e in entries if len(e) == 1 or not any(map(str.isalpha, e)) or e in ("なめ",)]
        found = sum(bad.count(f"… {entry} …")[0].total() > 0 for entry in entries)
        assert found >= len(entries) - len(left_out) - len(short), code


def test_ordinary_sentences_hold_hardly_any():
    """150 sentences a language, of newspapers and lessons: at most two words of a list in each, none in most."""
    lists = ldnoobw()
    folder = shared_data("lid", "lingua-sentences")
    hits = {}
    for path in sorted(folder.glob("*.txt")):
        bad = count_lists(lists, language_of(path.stem))
        if bad is not None:
            hits[path.stem] = bad.count(path.read_text(encoding="utf-8"))[0].total()
    assert len(hits) >= 20 and max(hits.values()) <= 2 and sum(hits.values()) <= 10, hits
