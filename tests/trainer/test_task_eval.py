"""`tokenmill train eval`, for a run with a real tokenizer and for the export that `train export` made of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline.base import confinement
from tests.trainer.evaluation import word_run, write_task
from tests.trainer.synthetic import quiet
from trainer.__main__ import main
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint import in_use
from trainer.data.tokenizer import load_tokenizer
from trainer.evaluation.models import StoredModel
from trainer.loop.run import open_run
from trainer.loop.train import train
from trainer.parallel.world import world
from trainer.tools import task_eval

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run that has three checkpoints and a tokenizer of words, and a folder with a task of 30 rows."""
    folder = tmp_path_factory.mktemp("eval")
    run = word_run(folder, checkpoint={"every": 5, "keep": 9}, seed=3)
    with world("cpu") as here:
        train(open_run(str(run), None, None, []), here, None, quiet)
    return folder


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def common(place: Path) -> list[str]:
    return ["--data", str(place / "data"), "--tasks", str(place / "quiz.yaml")]


def test_all_steps_are_scored_and_written(place: Path, capsys):
    run = place / "store" / "runs" / "toy"
    results = evaluate(capsys, str(run), *common(place), "--steps", "all")
    steps = [r["model"]["step"] for r in results]
    assert len(steps) >= 3 and steps == sorted(steps)
    for result in results:
        folder = run / "train" / "evaluation" / f"step_{result['model']['step']:08d}"
        assert json.loads((folder / "quiz.json").read_text()) == result
        items = [json.loads(line) for line in (folder / "quiz.items.jsonl").read_text().splitlines()]
        right = [line["cloze"].index(max(line["cloze"])) == line["gold"] for line in items]
        assert sum(right) / 30 == pytest.approx(result["measures"]["cf.raw"]["value"])
    assert results[0]["measures"]["bpb"] != results[-1]["measures"]["bpb"]
    assert results[0]["shots"] == 2 and results[0]["version"] == 1 and results[0]["data"].keys() == {"quiz.jsonl"}


def test_a_training_deletes_no_checkpoint_that_is_still_to_be_scored(place: Path, tmp_path: Path, capsys, monkeypatch):
    run = shutil.copytree(place / "store" / "runs" / "toy", tmp_path / "toy")
    checkpoints, real = run / "train" / "checkpoints", task_eval.evaluate_model
    steps = [c.step for c in ckpt.complete(checkpoints)]

    def during(model: StoredModel, *rest: Any) -> list[dict[str, Any]]:
        for mark in checkpoints.glob(f"*/{in_use.MARKS}"):             # a person has removed it, or it is old
            mark.unlink()
        rest[-1].last = rest[-1].touched = -1000.0
        rest[-1].show("")
        ckpt.retain(checkpoints, ckpt.CheckpointConfig(keep=1))
        return real(model, *rest)

    monkeypatch.setattr(task_eval, "evaluate_model", during)
    results = evaluate(capsys, str(run), *common(place), "--steps", "all", "--store", str(place / "store"))
    assert [r["model"]["step"] for r in results] == steps and len(steps) >= 3
    assert not list(checkpoints.glob(f"*/{in_use.MARKS}"))
    ckpt.retain(checkpoints, ckpt.CheckpointConfig(keep=1))
    assert len(ckpt.complete(checkpoints)) < len(steps)


def test_the_table_says_the_same(place: Path, capsys):
    run = str(place / "store" / "runs" / "toy")
    (result,) = evaluate(capsys, run, *common(place))
    [file] = (Path(run) / "train" / "evaluation" / f"step_{result['model']['step']:08d}").glob("quiz.json")
    written = file.read_bytes()
    assert main(["eval", run, *common(place)]) == 0
    assert file.read_bytes() == written                      # no times: the same evaluation writes the same bytes
    lines = capsys.readouterr().out.splitlines()
    assert f"{result['measures']['bpb']['value']:.4f}" in next(line for line in lines if " bpb " in line)
    assert "0.5000" in next(line for line in lines if " mcf " in line)
    assert [line.split()[0] for line in lines if " * " in line] == [result["main"]] == ["cf.raw"]


def test_an_exported_model_scores_what_its_checkpoint_scores(place: Path, capsys):
    run, out = place / "store" / "runs" / "toy", place / "hf"
    assert main(["export", str(run), "--out", str(out), "--dtype", "fp32"]) == 0
    (own,), (exported,) = (evaluate(capsys, str(folder), *common(place)) for folder in (run, out))
    assert exported["model"].keys() == {"config_sha256", "parameters"}
    for name, measure in own["measures"].items():
        assert exported["measures"][name]["value"] == pytest.approx(measure["value"], rel=1e-5), name
    assert json.loads((out / "evaluation" / "quiz.json").read_text()) == exported


def test_contaminated_items_are_taken_from_the_runs_list(place: Path, tmp_path: Path, capsys):
    run = str(place / "store" / "runs" / "toy")
    lines = [{"dataset": "clean", "set": name, "row": row, "part": "question", "documents": 1}
             for name, row in (("quiz", 3), ("quiz", 4), ("other", 5))]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (result,) = evaluate(capsys, run, *common(place), "--contaminated", str(tmp_path / "list.jsonl"))
    assert (result["contaminated"]["items"], result["clean"]["items"]) == (2, 28)
    own = place / "store" / "runs" / "toy" / "contamination.jsonl"
    own.write_text((tmp_path / "list.jsonl").read_text())
    (again,) = evaluate(capsys, run, *common(place))
    own.unlink()
    assert again["contaminated"] == result["contaminated"]
    assert main(["eval", run, *common(place), "--contaminated", str(place / "quiz.yaml")]) == 2
    assert "contamination.jsonl" in capsys.readouterr().err


def test_a_list_of_contaminated_items_of_other_files_is_not_believed(place: Path, tmp_path: Path, capsys, monkeypatch):
    run, line = place / "store" / "runs" / "toy", json.dumps({"set": "quiz", "row": 30})
    (run / "contamination.jsonl").write_text(line)
    (result,) = evaluate(capsys, str(run), *common(place))
    (run / "contamination.jsonl").rename(tmp_path / "list.jsonl")
    assert "contaminated" not in result
    monkeypatch.setattr("trainer.evaluation.models._empty", lambda *_: pytest.fail("the model was loaded"))
    assert main(["eval", str(run), *common(place), "--contaminated", str(tmp_path / "list.jsonl")]) == 2
    assert "row 30 of quiz" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "key"), [
    (["--tasks", "helaswag"], "hellaswag"), (["--steps", "3"], "--steps 3"), (["--data", "nowhere"], "--data nowhere"),
    (["--shots", "30"], "--shots"), (["--trained", "nowhere"], "no checkpoint"), (["--tasks", "piqa"], "piqa.jsonl")])
def test_mistakes_are_one_line_before_the_model_is_loaded(place: Path, capsys, monkeypatch, change, key):
    monkeypatch.setattr("trainer.evaluation.models._empty", lambda *_: pytest.fail("the model was loaded"))
    arguments = dict(zip(["--data", "--tasks"], [str(place / "data"), str(place / "quiz.yaml")])) | dict([change])
    assert main(["eval", str(place / "store" / "runs" / "toy"), *(x for pair in arguments.items() for x in pair)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and key in error


def test_a_missing_tokenizer_is_named(place: Path, tmp_path: Path, capsys):
    assert main(["eval", str(place / "store" / "runs" / "toy"), *common(place), "--store", str(tmp_path)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_tasks_that_do_not_fit_are_left_out_unless_they_are_named(place: Path, tmp_path: Path, capsys):
    run = str(place / "store" / "runs" / "toy")
    (tmp_path / "svamp.jsonl").write_text(json.dumps({"context": "w1", "answer": "1"}) + "\n")
    (tmp_path / "lambada.jsonl").write_text(json.dumps({"context": "w1", "continuation": "w2 " * 99}) + "\n")
    results = evaluate(capsys, run, "--data", str(tmp_path), "--shots", "0")
    assert [r["task"] for r in results] == ["svamp"]
    assert main(["eval", run, "--data", str(tmp_path), "--shots", "0"]) == 0
    assert "left out" in capsys.readouterr().err
    assert main(["eval", run, "--data", str(tmp_path), "--shots", "0", "--tasks", "svamp,lambada"]) == 2
    assert "context" in capsys.readouterr().err


def test_results_go_to_out(place: Path, tmp_path: Path, capsys):
    run = place / "store" / "runs" / "toy"
    (result,) = evaluate(capsys, str(run), *common(place), "--out", str(tmp_path / "results"))
    step = f"step_{result['model']['step']:08d}"
    assert json.loads((tmp_path / "results" / step / "quiz.json").read_text()) == result
    (tmp_path / "file").write_text("")
    assert main(["eval", str(run), *common(place), "--out", str(tmp_path / "file")]) == 2
    assert "--out" in capsys.readouterr().err


def test_another_tokenizer_is_refused(place: Path, tmp_path: Path, capsys):
    path = tmp_path / "tokenizers" / "none" / "tokenizer.json"
    path.parent.mkdir(parents=True)
    path.write_bytes((place / "store" / "tokenizers" / "none" / "tokenizer.json").read_bytes() + b"\n")
    assert main(["eval", str(place / "store" / "runs" / "toy"), *common(place), "--store", str(tmp_path)]) == 2
    assert "sha256" in capsys.readouterr().err


def test_a_model_of_nan_is_refused(place: Path, capsys, monkeypatch):
    from trainer.evaluation import scoring

    monkeypatch.setattr(scoring.Transformer, "logits", lambda self, x, _: x.new_full((len(x), self.vocab), torch.nan))
    assert main(["eval", str(place / "store" / "runs" / "toy"), *common(place)]) == 1
    assert "earlier step" in capsys.readouterr().err


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(place: Path, tmp_path: Path, capsys):
    out = tmp_path / "hf"
    assert main(["export", str(place / "store" / "runs" / "toy"), "--out", str(out), "--dtype", "fp32"]) == 0
    text = (out / "tokenizer.json").read_text().replace('"A:":94', '"A:":4711').replace('"A:": 94', '"A:": 4711')
    (out / "tokenizer.json").write_text(text)
    assert main(["eval", str(out), *common(place)]) == 2
    assert "4,711" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["json", "model"])
def test_texts_are_encoded_alike_one_by_one_and_together(kind: str, tmp_path: Path):
    texts = [" red", "", "Question: what?\nAnswer:", "naïve  spaces ", "<eos>", "日本"]
    if kind == "json":
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.train_from_iterator(["Question what Answer red " * 9], tokenizers.trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
        inner.save(str(tmp_path / "t.json"))
    else:
        package = pytest.importorskip("sentencepiece")
        (tmp_path / "text").write_text("Question what Answer red\n" * 99)
        package.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(tmp_path / "t"),
                                           vocab_size=300, hard_vocab_limit=False, byte_fallback=True, minloglevel=2)
    coder, why = load_tokenizer(tmp_path / f"t.{kind}")
    assert coder is not None, why
    assert coder.encode_batch(texts) == [coder.encode(text) for text in texts]
    assert coder.encode_batch(texts)[1] == []


def test_programs_run_only_with_allow_code(place: Path, tmp_path: Path, capsys, monkeypatch):
    """Without --allow-code, the task has bits per byte alone, a line says so, and no process is started."""
    rows = [{"prompt": "def f():\n    return 1  # w1", "solution": " w2", "test": f"def check(c):\n assert c() == {n}"}
            for n in (1, 1, 2)]
    write_task(tmp_path, rows, "coded", forms=["bpb", "code"], context="{prompt}", answer="{solution}",
               lettered="", prior=None, choices_from="", choices=["{solution}"], gold="0",
               generate={"tokens": 2, "stop": ["\n"]}, code={"function": "f", "tests": "{test}"})
    arguments = [str(place / "store" / "runs" / "toy"), "--data", str(tmp_path / "data"), "--tasks",
                 str(tmp_path / "coded.yaml"), "--out", str(tmp_path / "out"), "--json"]
    with monkeypatch.context() as patched:
        patched.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
        assert main(["eval", *arguments]) == 0
    printed = capsys.readouterr()
    (result,) = json.loads(printed.out)
    assert list(result["measures"]) == ["bpb"] and result["main"] == "bpb"
    assert [line for line in printed.err.splitlines() if line.startswith("coded: ") and "--allow-code" in line]
    write_task(tmp_path, rows, "coded", **{**yaml.safe_load((tmp_path / "coded.yaml").read_text()), "forms": ["code"]})
    assert main(["eval", *arguments]) == 2 and "--allow-code" in capsys.readouterr().err
    if confinement.missing(confinement.support()):
        pytest.skip("this kernel cannot isolate programs")
    (result,) = evaluate(capsys, *arguments[:-1], "--allow-code")
    assert result["measures"]["code"]["value"] == pytest.approx(2 / 3) and result["main"] == "code"
    (items,) = (tmp_path / "out").glob("*/coded.items.jsonl")
    lines = [json.loads(line) for line in items.read_text().splitlines()]
    assert [(line["outcome"], line["right"]) for line in lines] == [("passed", True)] * 2 + [("wrong", False)]
    # an evaluation without programs does not replace their scores
    write_task(tmp_path, rows, "coded", **{**yaml.safe_load((tmp_path / "coded.yaml").read_text()),
                                           "forms": ["bpb", "code"]})
    before = (items.parent / "coded.json").read_bytes()
    assert main(["eval", *arguments]) == 2 and "coded.json: has scores of programs" in capsys.readouterr().err
    assert (items.parent / "coded.json").read_bytes() == before


def test_the_list_needs_no_model(capsys):
    assert main(["eval", "--list"]) == 0
    out = capsys.readouterr().out
    assert "hellaswag" in out and "blimp" in out
    assert main(["eval"]) == 2


def test_task_files_are_in_the_wheel():
    settings = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '"evaluation/tasks/*.yaml"' in settings
    for path in (Path(__file__).resolve().parents[2] / "trainer" / "evaluation" / "tasks").iterdir():
        assert yaml.safe_load(path.read_text())["version"] >= 1
