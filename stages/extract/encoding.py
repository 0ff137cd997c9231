"""Bytes of a page → text: which character encoding, and a decoding that loses no page.

Order: byte-order mark; UTF-16 without one, by its NULs; stateful encodings that look like ASCII, if declared; UTF-8 if
it is valid (a page that decodes as UTF-8 by accident practically does not exist, while wrong declarations are common);
the transport's charset; the page's own `<meta>`; detection by byte statistics (resiliparse, and what it takes for a
single-byte encoding is looked at again); UTF-8 if it is *mostly* valid; windows-1252. Labels mean what browsers take
them for (WHATWG: ISO-8859-1 is windows-1252, GB2312 is GBK, Shift_JIS is code page 932).
"""

from __future__ import annotations

import codecs
import re

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
         (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
#: their bytes are all below 0x80, so "valid UTF-8" says nothing about them
_STATEFUL = {"iso2022_jp", "iso2022_jp_2", "iso2022_jp_3", "iso2022_jp_ext", "iso2022_kr", "hz"}
_WIDER = {"shift_jis": "cp932", "euc_kr": "cp949", "gbk": "gb18030", "gb2312": "gb18030", "big5": "big5hkscs",
          "iso8859-11": "cp874"}
#: what statistics cannot tell apart is taken for the one that pages are in, which has the same letters
_COMMONER = {"iso8859-13": "cp1257", "iso8859-16": "cp1250", "koi8-r": "koi8-u"}
#: what a page says of itself, in its first bytes
_META = re.compile(rb"<meta\b[^<>]{0,400}?\bcharset\s*=\s*[\"']?\s*([\w.:-]{2,40})"
                   rb"|<\?xml\b[^<>]{0,200}?\bencoding\s*=\s*[\"']([\w.:-]{2,40})", re.IGNORECASE)
_META_WITHIN = 8 << 10
#: encodings whose letters show that they are the right one, and the part of all beyond ASCII they must be at least
_TELLING = (("cp949", re.compile("[\uac00-\ud7a3]"), 0.7), ("cp932", re.compile("[\u3041-\u30fe]"), 0.3),
            ("euc_jp", re.compile("[\u3041-\u30fe]"), 0.3))
_FOREIGN = bytes(range(0x80, 0x100))
#: bytes looked at for statistics
_SAMPLE = 128 << 10


def canonical(label: str) -> str:
    """Python's name of the encoding a browser takes `label` for, or "" for an unknown one."""
    mapped = map_encoding_to_html5(label.strip().lower(), fallback_utf8=False) if label else None
    if mapped is None:
        return ""
    try:
        name = codecs.lookup(mapped).name
    except LookupError:
        return ""
    return _WIDER.get(name, name)


def decode(data: bytes, charset: str = "") -> tuple[str, str]:
    """(text, encoding it was read with). `charset` is what the transport declared, "" for nothing. Never fails.

    Bytes that are invalid in the chosen encoding become U+FFFD.
    """
    for bom, name in _BOMS:
        if data.startswith(bom):
            return data.decode(name, "replace").removeprefix("\ufeff"), name
    if wide := _utf16(data):
        return data.decode(wide, "replace"), wide
    declared = canonical(charset)
    if declared in _STATEFUL and b"\x1b" in data:
        return data.decode(declared, "replace"), declared
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        pass
    tried: list[str] = []
    for guess in (lambda: declared, lambda: _said(data), lambda: _detected(data)):
        name = guess()
        if name and name not in tried and name != "utf-8":
            tried.append(name)
            if (text := _strictly(data, name)) is not None:
                return text, name
    text = data.decode("utf-8", "replace")
    lost = text.count("\ufffd")
    foreign = len(text) - len(text.encode("ascii", "ignore"))
    if lost * 10 <= foreign - lost or not tried:             # UTF-8 with a few broken places
        return (text, "utf-8") if lost * 10 <= foreign - lost else (data.decode("cp1252", "replace"), "cp1252")
    return data.decode(tried[0], "replace"), tried[0]


def _utf16(data: bytes) -> str:
    """The byte order of UTF-16 without a mark: NULs are every other byte of tags, and in no other encoding; or ""."""
    even, odd = data[:128:2].count(0), data[1:128:2].count(0)
    return "utf-16-le" if odd >= 8 and not even else "utf-16-be" if even >= 8 and not odd else ""


def _said(data: bytes) -> str:
    """The encoding a page declares in its `<meta>` or XML declaration, or ""."""
    found = _META.search(data, 0, _META_WITHIN)
    return canonical((found[1] or found[2]).decode("ascii", "replace")) if found else ""


def _detected(data: bytes) -> str:
    """The encoding by statistics of bytes. They take some Korean and Japanese pages for broken UTF-8
    or Western ones."""
    sample = data[:_SAMPLE]
    name = canonical(detect_encoding(sample) or "")
    foreign = len(sample) - len(sample.translate(None, _FOREIGN))
    if (name in ("", "utf-8") or name.startswith(("cp125", "iso8859", "koi8", "mac"))) and foreign * 5 > len(sample):
        for other, letters, share in _TELLING:
            # a character may be cut at the end of the sample
            text = sample.decode(other, "replace") if _strictly(data, other) is not None else ""
            if len(letters.findall(text)) > share * (len(text) - len(text.encode("ascii", "ignore"))) > 0:
                return other
    return _COMMONER.get(name, name)


def _strictly(data: bytes, name: str) -> str | None:
    """`data` in that encoding, or None when it is not. Single-byte encodings accept nearly everything: a result with
    many control characters is no text in them."""
    try:
        text = data.decode(name)
    except (UnicodeDecodeError, LookupError):
        return None
    controls = sum(text.count(chr(c)) for c in range(0x80, 0xa0))
    return None if controls * 100 > len(text) else text
