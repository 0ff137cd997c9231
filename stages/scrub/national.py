"""Finds national identity numbers by their form, their check digits and dates, and the words before them.

The rules are in `national_rules`. Two sorts of numbers are reported wherever they occur: those of an unmistakable form
(Belgium's `85.07.30-033.28`), and those whose checks are strong, for instance a date and two check digits. All other
numbers are reported only after a word for such numbers in a language of the country. Among these are bare runs of
digits with one check digit, and forms that telephone numbers or grouped thousands also have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from stages.scrub.checks import in_address, stands_alone, word_before
from stages.scrub.clues import FEWEST_DIGITS, Clues
from stages.scrub.national_rules import RULES, NumberRule

#: patterns that several rules share: these rules are tried only in stretches where their pattern matches
GATES = {"digits letter": re.compile(r"[0-9]{6,17}(?:[-+]|[ -]?[A-Za-z])"),
         "letter digits": re.compile(r"[0-9]{6}(?:(?<=[A-Za-z][0-9]{6})|(?<=[A-Za-z]-[0-9]{6}))"),
         "dotted": re.compile(r"\.[0-9]{3}\.[0-9]{3}-?[0-9A-Za-z]"),
         "date": re.compile(r"[0-9]{2}[A-Z][0-9]{2} [A-Z]")}
#: gate → attribute of Clues with the stretches to search; other gates search `near_numbers`
_NEAR = {"date": "near_dates", "word": "words"}


#: digits in groups separated by one character. A blank also separates numbers, so runs with blanks are searched group
#: by group.
_RUN = re.compile(r"[0-9]+(?:[ .\-/+\u00a0][0-9]+)*")
_WORD = re.compile(r"[0-9]+(?:[.\-/+][0-9]+)*")
_SIZES = re.compile(r"[0-9]+")
_NOT_VALUE = str.maketrans("", "", " .-/+\u00a0")
#: Long runs are searched in pieces of _PIECE characters. The pieces overlap by more characters than any number has.
_PIECE, _OVERLAP = 400, 64
#: most groups of a number separated by blanks ("1 85 05 78 006 084 36")
_MOST_GROUPS = 7


class Finder:
    """Finds the national identity numbers of some countries in texts, by the countries' rules."""

    def __init__(self, rules: Sequence[NumberRule], anywhere: bool = False) -> None:
        """Prepare the search by `rules`. A rule may have weak forms, which are forms that numbers of other kinds have,
        too. A match of a weak form is normally accepted only after a word that names the number, such as "ssn". With
        `anywhere`, the match is accepted without such a word."""
        #: form → (rule, pattern of the words that must stand before; None: no word needed)
        self.forms: dict[str, list[tuple[NumberRule, re.Pattern[str] | None]]] = {}
        #: gate → (pattern of whole values, rule, pattern of the words before) of the rules that have this gate
        self.letters: dict[str, list[tuple[re.Pattern[str], NumberRule, re.Pattern[str] | None]]] = {}
        for rule in rules:
            words = re.compile(rf"(?<![^\W\d_])(?:{rule.words})(?![^\W\d_])", re.IGNORECASE) \
                if rule.words and not anywhere else None
            for form in rule.forms:
                self.forms.setdefault(form, []).append((rule, None))
            for form in rule.weak:
                self.forms.setdefault(form, []).append((rule, words))
            if rule.letters:
                self.letters.setdefault(rule.gate, []).append((re.compile(rule.letters), rule, None))
            if rule.weak_letters:
                self.letters.setdefault(rule.gate, []).append((re.compile(rule.weak_letters), rule, words))
        #: the beginnings of all forms with blanks, up to each group
        self.begun = {" ".join(groups[:count]) for form in self.forms if len(groups := form.split(" ")) > 1
                      for count in range(1, len(groups) + 1)}
        self.fewest = max(min((sum(map(int, _SIZES.findall(form))) for form in self.forms), default=0), FEWEST_DIGITS)

    def find(self, clues: Clues) -> Iterator[tuple[int, int, str]]:
        """Find identity numbers in the text of `clues`. Yields (start, end, country), in no order; results may
        overlap."""
        text = clues.text
        for gate, rules in self.letters.items():
            places = getattr(clues, _NEAR.get(gate, "near_numbers"))
            if gate in GATES:
                places = [span for span in places if GATES[gate].search(text, *span)]
            for pattern, rule, words in rules if places else ():
                if not rule.hints or any(hint in text for hint in rule.hints):
                    for match in (match for span in places for match in pattern.finditer(text, *span)):
                        if self._counts(text, match.start(), match.end(), rule, words):
                            yield match.start(), match.end(), rule.country
        for span in clues.numbers(self.fewest) if self.forms else ():
            for run in _RUN.finditer(text, *span):
                start, end = run.span()
                if end - start >= 8:
                    for begun in range(start, max(end - _OVERLAP, start + 1), _PIECE - _OVERLAP):
                        yield from self._in_run(text, begun, min(begun + _PIECE, end))

    def _in_run(self, text: str, start: int, end: int) -> Iterator[tuple[int, int, str]]:
        """Find identity numbers in text[start:end], a run of digits with separators. Yields (start, end, country). Each
        group of digits between blanks is tried as a number, and then each row of groups that begins with it, of up to
        _MOST_GROUPS groups."""
        words = [m.span() for m in _WORD.finditer(text, start, end)]
        bare = [text[a:b].isdigit() for a, b in words]
        for number, (first, last) in enumerate(words):
            if last - first >= 8:
                yield from self._matching_form(text, first, last, _SIZES.sub(_size, text[first:last]))
            form = str(last - first)
            if bare[number] and form in self.begun:         # groups separated by blanks
                for other in range(number + 1, min(number + _MOST_GROUPS, len(words))):
                    if not bare[other] and "-" not in text[words[other][0]:words[other][1]]:
                        break
                    form += " " + _SIZES.sub(_size, text[words[other][0]:words[other][1]])
                    if form not in self.begun:
                        break
                    if form in self.forms and not _goes_on(words, number, other):
                        yield from self._matching_form(text, first, words[other][1], form)

    def _matching_form(self, text: str, start: int, end: int, form: str) -> Iterator[tuple[int, int, str]]:
        """Yield (start, end, country) if a rule accepts text[start:end] as an identity number, and nothing otherwise.
        `form` describes the digits there: the sizes of groups, with the separators between them, such as "3-2-4". If
        several rules accept the number, the first of them gives the country."""
        for rule, words in self.forms.get(form, ()):
            if self._counts(text, start, end, rule, words):
                yield start, end, rule.country
                return

    @staticmethod
    def _counts(text: str, start: int, end: int, rule: NumberRule, words: re.Pattern[str] | None) -> bool:
        """Return whether text[start:end] is an identity number by `rule`, and the text around it fits. The digits and
        letters of the number must not all be the same. The number must not be part of something longer, such as a word.
        One of `words` must precede the number. If `words` is None, no word is needed, but the number must not be inside
        a URL."""
        value = text[start:end].translate(_NOT_VALUE)
        return (len(set(value)) > 1 and rule.valid(value.upper()) and stands_alone(text, start, end)
                and (word_before(text, start, words) if words is not None else not in_address(text, start)))


def _size(run: re.Match[str]) -> str:
    """Return the number of digits of a matched run, as a string. `Finder` uses this to describe the form of a number,
    such as "3-2-4"."""
    return str(run.end() - run.start())


def _goes_on(words: list[tuple[int, int]], first: int, last: int) -> bool:
    """Return whether the groups of digits from number `first` to number `last` are part of a longer row of groups of
    equal size. For this, the group before them must be as long as the group `first`, or the group after them as long as
    the group `last`. `words` holds the (start, end) of all groups."""
    sizes = [end - start for start, end in words]
    return (first > 0 and sizes[first - 1] == sizes[first]) or (
        last + 1 < len(sizes) and sizes[last + 1] == sizes[last])


@lru_cache(maxsize=16)
def finder(countries: tuple[str, ...], anywhere: bool = False) -> Finder:
    """Return the Finder for the identity numbers of some countries. A country is given by two lower-case letters; "all"
    stands for every country. Numbers of a form that other numbers have, too, are accepted only after a word that names
    them, unless `anywhere` is true."""
    return Finder([rule for rule in RULES if "all" in countries or rule.country in countries], anywhere)
