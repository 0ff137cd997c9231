"""RedPajama-v2's signals, compared with plain implementations of their definitions. Test vectors are in
tests/conformance."""

from __future__ import annotations

import json
import math
import random
import re
import string
import unicodedata
from collections import Counter

import pytest

from stages.document import Document
from stages.filter.redpajama2 import RedPajama2, _ln
from tests.stages.texts import AWKWARD, PROSE, assert_linear, random_texts, real_texts

STOP, BAD = ["the", "a", "and", "of", "The", "m"], ["word", "lorem ipsum", "a b", "é"]
LINES = ("lorem ipsum dolor", "Lorem, Ipsum", "use JavaScript now", "{ x }", "• item", "– dash", "THE END...", "“so.”",
         "so it goes…", "12 34", "½ ² ٣", "ΟΔΥΣΣΕΥΣ'ΑΣ", "e\u0301 É", " \u2000x\u2001y", "", "\u00a0", "a b a b")


def texts() -> list[str]:
    rng, out = random.Random(2), [*AWKWARD, *real_texts(25)]
    base = [*AWKWARD, *random_texts(30, 3)]
    for _ in range(200):
        lines: list[str] = []
        for _ in range(rng.randrange(1, 15)):
            lines += [rng.choice(LINES)] if rng.random() < 0.5 else rng.choice(base).split("\n")[:4]
        out.append("\n".join(lines))
    return out


def normalise(text: str) -> str:
    plain = "".join(c for c in text if c not in string.punctuation).lower()
    return unicodedata.normalize("NFD", re.sub(r"\s+", " ", plain.strip()))


def plain(text: str) -> dict[str, float]:
    """Compute all signals by their definitions, over lines that keep their line break."""
    norm, raw = normalise(text), re.findall(r"\w+|[^\w\s]+", text)
    words, lines = norm.split(), re.findall(r"[^\n]*\n|[^\n]+$", text)
    small = [normalise(line) for line in lines]
    size = len("".join(words))

    def share(part: float, whole: float) -> float:
        return round(part / whole, 8) if whole else 0.0

    out = {"ccnet_length": len(text), "ccnet_nlines": len(lines), "rps_doc_word_count": len(words),
           "rps_doc_curly_bracket": share(len(re.findall("[{}]", text)), len(text)),
           "rps_doc_lorem_ipsum": share(norm.count("lorem ipsum"), len(norm)),
           "rps_doc_stop_word_fraction": share(sum(w in STOP for w in raw), len(raw)) if words else 0.0,
           "rps_doc_num_sentences": len(re.findall(r"\b[^.!?]+[.!?]*", text)),
           "rps_doc_ldnoobw_words": sum(" ".join(words[i:i + n]) in BAD for n in (1, 2)
                                        for i in range(len(words) - n + 1))}
    if words:
        counts = Counter(words).values()
        out |= {"rps_doc_mean_word_length": share(size, len(words)),
                "rps_doc_frac_unique_words": share(len(set(words)), len(words)),
                "rps_doc_unigram_entropy": round(-sum(n / len(words) * math.log(n / len(words)) for n in counts), 8)}
        out["rps_doc_unigram_entropy"] += 0.0              # -0.0 of one word
    if raw:
        out |= {"rps_doc_symbol_to_word_ratio": share(len(re.findall("#|…", text)) + text.count("..."), len(raw)),
                "rps_doc_frac_no_alph_words": round(1 - sum(bool(re.search("[a-zA-Z]", w)) for w in raw) / len(raw), 8),
                "rps_doc_frac_all_caps_words": share(sum(w.isupper() for w in raw), len(raw))}
    for n in range(2, 11):
        grams = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
        counted = Counter(grams)
        if n < 5:
            gram, count = max(counted.items(), key=lambda item: item[1], default=((), 0))
            out[f"rps_doc_frac_chars_top_{n}gram"] = share(len("".join(gram)) * count, size) if count > 1 else 0.0
        else:
            inside = {k for i, gram in enumerate(grams) if counted[gram] > 1 for k in range(i, i + n)}
            out[f"rps_doc_frac_chars_dupe_{n}grams"] = share(sum(len(words[k]) for k in inside), size)
    if lines:
        bullets = tuple("•‣▶◀◦■□▪▫–")
        sums = {
            "rps_doc_frac_lines_end_with_ellipsis": sum(line.rstrip().endswith(("...", "…")) for line in lines),
            "rps_lines_javascript_counts": sum(line.split().count("javascript") for line in small),
            "rps_lines_ending_with_terminal_punctution_mark":
                sum(line.rstrip()[-1:] in (".", "!", "?", "”") and bool(line.rstrip()) for line in lines),
            "rps_lines_num_words": sum(len(line.split()) for line in small),
            "rps_lines_uppercase_letter_fraction": sum(share(sum(map(str.isupper, x)), len(x)) for x in lines),
            "rps_lines_numerical_chars_fraction": sum(share(sum(map(str.isnumeric, x)), len(x)) for x in small),
            "rps_lines_start_with_bulletpoint": sum(line.lstrip().startswith(bullets) for line in lines)}
        out |= {name: round(value / len(lines), 8) for name, value in sums.items()}
    return out


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    (folder / "stop.json").write_text(json.dumps({"en": STOP, "de": ["der"]}), encoding="utf-8")
    (folder / "bad.txt").write_text("\n".join(BAD), encoding="utf-8")
    made = RedPajama2(stop_words=str(folder / "stop.json"), bad_words=str(folder / "bad.txt"))
    made.setup()
    return made


def test_signals_by_their_definition(stage):
    for text in texts():
        doc = Document("id", text)
        assert stage.process(doc) is None
        assert doc.signals == plain(text), text[:200]
        assert set(doc.signals) <= set(stage.signals)
        assert doc.text == text and stage.verdict(Document("", signals=doc.signals)) is None
    assert set(plain(PROSE)) == set(stage.signals)


def test_lists_by_language(stage):
    def signals(language: str) -> dict[str, float]:
        doc = Document("id", "der Hund, the word", language=language)
        stage.process(doc)
        return doc.signals

    assert all(signals(name)["rps_doc_stop_word_fraction"] == 0.2 for name in ("de", "deu", "deu_Latn"))
    assert signals("")["rps_doc_stop_word_fraction"] == signals("en")["rps_doc_stop_word_fraction"] == 0.2
    assert "rps_doc_stop_word_fraction" not in signals("fr")
    assert signals("fr")["rps_doc_ldnoobw_words"] == 1, "a list without a language counts for all"
    bare = RedPajama2()
    bare.setup()
    doc = Document("id", "der Hund")
    bare.process(doc)
    assert not {"rps_doc_stop_word_fraction", "rps_doc_ldnoobw_words"} & set(doc.signals)


def test_logarithms():
    assert _ln(1) == 0.0
    assert all(abs(_ln(n) - math.log(n)) < 4e-15 * max(1, math.log(n)) for n in (*range(1, 3000), 10**6, 10**9 + 7))


@pytest.mark.parametrize("make", [lambda n: "a" * n, lambda n: "a " * n, lambda n: ".!" * n, lambda n: "a." * n,
                                  lambda n: "é\n" * n, lambda n: "{ #" * n])
def test_hostile_texts_take_linear_time(stage, make):
    assert_linear(lambda text: stage.process(Document("id", text)), make, 2000)
