"""Shingles, signatures and band keys: equal to datatrove's where that is promised, and unbiased in our own dialect."""

from __future__ import annotations

import gzip
import json
import random
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from stages.dedup import signature
from stages.dedup.curve import chance, masses, shape
from stages.dedup.hashing import (
    Permutations,
    band_keys,
    character_shingles,
    split_words,
    word_shingles,
)
from stages.dedup.sets import jaccard
from stages.dedup.signature import MinHashSignature
from stages.document import Document
from stages.text import cache
from stages.text.chunks import utf8
from stages.text.normalize import simplify
from tests.conftest import shared_data
from tests.stages.dedup_corpus import edited, vocabulary

AWKWARD = ["", "one two three", "It's a test, isn't it? U.S.A. 3.14 and 1,000,000 e.g. don't",
           "naïve Café №5 ½ \x85 \x1c x",
           "wörter, die — mit “Zitaten” und … Punkten; (a) [b] {c} «d» enden! " * 3, "a " * 30, "الكتاب الجديد " * 9,
           "मैं हिन्दी में लिखता हूँ और यह एक परीक्षण है " * 2, "http://x.org/a?b=c d@e.org #tag @me 12:30 7th " * 3,
           "Ⅷ ① ﬁ İstanbul ǅ ẞ ῼ combining e\u0301 \u200b zero \u00ad width " * 3]


def texts() -> list[str]:
    rng = random.Random(4)
    names = vocabulary(rng)
    return [*AWKWARD, *(" ".join(rng.choices(names, k=rng.randint(5, 300))) for _ in range(20))]


def real_texts(n: int) -> list[str]:
    with gzip.open(shared_data("dedup", "scancode_rules_dev.jsonl.gz"), "rt", encoding="utf-8") as f:
        return [json.loads(line)["text"] for _, line in zip(range(n), f)]


def same_as_datatrove(function: str, sample: list[str], bands: int = 14, rows: int = 8, seed: int = 1,
                      language: str = "") -> int:
    """Check that every signature equals that of the installed datatrove, bit by bit. Returns how many texts have a
    signature."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.hashing import HashConfig, create_hash_func
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    config = MinhashConfig(num_buckets=bands, hashes_per_bucket=rows, seed=seed,
                           hash_config=HashConfig(hash_fc=function, precision=64))
    theirs = MinhashDedupSignature.__new__(MinhashDedupSignature)      # no output folder
    theirs.config, theirs.num_hashes, theirs._parameters = config, bands * rows, None
    function_of_bytes = create_hash_func(config.hash_config, bytes)     # xxhash 4 no longer takes the str it passes
    theirs._hash_func = lambda text: function_of_bytes(text.encode())
    theirs.word_tokenizer = load_word_tokenizer(language or "eng")
    ours = MinHashSignature(dialect="datatrove", hash=function, bands=bands, rows=rows, seed=seed,
                            words="language" if language else "english")
    signed = 0
    for text in sample:
        shingles = theirs.get_shingles(text)
        mine = ours.signature(text, language)
        if not shingles.size:
            assert mine is None, text
            continue
        signed += 1
        with np.errstate(over="ignore"):
            assert np.concatenate(theirs.get_signature(shingles)).tolist() == mine.tolist(), text
    return signed


@pytest.mark.parametrize("function", ["sha1", "xxhash"])
def test_datatrove_dialect_is_bit_equal(function):
    assert same_as_datatrove(function, texts()) > 20
    assert same_as_datatrove(function, texts()[:12], bands=5, rows=3, seed=77) > 5


@pytest.mark.parametrize("language", ["deu_Latn", "fra_Latn", "arb_Arab", "rus_Cyrl", "tur_Latn", "eng_Latn"])
def test_words_of_a_language_are_bit_equal(language):
    """FineWeb-2's signatures: xxhash over the words of the language."""
    said = ("Im Haus sagte er, dass z.B. am 3. Mai nichts war; usw. und so fort, vgl. S. 12 im Buch. ",
            "Aujourd'hui l'homme n'a qu'un mot, c.-à-d. presque rien, dit-il à Mme. Dupont. ",
            "кто-то сказал и т.д., что в 2010 г. было так, а не иначе ", "الكتاب الجديد في البيت الكبير مع ذلك ",
            "Dr. Ali'nin evi vb. şeyler için 5'te geldi. ", "dont cannot im ill its were id shell gonna wont ")
    assert same_as_datatrove("xxhash", [*texts()[:15], *(s * 3 for s in said)], language=language) > 12


def test_languages_have_any_name_and_others_no_words_of_english():
    stage = MinHashSignature(dialect="datatrove", words="language")
    german = "im haus war am abend dont cannot und sonst nichts mehr zu sehen " * 3
    for name in ("de", "deu", "deu_Latn", "DE"):
        assert stage.shingles(german, name)[0].tolist() == stage.shingles(german, "deu_Latn")[0].tolist()
    assert stage.shingles(german, "deu_Latn")[1] != stage.shingles(german, "eng_Latn")[1]
    assert stage.shingles(german, "no")[1] == len(german.split())          # nob has rules of its own
    plain = MinHashSignature(dialect="tokenmill")
    for language, text in (("zh", "今天天气很好，我们去公园散步吧。"), ("jpn_Jpan", "今日は天気がいいので公園へ"),
                           ("tha_Thai", "วันนี้อากาศดีมากเราไปเดินเล่นกันเถอะ"), ("", "one two three four five six"),
                           ("xx-weird", "one two three four five six")):
        assert stage.shingles(text * 3, language)[1] == plain.shingles(text * 3)[1] > 5
    with pytest.raises(ValueError, match="dialect: datatrove"):
        MinHashSignature(words="language")


def test_the_set_up_prepares_all_rules_that_a_document_may_need(tmp_path, monkeypatch):
    """A confined worker cannot start the program that exports them when a document needs them."""
    exported: list[str] = []

    def export(paths: dict[str, Path]) -> None:
        exported.extend(paths)
        for path in paths.values():
            path.touch()

    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_export", export)
    MinHashSignature().setup()
    assert exported == []
    MinHashSignature(dialect="datatrove").setup()
    assert exported == ["en"]
    MinHashSignature(dialect="datatrove", words="language").setup()
    assert len(exported) > 50
    assert {signature._rules(name) for name in ("de", "fra_Latn", "ru", "tur_Latn", "no", "gsw_Latn")} < {*exported}


@pytest.mark.parametrize("dialect", ["tokenmill", "datasketch"])
def test_a_hash_that_has_no_effect_is_refused(dialect):
    with pytest.raises(ValueError, match="hash: xxhash is for dialect: datatrove"):
        MinHashSignature(dialect=dialect, hash="xxhash")


def test_datatrove_dialect_is_bit_equal_on_real_texts():
    assert same_as_datatrove("sha1", real_texts(150)) > 140


def test_datatrove_wraps():
    """The product wraps modulo 2**64 before the Mersenne prime is taken: exact arithmetic gives other numbers."""
    permute = Permutations(112, 1, "datatrove")
    x = 0x0123456789ABCDEF
    wrapped = [((x * int(a) + int(b)) % 2**64) % (2**61 - 1) for a, b in zip(permute.a, permute.b)]
    exact = [(x * int(a) + int(b)) % (2**61 - 1) for a, b in zip(permute.a, permute.b)]
    assert permute(np.array([x], np.uint64)).tolist() == wrapped != exact


def test_signature_is_the_least_value_of_each_function():
    permute = Permutations(24, 9, "tokenmill")
    assert all(int(a) % 2 for a in permute.a)
    assert len(set(permute.a.tolist()) | set(permute.b.tolist())) == 48
    shingles = word_shingles(utf8(" ".join(vocabulary(random.Random(1), 50))), 5)[0]
    brute = [min((int(x) * int(a) + int(b)) % 2**64 for x in shingles) for a, b in zip(permute.a, permute.b)]
    assert permute(shingles).tolist() == brute


@pytest.mark.parametrize("text", [simplify(t) for t in AWKWARD])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_equal_words_have_equal_shingles_and_others_not(text, n):
    words = text.split(" ") if text else []
    hashes, count = word_shingles(utf8(text), n)
    runs = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
    assert count == len(words)
    assert len(hashes) == len(runs)
    assert len(set(zip(hashes.tolist(), runs))) == len(set(hashes.tolist())) == len(set(runs))


def mixed(value: int) -> int:
    """The finaliser of MurmurHash3 (64 bits)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = ((value ^ value >> 33) * factor) % 2**64
    return value ^ value >> 33


def hash_of_word(word: str) -> int:
    """FNV-1a, mixed."""
    hashed = 0xCBF29CE484222325
    for byte in word.encode("utf-8", "surrogatepass"):
        hashed = ((hashed ^ byte) * 0x100000001B3) % 2**64
    return mixed(hashed)


def hash_of_run(words: list[str]) -> int:
    hashed = len(words)
    for word in words:
        hashed = mixed((hashed * 0x9E3779B97F4A7C15 + hash_of_word(word)) % 2**64)
    return hashed


def test_shingles_have_the_hashes_that_they_are_defined_by():
    """Existing signatures and results depend on every bit."""
    rng = random.Random(4)
    pool = [*" \u0301ab1.é今ก\U00020000\U00010400\ud800가", "  ", "word", "ΑΣ"]
    narrow = [*" \u0301ab1.é", " \u0301 ", "word"]          # a mark alone leaves two spaces; all have one byte or two
    for n in (1, 2, 5):
        for text in [*AWKWARD, *("".join(rng.choices(characters, k=rng.randint(0, 30)))
                                 for characters in (pool, narrow) for _ in range(300))]:
            simplified = simplify(text)
            words = split_words(simplified)
            hashes, count = word_shingles(utf8(simplified), n)
            assert (hashes.tolist(), count) == (
                [hash_of_run(words[i:i + n]) for i in range(len(words) - n + 1)], len(words)), ascii(text)


def test_only_the_first_characters_of_a_text_count():
    text = "é 今天 b\ud800 \U00010400c " * 9
    for most in (1, 2, 7, 50, len(text) - 1, len(text), len(text) + 1, 10 * len(text)):
        cut, whole = MinHashSignature(max_chars=most, ngram=2), MinHashSignature(ngram=2)
        (some, count), (same, same_count) = cut.shingles(text), whole.shingles(text[:most])
        assert (some.tolist(), count) == (same.tolist(), same_count)


def test_scripts_without_spaces_are_shingled_by_character():
    hashes, count = word_shingles(utf8(simplify("我们今天去学校。ภาษาไทย かな abc def")), 3)
    assert count == len("我们今天去学校") + len(simplify("ภาษาไทย")) + 2 + 2
    assert len(hashes) == count - 2
    one, two = (set(word_shingles(utf8(t), 5)[0].tolist())
                for t in ("今天天气很好我们去公园", "昨天天气很好我们去公园"))
    assert 0 < len(one & two) < len(one)


def test_band_keys_tell_bands_and_rows_apart():
    signature = np.arange(1, 113, dtype=np.uint64)
    keys = band_keys(signature, 14, 8)
    assert len(set(keys.tolist())) == 14
    assert len(set(band_keys(np.zeros(112, np.uint64), 14, 8).tolist())) == 14
    for at in range(112):
        other = signature.copy()
        other[at] ^= np.uint64(1 << (at % 64))
        assert [i for i, same in enumerate(band_keys(other, 14, 8) == keys) if not same] == [at // 8]
    swapped = signature.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert band_keys(swapped, 14, 8)[0] != keys[0]


@pytest.mark.parametrize("dialect", ["tokenmill", "datatrove"])
def test_estimate_is_as_good_as_datasketch(dialect):
    """The share of equal values estimates the Jaccard similarity without bias, as closely as datasketch's does."""
    from datasketch import MinHash as Reference

    rng = random.Random(21)
    names = vocabulary(rng)
    k = 512
    permute = Permutations(k, 3, dialect)
    ours, reference = [], []
    for n in range(80):
        base = rng.choices(names, k=200)
        a, b = (word_shingles(utf8(" ".join(w)), 2)[0] for w in (base, edited(rng, base, n / 200, names)))
        true = jaccard(np.unique(a), np.unique(b))
        ours.append(float((permute(a) == permute(b)).mean()) - true)
        pair = []
        for shingles in (a, b):
            sketch = Reference(num_perm=k, seed=3)
            sketch.update_batch([int(x).to_bytes(8, "little") for x in shingles])
            pair.append(sketch)
        reference.append(pair[0].jaccard(pair[1]) - true)
    spread = 0.5 / k**0.5                              # largest possible standard deviation
    assert abs(np.mean(ours)) < 3 * spread / 80**0.5
    assert np.std(ours) < 1.3 * spread
    assert np.std(ours) < 1.5 * np.std(reference)


def test_bands_meet_as_often_as_they_should():
    """1 - (1 - s^rows)^bands for pairs of known similarity s."""
    rng = np.random.default_rng(5)
    permute = Permutations(112, 1, "tokenmill")
    for s, share in ((0.6, 0.211), (0.75, 0.772), (0.85, 0.988)):
        met, trials = 0, 400
        for _ in range(trials):
            both, each = round(400 * s), round(200 * (1 - s))
            values = rng.integers(0, 2**64, both + 2 * each, dtype=np.uint64)
            a, b = values[:both + each], np.r_[values[:both], values[both + each:]]
            met += bool((band_keys(permute(a), 14, 8) == band_keys(permute(b), 14, 8)).any())
        assert abs(met / trials - share) < 4 * (share * (1 - share) / trials) ** 0.5 + 0.003


def test_side_row():
    stage = MinHashSignature(max_chars=42)
    doc = Document("0" * 32, "one two three four five six seven eight nine ten")
    assert stage.process(doc) is None
    row = doc.side["minhash_signature"]
    assert (row["chars"], row["words"]) == (48, 9)           # the last word looked at is cut short
    assert len(row["bands"]) == 14 * 8
    longer = Document("1" * 32, doc.text[:42] + " and something else")
    stage.process(longer)
    assert longer.side["minhash_signature"]["bands"] == row["bands"]
    short = Document("2" * 32, "too short")
    stage.process(short)
    assert short.side["minhash_signature"] == {"bands": b"", "chars": 9, "words": 2}


def test_signatures_never_change():
    """Golden values: a change of words, hashes or permutations needs a new version of the stage and of `Shingles`."""
    stage = MinHashSignature()
    text = "The quick brown fox jumps over the lazy dog; Ünïcode, 3.14 and 今天天气很好."
    assert [f"{x:016x}" for x in stage.signature(text)[:3].tolist()] == GOLDEN_SIGNATURE
    doc = Document("0" * 32, text)
    stage.process(doc)
    assert [f"{x:016x}" for x in np.frombuffer(doc.side[stage.name]["bands"], "<u8")[:2].tolist()] == GOLDEN_BANDS


GOLDEN_SIGNATURE = ["070fef138ba984ff", "0c50df7637e41c20", "0fa9e640e29bb35b"]
GOLDEN_BANDS = ["96fe3442f024cf34", "419135526f6f2e76"]


@pytest.mark.parametrize("dialect", ["tokenmill", "datatrove"])
def test_the_key_counts_what_normalisation_goes_by(monkeypatch, dialect):
    stage = MinHashSignature(dialect=dialect)
    key, version = stage.key(), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0" if name == "regex" else version(name))
    assert stage.key() != key


def test_datasketch_dialect_is_bit_equal():
    from datasketch import MinHash as Reference

    stage = MinHashSignature(dialect="datasketch", bands=8, rows=4, seed=5, ngram=3)
    signed = 0
    for text in texts():
        words = split_words(simplify(text))
        grams = [" ".join(words[i:i + 3]).encode() for i in range(len(words) - 2)]
        mine = stage.signature(text)
        if not grams:
            assert mine is None
            continue
        theirs = Reference(num_perm=32, seed=5, scheme="legacy")
        theirs.update_batch(grams)
        assert mine.tolist() == theirs.hashvalues.tolist()
        signed += 1
    assert signed > 20


@pytest.mark.parametrize("n", [1, 2, 24])
def test_equal_runs_of_characters_have_equal_shingles_and_others_not(n):
    for text in (simplify(t) for t in [*AWKWARD, "가나 abc \U0001d7d8 zz" * 5]):
        hashes, count = character_shingles(utf8(text), n)
        runs = [text[i:i + n] for i in range(len(text) - n + 1)]
        assert (count, len(hashes)) == (len(text), len(runs))
        assert len(set(zip(hashes.tolist(), runs))) == len(set(hashes.tolist())) == len(set(runs))


def test_bands_and_rows_of_a_recall():
    """The most rows that 128 hashes allow; FineWeb's 14 x 8 finds 77 % at .75, and 22 x 5 finds 99 %."""
    assert chance(0.75, 14, 8) == pytest.approx(0.772, abs=1e-3)
    assert chance(0.75, 22, 5) == pytest.approx(0.997, abs=1e-3)
    for recall in (0.5, 0.9, 0.95, 0.99, 0.999):
        for similarity in (0.3, 0.5, 0.75, 0.8, 0.95, 1.0):
            bands, rows = shape(recall, similarity)
            assert chance(similarity, bands, rows) >= recall - 1e-9
            assert bands == 1 or chance(similarity, bands - 1, rows) < recall
            assert bands * rows <= 128 or rows == 1
    with pytest.raises(ValueError, match="bands do not find"):
        shape(0.999, 0.01)


def test_masses_are_those_of_datasketch():
    from datasketch.lsh import _false_negative_probability, _false_positive_probability

    for threshold, bands, rows in ((0.75, 14, 8), (0.5, 20, 5), (0.9, 3, 40)):
        wrong, missed = masses(threshold, bands, rows)
        assert wrong == pytest.approx(_false_positive_probability(threshold, bands, rows), abs=2e-4)
        assert missed == pytest.approx(_false_negative_probability(threshold, bands, rows), abs=2e-4)


def test_facts_are_those_of_the_settings():
    from stages.dedup.minhash import MinHash

    lines = MinHash().facts()
    assert "14 bands of 8 rows" in lines[0] and "0.75 with 77.2%" in lines[0]
    assert "17 bands of 5 rows" in MinHash(recall=0.99).facts()[0]
    assert "below 0.9," in MinHash(verify=0.9).facts()[1]
