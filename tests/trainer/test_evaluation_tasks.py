"""Tasks: what becomes of their rows, which measures follow from likelihoods, and what is refused before a model is
loaded."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.parquet import write_table
from tests import conftest
from tests.trainer.evaluation import EOS, SMALL, Bytes, alone, model_of, quiz, reader, write_task
from trainer.base.config import ConfigError
from trainer.evaluation.evaluate import prepare, score
from trainer.evaluation.items import ExamplePool, cloze, lettered, make_items
from trainer.evaluation.measures import PERMUTATIONS, accuracy, mean, normalised
from trainer.evaluation.rows import find_files, read_rows
from trainer.evaluation.task_file import FOLDER, GenerateConfig, built_in, read_task, tasks_named
from trainer.evaluation.template import TemplateError, render
from trainer.model.loss import IGNORE


# -- templates ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("template", "text"), [
    ("{a}: {b.c.1}", "x: 2"), ("{none/a}", "x"), ("{{{a}}}", "{x}"), ("{s|before:_}|{s|after:_|strip}", "one |two"),
    ("{a|after:_}", "x"), ("{s|capitalize}", "One _ two"), ("{n}", "7"), ("", "")])
def test_templates_insert_fields(template: str, text: str):
    assert render(template, {"a": "x", "b": {"c": [1, 2]}, "s": "one _ two", "n": 7}) == text


@pytest.mark.parametrize("template", ["{missing}", "{b}", "{empty}", "{a|eval}", "{a", "a}", "{a.__class__}", "{b.9}",
                                      "{a[0]}", "{}", "{a!r}"])
def test_templates_that_do_not_fit_are_refused(template: str):
    with pytest.raises(TemplateError):
        render(template, {"a": "x", "b": ["y"], "empty": None})


@given(st.text(max_size=30))
def test_texts_of_rows_are_never_templates(text: str):
    assert render("{a}{a}", {"a": text}) == text * 2


def test_hellaswag_is_cleaned():
    text = "[header] How to cook [title] Take a pot. [title] Fill it. [step] Water  is [substeps] enough."
    assert render("{a|wikihow}", {"a": text}) == " How to cook. Take a pot. Fill it. Water is enough."


# -- rows -----------------------------------------------------------------------------------------------------------
def test_all_kinds_of_files_give_the_same_rows(tmp_path: Path):
    rows = quiz(40)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    table = pa.Table.from_pylist(rows)
    write_table(table, tmp_path / "c.parquet")
    with pa.OSFile(str(tmp_path / "d.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    for path in sorted(tmp_path.iterdir()):
        assert [dict(row.values) for row in read_rows([path])] == rows, path
    both = list(read_rows([tmp_path / "a.jsonl", tmp_path / "c.parquet"]))
    assert [row.number for row in both] == list(range(80))


def test_files_that_unpack_to_too_much_are_refused_with_a_line(tmp_path: Path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"q": 1}\n' * 100))
    limits = {"most_rows": 100, "most_bytes": 5000}
    assert len(list(read_rows([file], **limits))) == 100
    with pytest.raises(ConfigError, match="more than 100 rows"):
        list(read_rows([file, file], **limits))
    file.write_bytes(gzip.compress(b"\n" * 5001))
    with pytest.raises(ConfigError, match="more than 5,000 bytes"):
        list(read_rows([file], **limits))


def test_small_tables_that_unpack_to_too_much_are_refused(tmp_path: Path):
    """Each file is smaller than a tenth of the limit, which its rows exceed: by compression, by a dictionary or views
    that show a text again and again, or by lists of nulls, which take no bytes at all."""
    texts = pa.array(["x" * 5000] * 40)
    view = pa.array(["x" * 5000], pa.string_view())
    views = pa.Array.from_buffers(pa.string_view(), 40, [None, pa.py_buffer(view.buffers()[1].to_pybytes() * 40),
                                                         view.buffers()[2]])
    nulls = pa.array([[None] * 20_000], pa.list_(pa.null()))

    def arrow(column: pa.Array, **options: Any) -> Path:
        table = pa.table({"q": column})
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(
                sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(table)
        return tmp_path / "a.arrow"

    def parquet(column: pa.Array, **options: Any) -> Path:
        write_table(pa.table({"q": column}), tmp_path / "a.parquet", **options)
        return tmp_path / "a.parquet"

    for make in (lambda: arrow(texts, compression="zstd"), lambda: arrow(texts, compression="lz4"),
                 lambda: arrow(texts.dictionary_encode()), lambda: arrow(views), lambda: arrow(nulls),
                 lambda: parquet(texts, use_dictionary=False), lambda: parquet(texts), lambda: parquet(nulls)):
        file = make()
        assert file.stat().st_size < 10_000
        with pytest.raises(ConfigError, match=rf"{file.name}: unpacks to more than 100,000 bytes.*smaller part"):
            list(read_rows([file], most_bytes=100_000))
    for column in (texts[:3], texts[:3].dictionary_encode(), views[:3]):
        for file in (arrow(column, compression="zstd"), arrow(column), parquet(column)):
            assert [row.values["q"] for row in read_rows([file], most_bytes=100_000)] == ["x" * 5000] * 3


@contextlib.contextmanager
def own_pool() -> Iterator[pa.MemoryPool]:
    """A context manager in which pyarrow uses a memory pool that nothing else uses."""
    pool, default = pa.system_memory_pool(), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(default)


def test_a_row_group_that_unpacks_to_too_much_is_not_read(tmp_path: Path):
    write_table(pa.table({"q": ["x" * (12 << 20)]}), tmp_path / "a.parquet", use_dictionary=False)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(
            sink, pa.schema({"q": pa.string()}), options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(pa.table({"q": ["x" * (12 << 20)]}))
    for name in ("a.parquet", "a.arrow"):
        with own_pool() as pool, pytest.raises(ConfigError, match="unpacks to more than"):
            list(read_rows([tmp_path / name], most_bytes=1 << 20))
        assert pool.max_memory() < 4 << 20, name


def test_a_row_group_that_is_larger_than_the_file_says_is_refused(tmp_path: Path):
    path = tmp_path / "a.parquet"
    write_table(pa.table({"q": ["x" * (256 << 20)]}), path, use_dictionary=False, write_statistics=False)
    data = path.read_bytes()
    size = 2 * pq.read_metadata(path).row_group(0).total_byte_size
    varint = bytes(size >> shift & 127 | (128 if size >> shift + 7 else 0) for shift in range(0, size.bit_length(), 7))
    place = data.rindex(varint)
    path.write_bytes(data[:place] + b"\x80" * (len(varint) - 1) + b"\0" + data[place + len(varint):])
    assert pq.read_metadata(path).row_group(0).total_byte_size == 0 and path.stat().st_size < 50_000
    message = r"a\.parquet: takes more than 25,165,824 bytes of memory.*smaller part"
    with own_pool() as pool, pytest.raises(ConfigError, match=message):
        list(read_rows([path], most_memory=24 << 20))
    assert pool.max_memory() < 300 << 20


def test_rows_that_take_no_bytes_become_objects_a_few_at_a_time(tmp_path: Path):
    table = pa.table({"q": pa.nulls(500_000)})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    rows, before = read_rows([tmp_path / "a.arrow"]), sys.getallocatedblocks()
    assert next(rows).values == {"q": None} and sys.getallocatedblocks() - before < 50_000


def read_with_damaged_footers(folder: Path) -> int:
    """Read a Parquet file with each bit of its footer flipped, one at a time. Returns how many were refused."""
    write_table(pa.table({"q": ["one", "two"], "n": [[1], [2, 3]]}), folder / "a.parquet")
    data, refused = (folder / "a.parquet").read_bytes(), 0
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for place in range(footer, len(data) - 8):
        for bit in range(8):
            (folder / "b.parquet").write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1:])
            try:
                list(read_rows([folder / "b.parquet"]))
            except ConfigError:
                refused += 1
    return refused


@pytest.mark.slow
def test_a_damaged_footer_does_not_crash_the_process(tmp_path: Path):
    assert conftest.alone(read_with_damaged_footers, tmp_path) > 100


def test_arrow_columns_that_show_values_any_number_of_times_are_refused(tmp_path: Path):
    views = pa.ListViewArray.from_arrays([0] * 100, [100] * 100, pa.array(range(100)))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(
            sink, pa.schema({"q": views.type})) as writer:
        writer.write_table(pa.table({"q": views}))
    with pytest.raises(ConfigError, match=r"a.arrow: the column q has the type list_view.*JSON Lines"):
        list(read_rows([tmp_path / "a.arrow"]))


@pytest.mark.parametrize(("name", "data"), [
    ("a.jsonl", b'{"q": 1}\nnot json\n'), ("a.jsonl", b"[1]\n"), ("a.jsonl", b'{"q": "' + b"x" * (17 << 20) + b'"}'),
    ("a.jsonl.gz", gzip.compress(b'{"q": 1}\n', mtime=0)[:-9]), ("a.jsonl.gz", b"no gzip"), ("a.parquet", b"PAR1"),
    ("a.arrow", b"\xff" * 64), ("a.jsonl", b'{"q": "\xff\xfe"}'), ("a.jsonl", b"[" * 100_000),
    ("a.jsonl", b'{"q": "\\ud800"}'), ("a.jsonl", b'{"q": "\xed\xa0\x80"}')])
def test_damaged_files_are_named(tmp_path: Path, name: str, data: bytes):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=name) as error:
        list(read_rows([tmp_path / name]))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_tasks_own_file_comes_first(tmp_path: Path):
    (tmp_path / "deep" / "x").mkdir(parents=True)
    (tmp_path / "deep" / "x" / "p.arrow").write_bytes(b"")
    assert [p.name for p in find_files(tmp_path, "quiz", ["**/x/*"])] == ["p.arrow"]
    (tmp_path / "quiz.jsonl.gz").write_bytes(b"")
    assert [p.name for p in find_files(tmp_path, "quiz", ["**/x/*"])] == ["quiz.jsonl.gz"]


# -- items and prompts ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", built_in())
def test_built_in_tasks_are_sound(name: str):
    (task,) = tasks_named([name])
    assert task.file.version >= 1 and task.file.description


def test_prompts_of_both_forms(tmp_path: Path):
    task = write_task(tmp_path, quiz(3))
    items = make_items(task, read_rows([tmp_path / "data" / "quiz.jsonl"]))
    assert items[1].choices == ("green apple", "a very long answer, indeed", "x") and items[1].gold == 1
    first = cloze(task, items[1], [items[0]])
    assert [p.context for p in first] == ["Q: what is 0?\nA: red\n\nQ: what is 919? why\nA:"] * 3
    assert [p.continuation for p in first] == [" green apple", " a very long answer, indeed", " x"]
    second = lettered(task, items[1], [items[0]])
    assert second[2].context == ("Q: what is 0?\n A. red\n B. green apple\nA: A\n\n"
                                 "Q: what is 919? why\n A. green apple\n B. a very long answer, indeed\n C. x\nA:")
    assert [p.continuation for p in second] == [" A", " B", " C"]


def test_shuffled_answers_keep_the_right_one(tmp_path: Path):
    rows = [{"q": str(i), "answers": ["right", "w1", "w2", "w3"], "right": 0} for i in range(400)]
    items = make_items(write_task(tmp_path, rows, shuffle=True), read_rows([tmp_path / "data" / "quiz.jsonl"]))
    assert all(item.choices[item.gold] == "right" for item in items)
    shares = np.bincount([item.gold for item in items]) / 400
    assert shares.min() > 0.15 and shares.max() < 0.35


def test_examples_depend_on_task_item_and_seed_alone(tmp_path: Path):
    task = write_task(tmp_path, quiz(50))
    items = make_items(task, read_rows([tmp_path / "data" / "quiz.jsonl"]))
    chosen = {item.id: [e.id for e in ExamplePool(task, items, 0).examples(item, 4)] for item in items}
    again = ExamplePool(task, items, 0)
    for item in reversed(items):
        assert [e.id for e in again.examples(item, 4)] == chosen[item.id]
        assert item.id not in chosen[item.id] and len(set(chosen[item.id])) == 4
    other = ExamplePool(task, items, 1)
    assert sum([e.id for e in other.examples(item, 4)] == chosen[item.id] for item in items) < 5
    # fewer examples are the first of more
    assert [e.id for e in again.examples(items[7], 2)] == chosen["7"][:2]
    used = np.bincount([int(e) for ids in chosen.values() for e in ids], minlength=50)
    assert (used > 0).mean() > 0.9 and used.max() <= 12


def test_examples_do_not_depend_on_the_order_of_rows(tmp_path: Path):
    def prompts(rows: list[dict]) -> set[str]:
        task = write_task(tmp_path, rows)
        items = make_items(task, read_rows([tmp_path / "data" / "quiz.jsonl"]))
        pool = ExamplePool(task, items, 0)
        return {cloze(task, item, pool.examples(item, 3))[0].context for item in items}

    rows = quiz(40)
    assert prompts(rows) == prompts(rows[::-1]) == prompts(rows[7:] + rows[:7])


def test_copies_of_a_question_are_never_its_examples(tmp_path: Path):
    """Neither in the rows of the task, nor in rows of examples; not even if nothing else is left."""
    row = {"q": "which?", "answers": ["red", "green"], "right": 1, "n": 0}
    rows = [{**row, "n": i} for i in range(8)] + [{**row, "answers": ["green", " blue"], "right": 0}, *quiz(3)]
    task = write_task(tmp_path, rows)
    items = make_items(task, read_rows([tmp_path / "data" / "quiz.jsonl"]))
    pool = ExamplePool(task, items, 0)
    assert all(e.values["q"] != "which?" for item in items[:9] for e in pool.examples(item, 3))
    with pytest.raises(ConfigError, match="only 3 rows"):
        pool.examples(items[0], 4)
    assert len(pool.examples(items[-1], 9)) == 9
    (tmp_path / "data" / "quiz_examples.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="only 0 rows"):
        prepare(write_task(tmp_path, rows, examples=["x"]), tmp_path / "data", 1, 0, reader())


def test_examples_come_from_the_items_group(tmp_path: Path):
    rows = [{**row, "part": "ab"[i % 2]} for i, row in enumerate(quiz(20))]
    task = write_task(tmp_path, rows, group="{part}")
    items = make_items(task, read_rows([tmp_path / "data" / "quiz.jsonl"]))
    pool = ExamplePool(task, items, 0)
    assert all(e.group == item.group for item in items for e in pool.examples(item, 3))


# -- what is refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("change", "key"), [
    ({"right": None}, "answer key"), ({"right": 9}, "answer key"), ({"right": ""}, "answer key"),
    ({"answers": []}, "answers"), ({"answers": "red"}, "answers"), ({"q": None}, "'q'")])
def test_rows_without_what_the_task_needs_are_named(tmp_path: Path, change: dict, key: str):
    rows = quiz(6)
    rows[4] |= change
    task = write_task(tmp_path, rows)
    with pytest.raises(ConfigError, match=rf"quiz\.jsonl: row 4: .*{key}") as error:
        prepare(task, tmp_path / "data", 0, 0, reader())
    assert "\n" not in str(error.value) and "green apple" not in str(error.value)


def test_too_few_rows_for_the_examples(tmp_path: Path):
    task = write_task(tmp_path, quiz(5))
    with pytest.raises(ConfigError, match=r"4 rows.*--shots"):
        prepare(task, tmp_path / "data", 5, 0, reader())
    assert len(prepare(task, tmp_path / "data", 4, 0, reader()).items) == 5


def test_missing_data_is_named(tmp_path: Path):
    task = write_task(tmp_path, quiz(5))
    with pytest.raises(ConfigError, match=r"quiz\.jsonl"):
        prepare(task, tmp_path, 0, 0, reader())
    (tmp_path / "data" / "quiz.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no rows"):
        prepare(task, tmp_path / "data", 0, 0, reader())


def test_a_merged_boundary_is_refused(tmp_path: Path):
    """The tokenizer has a token ': ': with answers that begin with a space it would swallow the context's end."""
    task = write_task(tmp_path, quiz(5), lettered="Q: {q}\n{options}\nA")
    with pytest.raises(ConfigError, match=r"5 of 5 rows.*--tasks"):
        prepare(task, tmp_path / "data", 0, 0, reader(coder=Bytes(": ")))


def test_answers_longer_than_the_context_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="context only 20"):
        prepare(write_task(tmp_path, quiz(5)), tmp_path / "data", 0, 0, reader(context=20))


def test_empty_answers_are_named(tmp_path: Path):
    rows = [*quiz(2), {"q": "x", "answers": ["", "y"], "right": 0}]
    with pytest.raises(ConfigError, match="row 2: an answer is empty"):
        prepare(write_task(tmp_path, rows, answer="{choice}"), tmp_path / "data", 0, 0, reader())


@pytest.mark.parametrize(("settings", "key"), [
    ({"choices": ["a"]}, "choices"), ({"lettered": None}, "lettered"), ({"forms": ["bbp"]}, "forms"),
    ({"files": ["../x"]}, "files|data folder"), ({"files": ["/etc/*"]}, "data folder"),
    ({"norm": "prior", "prior": None}, "prior"),
    ({"context": None}, "context"), ({"forms": ["fg"]}, "generate"), ({"files": [""]}, "data folder"),
    ({"files": ["a**/b"]}, r"\*\*"), ({"generate": {"tokens": 0}}, "tokens"), ({"generate": {"stop": [""]}}, "stop"),
    ({"shots": -1}, "shots"), ({"shot": 1}, "shots")])
def test_task_files_that_do_not_hold_together(tmp_path: Path, settings: dict, key: str):
    with pytest.raises(ConfigError, match=key):
        write_task(tmp_path, quiz(2), **settings)


def test_hostile_task_files_are_refused(tmp_path: Path):
    for text in ("!!python/object/apply:os.system [id]", "a: [", "x" * (2 << 20), "- 1", ""):
        (tmp_path / "t.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"t\.yaml") as error:
            read_task(tmp_path / "t.yaml")
        assert "\n" not in str(error.value)


def test_task_files_cannot_fill_the_memory(tmp_path: Path):
    """Fields that insert each other ten times, and YAML aliases that name each other ten times."""
    fields = {"f0": "x" * 10, **{f"f{i}": f"{{f{i - 1}}}" * 10 for i in range(1, 12)}}
    write_task(tmp_path, quiz(2))                      # the fields must stay in this order
    (tmp_path / "quiz.yaml").write_text((tmp_path / "quiz.yaml").read_text() + f"fields: {json.dumps(fields)}\n")
    task = read_task(tmp_path / "quiz.yaml")
    with pytest.raises(ConfigError, match="characters"):
        prepare(task, tmp_path / "data", 0, 0, reader())
    nested = ", ".join(f"&a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30))
    for key in ("version", "forms", "generate"):
        (tmp_path / "bomb.yaml").write_text(f"{key}: [&a0 [x], {nested}]")
        with pytest.raises(ConfigError) as error:
            read_task(tmp_path / "bomb.yaml")
        assert len(str(error.value)) < 500


def test_an_unknown_task_is_named_with_the_likely_one():
    with pytest.raises(ConfigError, match="'hellaswag'"):
        tasks_named(["helaswag"])
    with pytest.raises(ConfigError, match="twice"):
        tasks_named(["piqa", str(FOLDER / "piqa.yaml")])


# -- measures -------------------------------------------------------------------------------------------------------
def test_measures_are_those_of_plain_forwards(tmp_path: Path):
    """bpb and every norm of the cloze form, written out for each item over single forwards."""
    task = write_task(tmp_path, quiz(30))
    model, coder = model_of(), Bytes()
    scores = score(model, prepare(task, tmp_path / "data", 2, 0, reader()), reader())
    items = make_items(task, read_rows([tmp_path / "data" / "quiz.jsonl"]))
    pool = ExamplePool(task, items, 0)

    def nats(context: str, continuation: str) -> float:
        before, after = coder.encode(context), coder.encode(continuation)
        logs = alone(model, [*before, *after][:-1])[-len(after):]
        return float(logs.gather(1, torch.tensor(after)[:, None]).double().sum())

    bits, right = [], {name: [] for name in ("raw", "per_byte", "per_token", "prior", "mcf")}
    for item in items:
        shown = pool.examples(item, 2)
        own = np.array([nats(p.context, p.continuation) for p in cloze(task, item, shown)])
        size = np.array([len(choice) for choice in item.choices])
        bits.append(-own[item.gold] / math.log(2) / size[item.gold])
        prior = np.array([nats("A:", f" {choice}") for choice in item.choices])
        letters = np.array([nats(p.context, p.continuation) for p in lettered(task, item, shown)])
        for name, values in (("raw", own), ("per_byte", own / size), ("per_token", own / (size + 1)),
                             ("prior", own - prior), ("mcf", letters)):
            right[name].append(values.argmax() == item.gold)
    assert scores.measures["bpb"].value == pytest.approx(np.mean(bits), rel=1e-5)
    assert scores.measures["bpb"].stderr == pytest.approx(np.std(bits, ddof=1) / 30 ** 0.5, rel=1e-5)
    assert scores.measures["mcf"].value == pytest.approx(np.mean(right.pop("mcf")))
    for name, values in right.items():
        assert scores.measures[f"cf.{name}"].value == pytest.approx(np.mean(values)), name


def test_batch_size_and_shape_do_not_matter(tmp_path: Path):
    task = write_task(tmp_path, quiz(25))
    found = [score(model_of(), prepare(task, tmp_path / "data", 3, 0, r), r)
             for r in (reader(), reader(batch=64), reader(batch=10_000))]
    for other in found[1:]:
        for a, b in zip(found[0].items, other.items):
            assert [x.nats for x in a.cloze] == pytest.approx([x.nats for x in b.cloze], rel=1e-5)
            assert [x.nats for x in a.letters] == pytest.approx([x.nats for x in b.letters], rel=1e-5)


def test_an_oracle_is_right(tmp_path: Path):
    """A model whose loss was lowered on the right answers alone, by gradient steps, scores 1, in every form."""
    rows = [{"q": f"{i}", "answers": ["left", "right", "up", "down"], "right": i * 7 % 4} for i in range(16)]
    task = write_task(tmp_path, rows, prior=None)
    ready = prepare(task, tmp_path / "data", 0, 0, reader())
    model = model_of(replace(SMALL, width=96)).requires_grad_(True)
    before = score(model, ready, reader()).measures
    sequences = []
    for item in ready.items:
        for prompts, answer in ((cloze(task, item, []), item.gold), (lettered(task, item, []), item.gold)):
            context, whole = (Bytes().encode(t) for t in (prompts[answer].context,
                                                          prompts[answer].context + prompts[answer].continuation))
            sequences.append((whole, len(context)))
    longest = max(len(whole) for whole, _ in sequences)
    tokens = torch.tensor([[*whole, *[EOS] * (longest - len(whole))] for whole, _ in sequences])
    targets = torch.full_like(tokens, IGNORE)
    for line, (whole, start) in zip(targets, sequences):
        line[start - 1:len(whole) - 1] = torch.tensor(whole[start:])
    from trainer.model.attention import DocMask

    positions = torch.arange(longest).expand(len(tokens), longest)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(75):
        objective, _, _ = model(tokens, DocMask(positions, None, None, longest), targets)
        optimizer.zero_grad()
        (objective / 200).backward()
        optimizer.step()
    after = score(model.requires_grad_(False), ready, reader()).measures
    assert before["cf.raw"].value < 0.8 and before["mcf"].value < 0.8
    assert after["cf.raw"].value >= 0.99 and after["mcf"].value >= 0.99
    assert after["bpb"].value < 0.1 < before["bpb"].value


@given(st.integers(0, 2**32), st.integers(2, 6))
@settings(max_examples=30, deadline=None)
def test_permuted_labels_lie_at_chance(seed: int, choices: int):
    """Also for a model that always names the same place, and labels that prefer it."""
    rng = np.random.default_rng(seed)
    scores = rng.random((600, choices)) + np.array([2.0, *[0.0] * (choices - 1)]) * (seed % 2)
    gold = [int(i) for i in np.minimum(rng.geometric(0.6, 600) - 1, choices - 1)]
    result = accuracy(scores.tolist(), gold)
    expected = 5 * (1 / choices * (1 - 1 / choices) / 600 / PERMUTATIONS) ** 0.5
    assert abs(result.baselines["permuted"] - 1 / choices) < expected
    assert result.baselines["chance"] == pytest.approx(1 / choices)
    assert result.baselines["constant"] == max(np.bincount(gold)) / 600
    assert result.value == np.mean(scores.argmax(1) == np.array(gold))


def test_standard_errors():
    assert mean([1.0]).stderr is None
    assert mean([0.0, 1.0, 1.0, 0.0]).stderr == pytest.approx((1 / 3) ** 0.5 / 2)


@pytest.mark.parametrize(("text", "answer"), [
    ("so 3 + 4 = 7", "7"), ("it costs $1,234.50 today.", "1234.5"), ("18.00", "18"), ("-5 degrees", "-5"),
    ("7-3", "3"), ("is -3.50", "-3.5"), ("none", ""),
    ("The answer is 100", "100"), ("1,000", "1000")])
def test_numbers_are_taken_from_texts(text: str, answer: str):
    assert normalised(text, GenerateConfig(extract="number")) == answer


def test_texts_are_compared_without_articles_and_punctuation():
    assert normalised(" The  quick, Fox! ", GenerateConfig(extract="text")) == "quick fox"


def test_pairs_last_words_and_generation(tmp_path: Path):
    """The forms with one answer or two, over a model that has learned nothing: each against its definition."""
    model, coder = model_of(), Bytes()
    rows = [{"good": f"one {i}", "bad": f"{i} one"} for i in range(12)]
    pairs = write_task(tmp_path, rows, "pairs", forms=["pairs"], context="", answer="{choice}", lettered="",
                       choices_from="", choices=["{good}", "{bad}"], gold="0", shuffle=True, prior=None)
    result = score(model, prepare(pairs, tmp_path / "data", 0, 0, reader()), reader())

    def whole(text: str) -> float:
        ids = coder.encode(text)
        return float(alone(model, [EOS, *ids[:-1]]).gather(1, torch.tensor(ids)[:, None]).sum())

    assert result.measures["pairs"].value == np.mean([whole(r["good"]) > whole(r["bad"]) for r in rows])
    last = tokens = coder.encode("abc")
    for _ in range(3):
        tokens = [*tokens, int(alone(model, tokens)[-1].argmax())]
    greedy = coder.decode(tokens[len(last):])
    rows = [{"text": "abc", "word": greedy if i % 3 == 0 else "zzz"} for i in range(9)]
    word = write_task(tmp_path, rows, "word", forms=["word"], context="{text}", answer="{choice}", lettered="",
                      choices_from="", choices=["{word}"], gold="0", prior=None)
    result = score(model, prepare(word, tmp_path / "data", 0, 0, reader()), reader())
    assert result.measures["word"].value == pytest.approx(1 / 3)
    made = write_task(tmp_path, rows, "made", forms=["fg"], context="{text}", lettered="", choices_from="",
                      choices=["{word}"], gold="0", prior=None, generate={"tokens": 3, "stop": [], "extract": "text"})
    result = score(model, prepare(made, tmp_path / "data", 0, 0, reader()), reader())
    assert result.items[0].generated == normalised(greedy, GenerateConfig(extract="text"))
    assert result.measures["fg"].value == np.mean([i.generated == i.expected for i in result.items])


def test_a_prompt_that_is_continued_is_read_once(tmp_path: Path):
    """Bits per byte of the right answers are those of the task without generation. Prompts that were cut otherwise are
    read on their own."""
    made = {"lettered": "", "context": "Q: {q}\nA:", "prior": None, "shots": 1,
            "generate": {"tokens": 9, "stop": [], "extract": "text"}}
    model = model_of()
    whole = prepare(write_task(tmp_path, quiz(20), "whole", **made, forms=["fg"]), tmp_path / "data", None, 0, reader())
    for name, context in (("long", 512), ("short", 64)):
        both = prepare(write_task(tmp_path, quiz(20), name, **made, forms=["bpb", "fg"]), tmp_path / "data", None, 0,
                       reader(context))
        alone = prepare(write_task(tmp_path, quiz(20), name, **made, forms=["bpb"]), tmp_path / "data", None, 0,
                        reader(context))
        cut = sum(len(prompt.tokens) > context - 9 for prompt in whole.prompts)
        left = sum(len(np.unique(row.asked[:, 2])) for row in both.rows)
        assert left <= cut and (left > 0) == (cut > 0) == (context == 64)
        assert len(alone.owners) == len(both.prompts) == 20
        first, second = (score(model, ready, reader(context)) for ready in (both, alone))
        assert first.measures["bpb"].value == pytest.approx(second.measures["bpb"].value, rel=1e-6)
        for a, b in zip(first.items, second.items):
            assert a.cloze[0].nats == pytest.approx(b.cloze[0].nats, rel=1e-5)
            assert a.cloze[0].tokens == b.cloze[0].tokens


def test_long_prompts_are_cut_at_the_beginning_and_counted(tmp_path: Path):
    rows = [{"q": "x" * (400 if i == 3 else 5), "answers": ["yes", "no"], "right": 0} for i in range(6)]
    task = write_task(tmp_path, rows, forms=["cf"], prior=None)
    short = reader(context=50)
    ready = prepare(task, tmp_path / "data", 0, 0, short)
    assert ready.truncated == 1
    result = score(model_of(), ready, short).items[3]
    ids = Bytes().encode("Q: " + "x" * 400 + "\nA: yes")
    logs = alone(model_of(), ids[-51:-1])[-4:]
    assert result.cloze[0].nats == pytest.approx(float(logs.gather(1, torch.tensor(ids[-4:])[:, None]).sum()), rel=1e-5)


def test_groups_and_contaminated_items_are_scored_apart(tmp_path: Path):
    rows = [{**row, "part": "ab"[i % 2]} for i, row in enumerate(quiz(20))]
    task = write_task(tmp_path, rows, group="{part}")
    ready = prepare(task, tmp_path / "data", 0, 0, reader())
    whole = score(model_of(), ready, reader(), frozenset({1, 2, 3}))
    assert whole.counts == {"contaminated": 3, "clean": 17}
    for name in ("bpb", "cf.raw"):
        parts = [(whole.apart["contaminated"], 3), (whole.apart["clean"], 17)]
        assert sum(part[name].value * n for part, n in parts) / 20 == pytest.approx(whole.measures[name].value)
        assert np.mean([group[name].value for group in whole.groups.values()]) == pytest.approx(
            whole.measures[name].value)
    assert json.dumps(whole.to_json())


def test_items_in_memory_are_small(tmp_path: Path):
    """What an item keeps for scoring: its tokens once, whatever the number of answers that share them."""
    rows = [{"q": "x" * 1000, "answers": ["a", "b", "c", "d"], "right": 0}] * 3
    ready = prepare(write_task(tmp_path, rows, forms=["cf", "mcf"], prior=None), tmp_path / "data", 0, 0,
                    reader(context=4096))
    assert len(ready.rows) == 2                                 # equal questions of different items, too
    assert all(len(row.tokens) < 1100 for row in ready.rows)


def test_tasks_with_examples_have_another_version_since_examples_are_chosen_in_another_way():
    assert all(task.file.version >= 2 for task in tasks_named(list(built_in())) if task.file.shots)
