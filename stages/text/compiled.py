"""Kernels that numba compiles when the first one of their module is called.

Importing numba takes longer than planning a recipe, and a plan imports every stage the recipe names; so nothing here
imports it early. A kernel is written and called as with `numba.njit`; kernels of one module may call each other.

An image brings compiled kernels in the folder that TOKENMILL_KERNELS names, which is read and never written. They are
compiled with NUMBA_CPU_NAME=generic, for any processor of the architecture. Kernels that are missing there are compiled
as usual.
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
    """`numba.njit(**options)`, postponed until the kernel is called."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        _waiting.setdefault(function.__module__, []).append((function, options))

        @functools.wraps(function)
        def kernel(*arguments: Any) -> Any:
            found = _compiled.get(function)
            return (found or _compile(function))(*arguments)

        return kernel

    return mark


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand all kernels of the module to numba, and put the results in their place, so that kernels and everything else
    in the module call the compiled ones."""
    import numba

    with _lock:
        if waiting := _waiting.pop(function.__module__, []):
            made = {kernel: _apart(_shipped(numba.njit(**options)(kernel))) for kernel, options in waiting}
            # in one step: numba compiles a kernel with the names its module holds at that time, and another thread may
            # call a kernel as soon as it is there
            function.__globals__.update({kernel.__name__: compiled for kernel, compiled in made.items()})
            _compiled.update(made)
        return _compiled[function]


def keep_in(folder: str) -> None:
    """Read and keep compiled kernels in `folder` from now on, also those of modules that were handed to numba before.
    Kernels that this process has already compiled stay in use."""
    os.environ["NUMBA_CACHE_DIR"] = folder
    if "numba" not in sys.modules:
        return                                        # numba reads the variable when it is imported
    import numba

    settings: Any = numba.config                      # filled when numba is imported
    with _lock:
        settings.CACHE_DIR = folder
        for kernel in _compiled.values():
            own: Any = getattr(kernel, "_cache", None)
            if hasattr(own, "_cache_file"):           # it is cached at all
                kernel._cache = type(own)(kernel.py_func)             # type: ignore[attr-defined]
                _apart(_shipped(kernel))


def _shipped(kernel: Any) -> Any:
    """The kernel, which now loads its variants from the folder that SHIPPED names, if they are in it."""
    own: Any = getattr(kernel, "_cache", None)
    folder = os.environ.get(SHIPPED)
    if not folder or not hasattr(own, "_cache_file"):
        return kernel
    from numba.core.caching import IndexDataCacheFile, UserProvidedCacheLocator

    source = kernel.py_func.__code__.co_filename
    path = os.path.join(folder, UserProvidedCacheLocator.get_suitable_cache_subpath(source))
    there = IndexDataCacheFile(path, own._impl.filename_base, own._impl.locator.get_source_stamp())
    kept = own.load_overload

    def load(signature: Any, context: Any) -> Any:
        context.refresh()
        signature, (triple, *_), code = own._index_key(signature, context.codegen())
        data = there.load((signature, (triple, *GENERIC), code))
        return kept(signature, context) if data is None else own._impl.rebuild(context, data)

    own.load_overload = load
    return kernel


def _apart(kernel: Any) -> Any:
    """The kernel, each of whose variants is now kept in a file with a unique name.

    numba numbers the files of a kernel's variants (one for every combination of argument types) without a lock. Two
    processes that compile two variants at the same time may both write the first file. The index of one may then stay
    with the code of the other, and that code runs on arguments it was not made for. With unique names no file is
    written twice. Files of changed sources stay in their __pycache__ until it is emptied.
    """
    files = getattr(getattr(kernel, "_cache", None), "_cache_file", None)      # there is none without `cache=True`
    if files is not None:
        files._data_name = lambda number: f"{files._index_name.removesuffix('.nbi')}.{uuid.uuid4().hex}.nbc"
    return kernel
