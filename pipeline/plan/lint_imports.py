"""Finds files that the user's own code imports, but that the recipe does not list."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.recipe import Recipe
from pipeline.recipe.errors import KeyPath

#: one finding: (key in the recipe, what is wrong and what to do)
Finding = tuple[KeyPath, str]


def unlisted_imports(recipe: Recipe) -> Iterator[Finding]:
    """Finds files that the user's own code imports from its folder, but that `code:` does not list. Such files are not
    sent to workers, and when they change, no result becomes stale (has to be made again)."""
    named = {os.path.realpath(path) for path in recipe.code}
    for i, path in enumerate(recipe.code):
        folder = os.path.dirname(os.path.realpath(path))
        for module in sorted(_imports(path)):
            imported = next((p for p in (f"{module}.py", os.path.join(module, "__init__.py"))
                          if os.path.isfile(os.path.join(folder, p))), None)
            if imported and os.path.realpath(os.path.join(folder, imported)) not in named:
                yield ("code", i), (f"{os.path.basename(path)} imports '{module}' ({imported} beside it), which "
                                    f"`code:` does not list, so workers do not get it and its changes make no result "
                                    f"stale; list it under `code:`, before this file")


def _imports(path: str) -> set[str]:
    """Return the top-level names of all modules that a Python file imports, also inside functions. The set is empty
    when the file cannot be read or parsed."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
              and not node.level]
    return {name.partition(".")[0] for name in names}
