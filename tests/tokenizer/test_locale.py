"""Files have the same meaning under any locale: our code never opens a text file with the machine's default
encoding."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def without_encoding(source: str) -> list[int]:
    """Return the lines of the code `source` that open a text file without naming its encoding."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {k.arg for k in node.keywords}
        if name in ("read_text", "write_text"):
            positional = len(node.args) > (name == "write_text")
        elif name == "open" and isinstance(node.func, ast.Name):
            mode = node.args[1] if len(node.args) > 1 else None
            positional = isinstance(mode, ast.Constant) and "b" in str(mode.value)
        else:
            continue
        if not positional and "encoding" not in given:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("folder", ["tokenizer", "tokenizer/mixture", "pipeline/passes", "pipeline/recipe"])
def test_text_files_say_their_encoding(folder):
    found = [f"{p.relative_to(ROOT)}:{line}" for p in sorted((ROOT / folder).rglob("*.py"))
             for line in without_encoding(p.read_text(encoding="utf-8"))]
    assert not found, found


def test_the_rule_sees_what_it_is_for():
    bad = "open(p)\nopen(p, 'w')\nPath(p).read_text()\nPath(p).write_text(x)\n"
    good = "open(p, 'rb')\nopen(p, 'w', encoding='utf-8')\np.read_text('utf-8')\np.write_text(x, encoding='utf-8')\n"
    assert without_encoding(bad) == [1, 2, 3, 4]
    assert without_encoding(good) == []
