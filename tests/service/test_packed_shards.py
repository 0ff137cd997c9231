"""A recipe with `packing: best-fit`: from its run to what the service and the commands say about steps and
documents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.app import run_command
from pipeline.recipe import RecipeError, load_recipe
from tests.service.shard_site import RECIPE, make_site
from tests.service.test_pages import client_of
from tests.tokenizer.packs import slow_rows
from tokenizer.mixture.curriculum import Curriculum, Order
from tokenizer.mixture.steps import rows_of, steps
from tokenizer.shards.layout import ENDS
from tokenizer.shards.reader import ShardSet

PACKED = RECIPE.replace("val: 5%", "val: 5%, packing: best-fit").replace("sequence: 32", "sequence: 64")
API = "/api/v1/stores/main/shards"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_site(tmp_path_factory.mktemp("packed"), PACKED)


@pytest.fixture(scope="module")
def curriculum(root) -> Curriculum:
    return Curriculum.load(root / "runs/main/curriculum.json")


@pytest.fixture(scope="module")
def rows(root) -> list[list[tuple[int, int]]]:
    shards = ShardSet(root / "shards/web/split=train")
    [info] = shards.manifest.shards
    ends = np.fromfile(shards.folder / info.ends, ENDS).astype(np.int64)
    return slow_rows(np.diff(ends, prepend=0).tolist(), 64)


def test_a_run_packs_the_stream_and_names_the_rows_in_its_curriculum(root, curriculum, rows):
    [stream] = curriculum.streams
    assert stream.rows == len(rows) and Order(curriculum).supers == [len(rows)]
    assert stream.filled == sum(stop - start for row in rows for start, stop in row) - len(rows)


def test_a_step_has_the_documents_of_its_rows(root, curriculum, rows):
    api, shards = client_of({"main": root}), ShardSet(root / "shards/web/split=train")
    for step in list(steps(curriculum))[::9]:
        answer = api.get(f"{API}/steps/{step.number + 1}").json()
        assert [r["window"] for r in answer["rows"]] == [r["window"] for r in rows_of(curriculum, step)]
        for row in answer["rows"]:
            held = {shards.documents(start, start + 1)[0].id for start, _ in rows[row["window"]]}
            assert {d["id"] for d in row["documents"]} == held


def test_the_command_explains_the_rows_as_the_service_does(root, curriculum, capsys):
    api = client_of({"main": root})
    for step in list(steps(curriculum))[::9]:
        assert run_command(["shards", "explain", str(root / "runs/main"), "--step", str(step.number + 1),
                            "--json"]) == 0
        ours, theirs = json.loads(capsys.readouterr().out)["rows"], api.get(f"{API}/steps/{step.number + 1}").json()
        assert [[(d["id"], d["tokens"], d["begins"]) for d in row["documents"]] for row in ours] == \
            [[(d["id"], d["tokens"], d["begins"]) for d in row["documents"]] for row in theirs["rows"]]


def test_the_command_says_when_the_packed_rows_are_gone(root, curriculum, tmp_path, capsys):
    shutil.copytree(root, tmp_path / "store")
    [stream] = curriculum.streams
    (tmp_path / "store" / stream.train / f"packed-{stream.packing[:16]}.json").unlink()
    assert run_command(["shards", "explain", str(tmp_path / "store/runs/main"), "--step", "1"]) != 0
    assert f"packed-{stream.packing[:16]}.json" in capsys.readouterr().err


def test_a_document_is_read_by_the_steps_that_draw_its_rows(root, curriculum, rows):
    api, shards = client_of({"main": root}), ShardSet(root / "shards/web/split=train")
    drawn = [(step.number + 1, r["window"]) for step in steps(curriculum) for r in rows_of(curriculum, step)]
    for span in shards.documents(0, shards.tokens)[::7]:
        [place] = api.get(f"{API}/find", params={"id": span.id}).json()["places"]
        held = [n for n, row in enumerate(rows) if any(a < span.stop and b > span.start for a, b in row)]
        assert place["rows"] == held and place["windows"] == {}
        assert sorted(s["step"] for s in place["steps"]) == sorted(n for n, window in drawn if window in held)


def test_the_page_of_a_document_names_its_rows(root, rows):
    span = ShardSet(root / "shards/web/split=train").documents(0, 1)[0]
    page = client_of({"main": root}).get(f"/stores/main/shards?id={span.id}")
    assert page.status_code == 200 and "packed row" in page.text


def test_stats_and_report_count_rows_and_padding(root, rows, capsys):
    assert run_command(["shards", "stats", str(root / "shards/web/split=train"), "--json"]) == 0
    packing = json.loads(capsys.readouterr().out)["packing"]
    filled = sum(stop - start for row in rows for start, stop in row)
    assert (packing["rows"], packing["pieces"]) == (len(rows), sum(map(len, rows)))
    assert packing["padding"] == pytest.approx(1 - (filled - len(rows)) / (64 * len(rows)), abs=1e-6)
    document = json.loads((root / "runs/main/report.json").read_text())
    stated = document["tokens"]["web"]["packing"]
    assert (stated["rows"], stated["tokens"], stated["padding"]) == (len(rows), filled, 65 * len(rows) - filled)
    assert all(row["padding"] >= 0 for row in document["mixture"])


def test_the_store_is_verified_with_its_packed_rows(root, tmp_path):
    assert run_command(["store", "verify", "--store", str(root)]) == 0
    copy = tmp_path / "store"
    shutil.copytree(root, copy)
    [path] = (copy / "shards/web/split=train").glob("*.packed")
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert run_command(["store", "verify", "--store", str(copy)]) != 0
    assert run_command(["shards", "verify", str(path.parent)]) != 0


def test_another_sequence_is_refused_by_the_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    path.write_text(RECIPE.replace("val: 5%", "val: 5%, packing: best-fit"))
    with pytest.raises(RecipeError, match=r"curriculum\.phases\[0\]\.sequence.*packing"):
        load_recipe(path, [])
    path.write_text(RECIPE.replace("val: 5%", "val: 5%, packing: first-fit"))
    with pytest.raises(RecipeError, match=r"shards\.web\.packing"):
        load_recipe(path, [])


def test_the_page_of_a_window_shows_the_packed_row(root, rows):
    api, shards = client_of({"main": root}), ShardSet(root / "shards/web/split=train")
    for number in range(0, len(rows), 7):
        shown = api.get(f"{API}/web/train/windows/{number}", params={"length": 64}).json()
        held = [(shards.documents(start, start + 1)[0].id, stop - start) for start, stop in rows[number]]
        assert shown["packed"] and sorted((d["id"], d["tokens"][1] - d["tokens"][0]) for d in shown["documents"]) == \
            sorted(held)
    page = api.get("/stores/main/shards/web/train/windows/3", params={"length": 64}).text
    assert "Packed row 3" in page and "Window 3" not in page
    for number, length, key in ((len(rows), 64, "window"), (0, 32, "length")):
        refused = api.get(f"{API}/web/train/windows/{number}", params={"length": length})
        assert refused.status_code == 404 and refused.json()["key"] == key
