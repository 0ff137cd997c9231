"""The filter `url`: drops documents whose URL is from a blocked site or holds blocked words."""

from __future__ import annotations

import gzip
import importlib.util
import re
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal
from urllib.parse import urlsplit

from pydantic import model_validator

from stages.filter.blacklists import Blacklists, categories_of, host_span
from stages.stage import Stage, StageConfig, decision, file_sha256, resource, signal
from stages.text.cache import cache_dir, cached
from stages.text.hashlist import HashList, entry, write_hashes
from stages.text.marks import Span, pattern_spans, pattern_spans_without, same_length_lower
from stages.text.trie import trie_pattern

if TYPE_CHECKING:
    from tldextract import TLDExtract

    from stages.document import Document

_NOT_WORD = re.compile(r"[^a-zA-Z0-9]+")
_WORD = re.compile(r"[a-zA-Z0-9]+")
#: characters that the dialect `dclm` leaves out of a URL before it looks for strict words
_DCLM_LEFT_OUT = re.compile(r"[-.]")
#: reason → setting that names the words that were found
_WORD_LISTS = {"hard_blacklisted": "banned_words", "soft_blacklisted": "soft_banned_words",
               "blacklisted_subword": "banned_subwords"}
_NOT_NAME = re.compile(r"[^a-z0-9]+")
#: categories of UT1 that RefinedWeb blocks (arXiv 2306.01116, G.1)
_REFINEDWEB = ("adult", "phishing", "dating", "gambling", "filehosting", "ddos", "agressif", "chat", "mixed_adult",
               "arjel")
#: archives up to this many bytes are read while a recipe is checked; larger ones only in `setup`
_MOST_CHECKED_BYTES = 64 << 20


class Url(Stage):
    """Drop documents from blocked sites and with blocked words in their URL (RefinedWeb, arXiv 2306.01116, G.1).

    Blocked words come in three degrees. A *strict* word blocks a URL that contains it anywhere (`banned_subwords`), a
    *hard* word blocks only as a whole word (`banned_words`), and *soft* words block if at least `soft_words` different
    ones occur (`soft_banned_words`).

    Dialect `datatrove` follows the code of datatrove 0.10.1 (`URLFilter`). A document is dropped for the first of these
    reasons that applies:

    - `domain` or `subdomain`: the registered domain or the whole host is in the list of domains.
    - `url`: the URL is in the list of URLs.
    - `hard_blacklisted`: a hard word occurs. Words are runs of letters and digits, with their case.
    - `soft_blacklisted`: enough soft words occur.
    - `blacklisted_subword`: a strict word occurs in the letters and digits of the URL.

    Public suffixes are those of tldextract's snapshot; nothing is fetched from the network.

    Dialect `dclm` follows DCLM at commit c7ed275 (`url_substring_filter` in `dclm_baseline_refinedweb.yaml`), which
    ignores case. The rule `domain` looks up the host with its port and without every "www" (so that `www.bad.com` is
    looked up as `.bad.com`). The next rules are the list of URLs, strict words in the URL without `-` and `.`, hard
    words between word boundaries, and soft words. Entries of word lists keep their hyphens and other marks, which the
    dialect `datatrove` removes.

    With `integrated`, the lists that datatrove ships are used (4.5 million domains by the University of Toulouse, and
    RefinedWeb's words). Files named in the settings for lists add entries to these. Such a file has one entry per line
    and may be gzipped; a line that begins with # is a comment.

    The setting `blacklists` names an archive in the layout of UT1, the University of Toulouse's lists by category. The
    hosts and URLs in its categories `categories` are blocked, and so are all subdomains and all URLs below them. This
    rule is applied after the list of URLs. Its reason names the category, such as `url_gambling`. The signal
    `url_category` (a number stored with the document) is the number of the category that blocks the URL: 1 for the
    first, 0 for none, null without `blacklists`.

    A document without a URL is kept, and its signals are null.
    """

    name = "url"
    verdict_is_whole = False
    reads_text = False
    version = 3
    cost_ms = 0.02
    leaves = 0.97
    drops = True
    libraries = ("datatrove", "tldextract")
    signals = ("url_soft_words", "url_category")
    memory_mb = 120

    class Config(StageConfig):
        dialect: Literal["datatrove", "dclm"] = signal(
            "datatrove", "project whose rules for looking up words and hosts are followed")
        integrated: bool = signal(True, "use the lists that ship with datatrove")
        soft_words: int = decision(2, "drop at this many different soft words")
        domains: str | None = resource(None, "file of more blocked domains and hosts")
        urls: str | None = resource(None, "file of more blocked URLs")
        banned_words: str | None = resource(None, "file of more hard words, which block a URL as whole words")
        banned_subwords: str | None = resource(None, "file of more strict words, which block a URL anywhere in it")
        soft_banned_words: str | None = resource(None, "file of more soft words, of which `soft_words` block a URL")
        blacklists: str | None = resource(None, "archive of lists by category: UT1's blacklists.tar.gz, or one like it")
        categories: tuple[str, ...] = signal(_REFINEDWEB, "categories of the archive that are blocked", max_length=255)

        @model_validator(mode="after")
        def _each_once(self) -> Url.Config:
            if self.blacklists is not None and not self.categories:
                raise ValueError("categories: name those of the archive that are to be blocked, or take blacklists out")
            if len(set(self.categories)) < len(self.categories):
                raise ValueError("categories: one is named twice")
            return self

    def problems(self) -> dict[str, str]:
        path = self.config.blacklists
        if path is None or not Path(path).is_file() or Path(path).stat().st_size > _MOST_CHECKED_BYTES:
            return {}
        try:
            available = categories_of(Path(path))
        except ValueError as e:
            return {"blacklists": str(e)}
        for name in self.config.categories:
            if name not in available:
                return {"categories": f"the archive has no '{name}'; it has {', '.join(available) or 'none'}"}
        return {}

    def setup(self) -> None:
        config = self.config
        self._split = _split_host()
        self._domains = self._lists("domains", config.domains)
        self._urls = self._lists("urls", config.urls)
        self._banned = self._words("banned_words", config.banned_words)
        self._soft = self._words("soft_banned_words", config.soft_banned_words)
        self._subword = _pattern_of(self._words("banned_subwords", config.banned_subwords))
        self._banned_search = _pattern_of(self._banned, r"\b")
        self._soft_search = _pattern_of(self._soft, r"\b")
        self._categories = Blacklists(Path(config.blacklists), config.categories) if config.blacklists else None

    def _lists(self, name: str, extra: str | None) -> list[HashList]:
        lower = self.config.dialect == "dclm"
        result = []
        if self.config.integrated:
            result.append(HashList(_hashed(_datatrove_lists() / "url_filterblacklistsv0_3_0.tar.gz", name, lower)))
        if extra is not None:
            result.append(HashList(_hashed(Path(extra), None, lower)))
        return result

    def _words(self, name: str, extra: str | None) -> frozenset[str]:
        files = [_datatrove_lists() / f"{name}.txt"] if self.config.integrated else []
        files.extend([Path(extra)] if extra is not None else [])
        lines = [line for file in files for line in _decoded(file).splitlines() if not line.startswith("#")]
        if self.config.dialect == "datatrove":
            lines = [_NOT_WORD.sub("", line) for line in lines]
        return frozenset(line.lower() for line in lines if line.strip())

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        url = doc.url
        if not url:
            return None
        if self._categories is not None:
            doc.signals["url_category"] = self._categories.category(url)
        return (self._as_dclm if self.config.dialect == "dclm" else self._as_datatrove)(doc, url)

    def _as_datatrove(self, doc: Document, url: str) -> str | None:
        words = set(_NOT_WORD.split(url))
        doc.signals["url_soft_words"] = len(words & self._soft)
        host = self._split(url)
        registered = f"{host.domain}.{host.suffix}" if host.domain and host.suffix else ""
        # an IP address or "localhost" has no registered domain; an empty name is not looked up
        if registered and any(registered in blocked for blocked in self._domains):
            return "domain"
        if host.fqdn and any(host.fqdn in blocked for blocked in self._domains):
            return "subdomain"
        if any(url in blocked for blocked in self._urls):
            return "url"
        if doc.signals.get("url_category"):
            return self.verdict(doc)
        if not words.isdisjoint(self._banned):
            return "hard_blacklisted"
        reason = self.verdict(doc)
        if reason is None and self._subword is not None and self._subword.search(_NOT_WORD.sub("", url).lower()):
            return "blacklisted_subword"
        return reason

    def _as_dclm(self, doc: Document, url: str) -> str | None:
        lower = url.lower()
        doc.signals["url_soft_words"] = len(set(self._soft_search.findall(lower))) if self._soft_search else 0
        try:
            host = urlsplit(lower).netloc.replace("www", "")
        except ValueError:                                 # "[" without "]"
            host = ""
        if host and any(host in blocked for blocked in self._domains):
            return "domain"
        if any(lower in blocked for blocked in self._urls):
            return "url"
        if doc.signals.get("url_category"):
            return self.verdict(doc)
        if self._subword is not None and self._subword.search(lower.replace("-", "").replace(".", "")):
            return "blacklisted_subword"
        if self._banned_search is not None and self._banned_search.search(lower):
            return "hard_blacklisted"
        return self.verdict(doc)

    def verdict(self, doc: Document) -> str | None:
        """Decide from the stored signals whether a document is dropped: by the category that blocks its URL, and by its
        number of soft words (words that block a URL only together). Returns the reason, or None. Lists of domains, URLs
        and other words are not looked up here, because they have no threshold."""
        category = int(doc.signals.get("url_category") or 0)
        if category:
            return _reason_of(self.config.categories[category - 1])
        return "soft_blacklisted" if doc.signals.get("url_soft_words", -1) >= self.config.soft_words else None


    # -- places in a URL ---------------------------------------------------------------------------------------------
    def url_matches(self, url: str, reason: str) -> list[Span]:
        """Return the parts of a URL for which it was dropped. Lists of domains and of URLs are not looked up again,
        because the reason says which part of the URL is in them."""
        if reason == "url":
            return [(0, len(url))]
        if reason in ("domain", "subdomain"):
            return self._blocked_name(url, reason)
        if reason in _WORD_LISTS:
            return self._blocked_words(url, _WORD_LISTS[reason])
        if self.config.blacklists is None:
            return []
        categories = self.config.categories
        place = next((place for number, name in enumerate(categories, 1) if _reason_of(name) == reason
                      and (place := Blacklists(Path(self.config.blacklists), categories).place(url, number))), None)
        return [place] if place is not None else []

    def _blocked_name(self, url: str, reason: str) -> list[Span]:
        begin, end = host_span(url)
        if self.config.dialect == "datatrove":
            host = _split_host()(url)
            name = host.fqdn if reason == "subdomain" else f"{host.domain}.{host.suffix}"
            begin = url.rfind(name, begin, end)
            end = begin + len(name)
        return [(begin, end)] if 0 <= begin < end else []

    def _blocked_words(self, url: str, name: str) -> list[Span]:
        words = self._words(name, getattr(self.config, name))
        lower, is_dclm = same_length_lower(url), self.config.dialect == "dclm"
        if name == "banned_subwords":
            pattern = _pattern_of(words)
            left_out = _DCLM_LEFT_OUT if is_dclm else _NOT_WORD
            return pattern_spans_without(pattern, left_out, lower) if pattern is not None else []
        if not is_dclm:
            return [match.span() for match in _WORD.finditer(url) if match[0] in words]
        pattern = _pattern_of(words, r"\b")
        return pattern_spans(pattern, lower) if pattern is not None else []


def _split_host() -> TLDExtract:
    import tldextract

    return tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


def _reason_of(category: str) -> str:
    return f"url_{_NOT_NAME.sub('_', category.lower())}"


def _lower(line: bytes) -> bytes:
    return entry(line).decode("utf-8", "replace").lower().encode()


def _pattern_of(words: frozenset[str], boundary: str = "") -> re.Pattern[str] | None:
    return re.compile(f"{boundary}{trie_pattern(words)}{boundary}") if words else None


def _datatrove_lists() -> Path:
    """Return the folder of the lists of blocked sites in the installed package datatrove. The package is not imported,
    because an import takes 0.4 s."""
    spec = importlib.util.find_spec("datatrove")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("url: integrated lists ship with datatrove, which is not installed: "
                                  "`pip install datatrove`, or set integrated: false and name your own lists")
    return Path(spec.submodule_search_locations[0]) / "assets"


def _unpacked(file: Path) -> BinaryIO:
    """Open a list of blocked sites or words for reading. A gzip file is decompressed. It is recognised by its first
    bytes and not by its name, because results are cached by the contents of files and not by their names."""
    with open(file, "rb") as f:
        packed = f.read(2) == b"\x1f\x8b"
    return gzip.open(file) if packed else open(file, "rb")          # type: ignore[return-value]


def _decoded(file: Path) -> str:
    with _unpacked(file) as lines:
        try:
            return lines.read().decode("utf-8")
        except UnicodeDecodeError as e:
            raise ValueError(f"{file} is no text in UTF-8 ({e}); convert it, e.g. by iconv") from None


def _hashed(file: Path, member: str | None = None, lower: bool = False) -> Path:
    """Return the path of a file with the hashes of the entries of a list (of blocked sites). The file of hashes is made
    when it is first needed, and is cached under the hash of the list's content. `member` names the list inside a
    .tar.gz archive. With `lower`, entries are put into lower case before they are hashed."""

    def write(path: Path) -> None:
        to_entry = _lower if lower else entry
        if member is not None:
            with tarfile.open(file, "r:gz") as tar:
                lines = tar.extractfile(member)
                if lines is None:
                    raise ValueError(f"{file}: holds no file '{member}'")
                write_hashes(lines, path, to_entry)
        else:
            with _unpacked(file) as lines:
                write_hashes(lines, path, to_entry)

    kind = f"{'.' + member if member else ''}{'.lower' if lower else ''}"
    return cached(cache_dir() / "lists" / f"{file_sha256(file)[:32]}{kind}.npy", write)
