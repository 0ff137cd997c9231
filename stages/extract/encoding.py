"""Bytes of a page → text: which character encoding, and a decoding that loses no page.

Order: byte-order mark; stateful encodings that look like ASCII, if declared; UTF-8 if it is valid (a page that decodes
as UTF-8 by accident practically does not exist, while wrong declarations are common); the transport's charset; the
page's own `<meta>`; detection by byte statistics (resiliparse); UTF-8 if it is *mostly* valid; windows-1252. Labels
mean what browsers take them for (WHATWG: ISO-8859-1 is windows-1252, GB2312 is GBK, Shift_JIS is code page 932).
"""

from __future__ import annotations

import codecs

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
         (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
#: their bytes are all below 0x80, so "valid UTF-8" says nothing about them
_STATEFUL = {"iso2022_jp", "iso2022_jp_2", "iso2022_jp_3", "iso2022_jp_ext", "iso2022_kr", "hz"}
_WIDER = {"shift_jis": "cp932", "euc_kr": "cp949", "gbk": "gb18030", "gb2312": "gb18030", "big5": "big5hkscs"}
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
    declared = canonical(charset)
    if declared in _STATEFUL and b"\x1b" in data:
        return data.decode(declared, "replace"), declared
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        pass
    tried = []
    for name in (declared, canonical(detect_encoding(data[:_SAMPLE], from_html_meta=True) or ""), ""):
        name = name or canonical(detect_encoding(data[:_SAMPLE]) or "")
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


def _strictly(data: bytes, name: str) -> str | None:
    """`data` in that encoding, or None when it is not. Single-byte encodings accept nearly everything: a result with
    many control characters is no text in them."""
    try:
        text = data.decode(name)
    except (UnicodeDecodeError, LookupError):
        return None
    controls = sum(text.count(chr(c)) for c in range(0x80, 0xa0))
    return None if controls * 100 > len(text) else text
