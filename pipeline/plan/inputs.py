"""What a source consists of: its files, by path relative to the source root, with size and etag (contracts §2)."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec

from stages.stage import file_sha256


class InputError(Exception):
    """A source names nothing readable. The message names the source, the pattern and the remedy."""


@dataclass(frozen=True, order=True)
class SourceFile:
    """One input file. `path` is relative to `root` with forward slashes; `etag` is mtime_ns, an object store's etag or
    version id, or 'sha256:…' when inputs are verified by content."""

    path: str
    root: str
    size: int
    etag: str

    def arg(self, **range: int | None) -> dict[str, Any]:
        """The file (or a range of it) as a task argument; the root never enters a key."""
        doc: dict[str, Any] = {"$file": self.path, "root": self.root, "size": self.size, "etag": self.etag}
        return {**doc, **{k: v for k, v in range.items() if v is not None}}


def fixed_prefix(pattern: str) -> str:
    """The directory part of a glob pattern before its first wildcard: the source root."""
    parts = pattern.split("/")
    keep = []
    for part in parts[:-1]:
        if glob.has_magic(part):
            break
        keep.append(part)
    return "/".join(keep) or ("/" if pattern.startswith("/") else ".")


def common_root(roots: list[str]) -> str:
    """Longest directory that contains all `roots`."""
    if len(set(roots)) == 1:
        return roots[0]
    split = [r.split("/") for r in roots]
    shared = []
    for names in zip(*split):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return "/".join(shared) or "/"


def list_source(name: str, patterns: list[str], *, base: str = ".", root: str | None = None,
                suffixes: tuple[str, ...] = (), verify: bool = False) -> list[SourceFile]:
    """Files of source `name`, sorted by relative path.

    A pattern is a file, a directory (its files with one of `suffixes`, recursively; all when empty) or a glob with
    `**`; relative ones start at `base` (the recipe's folder). `root` is what relative paths count from; by default the
    directory before the first wildcard. `verify` hashes the contents instead of trusting size and time.
    """
    remote = [p for p in patterns if "://" in p]
    if remote and verify:
        raise InputError(f"source '{name}': --verify-inputs hashes local files only; object stores have etags of their "
                         f"own, which always count")
    if remote and len(remote) != len(patterns):
        raise InputError(f"source '{name}': local and remote paths in one source; make two sources of them")
    found = (_remote if remote else _local)(name, patterns, base, root, suffixes)
    files = []
    for rel, full_root, size, etag in sorted(set(found)):
        if verify and not remote:
            etag = "sha256:" + file_sha256(os.path.join(full_root, rel))
        files.append(SourceFile(rel, full_root, size, etag))
    return files


def _local(name: str, patterns: list[str], base: str, root: str | None,
           suffixes: tuple[str, ...]) -> list[tuple[str, str, int, str]]:
    full = [os.path.abspath(os.path.join(base, os.path.expanduser(p))) for p in patterns]
    dirs = [p if os.path.isdir(p) else fixed_prefix(p) for p in full]
    top = os.path.abspath(os.path.join(base, os.path.expanduser(root))) if root else common_root(dirs)
    found = []
    for pattern, given in zip(full, patterns):
        if os.path.isdir(pattern):
            paths = [os.path.join(d, f) for d, _, names in os.walk(pattern) for f in names]
            paths = [p for p in paths if not suffixes or p.lower().endswith(suffixes)]
        elif glob.has_magic(pattern) and not os.path.exists(pattern):
            paths = [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]
        else:
            paths = [pattern] if os.path.isfile(pattern) else []
        if not paths:
            raise InputError(f"source '{name}': no file matches '{given}' (looked in {os.path.dirname(pattern)}); "
                             f"check `path:` of the source, or pass --input")
        for p in paths:
            try:
                info = os.stat(p)
            except OSError as e:
                raise InputError(f"source '{name}': cannot read '{p}': {e.strerror}") from e
            if not os.access(p, os.R_OK):
                raise InputError(f"source '{name}': no permission to read '{p}'")
            rel = os.path.relpath(p, top)
            if rel.startswith(".."):
                raise InputError(f"source '{name}': '{p}' is outside its root '{top}'; set `root:` to one above it")
            found.append((rel.replace(os.sep, "/"), top, info.st_size, str(info.st_mtime_ns)))
    return found


def _remote(name: str, patterns: list[str], base: str, root: str | None,
            suffixes: tuple[str, ...]) -> list[tuple[str, str, int, str]]:
    scheme = patterns[0].split("://")[0]
    top = root or common_root([fixed_prefix(p) for p in patterns])
    if len(top.split("/")) < 3 or not top.split("/")[2]:
        raise InputError(f"source '{name}': its paths lie in different buckets ({', '.join(patterns)}); "
                         f"make a source of each")
    found = []
    for pattern in patterns:
        fs, path = fsspec.core.url_to_fs(pattern)
        cut = len(fs._strip_protocol(top).rstrip("/")) + 1
        if glob.has_magic(path):
            infos = fs.glob(path, detail=True)
        else:
            infos = fs.find(path, detail=True)
        infos = {p: i for p, i in infos.items() if i["type"] == "file"}
        if not glob.has_magic(path) and path not in infos and suffixes:
            infos = {p: i for p, i in infos.items() if p.lower().endswith(suffixes)}
        if not infos:
            raise InputError(f"source '{name}': no object matches '{pattern}'")
        for p, info in infos.items():
            etag = info.get("VersionId") or info.get("ETag") or info.get("etag") or str(info.get("mtime", ""))
            found.append((PurePosixPath(p[cut:]).as_posix(), top if "://" in top else f"{scheme}://{top}",
                          int(info["size"]), str(etag).strip('"')))
    return found
