"""The scrubber searches only near clues (such as a run of digits). It finds the same values as a search through the
whole text, which these tests get by clues that point to the whole text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from stages.scrub import find as finding
from stages.scrub.clues import Clues, Span
from stages.scrub.find import Match
from stages.scrub.network import _IPV4, _IPV6, _is_address, ipv4, ipv6
from stages.scrub.phones import local
from stages.scrub.pii import Pii
from stages.vectors import read_vectors
from tests.stages.pii_benchmark import GENERATED, cases
from tests.stages.test_conformance_vectors import FOLDER
from tests.stages.texts import AWKWARD, random_texts, real_texts

SCRUBBERS = [
    Pii(ipv6=True, cards=True, ibans=True, phones=True, ids=["all"], secrets=True, wallets=True, region="US"),
    Pii(emails=False, ips=False, ids=["it", "fr", "gb", "es", "cl"]),
    Pii(cards=True), Pii(emails=False, ibans=True), Pii(ips=False, secrets=True), Pii(wallets=True),
]
#: what finders trip over, beside values and pieces of them
PIECES = [*"0123456789" * 3, *"0123456789abcdefABCDEFXYZxyzlLKMTr", *" .-/+:()@_=<>~%$'\"`#\n\t,;&*^!",
          *"\u00a0\u2009\u2013é中İſ\u212a\x00²٣", "AKIA", "sk-", "sk_live_", "key=", "password: ", "token=>'", "0x",
          "bc1", "DE89", "00", "+49 ", "2A", "ssn ", "card ", "codice fiscale ", "dni ", "eyJ", "PRIVATE KEY",
          "hooks.slack.com/services/", "  ", "a.b@c.de", "://", "www.", "xox", "::", "fe80:", "AB 12 34 56 C",
          "12.345.678-5", "RSS MRA 85T10 A562S", "20190102 by"]


class Whole(Clues):
    """Clues that say that everything may be anywhere, so that the whole text is searched."""

    @property
    def _all(self) -> list[Span]:
        return [(0, len(self.text))]

    none = False
    near_numbers = near_dates = codes = words = _all

    def numbers(self, least: int) -> list[Span]:
        return self._all

    def checked(self) -> list[int]:
        return list(range(2, len(self.text)))


def hostile(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    values = [v for kind in GENERATED for case in cases(kind, 60, seed) for v in (*case.values, case.text)]
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    make: list[Callable[[], str]] = [
        lambda: rng.choice(values), lambda: (v := rng.choice(values))[rng.randrange(len(v)):],
        lambda: (v := rng.choice(values))[:rng.randrange(len(v))],
        lambda: "".join(rng.choices("0123456789 ", k=rng.randint(3, 25))),
        lambda: "".join(rng.choices(letters, k=rng.randint(10, 60))), *[lambda: rng.choice(PIECES)] * 6]
    for _ in range(count):
        yield "".join(rng.choice(make)() for _ in range(rng.randint(1, 40)))


def texts() -> Iterator[str]:
    yield from AWKWARD
    yield from random_texts(60)
    yield from real_texts(40)
    published = [case["text"] for case in read_vectors(FOLDER / "pii.jsonl")[1]]
    for i in range(0, len(published), 12):
        joined = "|".join(published[i:i + 12])
        yield joined
        yield joined.replace(" ", "\u00a0")
    for kind in GENERATED:
        of = [case.text for case in cases(kind, 60, 4)]
        yield from of[::6]
        for between in (" ", "\n", "", "\u00a0", "0"):
            yield between.join(of)
    yield from hostile(200, 1)


def found(text: str, how: type[Clues], monkeypatch: pytest.MonkeyPatch) -> list[list[Match]]:
    monkeypatch.setattr(finding, "Clues", how)
    return [pii._find(text) for pii in SCRUBBERS]


def test_clues_lose_nothing(monkeypatch: pytest.MonkeyPatch):
    """Neither where short texts are searched by arrays nor where they are by patterns."""
    class Arrays(Clues):
        SHORT = 0

    class Patterns(Clues):
        SHORT = 1 << 30

    hits = 0
    for text in texts():
        wanted = found(text, Whole, monkeypatch)
        for how in (Arrays, Patterns):
            assert found(text, how, monkeypatch) == wanted, (how, text)
        hits += len(wanted[0])
    assert hits > 1000


def test_addresses_are_those_of_the_plain_patterns():
    for text in texts():
        for pattern, finder, rule in ((_IPV4, ipv4, "ipv4"), (_IPV6, ipv6, "ipv6")):
            wanted = [(*m.span(), rule) for m in pattern.finditer(text) if _is_address(m.group(), True)]
            assert list(finder(Clues(text))) == wanted, text


def test_other_digits_behind_a_local_number_are_no_error():
    for after in ("²", "٣", "3", ""):
        list(local(Clues(f"Call 0212 736 5000 1234{after}"), "US"))
