"""Draws a page of a PDF, and measures the pictures on it. The pixels of these pictures are counted before a picture is
decoded, so that a page with too many pixels is never drawn."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from stages.extract.pdf.ocr import DPI

#: most pixels of a page's picture, and most along one side (leptonica takes 32,767); larger pages are drawn at fewer
#: dots per inch
PIXELS, ALONG = 10_000_000, 32_000
#: most pixels of all pictures on a page that is drawn (A4 at 800 dpi): a pixel of JPEG 2000 takes 15 bytes
DECODED = 60_000_000
#: longest side of a page, points (ISO 32000-1, annex C: 14,400)
_SIDE = 14_400
#: most objects of a page, and most levels of forms, that are searched for pictures
_OBJECTS, _LEVELS = 10_000, 3


def dots(page: pdfium.PdfPage) -> int:
    """Returns the dots per inch at which a page is drawn; 0 for a page larger than PDF allows, which is not drawn."""
    width, height = page.get_size()
    if not (0 < width <= _SIDE and 0 < height <= _SIDE):
        return 0
    most = math.isqrt(int(PIXELS * 72 * 72 / max(1.0, width * height)))
    return max(1, min(DPI, most, int(ALONG * 72 / max(width, height))))


def size(page: pdfium.PdfPage, dpi: int) -> tuple[int, int]:
    """Returns the width and height, in pixels, of a page drawn at `dpi` dots per inch."""
    width, height = page.get_size()
    return math.ceil(width * dpi / 72), math.ceil(height * dpi / 72)


def draw(page: pdfium.PdfPage, dpi: int, turn: int = 0) -> np.ndarray:
    """Returns a picture of the page in grey, turned by `turn` (0 or 180) degrees: (height, width) uint8, white is
    255."""
    return page.render(scale=dpi / 72, rotation=turn, grayscale=True).to_numpy()


def pictures(page: pdfium.PdfPage) -> tuple[bool, int]:
    """Measures the pictures on a page. Returns (whether one picture covers at least half of the page; number of pixels
    that all pictures together declare). A picture inside a form (a group of objects that may be shown several times)
    counts each time the form is shown."""
    left, bottom, right, top = page.get_bbox()
    sides = [ctypes.c_float() for _ in range(4)]
    covers, total, remaining = False, 0, _OBJECTS
    count = pdfium_c.FPDFPage_CountObjects(page.raw)
    for k in range(min(count, remaining)):
        object_ = pdfium_c.FPDFPage_GetObject(page.raw, k)
        pixels, remaining = _pixels(object_, remaining, _LEVELS)
        total += pixels
        if pixels and not covers and pdfium_c.FPDFPageObj_GetBounds(object_, *sides):
            x0, y0, x1, y1 = (side.value for side in sides)
            wide, high = min(x1, right) - max(x0, left), min(y1, top) - max(y0, bottom)
            covers = wide > 0 and high > 0 and 2 * wide * high >= (right - left) * (top - bottom)
    return covers, total


def _pixels(object_: Any, remaining: int, levels: int) -> tuple[int, int]:
    """Counts the pixels of a picture, or of all pictures in a form (a group of objects). Returns (this number; number
    of objects that may still be searched). `remaining` is the number of objects that may be searched. `levels` is the
    number of levels of forms inside forms that are searched."""
    kind, remaining = pdfium_c.FPDFPageObj_GetType(object_), remaining - 1
    if kind == pdfium_c.FPDF_PAGEOBJ_IMAGE:
        wide, high = ctypes.c_uint(), ctypes.c_uint()
        pdfium_c.FPDFImageObj_GetImagePixelSize(object_, wide, high)
        return wide.value * high.value, remaining
    total = 0
    if kind == pdfium_c.FPDF_PAGEOBJ_FORM and levels:
        for k in range(pdfium_c.FPDFFormObj_CountObjects(object_)):
            if remaining <= 0:
                break
            pixels, remaining = _pixels(pdfium_c.FPDFFormObj_GetObject(object_, k), remaining, levels - 1)
            total += pixels
    return total, remaining
