"""Computes content keys, the hashes that identify the results of tasks. A task must run when the commit log (the list
of results) has no record under its key.

A key is a hash of the task's name, its version and its JSON arguments. Locations in the arguments are left out, so that
a moved store or source keeps its results. Three kinds of dict in the arguments have a special meaning:

    {"$ref": path in the store, "content": …, "sha256": …, "bytes": …, "rows": …}   a file that an earlier task wrote
    {"$file": path below the source root, "root": URL, "size": …, "etag": …}        an input file, maybe with a range
    {"$list": path in the store, "content": …, "items": …}                          a long list (`pipeline.store.lists`)

The value under "$volatile" in a dict does not enter the key.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from typing import Any

from pipeline.base.files import file_sha256
from stages.catalog import load

#: packages whose tasks are identified by name and version alone; a test ensures that names are unique
OWN_PACKAGES = frozenset({"pipeline", "stages"})
#: names that give a dict its meaning
_SPECIAL = frozenset({"$ref", "$file", "$list"})


def task_key(task: str, args: Any) -> str:
    """Return the key of a task with these arguments: a hash under which the result of the task is found. `task` is the
    import path of the task, 'module:Class'. A task from outside OWN_PACKAGES may inherit its name and version from one
    of our classes. So its key also covers the name of its class and the source code of its module."""
    cls = load(task)
    module = task.partition(":")[0]
    if module.partition(".")[0] in OWN_PACKAGES:
        return content_key(cls.name, cls.version, args)
    source = file_sha256(importlib.import_module(module).__file__ or "")
    return content_key(getattr(cls, "name", ""), cls.version, [cls.__qualname__, source, args])


class SharedArgs:
    """Computes the keys (hashes that identify results) of many tasks that share most of their arguments. Each of
    `commons`, the sets of shared arguments, is encoded only once."""

    def __init__(self, task: str, *commons: Mapping[str, Any]) -> None:
        self._task, self._commons = task, commons
        cls = load(task)
        self._own = task.partition(".")[0] in OWN_PACKAGES
        self._head = _json([getattr(cls, "name", ""), cls.version])[:-1]
        self._encoded = [_members(common) for common in commons]

    def keys(self, args: Mapping[str, Any]) -> list[str]:
        """Return a list with one key for each set of shared arguments: the `task_key` of a task whose arguments are
        this set and `args`. An argument in `args` replaces a shared argument of the same name."""
        if not self._own or any(_SPECIAL & (common.keys() | args.keys()) for common in self._commons):
            return [task_key(self._task, {**common, **args}) for common in self._commons]
        own, keys = _members(args), []
        for encoded in self._encoded:
            members = {**encoded, **own}
            blob = f"{self._head},{{{','.join(members[name] for name in sorted(members))}}}]"
            keys.append(hashlib.blake2b(blob.encode(), digest_size=16).hexdigest())
        return keys


def _members(args: Mapping[str, Any]) -> dict[str, str]:
    """Encode the arguments of a task that enter its content key, each as a member '"name":value' of a JSON object.
    Locations are taken out of the values, so that the key does not depend on where files lie. Returns {name of the
    argument: member}."""
    return {name: _json({name: placeless(value)})[1:-1] for name, value in args.items() if name != "$volatile"}


#: encodes a value for a key. The encoder is made once, because `json.dumps` with options makes one for every call
_json = json.JSONEncoder(sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode


def content_key(name: str, version: int, args: Any) -> str:
    """Return a hash of a name, a version and arguments, as 32 hex characters.

    Locations in the arguments (paths in the store, roots of sources and `$volatile` values) do not enter the hash. The
    contents of files, paths relative to a source's root, and ranges do.
    """
    return hashlib.blake2b(_json([name, version, placeless(args)]).encode(), digest_size=16).hexdigest()


def ref_contents(args: Any) -> list[str]:
    """Return the content hashes of all files and lists to which the arguments of a task refer (`$ref` and `$list`).
    They come in the order of the arguments."""
    if isinstance(args, dict):
        if "$ref" in args or "$list" in args:
            return [args["content"]]
        return [c for v in args.values() for c in ref_contents(v)]
    return [c for v in args for c in ref_contents(v)] if isinstance(args, (list, tuple)) else []


def placeless(value: Any) -> Any:
    if isinstance(value, dict):
        if "$ref" in value or "$list" in value:
            return {"content": value["content"]}
        hidden = {"$volatile", "root"} if "$file" in value else {"$volatile"}
        return {k: placeless(v) for k, v in value.items() if k not in hidden}
    if isinstance(value, (list, tuple)):
        return [placeless(v) for v in value]
    return value
