"""What LaTeX commands and environments do, as far as text is concerned (LaTeX2e, amsmath, natbib, hyperref)."""

from __future__ import annotations

#: environments that are formulas
MATH = frozenset("""
math displaymath equation align alignat flalign gather multline eqnarray xalignat dmath
""".split())  # noqa: SIM905
#: environments that go with all that is in them
SKIPPED = frozenset("""
thebibliography comment filecontents tikzpicture pspicture picture CCSXML keywords IEEEkeywords asy forest
""".split())  # noqa: SIM905
#: environments whose content is no LaTeX
LISTINGS = ("verbatim", "Verbatim", "lstlisting", "minted", "alltt")
LISTS = frozenset({"itemize", "enumerate", "description"})
#: tables, and how many arguments they begin with
TABLES = {"tabular": 1, "tabularx": 2, "tabulary": 2, "longtable": 1, "array": 1, "supertabular": 1}
#: other environments that begin with arguments
BOXES = {"minipage": 1, "wrapfigure": 2, "wraptable": 2, "multicols": 1, "adjustbox": 1, "subfigure": 1, "subtable": 1}
#: statements, besides those that \newtheorem declares
STATEMENTS = frozenset("""
proof theorem lemma proposition corollary definition remark example conjecture
""".split())  # noqa: SIM905
#: level of a heading
HEADINGS = {"part": 1, "chapter": 1, "section": 2, "subsection": 3, "subsubsection": 4}

#: commands that refer to something by labels
REFERENCES = frozenset("""
ref eqref autoref cref Cref pageref nameref cite citep citet citealp citealt citenum citeyear citeyearpar citen
citeauthor parencite textcite autocite onlinecite Cite Citet
""".split())  # noqa: SIM905

#: commands that go with so many of their arguments
DROPPED: dict[str, int] = {
    **dict.fromkeys("""
label nocite footcite includegraphics includesvg epsfig psfig input include bibliography bibliographystyle vspace hspace
vskip hskip kern pagestyle thispagestyle usepackage documentclass RequirePackage graphicspath hypersetup title author
date thanks affil affiliation institute address email orcid keywords ccsdesc color pagecolor fontsize linespread
pagenumbering captionsetup theoremstyle allowdisplaybreaks hyphenation index bibitem tikzset pgfplotsset markboth
newcounter stepcounter refstepcounter selectlanguage phantom hphantom vphantom subjclass dedicatory curraddr urladdr
tnoteref fntext cortext footnotetext acmConference acmYear copyrightyear setcopyright acmDOI acmISBN received
accepted pacs preprint usetikzlibrary cline cmidrule crefname linenumbers addbibresource IEEEauthorblockA
IEEEauthorblockN textcolor colorbox raisebox href scalebox rotatebox parbox tnotetext
""".split(), 1),  # noqa: SIM905
    **dict.fromkeys("""
setcounter addtocounter setlength addtolength rule resizebox multirow multicolumn newtheorem newcommand renewcommand
providecommand
""".split(), 2),  # noqa: SIM905
    "newenvironment": 3, "renewenvironment": 3, "definecolor": 3, "addcontentsline": 3, "DeclareMathSymbol": 4,
    "titlespacing": 4, "titleformat": 5,
}
#: commands that go, and take nothing with them
NOTHING = frozenset("""
maketitle tableofcontents listoffigures listoftables centering raggedright raggedleft noindent indent newpage clearpage
cleardoublepage pagebreak linebreak hline toprule midrule bottomrule bigskip medskip smallskip small footnotesize
scriptsize tiny large Large LARGE huge Huge normalsize bf it rm sf tt sc em bfseries itshape rmfamily sffamily ttfamily
scshape mdseries upshape normalfont boldmath appendix hfill vfill hfil vfil protect onecolumn twocolumn singlespacing
doublespacing relax ignorespaces unskip left right displaystyle textstyle printbibliography frontmatter mainmatter
backmatter balance flushbottom sloppy fussy makeatletter makeatother begingroup endgroup bgroup egroup leavevmode strut
null qed xspace columnwidth textwidth linewidth unitlength baselineskip parskip parindent newblock footnotemark
""".split())  # noqa: SIM905

#: commands that are a sign or a word
SIGNS: dict[str, str] = {
    "ldots": "…", "dots": "…", "textellipsis": "…", "LaTeX": "LaTeX", "TeX": "TeX", "LaTeXe": "LaTeX2e", "ss": "ß",
    "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "o": "ø", "O": "Ø", "aa": "å", "AA": "Å", "l": "ł", "L": "Ł", "i": "ı",
    "j": "ȷ", "S": "§", "P": "¶", "copyright": "©", "pounds": "£", "euro": "€", "texteuro": "€", "dag": "†",
    "ddag": "‡", "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textbar": "|", "textless": "<",
    "textgreater": ">", "textbullet": "•", "textdegree": "°", "degree": "°", "textendash": "–", "textemdash": "—",
    "textquoteleft": "‘", "textquoteright": "’", "textquotedblleft": "“", "textquotedblright": "”", "slash": "/",
    "textregistered": "®", "texttrademark": "™", "textmu": "µ", "quad": " ", "qquad": " ", "enspace": " ",
    "guillemotleft": "«", "guillemotright": "»", "newline": "\n", "textunderscore": "_", "textperiodcentered": "·",
}
#: accents, by their sign or their word, as Unicode's combining characters
ACCENTS: dict[str, str] = {
    "'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303", "=": "\u0304", ".": "\u0307",
    "u": "\u0306", "v": "\u030c", "H": "\u030b", "c": "\u0327", "d": "\u0323", "b": "\u0331", "r": "\u030a",
    "k": "\u0328",
}
LIGATURES = {"---": "—", "--": "–", "``": "“", "''": "”"}
