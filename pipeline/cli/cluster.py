"""`tokenmill submit` and `tokenmill resume`: start and continue runs on a cluster.

`submit` starts a job on the cluster's head node, and this job runs `tokenmill resume` with the hidden option --job. The
commands about the state of a run are in `pipeline.cli.watch`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli import options as opt
from pipeline.cli.errors import BadUsage, UserError, report_error, stoppable
from pipeline.cli.watch import cancel, logs, status

if TYPE_CHECKING:
    from pipeline.recipe.model import Recipe
    from pipeline.store.fs import Store

ServerOpt = Annotated[str, typer.Option("--address", metavar="URL", envvar="TOKENMILL_ADDRESS",
                                        help="Job server of the cluster, e.g. http://127.0.0.1:8265.")]


def register(app: typer.Typer) -> None:
    for name, command in (("submit", submit), ("status", status), ("logs", logs), ("cancel", cancel),
                          ("resume", resume)):
        app.command(name)(command)


# -- submit and resume -----------------------------------------------------------------------------------------------
def submit(recipe: opt.RecipeArg, address: ServerOpt, store: opt.StoreOpt = "store", input: opt.InputOpt = None,
           set: opt.SetOpt = None, workers: opt.WorkersOpt = None, name: opt.NameOpt = None,
           takeover: opt.TakeoverOpt = False, verify_inputs: opt.VerifyOpt = False,
           allow_custom_stages: opt.CodeOpt = False, ship_code: opt.ShipOpt = False, python: opt.PythonOpt = "python",
           insecure_local: opt.InsecureOpt = False, json_lines: opt.JsonOpt = False) -> None:
    """Run a recipe as a job on a Ray cluster.

    Prints the name of the run and returns as soon as the cluster has accepted the job; the run continues when the
    terminal is closed. The store and the inputs must be on object storage, or on a file system that all nodes share.

    \b
    Examples:
      tokenmill submit recipe.yaml --address http://127.0.0.1:8265 --store s3://bucket/store
      tokenmill submit fineweb --input '/shared/*.warc.gz' --store /shared/store --address http://127.0.0.1:8265
    """
    from pipeline.recipe import load_recipe
    from pipeline.run import run_name
    from pipeline.store.fs import Store

    opt.check_name(name)
    opt.check_root(store)
    loaded = load_recipe(recipe, set or [], inputs=input or [], allow_custom=allow_custom_stages)
    at = Store(store)
    run = name or run_name(loaded)
    options = job_options(workers, takeover, verify_inputs, allow_custom_stages)
    send(at, run, loaded, address, options, ship_code, python, insecure_local, json_lines)


def resume(run: opt.RunArg, store: opt.StoreOpt = "store",
           address: Annotated[str | None, typer.Option(metavar="ADDRESS", help=
               "Where to run: the URL of a job server (http://…) starts a job there; the address of a Ray cluster "
               "attaches this process to it.")] = None,
           workers: opt.WorkersOpt = None, backend: opt.BackendOpt = opt.BackendName.ray,
           takeover: opt.TakeoverOpt = False, verify_inputs: opt.VerifyOpt = False,
           allow_custom_stages: opt.CodeOpt = False, ship_code: opt.ShipOpt = False, python: opt.PythonOpt = "python",
           insecure_local: opt.InsecureOpt = False, quiet: opt.QuietOpt = False, json_lines: opt.JsonOpt = False,
           job: Annotated[int | None, typer.Option("--job", hidden=True, help="We are this attempt's job.")] = None,
           queued: Annotated[str | None, typer.Option("--queued", hidden=True, help="We are the driver of this entry "
                                                                                    "of the queue.")] = None) -> None:
    """Continue a run that was stopped, has failed, or whose cluster is gone.

    The run keeps its recipe and its store, and does not repeat tasks whose results were committed. It continues on this
    machine or, with --address, on a cluster; this may be another cluster than the one where it began.

    \b
    Examples:
      tokenmill resume fineweb-3f2a91c0 --store s3://bucket/store --address http://127.0.0.1:8265
      tokenmill resume fineweb-3f2a91c0 --store store --workers 8
    """
    if queued is not None:
        from pipeline.cli.queued import work
        from pipeline.store.fs import Store

        raise typer.Exit(work(Store(store), queued, backend, workers, address, insecure_local, allow_custom_stages))
    at, name = opt.resolve_run(run, store) if job is None else seen_by_the_head(run, store)
    options = job_options(workers, takeover, verify_inputs, allow_custom_stages)
    if job is not None:
        raise typer.Exit(_work(at, name, job, workers, takeover, verify_inputs, allow_custom_stages))
    if address is not None and address.startswith(("http://", "https://")):
        if backend is not opt.BackendName.ray:
            raise BadUsage(f"--address {address} runs it as a job on Ray; leave out --backend {backend.value}")
        with kept_recipe(at, name, allow_custom_stages) as loaded:
            send(at, name, loaded, address, options, ship_code, python, insecure_local, json_lines)
        return
    from pipeline.cli.runs import drive

    opt.check_backend(backend, address, insecure_local, ship_code)
    with kept_recipe(at, name, allow_custom_stages) as loaded, stoppable(address):
        drive(loaded, at.root, name, backend, workers, address, quiet=quiet, json_lines=json_lines, takeover=takeover,
              verify_inputs=verify_inputs, ship_code=ship_code)


def job_options(workers: int | None, takeover: bool, verify_inputs: bool, allow_custom_stages: bool) -> list[str]:
    """Return options of `tokenmill resume` for the command line of a Ray job. They are only flags and a number, so that
    no text from the user reaches a shell."""
    return [*(("--workers", str(workers)) if workers else ()), *(("--takeover",) if takeover else ()),
            *(("--verify-inputs",) if verify_inputs else ()),
            *(("--allow-custom-stages",) if allow_custom_stages else ())]


def send(store: Store, run: str, recipe: Recipe, address: str, options: list[str], ship_code: bool, python: str,
         insecure_local: bool, json_lines: bool) -> None:
    """Start a Ray job for the next attempt (start) of the run `run`, on the job server `address`. In two cases no
    job is started, and a message says so:

    * The latest attempt is running or stopping, and `options` lacks --takeover.
    * The latest attempt was submitted, and its job on this server has not ended."""
    from pipeline.base import auth
    from pipeline.cluster.attempts import facts_of, keep_code, keep_recipe, note_attempt, note_refusal, standing
    from pipeline.plan.changes import run_before

    check_store(store)
    address = auth.job_server(address)
    auth.check_job_server(address, insecure_local)
    # imported only now, because Ray reads the token when it is imported
    from pipeline.cluster import jobs
    from pipeline.engine.backends.fingerprint import roots

    now, facts = standing(store, run), facts_of(store, run)
    attempt = facts.get("attempt", 0)
    if now.state in ("running", "stopping") and "--takeover" not in options:
        _sent(run, attempt, facts.get("job"), facts.get("address"), store, json_lines, now.state)
        return
    job = jobs.job_id(store.root, run, attempt)
    job_state = jobs.state(address, job) if now.state == "submitted" else None
    if job_state is not None and not job_state.ended:
        _sent(run, attempt, job, address, store, json_lines, "submitted")
        return
    # If the latest attempt's job was never sent, or its cluster is gone, it is sent now with the attempt's job id, so
    # that two senders cannot start it twice. Otherwise a new attempt begins.
    if attempt == 0 or job_state is not None or now.state != "submitted":
        attempt += 1
    keep_recipe(store, run, recipe.canonical_yaml().encode(), recipe.text)
    keep_code(store, run, recipe.code)
    packages = [root for root in roots().values() if root] if ship_code else []
    while True:
        job = jobs.job_id(store.root, run, attempt)
        note_attempt(store, run, attempt, "job", job=job, address=address, recipe=recipe.name, base=recipe.base,
                     before=run_before(store, run))
        arguments = ["resume", "--job", str(attempt), "--store", store.root, *options, "--", run]
        try:
            new = jobs.submit(address, job, arguments, python=python, packages=packages)
            job_state = None if new else jobs.state(address, job)
        except auth.ClusterError as e:
            note_refusal(store, run, attempt, str(e))
            raise
        if job_state is None or not job_state.ended:
            break
        attempt += 1              # the cluster knows an ended job of this id, from an earlier store at the same path
    for note in notes(store, address, auth.in_clear(address)):
        typer.echo(f"note: {note}", err=True)
    _sent(run, attempt, job, address, store, json_lines, "new" if new else "submitted")


def _sent(run: str, attempt: int, job: str | None, address: str | None, store: Store, json_lines: bool,
          what: str) -> None:
    if json_lines:
        typer.echo(json.dumps({"run": run, "attempt": attempt, "job": job, "address": address, "store": store.root,
                               "already": None if what == "new" else what}))
        return
    where = f"as job {job} to {address}" if job else "on this machine or another"
    typer.echo(run)
    typer.echo({"new": f"submitted {where}", "submitted": f"it was submitted already, {where}",
                "running": f"it is under way already, {where}",
                "stopping": f"it is stopping, {where}; resume it once it has stopped"}[what], err=True)
    for command in ("status", "logs -f", "cancel"):
        typer.echo(f"  {opt.as_typed(command, run, store)}", err=True)


def check_store(store: Store) -> None:
    """Raise BadUsage for a store in this process's memory, which the nodes of a cluster cannot reach."""
    if store.root.startswith("memory://"):
        raise BadUsage(f"--store {store.root} is this process's own memory, which no cluster sees; use object storage "
                       f"or a file system that all nodes share")


def notes(store: Store, address: str, in_clear: bool) -> Iterator[str]:
    from urllib.parse import urlsplit

    from pipeline.base.auth import loopback

    if in_clear:
        yield f"the cluster's token went to {address} unencrypted; use https, or ssh -L 8265:127.0.0.1:8265 HEAD"
    if store.local is not None and not loopback(urlsplit(address).hostname):
        yield (f"{store.root} must be on a file system that every node of the cluster shares; a node that does not see "
               f"it is refused by name")


# -- the job ---------------------------------------------------------------------------------------------------------
def seen_by_the_head(run: str, root: str) -> tuple[Store, str]:
    """Open the store of a submitted run, and return (store, run). This is called in the job on the cluster's head node.
    Raises UserError when the head node cannot find or read the run that the submitting machine wrote to the store.
    Raises StoreError when the store denies access; the head node's credentials may differ from those of the submitting
    machine."""
    from pipeline.cluster.attempts import facts_name
    from pipeline.store.fs import Store

    store = Store(root)
    try:
        store.read(facts_name(run))
    except FileNotFoundError:
        raise UserError(f"the head node does not see run '{run}' in the store {store.root}; put the store on a file "
                        f"system that all nodes share, or on object storage") from None
    except OSError as e:
        raise UserError(f"the head node cannot read {store.root}/{facts_name(run)}: {e.strerror or e}; see that the "
                        f"user who runs Ray there may") from None
    return store, run


def _work(store: Store, run: str, attempt: int, workers: int | None, takeover: bool, verify_inputs: bool,
          allow_custom_stages: bool) -> int:
    """Run a submitted attempt (start) of a run, in the job on the head node, and return the exit code. This process
    is the driver (the process that schedules the run). Its output is also copied to the store. If the attempt fails,
    the reason is written to run.json."""
    from pipeline.cli.runs import drive
    from pipeline.cluster.attempts import asked_to_stop, facts_of, note_refusal
    from pipeline.cluster.driver_log import DriverLog
    from pipeline.engine.driver.endings import Interrupted

    def interrupt(signum: int, frame: Any) -> None:
        raise Interrupted(signum)

    signal.signal(signal.SIGTERM, interrupt)          # until Ray, and then the scheduler, install their handlers
    with DriverLog(store, run, attempt):
        try:
            latest = facts_of(store, run).get("attempt", 0)
            if latest != attempt:
                raise UserError(f"this job is attempt {attempt} at '{run}', but attempt {latest} was begun since")
            if asked_to_stop(store, run, attempt):
                raise UserError(f"attempt {attempt} at '{run}' was cancelled before it began")
            address = os.environ.get("RAY_ADDRESS") or "auto"
            with kept_recipe(store, run, allow_custom_stages) as loaded, stoppable(address):
                try:
                    drive(loaded, store.root, run, opt.BackendName.ray, workers, address, quiet=False, json_lines=False,
                          takeover=takeover, verify_inputs=verify_inputs, attempt=attempt)
                except Interrupted:
                    raise UserError(f"stopped; what was committed is kept, and tokenmill resume {run} goes on from "
                                    f"there") from None
            return 0
        except BaseException as e:
            note_refusal(store, run, attempt, str(e) or type(e).__name__)
            return report_error(e)


@contextlib.contextmanager
def kept_recipe(store: Store, run: str, allow_custom_stages: bool) -> Iterator[Recipe]:
    """A context manager that loads the recipe that the store keeps in the folder of a run, and yields the recipe. With
    `allow_custom_stages`, the user's own code that the recipe names is loaded, too, from the copies in the store."""
    import yaml

    from pipeline.base.scratch import Scratch
    from pipeline.cluster.attempts import facts_of, kept_code
    from pipeline.recipe import load_recipe

    facts = facts_of(store, run)
    with Scratch() as scratch:                   # the folder is swept later if the driver is killed
        folder = scratch.folder()
        path = f"{folder}/recipe.yaml"
        try:
            data = store.read(f"runs/{run}/recipe.yaml")
        except FileNotFoundError:
            raise UserError(f"run '{run}' has no recipe.yaml in {store.root}; run its recipe again with --name "
                            f"{run}") from None
        with open(path, "wb") as f:
            f.write(data)
        overrides = []
        if allow_custom_stages:
            document = yaml.safe_load(data)
            code = document.get("code") if isinstance(document, dict) else None
            if code:
                files = kept_code(store, run, [code] if isinstance(code, str) else code, folder)
                overrides = [f"code={json.dumps(files)}"]
        loaded = load_recipe(path, overrides, allow_custom=allow_custom_stages)
        loaded.came_from(facts.get("recipe") or loaded.name, facts.get("base") or loaded.base)
        yield loaded
