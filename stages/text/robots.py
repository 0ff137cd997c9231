"""Reads the directives of `<meta name="robots">` and of the header `X-Robots-Tag`, by which publishers forbid robots
certain uses of a page."""

from __future__ import annotations

import re

#: directives that forbid a use of a text or its pictures; `noai` and `noimageai` are a convention of DeviantArt (2022)
FORBIDDING = ("noai", "noimageai", "noindex", "noarchive", "nosnippet")
_AGENT = re.compile(r"[\w*.-]{1,100}")
#: directives that have a value: the word before their colon names no robot
_VALUED = ("unavailable_after", "max-snippet", "max-image-preview", "max-video-preview")
#: most characters examined
_LONGEST = 4000


def directives(value: str) -> tuple[str, ...]:
    """Return those directives of the list FORBIDDING, in the order of the list, that a page addresses to all robots.
    `value` is the content of a robots header or of a robots `<meta>` tag.

    In `X-Robots-Tag: noindex, somebot: noai, nosnippet` the last two directives are for the robot `somebot` alone, so
    only `noindex` is returned. If a page has several such headers, `value` holds one per line. The directives of a line
    are for all robots until the line names a robot. `none` means `noindex, nofollow`.
    """
    result = set()
    for line in value[:_LONGEST].lower().split("\n"):
        for_all = True
        for item in line.split(","):
            before, colon, after = item.strip().partition(":")
            if colon and before not in _VALUED and _AGENT.fullmatch(before):
                for_all, item = before == "*", after
            if for_all:
                result.update(item.split())
    if "none" in result:
        result.add("noindex")
    return tuple(name for name in FORBIDDING if name in result)
