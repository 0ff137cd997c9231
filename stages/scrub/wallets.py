"""Finds addresses of cryptocurrencies, most of which contain a checksum. Their forms are:

- Base58Check (Bitcoin wiki): addresses of Bitcoin, Litecoin, Dogecoin, Tron, Dash and Zcash, private keys of Bitcoin
  (WIF), and, with an alphabet of its own, addresses of XRP.
- Bech32 and Bech32m (BIP 173, BIP 350): addresses that begin with bc1, tb1, ltc1, addr1 (Cardano) or cosmos1.
- Ethereum: 0x and 40 hex digits. If the digits contain both capitals and small letters, the EIP-55 checksum must hold
  (one random string in 2**12 passes). It is computed for the first CHECKED such addresses of a text; later ones count
  without it. If the letters are all capitals or all small, a word such as 'wallet' must closely precede the address.

Addresses without an owner (zero, burn addresses with many zeros) are not reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha256

from stages.scrub.checks import word_before
from stages.scrub.clues import Clues, Span
from stages.scrub.keccak import keccak256

_BITCOIN = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_RIPPLE = "rpshnaf39wBUDNEGHJKLM4PQRST7VWXYZ2bcdeCg65jkm8oFqi1tuvAxyz"
_VALUE = {c: i for i, c in enumerate(_BITCOIN)}
_RIPPLE_VALUE = {c: i for i, c in enumerate(_RIPPLE)}
#: fewest letters and digits of an address (`bc1` and 20)
_SHORTEST = 23
#: candidates: the beginnings of addresses, with at least 25 letters and digits in all
_WORD = "[1-9A-HJ-NP-Za-km-z]"
_LONG = (re.compile(f"[13579ADKLMTX]{_WORD}{{24,}}"), re.compile(f"r{_WORD}{{24,}}"),
         re.compile(f"t[13]{_WORD}{{23,}}"))
#: first byte of a decoded address of 25 bytes (20 of a hash, 4 of the checksum) → currency
_VERSIONS = {b"\x00": "bitcoin", b"\x05": "bitcoin", b"\x30": "litecoin", b"\x32": "litecoin", b"\x1e": "dogecoin",
             b"\x16": "dogecoin", b"\x41": "tron", b"\x4c": "dash", b"\x10": "dash"}
_BECH32 = re.compile(r"(?:bc|tb|ltc|addr|cosmos)1[02-9ac-hj-np-z]{20,100}|(?:BC|TB|LTC)1[02-9AC-HJ-NP-Z]{20,87}")
_BECH32_VALUE = {c: i for i, c in enumerate("qpzry9x8gf2tvdw0s3jn54khce6mua7l")}
_ETHEREUM = re.compile(r"0x[0-9a-fA-F]{40}(?![0-9A-Za-z])")
_ETHEREUM_WORDS = re.compile(r"eth(?:er(?:eum)?)?\b|erc-?20|wallet|contract|address|metamask|token|polygon|bsc\b|0x\b",
                             re.IGNORECASE)
#: addresses per text whose EIP-55 checksum is computed (1 ms each); later addresses count without this check
CHECKED = 1000


def wallets(clues: Clues) -> Iterator[tuple[int, int, str]]:
    """Find addresses and private keys of cryptocurrencies in the text of `clues`. Yields (start, end, currency), in no
    order. `currency` is a name such as "bitcoin", or for a Bech32 address its prefix ("bc"). For a private key of
    Bitcoin, it is "private_key"."""
    text, words = clues.text, [span for span in clues.words if span[1] - span[0] >= _SHORTEST]
    yield from _ethereum(text, words)
    for begin, stop in words:
        for pattern in _LONG:
            for match in pattern.finditer(text, begin, stop):
                start, end = match.span()
                if end - start <= 52 and not _part_of_word(text, start, end) and (name := _base58(match.group())):
                    yield start, end, name
        for match in _BECH32.finditer(text, begin, stop):
            if not _part_of_word(text, *match.span()) and _bech32(match.group().lower()):
                yield *match.span(), match.group()[:match.group().index("1")].lower()


def _part_of_word(text: str, start: int, end: int) -> bool:
    """Return whether text[start:end] is part of a longer word. If it is, it is no address of a cryptocurrency."""
    return (start > 0 and (text[start - 1].isalnum() or text[start - 1] in "_+")) or (
        end < len(text) and (text[end].isalnum() or text[end] in "_+="))


def _base58(word: str) -> str:
    """Return the currency of `word`, if it is a cryptocurrency address in Base58Check; "private_key" if it is a Bitcoin
    private key; and "" if it is neither."""
    if word[0] == "r" and len(word) <= 35:
        return "xrp" if _decoded(word, _RIPPLE_VALUE, "r", 25)[:1] == b"\x00" else ""
    size = 25 if len(word) <= 34 else 26 if len(word) == 35 else 37 if word[0] == "5" else 38
    if (len(word) == 51 and word[0] == "5") or (len(word) == 52 and word[0] in "KL"):
        return "private_key" if _decoded(word, _VALUE, "1", size)[:1] == b"\x80" else ""
    if size == 26:
        return "zcash" if _decoded(word, _VALUE, "1", 26)[:2] in (b"\x1c\xb8", b"\x1c\xbd") else ""
    return _VERSIONS.get(_decoded(word, _VALUE, "1", 25)[:1], "") if size == 25 else ""


def _decoded(word: str, values: dict[str, int], zero: str, size: int) -> bytes:
    """Decode a Base58Check string to `size` bytes. The result is b"" if the length or the checksum is wrong, or all
    bytes are zero. `values` holds the value of each character, and `zero` is the character for 0."""
    number = 0
    for character in word:
        number = number * 58 + values[character]
    zeros = len(word) - len(word.lstrip(zero))
    data = b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
    if len(data) != size or sha256(sha256(data[:-4]).digest()).digest()[:4] != data[-4:] or not any(data[1:-4]):
        return b""
    return data


def _bech32(word: str) -> bool:
    """Return whether a Bech32 or Bech32m address has a right checksum (a BCH code over 5-bit groups, with the constant
    of BIP 173 or that of BIP 350)."""
    name, _, data = word.rpartition("1")
    check = 1
    for value in [*(ord(c) >> 5 for c in name), 0, *(ord(c) & 31 for c in name), *(_BECH32_VALUE[c] for c in data)]:
        top = check >> 25
        check = (check & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate((0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)):
            check ^= generator if top >> bit & 1 else 0
    return check in (1, 0x2BC830A3)


def _ethereum(text: str, words: list[Span]) -> Iterator[tuple[int, int, str]]:
    checked = 0
    for match in (match for span in words for match in _ETHEREUM.finditer(text, *span)):
        start, end = match.span()
        digits = text[start + 2:end]
        if digits.count("0") >= 20 or len(set(digits)) < 4 or (start and (text[start - 1].isalnum())):
            continue
        if digits.isdigit() or digits == digits.lower() or digits == digits.upper():
            real = word_before(text, start, _ETHEREUM_WORDS)
        else:
            checked += 1
            real = checked > CHECKED or _eip55(digits)
        if real:
            yield start, end, "ethereum"


def _eip55(digits: str) -> bool:
    """Return whether the capitals in the 40 hex digits of an Ethereum address form a right EIP-55 checksum. By EIP-55,
    a letter is a capital exactly if the hash of the lower-case address has a hex digit from 8 to f at the letter's
    position."""
    marks = keccak256(digits.lower().encode()).hex()
    return all(not c.isalpha() or c.isupper() == (mark > "7") for c, mark in zip(digits, marks))
