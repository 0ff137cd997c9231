"""Imports the Python files of the user's own stages and readers, which a recipe lists under `code:`. This needs the
option --allow-custom-stages.

The files are distributed through the store. The driver, which plans a run, keeps copies of them in runs/RUN/code and
notes their sha256. A worker uses the file at the original path if it has the noted sha256, and otherwise the copy. The
task fails when the copy does not have this sha256 either.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.base import confinement
from pipeline.base.files import file_sha256, replacing
from pipeline.base.scratch import user_folder
from pipeline.engine.task import ChangedInput
from pipeline.store.fs import Store
from stages.catalog import load, reader_class
from stages.read.reader import Reader
from stages.stage import resource_files

_imported: set[tuple[str, str]] = set()          # (name, sha256) of the files that this process has imported as planned


def import_code(files: Sequence[str]) -> None:
    """Import Python files of the user's own stages. A module gets the name of its file without .py, so that
    'my_stages:Class' finds its class. A file is not imported again if the module of this name came from the same file
    or from one with equal contents. Raises FileNotFoundError for a missing file, and ImportError when another module
    has the same name. Errors that the file's own code raises are passed on."""
    for path in files:
        name = Path(path).stem
        loaded = sys.modules.get(name)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: no such file")
        if loaded is not None and _same(loaded.__file__, path):
            continue
        other = None if loaded is not None else importlib.util.find_spec(name)
        # Ray adds the driver's working directory to a worker's path, so the recipe's folder may be on it already
        if loaded is not None or (other is not None and not _same(other.origin, path)):
            raise ImportError(f"{path}: a module called '{name}' exists already; rename the file")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path}: is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise


def _same(one: str | None, other: str) -> bool:
    """Whether two paths lead to one file, or to files with equal contents."""
    if one is None or not os.path.isfile(one):
        return False
    return os.path.realpath(one) == os.path.realpath(other) or file_sha256(one) == file_sha256(other)


def import_planned(store: Store, files: Iterable[Mapping[str, str]]) -> None:
    """Import, in a worker, the user's Python files with which the run was planned. `files` lists them as {"path",
    "sha256", "kept"} (`Recipe.code_args`).

    Files that this process has imported before are skipped. Raises ChangedInput when neither this machine nor the store
    has a file with the planned sha256. An import may need the network. If this process is already sealed (cut off from
    the network) and a file is still to be imported, raises FreshProcess.
    """
    for file in files:
        path, name = file["path"], os.path.basename(file["path"])
        if (name, file["sha256"]) in _imported:
            continue
        if confinement.sealed():
            raise confinement.FreshProcess(f"{name} may need the network to be imported")
        if not os.path.isfile(path) or file_sha256(path) != file["sha256"]:
            path = _fetch(store, file, name)
        import_code([path])
        _imported.add((name, file["sha256"]))


def planned_reader(store: Store, entry: Mapping[str, Any]) -> Reader:
    """Make, in a worker, the reader that a task's argument `entry` describes: {name, key, $volatile: {target, config,
    code, resources}}. Raises ChangedInput when a resource file is not the one with which the run was planned, and the
    errors of `import_planned`. A caller must check each record that the reader yields
    (`pipeline.passes.storable.checked`), because a user's reader may yield records that cannot be stored."""
    hidden = entry["$volatile"]
    import_planned(store, hidden.get("code", ()))
    reader = reader_class(hidden["target"])(hidden["config"])
    check_resources(resource_files(reader.config), hidden.get("resources", {}))
    return reader


def check_resources(files: Mapping[str, str], planned: Mapping[str, str]) -> None:
    """Raise ChangedInput when the resource files of a stage or reader, {config field: path}, do not have the sha256
    with which the run was planned. `planned` maps a config field to this sha256; if it is empty, nothing is checked."""
    for field, path in files.items() if planned else ():
        if file_sha256(path) != planned.get(field):
            raise ChangedInput(f"{path} is not the file this run was planned with; run again to plan with the new one, "
                               f"and see that all nodes have the same")


def own_source(target: str, files: Sequence[str]) -> list[str]:
    """Return strings that identify the source code of `target`, a class from outside Tokenmill ('module:Class'). They
    enter the keys of results, so that the results of a changed class are computed anew. Returns [] for Tokenmill's own
    classes.

    The strings are the class name, sha256 hashes, and versions of installed packages. The hashes are those of the files
    under the recipe's `code:`, and of the modules that define the class and its bases. The packages are those of these
    modules.
    """
    if target.partition(".")[0] == "stages":
        return []
    cls = load(target)
    modules = {target.partition(":")[0], *(c.__module__ for c in cls.__mro__)}
    foreign = {name for name in modules if name.partition(".")[0] not in {"stages", *sys.stdlib_module_names}}
    paths = {importlib.import_module(name).__file__ or "" for name in foreign}
    packages = {dist for name in foreign for dist in _distributions().get(name.partition(".")[0], ())}
    return [cls.__qualname__, *sorted(file_sha256(path) for path in {*paths, *files}),
            *sorted(f"{name} {metadata.version(name)}" for name in packages)]


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """Return {top-level module: installed distributions that contain the module}."""
    return metadata.packages_distributions()


def _fetch(store: Store, file: Mapping[str, str], name: str) -> str:
    """Fetch the store's copy of a user's Python file to this machine, unless it was fetched before, and return the
    path. The folder of the fetched file belongs to this user and is named after the file's sha256. Raises ChangedInput
    when the copy is missing or has another sha256."""
    folder = user_folder() / f"code-{file['sha256'][:32]}"
    target = folder / name
    if target.is_file() and file_sha256(target) == file["sha256"]:
        return str(target)
    try:
        data = store.read(file["kept"])
    except FileNotFoundError:
        data = b""
    if hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise ChangedInput(f"{name}: neither {file['path']} on this node nor {file['kept']} in the store is the file "
                           f"this run was planned with; run again")
    folder.mkdir(mode=0o700, exist_ok=True)
    with replacing(target) as part:
        part.write_bytes(data)
    return str(target)
