"""Functions that verify check digits and dates in numbers, to tell numbers that an authority has assigned from
arbitrary ones. The argument `digits` of a function is a string of 0-9."""

from __future__ import annotations

import re
from collections.abc import Sequence

_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
#: borders that the search for words before a value does not cross: a value already replaced (NUL), and the < and > of a
#: placeholder
_BORDER = re.compile(r"[<>\0]")
#: the beginning of an IBAN: the groups after it are not numbers of their own
_ACCOUNT = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]{2}[0-9]{2}(?:[ -][A-Za-z0-9]{4}){0,8}[ -]$")
_DOUBLED = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)

#: the dihedral group D5, and the powers of a permutation of the digits (Verhoeff, Error Detecting Decimal Codes, 1969)
_D5 = tuple(tuple((i + j) % 5 if i < 5 and j < 5 else (i - j) % 5 if i >= 5 and j >= 5 else
                  5 + ((i + j) % 5 if i < 5 else (i - j) % 5) for j in range(10)) for i in range(10))
_PERMUTATIONS = [tuple(range(10)), (1, 5, 7, 6, 2, 8, 3, 0, 9, 4)]
while len(_PERMUTATIONS) < 8:
    _PERMUTATIONS.append(tuple(_PERMUTATIONS[-1][_PERMUTATIONS[1][i]] for i in range(10)))


def luhn(digits: str) -> bool:
    """Return whether a number passes the Luhn check (ISO/IEC 7812-1, annex B). Every second digit from the right is
    doubled, and the sum of all digits must be a multiple of 10."""
    return (sum(map(int, digits[::-2])) + sum(_DOUBLED[int(d)] for d in digits[-2::-2])) % 10 == 0


def mod97(value: str) -> int:
    """Return the remainder of a string of digits and letters by ISO/IEC 7064 MOD 97-10, where A = 10 … Z = 35. The
    remainder is 1 if the check digits are right."""
    return int("".join(str(int(c, 36)) for c in value)) % 97


def verhoeff(digits: str) -> bool:
    check = 0
    for place, digit in enumerate(reversed(digits)):
        check = _D5[check][_PERMUTATIONS[place % 8][int(digit)]]
    return check == 0


def mod11_10(digits: str) -> bool:
    """Return whether the last digit is the right check digit by ISO/IEC 7064 MOD 11,10 (hybrid)."""
    product = 10
    for digit in digits[:-1]:
        product = ((int(digit) + product) % 10 or 10) * 2 % 11
    return (11 - product) % 10 == int(digits[-1])


def mod11_2(value: str) -> bool:
    """Return whether the last character, which may be X (10), is the right check character by ISO/IEC 7064 MOD 11-2."""
    total = 0
    for digit in value[:-1]:
        total = (total + int(digit)) * 2 % 11
    last = 10 if value[-1] in "Xx" else int(value[-1])
    return (total + last) % 11 == 1


def weighted(digits: str, weights: Sequence[int]) -> int:
    """Return the sum of the digits, each multiplied by its weight. Weight i belongs to digit i from the left. Digits
    for which there is no weight are left out."""
    return sum(int(digit) * weight for digit, weight in zip(digits, weights))


def ean(digits: str) -> bool:
    """Return whether the last digit is the right GS1 check digit, as in EAN bar codes. The sum of the digits must be a
    multiple of 10, with the weights 1 and 3 in turn from the right."""
    return (sum(map(int, digits[::-2])) + 3 * sum(map(int, digits[-2::-2]))) % 10 == 0


def date(year: int, month: int, day: int) -> bool:
    """Return whether a date exists. If `year` is below 100, it gives only the last two digits of a year, and a date
    that exists in any century counts."""
    if not (1 <= month <= 12 and 1 <= day <= _DAYS[month - 1]):
        return False
    if (month, day) != (2, 29) or year % 4:
        return (month, day) != (2, 29)
    return year < 100 or year % 100 != 0 or year % 400 == 0


def yymmdd(digits: str) -> bool:
    return date(int(digits[:2]), int(digits[2:4]), int(digits[4:6]))


def ddmmyy(digits: str) -> bool:
    return date(int(digits[4:6]), int(digits[2:4]), int(digits[:2]))


def yyyymmdd(digits: str) -> bool:
    return 1850 <= int(digits[:4]) < 2100 and date(int(digits[:4]), int(digits[4:6]), int(digits[6:8]))


def word_before(text: str, start: int, words: re.Pattern[str], window: int = 64) -> bool:
    """Return whether one of `words` occurs in the `window` characters before `start`. If a value in these characters
    was already replaced (by NULs or a placeholder), only the text after this value counts."""
    near = text[max(0, start - window):start]
    if "<" in near or ">" in near or "\0" in near:
        near = _BORDER.split(near)[-1]
    return words.search(near) is not None


def in_address(text: str, start: int) -> bool:
    """Return whether position `start` of a text is inside a URL. Digits in a URL nearly always number a page."""
    word = text[max(0, start - 256):start].split()
    return bool(word) and start > 0 and not text[start - 1].isspace() and ("://" in word[-1] or "www." in word[-1])


def stands_alone(text: str, start: int, end: int) -> bool:
    """Return whether text[start:end], which has digits or letters at both ends, is not part of something longer. Longer
    things are a word, a decimal or dotted number, an amount of money, a percentage, a path, a code joined by hyphens,
    and a bank account number (IBAN) in groups. A full stop or hyphen that belongs to the sentence may follow it."""
    before, after = text[max(0, start - 2):start], text[end:end + 2]
    if before and (before[-1].isalnum() or before[-1] in "_$€£\\" or (
            before[-1] in "-./,+'&%~^*" and before[0].isalnum())):
        return False
    if before and before[-1] in " -" and _ACCOUNT.search(text[max(0, start - 45):start]):
        return False
    if not after:
        return True
    return not (after[0].isalnum() or after[0] in "_%\\" or (after[0] in "-/+@&^*" and after[-1].isalnum()) or (
        after[0] in ".,'" and after[-1].isdigit()))
