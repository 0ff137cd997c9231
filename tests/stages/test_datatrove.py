"""datatrove's blocks, used through the adapter: equal to datatrove's own run. Blocks that cannot run are refused by
name."""

from __future__ import annotations

import copy
import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datatrove.data import Document as Theirs
from datatrove.pipeline import extractors, filters, formatters, readers
from pydantic import ValidationError

from stages.adapters.datatrove import Datatrove, DatatroveReader
from stages.catalog import reader_class, stage_class
from stages.document import BadRecord, Document, document_id
from stages.read.reader import Slice
from tests.stages.texts import AWKWARD, PROSE, random_texts, real_texts

TEXTS = [text for text in [*AWKWARD, *random_texts(60, seed=21), *real_texts(60),
                           PROSE + "\n!!! --- ***\n" + PROSE,
                           "\n".join(["x" * 220] * 4),
                           PROSE + " mail a@b.org c@d.org from 8.8.8.8 or 10.0.0.1"] if text]
PAGE = (f"<html><head><title>t</title></head><body><nav><a href=/>home</a></nav><article><h1>The house</h1><p>"
        f"{PROSE}</p><p>{PROSE.replace('house', 'shed')}</p></article><footer>contact</footer></body></html>")

PER_DOCUMENT = {
    "filters.GopherRepetitionFilter": {"dup_line_frac": 0.2},
    "filters.GopherQualityFilter": {"min_doc_words": 20, "min_stop_words": 1},
    "filters.C4QualityFilter": {"filter_no_terminal_punct": False},
    "filters.C4ParagraphFilter": {},
    "filters.FineWebQualityFilter": {"line_punct_thr": 0.2},
    "filters.RegexFilter": {"regex_exp": r"[Tt]hat \w+ing|日本"},
    "formatters.PIIFormatter": {"email_replacement": ["one@example.com", "two@example.com"]},
    "formatters.SymbolLinesFormatter": {"replace_char": "\n"},
    "formatters.FTFYFormatter": {"uncurl_quotes": True},
    "extractors.Trafilatura": {"favour_precision": False},
}


def their_run(block: str, args: dict, text: str) -> tuple[bool, str, dict]:
    """Run one document through datatrove's own `run`. Returns (whether it is kept, text, metadata)."""
    if block == "formatters.PIIFormatter":
        args = {**args, "email_replacement": tuple(args["email_replacement"])}
    if block == "extractors.Trafilatura":
        args = {**args, "deduplicate": False, "timeout": 600}
    package, name = block.split(".")
    made = getattr({"filters": filters, "formatters": formatters, "extractors": extractors}[package], name)(**args)
    out = list(made.run([Theirs(text=text, id="1", metadata={"url": "http://x.org/"})]))
    return (True, out[0].text, out[0].metadata) if out else (False, text, {})


@pytest.mark.parametrize("block", PER_DOCUMENT)
def test_a_block_equals_datatrove_s_own_run(block):
    args = PER_DOCUMENT[block]
    stage = stage_class("datatrove")({"block": block, **copy.deepcopy(args)})
    stage.setup()
    extracts = block.startswith("extractors")
    assert stage.extracts is extracts
    outcomes = set()
    for text in [PAGE, PAGE.replace("house", "barn"), "<p>no"] if extracts else TEXTS:
        kept, expected, metadata = their_run(block, args, text)
        doc = Document("1", "" if extracts else text, url="http://x.org/", raw=text.encode() if extracts else None)
        reason = stage.process(doc)
        assert (reason is None) == kept
        assert not kept or doc.text == expected
        assert not kept or {**doc.meta, "url": doc.url} == metadata
        outcomes.add(reason)
    if block.startswith("filters"):
        assert len(outcomes) >= 2, outcomes


def test_reasons():
    quality = Datatrove(block="filters.GopherQualityFilter")
    assert quality.process(Document("1", "too short")) == "gopher_short_doc"
    regex = Datatrove(block="filters.RegexFilter", regex_exp="x")
    assert regex.process(Document("1", "xyz")) == "regex_filter"
    assert Datatrove(block="extractors.Trafilatura").process(Document("1", raw=b"<p></p>")) == "no_text"


def test_metadata_goes_to_meta(monkeypatch):
    class Tagging(filters.RegexFilter):
        def filter(self, doc):
            assert doc.metadata == {"url": "http://x.org/", "language": "de", "a": 1}
            doc.metadata.update(language="en", tag="t", score=pa.scalar(0.5).as_py())
            return True

    monkeypatch.setattr(filters, "RegexFilter", Tagging)
    doc = Document("1", "text", url="http://x.org/", language="de", meta={"a": 1})
    assert Datatrove(block="filters.RegexFilter", regex_exp="x").process(doc) is None
    assert (doc.language, doc.meta) == ("en", {"a": 1, "tag": "t", "score": 0.5})


@pytest.mark.parametrize(("config", "message"), [
    ({"block": "dedup.MinhashDedupSignature"}, "use the steps `exact` or `minhash`"),
    ({"block": "dedup.SentenceDedupFilter"}, "use the steps `exact` or `minhash`"),
    ({"block": "decont.NGramsDecontFilter"}, "its index is built from other data"),
    ({"block": "stats.WordStats"}, "summed up in the report"),
    ({"block": "tokens.DocumentTokenizer"}, "`tokenizer:` and `shards:`"),
    ({"block": "writers.JsonlWriter"}, "datasets are written by the engine"),
    ({"block": "readers.CSVReader"}, "a reader is a source"),
    ({"block": "filters.LambdaFilter"}, "it takes a Python function"),
    ({"block": "filters.SamplerFilter", "rate": 0.5}, "number of workers"),
    ({"block": "filters.LanguageFilter", "languages": "en"}, "use the step `language`"),
    ({"block": "filters.FastTextClassifierFilter", "model_url": "m.bin"}, "use the step `quality`"),
    ({"block": "filters.UnigramLogProbFilter"}, "use the step `language` or `quality`"),
    ({"block": "filters.C4BadWordsFilter", "keep_fraction": 0.1}, "number of workers"),
    ({"block": "extractors.Trafilatura", "deduplicate": True}, "it remembers pages"),
    ({"block": "extractors.Trafilatura", "timeout": 3}, "no clock decides about text"),
    ({"block": "filters.RegexFilter", "regex_exp": "x", "exclusion_writer": 1}, "kept beside the dataset"),
    ({"block": "GopherQualityFilter"}, "names no block of datatrove"),
    ({"block": "filters.os; x"}, "names no block of datatrove"),
    ({"block": "os.path"}, "names no block of datatrove"),
])
def test_what_cannot_run_is_refused_with_the_remedy(config, message):
    with pytest.raises(ValidationError, match=message):
        Datatrove(config)


def test_unknown_blocks_and_arguments():
    with pytest.raises(ValueError, match=r"no block filters\.GopherFilter; there are .*GopherQualityFilter"):
        Datatrove(block="filters.GopherFilter").setup()
    with pytest.raises(TypeError, match="min_words"):
        Datatrove(block="filters.GopherQualityFilter", min_words=3).setup()
    with pytest.raises(ValidationError, match="not to be set"):
        DatatroveReader(block="readers.CSVReader", limit=3)
    with pytest.raises(ValidationError, match="for example readers"):
        DatatroveReader(block="filters.RegexFilter")
    with pytest.raises(ValidationError, match="use `read: parquet`"):
        DatatroveReader(block="readers.HuggingFaceDatasetReader")


def test_keys(tmp_path, monkeypatch):
    first = Datatrove(block="filters.RegexFilter", regex_exp="x")
    assert first.key() == Datatrove({"block": "filters.RegexFilter", "args": {"regex_exp": "x"}}).key()
    assert first.key() == Datatrove(first.config.model_dump()).key()
    assert first.key() != Datatrove(block="filters.RegexFilter", regex_exp="y").key()
    # a file that happens to be called like an argument has no say
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_bytes(b"1")
    assert Datatrove(block="filters.RegexFilter", regex_exp="x").key() == first.key()


ROWS = [{"text": f"text number {i}\nwith a line", "id": f"r{i}", "url": f"http://x.org/{i}", "n": i} for i in range(7)]


def write_rows(folder) -> dict[str, str]:
    with gzip.open(folder / "rows.jsonl.gz", "wt", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in ROWS)
    with open(folder / "rows.csv", "w", newline="", encoding="utf-8") as f:
        table = csv.DictWriter(f, ROWS[0])
        table.writeheader()
        table.writerows(ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return {"readers.JsonlReader": "rows.jsonl.gz", "readers.CSVReader": "rows.csv",
            "readers.ParquetReader": "rows.parquet"}


@pytest.mark.parametrize("block", ["readers.JsonlReader", "readers.CSVReader", "readers.ParquetReader"])
def test_a_reader_equals_datatrove_s_own_run(tmp_path, block):
    path = write_rows(tmp_path)[block]
    made = getattr(readers, block.split(".")[1])(str(tmp_path), glob_pattern=path)
    expected = [(doc.text, doc.id, doc.metadata["url"], str(doc.metadata["n"])) for doc in made.run()]
    assert len(expected) == len(ROWS)
    reader = reader_class("datatrove")({"block": block})
    found = list(reader.read(str(tmp_path / path), Slice("web", f"sub/{path}")))
    assert [(doc.text, doc.meta["id"], doc.url, str(doc.meta["n"])) for doc in found] == expected
    assert [doc.id for doc in found] == [document_id("web", f"sub/{path}", "", i) for i in range(len(ROWS))]
    assert str(tmp_path) not in json.dumps([[doc.meta, doc.locator] for doc in found])


def test_a_damaged_file_is_a_bad_record(tmp_path):
    write_rows(tmp_path)
    data = (tmp_path / "rows.jsonl.gz").read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(data[:-20])
    (tmp_path / "not.parquet").write_bytes(b"nothing of the kind")
    for block, path in (("readers.JsonlReader", "cut.jsonl.gz"), ("readers.ParquetReader", "not.parquet")):
        *_, last = DatatroveReader(block=block).read(str(tmp_path / path), Slice("web", path))
        assert isinstance(last, BadRecord)
        assert (last.reason, last.fatal) == ("unreadable", True)
    with pytest.raises(FileNotFoundError):
        list(DatatroveReader(block="readers.CSVReader").read(str(tmp_path / "gone.csv"), Slice("web", "gone.csv")))


def test_foreign_metadata_does_not_choose_who_is_held_out(tmp_path):
    """`meta.cluster` is what deduplication writes; shards split train from val by it."""
    row = {"text": "hello", "id": "1", "metadata": {"cluster": "a" * 32}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    reader = DatatroveReader(block="readers.JsonlReader")
    (doc,) = reader.read(str(tmp_path / "rows.jsonl"), Slice("web", "rows.jsonl"))
    assert doc.meta == {"id": "1", "their_cluster": "a" * 32} and reader.lost == {}
    row["metadata"]["their_cluster"] = "b"
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    for doc in reader.read(str(tmp_path / "rows.jsonl"), Slice("web", "rows.jsonl")):
        assert doc.meta == {"id": "1", "their_cluster": "a" * 32}
    assert reader.lost == {"their_cluster": {"name_taken": 2}}


def test_text_key_and_other_arguments(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"body": "the text", "key": "k"}) + "\n")
    reader = DatatroveReader(block="readers.JsonlReader", text_key="body", id_key="key")
    (doc,) = reader.read(str(tmp_path / "x.jsonl"), Slice("web", "x.jsonl"))
    assert (doc.text, doc.meta) == ("the text", {"id": "k"})
    assert reader.key() != DatatroveReader(block="readers.JsonlReader", text_key="body").key()


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc failed"),
                                   OSError(5, "Input/output error"), ImportError("no module")])
def test_a_fault_of_the_machine_is_not_the_file_s(tmp_path, monkeypatch, error):
    write_rows(tmp_path)

    def fail(self: object, path: str) -> None:
        raise error

    monkeypatch.setattr(readers.JsonlReader, "read_file", fail)
    with pytest.raises(type(error)):
        list(DatatroveReader(block="readers.JsonlReader").read(str(tmp_path / "rows.jsonl.gz"), Slice("web", "rows")))
