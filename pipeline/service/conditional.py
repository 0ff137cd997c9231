"""Answers conditional HTTP requests. If the client already has the current version of a page, the server answers 304
and does not send the page again.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header
from starlette.responses import Response

IfNoneMatch = Annotated[str | None, Header(max_length=200)]
UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "as it was"}}


def unchanged(if_none_match: str | None, tag: str) -> Response | None:
    """Return an answer with status 304 if the client has sent the ETag `tag` as If-None-Match, otherwise None."""
    if if_none_match is None or tag not in (part.strip().removeprefix("W/") for part in if_none_match.split(",")):
        return None
    return Response(status_code=304, headers={"ETag": tag})
