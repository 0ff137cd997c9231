"""Reads task files. A task file describes a benchmark task in YAML: which files are read, how a row of them becomes a
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
    """How an answer is generated, and what counts as the answer. Generation stops after `tokens` tokens, at EOS, or at
    one of the texts in `stop`, which is not part of the answer. With `extract: number`, the last number in the
    generated text is the answer; with `extract: text`, the whole text."""

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
    """How a program is tested. The program is the prompt, without whitespace at its end, followed by the text that the
    model generates. `function` is the name of the function in it that is tested. `tests` is Python code that defines
    `check`, which is called with the function. Both settings are templates, filled with the fields of a row."""

    function: str
    tests: str


@dataclass(frozen=True)
class TaskFile:
    """The contents of a task file, which describes a benchmark task. Texts with braces are templates, filled with the
    fields of a row (`trainer.evaluation.template`).

        files         patterns of paths below the data folder. The files of the first pattern that matches any are read,
                      if no file is named after the task (`trainer.evaluation.rows.find_files`)
        forms         the ways in which the task is scored (`Form`)
        fields        fields that are added to each row
        choices       the answers to choose from; or `choices_from` names a field with a list of them
        choice        is applied to each answer, for instance to clean it
        gold          the label of the right answer
        labels        the labels of the answers, in their order; or `labels_from` names a field with a list of them.
                      Without both, the labels are 0, 1, 2, …
        context       the prompt; `answer` is its continuation. Both may use `{choice}`
        lettered      the prompt of the form mcf, in which `{options}` are the answers with letters
        prior         a context without the question; the likelihood of each answer after it is computed, too
        norm          which result of the form cf is the main one
        id            identifies a row (default: its number)
        group         the name of a row's group. Groups are also scored on their own, and examples are of the same group
        shuffle       whether the answers of each row are put into a pseudo-random order
        shots         the default number of examples before the question; `separator` follows each of them
        examples      patterns of the files from which examples are taken (default: from the other rows of the task)
        generate      how answers of the forms fg and code are generated
        code          how programs of the form code are tested
        version       a number that rises with every change of the file that can change a score
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
        """The name of the task's main measure, which is shown where there is room for only one."""
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
    """A benchmark task: its name, the content of its task file, and the sha256 of that file."""

    name: str
    file: TaskFile
    sha256: str

    def render(self, template: str, row: Mapping[str, object], where: str) -> str:
        """Fill `template` with the fields of `row`. Raises ConfigError when the template is malformed or does not fit
        the row; the message names the row by `where`."""
        try:
            return render(template, row)
        except TemplateError as error:
            raise ConfigError(f"{where}: {error} (task {self.name}); mend the row or give a task file that fits it "
                              f"to --tasks") from None


def without_code(task: EvalTask) -> EvalTask:
    """Return the task without the form `code`, so that no program that a model writes is run."""
    return replace(task, file=replace(task.file, forms=tuple(form for form in task.file.forms if form != "code")))


def built_in() -> dict[str, Path]:
    """Return {name of a built-in task: its file}."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def read_task(path: Path) -> EvalTask:
    """Read a task file. The task's name is the name of the file without `.yaml` or `.yml`. Raises ConfigError when the
    file cannot be read, or is no task file."""
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
