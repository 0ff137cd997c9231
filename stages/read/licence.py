"""Which licence the head of a source file names: an SPDX tag, or the words of a common licence.

Identifiers are SPDX's (https://spdx.org/licenses). "" means that the head says nothing known, not that there is none.
"""

from __future__ import annotations

import re

#: characters of a file that are its head
HEAD = 6000
_ID = r"[A-Za-z0-9][A-Za-z0-9.+-]{0,60}"
_TAG = re.compile(rf"SPDX-License-Identifier:[ \t]{{0,9}}(\(?{_ID}\)?(?: (?:AND|OR|WITH) \(?{_ID}\)?){{0,6}})")
#: what stands between the words of a comment
_MARKS = re.compile(r"[\s/*#;!%|\"'>-]+")
_LATER = re.compile(r"\b(?:any later version|or later)\b")
_WORDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple((name, re.compile(words)) for name, words in (
    ("Apache-2.0", r"licensed under the apache license,? version 2\.0|apache\.org licenses license 2\.0"),
    ("MPL-2.0", r"mozilla public license,? (?:v\.|version) ?2\.0"),
    ("EPL-2.0", r"eclipse public license,? ?(?:v\.?|version)? ?2\.0"),
    ("AGPL-3.0", r"gnu affero general public license"),
    ("LGPL-3.0", r"gnu lesser general public license.{0,120}version 3"),
    ("LGPL-2.1", r"gnu (?:lesser|library) general public license"),
    ("GPL-3.0", r"gnu general public license.{0,160}\bversion 3\b|\bgplv3\b"),
    ("GPL-2.0", r"gnu general public license.{0,160}\bversion 2\b|\bgplv2\b"),
    ("BSD-3-Clause", r"redistributions? and use in source and binary forms.{0,2500}neither the names? of|bsd 3 clause"),
    ("BSD-2-Clause", r"redistributions? and use in source and binary forms|bsd 2 clause"),
    ("MIT", r"permission is hereby granted, free of charge|\bmit license\b|licensed under the mit\b"),
    ("ISC", r"permission to use, copy, modify, and (?:or )?distribute this software for any purpose"),
    ("BSL-1.0", r"boost software license,? version 1\.0"),
    ("Unlicense", r"this is free and unencumbered software"),
    ("CC0-1.0", r"cc0 1\.0|dedicated to the public domain under"),
    ("Zlib", r"this software is provided as is , without any express or implied warranty\. in no event"),
))


def licence(text: str) -> str:
    """SPDX expression of the licence that the head of a file names, or ""."""
    head = text[:HEAD]
    if (tag := _TAG.search(head)) is not None:
        said = tag[1].rstrip(".")
        return said if said.count("(") == said.count(")") else said.strip("()")
    said = _MARKS.sub(" ", head).lower()
    if not any(word in said for word in ("licen", "permission", "redistribution", "public domain", "gpl", "bsd")):
        return ""
    for name, words in _WORDS:
        if (m := words.search(said)) is not None:
            if "GPL" not in name:
                return name
            return name + ("-or-later" if _LATER.search(said, m.start(), m.end() + 200) else "-only")
    return ""
