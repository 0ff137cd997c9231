"""Compares the code and libraries of a node (a machine of the cluster) with those of the driver, before the node gets
any work (docs/contracts.md: Code on workers).

The key under which a task's result is stored covers the code and libraries of the driver. A node with other versions
would store results under keys that do not fit them. The driver therefore refuses such a node, and names it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.base.machine import cpu_tag
from stages.catalog import GROUPS

PACKAGES = ("pipeline", "stages", "tokenizer", "trainer")


def declared_libraries() -> list[str]:
    """Returns the sorted names of the distributions (installed packages) whose versions may change results. These are
    the requirements of Tokenmill and of its extra `pipeline`, and the installed plug-ins that add steps or readers."""
    added = {e.dist.name.lower() for group in GROUPS for e in metadata.entry_points(group=group) if e.dist is not None}
    try:
        requirements = metadata.requires("tokenmill") or []
    except metadata.PackageNotFoundError:       # the code was shipped as plain folders
        return sorted(added)
    chosen = [r for r in requirements if "extra ==" not in r or re.search(r"extra == ['\"]pipeline['\"]", r)]
    return sorted({re.split(r"[^A-Za-z0-9._-]", r, maxsplit=1)[0].lower() for r in chosen} | added)


def roots() -> dict[str, str]:
    """Returns {package: folder} for the four top-level packages of Tokenmill. The folder is "" for a package that is
    missing."""
    result = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        result[name] = str(Path(spec.origin).parent) if spec is not None and spec.origin else ""
    return result


def code_hash(places: dict[str, str]) -> str:
    """Returns a hash of all Python sources in the packages `places` ({package: folder}). It covers the files' relative
    paths and contents."""
    digest = hashlib.sha256()
    for name, root in sorted(places.items()):
        for path in sorted(Path(root).rglob("*.py")) if root else ():
            body = path.read_bytes()
            digest.update(f"{name}/{path.relative_to(root).as_posix()}\0{len(body)}\0".encode())
            digest.update(body)
    return digest.hexdigest()


@dataclass(frozen=True)
class Fingerprint:
    """The code and libraries that a process runs. `code` is a hash of Tokenmill's packages, and `roots` are their
    folders. `libraries` maps names of distributions to versions ("": not installed). `cpu` is the CPU's instruction-set
    family (`base.machine.cpu_tag`)."""

    node: str
    code: str
    roots: dict[str, str]
    python: str
    libraries: dict[str, str]
    cpu: str

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Fingerprint:
        """Returns the fingerprint that another node sent. Fields that are missing in `doc` are left empty, because the
        node may run another version of this class. The node is then refused with a message about its code."""
        empty: dict[str, Any] = {"roots": {}, "libraries": {}}
        return cls(**{f.name: doc.get(f.name, empty.get(f.name, "")) for f in fields(cls)})


def fingerprint(libraries: list[str]) -> Fingerprint:
    """Return the fingerprint of this process: a hash of its code, and the versions of Python and of `libraries`."""
    places = roots()
    versions = {}
    for name in libraries:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return Fingerprint(socket.gethostname(), code_hash(places), places, platform.python_version(), versions, cpu_tag())


def differences(own: Fingerprint, other: Fingerprint) -> list[str]:
    """Returns, in words, the differences between two fingerprints that would change results; [] if there are none.
    Folders may differ. CPUs may differ, too, because a task whose results depend on the CPU declares which one it needs
    (`TaskSpec.cpu`)."""
    result = []
    if own.code != other.code:
        result.append(f"other code (there: {', '.join(sorted({r or 'missing' for r in other.roots.values()}))})")
    if own.python != other.python:
        result.append(f"Python {other.python} instead of {own.python}")
    for name, version in own.libraries.items():
        if other.libraries.get(name, "") != version:
            result.append(f"{name} {other.libraries.get(name) or 'missing'} instead of {version or 'none'}")
    return result
