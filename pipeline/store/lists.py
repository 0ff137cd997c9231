"""Lists that are too long for the arguments of a task. They become files of the store, which the arguments name.

Every reduce task of a wave reads files of all its map tasks. Written out in every spec, their names would be groups
times buckets in number. So `ListFiles.fold` writes a list once and replaces it in the arguments by

    {"$list": "objects/lists/SHA256.json", "content": hash of its items, "items": n}

`unfold` gives the task its list back. As with a `$ref`, only `content` enters the key of the task. It is a hash of the
items without their locations, so the key depends on the same things as if it held the list itself. Which lists become
files depends on their lengths alone. A file is named by the hash of its bytes, so every writer writes the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.store.content_keys import placeless
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store

FOLDER = "objects/lists"
#: most items of a list that stays in the arguments
INLINE = 8
#: number of lists remembered as written: the tasks of a wave share theirs
_KNOWN = 16


class ListFiles:
    """Replaces long lists by files. `put(path, bytes)` creates a file of the store unless it exists. Without `put`
    nothing is written, but the arguments, and therefore the keys, are the same."""

    def __init__(self, put: Callable[[str, bytes], Any] | None = None) -> None:
        self._put = put
        #: by id() of the list, which is kept alive so that no other object gets that id
        self._known: OrderedDict[int, tuple[list[Any], dict[str, Any]]] = OrderedDict()

    def fold(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with their long lists replaced by files. A list must not be changed afterwards, because a list
        that several drafts share is written only once."""
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
    """The value with all its lists restored. Raises DamagedFile when a file does not hold what was written to it."""
    if isinstance(value, dict):
        if "$list" not in value:
            return {k: v if k == "$volatile" else unfold(v, read) for k, v in value.items()}
        data = read(value["$list"])
        if f"{FOLDER}/{hashlib.sha256(data).hexdigest()}.json" != value["$list"]:
            raise DamagedFile(value["$list"], "is damaged: its bytes are not those its name tells")
        return json.loads(data)
    return [unfold(v, read) for v in value] if isinstance(value, list) else value


def writes_to(store: Store) -> Callable[[str, bytes], Any]:
    """The `put` for a ListFiles of this store."""
    return lambda path, data: store.exists(path) or store.put_absent(path, data)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
