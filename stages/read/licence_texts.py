"""Recognises whole licence texts. It compares triples of consecutive words, to find out which words of the standard
text of a licence are missing in a document, and which words were added.

A form is one wording of a licence; `licences.json` holds the hashes of its word triples in order. A form and a document
are compared by three kinds of words:

- Standard words of the document are part of a triple of the form.
- Added words are all other words of the document between the first and the last standard word. A single "not" in a
  licence text is thus an added word.
- Missing words are words of the form that are in no triple of the document.

A form fits a document if few words are missing and no added words change the terms. Real notices add names, years and
addresses of copyright holders, but no words of permission, prohibition or condition.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

#: words that are hashed together
TRIPLE = 3
#: Limits for the words of a form that are missing: MISSING is their share of the form, GAP the words in one run. Limits
#: for added words: ADDED is their number as a share of the form, RUN the words in one run
MISSING, GAP, ADDED, RUN = 0.1, 12, 0.25, 20
#: share of a form's triples that a text must hold to be compared with it
LIKELY = 0.5
#: a licence text ends where more words than this lie between two standard ones
_APART = 60
#: most words around a licence; none may speak of other terms, and a longer text around it is refused
_AROUND = 150
#: a form of at least this many words states all its terms itself, so words before it, which may name GPL and patents,
#: are ignored
_LONG = 800
#: characters below a holder's line in which its paragraph may go on
_PARAGRAPH = 300

_WORD = re.compile(r"[a-z0-9]+(?:\.[0-9]+)*\+?")
_SAME = {"licence": "license", "licences": "licenses", "licenced": "licensed", "redistribution": "redistributions",
         "condition": "conditions", "expressed": "express", "acknowledgement": "acknowledgment",
         "acknowledgements": "acknowledgments", "acknowlegement": "acknowledgment",
         "merchantibility": "merchantability",
         "warrantees": "warranties", "https": "http", "holders": "holder", "owners": "holder", "owner": "holder",
         "authors": "author", "contributor": "contributors", "names": "name", "organisation": "organization",
         "obligation": "obligations", "documentations": "documentation"}
_MARKS = re.compile(r"^[ \t]*(?:[/*#;%!|>\"'.-]|dnl|rem\b)+", re.MULTILINE)
_HOLDER = re.compile(r"^\W*(?:portions )?(?:copyright\b.{0,200}(?:\d{4}|<|\[|\(c\)|©)|(?:\(c\)|©)\s*\d{4}).*$",
                     re.MULTILINE)
#: addresses in a holder's line, in which words of terms are parts of names
_ADDRESS = re.compile(r"\S{0,99}(?:@|://|www\.|\bat\b.{1,20}\bdot\b)\S{0,199}")
#: where the name in a holder's line ends; text after an initial still belongs to the name
_NAME_ENDS = re.compile(r"(?<=\w\w\w)[.;:]\s|\s[-\u2013\u2014]\s")
#: words of terms that are part of no holder's name; they count anywhere in a holder's line
_NO_NAME = (
    r"nda|gpl|agpl|lgpl|copyleft|no (?:part|use|cop|commerc|licen|right|redistrib|deriv|modif|permission)\w*"
    r"|may (?:be|use|copy|freely)\b|us(?:e|ed|ing|age)|cop(?:y|ies|ied|ying)|distribut\w+|redistribut\w+|reproduc\w+"
    r"|modif(?:y|ied)|non[- ]?commercial\w*|commercial(?:ly)? (?:use|purpose|licen|product|version|redist|only)\w*"
    r"|prohibit\w*|restrict\w*|forbid\w*|disallow\w*|permi(?:t|ssion)\w*|licen[cs](?:e|es|ed|ing|ors?)"
    r"|confidential\w*|proprietary|trade secrets?|royalt\w+|consent|approval|authori[sz]\w+|granted"
    r"|provided (?:that|you)|(?:not|only) (?:for|to|be|by|with|under|permitted|allowed|free)"
    r"|for (?:\w+ ){0,3}(?:only|evaluation|sale|resale)|(?:must|shall) (?:not|be|retain|include|have|obtain|agree)"
    r"|you (?:may|must|can|shall|agree|are)|patents? (?:pending|right|appl|licen|protect)\w*"
    r"|evaluation (?:purposes?|copy|version)|internal (?:purposes?|business))\b")
_NAMED_TERMS = re.compile(rf"\b(?:{_NO_NAME}")
#: words of terms in the text after a holder's name. They include single words that could be part of a name (Evan You,
#: Only Office, Patent Office)
_HOLDER_TERMS = re.compile(
    r"\b(?:not|non|only|except\w*|unless|must|shall|without|you|your|commercial\w*|allow\w*|classified|patent\w*|fees?"
    r"|sell|sold|sale|resale|internal\w*|evaluation|terms|conditions?|agree\w*|exempt\w*|purposes?|grants"
    rf"|{_NO_NAME}")
#: terms in the lines below a holder's; other words there describe the file
_HOLDER_LIMITS = re.compile(r"\b(?:(?:use|purposes?) only|only for|internal (?:use|evaluation|business)|for evaluation"
                            r"|trade secrets?)\b")
_BLANK = re.compile(r"\n[^\w\n]*\n")
_DROPPED = re.compile(r"(?:all )?rights reserved|\breserved\b|(?<![0-9.])(?:19|20)\d\d(?![0-9.])|non-?\s*infringement"
                      r"|copyright \(c\)|\(c\)|©|(?<![ivx])[ivx]{1,9}[.)]\s|\b[a-h0-9][.)]\s")
#: words that change what a licence permits or demands when they are added to it
_TERMS = frozenset("""
    not no non only except excepting unless must shall may require required requires requirement prohibited prohibit
    prohibits restrict restricted restriction restrictions forbidden additional additionally addition further
    furthermore provision patent patents royalty fee fees sell sold sale sales selling resale profit nonprofit
    noncommercial commercial commercially military nuclear weapon weapons export exported educational education
    academic research evaluation internal personal private ethical harm evil advertising advertisement
    acknowledgment acknowledge acknowledges permission consent approval gpl lgpl agpl copyleft compatible modified
    modifications modify changed changes unmodified unaltered unchanged unedited beginning immediately indemnify
    government purpose purposes terminate terminated termination notify notification contributed contribute
    exception exempt however instead allowed permit permits permitted granted grants agree agrees agreement void
    illegal law human rights trademark trademarks logo charge free gratis watermark visible link hereby used uses
    using distribute distributed distribution redistribute redistributed redistributions copies both
""".split())  # noqa: SIM905
#: phrases with such a word that change nothing
_HARMLESS = re.compile(r"\b(?:nor may|permission notice|patent infringement|permission please contact)\b")
#: words of other terms, beside a licence
_OTHER = re.compile(
    r"\b(?:a?gpl(?! compat)|lgpl|gpl(?:v?[0-9.]+)|gnu (?:\w+ )?(?:general|lesser|library|affero)|affero|mozilla public"
    r"|commons clause|non ?commercial|commercial (?:use|license|purpose|product|redistributions|version)"
    r"|(?:additional|further|special|other) (?:terms|restrictions?|permissions?|conditions|exceptions?|requirements?"
    r"|provisions?|clauses?|modifications?|limitations?)"
    r"|following (?:restrictions?|exceptions?|modifications?|additional|provisions?|limitations?)"
    r"|(?:may|must|shall|can|should) not(?! be (?:liable|held|responsible|removed))"
    r"|(?:are|is) not (?:permitted|allowed|granted|licensed|intended|designed|free)|not for|nuclear|royalty|proprietary"
    r"|confidential|(?:may|can|is) only|only be|disallowed|be sold|patents?(?! infring)"
    r"|you (?:must|agree|acknowledge)|prohibited|dual"
    r"|either (?:of|the)|your option"
    r"|exception|advertising|permission to use|creative commons|modified version|without modification"
    r"|any form whatsoever"
    r"|endorse|products derived|derived from this software|must (?:retain|include|display|be|also)|product includes"
    r"|free of charge)\b")


class Form(NamedTuple):
    """One wording of a licence: the licence's whole text, its terms without the disclaimer, or its notice."""

    licence: str
    size: int                          # words
    places: dict[int, list[int]]       # hash of a triple → its positions
    required: frozenset[int]           # positions of words without which it is another licence


class LicenceMatch(NamedTuple):
    form: Form
    start: int                         # index of the first standard word in the text
    stop: int
    missing: list[tuple[int, int]]     # runs of words of the form
    added: list[tuple[int, int]]       # runs of words of the text


def words_of(text: str) -> list[str]:
    """Return the words of a text in a uniform spelling, for the comparison with licence texts. Copyright lines, years,
    bullets and comment marks are left out, but a copyright line that also states terms is kept."""
    return _words(_HOLDER.sub(lambda m: m[0] if _has_terms(*_name_and_remainder(m[0])) else " ", text.lower()))


def _name_and_remainder(line: str) -> tuple[str, str]:
    """Split a copyright line into (text up to the end of the copyright holder's name, text after it). Addresses are
    removed."""
    line = _ADDRESS.sub(" ", line)
    end = _NAME_ENDS.search(line)
    return (line, "") if end is None else (line[:end.start()], line[end.end():])


def _has_terms(name: str, after_name: str) -> bool:
    return _NAMED_TERMS.search(name) is not None or _HOLDER_TERMS.search(after_name) is not None


def _words(lower: str) -> list[str]:
    plain = _MARKS.sub(" ", lower).replace("\n", " ")
    return [_SAME.get(word, word) for word in _WORD.findall(_DROPPED.sub(" ", plain)) if len(word) > 1 or word == "a"]


def triples(words: list[str]) -> list[int]:
    return [zlib.crc32(" ".join(words[i:i + TRIPLE]).encode()) for i in range(len(words) - TRIPLE + 1)]


@cache
def forms() -> tuple[list[Form], dict[int, list[int]]]:
    """Return (all forms, which are wordings of licences; {hash of three consecutive words: numbers of the forms that
    contain these words})."""
    forms, forms_of = [], dict[int, list[int]]()
    for number, entry in enumerate(json.loads(Path(__file__).with_name("licences.json").read_text("ascii"))):
        hashes = np.frombuffer(base64.b64decode(entry["triples"]), "<u4").tolist()
        places: dict[int, list[int]] = {}
        for i, value in enumerate(hashes):
            places.setdefault(value, []).append(i)
        for value in places:
            forms_of.setdefault(value, []).append(number)
        required = frozenset(i for a, b in entry["required"] for i in range(a, b))
        forms.append(Form(entry["licence"], len(hashes) + TRIPLE - 1, places, required))
    return forms, forms_of


def licence_text(text: str) -> str | None:
    """Return the SPDX identifier of the licence whose whole text, terms or notice stands in `text`; None if `text`
    contains no licence text.

    Returns "" if the licence text was changed, or is not alone: other terms stand beside it, or more than _AROUND other
    words.
    """
    words = words_of(text)
    hashes = triples(words)
    near = matches(hashes)
    for match in near:
        if fits_form(match, words):
            sole = stands_alone(match, words) and not _has_second_licence(match, near) \
                and not _holders_terms(text, match.form)
            return match.form.licence if sole else ""
    return "" if near else None


def matches(hashes: list[int]) -> list[LicenceMatch]:
    """Return the licence texts that a document probably contains, as matches with forms (wordings of licences), the
    best match first. The document must contain at least the share `LIKELY` of a form's triples of consecutive words.
    `hashes` are the hashes of the document's triples."""
    all_forms, forms_of = forms()
    votes = Counter(number for value in set(hashes) for number in forms_of.get(value, ()))
    likely = [all_forms[number] for number, n in votes.items() if n >= LIKELY * len(all_forms[number].places)]
    near = [_compare(hashes, form) for form in likely]
    near.sort(key=lambda m: (_length(m.missing) + _length(m.added) - m.form.size, m.form.size, m.form.licence))
    return near


def _compare(hashes: list[int], form: Form) -> LicenceMatch:
    hits = [i for i, value in enumerate(hashes) if value in form.places]
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(hits)) if b - a > _APART), len(hits)]
    a, b = max(pairwise(cuts), key=lambda cut: cut[1] - cut[0])
    hits = hits[a:b]
    start, stop = hits[0], hits[-1] + TRIPLE
    present, standard = bytearray(form.size), bytearray(stop - start)
    for i in hits:
        standard[i - start:i - start + TRIPLE] = b"\1" * TRIPLE
        for place in form.places[hashes[i]]:
            present[place:place + TRIPLE] = b"\1" * TRIPLE
    return LicenceMatch(form, start, stop, _zeros(present), [(start + x, start + y) for x, y in _zeros(standard)])


def _zeros(marks: bytearray) -> list[tuple[int, int]]:
    """Return the runs of zeros in `marks` as (start, stop)."""
    return [m.span() for m in re.finditer(b"\0+", marks)]


def _length(runs: list[tuple[int, int]]) -> int:
    return sum(b - a for a, b in runs)


def fits_form(match: LicenceMatch, words: list[str]) -> bool:
    """Return whether a text states, at the place of a match, the licence of the match's form (wording of a licence)
    unchanged. Few words of the form may be missing, and no added words may speak of terms. `words` are the words of the
    text."""
    size = match.form.size
    if any(not match.form.required.isdisjoint(range(a, b)) for a, b in match.missing):
        return False
    if _length(match.missing) > MISSING * size or any(b - a > GAP for a, b in match.missing):
        return False
    if _length(match.added) > ADDED * size or any(b - a > RUN for a, b in match.added):
        return False
    return all(_TERMS.isdisjoint(_HARMLESS.sub(" ", " ".join(words[a:b])).split()) for a, b in match.added)


def stands_alone(match: LicenceMatch, words: list[str]) -> bool:
    """Return whether a document holds a licence text and little else: only few words are around the match, and none of
    them speak of other terms. Words before a form of `_LONG` words or more do not count. `words` are the words of the
    document."""
    before, after = words[:match.start], words[match.stop:]
    if match.form.size >= _LONG:
        before = []
    return len(before) + len(after) <= _AROUND and not any(other_terms(" ".join(side)) for side in (before, after))


def _holders_terms(text: str, form: Form) -> bool:
    """Return whether a copyright line of a text, or the lines below such a line, set other terms than the licence of
    `form`. Words of the licence text itself are ignored."""
    lower = text.lower()
    for line in _HOLDER.finditer(lower):
        below = _BLANK.split(lower[line.end():line.end() + _PARAGRAPH], maxsplit=1)[0]
        name, after_name = (_outside_form(part, form) for part in _name_and_remainder(line[0]))
        if _has_terms(name, after_name) or _HOLDER_LIMITS.search(_outside_form(below, form)):
            return True
    return False


def _outside_form(lower: str, form: Form) -> str:
    """Return the words of a piece of text (in lower case) that `form`, a wording of a licence, does not contain. A word
    is compared together with its neighbours: it is contained if it is part of a triple of consecutive words of
    `form`."""
    words = _words(_ADDRESS.sub(" ", lower))
    standard = {j for i, value in enumerate(triples(words)) if value in form.places for j in range(i, i + TRIPLE)}
    return " ".join(word for j, word in enumerate(words) if j not in standard)


def other_terms(text: str) -> bool:
    """Return whether a text speaks of conditions, exceptions, or another licence."""
    return _OTHER.search(text) is not None


def _has_second_licence(match: LicenceMatch, near: list[LicenceMatch]) -> bool:
    """Return whether one of the matches `near` is the text of another licence at another place than `match`."""
    return any(m.form.licence != match.form.licence and (m.stop <= match.start or m.start >= match.stop) for m in near)
