"""Loads a second copy of trafilatura's modules, as `tokenmill_trafilatura`, for use by this project alone.

Some extraction engines replace functions of trafilatura to bound its work, to let MemoryError through and to save CPU
time. A replacement in the package itself would change the package for every other user in the process. The engines
therefore change only the second copy; `import trafilatura` still gives the original.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from lxml import etree

NAME = "tokenmill_trafilatura"
#: every exception except MemoryError
_SURVIVABLE = (etree.LxmlError, *(kind for kind in vars(builtins).values() if isinstance(kind, type)
                                  and issubclass(kind, Exception) and kind not in (Exception, MemoryError)))


def _load_package() -> None:
    """Load the package trafilatura under the name `NAME`. Its modules import each other relatively, so they are loaded
    under this name, too."""
    original = importlib.util.find_spec("trafilatura")
    if original is None or original.origin is None:
        raise ModuleNotFoundError("No module named 'trafilatura'", name="trafilatura")
    spec = importlib.util.spec_from_file_location(NAME, original.origin, submodule_search_locations=list(
        original.submodule_search_locations or ()))
    if spec is None or spec.loader is None:
        raise ImportError(f"trafilatura cannot be loaded from {original.origin}", name="trafilatura")
    package = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[NAME]
        raise


def _module(name: str) -> Any:
    return importlib.import_module(f"{NAME}.{name}")


def loud(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a parse function of lxml so that it raises MemoryError instead of XMLSyntaxError when libxml2 runs out of
    memory."""
    @wraps(parse)
    def parsed(*args: Any, **kw: Any) -> Any:
        try:
            return parse(*args, **kw)
        except etree.XMLSyntaxError as e:
            if e.code == etree.ErrorTypes.ERR_NO_MEMORY:
                raise MemoryError("libxml2 has no memory left") from None
            raise

    return parsed


def _raise_memory_errors() -> None:
    """Keep trafilatura's exception handlers from catching MemoryError.

    If they caught it (`except Exception`), the text would depend on the machine: with too little memory, a page would
    silently lose its text or get a different one. Python looks the name `Exception` up in the module when an error is
    raised. The function therefore binds this name, in each module, to a tuple of all exceptions of lxml and Python
    except MemoryError.
    """
    for module in (baseline, core, external, readability_lxml, utils):
        module.Exception = _SURVIVABLE
        for name in ("fromstring", "fragment_fromstring"):
            if hasattr(module, name):
                setattr(module, name, loud(getattr(module, name)))


_load_package()
version: str = sys.modules[NAME].__version__
baseline, core, external, htmlprocessing, main_extractor = map(_module, (
    "baseline", "core", "external", "htmlprocessing", "main_extractor"))
readability_lxml, settings, utils, xml, xpaths = map(_module, (
    "readability_lxml", "settings", "utils", "xml", "xpaths"))
_raise_memory_errors()
