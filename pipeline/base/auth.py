"""Finds the user's authentication token for Ray clusters, and checks that a cluster demands a token and accepts the
user's. Ray decides at its import whether it uses tokens. `use_token` must therefore be called before Ray is imported,
and this module never imports Ray.

Anyone who reaches a cluster without authentication can run code on it (CVE-2023-48022). Such a cluster is therefore
refused, unless it is on this machine's loopback and the user accepts the risk with --insecure-local. Ray (2.52 and
later) reads from RAY_AUTH_MODE whether to use tokens. It takes the token from the first of these that is set or exists:
RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, ~/.ray/auth_token.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import secrets
import sys
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from pipeline.base.errors import TokenmillError
from pipeline.base.redact import redact

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
#: environment variable with the URL of the job server
ADDRESS = "TOKENMILL_ADDRESS"
CONNECT_S = 10.0         # seconds to wait for the head node's answer
REMEDY = ("start the cluster with RAY_AUTH_MODE=token and give this shell the same token (RAY_AUTH_TOKEN_PATH); see "
          "docs/cluster.md")


class ClusterError(TokenmillError):
    """Raised for a cluster that cannot be reached, or must not be used. The message says what to do."""


class NoAnswer(ClusterError):
    """Raised when the head node of a Ray cluster does not answer, because it is down or out of reach. Also raised when
    this machine is part of no cluster. The head node may come back, so a run in a queue waits for it."""


class BadAddress(ClusterError):
    """Raised when a given text is not the address of a cluster."""

    exit_code = 2


def token() -> str | None:
    """Return the authentication token that Ray would use, or None when there is none. Raises ClusterError when the file
    that RAY_AUTH_TOKEN_PATH names cannot be read, or when the token is not one word of ASCII characters."""
    if os.environ.get(TOKEN, "").strip():
        return _one_word(TOKEN, os.environ[TOKEN])
    for path in (os.environ.get(TOKEN_PATH), os.path.expanduser("~/.ray/auth_token")):
        if path:
            try:
                with open(path, encoding="utf-8", errors="replace") as f:
                    return _one_word(path, f.read())
            except OSError as e:
                if path == os.environ.get(TOKEN_PATH):
                    raise ClusterError(f"{TOKEN_PATH}={path}: {e.strerror}; name the file that holds the cluster's "
                                       f"token") from None
    return None


def _one_word(where: str, text: str) -> str | None:
    """Return the token in `text`, which comes from `where` (a variable or a file), or None when `text` is blank. Raises
    ClusterError when `text` is anything but one word of ASCII characters. The error message does not quote `text`,
    because the file may hold other secrets."""
    word = text.strip()
    if not all("!" <= c <= "~" for c in word):
        raise ClusterError(f"{where}: a token is one word of ASCII characters, and this is something else; make one "
                           f"with python -c 'import secrets; print(secrets.token_hex(32))'")
    return word or None


def use_token() -> str | None:
    """Return the authentication token for Ray clusters, or None when there is none. If there is one, and RAY_AUTH_MODE
    is not set, set this variable so that Ray uses the token. Call this before Ray is imported, because Ray reads the
    variable only once."""
    bearer = token()
    if bearer is not None:
        os.environ.setdefault(MODE, "token")
    return bearer


def own_token() -> None:
    """Set a random authentication token for a Ray cluster that Tokenmill starts on this machine, if the user has no
    token. The ports of such a cluster listen on all addresses, so without a token others could run code on it. No token
    is set when RAY_AUTH_MODE is set to anything but "token", or when Ray is already imported and has read that
    variable."""
    if "ray" not in sys.modules and os.environ.setdefault(MODE, "token").lower() == "token" and token() is None:
        os.environ[TOKEN] = secrets.token_hex(32)


def loopback(host: str | None) -> bool:
    """Whether `host` is a loopback address, which only this machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address((host or "").strip("[]")).is_loopback
    except ValueError:
        return False


def loopback_url(url: str) -> bool:
    """Whether a URL leads to this machine's loopback."""
    return loopback(urlsplit(url).hostname)


def job_server(address: str) -> str:
    """Return the URL of a job server (the dashboard of a Ray head node) without its trailing slash. Raises BadAddress
    when `address` is not such a URL, or holds credentials or a query."""
    try:
        parts = urlsplit(address)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:                      # brackets without an address, or a port beyond 65535
        sound = False
    if not sound:
        raise BadAddress(f"{redact(address)} is not the URL of a job server; give the dashboard of the head node, "
                         f"e.g. http://127.0.0.1:8265")
    if parts.username or parts.password or parts.query:
        raise BadAddress(f"{redact(address)}: leave credentials out of the URL; {REMEDY}")
    return address.rstrip("/")


def check_kept_server(address: str) -> None:
    """Check a job server whose address was read from a store, and raise ClusterError if our token must not be sent to
    it. Whoever can write to the store could put the address of a server of their own there and obtain the token. The
    token is therefore sent only to the server that the environment variable TOKENMILL_ADDRESS names, or to a loopback
    address (for example an SSH tunnel). Finally, `check_job_server` checks the server."""
    if job_server(address) != os.environ.get(ADDRESS, "").rstrip("/") and not loopback_url(address):
        raise ClusterError(f"the store names {address} as the job server of the run. Your token is sent only to a "
                           f"server that you name: if this is your server, export {ADDRESS}={address}")
    check_job_server(address, insecure_local=loopback_url(address))


def check_job_server(address: str, insecure_local: bool = False) -> None:
    """Check that the job server at `address` (from `job_server`) demands an authentication token and accepts ours.
    Raises ClusterError if it does not.

    `insecure_local`: also accept a server without authentication if its address is a loopback address.
    """
    use_token()
    status = _status(address, None)
    if status == 200:
        refuse_open(address, urlsplit(address).hostname, insecure_local)
        return
    if status not in (401, 403):
        raise ClusterError(f"{address} answers with status {status}, not like a Ray dashboard; give the URL of the "
                           f"head node's dashboard, e.g. http://127.0.0.1:8265")
    status = _status(address, our_token(address))
    if status in (401, 403):
        raise token_refused(address)
    if status != 200:
        raise ClusterError(f"{address} answers with status {status}; see the log of its dashboard")


def our_token(address: str) -> str:
    """Return the authentication token for the cluster at `address`, which demands one. Raises ClusterError when the
    environment has no token, or when RAY_AUTH_MODE keeps Ray from sending it."""
    bearer = token()
    if bearer is None or os.environ.get(MODE, "").lower() != "token":
        raise ClusterError(f"{address} wants a token, and this shell has none; set RAY_AUTH_MODE=token and "
                           f"RAY_AUTH_TOKEN_PATH to a file that holds the cluster's token")
    return bearer


def token_refused(address: str) -> ClusterError:
    return ClusterError(f"{address} does not accept our token; see that RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH is that "
                        f"of this cluster")


def refuse_open(address: str, host: str | None, insecure_local: bool) -> None:
    """Raise ClusterError for a cluster without authentication, unless `host` is a loopback address and `insecure_local`
    is set."""
    if not insecure_local:
        raise ClusterError(f"{address} is open: anybody who reaches it can run code on it; {REMEDY}"
                           + (" (or --insecure-local, on this machine alone)" if loopback(host) else ""))
    if not loopback(host):
        raise ClusterError(f"{address} is open to others: --insecure-local holds for this machine's loopback alone; "
                           f"{REMEDY}")


def in_clear(address: str) -> bool:
    """Whether our authentication token would be sent unencrypted over a network to the server at `address`."""
    parts = urlsplit(address)
    return parts.scheme == "http" and not loopback(parts.hostname)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses HTTP redirects, because a redirect would carry the authentication token to another server."""

    def redirect_request(self, *_: object) -> None:
        return None


def _status(address: str, bearer: str | None) -> int:
    headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if loopback(urlsplit(address).hostname):
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(f"{address}/api/version", headers=headers)
        with urllib.request.build_opener(*handlers).open(request, timeout=CONNECT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return e.code
    except (OSError, http.client.HTTPException, ValueError) as e:
        why = e.reason if isinstance(e, urllib.error.URLError) else e
        raise ClusterError(f"nothing answers at {address} ({redact(str(why))}); see that the head node runs and its "
                           f"dashboard port is forwarded (ssh -L 8265:127.0.0.1:8265 HEAD)") from None
