"""Runs the web service on a port."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import uvicorn

from pipeline.base.redact import mask_record
from pipeline.service.app import create_app
from pipeline.service.settings import BadSettings, ServiceSettings

#: seconds that streams get to end when the server is stopped; their clients continue elsewhere
GRACE_S = 3
#: most connections at once: each costs a socket and some kB
CONNECTIONS = 2000


def run_server(settings: ServiceSettings, started: Callable[[str], None]) -> None:
    """Run the service until the process gets SIGINT or SIGTERM. `started` is called with the service's URL once clients
    can connect. Raises BadSettings when the port or the certificate cannot be used."""
    log_to_stderr()
    for path in (settings.certificate, settings.key):
        if path is not None and not os.access(path, os.R_OK):
            raise BadSettings(f"cannot read {path}; name the files of the TLS certificate and its key (PEM)")
    config = uvicorn.Config(
        create_app(settings), settings.host, settings.port, ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key, proxy_headers=settings.behind_proxy, forwarded_allow_ips=settings.proxy,
        access_log=False, log_config=None, server_header=False, ws="none", limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=GRACE_S)
    try:
        if settings.certificate is not None:
            config.load()
        listener = config.bind_socket()
        listener.listen(config.backlog)                           # who reads the URL may connect at once
    except SystemExit:                                            # uvicorn logs why it cannot bind, and exits
        raise BadSettings(f"cannot listen on {settings.host}:{settings.port}; choose another --port or --host, or stop "
                          f"what listens there") from None
    except OSError as e:
        raise BadSettings(f"{settings.certificate}: not a TLS certificate with its key ({e}); give both as PEM files "
                          f"without a password") from None
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    started(f"{'https' if settings.certificate else 'http'}://{host}:{settings.port}/")
    uvicorn.Server(config).run(sockets=[listener])


def log_to_stderr() -> None:
    """Write the access log and errors to stderr, one line each, with secrets masked."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    handler.addFilter(mask_record)
    for name, level in (("tokenmill.access", logging.INFO), ("tokenmill.service", logging.INFO),
                        ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
