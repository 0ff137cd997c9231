"""MediaWiki markup → plain text, in time linear in the markup.

Kept: running text, headings, list items, labels of links, the text of a few inline templates. Gone: references,
templates, tables, files and categories, galleries, formulas, comments, magic words. (What WikiExtractor and the HF
`wikipedia` set do; https://www.mediawiki.org/wiki/Help:Formatting)
"""

from __future__ import annotations

import html
import re
from bisect import bisect_right

#: elements whose content is no running text
_DROPPED = ("ref", "references", "math", "chem", "gallery", "timeline", "score", "syntaxhighlight", "source", "style",
            "imagemap", "templatestyles", "hiero", "graph", "maplink", "mapframe", "categorytree", "section", "table",
            "inputbox", "indicator", "noinclude")
_ELEMENT = re.compile(rf"<(/?)({'|'.join(_DROPPED)})\b([^<>]*)>", re.IGNORECASE)
_TOKEN = re.compile(r"\{\{|\}\}|\[\[|\]\]|^[ :]*\{\||^ *\|\}(?!\})", re.MULTILINE)
_NAMESPACED = re.compile(r"\s*(file|image|category|media|template|special|wikipedia|portal|help|module|draft|user|datei"
                         r"|bild|fichier|archivo|categor[ií]a|kategorie|catégorie|файл|категория)\s*:", re.IGNORECASE)
_INTERWIKI = re.compile(r"[a-z]{2,3}(?:-[a-z]{2,8})?:\S")
#: one blank before the label, which may begin with more: two runs that both take blanks try every way to share them
_EXTERNAL = re.compile(r"\[(?:https?:|ftp:|mailto:|//)[^\s\[\]]{1,2048}(?:[ \t]([^\[\]\n]*))?\]")
#: a character reference longer than any number Python reads; what it says is no character
_LONG_NUMBER = re.compile(r"&#([0-9]{20,});?")
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,500}>")
_BREAK = re.compile(r"<(?:br|p|/p|div|/div|blockquote|/blockquote|poem|/poem)\b[^<>]{0,500}>", re.IGNORECASE)
_BARE = re.compile(r"\((?:[\s,;:/]|or\b)*\)")                           # brackets that only held templates
_OPENING = re.compile(r"\(\s*[,;:]+\s*")
_MAGIC = re.compile(r"__[A-Z]{3,20}__")
#: templates whose text belongs to the sentence: which argument says it (-1: all, joined by spaces)
_INLINE = {"lang": 2, "transl": 2, "transliteration": 2, "nowrap": 1, "nobold": 1, "small": 1, "big": 1, "abbr": 1,
           "em": 1, "strong": 1, "smallcaps": 1, "sc": 1, "visible anchor": 1, "vanchor": 1, "quote": 1,
           "blockquote": 1, "cquote": 1, "convert": -1, "cvt": -1, "val": 1, "num": 1, "formatnum": 1, "circa": -1,
           "linktext": 1}
_SIGNS = {"spaced ndash": " – ", "snd": " – ", "ndash": "–", "mdash": "—", "spaced mdash": " — ", "emdash": "—",
          "nbsp": " ", "sp": " ", "space": " ", "'": "'", "-": "", "!": "|", "=": "=", "·": " · ", "dot": " · ",
          "c.": "c. ", "ad": "AD", "bc": "BC"}
#: deeper nesting is taken as text
_DEPTH = 60


def plain(markup: str) -> str:
    """Plain text of a page. Paragraphs are separated by a blank line, headings stand on lines of their own."""
    text = _without_comments(markup)
    text = _without_elements(text)
    text = _without_brackets(text)
    text = _EXTERNAL.sub(lambda m: (m[1] or "").lstrip(" \t"), text)
    text = re.sub(r"'{2,5}", "", text)
    text = _TAG.sub("", _BREAK.sub("\n", text))
    text = _LONG_NUMBER.sub(lambda m: f"&#{m[1].lstrip('0')[:20] or '0'};", text)
    text = _MAGIC.sub("", html.unescape(text)).replace("\xa0", " ").replace("\r", "")
    text = _OPENING.sub("(", _BARE.sub("", text))
    return _paragraphs(text)


def _without_comments(text: str) -> str:
    parts, at = [], 0
    while (start := text.find("<!--", at)) >= 0:
        parts.append(text[at:start])
        end = text.find("-->", start + 4)
        if end < 0:
            return "".join(parts)
        at = end + 3
    return "".join((*parts, text[at:]))


def _without_elements(text: str) -> str:
    """Without the elements of `_DROPPED` and what is in them; an element nobody closes loses only its tag."""
    tags = list(_ELEMENT.finditer(text))
    if not tags:
        return text
    closing: dict[str, list[int]] = {}
    for i, tag in enumerate(tags):
        if tag[1]:
            closing.setdefault(tag[2].lower(), []).append(i)
    parts, at, i = [], 0, 0
    while i < len(tags):
        tag = tags[i]
        parts.append(text[at:tag.start()])
        at = tag.end()
        i += 1
        if tag[1] or tag[3].endswith("/"):
            continue
        ends = closing.get(tag[2].lower(), [])
        k = bisect_right(ends, i - 1)
        if k < len(ends):
            i = ends[k] + 1
            at = tags[ends[k]].end()
    return "".join((*parts, text[at:]))


def _without_brackets(text: str) -> str:
    """Templates, tables and links resolved from the inside out, in one pass with a stack."""
    stack: list[tuple[str, list[str]]] = [("", [])]
    at = 0
    for token in _TOKEN.finditer(text):
        word = token[0].strip(" :")
        stack[-1][1].append(text[at:token.start()])
        at = token.end()
        if word in ("{{", "[[", "{|") and len(stack) <= _DEPTH:
            stack.append((word, []))
            continue
        opener = {"}}": "{{", "]]": "[[", "|}": "{|"}.get(word)
        if opener is None or not any(kind == opener for kind, _ in stack):
            stack[-1][1].append("" if opener else token[0])
            continue
        while stack[-1][0] != opener:                                   # something inside was never closed
            _, lost = stack.pop()
            stack[-1][1].extend(lost)
        _, inner = stack.pop()
        stack[-1][1].append(_resolve(opener, "".join(inner)))
    stack[-1][1].append(text[at:])
    while len(stack) > 1:
        kind, lost = stack.pop()
        stack[-1][1].extend(lost if kind == "[[" else lost[-1:])        # an open template or table: its last piece
    return "".join(stack[0][1])


def _resolve(opener: str, inner: str) -> str:
    if opener == "{|":
        return "\n"
    if opener == "{{":
        name, *args = inner.split("|")
        name = name.strip().lower().replace("_", " ").partition(":")[0]
        if name in _SIGNS:
            return _SIGNS[name]
        which = _INLINE.get(name, 0)
        if name.startswith("lang-") and args:
            which = 1
        given = [a.strip() for a in args if "=" not in a]
        if which < 0:
            return " ".join(given[:2])
        return given[which - 1] if 0 < which <= len(given) else ""
    if _NAMESPACED.match(inner):                            # [[:Category:X]] shows as a link, [[Category:X]] does not
        return ""
    target, bar, label = inner.partition("|")
    if not bar:
        return "" if _INTERWIKI.match(target) and not target.startswith(":") else target.lstrip(":")
    return label.rpartition("|")[2] if "|" in label else label


def _paragraphs(text: str) -> str:
    """Lines trimmed, list marks gone, one blank line between blocks; a heading with nothing below it is dropped."""
    out: list[str] = []
    open_headings: list[tuple[int, int]] = []                   # (level, place in out) of those with no text yet

    def close(level: int) -> None:
        while open_headings and open_headings[-1][0] >= level:
            del out[open_headings.pop()[1]:]

    for raw in text.split("\n"):
        line = " ".join(raw.split())
        level = len(line) - len(line.lstrip("="))
        if level and line.endswith("=") and (title := line.strip("= ")):
            close(level)
            if out and out[-1]:
                out.append("")
            open_headings.append((level, len(out)))
            out += [title, ""]
            continue
        line = line.lstrip("*#:; ")
        if line.startswith(("|", "!")):                         # what is left of a broken table
            line = ""
        if line:
            open_headings.clear()
        if line or (out and out[-1]):
            out.append(line)
    close(0)
    return "\n".join(out).strip()
