"""Counts how often the entries of a list of bad words occur in a text, by rules that depend on the language.

Texts and entries are normalised before they are compared: NFKC, lower case (in Turkish, dotted and dotless i stay
different), no soft hyphens and no zero-width characters. In Arabic and Persian, vowel signs and elongation marks are
removed, and letters that are often typed for one another become the same letter. In Russian, ё becomes е. The language
then decides which occurrences count:

- Most languages: whole words. A word is a run of letters, marks and digits, so `don't` and `l'un` are two words each.
  An entry of several words matches with blanks, a hyphen or an apostrophe between them. Inflected forms count only if
  the list has them. LDNOOBW's lists have many for Hungarian and Turkish, and hardly any for Polish, Czech or Finnish.
  Entries are not searched for inside longer words: `am` would be found in every Turkish `ama` (but).
- Arabic: articles, prepositions and conjunctions joined to a word are removed if at least three letters remain.
- Korean: particles are removed from the end of a word; an entry inside a longer word (자위대, an army) does not count.
- Chinese, Japanese: an entry matches anywhere in the text. Entries of a single ideograph or of one or two hiragana are
  ignored: 性, for instance, occurs in every text about quality. An entry in katakana matches only a whole run of
  katakana: セックス does not count inside エセックス (Essex). Entries in Latin letters match whole words.
- Thai: an entry matches anywhere in the text, with two exceptions. An entry of one syllable must have no Thai letter on
  either side, because other words begin with it (ห่าง, far; สัดส่วน, proportion; กูเกิล, Google). A longer entry must
  not be followed by a vowel or mark that would change its last syllable.
- Hindi: the list (LDNOOBW's) is written in Latin letters, so it finds nothing in Devanagari.

LDNOOBW is the "List of Dirty, Naughty, Obscene, and Otherwise Bad Words". `EVERYDAY` names the entries of LDNOOBW that
are ignored because they mostly have another, everyday meaning. It includes the entries that C4 leaves out.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import regex

from stages.text.language_codes import short
from stages.text.wordlists import ANY

#: entries of LDNOOBW left out, since they mostly mean something else (C4, arXiv 1910.10683: ja sm, グロ, 女の子; zh 性)
EVERYDAY: dict[str, tuple[str, ...]] = {
    "ja": ("sm", "グロ", "女の子", "xx", "支配", "人種", "嫌い", "誘惑", "挿入", "噴出", "両性", "フック", "ラバー",
           "ローター", "スリット", "エスコート", "ファンタジー", "いたずら", "殺人事件", "カント", "ディック",
           "ハードコア"),
    "zh": ("性", "成人", "激情", "刚度", "靠背", "祖宗", "老二", "九游", "私服", "13点", "十三点"),
    "ko": ("보지", "자지", "미친", "고자", "유모", "노모", "망가"),
}
#: languages that use the list of a near relative, or whose list goes by another code
_SAME = {"nn": "no", "prs": "fa", "tl": "fil", "wuu": "zh", "yue": "zh"}
#: letters that count as one word in languages without spaces between words
LETTERS_A_WORD = {"ja": 2, "zh": 2, "th": 4}
_ARABIC = frozenset(("ar", "fa"))

_WORD = regex.compile(r"[\p{L}\p{M}\p{N}]+")
_RUN = regex.compile(r"[\p{L}\p{M}\p{N}]+|[^\p{L}\p{M}\p{N}]", regex.DOTALL)
_LATIN = re.compile(r"[0-9a-z]+")
_NO_WIDTH = dict.fromkeys((0xAD, 0x200B, 0x200D, 0x2060, 0xFEFF))
_ARABIC_SIGNS = {**dict.fromkeys((*range(0x64B, 0x660), 0x670, 0x640)),
                 **str.maketrans("أإآٱيىك", "ااااییک")}
_CYRILLIC = str.maketrans("ё", "е")
_PROCLITICS = ("وال", "فال", "بال", "کال", "ولل", "ال", "لل", "و", "ف", "ب", "ل", "ک")
_PARTICLES = tuple(sorted((
    "은", "는", "이", "가", "을", "를", "의", "에", "와", "과", "도", "만", "로", "으로", "에서", "에게", "한테",
    "까지", "부터", "보다", "처럼", "라고", "이라고", "이나", "나", "랑", "이랑", "들", "들이", "들은", "들을", "들의",
    "같은", "이다", "다", "야", "아"), key=len, reverse=True))
_KATAKANA = re.compile(r"[ァ-ヺー・ ]+")
_HIRAGANA = re.compile(r"[ぁ-ゖ]+")
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
                       r"\u3100-\u312f]")
_THAI = re.compile(r"[\u0e00-\u0e7f]")
#: vowels that continue the syllable before them
_THAI_GOES_ON = frozenset("ะาำๅ")
#: Thai entries of fewer characters count as one syllable
_SYLLABLE = 4
#: separators between the words of an entry; each of them matches any other
_LOOSE = re.compile(r"[\s'’ʼ`‐‑-]+")
#: most characters between two words of an entry
_GAP = 3


def language_of(code: str) -> str:
    """Return the code by which word lists name the language of a label: `en` for en-US, eng and eng_Latn."""
    primary = short(code.replace("_", "-").partition("-")[0].lower())
    return _SAME.get(primary, primary)


def normal(text: str, language: str) -> str:
    """Normalise a text, or an entry of a word list, before the two are compared: NFKC, lower case, and the rules for
    the language in the docstring of this module."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).translate(_NO_WIDTH)
    if language == "tr":
        text = text.replace("İ", "i").replace("I", "ı")
    text = text.lower()
    if language in _ARABIC:
        text = text.translate(_ARABIC_SIGNS)
    return text.translate(_CYRILLIC) if language == "ru" else text


class BadWords:
    """Counts how often the entries of one language's lists of bad words occur in texts."""

    def __init__(self, language: str, entries: Iterable[str]) -> None:
        self.language = language
        self.unspaced = language in LETTERS_A_WORD
        #: First word of an entry → one pair for each entry that begins with this word: (its other words, the signs such
        #: as `&` that must stand before each of them). Entries of more words come first.
        self._words: dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]] = {}
        #: first character → entries that match anywhere in a text, the longest first
        self._anywhere: dict[str, list[str]] = {}
        left_out = {normal(entry, language) for entry in EVERYDAY.get(language, ())}
        for entry in entries:
            entry = normal(entry, language)
            if not entry or entry in left_out:
                continue
            if (self.unspaced and _UNSPACED.search(entry)) or not any(map(str.isalnum, entry)):
                if entry not in (anywhere := self._anywhere.setdefault(entry[0], [])) and not _is_everywhere(entry):
                    anywhere.append(entry)
                continue
            words = list(_words(entry, self.unspaced).finditer(entry))
            if not any(c.isalpha() for c in entry) or not words:
                continue
            tail = (tuple(m[0] for m in words[1:]), _gaps(entry, words))
            if tail not in (tails := self._words.setdefault(words[0][0], [])):
                tails.append(tail)
        for tails in self._words.values():
            tails.sort(key=lambda tail: (-len(tail[0]), tail))
        self._anywhere = {c: sorted(candidates, key=lambda e: (-len(e), e))
                          for c, candidates in self._anywhere.items() if candidates}
        self._begins = re.compile(f"[{re.escape(''.join(sorted(self._anywhere)))}]") if self._anywhere else None

    def count(self, text: str) -> tuple[Counter[str], float]:
        """Count the bad words in a text. Returns (count of each entry of the lists, number of words in the text). If
        entries overlap in the text, the one that begins first counts; of those that begin together, the longest counts.
        In languages without spaces between words, the number of words is estimated: two letters are a word in Chinese
        and Japanese, four in Thai."""
        text = normal(text, self.language)
        entries, words = self._entries_in(text)
        return Counter(entry for entry, _, _ in entries), words

    def places(self, text: str) -> list[tuple[int, int]]:
        """Return the places of the bad words in a text, in order, as (first character, one past the last). If
        normalisation changes the length of a run of letters, the place of a bad word in this run is the whole run."""
        forms, starts = [], []                # of the runs of letters, and of the characters between them
        bounds = [0]
        for run in _RUN.finditer(text):
            forms.append(normal(run[0], self.language))
            starts.append(run.start())
            bounds.append(bounds[-1] + len(forms[-1]))

        def place(at: int, *, end: bool) -> int:
            run = bisect_left(bounds, at) - 1 if end else bisect_right(bounds, at) - 1
            begin, stop = starts[run], starts[run + 1] if run + 1 < len(starts) else len(text)
            return begin + at - bounds[run] if stop - begin == len(forms[run]) else stop if end else begin

        entries, _ = self._entries_in("".join(forms))
        return sorted((place(begin, end=False), place(stop, end=True)) for _, begin, stop in entries)

    def _entries_in(self, text: str) -> tuple[list[tuple[str, int, int]], float]:
        """Return two values: the entries of the lists that occur in a normalised text, each as (entry, first character,
        one past the last); and the number of words in the text."""
        entries: list[tuple[str, int, int]] = []
        if self.unspaced:
            words = sum(map(str.isalpha, text)) / LETTERS_A_WORD[self.language]
            distinct = set(_LATIN.findall(text)) if self._words else set()
        else:
            all_words = _words(text, False).findall(text)
            words, distinct = float(len(all_words)), set(all_words)
        form_of = {word: form for word in sorted(distinct) for form in self._forms(word) if form in self._words}
        if form_of:
            entries += self._in_words(text, form_of)
        if self._begins is not None:
            entries += self._in_text(text)
        return entries, words

    def _forms(self, word: str) -> Iterable[str]:
        """Yield the forms of a word of a text that may be in the list. In Arabic, these are the word without a prefix,
        and in Korean the word without a particle. In every language, the last form is the word itself."""
        if self.language == "ar":
            yield from (word[len(p):] for p in _PROCLITICS if len(word) > len(p) + 2 and word.startswith(p))
        elif self.language == "ko":
            yield from (word[:-len(p)] for p in _PARTICLES if len(word) > len(p) and word.endswith(p))
        yield word

    def _in_words(self, text: str, form_of: Mapping[str, str]) -> Iterator[tuple[str, int, int]]:
        words = list(_words(text, self.unspaced).finditer(text))
        at = 0
        while at < len(words):
            form = form_of.get(words[at][0])
            step = 1
            for tail, gaps in self._words[form] if form is not None else ():
                run = words[at:at + 1 + len(tail)]
                if len(run) == 1 + len(tail) and tuple(m[0] for m in run[1:]) == tail and all(
                        b.start() - a.end() <= _GAP for a, b in pairwise(run)) and _gaps(text, run) == gaps:
                    yield " ".join((str(form), *tail)), run[0].start(), run[-1].end()
                    step = 1 + len(tail)
                    break
            at += step

    def _in_text(self, text: str) -> Iterator[tuple[str, int, int]]:
        assert self._begins is not None
        at = 0
        while (begin := self._begins.search(text, at)) is not None:
            at = begin.start()
            entry = next((e for e in self._anywhere[begin[0]]
                          if text.startswith(e, at) and _stands_alone(text, at, e)), None)
            if entry is None:
                at += 1
            else:
                yield entry, at, at + len(entry)
                at += len(entry)


def count_lists(lists: Mapping[str, Iterable[str]], language: str) -> BadWords | None:
    """Return a counter of the bad words of a language, or None if there is no list for it. `lists` is {language code:
    entries}. All lists for the language (`en` and `en-US`, for instance) and the list for any language are used."""
    entries = [entry for code, words in lists.items() if code == ANY or language_of(code) == language
               for entry in words]
    return BadWords(language, entries) if entries else None


def _words(text: str, latin: bool) -> re.Pattern[str] | regex.Pattern[str]:
    """Return the pattern that finds the words of a text in lower case. With `latin`, or if the whole text is ASCII, it
    is a fast pattern for runs of ASCII letters and digits. Otherwise it is a pattern for runs of the letters, marks and
    digits of all scripts."""
    return _LATIN if latin or text.isascii() else _WORD


def _gaps(text: str, words: list[re.Match[str]]) -> tuple[str, ...]:
    """Return the text between each word and the next, without blanks, hyphens and apostrophes. `words` are the matches
    of the words. An entry of several words occurs in a text only if these gaps are equal: `&` matches only `&`."""
    return tuple(_LOOSE.sub("", text[a.end():b.start()]) for a, b in pairwise(words))


def _is_everywhere(entry: str) -> bool:
    """Return whether an entry of a word list would be found in nearly every text. Such an entry is too short to mean
    anything in a script without spaces between words, or has neither a letter nor a symbol."""
    if len(entry) == 1 and not _KATAKANA.fullmatch(entry):
        return unicodedata.category(entry) != "So"
    return (len(entry) <= 2 and _HIRAGANA.fullmatch(entry) is not None) or not any(
        c.isalpha() or unicodedata.category(c) == "So" for c in entry)


def _stands_alone(text: str, at: int, entry: str) -> bool:
    """Return whether an entry of a word list, found at position `at` of the text, is a word of its own there, rather
    than a part of a longer one. In some scripts this can only be guessed."""
    before, after = text[at - 1:at], text[at + len(entry):at + len(entry) + 1]
    if _KATAKANA.fullmatch(entry):
        return not (before and before != " " and _KATAKANA.fullmatch(before)) and not (
            after and after != " " and _KATAKANA.fullmatch(after))
    if _THAI.match(entry):
        if len(entry) < _SYLLABLE:
            return not _THAI.match(before) and not _THAI.match(after)
        return not after or not (after in _THAI_GOES_ON or unicodedata.category(after) == "Mn")
    for end, beside in ((entry[0], before), (entry[-1], after)):      # Latin at an end: 3p, 卖b
        if end.isascii() and end.isalnum() and beside.isascii() and beside.isalnum():
            return False
    return True
