"""Stands in for the GCS, the control process of a Ray cluster: it answers clients that send the right token, and
refuses others. Our code asks nothing else of it before it attaches to a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc


class Gcs(grpc.GenericRpcHandler):
    """The handler of requests. `wants` is the token that it requires (None: an open cluster). `seen` lists the
    `authorization` header of each request, or None."""

    def __init__(self, wants: str | None) -> None:
        self.wants, self.seen = wants, []

    def service(self, details):
        def answer(request, context):
            given = dict(context.invocation_metadata()).get("authorization")
            self.seen.append(given)
            if self.wants is not None and given != f"Bearer {self.wants}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""                                        # a reply with nothing in it

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def gcs(wants: str | None) -> Iterator[tuple[str, Gcs]]:
    """A context manager that runs such a server. Yields ('127.0.0.1:port', its handler)."""
    handler = Gcs(wants)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", handler
    finally:
        server.stop(None).wait()
