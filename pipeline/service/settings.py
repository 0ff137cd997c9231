"""Settings of the service: stores, address, tokens and limits. Also reads a token from a file or an environment
variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.base.auth import loopback
from pipeline.base.errors import TokenmillError

#: environment variables with the tokens, for users who give no file
OPERATOR_TOKEN, VIEWER_TOKEN = "TOKENMILL_OPERATOR_TOKEN", "TOKENMILL_VIEWER_TOKEN"
SHORTEST = 20            # characters of a token: it must not be guessed
MAKE_ONE = "make one with python -c 'import secrets; print(secrets.token_hex(32))'"


class BadSettings(TokenmillError):
    """Raised when the service cannot be started with the given settings."""

    exit_code = 2


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of the service. `stores` maps names to folders or URLs of stores. Without tokens, everybody who reaches
    the port is an operator, so `host` must then be a loopback address.

    - `names`: host names under which browsers may reach the service, in addition to loopback names and `host`
    - `allowed_roots`: folders and URLs in which the inputs of submitted recipes must lie
    - `allow_code`: whether submitted recipes may name code
    - `backend`, `workers`, `address` and `insecure_local`: the options of `tokenmill run` with which submitted runs are
      started
    - `trainings`: name of a store → folders with further trainings, in addition to those in the store's runs
    """

    stores: Mapping[str, str]
    host: str = "127.0.0.1"
    port: int = 8700
    viewer_token: str | None = field(default=None, repr=False)
    operator_token: str | None = field(default=None, repr=False)
    certificate: str | None = None
    key: str | None = None
    behind_proxy: bool = False
    proxy: str = "127.0.0.1"
    names: tuple[str, ...] = ()
    allowed_roots: tuple[str, ...] = ()
    backend: str = "process"
    workers: int | None = None
    address: str | None = field(default=None, repr=False)
    insecure_local: bool = False
    allow_code: bool = False
    trainings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    max_body_bytes: int = 1 << 20
    max_url_bytes: int = 8 << 10
    #: requests that one address may send per second on average, and at once
    rate: float = 200.0
    burst: int = 1000
    #: wrong tokens that one address may send per minute
    wrong_tokens: int = 10
    #: seconds until the answer to a request must begin
    request_s: float = 60.0
    #: streams of events open at once, and seconds after which one ends (its client continues with a new one)
    streams: int = 500
    stream_s: float = 3600.0
    #: a run that is watched is read again after this many seconds
    look_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.stores:
            raise BadSettings("no store to serve; give --store")
        if (self.certificate is None) != (self.key is None):
            raise BadSettings("--certificate and --key belong together; give both")
        if self.operator_token is not None and self.operator_token == self.viewer_token:
            raise BadSettings("the tokens of operators and viewers are the same; make two")
        if (self.behind_proxy or not self.local) and not self.tokens:
            raise BadSettings(f"others could reach {'the proxy' if self.behind_proxy else self.host} and do anything; "
                              f"give --token-file (or set {OPERATOR_TOKEN}), {MAKE_ONE}")
        if not self.local and self.certificate is None and not self.behind_proxy:
            raise BadSettings(f"the token would travel to {self.host} in clear; give --certificate and --key, or "
                              f"--behind-proxy if a proxy in front of it speaks TLS")
        if not self.names and (self.behind_proxy or self.host in ("0.0.0.0", "::", "")):
            raise BadSettings("without its host name, the server cannot refuse pages that pretend to be this server; "
                              "give --name with the host name under which people open it")

        for folder in (folder for folders in self.trainings.values() for folder in folders):
            if not os.path.isdir(folder):
                raise BadSettings(f"--trainings {folder}: no such folder; make it, or name one that is there")
        for root in self.allowed_roots:
            if "://" not in root and not os.path.isdir(root):
                raise BadSettings(f"--allow-root {root}: no such folder; name one that is there, or a URL")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the port, because `host` is a loopback address."""
        return loopback(self.host)

    @property
    def tokens(self) -> bool:
        """Whether requests need a token."""
        return self.operator_token is not None or self.viewer_token is not None

    @property
    def secure(self) -> bool:
        """Whether browsers reach the service by TLS."""
        return self.certificate is not None or self.behind_proxy


def read_token(variable: str, path: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Read a token from the file `path` or, if `path` is None, from the environment variable `variable`. Returns None
    when neither is given. Raises BadSettings when the token is not one word of ASCII characters, or is too short to be
    safe. The message does not quote the token."""
    where = path or variable
    text = environment.get(variable, "")
    if path is not None:
        try:
            with open(path, encoding="utf-8", errors="replace") as f:
                text = f.read(4096)
        except OSError as e:
            raise BadSettings(f"{path}: {e.strerror}; name the file that holds the token") from None
    token = text.strip()
    if not token and path is None:
        return None
    if len(token) < SHORTEST or not all("!" <= c <= "~" for c in token):
        raise BadSettings(f"{where}: a token is one word of at least {SHORTEST} ASCII characters; {MAKE_ONE}")
    return token
