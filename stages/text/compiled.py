"""Kernels that numba compiles when one of their module is first called.

Importing numba takes longer than planning a recipe, and a plan imports every stage the recipe names. A kernel is
written and called as with `numba.njit`; kernels of one module may call each other.
"""

from __future__ import annotations

import functools
import threading
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
        for waiting, options in _waiting.pop(function.__module__, []):
            _compiled[waiting] = waiting.__globals__[waiting.__name__] = numba.njit(**options)(waiting)
        return _compiled[function]
