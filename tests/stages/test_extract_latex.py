"""LaTeX to text: formulas stay as they are, headings, lists and tables are converted, and comments, preamble and
bibliography are removed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from stages.document import Document
from stages.extract.latex.step import Latex, plain
from tests.conftest import shared_data
from tests.stages.texts import assert_linear

PAPER = r"""% a comment
\documentclass[11pt]{article}
\usepackage{amsmath} % packages
\newcommand{\R}{\mathbb{R}}
\newcommand{\eg}{e.g.\xspace}
\def\half{\frac12}
\newcommand{\vect}[1]{\mathbf{#1}}
\DeclareMathOperator{\argmax}{arg\,max}
\newtheorem{thm}{Theorem}[section]
\title[Short]{On \emph{Small} Gradients\thanks{Supported by nobody.}}
\author{A. Nonymous \and B. Else}
\begin{document}
\maketitle
\begin{abstract}
We study 50\% of gradients~\cite{one,two}, \eg those in $\R^n$,
as in \citet{smith}.
\end{abstract}

\section{Introduction}\label{sec:intro}
Let $f:\R\to\R$ be smooth --- ``very'' smooth; see Section~\ref{sec:intro} and~\eqref{eq:a}.
G\"odel and Erd\H{o}s \textbf{bold \textit{both}} na\"{\i}ve.% a comment

\setlength{\parskip}{1cm}\vskip 2cm \unitlength=1mm
\begin{equation}\label{eq:a}
  x^* = \argmax_x \half f(x) % inner
    \nonumber
\end{equation}
where \[ \vect{a} = b. \]
\begin{thm}[Main]
Every $x$ is \emph{good}.
\end{thm}
\begin{proof} Trivial.\footnote{Not really.} \qed \end{proof}
\begin{itemize}
\item First
  line
\item[(b)] Second
  \begin{enumerate}
  \item one \item two
  \end{enumerate}
\end{itemize}
\begin{figure}[t]
\centering\includegraphics[width=\linewidth]{fig.pdf}
\caption{A nice figure of $x$.}\label{fig:x}
\begin{tikzpicture} \draw (0,0) -- (1,1); \end{tikzpicture}
\end{figure}
\subsection*{Data}
\begin{table}
\begin{tabular}{l|cc}
\toprule
Name & A & B \\ \midrule
\multicolumn{2}{c}{x} & 1 \\[2pt]
y & 2 & 3 \\
\bottomrule
\end{tabular}
\end{table}
\begin{verbatim}
x = 5 % 3   # kept \textbf
\end{verbatim}
See \href{http://x.org}{the site} or \url{http://y.org/a_b}. Cost: \$5 \& more.
\bibliography{refs}
\begin{thebibliography}{9} \bibitem{one} Gone. \end{thebibliography}
\end{document}
after the end
"""
TEXT = r"""# On Small Gradients

## Abstract

We study 50% of gradients [one, two], e.g. those in $\mathbb{R}^n$, as in [smith].

## Introduction

Let $f:\mathbb{R}\to\mathbb{R}$ be smooth — “very” smooth; see Section [sec:intro] and [eq:a]. Gödel and Erdős bold both naïve.

\begin{equation}
  x^* = \operatorname{arg\,max}_x \frac12 f(x)
\end{equation}

where

\[ \mathbf{a} = b. \]

Theorem (Main). Every $x$ is good.

Proof. Trivial. (Not really.)

- First line
- (b) Second
  1. one
  2. two

A nice figure of $x$.

### Data

Name | A | B
x | 1
y | 2 | 3

```
x = 5 % 3   # kept \textbf
```

See the site or http://y.org/a_b. Cost: $5 & more."""  # noqa: E501


def test_a_paper():
    text, title = plain(PAPER)
    assert text == TEXT and title == "On Small Gradients"


def test_the_stage():
    doc = Document("0" * 32, PAPER)
    assert Latex().process(doc) is None and doc.text == TEXT and doc.meta == {"title": "On Small Gradients"}
    doc = Document("0" * 32, raw=PAPER.encode("latin-1"), meta={"title": "Known"})
    assert Latex(captions=False).process(doc) is None and doc.meta == {"title": "Known"}
    assert "A nice figure" not in doc.text and "Gödel" in doc.text
    same = Document("0" * 32, "No command in here,\nbut 100% of two lines.")
    assert Latex().process(same) is None and same.text == "No command in here,\nbut 100% of two lines."
    assert Latex().process(Document("0" * 32, "\\maketitle % x")) == "no_text"
    assert Latex(max_chars=10).process(Document("0" * 32, "\\section{Long}")) == "too_large"


@pytest.mark.parametrize(("source", "text"), [
    (r"50\% \& \_ \# \{x\} a\,b a~b c\ d", "50% & _ # {x} a b a b c d"),
    (r"\'e \`a \^{o} \c{c} \v s \~n {\ss} \o{}re \L{}\'od\'z \aa", "é à ô ç š ñ ß øre Łódź å"),
    ("a % b\nc\n\nd", "a c\n\nd"), ("100\\% sure\\\\% x\nb", "100% sure\nb"), ("x%\n  y", "xy"),
    (r"\paragraph{Setup.} We go. \underline{So \texttt{it} is}.", "Setup. We go. So it is."),
    ("$$ a\n = b $$ and \\(c\\)", "$$ a\n = b $$\n\nand \\(c\\)"),
    ("costs $5 only", "costs $5 only"), ("a $b\n\nc$ d", "a $b\n\nc$ d"), ("\\begin{align}\na", "a"),
    ("\\begin{align}a&=b\\label{x}\\\\c&=d\\end{align}", "\\begin{align}a&=b\\\\c&=d\\end{align}"),
    (r"\newcommand{\a}{\b}\newcommand{\b}{\a}$\a$ \a x", "$\\a$ x"),
    (r"\def\x{\x\x}a \x b", "a b"), (r"\newcommand\half{\frac12}$\half x\half^2$", r"$\frac12 x\frac12^2$"),
    (r"\newcommand{\bb}{\mathbb R}$\bb x$", r"$\mathbb R x$"), (r"\renewcommand{\ge}{\geq}$\ge x$", r"$\geq x$"),
    (r"\newcommand{\two}[2]{#1 and #2}\two{a}{b}", "a and b"), (r"\verb|a_b{| c \verb+x y+", "a_b{ c x y"),
    ("\\begin{minted}[x]{py}\na = {1}\n\\end{minted}", "```py\na = {1}\n```"), ("}}} a {{{", "a"),
    ("\\item a\n\\item b", "- a\n- b"), (r"\textcolor{red}{hot} \href{u}{v} \rule{1cm}{2cm}x", "hot v x"),
    ("\\bf 5 in total", "5 in total"), ("\ue0005\ue001\ue002 x\\'e", "5 xé"), (r"a\footnote{b {c}} d", "a (b c) d"),
    ("\\section{}\nx\\section{One\n two}y", "x\n\n## One two\n\ny"), (r"\title{A \title{B}} x", "x"),
    (r"\input{x} see \cref{a,b}~\citep[p.~3]{k}", "see [a, b] [k]"),
    # macros
    (r"\newcommand{\ip}[2][x]{\langle #1,#2\rangle}$\ip y \ip[z]{y}$", r"$\langle x,y\rangle \langle z,y\rangle$"),
    (r"\newcommand{\n}[1]{|#1|}$\n{\n{a}}\n b$", "$||a|||b|$"),
    (r"\def\v#1{\mathbf#1}$\v x\v{12}$", r"$\mathbf x\mathbf12$"),
    (r"\let\eps\varepsilon\let\e=\eps $\e$", r"$\varepsilon$"), (r"\def\a#1.{#1}x \a y. z", "x y. z"),
    (r"\DeclareMathOperator*{\argmin}{arg\,min}$\argmin_x$", r"$\operatorname*{arg\,min}_x$"),
    (r"\DeclarePairedDelimiter{\abs}{\lvert}{\rvert}$\abs{x}$", r"$\lvert x \rvert$"),
    (r"\NewDocumentCommand{\p}{m m}{(#1, #2)}\p{a}{b}", "(a, b)"),
    (r"\def\o{\omega}\renewcommand{\c}{c'}$\o\c$", r"$\omega c'$"),
    (r"\newcommand{\be}{\begin{equation}}\newcommand{\ee}{\end{equation}}\be x \ee",
     "\\begin{equation} x \\end{equation}"),
    (r"\newenvironment{q}[1]{\textbf{Q#1:} \begin{quote}}{\end{quote}}\begin{q}{7}Why?\end{q}", "Q7:\n\nWhy?"),
    (r"\newcommand{\a}{\ensuremath{\alpha}}\a-decay, \a, $\a$", r"$\alpha$-decay, $\alpha$, $\ensuremath{\alpha}$"),
    (r"\def\x{1}\x\def\x{2}\x", "12"), (r"\newcommand{\x}{\csname y\endcsname}a\x b", "a b"),
    (r"\def\section#1{}\section{A}", "## A"),
    ("\\begin{verbatim}\n\\newcommand{\\x}{y}\\x % {\n\\end{verbatim}\\x", "```\n\\newcommand{\\x}{y}\\x % {\n```"),
    # what is no LaTeX
    (r"a \verb+%x+ b % c", "a %x b"), (r"\url{http://a.b/~c%20d\_e} \href{http://a%20b}{c}",
     "http://a.b/~c%20d_e c"),
    (r"a\iffalse b\ifx\c\d e\fi f\fi g", "ag"),
    (r"a\iffalse b\else c\fi d", "ac d"), (r"$a\iff b$\iffalse c", r"$a\iff b$ c"),
    ("\\begin{comment}\nx\n\\end{comment}y", "y"),
    (r"\lstinline[language=C]|a_b| \mintinline{py}{x} \Verb!%!", "a_b x %"),
    ("\\lstnewenvironment{shell}{}{}\\begin{shell}\n$ ls % {\n\\end{shell}", "```\n$ ls % {\n```"),
    ("\\begin{lstlisting}[language=[90]Fortran]\nx\n\\end{lstlisting}", "```fortran\nx\n```"),
    (r"\MakeShortVerb{\|}a |\b{%| c", r"a \b{% c"), (r'a\char`\~b \char92 \char"41 c', "a~b \\ A c"),
    # tables, notes, numbers, accents
    (r"\begin{tabular*}{\textwidth}{lr} a & b\\ \cmidrule(lr){1-2} c & d\end{tabular*}", "a | b\nc | d"),
    (r"\begin{mylongtable}{lr} & \\ a & b\\ & \\ c & d\end{mylongtable}", "a | b\nc | d"),
    ("\\errorcontextlines=9\nA\\ExplSyntaxOn \\int_new:N \\ExplSyntaxOff B\\ExplSyntaxOn x", "A B"),
    (r"x\footnotemark\footnotetext{Why.}", "x (Why.)"),
    (r"\SI{5}{\kilo\metre}, \num{3.1}", r"$\SI{5}{\kilo\metre}$, 3.1"),
    (r"\~{} \^{} \'\i \th\dj\ng{} !`?` ,,a''", "~ ^ í þđŋ ¡¿ „a”"), ("\\usepackage{german}\"Uber \"`a\"'", "Über „a“"),
    (r"\begin{proof}[Proof of Theorem $x$] Y.\end{proof}", "Proof of Theorem $x$. Y."),
    (r"\begin{theorem}[See \cite{a}, \emph{b}]Z\end{theorem}", "Theorem (See [a], b). Z"),
    ("A\n\n\\section*{References}\\begin{thebibliography}{9}\\bibitem{x} y\\end{thebibliography}", "A"),
])
def test_pieces(source, text):
    assert plain(source)[0] == text


GOLDEN = [
    # AMS-TeX
    (r"""\input amstex
\documentstyle{amsppt}
\magnification=1200 \hsize 6in
\define\R{\Bbb R}
\topmatter
\title On plain things\endtitle
\author A. Nobody\endauthor
\abstract We show $\R$.\endabstract
\endtopmatter
\document
\head 1. Introduction\endhead
Some text \cite{1}.
\proclaim{Theorem 1} All is well in $\R^2$.
\endproclaim
\demo{Proof} Clear. \qed\enddemo
\roster
\item"(a)" first
\item second
\endroster
\Refs
\ref\key 1 \by A. B\paper On x\jour J.\endref
\endRefs
\enddocument""", """# On plain things

## Abstract

We show $\\Bbb R$.

## 1. Introduction

Some text [1].

Theorem 1. All is well in $\\Bbb R^2$.

Proof. Clear.

- (a) first
- second"""),
    # plain TeX
    (r"""\magnification=\magstep1
\font\bigbf=cmbx10 scaled 1440
\parskip=3pt plus 1pt minus 1pt
\def\Real{{\bf R}}
\centerline{\bigbf A Title}
\vskip 12pt plus 1fil
\beginsection 1. Start

Here is $a\over b$ in \Real, and a note\footnote{*}{Not so.}.

\proclaim Theorem 1. It holds.

\item{(a)} one
\itemitem{i.} sub
\hbox to 3cm{boxed\hfil}
\vfill\eject\bye
junk""", """A Title

## 1. Start

Here is $a\\over b$ in R, and a note (Not so.).

Theorem 1. It holds.
- (a) one
  - i. sub boxed"""),
    # slides
    (r"""\documentclass{beamer}\title[s]{Slides}\begin{document}\frame{\titlepage}
\begin{frame}<1->[t]{First \emph{title}}
\begin{itemize}[<+->]
\item<1-> one \pause
\item<2-> two \only<3>{three}
\end{itemize}
\begin{block}{Note}Text.\end{block}
\begin{columns}\begin{column}{.5\textwidth}left\end{column}\end{columns}
\end{frame}
\begin{frame}\frametitle{Second}\verb|x%y|\end{frame}\end{document}""", """# Slides

### First title

- one
- two three

Note

Text.

left

### Second

x%y"""),
    # pseudo-code
    (r"""\begin{algorithm}\caption{Euclid}\begin{algorithmic}[1]
\Require $a\ge 0$
\Procedure{Euclid}{$a,b$}\Comment{gcd}
\State $r\gets a\bmod b$
\While{$r\not=0$}
\State $a\gets b$
\If{$a>1$} \State x \Else \State y \EndIf
\EndWhile
\State \Return $b$
\EndProcedure
\end{algorithmic}\end{algorithm}""", """Euclid

Require: $a\\ge 0$
procedure Euclid($a,b$) // gcd
  $r\\gets a\\bmod b$
  while $r\\not=0$ do
    $a\\gets b$
    if $a>1$ then
      x
    else
      y
    end if
  end while
  return $b$
end procedure"""),
]


@pytest.mark.parametrize(("source", "text"), GOLDEN, ids=["AMS-TeX", "plain TeX", "beamer", "algorithmic"])
def test_other_kinds_of_tex(source, text):
    assert plain(source)[0] == text


@pytest.mark.parametrize("unit", [
    "\\[", "$", "$$", "\\begin{equation}", "\\end{x}", "{", "}", "\\begin{a}", "\\newcommand{\\a}{\\b}", "\\a{", "%",
    "\\verb|", "\\begin{verbatim}%", "\\section{", "[", "\\x[", "\\\\", "~", "\\item ", "\\def\\a{\\a\\a}\\a", "\\c",
    "\\title{", "\\cite{", " \\label{", "\n#", " ", "\n", "\n ", "\\title ", "\\newcommand\\a ", "\\ref{\\ref{",
    "\\begin{itemize}\\item ", " \\label{a}", "\\begin{tabular}{", "\\caption{", "\ue002", "\\\\ ", "\\vskip ",
    "\\x= ", "\\begin{comment}", "\\'", "``", "\\iffalse", "\\url{", "\\def\\a#1{#1}\\a{", "\\newenvironment{x}{",
    "\\proclaim{", "\\author ", "\\footnote{", "\\lstinline{", "\\MakeShortVerb{\\|}|", "\\SI{", "\\font\\a",
    "\\begin{frame}{", "\\begin{proof}[", "\\begin{algorithmic}\\If{", "\\char", "\\title a\n"])
def test_hostile_source_takes_linear_time(unit):
    assert_linear(plain, lambda n: unit * n, 500)


def test_macros_cannot_grow_without_bound():
    letters = "abcdefghijklmnopqrstuvwxyz"
    bomb = "".join(f"\\def\\{a}x{{{f'!{b}x' * 10}}}".replace("!", "\\") for a, b in pairwise(letters))
    assert len(plain(bomb + "\\def\\zx{lol }" + "\\ax " * 2_000)[0]) < 3 << 20
    doubling = r"\def\a#1{#1#1}" + r"\a{" * 40 + "x" + "}" * 40
    assert len(plain(doubling)[0]) < 3 << 20
    wide = r"\def\a#1{" + "#1" * 1900 + "}" + r"\def\b#1{" + r"\a{#1}" * 300 + r"}\b{" + "x" * 100_000 + "}"
    assert len(plain(wide)[0]) < 3 << 20
    many = "".join(f"\\def\\m{a}{b}{{{'x' * 1900}}}" for a in letters for b in letters[:6]) + "\\maa" * 5_000
    assert len(plain(many)[0]) < 3 << 20


def test_any_cut_of_a_paper_is_survived():
    rng, sources = random.Random(5), "\n".join((PAPER, *(source for source, _ in GOLDEN)))
    for _ in range(100):
        a = rng.randrange(len(sources))
        text = plain(sources[a:a + rng.randrange(1, 3000)])[0]
        assert not any("\ue000" <= c <= "\ue003" for c in text)
        pieces = [sources[a:a + rng.randrange(1, 12)] for a in rng.choices(range(len(sources)), k=60)]
        assert not any("\ue000" <= c <= "\ue003" for c in plain("".join(pieces))[0])


def test_real_papers():
    import gzip
    import json

    with gzip.open(shared_data("text", "data-juicer", "arxiv.jsonl.gz"), "rt", encoding="utf-8") as f:
        sources = [json.loads(line)["text"] for line in f]
    texts = [plain(s)[0] for s in sources]
    assert all(texts) and sum(map(len, texts)) > 0.75 * sum(map(len, sources))
    assert not any(mark in t for t in texts for mark in ("\\section", "\\cite", "\\includegraphics", "\\maketitle"))
