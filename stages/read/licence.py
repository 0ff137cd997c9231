"""Finds the licence that the head of a source file (its first characters) names: by an SPDX tag, the whole text of a
licence, or a licence's notice.

Identifiers are those of SPDX (https://spdx.org/licenses). The result "" means that the head names no known licence; the
file may still have one. Without an SPDX tag, a permissive licence is reported only in one of three cases:

- Its whole text, its terms or its notice begins in the head, unchanged (`licence_texts`).
- A sentence puts the file under the licence, and no other terms stand beside that sentence.
- The comments at the beginning of the file say nothing but the licence's name.

The rules are strict, because a missed licence costs only a file, whereas a wrong one puts a file into a corpus that
must not have it.
"""

from __future__ import annotations

import re

from stages.read.licence_texts import licence_text, other_terms

#: characters of a file that are its head, and characters in which a licence that begins there must end
HEAD, TEXT = 6_000, 20_000
_ID = r"[A-Za-z0-9][A-Za-z0-9.+-]{0,60}"
_TAG = re.compile(rf"SPDX-License-Identifier:[ \t]{{0,9}}"
                  rf"(\(?{_ID}\)?(?: (?:AND|OR|WITH) \(?{_ID}\)?){{0,6}})(.{{0,60}})")
#: words after a tag that qualify it
_MORE = re.compile(r"[ \t,;]*(?:and|or|with|but|except|plus|only|unless|commons)\b", re.IGNORECASE)
#: blanks and comment marks between words
_MARKS = re.compile(r"[\s/*#;!%|\"'>-]+")
_COMMENT = re.compile(r"[ \t]*(?://|#|;|%|--|!|dnl\b|rem\b|')", re.IGNORECASE)
#: fewest comment lines at the beginning that count as the head's comment; fewer may be a heading
_LINES = 3
#: openers and closers of block comments
_BLOCKS = (("/*", "*/"), ('"""', '"""'), ("'''", "'''"), ("<!--", "-->"), ("{-", "-}"), ("(*", "*)"),
           ("=begin", "=end"), ("=pod", "=cut"), ("--[[", "]]"), ("#|", "|#"))
_TRIGGERS = ("licen", "permission", "redistribution", "public domain", "gpl", "bsd", "software is provided")

# -- copyleft, by the words of its notices -----------------------------------------------------------------------------
_WORDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple((name, re.compile(words)) for name, words in (
    ("MPL-2.0", r"mozilla public license,? (?:v\.|version) ?2\.0"),
    ("MPL-1.1", r"mozilla public license,? (?:v\.|version) ?1\.1"),
    ("EPL-2.0", r"eclipse public license,? ?(?:v\.?|version)? ?2\.0"),
    ("EPL-1.0", r"eclipse public license,? ?(?:v\.?|version)? ?1\.0"),
    ("CDDL-1.0", r"common development and distribution license"),
))
_GNU = re.compile(r"\bgnu (?P<kind>affero |lesser |library )?(?:general )?public licen[cs]e"
                  r"|\b(?P<short>a|l)?gpl(?:,? ?v? ?(?P<n>[123](?:\.[01])?(?![\w.]*\w)))?")
_VERSION = re.compile(r"\b(?:version|v\.?) ?([123](?:\.[01])?)(?!\w|\.\d)")
_BEFORE = re.compile(r"\b(?:version|v\.?) ?([123](?:\.[01])?) of the (?:gnu )?$")
_LATER = re.compile(r"\b(?:any (?:later|newer|subsequent)|or (?:any )?(?:later|newer|higher|above|greater))\b|^[ )]?\+")
_ONLY = re.compile(r"\bonly\b|\bno(?:t)? (?:any )?(?:later|other|newer)\b")
#: the title of a whole licence text, whose own words about later versions grant no choice
_TITLE = re.compile(r"gnu (?:affero |lesser |library )?general public license,? version [123](?:\.[01])?,? (?:\d+ )?"
                    r"(?:june|february|november|july)")
_EXCEPTION = re.compile(r"\bexception|additional permission|in addition to the permissions|special permission"
                        r"|with the following|commercial license|dual licen|\balternatively\b|\bor version [123]")
_VERSIONS = {"AGPL": {"1": "1.0", "3": "3.0"},
             "LGPL": {"2": "2.0", "2.0": "2.0", "2.1": "2.1", "3": "3.0", "3.0": "3.0"},
             "GPL": {"1": "1.0", "2": "2.0", "2.0": "2.0", "3": "3.0", "3.0": "3.0"}}

# -- permissive, by a sentence that puts the file under it -------------------------------------------------------------
_NAMES: tuple[tuple[str, str], ...] = (
    ("Apache-2.0", r"apache(?: software)?(?: license)?,? (?:version |v\.? ?)?2(?:\.0)?(?: license)?"),
    ("MIT", r"mit(?: license)?"),
    ("BSD-3-Clause", r"(?:bsd 3 clause|3 clause bsd|(?:new|modified|revised) bsd)(?: license)?"),
    ("BSD-2-Clause", r"(?:bsd 2 clause|2 clause bsd|simplified bsd|freebsd)(?: license)?"),
    ("BSL-1.0", r"boost software license,? (?:version |v\.? ?)?1\.0"), ("ISC", r"isc(?: license)?"),
    ("Zlib", r"zlib license"), ("Unlicense", r"unlicense(?: license)?"),
    ("ECL-2.0", r"educational community license,? version 2\.0"),
    ("NCSA", r"university of illinois ncsa open source license"),
    ("CC0-1.0", r"cc0 1\.0(?: universal)?"))
_UNDER = (r"(?:licensed|license|released|distributed|available|published|provided|covered|redistributed?|used?|made)"
          r" (?:\w+ ){0,3}?(?:under|by|with|to)(?: you under)? (?:the )?"
          r"(?:terms (?:and conditions )?of )?(?:the |an? )?"
          r"|(?:^|[. ])licensed?:? (?:is )?(?:the )?")
_MENTIONS = tuple((name, re.compile(rf"(?P<lead>{_UNDER})(?:{words})(?![\w.+]*\w)(?P<rest>.{{0,40}})"))
                  for name, words in _NAMES)
_BARE = tuple((name, re.compile(rf"^\W*(?:the )?(?:{words})\W*$")) for name, words in _NAMES)
_NEGATED = re.compile(r"\b(?:not|no longer|never|formerly|previously|unlike|isn|aren|except|cannot|neither|was|were)\b")
_CHANGED = re.compile(r"^[ ,(]*(?:license )?(?:with|except|but|plus|and|or|unless|modified|style|like|compatible|non"
                      r"|commons|provided|subject|as long)\b(?! (?:the notice|is found|can be|in the))")
#: sentences of standard notices, which are not other terms
_NOTICE = re.compile(r"you may not use(?: th(?:is|ese) files? except in compliance|\W*$)"
                     r"|without warranties or conditions")


def licence(text: str) -> str:
    """Return the SPDX expression of the licence that the head of a source file names; "" if it names no known licence.
    Also returns "" if the head changes the licence's terms, or sets other terms beside them. `text` is the content of
    the file."""
    head = text[:HEAD]
    if (tag := _tags(head)) is not None:
        return tag
    lower = head.lower()
    if not any(word in lower for word in _TRIGGERS):
        return ""
    body = _lead(text[:TEXT])
    if not any(word in body.lower() for word in _TRIGGERS):
        body = head
    plain = _MARKS.sub(" ", body[:HEAD]).lower()
    full_text = licence_text(body)
    if full_text:
        return full_text
    notice = _copyleft(plain)
    if full_text == "" or (notice and any(words.search(plain) for _, words in _MENTIONS)):
        return ""
    return notice or _mention(plain)


def _tags(head: str) -> str | None:
    """Return the SPDX expression in the SPDX tags of `head`, the first characters of a source file; "" if further words
    qualify a tag, None if there is no tag."""
    tags = []
    for tag in _TAG.finditer(head):
        if _MORE.match(tag[2]):
            return ""
        expression = tag[1].rstrip(".")
        tags.append(expression if expression.count("(") == expression.count(")") else expression.strip("()"))
    different = list(dict.fromkeys(tags))
    if len(different) > 1:
        return " AND ".join(f"({x})" if " OR " in x else x for x in different)
    return different[0] if different else None


def _lead(text: str) -> str:
    """Return the comments at the beginning of a source file. Returns the whole text if they are fewer than `_LINES`
    comments of one line; a single block comment is enough."""
    out: list[str] = []
    close, marked = "", 0
    for line in text.split("\n"):
        if close:
            close = "" if close in line else close
        elif plain := line.strip():
            block = next(((a, b) for a, b in _BLOCKS if plain.startswith(a)), None)
            if block is not None:
                close = "" if block[1] in plain[len(block[0]):] else block[1]
                marked = _LINES
            elif _COMMENT.match(line):
                marked += 1
            elif not plain.startswith(("<?", "<!", "package ", "@echo")):
                break
        out.append(line)
    return "\n".join(out) if marked >= _LINES else text


def _copyleft(text: str) -> str:
    title = _TITLE.search(text[:300])
    gnu = _GNU.search(text)
    for name, words in _WORDS:
        if (m := words.search(text)) is not None and (gnu is None or m.start() < gnu.start()):
            return name
    if gnu is None:
        return ""
    family = {"affero ": "AGPL", "lesser ": "LGPL", "library ": "LGPL", "a": "AGPL", "l": "LGPL"}.get(
        gnu["kind"] or gnu["short"] or "", "GPL")
    after = text[gnu.end():gnu.end() + 200]
    before = _BEFORE.search(text[max(0, gnu.start() - 40):gnu.start()])
    version = None if gnu["n"] or before else _VERSION.search(after)
    number = gnu["n"] or (before[1] if before else version[1] if version else "")
    spdx_version = _VERSIONS[family].get(number)
    if spdx_version is None:
        return ""
    if title is not None:
        return f"{family}-{spdx_version}-only"
    if _EXCEPTION.search(text) or _NEGATED.search(text[max(0, gnu.start() - 60):gnu.start()]):
        return ""
    terms = (after[version.end():] if version else after)[:80].partition(". ")[0]
    later, only = _LATER.search(terms), _ONLY.search(terms)
    if later and only:
        return ""
    return f"{family}-{spdx_version}-or-later" if later else f"{family}-{spdx_version}-only"


def _mention(text: str) -> str:
    """Return the SPDX identifier of a permissive licence. A sentence of the text must put the file under this licence,
    or the whole text must be the licence's name. Returns "" if there is no such licence, or more than one, or if the
    text sets other terms."""
    named = {name: m for name, words in _MENTIONS if (m := words.search(text)) is not None}
    if not named:
        return next((name for name, words in _BARE if words.match(text)), "")
    if len(named) > 1:
        return ""
    [(name, m)] = named.items()
    if _NEGATED.search(text[max(0, m.start() - 60):m.end("lead")]) or _CHANGED.match(m["rest"]):
        return ""
    return "" if other_terms(_NOTICE.sub(" ", text)) else name
