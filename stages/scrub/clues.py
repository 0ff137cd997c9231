"""Finds the stretches of a text that may hold personal data. There are three kinds:

- numbers of at least FEWEST_DIGITS digits, with at most one separator between two digits;
- runs of at least SHORTEST_CODE characters of the kind that API keys consist of;
- places with two digits, a letter and two digits.

Most texts have few such stretches. The stretches are determined once per text, and all finders (functions that each
search for one kind of data) use them. The finders of cards, national ids, API keys, passwords and wallets search only
these stretches. They miss nothing, because each value that they look for lies within one stretch. The finder of bank
accounts looks only where two digits follow two letters. The finders of e-mail and IP addresses, telephone numbers and
private keys search the whole text. To decide whether a value counts, a finder may also read the text around the
stretch.

Texts of SHORT to below LONG characters are searched as arrays of one byte per character. Characters outside ASCII count
as `?`. A `?` may therefore separate the digits of a number, because it may stand for a no-break space (U+00A0).
"""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np

#: characters that may stand between two digits of a number, one at a time; `?` is any character outside ASCII
_BETWEEN = " .-/+?"
#: characters of keys, tokens and secret values
_OF_CODES = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_+/=.~!@#$%^&*:-"
#: fewest characters of a run of _OF_CODES (a token of Slack), and fewest digits of a number
SHORTEST_CODE, FEWEST_DIGITS = 15, 6

_DIGIT, _GAP, _LETTER, _CODE = 1, 2, 4, 8
_CLASSES = bytes((_DIGIT if chr(c) in "0123456789" else 0) | (_GAP if chr(c) in _BETWEEN else 0)
                 | (_LETTER if c < 128 and chr(c).isalpha() else 0) | (_CODE if chr(c) in _OF_CODES else 0)
                 for c in range(256))
_NUMBER = re.compile(rf"[0-9]+(?:[{re.escape(_BETWEEN)}\x80-\U0010ffff][0-9]+)*")
_NOT_DIGITS = re.compile(r"[^0-9]+")
_CODES = re.compile(rf"[{re.escape(_OF_CODES)}]{{{SHORTEST_CODE},}}")
_ANY = re.compile(rf"[0-9]|{_CODES.pattern}|PRIVATE KEY")
_DATED = re.compile(r"[0-9](?=[0-9][A-Za-z][0-9]{2})")
_CHECKED = re.compile(r"[A-Za-z]{2}[0-9]{2}")
_WORD = re.compile(rf"[0-9A-Za-z]{{{SHORTEST_CODE},}}")

#: (start, end) of a stretch: text[start:end]
Span = tuple[int, int]


class Clues:
    """A text together with those stretches of it that may hold personal data. Most finders (functions that each search
    for one kind of data) search only these stretches. Each kind of stretch is determined when it is first requested."""

    #: texts from SHORT to below LONG characters use arrays: patterns are faster on shorter texts and need less memory
    #: on longer ones
    SHORT, LONG = 600, 1 << 19

    def __init__(self, text: str) -> None:
        self.text = text
        self._plain = not self.SHORT <= len(text) < self.LONG

    @property
    def none(self) -> bool:
        """Return whether the repeated finders can be left out, because the text certainly holds nothing that they look
        for. Only a text shorter than SHORT is examined, for digits, codes and private keys; for a longer text, the
        result is False. The repeated finders are all but those of e-mail addresses, IP addresses and telephone numbers
        with a plus."""
        return len(self.text) < self.SHORT and not _ANY.search(self.text)

    @cached_property
    def _kinds(self) -> np.ndarray:
        """Return the classes of each character of the text (digit, Latin letter, separator …), as bits of a uint8."""
        return np.frombuffer(self.text.encode("ascii", "replace").translate(_CLASSES), np.uint8)

    @cached_property
    def _digits(self) -> np.ndarray:
        """Return the positions of the digits 0 to 9 in the text."""
        return np.flatnonzero((self._kinds & _DIGIT).view(np.bool_))

    @cached_property
    def _numbers(self) -> list[tuple[int, Span]]:
        """Return (number of digits, span) of every number in the text. Numbers of fewer than FEWEST_DIGITS characters
        are left out."""
        if self._plain:
            spans = [m.span() for m in _NUMBER.finditer(self.text) if m.end() - m.start() >= FEWEST_DIGITS]
            counts = [len(_NOT_DIGITS.sub("", self.text[start:end])) for start, end in spans]
        else:
            places = self._digits
            if not len(places):
                return []
            gaps = places[1:] - places[:-1]
            ends = np.flatnonzero((gaps > 2) | ((gaps == 2) & ((self._kinds[places[:-1] + 1] & _GAP) == 0)))
            ends = np.concatenate(([-1], ends, [len(places) - 1]))
            sizes = ends[1:] - ends[:-1]
            long_runs = np.flatnonzero(sizes >= FEWEST_DIGITS)
            counts = sizes[long_runs].tolist()
            spans = list(zip(places[ends[long_runs] + 1].tolist(), (places[ends[long_runs + 1]] + 1).tolist()))
        return list(zip(counts, spans))

    def numbers(self, fewest: int) -> list[Span]:
        """Return the spans of runs of at least `fewest` digits. `fewest` must be at least FEWEST_DIGITS. The digits are
        adjacent or separated by single characters of _BETWEEN, such as a blank or a hyphen."""
        return [span for count, span in self._numbers if count >= fewest]

    @cached_property
    def near_numbers(self) -> list[Span]:
        """Return the spans of numbers of at least FEWEST_DIGITS digits, widened by 16 characters on either side. Spans
        that then meet are joined."""
        return self._around(self.numbers(FEWEST_DIGITS))

    @cached_property
    def near_dates(self) -> list[Span]:
        """Return the spans of two digits, a Latin letter and two digits (as in the date of Italy's codice fiscale),
        widened by 16 characters on either side. Spans that then meet are joined."""
        if self._plain:
            return self._around([m.span() for m in _DATED.finditer(self.text)])
        places, kinds = self._digits, self._kinds
        starts = places[:-3]
        places = starts[(places[3:] - starts == 4) & (places[1:-2] - starts == 1) & (places[2:-1] - starts == 3)]
        places = places[(kinds[places + 2] & _LETTER) != 0]
        return self._around([(start, start + 5) for start in places.tolist()])

    def _around(self, spans: list[Span]) -> list[Span]:
        """Return spans widened by 16 characters on either side. Spans that then meet are joined. The spans must be
        given in order."""
        result: list[Span] = []
        for start, end in spans:
            start, end = max(0, start - 16), min(end + 16, len(self.text))
            if result and start <= result[-1][1]:
                result[-1] = result[-1][0], end
            else:
                result.append((start, end))
        return result

    def checked(self) -> list[int]:
        """Return the positions of all pairs of digits that follow two Latin letters, as the check digits of a bank
        account number (IBAN) do."""
        if self._plain:
            return [m.end() - 2 for m in _CHECKED.finditer(self.text)]
        places, kinds = self._digits, self._kinds
        places = places[:-1][(places[1:] - places[:-1] == 1) & (places[:-1] > 1)]
        return places[(kinds[places - 1] & kinds[places - 2] & _LETTER) != 0].tolist()

    @cached_property
    def codes(self) -> list[Span]:
        """Return the spans of runs of at least SHORTEST_CODE characters of the kind that API keys consist of
        (_OF_CODES)."""
        if self._plain:
            return [m.span() for m in _CODES.finditer(self.text)]
        ends = np.concatenate(([-1], np.flatnonzero((self._kinds & _CODE) == 0), [len(self.text)]))
        long = np.flatnonzero(ends[1:] - ends[:-1] > SHORTEST_CODE)
        return list(zip((ends[long] + 1).tolist(), ends[long + 1].tolist()))

    @cached_property
    def words(self) -> list[Span]:
        """Return the spans of runs of at least SHORTEST_CODE Latin letters and digits."""
        return [m.span() for span in self.codes for m in _WORD.finditer(self.text, *span)]
