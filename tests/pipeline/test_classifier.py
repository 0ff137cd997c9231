"""`tokenmill classifier train`, `check` and `score`, and the trained model as a step of a recipe."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from tests.stages.labelled import GOOD, GRADED, LABELLED, POOR, shaped

SMALL = ("--dim", 8, "--epochs", 10, "--rate", 0.5, "--buckets", 4096)


def lines(path: Path, rows: list[dict]) -> Path:
    """Write a file of JSON lines, compressed as its suffix says."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as f:
            f.write(data)
        return path
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with good.jsonl.gz, rest/ (Parquet), labelled.jsonl.zst, and quality.bin, which was trained on the first
    two."""
    from pipeline.cli.app import run_command

    at = tmp_path_factory.mktemp("classifier")
    lines(at / "good.jsonl.gz", [{"text": text, "label": label} for label, text in LABELLED if label == "hq"])
    (at / "rest").mkdir()
    pq.write_table(pa.table({"text": [text for label, text in LABELLED if label == "lq"]}), at / "rest" / "p.parquet")
    lines(at / "labelled.jsonl.zst", [{"body": text, "stars": int(grade)} for grade, text in GRADED] + [{"body": "x"}])
    code = run_command([str(a) for a in (
        "classifier", "train", "--positive", at / "good.jsonl.gz", "--negative", at / "rest", "--reference",
        at / "good.jsonl.gz", "--reference", at / "rest", "--keep", 0.25, "--held-out", 0.6, "--out",
        at / "quality.bin", "--intended-use", "Tests.", "--license", "CC0-1.0", *SMALL)])
    assert code == 0
    return at


def test_train_from_lines_and_tables(folder, tmp_path, tokenmill):
    card = json.loads((folder / "quality.card.json").read_text())
    assert [(d["label"], d["file"], d["documents"]) for d in card["data"]] == [
        ("hq", "good.jsonl.gz", 120), ("lq", "rest", 120)]
    assert 0.24 < card["threshold"]["kept"] <= 0.25
    assert (card["intended_use"], card["license"]) == ("Tests.", "CC0-1.0")
    assert str(folder) not in (folder / "quality.card.json").read_text()
    said = tokenmill("classifier", "train", "--positive", folder / "good.jsonl.gz", "--negative", folder / "rest",
                     "--reference", folder / "rest", "--held-out", 0.6, "--out", tmp_path / "q.bin", *SMALL)
    assert said.code == 0 and "ROC-AUC" in said.out
    step = said.out.partition("step: ")[2].strip()
    assert step.startswith("quality: {model: q.bin, calibration: q.calibration.json, min: 0.")
    assert (tmp_path / "q.bin").read_bytes() == (folder / "quality.bin").read_bytes()


def test_train_from_labelled_rows(folder, tmp_path, tokenmill):
    at = ("classifier", "train", "--labelled", folder / "labelled.jsonl.zst", "--text-column", "body", "--out",
          tmp_path / "g.bin", *SMALL)
    [made] = tokenmill(*at, "--label-column", "stars", "--json").json()
    assert made["model"] == str(tmp_path / "g.bin") and made["card"]["kind"] == "grades"
    assert made["card"]["labels"] == ["0", "1", "2", "3"] and made["card"]["data"][0]["documents"] == len(GRADED)
    said = tokenmill(*at)
    assert said.code == 2 and "no row of it has a label at 'label'; name it with --label-column" in said.err
    [scored] = tokenmill("classifier", "score", tmp_path / "g.bin", folder / "labelled.jsonl.zst", "--text-column",
                         "body", "--json").json()
    assert scored["documents"] == len(GRADED) + 1 and 1 < scored["mean"] < 2


def test_train_names_the_mistake(folder, tmp_path, tokenmill):
    (tmp_path / "one.txt").write_text("one text")
    (tmp_path / "no.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    lines(tmp_path / "other.jsonl", [{"body": "x"}])
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "other.parquet")
    at = ("--negative", folder / "rest", "--out", tmp_path / "q.bin")
    for positive, code, text in ((tmp_path / "nosuch", 2, "no such file"),
                                 (tmp_path / "one.txt", 1, "two texts or more"),
                                 (tmp_path / "no.parquet", 2, "is no parquet file that can be read"),
                                 (tmp_path / "empty", 2, "holds neither"),
                                 (tmp_path / "other.jsonl", 2, "no line of it has a text at 'text'"),
                                 (tmp_path / "other.parquet", 2, "no column 'text'; it has body")):
        said = tokenmill("classifier", "train", "--positive", positive, *at)
        assert said.code == code and text in said.err, (positive, said.err)
    for arguments in ((), ("--positive", folder / "rest"), ("--negative", folder / "rest"),
                      ("--positive", folder / "rest", "--negative", folder / "rest", "--labelled", folder / "rest")):
        said = tokenmill("classifier", "train", *arguments, "--out", tmp_path / "q.bin")
        assert said.code == 2 and "give --positive and --negative, or --labelled" in said.err
    said = tokenmill("classifier", "train", "--positive", folder / "rest", *at, "--rate", 0)
    assert said.code == 2 and "--rate" in said.err
    (tmp_path / "file").write_text("")
    said = tokenmill("classifier", "train", "--positive", folder / "good.jsonl.gz", "--negative", folder / "rest",
                     "--out", tmp_path / "file" / "q.bin")
    assert said.code == 1 and "cannot write" in said.err and "--out" in said.err


def test_check_tells_drift(folder, tmp_path, tokenmill):
    model, both = folder / "quality.bin", (folder / "good.jsonl.gz", folder / "rest")
    said = tokenmill("classifier", "check", model, *both)
    assert said.code == 0 and "no drift" in said.out and "% of the reference corpus" in said.out
    [found] = tokenmill("classifier", "check", model, *both, "--json").json()
    scores = tokenmill("classifier", "score", model, *both, "--out", tmp_path / "all.jsonl")
    scores = [json.loads(line)["score"] for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert found["kept"]["is"] == round(sum(s >= found["kept"]["min"] for s in scores) / 240, 4)
    said = tokenmill("classifier", "check", model, folder / "good.jsonl.gz")
    assert said.code == 1 and "scores    drift " in said.out and "--reference" in said.out
    [found] = tokenmill("classifier", "check", model, *both, "--against", "held_out", "--json").json()
    assert found["against"] == "held_out" and found["verdict"] == "too_few", "fewer than 100 were held out"
    said = tokenmill("classifier", "check", model, *both, "-n", 20)
    assert said.code == 0 and "too few documents" in said.out
    new = lines(tmp_path / "new.jsonl", [{"text": shaped(t, 9000 + i), "label": label} for i, (label, t) in enumerate(
        [("hq", t) for t in GOOD] + [("lq", t) for t in POOR])])
    [found] = tokenmill("classifier", "check", model, new, "--label-column", "label", "--json").json()
    [q] = found["measured"]["questions"]
    assert q["documents"] == 240 and q["roc_auc"] > 0.95
    assert "ROC-AUC" in tokenmill("classifier", "check", model, new, "--label-column", "label").out
    ones = lines(tmp_path / "ones.jsonl", [
        {"text": json.loads(line)["text"], "label": int(json.loads(line)["label"] == "hq"), "other": "x"}
        for line in new.read_text().splitlines()])
    [again] = tokenmill("classifier", "check", model, ones, "--label-column", "label", "--json").json()
    assert again["measured"] == found["measured"]
    said = tokenmill("classifier", "check", model, ones, "--label-column", "other")
    assert said.code == 2 and "no row has a label of the model (hq, lq) at 'other'; there is: x" in said.err


def test_check_names_the_mistake(folder, tmp_path, tokenmill):
    for name in ("quality.bin", "quality.card.json", "quality.calibration.json"):
        shutil.copy(folder / name, tmp_path / name)
    model, data = tmp_path / "quality.bin", folder / "rest"
    said = tokenmill("classifier", "check", model, data, "--against", "web")
    assert said.code == 2 and "no profile 'web'; it has: held_out, reference" in said.err
    (tmp_path / "quality.calibration.json").unlink()
    said = tokenmill("classifier", "check", model, data)
    assert said.code == 2 and "keep the file beside it" in said.err
    model.write_bytes(model.read_bytes() + b"\0")
    assert "card of another model" in tokenmill("classifier", "check", model, data).err
    (tmp_path / "quality.card.json").unlink()
    said = tokenmill("classifier", "check", model, data)
    assert said.code == 2 and "has no card" in said.err
    assert "cannot read" in tokenmill("classifier", "score", tmp_path / "no.bin", data).err


def test_scores_are_those_of_the_step(folder, tmp_path, tokenmill):
    model = folder / "quality.bin"
    said = tokenmill("classifier", "score", model, folder / "rest", "--out", tmp_path / "s.parquet")
    assert said.code == 0 and said.out.startswith("120 documents, ")
    table = pq.read_table(tmp_path / "s.parquet")
    [found] = tokenmill("classifier", "score", model, folder / "rest", "--out", tmp_path / "s.jsonl", "--json").json()
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert table.to_pylist() == rows and len({row["id"] for row in rows}) == 120
    values = sorted(row["score"] for row in rows)
    assert found["quantiles"]["50%"] == values[59] and found["mean"] == pytest.approx(sum(values) / 120, abs=1e-6)
    raw = tokenmill("classifier", "score", model, folder / "rest", "--raw", "--json").json()[0]
    assert raw["mean"] != found["mean"]
    assert tokenmill("classifier", "score", model, folder / "rest", "--out", tmp_path / "s.csv").code == 2
    was, nothing = (tmp_path / "s.parquet").read_bytes(), tmp_path / "nothing.jsonl"
    nothing.write_text("")
    assert tokenmill("classifier", "score", model, nothing, "--out", tmp_path / "s.parquet").code == 2
    assert (tmp_path / "s.parquet").read_bytes() == was, "all scores, or those of before"
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".scores")]
    said = tokenmill("classifier", "score", model, folder / "rest", "--label", "good")
    assert said.code == 2 and "it has hq, lq" in said.err

    (tmp_path / "recipe.yaml").write_text(f"""
version: 1
sources: {{rest: {{read: parquet, path: {folder}/rest}}}}
datasets:
  scored:
    from: rest
    steps: [{{quality: {{model: {model}, calibration: {folder}/quality.calibration.json, min: {values[60]}}}}}]
""")
    run_recipe(load_recipe(tmp_path / "recipe.yaml"), str(tmp_path / "store"),
               make_backend=make_backend("inline", 1, None), report=False)
    kept, dropped = (pq.read_table(tmp_path / "store" / kind / "scored").to_pylist()
                     for kind in ("datasets", "dropped"))
    assert sorted(row["signals"]["quality_score"] for row in [*kept, *dropped]) == values
    assert {row["reason"] for row in dropped} == {"quality"} and len(kept) == sum(v >= values[60] for v in values)
