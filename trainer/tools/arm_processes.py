"""Trains the arms of a study (short trainings that are compared) as processes of their own, several at a time.

Each process is `python -m trainer run FOLDER` with the folder of an arm. When the study is asked to stop (Ctrl-C,
SIGTERM), or one arm fails, every running arm writes a checkpoint and ends. When the process of the study is killed, the
operating system sends its arms a signal, and they also write a checkpoint and end. The next call of the same study
continues from these checkpoints.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.base.clock import SYSTEM, Clock
from trainer.base.arguments import say
from trainer.base.files import training_process
from trainer.base.interrupts import stopping
from trainer.launch.local import STOPPED_S, end_with_parent
from trainer.loop.run import TrainingError
from trainer.loop.threads import cores, threads
from trainer.tools.arm import Arm, finished, label

#: lines of an arm's log that an error message repeats
SHOWN = 5


def train_arms(arms: Sequence[Arm], options: argparse.Namespace, announce: Callable[[str], None], share: float = 1.0,
               clock: Clock = SYSTEM) -> None:
    """Train those of `arms` (trainings of a study) that are not finished, `options.jobs` at a time, each up to the
    share `share` of its steps. Raises TrainingError when an arm fails, and SystemExit(128 + n) when signal n asks this
    process to end. In both cases no further arm is started, and the running arms first write a checkpoint and end."""
    waiting = deque(arm for arm in arms if not finished(arm, share))
    running: dict[int, tuple[Arm, subprocess.Popen[bytes]]] = {}
    done, failed = len(arms) - len(waiting), ""
    goal = "" if share == 1 else f" (to {share:.0%} of their steps)"
    if done:
        announce(f"{done} of {len(arms)} trainings are done already{goal}")
    with signals(running) as caught:
        while running or (waiting and not caught and not failed):
            while waiting and len(running) < options.jobs and not caught and not failed:
                slot = min(set(range(options.jobs)) - set(running))
                arm = waiting.popleft()
                wait_for_earlier(arm.run.out, clock)
                running[slot] = arm, start(arm, options, slot, share)
                if caught:                     # a signal that came while this arm was being started did not reach it
                    stop({slot: running[slot]})
            clock.sleep(0.05)
            for slot, (arm, process) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[slot]
                if code == 0 and finished(arm, share):
                    done += 1
                    announce(f"{done} of {len(arms)}: {label(arm)}, seed {arm.seed}{goal}")
                elif not caught and not failed:
                    failed = failure(arm, code)
                    stop(running)
    if failed:
        raise TrainingError(failed)
    if caught:
        left = f" ({len(waiting)} had not begun)" if waiting else ""
        say(f"stopped: the running trainings have written a checkpoint{left}; the same command goes on", sys.stderr)
        raise SystemExit(128 + caught[0])


def command(arm: Arm, options: argparse.Namespace, share: float) -> list[str]:
    """Return the command line that trains an arm of a study up to the share `share` of its steps. With `--address`, the
    ranks run on that Ray cluster, and the process of the command only starts and watches them."""
    words = [sys.executable, "-m", "trainer", "run", str(arm.run.out), "--store", str(arm.run.store), "--out",
             str(arm.run.out), "--device", options.device]
    if share < 1:
        words += ["--stop-at", str(arm.rung(share))]
    if options.address:
        words += ["--address", options.address]
        words += ["--gpus", str(options.gpus)] if options.gpus else ["--ranks", str(options.ranks or 1)]
        words += [flag for flag, given in (("--ship-code", options.ship_code),
                                           ("--insecure-local", options.insecure_local)) if given]
    elif options.ranks:
        words += ["--ranks", str(options.ranks)]
    return words


def start(arm: Arm, options: argparse.Namespace, slot: int, share: float) -> subprocess.Popen[bytes]:
    """Start an arm (a training of a study) as a process. `slot` numbers the processes that run at the same time, and
    selects the GPUs. The number of CPU threads is OMP_NUM_THREADS, if that is set. Otherwise it depends on the model,
    the machine's cores, `--jobs` and `--ranks`, but not on the load of the machine: with another number of threads, the
    last digits of losses may change."""
    count = threads(arm.run, options.jobs * (options.ranks or 1), cores(), options.device)
    env = {"OMP_NUM_THREADS": str(count), **os.environ}
    here = options.jobs > 1 and not options.ranks and not options.address and options.device != "cpu"
    if here and (gpus := visible_gpus()):
        env["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    with open(arm.run.out / "log.txt", "ab") as log:
        return subprocess.Popen(command(arm, options, share), env=env, stdin=subprocess.DEVNULL, stdout=log,
                                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_parent)


def visible_gpus() -> list[str]:
    """Return the names by which the GPUs that this process may use are listed in CUDA_VISIBLE_DEVICES; [] without
    GPUs."""
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",") if listed else [str(i) for i in range(torch.cuda.device_count())]


def wait_for_earlier(folder: Path, clock: Clock) -> None:
    """Wait until no process of this machine trains in `folder`. A study that was killed may have left a process that
    still writes its checkpoint. Raises TrainingError when the process has not ended after STOPPED_S seconds."""
    deadline = clock.now() + STOPPED_S
    while (pid := training_process(folder)) is not None:
        if clock.now() > deadline:
            raise TrainingError(f"{folder}: process {pid} of this machine trains there; wait until it ends, or stop it "
                                f"(kill {pid})")
        clock.sleep(0.2)


@contextmanager
def signals(running: dict[int, tuple[Arm, subprocess.Popen[bytes]]]) -> Iterator[list[int]]:
    """Pass a signal that asks this process to end on to every arm (training of a study) in `running`, as SIGTERM, until
    the context ends. Yields the list of the numbers of the signals that have arrived so far. On leaving the context,
    arms that still run are killed."""
    caught: list[int] = []

    def note(number: int, _frame: Any) -> None:
        caught.append(number)
        stop(running)

    old = {number: signal.signal(number, note) for number in stopping()}
    try:
        yield caught
    finally:
        for _, process in running.values():
            process.kill()
            process.wait()
        for number, handler in old.items():
            signal.signal(number, handler)


def stop(running: dict[int, tuple[Arm, subprocess.Popen[bytes]]]) -> None:
    for _, process in running.values():
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)


def failure(arm: Arm, code: int) -> str:
    """Return the message about an arm of a study whose training has failed, with the last lines of its log."""
    log = arm.run.out / "log.txt"
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    end = f"{log} says at its end:" if last else f"{log} is empty"
    return "\n  ".join([f"the training of {label(arm)}, seed {arm.seed}, {how}; the same command goes on from the "
                        f"latest checkpoints; {end}", *last])
