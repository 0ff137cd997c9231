"""Router: shows operators the source of a document (for example the page in a WARC record, or the bytes of a file)
beside the text made from this source. The source is shown as text and never rendered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
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
from pipeline.service.problems import HttpProblem
from pipeline.service.read_source import LONGEST
from pipeline.service.settings import OPERATOR_TOKEN, VIEWER_TOKEN
from pipeline.service.stores import StoreOf, check_run, read_file
from pipeline.store.fs import Store
from pipeline.store.web import DIRECT
from stages.catalog import READERS
from stages.scrub.pii import scrub_text
from stages.scrub.rows import MARGIN

router = APIRouter(tags=["datasets"], dependencies=[Depends(operator)])

#: bytes of a recipe, and bytes fetched of a source; seconds that fetching, or reading, a source may take
RECIPE, FETCHED, READ_S = 1 << 20, 256 << 20, 15.0
#: keys of a source in a recipe that are no settings of its reader
OURS = ("read", "path", "root", "follow_symlinks")
#: beginnings of the URLs of object storage from which sources are read
BUCKETS = ("s3://", "s3a://", "gs://", "gcs://")
#: characters that the page shows of a source and of a document's text
SHOWN = 200_000


class NoSource(QueryError):
    """Raised when the source of a document cannot be shown."""

    status = 409
    title = "The source cannot be shown"


@router.get("/api/v1/stores/{store}/datasets/{dataset}/documents/{id}/source", summary="Show a document's source")
async def show_source(
        request: Request, at: StoreOf, dataset: str, id: str, queries: QueriesOf,
        run: Annotated[str, Query(max_length=200, description="whose recipe names the files (default: latest)")] = "",
        chars: Annotated[int, Query(ge=0, le=1_000_000, description="characters to show")] = 100_000,
        unmasked: Unmasked = False) -> dict[str, Any]:
    """Return the bytes from which a document's text was made, decoded as text. They must lie in the store, or below a
    folder or bucket that the server allows (`--allow-root`). The source file is read as it is at present, and may have
    changed since the run. `what` says what is returned:

    - `file`: a whole file
    - `line`: a line of a file
    - `record`: a record of a WARC file or archive
    - `read`: the text that the reader passed to the first step

    `bytes` is its size, or null for a line of 4 MiB or more, of which only the beginning is read.
    """
    await allow_unmasked(request, at, unmasked, {"dataset": dataset, "id": id[:100], "source": True})
    stop, roots = queries.stop(), request.app.state.settings.allowed_roots

    def call() -> dict[str, Any]:
        row = locate(queries, at, dataset, id, stop)
        source = _source(at, run, row)
        allowed = (*roots, at.root)
        _confine(source, allowed)
        with queries.turn(stop), tempfile.TemporaryDirectory(prefix="tokenmill-source-") as folder:
            if "path" not in source:
                most = min(FETCHED, queries.limits.fetched_bytes)
                source = _fetched({**source, "roots": allowed, "most": most}, folder, stop)
            shown = _read({**source, "chars": chars + MARGIN}, stop)
        text = shown["text"] if unmasked else scrub_text(shown["text"])
        return {"id": row["id"], "source": row["source"], "reader": source["reader"], **shown,
                "text": text[:chars], "cut": len(text) > chars}

    return await answer(request, stop, call)


@router.get("/stores/{store}/datasets/{dataset}/documents/{id}/source", include_in_schema=False)
async def source_page(request: Request, store: str, at: StoreOf, dataset: str, id: str, queries: QueriesOf,
                      run: Annotated[str, Query(max_length=200)] = "") -> HTMLResponse:
    """Show a document's source beside its text."""
    shown = await show_source(request, at, dataset, id, queries, run, SHOWN, False)
    facts = await show_document(request, at, dataset, shown["id"], queries, SHOWN, False)
    return page(request, "source.html.j2", store=store, dataset=dataset, shown=shown, facts=facts,
                row=facts["document"] or {}, longest=LONGEST)


def _source(store: Store, run: str, row: dict[str, Any]) -> dict[str, Any]:
    """Find out from the recipe of a run in which file a document was and how to read it. Returns {path, reader, config,
    source, locator}. For a source in object storage, `patterns` and `root` from the recipe take the place of `path`."""
    name = run or latest_run(store)
    if name is None:
        raise NoSource("no run has finished in this store", "run", "name the run that has made the document")
    check_run(store, name)
    try:
        recipe = yaml.safe_load(read_file(store, f"runs/{name}/recipe.yaml", RECIPE))
        source = recipe["sources"][row["source"]]
        reader, patterns, locator = source["read"], source["path"], row["locator"]
        patterns = [str(p) for p in ([patterns] if isinstance(patterns, str) else patterns)]
        locator = {"file": str(locator["file"]), "offset": int(locator["offset"]), "record": int(locator["record"]),
                   "sub": str(locator.get("sub") or "")}
    except (FileNotFoundError, yaml.YAMLError, KeyError, TypeError, ValueError):
        raise NoSource("the run's recipe does not name the source of this document", "run",
                       "name the run that has made it") from None
    if reader not in READERS:
        raise NoSource("its reader is code of your own, which the service does not run", "run",
                       "read the file on the server's machine")
    facts = {"reader": reader, "source": row["source"], "locator": locator,
             "config": {k: v for k, v in source.items() if k not in OURS}}
    remote = ["://" in p.removeprefix("file://") for p in patterns]
    if not any(remote):
        base = facts_of(store, name).get("base") or os.sep
        top = local_root(patterns, str(base), source.get("root"))
        return {**facts, "path": os.path.join(top, locator["file"])}
    root = source.get("root")
    if not all(p.startswith(BUCKETS) for p in (*patterns, *([str(root)] if root else []))):
        raise NoSource("it lies on the web or on the Hugging Face hub, from which the service reads no sources", "run",
                       "tokenmill extract shows a copy of the file")
    return {**facts, "patterns": patterns, "root": root}


def _confine(source: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """Raise HttpProblem unless the file of a source lies below one of the `allowed` folders or URLs, with all links
    resolved. For a source in object storage, all addresses in the recipe must lie there. The URL of the object itself
    is not known yet; it is checked when the object is fetched. Raises NoSource when a local file does not exist."""
    remote = "path" not in source
    places = [*source["patterns"], *filter(None, [source["root"]])] if remote else [source["path"]]
    if any(refusal(str(place), os.sep, allowed) is not None for place in places):
        raise _not_allowed()
    if not remote and not os.path.isfile(source["path"]):
        raise NoSource("its file is not there any more", "id", "put it back to see it")


def _not_allowed() -> HttpProblem:
    return HttpProblem(403, "Not allowed", "the source lies outside the places that this server may show", "id",
                       "whoever runs the server allows its folder or bucket by --allow-root")


def _fetched(source: dict[str, Any], folder: str, stop: Stop) -> dict[str, Any]:
    """Fetch a document's source file, or the part of it that is needed, from object storage into a local file in
    `folder`. Returns the description of the source with the `path` of this local file added. Raises HttpProblem unless
    the object lies below one of the allowed URLs."""
    path = os.path.join(folder, "source")
    environment = {k: v for k, v in os.environ.items() if k not in (OPERATOR_TOKEN, VIEWER_TOKEN)} | {DIRECT: "1"}
    result = _run_module("fetch_source", {**source, "target": path}, environment, stop,
                  "it was not fetched from object storage")
    if "refused" in result:
        raise _not_allowed()
    return {**source, "path": path}


def _read(request: dict[str, Any], stop: Stop) -> dict[str, Any]:
    """Run `pipeline.service.read_source` in a separate process on the description of a document's source, and return
    its answer. Raises NoSource when the file no longer has such a record, or when reading fails or takes too long."""
    result = _run_module("read_source", {**request, "secrets": confinement.secret_files(os.environ)},
                  confinement.scrubbed(os.environ), stop,
                  "its record was not reached, as the file cannot be entered in its middle,")
    if "what" not in result:
        raise NoSource("the file has no such record any more", "id", "it was changed after the run")
    return result


def _run_module(module: str, request: dict[str, Any], environment: Mapping[str, str], stop: Stop,
                unfinished: str) -> dict[str, Any]:
    """Run a module of the service in a separate process, send it `request`, and return its answer. Raises NoSource when
    the module fails or takes too long. `unfinished` completes the message about a timeout: it says what was not done.
    """
    seconds = min(READ_S, stop.left)
    with subprocess.Popen([sys.executable, "-P", "-m", f"pipeline.service.{module}"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          env={**environment, "PYTHONPATH": import_path()}) as process:
        try:
            data, _ = process.communicate(json.dumps(request).encode(), seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise NoSource(f"{unfinished} within {seconds:.0f} s", "id",
                           "tokenmill extract shows the file on the server's machine") from None
    stop.check()
    result: dict[str, Any] = json.loads(data) if data.strip() else {"failed": "the process that reads it died"}
    if "failed" in result:
        raise NoSource(result["failed"], "id", "see the file on the server's machine")
    return result
