"""The import rules of docs/architecture.md. Imports are read from the syntax trees, so no module has to be
importable."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "stages", "tokenizer", "trainer")
#: the trainer's settings, which the recipe's checker reads: they import no torch
SETTINGS = ("trainer.base.config", "trainer.model.config", "trainer.optim.config", "trainer.loop.config")
#: what reads the files of a training without torch, for the service
READING = ("trainer.base.files", "trainer.observe.explain", "trainer.observe.performed", "trainer.observe.plot")
#: who may import whom: a package, and the prefixes of the project's own modules it may import
ALLOWED = {
    "stages": ("stages", "pipeline.base", "tokenizer.imports", "tokenizer.load"),         # `read: tokens`
    "tokenizer": ("tokenizer", "pipeline.base"),
    "pipeline": ("pipeline", "stages", "tokenizer", *SETTINGS, *READING),
    "trainer": ("trainer", "tokenizer.shards", "tokenizer.mixture", "pipeline.base"),
}
#: folders of the first two depths, from the ground up: each imports only those before it, wherever in a file it does so
LAYERS = (
    "pipeline.base",
    "tokenizer.shards", "tokenizer.mixture", "tokenizer.export", "tokenizer.imports", "tokenizer",
    "stages.text", "stages", "stages.scoring", "stages.read", "stages.adapters", "stages.dedup", "stages.scrub",
    "stages.filter", "stages.decontaminate", "stages.extract", "stages.models",
    "trainer.base", "trainer.model", "trainer.parallel", "trainer.optim", "trainer.data", "trainer.checkpoint",
    "trainer.observe", "trainer.evaluation", "trainer.loop",
    "pipeline.store", "pipeline.engine", "pipeline.cluster", "pipeline.recipe", "pipeline.passes", "pipeline.plan",
    "pipeline.report", "pipeline.takedown", "pipeline", "pipeline.forecast", "pipeline.study", "pipeline.service",
    "trainer", "trainer.launch", "trainer.tools",
    "pipeline.cli",
)
#: the most circles of files: a store and its kinds of storage
CIRCLES = 1
#: imports that cross a seam on purpose, each with its reason
EXCEPTIONS = {
    # `tokenmill train …` is `python -m trainer …`: one command hands over to the other, and no more
    ("pipeline/cli/training.py", "trainer.__main__"),
    # `--address`: which clusters are to be trusted is decided in one place
    ("trainer/launch/start.py", "pipeline.cluster.connect"),
    # DCP keeps its metadata as a pickle; it is read by an unpickler that admits a list of classes and nothing else
    ("trainer/checkpoint/reader.py", "pickle"),
    # compiles functions where numba is installed, and imports it when the first of them is called
    ("pipeline/base/compiled.py", "numba"),
}
RAY = {*(f"pipeline/engine/backends/ray_{part}.py" for part in ("backend", "demand", "local", "metrics", "supervisor")),
       "pipeline/cluster/jobs.py", "trainer/launch/ray.py"}
#: what a GPU node has: beyond it these may import nothing. `pipeline.base` is for everybody and imports nobody
LEAN = {"tokenizer/mixture": {"numpy", "pyarrow", "tokenizer", "pipeline"},
        "tokenizer/shards": {"numpy", "pyarrow", "tokenizer", "pipeline"},
        "pipeline/base": {"numpy", "pyarrow", "pipeline"}}
#: what opens Parquet without checking its pages, or writes it without sums
UNCHECKED = {"ParquetFile", "ParquetWriter", "ParquetDataset", "read_table", "read_pandas", "write_table"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


class Statements(NamedTuple):
    """What the rules look at in a file, wherever in the file it is."""

    imports: list[ast.Import | ast.ImportFrom]
    classes: list[tuple[str, int]]               # name and line
    unchecked: list[tuple[str, int]]             # calls that read or write Parquet by pyarrow directly


@functools.cache
def read(text: str) -> Statements:
    """Parse the text of a file. Most files are asked for by several tests, and parsing them takes most of the time."""
    result = Statements([], [], [])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            result.imports.append(node)
        elif isinstance(node, ast.ClassDef):
            result.classes.append((node.name, node.lineno))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in UNCHECKED \
                and isinstance(node.func.value, ast.Name) and node.func.value.id in ("pq", "parquet"):
            result.unchecked.append((node.func.attr, node.lineno))
    return result


def statements(path: Path) -> Statements:
    return read(path.read_text(encoding="utf-8"))


def imports(path: Path, root: Path = ROOT) -> Iterator[tuple[str, int]]:
    """Yield (module, line) for every import in a file. Relative imports become absolute."""
    package = path.relative_to(root).parent.parts
    for node in statements(path).imports:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        else:
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def inside(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


def broken_rules(path: Path, root: Path = ROOT) -> list[str]:
    """Return the imports of a file below `root` that break a rule, one line each."""
    rel = path.relative_to(root).as_posix()
    package = rel.split("/", 1)[0]
    found = []
    for module, line in imports(path, root):
        top = module.split(".")[0]
        exact = {m for r, m in EXCEPTIONS if r == rel}
        # `from tokenizer import shards` is read as `tokenizer` and `tokenizer.shards`: the second decides
        parent = any(p.startswith(module + ".") for p in ALLOWED[package])
        if top in PACKAGES and not parent and not inside(module, (*ALLOWED[package], *exact)):
            found.append(f"{rel}:{line}: {package} must not import {module}")
        if top == "ray" and rel not in RAY:
            found.append(f"{rel}:{line}: ray is imported by {', '.join(sorted(RAY))} alone")
        for folder, allowed in LEAN.items():
            if rel.startswith(folder + "/") and top not in allowed | exact | set(sys.stdlib_module_names):
                found.append(f"{rel}:{line}: {folder} uses the standard library, numpy and pyarrow alone, not {module}")
        if top in ("tests", "demo", "benchmarks"):
            found.append(f"{rel}:{line}: {top} is not part of the wheel")
        if top in ("pickle", "dill", "cloudpickle", "marshal") and top not in exact:
            found.append(f"{rel}:{line}: {top} runs whatever a file holds; use JSON, Parquet or safetensors")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package):
    found = [line for path in modules(package) for line in broken_rules(path)]
    assert not found, "\n" + "\n".join(found)


def source_files() -> dict[str, Path]:
    """Return {module: file} for all our packages."""
    found = {}
    for path in (p for package in PACKAGES for p in modules(package)):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def links() -> dict[str, set[str]]:
    """Return {module: modules of ours that it imports, at any place in its file}."""
    files = source_files()

    def module(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    return {name: {module(m) for m, _ in imports(path)} - {name, ""}
            - {".".join(name.split(".")[:i]) for i in range(name.count(".") + 1)} for name, path in files.items()}


def folder_of(name: str, path: Path) -> str:
    parts = name.split(".")
    return ".".join((parts if path.name == "__init__.py" else parts[:-1])[:2])


def test_folders_import_only_those_below_them():
    files, wrong = source_files(), []
    for name, targets in links().items():
        here = folder_of(name, files[name])
        assert here in LAYERS, f"{name}: give {here} its place in LAYERS"
        for target in targets:
            there = folder_of(target, files[target])
            if there != here and LAYERS.index(there) > LAYERS.index(here):
                wrong.append(f"{name} imports {target}, which is above it")
    assert not wrong, "\n" + "\n".join(sorted(wrong))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a circle (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph.get(name, ())):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name):]
            del stack[stack.index(name):]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def test_every_exception_is_needed():
    assert [pair for pair in sorted(EXCEPTIONS) if pair[1] not in {m for m, _ in imports(ROOT / pair[0])}] == []


def test_circles_of_files_are_few():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    found = circles(links())
    assert len(found) <= CIRCLES, "\n" + "\n".join(" - ".join(group) for group in found)


def test_a_name_stands_for_one_class():
    """A search for a class leads to one place. `Config` is exempt: it is what a step calls its settings."""
    places: dict[str, list[str]] = {}
    for name, path in source_files().items():
        for kind, line in statements(path).classes:
            if kind != "Config":
                places.setdefault(kind, []).append(f"{name}:{line}")
    assert not {name: at for name, at in places.items() if len(at) > 1}


def unchecked_parquet(path: Path) -> list[str]:
    """Return the calls in a file that read or write Parquet by pyarrow directly, instead of by `pipeline.base.parquet`,
    one line each."""
    return [f"{path}:{line}: {name} of pyarrow.parquet; use pipeline.base.parquet"
            for name, line in statements(path).unchecked]


@pytest.mark.parametrize("package", PACKAGES)
def test_parquet_has_one_door(package):
    """A page that is read past the door is a page whose damage nobody sees."""
    assert not [line for path in modules(package) if path != ROOT / "pipeline" / "base" / "parquet.py"
                for line in unchecked_parquet(path)]


def test_lean_packages_import_only_lean_ones():
    """What lean packages import of the project must be as lean as they are."""
    for folder in LEAN:
        own = folder.replace("/", ".")
        for path in modules(folder):
            for module, line in imports(path):
                if module.split(".")[0] in PACKAGES:
                    assert inside(module, (own, *(f.replace("/", ".") for f in LEAN))), f"{path}:{line}: {module}"


@pytest.mark.parametrize("package", ["stages", "tokenizer"])
def test_empty_packages_stay_empty(package):
    assert (ROOT / package / "__init__.py").read_text() == ""


def test_nothing_cites_a_file_that_is_not_here():
    """`contracts §3` meant a page outside the repository."""
    titles = {line[3:] for line in (ROOT / "docs" / "contracts.md").read_text().splitlines() if line.startswith("## ")}
    for path in (p for package in PACKAGES for p in modules(package)):
        text = " ".join(path.read_text(encoding="utf-8").split())
        assert "contracts §" not in text, path
        for cited in re.findall(r"docs/contracts\.md: ([A-Z][a-z ]+)", text):
            assert any(cited.startswith(title) for title in titles), f"{path}: {cited}"


def test_deploy_holds_no_python():
    assert not list((ROOT / "deploy").rglob("*.py"))


@pytest.mark.parametrize(("source", "rule"), [
    ("import ray\n", "ray is imported by"),
    ("def f():\n    from ray import data\n", "ray is imported by"),
    ("from pipeline.store import fs\n", "stages must not import pipeline"),
    ("from pipeline import run\n", "stages must not import pipeline"),
    ("from trainer import model\n", "stages must not import trainer"),
    ("import pickle\n", "runs whatever a file holds"),
    ("from ...pipeline import run\n", "stages must not import pipeline"),
])
def test_the_rules_catch_offenders(tmp_path, source, rule):
    """The check itself: each kind of offence, in a file that claims to be a filter."""
    path = tmp_path / "stages" / "filter" / "offender.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert any(rule in line for line in broken_rules(path, tmp_path))


def test_trainer_may_import_the_shards_but_not_the_tokenizer(tmp_path):
    path = tmp_path / "trainer" / "data.py"
    path.parent.mkdir(parents=True)
    path.write_text("from tokenizer import shards\nfrom tokenizer.shards.reader import A\n"
                    "import tokenizer.mixture.order\n")
    assert broken_rules(path, tmp_path) == []
    path.write_text("from tokenizer import train\nimport stages.filter.c4\n")
    assert [line.split()[-1] for line in broken_rules(path, tmp_path)] == ["tokenizer.train", "stages.filter.c4"]


def test_settings_of_the_trainer_need_no_torch():
    """The recipe's checker imports them, for every setting of every optimiser, where only the pipeline is installed."""
    program = """
import sys
sys.modules["torch"] = None
from trainer.base.config import keys_of
from trainer.loop.config import TrainConfig
print(*keys_of(TrainConfig, "train")["train.optimizer"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert {"kind", "lr", "betas", "scaling"} <= set(done.stdout.split())


def test_mix_and_shards_import_without_the_extras():
    """In a fresh interpreter that refuses everything but the standard library, numpy and pyarrow."""
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for folder in LEAN for p in modules(folder)
             if p.name != "__init__.py"]
    program = f"""
import sys, importlib
allowed = set(sys.stdlib_module_names) | {{"numpy", "pyarrow", "stages", "tokenizer", "pipeline"}}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed:
            raise ImportError("refused: " + name)
        return None
sys.meta_path.insert(0, Refuse())
for name in {names!r}:
    importlib.import_module(name)
print("imported", len({names!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["imported", str(len(names))]
