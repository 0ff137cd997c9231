"""Router: shows the trainings on the shards of a store. It shows their states, their losses by phase and source, and
the documents behind a spike (a step with a high loss).
"""

from __future__ import annotations

from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from pipeline.base.visible import visible
from pipeline.service.access import viewer
from pipeline.service.conditional import UNCHANGED, IfNoneMatch, unchanged
from pipeline.service.datasets import QueriesOf, Unmasked, allow_unmasked, answer
from pipeline.service.problems import finite
from pipeline.service.runs import REPORT_POLICY
from pipeline.service.shard_sets import add_documents, curriculum_of
from pipeline.service.shards import Run, StepNumber
from pipeline.service.stores import StoreOf, read_file
from pipeline.service.training_files import (
    METRICS,
    MetricsFile,
    MetricsFiles,
    Training,
    Unreadable,
    summary_of,
    task_scores,
)
from pipeline.service.training_starts import all_trainings, known_training, standing_now
from pipeline.store.fs import Store
from stages.scrub.pii import scrub_text, scrub_value
from trainer.observe.explain import explain
from trainer.observe.plot import svg

router = APIRouter(prefix="/api/v1/stores/{store}/trainings", tags=["trainings"], dependencies=[Depends(viewer)])

#: rows of a step that are explained, unless another number is asked for, and bytes of a recipe
ROWS, RECIPE = 5, 1 << 20
#: errors that are raised when a value in the metrics has an unexpected type
DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError)
#: characters of the text that a training has generated
SAMPLE = 1000


def folders_of(request: Request, store: str) -> tuple[str, ...]:
    folders: tuple[str, ...] = request.app.state.settings.trainings.get(store, ())
    return folders


def metrics_of(request: Request) -> MetricsFiles:
    """Return the server's MetricsFiles object, which reads the metrics of trainings and keeps them in memory."""
    metrics: MetricsFiles = request.app.state.metrics
    return metrics


@router.get("", summary="List trainings")
def list_trainings(request: Request, store: str, at: StoreOf) -> dict[str, Any]:
    """List the trainings in the runs of the store and in the folders given by `--trainings`, each with its state and
    its last step."""
    return {"trainings": [standing_now(*each) for each in all_trainings(at, folders_of(request, store))]}


@router.get("/{training}", summary="Show a training")
async def show_training(request: Request, store: str, at: StoreOf, training: str,
                        queries: QueriesOf) -> dict[str, Any]:
    """Show a training: its state, its phases, its spikes, its returns to a checkpoint, and its summary when it has
    ended. `curves` has the losses over tokens by source, and held-out losses; each curve has at most some hundred
    points, evenly spread. `tasks` has the scores of the last scored checkpoint on each benchmark task. `plot` changes
    when `losses.svg` changes."""
    stop = queries.stop()

    def call() -> dict[str, Any]:
        entry, start = known_training(at, folders_of(request, store), training)
        document = standing_now(entry, start)
        if not (entry.folder / METRICS).is_file():                # it has just been started
            return {**document, "phases": [], "curves": {"steps": [], "evals": []}, "plot": None, "spikes": [],
                    "rewinds": [], "tasks": [], "summary": None}
        file = metrics_of(request).of(entry, stop)
        return {**document, "phases": file.phases, "curves": file.losses.points(), "plot": file.plot,
                "spikes": list(file.spikes), "rewinds": scrub_value(list(file.rewinds)),
                "tasks": finite(task_scores(entry)), "summary": _summary(entry)}

    return await answer(request, stop, call)


def _summary(training: Training) -> dict[str, Any] | None:
    """Return the summary that a training has written at its end, None if there is none. In the text that the trained
    model generated, personal data is masked."""
    summary = summary_of(training)
    if summary is None:
        return None
    text = summary.get("sample")
    return {**finite(summary), "sample": scrub_text(text[:SAMPLE]) if isinstance(text, str) else None}


@router.get("/{training}/losses.svg", summary="Draw the losses", response_class=Response, responses=UNCHANGED)
async def draw_losses(
        request: Request, store: str, at: StoreOf, training: str, queries: QueriesOf,
        plot: Annotated[str, Query(max_length=100, description="ignored; gives each plot its own address")] = "",
        if_none_match: IfNoneMatch = None) -> Response:
    """Draw the loss, the held-out loss by source and the learning rate of a training over tokens, with the phases, as
    the trainer does. A client that sends the ETag of the last plot as If-None-Match gets 304 until the plot changes,
    and nothing is drawn."""
    stop = queries.stop()

    def call() -> Response:
        file = metrics_of(request).of(known_training(at, folders_of(request, store), training)[0], stop)
        tag = f'"{file.plot}"'
        return unchanged(if_none_match, tag) or Response(
            visible(_drawn(file)), media_type="image/svg+xml",
            headers={"Content-Security-Policy": REPORT_POLICY, "ETag": tag})

    return await answer(request, stop, call)


def _drawn(file: MetricsFile) -> str:
    try:
        return svg([*file.starts, *file.losses.lines()])
    except (*DAMAGED, ValueError) as e:
        raise Unreadable(f"its metrics cannot be drawn ({type(e).__name__}): they are damaged, or of another version",
                         "training", "see its figures instead") from None


@router.get("/{training}/steps/{step}", summary="Explain a step")
async def explain_step(
        request: Request, store: str, at: StoreOf, training: str, step: StepNumber, queries: QueriesOf,
        run: Run = "", row: Annotated[int | None, Query(ge=1, le=1 << 30, description="only this row")] = None,
        worst: Annotated[int, Query(ge=1, le=20, description="rows with the highest loss")] = ROWS,
        unmasked: Unmasked = False) -> dict[str, Any]:
    """Return the loss of a training step beside the losses of the steps around it, as `tokenmill train explain` does.
    Also return the documents in those rows of its batch that have the highest loss. `run` names the run that made the
    shards. It is needed only if the folder of the training is not inside that run's folder."""
    await allow_unmasked(request, at, unmasked, {"training": training[:100], "step": step})
    stop = queries.stop()

    def call() -> dict[str, Any]:
        entry, _ = known_training(at, folders_of(request, store), training)
        planned = curriculum_of(at, entry.run or run)
        if planned is None:
            raise Unreadable("it is not known which run it reads", "run", "name the run")
        name, curriculum = planned
        with queries.turn(stop):
            try:
                result = explain(curriculum, entry.folder, _window(at, name), step,
                                 lambda rows: add_documents(queries, at, curriculum, rows, True, not unmasked, stop),
                                 row, None if row is not None else worst, stop.check)
            except DAMAGED as e:
                raise Unreadable(f"its metrics cannot be read ({type(e).__name__}): they are damaged, or of another "
                                 f"version", "training", "see the documents of the step in the shards") from e
        return {"training": entry.name, "run": name, **result}

    return await answer(request, stop, call)


def _window(store: Store, run: str) -> int:
    """Return the number of earlier steps with whose losses the loss of a step is compared. It is the setting
    `train.stability.window` in the recipe of the run that made the shards, by default 128."""
    try:
        recipe = yaml.safe_load(read_file(store, f"runs/{run}/recipe.yaml", RECIPE))
        window = recipe["train"]["stability"]["window"]
    except (FileNotFoundError, yaml.YAMLError, KeyError, TypeError):
        return 128
    return window if isinstance(window, int) and 2 <= window <= 10_000 else 128
