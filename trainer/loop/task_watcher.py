"""Runs a process beside a training that scores the training's checkpoints on benchmark tasks: `tokenmill train eval
--follow`.

The process has low priority, is paused when it delays steps too much (`trainer.loop.pace`), and ends with the training.
If it is killed, it is started again. Its output is in the file tasks.log. If checkpoints cannot be scored, the training
goes on nevertheless.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.base.clock import SYSTEM, Clock
from trainer.base.config import ConfigError
from trainer.base.interrupts import end_with_parent
from trainer.evaluation import score_rows
from trainer.loop.pace import Pace
from trainer.loop.threads import cores

if TYPE_CHECKING:
    from trainer.checkpoint.checkpoints import Checkpoint
    from trainer.evaluation.score_rows import ScoreOrigin
    from trainer.evaluation.task_file import EvalTask
    from trainer.loop.config import TaskScoringConfig
    from trainer.loop.run import Run

#: file in the folder of a training with the output of the scoring process
LOG = "tasks.log"
#: seconds after which `look` is called again
POLL_S = 5.0
#: how often the scoring process is started again before it has written a new score
RESTARTS = 3
#: how far the priority of the scoring process is lowered, so that it uses only time that the training leaves
NICE = 19
#: largest number of tokens in a batch with which `check_tasks` prepares tasks; the check does not depend on it
BATCH = 2048


def subordinate() -> None:
    """Give this process the lowest priority, and let it end when its parent process ends. A child process calls this
    before exec. It is ended by SIGKILL, which also ends a process that is paused."""
    os.nice(NICE)
    end_with_parent(signal.SIGKILL)


def check_tasks(run: Run) -> None:
    """Raise ConfigError if the tasks of `evaluate.tasks` cannot be scored: a task does not exist, has no data, or does
    not fit the tokenizer. Called before the model is built, so that a mistake ends the training at once."""
    config = run.config.evaluate.tasks
    if config is None:
        return
    from trainer.evaluation.evaluate import PromptReader, prepare
    from trainer.evaluation.models import load_coder

    tasks, tokenizer = scorable_tasks(config), run.curriculum.tokenizer
    coder = load_coder(run.store / tokenizer.path, tokenizer.sha256)
    reader = PromptReader(coder, tokenizer.eos, tokenizer.eos, tokenizer.vocab_size, run.curriculum.phases[0].sequence,
                          BATCH)
    for task in tasks:
        prepare(task, Path(config.data), config.shots, 0, reader)


def scorable_tasks(config: TaskScoringConfig) -> list[EvalTask]:
    """Return the benchmark tasks of `evaluate.tasks` that can be scored beside a training. The form `code` is removed
    from them, because it runs programs that the model has written, which is not done beside a training. Raises
    ConfigError when a task does not exist, has no data or has only the form `code`, and when the folder of the data is
    missing."""
    from trainer.evaluation.rows import find_files
    from trainer.evaluation.task_file import tasks_named, without_code

    key, data = "train.evaluate.tasks", Path(config.data)
    if not data.is_dir():
        raise ConfigError(f"{key}.data: {data} is no folder; give the folder with the tasks' data")
    try:
        tasks = tasks_named(config.tasks)
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix('--tasks').lstrip(': ')}") from None
    for task in tasks:
        if task.file.forms == ("code",):
            raise ConfigError(f"{key}: {task.name} has only the form code, and programs are not run beside a training; "
                              f"leave it out, and score checkpoints with `tokenmill train eval --allow-code`")
        if not find_files(data, task.name, task.file.files):
            raise ConfigError(f"{key}.data: {data} has no data of the task {task.name}; put {task.name}.jsonl there, "
                              f"or one of {', '.join(task.file.files)}")
    return [without_code(task) for task in tasks]


def wanted_scores(config: TaskScoringConfig) -> set[ScoreOrigin]:
    """Return the origins of the scores that the settings `evaluate.tasks` ask for, one for each task. Scores with
    another origin are of other settings. This reads the data of the tasks."""
    from trainer.evaluation.rows import sums
    from trainer.evaluation.task_file import tasks_named

    wanted = set()
    for task in tasks_named(config.tasks):
        shots = task.file.shots if config.shots is None else config.shots
        wanted.add(score_rows.origin_of({"task": task.name, "sha256": task.sha256, "shots": shots, "seed": 0,
                                         "data": sums(Path(config.data), task, shots)}))
    return wanted


class TaskWatcher:
    """Starts, pauses and ends the process that scores the checkpoints of a training. A context manager: the process
    runs within the context. `threads` is how many CPU threads the ranks of this machine compute with."""

    def __init__(self, run: Run, threads: int, say: Callable[[str], None], clock: Clock = SYSTEM) -> None:
        config = run.config.evaluate.tasks
        assert config is not None
        self.out, self.say, self.clock = run.out, say, clock
        self.command = [
            sys.executable, "-m", "trainer", "eval", str(run.folder.absolute()), "--follow", "--store",
            str(run.store.absolute()), "--trained", str(run.out.absolute()), "--data", config.data, "--tasks",
            ",".join(config.tasks), "--every", str(config.every), "--device", config.device, "--end-with",
            str(os.getpid()), *(["--shots", str(config.shots)] if config.shots is not None else [])]
        # the scoring process is not a rank, so it must not see the variables of one
        self.env = {**{k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
                    "OMP_NUM_THREADS": str(max(1, int(cores()) - threads))}
        self.every, self.wanted = config.every, wanted_scores(config)
        self.rows = score_rows.RowReader(run.out, self.wanted)
        self.pace = Pace(config.share)
        self.process: subprocess.Popen[bytes] | None = None
        self.paused = self.failed = False
        self.restarts, self.looked, self.modified = 0, clock.now(), 0

    def __enter__(self) -> TaskWatcher:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the scoring process, and pause it at once unless `pace` lets it run. The next `look` returns all rows,
        because after a return to a checkpoint the scores of the same steps are new."""
        self.rows.restart()
        self.out.mkdir(parents=True, exist_ok=True)
        with open(self.out / LOG, "ab") as log:
            self.process = subprocess.Popen(self.command, env=self.env, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=subprocess.STDOUT, start_new_session=True,
                                            preexec_fn=subordinate)
        self.paused = False
        self.let(self.pace.runs)

    def stop(self) -> None:
        """Kill the scoring process. Checkpoints that it has not scored are scored after the next start."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stepped(self, shape: Hashable, seconds: float, steps: int) -> None:
        """Pause the scoring process or let it go on, depending on how long the last steps took. These are `steps` steps
        of the given `shape`, which took `seconds` in all."""
        self.let(self.pace.add(shape, seconds, steps))

    def let(self, run: bool) -> None:
        """Let the scoring process run if `run` is true, else pause it."""
        if self.process is not None and self.paused == run and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT if run else signal.SIGSTOP)
            self.paused = not run

    def awaits(self, checkpoint: Checkpoint) -> bool:
        """Return whether the setting `evaluate.tasks.every` asks for scores of `checkpoint` and these do not exist
        yet."""
        return checkpoint.step % self.every == 0 and bool(
            self.wanted - score_rows.results_by_origin(self.out, checkpoint).keys())

    def due(self) -> bool:
        """Return whether the last call of `look` is long enough ago (POLL_S seconds) to call it again."""
        return self.clock.now() - self.looked >= POLL_S

    def look(self) -> list[dict[str, Any]]:
        """Read new scores. Returns the rows of tasks.jsonl that belong to the settings of this training: all that were
        added since the last call, and perhaps earlier ones.

        Also restarts the scoring process if it has failed, but at most RESTARTS times without a new score. Exit code 2
        means that the tasks or their settings cannot be used, so the process is not restarted after it.
        """
        self.looked, rows = self.clock.now(), list[dict[str, Any]]()
        with suppress(FileNotFoundError):
            modified = (self.out / score_rows.NAME).stat().st_mtime_ns
            if modified != self.modified:
                rows = self.rows.read()
                self.modified, self.restarts = modified, 0
        if not self.failed and self.process is not None and self.process.poll():
            self.failed = self.process.poll() == 2 or self.restarts == RESTARTS
            if self.failed:
                self.say(f"checkpoints are no longer scored on tasks ({self.last_line()}); `tokenmill train eval "
                         f"{self.command[4]} --follow` scores them later")
            else:
                self.restarts += 1
                self.start()
        return rows

    def last_line(self) -> str:
        """Return the last line that the scoring process has printed. If the process has failed, the line says why."""
        lines = (self.out / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else f"{LOG} is empty"

    def wait(self, interrupted: Callable[[], int]) -> None:
        """Wait, at the end of a training, until the scoring process has scored all remaining checkpoints. Returns early
        if the process fails and is not restarted (see `look`), or when `interrupted` returns the number of a signal."""
        self.let(True)
        if self.process is not None and self.process.poll() is None:
            self.say("scoring the last checkpoints on tasks")
        while not interrupted() and not self.failed and self.process is not None and self.process.poll() != 0:
            self.clock.sleep(0.1)
            if self.process.poll():
                self.look()
                self.let(True)
