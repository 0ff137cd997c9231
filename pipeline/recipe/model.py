"""The structure of a recipe, as pydantic models. The models of its keys about tokens (`tokenizer:`, `shards:`,
`curriculum:`) are in `pipeline.recipe.token_models`. `pipeline.recipe.check` checks what these models cannot: names,
the settings of steps, and that no dataset is made from itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PrivateAttr, StrictBool

from pipeline.base.files import file_sha256
from pipeline.base.quantities import parse_count, parse_share, percent
from pipeline.recipe.errors import KeyPath, Mark
from pipeline.recipe.marks import Marks, dump_yaml
from pipeline.recipe.token_models import CurriculumSettings, Shards, TokenizerSettings
from pipeline.recipe.values import Bytes, Name, Names, RecipeModel, Settings, Share, Where, empty, listed


def _step(value: Any) -> Any:
    """Turn a step of a recipe into {"name", "config"}. In the recipe a step is a name, or a mapping whose one key is
    the name: `url`, `{language: {keep: [en]}}`, `{pii: }`."""
    if isinstance(value, Step):
        return value
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and len(value) == 1:
        [(name, config)] = value.items()
        if config is None or isinstance(config, dict):
            return {"name": name, "config": config or {}}
        raise ValueError(f"the settings of '{name}' must be a mapping, e.g. {name}: {{key: value}}; got {config!r}")
    if isinstance(value, dict) and len(value) > 1:
        raise ValueError(f"a step has one name, this has {len(value)} ({', '.join(map(str, value))}); indent the "
                         "settings of a step below its name, and begin every step with '- '")
    raise ValueError(f"a step is a name, or a name with settings such as 'language: {{min: 0.65}}'; got {value!r}")


class Source(RecipeModel):
    """A named set of input files, and the reader that turns them into documents. Keys of a source in the recipe that
    are no fields of this class are settings of the reader; they are moved into `config`.

    `path`: file, folder, glob or URL, or a list of them; relative paths start at `Recipe.base`. `root`: the folder to
    which the paths in document identities are relative (the default is described in `pipeline.plan.inputs`).
    `follow_symlinks`: also follow links that lead out of the folders in `path`.
    """

    read: str
    path: Names
    root: str | None = None
    follow_symlinks: StrictBool = False
    config: Settings = {}


class Step(RecipeModel):
    """One entry of `steps:` in a recipe: the name of a stage (the code of the step), and its settings. The stage's own
    class `Config` validates the settings."""

    name: str
    config: Settings = {}


class Dataset(RecipeModel):
    """A dataset of a recipe: the documents of `inputs` (sources or other datasets; the key is `from:`) after they went
    through `steps`.

    `where` selects documents before the first step. `priority` is a list of inputs: of two duplicates, the document of
    the input listed first is kept. Inputs that are not in the list come last, in the order of `from`.
    """

    inputs: Names = Field(alias="from")
    steps: list[Annotated[Step, BeforeValidator(_step)]] = []
    priority: list[str] = []
    where: Where = {}

    @property
    def against(self) -> list[str]:
        """Return the values of `against` of the dataset's deduplications: names of older datasets, and folders of
        indexes, with which the documents of this dataset are compared."""
        entries = [step.config.get("against") for step in self.steps]
        return [name for entry in entries if isinstance(entry, (list, tuple)) for name in entry]


def _files(value: Any) -> int | float:
    """Parse a number of files such as '20', or a share of all files such as '1%'."""
    return parse_share(value) if isinstance(value, str) and value.strip().endswith("%") else parse_count(value, least=0)


class RunSettings(RecipeModel):
    """Settings for how a recipe is run. They do not change which documents are kept, nor their texts.

    `partition`: uncompressed bytes per partition (the input of one task).

    `signals`: which signals (numbers that steps store beside a text) a dropped document gets. With `until-drop`, it
    gets those of the steps up to the one that drops it; with `all`, also those of the later steps of the pass.

    `max_error_rate`: the share of documents that may fail in one pass. If more than this share and more than ten fail,
    the run fails.

    `max_bad_files`: how many input files may be unreadable, whole or in part, before the run fails. It is a number, or
    a share of the input files; with a share, at least ten may be unreadable.
    """

    partition: Bytes = 32_000_000
    signals: Literal["until-drop", "all"] = "until-drop"
    max_error_rate: Share = 0.01
    max_bad_files: Annotated[int | float, BeforeValidator(_files),
                             PlainSerializer(lambda n: n if isinstance(n, int) else percent(n))] = 0.01


class About(RecipeModel):
    """The description of a ready recipe (one that comes with Tokenmill), by which a corpus made with it can be cited.
    It has a `name`, a `version`, a one-line `title`, and the papers and code that the recipe follows (`after`). The
    version is raised whenever a change to the recipe changes the documents it makes."""

    name: Name
    version: Annotated[int, Field(ge=1)]
    title: str
    after: Names


class Recipe(RecipeModel):
    """A whole recipe file. `input` names the source whose path `--input` gives. `code` lists the Python files of the
    user's own stages. `wants` lists values that must be given with `--set`: {key: what the value is and how to get it}.

    `pipeline.recipe.load_recipe` returns a recipe in which the settings of readers and steps are completed by their
    defaults. It also sets `name`, `base` (the folder at which relative paths start) and `warnings`.
    """

    version: Literal[1]
    about: About | None = None
    input: str | None = None
    wants: dict[str, str] | None = None
    code: Annotated[list[str], BeforeValidator(listed)] = []
    sources: Annotated[dict[Name, Source], Field(min_length=1)]
    datasets: Annotated[dict[Name, Dataset], Field(min_length=1)]
    tokenizer: TokenizerSettings | None = None
    shards: Annotated[dict[Name, Shards], BeforeValidator(empty)] = {}
    curriculum: CurriculumSettings | None = None
    train: Settings = {}
    run: Annotated[RunSettings, BeforeValidator(empty)] = RunSettings()

    _name: str = PrivateAttr("recipe")
    _base: str = PrivateAttr(".")
    _warnings: list[str] = PrivateAttr(default_factory=list)
    _marks: Marks | None = PrivateAttr(None)
    _kept_at: str = PrivateAttr("")
    _pinned: str = PrivateAttr("")
    _text: str | None = PrivateAttr(None)

    @property
    def text(self) -> str | None:
        """The text of the recipe, with comments, as its author wrote it. None if settings or inputs were overridden,
        because the text then differs from what is run."""
        return self._text

    @property
    def name(self) -> str:
        return self._name

    @property
    def base(self) -> str:
        return self._base

    @property
    def warnings(self) -> list[str]:
        return self._warnings

    def came_from(self, name: str, base: str) -> None:
        """Set the name and folder of the original recipe file. This is for a recipe that was read from the recipe.yaml
        of a run. With this name and folder, it has the same digest as the original recipe."""
        self._name, self._base = name, base

    def keep_code_at(self, folder: str) -> None:
        """Set the folder of the store that holds copies of the user's own Python files (`code`)."""
        self._kept_at = folder

    @property
    def kept_at(self) -> str:
        """Return the folder of the store that holds copies of the user's own Python files, as set by `keep_code_at`."""
        return self._kept_at

    def pin_tokenizer(self, name: str) -> None:
        """Set the name with revision (NAME@REVISION) of a tokenizer that is loaded from the Hugging Face hub. The
        recipe.yaml of the run then names this revision."""
        self._pinned = name

    def code_args(self) -> list[dict[str, str]]:
        """Describe the user's own Python files (`code`) for the arguments of tasks, as a list of {"path", "sha256",
        "kept"}. "path" is on this machine, and "kept" is the path of the copy in the store. Workers pass the list to
        `pipeline.recipe.code.import_planned`."""
        return [{"path": path, "sha256": file_sha256(path), "kept": f"{self._kept_at}/{os.path.basename(path)}"}
                for path in self.code]

    def mark(self, path: KeyPath) -> Mark:
        """Return the place of a key in the recipe file (file, line and column)."""
        return self._marks.at(path) if self._marks is not None else Mark(self._name)

    def dataset_order(self) -> list[str]:
        """Return the names of the datasets so that each comes after the datasets that it is made from or compared with.
        Where this leaves a choice, the order of the recipe file decides."""
        done: list[str] = []

        def visit(name: str) -> None:
            if name in self.datasets and name not in done:
                for upstream in (*self.datasets[name].inputs, *self.datasets[name].against):
                    visit(upstream)
                done.append(name)

        for name in self.datasets:
            visit(name)
        return done

    def sources_of(self, dataset: str) -> list[str]:
        """Return the names of the sources whose documents can reach `dataset`, in the order of the recipe file."""
        sources: set[str] = set()

        def visit(name: str, allowed: set[str]) -> None:
            if name in self.sources:
                sources.update({name} & allowed)
                return
            picked = self.datasets[name].where.get("source")
            for upstream in self.datasets[name].inputs:
                visit(upstream, allowed & set(picked) if picked else allowed)

        visit(dataset, set(self.sources))
        return [name for name in self.sources if name in sources]

    def split_of(self, stream: str) -> str | None:
        """Return the name of the entry of `shards:` that is split by labels (`by`) into streams, of which `stream` is
        one. Returns None if there is no such entry."""
        return next((name for name, shards in self.shards.items() if shards.by and stream.startswith(f"{name}.")), None)

    def plain(self) -> dict[str, Any]:
        """Return the recipe as plain values under the keys of the recipe file. Defaults are filled in, and values of
        None are left out. The settings of a reader stand under `config`, and a step is {"name", "config"}.

        Some paths are absolute: those of resource files, of folders in `against`, and of `--input`. Those of `code` are
        absolute if the recipe may run its own code. All other paths are as the user wrote them.
        """
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def canonical(self) -> dict[str, Any]:
        """Return the recipe as plain values that do not depend on where the inputs are, nor on the folder that holds
        the recipe. The paths of sources are left out. From other paths, the folder `base` is removed; of the files in
        `code`, only the names stay. Absolute paths outside of `base` remain."""
        doc = self.plain()
        for source in doc["sources"].values():
            source.pop("path")
            source.pop("root", None)
            source.pop("follow_symlinks")
        doc["code"] = [os.path.basename(path) for path in doc["code"]]
        return _map_strings(doc, lambda text: text.removeprefix(self.base.rstrip("/") + "/"))

    def digest(self) -> str:
        """Return a hash of the recipe in the form of `canonical`, as 32 hex characters."""
        blob = json.dumps(self.canonical(), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.blake2b(blob.encode(), digest_size=16).hexdigest()

    def canonical_yaml(self) -> str:
        """Return the recipe as YAML text that can be run from any folder. A run keeps this text as its recipe.yaml."""
        doc = self.plain()
        for source in doc["sources"].values():
            source.update(source.pop("config"))
            source["path"] = [p if "://" in p else os.path.join(self.base, p) for p in source["path"]]
            if "root" in source and "://" not in source["root"]:
                source["root"] = os.path.join(self.base, source["root"])
        if "load" in doc.get("tokenizer", {}):
            doc["tokenizer"]["load"] = self._pinned or os.path.join(self.base, doc["tokenizer"]["load"])
        doc["code"] = [os.path.join(self.base, path) for path in doc["code"]]
        for dataset in doc["datasets"].values():
            dataset["steps"] = [{s["name"]: s["config"]} for s in dataset["steps"]]
        return dump_yaml(_map_strings(doc, lambda text: _without_parents(text, self.base)))


def _without_parents(text: str, base: str) -> str:
    """Resolve each `..` at the beginning of a path that was joined to the folder `base`, because the service refuses
    paths that contain `..`. Any other text is returned as it is."""
    path = text.removeprefix(f"{base.rstrip('/')}/")
    if path == text or path.partition("/")[0] != "..":
        return text
    while path.partition("/")[0] == "..":
        base, path = os.path.dirname(os.path.realpath(base)), path[3:].lstrip("/")
    return os.path.join(base, path)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return plain data in which `change` has replaced every string except the keys of dicts."""
    if isinstance(value, dict):
        return {k: _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_strings(v, change) for v in value]
    return change(value) if isinstance(value, str) else value
