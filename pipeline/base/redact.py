"""Keeps secrets out of everything that is written or shown: messages, progress, logs of drivers, records of submitted
jobs.

There are three defences:

* Secrets that this process knows are masked wherever they occur. These are Ray's token and the values of environment
  variables that are named like secrets. Values of fewer than 8 characters and existing paths do not count.
* Text with the shape of a secret is masked: passwords in URLs, signed queries, bearer tokens, AWS and Hugging Face
  keys, private keys, `aws_secret_access_key=…`.
* Recipes and the URLs of stores are refused if they contain a secret (`secret_in`), because they are stored with a
  run.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from pipeline.base.visible import visible

MASK = "***"
SHORTEST = 8             # shorter values of variables are treated as words, not secrets

#: names of environment variables that hold a secret; whole words must match (unlike TOKENMILL_STORE, TOKENIZERS_…)
_SECRET_NAME = re.compile(r"(?:^|_)(?:secret|token|password|passwd|credentials?|(?:api|access|private)_?key)(?:_|$)",
                          re.IGNORECASE)
_PLACE_NAME = re.compile(r"_(?:path|file|dir|uri|url|mode)$", re.IGNORECASE)

_QUERY = (r"sig|auth|authorization|key|pwd|x-(?:amz|goog|ms)-[\w-]{1,60}|googleaccessid|key-pair-id|policy|"
          r"[\w.-]{0,40}(?:signature|token|secret|passw|credential|api[_-]?key|access[_-]?key)[\w.-]{0,40}")
_NAMED = (r"aws_access_key_id|aws_secret_access_key|aws_session_token|secret_access_key|secret_key|client_secret|"
          r"account_key|sas_token|api_key|access_token|auth_token|ray_auth_token|hf_token|password|passwd")
#: shapes that only secrets have
_SHAPES = (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"),
           re.compile(r"\bya29\.[\w.-]{8,}"),                                       # Google access tokens
           re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"))
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), MASK),
    # user:password@, where the password may hold a slash (AWS secrets do) but a port does not count as one
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)[^\s/?#@'\"<>:]{0,256}:(?!\d{1,5}[/?#\s])[^\s@'\"<>]{1,1024}@"),
     rf"\1{MASK}@"),
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)[^\s/?#@'\"<>:]{1,1024}@"), rf"\1{MASK}@"),
    (re.compile(rf"(?i)([?&;](?:{_QUERY})=)[^&;\s'\"<>#]+"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/-]{8,}=*"), rf"\1 {MASK}"),
    (re.compile(rf"(?i)\b({_NAMED})(['\"]?\s*[=:]\s*['\"]?)[^\s'\",;&]{{4,}}"), rf"\1\2{MASK}"),
    (re.compile(r"(?i)\b(secret|token|key)(['\"]?\s*[=:]\s*)(['\"])[^\s'\"]{16,}\3"), rf"\1\2\3{MASK}\3"),
    *((shape, MASK) for shape in _SHAPES[:3]),
)
_QUERY_NAME = re.compile(rf"(?i)(?:{_QUERY})$")


def redact(text: str) -> str:
    """Returns `text` with every secret masked that is known or has the shape of one (see the module). Other text is
    returned unchanged."""
    secrets = _any_of(tuple(sorted(_values(os.environ))))
    if secrets is not None:
        text = secrets.sub(MASK, text)
    for pattern, mask in _RULES:
        text = pattern.sub(mask, text)
    return text


def redact_json(value: Any) -> Any:
    """Returns a JSON value with the secrets masked in every string, including the keys of objects."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact(k) if isinstance(k, str) else k: redact_json(v) for k, v in value.items()}
    return [redact_json(v) for v in value] if isinstance(value, (list, tuple)) else value


def mask_record(record: logging.LogRecord) -> bool:
    """A filter for loggers. It masks secrets in the message of a log record, and escapes characters that are unsafe to
    show. It always returns True, so that every message is logged."""
    record.msg, record.args = visible(redact(record.getMessage())), None
    return True


def secret_in(value: str) -> str | None:
    """Name the secret that a URL, or another value of a recipe, contains, for example "a password or key before the
    '@'". Returns None when it contains none. Known secrets of fewer than 16 characters are ignored here, because a
    shorter one may be an ordinary word of a recipe."""
    if any(pattern.search(value) for pattern in _SHAPES):
        return "a key or token"
    if any(secret in value for secret in _values(os.environ) if len(secret) >= 2 * SHORTEST):
        return "the value of a secret environment variable"
    if "://" not in value:
        return None
    if any(pattern.search(value) for pattern, _ in _RULES[1:3]):
        return "a password or key before the '@'"
    try:
        query = urlsplit(value).query
    except ValueError:
        return None
    names = [part.partition("=")[0] for part in re.split("[&;]", query)]
    return "a signature or key in its query" if any(_QUERY_NAME.match(n) for n in names) else None


def _values(environment: Mapping[str, str]) -> set[str]:
    result = {v for name, v in environment.items()
             if len(v) >= SHORTEST and _SECRET_NAME.search(name) and not _PLACE_NAME.search(name)
             and not os.path.exists(v)}
    for path in (environment.get("RAY_AUTH_TOKEN_PATH"), os.path.expanduser("~/.ray/auth_token")):
        token = _token_file(path) if path else ""
        if len(token) >= SHORTEST:
            result.add(token)
    return result


@lru_cache(maxsize=8)
def _token_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as f:
            return f.read(4096).strip()
    except (OSError, UnicodeDecodeError):
        return ""


@lru_cache(maxsize=8)
def _any_of(values: tuple[str, ...]) -> re.Pattern[str] | None:
    longest_first = sorted(values, key=lambda v: (-len(v), v))
    return re.compile("|".join(map(re.escape, longest_first))) if values else None
