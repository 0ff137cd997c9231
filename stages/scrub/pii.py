"""Replaces personal data in text by placeholders or pseudonyms, or drops the documents that hold it.

`Pii` is the step of a recipe. The functions `scrub_text` and `scrub_value` scrub everything that is shown or sampled
(reports, quarantine, dropped documents). They find all kinds of personal data that can be found without a model. The
step and the functions take time proportional to the length of the text, so no hostile page can make them exceed a time
limit. docs/pii.md explains how to choose kinds and replacements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import field_validator, model_validator

from stages.scrub import names
from stages.scrub.find import Finder, Match, find, merged
from stages.scrub.network import emails, ipv4, ipv6
from stages.scrub.pseudonyms import Pseudonyms, is_fake
from stages.stage import Stage, StageConfig, decision, resource, signal
from stages.text.marks import Span, pattern_spans

if TYPE_CHECKING:
    from stages.document import Document

EMAILS = ("email@example.com", "firstname.lastname@example.org")
#: datatrove's replacements: addresses that did not answer when the list was drawn up
IPV4S = ("22.214.171.124", "126.96.36.199", "188.8.131.52", "184.108.40.206", "220.127.116.11", "18.104.22.168")
#: documentation addresses (RFC 3849)
IPV6S = ("2001:db8::1", "2001:db8::2")
#: replacements by rule or, for all other rules, by kind; those in angle brackets are named as in Microsoft Presidio
PLACEHOLDERS: dict[str, tuple[str, ...]] = {
    "email": EMAILS, "ipv4": IPV4S, "ipv6": IPV6S, "cards": ("<CREDIT_CARD>",), "ibans": ("<IBAN_CODE>",),
    "phones": ("<PHONE_NUMBER>",), "ids": ("<NATIONAL_ID>",), "secrets": ("<SECRET_KEY>",), "wallets": ("<CRYPTO>",),
    "names": ("<PERSON>",), "addresses": ("<ADDRESS>",)}
Kind = Literal["emails", "ips", "cards", "ibans", "phones", "ids", "secrets", "wallets", "names", "addresses"]
#: kinds that a model finds
MODELLED = ("names", "addresses")
KINDS: tuple[Kind, ...] = get_args(Kind)


class Pii(Stage):
    """Replace personal data in texts by placeholders or pseudonyms. By default, only e-mail and public IPv4 addresses
    are replaced (FineWeb, arXiv 2406.17557, section 3.8).

    Dialect (the code it follows): datatrove 0.10.1 (`PIIFormatter`) for e-mail and IP addresses. The text is byte for
    byte what a newly made `PIIFormatter` returns for the document. datatrove uses several replacements in turn across
    all documents of a process, so its text of a document depends on earlier documents. In this step, each document
    begins with the first replacement again. The domain of an e-mail address is searched for at most 319 characters
    after the @.

    The other kinds of data are off by default; the modules in `stages.scrub` say what is found and why. Names and
    postal addresses are found by a model (`stages.scrub.names`), whose results may differ between kinds of CPU.

    For each kind that is on, the signal `pii_KIND` (a number stored with the document) counts the values that the text
    held. A document that holds data of a kind named in the setting `drop` is dropped; the reason is the name of the
    signal. With `audit`, `meta.pii` says where the replacements are in the text that this step returns: [{kind, rule,
    start, end}] in UTF-8 bytes, never the values themselves.

    Values in the strings of `meta` (title, canonical address …) are also replaced, but not counted. The document's
    `url` stays unchanged, because it identifies the page for deduplication. The positions in `loss_spans` (the
    stretches of a text that training learns from) are moved to fit the new text. At each border of such a stretch, the
    first replacement is used again. A document in which a value lies across such a border is quarantined.
    """

    name = "pii"
    version = 4
    cost_ms, edits = 0.05, True
    scrubs = True
    memory_mb = 20
    signals: tuple[str, ...] = ("pii_emails", "pii_ips")

    class Config(StageConfig):
        emails: bool = signal(True, "replace e-mail addresses")
        ips: bool = signal(True, "replace IPv4 addresses")
        ipv6: bool = signal(False, "replace IPv6 addresses, too (datatrove does not)")
        public_only: bool = signal(True, "leave addresses of private and reserved networks alone")
        cards: bool = signal(False, "replace numbers of payment cards (issuer, length, Luhn)")
        ibans: bool = signal(False, "replace bank accounts (IBAN: country, length, MOD 97)")
        phones: bool = signal(False, "replace telephone numbers in international form")
        region: str = signal("", "country (ISO 3166, e.g. US) whose local telephone numbers are replaced with `phones`")
        ids: tuple[str, ...] = signal((), "countries whose national ids are replaced (us, de …), or all")
        secrets: bool = signal(False, "replace API keys, tokens and private keys")
        wallets: bool = signal(False, "replace addresses of cryptocurrencies")
        names: bool = signal(False, "replace names of persons, as `model` finds them")
        addresses: bool = signal(False, "replace postal addresses, as `model` finds them")
        model: str | None = resource(None, "folder of a model that finds names or addresses: a spaCy pipeline, or "
                                           "token classification as Hugging Face saves it")
        mode: Literal["placeholder", "pseudonym"] = signal(
            "placeholder", "what replaces a value: a placeholder, or a fake, which is the same for equal values")
        key_file: str | None = resource(None, "file with the secret that pseudonyms depend on, at least 32 bytes")
        audit: bool = signal(False, "note in meta.pii where the replacements are")
        drop: tuple[Kind, ...] = decision((), "kinds of data for which a document is dropped")

        @field_validator("ids")
        @classmethod
        def _has_rules(cls, countries: tuple[str, ...]) -> tuple[str, ...]:
            from stages.scrub.national_rules import COUNTRIES

            if unknown := [country for country in countries if country not in (*COUNTRIES, "all")]:
                raise ValueError(f"no rules for {', '.join(unknown)}; there are: {', '.join(COUNTRIES)}; all")
            return countries

        @field_validator("region")
        @classmethod
        def _two_letters(cls, region: str) -> str:
            if region and not (len(region) == 2 and region.isascii() and region.isupper()):
                raise ValueError("a region is a country in two capitals, e.g. DE")
            return region

        @model_validator(mode="after")
        def _together(self) -> Pii.Config:
            if (self.mode == "pseudonym") != (self.key_file is not None):
                raise ValueError("mode: pseudonym and key_file belong together; a key is made by: "
                                 "head -c 32 /dev/urandom | base64 > FILE")
            if self.region and not self.phones:
                raise ValueError("region is for phones: set phones: true, too")
            if self.region and find_spec("phonenumbers") is None:
                raise ValueError("region needs the library phonenumbers: pip install 'tokenmill[pipeline]'")
            if (self.model is not None) != (self.names or self.addresses):
                raise ValueError("names and addresses need a model, and a model is for them: set names: true (or "
                                 "addresses: true) and model: FOLDER together")
            if off := [kind for kind in self.drop if kind not in kinds_on(self)]:
                raise ValueError(f"drop names {', '.join(off)}, which this step does not look for: turn them on")
            return self

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self.signals = tuple(f"pii_{kind}" for kind in kinds_on(self.config))
        self.libraries = ("phonenumbers",) if self.config.region else ()
        self._modelled = tuple(kind for kind in MODELLED if getattr(self.config, kind))
        if self.config.model is not None:
            self.exact = False                          # the best label may depend on the last digits of a score
            self.libraries += names.libraries(self.config.model)
            self.memory_mb = Pii.memory_mb + names.memory_mb(self.config.model)
        self._tagger: names.Tagger | None = None
        self._single_pass, self._repeated = _finders(self.config)
        self._pseudonyms: Pseudonyms | None = None

    def problems(self) -> dict[str, str]:
        if self.config.model is None or not Path(self.config.model).exists():
            return {}
        return {"model": "; ".join(messages)} if (messages := names.problems(self.config.model, self._modelled)) else {}

    def setup(self) -> None:
        if self.config.model is not None:
            self._tagger = names.Tagger(self.config.model, self._modelled)
        if self.config.key_file is not None:
            key = Path(self.config.key_file).read_bytes().strip()
            try:
                self._pseudonyms = Pseudonyms(key)
            except ValueError as e:
                raise ValueError(f"pii: {self.config.key_file}: {e}") from None

    def process(self, doc: Document) -> str | None:
        matches = self._find(doc.text)
        for name in self.signals:
            doc.signals[name] = 0
        for match in matches:
            doc.signals[f"pii_{match.kind}"] += 1
        places: list[dict[str, Any]] = []
        if matches:
            doc.text, spans, places = self._replaced(doc.text, matches, doc.loss_spans or [])
            if doc.loss_spans is not None:
                doc.loss_spans = spans
        if doc.meta:
            doc.meta = scrub_value(doc.meta, self._scrubbed)
        if self.config.audit and places:
            doc.meta["pii"] = places
        return self.verdict(doc)

    def verdict(self, doc: Document) -> str | None:
        return next((f"pii_{kind}" for kind in self.config.drop if doc.signals[f"pii_{kind}"]), None)

    def matches(self, doc: Document, reason: str) -> list[Span]:
        """Return the placeholders of the kind of data for which the document was dropped: the values themselves have
        been removed."""
        kind = reason.removeprefix("pii_")
        rules = {"emails": ("email",), "ips": ("ipv4", "ipv6")}.get(kind, (kind,))
        names = [name for rule in rules for name in PLACEHOLDERS.get(rule, ())]
        return pattern_spans(re.compile("|".join(map(re.escape, names))), doc.text) if names else []

    def _find(self, text: str) -> list[Match]:
        matches = find(text, self._single_pass, self._repeated)
        if self.config.model is not None:
            if self._tagger is None:
                self.setup()
            assert self._tagger is not None
            matches = merged(matches, [Match(*match) for match in self._tagger.find(text)])
        if self.config.mode == "pseudonym":         # fakes from an earlier run of this step stay, whatever its key was
            matches = [match for match in matches if not is_fake(match.kind, text[match.start:match.end])]
        return matches

    def _replacement(self, match: Match, text: str, turns: dict[str, int]) -> str:
        if self.config.key_file is None:
            return _placeholder(match, text, turns)
        if self._pseudonyms is None:
            self.setup()
        assert self._pseudonyms is not None
        return self._pseudonyms.fake(match.kind, match.rule, text[match.start:match.end])

    def _replaced(self, text: str, matches: list[Match], spans: list[dict[str, int]]
                  ) -> tuple[str, list[dict[str, int]], list[dict[str, Any]]]:
        """Replace the matches (values of personal data) in a text. `spans` are the loss spans (the stretches of a text
        that training learns from), in UTF-8 bytes. Returns (the new text, the spans in the new text, entries for
        `meta.pii` if the setting `audit` is on).

        Raises ValueError if a value crosses the border of a span, because the model would then be trained on a part of
        the value. Because of this error, the engine quarantines the document.
        """
        data = text.encode("utf-8", "surrogatepass") if spans else b""
        ends = [*(cut for span in spans for cut in (span["start"], span["end"])), len(data)]
        cuts = list(accumulate((len(data[a:b].decode("utf-8", "surrogatepass")) for a, b in pairwise([0, *ends])))
                    ) if spans else [len(text)]
        pieces: list[str] = []
        places: list[dict[str, Any]] = []
        moved: list[int] = []
        size = number = 0                       # bytes of the pieces so far, matches that lie in them
        for start, cut in pairwise([0, *cuts]):
            begin = number
            while number < len(matches) and matches[number].start < cut:
                if matches[number].end > cut:
                    raise ValueError("personal data lies across the border of a loss span")
                number += 1
            inside = matches[begin:number]
            added = _pieces(text, inside, self._replacement, start, cut)
            pieces += added
            if spans or self.config.audit:
                ends = list(accumulate(map(_size, added), initial=size))
                places += [{"kind": match.kind, "rule": match.rule, "start": start_byte, "end": end_byte}
                           for match, start_byte, end_byte in zip(inside, ends[1::2], ends[2::2])]
                size = ends[-1]
                moved.append(size)
        moved_spans = [{"start": start, "end": end} for start, end in zip(moved[0:-1:2], moved[1:-1:2])]
        return "".join(pieces), moved_spans, places

    def _scrubbed(self, text: str) -> str:
        matches = self._find(text)
        return "".join(_pieces(text, matches, self._replacement, 0, len(text))) if matches else text


def kinds_on(config: Any) -> tuple[str, ...]:
    """Return the kinds of personal data that the settings turn on, in the order of the constant KINDS."""
    switches = {"ips": config.ips or config.ipv6}
    return tuple(kind for kind in KINDS if switches.get(kind, getattr(config, kind)))


def _finders(config: Any) -> tuple[list[tuple[str, Finder]], list[tuple[str, Finder]]]:
    """Return the finders (functions that each search for one kind of personal data) that the settings turn on, as two
    lists of (kind, finder). The finders in the first list search a text once. Those in the second list are repeated
    until they find nothing new (`find.ROUNDS` times at most). In each list, the most reliable finders come first,
    because a value that one finder has found is hidden from the later ones."""
    single_pass: list[tuple[str, Finder]] = []
    if config.emails:
        single_pass.append(("emails", emails))
    if config.phones:        # first, or a part of +33.1.79.16.92.70 would count as an IP address
        from stages.scrub.phones import with_plus

        single_pass.append(("phones", with_plus))
    if config.ips:
        single_pass.append(("ips", partial(ipv4, public_only=config.public_only)))
    if config.ipv6:
        single_pass.append(("ips", partial(ipv6, public_only=config.public_only)))
    return single_pass, _repeated_finders(config.cards, config.ibans, config.phones, config.region, config.ids,
                                          config.secrets, config.wallets)


@lru_cache(maxsize=16)
def _repeated_finders(cards: bool, ibans: bool, phones: bool, region: str, ids: tuple[str, ...], secrets: bool,
                      wallets: bool) -> list[tuple[str, Finder]]:
    result: list[tuple[str, Finder]] = []
    if secrets:
        from stages.scrub.credentials import credentials

        result.append(("secrets", credentials))
    if wallets:
        from stages.scrub.wallets import wallets as find_wallets

        result.append(("wallets", find_wallets))
    if cards or ibans:
        from stages.scrub import payment

        result += [("ibans", payment.ibans)] * ibans + [("cards", payment.cards)] * cards
    if phones:
        from stages.scrub.phones import international

        result.append(("phones", international))
    if ids:
        from stages.scrub.national import finder

        result.append(("ids", finder(ids).find))
    if region:
        from stages.scrub.phones import local

        result.append(("phones", partial(local, region=region)))
    return result


@lru_cache(maxsize=1)
def _finders_of_all_kinds() -> tuple[list[tuple[str, Finder]], list[tuple[str, Finder]]]:
    """Return the finders (functions that each search for one kind of personal data) that need neither a model nor a
    library: (finders that run once, finders that are repeated)."""
    return _finders(Pii.Config(ipv6=True, cards=True, ibans=True, phones=True, ids=("all",), secrets=True,
                               wallets=True))


def _placeholder(match: Match, _text: str, turns: dict[str, int]) -> str:
    """Return the placeholder that replaces a match (a value of personal data). Some kinds of data have several
    placeholders, which are used in turn. `turns` counts, for each rule, how many were used, and is updated."""
    circle = PLACEHOLDERS.get(match.rule) or PLACEHOLDERS[match.kind]
    if len(circle) == 1:
        return circle[0]
    turn = turns.get(match.rule, 0)
    turns[match.rule] = turn + 1
    return circle[turn % len(circle)]


def _pieces(text: str, matches: Sequence[Match], replacement: Callable[[Match, str, dict[str, int]], str], start: int,
            end: int) -> list[str]:
    """Return text[start:end] with the matches replaced, as a list of pieces whose concatenation is the new text. The
    pieces are the text before, between and after the matches, and, in between, the replacement of each match.
    Placeholders that are used in turn begin with the first one."""
    pieces: list[str] = []
    turns: dict[str, int] = {}
    for match in matches:
        pieces += text[start:match.start], replacement(match, text, turns)
        start = match.end
    return [*pieces, text[start:end]]


def _size(text: str) -> int:
    """Return the length of a text in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def scrub_text(text: str) -> str:
    """Return a text with the personal data in it replaced by placeholders. This is done with every text that is shown
    to people. Data of all kinds is found, ids of all countries included, with three exceptions: names and postal
    addresses, telephone numbers in local form, and IP addresses of private and reserved networks. The function needs no
    model and no library."""
    matches = find(text, *_finders_of_all_kinds())
    return "".join(_pieces(text, matches, _placeholder, 0, len(text))) if matches else text


def scrub_part(text: str, start: int, end: int) -> str:
    """Return text[start:end] with the personal data in it replaced as by `scrub_text`. The whole text is searched, so
    that a value that lies only partly in text[start:end] is replaced, too."""
    matches = [match for match in find(text, *_finders_of_all_kinds()) if match.end > start and match.start < end]
    return "".join(_pieces(text, matches, _placeholder, start, end))


def scrub_value(value: Any, scrub: Callable[[str], str] = scrub_text, *, keys: bool = False) -> Any:
    """Return a copy of a JSON value in which `scrub` has replaced the personal data in every string, however deeply
    nested. Keys of objects are scrubbed only with `keys`. If two keys of an object become equal, the later value
    stays."""
    result = [value]
    todo: list[list[Any] | dict[Any, Any]] = [result]    # no recursion, as records may nest deeper than Python allows
    while todo:
        inside = todo.pop()
        for key, item in list(inside.items() if isinstance(inside, dict) else enumerate(inside)):
            if isinstance(item, str):
                inside[key] = scrub(item)
            elif isinstance(item, (dict, list, tuple)):
                copy: list[Any] | dict[Any, Any] = list(item) if not isinstance(item, dict) else {
                    scrub(k) if keys and isinstance(k, str) else k: v for k, v in item.items()}
                inside[key] = copy
                todo.append(copy)
    return result[0]
