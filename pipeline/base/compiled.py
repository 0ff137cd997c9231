"""Compiles functions (kernels) with numba, but only when the first kernel of their module is called.

numba is imported only then, because the import takes longer than planning a recipe, and a plan imports every stage that
the recipe names. A kernel is written and called as with `numba.njit`. It may call kernels of its own module, and those
that its module imports by `from … import`.

A container image may have compiled kernels in the folder that the environment variable TOKENMILL_KERNELS names. This
folder is read and never written. Its kernels are compiled with NUMBA_CPU_NAME=generic, for any processor of the
architecture. Kernels that the folder lacks are compiled on this machine, or loaded from its own cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any

import numpy as np

from pipeline.base.clock import SYSTEM

#: environment variable: a folder of compiled kernels, laid out like NUMBA_CACHE_DIR
SHIPPED = "TOKENMILL_KERNELS"
#: name and features of the processor that shipped kernels were compiled for, as numba keys them
GENERIC = ("generic", "")
#: seconds that a process waits for another one to compile a kernel, before it compiles the kernel itself
PATIENCE_S = 120.0
#: seconds between two tries to get a lock
_RETRY_S = 0.02

#: module → its kernels that are not compiled yet, with their options
_waiting: dict[str, list[tuple[Callable[..., Any], dict[str, Any]]]] = {}
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
_lock = threading.Lock()
#: path → the lock file that this process has locked
_locked: dict[str, IO[bytes]] = {}
#: whether this process still waits for others. After it has once waited PATIENCE_S in vain, it never waits again: a
#: stopped process may hold the locks of many kernels
_waits = True


@functools.cache
def has_numba() -> bool:
    """Whether numba can be imported. The function tries the import, because an installed numba may refuse the version
    of numpy."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def njit(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function as `numba.njit(**options)` does, but postpone the compilation to the first call. The first
    call of a decorated function hands all decorated functions of its module to numba.

    numba compiles a kernel once for each combination of argument types, together with all kernels that it calls. To
    numba, a variable that begins as the literal 0 has a type of its own until it is assigned again. So a variable that
    is passed to another kernel begins as np.int64(0). With 0, numba would compile the other kernel twice: for the
    literal and for int64."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        _waiting.setdefault(function.__module__, []).append((function, options))

        @functools.wraps(function)
        def kernel(*arguments: Any) -> Any:
            compiled = _compiled.get(function)
            return (compiled or _compile(function))(*arguments)

        return kernel

    return mark


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled version of a kernel (a function that numba compiles). The first call for a module replaces
    all its kernels by their compiled versions, so that calls between kernels use these, too. The modules from which it
    imports kernels come first."""
    with _lock:
        _compile_module(function.__module__, function.__globals__)
        return _compiled[function]


def _compile_module(module: str, names: dict[str, Any]) -> None:
    if not (waiting := _waiting.pop(module, [])):
        return
    imported = {}
    for name, value in list(names.items()):
        kernel = getattr(value, "__wrapped__", None)
        if isinstance(kernel, FunctionType) and kernel.__module__ != module:
            _compile_module(kernel.__module__, kernel.__globals__)
            if kernel in _compiled:
                imported[name] = _compiled[kernel]
    kernels, constants = {}, _constants_of((kernel.__code__ for kernel, _ in waiting), names)
    for kernel, options in waiting:
        compiled = _with_stamps_of(imported.values(), constants, _given_to_numba(kernel, options))
        kernels[kernel] = _compiled_by_one_process(_cached(compiled))
    # All names are replaced in one step: another thread may call a kernel as soon as it is in the module, and numba
    # then compiles it with the objects that the module's names stand for at that time.
    names.update(imported | {kernel.__name__: compiled for kernel, compiled in kernels.items()})
    _compiled.update(kernels)


def _given_to_numba(kernel: Callable[..., Any], options: dict[str, Any]) -> Any:
    import numba

    try:
        return numba.njit(**options)(kernel)
    except RuntimeError:                              # numba finds no folder for its cache that it may write to
        return numba.njit(**{**options, "cache": False})(kernel)


def keep_in(folder: str) -> None:
    """Use `folder` as numba's cache from now on, to load compiled functions and to store them. The change also holds
    for functions that numba knows already. Code that this process has already compiled or loaded stays in use."""
    os.environ["NUMBA_CACHE_DIR"] = folder
    if "numba" not in sys.modules:
        return                                        # numba reads the variable when it is imported
    import numba

    settings: Any = numba.config                      # filled when numba is imported
    with _lock:
        settings.CACHE_DIR = folder
        for kernel in _compiled.values():
            cache: Any = getattr(kernel, "_cache", None)
            if files := _cache_files(kernel):
                kernel._cache = type(cache)(kernel.py_func)           # type: ignore[attr-defined]
                kernel._cache._cache_file._source_stamp = files._source_stamp  # type: ignore[attr-defined]
                _cached(kernel)


def _with_stamps_of(imported: Iterable[Any], constants: str, kernel: Any) -> Any:
    """Make numba's cache notice when the file of a kernel that the module of `kernel` imports has changed, or one of
    the constants in its module's kernels (`constants` is their hash). By itself it notices only changes in the kernel's
    own file, and would go on to use machine code with the old imported kernels and constants. Returns the kernel."""
    if files := _cache_files(kernel):
        stamps = {other_files._source_stamp for other in imported if (other_files := _cache_files(other))}
        files._source_stamp = (files._source_stamp, constants, *sorted(stamps, key=repr))
    return kernel


def _cache_files(kernel: Any) -> Any:
    """Return numba's object for the files in which a compiled kernel is cached; None for a kernel without a cache."""
    return getattr(getattr(kernel, "_cache", None), "_cache_file", None)


def _constants_of(codes: Iterable[CodeType], names: Mapping[str, Any]) -> str:
    """Return a hash of the global constants that functions with these codes use. `names` are the globals of their
    module. numba writes the values of constants into the machine code; many of them come from other modules."""
    digest = hashlib.sha256()
    used = {name for code in codes for name in _names_in(code)}
    for name in sorted(used & names.keys()):
        inside = vars(names[name]) if isinstance(names[name], ModuleType) else {}
        for key, value in ((name, names[name]), *((f"{name}.{n}", inside[n]) for n in sorted(used & inside.keys()))):
            if (constant := _constant(value)) is not None:
                digest.update(f"{key}={constant}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _constant(value: Any) -> str | None:
    """Return a text that is equal for equal constants, in every process; None if the value is no constant."""
    if isinstance(value, tuple):
        return "(" + ",".join(_constant(item) or "" for item in value) + ")"
    if isinstance(getattr(value, "dtype", None), np.dtype):           # an array or a number
        return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    return repr(value) if isinstance(value, (int, float, complex, str, bytes)) else None


def _cached(kernel: Any) -> Any:
    """Change how numba's cache of a kernel loads and stores compiled variants. Returns the kernel."""
    return _with_lock(_with_unique_files(_with_shipped_variants(kernel)))


def _with_shipped_variants(kernel: Any) -> Any:
    """Make a kernel (a function that numba compiles) load machine code that came with the container image. The
    environment variable TOKENMILL_KERNELS names the folder of this code. A kernel has one compiled variant for each
    combination of argument types; variants that the folder lacks are compiled. Returns the kernel."""
    cache: Any = getattr(kernel, "_cache", None)
    folder = os.environ.get(SHIPPED)
    if not folder or not hasattr(cache, "_cache_file"):
        return kernel
    from numba.core import caching

    untyped: Any = caching
    source = kernel.py_func.__code__.co_filename
    path = os.path.join(folder, untyped.UserProvidedCacheLocator.get_suitable_cache_subpath(source))
    shipped = untyped.IndexDataCacheFile(path, cache._impl.filename_base, cache._cache_file._source_stamp)
    load_own = cache.load_overload

    def load(signature: Any, context: Any) -> Any:
        context.refresh()
        signature, (triple, *_), code = cache._index_key(signature, context.codegen())
        data = shipped.load((signature, (triple, *GENERIC), code))
        return load_own(signature, context) if data is None else cache._impl.rebuild(context, data)

    cache.load_overload = load
    return kernel


def _with_unique_files(kernel: Any) -> Any:
    """Make numba's cache store each compiled variant of a kernel (a function that numba compiles) in a file with a
    unique name. Returns the kernel.

    numba numbers the files of a kernel's variants (one for each combination of argument types) without a lock. Two
    processes that compile two variants at the same time may both write the first file. The index of one process may
    then point to the code of the other, which would run on arguments of the wrong types. With unique names, no file is
    written twice. When a source changes, the files of its old kernels stay in the cache folder until the folder is
    emptied.
    """
    if files := _cache_files(kernel):
        files._data_name = lambda number: f"{files._index_name.removesuffix('.nbi')}.{uuid.uuid4().hex}.nbc"
    return kernel


def _with_lock(kernel: Any) -> Any:
    """Make a process that does not find a variant of a kernel in numba's cache lock the kernel, and then search the
    cache again. If another process has compiled the variant in the meantime, it is loaded. Without a lock, all workers
    of a first run would compile the same kernels. Two workers that compile two variants could also remove each other's
    variant from the index of the cache. Returns the kernel."""
    if (files := _cache_files(kernel)) is None:
        return kernel
    cache, path = kernel._cache, _lock_path(files)
    load = cache.load_overload

    def load_or_lock(signature: Any, context: Any) -> Any:
        data = load(signature, context)
        if data is not None or path in _locked:       # compiling one variant may need another one of the same kernel
            return data
        _wait_for_lock(path)
        return load(signature, context)

    cache.load_overload = load_or_lock
    return kernel


def _compiled_by_one_process(kernel: Any) -> Any:
    """Make a kernel give back, once it is compiled, the lock that `_with_lock` has taken. Returns the kernel."""
    if _cache_files(kernel) is None:
        return kernel
    compile_variant = kernel.compile

    def compile_and_unlock(signature: Any) -> Any:
        try:
            return compile_variant(signature)
        finally:
            if lock := _locked.pop(_lock_path(_cache_files(kernel)), None):
                fcntl.flock(lock, fcntl.LOCK_UN)         # a process that was forked meanwhile has the file open, too
                lock.close()

    kernel.compile = compile_and_unlock
    return kernel


def _lock_path(files: Any) -> str:
    """Return the path of the lock file of a kernel. `files` is numba's object for the files of its cache."""
    return f"{files._index_path}.lock"


def _wait_for_lock(path: str) -> None:
    """Lock the file `path`, and note it in `_locked`. The caller goes on without a lock where none is possible (on a
    file system without locks, in a folder that is gone). It also does so when another process keeps the lock longer
    than PATIENCE_S, perhaps because that process was stopped."""
    global _waits
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "ab"))
        until = SYSTEM.now() + (PATIENCE_S if _waits else 0.0)
        while not _is_locked(file):
            if SYSTEM.now() >= until:
                _waits = False
                return
            SYSTEM.sleep(_RETRY_S)
        _locked[path] = file
        stack.pop_all()                               # whoever compiles closes the file


def _is_locked(file: IO[bytes]) -> bool:
    """Try to lock a file for this process. Returns whether that has worked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
