"""Determines the role of a request's sender, and issues the tokens that prove that a form came from a page of the
service. The server stores no sessions: cookies and form tokens are signed.

A program sends `Authorization: Bearer TOKEN`. A browser exchanges the token for a cookie (`POST /api/v1/session`). The
cookie names the role and the time at which the session ends, and is signed with a key made from the role's token. So a
restarted server accepts existing sessions, and replacing the token ends them all.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from enum import StrEnum
from http.cookies import CookieError, SimpleCookie

from starlette.requests import Request

from pipeline.base.clock import SYSTEM, Clock
from pipeline.service.settings import ServiceSettings

SESSION_S = 12 * 3600


class Role(StrEnum):
    """The role of a user. A viewer may read; an operator may also write."""

    viewer = "viewer"
    operator = "operator"


class Sessions:
    """Recognises the tokens, the session cookies and the form tokens of one service."""

    def __init__(self, settings: ServiceSettings, clock: Clock = SYSTEM) -> None:
        self._tokens = {Role.operator: settings.operator_token, Role.viewer: settings.viewer_token}
        self._open = not settings.tokens
        self._secure, self._clock = settings.secure, clock
        # without tokens, this key signs the forms. It is new after a restart, and then pages must be loaded again
        self._own_key = secrets.token_bytes(32)
        #: browsers send a __Host- cookie only by TLS and only to the host that set it
        self.cookie = "__Host-tokenmill" if settings.secure else "tokenmill"

    def role_of_token(self, token: str) -> Role | None:
        """Return the role that belongs to a token, or None for a wrong token. The check takes equally long for every
        wrong token."""
        given, result = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest(), None
        for role, ours in self._tokens.items():
            same = hmac.compare_digest(given, hashlib.sha256((ours or "").encode()).digest())
            if same and ours is not None:
                result = role
        return result

    def role_of(self, request: Request) -> Role | None:
        """Return the role of a request's sender, or None if the sender has none. A bearer token decides if there is
        one, otherwise the cookie. With a wrong token, or an Authorization header of another kind, even a valid cookie
        does not count. If the service has no tokens, everybody is an operator."""
        if self._open:
            return Role.operator
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind:
            return self.role_of_token(token.strip()) if kind.lower() == "bearer" else None
        return self._role_of_cookie(self._cookie_of(request))

    def cookie_for(self, role: Role) -> str:
        """Return the value of the Set-Cookie header that begins a session of a user with this role."""
        value = f"{role}.{int(self._clock.wall()) + SESSION_S}"
        return self._set_cookie(f"{value}.{self._sign(role, value)}", SESSION_S)

    def ending_cookie(self) -> str:
        """Return the value of the Set-Cookie header that ends a session."""
        return self._set_cookie("", 0)

    def form_token(self, request: Request) -> str:
        """Return the value of the hidden field `csrf` for the forms that the session of this request is shown. Another
        site cannot know this value, so a form that contains it comes from a page of the service."""
        subject = self._cookie_of(request)
        key = b"".join(self._key(role) for role in Role) if not self._open else self._own_key
        return hmac.new(key, f"form.{subject}".encode(), "sha256").hexdigest()

    def _set_cookie(self, value: str, seconds: int) -> str:
        return (f"{self.cookie}={value}; Max-Age={seconds}; Path=/; HttpOnly; SameSite=Strict"
                + ("; Secure" if self._secure else ""))

    def _cookie_of(self, request: Request) -> str:
        try:
            morsel = SimpleCookie(request.headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return morsel.value if morsel is not None else ""

    def _role_of_cookie(self, value: str) -> Role | None:
        name, _, rest = value.partition(".")
        end, _, mac = rest.partition(".")
        if name not in list(Role) or not (end.isascii() and end.isdigit()) or len(end) > 12:
            return None
        role = Role(name)
        if self._tokens[role] is None or not hmac.compare_digest(self._sign(role, f"{name}.{end}").encode(),
                                                                 mac.encode("utf-8", "surrogatepass")):
            return None
        return role if self._clock.wall() < int(end) else None

    def _key(self, role: Role) -> bytes:
        return hashlib.sha256(f"tokenmill session {self._tokens[role] or ''}".encode()).digest()

    def _sign(self, role: Role, value: str) -> str:
        return hmac.new(self._key(role), value.encode(), "sha256").hexdigest()
