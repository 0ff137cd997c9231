"""What a Ray cluster's GCS says to who comes with a token, and to who comes without: all that is asked of one before we
attach to it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc


class Gcs(grpc.GenericRpcHandler):
    """`wants`: the token it asks for, None for an open cluster. `seen`: what it was given, request by request."""

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
    """('127.0.0.1:port', the handler) of one that runs for as long."""
    handler = Gcs(wants)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", handler
    finally:
        server.stop(None).wait()
