"""`tokenmill status` shows the state of a run. `tokenmill logs` shows the log of the run's driver, the process that
leads it. `tokenmill cancel` stops the run.

These commands need only the store, so they work on any machine that can read it. They ask Ray only about a job whose
driver has not begun.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.base.visible import visible
from pipeline.cli.errors import UserError
from pipeline.cli.options import JsonOpt, RunArg, StoreOpt, as_typed, resolve_run

if TYPE_CHECKING:
    from pipeline.cluster.attempts import Standing
    from pipeline.store.fs import Store

WATCH_S = 2.0            # seconds between two updates of --watch and -f


def look(store: Store, run: str) -> Standing:
    """Return the state of a run. For a submitted run whose driver (the process that schedules the run) has not begun,
    ask Ray whether the run's job still exists and will start."""
    from dataclasses import replace

    from pipeline.cluster.attempts import standing

    current = standing(store, run)
    if current.state != "submitted":
        return current
    job = job_of(current)
    if isinstance(job, str):
        return replace(current, error=f"its cluster cannot be asked: {job}")
    if job is None:
        return replace(current, state="died", error="the cluster does not know its job: it was never submitted, or the "
                                                  "cluster is another one now; tokenmill resume starts it")
    if not job.ended:
        return current
    now = standing(store, run)                                # it may have begun, and even ended, in the meantime
    if now.state != "submitted":
        return now
    from pipeline.cluster import jobs

    if job.status == "STOPPED":
        return replace(now, state="cancelled")
    lines = jobs.job_output(now.facts["address"], now.facts["job"]).strip().splitlines()
    return replace(now, state="failed", error="\n".join(["its job ended before its driver reached the store:",
                                                         *(lines[-8:] or [job.message])]))


def job_of(current: Standing) -> Any:
    """Ask Ray about the job of a submitted run. Returns a `JobState`, or None when Ray knows no such job or no job was
    noted for the run. If Ray cannot be asked, returns a text that says why."""
    from pipeline.base import auth

    address, job = current.facts.get("address"), current.facts.get("job")
    if not address or not job:
        return None
    try:
        auth.check_kept_server(address)
        from pipeline.cluster import jobs

        return jobs.state(address, job)
    except auth.ClusterError as e:
        return str(e)


def status(ctx: typer.Context, run: RunArg, store: StoreOpt = "store",
           watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds until the run ends.")] =
           False, json_lines: JsonOpt = False) -> None:
    """Show the state of a run.

    Prints the passes (groups of steps that run together) with their partitions done, running and failed, documents per
    second, the time left, and the failures with their reasons. The command needs only the store, so it works on any
    machine that can read the store, during the run and after. With --watch the exit code is 0 when the run is done and
    1 when it ends otherwise.

    \b
    Examples:
      tokenmill status fineweb-3f2a91c0 --store s3://bucket/store
      tokenmill status fineweb-3f2a91c0 --watch
    """
    from pipeline.cli.status import text
    from pipeline.cluster.attempts import status_document

    at, name = resolve_run(run, store)
    shown = None
    while True:
        current = look(at, name)
        now = json.dumps(status_document(at, current)) if json_lines else text(at, current, bool(ctx.obj))
        if watch and not json_lines and sys.stdout.isatty():
            typer.echo("\x1b[2J\x1b[H" + now)
        elif now != shown:
            typer.echo(now)
        shown = now
        if not watch:
            return
        if current.ended:
            raise typer.Exit(0 if current.state == "done" else 1)
        _pause()


def logs(run: RunArg, store: StoreOpt = "store",
         follow: Annotated[bool, typer.Option("-f", "--follow", help="Continue until the run ends.")] = False) -> None:
    """Print the log of a submitted run's driver (the process that schedules the run).

    Reads the log of the latest attempt (start of the run) from the store, where new lines appear after a few
    seconds. Secrets are masked.

    \b
    Examples:
      tokenmill logs fineweb-3f2a91c0 --store s3://bucket/store
      tokenmill logs -f fineweb-3f2a91c0
    """
    from pipeline.cluster.attempts import LogReader, piece_name

    at, name = resolve_run(run, store)
    current = look(at, name)
    if current.facts.get("how") == "local" and not at.exists(piece_name(name, current.attempt, 1)):
        raise UserError(f"'{name}' was not submitted, so the output of its driver went to the terminal that started "
                        f"it; {as_typed('status', name, at)} shows its state")
    reader, attempt = LogReader(at, name, current.attempt), current.attempt
    empty = True
    while True:
        ended = current.ended                                   # checked before the last read
        for chunk in reader.more():
            empty = False
            typer.echo(visible(chunk), nl=False)
        sys.stdout.flush()
        if ended or not follow or current.attempt != attempt:
            break
        _pause()
        current = look(at, name)
    if empty:
        typer.echo(current.error or f"'{name}' has said nothing yet ({current.state})", err=True)


def cancel(run: RunArg, store: StoreOpt = "store", json_lines: JsonOpt = False) -> None:
    """Stop a run.

    Tasks that are running get a minute to finish. Everything committed is kept, and `tokenmill resume` continues the
    run. The request to stop is written to the store, where the driver (the process that schedules the run) finds it, so
    the cluster need not be reachable.

    \b
    Example:
      tokenmill cancel fineweb-3f2a91c0 --store s3://bucket/store
    """
    from pipeline.cluster.attempts import ask_to_stop

    at, name = resolve_run(run, store)
    current = look(at, name)
    answer = {"run": name, "attempt": current.attempt, "was": current.state, "asked": not current.ended}
    if current.ended:
        verb = "has" if current.state in ("died", "failed") else "is"
        note = f"'{name}' {verb} {current.state}: there is nothing to stop"
    else:
        ask_to_stop(at, name, current.attempt)
        note = f"'{name}' was asked to stop; {as_typed('status', name, at)} shows when it has"
        if current.state == "submitted":                        # no driver polls the store yet, so its job is stopped
            note = _stop_job(current) or note
    if json_lines:
        typer.echo(json.dumps(answer))
    typer.echo(note, err=json_lines)


def _stop_job(current: Standing) -> str | None:
    """Ask Ray to stop the job of a run whose driver (the process that schedules the run) has not begun. Returns None,
    or a message that says why this machine cannot stop the job."""
    from pipeline.base import auth

    try:
        auth.check_kept_server(current.facts["address"])
        from pipeline.cluster import jobs

        jobs.stop(current.facts["address"], current.facts["job"])
        return None
    except (auth.ClusterError, KeyError) as e:
        return (f"'{current.run}' will stop as soon as it begins; its job cannot be stopped from here: {e}")


def _pause() -> None:
    """Wait until the next update of the display. Ctrl-C ends the command that shows the run, but not the run."""
    try:
        time.sleep(WATCH_S)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
