"""Finds the stores of the service by name, and refuses to read files that lie outside a store."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import Depends, Request

from pipeline.base.visible import visible
from pipeline.cluster.attempts import bad_name, has_run
from pipeline.service.problems import HttpProblem
from pipeline.store.fs import Store


async def known_store(request: Request, store: str) -> Store:
    """Return the store with this name, even if the store's folder has vanished. Raises HttpProblem when the service has
    no such store. Routes that read the store through `RunWatch` use this function, because `RunWatch` checks the folder
    itself."""
    stores: dict[str, Store] = request.app.state.stores
    if store not in stores:
        raise HttpProblem(404, "No such store", f"this server has no store {visible(store)[:80]!r}", "store",
                          "see /api/v1/stores for what it has")
    return stores[store]


def named_store(at: Annotated[Store, Depends(known_store)]) -> Store:
    """Return the store with this name. Raises HttpProblem when the service has no such store, or when the folder of the
    store has vanished."""
    check_there(at)
    return at


def available(store: Store) -> bool:
    """Return whether the folder of a store exists. A store on object storage counts as available without a request."""
    return store.local is None or store.local.is_dir()


def check_there(store: Store) -> None:
    """Raise HttpProblem when the folder of a store has vanished."""
    if not available(store):
        raise HttpProblem(404, "The store is gone", "the folder of the store is not there", "store",
                          "see that its disk is mounted; what was committed is not lost")


def check_run(at: Store, run: str, key: str = "run") -> None:
    """Raise HttpProblem, which names the parameter `key`, unless the folder of the store exists and the store has a run
    of this name."""
    check_there(at)
    if bad_name(run) or not has_run(at, run):
        raise HttpProblem(404, "No such run", f"the store has no run {visible(run)[:80]!r}", key,
                          "see /api/v1/stores/STORE/runs for those it has")
    inside(at, f"runs/{run}", key)


def named_run(run: str, at: Annotated[Store, Depends(named_store)]) -> str:
    """Check that the store has the run that a request's path names, and return the name of the run. Raises HttpProblem
    if it has no such run."""
    check_run(at, run)
    return run


def inside(store: Store, path: str, key: str = "run") -> None:
    """Raise HttpProblem when a path in the store is a link that leads out of the store. Otherwise whoever may write to
    the store could make this server read other files."""
    if store.local is not None:
        top = os.path.realpath(store.local)
        if not os.path.realpath(store.at(path)).startswith(top.rstrip(os.sep) + os.sep):
            raise HttpProblem(404, "Not in the store", f"{visible(path)} is a link to elsewhere", key,
                              "put a copy of the file in its place")


def read_file(store: Store, path: str, most: int, key: str = "run",
              remedy: str = "read it from the store itself") -> bytes:
    """Return the bytes of a file of the store. Raises FileNotFoundError when there is no such file. Raises HttpProblem
    when a link leads out of the store, or when the file is larger than `most` bytes. `remedy` is the advice in the
    error about the size."""
    inside(store, path, key)
    size = store.size(path)
    if size is None:
        raise FileNotFoundError(path)
    if size > most:
        raise HttpProblem(409, "Too large", f"{visible(path)} has {size:,} bytes, and the limit is {most:,}", key,
                          remedy)
    return store.read(path)


KnownStore = Annotated[Store, Depends(known_store)]
StoreOf = Annotated[Store, Depends(named_store)]
RunOf = Annotated[str, Depends(named_run)]
