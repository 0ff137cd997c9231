"""Converts MediaWiki markup to text with Markdown's headings, lists and tables, in time linear in the markup's length.

These elements are kept: running text, headings, lists, labels of links, formulas ($TeX$), code (in fences), tables of
data (class `wikitable`), and the text of inline templates. These are removed: references, other templates and tables,
files and categories, galleries, comments, magic words. The rules are those of WikiExtractor, except that elements which
FineWiki keeps are kept, too (https://www.mediawiki.org/wiki/Help:Formatting).
"""

from __future__ import annotations

import html
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator

from stages.text.placeholders import MARKS, Placeholders, without_stand_ins

#: elements that are removed with their content
_DROPPED = ("ref", "references", "gallery", "timeline", "score", "style", "imagemap", "templatestyles", "hiero",
            "graph", "maplink", "mapframe", "categorytree", "section", "table", "inputbox", "indicator", "noinclude")
_ELEMENT = re.compile(rf"<(/?)({'|'.join(_DROPPED)})\b([^<>]*)>", re.IGNORECASE)
#: elements whose content is not parsed as markup
_VERBATIM = re.compile(r"<(/?)(nowiki|math|chem|ce|syntaxhighlight|source|pre)\b([^<>]*)>", re.IGNORECASE)
_LANGUAGE = re.compile(r"\blang\s*=\s*[\"']?([A-Za-z0-9+#-]{1,20})")
#: stands for the `=` that {{=}} writes, so that it is not taken for the one after an argument's name
_EQUALS = MARKS[0]
_TOKEN = re.compile(r"\{\{|\}\}|\[\[|\]\]|^[ :]*\{\||^ *\|\}(?!\})", re.MULTILINE)
#: names of namespaces whose links show nothing in the text: in English and as the large wikis call or called them; a
#: dump names those of its own wiki (`hidden_in`)
_HIDDEN_NAMES = (
    "file", "image", "media", "category", "datei", "bild", "kategorie", "fichier", "catégorie", "archivo", "imagen",
    "categoría", "ficheiro", "arquivo", "imagem", "categoria", "immagine", "bestand", "afbeelding", "plik", "grafika",
    "kategoria", "fil", "billede", "kategori", "tiedosto", "kuva", "luokka", "soubor", "kép", "fájl", "kategória",
    "dosya", "resim", "berkas", "gambar", "tập tin", "hình", "thể loại", "файл", "изображение", "категория",
    "зображення", "категорія", "αρχείο", "κατηγορία", "fitxer", "imatge", "ファイル", "画像", "カテゴリ",
    "文件", "檔案", "图像", "圖像", "分类", "分類", "파일", "그림", "분류", "ملف", "صورة", "تصنيف", "پرونده",
    "تصویر", "رده", "קובץ",
    "קטגוריה")
_OTHER_NAMESPACES = re.compile(r"\s*(?:template|special|wikipedia|wikt|portal|help|module|draft|user|project)"
                               r"(?: talk)?\s*:", re.IGNORECASE)
_INTERWIKI = re.compile(r"(?:[a-z]{2,3}(?:-[a-z]{1,8}){0,2}|simple):\S")
#: #REDIRECT [[target]] in any language, followed only by templates and categories
_REDIRECT = re.compile(r"\s*#\s{0,9}[^\W\d]{2,30}\s{0,9}:?\s{0,9}\[\[[^\[\]\n]{1,300}\]\]\s*"
                       r"(?:(?:\{\{[^{}]{0,300}\}\}|\[\[[^\[\]\n]{1,300}\]\])\s*){0,20}\Z")
#: language variants (Chinese, Serbian), of which each reader sees one: -{zh-hans:甲; zh-hant:乙}-, -{kept as it is}-
_VARIANTS = re.compile(r"-\{(?:([A-Za-z+;-]{0,20})\|)?([^{}]{0,2000})\}-")
#: One blank is matched before the label, which may itself begin with blanks: if two parts of the pattern matched
#: blanks, the search would try every way to divide the blanks between them.
_EXTERNAL = re.compile(r"\[(?:https?:|ftp:|mailto:|//)[^\s\[\]]{1,2048}(?:[ \t]([^\[\]\n]*))?\]")
#: a character reference of this many digits names no character, and Python refuses to read thousands of digits
_LONG_NUMBER = re.compile(r"&#([0-9]{20,});?")
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,500}>")
_BREAK = re.compile(r"<(?:br|p|/p|div|/div|blockquote|/blockquote|poem|/poem)\b[^<>]{0,500}>", re.IGNORECASE)
_BARE = re.compile(r"\((?:[\s,;:/]|or\b)*\)")                           # brackets that only held templates
_OPENING = re.compile(r"\(\s*(?:[,;:]\s*)+")
_CLOSING = re.compile(r"(?:[,;][ \t]?){1,9}(?=\))")
_COMMAS = re.compile(r",(?:[ \t]*,)+")
_LOOSE = re.compile(r" +(?=\)|[,.](?:\s|$))|(?<=\() +")                     # blanks around removed templates
_RAISED = re.compile(r"<(su[pb])>([^<>]{0,60})</su[pb]>", re.IGNORECASE)
_ORDINAL = re.compile(r"(?:st|nd|rd|th|er?|o|a|[a-z]{3,})", re.IGNORECASE)
_HIGH = str.maketrans("0123456789+-−=()ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿⁱ")
_LOW = str.maketrans("0123456789+-−=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎")
_LIST = re.compile(r"[*#:;][*#:; ]*")
_MAGIC = re.compile(r"__[A-Z]{3,20}__")
#: templates whose text belongs to the sentence: which argument holds it (-1: the first two, -9: all, joined by spaces)
_INLINE = {"lang": 2, "transl": 2, "transliteration": 2, "nowrap": 1, "nobold": 1, "small": 1, "big": 1, "abbr": 1,
           "em": 1, "strong": 1, "smallcaps": 1, "sc": 1, "visible anchor": 1, "vanchor": 1, "quote": 1,
           "blockquote": 1, "cquote": 1, "convert": -1, "cvt": -1, "val": 1, "num": 1, "formatnum": 1, "circa": -1,
           "linktext": 1, "math": 1, "mvar": 1, "bigmath": 1, "unicode": 1, "nts": 1, "ill": 1,
           "interlanguage link": 1, "tooltip": 1, "sic": 1, "not a typo": 1, "as written": 1, "flag": 1,
           "flagcountry": 1, "ship": -1, "sclass": 1, "color": 2, "resize": 2, "script": 2, "chem2": 1, "angbr": 1,
           "langx": 2, "nq": 1, "qi": 1, "var": 1, "keypress": 1, "code": 1, "mono": 1, "samp": 1, "kbd": 1, "char": 1,
           "polytonic": 1, "quotation": 1, "midsize": 1, "nobr": 1, "respell": -1, "sortname": -1, "quote box": 1,
           "\"": 1, "cita": 1, "unité": -1, "unite": -1, "unidad": -1, "nombre": 1, "date": -9, "date-": -9,
           "lc": 1, "uc": 1, "ucfirst": 1, "lcfirst": 1, "us$": 1, "usd": 1, "gbp": 1, "eur": 1, "£": 1, "€": 1}
_MONEY = {"us$": "$", "usd": "$", "gbp": "£", "£": "£", "eur": "€", "€": "€"}
#: words between the numbers of a conversion
_RANGE = {"to": " to ", "-": "–", "–": "–", "and": " and ", "or": " or ", "x": " × ", "by": " by ", "×": " × "}
#: the name of a named argument
_NAMED = re.compile(r"\s*([\w -]{1,40}?)\s*=")
_SIGNS = {"spaced ndash": " – ", "snd": " – ", "ndash": "–", "mdash": "—", "spaced mdash": " — ", "emdash": "—",
          "nbsp": " ", "sp": " ", "space": " ", "'": "'", "-": "", "!": "|", "=": _EQUALS, "·": " · ", "dot": " · ",
          "c.": "c. ", "ad": "AD", "bc": "BC", "okina": "ʻ", "pi": "π", "thinsp": " ", "hairsp": " ", "en dash": "–",
          "em dash": "—", "snds": " – ", "times": "×", "minus": "−", "bull": " • ", "slash": "/", "pipe": "|",
          "sterling": "£", "euro": "€", "degree": "°", "prime": "′"}
#: brackets nested deeper than this are left as text
_DEPTH = 60
#: most rows, columns and characters of a table; larger tables are removed
_ROWS, _COLUMNS, _TABLE = 300, 40, 30_000
#: a cell of nothing but attributes, whose value came from a template
_ATTRIBUTES = re.compile(r"\s*+(?:[A-Za-z-]{3,20}+\s*+=\s*+(?:\"[^\"|]*+\"|[^\s\"|]++)\s*+)++")
_SPAN = re.compile(r"\b(col|row)span\s{0,3}=\s{0,3}[\"']?([1-9][0-9]{0,3})", re.IGNORECASE)


def hidden_in(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the beginning of links to files and categories. `names` are the names that the wiki
    gives to the namespaces of files and categories. The names in English and other large wikis are always included."""
    alternatives = sorted({*_HIDDEN_NAMES, *(name.lower() for name in names if name)},
                          key=lambda name: (-len(name), name))
    return re.compile(rf"\s*(?:{'|'.join(map(re.escape, alternatives))})\s*:", re.IGNORECASE)


HIDDEN = hidden_in(())


def plain(markup: str, hidden: re.Pattern[str] = HIDDEN) -> str:
    """Convert the MediaWiki markup of a page to text with Markdown's headings, lists and tables. A blank line separates
    paragraphs. `hidden` matches the beginning of links that are not shown (`hidden_in`)."""
    placeholders = Placeholders()
    text = _without_comments(without_stand_ins(markup))
    text = _without_elements(text, _VERBATIM, lambda name, facts, inner: _verbatim(name, facts, inner, placeholders))
    text = _without_elements(text, _ELEMENT, lambda name, facts, inner: "")
    text = _VARIANTS.sub(_variant, text) if "-{" in text else text
    text = _paragraphs(_inline(_without_brackets(text, placeholders, hidden)))
    return placeholders.restored(text, 2)                       # a table may hold formulas


def is_redirect(markup: str) -> bool:
    return _REDIRECT.match(markup) is not None


def _variant(m: re.Match[str]) -> str:
    """Return the text to show for MediaWiki's markup for language variants, `-{…}-`, which `m` matches. It is the first
    of several variants, or the text that is the same in all variants. Returns "" for a conversion rule, which shows no
    text."""
    flags, content = (m[1] or "").upper(), m[2]
    if any(flag in flags for flag in "HT-D") and not flags.startswith("ZH"):
        return ""
    first = content.split(";", 1)[0]
    name, colon, value = first.partition(":")
    return value.strip() if colon and re.fullmatch(r"\s*[a-z]{2}(?:-[a-z]{2,8})?\s*", name) else content


def _inline(text: str) -> str:
    """Return a text without the markup of external links, emphasis, tags and entities. Labels of links and contents of
    tags stay, and entities become characters."""
    text = _EXTERNAL.sub(lambda m: (m[1] or "").lstrip(" \t"), text)
    text = re.sub(r"'{2,5}", "", text)
    text = _TAG.sub("", _BREAK.sub("\n", _RAISED.sub(_super_or_subscript, text)))
    text = _LONG_NUMBER.sub(lambda m: f"&#{m[1].lstrip('0')[:20] or '0'};", text)
    text = _MAGIC.sub("", html.unescape(text)).replace("\xa0", " ").replace("\r", "")
    text = _OPENING.sub("(", _BARE.sub("", text.replace(_EQUALS, "=")))
    return _COMMAS.sub(",", _CLOSING.sub("", text))


def _super_or_subscript(m: re.Match[str]) -> str:
    """Return the text for a superscript or subscript, which `m` matches: Unicode characters where they exist
    (10<sup>6</sup> → 10⁶, H<sub>2</sub>O → H₂O), otherwise a sign (x<sub>max</sub> → x_max). An ordinal stays a word
    (19<sup>th</sup> → 19th)."""
    content, low = m[2].strip(), m[1].lower() == "sub"
    script = content.rstrip(",;:")
    if script != content:
        return (_super_or_subscript(_RAISED.fullmatch(f"<{m[1]}>{script}</{m[1]}>") or m) + content[len(script):]
                if script else content)
    if not script:
        return ""
    signs = script.translate(_LOW if low else _HIGH)
    if not any(a == b for a, b in zip(script, signs)):
        return signs
    if not low and _ORDINAL.fullmatch(script):
        return script
    return ("_" if low else "^") + (script if script.isalnum() else f"({script})")


def _verbatim(name: str, facts: str, inner: str, placeholders: Placeholders) -> str:
    """Return the placeholder for an element whose content is not parsed as markup, such as code or a formula.
    `placeholders` stores the content, written as Markdown. `name` is the element's name, `facts` its attributes,
    `inner` its content."""
    content = inner if name in ("source", "syntaxhighlight") else html.unescape(_LONG_NUMBER.sub("", inner))
    if name == "math":
        mark = "$$" if "block" in facts else "$"
        content = f"{mark}{' '.join(content.split())}{mark}" if content.strip() else ""
    elif name in ("syntaxhighlight", "source", "pre") and "\n" in content.strip():
        language = _LANGUAGE.search(facts)
        content = f"```{language[1].lower() if language else ''}\n{content.strip(chr(10)).rstrip()}\n```"
        return f"\n\n{placeholders.keep(content)}\n\n"
    return placeholders.keep(content)


def _without_comments(text: str) -> str:
    parts, at = [], 0
    while (start := text.find("<!--", at)) >= 0:
        parts.append(text[at:start])
        end = text.find("-->", start + 4)
        if end < 0:
            return "".join(parts)
        at = end + 3
    return "".join((*parts, text[at:]))


def _without_elements(text: str, pattern: re.Pattern[str], replacement: Callable[[str, str, str], str]) -> str:
    """Replaces each element whose tags `pattern` matches with the result of `replacement(name, attributes, content)`.
    An element without an end tag loses only its start tag.
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
            parts.append(replacement(tag[2].lower(), tag[3], text[at:tags[ends[k]].start()]))
            at = tags[ends[k]].end()
    return "".join((*parts, text[at:]))


def _without_brackets(text: str, placeholders: Placeholders, hidden: re.Pattern[str]) -> str:
    """Replaces templates, tables and links with the text that they show, from the innermost outwards, in one pass with
    a stack."""
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
            _, unclosed = stack.pop()
            stack[-1][1].extend(unclosed)
        _, inner = stack.pop()
        if opener != "{|":
            replacement = _template("".join(inner)) if opener == "{{" else _link("".join(inner), hidden)
        else:
            replacement = "\n" if len(stack) > 1 else _table("".join(inner), placeholders)
        stack[-1][1].append(replacement)
    stack[-1][1].append(text[at:])
    while len(stack) > 1:
        kind, unclosed = stack.pop()
        # of an unclosed template or table, only the text after its last inner brackets stays
        stack[-1][1].extend(unclosed if kind == "[[" else unclosed[-1:])
    return "".join(stack[0][1])


def _template(inner: str) -> str:
    """Returns the text that a template adds to a sentence; "" for most templates. `inner` is the text between {{ and
    }}."""
    name, *args = inner.split("|")
    name = name.strip().lower().replace("_", " ")
    if ":" in name and not name.startswith("#"):                # {{formatnum:1234}}
        args = [inner.partition("|")[0].partition(":")[2], *args]
        name = name.partition(":")[0]
    if name in _SIGNS:
        return _SIGNS[name]
    which = _INLINE.get(name, 0)
    if name.startswith("lang-") and args:
        which = 1
    named = {m[1].lower(): a[m.end():].strip() for a in args if (m := _NAMED.match(a)) and not m[1].isdigit()}
    positional = [(a[m.end():] if m else a).strip() for a in args if not (m := _NAMED.match(a)) or m[1].isdigit()]
    if name in ("convert", "cvt") and len(positional) > 3 and positional[1] in _RANGE:
        return f"{positional[0]}{_RANGE[positional[1]]}{positional[2]} {positional[3]}"
    if which < 0:
        return " ".join(positional[:2] if which == -1 else positional)
    if name in ("frac", "sfrac", "fraction") and positional:
        return "/".join(positional) if len(positional) < 3 else f"{positional[0]} {positional[1]}/{positional[2]}"
    if name in ("sub", "sup") and positional:
        return f"<{name}>{positional[0]}</{name}>"
    if name == "as of" and positional:
        return "As of " + positional[0]
    if name in ("nihongo", "nihongo2") and positional:
        return positional[0] + (f" ({', '.join(x for x in positional[1:3] if x)})" if any(positional[1:3]) else "")
    if name == "s-" and positional:
        return f"{positional[0]}e siècle"
    if name in ("chem", "e", "esp") and positional:
        return "".join(a.translate(_LOW) for a in positional) if name == "chem" else f"×10<sup>{positional[0]}</sup>"
    if 0 < which <= len(positional):
        return _MONEY.get(name, "") + positional[which - 1]
    return next((named[key] for key in ("text", "quote", "content") if which and key in named), "")


def _link(inner: str, hidden: re.Pattern[str]) -> str:
    """Returns the label of a link, or the target of a link without a label. `inner` is the text between [[ and ]].

    Returns "" for links to files and categories. Also returns "" for links without a label to other wikis, templates,
    talk pages and the like. A colon in front makes a link an ordinary one.
    """
    if hidden.match(inner):
        return ""
    target, bar, label = inner.partition("|")
    if not bar:
        aside = _INTERWIKI.match(target) or _OTHER_NAMESPACES.match(target)
        return "" if aside and not target.startswith(":") else target.lstrip(":")
    return label.rpartition("|")[2] if "|" in label else label


def _table(inner: str, placeholders: Placeholders) -> str:
    """Return the placeholder for a table of data, which `placeholders` stores as Markdown. Any other table (layout,
    boxes) becomes a line break. `inner` is the text between {| and |}, in which links and templates were replaced with
    their text."""
    head, _, body = inner.partition("\n")
    if "wikitable" not in head or len(body) > _TABLE:
        return "\n"
    rows: list[list[tuple[str, str]]] = [[]]                    # (attributes, value) of the cells of each row
    for line in body.split("\n"):
        stripped = line.strip()
        if stripped.startswith(("|-", "|+")):
            rows.append([])
        elif stripped.startswith(("|", "!")):
            for cell in re.split(r"\|\||!!" if stripped[0] == "!" else r"\|\|", stripped[1:]):
                facts, bar, value = cell.partition("|")
                rows[-1].append((facts, value) if bar and "=" in facts else (cell, "") if "=" in cell and
                                _ATTRIBUTES.fullmatch(cell) else ("", cell))
        elif rows[-1] and stripped:
            facts, value = rows[-1][-1]
            rows[-1][-1] = facts, value + " " + stripped.lstrip("*#:; ")
    cells = [row for row in _rows_with_spans(rows) if any(row)]
    wide = max(map(len, cells), default=0)
    if len(cells) < 2 or len(cells) > _ROWS or not 2 <= wide <= _COLUMNS:
        return "\n"
    lines = ["| " + " | ".join([*row, *[""] * (wide - len(row))]) + " |" for row in cells]
    return f"\n\n{placeholders.keep(chr(10).join([lines[0], '|' + '---|' * wide, *lines[1:]]))}\n\n"


def _rows_with_spans(rows: list[list[tuple[str, str]]]) -> Iterator[list[str]]:
    """Yields the rows of a table as lists of cells that each fill one row and one column. A cell that spans rows is
    repeated in each of them. A cell that spans columns is followed by empty cells."""
    repeats: dict[int, tuple[int, str]] = {}                    # column → (rows that still repeat a value, the value)
    for cells in rows:
        row: list[str] = []

        def above(row: list[str] = row) -> None:
            while (repeat := repeats.get(len(row), (0, "")))[0]:
                repeats[len(row)] = repeat[0] - 1, repeat[1]
                row.append(repeat[1])

        for facts, value in cells[:_COLUMNS]:
            cell = " ".join(_inline(value).split()).replace("|", "/")
            spans = {m[1].lower(): min(int(m[2]), _COLUMNS if m[1].lower() == "col" else _ROWS)
                     for m in _SPAN.finditer(facts)}
            above()
            for k in range(spans.get("col", 1)):
                if spans.get("row", 1) > 1:
                    repeats[len(row)] = spans["row"] - 1, "" if k else cell
                row.append("" if k else cell)
        if cells:
            above()
            yield row


def _paragraphs(text: str) -> str:
    """Writes a text without inline markup as Markdown. Lines are trimmed, headings and list items get Markdown's marks,
    and one blank line separates blocks. Headings without text below them are dropped."""
    out: list[str] = []
    counts: list[int] = []                                      # items so far at each depth of the current list
    open_headings: list[tuple[int, int]] = []                   # (level, index in `out`) of headings with no text yet

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
            out += [f"{'#' * min(level, 6)} {title}", ""]
            continue
        marks = _LIST.match(line)
        line = line[marks.end():].lstrip(" ,") if marks else line
        mark, counts = _mark(marks[0].replace(" ", "") if marks and line else "", counts)
        if line.startswith(("|", "!")) or (len(line) < 9 and line and not line.strip(" .,;:()[]-–*")):
            line = ""                                           # remains of a broken table or a citation
        if line:
            open_headings.clear()
            line = mark + line
        if line or (out and out[-1]):
            out.append(line)
    close(0)
    return "\n".join(out).strip()


def _mark(marks: str, counts: list[int]) -> tuple[str, list[int]]:
    """Return Markdown's mark for a list item, and the new counts. `marks` are the item's marks in wikitext, such as
    `*#`. `counts` holds the number of items so far at each depth of the list."""
    depth = sum(c in "*#" for c in marks)
    if not depth:
        return "", counts if marks else []                      # a line of : between items continues their list
    counts = [*counts, *[0] * depth][:depth]
    if marks[-1] in ":;":                                       # continues the item before
        return "  " * min(depth, 8), counts
    numbered = marks.endswith("#")
    counts[-1] = counts[-1] + 1 if numbered else 0
    return "  " * min(depth - 1, 8) + (f"{counts[-1]}. " if numbered else "- "), counts
