"""Measure the structure of the code at some commits, to see what a restructuring has changed.

    python benchmarks/code_metrics.py                        # the commit before the restructuring, and this tree
    python benchmarks/code_metrics.py --at HEAD~20 --at main --mypy

The table has a column for each commit, and one for this tree. Everything is read from syntax trees and from git;
nothing is imported. Fewer words, sleeps or constants are not always better, so these counts need judgement. The row
`commit subjects` counts all commits up to the commit of its column. In the column of this tree, it counts those since
the restructuring began. Logic that is written twice in different ways cannot be counted; the nearest figure is `class
names used more than once`.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("pipeline", "stages", "tokenizer", "trainer")
WORDS = {"found", "said", "made", "told", "mine", "some"}
#: variable names under which engine modules hold an assignment, an event or a message from a child
MESSAGES = {"a", "answer", "assignment", "e", "event", "head", "job", "m", "message", "msg", "reply", "result"}
#: helpers of tests that ask again and again, mostly about other processes and servers
POLLS = {"until", "wait_until", "eventually", "wait_for"}

Trees = dict[str, ast.Module]
N = TypeVar("N", bound=ast.AST)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def start() -> str:
    """The commit before the restructuring: the parent of the commit that added tests/frozen.py."""
    return git("log", "--diff-filter=A", "--format=%h", "--", "tests/frozen.py").split()[-1] + "^"


def parse(root: Path, folders: tuple[str, ...]) -> Trees:
    """Returns {path below `root`: syntax tree} of all Python files in these folders."""
    paths = sorted(p for folder in folders for p in (root / folder).rglob("*.py"))
    return {p.relative_to(root).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in paths}


@cache
def by_type(tree: ast.AST) -> dict[type[ast.AST], list[ast.AST]]:
    result = defaultdict(list)
    for node in ast.walk(tree):
        result[type(node)].append(node)
    return result


def nodes(tree: ast.AST, kind: type[N]) -> list[N]:
    """The nodes of a tree that are exactly of this type."""
    return cast("list[N]", by_type(tree).get(kind, []))


def last_name(node: ast.AST) -> str:
    """The last name of an attribute or name: `c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Yields (owner, name, call) for every call: ("time", "sleep", …) for `time.sleep()`, ("", "until", …) for
    `until()`."""
    for node in nodes(tree, ast.Call):
        if isinstance(node.func, ast.Name):
            yield "", node.func.id, node
        elif isinstance(node.func, ast.Attribute):
            yield last_name(node.func.value), node.func.attr, node


def literals(node: ast.AST) -> list[str]:
    """The strings of a set, list or tuple, or the keys of a dict."""
    items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def registered(trees: Trees) -> set[str]:
    """The names of all steps, readers and optimisers, as the product registers them."""
    names = {path.split("/")[-1][:-3] for path in trees if path.startswith("trainer/optim/")}
    for node in nodes(trees["stages/catalog.py"], ast.AnnAssign):
        if isinstance(node.value, ast.Dict):
            names.update(literals(node.value))
    return names - {"__init__", "build", "config", "groups", "schedule"}


def trainer_settings(trees: Trees) -> set[str]:
    """The field names of the trainer's config classes."""
    return {field.target.id for path, tree in trees.items() if path.startswith("trainer/")
            for node in nodes(tree, ast.ClassDef) if node.name.endswith("Config")
            for field in node.body if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)}


def error_classes(trees: Trees) -> set[str]:
    return {node.name for tree in trees.values() for node in nodes(tree, ast.ClassDef)
            if any(re.search(r"Error|Exception", ast.unparse(base)) for base in node.bases)}


def name_tables(trees: Trees) -> list[str]:
    """The places (file:line) of constants that list names of steps, readers, optimisers, trainer settings or errors,
    outside stages/, trainer/ and tokenizer/, where these are defined. Such a list becomes incomplete when a name is
    added there."""
    names, settings, errors, result = registered(trees), trainer_settings(trees), error_classes(trees), []
    for path, tree in trees.items():
        if path.startswith(("stages/", "trainer/", "tokenizer/")):
            continue
        for place in [*nodes(tree, ast.Assign), *nodes(tree, ast.AnnAssign), *nodes(tree, ast.Return)]:
            for node in ast.walk(place):
                keys = literals(node)
                of_names, of_settings = names.intersection(keys), settings.intersection(keys)
                of_errors = isinstance(node, ast.Tuple) and sum(last_name(e) in errors for e in node.elts)
                if 2 <= len(of_names) >= len(keys) / 2 or 8 <= len(of_settings) >= len(keys) * 0.8 or of_errors >= 5:
                    result.append(f"{path}:{place.lineno}")
                    break
    return result


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def links(trees: Trees) -> dict[str, set[str]]:
    """Returns {module: modules of the product that it imports}. Imports inside functions count, too."""
    known = {module_name(path) for path in trees}

    def nearest(name: str) -> str:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for path, tree in trees.items():
        names: set[str] = set()
        package = path.split("/")[:-1]
        for plain in nodes(tree, ast.Import):
            names.update(alias.name for alias in plain.names)
        for node in nodes(tree, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            names.update(".".join(filter(None, (*base, node.module, alias.name))) for alias in node.names)
        here = module_name(path)
        parents = {here[:m.start()] for m in re.finditer(r"\.", here)}
        graph[here] = {nearest(name) for name in names} - {"", here} - parents
    return graph


def circles(graph: dict[str, set[str]]) -> int:
    """The number of import cycles: groups of modules in which each module imports all others, directly or through
    others."""
    def reach(name: str) -> set[str]:
        seen: set[str] = set()
        todo = [name]
        while todo:
            fresh = graph.get(todo.pop(), set()) - seen
            seen |= fresh
            todo += fresh
        return seen

    reached = {name: reach(name) for name in graph}
    return len({frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph if a in reached[a]})


def mutual_folders(trees: Trees) -> list[str]:
    """The pairs of folders of the first two depths that import each other."""
    folders = {module_name(path): ".".join(path.split("/")[:-1][:2]) for path in trees}
    pairs = {(folders[a], folders[b]) for a, targets in links(trees).items() for b in targets}
    return sorted(f"{a} – {b}" for a, b in pairs if a < b and (b, a) in pairs)


def untyped_tasks(trees: Trees) -> int:
    """The number of tasks whose `run(inputs, cursor, out)` has an argument of type Any."""
    return sum(any(a.annotation and ast.unparse(a.annotation) == "Any" for a in node.args.args)
               for tree in trees.values() for node in nodes(tree, ast.FunctionDef)
               if [a.arg for a in node.args.args] == ["inputs", "cursor", "out"])


def message_subscripts(trees: Trees) -> int:
    """The number of string subscripts of messages in the engine, such as `event["id"]`."""
    return sum(isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
               and last_name(node.value) in MESSAGES
               for path, tree in trees.items() if path.startswith("pipeline/engine/")
               for node in nodes(tree, ast.Subscript))


def spec_serialisations(trees: Trees) -> list[str]:
    """The places where the engine converts a TaskSpec to JSON or back."""
    return [f"{path}:{call.lineno}" for path, tree in trees.items() if path.startswith("pipeline/")
            for owner, name, call in calls(tree)
            if (name == "from_json" and owner == "TaskSpec") or (name == "to_json" and owner.endswith("spec"))
            or (name in ("asdict", "encode", "dumps") and "spec" in map(last_name, call.args))]


def clock_calls(trees: Trees) -> int:
    return sum(owner == "time" for path, tree in trees.items()
               if path.startswith(("pipeline/engine/", "pipeline/store/")) for owner, _, _ in calls(tree))


def patched_constants(tests: Trees) -> int:
    """The number of calls of monkeypatch.setattr that change a module constant (a name in capitals)."""
    constant = re.compile(r"(.*\.)?_?[A-Z][A-Z0-9_]+")
    return sum(name == "setattr" and owner == "monkeypatch"
               and any(isinstance(a, ast.Constant) and constant.fullmatch(str(a.value)) for a in call.args[:2])
               for tree in tests.values() for owner, name, call in calls(tree))


def waits(tests: Trees, names: set[str]) -> int:
    return sum(name in names and owner in ("", "time") for tree in tests.values() for owner, name, _ in calls(tree))


def statements(tree: ast.AST) -> int:
    """The number of statements, without docstrings."""
    docstrings = sum(isinstance(node.value, ast.Constant) for node in nodes(tree, ast.Expr))
    return sum(len(group) for kind, group in by_type(tree).items() if issubclass(kind, ast.stmt)) - docstrings


def word_locals(trees: Trees) -> int:
    """The number of local variables with uninformative names (WORDS), counted once per function and name."""
    functions = [f for tree in trees.values() for f in nodes(tree, ast.FunctionDef)]
    return sum(len(WORDS & {n.id for n in ast.walk(f) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)})
               for f in functions)


def same_class_names(trees: Trees) -> int:
    """The number of public class names that occur in several files."""
    names = Counter(node.name for tree in trees.values() for node in tree.body
                                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    return sum(n > 1 for n in names.values())


def lines(root: Path, trees: Trees) -> int:
    return sum((root / path).read_bytes().count(b"\n") for path in trees)


def mypy_findings(root: Path) -> int:
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", *PRODUCT], cwd=root,
                          capture_output=True, text=True, env={**os.environ, "MYPY_FORCE_COLOR": "0"}, check=False)
    if done.returncode not in (0, 1):
        sys.exit(done.stdout + done.stderr)
    return len(re.findall(r": error: ", done.stdout))


def measure(root: Path, commits: str, mypy: bool) -> dict[str, int | list[str]]:
    """Returns {row of the table: figure, or the places that it counts}. `commits` is the range of commits whose
    subjects are measured, in git's notation; "" for none."""
    trees, tests = parse(root, PRODUCT), parse(root, ("tests",))
    subjects = git("log", "--format=%s", commits).splitlines() if commits else []
    return {
        "tables with facts about steps, readers, settings, errors": name_tables(trees),
        "circles of files": circles(links(trees)),
        "mutual imports of folders": mutual_folders(trees),
        "tasks with Any in their signature": untyped_tasks(trees),
        "string subscripts of messages in the engine": message_subscripts(trees),
        "serialisations of a task's spec": spec_serialisations(trees),
        "calls of time.* in engine and store": clock_calls(trees),
        "module constants monkeypatched by tests": patched_constants(tests),
        "sleeps in tests": waits(tests, {"sleep"}),
        "polls in tests": waits(tests, POLLS),
        **({"mypy findings": mypy_findings(root)} if mypy else {}),
        "class names used more than once": same_class_names(trees),
        "files that cite 'contracts §'": sum(b"contracts \xc2\xa7" in (root / path).read_bytes() for path in trees),
        f"locals called {', '.join(sorted(WORDS))}": word_locals(trees),
        "commit subjects over 72 characters": sum(len(s) > 72 for s in subjects),
        "product: lines": lines(root, trees),
        "product: statements": sum(statements(tree) for tree in trees.values()),
        "tests: lines": lines(root, tests),
    }


def measure_commit(commit: str, mypy: bool) -> dict[str, int | list[str]]:
    archive = subprocess.run(["git", "archive", commit, *PRODUCT, "tests"], cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        return measure(Path(folder), commit, mypy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--at", action="append", metavar="COMMIT", help="measure this commit; default: the start")
    parser.add_argument("--mypy", action="store_true", help="count mypy's findings as well (minutes)")
    parser.add_argument("--places", action="store_true", help="list the places that make up a figure, where known")
    options = parser.parse_args()
    begin = start()
    columns = {c: measure_commit(c, options.mypy) for c in options.at or [begin]}
    columns["now"] = measure(ROOT, f"{begin}..HEAD", options.mypy)
    print(f"{'':62}" + "".join(f"{c[:12]:>14}" for c in columns))
    for rows in zip(*(c.items() for c in columns.values())):
        values = [value for _, value in rows]
        print(f"{rows[-1][0]:62}" + "".join(f"{len(v) if isinstance(v, list) else v:14,}" for v in values))
        if options.places and isinstance(values[-1], list):
            print("".join(f"    {place}\n" for place in values[-1]), end="")


if __name__ == "__main__":
    main()
