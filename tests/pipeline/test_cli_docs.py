"""docs/cli.md describes every command with all its options and arguments, and its examples are valid command lines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pipeline.cli.reference import commands, parameters, rewrite, table
from pipeline.recipe import load_recipe

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
TEXTS = DOCS.with_name("texts.md")


def sections() -> dict[str, str]:
    """Return {heading: text} for those headings of the page that are commands."""
    parts = re.split(r"^#{2,3} `(tokenmill [a-z ]+)`$", DOCS.read_text(), flags=re.M)
    return dict(zip(parts[1::2], (re.split(r"^## ", p, flags=re.M)[0] for p in parts[2::2])))


def examples() -> list[str]:
    """Return the command lines in the code blocks of the page and in the help texts of the commands."""
    text = "\n".join([*re.findall(r"^```\w*\n(.*?)^```", DOCS.read_text(), flags=re.M | re.S),
                      *(c.help or "" for c in commands().values())])
    text = text.replace("\\\n", " ")
    return sorted({line.strip().removeprefix("$ ") for line in text.splitlines()
                   if re.match(r"\s*(\$ )?tokenmill ", line)})


def test_the_tables_of_options_are_those_of_the_commands():
    page = DOCS.read_text()
    assert rewrite(page) == page, "make docs"


def test_a_command_without_a_section_is_told():
    page = DOCS.read_text()
    with pytest.raises(ValueError, match="tokenmill doctor"):
        rewrite(page.replace("### `tokenmill doctor`", "### doctor"))
    with pytest.raises(ValueError, match="`tokenmill list` has 0 tables"):
        rewrite(page.replace(table(commands()["tokenmill list"]), ""))
    assert rewrite(page.replace("| `--quiet, -q` | Print nothing but errors. |", "| `--quiet` | |")) == page


def test_every_section_begins_with_an_example():
    for name, section in sections().items():
        assert re.search(r"^```\w*\n(\$ )?" + name, section, flags=re.M), name


def test_every_command_has_help_with_an_example():
    for name, command in commands().items():
        assert f"  {name}" in command.help and command.help.split("\n")[0].endswith("."), name
        for how, said in parameters(command):
            assert said, f"{name} {how}"


def test_examples_use_options_that_exist():
    known = commands()
    for line in examples():
        words = shlex.split(line.partition(" | ")[0].partition("  #")[0])
        name = next((n for n in (" ".join(words[:k]) for k in (3, 2)) if n in known), None)
        assert name or words[1:] == ["--help"], f"no such command: {line}"
        if name not in (None, "tokenmill train"):
            flags = {o for p in known[name].params for o in p.opts} | {"--help", "-h"}
            assert {w.partition("=")[0] for w in words if re.match(r"--?[a-z]", w)} <= flags, line


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```", TEXTS.read_text(), flags=re.M | re.S))
def test_recipes_in_the_docs_are_sound(tmp_path, block):
    if "code:" in block:
        return                                               # tests/e2e/test_own_reader.py runs it, with its code
    (tmp_path / "recipe.yaml").write_text("version: 1\n" * ("version:" not in block) + block)
    assert load_recipe(tmp_path / "recipe.yaml").datasets
