"""Makes up national ids of many countries. The rules of their check digits are written here from the authorities'
descriptions, independently of the finders."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

CAPITALS = string.ascii_uppercase


def digits(rng: random.Random, n: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(n))


def grouped(value: str, sizes: tuple[int, ...], by: str) -> str:
    out, place = [], 0
    for size in sizes:
        out.append(value[place : place + size])
        place += size
    return by.join(out)


def ended(body: str, right: Callable[[str], bool], ends: list[str]) -> str | None:
    """Return `body` with a valid ending: the first of `ends` with which the function `right` accepts it. Returns None
    if there is none."""
    return next((body + end for end in ends if right(body + end)), None)


ONE = list("0123456789")
TWO = [f"{i:02d}" for i in range(100)]


def dot(value: str, weights: list[int]) -> int:
    return sum(int(c) * w for c, w in zip(value, weights, strict=True))


def luhn_right(value: str) -> bool:
    total = 0
    for i, c in enumerate(reversed(value)):
        n = int(c) * (2 if i % 2 else 1)
        total += n // 10 + n % 10
    return total % 10 == 0


def day(rng: random.Random, form: str, *, day_plus: int = 0, month_plus: int = 0) -> str:
    year, month, of_month = rng.randrange(1930, 2010), rng.randrange(1, 13), rng.randrange(1, 29)
    return form.format(y=year % 100, Y=year, m=month + month_plus, d=of_month + day_plus)


def verhoeff_right(value: str) -> bool:
    """Return whether a number ends in the right Verhoeff digit. The rotations and reflections of a pentagon, by which
    the digit is defined, are composed one by one."""

    def times(a: int, b: int) -> int:
        ra, sa, rb, sb = a % 5, a // 5, b % 5, b // 5
        return (ra + (-rb if sa else rb)) % 5 + 5 * (sa ^ sb)

    state = 0
    for place, c in enumerate(reversed(value)):
        n = int(c)
        for _ in range(place % 8):
            n = int("1576283094"[n])
        state = times(state, n)
    return state == 0


def de_right(value: str) -> bool:
    rest = 10
    for c in value[:10]:
        rest = (int(c) + rest) % 10 or 10
        rest = rest * 2 % 11
    return (11 - rest) % 10 == int(value[10])


def de(rng: random.Random) -> str:
    nine = rng.sample("0123456789", 9)
    while True:
        ten = [*nine, rng.choice(nine)]
        rng.shuffle(ten)
        body = "".join(ten)
        if body[0] != "0":
            return ended(body, de_right, ONE) or ""


def fr(rng: random.Random) -> str:
    body = rng.choice("12") + day(rng, "{y:02d}{m:02d}") + rng.choice(("75", "13", "2A", "2B", "69")) + digits(rng, 6)
    number = int(body.replace("2A", "19").replace("2B", "18"))
    return f"{body}{97 - number % 97:02d}"


def it(rng: random.Random) -> str:
    odd = dict(
        zip(
            "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
            (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23),
        )
    )
    odd.update({str(i): odd[CAPITALS[i]] for i in range(10)})
    body = (
        "".join(rng.choice("BCDFGLMNPRSTV") for _ in range(6))
        + f"{rng.randrange(100):02d}"
        + rng.choice("ABCDEHLMPRST")
        + f"{rng.randrange(1, 29) + rng.choice((0, 40)):02d}"
        + rng.choice("ABFHL")
        + digits(rng, 3)
    )
    total = sum(odd[c] if i % 2 == 0 else (int(c) if c.isdigit() else CAPITALS.index(c)) for i, c in enumerate(body))
    return body + CAPITALS[total % 26]


def mx(rng: random.Random) -> str:
    body = (
        rng.choice("BCGLMR")
        + rng.choice("AEIO")
        + rng.choice("BCGLMR")
        + rng.choice("ABCJ")
        + day(rng, "{y:02d}{m:02d}{d:02d}")
        + rng.choice("HM")
        + rng.choice(("DF", "JC", "NL", "OC"))
        + "".join(rng.choice("BCDFGLM") for _ in range(3))
        + "0"
    )
    table = "0123456789ABCDEFGHIJKLMN" + "Ñ" + "OPQRSTUVWXYZ"
    total = 0
    for weight, c in zip(range(18, 1, -1), body, strict=True):
        total += table.index(c) * weight
    return body + str(-total % 10)


def ie_right(value: str) -> bool:
    total = dot(value[:7], [8, 7, 6, 5, 4, 3, 2]) + (9 * (CAPITALS.index(value[8]) + 1) if len(value) > 8 else 0)
    return ("W" + CAPITALS[:22])[total % 23] == value[7]


def sg(rng: random.Random) -> str:
    series, number = rng.choice("ST"), digits(rng, 7)
    total = dot(number, [2, 7, 6, 5, 4, 3, 2]) + (4 if series == "T" else 0)
    return series + number + "ABCDEFGHIZJ"[10 - total % 11]


def cl(rng: random.Random) -> str:
    number = str(rng.randrange(10_000_000, 26_000_000))
    check = -dot(number[::-1], [2, 3, 4, 5, 6, 7, 2, 3]) % 11
    return number + ("K" if check == 10 else str(check))


def until(make: Callable[[], str | None]) -> str:
    while (made := make()) is None:
        pass
    return made


def ids(rng: random.Random) -> dict[str, tuple[str, list[str]]]:
    """Returns {country: (a number, the forms in which it is written)}. Some numbers are found only after a certain
    word, such as SSN; their forms then contain the word."""
    d, r = digits, rng
    ymd = "{y:02d}{m:02d}{d:02d}"
    dmy = "{d:02d}{m:02d}{y:02d}"
    us = f"{rng.choice((12, 123, 401, 574, 733, 899)):03d}{rng.randrange(1, 99):02d}{rng.randrange(1, 9999):04d}"
    ca = ended(r.choice("1234567") + d(r, 7), luhn_right, ONE) or ""
    nhs = until(lambda: ended(r.choice("4679") + d(r, 8), lambda v: dot(v, [*range(10, 0, -1)]) % 11 == 0, ONE))
    nino = r.choice(("AB", "JG", "PW", "SR")) + d(r, 6) + r.choice("ABCD")
    tax, nir, cf, curp = de(r), fr(r), it(r), mx(r)
    number = d(r, 8)
    dni = number + "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23]
    pt = until(lambda: ended(r.choice("12") + d(r, 7), lambda v: dot(v, [*range(9, 0, -1)]) % 11 == 0, ONE))
    nl = until(lambda: ended(r.choice("12") + d(r, 7), lambda v: dot(v, [9, 8, 7, 6, 5, 4, 3, 2, -1]) % 11 == 0, ONE))
    be = day(r, ymd) + f"{r.randrange(1, 998):03d}"
    be += f"{97 - int(be) % 97:02d}"
    pl = until(lambda: ended(day(r, ymd) + d(r, 4), lambda v: dot(v, [1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1]) % 10 == 0, ONE))
    se = ended(day(r, ymd) + d(r, 3), luhn_right, ONE) or ""
    fi = day(r, dmy) + f"-{r.randrange(2, 900):03d}"
    fi += "0123456789ABCDEFHJKLMNPRSTUVWXY"[int(fi.replace("-", "")) % 31]
    dk = until(lambda: ended(day(r, dmy) + d(r, 3), lambda v: dot(v, [4, 3, 2, 7, 6, 5, 4, 3, 2, 1]) % 11 == 0, ONE))
    no = until(
        lambda: ended(
            day(r, dmy) + d(r, 3),
            lambda v: (
                dot(v[:10], [3, 7, 6, 1, 8, 9, 4, 5, 2, 1]) % 11 == 0
                and dot(v, [5, 4, 3, 2, 7, 6, 5, 4, 3, 2, 1]) % 11 == 0
            ),
            TWO,
        )
    )

    def cpf(v: str) -> bool:
        return all(
            int(v[n]) == (0 if (rest := dot(v[:n], [*range(n + 1, 1, -1)]) % 11) < 2 else 11 - rest) for n in (9, 10)
        )

    br = ended(d(r, 9), cpf, TWO) or ""
    aadhaar = ended(r.choice("23456789") + d(r, 10), verhoeff_right, ONE) or ""
    cn = r.choice(("110105", "310104", "440301")) + day(r, "{Y}{m:02d}{d:02d}") + d(r, 3)
    cn += "10X98765432"[dot(cn, [7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2]) % 11]
    kr = day(r, ymd) + r.choice("12") + d(r, 5)
    kr += str((11 - dot(kr, [2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5]) % 11) % 10)
    nine = r.choice("123456789") + d(r, 8)
    tr = nine + str((sum(map(int, nine[::2])) * 7 + sum(map(int, nine[1::2])) * 9) % 10)
    tr += str(sum(map(int, tr)) % 10)
    za = ended(day(r, ymd) + d(r, 4) + "08", luhn_right, ONE) or ""
    au = until(lambda: ended(r.choice("1234") + d(r, 7), lambda v: dot(v, [1, 4, 3, 7, 5, 8, 6, 9, 10]) % 11 == 0, ONE))
    ro = r.choice("12") + day(r, ymd) + f"{r.randrange(1, 47):02d}" + d(r, 3)
    check = dot(ro, [2, 7, 9, 1, 4, 6, 3, 5, 8, 2, 7, 9]) % 11
    ro += "1" if check == 10 else str(check)
    ch = until(lambda: ended("756" + d(r, 9), lambda v: dot(v, [1, 3] * 6 + [1]) % 10 == 0, ONE))
    cz = until(lambda: ended(day(r, ymd, month_plus=r.choice((0, 50))) + d(r, 3), lambda v: int(v) % 11 == 0, ONE))
    ie = until(lambda: ended(d(r, 7), ie_right, list(CAPITALS[:23])))
    rut, nric = cl(r), sg(r)
    return {
        "us": (
            us,
            [grouped(us, (3, 2, 4), "-"), f"SSN: {us}", f"social security number {grouped(us, (3, 2, 4), ' ')}"],
        ),
        "ca": (
            ca,
            [grouped(ca, (3, 3, 3), "-"), f"SIN {grouped(ca, (3, 3, 3), ' ')}", f"Social Insurance Number: {ca}"],
        ),
        "gb": (nino, [grouped(nino, (2, 2, 2, 2, 1), " "), f"National Insurance number {nino}"]),
        "gb nhs": (nhs, [f"NHS number: {grouped(nhs, (3, 3, 4), ' ')}", f"NHS {nhs}"]),
        "de": (tax, [grouped(tax, (2, 3, 3, 3), " "), f"Steuer-ID {tax}", f"Steueridentifikationsnummer: {tax}"]),
        "fr": (nir, [nir, grouped(nir, (1, 2, 2, 2, 3, 3, 2), " ")]),
        "it": (cf, [cf, f"codice fiscale {cf.lower()}"]),
        "mx": (curp, [curp]),
        "es": (dni, [dni, f"DNI: {dni[:8]} {dni[8]}", f"{dni[:8]}-{dni[8]}"]),
        "pt": (pt, [f"NIF {grouped(pt, (3, 3, 3), ' ')}", f"contribuinte n.º {pt}"]),
        "nl": (nl, [f"BSN {nl}", f"burgerservicenummer: {grouped(nl, (4, 2, 3), '.')}"]),
        "be": (be, [f"{be[:2]}.{be[2:4]}.{be[4:6]}-{be[6:9]}.{be[9:]}", be]),
        "pl": (pl, [f"PESEL: {pl}", f"nr PESEL {pl}"]),
        "se": (se, [f"{se[:6]}-{se[6:]}", f"personnummer {se}"]),
        "fi": (fi, [fi]),
        "dk": (dk, [f"{dk[:6]}-{dk[6:]}", f"CPR-nr. {dk}"]),
        "no": (no, [no, f"{no[:6]} {no[6:]}"]),
        "br": (br, [f"{br[:3]}.{br[3:6]}.{br[6:9]}-{br[9:]}", f"CPF {br}"]),
        "in": (aadhaar, [grouped(aadhaar, (4, 4, 4), " "), f"Aadhaar {aadhaar}"]),
        "cn": (cn, [cn]),
        "kr": (kr, [f"{kr[:6]}-{kr[6:]}", f"주민등록번호 {kr}"]),
        "tr": (tr, [f"T.C. Kimlik No: {tr}", f"TCKN {tr}"]),
        "za": (za, [f"ID number {za}", grouped(za, (6, 4, 3), " ")]),
        "au": (au, [f"TFN {grouped(au, (3, 3, 3), ' ')}", f"tax file number: {au}"]),
        "ro": (ro, [f"CNP {ro}", f"cod numeric personal: {ro}"]),
        "ch": (ch, [grouped(ch, (3, 4, 4, 2), "."), ch]),
        "cz": (cz, [f"{cz[:6]}/{cz[6:]}", f"rodné číslo {cz}"]),
        "ie": (ie, [f"PPS number {ie}", f"PPSN: {ie}"]),
        "cl": (rut, [f"{rut[:2]}.{rut[2:5]}.{rut[5:8]}-{rut[8]}", f"RUT {rut[:8]}-{rut[8]}"]),
        "sg": (nric, [nric]),
    }


#: countries whose ids need no valid check digit (Denmark's since 2007): no lookalike is made of them
_NO_CHECK = frozenset(("us", "gb", "dk"))


def broken_id(rng: random.Random) -> str:
    """An id in one of its forms with a wrong last character."""
    of = ids(rng)
    country = rng.choice([c for c in sorted(of) if c not in _NO_CHECK])
    form = rng.choice(of[country][1])
    place = next(i for i in range(len(form) - 1, -1, -1) if form[i].isalnum())
    last = form[place]
    if last.isdigit():
        new = str((int(last) + 1) % 10)
    else:
        alphabet = CAPITALS if last.isupper() else CAPITALS.lower()
        new = alphabet[(alphabet.index(last) + 1) % 26]
    return form[:place] + new + form[place + 1 :]
