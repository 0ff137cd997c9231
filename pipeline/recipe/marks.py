"""Reads a recipe's YAML into plain data, and notes the line and column of every key.

Duplicate keys are errors, and so are tags (`!!python/object` …) except those of plain values, such as `!!str`. Scalars
follow YAML 1.2: `no` is a string (the code of the Norwegian language), and `1e-5` is a number. Aliases and the merge
key `<<` work. The numbers of aliases and merges are limited, and so is the number of values after aliases are expanded.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from pipeline.recipe.errors import KeyPath, Mark, Problem, RecipeError

#: limits for an untrusted file: characters, nodes after alias expansion, levels of nesting
MAX_BYTES, MAX_NODES, MAX_DEPTH = 1 << 20, 100_000, 50
#: most aliases in a file, and most merges (`<<`); merges inside a mapping are counted each time it is merged
MAX_ALIASES = MAX_MERGES = 1000

_SCALARS = ("null", "bool", "int", "float", "str")


class _Loader(yaml.SafeLoader):
    """A YAML SafeLoader that reads unquoted scalars as the YAML 1.2 core schema does."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    aliases, too_many = 0, None               # `too_many`: the place of the first alias beyond the limit

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases == MAX_ALIASES + 1:
                self.too_many = self.peek_event().start_mark
        return super().compose_node(parent, index)


def _resolve(tag: str, pattern: str, first: list[str]) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"^(?:{pattern})$"), first)


_resolve("null", r"~|null|Null|NULL|", ["~", "n", "N", ""])
_resolve("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF"))
_resolve("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789"))
_resolve("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
         list("-+.0123456789"))
_resolve("merge", "<<", ["<"])


class _Dumper(yaml.SafeDumper):
    """A YAML SafeDumper that quotes every string that YAML 1.1 or 1.2 would read as another type."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *_Loader.yaml_implicit_resolvers.get(first, ())]
    for first in {**yaml.SafeDumper.yaml_implicit_resolvers, **_Loader.yaml_implicit_resolvers}}


def dump_yaml(data: Any) -> str:
    """Return the YAML text of plain data. Keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class Marks:
    """The places (file, line, column) of the keys in a recipe. `at` returns the place of a key. For a key without a
    place of its own, it returns the place of the nearest enclosing key that has one."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[KeyPath, Mark] = {}

    def at(self, path: KeyPath) -> Mark:
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Mark(self.file)

    def put(self, path: KeyPath, mark: Mark) -> None:
        """Set the place of `path` to `mark` and forget the places of all keys below it."""
        self.places = {p: m for p, m in self.places.items() if p[: len(path)] != path}
        self.places[path] = mark


def parse_yaml(text: str, file: str) -> tuple[Any, Marks]:
    """Return the data in a YAML text, and the places of its keys. Raises RecipeError for bad syntax, a tag, a duplicate
    key, or excessive size."""
    builder = _MarkBuilder(file)
    if len(text) > MAX_BYTES:
        raise builder.error(None, (), f"{len(text):,} characters; a recipe has at most {MAX_BYTES:,}")
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if loader.too_many is not None:
            raise builder.error(loader.too_many, (), f"more than {MAX_ALIASES:,} aliases; write the values out")
        return (builder.build(root, ()) if root is not None else None), builder.marks
    except yaml.MarkedYAMLError as e:
        problem = " ".join(filter(None, [e.context, e.problem])) + _syntax_remedy(e.problem or "")
        raise builder.error(e.problem_mark or e.context_mark, (), f"not YAML: {problem}") from None
    except yaml.YAMLError as e:
        raise builder.error(None, (), f"not YAML: {e}") from None
    except RecursionError:                              # nested too deeply, or a mapping merged into itself
        raise builder.error(None, (), f"nested deeper than {MAX_DEPTH} levels") from None
    finally:
        if loader is not None:
            loader.dispose()


class _MarkBuilder:
    """Turns the nodes of a parsed YAML text into plain data, and notes the place (line and column) of every key."""

    def __init__(self, file: str) -> None:
        self.marks = Marks(file)
        self.count = self.merges = 0

    def error(self, node_mark: Any, path: KeyPath, message: str) -> RecipeError:
        file = self.marks.file
        mark = Mark(file, node_mark.line + 1, node_mark.column + 1) if node_mark is not None else Mark(file)
        return RecipeError([Problem(mark, path, message)])

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise self.error(node.start_mark, path, f"more than {MAX_NODES:,} values once aliases are expanded")
        if len(path) > MAX_DEPTH:
            raise self.error(node.start_mark, path, f"nested deeper than {MAX_DEPTH} levels")
        self.marks.places.setdefault(path, Mark(self.marks.file, node.start_mark.line + 1, node.start_mark.column + 1))
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, yaml.ScalarNode) and kind in _SCALARS:
            return self._scalar(kind, node, path)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, path)
        raise self.error(node.start_mark, path, f"the tag '{node.tag}' is refused; write plain values without '!' tags")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        places = self.marks.places
        out: dict[str, Any] = {}
        merged: list[tuple[yaml.Node, Any]] = []
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                merged += [(n, key) for n in (value.value if isinstance(value, yaml.SequenceNode) else [value])]
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise self.error(key.start_mark, path, "a key must be a single word")
            name = key.value
            if name in out:
                first = self.marks.at((*path, name))
                raise self.error(key.start_mark, (*path, name), f"the key '{name}' stands here twice (first on line "
                                                                f"{first.line}); remove one")
            places[(*path, name)] = Mark(self.marks.file, key.start_mark.line + 1, key.start_mark.column + 1)
            out[name] = self.build(value, (*path, name))
        for value, key in merged:
            if not isinstance(value, yaml.MappingNode):
                raise self.error(key.start_mark, path, "'<<' takes an alias of a mapping, e.g. '<<: *defaults'")
            self.merges += 1
            if self.merges > MAX_MERGES:
                raise self.error(key.start_mark, path, f"more than {MAX_MERGES:,} merges ('<<'); write the keys out")
            self.marks.places = {}                      # collected apart, since keys of this mapping keep their places
            for name, item in self._mapping(value, path).items():
                out.setdefault(name, item)
            for at, mark in self.marks.places.items():
                places.setdefault(at, mark)
            self.marks.places = places
        return out

    def _scalar(self, kind: str, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text = node.value
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return text.lower() == "true"
            if kind == "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            raise self.error(node.start_mark, path, f"'{text[:80]}' is not a {kind}") from None
        return text


def _syntax_remedy(problem: str) -> str:
    if "mapping values are not allowed" in problem:
        return "; quote a value that contains ': ', and check the indentation"
    if "\\t" in problem:
        return "; indent with spaces, not tabs"
    if "found character '%'" in problem or "found character '@'" in problem or "'`'" in problem:
        return "; quote a value that begins with this character"
    if "expected ',' or" in problem:
        return "; a bracket is not closed, or a comma is missing"
    return ""
