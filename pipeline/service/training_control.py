"""Router: start, stop and resume trainings. Operators only."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from pipeline.cluster.attempts import bad_name
from pipeline.service import training_starts as starts
from pipeline.service.access import Operator, form_of, operator, viewer
from pipeline.service.html import path
from pipeline.service.outward import outward_text
from pipeline.service.problems import HttpProblem
from pipeline.service.stores import StoreOf, check_run
from pipeline.service.training_files import LOG, Training
from pipeline.service.training_starts import Options
from pipeline.service.trainings import folders_of
from pipeline.store.fs import Store

router = APIRouter(prefix="/api/v1/stores/{store}/trainings", tags=["trainings"], dependencies=[Depends(viewer)])
forms = APIRouter(include_in_schema=False, dependencies=[Depends(operator)])

#: bytes at the end of a log that the API returns, and that a page shows, which is loaded again every few seconds
LOG_BYTES, PAGE_BYTES = 64 << 10, 16 << 10
#: settings that name files, or send figures to a service elsewhere
OUTWARD = ("init", "metrics", "model.from", "evaluate.tasks.data", "evaluate.tasks.tasks")


class TrainingRequest(BaseModel):
    """A training that a client asks to start: the run whose shards it reads, and options as for `tokenmill train run`.
    `name` is the name of the training's folder below a folder of `--trainings`. Without `name`, the folder is in the
    folder of the run."""

    model_config = ConfigDict(extra="forbid")

    run: str = Field(min_length=1, max_length=200)
    name: str | None = Field(None, min_length=1, max_length=200)
    overrides: list[Annotated[str, Field(max_length=1000)]] = Field([], max_length=100, description="as --set")
    ranks: int | None = Field(None, ge=1, le=1024)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    stop_at: int | None = Field(None, ge=1)


@router.post("", summary="Start a training", status_code=202)
async def start_training(request: Request, store: str, at: StoreOf, role: Operator,
                         given: TrainingRequest) -> dict[str, Any]:
    """Start a training as a process on the server's machine. The process continues when the server ends. A training
    that has checkpoints continues from the latest. If two requests to start the same training come at the same time,
    only one of them starts it."""
    for assignment in given.overrides:
        key, sign, _ = assignment.partition("=")
        if not sign or "\0" in assignment:
            raise HttpProblem(422, "Not valid", "an override is KEY=VALUE", "overrides", "such as optimizer.lr=0.001")
        key = key.strip().removeprefix("train.")      # the trainer takes both forms
        # refuses a name of OUTWARD, a setting below it, and a section that contains it
        if any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in OUTWARD):
            raise HttpProblem(422, "Not valid", f"{key} cannot be set here: it may name files or other services",
                              "overrides", "set it in the run's recipe")
    training = await run_in_threadpool(_training, request, store, at, given)
    options = Options(tuple(given.overrides), given.ranks, given.device, given.stop_at)
    return await _start(request, at, training, options, str(role))


@router.post("/{training}/resume", summary="Resume a training", status_code=202)
async def resume_training(request: Request, store: str, at: StoreOf, training: str, role: Operator) -> dict[str, Any]:
    """Start a stopped training again, from its latest checkpoint and with the options of its last start."""
    known, latest = await run_in_threadpool(known_training, request, store, at, training)
    if not known.run:
        raise HttpProblem(409, "Its run is not known", "it was started by a command, in a folder of its own",
                          "training", "start it with its run and this name")
    return await _start(request, at, known, latest.options, str(role))


@router.post("/{training}/stop", summary="Stop a training", status_code=202)
async def stop_training(request: Request, store: str, at: StoreOf, training: str, role: Operator) -> dict[str, Any]:
    """Ask a training to stop. The training finishes its current step, writes a checkpoint and can be resumed."""
    known, _ = await run_in_threadpool(known_training, request, store, at, training)
    await run_in_threadpool(starts.stop, at, known, str(role))
    return {"training": training, "state": "stopping"}


@router.get("/{training}/log", summary="Read what a training has printed", dependencies=[Depends(operator)])
def training_log(request: Request, store: str, at: StoreOf, training: str) -> dict[str, Any]:
    """Return the end of the log of a training: what it has printed. Only trainings that a server has started have such
    a log."""
    known, _ = known_training(request, store, at, training)
    return {"training": training, "text": printed(known, LOG_BYTES)}


def printed(training: Training, size: int) -> str:
    """Return the last `size` bytes of what a training has printed, with secrets and personal data masked. Raises
    HttpProblem when no server has started the training."""
    try:
        with open(training.folder / LOG, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - size))
            text = f.read(size).decode("utf-8", "replace")
    except FileNotFoundError:
        raise HttpProblem(404, "No log", "no server has started this training", "training",
                          "its output went to the terminal that started it") from None
    return outward_text(text, [])


async def _start(request: Request, at: Store, training: Training, options: Options, by: str) -> dict[str, Any]:
    child = await run_in_threadpool(starts.start, at, training, options, by)
    children: list[subprocess.Popen[bytes]] = request.app.state.children
    # polled, so that one that has ended does not stay as a zombie
    request.app.state.children = [*(c for c in children if c.poll() is None), child]
    return {"training": training.name, "run": training.run, "state": "starting"}


def _training(request: Request, store: str, at: Store, given: TrainingRequest) -> Training:
    """Return the training that a client asks to start: its name, its run and its folder. Raises HttpProblem when it
    cannot be started."""
    check_run(at, given.run)
    if not at.exists(f"runs/{given.run}/curriculum.json"):
        raise HttpProblem(409, "Nothing to train on", f"the run {given.run!r} has made no curriculum", "run",
                          "choose a run whose recipe has `shards:` and `curriculum:`")
    if given.name is None or (given.name == given.run and at.local is not None):
        if at.local is None:
            raise HttpProblem(422, "Not valid", "a store in object storage has no place for checkpoints", "name",
                              "give the name of a folder, and start the server with --trainings")
        return Training(given.run, given.run, at.local / "runs" / given.run / "train")
    if bad_name(given.name) is not None:
        raise HttpProblem(422, "Not valid", "the name of a training is that of a folder", "name", "leave '/' out")
    folders = folders_of(request, store)
    if not folders:
        raise HttpProblem(422, "Not valid", "the server has no folder for trainings", "name",
                          "leave `name` out, or start the server with --trainings")
    if at.local is not None and (at.local / "runs" / given.name / "train").exists():
        raise HttpProblem(409, "Name is taken", f"the run {given.name!r} has a training of this name", "name",
                          "choose another")
    return Training(given.name, given.run, Path(folders[0]) / given.name)


def known_training(request: Request, store: str, at: Store, name: str) -> tuple[Training, starts.Start]:
    return starts.known_training(at, folders_of(request, store), name)


# -- forms -----------------------------------------------------------------------------------------------------------
@forms.post("/stores/{store}/trainings")
async def start_form(request: Request, store: str, at: StoreOf, role: Operator) -> Response:
    """Start the training that the submitted HTML form describes, and redirect to the page of the training."""
    form = await form_of(request)
    given = TrainingRequest.model_validate({
        "run": form.get("run", "")[:200] or "-",
        "name": form.get("name", "").strip()[:200] or None
    })
    started = await start_training(request, store, at, role, given)
    return RedirectResponse(path("stores", store, "trainings", started["training"]), 303)


@forms.post("/stores/{store}/trainings/{training}/{what}")
async def change_form(request: Request, store: str, at: StoreOf, training: str, what: Literal["stop", "resume"],
                      role: Operator) -> Response:
    """Stop or resume a training, as the button that was pressed on its HTML page says, and redirect to this page."""
    change = stop_training if what == "stop" else resume_training
    await change(request, store, at, training, role)
    return RedirectResponse(path("stores", store, "trainings", training), 303)
