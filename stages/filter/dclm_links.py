"""The step `dclm_links`: removes URLs and IPv4 addresses from texts as DCLM does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from stages.stage import Stage, StageConfig, resource, signal
from stages.text.trie import trie_pattern

if TYPE_CHECKING:
    from stages.document import Document

_IPV4 = re.compile(r"\s{0,10}\b((https?|ftp)://)?(?:[0-2]?[0-9]{1,2}\.){3}[0-2]?[0-9]{1,2}"
                   r"[-a-zA-Z0-9()@:%_\+.~#?&//=]*")
#: every URL or IPv4 address contains a match of its pattern here; texts without a match are not searched further
_MAYBE_IPV4 = re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]")
_MAYBE_URL = re.compile(r"[-a-zA-Z0-9@:%._+~#=]\.\w")
_SPACE = re.compile(r"\s")


class DclmLinks(Stage):
    """Cut URLs and IPv4 addresses out of the text, with up to ten white-space characters before each, and shorten runs
    of line breaks to `max_newlines` (DCLM-baseline, arXiv 2406.11794, appendix).

    Dialect (the code it follows): DCLM at commit c7ed275, `url_removal_modifier` and `newline_removal_modifier`. A URL
    is a dotted name that ends in a top-level domain in lower case, with the path after it. DCLM's code calls `re.match`
    in place of `re.search`, so it looks for URLs only in pages *whose very first characters* spell a top-level domain,
    in upper or lower case. A page that begins with `The` is searched, because .th is a top-level domain; a page that
    begins with `A few` is not. With the setting `everywhere`, all pages are searched for URLs. IPv4 addresses are
    always looked for in all pages. Top-level domains are those of tldextract's snapshot of the public suffix list,
    unless the setting `tlds` names a file with one domain per line, like DCLM's `iana_tlds.txt` (of 2020). A document
    of which no character is left is dropped (`empty`).
    """

    name = "dclm_links"
    cost_ms, edits = 0.22, True
    libraries = ("tldextract",)
    memory_mb = 60
    signals = ("dclm_links_cut",)

    class Config(StageConfig):
        everywhere: bool = signal(False, "look for URLs in every page, not as DCLM does")
        max_newlines: int = signal(2, "most line breaks in a row", ge=1)
        tlds: str | None = resource(None, "file of top-level domains, one a line; null: those tldextract ships")

    def setup(self) -> None:
        tlds = trie_pattern(_tlds(self.config.tlds))
        self._start = re.compile(tlds, re.IGNORECASE)
        self._url = re.compile(rf"\s{{0,10}}(?:((https?|ftp)://))?[-a-zA-Z0-9@:%._\+~#=]{{1,256}}\.({tlds})\b"
                               r"([-a-zA-Z0-9()@:%_\+.~#?&//=]*)")
        self._newlines = re.compile(rf"\n{{{self.config.max_newlines + 1},}}")

    def process(self, doc: Document) -> str | None:
        text = doc.text
        if self.config.everywhere or self._start.match(text):
            text = self._without_urls(text)
        if _MAYBE_IPV4.search(text):
            text = _IPV4.sub("", text)
        cut = len(doc.text) - len(text)
        if text and "\n" * (self.config.max_newlines + 1) in text:
            text = self._newlines.sub("\n" * self.config.max_newlines, text)
        doc.signals["dclm_links_cut"] = cut
        if not text:
            return "empty"
        if text != doc.text:
            doc.text = text
        return None

    def _without_urls(self, text: str) -> str:
        """Return a text without the URLs in it. The result equals `self._url.sub("", text)`. For speed, only stretches
        of the text around something like a host name are searched; such a stretch ends at white space. Nothing is
        missed, because white space occurs only at the beginning of a match, so no match reaches beyond a stretch."""
        out: list[str] = []
        place = 0
        for match in _MAYBE_URL.finditer(text):
            hit = match.start()
            if hit < place:
                continue
            begin = hit
            while begin > place and not text[begin - 1].isspace():
                begin -= 1
            while begin > place and text[begin - 1].isspace():
                begin -= 1
            space = _SPACE.search(text, hit)
            end = space.start() if space else len(text)
            out += text[place:begin], self._url.sub("", text[begin:end])
            place = end
        out.append(text[place:])
        return "".join(out)


def _tlds(path: str | None) -> list[str]:
    """Return the top-level domains by which URLs are recognised. They come from the file `path`, or from tldextract if
    `path` is None. Raises ValueError, which names the file, if the file holds no domain."""
    if path is not None:
        result = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        result = [tld for tld in result if tld and not tld.startswith("#")]
        if not result:
            raise ValueError(f"dclm_links: tlds: {path} holds no top-level domain; give one a line, like `com`")
        return result
    import tldextract

    return [suffix for suffix in tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None).tlds if "." not in suffix]
