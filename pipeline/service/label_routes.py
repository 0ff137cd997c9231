"""Router: the labels (good, bad or unsure) that people give to documents. It hands out documents to label, stores
labels, tells how far people agree, and exports a file for `tokenmill classifier train`."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from pipeline.passes.tables import RowWriter
from pipeline.service import tune
from pipeline.service.access import Operator, viewer
from pipeline.service.datasets import QueriesOf, Unmasked, allow_unmasked, answer
from pipeline.service.documents import shown
from pipeline.service.drawing import Draw, drawn, read_drawn
from pipeline.service.duck import QueryError, Stop
from pipeline.service.labels import Label, Labels, Name, decided, latest, summary
from pipeline.service.latest import latest_with
from pipeline.service.parts import NoDataset, published
from pipeline.service.problems import HttpProblem
from pipeline.service.query import DocumentKind, Queries
from pipeline.service.stores import StoreOf, check_run
from pipeline.store.fs import Store
from stages.scrub.pii import scrub_text
from stages.scrub.rows import MARGIN

router = APIRouter(prefix="/api/v1/stores/{store}/datasets/{dataset}/labels", tags=["labels"],
                   dependencies=[Depends(viewer)])

#: characters of a document that a person reads, and those that the export writes
READ, WRITTEN = 20_000, 100_000
#: disagreements that are listed; documents that the export looks up at a time
LISTED, AT_A_TIME = 200, 200
#: columns of the export: `text` and `label` are those that `tokenmill classifier train --labelled` reads
EXPORT = pa.schema([(name, pa.string()) for name in ("id", "text", "label", "source", "language", "url")]
                   + [("people", pa.list_(pa.string()))])
By = Annotated[str, Query(min_length=1, max_length=40, description="who labels: any name, the same every time")]


class LabelRequest(BaseModel):
    """A label that a person gives to a document. `text` is the `text_hash` that the server sent with the document; it
    identifies the text that the person read."""

    model_config = ConfigDict(extra="forbid")

    document: str = Field(min_length=1, max_length=200)
    label: Name
    by: str = Field(min_length=1, max_length=40)
    text: str = Field(pattern="^[0-9a-f]{32}$")
    run: str = Field("", max_length=200)


class Books:
    """Keeps one `Labels` object (the labels that people have given to the documents of a dataset) for each dataset in
    the stores of this server."""

    def __init__(self) -> None:
        self._books: dict[tuple[str, str], Labels] = {}
        self._lock = threading.Lock()

    def get(self, store: Store, dataset: str) -> Labels:
        """Return the `Labels` object of a dataset: the labels that people have given to its documents. Raises
        HttpProblem when the store has published no dataset of this name."""
        try:
            published(store, "kept", dataset)
        except NoDataset as e:
            raise HttpProblem(e.status, e.title, e.detail, e.key, e.remedy) from None
        with self._lock:
            return self._books.setdefault((store.root, dataset), Labels(store, dataset))


def labels_of(request: Request, at: StoreOf, dataset: str) -> Labels:
    """Return the labels that people have given to the documents of the dataset in a request's path."""
    books: Books = request.app.state.labels
    return books.get(at, dataset)


LabelsOf = Annotated[Labels, Depends(labels_of)]


@router.get("", summary="Show labels and agreement")
def show_labels(labels: LabelsOf) -> dict[str, Any]:
    """Count the documents by label, and what each person has labelled. Also tell how far each pair of people agrees,
    and list documents on which people disagree. Each document counts once; if one person calls it good and another bad,
    it counts as `disagreed`."""
    return summary(labels.all(), LISTED)


@router.get("/next", summary="Get a document to label", dependencies=[Depends(tune.turn)])
def next_document(request: Request, at: StoreOf, dataset: str, labels: LabelsOf, by: By, draw: Draw = "random",
                  run: Annotated[str, Query(max_length=200, description="a finished run; the latest by default")] = "",
                  threshold: Annotated[str, Query(max_length=120, description="of an edge: STEP.KEY")] = "",
                  other: Annotated[str, Query(max_length=200, description="the run to compare with")] = "",
                  ) -> dict[str, Any]:
    """Get the first document of a draw (a selection of a run's documents) that the person `by` has not labelled. `draw`
    says which documents are selected:

    - `random`: documents at random
    - `edge`: those nearest to a threshold of the run
    - `runs`: those that one of two runs kept and the other dropped

    The order is the same for all people. The field `document` of the answer is null when `by` has labelled all
    documents of the draw.
    """
    run = run or latest_with(at, dataset)
    game = _game(request, at, run, dataset)
    compared = _game(request, at, other, dataset) if draw == "runs" and other else None
    with tune.as_problem():
        documents = drawn(game, draw, threshold, compared)
    labelled = {document for document, by_person in latest(labels.all()).items() if by in by_person}
    unlabelled = [document for document in documents if document.id not in labelled]
    result = {"run": run, "of": len(documents), "labelled": len(documents) - len(unlabelled),
              "document": None}
    if not unlabelled:
        return result
    first = unlabelled[0]
    verdict = {"side": first.side, "stage": first.stage, "reason": first.reason}
    return {**result, "document": to_read(read_drawn(game, first)) | {"verdict": verdict}}


def _game(request: Request, at: Store, run: str, dataset: str) -> Any:
    check_run(at, run)
    return tune.game_of(request, at, run, dataset)


def to_read(row: dict[str, Any]) -> dict[str, Any]:
    """Return a document's row in the form in which a person reads it before labelling. Personal data is masked, and the
    text is cut to READ characters. The field `text_hash`, a hash of the text that the person reads, is added."""
    row = {**row, "text": row.get("text") or ""}
    result = shown({**row, "chars": len(row["text"])}, True, READ) or {}
    return {**result, "text_hash": text_hash(row["text"])}


def text_hash(text: str) -> str:
    """Return a hash of the part of a text that a person reads: its beginning, with personal data masked."""
    cut = scrub_text(text[:READ])
    return hashlib.blake2b(cut.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@router.post("", summary="Label a document", status_code=201)
async def put_label(labels: LabelsOf, role: Operator, given: LabelRequest) -> dict[str, Any]:
    """Store the label (good, bad or unsure) that a person gives to a document. It replaces an earlier label by this
    person of this document."""
    by = " ".join(given.by.split())
    if not by.isprintable() or not by:
        raise HttpProblem(422, "Not valid", "a name is printable characters on one line", "by", "choose another")
    label = await run_in_threadpool(labels.put, Label(given.document, given.label, by, given.text, given.run))
    return {"document": label.document, "label": label.label, "by": label.by, "at": label.at}


@router.get("/export", summary="Export labelled documents", response_class=Response)
async def export(request: Request, at: StoreOf, dataset: str, labels: LabelsOf, queries: QueriesOf,
                 format: Literal["jsonl", "parquet"] = "jsonl", unmasked: Unmasked = False) -> Response:
    """Export the labelled documents as a file of JSON lines or Parquet for `tokenmill classifier train --labelled
    FILE`. Each row has the `text` of a document and its `label` (good or bad). A document is left out if people
    disagree on it or are unsure, if it is no longer published, or if its text is not the one that people read. The
    header `X-Left-Out` counts such documents."""
    await allow_unmasked(request, at, unmasked, {"dataset": dataset, "labels": True})
    stop = queries.stop()
    folder = tempfile.mkdtemp(prefix="tokenmill-labels-")
    path = Path(folder) / f"{dataset}-labels.{format}"

    def write() -> dict[str, int]:
        of = latest(labels.all())
        counts = {"disagreed": 0, "unsure": 0, "gone": 0, "changed": 0}
        rows = labelled_rows(queries, at, dataset, of, not unmasked, counts, stop)
        if format == "parquet":
            table = RowWriter(str(path), EXPORT)
            for row in rows:
                table.write(row)
            table.close()
        else:
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        return counts

    try:
        counts = await answer(request, stop, write)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    left_out = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
    return FileResponse(path, media_type="application/jsonl" if format == "jsonl" else "application/octet-stream",
                        filename=path.name, headers={"X-Left-Out": left_out or "none"},
                        background=BackgroundTask(shutil.rmtree, folder, True))


def labelled_rows(queries: Queries, store: Store, dataset: str, of: dict[str, dict[str, Label]], masked: bool,
                  counts: dict[str, int], stop: Stop) -> Iterator[dict[str, Any]]:
    """Yield the labelled documents with text and label, as rows of a file for training a classifier. `of` has the
    labels, as {document: {person: label}}. Documents that must be left out (for example because people disagree) are
    counted in `counts`, by reason."""
    wanted = []
    for document, by_person in of.items():
        if (label := decided(by_person)) in counts:
            counts[label] += 1
        else:
            wanted.append((document, label))
    for first in range(0, len(wanted), AT_A_TIME):
        batch = dict(wanted[first:first + AT_A_TIME])
        for row in published_rows(queries, store, dataset, list(batch), WRITTEN + MARGIN, stop):
            if row["id"] not in batch:                             # listed twice: happens only in a damaged store
                continue
            label = batch.pop(row["id"])
            read = {by_person.text for by_person in of[row["id"]].values() if by_person.label == label}
            if text_hash(row["text"] or "") not in read:
                counts["changed"] += 1
                continue
            text, url = row["text"], row["url"] or ""
            yield {"id": row["id"], "text": scrub_text(text)[:WRITTEN] if masked else text[:WRITTEN], "label": label,
                   "source": row["source"], "language": row["language"] or "",
                   "url": scrub_text(url) if masked else url, "people": sorted(of[row["id"]])}
        counts["gone"] += len(batch)


def published_rows(queries: Queries, store: Store, dataset: str, ids: list[str], chars: int,
                   stop: Stop) -> Iterator[dict[str, Any]]:
    """Yield the rows of the kept and dropped documents with these ids. Each row has `side` ('kept' or 'dropped') and
    the first `chars` characters of the document's text."""
    for kind in ("kept", "dropped"):
        try:
            rows = queries.by_ids(DocumentKind(store, kind, dataset), ids, stop,
                                  ("url", "source", "language", "reason", "stage", "signals", "text"), chars)
        except NoDataset:
            if kind == "kept":
                raise
            continue
        yield from ({**row, "side": kind} for row in rows)


def one_document(queries: Queries, store: Store, dataset: str, id: str, stop: Stop) -> dict[str, Any]:
    """Return a published document that a person wants to label again, with the run's verdict (kept or dropped, and
    why). Raises QueryError when no kept or dropped document has this id."""
    row = next(published_rows(queries, store, dataset, [id], READ + 1000, stop), None)
    if row is None:
        raise QueryError("no kept or dropped document has this id", "document", "take the next one")
    verdict = {"side": row["side"], "stage": row.get("stage") or "", "reason": row.get("reason") or ""}
    return {**to_read(row), "verdict": verdict}
