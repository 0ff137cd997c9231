"""Defines the forms and the checks of national identity numbers, country by country.

The sources are the issuing authorities' own rules. The docstring of a check names the number and, in brackets, its
issuer or source; then it lists the parts of the number in their order, and the conditions. `NumberRule` explains the
fields of a rule. The argument `v` of every check is the value in capitals, without separators. The value has already
matched a form or a pattern of the rule, so its length and its kinds of characters are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stages.scrub.checks import (
    date,
    ddmmyy,
    ean,
    luhn,
    mod11_2,
    mod11_10,
    verhoeff,
    weighted,
    yymmdd,
    yyyymmdd,
)


class NumberRule(NamedTuple):
    """The form and the check of a national identity number.

    A form gives the number of digits in each group and the separators between the groups ("3-2-4", "2 3 3 3"). A number
    in one of `forms` counts anywhere. A number in one of the forms `weak` counts only after one of `words`. `letters`
    and `weak_letters` are patterns of whole numbers that contain letters. A number that matches `letters` counts
    anywhere, and one that matches `weak_letters` only after one of `words`. `valid` is the check: it is called with the
    digits and letters of a number, in capitals and without separators.
    """

    country: str
    valid: Callable[[str], bool]
    forms: tuple[str, ...] = ()
    weak: tuple[str, ...] = ()
    words: str = ""
    letters: str = ""
    weak_letters: str = ""
    #: `letters` and `weak_letters` are tried only in texts that hold one of these; (): in all texts
    hints: tuple[str, ...] = ()
    #: where `letters` and `weak_letters` are searched: with "word" in long words, with "date" near two digits, a letter
    #: and two digits, with others near six digits. A gate that GATES names also needs a match of its pattern there.
    gate: str = ""


def _us(v: str) -> bool:
    """Return whether `v` (nine digits) can be a US Social Security number (SSA; random since 2011). The area (the first
    three digits) must not be 000, 666 or 9xx, and no group may consist only of zeros. Numbers that were once printed as
    examples are rejected."""
    return (v[:3] not in ("000", "666") and v[0] != "9" and v[3:5] != "00" and v[5:] != "0000"
            and v not in ("078051120", "219099999", "123456789"))


def _ca(v: str) -> bool:
    """Return whether `v` (nine digits) is a valid Canadian Social Insurance Number (ESDC): it passes Luhn's check, and
    its first digit is not 0 or 8."""
    return v[0] not in "08" and luhn(v)


def _nino(v: str) -> bool:
    """Return whether `v` (in capitals, without blanks) can be a British National Insurance number (HMRC NIM39110): its
    prefix is not one of those that are never assigned."""
    return v[:2] not in ("BG", "GB", "KN", "NK", "NT", "TN", "ZZ")


def _nhs(v: str) -> bool:
    """Return whether `v` (ten digits) is a valid British NHS number (NHS Data Dictionary). The check digit is computed
    with weights 10 to 2, modulo 11. Numbers whose check digit would be 10 are not assigned."""
    return (11 - weighted(v, range(10, 1, -1)) % 11) % 11 == int(v[9])


def _de(v: str) -> bool:
    """Return whether `v` (eleven digits) is a valid German Steuer-Identifikationsnummer (BZSt). The check is ISO 7064
    MOD 11,10. Of the first ten digits, one occurs two or three times (never three in a row), and every other digit
    occurs at most once. The first digit is not 0."""
    often = sorted((v[:10].count(d) for d in set(v[:10])), reverse=True)
    if v[0] == "0" or often[0] not in (2, 3) or (len(often) > 1 and often[1] > 1):
        return False
    return not any(d * 3 in v[:10] for d in "0123456789") and mod11_10(v)


def _fr(v: str) -> bool:
    """Return whether `v` (without separators) is a valid French NIR (INSEE). The number consists of the sex (1, 2, 3, 7
    or 8), the year, the month (1 to 12, or codes from 20 to 42 or above 49 for an unknown month) and the place of
    birth, a serial number, and two check digits. The check digits are 97 - n mod 97, where n is the number before them.
    In n, Corsica's departments 2A and 2B count as 19 and 18."""
    month = int(v[3:5])
    if v[0] not in "12378" or not (1 <= month <= 12 or 20 <= month <= 42 or month >= 50):
        return False
    number = v[:13].replace("2A", "19").replace("2B", "18")
    return number.isdigit() and v[13:].isdigit() and 97 - int(number) % 97 == int(v[13:])


def _fr_dated(v: str) -> bool:
    """Return whether `v` is a valid French NIR written as digits alone. In addition to the checks of `_fr`, the sex
    must be 1 or 2, and the month 1 to 12."""
    return v[0] in "12" and 1 <= int(v[3:5]) <= 12 and _fr(v)


_ODD = dict(zip("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
                (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12,
                 14, 16, 10, 22, 25, 24, 23)))


def _it(v: str) -> bool:
    """Return whether `v` (in capitals) is a valid Italian codice fiscale (DM 23/12/1976). The code consists of letters
    of the name, the date and place of birth, and a check letter. Letters may replace digits (omocodia)."""
    total = sum(_ODD[c] for c in v[0:15:2]) + sum(int(c) if c.isdigit() else ord(c) - 65 for c in v[1:15:2])
    return chr(65 + total % 26) == v[15]


_DNI = "TRWAGMYFPDXBNJZSQVHLCKE"


def _es(v: str) -> bool:
    """Return whether `v` (in capitals, without separators) is a valid Spanish DNI or NIE (RD 1553/2005). The check
    letter depends on the number modulo 23, in which the first letter X, Y or Z of a NIE counts as 0, 1 or 2."""
    number = v[:-1].translate(str.maketrans("XYZ", "012"))
    return _DNI[int(number) % 23] == v[-1]


def _pt(v: str) -> bool:
    """Return whether `v` (nine digits) is a valid Portuguese NIF of a person (Autoridade Tributária). The check digit
    is computed with weights 9 to 2, modulo 11. Numbers of persons begin with 1, 2, 3 or 45."""
    check = 11 - weighted(v, range(9, 1, -1)) % 11
    return (v[0] in "123" or v[:2] == "45") and (0 if check > 9 else check) == int(v[8])


def _nl(v: str) -> bool:
    """Return whether `v` (nine digits) is a valid Dutch Burgerservicenummer (RvIG). The sum of the digits, by weights 9
    to 2 and -1 for the last digit, is a multiple of 11. Numbers that begin with 00 are rejected."""
    return v[:2] != "00" and weighted(v, (9, 8, 7, 6, 5, 4, 3, 2, -1)) % 11 == 0


def _be(v: str) -> bool:
    """Return whether `v` (eleven digits) is a valid Belgian Rijksregisternummer (KB 3 April 1984). The number consists
    of a date of birth (whose month or day may be 0), a serial number, and two check digits. The check digits are 97 - n
    mod 97, where n is the number before them; for persons born since 2000, a 2 is put in front of n. BIS numbers, for
    people outside the national register, have 20 or 40 added to the month."""
    month = int(v[2:4]) % 20
    born = v[4:6] == "00" or month == 0 or date(int(v[:2]), month, int(v[4:6]))
    return born and int(v[2:4]) < 53 and int(v[9:]) in (97 - int(v[:9]) % 97, 97 - int("2" + v[:9]) % 97)


def _be_dated(v: str) -> bool:
    """Return whether `v` is a valid Belgian Rijksregisternummer written as digits alone. In addition to the checks of
    `_be`, the date of birth must be a full date, and BIS numbers (with 20 or 40 added to the month) do not count."""
    return yymmdd(v) and _be(v)


def _pl(v: str) -> bool:
    """Return whether `v` (eleven digits) is a valid Polish PESEL (MSWiA). It begins with a date of birth, whose month
    also encodes the century. The check digit is computed with weights 1, 3, 7, 9 in turn, modulo 10."""
    month = int(v[2:4]) % 20
    return date(int(v[:2]), month, int(v[4:6])) and weighted(v, (1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1)) % 10 == 0


def _se(v: str) -> bool:
    """Return whether `v` (10 or 12 digits) is a valid Swedish personnummer (Skatteverket SKV 704). The number begins
    with a date of birth, and its last ten digits pass Luhn's check. A samordningsnummer (for people who are not
    registered as residents), which has 60 added to the day, is also valid."""
    v = v[-10:]
    return date(int(v[:2]), int(v[2:4]), int(v[4:6]) % 60) and luhn(v)


def _se_long(v: str) -> bool:
    return 1850 <= int(v[:4]) < 2100 and _se(v)


def _fi(v: str) -> bool:
    """Return whether `v` (in capitals) is a valid Finnish henkilötunnus (VRK). The number consists of a date of birth,
    a sign for the century, a serial number, and a check character. The check character depends on the nine digits of
    the date and the serial number, modulo 31."""
    digits = v[:6] + v[-4:-1]
    return ddmmyy(v[:6]) and digits.isdigit() and "0123456789ABCDEFHJKLMNPRSTUVWXY"[int(digits) % 31] == v[-1]


def _dk(v: str) -> bool:
    """Return whether `v` (ten digits) can be a Danish CPR number (CPR-kontoret). The number consists of a date of birth
    and four digits. The check modulo 11 is left out, since numbers issued since 2007 may fail it."""
    return ddmmyy(v[:6])


def _dk_checked(v: str) -> bool:
    return ddmmyy(v[:6]) and weighted(v, (4, 3, 2, 7, 6, 5, 4, 3, 2, 1)) % 11 == 0


def _no(v: str) -> bool:
    """Return whether `v` (eleven digits) is a valid Norwegian fødselsnummer (Skatteetaten). The number consists of a
    date of birth, a serial number, and two check digits modulo 11. A D-number (a temporary one), which has 40 added to
    the day, is also valid."""
    day = int(v[:2])
    return (date(int(v[4:6]), int(v[2:4]), day - 40 if day > 40 else day)
            and weighted(v, (3, 7, 6, 1, 8, 9, 4, 5, 2, 1)) % 11 == 0
            and weighted(v, (5, 4, 3, 2, 7, 6, 5, 4, 3, 2, 1)) % 11 == 0)


def _br(v: str) -> bool:
    """Return whether `v` (eleven digits) is a valid Brazilian CPF (Receita Federal), which has two check digits modulo
    11."""
    first = weighted(v, range(10, 1, -1)) * 10 % 11 % 10
    second = weighted(v, range(11, 1, -1)) * 10 % 11 % 10
    return (first, second) == (int(v[9]), int(v[10]))


_CURP = "0123456789ABCDEFGHIJKLMNÑOPQRSTUVWXYZ"


def _mx(v: str) -> bool:
    """Return whether `v` (in capitals) is a valid Mexican CURP (RENAPO). The code consists of letters of the name, the
    date of birth, the sex, the state, consonants of the name, a character that tells otherwise equal codes apart, and a
    check digit modulo 10."""
    total = sum(_CURP.index(c) * (18 - i) for i, c in enumerate(v[:17]))
    return yymmdd(v[4:10]) and v[17].isdigit() and (10 - total % 10) % 10 == int(v[17])


def _in(v: str) -> bool:
    """Return whether `v` (twelve digits) is a valid Indian Aadhaar number (UIDAI). It passes Verhoeff's check, does not
    begin with 0 or 1, and is no palindrome. Three years in a row (`1999 2000 2001`) are rejected."""
    years = all(1800 <= int(v[i:i + 4]) < 2100 for i in (0, 4, 8))
    return v[0] not in "01" and v != v[::-1] and not years and verhoeff(v)


def _cn(v: str) -> bool:
    """Return whether `v` (18 characters) is a valid number of a Chinese resident identity card (GB 11643-1999). The
    number consists of the province, the date of birth, a serial number, and a check character by ISO 7064 MOD 11-2."""
    return 11 <= int(v[:2]) <= 82 and yyyymmdd(v[6:14]) and mod11_2(v)


def _kr(v: str) -> bool:
    """Return whether `v` (13 digits) is a valid Korean resident registration number issued until October 2020. The
    number consists of a date of birth, a serial number, and a check digit modulo 11."""
    check = (11 - weighted(v, (2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5)) % 11) % 10
    return yymmdd(v) and check == int(v[12])


def _kr_dated(v: str) -> bool:
    """Return whether `v` (13 digits) can be a Korean resident registration number issued since October 2020. The number
    consists of a date of birth and seven further digits, the first from 1 to 8, without a check digit."""
    return yymmdd(v) and v[6] in "12345678"


def _tr(v: str) -> bool:
    """Return whether `v` (eleven digits) is a valid Turkish T.C. kimlik no (NVİ), which has two check digits and does
    not begin with 0."""
    digits = [int(digit) for digit in v]
    return (digits[0] != 0 and (7 * sum(digits[0:9:2]) - sum(digits[1:8:2])) % 10 == digits[9]
            and sum(digits[:10]) % 10 == digits[10])


def _za(v: str) -> bool:
    """Return whether `v` (13 digits) is a valid South African identity number (Home Affairs). The number consists of a
    date of birth, a serial number, the citizenship (0 to 2), a digit 8 or 9, and a check digit by Luhn."""
    return yymmdd(v) and v[10] in "012" and v[11] in "89" and luhn(v)


def _au(v: str) -> bool:
    """Return whether `v` (nine digits) is a valid Australian Tax file number (ATO): the weighted sum of its digits is a
    multiple of 11."""
    return weighted(v, (1, 4, 3, 7, 5, 8, 6, 9, 10)) % 11 == 0


def _ro(v: str) -> bool:
    """Return whether `v` (13 digits) is a valid Romanian CNP (Legea 105/1996). The number consists of a digit for sex
    and century, a date of birth, a county, a serial number, and a check digit modulo 11."""
    check = weighted(v, (2, 7, 9, 1, 4, 6, 3, 5, 8, 2, 7, 9)) % 11
    return v[0] != "0" and yymmdd(v[1:7]) and (1 if check == 10 else check) == int(v[12]) and \
        (1 <= int(v[7:9]) <= 52 or v[7:9] == "70")


def _ch(v: str) -> bool:
    """Return whether `v` (13 digits) is a valid Swiss AHV number (ZAS): it begins with 756 and ends with a GS1 check
    digit."""
    return v.startswith("756") and ean(v)


def _cz(v: str) -> bool:
    """Return whether `v` (ten digits) is a valid Czech rodné číslo (Act 133/2000). The number consists of a date of
    birth, a serial number, and a check digit modulo 11. For a woman, 50 is added to the month. If the serial numbers of
    a day run out, 20 is added to the month (70 in all for a woman)."""
    month = int(v[2:4])
    month -= next((offset for offset in (70, 50, 20) if month > offset), 0)
    return date(int(v[:2]), month, int(v[4:6])) and (int(v) % 11 == 0 or (int(v[:9]) % 11, v[9]) == (10, "0"))


def _ie(v: str) -> bool:
    """Return whether `v` (in capitals) is a valid Irish PPS number (DSP). The number consists of seven digits and a
    check letter modulo 23. A second letter may follow, which has weight nine in the check."""
    total = weighted(v[:7], range(8, 1, -1)) + 9 * ((ord(v[8]) - 64) % 23 if len(v) == 9 and v[8] != "W" else 0)
    return "WABCDEFGHIJKLMNOPQRSTUV"[total % 23] == v[7]


def _cl(v: str) -> bool:
    """Return whether `v` (in capitals, without separators) is a valid Chilean RUT (Registro Civil). The check digit is
    computed with weights 2 to 7 from the right, modulo 11; K stands for 10."""
    total = sum(int(d) * (2 + i % 6) for i, d in enumerate(reversed(v[:-1])))
    return "0123456789K0"[11 - total % 11] == v[-1]


def _sg(v: str) -> bool:
    """Return whether `v` (in capitals) is a valid NRIC or FIN of Singapore (ICA). The number consists of a letter for
    the series, seven digits, and a check letter. The check letter depends on the series and on the digits, by the
    weights 2, 7, 6, 5, 4, 3, 2."""
    total = weighted(v[1:8], (2, 7, 6, 5, 4, 3, 2)) + {"S": 0, "F": 0, "T": 4, "G": 4, "M": 3}[v[0]]
    table = {"S": "JZIHGFEDCBA", "T": "JZIHGFEDCBA", "F": "XWUTRQPNMLK", "G": "XWUTRQPNMLK", "M": "KLJNPQRTUWX"}[v[0]]
    return table[total % 11] == v[8]


_CF = (r"[A-Z]{6}[0-9LMNPQRSTUV]{2}[ABCDEHLMPRST][0-7LMNPQRST][0-9LMNPQRSTUV][A-Z][0-9LMNPQRSTUV]{3}[A-Z]")
_IT_HINTS = ("isc", "ISC", "C.F", "c.f", "ax code")
_IT_WORDS = r"codice fiscale|cod\.? ?fisc\.?|c\.?f\.?|tax code"
_ID = r"id(?:entity)? ?(?:card|number|no\.?|#)?"

RULES: tuple[NumberRule, ...] = (
    NumberRule("us", _us, ("3-2-4", ), ("9", "3 2 4"),
               r"ssns?|ss ?#|social security(?: (?:number|no|num|#))?|seguro social"),
    NumberRule("ca", _ca, ("3-3-3", ), ("9", "3 3 3"), r"sin|social insurance(?: number)?|nas|assurance sociale"),
    NumberRule("gb",
               _nino,
               letters=r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] [0-9]{2} [0-9]{2} [0-9]{2} [A-D]",
               weak_letters=r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z][0-9]{6}[A-D]",
               gate="digits",
               words=r"nino|ni|national insurance(?: (?:number|no\.?))?"),
    NumberRule("gb", _nhs, (), ("3 3 4", "3-3-4", "10"), r"nhs"),
    NumberRule(
        "de", _de, ("2 3 3 3", ), ("11", ),
        r"steuer[- ]?id(?:entifikations)?(?:nummer|nr\.?)?|steuer[- ]?identifikationsnummer|steuernummer|idnr\.?|"
        r"tax id|tin|identifikationsnummer"),
    NumberRule("fr", _fr_dated, ("15", "13 2")),
    NumberRule("fr",
               _fr, ("1 2 2 2 3 3 2", "1 2 2 2 3 3-2"),
               letters=r"[123478] ?[0-9]{2} ?[0-9]{2} ?2[AB] ?[0-9]{3} ?[0-9]{3} ?[0-9]{2}",
               hints=("2A", "2B"),
               gate="digits"),
    NumberRule("it", _it, letters=_CF, gate="word"),
    NumberRule("it", _it, weak_letters=_CF.lower(), gate="word", hints=_IT_HINTS, words=_IT_WORDS),
    NumberRule("it",
               _it,
               weak_letters=r"[A-Z]{3} [A-Z]{3} [0-9]{2}[A-Z][0-9]{2} [A-Z][0-9]{3}[A-Z]",
               gate="date",
               hints=_IT_HINTS,
               words=_IT_WORDS),
    NumberRule("es", _es, letters=r"[0-9]{2}\.[0-9]{3}\.[0-9]{3}-?[A-HJ-NP-TV-Z]", gate="dotted"),
    NumberRule("es", _es, letters=r"[0-9]{8}-?[A-HJ-NP-TV-Z]", gate="digits letter"),
    NumberRule("es", _es, letters=r"[XYZ]-?[0-9]{7}-?[A-HJ-NP-TV-Z]", gate="letter digits"),
    NumberRule(
        "es",
        _es,
        hints=("dni", "DNI", "nie", "NIE", "nif", "NIF", "ocumento"),
        gate="digits letter",
        weak_letters=r"[0-9]{8}[ -]?[a-hj-np-tv-zA-HJ-NP-TV-Z]|[XYZxyz][ -]?[0-9]{7}[ -]?[a-hj-np-tv-zA-HJ-NP-TV-Z]",
        words=r"dni|nie|nif|documento nacional(?: de identidad)?"),
    NumberRule("pt", _pt, (), ("9", "3 3 3"), r"nif|contribuinte|número fiscal|n\.?º? fiscal|identificação fiscal"),
    NumberRule("nl", _nl, (), ("9", "4.2.3", "3.3.3", "3 3 3"),
               r"bsn|burgerservicenummer|sofi(?:-?nummer)?|citizen service number"),
    NumberRule("be", _be, ("2.2.2-3.2", "2.2.2 3.2")),
    NumberRule("be", _be_dated, ("11", "6-3-2", "6 3 2")),
    NumberRule("pl", _pl, (), ("11", ), r"pesel(?:u|em)?"),
    NumberRule("se", _se, ("6-4", "6+4"), ("10", ),
               r"personnummer|pers\.? ?nr\.?|samordningsnummer|personal identity number"),
    NumberRule("se", _se_long, ("8-4", ), ("12", ),
               r"personnummer|pers\.? ?nr\.?|samordningsnummer|personal identity number"),
    NumberRule("fi", _fi, letters=r"[0-9]{6}[-+A-FU-Y][0-9]{3}[0-9A-FHJ-NPR-Y]", gate="digits letter"),
    NumberRule("dk", _dk_checked, ("6-4", )),
    NumberRule("dk", _dk, (), ("6-4", "6 4", "10"), r"cpr(?:[- ]?(?:nr\.?|nummer))?|personnummer"),
    NumberRule("no", _no, ("11", "6 5"), ()),
    NumberRule("br", _br, ("3.3.3-2", ), ("11", "9-2"), r"cpf"),
    NumberRule("mx",
               _mx,
               gate="letter digits",
               letters=r"[A-Z][AEIOUX][A-Z]{2}[0-9]{6}[HMX][A-Z]{2}[B-DF-HJ-NP-TV-Z]{3}[0-9A-Z][0-9]"),
    NumberRule("in", _in, ("4 4 4", "4-4-4"), ("12", ), r"aadhaar|aadhar|uidai|uid|आधार"),
    NumberRule("cn", _cn, ("18", ), letters=r"[1-8][0-9]{16}[Xx]", gate="digits letter"),
    NumberRule("kr", _kr, ("6-7", ), ("13", ), r"주민(?:등록)?번호|resident registration|rrn"),
    NumberRule("kr", _kr_dated, (), ("6-7", ), r"주민(?:등록)?번호|resident registration|rrn"),
    NumberRule("tr", _tr, (), ("11", ), r"t\.?c\.?(?: kimlik)?(?: (?:no|numarası))?|tckn|kimlik(?: (?:no|numarası))?"),
    NumberRule("za", _za, ("6 4 3", "6 4 2 1", "6 4 1 1 1"), ("13", ),
               rf"{_ID}|identity (?:number|document)|said|rsa id"),
    NumberRule("au", _au, (), ("9", "3 3 3"), r"tfn|tax file(?: (?:number|no\.?))?"),
    NumberRule("ro", _ro, (), ("13", ), r"cnp|cod(?:ul)? numeric(?: personal)?"),
    NumberRule("ch", _ch, ("3.4.4.2", "13")),
    NumberRule("cz", _cz, ("6/4", ), ("10", ), r"rodné číslo|rodného čísla|rodné číslo|r\.? ?č\.?|rč"),
    NumberRule("ie",
               _ie,
               weak_letters=r"[0-9]{7}[A-W][A-IW]?",
               gate="digits letter",
               hints=("PPS", "pps", "ublic"),
               words=r"ppsn?|pps (?:number|no\.?)|personal public service"),
    NumberRule("cl", _cl, letters=r"[0-9]{1,2}\.[0-9]{3}\.[0-9]{3}-[0-9Kk]", gate="dotted"),
    NumberRule("cl", _cl, weak_letters=r"[0-9]{7,8}-[0-9Kk]", gate="digits letter", words=r"rut|run"),
    NumberRule("sg", _sg, letters=r"[STFGM][0-9]{7}[A-Z]", gate="letter digits"),
)

COUNTRIES = tuple(sorted({rule.country for rule in RULES}))
