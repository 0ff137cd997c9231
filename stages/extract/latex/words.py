"""Tables of LaTeX commands and environments. They say what each becomes when LaTeX is converted to plain text (LaTeX
2.09 and 2e, amsmath, natbib, hyperref, beamer, algorithms, AASTeX, AMS-TeX, plain TeX)."""

from __future__ import annotations

import re

#: environments that are formulas
MATH = frozenset("""
math displaymath equation align alignat flalign gather multline eqnarray xalignat xxalignat dmath IEEEeqnarray tikzcd
numcases subnumcases empheq mathpar prooftree dgroup darray
""".split())  # noqa: SIM905
#: environments that are dropped with their content
SKIPPED = frozenset("""
thebibliography tikzpicture pspicture picture CCSXML keywords keyword IEEEkeywords asy forest references biblist bibdiv
psfrags circuitikz axis chronology feynmandiagram fmffile
""".split())  # noqa: SIM905
#: environments whose content is not LaTeX
LISTINGS = ("verbatim", "Verbatim", "BVerbatim", "LVerbatim", "lstlisting", "minted", "alltt", "verbatimtab",
            "spverbatim", "macrocode", "code")
#: list environments, and whether their items are numbered
LISTS = {**dict.fromkeys(("itemize", "description", "compactitem", "asparaitem", "inparaitem", "list", "trivlist",
                          "tablenotes", "desclist", "labeling"), False),
         **dict.fromkeys(("enumerate", "compactenum", "asparaenum", "inparaenum"), True)}
#: table environments, and the number of arguments they begin with
TABLES = {"tabular": 1, "tabular*": 2, "tabularx": 2, "tabulary": 2, "longtable": 1, "array": 1, "supertabular": 1,
          "xtabular": 1, "mpsupertabular": 1, "longtabu": 1, "tabu": 1, "deluxetable": 1, "NiceTabular": 1, "tblr": 1}
#: other environments that begin with arguments, and their number
BOXES = {"minipage": 1, "wrapfigure": 2, "wraptable": 2, "multicols": 1, "adjustbox": 1, "subfigure": 1, "subtable": 1,
         "column": 1, "list": 2, "adjustwidth": 2, "spacing": 1, "textblock": 1, "mdframed": 0, "fixme": 1}
#: theorem-like environments, besides those that \newtheorem declares
STATEMENTS = frozenset("""
proof theorem lemma proposition corollary definition remark remarks example examples conjecture claim fact assumption
observation axiom exercise problem solution question
""".split())  # noqa: SIM905
#: heading commands, and their level
HEADINGS = {"part": 1, "chapter": 1, "addchap": 1, "section": 2, "addsec": 2, "subsection": 3, "subsubsection": 4,
            "frametitle": 3, "head": 2, "heading": 2, "specialhead": 2, "subhead": 3, "subheading": 3,
            "subsubhead": 4, "beginsection": 2}
#: blocks of slides, which begin with their title in braces
BLOCKS = frozenset({"block", "alertblock", "exampleblock"})
#: commands of slides followed by the numbers of the slides they apply to: \item<2->
OVERLAID = re.compile(
    r"(\\(?:item|only|uncover|onslide|alert|visible|invisible|alt|action|structure|color|textbf|textit|emph|pause|column|"
    r"includegraphics)(?![A-Za-z])\*?|\\begin[ \t]*\{[A-Za-z]{1,40}\*?\}(?:\[[^\[\]\n]{0,100}\])?)<[^<>\n]{1,40}>")
#: AMS-TeX commands that, when they have no braces, end with a word of their own (\endabstract). Those in ENDED are
#: dropped with everything up to that word. The content of those in PARTS is kept, below the heading given here if it is
#: not empty.
ENDED = {w: f"end{w}" for w in ("author", "affil", "address", "curraddr", "email", "urladdr", "thanks", "date", "ref",
                                "keywords", "subjclass", "toc", "dedicatory", "translator", "title")}
PARTS = {"abstract": "## Abstract", **dict.fromkeys(("proclaim", "demo", "definition", "remark", "example"), "")}

#: commands of pseudo-code: the text written before and after their argument, and how many levels deeper the lines after
#: them are indented. Before a line of a command in DEDENTS, the indent decreases by one level.
ALGORITHM: dict[str, tuple[str, str, int]] = {
    "state": ("", "", 0), "statex": ("", "", 0), "if": ("if ", " then", 1), "elsif": ("else if ", " then", 1),
    "else": ("else", "", 1), "endif": ("end if", "", 0), "for": ("for ", " do", 1), "forall": ("for all ", " do", 1),
    "endfor": ("end for", "", 0), "while": ("while ", " do", 1), "endwhile": ("end while", "", 0),
    "loop": ("loop", "", 1), "endloop": ("end loop", "", 0), "repeat": ("repeat", "", 1), "until": ("until ", "", 0),
    "require": ("Require: ", "", 0), "ensure": ("Ensure: ", "", 0), "input": ("Input: ", "", 0),
    "output": ("Output: ", "", 0), "function": ("function ", "", 1), "endfunction": ("end function", "", 0),
    "procedure": ("procedure ", "", 1), "endprocedure": ("end procedure", "", 0)}
#: pseudo-code commands that end an indented block
DEDENTS = frozenset("elsif else endif endfor endwhile endloop until endfunction endprocedure".split())  # noqa: SIM905

#: commands that refer to something by labels
REFERENCES = frozenset("""
ref eqref autoref cref Cref pageref nameref cite citep citet citealp citealt citenum citeyear citeyearpar citen
citeauthor parencite textcite autocite onlinecite Cite Citet
""".split())  # noqa: SIM905

#: commands that are dropped, and how many of their arguments with them
DROPPED: dict[str, int] = {
    **dict.fromkeys("""
label nocite includegraphics includesvg epsfig psfig input include bibliography bibliographystyle vspace hspace
vskip hskip kern pagestyle thispagestyle usepackage documentclass RequirePackage graphicspath hypersetup title author
date thanks affil affiliation institute address email orcid keywords ccsdesc color pagecolor fontsize linespread
pagenumbering captionsetup theoremstyle allowdisplaybreaks hyphenation index bibitem tikzset pgfplotsset markboth
newcounter stepcounter refstepcounter selectlanguage phantom hphantom vphantom subjclass dedicatory curraddr urladdr
tnoteref fntext cortext footnotetext acmConference acmYear copyrightyear setcopyright acmDOI acmISBN received
accepted pacs preprint usetikzlibrary cline cmidrule linenumbers addbibresource IEEEauthorblockA
IEEEauthorblockN textcolor colorbox raisebox scalebox rotatebox parbox tnotetext documentstyle subfile subfileinclude
epsfbox epsffile plotone special message typeout pdfinfo marginpar marginnote todo inst orcidID titlerunning
authorrunning institution affiliations altaffiliation collaboration ead cellcolor rowcolor arrayrulecolor hyperlink
hypertarget captionof usetheme usecolortheme usefonttheme useinnertheme useoutertheme setbeamertemplate AtBeginSection
setbeamersize logo titlegraphic subject column setmainfont setsansfont setmonofont DeclareUnicodeCharacter
tablewidth tabletypesize tablecolumns tablenum emailAdd arxivnumber keyword PACS MSC JEL journal volume pubyear
acmJournal acmVolume acmNumber acmArticle acmMonth settopmatter citestyle pagerange shortauthors shorttitle runningtitle
runningauthor icmltitlerunning icmlsetsymbol icmlkeywords footnotesep excludecomment includecomment
ProvidesPackage NeedsTeXFormat AtBeginDocument AtEndDocument lstset mdfsetup sisetup setlist usemintedstyle
theoremseparator theoremheaderfont theorembodyfont newlength newsavebox newif newtoks newcount newdimen
bibpunct setcitestyle restylefloat floatname listofalgorithms colorlet pgfkeys pgfmathsetmacro glsresetall gls
""".split(), 1),  # noqa: SIM905
    **dict.fromkeys("""
setcounter addtocounter setlength addtolength rule resizebox multirow multicolumn newtheorem newcommand renewcommand
providecommand crefname Crefname settowidth plottwo icmlauthor icmlaffiliation icmlcorrespondingauthor newcolumntype
newfloat floatstyle setbeamercolor setbeamerfont DeclareMathAlphabet lstdefinestyle lstdefinelanguage sbox fontseries
newglossaryentry newacronym hyphenchar declaretheorem SetKw SetKwInOut SetKwFunction
""".split(), 2),  # noqa: SIM905
    "newenvironment": 3, "renewenvironment": 3, "definecolor": 3, "addcontentsline": 3, "specialrule": 3,
    "lstnewenvironment": 3, "DefineVerbatimEnvironment": 3, "newminted": 2, "newtcblisting": 2, "MakeShortVerb": 1,
    "DefineShortVerb": 1,
    "DeclareFontFamily": 3, "acmConference": 3, "DeclareMathSymbol": 4, "titlespacing": 4, "titleformat": 5,
}
#: TeX registers, which are set to a number, a length or another register
REGISTERS = frozenset("""
magnification hsize vsize hoffset voffset baselineskip parskip parindent leftskip rightskip tolerance pretolerance
hbadness
vbadness hfuzz vfuzz parfillskip abovedisplayskip belowdisplayskip textheight textwidth topmargin oddsidemargin topskip
evensidemargin tabcolsep arraystretch arrayrulewidth itemsep parsep topsep labelsep leftmargin fboxsep unitlength
headheight headsep footskip baselinestretch overfullrule pageno normalbaselineskip hangindent hangafter everymath
clubpenalty widowpenalty binoppenalty relpenalty brokenpenalty interlinepenalty looseness columnsep columnseprule
pdfoutput pdfpagewidth pdfpageheight secnumdepth tocdepth mathsurround delimitershortfall abovecaptionskip
belowcaptionskip emergencystretch lineskip lineskiplimit footins skip dimen count penalty
""".split())  # noqa: SIM905
#: commands that define the name after them
NAMING = frozenset("""
newcount newdimen newskip newtoks newif newlength newsavebox newbox setlength addtolength settowidth newfam
""".split())  # noqa: SIM905
#: commands that are dropped; their arguments, if any, stay
NOTHING = frozenset("""
maketitle tableofcontents listoffigures listoftables centering raggedright raggedleft noindent indent newpage clearpage
cleardoublepage pagebreak linebreak hline toprule midrule bottomrule bigskip medskip smallskip small footnotesize
scriptsize tiny large Large LARGE huge Huge normalsize bf it rm sf tt sc em bfseries itshape rmfamily sffamily ttfamily
scshape mdseries upshape normalfont boldmath appendix hfill vfill hfil vfil protect onecolumn twocolumn singlespacing
doublespacing relax ignorespaces unskip left right displaystyle textstyle printbibliography frontmatter mainmatter
backmatter balance flushbottom sloppy fussy makeatletter makeatother begingroup endgroup bgroup egroup leavevmode strut
null qed xspace columnwidth textwidth linewidth unitlength baselineskip parskip parindent newblock footnotemark
pause startdata enddata nodata fi else or topmatter document long global outer endinput goodbreak break
nobreak allowbreak eject supereject filbreak
smallbreak medbreak bigbreak thinspace negthinspace samepage onehalfspace doublespace rightline raggedbottom nopagebreak
tightlist quitvmode unhbox unvbox box copy sl tenrm tenbf tenit twelverm ninerm eightrm nofiles printindex makeindex
listoftodos linenumbers sectionmark headrulewidth
nonumber notag nobibliography clearemptydoublepage titlepage
""".split())  # noqa: SIM905

#: commands that stand for a sign or a word
SIGNS: dict[str, str] = {
    "ldots": "…", "dots": "…", "textellipsis": "…", "LaTeX": "LaTeX", "TeX": "TeX", "LaTeXe": "LaTeX2e", "ss": "ß",
    "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "o": "ø", "O": "Ø", "aa": "å", "AA": "Å", "l": "ł", "L": "Ł", "i": "ı",
    "j": "ȷ", "S": "§", "P": "¶", "copyright": "©", "pounds": "£", "euro": "€", "texteuro": "€", "dag": "†",
    "ddag": "‡", "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textbar": "|", "textless": "<",
    "textgreater": ">", "textbullet": "•", "textdegree": "°", "degree": "°", "textendash": "–", "textemdash": "—",
    "textquoteleft": "‘", "textquoteright": "’", "textquotedblleft": "“", "textquotedblright": "”", "slash": "/",
    "textregistered": "®", "texttrademark": "™", "textmu": "µ", "quad": " ", "qquad": " ", "enspace": " ",
    "guillemotleft": "«", "guillemotright": "»", "newline": "\n", "textunderscore": "_", "textperiodcentered": "·",
    "th": "þ", "TH": "Þ", "dh": "ð", "DH": "Ð", "dj": "đ", "DJ": "Đ", "ng": "ŋ", "NG": "Ŋ", "textcelsius": "℃",
    "textohm": "Ω", "textonehalf": "½", "textonequarter": "¼", "textthreequarters": "¾", "textsection": "§",
    "textparagraph": "¶", "textdagger": "†", "textdaggerdbl": "‡", "textpm": "±", "texttimes": "×", "textdiv": "÷",
    "textrightarrow": "→", "textleftarrow": "←", "textasteriskcentered": "*", "textbraceleft": "{",
    "textbraceright": "}", "textcopyright": "©", "textsterling": "£", "textyen": "¥", "textcent": "¢",
    "textdollar": "$", "textexclamdown": "¡", "textquestiondown": "¿", "textquotesingle": "'", "textquotedbl": '"',
    "guilsinglleft": "‹", "guilsinglright": "›", "quotedblbase": "„", "quotesinglbase": "‚", "glqq": "„", "grqq": "“",
    "flqq": "«", "frqq": "»", "og": "« ", "fg": " »", "textordfeminine": "ª", "textordmasculine": "º",
    "textpertenthousand": "‱", "textperthousand": "‰", "textnumero": "№", "textlangle": "⟨", "textrangle": "⟩",
    "BibTeX": "BibTeX", "XeTeX": "XeTeX", "XeLaTeX": "XeLaTeX", "LuaTeX": "LuaTeX", "LuaLaTeX": "LuaLaTeX",
    "pdfTeX": "pdfTeX", "pdfLaTeX": "pdfLaTeX", "AmS": "AMS", "AmSTeX": "AMS-TeX", "MF": "METAFONT",
    # macros that many papers take from a conference's style file
    "eg": "e.g.", "ie": "i.e.", "etal": "et al.", "etc": "etc.", "cf": "cf.", "wrt": "w.r.t.", "vs": "vs.",
    "space": " ", "lbrack": "[", "rbrack": "]", "lq": "‘", "rq": "’", "dotfill": "…", "hrulefill": "",
    "nobreakspace": " ", "textvisiblespace": "␣", "hyp": "-", "colon": ":",
}
#: accent commands (a sign or a word) → Unicode's combining characters
ACCENTS: dict[str, str] = {
    "'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303", "=": "\u0304", ".": "\u0307",
    "u": "\u0306", "v": "\u030c", "H": "\u030b", "c": "\u0327", "d": "\u0323", "b": "\u0331", "r": "\u030a",
    "k": "\u0328", "t": "\u0361",
}
LIGATURES = {"---": "—", "--": "–", "``": "“", "''": "”", "?`": "¿", "!`": "¡", ",,": "„"}
#: what remains of an accent without a letter, and the signs that stand for a blank
BARE = {"~": "~", "^": "^"}
BLANKS = frozenset(",;:> \t\n")

#: commands whose content is a formula or a quantity (siunitx), and their number of arguments
UNITS = {"ensuremath": 1, "num": 1, "si": 1, "unit": 1, "ang": 1, "SI": 2, "qty": 2, "numrange": 2, "SIrange": 3,
         "qtyrange": 3}
#: commands whose argument becomes a paragraph of its own
PARAGRAPHS = frozenset({"caption", "tablecaption", "subcaption", "centerline", "leftline", "rightline",
"framesubtitle"})
#: words of pseudo-code (algorithmic, algorithm2e)
WORDS = {"Return": "return ", "RETURN": "return ", "KwRet": "return ", "KwIn": "Input: ", "KwOut": "Output: ",
         "KwData": "Data: ", "KwResult": "Result: ", "Comment": " // ", "COMMENT": " // ", "tcp": " // ", "tcc": " // ",
         "And": " and ", "AND": " and ", "Or": " or ", "OR": " or ", "Not": "not ", "NOT": "not ", "To": " to ",
         "TO": " to ", "True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
#: shorthands of the package german: what `"` and a sign stand for
GERMAN = {"a": "ä", "o": "ö", "u": "ü", "A": "Ä", "O": "Ö", "U": "Ü", "s": "ß", "`": "„", "'": "“", "<": "«", ">": "»",
          "=": "-", "~": "-", "-": ""}

#: names that a source cannot redefine here
KNOWN = (frozenset(DROPPED) | NOTHING | REGISTERS | REFERENCES | MATH | SKIPPED | STATEMENTS | frozenset(LISTINGS) |
frozenset(LISTS)
         | frozenset(TABLES) | frozenset(HEADINGS) | frozenset("""
begin end item caption footnote footnotetext label title author abstract document figure table paragraph subparagraph
input include bibliography verb par url href path center quote quotation bibitem and centerline
""".split()) | frozenset("\\%&_#${}[]()'`^\"~=.,;:!/-@"))  # noqa: SIM905
