"""Calls PDFium's functions for the characters of a page from compiled code, by the addresses of the functions. The
module is imported only when the first page is read.

If Python called PDFium for four values of each character, this would take four times as long as loading the page. The
addresses are passed as arguments, so that numba can cache the compiled code on disk.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pypdfium2.raw as pdfium_c
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pipeline.base.compiled import njit

_I32, _F32 = ir.IntType(32), ir.FloatType()


def _call(builder: Any, values: Any, result: Any, kinds: str) -> Any:
    """Emits LLVM code for a C call of the function at the address `values[0]`, whose arguments are the values after it
    and whose result has the type `result`. `kinds` has a letter for each argument: p (pointer) or i (int)."""
    arguments = [builder.inttoptr(v, cgutils.voidptr_t) if kind == "p" else v for kind, v in zip(kinds, values[1:])]
    function = ir.FunctionType(result, [v.type for v in arguments])
    return builder.call(builder.inttoptr(values[0], function.as_pointer()), arguments)


@intrinsic
def _integer(typing: Any, address: Any, page: Any, index: Any) -> Any:
    """Calls the C function `int f(page, index)` at `address`."""
    return types.int32(types.intp, types.intp, types.int32), lambda context, builder, signature, values: _call(
        builder, values, _I32, "pi")


@intrinsic
def _real(typing: Any, address: Any, page: Any, index: Any) -> Any:
    """Calls the C function `float f(page, index)` at `address`."""
    return types.float32(types.intp, types.intp, types.int32), lambda context, builder, signature, values: _call(
        builder, values, _F32, "pi")


@intrinsic
def _rectangle(typing: Any, address: Any, page: Any, index: Any, out: Any) -> Any:
    """Calls the C function `int f(page, index, out*)` at `address`."""
    return types.int32(types.intp, types.intp, types.int32, types.intp), \
        lambda context, builder, signature, values: _call(builder, values, _I32, "pip")


_NAMES = ("FPDFText_GetUnicode", "FPDFText_IsGenerated", "FPDFText_GetCharAngle", "FPDFText_GetLooseCharBox",
          "FPDFText_GetCharBox")
_ADDRESSES = np.array([ctypes.cast(getattr(pdfium_c, name), ctypes.c_void_p).value for name in _NAMES], np.int64)


@njit(cache=True, nogil=True)
def _read(addresses, page, code, inserted, angle, loose, tight):
    """Fill the arrays with one entry per character of a text page, by calling the PDFium functions at `addresses`.
    `read` describes the arrays. For a character that PDFium inserted, only `code` and `inserted` are filled."""
    for i in range(code.shape[0]):
        code[i] = np.uint32(_integer(addresses[0], page, np.int32(i)))  # type: ignore[call-arg]
        inserted[i] = _integer(addresses[1], page, np.int32(i)) == 1
        if not inserted[i]:
            angle[i] = _real(addresses[2], page, np.int32(i))
            _rectangle(addresses[3], page, np.int32(i), loose.ctypes.data + 16 * i)
            _rectangle4(addresses[4], page, np.int32(i), tight.ctypes.data + 32 * i)


@intrinsic
def _rectangle4(typing: Any, address: Any, page: Any, index: Any, out: Any) -> Any:
    """Calls the C function `int f(page, index, double*, double*, double*, double*)` at `address`, with pointers to four
    successive doubles at `out`."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        where = [builder.add(values[3], ir.Constant(values[3].type, 8 * k)) for k in range(4)]
        return _call(builder, [*values[:3], *where], _I32, "pipppp")

    return types.int32(types.intp, types.intp, types.int32, types.intp), generate


def read(page: Any, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Reads the first `count` characters of a loaded text page (`page`, a ctypes handle). Returns five arrays with an
    entry for each character:

    - code: (n,) uint32
    - inserted: (n,) bool, whether PDFium inserted the character
    - angle: (n,) float32, radians
    - loose: (n, 4) float32, left, top, right, bottom of a box as wide as the advance and as high as the font
    - tight: (n, 4) float64, left, right, bottom, top of the ink
    """
    code, inserted, angle = np.zeros(count, np.uint32), np.zeros(count, np.bool_), np.zeros(count, np.float32)
    loose, tight = np.zeros((count, 4), np.float32), np.zeros((count, 4), np.float64)
    _read(_ADDRESSES, ctypes.cast(page, ctypes.c_void_p).value, code, inserted, angle, loose, tight)
    return code, inserted, angle, loose, tight
