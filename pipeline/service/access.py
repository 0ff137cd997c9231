"""Controls access to the web service. `Guard` checks every request before it reaches a route. The dependencies `viewer`
and `operator` declare which role a route demands. A viewer may read; an operator may also write.

Every request is refused unless a rule allows it. The guard demands a role for every path except static files and the
paths that signing in needs. It demands an operator for every request that is not a GET or HEAD. So a route that
declares no role is not open to everybody.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.base.auth import loopback
from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.visible import visible
from pipeline.service.audit import note_write, request_entry
from pipeline.service.limits import RateBuckets
from pipeline.service.problems import LOGIN, SIGN_IN, HttpProblem, problem_of, respond
from pipeline.service.session import Role, Sessions
from pipeline.service.settings import ServiceSettings
from pipeline.service.stores import available

access_log = logging.getLogger("tokenmill.access")
#: paths that need no role: the sign-in page, the request that begins a session, and static files
OPEN = (LOGIN, SIGN_IN)
STATIC = "/static/"
READS = ("GET", "HEAD")
#: a page of another site can send this header only after a CORS preflight, which this server refuses
HEADER = "x-tokenmill"
#: the hidden field of a form, which replaces the header where no script runs
FIELD = "csrf"
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": NOTHING,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # with no-referrer, browsers send `Origin: null` with the forms of our own pages, which is refused
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


def page_policy(nonce: str) -> str:
    """Return the value of the header Content-Security-Policy for an HTML page. The scripts and styles of the page carry
    the random value `nonce` (`request.state.nonce`); the browser refuses all others."""
    return (f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data:; "
            f"connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'")


class Guard:
    """The outermost layer of the service (an ASGI middleware). It limits the rate and size of requests, checks the
    headers Host and Origin, and determines the sender's role. It sets security headers, logs requests, and turns
    exceptions into error answers.

    The guard sets three attributes of `request.state`: `role` (None if nobody is signed in), `nonce` (a random value
    that the scripts of a page must carry), and `csrf` (a secret value that the forms of a page must send).
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings, sessions: Sessions, clock: Clock = SYSTEM) -> None:
        self._app, self._settings, self._sessions, self._clock = app, settings, sessions, clock
        self._requests = RateBuckets(settings.rate, settings.burst, clock)
        self._guesses = RateBuckets(settings.wrong_tokens / 60.0, settings.wrong_tokens, clock)
        self._origins = frozenset(name.lower() for name in settings.names)
        self._names = frozenset(_host_name(name) for name in (settings.host, *self._origins))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":                               # there is no route for a websocket
            await send({"type": "websocket.close", "code": 1008})
            return
        request = Request(scope)
        request.state.nonce = secrets.token_urlsafe(16)
        request.state.role, request.state.wrong_token = None, False
        began, status, sent = self._clock.now(), 0, 0
        limit = asyncio.timeout(self._settings.request_s)         # ends when the answer begins: a stream may take long

        async def send_safely(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                self._set_headers(MutableHeaders(scope=message), request)
            sent += len(message.get("body", b""))
            await send(message)

        async def send_in_time(message: Message) -> None:
            if message["type"] == "http.response.start" and not limit.expired():
                limit.reschedule(None)
            await send_safely(message)

        try:
            try:
                self._check(request)
                async with limit:
                    await self._app(scope, self._counted(receive), send_in_time)
            except ClientDisconnect:
                status = status or 499
            except Exception as e:
                e = self._too_slow() if limit.expired() else e
                if status:                                        # the answer has begun, so it is cut off
                    problem_of(e)
                    raise
                await respond(request, e)(scope, receive, send_safely)
        finally:
            if request.state.wrong_token:
                self._guesses.take(self._client(request))
            access_log.info("%s %s %s %s %s %.0f ms %s", self._client(request), request.method,
                            visible(request.url.path)[:500], status or "-", sent,
                            1000 * (self._clock.now() - began), request.state.role or "-")

    # -- before the route ----------------------------------------------------------------------------------------
    def _check(self, request: Request) -> None:
        """Raise HttpProblem for a request that must not reach its route, for one of these reasons:

        - the sender has sent too many requests or wrong tokens
        - the URL or the body is too large
        - the header Host or Origin is not allowed
        - the sender lacks the role that the path or the method demands
        """
        address = self._client(request)
        if not self._requests.take(address):
            raise HttpProblem(429, "Too many requests", f"more than {self._settings.rate:.0f} requests per second",
                              remedy="wait a second, and poll less often or follow the stream of events",
                              headers={"Retry-After": "1"})
        if len(request.scope["raw_path"]) + len(request.scope["query_string"]) > self._settings.max_url_bytes:
            raise HttpProblem(414, "URL too long", f"the limit is {self._settings.max_url_bytes:,} bytes")
        self._check_host(request)
        self._check_origin(request)
        self._check_guesses(request, address)
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._settings.max_body_bytes:
            raise self._too_large()
        role = self._sessions.role_of(request)
        if role is None and "authorization" in request.headers:
            self._guesses.take(address)
        request.state.role, request.state.csrf = role, self._sessions.form_token(request)
        if (path := request.url.path) in OPEN or path.startswith(STATIC):
            return
        if role is None:
            raise HttpProblem(401, "Sign in first", "this server wants a token", "Authorization",
                              "send `Authorization: Bearer TOKEN`, or open /login in a browser",
                              {"WWW-Authenticate": 'Bearer realm="tokenmill"'})
        if request.method not in READS:
            require_operator(request)

    def _check_guesses(self, request: Request, address: str) -> None:
        """Raise HttpProblem for a request with a token, even a right one, from an address that has just sent too many
        wrong tokens. Requests with a session's cookie are not affected."""
        guess = "authorization" in request.headers or request.url.path == SIGN_IN
        if guess and self._guesses.empty(address):
            raise HttpProblem(429, "Too many wrong tokens", f"{self._settings.wrong_tokens} in a minute",
                              "Authorization", "wait a minute", {"Retry-After": "60"})

    def _check_host(self, request: Request) -> None:
        """Raise HttpProblem for a request whose Host header does not name this server. In a DNS rebinding attack, the
        name of another site resolves to this server, and a page of that site could read the answers."""
        hosts = request.headers.getlist("host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not (name in self._names or (loopback(name) and self._settings.local)):
            raise HttpProblem(403, "Not the name of this server",
                              f"the request is for the host {','.join(hosts)[:200]!r}", "Host",
                              "open the server under its own address; tokenmill serve --name NAME adds a name")

    def _check_origin(self, request: Request) -> None:
        """Raise HttpProblem for a request that a page of another site has caused. A user may still follow a link from
        another site to a page of this server."""
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        if origin is not None:
            place = origin.lower().partition("://")[2]
            good = bool(place) and (place == request.headers["host"].lower() or place in self._origins)
        else:
            good = site in ("none", "same-origin") or (request.method in READS and
                                                       request.headers.get("sec-fetch-mode") == "navigate")
        if not good:
            raise HttpProblem(403, "From another site", "a page of another site made this request", "Origin",
                              "open the page of this server and do it there")

    # -- around the route ----------------------------------------------------------------------------------------
    def _too_slow(self) -> HttpProblem:
        return HttpProblem(503,
                           "Took too long",
                           f"no answer within {self._settings.request_s:.0f} s",
                           remedy="ask for less, or try again when the store is less busy",
                           headers={"Retry-After": "10"})

    def _counted(self, receive: Receive) -> Receive:
        """Return `receive` (the ASGI function that reads a request's body), wrapped so that it raises HTTPException
        (413) once the body is larger than allowed. A request may have no Content-Length, so the size is known only
        while the body is read."""
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._settings.max_body_bytes:
                # an HTTPException, as FastAPI answers 400 for any other error while it reads a body
                raise HTTPException(413, self._too_large().detail, {"Connection": "close"})
            return message

        return limited

    def _too_large(self) -> HttpProblem:
        return HttpProblem(413, "Body too large", f"the limit is {self._settings.max_body_bytes:,} bytes",
                           "Content-Length", headers={"Connection": "close"})

    @staticmethod
    def _set_headers(headers: MutableHeaders, request: Request) -> None:
        if headers.get("content-type", "").startswith("text/html"):
            headers.setdefault("Content-Security-Policy", page_policy(request.state.nonce))
        for name, value in HEADERS.items():
            headers.setdefault(name, value)

    @staticmethod
    def _client(request: Request) -> str:
        return request.client.host if request.client else "-"


def _host_name(host: str) -> str | None:
    """Return the host name in a Host header, in lower case and without the port. Returns None when the header is not
    valid."""
    try:
        parts = urlsplit(f"//{host}")
        port_is_sound = parts.port is None or parts.port > 0
    except ValueError:
        return None
    sound = port_is_sound and parts.netloc == host and "@" not in host
    return parts.hostname.rstrip(".") if sound and parts.hostname else None


# -- what a route asks for -------------------------------------------------------------------------------------------
def require_operator(request: Request) -> None:
    if request.state.role is not Role.operator:
        raise HttpProblem(403, "Operators only", "a viewer's token may only read", "Authorization",
                          "ask for an operator's token")


async def viewer(request: Request) -> Role:
    """A dependency of FastAPI routes. It refuses a request unless the sender is a viewer or an operator, and returns
    the sender's role."""
    role: Role | None = request.state.role
    if role is None:
        raise HttpProblem(401, "Sign in first", "this server wants a token", "Authorization",
                          "open /login in a browser")
    return role


async def operator(request: Request) -> Role:
    """A dependency of FastAPI routes. It refuses a request unless the sender is an operator, and returns this role. For
    a write (a request that changes something), it also demands a proof that the user intended it (`check_intended`). It
    notes the write in the store's audit log before the route runs."""
    await viewer(request)
    require_operator(request)
    if request.method not in READS:
        await check_intended(request)
        store = request.app.state.stores.get(request.path_params.get("store"))
        if store is not None and available(store):
            await run_in_threadpool(note_write, store, await request_entry(request))
    return Role.operator


async def known_parameters(request: Request) -> None:
    """A dependency of FastAPI routes. It refuses query parameters that the requested route of the API does not have. If
    a misspelt filter were ignored, the answer would include what the client wanted to filter out. HTML pages are
    exempt, because they parse the query of their URL themselves."""
    route = request.scope.get("route")
    if isinstance(route, APIRoute) and request.url.path.startswith("/api/"):
        known = _parameters(route.dependant)
        if unknown := sorted(request.query_params.keys() - known):
            raise HttpProblem(422, "Not valid", f"there is no parameter {visible(unknown[0])[:100]!r} here",
                              visible(unknown[0])[:100], f"there are: {', '.join(sorted(known))}" if known else
                              "this route takes no parameters")


def _parameters(dependant: Dependant) -> set[str]:
    """Return the names of the query parameters of a route and of its dependencies."""
    return {field.alias for field in dependant.query_params}.union(*map(_parameters, dependant.dependencies))


async def check_intended(request: Request) -> None:
    """Raise HttpProblem for a write (a request that changes something) that a page of another site could have sent
    (CSRF). A browser adds the session's cookie to such a request, and a server without tokens demands no cookie, so the
    cookie proves nothing.

    A write is accepted if it has a header that a page of another site cannot send (a bearer token or `X-Tokenmill`). It
    is also accepted if the hidden form field `csrf` has the right value, which such a page cannot read.
    """
    if request.headers.get("authorization", "").lower().startswith("bearer ") or request.headers.get(HEADER):
        return
    sent = (await form_of(request)).get(FIELD, "")
    if not secrets.compare_digest(sent.encode("utf-8", "surrogatepass"), request.state.csrf.encode()):
        raise HttpProblem(403, "Not from a page of this server", "the form is old, or another site sent it", FIELD,
                          "load the page again; a program sends the header `X-Tokenmill: 1`")


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of the URL-encoded form in a request's body, as {name: value}, or {} for a body of another
    type. If a field occurs more than once, its last value counts. Raises HttpProblem for a body that is no valid form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        return {}
    try:
        body = (await request.body()).decode("utf-8")
        return dict(parse_qsl(body, keep_blank_values=True, max_num_fields=1000, errors="strict"))
    except ValueError:
        raise HttpProblem(400, "Not a form", "the body is not an urlencoded form of at most 1,000 fields") from None


Viewer = Annotated[Role, Depends(viewer)]
Operator = Annotated[Role, Depends(operator)]
