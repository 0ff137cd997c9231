"""Generates personal data and lookalikes for `pii.py` and the tests, all from a seed: none of it belongs to a person.

The rules of check digits are written here a second time, from the issuers' descriptions. They do not use the finders'
tables, so that a mistake there shows. Mostly the last characters are tried until the rule holds. Telephone numbers are
made by national plans written out by hand.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from pii_ids import CAPITALS, ONE, broken_id, digits, dot, ended, grouped, ids, luhn_right

SENTENCES = (
    "Please write it down: {}.",
    "It was {} all along, she said.",
    "Nummer: {}\nDanke!",
    "Voici : {} (merci).",
    "({})",
    "see {}, and nothing else",
    "The form says “{}” on page 3.",
    "前の {} 後の",
    "a\tb\t{}\tc",
    "- {}\n- other",
    "{}",
    "Reply to this thread with {} if you agree; we closed 3 of 12 tickets in 2019.",
    "Его {} записали.",
    "[{}]",
)


@dataclass(frozen=True)
class Case:
    """A text and the values of one kind in it. A lookalike has no values."""

    kind: str
    text: str
    values: tuple[str, ...]


# -- cards and accounts --------------------------------------------------------------------------------------------


ISSUERS = (
    ("4", 16),
    ("4", 16),
    ("4", 19),
    ("51", 16),
    ("55", 16),
    ("2221", 16),
    ("2720", 16),
    ("34", 15),
    ("37", 15),
    ("36", 14),
    ("3015", 14),
    ("38", 14),
    ("6011", 16),
    ("645", 16),
    ("65", 16),
    ("3528", 16),
    ("3589", 16),
    ("62", 16),
    ("6759", 16),
    ("5018", 16),
    ("2202", 16),
    ("4", 13),
    ("5018", 12),
)
SIZES = {16: (4, 4, 4, 4), 15: (4, 6, 5), 14: (4, 6, 4), 19: (4, 4, 4, 4, 3)}


def card(rng: random.Random) -> str:
    prefix, size = rng.choice(ISSUERS)
    return ended(prefix + digits(rng, size - len(prefix) - 1), luhn_right, ONE) or ""


def card_text(rng: random.Random, value: str) -> str:
    by = rng.choice(("", "", " ", "-"))
    return grouped(value, SIZES[len(value)], by) if by and len(value) in SIZES else value


BBANS = {
    "DE": "n" * 18,
    "GB": "a" * 4 + "n" * 14,
    "FR": "n" * 10 + "c" * 11 + "nn",
    "ES": "n" * 20,
    "NL": "a" * 4 + "n" * 10,
    "IT": "a" + "n" * 10 + "c" * 12,
    "PL": "n" * 24,
    "CH": "n" * 5 + "c" * 12,
    "NO": "n" * 11,
    "MT": "aaaa" + "n" * 5 + "c" * 18,
    "SE": "n" * 20,
    "BE": "n" * 12,
    "SA": "nn" + "c" * 18,
    "BR": "n" * 23 + "ac",
    "TR": "n" * 6 + "c" * 16,
}


def iban_remainder(value: str) -> int:
    rest = 0
    for c in value[4:] + value[:4]:
        n = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ".index(c)
        rest = (rest * (100 if n > 9 else 10) + n) % 97
    return rest


def iban(rng: random.Random) -> str:
    country = rng.choice(sorted(BBANS))
    draw = {"n": "0123456789", "a": CAPITALS, "c": "0123456789" + CAPITALS}
    bban = "".join(rng.choice(draw[c]) for c in BBANS[country])
    return next(f"{country}{n:02d}{bban}" for n in range(2, 99) if iban_remainder(f"{country}{n:02d}{bban}") == 1)


def iban_text(rng: random.Random, value: str) -> str:
    by = rng.choice(("", "", " ", " ", "-"))
    value = value.lower() if rng.random() < 0.2 else value
    return by.join(value[i : i + 4] for i in range(0, len(value), 4)) if by else value


# -- the rest --------------------------------------------------------------------------------------------------------


def email(rng: random.Random) -> str:
    name = "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randrange(2, 9)))
    more = rng.choice(("", f".{name[::-1]}", f"+{rng.randrange(99)}", f"_{name[:3]}", str(rng.randrange(2000)), "-x"))
    host = rng.choice(("mail", "firma-xy", "uni", "a1", "x")) + rng.choice(("", "-post", "7"))
    value = f"{name}{more}@{host}.{rng.choice(('net', 'co.uk', 'de', 'museum', 'com.br', 'ac.jp'))}"
    return value if rng.random() < 0.8 else value.title()


def public_ip(rng: random.Random) -> str:
    first = rng.choice([n for n in range(1, 224) if n not in (10, 100, 127, 169, 172, 192, 198, 203)])
    return f"{first}.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}"


def phone(rng: random.Random) -> str:
    plans = (
        ("1", ((3, 3, 4),), "23456789", 10),
        ("49", ((2, 8), (3, 3, 4), (4, 7)), "123456789", 10),
        ("44", ((2, 4, 4), (4, 6)), "123", 10),
        ("33", ((1, 2, 2, 2, 2),), "1234567", 9),
        ("34", ((3, 3, 3),), "6789", 9),
        ("39", ((3, 7), (2, 8)), "03", 10),
        ("41", ((2, 3, 2, 2),), "2347", 9),
        ("46", ((2, 3, 2, 2),), "1234567", 9),
        ("81", ((2, 4, 4),), "789", 10),
        ("86", ((3, 4, 4),), "1", 11),
        ("91", ((5, 5),), "6789", 10),
        ("55", ((2, 5, 4),), "12345678", 11),
        ("61", ((3, 3, 3),), "2347", 9),
        ("353", ((2, 3, 4),), "8", 9),
        ("380", ((2, 3, 2, 2),), "3456", 9),
        ("852", ((4, 4),), "2369", 8),
        ("420", ((3, 3, 3),), "67", 9),
        ("972", ((2, 3, 4),), "5", 9),
        ("7", ((3, 3, 2, 2),), "489", 10),
    )
    code, sizes, first, size = rng.choice(plans)
    number = rng.choice(first) + digits(rng, size - 1)
    by = rng.choice((" ", " ", "-", ".", ""))
    said = grouped(number, rng.choice(sizes), by)
    if code == "1" and by == " ":
        said = f"({number[:3]}) {number[3:6]}-{number[6:]}"
    if code in ("41", "46", "49") and rng.random() < 0.3 and by:
        said = f"(0){said}"
    return f"{rng.choice(('+', '+', '+', '00' if by else '+'))}{code}{by}{said}"


BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
RIPPLE = "rpshnaf39wBUDNEGHJKLM4PQRST7VWXYZ2bcdeCg65jkm8oFqi1tuvAxyz"


def base58check(version: bytes, payload: bytes, alphabet: str = BASE58) -> str:
    data = version + payload
    data += hashlib.sha256(hashlib.sha256(data).digest()).digest()[:4]
    number, out = int.from_bytes(data, "big"), ""
    while number:
        number, rest = divmod(number, 58)
        out = alphabet[rest] + out
    return alphabet[0] * (len(data) - len(data.lstrip(b"\0"))) + out


def bech32(name: str, values: list[int], constant: int = 1) -> str:
    def polymod(of: list[int]) -> int:
        c = 1
        for v in of:
            c0 = c >> 25
            c = ((c & 0x1FFFFFF) << 5) ^ v
            for i, g in enumerate((0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)):
                c ^= g * (c0 >> i & 1)
        return c

    expanded = [ord(c) // 32 for c in name] + [0] + [ord(c) % 32 for c in name]
    check = polymod(expanded + values + [0] * 6) ^ constant
    values = values + [check >> 5 * (5 - i) & 31 for i in range(6)]
    return name + "1" + "".join("qpzry9x8gf2tvdw0s3jn54khce6mua7l"[v] for v in values)


#: mixed-case test addresses published in EIP-55
EIP55 = (
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
    "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
    "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB",
    "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
    "0x52908400098527886E0F7030069857D2E4169EE7",
    "0xde709f2102306220921060314715629080e2fb77",
)


def wallet(rng: random.Random) -> str:
    payload = rng.randbytes(20)
    program = [rng.randrange(32) for _ in range(32)]
    return rng.choice(
        (
            lambda: base58check(b"\x00", payload),
            lambda: base58check(b"\x05", payload),
            lambda: base58check(b"\x30", payload),
            lambda: base58check(b"\x1e", payload),
            lambda: base58check(b"\x41", payload),
            lambda: base58check(b"\x00", payload, RIPPLE),
            lambda: bech32("bc", [0, *program]),
            lambda: bech32("ltc", [0, *program]),
            lambda: bech32("bc", [1, *(rng.randrange(32) for _ in range(52))], 0x2BC830A3),
            lambda: rng.choice(EIP55[:4]),
        )
    )()


def secret(rng: random.Random) -> str:
    def of(alphabet: str, n: int) -> str:
        return "".join(rng.choice(alphabet) for _ in range(n))

    word, base, hexa = string.ascii_letters + string.digits, CAPITALS + "234567", "0123456789abcdef"
    url = word + "-_"
    return rng.choice(
        (
            lambda: "AKIA" + of(base, 16),
            lambda: "ghp_" + of(word, 36),
            lambda: "github_pat_" + of(word, 22) + "_" + of(word, 59),
            lambda: "glpat-" + of(word, 20),
            lambda: f"xoxb-{digits(rng, 12)}-{digits(rng, 12)}-{of(word, 24)}",
            lambda: "sk_live_" + of(word, 24),
            lambda: "AIza" + of(url, 35)[:-1] + "x",
            lambda: "sk-proj-" + of(word, 74),
            lambda: "sk-" + of(word, 20) + "T3BlbkFJ" + of(word, 20),
            lambda: f"sk-ant-api03-{of(word, 93)}AA",
            lambda: "hf_" + of(string.ascii_letters, 34),
            lambda: "npm_" + of(word, 36),
            lambda: "pypi-AgEIcHlwaS5vcmc" + of(word, 80),
            lambda: f"SG.{of(word, 22)}.{of(word, 43)}",
            lambda: f"{rng.randrange(10**8, 10**10)}:AA{of(word, 33)}",
            lambda: f"AccountKey={of(word, 86)}==",
            lambda: f"eyJ{of(word, 33)}.eyJ{of(word, 60)}.{of(url, 42)}x",
            lambda: (
                "-----BEGIN RSA PRIVATE KEY-----\n"
                + "\n".join(of(word, 64) for _ in range(5))
                + "\n-----END RSA PRIVATE KEY-----"
            ),
            lambda: "dckr_pat_" + of(word, 27),
            lambda: "dop_v1_" + of(hexa, 64),
            lambda: "key-" + of(hexa, 32),
        )
    )()


def lookalikes(rng: random.Random) -> list[str]:
    """Texts that no finder of any kind may report."""
    d = lambda n: digits(rng, n)  # noqa: E731
    hexa = "".join(rng.choice("0123456789abcdef") for _ in range(64))
    isbn = ended("978" + d(9), lambda v: dot(v, [1, 3] * 6 + [1]) % 10 == 0, ONE) or ""
    y, m, dd = rng.randrange(1900, 2030), rng.randrange(1, 13), rng.randrange(1, 29)
    return [
        f"version {rng.randrange(30)}.{rng.randrange(30)}.{rng.randrange(30)}",
        f"v2.{d(2)}.{d(3)}-rc1",
        f"ISBN {isbn}",
        f"ISBN 978-{isbn[3]}-{isbn[4:8]}-{isbn[8:12]}-{isbn[12]}",
        f"order no. {d(8)}",
        f"Order #{d(10)}",
        f"ticket {d(5)}-{d(5)}",
        f"{y}-{m:02d}-{dd:02d}T12:34:56.{d(3)}Z",
        f"{y}{m:02d}{dd:02d}{d(6)}",
        f"1{d(9)}",
        f"16{d(11)}",
        f"{dd:02d}.{m:02d}.{y}",
        f"{m}/{dd}/{y}",
        f"{y}-{y + 4}",
        f"{dd:02d}-{m:02d}-{y}",
        hexa[:32],
        hexa[:40],
        hexa,
        f"{hexa[:8]}-{hexa[8:12]}-4{hexa[13:16]}-a{hexa[17:20]}-{hexa[20:32]}",
        f"doi:10.{d(4)}/{d(6)}.{d(4)}.{d(7)}",
        f"https://doi.org/10.1016/j.x.{y}.{m:02d}.{d(3)}",
        f"{d(2)}.{d(6)}, -{d(2)}.{d(6)}",
        f"0.{d(16)}",
        f"3.{d(15)}",
        f"${d(3)},{d(3)},{d(3)}.00",
        f"{rng.randrange(1, 99)} {d(3)} {d(3)} {d(3)}",
        f"pp. {d(3)}-{d(3)}",
        f"{y} {y + 1} {y + 2} {y + 3}",
        f"https://x.org/p?id={d(16)}&t={d(10)}",
        f"https://www.facebook.com/photo.php?fbid={d(15)}",
        f"arXiv:{d(4)}.{d(5)}v2",
        f"SKU {d(4)}-{d(4)}-{d(3)}",
        f"{d(4)}x{d(4)} pixels",
        f"RFC {d(4)}, section {d(1)}.{d(1)}.{d(1)}.",
        f"+{rng.randrange(100)}%",
        f"GMT+{rng.randrange(10, 13)}:00 {y}",
        f"C++{d(2)}",
        f"{d(3)}+{d(3)}={d(4)}",
        "@name, and mail @ noon",
        "a@b",
        "user@localhost",
        "192.168.1.17",
        "10.0.0.8",
        "127.0.0.1",
        "12:30:45",
        "aa:bb:cc:dd:ee:ff",
        "std::vector<int>::iterator",
        f"0x{hexa[:8]}",
        f"#{hexa[:6]}",
        f"case {d(2)}-{d(5)}",
        f"ZIP {d(5)}-{d(4)}",
        f"{d(4)} {d(4)}",
        f"lot {d(12)}B",
        f"sha256-{hexa[:43]}=",
        "api_key = os.environ['API_KEY_FOR_THE_SERVICE']",
        "password: correct horse battery staple",
        "AKIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "ghp_" + "x" * 36,
        "4111 1111 1111 1111",
    ]


def broken(rng: random.Random, kind: str) -> str:
    """A text that looks like a value of the kind and is none: mostly a value with a wrong check digit, or a telephone
    number that no plan has. For the other kinds, it is one of `lookalikes`."""

    def other(c: str) -> str:
        return str((int(c) + rng.randrange(1, 10)) % 10)

    if kind == "cards":
        value = card(rng)
        return "my card " + card_text(rng, value[:-1] + other(value[-1]))
    if kind == "ibans":
        value = iban(rng)
        last = other(value[-1]) if value[-1].isdigit() else "A" if value[-1] != "A" else "B"
        return "IBAN " + iban_text(rng, value[:-1] + last)
    if kind == "wallets":
        value = wallet(rng)
        if value.startswith("0x"):
            return value[:3] + value[3:].swapcase()
        at = rng.randrange(8, len(value) - 2)
        swap = "q" if value[at] != "q" else "p"
        return value[:at] + swap + value[at + 1 :]
    if kind == "phones":
        return rng.choice(
            (
                f"+{digits(rng, 4)}",
                f"+1 {digits(rng, 3)} {digits(rng, 2)}",
                f"+0{digits(rng, 9)}",
                f"+999 {digits(rng, 9)}",
                f"00{digits(rng, 12)}",
                f"x+49{digits(rng, 9)}",
                f"+44 0{digits(rng, 3)} {digits(rng, 3)}",
            )
        )
    return rng.choice(lookalikes(rng))


def cases(kind: str, count: int, seed: int = 0) -> list[Case]:
    """Makes `count` texts with a value of the kind, and as many with a lookalike."""
    rng = random.Random(f"{seed}/{kind}")
    out = []
    for i in range(count):
        frame = SENTENCES[i % len(SENTENCES)]
        if kind == "ids":
            of = ids(rng)
            value, forms = of[sorted(of)[i % len(of)]]
            form = rng.choice(forms)
            out.append(Case(kind, frame.format(form), (form,)))
        elif kind == "cards":
            value = card_text(rng, number := card(rng))
            said = f"card no. {value}" if len(number) < 14 else value
            out.append(Case(kind, frame.format(said), (value,)))
        else:
            make: dict[str, Callable[[], str]] = {
                "emails": lambda: email(rng),
                "ips": lambda: public_ip(rng),
                "ibans": lambda: iban_text(rng, iban(rng)),
                "phones": lambda: phone(rng),
                "secrets": lambda: secret(rng),
                "wallets": lambda: wallet(rng),
            }
            value = make[kind]()
            out.append(Case(kind, frame.format(value), (value,)))
    for i in range(count):
        wrong = (
            broken_id(rng) if kind == "ids" and i % 2 else broken(rng, kind) if i % 2 else rng.choice(lookalikes(rng))
        )
        out.append(Case(kind, SENTENCES[i % len(SENTENCES)].format(wrong), ()))
    return out
