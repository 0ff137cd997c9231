"""`make demo`: what it installs, what it prints meanwhile, and which files a user can already look at before it
ends."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import demo.__main__ as demo
from demo import install
from pipeline.cli.app import command_group
from tests.test_demo_fetch import make_wheel, offline  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]


def extras(folder: Path, target: str) -> list[str]:
    """Return the extras that `make -n target` installs in a clone where nothing is installed yet."""
    (folder / "pipeline").mkdir(exist_ok=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "pipeline/fetch.py"):
        shutil.copyfile(ROOT / name, folder / name)
    commands = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=True).stdout
    return re.findall(r"-e '\.\[(.*)\]'", commands)


def test_the_demo_installs_what_it_needs_and_the_tests_more(tmp_path):
    assert extras(tmp_path, "demo") == ["pipeline,trainer,service"]
    assert extras(tmp_path, "test") == ["pipeline,trainer,service", "pipeline,trainer,service,s3,dev"]


def test_real_data_is_used_only_where_it_is_named(tmp_path):
    """Also where a variable of this name stands in the environment for something else."""
    makefile = ROOT / "Makefile"
    shown = ["make", "-f", str(makefile), "--eval", "show: ; @echo [$$TOKENMILL_TEST_DATA]", "show"]
    run = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path}
    assert subprocess.run(shown, env={"PATH": "/usr/bin:/bin", "DATA": "x", "TOKENMILL_TEST_DATA": "y"},
                          **run).stdout == "[]\n"
    assert subprocess.run([*shown, "DATA=../real"], env={"PATH": "/usr/bin:/bin"}, **run).stdout == "[../real]\n"


#: stands in for Python with pip: prints each line of pip's when the progress before it was shown
PIP = """#!/bin/sh
cd "$(dirname "$0")"
after() { for i in $(seq 3000); do [ -e "$1" ] && return; sleep 0.02; done; exit 1; }
after 1; echo "Collecting pages"
after 2; echo "Installing collected packages: pages"
after 3
"""


def test_an_installation_shows_how_far_it_is(tmp_path, monkeypatch):
    lines: list[str] = []

    def show(line: str, **_: object) -> None:
        lines.append(line)
        (tmp_path / str(len(lines))).touch()

    (tmp_path / "python").write_text(PIP)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(install.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(install, "print", show, raising=False)
    assert install.main("pages", every=0.01) == 0
    assert [line.partition(" s  ")[2] for line in lines] == ["0 packages looked up", "1 packages looked up",
                                                            "0 of 1 packages installed", "done"]


def test_an_installation_that_fails_says_why(offline, tmp_path, capsys):  # noqa: F811
    assert install.main("--target", str(tmp_path / "there"), "gone") == 1
    said = capsys.readouterr()
    assert "No matching distribution found for gone" in said.err and "done" not in said.out


def test_progress_is_read_from_pips_lines(offline, tmp_path, monkeypatch):  # noqa: F811
    """Of the pip that is here: what another one prints may be another thing, which then is not shown."""
    for name in ("pages", "words"):
        make_wheel(offline, name, {f"{name}/a.html": b"<p>a" * 9000})
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--target", tmp_path / "there", "pages", "words"],
                          capture_output=True, text=True, check=True)
    count = iter([100, 101, 250])
    monkeypatch.setattr(install, "installed", lambda: next(count))
    progress, said = install.Progress(), []
    for line in done.stdout.splitlines():
        progress.read(line)
        if line.startswith(("Collecting", "Processing")):
            said.append(str(progress))
    assert said == ["1 packages looked up", "2 packages looked up"], done.stdout
    assert str(progress) == "1 of 2 packages installed"
    assert str(progress) == "2 of 2 packages installed", "no more than there are"
    progress = install.Progress.__new__(install.Progress)
    progress.collected, progress.packages, progress.last = 3, 0, ""
    progress.read("  Downloading torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (190.2 MB)")
    assert str(progress) == "3 packages looked up, downloading torch 190.2 MB"


def test_the_report_and_the_service_are_named_before_the_training(tmp_path, monkeypatch, capsys):
    """So that a reader need not wait minutes for the training. And the training is started by the command that adds its
    section to that report."""
    before: list[str] = []

    def trains(command: list[str], **_: object) -> SimpleNamespace:
        before.append(capsys.readouterr().out)
        assert command[1:5] == ["-m", "pipeline.cli", "train", "run"]
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(demo, "fetch_main", lambda: 0)
    monkeypatch.setattr(demo, "load_recipe", lambda *a: None)
    monkeypatch.setattr(demo, "run_recipe", lambda *a, **k: SimpleNamespace(run="demo", warnings=["one"], datasets={},
                                                                           shards={}))
    monkeypatch.setattr(demo.subprocess, "run", trains)
    assert demo.main(str(tmp_path)) == 3
    assert f"{tmp_path}/runs/demo/report.html" in before[0] and "warning: one" in before[0]
    command = re.search(r"(tokenmill serve .*?)   ", before[0])
    assert command is not None and "While the model trains" in before[0]
    _, name, *arguments = shlex.split(command[1])
    options = command_group().commands[name].make_context(name, arguments).params
    assert [Path(store).resolve() for store in options["store"]] == [tmp_path]
    assert [Path(place).resolve() for place in options["allow_root"]] == [ROOT]


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_of_pip_is_that_of_the_step(monkeypatch, code):
    monkeypatch.setattr(install.sys, "executable", "true" if code == 0 else "false")
    assert install.main("anything") == code
