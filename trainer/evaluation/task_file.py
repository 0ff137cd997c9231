"""Reads task files. A task file is a YAML that says which files of a benchmark are read, how a row of them becomes a
prompt and its answers, and in which forms the task is scored.

The built-in tasks are in the folder `tasks` beside this module. Their prompts are those of OLMES (arXiv 2406.08446),
unless the file says otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import yaml

from trainer.base.config import ConfigError, build, suggestion
from trainer.evaluation.template import TemplateError, render

FOLDER = Path(__file__).parent / "tasks"
#: bpb: bits per byte of the right answer. cf (cloze form): which answer has the highest likelihood? mcf
#: (multiple-choice form): the same for the letters of lettered answers. pairs: is the right one of two sentences
#: likelier? word: is the right word the likeliest continuation? fg (free generation): is the generated answer right?
#: code: does the generated program pass its tests?
Form = Literal["bpb", "cf", "mcf", "pairs", "word", "fg", "code"]
#: by what the log-likelihood of an answer is divided before answers are compared; `prior` subtracts the log-likelihood
#: of the answer after the text `prior` alone
Norm = Literal["raw", "per_byte", "per_char", "per_token", "prior"]
NORMS: tuple[Norm, ...] = ("raw", "per_byte", "per_char", "per_token", "prior")
#: largest size of a task file in bytes
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class GenerateConfig:
    """How an answer is generated. Generation stops after `tokens` tokens, at EOS, or at one of the texts in `stop`,
    which is not part of the answer. With `extract: number`, the last number in the text is the answer; with
    `extract: text`, all of it."""

    tokens: int = 256
    stop: tuple[str, ...] = ("\n\n", "Question:")
    extract: Literal["number", "text"] = "number"

    def check(self) -> None:
        if self.tokens < 1:
            raise ValueError("tokens must be ≥ 1")
        if not all(self.stop):
            raise ValueError("stop must not contain an empty text, which would end every answer at once")


@dataclass(frozen=True)
class ProgramConfig:
    """How a generated program is tested. The program is the context without whitespace at its end, followed by the
    generated text. `function` is the name of the function in it that is tested. `tests` is Python code that defines
    `check`, which is called with the function. Both are templates."""

    function: str
    tests: str


@dataclass(frozen=True)
class TaskFile:
    """The contents of a task file. Texts with braces are templates (`trainer.evaluation.template`).

    `files` are patterns of paths below the data folder; the files of the first pattern that matches any are read, if no
    file is named after the task (`trainer.evaluation.rows.find_files`). `forms` says how the task is scored (`Form`).
    `fields` adds fields to a row. `choices` are the answers to choose from; `choices_from` names a field with a list of
    them. `choice` is applied to each of them, for instance to clean it. `gold` is the label of the right answer. The
    labels of the answers are `labels`, those in the field `labels_from`, or 0, 1, 2, …. `context` and `answer` make the
    prompt and its continuation; both may use `{choice}`. `lettered` makes the prompt of the form mcf; `{options}` are
    the lettered answers. `prior` is the context for the unconditional likelihood of an answer. `norm` says which result
    of the form cf is the main one. `id` identifies a row (default: its number), and `group` makes the name of a group,
    which is also scored on its own and from which an item's examples are taken. With `shuffle`, the answers of each row
    are put into a pseudo-random order. `shots` is the default number of examples before the question; they come from
    the files `examples` (default: the other rows), and `separator` follows each of them. `generate` says how answers of
    the forms fg and code are generated, and `code` how programs are tested. `version` rises with every change that can
    change a score.
    """

    version: int
    description: str
    files: tuple[str, ...]
    forms: tuple[Form, ...]
    context: str
    answer: str = " {choice}"
    choices: tuple[str, ...] = ()
    choices_from: str = ""
    choice: str = "{choice}"
    gold: str = "0"
    labels: tuple[str, ...] = ()
    labels_from: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    group: str = ""
    lettered: str = ""
    prior: str | None = None
    norm: Norm = "per_char"
    examples: tuple[str, ...] = ()
    shots: int = 0
    separator: str = "\n\n"
    shuffle: bool = False
    generate: GenerateConfig | None = None
    code: ProgramConfig | None = None

    @property
    def main(self) -> str:
        """The name of the measure that stands for the task where only one is shown."""
        if "cf" in self.forms:
            return f"cf.{self.norm}"
        return next((form for form in self.forms if form != "bpb"), "bpb")

    def check(self) -> None:
        if bool(self.choices) == bool(self.choices_from):
            raise ValueError("give either choices or choices_from")
        if not self.files or not self.forms:
            raise ValueError("files and forms must not be empty")
        if "mcf" in self.forms and "{options}" not in self.lettered:
            raise ValueError("the form mcf needs lettered, a template with {options}")
        generated = [form for form in ("fg", "code") if form in self.forms]
        if generated and self.generate is None:
            raise ValueError(f"the form {generated[0]} needs generate")
        if len(generated) > 1:
            raise ValueError("a task has either the form fg or the form code")
        if "code" in self.forms and self.code is None:
            raise ValueError("the form code needs code, with function and tests")
        if self.norm == "prior" and self.prior is None:
            raise ValueError("norm: prior needs prior")
        if self.shots < 0:
            raise ValueError("shots must be ≥ 0")
        for pattern in (*self.files, *self.examples):
            if not Path(pattern).parts or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
                raise ValueError(f"{pattern!r} must be a path below the data folder")
            if any("**" in part and part != "**" for part in Path(pattern).parts):
                raise ValueError(f"{pattern!r}: ** stands for whole folders, as in '**/test/*.jsonl'")


@dataclass(frozen=True)
class EvalTask:
    """A task by its name, with the sha256 of its file."""

    name: str
    file: TaskFile
    sha256: str

    def render(self, template: str, row: Mapping[str, object], where: str) -> str:
        """Fill `template` with the fields of `row`. Raises ConfigError when the template is malformed, or does not fit
        the row; `where` is the row's place in the message."""
        try:
            return render(template, row)
        except TemplateError as error:
            raise ConfigError(f"{where}: {error} (task {self.name}); mend the row or give a task file that fits it "
                              f"to --tasks") from None


def without_code(task: EvalTask) -> EvalTask:
    """Return the task without the form code."""
    return replace(task, file=replace(task.file, forms=tuple(form for form in task.file.forms if form != "code")))


def built_in() -> dict[str, Path]:
    """Return {name of a built-in task: its file}."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def read_task(path: Path) -> EvalTask:
    """Read a task file. Its name without `.yaml` or `.yml` is the name of the task. Raises ConfigError when it cannot
    be read, or is no task file."""
    try:
        data = path.read_bytes()
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{path}: larger than {_MOST_BYTES:,} bytes, which is no task file")
        content = yaml.safe_load(data.decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the task file's path") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: is no YAML ({reason})") from None
    return EvalTask(path.stem, build(TaskFile, content, str(path)), hashlib.sha256(data).hexdigest())


def tasks_named(names: Sequence[str], option: str = "--tasks") -> list[EvalTask]:
    """Return the tasks with these names; a name that ends in .yaml or .yml is the path of a task file. Raises
    ConfigError for an unknown name, and for two tasks of the same name; the message names `option`."""
    known, tasks = built_in(), []
    for name in names:
        if name.endswith((".yaml", ".yml")):
            tasks.append(read_task(Path(name)))
        elif name in known:
            tasks.append(read_task(known[name]))
        else:
            raise ConfigError(f"{option} {name}: unknown task{suggestion(name, known)}; there are {', '.join(known)}, "
                              f"or give the path of a task file (.yaml)")
    for task in tasks:
        if sum(task.name == other.name for other in tasks) > 1:
            raise ConfigError(f"{option}: {task.name} is given twice; results are named after tasks")
    return tasks
