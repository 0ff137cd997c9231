"""What the content key of a task depends on: declared names and versions, but not the module in which a class is
defined."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from collections import Counter
from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st

import pipeline.passes
import stages.dedup
from pipeline.cli.app import run_command
from pipeline.recipe.code import own_source
from pipeline.store.content_keys import SharedArgs, task_key
from pipeline.store.fs import Store
from pipeline.store.log import Log
from stages.catalog import load
from stages.stage import Stage


def tasks() -> dict[str, type]:
    """Return {import path: class} for every task of the product."""
    found = {}
    for package in (pipeline.passes, stages.dedup):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for cls in vars(importlib.import_module(module.name)).values():
                if (isinstance(cls, type) and cls.__module__ == module.name and hasattr(cls, "version")
                        and hasattr(cls, "run") and not issubclass(cls, Stage)):
                    found[f"{module.name}:{cls.__name__}"] = cls
    return found


def test_every_task_has_a_name_of_its_own():
    names = Counter(cls.name for cls in tasks().values())
    assert len(names) == len(tasks()) >= 20, "two tasks of one name would share results"


def test_a_task_that_moves_keeps_its_key(monkeypatch):
    moved_tasks = types.ModuleType("pipeline.moved_tasks")
    moved_tasks.Renamed = type("Renamed", (), {"name": "index", "version": 1})
    monkeypatch.setitem(sys.modules, "pipeline.moved_tasks", moved_tasks)
    args = {"reader": {"name": "text", "key": "k", "$volatile": {"target": "text"}}, "target": 1}
    moved = {**args, "reader": {**args["reader"], "$volatile": {"target": "elsewhere:Text"}}}
    index = next(path for path, cls in tasks().items() if cls.name == "index")
    assert task_key("pipeline.moved_tasks:Renamed", moved) == task_key(index, args)
    monkeypatch.setattr(load("pipeline.moved_tasks:Renamed"), "version", 2)
    assert task_key("pipeline.moved_tasks:Renamed", args) != task_key(index, args)


def test_a_task_of_somebody_else_never_has_the_key_of_ours(tmp_path, monkeypatch):
    """It inherits name and version of the one it derives from."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_tasks.py").write_text("from stages.dedup.exact import ExactReduce\n\n\n"
                                             "class Mine(ExactReduce):\n    pass\n\n\nclass Other(ExactReduce):\n"
                                             "    pass\n")
    paths = ("stages.dedup.exact:ExactReduce", "their_tasks:Mine", "their_tasks:Other")
    assert len({task_key(path, {"a": 1}) for path in paths}) == 3


CODE = '''
from stages.document import Document, document_id
from stages.read.reader import Reader, locator
from stages.stage import Stage


class Lines(Reader):
    name = "lines"
    suffixes = (".lines",)

    def read(self, local, slice):
        for i, line in enumerate(open(local, encoding="utf-8")):
            yield Document(document_id(slice.source, slice.path, "", i), line, source=slice.source,
                           locator=locator(slice.path, 0, i))


class Short(Stage):
    name = "short"

    def process(self, doc):
        return "short" if len(doc.text) < 3 else None
'''


def run(folder: Path, module: str) -> set[str]:
    """Run a recipe with a reader and a stage of the file `module`.py. Returns the keys in the log."""
    (folder / f"{module}.py").write_text(CODE)
    (folder / "recipe.yaml").write_text(f"""version: 1
code: [{module}.py]
sources: {{s: {{read: '{module}:Lines', path: a.lines}}}}
datasets: {{d: {{from: s, steps: ['{module}:Short']}}}}
""")
    assert run_command(["run", str(folder / "recipe.yaml"), "--store", str(folder / "store"), "--backend", "inline",
                        "--quiet", "--allow-custom-stages"]) == 0
    sys.modules.pop(module)
    return {record.key for record in Log.read(Store(folder / "store")).records()}


def test_a_file_of_the_users_own_may_be_renamed_but_not_changed(tmp_path, monkeypatch):
    (tmp_path / "a.lines").write_text("one\ntwo words\nx\n")
    first = run(tmp_path, "keys_before")
    assert run(tmp_path, "keys_after") == first
    monkeypatch.setitem(globals(), "CODE", CODE.replace("< 3", "< 4"))
    assert run(tmp_path, "keys_changed") > first


def test_readers_of_one_file_that_inherit_a_name_have_keys_of_their_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "two_readers.py").write_text("from stages.read.files import TextFiles\n\n\nclass A(TextFiles):\n"
                                             "    pass\n\n\nclass B(TextFiles):\n    pass\n")
    assert own_source("two_readers:A", ()) != own_source("two_readers:B", ())
    assert own_source("stages.read.files:TextFiles", ()) == []


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=6)
NAMES = st.sampled_from(["chain", "where", "slices", "part", "$volatile", "root", "ä", "\udc80", "$file", "$list"])
ARGS = st.dictionaries(NAMES, st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    NAMES, inner, max_size=3).filter(lambda d: "$list" not in d), max_leaves=8), max_size=5)


@given(ARGS, ARGS, ARGS)
def test_keys_with_shared_arguments_are_those_of_whole_arguments(common, other, args):
    """A task that is ours, and one that is not (its module's source counts)."""
    assume("$list" not in common and "$list" not in other and "$list" not in args)
    for task in ("pipeline.passes.documents:DocumentPass", "tests.pipeline.engine_tasks:Rows"):
        assert SharedArgs(task, common, other).keys(args) == [task_key(task, {**c, **args}) for c in (common, other)]


def test_a_file_as_the_arguments_themselves_hides_its_root():
    task, file = "pipeline.passes.documents:DocumentPass", {"$file": "a", "size": 1}
    for common, args in ((file, {"root": "x"}), ({"root": "x"}, file)):
        assert SharedArgs(task, common).keys(args)[0] == task_key(task, file)
