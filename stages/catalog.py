"""Maps the names of steps and readers in recipes to classes. A class is imported when it is first used, so a worker
imports only the classes that its tasks need.

An installed package adds names of steps and readers through entry points, without any other registration. Recipes,
plans, lint and `tokenmill steps` then know these names on every machine that has the package::

    [project.entry-points."tokenmill.stages"]
    my_filter = "my_package.filters:MyFilter"

    [project.entry-points."tokenmill.readers"]
    my_format = "my_package.readers:MyFormat"

A package cannot replace a name that Tokenmill itself defines: the package's entry is ignored. Facts about a class
(cost, settings, suffixes …) are declared in the class, never in this module.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any

from pipeline.base.errors import TokenmillError

#: steps of a dataset
STAGES: dict[str, str] = {
    # extraction: raw bytes → text
    "html": "stages.extract.html.step:Html",
    "pdf": "stages.extract.pdf.step:Pdf",
    "latex": "stages.extract.latex.step:Latex",
    "book": "stages.extract.book:Book",
    # filters
    "url": "stages.filter.url:Url",
    "badwords": "stages.filter.badwords:Badwords",
    "toxicity": "stages.filter.toxicity:Toxicity",
    "rights": "stages.filter.rights:Rights",
    "language": "stages.filter.language:Language",
    "gopher_repetition": "stages.filter.gopher_repetition:GopherRepetition",
    "gopher_quality": "stages.filter.gopher_quality:GopherQuality",
    "c4": "stages.filter.c4:C4",
    "c4_paragraphs": "stages.filter.c4_paragraphs:C4Paragraphs",
    "c4_badwords": "stages.filter.c4_badwords:C4BadWords",
    "fineweb": "stages.filter.fineweb:FineWeb",
    "fineweb2": "stages.filter.fineweb2:FineWeb2",
    "madlad400": "stages.filter.madlad400:Madlad400",
    "dclm_links": "stages.filter.dclm_links:DclmLinks",
    "dclm_quality": "stages.filter.dclm_quality:DclmQuality",
    "dclm_repetition": "stages.filter.dclm_repetition:DclmRepetition",
    "dclm_lines": "stages.filter.dclm_lines:DclmLines",
    "redpajama2": "stages.filter.redpajama2:RedPajama2",
    "refinedweb_lines": "stages.filter.refinedweb_lines:RefinedWebLines",
    "quality": "stages.filter.quality:Quality",
    "encoder": "stages.filter.encoder:Encoder",
    "perplexity": "stages.filter.perplexity:Perplexity",
    "buckets": "stages.filter.buckets:Buckets",
    "ensemble": "stages.filter.ensemble:Ensemble",
    "where": "stages.filter.where:Where",
    "rehydrate": "stages.filter.rehydrate:Rehydrate",
    # scrubbing
    "pii": "stages.scrub.pii:Pii",
    # items of evaluation sets
    "decontaminate": "stages.decontaminate.step:Decontaminate",
    # barriers
    "exact": "stages.dedup.exact:Exact",
    "minhash": "stages.dedup.minhash:MinHash",
    "substring": "stages.dedup.substring:Substring",
    "repeats": "stages.dedup.repeats:RepeatedPassages",
    # any block of datatrove that works document by document
    "datatrove": "stages.adapters.datatrove:Datatrove",
}

#: `read:` of a source
READERS: dict[str, str] = {
    "warc": "stages.read.warc:Warc",
    "html": "stages.read.files:HtmlFiles",
    "pdf": "stages.read.files:PdfFiles",
    "notebook": "stages.read.notebook:Notebook",
    "text": "stages.read.files:TextFiles",
    "code": "stages.read.code:Code",
    "code_table": "stages.read.code_table:CodeTable",
    "jsonl": "stages.read.jsonl:Jsonl",
    "parquet": "stages.read.parquet:Parquet",
    "wiki": "stages.read.wiki:Wiki",
    "latex": "stages.read.latex:LatexPapers",
    "sft": "stages.read.records:Sft",
    "preference": "stages.read.records:Preference",
    "datatrove": "stages.adapters.datatrove:DatatroveReader",
    # token files of other projects, for `shards:`
    "tokens": "stages.read.tokens:Tokens",
    # records of other readers, in the form `tokenmill plan --sample` stores
    "sample": "stages.read.sample:SampleReader",
}


def load(target: str) -> Any:
    """Import and return the object that the string 'module:attribute' names."""
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


#: entry points by which packages add steps and readers
GROUPS = ("tokenmill.stages", "tokenmill.readers")


@cache
def _installed(group: str) -> dict[str, str]:
    """Return {name: 'module:Class'} of the entry points that installed packages add to `group`. Raises NameTaken if two
    packages add different classes under one name."""
    result: dict[str, metadata.EntryPoint] = {}
    for entry in metadata.entry_points(group=group):
        first = result.setdefault(entry.name, entry)
        if (first.module, first.attr) != (entry.module, entry.attr):
            raise NameTaken(f"'{entry.name}' is added by two packages, as {first.module}:{first.attr} and as "
                            f"{entry.module}:{entry.attr}; uninstall one of them")
    return {name: f"{entry.module}:{entry.attr}" for name, entry in result.items()}


def steps() -> dict[str, str]:
    """Return {name: 'module:Class'} of all steps: Tokenmill's own and those of installed packages."""
    return {**_installed(GROUPS[0]), **STAGES}


def readers() -> dict[str, str]:
    """Return {name: 'module:Class'} of all readers: Tokenmill's own and those of installed packages."""
    return {**_installed(GROUPS[1]), **READERS}


def step_target(name: str) -> str:
    """Return the 'module:Class' of a step, given its name in a recipe. A name that is itself of the form 'module:Class'
    (a user's own stage) is returned unchanged. Raises UnknownName if no step of the name is registered."""
    return STAGES.get(name) or _target("step", name, steps)


def reader_target(name: str) -> str:
    """Return the 'module:Class' of a reader, given its name in a recipe. A name that is itself of the form
    'module:Class' (a user's own reader) is returned unchanged. Raises UnknownName if no reader of the name is
    registered."""
    return READERS.get(name) or _target("reader", name, readers)


def _target(kind: str, name: str, registered: Callable[[], dict[str, str]]) -> str:
    if ":" in name:
        return name
    names = registered()
    if name not in names:
        raise UnknownName(kind, name, names)
    return names[name]


class NameTaken(TokenmillError):
    """Raised when two installed packages add different steps, or different readers, under one name."""

    exit_code = 2


class UnknownName(TokenmillError, LookupError):
    """Raised for a name of a step or reader that is not registered. The message suggests the most similar registered
    name, or lists all registered names."""

    exit_code = 2

    def __init__(self, kind: str, name: str, names: dict[str, str]) -> None:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(names))}"
        super().__init__(f"unknown {kind} '{name}': {hint}")


def stage_class(name: str) -> Any:
    """Return the class of a step that a recipe names. `name` is a registered name, or 'package.module:Class' for a
    user's own stage, which recipes may use only with --allow-custom-stages."""
    return load(step_target(name))


def reader_class(name: str) -> Any:
    """Return the class of the reader that a recipe names for a source. `name` is a registered name, or 'module:Class'
    for a user's own reader, which recipes may use only with --allow-custom-stages."""
    return load(reader_target(name))
