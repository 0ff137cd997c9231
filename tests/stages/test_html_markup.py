"""What becomes of a page's markup: Markdown, formulas, metadata, and bytes in all kinds of encodings."""

from __future__ import annotations

import datetime
import random
import re
import subprocess
import sys

import pytest
from lxml import etree, html

from stages.document import Document
from stages.extract.html import metadata
from stages.extract.html.markdown import write
from stages.extract.html.marks import dollars, fence
from stages.extract.html.math import formulas_as_tex
from stages.extract.html.step import ENGINES, Html
from stages.text.encoding import decode, without_double_encoding

S = "The quick brown fox jumps over the lazy dog, and nobody in the village ever asked it why it did so. "


def md(body: str, markup: bool = True) -> str:
    return write(html.document_fromstring(f"<html><body>{body}</body></html>").body, markup=markup)


# -- Markdown --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("body", "expected"), [
    ("<h1>One</h1><p>two  <b>three</b>\n four", "# One\n\ntwo **three** four"),
    ("<h3><b>Bold</b> head</h3>", "### Bold head"), ("<h2><div>a <h3>b</h3> c</div></h2>", "## a b c"),
    ("<p>a<b> b </b>c <i>d</i>, <em><b>e</b></em>", "a **b** c *d*, ***e***"),
    ("<b><p>block in inline</p></b>", "block in inline"),
    ("<p><i>for </i><a><i>Decoders</i></a><i>, in part</i> it", "*for Decoders, in part* it"),
    ("<p><b>a</b> <b>b</b><b>c</b><i>d</i><br><b>e</b><br><b>f</b>", "**a bc***d*\n**e**\n**f**"),
    ("<p><b>a<i>b</i></b><i>c</i><p><b>d</b></p><b>e</b> x <b>f</b>", "**a*b****c*\n\n**d**\n\n**e** x **f**"),
    ("<p><b></b> <i> </i>x", "x"),
    ("<p>see <a href='http://x/y'>the link</a>, not <img src=a alt=picture>it", "see the link, not it"),
    ("loose<div>block</div>tail", "loose\n\nblock\n\ntail"),
    ("<p>one<br>two<br><br>three", "one\ntwo\nthree"),
    ("<ul><li>a<li>b<ol start=3><li>c<li>d</ol><li></li></ul>", "- a\n- b\n  3. c\n  4. d"),
    ("<ul><li><p>a</p><p>b</p></li></ul>", "- a\n  b"),
    ("<blockquote><p>a</p><p>b</p></blockquote>", "> a\n>\n> b"),
    ("<pre class='language-C++'>int x;\n\tif (x)\n\n  y();\n</pre>", "```c++\nint x;\n    if (x)\n\n  y();\n```"),
    ("<pre>a ``` b\n````</pre>", "`````\na ``` b\n````\n`````"),
    ("<p>call <code>f(x)</code> or <code>a`b</code>", "call `f(x)` or `` a`b ``"),
    ("<table><tr><th>A<th>B<tr><td>1|2<td>x <b>y</b><tr><td>3</table>",
     "| A | B |\n| --- | --- |\n| 1\\|2 | x **y** |\n| 3 |  |"),
    ("<table><tr><td><p>layout</p><h2>H</h2></td><td>b</td></tr><tr><td>c</table>", "layout\n\n## H\n\nb\n\nc"),
    ("<p>10<sup>6</sup> H<sub>2</sub>O said<sup>[12]</sup> <del>no</del>",
     "10<sup>6</sup> H<sub>2</sub>O said ~~no~~"),
    ("<dl><dt>term<dd>meaning<dd><dd></dl>", "term\n\n: meaning"),
    ("<p>a</p><script>x()</script><style>y</style><svg><text>z</text></svg>", "a"),
    ("<p>snake_case *star* 1. [x] # y", "snake_case *star* 1. [x] # y"),
    (r"<p>so \(a_1 < b\) and \[ c \] and \( and", "so $a_1 < b$ and $$c$$ and \\( and"),
    ("", ""),
])
def test_writer(body, expected):
    assert md(body) == expected


def test_writer_without_markup():
    body = ("<h1>H</h1><p>a <b>b</b><ul><li>c<ol><li>d</ol></ul><table><tr><td>1<td>2<tr><td>3<td>4</table>"
            "<pre>x\n y</pre>")
    assert md(body, markup=False) == "H\na b\n- c\n  - d\n1 | 2\n3 | 4\nx\n y"


def test_writer_reads_trafilaturas_trees():
    tree = etree.fromstring(
        "<doc><head rend='h2'>H</head><p>a <hi rend='#b'>b</hi><lb/>c</p><list rend='ol'><item>x</item></list>"
        "<quote>q</quote><table><row><cell role='head'>A</cell><cell>B</cell></row><row><cell>1</cell><cell>2</cell>"
        "</row>"
        "</table>"
        "<code>f\n g</code><p>see <ref target='u'>it</ref></p></doc>")
    assert write(tree) == ("## H\n\na **b**\nc\n\n1. x\n\n> q\n\n| A | B |\n| --- | --- |\n| 1 | 2 |\n\n"
                           "```\nf\n g\n```\n\nsee it")


def test_nothing_of_the_text_is_lost_or_repeated():
    """Whatever the nesting: the words of the text come out once, in their order."""
    tags = ["p", "div", "b", "i", "a", "ul", "li", "ol", "table", "tr", "td", "h2", "span", "code", "section", "dl",
            "dt", "dd", "em", "figure"]
    for seed in range(50):
        rng = random.Random(seed)
        words = iter(f"w{n}" for n in range(10_000))

        def grow(depth: int, rng=rng, words=words) -> str:
            inside = "".join(grow(depth + 1) for _ in range(rng.randrange(0, 4))) if depth < 7 else ""
            tag = rng.choice(tags)
            return f"<{tag}>{next(words)} {inside}</{tag}> {next(words)} "

        tree = html.document_fromstring(f"<body>{''.join(grow(0) for _ in range(5))}</body>").body
        expected = " ".join(tree.itertext()).split()
        for markup in (True, False):
            assert re.findall(r"w\d+", write(tree, markup=markup)) == expected


def test_fences_and_dollars():
    assert fence("a") == "```\na\n```" and dollars(r"\(\)x\[ \]") == "x" and dollars("$5 and $6") == "$5 and $6"
    assert dollars(r"\(a\) \( \[b\]") == r"$a$ \( $$b$$"


# -- formulas --------------------------------------------------------------------------------------------------------
KATEX = ('<span class="katex"><span class="katex-mathml"><math><semantics><mi>x</mi><annotation '
         'encoding="application/x-tex">x_1 &lt; \\frac{a}{b}</annotation></semantics></math></span><span class='
         '"katex-html" aria-hidden="true"><span class="base">x<span>1</span></span></span></span>')
WIKIPEDIA = ('<span class="mwe-math-element"><span class="mwe-math-mathml-inline" style="display: none;"><math alttext='
             '"{\\displaystyle x_1 &lt; \\frac{a}{b}}"><mi>x</mi></math></span><img src="x.svg" '
             'class="mwe-math-fallback-image-inline" alt="{\\displaystyle x_1 &lt; \\frac{a}{b}}"></span>')
MATHJAX = ('<span class="MathJax_Preview">x1</span><span class="MathJax" id="m"><span>x<span>1</span></span></span>'
           '<script type="math/tex">x_1 < \\frac{a}{b}</script>')
IMAGE = '<img src="latex.php?latex=x" alt="x_1 &lt; \\frac{a}{b}" class="latex">'


@pytest.mark.parametrize("formula", [KATEX, WIKIPEDIA, MATHJAX, IMAGE])
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_formulas_are_kept(engine, formula):
    body = "".join(f"<p>Number {i}: {S * 4} And {formula}, as they said of it. {S}</p>" for i in range(4))
    doc = Document("id", raw=f"<!DOCTYPE html><html><body><article>{body}</article></body></html>".encode(),
                   mime="text/html")
    assert Html(engine=engine, format="markdown").process(doc) is None
    assert doc.text.count("And $x_1 < \\frac{a}{b}$, as they said of it.") == 4, doc.text


@pytest.mark.parametrize("page", [("<math>" * 8_000 + "</math>") * 6, '<span class="katex-html">x' * 30_000,
                                  ("<math>" * 5_000 + "<annotation" * 2_000 + "</math>") * 6,
                                  '<div class="MathJax">' * 30_000, "<img class=latex alt='&#" + "9" * 7000 + ";'>"])
def test_hostile_formulas_are_read_in_no_time(page):
    import time

    began = time.process_time()
    formulas_as_tex(page)
    assert time.process_time() - began < 3


def test_display_formulas_and_what_is_none():
    assert formulas_as_tex('<p>a<math display="block" alttext="E=mc^2"></math>b') == "<p>a<br>\\[E=mc^2\\]<br>b"
    for page in ("<p>plain", "<math><mi>x</mi></math> y", "<math> never closed", "<script type='math/tex'>x",
                 "<img class=latex>", '<span class="katex-html"> never closed <math>'):
        assert formulas_as_tex(page).replace("</span>", "") in (page, " never closed <math>")
    for seed in range(300):
        rng = random.Random(seed)
        parts = [KATEX, WIKIPEDIA, MATHJAX, IMAGE, "<math", "</math>", "</span>", "<script type='math/tex'>",
                 "</script>", "x"]
        formulas_as_tex("".join(p[:rng.randrange(1, len(p) + 1)] for p in rng.choices(parts, k=8)))


# -- metadata --------------------------------------------------------------------------------------------------------
def test_what_a_page_says():
    page = """<!DOCTYPE html><html lang="de-AT"><head><title>\n The story | The Site</title>
      <meta property="og:title" content="The story &amp; more - The Site"><meta name=author content="By  Jane  Doe">
      <META NAME='article:published_time' content='2024-03-09T23:10:00+01:00'>
      <link rel="canonical" href="https://e.org/a?b=1&amp;c">
      <link rel=license href="https://creativecommons.org/licenses/by/4.0/"></head>
      <body><h1>The <i>story</i> &amp; more</h1>"""
    assert metadata.describe(page) == {
        "title": "The story & more", "author": "Jane Doe", "date": "2024-03-09", "canonical": "https://e.org/a?b=1&c",
        "lang": "de-at", "license": "https://creativecommons.org/licenses/by/4.0/"}


@pytest.mark.parametrize(("page", "expected"), [
    ('<script type="application/ld+json">{"@type": "Article", "datePublished": "2023-01-02T03:04", "author": '
     '[{"@type": "Person", "name": "J\\u00f6rg \\"Jo\\" X"}], "license": "https://l.org/x"}</script>',
     {"author": 'Jörg "Jo" X', "date": "2023-01-02", "license": "https://l.org/x"}),
    ('<script type="application/ld+json">{"author": "Plain Name", "datePublished": "bad"}</script>',
     {"author": "Plain Name"}),
    ("<meta name=author content='https://e.com/x'><meta name=date content='12 March 2019'>", {"date": "2019-03-12"}),
    ("<meta name=author content='a@b.org'><meta name=date content='March 12th, 2019 9:00'>", {"date": "2019-03-12"}),
    ("<body><time datetime='2020-01-01'>x</time><time class=published datetime='20210405'>", {"date": "2021-04-05"}),
    ("<head></head><body><span itemprop=\"datePublished\" content='2018-07-06'></span>", {}),
    ("<head></head><meta itemprop=\"datePublished\" content='2018-07-06'>", {"date": "2018-07-06"}),
    ("<meta name=date content='2023-02-30'><meta name=pubdate content='1970-01-01'>", {}),
    ("<meta name=date content='9999-12-31'>", {}),
    ("<title>Only the title of it – Some Site</title>", {"title": "Only the title of it"}),
    ("<title>A - B</title>", {"title": "A - B"}), ("<h1>Only heading</h1>", {"title": "Only heading"}),
    ("<link rel=canonical href='/relative'><meta property='og:url' content='https://e.org/'>",
     {"canonical": "https://e.org/"}),
    ("<meta http-equiv=content-language content='pt-BR'>", {"lang": "pt-br"}),
    ("<meta property=og:locale content=x>", {}),
    ("<body>text <a class=x rel='license' href='https://e.org/l?a&amp;b'>", {"license": "https://e.org/l?a&b"}),
    ("<a href='http://creativecommons.org/licenses/BY-SA/3.0/deed.de'>",
     {"license": "https://creativecommons.org/licenses/by-sa/3.0/"}),
    ("<a href='https://creativecommons.org/about'>the software license</a>", {}), ("", {}),
    # authors: all of them, in the words of the page
    ("<meta name=author content='Jane Doe'><meta name=author content='John Roe'><meta name=byl content='By X Y'>",
     {"author": "Jane Doe; John Roe"}),
    ("<meta name=author content='https://e.com/x'><meta name=author content='8145'><meta name=byl content='By X Y'>",
     {"author": "X Y"}),
    ('<script type="application/ld+json">{"author": [{"name": "Jane Doe"}, {"name": ["John Roe", "A &amp; B"]}, "C D", '
     '7, {"@id": "#x"}, {"name": "Jane Doe"}]}</script><meta name=author content="Jane Doe">',
     {"author": "Jane Doe; John Roe; A & B; C D"}),
    ('<script type="application/ld+json">{"author": {"@id": "#me"}, "x": {"author" : {"name": "Jane Doe"}}, bad',
     {"author": "Jane Doe"}),
    ("<meta name='twitter:label1' content='Written by'><meta name='twitter:data1' content='Jane Doe'>",
     {"author": "Jane Doe"}),
    ("<meta name='twitter:label1' content='Price'><meta name='twitter:data1' content='12 dollars'>", {}),
    ('<body><div itemprop="author" itemscope><a><b itemprop="name">Jane  Doe</b></a></div>', {"author": "Jane Doe"}),
    ('<body><i itemprop="author" itemscope><meta itemprop="name" content="Jane Doe"></i>', {"author": "Jane Doe"}),
    ('<body><p>By <a href="/jane" rel="author"><span>Jane &amp; Doe</span></a>', {"author": "Jane & Doe"}),
    ('<body><a rel="author"><img src=x></a><p>no name', {}),
    # a heading with the mark of a link
    ("<title>Maps and sets - Docs</title><h1>Maps and sets<a href='#x'>¶</a></h1>", {"title": "Maps and sets"}),
    # a reference of more digits than Python reads
    (f"<title>&#{'9' * 1900};</title><meta name=author content='&#{'9' * 7000}; Doe'>",
     {"title": "\ufffd", "author": "\ufffd Doe"}),
])
def test_what_odd_pages_say(page, expected):
    assert metadata.describe(page) == expected


def test_no_page_is_from_the_future_of_its_crawl():
    page = "<meta name=pubdate content='2024-05-05'><time datetime='2019-01-01'>"
    assert metadata.describe(page)["date"] == "2024-05-05"
    assert metadata.describe(page, "2024-05-04T10:00:00Z")["date"] == "2024-05-05", "a day of time zones"
    assert metadata.describe(page, "2022-01-01")["date"] == "2019-01-01"
    assert [metadata.describe(page, f"2024-05-0{day}")["date"] for day in (3, 2)] == ["2024-05-05", "2019-01-01"]


def test_dates_do_not_depend_on_today(monkeypatch):
    class Never(datetime.date):
        @classmethod
        def today(cls):
            raise AssertionError("the clock")

    monkeypatch.setattr(datetime, "date", Never)
    assert metadata.parse_date("2031-12-24").isoformat() == "2031-12-24"


@pytest.mark.parametrize("page", ["<meta name=author content='" * 20_000, "<meta " * 60_000, '<time "' * 40_000,
                                  "<link rel=license " * 20_000, "ld+json>" * 50_000, "<h1>" * 60_000,
                                  "<a rel=license" * 30_000,
                                  'ld+json>"author":{' * 6_000, 'ld+json>"author":[{"name":' * 9_000,
                                  'ld+json>"author":"' + "\\" * 400_000,
                                  'itemprop="author"' + "<b>" * 90_000, "creativecommons.org/" * 20_000,
                                  "<html " * 50_000])
def test_hostile_heads_are_read_in_no_time(page):
    import time

    began = time.process_time()
    metadata.describe(page)
    assert time.process_time() - began < 5


def test_metadata_in_the_stage():
    raw = b"<html lang=en><head><title>A title</title><link rel=canonical href='https://e.org/c'></head><body><p>" \
          + (S * 6).encode() + b"</p><p>" + (S * 5).encode()
    doc = Document("id", raw=raw, mime="text/html", url="https://e.org/b")
    assert Html().process(doc) is None
    assert doc.meta == {"title": "A title", "lang": "en", "canonical": "https://e.org/c"}
    doc = Document("id", raw=raw, mime="text/html")
    assert Html(metadata=False).process(doc) is None and doc.meta == {} and doc.url == ""


# -- encodings -------------------------------------------------------------------------------------------------------
TEXTS = {
    "polish": "Zażółć gęślą jaźń, bo wszyscy ludzie rodzą się wolni i równi pod względem swej godności. ",
    "czech": "Příliš žluťoučký kůň úpěl ďábelské ódy, a všichni lidé se rodí svobodní a sobě rovní. ",
    "russian": "Съешь же ещё этих мягких французских булок, да выпей чаю; все люди рождаются свободными. ",
    "ukrainian": "Щастям б'єш жук їх глицю в фон й ґедзь пріч; усі люди народжуються вільними і рівними. ",
    "german": "Größere Übungen für Männer heißen süß und öde, weil alle Menschen frei und gleich geboren sind. ",
    "greek": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. ",
    "turkish": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar; akıl ve vicdana sahiptirler. ",
    "hebrew": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם, כולם חוננו בתבונה ובמצפון. ",
    "arabic": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق، وقد وهبوا عقلا وضميرا وعليهم أن يعاملوا. ",
    "lithuanian": "Visi žmonės gimsta laisvi ir lygūs savo orumu ir teisėmis, jiems suteiktas protas ir sąžinė. ",
    "thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม ",
    "chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "taiwanese": "人人生而自由，在尊嚴和權利上一律平等。他們賦有理性和良心，並應以兄弟關係的精神相對待。",
    "japanese": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. ",
}
ENCODED = [("polish", "windows-1250"), ("czech", "windows-1250"), ("czech", "iso-8859-2"), ("russian", "windows-1251"),
           ("ukrainian", "windows-1251"), ("german", "windows-1252"), ("german", "iso-8859-1"),
           ("greek", "windows-1253"), ("greek", "iso-8859-7"), ("turkish", "windows-1254"),
           ("hebrew", "windows-1255"), ("arabic", "windows-1256"),
           ("lithuanian", "windows-1257"), ("thai", "windows-874"), ("chinese", "gb18030"), ("chinese", "gb2312"),
           ("taiwanese", "big5"), ("japanese", "shift_jis"), ("japanese", "euc-jp"), ("korean", "euc-kr"),
           ("russian", "koi8-r"), ("ukrainian", "koi8-u"), ("german", "utf-16"), ("japanese", "utf-16-le"),
           ("russian", "utf-16-be")]
_PYTHON = {"windows-874": "cp874"}


@pytest.mark.parametrize(("language", "encoding"), ENCODED)
def test_pages_of_the_world(language, encoding):
    """The same text whether the encoding stands in the header, in the page, is mistaken for UTF-8, or is not said."""
    body = "".join(f"<p>{i}. {TEXTS[language] * 4}</p>" for i in range(6))
    declared = f'<meta http-equiv="Content-Type" content="text/html; charset={encoding}">'
    for charset, meta in ((encoding, ""), ("", declared), ("utf-8", ""), ("", "")):
        page = f"<!DOCTYPE html><html><head>{meta}<title>x</title></head><body>{body}</body></html>"
        raw = page.encode(_PYTHON.get(encoding, encoding))
        text, name = decode(raw, charset)
        assert text == page, (charset, meta, name, text[:200])
        assert name.startswith("utf-16") == encoding.startswith("utf-16")
        doc = Document("id", raw=raw, mime="text/html", charset=charset)
        assert Html(engine="resiliparse").process(doc) is None
        assert doc.text.count(TEXTS[language].strip()) == 24 and doc.meta["encoding"] == name


@pytest.mark.parametrize(("language", "encoding", "declared"), [
    ("russian", "windows-1251", "iso-8859-1"), ("ukrainian", "koi8-u", "windows-1252"),
    ("greek", "iso-8859-7", "iso-8859-1"), ("hebrew", "windows-1255", "windows-1250"),
    ("arabic", "windows-1256", "iso-8859-1"), ("thai", "windows-874", "windows-1252"),
    ("chinese", "gb18030", "iso-8859-1"), ("taiwanese", "big5", "windows-1250"), ("korean", "euc-kr", "iso-8859-1"),
    ("japanese", "euc-jp", "iso-8859-1"), ("japanese", "shift_jis", "iso-8859-1"),
    ("german", "windows-1252", "windows-1251"), ("german", "windows-1252", "gbk"), ("czech", "windows-1250", "koi8-r")])
def test_a_label_of_another_script_is_not_believed(language, encoding, declared):
    text = f"<html><head><title>x</title></head><body>{f'<p>{TEXTS[language] * 4}</p>' * 6}</body></html>"
    assert decode(text.encode(_PYTHON.get(encoding, encoding)), declared)[0] == text


def test_meta_behind_a_long_script():
    text = f"<html><head><script>{'x = 1; ' * 5000}</script><meta charset=iso-8859-2><p>{TEXTS['czech'] * 9}"
    assert decode(text.encode("iso-8859-2")) == (text, "iso8859-2")


def test_what_was_encoded_twice_is_undone():
    for text in (TEXTS["german"] * 9 + "“Yes”, it’s – €5 … naïve", TEXTS["russian"] * 3, TEXTS["japanese"] * 3):
        for name in ("latin-1", "cp1252"):
            twice = text.encode().decode(name, "ignore" if name == "cp1252" else "strict")
            if name == "latin-1" or twice.encode("cp1252") == text.encode():     # windows-1252 has no 0x81 …
                assert without_double_encoding(twice, twice.encode()) == text
    # a page of two minds: only what can be nothing else is undone
    both = "it’s".encode().decode("latin-1"), " it’s ".encode().decode("cp1252") + "Ã©"
    assert without_double_encoding(TEXTS["polish"] * 20 + both[0] + both[1], (both[0] + both[1]).encode()) == \
        TEXTS["polish"] * 20 + "it’s" + both[1]
    # what only looks like it
    for text in ("CAFÉ®", "Nobel-palhâšume", "À“quoi", "ÇÃO”", "Â", "â€", "naïve – façade", "Ã" * 9, *TEXTS.values()):
        assert without_double_encoding(text, text.encode()) == text
    raw = f"<html><title>It’s</title><p>{(S + 'It’s naïve. ') * 9}</html>".encode().decode("latin-1").encode()
    doc = Document("id", raw=raw, mime="text/html")
    assert Html().process(doc) is None and doc.text.count("It’s naïve.") == 9 and doc.meta["title"] == "It’s"
    assert decode(raw)[0].encode() == raw, "a program may mean it"


def test_nuls_alone_are_no_utf16():
    assert decode(b"\x00" * 300)[1] == "utf-8" and decode(b"<html>\x00<p>x")[1] == "utf-8"
    assert decode("<html><p>日本語".encode("utf-16-be"))[0] == "<html><p>日本語"


def test_encoding_is_the_same_in_another_process():
    raw = "".join(f"<p>{TEXTS['korean']}" for _ in range(9)).encode("euc-kr")
    script = "import sys\nfrom stages.text.encoding import decode\nprint(ascii(decode(sys.stdin.buffer.read())))"
    there = subprocess.run([sys.executable, "-c", script], input=raw, capture_output=True, check=True,
                           env={"PATH": "", "PYTHONHASHSEED": "1"}).stdout
    assert there == ascii(decode(raw)).encode() + b"\n"
