"""Recipes that read rows (training samples of one length) in the formats of other projects: each piece of a document in
a row becomes a document, and no token is lost."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.app import run_command
from pipeline.engine.driver.endings import TaskFailed
from pipeline.recipe import RecipeError, load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store
from tests.corpus import sentences
from tests.tokenizer.packs import write_packing
from tests.tokenizer.test_round_trips import write_ds, write_litdata, write_mds, write_megatron
from tokenizer.byte_level import byte_level_json
from tokenizer.export.export import export, export_rows
from tokenizer.imports.imports import FORMATS
from tokenizer.shards.layout import MANIFEST
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.verify import verify

#: sequence length of the rows, and EOS of the byte tokenizer
LENGTH, EOS = 48, 255
#: formats that give the first L tokens of a row, that give no document ends, and that give no loss masks
SHORT, BARE, NO_LOSS = {"olmo", "nanogpt"}, {"megatron", "litdata", "nanogpt"}, {"megatron", "litdata", "nanogpt"}
KEEPING = [name for name, format in FORMATS.items() if format.keeps_rows]
OLD = """version: 1
sources: {texts: {read: text, path: "texts/*.txt"}}
datasets: {all: {from: texts}}
tokenizer: {kind: bytes}
shards: {old: {from: all, longest: 48, val: 0%}}
curriculum:
  seed: 1
  total: 4800
  phases: [{name: all, until: 100%, sequence: 48, batch: 480, mix: {old: 1}}]
"""
RECIPE = """version: 1
sources:
  texts: {read: text, path: "texts/00.txt"}
  old: {read: tokens, path: FILES, format: FORMAT, tokenizer: bytes.json, sequence: 48}
datasets: {all: {from: texts}}
tokenizer: {kind: bytes}
shards: {old: {from: old, longest: 48, val: 0%}}
run: {partition: SIZE}
"""
DECODED = """version: 1
sources: {old: {read: tokens, path: FILES, format: FORMAT, tokenizer: bytes.json, decode: true, sequence: 48}}
datasets: {clean: {from: old}}
"""


class Row(NamedTuple):
    """A row of the set, as a training reads it. All lists have one value for each of its L + 1 tokens."""

    tokens: list[int]
    begins: list[bool]            # whether a document, or the padding, begins there
    counts: list[bool]            # whether the token is a target


def run(path: Path, store: Path) -> Store:
    run_recipe(load_recipe(path), str(store), make_backend=make_backend("inline", 1, None))
    return Store(str(store))


def documents(store: Path, split: str = "train") -> list[tuple[str, list[int], list[bool]]]:
    """Return (id, tokens, whether each is a target) for each document of the stream `old`."""
    shards = ShardSet(store / f"shards/old/split={split}")
    assert verify(shards.folder) == []
    result = []
    for d in shards.documents(0, shards.tokens):
        counts = shards.counts(d.start, d.stop)
        result.append((d.id, shards.read(d.start, d.stop).tolist(),
                       [True] * (d.stop - d.start) if counts is None else counts.tolist()))
    return result


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the packed rows of a set (`packed-FORMAT`) and the rows of a training (`order-FORMAT`) in every
    format."""
    folder, rng, prose = tmp_path_factory.mktemp("rows"), random.Random(5), sentences()
    (folder / "texts").mkdir()
    for i in range(70):
        text = " ".join(rng.sample(prose, rng.randint(1, 3)))
        (folder / "texts" / f"{i:02}.txt").write_text(text[:rng.choice([5, 20, 47, 48, 500])])
    (folder / "bytes.json").write_text(byte_level_json())
    (folder / "old.yaml").write_text(OLD)
    store = run(folder / "old.yaml", folder / "old-store")
    shards = folder / "old-store/shards/old/split=train"
    write_packing(shards, LENGTH)
    [name] = (folder / "old-store/runs").iterdir()
    assert run_command(["materialize", name.name, "--store", store.root, "--quiet"]) == 0
    for format in FORMATS:
        export_rows(ShardSet(shards), format, folder / f"packed-{format}", drop_loss=format in NO_LOSS)
        assert run_command(["shards", "export", "--order", name.name, "--store", store.root, "--format", format,
                            "--out", str(folder / f"order-{format}"), "--quiet"]) == 0
    return folder


def packed_rows(site: Path) -> list[Row]:
    shards = ShardSet(site / "old-store/shards/old/split=train")
    packing = shards.published_packing()
    shards = ShardSet(shards.folder, packing=packing.sha256)
    rows = []
    for number in range(len(shards.packed)):
        tokens, bounds, counts = shards.packed_row(shards.packed.row(number))
        begins = [position in bounds.tolist() for position in range(len(tokens))]
        rows.append(Row(tokens.tolist(), begins, [True, *([True] * LENGTH if counts is None else counts.tolist())]))
    return rows


def order_rows(site: Path) -> list[Row]:
    rows = []
    for path in sorted((site / "order-parquet").iterdir()):
        for row in pq.read_table(path).to_pylist():
            begins = [position in row["ends"] for position in range(LENGTH + 1)]
            rows.append(Row(row["input_ids"], begins, [True] * (LENGTH + 1)))
    return rows


def expected(rows: list[Row], format: str) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens and targets of the documents that rows become, found token by token."""
    width, result = LENGTH + (format not in SHORT), []
    for row in rows:
        pieces: list[list[tuple[int, bool]]] = [[]]
        for position in range(width):
            if pieces[-1] and (row.tokens[position - 1] == EOS if format in BARE else row.begins[position]):
                pieces.append([])
            pieces[-1].append((row.tokens[position], row.counts[position] or format in NO_LOSS))
        for number, piece in enumerate(pieces):
            if number and number == len(pieces) - 1 and set(piece) == {(EOS, False)}:
                continue                                             # padding
            if piece[-1][0] != EOS:
                piece.append((EOS, False))
            result.append(([token for token, _ in piece], [counts for _, counts in piece]))
    return result


def recipe(site: Path, kind: str, format: str, size: str = "3GB", text: str = RECIPE) -> Path:
    path = site / f"{kind}-{format}-{size}-{len(text)}.yaml"
    path.write_text(text.replace("FILES", f"{kind}-{format}").replace("FORMAT", format).replace("SIZE", size))
    return path


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["packed", "order"])
def test_each_piece_of_a_document_in_a_row_becomes_a_document(site, kind, format, tmp_path):
    store = run(recipe(site, kind, format), tmp_path / "store")
    rows = packed_rows(site) if kind == "packed" else order_rows(site)
    made = documents(store.local)
    assert [(tokens, counts) for _, tokens, counts in made] == expected(rows, format) and len(rows) >= 80
    # nothing is lost: beside the EOS behind cut pieces, the documents have the tokens of the rows without padding
    width = LENGTH + (format not in SHORT)
    padding = 0 if format in NO_LOSS else sum(not any(row.counts[p:width]) and row.begins[p] and p > 0 and
                                              (width - p) for row in rows for p in range(width))
    added = sum(tokens[-1] == EOS and not counts[-1] for _, tokens, counts in made)
    assert sum(len(tokens) for _, tokens, _ in made) - added == len(rows) * width - padding
    manifest = json.loads((store.local / f"shards/old/split=train/{MANIFEST}").read_text())
    [source] = manifest["source"]["tokens"]
    assert source["sequence"] == LENGTH and source["format"] == format


@pytest.mark.parametrize("format", KEEPING)
@pytest.mark.parametrize("kind", ["packed", "order"])
def test_documents_are_those_of_an_import_of_the_rows(site, kind, format, tmp_path):
    """The command keeps the rows, too; tokens, ids and masks of the documents are equal, however tasks divide the
    files."""
    assert run_command(["shards", "import", str(site / f"{kind}-{format}"), "--format", format, "--tokenizer",
                        str(site / "bytes.json"), "--store", str(tmp_path / "command"), "--name", "old", "--sequence",
                        str(LENGTH), "--quiet"]) == 0
    for size in ("1KB", "3GB"):
        store = run(recipe(site, kind, format, size), tmp_path / size)
        assert documents(store.local) == documents(tmp_path / "command")


@pytest.mark.parametrize("format", FORMATS)
def test_the_documents_are_exported_and_come_back(site, format, tmp_path):
    store = run(recipe(site, "packed", "ds"), tmp_path / "store")
    shards = ShardSet(store.local / "shards/old/split=train")
    export(shards, format, site / f"again-{tmp_path.name}-{format}", drop_loss=format in NO_LOSS)
    text = RECIPE.replace(", sequence: 48", "")
    again = run(recipe(site, f"again-{tmp_path.name}", format, text=text), tmp_path / "again")
    assert [(tokens, counts if format not in NO_LOSS else None) for _, tokens, counts in documents(again.local)] == \
        [(tokens, counts if format not in NO_LOSS else None) for _, tokens, counts in documents(store.local)]


@pytest.mark.parametrize(("format", "write"), [("ds", write_ds), ("megatron", write_megatron), ("mds", write_mds),
                                               ("litdata", write_litdata)])
def test_rows_that_a_project_s_own_writer_has_written_become_documents(site, format, write, tmp_path):
    """Rows of L + 1 tokens as another project packs them: back to back, with EOS between documents."""
    rng = np.random.default_rng(7)
    rows = [rng.choice([EOS, *range(4, 90)], LENGTH + 1).astype("u2") for _ in range(30)]
    rows[4][:] = 9                                                   # no document ends in this row
    (site / f"theirs-{format}").mkdir()
    write(site / f"theirs-{format}", rows)
    store = run(recipe(site, "theirs", format), tmp_path / "store")
    ends = [[*(p for p in range(1, LENGTH + 1) if row[p - 1] == EOS), LENGTH + 1] for row in rows]
    if format == "ds":                                               # its index has the ends of rows alone
        ends = [[LENGTH + 1] for _ in rows]
    pieces = [row[begin:end].tolist() for row, stops in zip(rows, ends) for begin, end in zip([0, *stops], stops)]
    assert [tokens for _, tokens, _ in documents(store.local)] == \
        [piece if piece[-1] == EOS else [*piece, EOS] for piece in pieces]


@pytest.mark.parametrize("columns", [["input_ids"], ["input_ids", "ends"]])
def test_packed_samples_of_a_parquet_file_become_documents(site, columns, tmp_path):
    rng = np.random.default_rng(9)
    rows = rng.choice([EOS, 5, 6, 7, 8, 9, 10, 11, 12], (40, LENGTH + 1)).tolist()
    ends = [[10, 30], *([[]] * 39)]
    (site / f"hub{len(columns)}-parquet").mkdir()
    pq.write_table(pa.table({"input_ids": rows, "ends": pa.array(ends, pa.list_(pa.uint32()))}).select(columns),
                   site / f"hub{len(columns)}-parquet" / "a.parquet")
    store = run(recipe(site, f"hub{len(columns)}", "parquet"), tmp_path / "store")
    pieces: list[Sequence[int]] = []
    for row, borders in zip(rows, ends):
        stops = borders if len(columns) == 2 else [p for p in range(1, LENGTH + 1) if row[p - 1] == EOS]
        pieces += [row[begin:end] for begin, end in zip([0, *stops], [*stops, LENGTH + 1])]
    assert [tokens for _, tokens, _ in documents(store.local)] == \
        [piece if piece[-1] == EOS else [*piece, EOS] for piece in pieces]


@pytest.mark.parametrize("format", FORMATS)
def test_pieces_of_rows_are_decoded_to_the_texts_that_they_spell(site, format, tmp_path):
    store = run(recipe(site, "order", format, text=DECODED), tmp_path / "store")
    texts = [row["text"] for path in sorted((store.local / "datasets/clean").glob("*.parquet"))
             for row in pq.read_table(path).to_pylist()]
    pieces = [bytes(tokens[:-1]).decode(errors="replace") for tokens, _ in expected(order_rows(site), format)]
    assert sorted(texts) == sorted(piece for piece in pieces if piece and not piece.isspace())


def test_padding_is_left_out_of_texts_and_a_mask_of_documents_is_not_lost(site, tmp_path):
    """Packed rows have loss masks for their padding alone, so the files are read; a mask of other tokens is refused."""
    store = run(recipe(site, "packed", "parquet", text=DECODED), tmp_path / "store")
    texts = [row["text"] for path in (store.local / "datasets/clean").glob("*.parquet")
             for row in pq.read_table(path).to_pylist()]
    pieces = [bytes(tokens[:-1]).decode(errors="replace") for tokens, _ in expected(packed_rows(site), "parquet")]
    assert sorted(texts) == sorted(piece for piece in pieces if piece and not piece.isspace())
    shutil.copytree(site / "packed-ds", site / "masked-ds")
    for mask in (site / "masked-ds").glob("*.loss"):
        mask.write_bytes(b"\1\0" + mask.read_bytes()[2:])
    store = run(recipe(site, "masked", "ds", text=DECODED), tmp_path / "masked")
    [report] = [p for p in store.list("runs") if p.endswith("/report.json")]
    assert "corrupt_tokens" in store.read(report).decode()


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_another_length_end_the_run_and_leave_no_shards(site, format, tmp_path):
    path = recipe(site, "packed", format, text=RECIPE.replace("sequence: 48", "sequence: 47"))
    with pytest.raises(TaskFailed, match="sequence 47") as error:
        run(path, tmp_path / "store")
    assert "\n" not in str(error.value) and not (tmp_path / "store/shards").exists()


@pytest.mark.parametrize("format", ["megatron", "mds"])
def test_rows_without_their_length_are_refused_with_the_setting_to_give(site, format, tmp_path):
    path = recipe(site, "packed", format, text=RECIPE.replace(", sequence: 48", ""))
    with pytest.raises(TaskFailed, match="`sequence:`"):
        run(path, tmp_path / "store")


def test_a_negative_length_is_an_error_of_the_recipe(site):
    with pytest.raises(RecipeError, match=r"sources\.old\.sequence"):
        load_recipe(recipe(site, "packed", "ds", text=RECIPE.replace("sequence: 48", "sequence: -1")))
