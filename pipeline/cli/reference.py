"""Updates the tables of options in docs/cli.md from the commands: `python -m pipeline.cli.reference docs/cli.md`.

Each section of the page whose heading is `tokenmill COMMAND` holds prose and one table. The table is replaced, and the
prose is not changed. The section of `tokenmill train`, whose options the trainer parses, stays as it is. `make docs`
runs this module, and a test checks that the page is up to date."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

SECTION = re.compile(r"^#{2,3} `(tokenmill [a-z ]+)`$", re.M)
TABLE = re.compile(r"^\| \| \|\n\|---\|---\|\n(?:\|.*\n)*", re.M)
#: commands whose options another program parses
FOREIGN = ("tokenmill train",)


def commands(group: Any = None, prefix: str = "tokenmill") -> dict[str, Any]:
    """Return {full name: Click command} for every command of `tokenmill`, without those that are only groups of other
    commands."""
    from pipeline.cli.app import command_group

    inside: dict[str, Any] = getattr(group or command_group(), "commands", {})
    out: dict[str, Any] = {}
    for name, command in inside.items():
        full = f"{prefix} {name}"
        out |= commands(command, full) if hasattr(command, "commands") else {full: command}
    return out


def parameters(command: Any) -> list[tuple[str, str]]:
    """Return a list of (form on the command line, help text), with an entry for each visible parameter of a Click
    command."""
    out = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        if parameter.param_type_name == "argument":
            out.append((parameter.metavar or parameter.name.upper(), parameter.help))
            continue
        choices = "|".join(type(parameter.default)) if isinstance(parameter.default, StrEnum) else ""
        flag = getattr(parameter, "is_flag", False)
        value = "" if flag else " " + (parameter.metavar or choices or parameter.name.upper())
        default = None if flag or parameter.required or parameter.default is None else str(parameter.default)
        notes = [f"Default: `{default}`"] if default is not None else []
        notes += [f"Also `{parameter.envvar}`"] if parameter.envvar else []
        out.append((", ".join(parameter.opts) + value, " ".join([parameter.help, *(f"{n}." for n in notes)])))
    return out


def table(command: Any) -> str:
    """Return the table of the options and arguments of a Click command, as Markdown."""
    cells = [(f"`{how}`".replace("|", "\\|"), text.replace("|", "\\|")) for how, text in parameters(command)]
    return "\n".join(["| | |", "|---|---|", *(f"| {how} | {text} |" for how, text in cells)]) + "\n"


def rewrite(page: str) -> str:
    """Return the text of docs/cli.md with the tables of options replaced by tables of the present commands.

    Raises ValueError when the page's sections are not exactly those of the commands, in the order of the commands, or
    when a section has not exactly one table.
    """
    head, *sections = SECTION.split(page)
    by_name, names = commands(), sections[::2]
    if names != list(by_name):
        raise ValueError(f"sections and commands differ: {set(names) ^ set(by_name) or 'their order'}")
    out = [head]
    for name, text in zip(names, sections[1::2]):
        if name not in FOREIGN:
            text, count = TABLE.subn(lambda _, name=name: table(by_name[name]), text)
            if count != 1:
                raise ValueError(f"the section of `{name}` has {count} tables of options, not one")
        mark = "##" if f"\n## `{name}`\n" in f"\n{page}" else "###"
        out.append(f"{mark} `{name}`{text}")
    return "".join(out)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")
