"""Compiles functions (kernels) with numba, but only when the first kernel of their module is called.

numba is not imported before, because importing it takes longer than planning a recipe, and a plan imports every stage
that the recipe names. A kernel is written and called as with `numba.njit`. Kernels of one module may call each other.

A container image may have compiled kernels in the folder that the environment variable TOKENMILL_KERNELS names. This
folder is read and never written. Its kernels are compiled with NUMBA_CPU_NAME=generic, for any processor of the
architecture. Kernels that are missing in it are compiled as usual.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

#: environment variable: a folder of compiled kernels, laid out like NUMBA_CACHE_DIR
SHIPPED = "TOKENMILL_KERNELS"
#: name and features of the processor that shipped kernels were compiled for, as numba keys them
GENERIC = ("generic", "")

#: module → its kernels that are not compiled yet, with their options
_waiting: dict[str, list[tuple[Callable[..., Any], dict[str, Any]]]] = {}
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
_lock = threading.Lock()


def njit(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a kernel as `numba.njit(**options)` does, but compile it only when it is called."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        _waiting.setdefault(function.__module__, []).append((function, options))

        @functools.wraps(function)
        def kernel(*arguments: Any) -> Any:
            compiled = _compiled.get(function)
            return (compiled or _compile(function))(*arguments)

        return kernel

    return mark


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled version of a kernel. All kernels of its module are given to numba and replaced in the module
    by the results, so that all code of the module calls the compiled kernels."""
    import numba

    with _lock:
        if waiting := _waiting.pop(function.__module__, []):
            kernels = {kernel: _with_unique_files(_with_shipped_variants(numba.njit(**options)(kernel)))
                       for kernel, options in waiting}
            # All names are replaced in one step: another thread may call a kernel as soon as it is in the module, and
            # numba then compiles it with the objects that the module's names stand for at that time.
            function.__globals__.update({kernel.__name__: compiled for kernel, compiled in kernels.items()})
            _compiled.update(kernels)
        return _compiled[function]


def keep_in(folder: str) -> None:
    """Use `folder` as numba's cache from now on, to load compiled kernels and to store them. This also holds for
    kernels that numba knows already. Kernels that this process has already compiled stay in use."""
    os.environ["NUMBA_CACHE_DIR"] = folder
    if "numba" not in sys.modules:
        return                                        # numba reads the variable when it is imported
    import numba

    settings: Any = numba.config                      # filled when numba is imported
    with _lock:
        settings.CACHE_DIR = folder
        for kernel in _compiled.values():
            cache: Any = getattr(kernel, "_cache", None)
            if hasattr(cache, "_cache_file"):         # it is cached at all
                kernel._cache = type(cache)(kernel.py_func)           # type: ignore[attr-defined]
                _with_unique_files(_with_shipped_variants(kernel))


def _with_shipped_variants(kernel: Any) -> Any:
    """Make a kernel load its compiled variants (one for each combination of argument types) from the folder that the
    environment variable SHIPPED names, if the folder has them. Returns the kernel."""
    cache: Any = getattr(kernel, "_cache", None)
    folder = os.environ.get(SHIPPED)
    if not folder or not hasattr(cache, "_cache_file"):
        return kernel
    from numba.core.caching import IndexDataCacheFile, UserProvidedCacheLocator

    source = kernel.py_func.__code__.co_filename
    path = os.path.join(folder, UserProvidedCacheLocator.get_suitable_cache_subpath(source))
    shipped = IndexDataCacheFile(path, cache._impl.filename_base, cache._impl.locator.get_source_stamp())
    load_own = cache.load_overload

    def load(signature: Any, context: Any) -> Any:
        context.refresh()
        signature, (triple, *_), code = cache._index_key(signature, context.codegen())
        data = shipped.load((signature, (triple, *GENERIC), code))
        return load_own(signature, context) if data is None else cache._impl.rebuild(context, data)

    cache.load_overload = load
    return kernel


def _with_unique_files(kernel: Any) -> Any:
    """Make numba's cache store each compiled variant of a kernel in a file with a unique name. Returns the kernel.

    numba numbers the files of a kernel's variants (one for each combination of argument types) without a lock. Two
    processes that compile two variants at the same time may both write the first file. The index of one process may
    then point to the code of the other, which would run on arguments of the wrong types. With unique names, no file is
    written twice. When a source changes, the files of its old kernels stay in __pycache__ until it is emptied.
    """
    files = getattr(getattr(kernel, "_cache", None), "_cache_file", None)      # None without `cache=True`
    if files is not None:
        files._data_name = lambda number: f"{files._index_name.removesuffix('.nbi')}.{uuid.uuid4().hex}.nbc"
    return kernel
