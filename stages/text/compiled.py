"""Kernels that numba compiles when one of their module is first called.

Importing numba takes longer than planning a recipe, and a plan imports every stage the recipe names. A kernel is
written and called as with `numba.njit`; kernels of one module may call each other.
"""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Callable
from typing import Any

#: module → its kernels that are not compiled yet, with their options
_waiting: dict[str, list[tuple[Callable[..., Any], dict[str, Any]]]] = {}
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
_lock = threading.Lock()


def njit(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit(**options)`, put off until the kernel is called."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        _waiting.setdefault(function.__module__, []).append((function, options))

        @functools.wraps(function)
        def kernel(*arguments: Any) -> Any:
            found = _compiled.get(function)
            return (found or _compile(function))(*arguments)

        return kernel

    return mark


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand all kernels of the module to numba, and put the results in their place: from then on kernels, and whatever
    else of the module calls them, find the compiled ones."""
    import numba

    with _lock:
        if waiting := _waiting.pop(function.__module__, []):
            made = {kernel: _apart(numba.njit(**options)(kernel)) for kernel, options in waiting}
            # in one step: numba compiles a kernel with what its module holds then, and another thread may call one as
            # soon as it is there
            function.__globals__.update({kernel.__name__: compiled for kernel, compiled in made.items()})
            _compiled.update(made)
        return _compiled[function]


def _apart(kernel: Any) -> Any:
    """The kernel, each of whose variants is kept in a file of a name of its own.

    numba counts the files of a kernel's variants (one for every combination of argument types) and does not lock what
    it counts by. Of two processes that compile two variants at the same time both write the first file; the index of
    the one may stay with the code of the other, which is then run on arguments it was not made for. So no file is
    written twice, and what a changed source leaves behind lies in its __pycache__ until somebody empties it.
    """
    files = getattr(getattr(kernel, "_cache", None), "_cache_file", None)      # there is none without `cache=True`
    if files is not None:
        files._data_name = lambda number: f"{files._index_name.removesuffix('.nbi')}.{uuid.uuid4().hex}.nbc"
    return kernel
