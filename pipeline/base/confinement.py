"""Confines processes that parse untrusted documents. They get no secrets and no network, and may start no programs
except those that their stages (the steps that they run on documents) declare.

A hostile page or PDF that takes over a parser gets the rights of the parser. The child process in which stages run is
therefore confined in two steps:

* `enter`, when the process starts. The process gets only allowed environment variables (`scrubbed`), writes no core
  dump, and gains no new privileges. It keeps no capabilities except those for files, and has no access to other
  processes or to files that hold credentials.
* `seal`, once its stages are set up. The process may open no sockets, create no namespaces, and use neither tracing nor
  io_uring. It may then start only the programs that its stages declare, and write only below its own folders. A seal
  cannot be lifted. If further stages need more rights for their set-up, `FreshProcess` is raised, and they must run in
  a new process.

Landlock and seccomp enforce these limits where the kernel has them (`support`). Landlock binds only the calling thread
and the threads it starts later, so `enter` must run before any other thread exists. `seal` runs when other threads may
exist. It therefore uses seccomp, which binds every thread of the process, to deny sockets, and to deny all programs if
no stage declares one.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import struct
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pipeline.base import kernel, process

#: environment variables that Python, its numeric libraries, CUDA and OCR read; a child gets no others
_NAMES = frozenset({
    "CUDA_VISIBLE_DEVICES", "HF_DATASETS_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HOME", "LANG",
    "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME", "NLTK_DATA", "PATH", "SHELL", "SSL_CERT_DIR",
    "SSL_CERT_FILE", "TESSDATA_PREFIX", "TIKTOKEN_CACHE_DIR", "TMPDIR", "TOKENIZERS_PARALLELISM",
    "TOKENMILL_KERNELS", "TOKENMILL_MODELS", "TORCH_HOME", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TZ", "USER",
    "VIRTUAL_ENV"})
_PREFIXES = ("ARROW_", "COVERAGE_", "CUBLAS_", "CUDA_", "CUDNN_", "GLIBC_", "GOTO_", "KMP_", "LC_", "MALLOC_", "MKL_",
             "NUMBA_", "NUMEXPR_", "NVIDIA_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "RAYON_", "VECLIB_", "XDG_")
#: variables that look like secrets by their name, or by a value with something before an @: withheld even if listed
_SECRET = re.compile(r"(?i)tokens?(_|$)|secret|passw|credential|api_?key|access_?key|auth")
_USERINFO = re.compile(r"://[^/\s]*@")
#: where credentials lie: files and folders below the home, other places, and variables that name files
_HOMES = (".aws", ".azure", ".boto", ".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".config/gcloud",
          ".docker", ".git-credentials", ".gnupg", ".huggingface", ".kube", ".netrc", ".pypirc", ".ray/auth_token",
          ".s3cfg", ".ssh")
_PLACES = ("/run/secrets", "/var/run/secrets")
_NAMED = ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "BOTO_CONFIG",
          "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN_PATH", "KUBECONFIG", "NETRC", "RAY_AUTH_TOKEN_PATH")
#: capabilities that let root read and write files of other users (chown, dac_override, dac_read_search, fowner)
_FILES = range(4)
_WRITES = (kernel.WRITE_FILE | kernel.REMOVE_DIR | kernel.REMOVE_FILE | kernel.MAKE_CHAR | kernel.MAKE_DIR
           | kernel.MAKE_REG | kernel.MAKE_SOCK | kernel.MAKE_FIFO | kernel.MAKE_BLOCK | kernel.MAKE_SYM | kernel.REFER
           | kernel.TRUNCATE)
_OWN_FOLDER = _WRITES & ~(kernel.MAKE_CHAR | kernel.MAKE_BLOCK | kernel.MAKE_SOCK)
_CALLS = ("socket", "connect", "bind", "listen", "accept", "accept4",
          "io_uring_setup", "io_uring_enter", "io_uring_register",  # can do what denied calls do, past the filter
          "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd",
          "unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen",
          "fsconfig", "fsmount", "fspick", "mount_setattr", "open_by_handle_at",
          "bpf", "perf_event_open", "userfaultfd", "add_key", "request_key", "keyctl", "init_module", "finit_module",
          "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "execveat")

_sealed: frozenset[str] | None = None


class FreshProcess(Exception):
    """Raised when this process is sealed (has given up its rights for good), and the next stages need rights that it no
    longer has. They must be set up in a new process."""


def support() -> dict[str, Any]:
    """Return which means of confinement this kernel supports: {"landlock": its version or 0, "seccomp": True or False}.
    The call itself confines nothing."""
    if sys.platform != "linux":
        return {"landlock": 0, "seccomp": False}
    return {"landlock": kernel.landlock_version(), "seccomp": kernel.has_seccomp()}


def missing(supported: Mapping[str, Any]) -> str:
    """Return, in words, what a parser could still do on a kernel that lacks means of confinement; "" if the kernel has
    all. `supported` is what `support` returned on that kernel."""
    gaps = []
    if not supported["seccomp"]:
        gaps.append("no seccomp: parsers could open sockets")
    if not supported["landlock"]:
        gaps.append("no Landlock: parsers could write any file of this user, read its other processes and, if their "
                    "stages declare a program, start any program")
    return "; ".join(gaps)


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a parser may have: those of `env` that are on an allow-list and do not look
    like a secret."""
    return {name: value for name, value in env.items()
            if (name in _NAMES or name.startswith(_PREFIXES)) and not _SECRET.search(name)
            and not _USERINFO.search(value)}


def secret_files(env: Mapping[str, str]) -> list[str]:
    """Return the existing files and folders of this machine that hold credentials. They are found in the usual places,
    or named by variables of `env`."""
    home = env.get("HOME") or os.path.expanduser("~")
    named = [env[name] for name in _NAMED if env.get(name)]
    paths = {os.path.realpath(p) for p in (*(os.path.join(home, p) for p in _HOMES), *_PLACES, *named)}
    return sorted(p for p in paths if os.path.isfile(p) or (os.path.isdir(p) and p != "/"))      # leaves out /dev/null


def all_but(denied: Collection[str]) -> list[str]:
    """Return paths that together cover all files of this machine except `denied`. Landlock needs such a list, because
    its rules can only allow access."""
    open_: list[str] = []
    folders = ["/"]
    while folders:
        folder = folders.pop()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink() or entry.path in denied:
                    continue                             # the target of a link is covered at its own path
                if any(path.startswith(entry.path + "/") for path in denied):
                    folders.append(entry.path)
                else:
                    open_.append(entry.path)
    return open_


def not_dumpable() -> None:
    """Keep other processes of the same user from reading the memory and environment of this process. The supervisor
    (the process that starts the parsers) calls it, because it holds credentials that the parsers must not read."""
    with contextlib.suppress(OSError):
        kernel.not_dumpable()


def enter(secrets: Collection[str]) -> None:
    """Confine this process as far as is possible before its stages are set up. It then makes no core dumps, gains no
    new privileges, and keeps no capabilities except those for files. Where the kernel has Landlock, it has no access to
    the files and folders `secrets`. This must run before the process has a second thread. `seal` completes the
    confinement."""
    process.no_core()
    kernel.no_new_privileges()
    kernel.keep_capabilities(_FILES)
    if kernel.landlock_version():
        readable = dict.fromkeys(all_but(secrets), kernel.READ_FILE) if secrets else {"/": kernel.READ_FILE}
        kernel.landlock(kernel.READ_FILE, {**readable, "/": readable.get("/", 0) | kernel.REFER})


def seal(programs: Iterable[str], writable: Iterable[str]) -> None:
    """Seal this process: deny it, for good, everything that parsing does not need, as far as the kernel can
    (`support`). The process may then start only `programs` (names or paths). It may write only below the folders
    `writable`, to /dev/shm, to devices and to files of its own in /proc. If the process is sealed already, this only
    checks `programs`, and raises FreshProcess if the seal denies one of them."""
    global _sealed
    named = frozenset(programs)
    if _sealed is not None:
        check(named)
        return
    if kernel.landlock_version():
        folders = dict.fromkeys([*writable, "/dev/shm"], _OWN_FOLDER)
        kernel.landlock(kernel.EXECUTE | _WRITES, {
            "/dev": kernel.WRITE_FILE | kernel.TRUNCATE, "/proc/self": kernel.WRITE_FILE | kernel.TRUNCATE, **folders,
            **dict.fromkeys(_files_of(named), kernel.EXECUTE)})
    if kernel.has_seccomp():
        # Landlock would deny this outside the writable folders, if it knew it
        unnoticed = ("truncate",) if kernel.landlock_version() < kernel.TRUNCATE_SINCE else ()
        kernel.deny_calls((*_CALLS, *unnoticed, *(() if named else ("execve",))))
    _sealed = named


def isolate(memory: int, cpu_s: int) -> None:
    """Restrict this process, for good, to pure computation, before it runs code that may be hostile. It may then use up
    to `memory` bytes of address space and `cpu_s` seconds of CPU time. It may read the libraries of Python and of the
    system, and use the pipes that are open already. It must not have a second thread when this is called.

    Raises OSError where the kernel lacks seccomp or Landlock (`support`)."""
    process.no_core()
    for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, 0),
                         (resource.RLIMIT_NOFILE, 64)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value, value) if hard == resource.RLIM_INFINITY else (min(value, hard),) * 2)
    kernel.no_new_privileges()
    kernel.keep_capabilities(())
    read = kernel.READ_FILE | kernel.READ_DIR
    kernel.landlock(read | kernel.EXECUTE | _WRITES, dict.fromkeys(_libraries(), read))
    kernel.allow_computing()


def _libraries() -> list[str]:
    """Return the files and folders that a Python program reads when it imports modules of the standard library."""
    prefixes = (sys.base_prefix, sys.base_exec_prefix, "/", "/usr", "/usr/local")
    return [*(os.path.join(prefix, folder) for prefix in prefixes for folder in ("lib", "lib64")),
            "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]


def sealed() -> bool:
    """Whether this process is sealed, that is, has given up all rights that parsing does not need."""
    return _sealed is not None


def hint(error: BaseException) -> str:
    """Return a suffix for the message of `error` that explains that this process is confined (has given up rights for
    good). Returns "" if the confinement cannot have caused the error."""
    if _sealed is None or not isinstance(error, PermissionError):
        return ""
    return ("; a worker is confined once its stages are set up: no sockets, no programs a stage does not declare, no "
            "files outside its folders (docs/filters.md, confined = False)")


def check(programs: Iterable[str]) -> None:
    """Raise FreshProcess if this process is sealed (confined for good) and may not start one of `programs`."""
    if _sealed is not None and (denied := set(programs) - _sealed):
        raise FreshProcess(f"sealed without {', '.join(sorted(denied))}")


def _files_of(programs: Iterable[str]) -> list[str]:
    """Return the files that the kernel executes when `programs` are started: the programs, the interpreters of scripts,
    and the dynamic loaders."""
    files: list[str] = []
    pending = list(programs)
    while pending:
        path = shutil.which(pending.pop())
        path = path and os.path.realpath(path)
        if not path or path in files:
            continue
        files.append(path)
        with contextlib.suppress(OSError, struct.error, UnicodeDecodeError), open(path, "rb") as f:
            head = f.read(64)
            if head.startswith(b"#!"):
                f.seek(2)
                pending += f.readline(1024).decode().split()[:2]
            elif head.startswith(b"\x7fELF\x02\x01"):
                pending += _loader(f, *struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54))
    return files


def _loader(file: Any, table_offset: int, size: int, count: int) -> list[str]:
    """Return a list with the path of the dynamic loader that a 64-bit ELF file names (PT_INTERP); [] when the file
    names none. The program headers of the file are at `table_offset`; there are `count` of them, each of `size`
    bytes."""
    for number in range(count):
        file.seek(table_offset + number * size)
        header = file.read(size)
        if struct.unpack_from("<I", header)[0] == 3:
            offset, _, _, length = struct.unpack_from("<4Q", header, 8)
            file.seek(offset)
            return [file.read(length).rstrip(b"\0").decode()]
    return []
