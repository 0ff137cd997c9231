r"""Replaces the formulas of an HTML page with their TeX source, before an extraction engine reads the page. The TeX is
written as `\(…\)` or `\[…\]`, and the rendered form is removed.

Pages hold the TeX of a formula beside its rendered form, in one of these places:

- `<script type="math/tex">` (MathJax 2)
- an annotation or the `alttext` of MathML (KaTeX, Wikipedia, arXiv's HTML)
- the `alt` of an image (WordPress, older Wikipedia)

The work on a page is bounded: all searches run forwards, no stretch is searched twice, and the number of tags read in
rendered formulas is limited.
"""

from __future__ import annotations

import html
import re

from stages.extract.html.metadata import unescape

_LIKELY = re.compile(r"<math[\s>]|math/tex|\bmwe-math|class=[\"'][^\"'<>]{0,100}\b(?:latex|tex)\b", re.IGNORECASE)
#: Every page that `_LIKELY` matches contains one of these; searching for them takes half the time.
_WORDS, _TEX = ("<math", "math/tex", "mwe-math"), re.compile(r"tex\b")
_FORMULA = re.compile(
    r"<script[^<>]{0,200}?\btype\s*=\s*[\"']math/tex(?P<script>[^\"'<>]{0,40})[\"'][^<>]{0,200}>"
    r"|<math\b(?P<attributes>[^<>]{0,4000})>"
    r"|<img\b(?P<image>[^<>]{0,8000})>", re.IGNORECASE)
#: patterns that are searched for after the beginning of a formula
_NEXT = {"math": re.compile(r"</math\s*>", re.IGNORECASE), "script": re.compile(r"</script\s*>", re.IGNORECASE),
         "annotation": re.compile(r"<annotation\b[^<>]{0,200}\bencoding\s*=\s*[\"']application/x-tex[\"'][^<>]{0,200}>"
                                  r"([^<]{1,20000})</annotation", re.IGNORECASE)}
_ATTRIBUTE = {name: re.compile(rf"(?:^|\s){name}\s*=\s*(?:\"([^\"]*)\"|'([^']*)')", re.IGNORECASE)
              for name in ("alttext", "alt", "class", "display")}
_HIDDEN = re.compile(r"<span\b[^<>]{0,400}display\s*:\s*none[^<>]{0,400}>\s*\Z", re.IGNORECASE)
_IMAGE_CLASS = re.compile(r"\b(?:latex|tex|mwe-math-fallback-image-\w+)\b", re.IGNORECASE)
_RENDERED = re.compile(r"<(span|div)\b[^<>]{0,400}\bclass\s*=\s*[\"'](?:katex-html|MathJax(?:_\w+)?)\b[^<>]{0,400}>",
                       re.IGNORECASE)
_TAGS = {tag: re.compile(rf"<(/?){tag}\b", re.IGNORECASE) for tag in ("span", "div")}
_STYLE = re.compile(r"\{\\(?:display|text)style\s(.*)\}\s*\Z", re.DOTALL)
#: most characters between the beginning and the end of a formula, and of one rendered formula
_LONGEST = 100_000
#: most tags examined in one page to find the ends of rendered formulas
_MOST_TAGS = 300_000


def formulas_as_tex(page: str) -> str:
    """Returns the page with TeX in place of its formulas. A page without formulas is returned unchanged."""
    lower = page.lower()
    if not (any(word in lower for word in _WORDS) or _TEX.search(lower)) or _LIKELY.search(page) is None:
        return page
    page = _without_rendered(page)
    next_matches: dict[str, re.Match[str] | None] = {}

    def following(name: str, at: int) -> re.Match[str] | None:
        """Returns the first match of the pattern `_NEXT[name]` from position `at` on; None when the match begins more
        than `_LONGEST` characters after `at`, or there is none. The last match is cached, so that no stretch of the
        page is searched twice."""
        match = next_matches.get(name)
        if name not in next_matches or (match is not None and match.start() < at):
            match = next_matches[name] = _NEXT[name].search(page, at)
        return match if match is not None and match.start() - at <= _LONGEST else None

    out: list[str] = []
    at = 0
    while (formula := _FORMULA.search(page, at)) is not None:
        before, after = page[at:formula.start()], formula.end()
        tex, display = "", False
        if formula["script"] is not None:
            end = following("script", after)
            if end is not None:
                tex, display = page[after:end.start()], "display" in formula["script"].lower()
                after = end.end()
        elif formula["attributes"] is not None:
            end = following("math", after)
            if end is not None:
                inner = following("annotation", after)
                tex = unescape(inner[1]) if inner is not None and inner.end() <= end.start() else \
                    _attribute(formula["attributes"], "alttext")
                display = _attribute(formula["attributes"], "display").lower() == "block"
                after = end.end() if tex.strip() else after
                hidden = _HIDDEN.search(before, max(0, len(before) - 1000)) if tex.strip() else None
                if hidden is not None:
                    before = before[:hidden.start()]
                    closing = re.compile(r"\s*</span\s*>", re.IGNORECASE).match(page, after)
                    after = closing.end() if closing else after
        elif _IMAGE_CLASS.search(_attribute(formula["image"], "class")):
            fallback = "mwe-math" in formula["image"] and bool(out) and out[-1].endswith(("\\)", "\\]"))
            if fallback and before.strip().lower() in ("", "</span>"):
                at = after                                 # the picture of the formula just written
                out.append(before)
                continue
            tex = _attribute(formula["image"], "alt").strip("$")
        tex = " ".join(tex.split())
        if (style := _STYLE.match(tex)) is not None:
            tex = style[1].strip()
        if tex:
            tex = html.escape(tex, quote=False)
            out += [before, f"<br>\\[{tex}\\]<br>" if display else f"\\({tex}\\)"]
        else:
            out += [before, page[formula.start():after]]
        at = after
    out.append(page[at:])
    return "".join(out)


def _attribute(attributes: str, name: str) -> str:
    match = _ATTRIBUTE[name].search(attributes)
    return unescape(match[1] if match[1] is not None else match[2] or "") if match else ""


def _without_rendered(page: str) -> str:
    """Returns the page without the elements that show a rendered formula (KaTeX, MathJax)."""
    out: list[str] = []
    at, remaining = 0, _MOST_TAGS
    while remaining > 0 and (match := _RENDERED.search(page, at)) is not None:
        out.append(page[at:match.start()])
        at, tags_read = _end_of(page, match, remaining)
        remaining -= tags_read
    return "".join([*out, page[at:]]) if out else page


def _end_of(page: str, start: re.Match[str], most: int) -> tuple[int, int]:
    """Returns (position after the element whose start tag is `start`; number of tags read to find it). If the end of
    the element is not within `_LONGEST` characters and `most` tags, the position is the end of the start tag."""
    depth = tags_read = 0
    for tag in _TAGS[start[1].lower()].finditer(page, start.start(), start.start() + _LONGEST):
        depth += -1 if tag[1] else 1
        tags_read += 1
        if depth == 0:
            return page.find(">", tag.end()) + 1 or len(page), tags_read
        if tags_read > most:
            break
    return start.end(), tags_read
