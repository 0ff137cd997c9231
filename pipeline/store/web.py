"""Reads files from web servers, for recipes that strangers have submitted. A recipe must not make this machine read
from itself, or from services that only this machine can reach (`pipeline.base.addresses`). Clouds hand out credentials
through such services.

A URL can lead there in two ways. The server may answer with a redirect to such an address, or the server's name may get
such an address after it was checked.

If the environment variable that `DIRECT` names is set, redirects are errors, and every address is checked when the
connection is made. Brokers (processes that use storage for confined children) inherit the variable from the process
that starts them.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from pipeline.base.addresses import outside
from pipeline.store.errors import StoreError
from pipeline.store.remote import Remote

DIRECT = "TOKENMILL_NO_REDIRECTS"


def direct() -> bool:
    """Whether this process refuses redirects and local addresses (`pipeline.base.addresses`) when it reads from web
    servers."""
    return os.environ.get(DIRECT) == "1"


async def _client(**options: Any) -> Any:
    """Return an aiohttp session that raises StoreError instead of following a redirect. It also raises StoreError
    instead of connecting to this machine or to an address that only this machine can reach."""
    import aiohttp
    from aiohttp.resolver import ThreadedResolver

    class Resolver(ThreadedResolver):
        async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[Any]:
            addresses = await super().resolve(host, port, family)
            if not all(outside(info["host"]) for info in addresses):
                raise StoreError(f"{host} is this machine, or a service of its network; a submitted recipe must not "
                                 f"read there")
            return addresses

    async def refuse(session: Any, context: Any, parameters: Any) -> None:
        raise StoreError(f"{parameters.url} redirects elsewhere, which is refused for submitted recipes; name the "
                         f"address of the file itself")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=Resolver()), trace_configs=[trace],
                                 **{k: v for k, v in options.items() if k != "loop"})


class Direct(Remote):
    """A web server from which files are read without following redirects."""

    options = {"get_client": _client}  # noqa: RUF012
