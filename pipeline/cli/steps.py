"""`tokenmill steps` and `tokenmill readers`: list the steps and readers that a recipe may name. Descriptions and
settings are taken from their classes."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.base.visible import visible
from pipeline.cli.errors import BadUsage, UserError, reading
from pipeline.cli.options import JsonOpt

NameArg = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show only this one, with all its settings.")]

CheckOpt = Annotated[Path | None, typer.Option("--check", metavar="FILE",
                                               help="Run NAME on these test vectors, JSON Lines.")]


def register(app: typer.Typer) -> None:
    app.command("steps")(steps)
    app.command("readers")(readers)


def steps(name: NameArg = None, vectors: CheckOpt = None, json_lines: JsonOpt = False) -> None:
    """List the steps a dataset can have, or show one with its settings.

    Steps of installed packages are included. Give 'package.module:Class' to show a stage of your own. With --check the
    step is run on test vectors (tests/conformance/README.md), and a line is printed for each result that differs from
    the expected one.

    \b
    Examples:
      tokenmill steps
      tokenmill steps gopher_quality
      tokenmill steps my_filter --check vectors/my_filter.jsonl
    """
    from stages import catalog
    from stages.stage import Stage

    if vectors is not None:
        _check(name, vectors, json_lines)
        return
    _show(name, catalog.steps(), catalog.stage_class, Stage, step_facts, json_lines)


def readers(name: NameArg = None, json_lines: JsonOpt = False) -> None:
    """List the readers a source can name, or show one with its settings.

    \b
    Examples:
      tokenmill readers
      tokenmill readers parquet
    """
    from stages import catalog
    from stages.read.reader import Reader

    _show(name, catalog.readers(), catalog.reader_class, Reader, reader_facts, json_lines)


def _check(name: str | None, path: Path, json_lines: bool) -> None:
    """Run a step on a file of test vectors (documents with expected results), and print each result that differs from
    the expected one. Raises UserError if any result differs."""
    from stages.catalog import stage_class
    from stages.stage import Stage
    from stages.vectors import failures, read_vectors

    if name is None:
        raise BadUsage("--check: which step? tokenmill steps NAME --check FILE")
    try:
        if not issubclass(stage_class(name), Stage):
            raise ValueError("is no step that takes one document at a time")
        with reading(path):
            head, cases = read_vectors(path)
            if head["stage"] not in (name, path.stem):
                raise ValueError(f"the file is for the step '{head['stage']}'")
            problems = failures(name, path)
    except (ValueError, LookupError, ImportError, AttributeError) as e:
        raise BadUsage(f"'{name}' --check {path}: {e}") from None
    for line in problems:
        typer.echo(json.dumps({"failure": line}) if json_lines else visible(line))
    if problems:
        raise UserError(f"{path}: {len(problems)} differences in {len(cases)} cases; fix the step or the vectors")
    sound = f"{path}: {len(cases)} cases, all as they should be"
    typer.echo(json.dumps({"cases": len(cases)}) if json_lines else sound)


def step_facts(cls: Any) -> dict[str, Any]:
    """Return the facts that a step's class declares, as JSON: the kind of the step, its version, signals, costs and
    others."""
    from stages.barrier import Barrier

    kind = ("deduplicates" if issubclass(cls, Barrier) else "extracts" if cls.extracts else "scrubs" if cls.scrubs
            else "filters" if cls.drops else "edits" if cls.edits else "annotates")
    return {"kind": cls.does or kind, "version": cls.version, "cost_ms": cls.cost_ms, "edits": cls.edits,
            "made_for": list(cls.made_for), "signals": list(cls.signals), "exact": cls.exact,
            "libraries": list(cls.libraries), "memory_mb": cls.memory_mb}


def reader_facts(cls: Any) -> dict[str, Any]:
    """Return the facts that a reader's class declares, as JSON: the reader's file suffixes, version, memory and
    others."""
    return {"suffixes": list(cls.suffixes), "version": cls.version, "extractor": cls.extractor, "crawl": cls.crawl,
            "libraries": list(cls.libraries), "memory_mb": cls.memory_mb}


def settings(cls: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of a step or reader as {name: {"help", "role", "default"}}. A setting without a default has
    "required" instead of "default"."""
    from stages.stage import role_of

    out = {}
    for field, info in cls.Config.model_fields.items():
        default = info.get_default(call_default_factory=True)
        out[field] = {"help": info.description or "", "role": role_of(cls.Config, field),
                        **({"required": True} if info.is_required() else {"default": _plain(default)})}
    return out


def _plain(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=lambda v: v.model_dump(mode="json")))
    except (TypeError, AttributeError):
        return str(value)


def _show(name: str | None, targets: Mapping[str, str], find: Any, base: type, facts: Any, json_lines: bool) -> None:
    from pipeline.recipe.errors import nearest

    if name is not None and name not in targets and ":" not in name:
        raise BadUsage(f"unknown {'step' if facts is step_facts else 'reader'} '{name}': {nearest(name, targets)}")
    for each in [name] if name is not None else sorted(targets):
        try:
            cls = find(each)
            if not (isinstance(cls, type) and issubclass(cls, base)):
                raise TypeError(f"is no {base.__name__}")
        except Exception as e:  # a third-party package may raise anything; an extra may not be installed
            problem = f"cannot be loaded: {e}"
            if name is not None:
                raise BadUsage(f"'{name}' {problem}") from None
            line = {"name": each, "problem": problem}
            typer.echo(json.dumps(line) if json_lines else visible(f"{each:<20} {problem}"))
            continue
        document = {"name": each, "from": targets.get(each, each), "about": _about(cls), **facts(cls)}
        if json_lines:
            typer.echo(json.dumps({**document, "settings": settings(cls)}))
        elif name is None:
            kind = document.get("kind") or textwrap.shorten(", ".join(document["suffixes"]), 28, placeholder=" …")
            typer.echo(f"{each:<20} {kind:<28} {textwrap.shorten(document['about'], 90, placeholder=' …')}")
        else:
            _show_one(cls, document)


def _about(cls: Any) -> str:
    """Return the first sentence of a class's docstring, on one line."""
    text = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return visible(text.partition(". ")[0].rstrip("."))


def _show_one(cls: Any, document: dict[str, Any]) -> None:
    typer.echo(visible(inspect.cleandoc(cls.__doc__ or "")))
    typer.echo("")
    for key, value in document.items():
        if key not in ("name", "about") and value not in (None, "", [], False):
            typer.echo(f"{key:<12} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    typer.echo("\nsettings" if cls.Config.model_fields else "\nno settings")
    for field, fact in settings(cls).items():
        default = "required" if fact.get("required") else json.dumps(fact["default"], ensure_ascii=False)
        role = "" if fact["role"] == "signal" else f" ({fact['role']})"
        typer.echo(visible(f"  {field:<26} {default:<12} {fact['help']}{role}"))
