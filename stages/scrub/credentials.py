"""Finds API keys, tokens and private keys.

The rules follow gitleaks (config/gitleaks.toml, MIT) and the services' own documentation of the prefixes that make
their keys recognisable. Published examples are not reported: values that contain EXAMPLE (AWS' AKIAIOSFODNN7EXAMPLE),
and values of fewer than eight different characters (`xxxxxxxx`). Gitleaks also leaves out values such as `xxxxxxxx`,
for their low entropy.

Each rule has a list of literal strings. The rule is tried only if one of these strings occurs in a code of the text
(`Clues.codes`). A code is a run of at least SHORTEST_CODE characters of the kind that keys consist of. A value that a
rule matches always lies within one code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stages.scrub.clues import Clues, Span

_LEFT, _RIGHT = r"(?<![A-Za-z0-9_-])", r"(?![A-Za-z0-9])"


def _rule(name: str, pattern: str, *literals: str) -> tuple[str, re.Pattern[str], tuple[str, ...]]:
    return name, re.compile(_LEFT + "(" + pattern + ")" + _RIGHT), literals


_RULES = (
    _rule("aws", r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}", "A3T", "AKIA", "ASIA", "ABIA", "ACCA"),
    _rule("github", r"gh[pousr]_[A-Za-z0-9]{36,255}", "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
    _rule("github", r"github_pat_[A-Za-z0-9_]{82}", "github_pat_"),
    _rule("gitlab", r"(?:glpat|gldt|glrt|glft|glsoat|glagent|glimt|glcbt|gloas|glffct)-[A-Za-z0-9_.-]{20,120}|"
                    r"glptt-[0-9a-f]{40}|GR1348941[A-Za-z0-9_-]{20}", "gl", "GR1348941"),
    _rule("slack", r"xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,250}", "xox"),
    _rule("slack", r"xapp-[0-9]-[A-Z0-9]{5,20}-[0-9]{5,20}-[a-z0-9]{20,100}", "xapp-"),
    _rule("slack", r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{40,60}", "hooks.slack.com/"),
    _rule("stripe", r"(?:sk|rk)_(?:test|live|prod)_[A-Za-z0-9]{10,99}|whsec_[A-Za-z0-9+/]{32,100}",
          "_live_", "_test_", "_prod_", "whsec_"),
    _rule("google", r"AIza[A-Za-z0-9_-]{35}|GOCSPX-[A-Za-z0-9_-]{28}|ya29\.[A-Za-z0-9_-]{20,500}", "AIza", "GOCSPX-",
          "ya29."),
    _rule("openai", r"sk-(?:(?:proj|svcacct|admin|None)-[A-Za-z0-9_-]{40,200}|[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}|"
                    r"[A-Za-z0-9]{48})", "sk-"),
    _rule("anthropic", r"sk-ant-[a-z0-9]{3,10}-[A-Za-z0-9_-]{80,120}", "sk-ant-"),
    _rule("openrouter", r"sk-or-v1-[0-9a-f]{64}", "sk-or-"),
    _rule("huggingface", r"hf_[A-Za-z0-9]{30,40}|api_org_[A-Za-z]{34}", "hf_", "api_org_"),
    _rule("npm", r"npm_[A-Za-z0-9]{36}", "npm_"),
    _rule("pypi", r"pypi-AgE[A-Za-z0-9_-]{50,1000}", "pypi-AgE"),
    _rule("rubygems", r"rubygems_[0-9a-f]{48}", "rubygems_"),
    _rule("sendgrid", r"SG\.[A-Za-z0-9_=-]{16,32}\.[A-Za-z0-9_=-]{36,64}", "SG."),
    _rule("telegram", r"(?:bot)?[0-9]{8,10}:A[A-Za-z0-9_-]{34}", ":A"),
    _rule("azure", r"(?:AccountKey|SharedAccessKey)=[A-Za-z0-9+/]{43,86}={1,2}", "AccountKey=", "SharedAccessKey="),
    _rule("azure", r"[A-Za-z0-9_~.]{3}[0-9]Q~[A-Za-z0-9_~.-]{31,34}", "Q~"),
    _rule("jwt", r"eyJ[A-Za-z0-9_-]{14,4000}\.eyJ[A-Za-z0-9_-]{14,8000}\.[A-Za-z0-9_-]{10,2000}", "eyJ"),
    _rule("twilio", r"(?:SK|AC)[0-9a-f]{32}", "SK", "AC"),
    _rule("mailgun", r"(?:key|pubkey)-[0-9a-f]{32}", "key-"),
    _rule("mailchimp", r"[0-9a-f]{32}-us[0-9]{1,2}", "-us"),
    _rule("digitalocean", r"do[opr]_v1_[0-9a-f]{64}", "_v1_"),
    _rule("shopify", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}", "shp"),
    _rule("databricks", r"dapi[0-9a-f]{32}(?:-[0-9])?", "dapi"),
    _rule("docker", r"dckr_(?:pat|oat)_[A-Za-z0-9_-]{27,32}", "dckr_"),
    _rule("hashicorp", r"hv[sbr]\.[A-Za-z0-9_-]{90,300}|[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{60,70}",
          "hvs.", "hvb.", "hvr.", "atlasv1."),
    _rule("grafana", r"gl(?:c_[A-Za-z0-9+/]{32,400}={0,3}|sa_[A-Za-z0-9]{32}_[0-9A-Fa-f]{8})", "glc_", "glsa_"),
    _rule("square", r"sq0[a-z]{3}-[A-Za-z0-9_-]{22,43}|EAAA[A-Za-z0-9_-]{60}", "sq0", "EAAA"),
    _rule("linear", r"lin_api_[A-Za-z0-9]{40}", "lin_api_"),
    _rule("notion", r"ntn_[A-Za-z0-9]{40,50}|secret_[A-Za-z0-9]{43}", "ntn_", "secret_"),
    _rule("postman", r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}", "PMAK-"),
    _rule("newrelic", r"NRAK-[A-Z0-9]{27}|NRJS-[0-9a-f]{19}", "NRAK-", "NRJS-"),
    _rule("groq", r"gsk_[A-Za-z0-9]{52}", "gsk_"),
    _rule("replicate", r"r8_[A-Za-z0-9]{37,40}", "r8_"),
    _rule("perplexity", r"pplx-[A-Za-z0-9]{48}", "pplx-"),
    _rule("xai", r"xai-[A-Za-z0-9]{80}", "xai-"),
    _rule("planetscale", r"pscale_(?:tkn|pw|oauth)_[A-Za-z0-9=._-]{32,64}", "pscale_"),
    _rule("age", r"AGE-SECRET-KEY-1[QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L]{58}", "AGE-SECRET-KEY-1"),
    _rule("alibaba", r"LTAI[A-Za-z0-9]{20}", "LTAI"),
)
#: every text with a key has a run of letters, digits and some signs of this length
_HINT = re.compile(r"[A-Za-z0-9_+/.=~-]{20}")
_PEM = re.compile(r"-----BEGIN (?:[A-Z0-9]{2,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = re.compile(r"-----END (?:[A-Z0-9]{2,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
#: longest private key, characters: RSA of 16384 bits has 13,000. A key cut short has no end line.
_PEM_LONGEST = 20_000
_PEM_BODY = re.compile(r"[A-Za-z0-9+/=\\\s:,.-]*")
#: name = value, where the name says that the value is secret (gitleaks: generic-api-key). The value stands in quotes,
#: or without quotes as in an environment file.
_NAME = re.compile(
    r"(?:api_?-?key|apikey|secret_?-?(?:access_?-?)?key|client_?-?secret|app_?-?secret|access_?-?token|auth_?-?token|"
    r"secret_?-?token|private_?-?token|passwd|password|encryption_?-?key|signing_?-?key|account_?-?key)"
    r"[\"']?[ \t]{0,4}[:=]?$", re.IGNORECASE)
_ASSIGNED = re.compile(r"[=:>][ \t]{0,4}(?:([\"'`])([A-Za-z0-9_+/=.~!@#$%^&*-]{16,200})\1|"
                       r"([A-Za-z0-9_+/=~-]{24,200})(?=[\s,;]|$))")
#: most characters of a match of _ASSIGNED before its value
_BEFORE = 6
_NAME_HINTS = ("key", "secret", "token", "passw")
_LETTERS, _NUMERALS = re.compile("[A-Za-z]"), re.compile("[0-9]")


def credentials(clues: Clues) -> Iterator[tuple[int, int, str]]:
    """Find API keys, tokens and private keys in the text of `clues`. Yields (start, end, service), in no order; results
    may overlap. `service` names the service that issues such keys. It is "private_key" for a private key, and "named"
    for a value that the text assigns to a name such as `api_key`."""
    text, codes = clues.text, clues.codes
    if "PRIVATE KEY" in text:
        yield from _private_keys(text)
    if not any(_HINT.search(text, *span) for span in codes):
        return
    every = " ".join([text[start:end] for start, end in codes])
    for name, pattern, literals in _RULES:
        for literal in literals:
            if literal in every:
                for match in (match for span in codes for match in pattern.finditer(text, *span)):
                    if _secret(match[1]):
                        yield *match.span(1), name
                break
    yield from _assigned_secrets(text, codes)


def _assigned_secrets(text: str, codes: list[Span]) -> Iterator[tuple[int, int, str]]:
    """Find secret values that a text assigns to a name, such as `api_key = …`. The name must say that the value is
    secret. `codes` holds the spans of long runs of the characters of which keys consist. Yields (start, end,
    "named")."""
    place, name_occurs = 0, None
    for start, end in codes:
        # a match may begin before the run, with the equals sign, blanks and opening quote, and end after it, with the
        # closing quote
        for match in _ASSIGNED.finditer(text, max(place, start - _BEFORE), end + 1):
            place = match.end()
            group = 2 if match[2] is not None else 3
            value = match[group]
            if _secret(value) and len(set(value)) >= 10 and _NUMERALS.search(value) and _LETTERS.search(value) and \
                    _NAME.search(text, max(0, match.start() - 40), match.start()):
                if name_occurs is None:
                    lower = text.lower()
                    name_occurs = any(hint in lower for hint in _NAME_HINTS)
                if name_occurs:
                    yield *match.span(group), "named"


def _secret(value: str) -> bool:
    """Return whether a value may be a real API key: it does not contain EXAMPLE, and it has at least eight different
    characters."""
    return "EXAMPLE" not in value.upper() and len(set(value)) >= 8


def _private_keys(text: str) -> Iterator[tuple[int, int, str]]:
    """Find private keys in PEM and PGP blocks (RFC 7468, RFC 9580). Yields (start, end, "private_key"). A block ends
    with its end line ("-----END …"). A block without this line ends before the first character that cannot occur in a
    key, or after _PEM_LONGEST characters. Blocks with fewer than 16 different characters, or with EXAMPLE in them, are
    left out."""
    place = 0
    while begun := _PEM.search(text, place):
        limit = begun.end() + _PEM_LONGEST
        ended = _PEM_END.search(text, begun.end(), limit)
        end = ended.end() if ended else _PEM_BODY.match(text, begun.end(), limit).end()     # type: ignore[union-attr]
        place = end
        body = text[begun.end():end]
        if len(set(body)) >= 16 and "EXAMPLE" not in body:
            yield begun.start(), end, "private_key"
