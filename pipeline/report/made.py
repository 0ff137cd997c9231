"""Makes the section `made` of the report: who made the run, when, where and with which versions, and its recipe."""

from __future__ import annotations

import os
from typing import Any

from pipeline.base.redact import redact, redact_json
from pipeline.cluster.attempts import facts_of
from pipeline.recipe.errors import RecipeError
from pipeline.recipe.marks import dump_yaml, parse_yaml
from pipeline.store.fs import Store
from stages.scrub.pii import scrub_text, scrub_value


def made_section(store: Store, run: str) -> dict[str, Any]:
    """Make the section `made` of the report, from run.json. A value that run.json does not have is None. The date, host
    and author are those of the run's latest attempt."""
    facts = facts_of(store, run)
    return {"at": facts.get("begun"), "host": _masked(facts.get("host")), "author": _masked(facts.get("author")),
            "version": facts.get("version") or None, "python": facts.get("python"),
            "name": _masked(facts.get("recipe")), "store": masked_root(store), "recipe": masked_recipe(store, run)}


def masked_root(store: Store) -> str:
    """Return the folder or URL of a store, with secrets and personal data masked."""
    return scrub_text(redact(store.root if "://" in store.root else os.path.abspath(store.root)))


def _masked(value: str | None) -> str | None:
    return scrub_text(redact(value)) if value else None


def masked_recipe(store: Store, run: str) -> str | None:
    """Return the text of the run's recipe.yaml, with secrets and personal data masked, because its paths may contain
    the names and addresses of users. None when the file is missing or is not valid YAML."""
    try:
        data, _ = parse_yaml(store.read(f"runs/{run}/recipe.yaml").decode(), "recipe.yaml")
    except (FileNotFoundError, UnicodeDecodeError, RecipeError):
        return None
    return dump_yaml(scrub_value(redact_json(data)))
