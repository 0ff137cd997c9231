"""Starts the runs that wait in the queues of the stores, for as long as the service runs."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator
from functools import partial

from fastapi import FastAPI

from pipeline.base.redact import redact
from pipeline.base.visible import visible
from pipeline.cluster.dispatch import Dispatcher, DriverOptions, start_driver
from pipeline.service.settings import OPERATOR_TOKEN, VIEWER_TOKEN, ServiceSettings

#: seconds between two looks at a queue
TICK_S = 2.0
logger = logging.getLogger("tokenmill.service")


def driver_options(settings: ServiceSettings) -> DriverOptions:
    """Return the options for the drivers (processes that lead a run) of submitted recipes. Drivers do not get the
    service's tokens. Inputs must lie in the allowed roots, which are folders and URLs. If runs use a cluster, web
    addresses are no allowed roots: the cluster's nodes fetch them themselves and would follow a redirect out of a
    root."""
    roots = tuple(root if "://" in root else os.path.abspath(root) for root in settings.allowed_roots)
    if settings.address is not None:
        roots = tuple(root for root in roots if not root.startswith(("http://", "https://")))
    backend = settings.backend if settings.address is None else "ray"
    folder = next((root for root in roots if "://" not in root), os.sep)
    return DriverOptions(backend, settings.workers, settings.address, settings.insecure_local, settings.allow_code,
                         roots, folder, (OPERATOR_TOKEN, VIEWER_TOKEN))


@contextlib.asynccontextmanager
async def dispatching(app: FastAPI) -> AsyncIterator[None]:
    """A context manager that starts the waiting runs of every store's queue, in one thread for each store. The drivers
    (processes that lead a run) continue when the service ends. The service that is started next learns of these drivers
    from the store."""
    stopping = threading.Event()
    options = driver_options(app.state.settings)
    for name, queue in app.state.queues.items():
        dispatcher = Dispatcher(queue, partial(start_driver, queue.store, options))
        threading.Thread(target=_look_after, args=(name, dispatcher, stopping), name=f"queue {name}",
                         daemon=True).start()
    try:
        yield
    finally:
        stopping.set()


def _look_after(name: str, dispatcher: Dispatcher, stopping: threading.Event) -> None:
    logged = ""
    while not stopping.wait(TICK_S):
        try:
            dispatcher.tick()
            logged = ""
        except Exception as e:                                    # a damaged queue, a store that does not answer
            message = visible(redact(f"{type(e).__name__}: {e}"))
            if message != logged:
                logger.error("the queue of store %s: %s", visible(name), message)
            logged = message
