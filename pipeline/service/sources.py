"""Router: the source of a document (the page of a WARC record, the bytes of a file) beside the text made of it. For
operators. The source is shown as text and never rendered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import HTMLResponse

from pipeline.base import confinement
from pipeline.base.process import import_path
from pipeline.cluster.attempts import facts_of
from pipeline.plan.changes import latest_run
from pipeline.plan.inputs import local_root
from pipeline.recipe.confine import refusal
from pipeline.service.access import operator
from pipeline.service.datasets import QueriesOf, Unmasked, allow_unmasked, answer, show_document
from pipeline.service.documents import locate
from pipeline.service.duck import QueryError, Stop
from pipeline.service.html import page
from pipeline.service.problems import Problem
from pipeline.service.stores import StoreOf, check_run, read_file
from pipeline.store.fs import Store
from stages.catalog import READERS
from stages.scrub.pii import scrub_text
from stages.scrub.rows import MARGIN

router = APIRouter(tags=["datasets"], dependencies=[Depends(operator)])

#: bytes of a recipe; seconds that reading a source may take
RECIPE, READ_S = 1 << 20, 15.0
#: keys of a source in a recipe that are no settings of its reader
OURS = ("read", "path", "root", "follow_symlinks")
#: characters that the page shows of both
SHOWN = 200_000


class NoSource(QueryError):
    """The source of the document cannot be shown."""

    status = 409
    title = "The source cannot be shown"


@router.get("/api/v1/stores/{store}/datasets/{dataset}/documents/{id}/source", summary="Show a document's source")
async def show_source(
        request: Request, at: StoreOf, dataset: str, id: str, queries: QueriesOf,
        run: Annotated[str, Query(max_length=200, description="whose recipe names the files (default: latest)")] = "",
        chars: Annotated[int, Query(ge=0, le=1_000_000, description="characters to show")] = 100_000,
        unmasked: Unmasked = False) -> dict[str, Any]:
    """The bytes from which a document's text was made, as text, if they lie in a folder that the server allows
    (`--allow-root`) or in the store. They are read as they are now. `what`: `file`, `line` of a file, `record` of a
    WARC file or archive, or `read`, the text as its reader gave it to the first step."""
    await allow_unmasked(request, at, unmasked, {"dataset": dataset, "id": id[:100], "source": True})
    stop, roots = queries.stop(), request.app.state.settings.allowed_roots

    def call() -> dict[str, Any]:
        row = locate(queries, at, dataset, id, stop)
        source = _source(at, run, row)
        _confine(at, source["path"], roots)
        with queries.turn(stop):
            shown = _read({**source, "chars": chars + MARGIN}, stop)
        text = shown["text"] if unmasked else scrub_text(shown["text"])
        return {"id": row["id"], "source": row["source"], "reader": source["reader"], **shown,
                "text": text[:chars], "cut": len(text) > chars}

    return await answer(request, stop, call)


@router.get("/stores/{store}/datasets/{dataset}/documents/{id}/source", include_in_schema=False)
async def source_page(request: Request, store: str, at: StoreOf, dataset: str, id: str, queries: QueriesOf,
                      run: Annotated[str, Query(max_length=200)] = "") -> HTMLResponse:
    """A document's source beside its text."""
    shown = await show_source(request, at, dataset, id, queries, run, SHOWN, False)
    facts = await show_document(request, at, dataset, shown["id"], queries, SHOWN, False)
    return page(request, "source.html.j2", store=store, dataset=dataset, shown=shown, facts=facts,
                row=facts["document"] or {})


def _source(store: Store, run: str, row: dict[str, Any]) -> dict[str, Any]:
    """The file of a document and how to read it: {path, reader, config, source, locator}, from the recipe of a run."""
    name = run or latest_run(store)
    if name is None:
        raise NoSource("no run has finished in this store", "run", "name the run that has made the document")
    check_run(store, name)
    try:
        recipe = yaml.safe_load(read_file(store, f"runs/{name}/recipe.yaml", RECIPE))
        source = recipe["sources"][row["source"]]
        reader, patterns, locator = source["read"], source["path"], row["locator"]
        locator = {"file": str(locator["file"]), "offset": int(locator["offset"]), "record": int(locator["record"]),
                   "sub": str(locator.get("sub") or "")}
    except (FileNotFoundError, yaml.YAMLError, KeyError, TypeError, ValueError):
        raise NoSource("the run's recipe does not name the source of this document", "run",
                       "name the run that has made it") from None
    if reader not in READERS:
        raise NoSource("its reader is code of your own, which the service does not run", "run",
                       "read the file on the server's machine")
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if any("://" in str(p).removeprefix("file://") for p in patterns):
        raise NoSource("it lies in object storage, from which the service reads no sources", "run",
                       "tokenmill extract shows a copy of the file")
    base = facts_of(store, name).get("base") or os.sep
    top = local_root([str(p) for p in patterns], str(base), source.get("root"))
    return {"path": os.path.join(top, locator["file"]), "reader": reader, "source": row["source"], "locator": locator,
            "config": {k: v for k, v in source.items() if k not in OURS}}


def _confine(store: Store, path: str, roots: tuple[str, ...]) -> None:
    """Raise Problem unless a file lies below an allowed root or in the store, with all links resolved."""
    allowed = (*roots, *((str(store.local),) if store.local is not None else ()))
    if refusal(path, os.sep, allowed) is not None:
        raise Problem(403, "Not allowed", "the source lies outside the folders that this server may show", "id",
                      "whoever runs the server allows its folder by --allow-root")
    if not os.path.isfile(path):
        raise NoSource("its file is not there any more", "id", "put it back to see it")


def _read(request: dict[str, Any], stop: Stop) -> dict[str, Any]:
    """What `read_source` says, in a process of its own."""
    request = {**request, "secrets": confinement.secret_files(os.environ)}
    with subprocess.Popen([sys.executable, "-P", "-m", "pipeline.service.read_source"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          env=confinement.scrubbed(os.environ) | {"PYTHONPATH": import_path()}) as process:
        try:
            data, _ = process.communicate(json.dumps(request).encode(), min(READ_S, stop.left))
        except subprocess.TimeoutExpired:
            process.kill()
            raise NoSource(f"its record was not reached within {READ_S:.0f} s, as the file cannot be entered in its "
                           f"middle", "id", "tokenmill extract shows the file on the server's machine") from None
    stop.check()
    result: dict[str, Any] = json.loads(data) if data.strip() else {"failed": "its reader died"}
    if "failed" in result:
        raise NoSource(result["failed"], "id", "see the file on the server's machine")
    if "what" not in result:
        raise NoSource("the file has no such record any more", "id", "it was changed after the run")
    return result
