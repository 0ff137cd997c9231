"""Keeps the audit log, which records who has sent which request to change something. Each entry is a file in the
store's folder `audit/`; entries are not part of the store's commit log.

The name of an entry begins with the time, and no entry is ever overwritten. So servers cannot destroy each other's
entries, and the entries sorted by name are in the order of time. If the entry of a request cannot be written, the
request is refused.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from fastapi import Request

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.redact import redact_json
from pipeline.base.visible import visible
from pipeline.service.problems import HttpProblem
from pipeline.service.stores import read_file
from pipeline.store.fs import Store

FOLDER = "audit"
LARGEST = 64 << 10       # most bytes of an entry; a larger file is not read as one


def note_write(store: Store, entry: dict[str, Any], clock: Clock = SYSTEM) -> str:
    """Write an entry to the audit log of a store, with secrets masked. Returns the path of the entry, relative to the
    store."""
    at = datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    path = f"{FOLDER}/{at.replace(':', '')}-{clock.new_id()}.json"
    store.put_absent(path, json.dumps(redact_json({"at": at, **entry}), sort_keys=True).encode())
    return path


async def request_entry(request: Request) -> dict[str, Any]:
    """Return the audit entry of a request: who sent it, and what it requests. The entry has only a hash of the
    request's body, because the body may hold any data."""
    body = await request.body()
    return {"role": str(request.state.role), "from": request.client.host if request.client else None,
            "method": request.method, "path": visible(request.url.path), "bytes": len(body),
            "sha256": hashlib.sha256(body).hexdigest()}


def entries(store: Store, after: str, limit: int) -> list[dict[str, Any]]:
    """Return up to `limit` entries of the audit log that come after the entry with the id `after`, in the order of
    time. An entry that cannot be read is marked as damaged."""
    result: list[dict[str, Any]] = []
    for path in store.list(FOLDER, f"{FOLDER}/{after}" if after else ""):
        if len(result) == limit:
            break
        name = path.removeprefix(f"{FOLDER}/")
        try:
            entry = json.loads(read_file(store, path, LARGEST))
        except (FileNotFoundError, ValueError, RecursionError, HttpProblem):
            entry = None
        result.append({"id": name, **(entry if isinstance(entry, dict) else {"damaged": True})})
    return result
