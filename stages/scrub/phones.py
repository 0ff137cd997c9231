"""Finds telephone numbers.

International form: a country calling code of ITU-T E.164 after `+` or `00`, and as many digits as numbers of that
country have. After `00`, the digits must be in groups, or a word for telephone must precede them. Groups may be
separated by blanks, dots, hyphens, slashes and brackets. A trunk zero may be in brackets, and an extension may follow.
No library is needed to find the international form. Numbers reserved for fiction (NANPA 555-0100 to 0199, Ofcom 07700
900000 to 900999) belong to nobody and are not reported.

Local form: numbers without a country calling code are found only if a region is given, because digits that are a
telephone number in one country may be an article number in another. The library `phonenumbers` (Google's
libphonenumber) decides whether a candidate is valid in the region, which takes 50 µs for each candidate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from stages.scrub.checks import in_address, stands_alone, word_before
from stages.scrub.clues import Clues

_SEPARATOR = r"[ .\-/()\u00a0\u2009\u2010-\u2013]"
_PLUS = re.compile(rf"\+[ (]?[1-9](?:{_SEPARATOR}{{0,3}}[0-9]){{6,16}}")
_ZEROS = re.compile(rf"00[1-9](?:{_SEPARATOR}{{0,3}}[0-9]){{6,16}}")
_EXTENSION = re.compile(r" ?(?:x|ext\.? ?)[0-9]{1,6}(?![0-9])", re.IGNORECASE)
_DECIMAL = re.compile(r"[0-9]+\.[0-9]+")
_TRUNK = re.compile(r"\( ?0 ?\)")
_DIGITS = re.compile(r"[0-9]+")
_NOT_DIGIT = re.compile(r"[^0-9]")
#: calling code → fewest and most digits of a national number (ITU-T E.164 list of assigned codes and the national
#: numbering plans that ITU publishes); three-digit codes not listed have 7 to 9
_LENGTHS = {
    "1": (10, 10), "7": (10, 10), "20": (8, 10), "27": (9, 9), "30": (10, 10), "31": (9, 9), "32": (8, 9), "33": (9, 9),
    "34": (9, 9), "36": (8, 9), "39": (6, 11), "40": (9, 9), "41": (9, 9), "43": (5, 13), "44": (9, 10), "45": (8, 8),
    "46": (7, 10), "47": (8, 8), "48": (9, 9), "49": (6, 12), "51": (8, 9), "52": (10, 11), "53": (8, 8),
    "54": (10, 11), "55": (10, 11),
    "56": (9, 9), "57": (8, 10), "58": (10, 10), "60": (8, 10), "61": (9, 9), "62": (7, 12),
    "63": (8, 10), "64": (8, 10), "65": (8, 8), "66": (8, 9), "81": (9, 10), "82": (8, 10), "84": (9, 10),
    "86": (9, 11), "90": (10, 10), "91": (10, 10), "92": (9, 10), "93": (9, 9), "94": (9, 9), "95": (7, 10),
    "98": (10, 10), "225": (10, 10), "229": (8, 10), "234": (7, 10), "254": (9, 10), "255": (9, 9), "352": (6, 11),
    "353": (7, 9), "358": (5, 12), "385": (8, 9), "421": (9, 9), "423": (7, 9), "378": (6, 10), "372": (7, 8),
    "855": (8, 9), "880": (8, 10), "964": (8, 10), "977": (8, 10), "382": (8, 9), "251": (9, 9), "998": (9, 9),
    "290": (4, 5), "247": (4, 6), "500": (5, 5), "508": (6, 6), "690": (4, 5), "683": (4, 7), "682": (5, 5),
    "681": (6, 6), "678": (5, 7), "677": (5, 7), "676": (5, 7), "674": (7, 7), "672": (6, 6), "688": (5, 7),
    "687": (6, 6), "685": (5, 10), "376": (6, 9), "297": (7, 7), "298": (6, 6), "299": (6, 6), "269": (7, 7),
    "239": (7, 7), "248": (7, 7), "590": (9, 9), "262": (9, 9), "594": (9, 9), "596": (9, 9), "689": (6, 8),
    "800": (8, 8), "979": (9, 9), "870": (9, 12), "881": (8, 10), "882": (7, 12), "883": (7, 12), "878": (10, 12),
    "686": (5, 8), "850": (8, 10), "856": (8, 10), "597": (6, 7), "595": (7, 9),
    "670": (7, 8), "967": (7, 9), "963": (8, 9), "593": (8, 9), "232": (8, 8), "389": (8, 8)}
#: three-digit codes that are not assigned
_UNASSIGNED = frozenset((
    "210", "214", "215", "217", "219", "259", "271", "272", "273", "274", "275", "276", "277", "278", "279", "280",
    "281", "282", "283", "284", "285", "286", "287", "288", "289", "292", "293", "294", "295", "296", "384", "388",
    "422", "424", "425", "426", "427", "428", "429", "693", "694", "695", "696", "697", "698", "699", "801", "802",
    "803", "804", "805", "806", "807", "809", "830", "831", "832", "833", "834", "835", "836", "837", "838", "839",
    "851", "854", "857", "858", "859", "871", "872", "873", "874", "875", "876", "877", "879", "884", "885", "887",
    "889", "890", "891", "892", "893", "894", "895", "896", "897", "898", "899", "969", "978", "990", "991", "997",
    "999"))
_TWO_DIGITS = frozenset(code for code in _LENGTHS if len(code) == 2)
_WORDS = re.compile(
    r"(?<![^\W\d_])(?:(?:tele)?phone|tel|telef[oó]no?|t[eé]l[eé]phone|phones|mobile|mobil|cell|handy|fax|call|dial|"
    r"text|sms|whatsapp|hotline|rufnummer|fon|telefon|puhelin|тел|телефон|電話|电话|전화|m[oó]vil|portable|cellulare|"
    r"gsm)(?![^\W\d_])", re.IGNORECASE)


def international(clues: Clues) -> Iterator[tuple[int, int, str]]:
    """Find telephone numbers in international form in the text of `clues`: with a country calling code after `+` or
    `00`. Yields (start, end, ""); the third value is always empty, because telephone numbers have no rule
    (`Match.rule`)."""
    yield from with_plus(clues)
    if "00" in clues.text:
        yield from _international(clues.text, _ZEROS, 2)


def with_plus(clues: Clues) -> Iterator[tuple[int, int, str]]:
    """Find telephone numbers that begin with a plus in `clues.text`. Yields (start, end, ""); the third value is always
    empty, because telephone numbers have no rule (`Match.rule`). No word such as "phone" is needed before the number,
    because hardly anything else has this form."""
    if "+" in clues.text:
        yield from _international(clues.text, _PLUS, 1)


def _international(text: str, pattern: re.Pattern[str], prefix: int) -> Iterator[tuple[int, int, str]]:
    place = 0
    while match := pattern.search(text, place):
        start = match.start()
        place = start + prefix
        preceding = text[max(0, start - 2):start]
        if prefix == 2 and preceding[:1].isdigit() and preceding[-1] in " -\u00a0":
            continue                         # the zeros belong to a longer number
        if preceding and (preceding[-1].isalnum() or preceding[-1] in "_+$"
                          or (preceding[-1] in "-/." and preceding[0].isalnum())
                          or (preceding[-1] == "," and preceding[0].isdigit())):
            if prefix == 2:
                place = match.end()          # zeros inside a number, where no number begins
            continue
        end = _end(text, start, match.end(), prefix)
        if end:
            place = end
            yield start - (_brackets(text, start, end) < 0), end, ""


def _end(text: str, start: int, furthest: int, prefix: int) -> int:
    """Return the position at which the telephone number that begins at `start` ends, including its extension; 0 if no
    number begins there. Without the extension, the number ends at `furthest` or before, and never inside a group of
    digits. `prefix` is the length of the `+` or `00` with which the number begins."""
    ends = [run.end() for run in _DIGITS.finditer(text, start, furthest)]
    for end in reversed(ends):
        if end < len(text) and (text[end].isalnum() or text[end] == "_") and not _EXTENSION.match(text, end):
            continue
        number = text[start + prefix:end]
        if prefix == 2 and number.isdigit() and not word_before(text, start, _WORDS):
            return 0                         # a bare run of digits that begins with two zeros can be any number
        if _DECIMAL.fullmatch(number):
            return 0
        trunk = _TRUNK.search(number)
        digits = _NOT_DIGIT.sub("", number if trunk is None else number[:trunk.start()] + number[trunk.end():])
        if _possible(digits) and _brackets(text, start, end) in (0, -(text[start - 1:start] == "(")):
            extension = _EXTENSION.match(text, end)
            return extension.end() if extension else end
    return 0


def _brackets(text: str, start: int, end: int) -> int:
    """Return the number of opening brackets minus the number of closing brackets in text[start:end]."""
    return text.count("(", start, end) - text.count(")", start, end)


def _possible(digits: str) -> bool:
    """Return whether `digits`, a country calling code followed by a number, can be an assigned telephone number."""
    code = digits[0] if digits[0] in "17" else digits[:2] if digits[:2] in _TWO_DIGITS else digits[:3]
    if code in _UNASSIGNED or (code not in _LENGTHS and len(code) < 3):
        return False
    fewest, most = _LENGTHS.get(code, (7, 9))
    number = digits[len(code):]
    if not fewest <= len(number) <= most or len(set(number)) < 2:
        return False
    if code == "1":
        return number[0] in "23456789" and number[3:8] != "55501"
    if code == "44":
        return number[0] != "0" and not number.startswith("7700900")
    return number[0] != "0" or code in ("39", "225", "229", "241", "242", "378")


# -- local ---------------------------------------------------------------------------------------------------------

_LOCAL = re.compile(rf"[0-9](?:{_SEPARATOR}{{0,2}}[0-9]){{6,13}}")


def local(clues: Clues, region: str) -> Iterator[tuple[int, int, str]]:
    """Find telephone numbers as they are written inside `region` (two letters, ISO 3166), in the text of `clues`.
    Yields (start, end, ""). A number must be valid in the region by the library `phonenumbers`. In addition, it must be
    written in groups, begin with the trunk prefix 0, or follow a word for telephone. A number of fewer than 8
    characters must follow such a word. Dates, and digits inside a URL, do not count."""
    text, place = clues.text, 0
    while match := _LOCAL.search(text, place):
        start, end = match.span()
        if "0" <= text[end:end + 1] <= "9":          # longer than any number, so the whole run is skipped
            place = _DIGITS.match(text, end).end()               # type: ignore[union-attr]
            continue
        place = end
        if start and text[start - 1] == "(" and ")" in match.group():
            start -= 1
        if start and text[start - 1] == "+":
            continue
        number = text[start:end]
        if not stands_alone(text, start, end) and not _EXTENSION.match(text, end):
            continue
        only_digits = number.isdigit()
        unclear = (only_digits and number[0] != "0") or len(number) < 8
        if in_address(text, start) or _DATE.match(number) or (unclear and not word_before(text, start, _WORDS, 24)):
            continue
        if _valid(number, region):
            extension = _EXTENSION.match(text, end)
            place = extension.end() if extension else end
            yield start, place, ""


_DATE = re.compile(r"(?:1[89]|20)[0-9]{2}[-./ ][0-9]{1,2}[-./ ][0-9]{1,2}|"
                   r"[0-9]{1,2}[-./ ][0-9]{1,2}[-./ ](?:1[89]|20)[0-9]{2}|"
                   r"(?:1[5-9]|20)[0-9]{2} ?[-/\u2013] ?(?:1[5-9]|20)[0-9]{2}")


@lru_cache(maxsize=4096)
def _valid(number: str, region: str) -> bool:
    import phonenumbers as library

    try:
        parsed = library.parse(number, region)
    except library.NumberParseException:
        return False
    return bool(library.is_valid_number_for_region(parsed, region) or (
        library.is_valid_number(parsed) and parsed.country_code == library.country_code_for_region(region)))
