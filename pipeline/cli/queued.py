"""`tokenmill resume --queued`: runs an entry (a submitted run) of a store's queue, with this process as the driver (the
process that schedules the run). `pipeline.cluster.dispatch` starts this command.
"""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.base.auth import NoAnswer
from pipeline.cli import options as opt
from pipeline.cli.errors import BadUsage, in_words, report_error
from pipeline.cluster.attempts import asked_to_stop, note_attempt, note_refusal
from pipeline.cluster.cancellation import interrupted
from pipeline.cluster.dispatch import begin, confined_to, end
from pipeline.cluster.driver_log import DriverLog
from pipeline.cluster.queue import Queue, QueueEntry, Submission
from pipeline.plan.changes import run_before
from pipeline.store.lease import LeaseHeld, identity
from pipeline.store.log import Fenced

if TYPE_CHECKING:
    from pipeline.recipe.model import Recipe
    from pipeline.store.fs import Store


def work(store: Store, claim: str, backend: opt.BackendName, workers: int | None, address: str | None,
         insecure_local: bool, allow_code: bool) -> int:
    """Run an entry (a submitted run) of the store's queue, write the result to the queue, and return the exit code.
    `claim` ('NUMBER/EVENT') names the entry. Raises BadUsage when `claim` has another form.

    The entry waits in the queue again in three cases:

    * Another driver holds the store's lease.
    * The cluster does not answer.
    * This process is told to stop although nobody has cancelled the run."""
    from pipeline.engine.driver.endings import Interrupted

    number, _, event = claim.partition("/")
    if not (number.isdecimal() and event.isdecimal()):
        raise BadUsage(f"--queued {claim}: give NUMBER/EVENT")

    signals: list[int] = []

    def interrupt(signum: int, frame: Any) -> None:
        raise Interrupted(signum)

    signal.signal(signal.SIGTERM, lambda signum, frame: signals.append(signum))    # kept until `end` is sure to run
    queue, position = Queue(store), (int(number), int(event))
    try:
        entry = begin(queue, *position, identity(""))
    except BaseException as e:
        return report_error(e)
    attempt = entry.attempt
    with DriverLog(store, entry.run, attempt):
        try:
            signal.signal(signal.SIGTERM, interrupt)      # until the scheduler installs its handlers
            if signals:
                raise Interrupted(signals[0])
            _drive(store, entry, queue.submission(entry.number), backend, workers, address, insecure_local, allow_code)
        except BaseException as e:
            stopped = isinstance(e, (KeyboardInterrupt, SystemExit))
            if isinstance(e, (LeaseHeld, Fenced)) or (stopped and not asked_to_stop(store, entry.run, attempt)):
                end(queue, *position, "returned", in_words(e))
            elif isinstance(e, NoAnswer):
                end(queue, *position, "unreachable", in_words(e))
            else:
                note_refusal(store, entry.run, attempt, str(e) or type(e).__name__)
                end(queue, *position, "cancelled" if stopped else "failed", in_words(e))
            return report_error(e)
        end(queue, *position, "done")
        return 0


def _drive(store: Store, entry: QueueEntry, submission: Submission, backend: opt.BackendName, workers: int | None,
           address: str | None, insecure_local: bool, allow_code: bool) -> None:
    # before the import, which takes long: the queue's page links to the run already
    note_attempt(store, entry.run, entry.attempt, "local", recipe=submission.name, base=submission.base,
                 before=run_before(store, entry.run))
    from pipeline.run import default_workers, make_backend, run_recipe

    if asked_to_stop(store, entry.run, entry.attempt):
        raise KeyboardInterrupt("cancelled before it began; nothing was run")
    opt.check_backend(backend, address, insecure_local)
    with interrupted(store, entry.run, entry.attempt):
        recipe = _recipe(submission, allow_code)
    if address is None:
        workers = workers or default_workers()
    summary = run_recipe(recipe, store.root, run=entry.run, show="rich", attempt=entry.attempt,
                         make_backend=make_backend(backend.value, workers, address),
                         verify_inputs=submission.verify_inputs)
    print(f"{summary.run}: {summary.executed:,} tasks run, {summary.reused:,} reused")


def _recipe(submission: Submission, allow_code: bool) -> Recipe:
    """Load the recipe that was submitted with an entry of the queue. The recipe's paths are checked again to lie in the
    allowed folders, because a link may have changed since the submission."""
    from pipeline.recipe.confine import refusals
    from pipeline.recipe.load import load_text

    roots = confined_to()
    return load_text(submission.text, f"{submission.name}.yaml", name=submission.name, base=submission.base,
                     overrides=submission.overrides, inputs=submission.inputs, inputs_from=submission.base,
                     allow_custom=allow_code,
                     confine=None if roots is None else partial(refusals, base=submission.base, roots=roots))
