"""Turns exceptions in the service into error answers for clients, as `application/problem+json` (RFC 9457) or as an
HTML page. An answer says what is wrong, names the parameter or field, and says what to do. It never contains a
traceback, a secret or an unsafe character.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, RedirectResponse, Response

from pipeline.base.errors import TokenmillError
from pipeline.base.redact import redact, redact_json
from pipeline.base.visible import json_text, visible
from pipeline.service.html import own_path, page, place_of
from pipeline.store.errors import EnvironmentFailure, StoreError

logger = logging.getLogger("tokenmill.service")
LONGEST = 2000           # characters of a detail: an error may quote a document
#: the path of the sign-in page, and the path to which its form sends the token
LOGIN, SIGN_IN = "/login", "/api/v1/session"


class HttpProblem(Exception):
    """Raised to answer a request with an error, whose HTTP status is 4xx or 5xx. `title` says in a few words what is
    wrong, and `detail` in one line. `key` names the parameter, header or field, and `remedy` says what to do."""

    def __init__(self, status: int, title: str = "", detail: str = "", key: str = "", remedy: str = "",
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail or title)
        self.status, self.title, self.detail, self.key, self.remedy = status, title, detail, key, remedy
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        """Return the error as JSON, in the form `application/problem+json` (RFC 9457)."""
        title = self.title or HTTPStatus(self.status).phrase
        document = {"type": "about:blank", "title": title, "status": self.status, "detail": self.detail or title,
                    "key": self.key, "remedy": self.remedy}
        cut = {k: v[:LONGEST] if isinstance(v, str) else v for k, v in document.items()}
        return {k: v for k, v in redact_json(cut).items() if v != ""}

    def response(self) -> Response:
        return SafeJSON(self.document(), self.status, self.headers, media_type="application/problem+json")


#: how OpenAPI describes the answers that are problems
_SCHEMA = {"type": "object", "required": ["type", "title", "status", "detail"], "properties": {
    "status": {"type": "integer"},
    **{name: {"type": "string"} for name in ("type", "title", "detail", "key", "remedy")}}}
RESPONSES: dict[int | str, dict[str, Any]] = {"4XX": {"description": "Refused: what is wrong, and what to do",
                                                      "content": {"application/problem+json": {"schema": _SCHEMA}}}}


class SafeJSON(JSONResponse):
    """A JSON response in which control characters, bidirectional characters and lone surrogates are escaped. Names of
    runs and files may hold them, and UTF-8 cannot encode a lone surrogate. Infinity and NaN, which JSON does not have,
    become null."""

    def render(self, content: Any) -> bytes:
        try:
            return json_text(content, allow_nan=False).encode()
        except ValueError:
            return json_text(finite(content)).encode()


def finite(value: Any) -> Any:
    """Return a copy of a JSON value in which None replaces numbers that are not finite (infinity and NaN)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def problem_of(error: Exception) -> HttpProblem:
    """Turn an exception into the error (HttpProblem) that the client gets. An unexpected exception is logged, and the
    client does not see its message."""
    if isinstance(error, HttpProblem):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path", "header"))
        return HttpProblem(422, "Not valid", first["msg"], visible(key),
                           "see /api/v1/openapi.json for what is accepted")
    if isinstance(error, HTTPException):
        remedy = "see /api/v1/openapi.json for what there is" if error.status_code in (404, 405) else ""
        return HttpProblem(error.status_code, detail=str(error.detail), remedy=remedy, headers=error.headers)
    if isinstance(error, EnvironmentFailure):
        return _two_parts(503, "The store does not answer", error, headers={"Retry-After": "10"})
    if isinstance(error, StoreError):
        return _two_parts(409, "The store cannot be used as it is", error)
    if isinstance(error, TokenmillError):
        return _two_parts(400 if error.exit_code == 2 else 409, "", error)
    if isinstance(error, OSError):
        logger.warning("%s", _line(error))
        return HttpProblem(503,
                           "A file cannot be read",
                           f"the server cannot read a file of the store ({error.strerror})",
                           remedy="see the server's log",
                           headers={"Retry-After": "10"})
    logger.error("%s", _line(error), exc_info=error)
    return HttpProblem(500, "Unexpected", "the server met an error that it did not expect",
                       remedy="see the server's log, and report it")


def _two_parts(status: int, title: str, error: TokenmillError, headers: Mapping[str, str] | None = None) -> HttpProblem:
    """Turn an error of Tokenmill into an HttpProblem. The error's message has the form `what is wrong; what to do`: the
    first part becomes `detail`, the second `remedy`."""
    detail, _, remedy = visible(redact(str(error))).partition("; ")
    return HttpProblem(status, title, detail, remedy=remedy, headers=headers)


def _line(error: Exception) -> str:
    return visible(redact(f"{type(error).__name__}: {error}"))


def respond(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed. A browser that opens a page gets an HTML page with the problem, or
    the form to sign in. Programs, and all requests to the API, get JSON."""
    problem, path = problem_of(error), request.url.path
    form = path == SIGN_IN and request.method == "POST"
    if "text/html" not in request.headers.get("accept", "") or (path.startswith("/api/") and not form):
        return problem.response()
    if problem.status == 401 and form:
        return page(request, "login.html.j2", 401, problem.headers, problem=problem.document(), next="/")
    if problem.status == 401:
        after = own_path(place_of(request)) if request.method == "GET" else "/"
        return RedirectResponse(f"{LOGIN}?{urlencode({'next': after})}", 303)
    return page(request, "problem.html.j2", problem.status, problem.headers, problem=problem.document())


def install(app: FastAPI) -> None:
    """Register handlers with the application `app` that answer the exceptions of its routes with errors, as JSON or as
    an HTML page."""
    async def answer(request: Request, error: Exception) -> Response:
        return respond(request, error)

    for kind in (HttpProblem, TokenmillError, OSError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)
