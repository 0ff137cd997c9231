"""Reads post-training data sets (conversations, instructions, preferences) in JSON Lines, JSON or Parquet. A document
is made of each record: the record's turns as text, written by a template, and the spans that count for the loss.

There are two readers, `sft` and `preference`. `stages.read.conversation` describes the formats and the templates. Keys
that belong to no format are handled by `stages.read.columns`.

The `loss_spans` of a document mark the bytes of its text that count for the loss: what the assistant wrote, and what
the template puts after it in the same turn. Such a data set can therefore be part of an annealing mixture without
further preparation.

Records of which no document can be made are quarantined under these reasons:

- `missing_turns`: none of the formats
- `bad_turn`, `unknown_role`, `empty_turn`: a turn that cannot be read
- `no_answer`, `starts_with_answer`: the assistant has no turn that counts, or speaks first
- `disliked`: `label: false`
- `not_text`: images, video or sound
- `too_many_turns`, `too_large`
- `marker_in_content`: a turn spells a marker of the template
- `bad_json`, `invalid_utf8` and other reasons of faulty lines, arrays and tables
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from pipeline.base.parquet import open_parquet
from stages.document import BadRecord, Document, document_id
from stages.read.columns import ColumnsConfig, clean
from stages.read.conversation import (
    TEMPLATES,
    Refused,
    Template,
    Turn,
    checked_turns,
    first,
    instruction,
    messages,
    preference,
    render,
    with_system,
)
from stages.read.jsonl import Jsonl, columns_of, make_document
from stages.read.parquet import Parquet, unread_columns
from stages.read.reader import Reader, Slice, Split, bad, check_file, is_machine_fault, skipped
from stages.read.row_groups import rows_per_batch, too_large
from stages.stage import SettingsError, signal

#: keys of images, sound and video: a record of lines or arrays that has one is refused, columns of tables are not read
MEDIA = ("images", "image", "videos", "video", "audios", "audio")


class RecordsConfig(ColumnsConfig):
    template: Literal["chatml", "llama3", "plain"] | Template = signal(
        "chatml", "name of a template, or the settings of your own (turn, names …)")
    system: tuple[str, ...] = signal(("system", "system_prompt"), "keys of a system prompt that is not among the turns")
    tools: tuple[str, ...] = signal(("tools", "functions"), "keys of the functions the assistant may call")
    id: str = signal("id", "key of the set's own id, kept in meta.id; '' for none")
    url: str = signal("url", "key of the URL; '' for none")
    date: str = signal("date", "key of the date; '' for none")
    language: str = signal("", "key of the language, if it is to be trusted")
    max_bytes: int = signal(16 << 20, "longest line or text, bytes; beyond: line_too_long, too_large", gt=0)


class Records(Reader):
    """Base class of the readers `sft` and `preference`, which read conversations from JSON Lines, JSON arrays and
    Parquet tables. A record is a line, an element or a row."""

    suffixes = Jsonl.suffixes + Parquet.suffixes
    collection = True
    libraries = ("pyarrow",)
    memory_mb = 800
    version = 5
    Config = RecordsConfig

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        named = self.config.template
        self.template = TEMPLATES[named] if isinstance(named, str) else named
        self._lines = Jsonl(max_line=self.config.max_bytes)
        self._lines.warnings = self.warnings
        self.columns = columns_of(self.config, *self._keys(), *MEDIA, reserved=("turns", "answer"))
        self.signals, self.lost = self.config.signals, self.columns.lost

    # -- files -------------------------------------------------------------------------------------------------------
    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        table = slice.path.lower().endswith(Parquet.suffixes)
        for ordinal, offset, row in (self._table if table else self._lines.rows)(local, slice):
            if isinstance(row, BadRecord):
                yield row
            elif row is None:
                yield skipped("empty", slice, offset, ordinal)
            else:
                yield from self._documents(row, slice, offset, ordinal)

    def _table(self, local: str, slice: Slice) -> Iterator[tuple[int, int, Any]]:
        """Yields (number of the row, number of its row group, row) for each row of a Parquet file that a slice (the
        file or a piece of it) covers. The row is a dict or a `BadRecord`."""
        check_file(local, slice.path)
        ordinal, group = slice.ordinal, slice.start
        try:
            with open_parquet(local) as file:
                names = file.schema_arrow.names
                keys, binary = self._keys(), unread_columns(self.columns, file.schema_arrow)
                meta_columns = {n for n in self.columns.of(names) if n not in keys and n not in binary}
                columns = [n for n in names if n in keys or n in meta_columns]
                named = (*self.columns.named, *self.columns.signals)
                if missing := [key for key in named if key.partition(".")[0] not in columns]:
                    raise SettingsError(f"{slice.path}: no column '{missing[0]}'; it has "
                                     f"{', '.join(file.schema_arrow.names)}. Mend `keep:`")
                stop = file.num_row_groups if slice.stop is None else slice.stop
                for group in range(slice.start, stop):
                    info, number = file.metadata.row_group(group), ordinal
                    for column in binary:
                        self.columns.lose(column, "binary", info.num_rows)
                    if info.total_byte_size > 4 << 30:
                        yield ordinal, group, too_large(info, info.total_byte_size, slice, group, ordinal)
                    elif columns:
                        for batch in file.iter_batches(rows_per_batch(info, columns, local), row_groups=[group],
                                                       columns=columns):
                            for i in range(len(batch)):
                                yield number, group, self._row(batch, i, meta_columns, slice, group, number)
                                number += 1
                    else:
                        for number in range(ordinal, ordinal + info.num_rows):
                            yield number, group, {}
                    ordinal += info.num_rows
        except (pa.ArrowException, OSError) as e:
            if is_machine_fault(e):
                raise
            yield ordinal, group, bad("corrupt_parquet", slice, group, ordinal, detail=str(e).partition("\n")[0],
                                      fatal=True)

    def _row(self, batch: pa.RecordBatch, i: int, meta_columns: set[str], slice: Slice, group: int,
             ordinal: int) -> Any:
        """Return row `i` of a batch as a dict. If Python cannot represent a value, the result is a `BadRecord`, unless
        the column is in `meta_columns` (columns that are only copied to `meta`). In this case, only the value is
        lost."""
        with suppress(ArithmeticError, RecursionError, TypeError, ValueError, pa.ArrowInvalid):
            return batch.slice(i, 1).to_pylist()[0]
        row = {}
        for name in batch.schema.names:
            try:
                row[name] = batch.column(name)[i].as_py()
            except MemoryError:
                raise
            except (ArithmeticError, RecursionError, TypeError, ValueError, pa.ArrowException) as e:
                reason = "invalid_utf8" if isinstance(e, UnicodeDecodeError) else "bad_value"
                if name not in meta_columns:
                    return bad(reason, slice, group, ordinal, detail=getattr(e, "reason", type(e).__name__))
                self.columns.lose(name, reason)
        return row

    def _keys(self) -> set[str]:
        """Return the columns (or keys) that the settings of the reader name. For a path with dots, both the path and
        its first part are returned."""
        settings = self.config.model_dump(exclude={"template", "max_bytes", "keep", "answers"})
        named = [v for value in settings.values() for v in ([value] if isinstance(value, str) else value)]
        named += () if self.config.keep == "all" else self.config.keep
        return {part for name in named for part in (name, name.partition(".")[0])} - {""}

    def needs(self, slice: Slice | None, size: int, read: Callable[[int, int], bytes]) -> list[tuple[int, int]] | None:
        """Return the byte ranges of a file in object storage that must be fetched to read a slice (the file or a piece
        of it), or to split the file if `slice` is None. For JSON they are the ranges that the reader `jsonl` needs. For
        a Parquet table the result is None (the whole file), since only its footer shows which columns it has."""
        return None if read(max(0, size - 4), size) == b"PAR1" else self._lines.needs(slice, size, read)

    def beyond(self, local: str, slice: Slice, record: int) -> Slice | None:
        return Parquet().beyond(local, slice, record) if slice.path.lower().endswith(Parquet.suffixes) else None

    def stored(self, local: str, slice: Slice, size: int) -> int:
        return (Parquet() if slice.path.lower().endswith(Parquet.suffixes) else self._lines).stored(local, slice, size)

    def splits(self, local: str, path: str, target: int) -> list[Split] | None:
        return (Parquet() if path.lower().endswith(Parquet.suffixes) else self._lines).splits(local, path, target)

    # -- records -----------------------------------------------------------------------------------------------------
    def _documents(self, row: Any, slice: Slice, offset: int, ordinal: int) -> Iterator[Document | BadRecord]:
        if not isinstance(row, Mapping):
            yield bad("missing_turns", slice, offset, ordinal, detail=f"the record is a {type(row).__name__}")
            return
        for member, conversation in self.conversations(row):
            try:
                if media_key := next((key for key in MEDIA if row.get(key)), None):
                    raise Refused("not_text", f"the record has {media_key}")
                turns = checked_turns(conversation())
                turns = [t._replace(content=clean(t.content)) for t in turns]
                text, spans = render(turns, self.template)
            except Refused as e:
                yield bad(e.reason, slice, offset, ordinal, member=member, detail=e.detail)
                continue
            if spans[-1]["end"] > self.config.max_bytes:
                yield bad("too_large", slice, offset, ordinal, member=member, detail=f"{spans[-1]['end']} bytes")
                continue
            try:
                doc = make_document(slice, ordinal, offset, text, lambda key: first(row, (key,)), self.config,
                                    self.columns, self.columns.of(row))
            except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as e:
                yield bad("bad_value", slice, offset, ordinal, member=member, detail=type(e).__name__)
                continue
            if member:
                doc.id = document_id(slice.source, slice.path, member, ordinal)
                doc.locator["sub"] = doc.meta["answer"] = member
            doc.loss_spans, doc.mime = spans, "text/plain"
            doc.meta["turns"] = len(turns)
            yield doc

    def conversations(self, row: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], list[Turn]]]]:
        """Yields (answer, function that returns the turns) for each document to be made of a record. `answer` says
        which of the record's answers the document contains: "chosen" or "rejected", or "" for the reader `sft`, whose
        records have one answer."""
        raise NotImplementedError


class Sft(Records):
    """Reads data for supervised fine-tuning: messages, ShareGPT conversations, and instructions with input and
    output."""

    name = "sft"

    class Config(RecordsConfig):
        messages: tuple[str, ...] = signal(("messages", "conversations", "conversation"), "keys of a list of turns")
        instruction: tuple[str, ...] = signal(("instruction", "prompt", "question"), "keys of the instruction")
        input: tuple[str, ...] = signal(("input", "context"), "keys of what the instruction is about")
        output: tuple[str, ...] = signal(("output", "response", "completion", "answer"), "keys of the answer")
        history: tuple[str, ...] = signal(("history",), "keys of earlier questions with their answers")

    def conversations(self, row: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], list[Turn]]]]:
        config = self.config
        if row.get("label") is False:                       # TRL's unpaired preferences: a disliked answer
            yield "", lambda: _refuse("disliked", "label: false")
            return
        listed = first(row, config.messages)
        if listed is None:
            question, answer = first(row, config.instruction), first(row, config.output)
            if isinstance(question, (list, tuple)) and isinstance(answer, (list, tuple)):  # TRL's conversational form
                yield "", lambda: with_system([*messages(question), *messages(answer)], row, config)
            else:
                yield "", lambda: instruction(row, config)
        else:
            yield "", lambda: with_system(messages(listed), row, config)


class Preference(Records):
    """Reads preference data, whose records have a prompt, a chosen and a rejected answer. A document consists of the
    prompt and one answer, the chosen one by default. The setting `answers` can also select the rejected answer, or
    both, which makes two documents of a record. `meta.answer` says which answer a document contains."""

    name = "preference"

    class Config(RecordsConfig):
        prompt: tuple[str, ...] = signal(("prompt", "question", "instruction", "input.messages", "conversations"),
                                         "keys of the prompt")
        chosen: tuple[str, ...] = signal(("chosen", "preferred_output", "chosen_messages"),
                                         "keys of the answer that was preferred")
        rejected: tuple[str, ...] = signal(("rejected", "non_preferred_output", "rejected_messages"),
                                           "keys of the answer that was not preferred")
        answers: Literal["chosen", "rejected", "both"] = signal("chosen", "which answers become documents")

    def conversations(self, row: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], list[Turn]]]]:
        which = ("chosen", "rejected") if self.config.answers == "both" else (self.config.answers,)
        for name in which:
            yield name, partial(preference, row, self.config, name)


def _refuse(reason: str, detail: str) -> list[Turn]:
    raise Refused(reason, detail)
