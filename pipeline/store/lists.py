"""Writes long lists in a task's arguments to files of the store, and puts the name of the file in place of the list.

In a shuffle, every reduce task reads a file of every map task. With M map tasks and R reduce tasks, the arguments of
the reduce tasks would hold M × R file names. So `ListFiles.fold` writes a list once and replaces it in the arguments by

    {"$list": "objects/lists/SHA256.json", "content": hash of its items, "items": n}

`unfold` reads the list back when the task starts. Only `content` enters the key of the task, as for `$ref`
(`pipeline.store.content_keys`). It is a hash of the items without their locations. So the key changes exactly when it
would change with the list itself in the arguments.

Whether a list becomes a file depends only on its length. The file is named by the hash of its bytes, so every process
that writes the list writes the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.store.content_keys import placeless
from pipeline.store.errors import GONE, DamagedFile
from pipeline.store.fs import Store

FOLDER = "objects/lists"
#: most items of a list that stays in the arguments
INLINE = 8
#: number of written lists that are remembered, because tasks planned together share their lists
_REMEMBERED = 16


class ListFiles:
    """Replaces long lists in the arguments of tasks by references to files of the store. `put(path, bytes)` must create
    such a file if it does not exist. Without `put` no file is written, but the arguments are replaced all the same, so
    the keys of tasks (hashes of their arguments) do not change."""

    def __init__(self, put: Callable[[str, bytes], Any] | None = None) -> None:
        self._put = put
        #: id() of a list → (the list, its reference); the list is kept alive so that no other object gets its id
        self._references: OrderedDict[int, tuple[list[Any], dict[str, Any]]] = OrderedDict()

    def fold(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the arguments in which references to files replace long lists. The caller must not change a
        list afterwards: the reference to a list object is made once, and used wherever the same object occurs in later
        arguments."""
        return {k: v if k == "$volatile" else self._value(v) for k, v in args.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self.fold(value)
        if not isinstance(value, list):
            return value
        if len(value) <= INLINE:
            return [self._value(v) for v in value]
        entry = self._references.get(id(value))
        if entry is None:
            entry = self._references[id(value)] = (value, self._file(value))
            if len(self._references) > _REMEMBERED:
                self._references.popitem(last=False)
        else:
            self._references.move_to_end(id(value))
        return entry[1]

    def _file(self, value: list[Any]) -> dict[str, Any]:
        data = _json(value)
        path = f"{FOLDER}/{hashlib.sha256(data).hexdigest()}.json"
        if self._put is not None:
            self._put(path, data)
        content = hashlib.sha256(_json([placeless(v) for v in value])).hexdigest()
        return {"$list": path, "content": content, "items": len(value)}


def unfold(value: Any, read: Callable[[str], bytes]) -> Any:
    """Return `value` with each reference to a list file replaced by the list, which undoes `ListFiles.fold`. Values
    under a key `$volatile` are not unfolded; code that needs a list there must call `unfold` for it. `read` reads a
    file of the store. Raises DamagedFile when a list file is missing, or its bytes do not have the hash in its name."""
    if isinstance(value, dict):
        if "$list" not in value:
            return {k: v if k == "$volatile" else unfold(v, read) for k, v in value.items()}
        try:
            data = read(value["$list"])
        except FileNotFoundError as e:
            raise DamagedFile(value["$list"], GONE) from e
        if f"{FOLDER}/{hashlib.sha256(data).hexdigest()}.json" != value["$list"]:
            raise DamagedFile(value["$list"], "is damaged: its bytes do not match the hash in its name")
        return json.loads(data)
    return [unfold(v, read) for v in value] if isinstance(value, list) else value


def writes_to(store: Store) -> Callable[[str, bytes], Any]:
    """Return a function that creates a file of `store` if it does not exist, for the argument `put` of `ListFiles`."""
    return lambda path, data: store.exists(path) or store.put_absent(path, data)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
