"""Compares the code and libraries of a node with those of the driver, before the node gets any work (docs/contracts.md:
Code on workers).

The key of a result covers the code and libraries of the driver. A node that runs other versions would commit results
under keys that do not fit them. The driver therefore refuses such a node, and names it.
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
    """Returns the sorted names of the distributions that may change results: those that this project declares for its
    base and its pipeline, and those that add steps and readers."""
    added = {e.dist.name.lower() for group in GROUPS for e in metadata.entry_points(group=group) if e.dist is not None}
    try:
        requirements = metadata.requires("tokenmill") or []
    except metadata.PackageNotFoundError:       # the code was shipped as plain folders
        return sorted(added)
    chosen = [r for r in requirements if "extra ==" not in r or re.search(r"extra == ['\"]pipeline['\"]", r)]
    return sorted({re.split(r"[^A-Za-z0-9._-]", r, maxsplit=1)[0].lower() for r in chosen} | added)


def roots() -> dict[str, str]:
    """Returns the folder of each of our four packages ("" for one that is missing)."""
    result = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        result[name] = str(Path(spec.origin).parent) if spec is not None and spec.origin else ""
    return result


def code_hash(places: dict[str, str]) -> str:
    """Returns a hash of the Python sources of the packages, over relative paths and contents."""
    digest = hashlib.sha256()
    for name, root in sorted(places.items()):
        for path in sorted(Path(root).rglob("*.py")) if root else ():
            body = path.read_bytes()
            digest.update(f"{name}/{path.relative_to(root).as_posix()}\0{len(body)}\0".encode())
            digest.update(body)
    return digest.hexdigest()


@dataclass(frozen=True)
class Fingerprint:
    """The code and libraries that a process runs. `code` is a hash of our four packages, `roots` are their folders,
    `libraries` maps names to versions ("": not installed), and `cpu` is the tag of `base.machine.cpu_tag`."""

    node: str
    code: str
    roots: dict[str, str]
    python: str
    libraries: dict[str, str]
    cpu: str

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Fingerprint:
        """Returns the fingerprint that another node sent. If that node runs another version of this class, its
        fingerprint may lack fields. They are left empty, so that the node is refused for its other code and not for an
        unreadable message."""
        empty: dict[str, Any] = {"roots": {}, "libraries": {}}
        return cls(**{f.name: doc.get(f.name, empty.get(f.name, "")) for f in fields(cls)})


def fingerprint(libraries: list[str]) -> Fingerprint:
    """The fingerprint of this process."""
    places = roots()
    versions = {}
    for name in libraries:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return Fingerprint(socket.gethostname(), code_hash(places), places, platform.python_version(), versions, cpu_tag())


def differences(own: Fingerprint, other: Fingerprint) -> list[str]:
    """Returns the differences of `other` from our `own` fingerprint that would change results, in words; [] if there
    are none. Folders may differ, and so may the CPU. Only numeric tasks depend on the CPU, and they declare the kind
    they need (`TaskSpec.cpu`)."""
    result = []
    if own.code != other.code:
        result.append(f"other code (there: {', '.join(sorted({r or 'missing' for r in other.roots.values()}))})")
    if own.python != other.python:
        result.append(f"Python {other.python} instead of {own.python}")
    for name, version in own.libraries.items():
        if other.libraries.get(name, "") != version:
            result.append(f"{name} {other.libraries.get(name) or 'missing'} instead of {version or 'none'}")
    return result
