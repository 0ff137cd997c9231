"""Files of the user's own stages (`code:` of a recipe), imported only with --allow-custom-stages."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def import_code(files: Sequence[str]) -> None:
    """Import files of custom stages under their stems, so that 'my_stages:Class' finds them. Workers call it too."""
    for path in files:
        name = Path(path).stem
        known = sys.modules.get(name)
        if known is not None and os.path.realpath(known.__file__ or "") == os.path.realpath(path):
            continue
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: no such file")
        found = None if known is not None else importlib.util.find_spec(name)
        # a worker may have the folder of the recipe on its path already (Ray adds the driver's working directory)
        if known is not None or (found is not None and os.path.realpath(found.origin or "") != os.path.realpath(path)):
            raise ImportError(f"{path}: a module called '{name}' exists already; rename the file")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path}: is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
