"""Confines a recipe by somebody else: it may use only the folders and URLs (roots) that the operator allows.

`refusals` checks the plain data of a recipe, before any file that the recipe names is opened or imported. It checks
every path, glob and URL of

* sources, and files that steps and readers name
* the tokenizer and `code:`
* under `train:`, the checkpoints to start from and the benchmark tasks to evaluate.

Symbolic links are resolved first. Links that are found later, when a glob is expanded, are not followed out of the
glob's folder (`pipeline.plan.inputs`), because `follow_symlinks` is refused.
"""

from __future__ import annotations

import glob
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from pipeline.base.addresses import outside
from pipeline.recipe.errors import KeyPath, Problem, nearest
from pipeline.recipe.hub import is_hub_name
from pipeline.recipe.marks import Marks
from stages.catalog import READERS, STAGES, reader_class, stage_class
from stages.stage import role_of

_ENCODED = re.compile(r"%(?:2e|2f|5c|25|00)", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")


def refusals(data: dict[str, Any], marks: Marks, base: str, roots: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for every path or URL in a recipe that leads out of `roots`, the folders and URLs that the recipe
    may use. Readers and steps 'module:Class' whose file `code:` does not list, and every `follow_symlinks`, are
    problems as well. Relative paths start at `base`. Values of wrong types are skipped, because validation reports
    them."""
    code = [value for _, value in _strings(data.get("code"), ("code",))]
    modules = {PurePosixPath(path).stem for path in code}
    for path, value in _named(data, base):
        if (message := refusal(value, base, roots)) is not None:
            yield Problem(marks.at(path), path, message)
    for path, value in _own_classes(data):
        if (module := value.partition(":")[0]) not in modules:
            yield Problem(marks.at(path), path, f"'{module}' is not one of the files under `code:`; name its file "
                                                f"there: {nearest(module, modules)}")
    at: KeyPath
    for name, source in _mapping(data.get("sources")).items():
        if _mapping(source).get("follow_symlinks") not in (None, False):
            at = ("sources", name, "follow_symlinks")
            yield Problem(marks.at(at), at, "a submitted recipe follows no links out of its folders; leave this out")
    at = ("tokenizer", "load")
    load = _mapping(data.get("tokenizer")).get("load")
    if isinstance(load, str):
        hub = is_hub_name(load, base)
        place = f"hf://{load.partition('@')[0]}" if hub else load
        if (message := refusal(place, base, roots)) is not None:
            yield Problem(marks.at(at), at, f"a tokenizer of the Hugging Face hub: {message}" if hub else message)


def refusal(value: str, base: str, roots: Sequence[str]) -> str | None:
    """Return the reason why a path, glob or URL must not be used, with the remedy. Returns None when it is one of
    `roots` or lies below one, and has a plain form (no `..`, `~` or chained address). The host of an http or https URL
    must also not be this machine or a service that hands out credentials (`addresses.outside`)."""
    allowed = f"allowed are: {', '.join(roots)}" if roots else ("the operator allows no place to read from "
                                                                        "(tokenmill serve --allow-root FOLDER)")
    if not value.isprintable():
        return "it holds characters that cannot be printed; rename the file"
    if "::" in value:
        return "chained addresses ('::') are refused; name the file itself"
    value = value.removeprefix("file://")
    if ".." in re.split(r"[/\\]", value):
        return f"'..' is refused; write the path that is meant ({allowed})"
    if "://" in value:
        return _url_refusal(value, roots, allowed)
    if value.startswith("~"):
        return f"'~' is refused; write the whole path ({allowed})"
    path = os.path.abspath(os.path.join(base, value))
    fixed = "/".join(takewhile(lambda part: not glob.has_magic(part), path.split("/")))
    local = [os.path.realpath(root.removeprefix("file://")) for root in roots
             if "://" not in root.removeprefix("file://")]
    for place in (path, fixed or "/"):
        if not any(_below(os.path.realpath(place), root) for root in local):
            return f"it lies outside the allowed places, or a link leads out of them; {allowed}"
    return None


def _url_refusal(url: str, roots: Sequence[str], allowed: str) -> str | None:
    scheme = _SCHEME.match(url)
    if scheme is None or scheme[0] == "file://" or "@" in url.split("/")[2] or "\\" in url or _ENCODED.search(url):
        return f"this form of address is refused; write it plainly, SCHEME://PLACE/PATH ({allowed})"
    if not any("://" in root and _below(url, root) for root in roots):
        return f"it lies outside the allowed places; {allowed}"
    if scheme[0] in ("http://", "https://"):
        try:
            addresses = {info[4][0] for info in socket.getaddrinfo(urlsplit(url).hostname, None)}
        except (OSError, ValueError) as e:
            return f"its host has no address ({e}); check the address"
        if not all(outside(str(address)) for address in addresses):
            return "its host is this machine, or a service of its network that hands out credentials; that is refused"
    return None


def _below(place: str, root: str) -> bool:
    root = root.rstrip("/")
    return place == root or place.startswith(f"{root}/")


# -- values that name files or URLs -----------------------------------------------------------------------------------
def _named(data: dict[str, Any], base: str) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, value) for every value of a recipe that names a file or URL. The tokenizer's file is left out."""
    at: KeyPath
    yield from _strings(data.get("code"), ("code",))
    for name, source in _mapping(data.get("sources")).items():
        source, at = _mapping(source), ("sources", name)
        yield from _strings(source.get("path"), (*at, "path"))
        yield from _strings(source.get("root"), (*at, "root"))
        yield from _settings(source.get("read"), _mapping(source.get("config")), at, base, READERS, reader_class)
    for name, dataset in _mapping(data.get("datasets")).items():
        steps = _mapping(dataset).get("steps")
        for i, step in enumerate(steps if isinstance(steps, list) else ()):
            for stage, config in _mapping(step).items():
                at = ("datasets", name, "steps", i, stage)
                yield from _settings(stage, _mapping(config), at, base, STAGES, stage_class)
                if stage in STAGES:                        # the folder of an index, if it is no dataset
                    yield from ((path, value) for path, value in _strings(_mapping(config).get("against"),
                                                                          (*at, "against"))
                                if value not in _mapping(data.get("datasets")))
    train = _mapping(data.get("train"))
    for section in ("init", "model"):
        yield from _strings(_mapping(train.get(section)).get("from"), ("train", section, "from"))
    at, tasks = ("train", "evaluate", "tasks"), _mapping(_mapping(train.get("evaluate")).get("tasks"))
    yield from _strings(tasks.get("data"), (*at, "data"))
    yield from ((path, value) for path, value in _strings(tasks.get("tasks"), (*at, "tasks"))
                if value.endswith((".yaml", ".yml")))      # any other name is that of a task of Tokenmill


def _settings(name: Any, config: dict[str, Any], at: KeyPath, base: str, catalog: dict[str, str],
              load: Callable[[str], Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, value) for the settings of a step or reader that name files. Those in `catalog` come with Tokenmill,
    and declare which settings name files. The user's own do not, nor does `datatrove`, which passes settings to another
    library. Of their settings, every string counts that looks like a path or names an existing one. Relative paths
    start at `base`, the folder in which the run was started."""
    if isinstance(name, str) and name in catalog and name != "datatrove":
        fields = load(name).Config
        for field, value in config.items():
            if field in fields.model_fields and role_of(fields, field) == "resource":
                yield from _strings(value, (*at, field))
        return
    for path, value in _strings(config, at):
        if value.startswith(("/", "~", ".")) or "://" in value or "::" in value or ".." in value.split("/") or \
                os.path.exists(os.path.join(base, value)):
            yield path, value


def _own_classes(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, value) for the readers and steps of a recipe that are given as 'module:Class'."""
    for name, source in _mapping(data.get("sources")).items():
        read = _mapping(source).get("read")
        if isinstance(read, str) and ":" in read:
            yield ("sources", name, "read"), read
    for name, dataset in _mapping(data.get("datasets")).items():
        steps = _mapping(dataset).get("steps")
        for i, step in enumerate(steps if isinstance(steps, list) else ()):
            for stage in (step,) if isinstance(step, str) else _mapping(step):
                if ":" in str(stage):
                    yield ("datasets", name, "steps", i), str(stage)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _strings(value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, string) for all strings in `value`, also those in lists and mappings. `at` is the key of `value` in
    the recipe."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, (list, dict)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _strings(inner, (*at, key))
