"""The code and libraries that a node runs, compared before it gets any work (docs/contracts.md: Code on workers).

Keys of results stand for the driver's code and libraries. A node that runs others would commit results under keys that
do not fit them, so the driver refuses it by name.
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
    """Sorted names of the distributions that this project declares for its base and its pipeline, and of those that add
    steps and readers."""
    added = {e.dist.name.lower() for group in GROUPS for e in metadata.entry_points(group=group) if e.dist is not None}
    try:
        wanted = metadata.requires("tokenmill") or []
    except metadata.PackageNotFoundError:       # the code was shipped as plain folders
        return sorted(added)
    chosen = [r for r in wanted if "extra ==" not in r or re.search(r"extra == ['\"]pipeline['\"]", r)]
    return sorted({re.split(r"[^A-Za-z0-9._-]", r, maxsplit=1)[0].lower() for r in chosen} | added)


def roots() -> dict[str, str]:
    """The folder of each of the four packages ("" when it is missing)."""
    result = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        result[name] = str(Path(spec.origin).parent) if spec is not None and spec.origin else ""
    return result


def code_hash(places: dict[str, str]) -> str:
    """Hash of the Python sources of the packages: relative paths and contents."""
    h = hashlib.sha256()
    for name, root in sorted(places.items()):
        for path in sorted(Path(root).rglob("*.py")) if root else ():
            body = path.read_bytes()
            h.update(f"{name}/{path.relative_to(root).as_posix()}\0{len(body)}\0".encode())
            h.update(body)
    return h.hexdigest()


@dataclass(frozen=True)
class Fingerprint:
    """What a process runs. `code` is a hash of the four packages, `roots` are their folders, `libraries` maps names to
    versions ("": not installed), and `cpu` is the tag of `base.machine.cpu_tag`."""

    node: str
    code: str
    roots: dict[str, str]
    python: str
    libraries: dict[str, str]
    cpu: str

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint of another node. That node may run another version, whose fingerprint has other fields.
        Missing fields are left empty, so that the node is refused by name for its code and not taken for broken."""
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


def differences(ours: Fingerprint, theirs: Fingerprint) -> list[str]:
    """Differences in `theirs` that would change results, in words; [] when there are none. Folders may differ, and so
    may the CPU: only numeric tasks depend on it, and they declare that (`TaskSpec.cpu`)."""
    result = []
    if ours.code != theirs.code:
        result.append(f"other code (there: {', '.join(sorted({r or 'missing' for r in theirs.roots.values()}))})")
    if ours.python != theirs.python:
        result.append(f"Python {theirs.python} instead of {ours.python}")
    for name, version in ours.libraries.items():
        if theirs.libraries.get(name, "") != version:
            result.append(f"{name} {theirs.libraries.get(name) or 'missing'} instead of {version or 'none'}")
    return result
