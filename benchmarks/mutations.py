"""Chooses small mistakes (mutants) to plant in the product, and finds their places again in a tree that has changed
since.

Only lines inside functions are mutated. All other lines are executed by imports, so it is unknown which test needs
them. Messages, logging and kernels that numba compiles are left out.
"""

from __future__ import annotations

import ast
import copy
import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

PRODUCT = ("pipeline", "stages", "tokenizer", "trainer")
QUIET = {"debug", "info", "warning", "warn", "error", "exception", "log", "print", "echo", "cast", "isinstance"}
COMPARISONS: dict[type, type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}

@dataclass
class Mutant:
    file: str
    function: str
    old: str                    # the lines of the mutated expression, without indentation
    new: str
    kind: str
    nth: int = 0                # which of several equal places in the function
    status: str = ""            # killed, survived, timeout, uncovered, too slow, gone
    by: str = ""                # the test that failed; for `gone`, the line that is most alike
    tests: int = 0              # how many tests execute the line


class Function:
    """A function of the product, with the source of its file."""

    def __init__(self, file: str, source: str, name: str, node: Any) -> None:
        self.file, self.source, self.name, self.node = file, source, name, node

    @cached_property
    def lines(self) -> list[str]:
        return self.source.split("\n")

    def place(self, mutant: Mutant) -> int:
        """The index of the line of the file at which the mutant is planted; -1 if the function does not contain the
        lines that the mutant replaces."""
        old = mutant.old.split("\n")
        places = [at for at in range(self.node.lineno - 1, self.node.end_lineno - len(old) + 1)
                  if [line.strip() for line in self.lines[at:at + len(old)]] == old]
        return places[mutant.nth] if mutant.nth < len(places) else -1

    def mutated(self, mutant: Mutant, at: int) -> str:
        indent = self.lines[at][:-len(self.lines[at].lstrip())]
        return "\n".join([*self.lines[:at], indent + mutant.new, *self.lines[at + 1 + mutant.old.count("\n"):]])

    def mutant(self, kind: str, node: Any, text: str) -> Mutant | None:
        """The mutant that has `text` in place of `node`. Returns None if the result is not valid Python, or the same
        program as before. Also returns None if the place of `node` cannot be found again by its text."""
        start, end = node.lineno - 1, node.end_lineno
        before = self.lines[start].encode()[:node.col_offset].decode()
        after = self.lines[end - 1].encode()[node.end_col_offset:].decode()
        mutant = Mutant(self.file, self.name, "\n".join(line.strip() for line in self.lines[start:end]),
                        (before + text + after).strip(), kind)
        while self.place(mutant) not in (start, -1):
            mutant.nth += 1
        try:
            tree = ast.parse(self.mutated(mutant, start))
        except SyntaxError:
            return None
        return mutant if self.place(mutant) == start and ast.dump(tree) != ast.dump(ast.parse(self.source)) else None


@cache
def functions(tree: Path) -> list[Function]:
    """All functions of the product that may be mutated. Left out are `__repr__`, `__str__` and the functions that numba
    compiles."""
    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from inside(child, prefix)
                continue
            if not isinstance(child, ast.ClassDef) and child.name not in ("__repr__", "__str__") \
                    and not any("jit" in ast.unparse(decorator) for decorator in child.decorator_list):
                yield prefix + child.name, child
            yield from inside(child, f"{prefix}{child.name}.")

    sources = {path.relative_to(tree).as_posix(): path.read_text(encoding="utf-8")
               for folder in PRODUCT for path in sorted((tree / folder).rglob("*.py"))}
    return [Function(file, source, name, node)
            for file, source in sources.items() for name, node in inside(ast.parse(source), "")]


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements of a function that may be mutated. Left out are its docstring, imports, assertions, and the
    functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)) \
                and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if isinstance(child, ast.stmt) and not isinstance(child, (ast.Assert, ast.Import, ast.ImportFrom)) \
                    and not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                yield child
            yield from statements(child)


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the expressions inside one statement that can change what the program does. Messages, defaults of
    arguments and annotations are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case, ast.JoinedStr, ast.arguments)) \
                or (isinstance(child, ast.Call) and name_of(child.func) in QUIET) \
                or (isinstance(node, ast.AnnAssign) and child is node.annotation):
            continue
        yield child
        yield from expressions(child)


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def mutations(statement: ast.stmt) -> Iterator[tuple[str, ast.AST, str]]:
    """Yields (kind of mistake, node to replace, source that replaces it) for each mistake that can be made in a
    statement."""
    match statement:
        case ast.Expr(value=ast.Call(func=function)) if name_of(function) in QUIET:
            return
        case (ast.Continue() | ast.Break() | ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call())
              | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])):
            yield "statement dropped", statement, "pass"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "None returned", statement, "return None"
    if not isinstance(statement, ast.Raise):
        for node in [statement, *expressions(statement)]:
            yield from replacements(node)


def replacements(node: Any) -> Iterator[tuple[str, ast.AST, str]]:
    def changed(**fields: Any) -> str:
        other = copy.copy(node)
        vars(other).update(fields)
        return ast.unparse(other)

    for test in [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else getattr(node, "ifs", []):
        yield "condition negated", test, f"not ({ast.unparse(test)})"
    match node:
        case ast.Compare(ops=[op]):
            yield "comparison", node, changed(ops=[COMPARISONS[type(op)]()])
        case ast.BoolOp(op=op):
            yield "and/or", node, f"({changed(op=ast.Or() if isinstance(op, ast.And) else ast.And())})"
        case ast.UnaryOp(op=ast.Not()):
            yield "not removed", node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool() as value):
            yield "constant", node, str(not value)
        case ast.Constant(value=int() as value):
            yield "constant", node, str(value + 1)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.FloorDiv() as op) \
                if "'" not in ast.unparse(node):                                              # no texts put together
            yield "arithmetic", node, f"({changed(op=ast.Sub() if isinstance(op, ast.Add) else ast.Add())})"
        case ast.Call(func=ast.Name(id=name)) if name in OPPOSITES:
            yield "opposite", node, changed(func=ast.Name(OPPOSITES[name]))
        case ast.Call(args=[ast.Name() | ast.Attribute() as first, ast.Name() | ast.Attribute() as second, *rest]):
            yield "arguments swapped", node, changed(args=[second, first, *rest])


def plant(tree: Path, count: int, seed: int) -> list[Mutant]:
    """Chooses `count` mutants that are spread evenly over the product. All statements, file by file, are divided into
    `count` stretches of equal length, and one mutant is chosen at random in each stretch."""
    chance, chosen = random.Random(seed), []
    places = [(function, statement) for function in functions(tree) for statement in statements(function.node)]
    for n in range(count):
        stretch = places[n * len(places) // count:(n + 1) * len(places) // count]
        for function, statement in chance.sample(stretch, len(stretch)):
            options = list(mutations(statement))
            if options and (mutant := function.mutant(*chance.choice(options))):
                chosen.append(mutant)
                break
    return chosen


def locate(mutant: Mutant, tree: Path) -> tuple[Function, int] | None:
    """Finds where a mutant goes in a tree. Its text is searched for in the function of the same file and name, then in
    all functions of the same name, then in all functions. If it is in exactly one place, the mutant's file and function
    are changed to this place. Otherwise the mutant gets the status `gone`, and the result is None."""
    everywhere, last = functions(tree), mutant.function.rpartition(".")[2]
    for among in ([f for f in everywhere if (f.file, f.name) == (mutant.file, mutant.function)],
                  [f for f in everywhere if f.name.rpartition(".")[2] == last], everywhere):
        places = {(f.file, at): f for f in among if (at := f.place(mutant)) >= 0}  # of nested ones the inner
        if len(places) == 1:
            [((_, at), function)] = places.items()
            mutant.file, mutant.function = function.file, function.name
            return function, at
    near = [line.strip() for function in everywhere if function.file == mutant.file for line in function.lines]
    mutant.status, mutant.by = "gone", "".join(difflib.get_close_matches(mutant.old.split("\n")[0], near, 1))
    return None
