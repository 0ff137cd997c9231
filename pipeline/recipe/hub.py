"""Loads a tokenizer by its name on the Hugging Face hub: `tokenizer: {load: gpt2}`, or `gpt2@REVISION`.

The driver (the process that plans a run) fetches the tokenizer through the cache of `huggingface_hub` on its machine,
and puts a copy into the store for the workers. A name without a revision means the latest revision. The copy of the
recipe that a run keeps names the revision that was used. No request is sent to the hub if the revision is a commit (40
hex digits) that the cache holds, or if HF_HUB_OFFLINE is set. If the hub cannot be reached, the cached copy is used.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipeline.recipe.model import Recipe
from pipeline.store.errors import StoreError
from tokenizer.errors import TokenizerError

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: file names of a tokenizer in a repository, most preferred first
FILES = ("tokenizer.json", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class HubTokenizer:
    """A tokenizer from the Hugging Face hub, after it was fetched to this machine. `path` is its file, and `pinned` its
    name with the revision, NAME@REVISION."""

    path: Path
    pinned: str


def is_hub_name(load: str, base: str) -> bool:
    """Whether `load` is the name of a tokenizer on the Hugging Face hub. It is one if it has the form of a hub name,
    does not end in .json, .model or .tiktoken, and names neither a file nor a folder below the folder `base`."""
    return (_NAME.fullmatch(load) is not None and not load.endswith((".json", ".model", ".tiktoken"))
            and not os.path.exists(os.path.join(base, load)))


def hub_tokenizer(recipe: Recipe) -> HubTokenizer | None:
    """Fetch the tokenizer of a recipe if the recipe loads it from the Hugging Face hub; otherwise return None."""
    load = recipe.tokenizer.load if recipe.tokenizer is not None else None
    return fetch(load) if load is not None and is_hub_name(load, recipe.base) else None


@lru_cache(maxsize=8)
def fetch(load: str) -> HubTokenizer:
    """Fetch the tokenizer named `load` from the Hugging Face hub, or take it from the cache of this machine. If neither
    has it, raises TokenizerError, whose message says what to do. The hub is contacted once, without retries, so that
    the error comes soon where there is no network."""
    try:
        from huggingface_hub import constants
    except ImportError:
        raise TokenizerError(f"tokenizer.load: there is no file '{load}', and a package is needed to fetch a tokenizer "
                             f"of that name from the Hugging Face hub: pip install 'tokenmill[hf]'") from None
    matched = _NAME.fullmatch(load)
    assert matched is not None
    repository, revision = matched.groups()
    offline, fixed = constants.HF_HUB_OFFLINE, _COMMIT.fullmatch(revision or "") is not None
    if (offline or fixed) and (tokenizer := _download(repository, revision, local=True)):
        return tokenizer
    why = "HF_HUB_OFFLINE is set"
    from pipeline.store.remote import connect

    try:
        if not offline:
            connect(f"hf://{repository}").reach()
            if tokenizer := _download(repository, revision, local=False):
                return tokenizer
            raise TokenizerError(f"tokenizer.load: '{load}' of the Hugging Face hub holds none of {', '.join(FILES)}; "
                                 f"name another, or a file")
    except StoreError as e:
        why = str(e)
        if tokenizer := _download(repository, revision, local=True):
            return tokenizer
    raise TokenizerError(f"tokenizer.load: there is no file '{load}', and no tokenizer of that name in this machine's "
                         f"cache of the Hugging Face hub ({why}); name a file, or fetch it where there is a network: "
                         f"hf download {repository} tokenizer.json tokenizer_config.json")


def _download(repository: str, revision: str | None, *, local: bool) -> HubTokenizer | None:
    """Return the tokenizer of a repository on the Hugging Face hub, or None when the repository has no tokenizer file.
    With `local`, the file is only looked up in the cache of this machine, and None means that the cache has none.
    Otherwise the file is downloaded. Raises TokenizerError when the download fails."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()

    def get(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(repository, file, revision=revision, local_files_only=local))
        except EntryNotFoundError:
            return None

    try:
        path = next((path for file in FILES if (path := get(file)) is not None), None)
        if path is not None:
            get("tokenizer_config.json")                 # names the token that ends a text
    except GatedRepoError:
        raise TokenizerError(f"tokenizer.load: '{repository}' is given only to users who have agreed to its terms; "
                             f"agree to them on its page of the hub, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise TokenizerError(f"tokenizer.load: there is no file '{repository}', and no repository of that name on the "
                             f"Hugging Face hub; fix the name (a private one needs HF_TOKEN)") from None
    except Exception as e:                               # for example a missing revision, or an invalid response
        message = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise TokenizerError(f"tokenizer.load: '{repository}' cannot be fetched from the Hugging Face hub: {message}; "
                             f"fix the name or its revision, or name a file") from e
    return None if path is None else HubTokenizer(path, f"{repository}@{path.parent.name}")
