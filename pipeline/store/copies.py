"""Notes which folders outside a store hold copies of its texts or tokens: indexes of `tokenmill dedup index`, and
exports. `tokenmill takedown` does not reach these folders, so it names them.

    copies/HASH.json        one folder; put if absent, and never changed
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
from dataclasses import asdict, dataclass

from pipeline.store.errors import StoreError
from pipeline.store.fs import Store

FOLDER = "copies"


@dataclass(frozen=True)
class Copy:
    """A folder or URL outside a store that holds a copy of texts or tokens of the store."""

    kind: str                     # index: of `dedup index`; rows: of `materialize --out`; tokens: of `shards export`
    of: str                       # what was copied: a dataset, a run, or a folder of shards
    place: str                    # absolute path, or URL
    host: str                     # the machine that has the path; "" for a URL

    def remedy(self, store: Store) -> str:
        """Return the advice for the user: how to remove from this copy what a takedown has removed from `store`."""
        if self.kind == "index":
            return f"give `{shlex.join(['tokenmill', 'dedup', 'forget', self.place, '--store', store.root])}`"
        return "remove it, and export it again if it is still needed"


def note_copy(store: Store, kind: str, of: str, place: str) -> None:
    """Note in `store` that `place`, a folder or URL outside it, holds a copy of a part of the store, or soon will. `of`
    names that part, and `kind` says how it was copied (see `Copy`). Raises StoreError or OSError when the store cannot
    be written."""
    place = place.removeprefix("file://")
    is_url = "://" in place
    copy = Copy(kind, of, place if is_url else os.path.abspath(place), "" if is_url else socket.gethostname())
    body = json.dumps(asdict(copy), sort_keys=True, indent=1).encode()
    store.put_absent(f"{FOLDER}/{hashlib.sha256(body).hexdigest()[:32]}.json", body)


def noted_copies(store: Store) -> list[Copy]:
    """Return the copies that `note_copy` has noted in a store, except folders of this machine that do not exist any
    more. Raises StoreError when a note is damaged."""
    copies = []
    for path in sorted(store.list(FOLDER)):
        try:
            copies.append(Copy(**json.loads(store.read(path))))
        except (ValueError, TypeError) as e:
            raise StoreError(f"{store.at(path)} is damaged; it named a folder outside the store that holds copies. "
                             f"Remove the file, and that folder if you know it") from e
    return [copy for copy in copies if copy.host != socket.gethostname() or os.path.exists(copy.place)]
