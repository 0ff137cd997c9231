"""MediaWiki markup → plain text, in time linear in the markup.

Kept: running text, headings, lists (with their marks), labels of links, formulas ($TeX$), code (fenced), tables of data
(class `wikitable`, as Markdown), the text of inline templates. Gone: references, other templates and tables, files and
categories, galleries, comments, magic words. (WikiExtractor's rules, and what FineWiki keeps beyond them;
https://www.mediawiki.org/wiki/Help:Formatting)
"""

from __future__ import annotations

import html
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator

#: elements whose content is no running text
_DROPPED = ("ref", "references", "gallery", "timeline", "score", "style", "imagemap", "templatestyles", "hiero",
            "graph", "maplink", "mapframe", "categorytree", "section", "table", "inputbox", "indicator", "noinclude")
_ELEMENT = re.compile(rf"<(/?)({'|'.join(_DROPPED)})\b([^<>]*)>", re.IGNORECASE)
#: elements whose content is no markup
_VERBATIM = re.compile(r"<(/?)(nowiki|math|chem|ce|syntaxhighlight|source|pre)\b([^<>]*)>", re.IGNORECASE)
_LANGUAGE = re.compile(r"\blang\s*=\s*[\"']?([A-Za-z0-9+#-]{1,20})")
#: stand-ins for what is put back at the end
_STAND_INS = dict.fromkeys((0xE000, 0xE001))
_KEPT = re.compile("\ue000([0-9]{1,9})\ue001")
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
_LOOSE = re.compile(r" +(?=\)|[,.](?:\s|$))|(?<=\() +")                     # blanks around templates that are gone
_RAISED = re.compile(r"<(su[pb])>([^<>]{0,60})</su[pb]>", re.IGNORECASE)
_ORDINAL = re.compile(r"(?:st|nd|rd|th|er?|o|a|[a-z]{3,})", re.IGNORECASE)
_HIGH = str.maketrans("0123456789+-−=()ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿⁱ")
_LOW = str.maketrans("0123456789+-−=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎")
_LIST = re.compile(r"[*#:;][*#:; ]*")
_MAGIC = re.compile(r"__[A-Z]{3,20}__")
#: templates whose text belongs to the sentence: which argument says it (-1: all, joined by spaces)
_INLINE = {"lang": 2, "transl": 2, "transliteration": 2, "nowrap": 1, "nobold": 1, "small": 1, "big": 1, "abbr": 1,
           "em": 1, "strong": 1, "smallcaps": 1, "sc": 1, "visible anchor": 1, "vanchor": 1, "quote": 1,
           "blockquote": 1, "cquote": 1, "convert": -1, "cvt": -1, "val": 1, "num": 1, "formatnum": 1, "circa": -1,
           "linktext": 1, "math": 1, "mvar": 1, "bigmath": 1, "unicode": 1, "nts": 1, "ill": 1,
           "interlanguage link": 1, "tooltip": 1, "sic": 1, "not a typo": 1, "as written": 1, "flag": 1,
           "flagcountry": 1, "ship": -1, "sclass": 1, "color": 2, "resize": 2, "script": 2, "chem2": 1, "angbr": 1,
           "langx": 2, "nq": 1, "qi": 1, "var": 1, "keypress": 1, "code": 1, "mono": 1, "samp": 1, "kbd": 1, "char": 1,
           "polytonic": 1, "quotation": 1, "midsize": 1, "nobr": 1, "respell": -1, "sortname": -1}
_SIGNS = {"spaced ndash": " – ", "snd": " – ", "ndash": "–", "mdash": "—", "spaced mdash": " — ", "emdash": "—",
          "nbsp": " ", "sp": " ", "space": " ", "'": "'", "-": "", "!": "|", "=": "=", "·": " · ", "dot": " · ",
          "c.": "c. ", "ad": "AD", "bc": "BC", "okina": "ʻ", "pi": "π", "thinsp": " ", "hairsp": " ", "en dash": "–",
          "em dash": "—", "snds": " – ", "times": "×", "minus": "−", "bull": " • ", "slash": "/", "pipe": "|",
          "sterling": "£", "euro": "€", "degree": "°", "prime": "′"}
#: deeper nesting is taken as text
_DEPTH = 60
#: rows, columns and characters of a table; beyond: gone
_ROWS, _COLUMNS, _TABLE = 300, 40, 30_000
_SPAN = re.compile(r"\b(col|row)span\s{0,3}=\s{0,3}[\"']?([1-9][0-9]{0,3})", re.IGNORECASE)


def plain(markup: str) -> str:
    """Plain text of a page. Paragraphs are separated by a blank line, headings stand on lines of their own."""
    kept: list[str] = []
    text = _without_comments(markup.translate(_STAND_INS))
    text = _without_elements(text, _VERBATIM, lambda name, facts, inner: _verbatim(name, facts, inner, kept))
    text = _without_elements(text, _ELEMENT, lambda name, facts, inner: "")
    text = _paragraphs(_inline(_without_brackets(text, kept)))
    for _ in range(2):                                          # a table may hold formulas
        text = _KEPT.sub(lambda m: kept[int(m[1])], text)
    return text


def _inline(text: str) -> str:
    """Without external links, emphasis, tags and entities."""
    text = _EXTERNAL.sub(lambda m: (m[1] or "").lstrip(" \t"), text)
    text = re.sub(r"'{2,5}", "", text)
    text = _TAG.sub("", _BREAK.sub("\n", _RAISED.sub(_raised, text)))
    text = _LONG_NUMBER.sub(lambda m: f"&#{m[1].lstrip('0')[:20] or '0'};", text)
    text = _MAGIC.sub("", html.unescape(text)).replace("\xa0", " ").replace("\r", "")
    return _OPENING.sub("(", _BARE.sub("", text))


def _raised(m: re.Match[str]) -> str:
    """10<sup>6</sup> → 10⁶, H<sub>2</sub>O → H₂O, x<sub>max</sub> → x_max; 19<sup>th</sup> stays a word."""
    said, low = m[2].strip(), m[1].lower() == "sub"
    if not said:
        return ""
    signs = said.translate(_LOW if low else _HIGH)
    if not any(a == b for a, b in zip(said, signs)):
        return signs
    if not low and _ORDINAL.fullmatch(said):
        return said
    return ("_" if low else "^") + (said if said.isalnum() else f"({said})")


def _verbatim(name: str, facts: str, inner: str, kept: list[str]) -> str:
    """What stands for an element whose content is no markup; `kept` gets the content."""
    said = inner if name in ("source", "syntaxhighlight") else html.unescape(_LONG_NUMBER.sub("", inner))
    if name == "math":
        mark = "$$" if "block" in facts else "$"
        said = f"{mark}{' '.join(said.split())}{mark}" if said.strip() else ""
    elif name in ("syntaxhighlight", "source", "pre") and "\n" in said.strip():
        language = _LANGUAGE.search(facts)
        said = f"```{language[1].lower() if language else ''}\n{said.strip(chr(10)).rstrip()}\n```"
        kept.append(said)
        return f"\n\n\ue000{len(kept) - 1}\ue001\n\n"
    kept.append(said)
    return f"\ue000{len(kept) - 1}\ue001"


def _without_comments(text: str) -> str:
    parts, at = [], 0
    while (start := text.find("<!--", at)) >= 0:
        parts.append(text[at:start])
        end = text.find("-->", start + 4)
        if end < 0:
            return "".join(parts)
        at = end + 3
    return "".join((*parts, text[at:]))


def _without_elements(text: str, pattern: re.Pattern[str], instead: Callable[[str, str, str], str]) -> str:
    """With `instead(name, attributes, content)` for the elements a pattern knows; one nobody closes loses only its tag.
    """
    tags = list(pattern.finditer(text))
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
            parts.append(instead(tag[2].lower(), tag[3], text[at:tags[ends[k]].start()]))
            at = tags[ends[k]].end()
    return "".join((*parts, text[at:]))


def _without_brackets(text: str, kept: list[str]) -> str:
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
        if opener != "{|":
            said = _resolve(opener, "".join(inner))
        else:
            said = "\n" if len(stack) > 1 else _table("".join(inner), kept)
        stack[-1][1].append(said)
    stack[-1][1].append(text[at:])
    while len(stack) > 1:
        kind, lost = stack.pop()
        stack[-1][1].extend(lost if kind == "[[" else lost[-1:])        # an open template or table: its last piece
    return "".join(stack[0][1])


def _resolve(opener: str, inner: str) -> str:
    if opener == "{{":
        name, *args = inner.split("|")
        name = name.strip().lower().replace("_", " ").partition(":")[0]
        if name in _SIGNS:
            return _SIGNS[name]
        which = _INLINE.get(name, 0)
        if name.startswith("lang-") and args:
            which = 1
        given = [a.strip().removeprefix("1=") for a in args if "=" not in a or a.lstrip().startswith("1=")]
        if which < 0:
            return " ".join(given[:2])
        if name in ("frac", "sfrac", "fraction") and given:
            return "/".join(given) if len(given) < 3 else f"{given[0]} {given[1]}/{given[2]}"
        if name in ("sub", "sup") and given:
            return f"<{name}>{given[0]}</{name}>"
        if name == "as of" and given:
            return "As of " + given[0]
        if name in ("nihongo", "nihongo2") and given:
            return given[0] + (f" ({', '.join(x for x in given[1:3] if x)})" if any(given[1:3]) else "")
        if name in ("chem", "e", "esp") and given:
            return "".join(given) if name == "chem" else f"×10<sup>{given[0]}</sup>"
        return given[which - 1] if 0 < which <= len(given) else ""
    if _NAMESPACED.match(inner):                            # [[:Category:X]] shows as a link, [[Category:X]] does not
        return ""
    target, bar, label = inner.partition("|")
    if not bar:
        return "" if _INTERWIKI.match(target) and not target.startswith(":") else target.lstrip(":")
    return label.rpartition("|")[2] if "|" in label else label


def _table(inner: str, kept: list[str]) -> str:
    """A table of data as Markdown, kept for later; other tables (layout, boxes) are gone. `inner` is what stands
    between {| and |}, its links and templates resolved."""
    head, _, body = inner.partition("\n")
    if "wikitable" not in head or len(body) > _TABLE:
        return "\n"
    rows: list[list[tuple[str, str]]] = [[]]                    # (attributes, value) of the cells of each row
    for line in body.split("\n"):
        said = line.strip()
        if said.startswith(("|-", "|+")):
            rows.append([])
        elif said.startswith(("|", "!")):
            for cell in re.split(r"\|\||!!" if said[0] == "!" else r"\|\|", said[1:]):
                facts, bar, value = cell.partition("|")
                rows[-1].append((facts, value) if bar and "=" in facts else ("", cell))
        elif rows[-1] and said:
            facts, value = rows[-1][-1]
            rows[-1][-1] = facts, value + " " + said.lstrip("*#:; ")
    cells = [row for row in _spanned(rows) if any(row)]
    wide = max(map(len, cells), default=0)
    if len(cells) < 2 or len(cells) > _ROWS or not 2 <= wide <= _COLUMNS:
        return "\n"
    lines = ["| " + " | ".join([*row, *[""] * (wide - len(row))]) + " |" for row in cells]
    kept.append("\n".join([lines[0], "|" + "---|" * wide, *lines[1:]]))
    return f"\n\n\ue000{len(kept) - 1}\ue001\n\n"


def _spanned(rows: list[list[tuple[str, str]]]) -> Iterator[list[str]]:
    """Rows of plain cells; one that spans rows is said in each, one that spans columns is followed by empty ones."""
    held: dict[int, tuple[int, str]] = {}                       # column → rows to come that repeat a value
    for cells in rows:
        row: list[str] = []

        def above(row: list[str] = row) -> None:
            while (left := held.get(len(row), (0, "")))[0]:
                held[len(row)] = left[0] - 1, left[1]
                row.append(left[1])

        for facts, value in cells[:_COLUMNS]:
            said = " ".join(_inline(value).split()).replace("|", "/")
            spans = {m[1].lower(): min(int(m[2]), _COLUMNS if m[1].lower() == "col" else _ROWS)
                     for m in _SPAN.finditer(facts)}
            above()
            for k in range(spans.get("col", 1)):
                if spans.get("row", 1) > 1:
                    held[len(row)] = spans["row"] - 1, "" if k else said
                row.append("" if k else said)
        if cells:
            above()
            yield row


def _paragraphs(text: str) -> str:
    """Lines trimmed, lists with Markdown's marks, one blank line between blocks; a heading with nothing below it is
    dropped."""
    out: list[str] = []
    counts: list[int] = []                                      # items so far of the list of each depth
    open_headings: list[tuple[int, int]] = []                   # (level, place in out) of those with no text yet

    def close(level: int) -> None:
        while open_headings and open_headings[-1][0] >= level:
            del out[open_headings.pop()[1]:]

    for raw in text.split("\n"):
        line = _LOOSE.sub("", " ".join(raw.split()))
        level = len(line) - len(line.lstrip("="))
        if level and line.endswith("=") and (title := line.strip("= ")):
            close(level)
            if out and out[-1]:
                out.append("")
            open_headings.append((level, len(out)))
            out += [title, ""]
            continue
        marks = _LIST.match(line)
        line = line[marks.end():].lstrip(" ,") if marks else line
        mark, counts = _mark(marks[0].replace(" ", "") if marks and line else "", counts)
        if line.startswith(("|", "!")):                         # what is left of a broken table
            line = ""
        if line:
            open_headings.clear()
            line = mark + line
        if line or (out and out[-1]):
            out.append(line)
    close(0)
    return "\n".join(out).strip()


def _mark(marks: str, counts: list[int]) -> tuple[str, list[int]]:
    """(what stands in front of a list item in Markdown, the counts of items with this one)."""
    depth = sum(c in "*#" for c in marks)
    if not depth:
        return "", counts if marks else []                      # a line of : between items continues their list
    counts = [*counts, *[0] * depth][:depth]
    if marks[-1] in ":;":                                       # more of the item before
        return "  " * min(depth, 8), counts
    numbered = marks.endswith("#")
    counts[-1] = counts[-1] + 1 if numbered else 0
    return "  " * min(depth - 1, 8) + (f"{counts[-1]}. " if numbered else "- "), counts
