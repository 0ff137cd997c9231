"""Checks a Ray cluster before it is used: the cluster must answer at its address, demand a token, and accept this
user's token.

Ray is imported only after the token has been set, because Ray looks for a token only once, when it is imported.
"""

from __future__ import annotations

import socket

from pipeline.base.auth import CONNECT_S, BadAddress, NoAnswer, use_token
from pipeline.base.redact import redact


def check_cluster(address: str, insecure_local: bool = False) -> str:
    """Return 'host:port' of the Ray cluster at `address` (see `gcs_of`), after checking that the cluster demands a
    token and accepts this user's token. With `insecure_local`, a cluster without authentication is also accepted if it
    is on loopback. Raises BadAddress when `address` is neither 'host:port' nor 'auto', and ClusterError when a check
    fails."""
    gcs = gcs_of(address)
    from pipeline.cluster import jobs

    jobs.check_gcs(gcs, insecure_local)
    return gcs


def gcs_of(address: str) -> str:
    """Return 'host:port' of the Ray cluster at `address`, which is 'host:port' already, or 'auto' for the cluster that
    this machine is part of. Call this before Ray is imported, because it sets the token that Ray reads at its import.
    Raises BadAddress when `address` is neither of these, and NoAnswer when this machine is part of no cluster or
    nothing answers at the address."""
    if address.startswith(("http://", "https://")):
        raise BadAddress(f"--address {redact(address)} is a job server, which is for tokenmill submit; to attach, give "
                         f"the cluster itself, HOST:6379")
    if address.startswith("ray://"):
        raise BadAddress(f"--address {redact(address)}: Ray Client is not supported; attach to HOST:6379 from a "
                         f"machine of the cluster, or use tokenmill submit")
    use_token()
    from pipeline.cluster import jobs

    if address == "auto":
        address = jobs.local_cluster()
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadAddress(f"--address {redact(address)} is not the address of a cluster; give HOST:6379, or auto on a "
                         f"machine of the cluster")
    try:                                         # Ray itself would try for two minutes
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, UnicodeError) as e:
        raise NoAnswer(f"--address {address}: nothing answers there ({e}); see that the head node of the cluster runs "
                       f"(ray status) and its port is open, or leave --address out to use this machine alone") from None
    return address
