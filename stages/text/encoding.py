"""Decodes the bytes of a page to text: it chooses the character encoding, and never fails.

The first of these rules that applies decides:

1. The encoding of a byte-order mark.
2. UTF-16 without a byte-order mark, recognised by its NUL bytes.
3. ISO-2022-JP, whose bytes look like ASCII, if the transport, such as HTTP, declares it and the page has an escape
   character.
4. UTF-8, if the bytes are valid. Hardly any page in another encoding is valid UTF-8, while wrong declarations are
   common.
5. The first of three guesses that fits: the charset that the transport declares, the charset that the page declares in
   its own `<meta>`, the result of byte statistics (resiliparse, checked again for Korean and Japanese).
6. UTF-8, if the bytes are *mostly* valid: ten or more sound characters beyond ASCII for each broken place.
7. The first guess of rule 5, with its errors replaced, or windows-1252 if there was no guess.

A guess is never UTF-8. It fits if three conditions hold: all bytes decode without error, at most 1 % of the characters
are control characters, and the runs of bytes beyond ASCII suit the script. In Latin script such bytes stand mostly
alone, so the runs must have at most _LATIN_RUN bytes on average. For any other script they must have at least
_OTHER_RUN. If a server declares every page as ISO-8859-1, the declaration is thus ignored for Russian, Greek and
Chinese pages.

Labels (names of encodings) are read as browsers read them (WHATWG: ISO-8859-1 is windows-1252, GB2312 is GBK, Shift_JIS
is code page 932).
"""

from __future__ import annotations

import codecs
import re

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
         (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
#: The one encoding known to browsers whose bytes are all below 0x80. A text in it is always valid UTF-8, too.
_STATEFUL = "iso2022_jp"
_WIDER = {"shift_jis": "cp932", "euc_kr": "cp949", "gbk": "gb18030", "gb2312": "gb18030", "big5": "big5hkscs",
          "iso8859-11": "cp874"}
#: encodings that byte statistics mistake for a commoner one with the same letters → the commoner one
_COMMONER = {"iso8859-13": "cp1257", "iso8859-16": "cp1250", "koi8-r": "koi8-u"}
#: the encoding that a page declares, in its first bytes
_META = re.compile(rb"<meta\b[^<>]{0,400}?\bcharset\s*=\s*[\"']?\s*([\w.:-]{2,40})"
                   rb"|<\?xml\b[^<>]{0,200}?\bencoding\s*=\s*[\"']([\w.:-]{2,40})", re.IGNORECASE)
_META_WITHIN = 64 << 10
#: encodings, the letters by which each is recognised, and the least share of these letters among all characters beyond
#: ASCII
_LETTERS = (("cp949", re.compile("[\uac00-\ud7a3]"), 0.7), ("cp932", re.compile("[\u3041-\u30fe]"), 0.3),
            ("euc_jp", re.compile("[\u3041-\u30fe]"), 0.3))
_FOREIGN = bytes(range(0x80, 0x100))
_RUN = re.compile(rb"[\x80-\xff]+")
#: encodings of Latin scripts
_LATIN = frozenset(("cp1250", "cp1252", "cp1254", "cp1257", "cp1258", "mac-roman",
                    *(f"iso8859-{n}" for n in (1, 2, 3, 4, 9, 10, 13, 14, 15, 16))))
#: Mean length in bytes of the runs beyond ASCII. Above the first number, the script is not Latin; below the second, it
#: is.
_LATIN_RUN, _OTHER_RUN = 2.5, 1.5
#: characters that windows-1252 and ISO-8859-1 make of the bytes from 0x80 on → those bytes
_BYTE_OF = {bytes([b]).decode(name, "replace"): b for name in ("cp1252", "latin-1") for b in range(0x80, 0x100)}
#: Matches a character whose UTF-8 bytes were decoded as windows-1252 or ISO-8859-1: its first byte and the bytes that
#: follow. A match that contains a control character cannot be ordinary text.
_FOLLOWING = "".join(c for c, b in _BYTE_OF.items() if b < 0xc0 and c != "\ufffd")
_DOUBLE = re.compile(f"[\u00c2-\u00f4][{_FOLLOWING}]{{1,3}}")
#: the beginning, in UTF-8, of most matches of `_DOUBLE`; a page without it is not searched further
_DOUBLE_BYTES = re.compile(rb"\xc3[\x82-\xb4](?:\xc2|\xe2\x80|\xe2\x82\xac|\xc5|\xc6|\xcb)")
#: a whole page counts as doubly encoded if the matches of `_DOUBLE` have more than 2 * _DOUBLE_MOST characters, and
#: more than the share _DOUBLE_SHARE of all characters beyond ASCII
_DOUBLE_MOST, _DOUBLE_SHARE = 3, 0.6
_CONTROL = re.compile("[\x80-\x9f]")
#: bytes examined for statistics
_SAMPLE = 128 << 10


def canonical(label: str) -> str:
    """Return Python's name for the encoding that a browser uses when a page names its encoding `label`. The result is
    "" for an unknown label."""
    mapped = map_encoding_to_html5(label.strip().lower(), fallback_utf8=False) if label else None
    if mapped is None:
        return ""
    try:
        name = codecs.lookup(mapped).name
    except LookupError:
        return ""
    return _WIDER.get(name, name)


def decode(data: bytes, charset: str = "") -> tuple[str, str]:
    """Decode the bytes of a page to text. Returns (text, name of the encoding that was used). The function never fails.

    `charset` is the encoding that the transport declared, "" if it declared none. Bytes that are invalid in the chosen
    encoding become U+FFFD.
    """
    for bom, name in _BOMS:
        if data.startswith(bom):
            return data.decode(name, "replace").removeprefix("\ufeff"), name
    if utf16 := _utf16(data):
        return data.decode(utf16, "replace"), utf16
    declared = canonical(charset)
    if declared == _STATEFUL and b"\x1b" in data:
        return data.decode(declared, "replace"), declared
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        pass
    candidates: list[str] = []
    mean_run = _mean_run(data)
    for guess in (lambda: declared, lambda: _declared_in_page(data), lambda: _by_statistics(data)):
        name = guess()
        if name and name not in candidates and name != "utf-8":
            candidates.append(name)
            if (mean_run > _LATIN_RUN if name in _LATIN else mean_run < _OTHER_RUN):
                continue
            if (text := _decoded_strictly(data, name)) is not None:
                return text, name
    text = data.decode("utf-8", "replace")
    replaced = text.count("\ufffd")
    non_ascii = len(text) - len(text.encode("ascii", "ignore"))
    if replaced * 10 <= non_ascii - replaced or not candidates:  # UTF-8 with a few broken places
        return (text, "utf-8") if replaced * 10 <= non_ascii - replaced else (
            data.decode("cp1252", "replace"), "cp1252")
    return data.decode(candidates[0], "replace"), candidates[0]


def _mean_run(data: bytes) -> float:
    """Return the mean length of the runs of bytes beyond ASCII in `data`. The result is `_LATIN_RUN` if all bytes are
    ASCII."""
    runs = _RUN.findall(data, 0, _SAMPLE)
    return sum(map(len, runs)) / len(runs) if runs else _LATIN_RUN


def without_double_encoding(text: str, data: bytes) -> str:
    """Undo double encoding in the text of a page. Doubly encoded text is UTF-8 that was read as windows-1252 or
    ISO-8859-1 and written as UTF-8 again: `â€™` for `’`. One real page in fifty has some. `data` is the same text in
    UTF-8.

    All doubly encoded pieces are undone if they have more than six characters in total, and more than 60 % of the
    page's characters beyond ASCII. Otherwise only pieces with a control character are undone, because they cannot be
    ordinary text. A single `â€™` stays.

    The function is for prose only, because a program may contain doubly encoded text on purpose.
    """
    if text.isascii() or _DOUBLE_BYTES.search(data) is None:
        return text
    matched = 0

    def decoded(m: re.Match[str]) -> str:
        try:
            return bytes(map(_BYTE_OF.__getitem__, m[0])).decode()
        except UnicodeDecodeError:
            return m[0]

    for m in _DOUBLE.finditer(text):
        matched += len(m[0]) if decoded(m) != m[0] else 0
    if not matched:
        return text
    non_ascii = len(text) - len(text.encode("ascii", "ignore"))
    if matched > 2 * _DOUBLE_MOST and matched > _DOUBLE_SHARE * non_ascii:
        return _DOUBLE.sub(decoded, text)
    return _DOUBLE.sub(lambda m: decoded(m) if _CONTROL.search(m[0]) else m[0], text)


def _utf16(data: bytes) -> str:
    """Return the codec of UTF-16 for a page without a byte-order mark, or "" if the page is not in UTF-16. In UTF-16,
    and in no other encoding, every other byte of markup is NUL."""
    even, odd = data[:128:2].count(0), data[1:128:2].count(0)
    return "utf-16-le" if odd >= 8 and not even else "utf-16-be" if even >= 8 and not odd else ""


def _declared_in_page(data: bytes) -> str:
    """Return the encoding that a page declares in its `<meta>` or XML declaration; "" if it declares none."""
    match = _META.search(data, 0, _META_WITHIN)
    return canonical((match[1] or match[2]).decode("ascii", "replace")) if match else ""


def _by_statistics(data: bytes) -> str:
    """Guess the encoding of a page by byte statistics. Returns Python's name of the encoding. The statistics mistake
    some Korean and Japanese pages for broken UTF-8 or for Western pages. If the statistics give such a result for a
    page with many bytes beyond ASCII, the page is therefore also checked for Korean and Japanese letters."""
    sample = data[:_SAMPLE]
    name = canonical(detect_encoding(sample) or "")
    non_ascii = len(sample) - len(sample.translate(None, _FOREIGN))
    if (name in ("", "utf-8") or name.startswith(("cp125", "iso8859", "koi8", "mac"))) and non_ascii * 5 > len(sample):
        for codec, letters, share in _LETTERS:
            # a character may be cut at the end of the sample
            text = sample.decode(codec, "replace") if _decoded_strictly(data, codec) is not None else ""
            if len(letters.findall(text)) > share * (len(text) - len(text.encode("ascii", "ignore"))) > 0:
                return codec
    return _COMMONER.get(name, name)


def _decoded_strictly(data: bytes, name: str) -> str | None:
    """Return `data` decoded by the encoding `name`, or None if the bytes are not valid in that encoding. Single-byte
    encodings accept nearly all bytes, so None is also returned if more than 1 % of the characters are control
    characters (U+0080 to U+009F)."""
    try:
        text = data.decode(name)
    except (UnicodeDecodeError, LookupError):
        return None
    controls = sum(text.count(chr(c)) for c in range(0x80, 0xa0))
    return None if controls * 100 > len(text) else text
