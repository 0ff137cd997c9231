"""Copies a part of a source file from object storage to a local file: the part that is needed to show one document. The
module runs as a separate process, which can be killed when it takes too long. This process has the credentials of the
server, but parses nothing that it fetches. `pipeline.service.read_source` parses the data, in a process with neither
credentials nor a network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pipeline.base.process import die_with_parent, limit_data
from pipeline.plan.inputs import remote_root
from pipeline.recipe.confine import refusal
from pipeline.service.one_request import answer_request
from pipeline.service.read_source import LONGEST, kind_of_place
from pipeline.store.errors import StoreError
from pipeline.store.remote import connect

#: memory of the process; bytes that are fetched from the beginning of a record of a WARC file on
MEMORY, RECORD = 1 << 30, 64 << 20


def fetch(request: Mapping[str, Any]) -> dict[str, Any]:
    """Fetch an object of object storage, the source file of a document, into the new local file `target`. Only the
    bytes that are needed for the document are fetched. The rest of the local file is a hole, which takes no disk space.

    Returns {"refused": true} if the object does not lie below one of the URLs in `roots`, {"failed": why}, or {"size":
    bytes of the object}. The caller has checked that the source's path patterns lie below `roots`.
    """
    url = f"{remote_root(request['patterns'], request['root'])}/{request['locator']['file']}"
    if refusal(url, os.sep, request["roots"]) is not None:
        return {"refused": True}
    folder, _, name = url.rpartition("/")
    remote = connect(folder)
    entry = remote.head(name)
    if entry is None:
        return {"failed": "the file is not there any more"}
    start, stop = _needed(request, entry.size)
    if stop - start > request["most"]:
        return {"failed": f"it lies in object storage, and to find its record {stop - start:,} bytes would have to be "
                          f"fetched, where the limit is {request['most']:,}"}
    remote.download(name, request["target"], entry.size, [(start, stop)] if start < stop else [])
    return {"size": entry.size}


def _needed(request: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Return the range of bytes (start, stop) of an object that must be read for a document. `size` is the size of the
    object."""
    offset = request["locator"]["offset"]
    match kind_of_place(request):
        case "file":
            return 0, min(size, LONGEST)
        case "line":
            return offset, min(size, offset + LONGEST)
    if request["reader"] == "warc" and (offset or not request["locator"]["record"]):
        return offset, min(size, offset + RECORD)
    return 0, size


def main() -> None:
    die_with_parent(os.getppid())
    limit_data(MEMORY)
    answer_request(_fetched)


def _fetched(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return fetch(request)
    except FileNotFoundError:
        return {"failed": "the file is not there any more"}
    except (OSError, StoreError, ValueError) as e:
        # an error of the storage may name its address and our account, which clients must not see
        return {"failed": f"object storage does not give it out ({type(e).__name__})"}


if __name__ == "__main__":
    main()
