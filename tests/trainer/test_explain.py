"""`explain` over a store written by the test: rows, documents and their places come from the order and the shards
alone. Facts from the datasets are added if the dataset is still the one from which the shards were made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.synthetic import language, make_run
from tokenizer.shards.layout import MANIFEST, Manifest
from tokenizer.shards.reader import ShardSet
from trainer.__main__ import main
from trainer.data.batches import Data
from trainer.loop.high_loss import HighLossRows
from trainer.loop.run import open_run
from trainer.observe.worst_rows import read_high_loss

STEP = 7
DOCUMENTS = 120


def dataset(store: Path, name: str, keys: tuple[str, ...]) -> None:
    """Publish the documents of a stream as a dataset, in one part for each of `keys`. The manifest of the shards is
    changed to name these parts as their source."""
    folder = store / "datasets" / f"{name}-clean"
    folder.mkdir(parents=True)
    path = store / "shards" / name / "split=train" / MANIFEST
    path.write_text(replace(Manifest.from_json(json.loads(path.read_text()), "x"), parts=keys).dumps())
    rows = [{"id": f"{i:032x}", "text": (f"text {i} \x1b[31mred " + "x" * 999)[:1000] + "y" * 9000,
             "url": f"https://{name}.example/{i}" if i % 2 else "", "locator": {"file": f"{name}/{i}.txt", "offset": 0},
             "source": name, "language": "en", "signals": {"quality": i / 7, "absent": None}, "meta": "{}"}
            for i in range(DOCUMENTS)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "part-000000.parquet", row_group_size=50)
    pq.write_table(pa.Table.from_pylist([{"part": "part-000000.parquet", "key": keys[0]}]),
                   folder / ".manifest")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    store = tmp_path_factory.mktemp("store")
    folder = make_run(store, documents=DOCUMENTS)
    dataset(store, "web", ("ab" * 32,))
    out = folder / "train"
    out.mkdir()
    before = [{"event": "step", "step": s, "loss": 3 + 0.1 * (s % 2), "grad_norm": 1.0 + s % 2}
              for s in range(1, STEP)]
    lines = [{"event": "start", "step": 0}, *before,
             {"event": "step", "step": STEP, "loss": 9.05, "grad_norm": None, "skipped": True, "why": "norm nan"}]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = 5 * (STEP - 1)
    worst = [{"step": STEP, "sample": first, "stream": "x", "loss": 99.0}, {"event": "from", "step": STEP - 1},
             {"step": STEP, "sample": first + 3, "stream": "web", "loss": 9.5},
             {"step": STEP, "sample": first + 1, "stream": "web", "loss": None}]
    (out / "worst_rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in worst))
    (out / "ledger.jsonl").write_text(json.dumps(
        {"v": 1, "event": "manual", "step": 0, "steps": [[STEP + 1, STEP + 2]], "why": "train.skip"}) + "\n")
    return folder


def said(capsys, run: Path, *arguments: object) -> dict:
    assert main(["explain", str(run), *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shown(capsys, run: Path, *arguments: object) -> str:
    assert main(["explain", str(run), *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_rows_are_those_of_the_loader_and_documents_are_whole(run, capsys):
    """Each document's tokens, read from what `language` made, stand in the window where it says."""
    opened = open_run(str(run), None, None, [])
    data = Data(opened.curriculum, opened.store)
    corpora = {name: language(10 * s, DOCUMENTS, chain=s) for s, name in enumerate(("web", "code"))}
    found = said(capsys, run, STEP)
    batch = data.step(5 * (STEP - 1), 5, 0, 1)
    assert [row["row"] for row in found["rows"]] == [2, 4, 1, 3, 5]       # no number, then 9.5, then as they stand
    for row in found["rows"]:
        sets = ShardSet(opened.store / f"shards/{row['stream']}/split=train")
        window = sets.window(row["window"], row["tokens"]).tolist()
        assert window[:-1] == batch.tokens[row["row"] - 1].tolist()
        covered = np.zeros(len(window), int)
        for d in row["documents"]:
            (first, stop), whole = d["tokens"], corpora[row["stream"]][int(d["id"], 16)]
            assert window[first:stop] == whole[d["begins"]:d["begins"] + stop - first].tolist()
            assert (d["of"], d["bytes"]) == (len(whole), 3 * len(whole))
            covered[first:stop] += 1
        assert (covered[:-1] == 1).all()
        sizes = [d["tokens"][1] - d["tokens"][0] for d in row["documents"]]
        assert sizes == sorted(sizes, reverse=True)


def test_what_the_dataset_says_is_added(run, capsys):
    found = said(capsys, run, STEP)
    flat = [(row["stream"], d) for row in found["rows"] for d in row["documents"]]
    assert {stream for stream, _ in flat} == {"web", "code"}
    for stream, d in flat:
        n = int(d["id"], 16)
        assert d.get("url") == ((f"https://web.example/{n}" if n % 2 else "") if stream == "web" else None)
        assert "text" not in d
    missing = sum(stream == "code" for stream, _ in flat)
    assert found["not_at_hand"].startswith(f"{missing} of {len(flat)} documents are not in ")
    [row] = said(capsys, run, STEP, "--worst", 1)["rows"]
    assert (row["row"], row["loss"]) == (2, None)
    [row] = said(capsys, run, STEP, "--row", next(r["row"] for r in found["rows"] if r["stream"] == "web"))["rows"]
    d = row["documents"][0]
    assert d["signals"] == {"quality": int(d["id"], 16) / 7}
    assert (d["dataset"], d["verdict"], len(d["text"])) == ("web-clean", "kept", 400)
    assert said(capsys, run, STEP, "--row", 4)["rows"][0]["loss"] == 9.5


def test_of_a_piece_its_place_in_the_document_is_told_and_the_text_from_there(run, capsys):
    """Not the beginning of a long document, which another step may have read."""
    rows = [row for row in said(capsys, run, STEP)["rows"] if row["stream"] == "web"]
    row, d = next((row["row"], d) for row in rows for d in row["documents"] if d["begins"] > d["of"] / 5)
    text = shown(capsys, run, STEP, "--row", row)
    assert f" of {d['of']:,} tokens from {d['begins']:,}  {d['id']}" in text
    assert "  … yyyyy" in text
    [inside] = [line for line in text.splitlines() if d["id"] in line]
    assert inside.endswith(d["url"] or f"web/{int(d['id'], 16)}.txt")      # files have no URL


def test_people_read_it_without_their_terminal_obeying(run, capsys):
    text = shown(capsys, run, STEP, "--worst", 2)
    one = shown(capsys, run, STEP, "--row", next(r["row"] for r in said(capsys, run, STEP)["rows"]
                                                 if r["stream"] == "web"))
    lines = text.splitlines()
    assert lines[0] == "step 7 of 44, phase stable: samples 30 to 34"
    assert lines[1] == "  changed nothing: norm nan"
    assert lines[2] == "  loss 9.05, before it 3.05 ± 0.055 (6 steps): +109.5 σ"
    assert "  →        7    9.0500         –  norm nan" in lines
    assert "\x1b" not in one
    assert text.index("row 2 (sample 31)") < text.index("row 4 (sample 33)  loss 9.5000")
    assert "kept in web-clean: quality=" in one
    assert "99.0" not in text                                             # void: written before a rewind
    assert "these are the first, not the worst" not in text
    assert "(worst_rows.jsonl): these are the first, not the worst" in shown(capsys, run, 2, "--worst", 1)


def test_a_skipped_step_says_so(run, capsys):
    text = shown(capsys, run, STEP + 1)
    assert "  was skipped (train.skip)" in text.splitlines()
    assert said(capsys, run, STEP + 1)["skip_reason"] == "train.skip"
    assert said(capsys, run, STEP)["skip_reason"] is None


def test_another_dataset_under_the_same_name_is_not_taken_for_it(run, capsys):
    """A part whose rows are other documents now, and one that has gone."""
    part = run.parents[1] / "datasets" / "web-clean" / "part-000000.parquet"
    table = pq.read_table(part)
    pq.write_table(table.take(list(range(DOCUMENTS - 1, -1, -1))), part)
    found = said(capsys, run, STEP)
    assert not any("url" in d for row in found["rows"] for d in row["documents"])
    part.unlink()
    again = said(capsys, run, STEP)
    assert again == found
    count = sum(len(row["documents"]) for row in found["rows"])
    assert found["not_at_hand"].startswith(f"{count} of {count} ")
    pq.write_table(table, part)


def test_losses_of_a_past_that_was_given_up_are_not_those_of_the_step(tmp_path):
    """Done again after a resume, a step may have no row among the worst any more; skipped, it has those of then."""
    path = tmp_path / "worst_rows.jsonl"
    row = {"step": 7, "sample": 30, "stream": "web", "loss": 9.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (
        {"event": "from", "step": 0}, row, {"step": 70, "sample": 9, "stream": "web", "loss": 1.0},
        {"event": "from", "step": 5})))
    assert read_high_loss(tmp_path, 7) == [] and read_high_loss(tmp_path, 7, True) == [row]
    with open(path, "a") as f:
        f.write(json.dumps({**row, "loss": 2.0}) + "\n")
    assert [line["loss"] for line in read_high_loss(tmp_path, 7)] == [2.0]


def test_what_a_kill_tore_does_not_take_the_next_line_with_it(tmp_path, alone):
    path = tmp_path / "worst_rows.jsonl"
    path.write_text('{"v": 1, "step": 7, "sample": 30, "stream": "web", "loss": 9.0}\n{"v": 1, "step": 8, "sam')
    HighLossRows(tmp_path, 3, ["web"], alone).begin(5)
    assert json.loads(path.read_text().splitlines()[-1]) == {"v": 1, "event": "from", "step": 5}
    assert read_high_loss(tmp_path, 7) == []


def test_what_was_read_before_an_edit_is_not_shown_beside_other_documents(tmp_path, capsys):
    run = make_run(tmp_path / "store", documents=DOCUMENTS)
    phases = open_run(str(run), None, None, []).curriculum.phases
    out = run / "train"
    out.mkdir()
    begun = {"phases": [{"name": p.name, "tokens": p.tokens, "steps": p.steps, "lr": p.lr, "sequence": p.sequence,
                         "batch": p.batch, "ramp": p.ramp} for p in phases]}
    lines = [{"v": 1, "event": "start", "step": 0, **begun}, *(
        {"v": 1, "event": "step", "step": s, "loss": 2.0, "grad_norm": 1.0} for s in range(1, 45))]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "worst_rows.jsonl").write_text(json.dumps({"step": 30, "sample": 125, "stream": "web", "loss": 5.0}) + "\n")
    assert said(capsys, run, 30)["loss"]["value"] == 2.0 and said(capsys, run, 30)["stale"] is None
    (tmp_path / "phases.yaml").write_text("- {name: other, until: 100%, mix: {web: 1, code: 9}}\n")
    assert main(["edit", str(run), "--at", "27", "--phases", str(tmp_path / "phases.yaml")]) == 0
    capsys.readouterr()
    assert said(capsys, run, 27)["loss"]["value"] == 2.0
    found = said(capsys, run, 30)
    assert found["loss"]["value"] is None and found["around"] == [] and not any(r["loss"] for r in found["rows"])
    assert "  it was performed before the curriculum was edited from step 27 on, with other samples than these: its " \
           "losses of then are left out" in shown(capsys, run, 30)
    new = open_run(str(run), None, None, []).curriculum.phases
    begun["phases"] = [{"name": p.name, "sequence": p.sequence, "batch": p.batch, "ramp": p.ramp, "steps": p.steps,
                        "weights": p.weights} for p in new]
    with open(out / "metrics.jsonl", "a") as f:                           # it went on from there
        f.write(json.dumps({"v": 1, "event": "resume", "step": 27, **begun}) + "\n"
                + json.dumps({"v": 1, "event": "step", "step": 30, "loss": 3.0, "grad_norm": 1.0}) + "\n")
    assert said(capsys, run, 30)["loss"]["value"] == 3.0
    begun["phases"][-1]["weights"] = {"web": 9, "code": 1}                 # nothing else of the phase was edited
    with open(out / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"v": 1, "event": "resume", "step": 30, **begun}) + "\n")
    assert said(capsys, run, 30)["loss"]["value"] is None and said(capsys, run, 27)["loss"]["value"] == 2.0


def test_nothing_trained_yet_and_wrong_numbers(run, capsys, tmp_path):
    text = shown(capsys, run, 44, "--out", tmp_path)
    assert text.splitlines()[:3] == ["step 44 of 44, phase anneal: samples 177 to 179", "",
                                     text.splitlines()[2]]
    assert text.splitlines()[2].startswith("row 1 (sample 177)  ")
    for arguments, message in ((("45",), "there is no step 45; the curriculum has 44"),
                               (("44", "--row", "4"), "--row 4: step 44 has 3 rows"), (("0",), "is not a whole number"),
                               (("1", "--row", "1", "--worst", "1"), "not allowed with")):
        assert main(["explain", str(run), *arguments]) == 2
        assert message in capsys.readouterr().err
