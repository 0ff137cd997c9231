"""Finds numbers of payment cards and bank accounts.

The numbers of cards follow ISO/IEC 7812-1 (Luhn). The schemes publish their issuer ranges and lengths (in brackets):

    Visa              4 (13, 16, 19)
    Mastercard        51-55, 2221-2720 (16)
    American Express  34, 37 (15)
    Diners Club       300-305, 3095 (14, 16, 19); 36 (14-19); 38, 39 (14, 16-19)
    Discover          6011, 644-649 (16, 19); 65 (16-19)
    JCB               3528-3589 (16-19); formerly 1800, 2131 (15)
    UnionPay          62, 81 (16-19)
    Maestro           50, 56-58, 6304, 6390, 6759, 676 (12-19)
    Mir               2200-2204 (16-19)
    RuPay             60 (16); 82 (16-19)
    Troy              9792 (16)

RuPay's 65, 81 and 508, and the numbers of Elo and Hipercard, lie inside these ranges. The digits of a card form one
run, or the groups printed on cards, separated by blanks or hyphens. A number of 12 or 13 digits counts only after a
word about cards, because article and order numbers have this length, too. Such a word is also needed before a number
that begins with 2 to 6 but fits no issuer by its beginning and length.

The numbers of bank accounts (IBAN) follow ISO 13616, with lengths by country from the SWIFT registry and check digits
02 to 98 by MOD 97-10. The number is written in one piece or in groups of four separated by blanks or hyphens, in
capitals or small letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stages.scrub.checks import in_address, luhn, mod97, stands_alone, word_before
from stages.scrub.clues import Clues

#: (first digits from, to, lengths); the first range that fits decides
_ISSUERS: tuple[tuple[int, int, frozenset[int]], ...] = tuple(
    (low, high, frozenset(lengths)) for low, high, lengths in (
    (4, 4, (13, 16, 19)), (51, 55, (16,)), (2221, 2720, (16,)), (34, 34, (15,)), (37, 37, (15,)),
    (300, 305, (14, 16, 19)), (3095, 3095, (14, 16, 19)), (36, 36, (14, 15, 16, 17, 18, 19)),
    (38, 39, (14, 16, 17, 18, 19)), (6011, 6011, (16, 19)), (644, 649, (16, 19)), (65, 65, (16, 17, 18, 19)),
    (3528, 3589, (16, 17, 18, 19)), (1800, 1800, (15,)), (2131, 2131, (15,)), (62, 62, (16, 17, 18, 19)),
    (81, 82, (16, 17, 18, 19)), (508, 508, (12, 13, 14, 15, 16, 17, 18, 19)),
    (50, 50, range(12, 20)), (56, 58, range(12, 20)), (6304, 6304, range(12, 20)), (6390, 6390, range(12, 20)),
    (6759, 6759, range(12, 20)), (676, 676, range(12, 20)), (60, 60, (16,)), (2200, 2204, (16, 17, 18, 19)),
    (9792, 9792, (16,))))
#: one run of digits, or groups as on cards with one kind of separator
_SHAPE = re.compile(r"[0-9]{4}(?:([ -])(?:[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?:\1[0-9]{1,3})?|[0-9]{6}\1[0-9]{4,5}|"
                    r"[0-9]{4}\1[0-9]{4}\1[0-9]{3}|[0-9]{4}\1[0-9]{4,5})(?![0-9])|[0-9]{8,15}(?![0-9]))")
#: fewest digits of a card number
_FEWEST = 12
_DIGITS = re.compile("[0-9]+")
_CARD_WORDS = re.compile(
    r"\b(?:cards?|cc|visa|master ?card|maestro|amex|american express|diners|discover|jcb|unionpay|credit|debit|"
    r"kreditkarten?|karten?(?:nummer|nr)?|cartes?|tarjetas?|carta|cart[ãa]o|karta|kart[ıi]?|kaart|kort|карт[аыу])(?![a-z])",
    re.IGNORECASE)
#: numbers that schemes and payment services publish for tests: no real card has them
_TEST_CARDS = frozenset((
    "4111111111111111", "4242424242424242", "5555555555554444", "378282246310005", "371449635398431",
    "6011111111111117", "3056930009020004", "30569309025904", "3530111333300000", "4012888888881881",
    "5105105105105100", "4222222222222", "5019717010103742", "38520000023237", "6011000990139424", "5431111111111111",
    "4000056655665556", "2223003122003222", "5200828282828210", "3566002020360505", "6200000000000005"))


def cards(clues: Clues) -> Iterator[tuple[int, int, str]]:
    """Find numbers of payment cards in the text of `clues`. Yields (start, end, ""). The third value is empty because
    cards have no rule of their own (`Match.rule`)."""
    for start, end in clues.numbers(_FEWEST):
        yield from _cards(clues.text, start, end)


def _cards(text: str, place: int, stop: int) -> Iterator[tuple[int, int, str]]:
    while match := _SHAPE.search(text, place, stop):
        start, end = match.span()
        digits = match.group() if match[1] is None else match.group().replace(match[1], "")
        if _card_number(digits) and stands_alone(text, start, end) and _plausible(text, start, end, digits, match[1]):
            place = end
            yield start, end, ""
        else:
            place = _DIGITS.match(text, start).end()                        # type: ignore[union-attr]


def _card_number(digits: str) -> bool:
    """Return whether `digits` may be the number of a payment card. Four conditions must hold. The number begins with 2
    to 6 (numbers of airlines and so on begin with other digits, ISO/IEC 7812) or lies in an issuer's range. Its check
    digit is right. It has more than two different digits. It is no published test number."""
    return (digits[0] in "23456" or _issued(digits)) and luhn(digits) and digits not in _TEST_CARDS and \
        len(set(digits)) > 2


def _issued(digits: str) -> bool:
    """Return whether a card issuer assigns numbers that begin like `digits` and have as many digits."""
    for low, high, lengths in _ISSUERS:
        if low <= int(digits[:len(str(low))]) <= high:
            return len(digits) in lengths
    return False


def _plausible(text: str, start: int, end: int, digits: str, separator: str | None) -> bool:
    """Return whether the text around text[start:end] fits a card number, whose digits are `digits`. If the digits are
    in groups (with a `separator`), they must not be part of a longer row of groups of four. If they are a bare run, it
    must not be in a URL. A number of up to 13 digits, or one that no known issuer assigns, needs a word about cards
    before it."""
    if separator is None:
        if in_address(text, start):
            return False
    elif (start > 4 and text[start - 1] in " -" and text[start - 5:start - 1].isdigit()) or (
            text[end:end + 1] == separator and text[end + 1:end + 5].isdigit() and end + 5 <= len(text)):
        return False
    return (len(digits) > 13 and _issued(digits)) or word_before(text, start, _CARD_WORDS)


#: country → length of its IBAN (SWIFT, IBAN registry, release 99)
IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BI": 27, "BR": 29,
    "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DJ": 27, "DK": 18, "DO": 28, "EE": 20, "EG": 29,
    "ES": 24, "FI": 18, "FK": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28,
    "HN": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26, "IT": 27, "JO": 30, "KW": 30, "KZ": 20,
    "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19,
    "MN": 20, "MR": 27, "MT": 31, "MU": 30, "NI": 28, "NL": 18, "NO": 15, "OM": 23, "PK": 24, "PL": 28, "PS": 29,
    "PT": 25, "QA": 29, "RO": 24, "RS": 22, "RU": 33, "SA": 24, "SC": 31, "SD": 18, "SE": 24, "SI": 19, "SK": 24,
    "SM": 27, "SO": 23, "ST": 25, "SV": 28, "TL": 23, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
    "YE": 30}
#: check digits after a country code
_IBAN_CHECK = re.compile(r"[0-9]{2}(?<=[A-Za-z]{2}[0-9]{2})(?<![A-Za-z0-9_][A-Za-z]{2}[0-9]{2})(?=[ -]?[A-Za-z0-9])")
_BBAN = re.compile(r"[A-Za-z0-9]{1,40}")


def ibans(clues: Clues) -> Iterator[tuple[int, int, str]]:
    """Find bank account numbers (IBANs) in the text of `clues`. Yields (start, end, country)."""
    text, previous_end = clues.text, 0
    for place in clues.checked():
        start = place - 2
        country = text[start:place].upper()
        length = IBAN_LENGTHS.get(country)
        if length is None or start < previous_end or not _IBAN_CHECK.match(text, place):
            continue
        end = _iban_end(text, start, length)
        if end:
            previous_end = end
            yield start, end, country.lower()


def _iban_end(text: str, start: int, length: int) -> int:
    """Return the end of the IBAN of `length` characters that begins at `start`; 0 if no IBAN begins there."""
    solid = _BBAN.match(text, start)
    assert solid is not None
    if solid.end() - start >= 5:
        end = start + length
        value = text[start:end]
        if solid.end() < end:
            return 0
    else:
        separator, end = text[start + 4], start + 4
        for remaining in range(length - 4, 0, -4):
            size = min(4, remaining)
            group = text[end + 1:end + 1 + size]
            if text[end:end + 1] != separator or len(group) < size or not (group.isascii() and group.isalnum()):
                return 0
            end += 1 + len(group)
        value = text[start:end].replace(separator, "")
    if not stands_alone(text, start, end) or not (value.isupper() or value.islower() or value[4:].isdigit()):
        return 0
    check = value[2:4]
    if not "02" <= check <= "98" or mod97(value[4:] + value[:4]) != 1:
        return 0
    return end
