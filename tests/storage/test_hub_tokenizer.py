"""A tokenizer given by its name on the Hugging Face hub: it is fetched once, pinned to a revision, and sent to the
workers. Errors are reported."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.cli.app import run_command
from pipeline.recipe import RecipeError, load_recipe
from tests.commands import command
from tests.storage.servers import Handler, serving

pytest.importorskip("huggingface_hub")
COMMIT, LATER = "c" * 40, "d" * 40


class _Hub(Handler):
    """The part of the hub's protocol that `hf_hub_download` uses. `files` has the files of each revision, and `main` is
    the revision that "main" means."""

    def do_GET(self) -> None:
        server = self.server
        server.seen.append((self.command, self.path))
        found = re.fullmatch(r"/(org/tok|gpt9)/resolve/([^/]+)/(.*)", self.path.partition("?")[0])
        if found is None:
            self.send(b"", 404, {"X-Error-Code": "RepoNotFound"})
            return
        revision = server.main if found[2] == "main" else found[2]
        if revision not in server.files:
            self.send(b"", 404, {"X-Error-Code": "RevisionNotFound"})
        elif found[3] not in server.files[revision]:
            self.send(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": revision})
        else:
            data = server.files[revision][found[3]]
            self.send(data, 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": revision,
                                   "Accept-Ranges": "bytes"})

    do_HEAD = do_GET


@pytest.fixture
def tokenizer(tmp_path) -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.BPE(vocab={chr(97 + i): i for i in range(26)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<end>", "<pad>"])
    return made.to_str().encode()


@pytest.fixture
def hub(monkeypatch, tmp_path, tokenizer):
    files = {COMMIT: {"tokenizer.json": tokenizer, "tokenizer_config.json": b'{"eos_token": "<end>"}'}}
    with serving(_Hub, files=files, main=COMMIT, seen=[]) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def recipe(folder: Path, load: str) -> Path:
    docs = folder / "docs"
    if not docs.is_dir():                                        # their times are part of what they are known by
        docs.mkdir()
        for i in range(4):
            (docs / f"{i}.txt").write_text("a text of words like any other " * 40)
    path = folder / "recipe.yaml"
    path.write_text(f"""
version: 1
sources: {{docs: {{read: text, path: docs}}}}
datasets: {{kept: {{from: docs}}}}
tokenizer: {{load: {load}}}
shards: {{web: {{from: kept, longest: 64, val: 0}}}}
""")
    return path


def run(folder: Path, load: str, store: str = "store", **env: str) -> subprocess.CompletedProcess:
    return command("pipeline.cli", "run", recipe(folder, load), "--store", folder / store, "--backend", "inline",
                   "--name", "first", env={"COLUMNS": "1000", **env})


def made(folder: Path, store: str = "store") -> dict[str, bytes]:
    """Return the files of the shards by path."""
    shards = folder / store / "shards"
    return {p.relative_to(shards).as_posix(): p.read_bytes() for p in sorted(shards.rglob("*")) if p.is_file()}


def test_a_name_is_fetched_once_and_pinned(hub, tmp_path, tokenizer):
    done = run(tmp_path, "org/tok")
    assert done.returncode == 0, done.stderr
    assert f"'org/tok@{COMMIT}'" in done.stderr + done.stdout, "which revision it was is not said"
    [name] = [n for n in made(tmp_path) if n.startswith("tokenizer-")]
    assert name == f"tokenizer-{hashlib.sha256(tokenizer).hexdigest()[:12]}.json"
    kept = yaml.safe_load((tmp_path / "store" / "runs" / "first" / "recipe.yaml").read_text())
    assert kept["tokenizer"]["load"] == f"org/tok@{COMMIT}"
    assert sum(method == "GET" and path.endswith("/tokenizer.json") for method, path in hub.seen) == 1
    # the hub moves on: a pinned name means what it meant, and nobody is asked
    hub.files[LATER] = {"tokenizer.json": tokenizer.replace(b"<end>", b"<END>"),
                        "tokenizer_config.json": b'{"eos_token": "<END>"}'}
    hub.main = LATER
    hub.seen.clear()
    done = run(tmp_path, f"org/tok@{COMMIT}", "pinned")
    assert done.returncode == 0, done.stderr
    assert not [path for _, path in hub.seen if "/resolve/" in path]
    assert made(tmp_path, "pinned") == made(tmp_path)
    # the same tokenizer in a folder gives the same tokens
    (tmp_path / "here").mkdir()
    for file, data in hub.files[COMMIT].items():
        (tmp_path / "here" / file).write_bytes(data)
    done = run(tmp_path, "here", "folder")
    assert done.returncode == 0, done.stderr
    assert made(tmp_path, "folder") == made(tmp_path)


def test_what_is_in_the_cache_needs_no_hub(hub, tmp_path):
    assert run(tmp_path, "gpt9").returncode == 0
    for name, env in (("offline", {"HF_HUB_OFFLINE": "1"}), ("unreachable", {"HF_ENDPOINT": "http://127.0.0.1:9"})):
        done = run(tmp_path, "gpt9", name, **env)
        assert done.returncode == 0, done.stderr
        assert made(tmp_path, name) == made(tmp_path)


@pytest.mark.parametrize(("load", "env", "said"), [
    ("org/tok", {"HF_HUB_OFFLINE": "1"}, "(HF_HUB_OFFLINE is set); name a file, or fetch it where there is a network: "
                                         "hf download org/tok"),
    ("org/tok", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot reach 127.0.0.1:9"),
    ("org/gone", {}, "no repository of that name on the Hugging Face hub"),
    (f"org/tok@{LATER}", {}, "cannot be fetched from the Hugging Face hub"),
    ("org/tok@bare", {}, "holds none of tokenizer.json")])
def test_what_is_wrong_is_said_at_once_and_in_one_line(hub, tmp_path, load, env, said):
    hub.files["bare"] = {"README.md": b"x"}
    done = run(tmp_path, load, **env)
    assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert sum("tokenizer.load" in line for line in done.stderr.splitlines()) == 1, done.stderr
    assert not list((tmp_path / "store").glob("datasets/*")), "documents were read first"


def test_without_the_package_it_says_which(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert run_command(["run", str(recipe(tmp_path, "gpt9")), "--store", str(tmp_path / "store")]) != 0
    assert "pip install 'tokenmill[hf]'" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_no_name(tmp_path):
    for load in ("gone.json", "./gone", "models/gone/tokenizer", "gone.model", "gone.tiktoken", "org/gone.tiktoken"):
        with pytest.raises(RecipeError, match=r"tokenizer\.load: no such file"):
            load_recipe(recipe(tmp_path, load))
    shutil.rmtree(tmp_path / "docs")
    assert load_recipe(recipe(tmp_path, "org/tok")).plain()["tokenizer"]["load"] == "org/tok", "nothing is fetched yet"
