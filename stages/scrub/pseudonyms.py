"""Replaces values of personal data by pseudonyms (fakes). A value in one spelling gets the same fake throughout a
corpus (`Pseudonyms.fake`). Without the key, nobody can find out which value a fake stands for, not even by trying all
values.

A fake is made from a keyed hash of the value (BLAKE2b, RFC 7693), and looks like data of the same kind. It belongs to
nobody, and is not replaced again when a text is scrubbed a second time. Fakes have these forms:

- e-mail: addresses at example.com (RFC 2606)
- IP: documentation addresses (RFC 5737, RFC 3849)
- cards: numbers that begin with 411111 and fail Luhn's check
- accounts: IBANs with check digits 00
- telephone: 555-01xx numbers (NANPA)
- ids: numbers that begin with zeros or X and fit no country
- keys and wallets: values that show by EXAMPLE or zeros that they are not real
- names and postal addresses: Person-0123456789 or Address-0123456789

There are only 762 fakes of IPv4 addresses and 80,000 of telephone numbers, so several values may have the same fake.
The layout of a value (blanks, hyphens) and the prefix of a country or service are kept where they tell a reader what
kind of value was replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import count

from stages.scrub.checks import luhn
from stages.scrub.clues import Clues
from stages.scrub.national import finder
from stages.scrub.wallets import wallets

#: fewest bytes of a key
SHORTEST_KEY = 32
_NOT_VALUE = re.compile(r"[^0-9A-Za-z]")
_NOBODY = re.compile(r"(?:Person|Address)-[0-9a-f]{10}")
_EXAMPLE_NETS = ("192.0.2.", "198.51.100.", "203.0.113.")
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"


class Pseudonyms:
    """Makes fakes that replace values of personal data, with a secret key. Raises ValueError if the key has fewer than
    SHORTEST_KEY bytes."""

    def __init__(self, key: bytes) -> None:
        if len(key) < SHORTEST_KEY:
            raise ValueError(f"a key for pseudonyms has at least {SHORTEST_KEY} bytes: "
                             f"head -c 32 /dev/urandom | base64 > FILE")
        self._key = blake2b(key, digest_size=32).digest()

    def fake(self, kind: str, rule: str, value: str) -> str:
        """Return the fake that replaces `value`. `kind` and `rule` are those of the match (`stages.scrub.find.Match`).
        Two spellings of a value get the same fake if they differ only in the following:

        - in keys and addresses of cryptocurrencies: the amount of white space;
        - in e-mail and IP addresses: capitals;
        - in numbers (telephone numbers, cards, accounts, ids): capitals, and all characters but letters and digits;
        - in names and postal addresses: capitals, and the signs between the words.

        Fakes of cards, accounts and ids keep the blanks and hyphens of the value. Any other difference in spelling
        gives another fake, such as `0049` instead of `+49` in a telephone number, or an IPv6 address in full.
        """
        make: Callable[[str, str, Iterator[int]], str] = _MAKERS[kind]
        if kind in ("secrets", "wallets"):
            canonical = " ".join(value.split())
        elif kind in ("names", "addresses"):
            canonical = " ".join(re.findall(r"\w+", value.casefold()))
        else:
            canonical = value.lower() if kind in ("emails", "ips") else _NOT_VALUE.sub("", value).upper()
        for attempt in count():
            fake = make(rule, value, self._draws(f"{kind}/{attempt}/{canonical}"))
            if not _looks_real(kind, fake):
                return fake
        raise AssertionError

    def _draws(self, label: str) -> Iterator[int]:
        """Yield an endless sequence of pseudo-random numbers below 2**32. The numbers depend on `label` and on the key,
        and cannot be predicted without the key."""
        for block in count():
            data = blake2b(f"{block}/{label}".encode("utf-8", "surrogatepass"), key=self._key).digest()
            yield from (int.from_bytes(data[place:place + 4], "little") for place in range(0, 64, 4))


def is_fake(kind: str, value: str) -> bool:
    """Return whether `value` looks like a fake of a kind that scrubbing would otherwise replace again. These are e-mail
    and IP addresses that are reserved for examples, and Person-… and Address-…, which a model may take for a name."""
    if kind == "emails":
        return value.lower().endswith(("@example.com", "@example.org", "@example.net"))
    if kind == "ips":
        return value.startswith(_EXAMPLE_NETS) or value.lower().startswith("2001:db8:")
    return kind in ("names", "addresses") and not any(map(str.isalnum, _NOBODY.sub("", value)))


def _looks_real(kind: str, fake: str) -> bool:
    """Return whether a search for personal data could mistake the fake for a real value. In that case, the caller draws
    another fake."""
    if kind == "cards":
        return luhn(_NOT_VALUE.sub("", fake))
    if kind == "ids":
        return any(True for _ in finder(("all",), anywhere=True).find(Clues(fake)))
    return kind == "wallets" and any(True for _ in wallets(Clues("wallet " + fake)))


def _hex(draws: Iterator[int], digits: int) -> str:
    return "".join(f"{next(draws) & 15:x}" for _ in range(digits))


def _dressed(value: str, draws: Iterator[int], start: str = "") -> str:
    """Return `value` with other ASCII digits and letters; all other characters are kept. The first digits and letters
    become the characters of `start`. The following ones become random: a digit becomes a digit, and a letter a
    letter."""
    fixed, out = iter(start), []
    for character in value:
        if not (character.isascii() and character.isalnum()):
            out.append(character)
            continue
        draw = next(draws)
        drawn = str(draw % 10) if character.isdigit() else chr(ord("a" if character.islower() else "A") + draw % 26)
        out.append(next(fixed, "") or drawn)
    return "".join(out)


def _ip(rule: str, value: str, draws: Iterator[int]) -> str:
    if rule == "ipv6":
        return f"2001:db8:{next(draws) & 0xFFFF:x}:{next(draws) & 0xFFFF:x}::{next(draws) % 0xFFFF + 1:x}"
    return f"{_EXAMPLE_NETS[next(draws) % 3]}{next(draws) % 254 + 1}"


def _id(rule: str, value: str, draws: Iterator[int]) -> str:
    characters = [c for c in value if c.isascii() and c.isalnum()]
    return _dressed(value, draws, "".join("0" if c.isdigit() else "X" for c in characters[:len(characters) // 2]))


def _secret(rule: str, value: str, draws: Iterator[int]) -> str:
    if rule == "private_key":
        return f"-----BEGIN PRIVATE KEY-----\nEXAMPLE{_hex(draws, 32)}\n-----END PRIVATE KEY-----"
    prefix = re.match(r"(?:[A-Za-z]{2,12}[-_.=])?", value)
    assert prefix is not None
    return f"{prefix.group()}{_hex(draws, 24)}EXAMPLE"


def _wallet(rule: str, value: str, draws: Iterator[int]) -> str:
    if rule == "ethereum":
        return "0x" + "0" * 24 + _hex(draws, 16)
    if rule in ("bc", "tb", "ltc", "addr", "cosmos"):
        return f"{rule}1qexample" + "".join(_BECH32[next(draws) % 32] for _ in range(31))
    return value[0] + "EXAMPLE" + "".join(_BASE58[next(draws) % 58] for _ in range(26))


_MAKERS: dict[str, Callable[[str, str, Iterator[int]], str]] = {
    "emails": lambda rule, value, draws: f"user-{_hex(draws, 10)}@example.com",
    "ips": _ip,
    "cards": lambda rule, value, draws: _dressed(value, draws, "411111"),
    "ibans": lambda rule, value, draws: _dressed(value.upper(), draws, value[:2].upper() + "00"),
    "phones": lambda rule, value, draws: f"+1-{next(draws) % 800 + 200}-555-01{next(draws) % 100:02d}",
    "ids": _id,
    "secrets": _secret,
    "wallets": _wallet,
    "names": lambda rule, value, draws: f"Person-{_hex(draws, 10)}",
    "addresses": lambda rule, value, draws: f"Address-{_hex(draws, 10)}",
}
