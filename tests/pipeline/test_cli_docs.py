"""docs/cli.md names every command with every option and argument, and its examples are of this command line.

`python -m tests.pipeline.test_cli_docs` prints the tables, for pasting after a change.
"""

from __future__ import annotations

import re
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import typer

from pipeline.cli.app import build
from pipeline.recipe import load_recipe

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
TEXTS = DOCS.with_name("texts.md")


def commands(group: Any = None, prefix: str = "tokenmill") -> dict[str, Any]:
    """Full name → command, of every command that does something itself."""
    found = {}
    for name, command in (group or typer.main.get_command(build())).commands.items():
        full = f"{prefix} {name}"
        found |= commands(command, full) if hasattr(command, "commands") else {full: command}
    return found


def parameters(command: Any) -> list[tuple[str, str]]:
    """(how it is written, help) of the visible parameters."""
    out = []
    for p in command.params:
        if getattr(p, "hidden", False) or p.name == "help":
            continue
        if p.param_type_name == "argument":
            out.append((p.metavar or p.name.upper(), p.help))
            continue
        choices = "|".join(type(p.default)) if isinstance(p.default, StrEnum) else ""
        flag = getattr(p, "is_flag", False)
        value = "" if flag else " " + (p.metavar or choices or p.name.upper())
        default = None if flag or p.required or p.default is None else str(p.default)
        notes = [f"Default: `{default}`"] if default is not None else []
        notes += [f"Also `{p.envvar}`"] if p.envvar else []
        out.append((", ".join(p.opts) + value, " ".join([p.help, *(f"{n}." for n in notes)])))
    return out


def table(command: Any) -> str:
    cells = [(f"`{how}`".replace("|", "\\|"), said.replace("|", "\\|")) for how, said in parameters(command)]
    return "\n".join(["| | |", "|---|---|", *(f"| {how} | {said} |" for how, said in cells)])


def sections() -> dict[str, str]:
    """Heading → text, of the headings that are commands."""
    parts = re.split(r"^#{2,3} `(tokenmill [a-z ]+)`$", DOCS.read_text(), flags=re.M)
    return dict(zip(parts[1::2], (re.split(r"^## ", p, flags=re.M)[0] for p in parts[2::2])))


def examples() -> list[str]:
    """The command lines in the code blocks of the page and in the help of the commands."""
    text = "\n".join([*re.findall(r"^```\w*\n(.*?)^```", DOCS.read_text(), flags=re.M | re.S),
                      *(c.help or "" for c in commands().values())])
    text = text.replace("\\\n", " ")
    return sorted({line.strip().removeprefix("$ ") for line in text.splitlines()
                   if re.match(r"\s*(\$ )?tokenmill ", line)})


def test_every_command_has_a_section_and_no_other():
    assert list(sections()) == list(commands())


@pytest.mark.parametrize("name", list(commands()))
def test_every_option_stands_there_and_no_other(name):
    command, section = commands()[name], sections()[name]
    assert re.search(r"^```\w*\n(\$ )?" + name, section, flags=re.M), "an example comes first"
    if name != "tokenmill train":                     # its options are the trainer's own
        assert table(command) in section


def test_every_command_has_help_with_an_example():
    for name, command in commands().items():
        assert f"  {name}" in command.help and command.help.split("\n")[0].endswith("."), name
        for how, said in parameters(command):
            assert said, f"{name} {how}"


@pytest.mark.parametrize("line", examples())
def test_examples_use_options_that_exist(line):
    words = shlex.split(line.partition(" | ")[0].partition("  #")[0])
    known = commands()
    name = next((n for n in (" ".join(words[:k]) for k in (3, 2)) if n in known), None)
    assert name or words[1:] == ["--help"], "no such command"
    if name in (None, "tokenmill train"):
        return
    flags = {o for p in known[name].params for o in p.opts} | {"--help", "-h"}
    assert {w.partition("=")[0] for w in words if re.match(r"--?[a-z]", w)} <= flags


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```", TEXTS.read_text(), flags=re.M | re.S))
def test_recipes_in_the_docs_are_sound(tmp_path, block):
    if "code:" in block:
        return                                               # tests/e2e/test_own_reader.py runs it, with its code
    (tmp_path / "recipe.yaml").write_text("version: 1\n" * ("version:" not in block) + block)
    assert load_recipe(tmp_path / "recipe.yaml").datasets


if __name__ == "__main__":
    for full, found in commands().items():
        print(f"\n## `{full}`\n\n{table(found)}")
