"""Keeps files in a cache folder: compiled lists, and spaCy's tokenizer rules. An installation makes each file once,
when it is first needed. The environment variable TOKENMILL_CACHE names the folder (default ~/.cache/tokenmill)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

#: format version of the exported rules
FORMAT = 2


def cache_dir() -> Path:
    return Path(os.environ.get("TOKENMILL_CACHE") or Path.home() / ".cache" / "tokenmill")


def cached(path: Path, write: Callable[[Path], None]) -> Path:
    """Return `path`, the path of a file in the cache. If the file does not exist, `write(path)` makes it first. If
    several processes on a machine call this function for one path, one of them writes the file, and the others wait for
    it."""
    if not path.exists():
        with _lock(path):
            if not path.exists():
                write(path)
    return path


def rules_path(language: str = "en") -> Path:
    """Return the path of a file with spaCy's tokenizer rules for a language. `language` is a language code of spaCy,
    such as 'en'. If the file does not exist, the rules are exported from spaCy first.

    Raises:
        importlib.metadata.PackageNotFoundError: spaCy is missing.
        RuntimeError: the export failed; the message holds its error output.
    """
    return rules_paths([language])[0]


def rules_paths(languages: Iterable[str]) -> list[Path]:
    """Return the paths of the files with spaCy's tokenizer rules for several languages, given as spaCy's codes. One
    process makes all files that do not exist yet, because an import of spaCy takes longer than the export of a
    language. Raises the same errors as `rules_path`."""
    folder = cache_dir() / "words"
    version = f"spacy-{metadata.version('spacy')}-py{sys.version_info.major}.{sys.version_info.minor}-v{FORMAT}"
    paths = {language: folder / f"{language}-{version}.json" for language in languages}
    if not all(path.exists() for path in paths.values()):
        with _lock(folder / version):
            missing = {language: path for language, path in paths.items() if not path.exists()}
            if missing:
                _export(missing)
    return list(paths.values())


def _export(paths: dict[str, Path]) -> None:
    # -P: of a submitted recipe, the current folder is one that others may write to
    command = [sys.executable, "-P", "-m", "stages.text.spacy_export"]
    command += [word for language, path in paths.items() for word in (language, str(path))]
    root = str(Path(__file__).resolve().parents[2])
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])))
    process = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if process.returncode != 0:
        raise RuntimeError(f"exporting spaCy's tokenizer rules of {', '.join(paths)} to "
                           f"{next(iter(paths.values())).parent} failed:\n{process.stderr[-2000:]}")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Context manager that holds a lock, so that only one process at a time writes the file `path`. The lock is on a
    lock file beside `path`. A missing folder is created.

    The caller goes on without a lock where none is possible: on a file system without locks, with another user's lock
    file, in a read-only folder. Two processes may then write the same file, and the one that finishes last decides its
    content.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path.with_name(f".{path.name}.lock"), "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
