"""What publishers tell robots, as far as it forbids use: directives of `<meta name="robots">` and `X-Robots-Tag`."""

from __future__ import annotations

import re

#: those that forbid something of a text or its pictures. `noai` and `noimageai`: a convention of DeviantArt's (2022)
FORBIDDING = ("noai", "noimageai", "noindex", "noarchive", "nosnippet")
_AGENT = re.compile(r"[\w*.-]{1,100}")
#: directives that have a value, so that what stands before the colon is no robot
_VALUED = ("unavailable_after", "max-snippet", "max-image-preview", "max-video-preview")
#: characters looked at
_LONGEST = 4000


def directives(said: str) -> tuple[str, ...]:
    """Directives of FORBIDDING that are said to all robots, in the order of FORBIDDING.

    `X-Robots-Tag: noindex, somebot: noai, nosnippet` says the last two to somebot alone; several such headers are
    lines, each of which begins anew with all robots. `none` is `noindex, nofollow`.
    """
    result = set()
    for line in said[:_LONGEST].lower().split("\n"):
        everybody = True
        for item in line.split(","):
            before, colon, after = item.strip().partition(":")
            if colon and before not in _VALUED and _AGENT.fullmatch(before):
                everybody, item = before == "*", after
            if everybody:
                result.update(item.split())
    if "none" in result:
        result.add("noindex")
    return tuple(name for name in FORBIDDING if name in result)
