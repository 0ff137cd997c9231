"""The step `html`, which extracts the main text of a web page."""

from __future__ import annotations

import contextlib
import logging
import re
from functools import cached_property
from importlib import metadata
from typing import Any, Literal, Protocol

from pydantic import model_validator

from stages.catalog import load
from stages.document import Document
from stages.extract.html import limits
from stages.extract.html.math import formulas_as_tex
from stages.extract.html.metadata import describe
from stages.stage import Stage, StageConfig, signal
from stages.text.encoding import decode, without_double_encoding

#: a file that begins with one of these is no page, whatever the server declared
_BINARY = (b"%PDF-", b"\x89PNG", b"GIF8", b"\xff\xd8\xff", b"PK\x03\x04", b"\x1f\x8b", b"RIFF", b"\x00\x00\x01\x00",
           b"ID3", b"OggS", b"\x7fELF", b"MZ\x90", b"Rar!", b"7z\xbc\xaf", b"BZh", b"\xfd7zXZ", b"wOFF", b"wOF2")
_DECLARED = ("text/html", "application/xhtml+xml", "application/vnd.wap.xhtml+xml")
#: Text that is not declared as HTML counts as a page if it begins with `<` and has one of these tags: those of WHATWG
#: MIME sniffing §7.1, and tags with which pages without <html> begin.
_PAGE = re.compile(r"<(?:!doctype\s+html|html|head|body|script|iframe|h1|div|font|table|style|title|p|br|b|a|meta)"
                   r"[\s>/]", re.IGNORECASE)
#: libxml2 stops building the tree at this depth
DEEPEST = 255


class Engine(Protocol):
    """Interface of an extraction engine, which extracts the main text of a web page. The constructor gets the settings
    `favor`, `fast`, `tables`, `comments` and `max_depth` of the step as keyword arguments, and ignores arguments that
    it does not use.

    An engine must give the same text for the same page on every machine, whatever pages it read before. It therefore
    keeps no state between pages, reads no clock, and limits long work by counting operations. An engine that computes
    signals (numbers stored beside the text, named in `SIGNALS`) keeps the signals of the last page in its attribute
    `signals`.
    """

    def text(self, page: str) -> str | None:
        """Returns the main text of a page; "" when the page has none; None when elements nest deeper than `max_depth`,
        or when extraction would exceed the engine's limit of work."""

    def markdown(self, page: str) -> str | None:
        """Returns the main text of a page as the method `text` does, but with headings, lists, tables, code and
        formulas written as Markdown."""


EngineName = Literal["trafilatura", "resiliparse", "justext", "readability", "mill"]
#: name → "module:Class" of an Engine. To add an engine, add its name to `EngineName` and a line here.
ENGINES: dict[EngineName, str] = {
    "trafilatura": "stages.extract.html.trafilatura:Trafilatura",
    "resiliparse": "stages.extract.html.resiliparse:Resiliparse",
    "justext": "stages.extract.html.justext:JusText",
    "readability": "stages.extract.html.readability:Readability",
    "mill": "stages.extract.html.mill.engine:Mill",
}
#: Python distributions whose versions may change an engine's text. `resiliparse` is added for every engine, because it
#: detects the encoding.
_ON_LXML = ("trafilatura", "justext", "lxml")
LIBRARIES = {"trafilatura": _ON_LXML, "justext": _ON_LXML, "readability": _ON_LXML, "resiliparse": ("lxml",),
             "mill": ()}
#: the version of trafilatura whose XPath expressions are replaced by faster rules (`stages.extract.html.xpath_rules`)
FAST_TRAFILATURA = "2.3.1"
#: settings that only these engines use; a recipe that sets one with another engine is refused
KNOWN_TO = {"favor": ("trafilatura", "mill"), "fast": ("trafilatura",),
            "tables": ("trafilatura", "readability", "mill"), "comments": ("trafilatura", "resiliparse", "mill")}
#: signals of an engine besides those of the step
SIGNALS = {"mill": ("html_expected_f1",)}
#: version of the step for an engine whose texts have changed; the results of other engines stay valid
VERSIONS = {"mill": 5}


class Html(Stage):
    """Extracts the main text of a web page, with one of five extraction engines (setting `engine`).

    Reads the page's bytes from `raw` and writes `text`. A document without `raw` keeps its `text`. Reasons for dropping
    a document:

    - `not_html`: the bytes are not a web page
    - `html_too_many_nodes`: a parser would create more than `max_nodes` elements, or the page has too many attributes,
      options or templates (`stages.extract.html.limits`)
    - `html_too_deep`: elements nest too deep, or the page would take the engine too much work
    - `no_text`: no text was found

    A page of more than `max_bytes` bytes loses its scripts, styles, comments and drawings before it is read. If it is
    still too long, its end is cut off. The signal `html_cut_bytes` is the number of bytes that were not read. About 1 %
    of real pages are above 2 MB, and nearly all of these lose only scripts and styles.

    With the same versions of the libraries, the same bytes give the same text on any machine. All limits are counts and
    there is no timeout. No state is kept from one page to the next. trafilatura's option `deduplicate` is not offered,
    because it would make the text of a page depend on the pages before it.

    The engines were measured on 1,182 pages of seven kinds with reference texts, from sites on which the model of the
    engine mill was not trained (benchmarks/html_extraction.py). The table gives the mean word F1 and the CPU
    milliseconds per page, from decoded page to main text. The machine was busy, so only the ratios of the times count:

        mill (default)                 0.922   3.2      resiliparse                    0.844   2.5
        trafilatura 2.3.1 balanced     0.889  16.8      justext                        0.753   7.7
        … precision                    0.841  19.6      readability                    0.694   7.7

    Other settings of trafilatura (benchmarks/html_engines.py): with `fast` the F1 is 0.858, with `favor: recall` 0.875;
    both take 0.6 of the time of `favor: balanced`. With its own XPath expressions, instead of the rules that replace
    them (`stages.extract.html.xpath_rules`), trafilatura takes 1.7 times as long. jusText and readability are made for
    articles; on the articles among these pages their F1 is 0.80 and 0.90. docs/texts.md has the numbers for news pages.
    `metadata` takes about 0.4 ms per page. Markdown takes 2 to 3 ms more than plain text, most of it to search for
    formulas.

    `meta` gets facts that the page states about itself:

    - `title`, `author`, `date` (of publication, YYYY-MM-DD), and `lang`, which is often wrong
    - `canonical`: the page's canonical address, if it is not the document's URL. A document without URL gets it as its
      URL.
    - `license`: the URL of a licence of something on the page
    - `robots`, `tdm`, `tdm_policy`, `rights`: declarations that the step `rights` reads

    `meta.encoding` is set when the encoding of the page is not UTF-8.
    """

    name = "html"
    version = 4
    cost_ms, leaves = 0.55, 0.04
    libraries: tuple[str, ...] = ("resiliparse",)
    signals: tuple[str, ...] = ("html_cut_bytes",)
    extracts = True
    memory_mb = 600

    class Config(StageConfig):
        engine: EngineName = signal("mill", "extraction engine, which finds the main text")
        format: Literal["text", "markdown"] = signal("text", "plain text, or Markdown: headings, lists, tables, code, "
                                                             "formulas")
        favor: Literal["balanced", "precision", "recall"] = signal(
            "balanced", "trafilatura, mill: precision leaves out doubtful text, recall keeps it")
        fast: bool = signal(False, "trafilatura: do not run its fallback extractors, readability and justext")
        tables: bool = signal(True, "trafilatura, readability, mill: keep the text of tables")
        comments: bool = signal(False, "trafilatura, resiliparse, mill: keep readers' comments")
        metadata: bool = signal(True, "note title, author, date, canonical URL, language and licence in meta")
        max_bytes: int = signal(2_000_000, "most bytes of a page that are read; from a longer page, scripts, "
                                           "styles, drawings and inline images are removed first, then its end", gt=0)
        max_nodes: int = signal(60_000, "most elements; beyond: html_too_many_nodes", gt=0)
        max_depth: int = signal(DEEPEST, "deepest nesting of elements; beyond: html_too_deep", gt=0, le=DEEPEST)

        @model_validator(mode="after")
        def _known_to_the_engine(self) -> Html.Config:
            for field, engines in KNOWN_TO.items():
                if self.engine not in engines and getattr(self, field) != type(self).model_fields[field].default:
                    raise ValueError(f"{field}: the engine '{self.engine}' does not know this setting; name one that "
                                     f"does (engine: {' or '.join(engines)}), or leave it out")
            return self

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self.libraries = (*Html.libraries, *LIBRARIES[self.config.engine])
        self.signals = (*Html.signals, *SIGNALS.get(self.config.engine, ()))
        self.version = VERSIONS.get(self.config.engine, Html.version)

    def warnings(self) -> list[str]:
        installed = FAST_TRAFILATURA
        if self.config.engine == "trafilatura":
            with contextlib.suppress(metadata.PackageNotFoundError):         # `setup` says that it is missing
                installed = metadata.version("trafilatura")
        if installed == FAST_TRAFILATURA:
            return []
        return [f"trafilatura {installed} takes 1.7 times the CPU time of {FAST_TRAFILATURA}, which alone runs with "
                f"faster rules; pip install trafilatura=={FAST_TRAFILATURA}"]

    def setup(self) -> None:
        self._engine  # noqa: B018 - made here, so that this time does not count as the first document's

    def warm(self) -> None:
        limits.count_nodes(b"<p>", 1)
        self._engine.markdown("<p>A page.")

    @cached_property
    def _engine(self) -> Engine:
        # trafilatura would log an error for every malformed page; the reasons of dropped documents are counted anyway
        logging.getLogger("tokenmill_trafilatura").setLevel(logging.CRITICAL)
        names = ("favor", "fast", "tables", "comments", "max_depth")
        engine: Engine = load(ENGINES[self.config.engine])(**{name: getattr(self.config, name) for name in names})
        return engine

    def process(self, doc: Document) -> str | None:
        raw = doc.raw
        if raw is None:
            return None if doc.text else "no_text"
        if raw.startswith(_BINARY):
            return "not_html"
        data = limits.shorten(raw, self.config.max_bytes)
        doc.signals["html_cut_bytes"] = float(len(raw) - len(data))
        page, encoding = decode(data, doc.charset)
        if not is_page(page, doc.mime):
            return "not_html"
        utf8 = data if encoding == "utf-8" else page.encode("utf-8", "surrogatepass")
        if limits.count_nodes(utf8, self.config.max_nodes) > self.config.max_nodes:
            return "html_too_many_nodes"
        page = without_double_encoding(page, utf8)
        text = self._engine.text(page) if self.config.format == "text" else self._engine.markdown(formulas_as_tex(page))
        if text is None:
            return "html_too_deep"
        doc.signals.update(getattr(self._engine, "signals", {}))
        if encoding != "utf-8":
            doc.meta["encoding"] = encoding
        if self.config.metadata:
            facts = describe(page, doc.date or "")
            canonical = facts.pop("canonical", "")
            if not doc.url:
                doc.url = canonical
            elif canonical not in ("", doc.url):
                facts["canonical"] = canonical
            doc.meta.update(facts)
        doc.text = limits.stream_safe(text).strip()
        return None if doc.text else "no_text"


def is_page(page: str, mime: str) -> bool:
    """Whether a text is HTML. `mime` is the content type that the server declared.

    - Declared as HTML: the text is HTML if it holds a `<` and does not begin like a feed or JSON.
    - Declared as plain text: it is not HTML.
    - Anything else, or nothing, declared: it is HTML if it begins with `<` and has a tag of a page (`_PAGE`) among its
      first 1,024 characters. Some pages are declared as `application/xml`. If the text begins with an XML declaration,
      these characters must hold `<html`.
    """
    start = page[:1024].lstrip("\ufeff \t\r\n\f\x00")
    if mime in _DECLARED:
        return "<" in page and not start.startswith(("<?xml-stylesheet", "<rss", "<feed", "{", "["))
    if mime == "text/plain":
        return False
    if start.startswith("<?xml") and "<html" not in start.lower():
        return False
    return start.startswith("<") and _PAGE.search(start) is not None
