"""Writes report.md: a dataset card for the corpus of a run, with the front matter that the Hugging Face hub reads.

Every statement follows from report.json. A fact that report.json does not have is left out of the front matter, and the
text says that it is not known. The card does not contain the text of any document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pipeline.base.humanize import count, percent, plural, size
from pipeline.base.visible import visible, visible_json
from pipeline.recipe.marks import dump_yaml
from pipeline.report import card_sections as sections
from pipeline.report.html import headline
from pipeline.report.markdown import code, plain
from pipeline.report.recipe_words import hub_datasets, recipe_of
from pipeline.report.totals import distinct, shared

#: a language is named in the front matter if it has at least this share of the documents
LANGUAGE_SHARE = 0.01
#: most characters of the title
LONGEST_NAME = 100
_CODE = re.compile(r"([a-z]{2,3})(?:[_-][A-Za-z0-9]{2,8})*")
#: the hub's size categories, each with its bound: a corpus of the category has fewer documents than the bound
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
          (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B"),
          (10**12, "100B<n<1T"))


def render_card(document: dict[str, Any]) -> str:
    """Return the dataset card as Markdown. `document` is the content of report.json
    (`pipeline.report.collect.collect`)."""
    document = visible_json(json.loads(json.dumps(document, sort_keys=True)))
    recipe = recipe_of(document)
    lines = ["---", dump_yaml(front_matter(document, recipe)).rstrip("\n"), "---", "",
             f"# {plain(title(document))}", "", *summary(document),
             *sections.sources(document, recipe), *sections.steps(document, recipe), *sections.drops(document),
             *sections.languages(document), *sections.duplicates(document), *sections.personal_data(document, recipe),
             *sections.licences(document), *sections.contamination(document), *sections.tokens(document),
             *sections.reproduce(document, recipe), *sections.limitations(document, recipe)]
    return "\n".join(lines).rstrip("\n") + "\n"


def title(document: Mapping[str, Any]) -> str:
    """Return the title of the dataset card. It is the title of the ready recipe (a recipe that Tokenmill ships) that
    the run follows. Without such a title, it is the name of the recipe's file, or else the name of the run."""
    about = document["about"] or {}
    name = about.get("title") or document["made"]["name"] or document["run"]
    return " ".join(visible(name).split())[:LONGEST_NAME] or "corpus"


def front_matter(document: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the front matter of the dataset card: those fields of `huggingface_hub.DatasetCardData` that are known.
    The files of each final dataset (one from which no other dataset is made) are listed as a config, which the hub's
    viewer shows. A licence is given only if every document states a known licence."""
    final = document["names"]["final"]
    docs = sum(document["datasets"][name]["docs"] for name in final)
    matter: dict[str, Any] = {"pretty_name": title(document), "size_categories": [size_category(distinct(document))]}
    stated = sections.licence_counts(document)
    if docs and sum(stated.values()) == docs and "other" not in stated:
        matter["license"] = sorted(stated)
    if codes := language_codes(sections.language_counts(document)):
        matter["language"] = codes
    if document["tokens"]:
        matter["task_categories"] = ["text-generation"]
    if hub := list(hub_datasets(recipe)):
        matter["source_datasets"] = hub
    if docs:
        matter["configs"] = [{"config_name": name, "data_files": f"datasets/{name}/part-*.parquet"} for name in final
                             if document["datasets"][name]["docs"]]
    return matter


def size_category(docs: int) -> str:
    """Return the Hugging Face hub's size category, such as `10K<n<100K`, for a number of documents."""
    return next((name for bound, name in _SIZES if docs < bound), "n>1T")


def language_codes(counts: Mapping[str, int]) -> list[str]:
    """Return the ISO 639 codes of the languages that have at least the share LANGUAGE_SHARE of the documents, the most
    frequent first. The script in a code such as `eng_Latn` is left out, because the hub knows only languages."""
    total = sum(counts.values())
    codes: dict[str, int] = {}
    for language, docs in counts.items():
        if match := _CODE.fullmatch(language):
            codes[match[1]] = codes.get(match[1], 0) + docs
    return [name for name, docs in sorted(codes.items(), key=lambda item: (-item[1], item[0]))
            if docs >= LANGUAGE_SHARE * total]


def summary(document: Mapping[str, Any]) -> list[str]:
    """Return a description of the corpus in a few sentences, as lines of Markdown."""
    head, final, about = headline(dict(document)), document["names"]["final"], document["about"]
    origin = document["made"]
    sources = plural(len(document["names"]["sources"]), "source")
    several = shared(document)
    share = f" ({percent(head['kept'] / head['read'])} of those read)" if head["read"] and not several else ""
    lines = [f"{plural(head['kept'], 'document')} with {size(head['bytes'])} of text, made by Tokenmill from "
             f"{plural(head['read'], 'document')} of {sources}{share}. "
             f"{'Dataset' if len(final) == 1 else 'Datasets'}: {sections.listed(final)}."
             + (f" {sections.IN_SEVERAL}" if several else "")]
    if head["tokens"]:
        lines.append(f"{count(head['tokens'])} training tokens in "
                     f"{plural(len(document['tokens']), 'stream')}.")
    if about:
        changed = about["changed"]
        how = ("unchanged" if changed == [] else f"changed at {sections.listed(changed)}" if changed
               else "as the recipe itself says")
        lines.append(f"It follows the recipe {plain(about['name'])}, version {about['version']} ({how}), after "
                     f"{sections.listed(about['after'])}.")
    if origin["at"] or origin["author"]:
        when = f" on {plain(origin['at'][:10])}" if origin["at"] else ""
        lines.append(f"Made{when}{' by ' + plain(origin['author']) if origin['author'] else ''}.")
    lines.append(f"Run {code(document['run'])}. Every figure below is in `report.json` of the run.")
    return [" ".join(lines), ""]
