r"""The step `latex`, which converts LaTeX source to text, in time linear in the length of the source. Formulas stay in
LaTeX.

The content of a paper is kept: running text, formulas, headings (Markdown's #), lists, theorems, captions, table cells,
listings, pseudo-code, slides. Formulas ($…$, \[…\] and display environments) lose their labels, and the paper's own
macros in them are expanded. Markup for typesetting is removed: comments, the preamble, the bibliography, graphics,
layout commands, labels. (The rules include those that RedPajama used for arXiv:
https://github.com/togethercomputer/RedPajama-Data/tree/rp_v1/data_prep/arxiv.) A reference or citation becomes its
label in brackets. Plain TeX, AMS-TeX and LaTeX 2.09 are read, too.

Nothing recurses without bound: braces are matched once, and the ends of environments and formulas are looked up in
lists. Macro expansion is bounded by counts (`stages.extract.latex.macros`).
"""

from __future__ import annotations

import re

from stages.document import Document
from stages.extract.latex.macros import MACROS, Expansion, set_aside
from stages.extract.latex.scan import Scan
from stages.extract.latex.words import GERMAN, OVERLAID
from stages.stage import Stage, StageConfig, signal
from stages.text.encoding import decode
from stages.text.placeholders import Placeholders, without_stand_ins

_THEOREM = re.compile(r"\\newtheorem\*?\{([A-Za-z]{1,40}\*?)\}(?:\[[^\]\n]{0,60}\])?\{([^{}\n]{1,80})\}")
#: detects the package german, and matches its shorthands
_IS_GERMAN = re.compile(r"\\(?:usepackage|documentstyle|documentclass)[ \t]*"
                        r"(?:\[[^\]]{0,200}german[^\]]{0,200}\]|\{n?german\})")
_SHORTHAND = re.compile("\"([aouAOUs`'<>=~-])")


class Latex(Stage):
    """Converts LaTeX source (`doc.text`, or `doc.raw` if there is no text) to plain text. Formulas stay in LaTeX.

    The paper's title, if the source gives one, goes to `meta.title`, unless `meta` has a title already. Text without
    any command or formula is left unchanged. Reasons for dropping a document: `too_large` (more than `max_chars`
    characters), and `no_text` (the source has no text besides commands).
    """

    name = "latex"
    version = 2
    cost_ms, leaves, edits = 4.0, 0.6, True
    does = "extracts"

    class Config(StageConfig):
        captions: bool = signal(True, "keep captions of figures and tables")
        max_chars: int = signal(16 << 20, "longest source, characters; beyond: too_large", gt=0)

    def process(self, doc: Document) -> str | None:
        source = doc.text or (decode(doc.raw, doc.charset)[0] if doc.raw else "")
        if len(source) > self.config.max_chars:
            return "too_large"
        if "\\" not in source and "$" not in source:
            doc.text = source
        else:
            doc.text, title = plain(source, captions=self.config.captions)
            if title and "title" not in doc.meta:
                doc.meta["title"] = title
        return None if doc.text.strip() else "no_text"


def plain(source: str, *, captions: bool = True) -> tuple[str, str]:
    """Converts a LaTeX source to plain text. Returns (text; title of the paper, "" if the source gives none). Captions
    of figures and tables are left out unless `captions` is set."""
    placeholders = Placeholders()                               # formulas and listings, put back at the end
    text = set_aside(without_stand_ins(source.replace("\r\n", "\n").replace("\r", "\n")), placeholders.keep)
    theorems = dict(_THEOREM.findall(text)[:MACROS])
    if "{beamer}" in text or "\\begin{frame}" in text:
        text = OVERLAID.sub(r"\1", text)                        # \item<2-> → \item
    if _IS_GERMAN.search(text, 0, 20_000):
        text = _SHORTHAND.sub(lambda m: GERMAN[m[1]], text)
    text, title = Scan(Expansion(text).run(), theorems, captions, placeholders).run()
    # two levels, since a formula may hold a \verb
    return without_stand_ins(placeholders.restored(text, 2)).strip(), without_stand_ins(placeholders.restored(title, 2))
