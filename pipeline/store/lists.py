"""Lists that are too long for the arguments of a task: they become files of the store, and the task names the file.

Every reduce task of a wave reads the files of all its maps. Written out in each spec, those names would be groups times
buckets of them; so `ListFiles.fold` writes a list once and puts

    {"$list": "objects/lists/SHA256.json", "content": what its items say, "items": n}

in its place, and `unfold` gives the task its list back. Like that of a `$ref`, only `content` enters the key of the
task: it is the hash of the items without their places, so the key means what it meant before. Which lists become files
depends on their lengths alone. The file is named by its bytes: every writer writes the same.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from pipeline.store.keys import placeless

FOLDER = "objects/lists"
#: longest list that stays in the arguments
INLINE = 8
#: lists of which is remembered that they have been written: tasks of a wave share theirs
_KNOWN = 16


class ListFiles:
    """`put(path, bytes)` creates a file of the store unless it is there; without it nothing is written, and keys are
    what they would be."""

    def __init__(self, put: Callable[[str, bytes], Any] | None = None) -> None:
        self._put = put
        #: by the identity of the list, which is held so that nothing else can have it
        self._known: OrderedDict[int, tuple[list[Any], dict[str, Any]]] = OrderedDict()

    def fold(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with long lists as files. Lists must not be changed afterwards: one that several drafts share
        is looked at once."""
        return {k: v if k == "$volatile" else self._value(v) for k, v in args.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self.fold(value)
        if not isinstance(value, list):
            return value
        if len(value) <= INLINE:
            return [self._value(v) for v in value]
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = (value, self._file(value))
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(id(value))
        return known[1]

    def _file(self, value: list[Any]) -> dict[str, Any]:
        data = _json(value)
        path = f"{FOLDER}/{hashlib.sha256(data).hexdigest()}.json"
        if self._put is not None:
            self._put(path, data)
        content = hashlib.sha256(_json([placeless(v) for v in value])).hexdigest()
        return {"$list": path, "content": content, "items": len(value)}


def unfold(value: Any, read: Callable[[str], bytes]) -> Any:
    """The value with all its lists. Raises DamagedFile for one that does not hold what was written."""
    if isinstance(value, dict):
        if "$list" not in value:
            return {k: v if k == "$volatile" else unfold(v, read) for k, v in value.items()}
        data = read(value["$list"])
        if f"{FOLDER}/{hashlib.sha256(data).hexdigest()}.json" != value["$list"]:
            raise DamagedFile(value["$list"], "is damaged: its bytes are not those its name tells")
        return json.loads(data)
    return [unfold(v, read) for v in value] if isinstance(value, list) else value


def writes_to(store: Store) -> Callable[[str, bytes], Any]:
    """`put` of a ListFiles for a store."""
    return lambda path, data: store.exists(path) or store.put_absent(path, data)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
