"""Rules about the URL of a document."""

from __future__ import annotations

import importlib.util
import re
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from stages.stage import Stage, StageConfig, decision, file_sha256, resource, signal
from stages.text.hashlist import HashList, write_hashes
from stages.text.spacy_export import cache_dir

if TYPE_CHECKING:
    from stages.document import Document

_NOT_WORD = re.compile(r"[^a-zA-Z0-9]+")


class Url(Stage):
    """Drop documents from blocked sites and with blocked words in their URL (RefinedWeb, arXiv 2306.01116, G.1).

    Dialect: datatrove 0.10.1 (`URLFilter`). In this order: registered `domain`, then `subdomain` (the whole host) in
    the list of domains; the `url` in the list of URLs; one banned word (`hard_blacklisted`, words are the runs of
    letters and digits in their own case); `soft_words` different soft words (`soft_blacklisted`); a banned substring of
    the URL without its other characters (`blacklisted_subword`). With `integrated` the lists datatrove ships take part
    (4.5 million domains by the University of Toulouse, and RefinedWeb's words); the named files add to them, one
    entry a line, # begins a comment. Public suffixes are those of tldextract's snapshot, never fetched.

    A document without a URL is kept: there is nothing to judge (`url_soft_words` is then unknown).
    """

    name = "url"
    version = 2
    libraries = ("datatrove", "tldextract")
    signals = ("url_soft_words",)
    memory_mb = 120

    class Config(StageConfig):
        integrated: bool = signal(True, "use the lists that ship with datatrove")
        soft_words: int = decision(2, "drop at this many different soft words")
        domains: str | None = resource(None, "file of more blocked domains and hosts")
        urls: str | None = resource(None, "file of more blocked URLs")
        banned_words: str | None = resource(None, "file of more words that must not stand in a URL")
        banned_subwords: str | None = resource(None, "file of more strings a URL must not contain")
        soft_banned_words: str | None = resource(None, "file of more words of which a URL may hold few")

    def setup(self) -> None:
        import tldextract

        config = self.config
        self._split = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
        self._domains = self._lists("domains", config.domains)
        self._urls = self._lists("urls", config.urls)
        self._banned = self._words("banned_words", config.banned_words)
        self._soft = self._words("soft_banned_words", config.soft_banned_words)
        subwords = sorted(self._words("banned_subwords", config.banned_subwords))
        self._subword = re.compile("|".join(map(re.escape, subwords))) if subwords else None

    def _lists(self, name: str, extra: str | None) -> list[HashList]:
        found = []
        if self.config.integrated:
            found.append(HashList(_hashed(_assets() / "url_filterblacklistsv0_3_0.tar.gz", name)))
        if extra is not None:
            found.append(HashList(_hashed(Path(extra))))
        return found

    def _words(self, name: str, extra: str | None) -> frozenset[str]:
        files = [_assets() / f"{name}.txt"] if self.config.integrated else []
        files.extend([Path(extra)] if extra is not None else [])
        words = (_NOT_WORD.sub("", line).lower() for file in files
                 for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
        return frozenset(word for word in words if word)

    def process(self, doc: Document) -> str | None:
        url = doc.url
        if not url:
            return None
        words = set(_NOT_WORD.split(url))
        doc.signals["url_soft_words"] = len(words & self._soft)
        host = self._split(url)
        registered = f"{host.domain}.{host.suffix}" if host.domain and host.suffix else ""
        # an IP address or "localhost" has neither: no list is asked for a name that is empty
        if registered and any(registered in blocked for blocked in self._domains):
            return "domain"
        if host.fqdn and any(host.fqdn in blocked for blocked in self._domains):
            return "subdomain"
        if any(url in blocked for blocked in self._urls):
            return "url"
        if not words.isdisjoint(self._banned):
            return "hard_blacklisted"
        reason = self.verdict(doc)
        if reason is None and self._subword is not None and self._subword.search(_NOT_WORD.sub("", url).lower()):
            return "blacklisted_subword"
        return reason

    def verdict(self, doc: Document) -> str | None:
        """The decision about soft words alone: the only one that a threshold takes part in."""
        return "soft_blacklisted" if doc.signals.get("url_soft_words", -1) >= self.config.soft_words else None


def _assets() -> Path:
    """Folder of the lists inside the installed datatrove (which is not imported: 0.4 s)."""
    spec = importlib.util.find_spec("datatrove")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("url: integrated lists ship with datatrove, which is not installed: "
                                  "`pip install datatrove`, or set integrated: false and name your own lists")
    return Path(spec.submodule_search_locations[0]) / "assets"


def _hashed(file: Path, member: str | None = None) -> Path:
    """The hashes of a list, made at first use and kept in the cache under its content."""
    path = cache_dir() / "lists" / f"{file_sha256(file)[:32]}{'.' + member if member else ''}.npy"
    if not path.exists():
        if member is None:
            with open(file, "rb") as lines:
                write_hashes(lines, path)
        else:
            with tarfile.open(file, "r:gz") as tar:
                lines = tar.extractfile(member)
                if lines is None:
                    raise ValueError(f"{file}: holds no file '{member}'")
                write_hashes(lines, path)
    return path
