"""What the docs tell people to write is accepted: options of commands, and keys and values of YAML."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import yaml

from trainer.__main__ import COMMANDS, parser
from trainer.base.config import build
from trainer.loop.config import TrainConfig
from trainer.tools.curriculum_edit import read_phases

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/training.md", "docs/first-training.md", "docs/cli.md")
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)


def blocks(page: str) -> list[tuple[str, str]]:
    """Return (language, text) for each code block of a page."""
    return [(kind, textwrap.dedent(text)) for _, kind, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]


def commands() -> list[str]:
    """Return the lines of the docs that call `tokenmill train COMMAND …`. Continuation lines are joined."""
    texts = [text.replace("\\\n", " ") for page in PAGES for _, text in blocks(page)]
    lines = [line.strip().removeprefix("$ ") for text in texts for line in text.splitlines()]
    return sorted({line for line in lines if line.startswith("tokenmill train ") and "--help" not in line})


def test_every_command_is_shown():
    shown = {line.split()[2] for line in commands()}
    assert shown == set(COMMANDS)


@pytest.mark.parametrize("line", commands())
def test_commands_are_accepted(line):
    arguments = shlex.split(line, comments=True)[2:]
    assert parser(arguments[0]).parse_args(arguments).command == arguments[0]


@pytest.mark.parametrize(("page", "text"), [(page, text) for page in PAGES for kind, text in blocks(page)
                                            if kind == "yaml"])
def test_yaml_is_accepted(page, text, tmp_path):
    """`train:` (or a part of it) builds; phases have keys that phases have."""
    said = yaml.safe_load(text.replace("- …\n", ""))
    phases = said if isinstance(said, list) else (said.get("curriculum") or {}).get("phases")
    if phases:
        (tmp_path / "phases.yaml").write_text(yaml.safe_dump(phases))
        assert read_phases(tmp_path / "phases.yaml")["phases"] == phases
    if isinstance(said, dict):
        train = said.get("train", {key: said[key] for key in said if key in TrainConfig.__dataclass_fields__})
        build(TrainConfig, {"model": {"preset": "tiny"}, **train}, f"{page}: train")
