"""Router: exchanges a token for a session's cookie, and ends the session. It accepts forms as well as JSON, so that
signing in needs no JavaScript."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from pipeline.service.access import check_intended, form_of
from pipeline.service.html import own_path
from pipeline.service.problems import LOGIN, SIGN_IN, HttpProblem

router = APIRouter(prefix=SIGN_IN, tags=["session"])


@router.post("", status_code=204, summary="Begin a session", openapi_extra={"requestBody": {"content": {
    kind: {"schema": {"type": "object", "required": ["token"], "properties": {"token": {"type": "string"}}}}
    for kind in ("application/json", "application/x-www-form-urlencoded")}}})
async def begin(request: Request) -> Response:
    """Begin a session: the client sends its token, and the answer sets a cookie. If the client sends a form, the answer
    redirects to the page that the form's field `next` names (default: the first page). A form with a field `end` ends
    the session instead, because forms cannot send DELETE."""
    sessions, form = request.app.state.sessions, await form_of(request)
    if "end" in form:
        await check_intended(request)
        return RedirectResponse(LOGIN, 303, {"Set-Cookie": sessions.ending_cookie()})
    token = form.get("token") if form else await _token_in_json(request)
    role = sessions.role_of_token(token) if isinstance(token, str) else None
    if role is None:
        request.state.wrong_token = True
        raise HttpProblem(401, "Not a token of this server", key="token", remedy="see the file given by --token-file")
    answer = RedirectResponse(own_path(form.get("next", "/")), 303) if form else Response(status_code=204)
    answer.headers["Set-Cookie"] = sessions.cookie_for(role)
    return answer


@router.delete("", status_code=204, summary="End the session")
async def end(request: Request) -> Response:
    """End the session: the answer removes the cookie."""
    await check_intended(request)
    return Response(status_code=204, headers={"Set-Cookie": request.app.state.sessions.ending_cookie()})


async def _token_in_json(request: Request) -> object:
    try:
        document = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise HttpProblem(400, "Not JSON", 'the body is {"token": "…"}', "token") from None
    return document.get("token") if isinstance(document, dict) else None
