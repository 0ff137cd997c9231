"""Counts the input files that could not be read, whole or in part. Ends a run in which more files failed than
`run.max_bad_files` allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pipeline.base.errors import TokenmillError
from pipeline.engine.task import TaskSpec
from pipeline.store.records import READING, PartRecord

#: files named in an error message
NAMED = 3
#: number of bad files that are always allowed when the limit is a share
ALWAYS = 10


class TooManyBadFiles(TokenmillError):
    """Raised when more input files could not be read than `run.max_bad_files` allows, or when the reader of a source
    failed in all files of the source."""


class BadFiles:
    """Collects the input files that could not be read during a run. A big file that is read in pieces counts once for
    each bad piece.

    `allowed` is the limit from the recipe: a number of files, or a share of all input files (`files` is their number).
    A share always allows at least ALWAYS files.
    """

    def __init__(self, allowed: int | float, files: int) -> None:
        self.written = allowed
        self.allowed = allowed if isinstance(allowed, int) else max(ALWAYS, int(allowed * files))
        #: source → file → reason → bytes not read
        self.by_source: dict[str, dict[str, dict[str, int]]] = {}
        #: files that killed the processes that read them, as long as their task has no record: (task's key, number of
        #: the file) → the task's label and the reason
        self._dying: dict[tuple[str, int], str] = {}

    def done(self, record: PartRecord) -> None:
        """Count the bad input files (files that could not be read) that the commit record of a finished task lists."""
        self.add(record.counters.get("bad_files", {}))
        for task in [t for t in self._dying if t[0] == record.key]:
            del self._dying[task]

    def add(self, bad_files: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        """Count bad input files (files that could not be read). They are given as {source: {file: {reason: bytes not
        read}}}."""
        for source, files in bad_files.items():
            files_of_source = self.by_source.setdefault(source, {})
            for file, reasons in files.items():
                files_of_source[file] = dict(reasons)          # not added up: two datasets may read the same source

    def quarantined(self, spec: TaskSpec, stage: int, reason: str) -> None:
        """Take note of a quarantined row of a task. If the row killed its process while it was read, `stage` encodes
        the number of its input file (`store.records.READING`), and this file is counted. Any other row is a document
        that failed in stage number `stage`, and no file is counted."""
        if stage <= READING:
            self._dying[spec.key, READING - stage] = f"{spec.label} ({reason})"

    def check(self) -> None:
        """Raise TooManyBadFiles when more files could not be read than `allowed` permits."""
        count = sum(map(len, self.by_source.values())) + len(self._dying)
        if count > self.allowed:
            named = ", ".join(_first([*self.listed(), *self._dying.values()]))
            raise TooManyBadFiles(
                f"{count} input files could not be read, whole or in part: {named}. `run.max_bad_files` allows "
                f"{self.allowed}: fix these files, or leave them out of `path:`, or raise run.max_bad_files")

    def listed(self, source: str | None = None) -> Iterator[str]:
        """Yield 'SOURCE: FILE (reasons)' for each bad file of `source`, or of all sources if it is None."""
        for name, files in sorted(self.by_source.items()):
            for file, reasons in sorted(files.items() if source in (None, name) else ()):
                yield f"{name}: {file} ({', '.join(sorted(reasons))})"

    def warnings(self, of_records: Iterable[str] = ()) -> Iterator[str]:
        """Yield the warnings to show at the end of the run, one line for each source with warnings. A line names the
        files of the source that could not be read. `of_records` are lines about single records that could not be read,
        each beginning with its source. Such a line becomes the beginning of the source's line."""
        lines = {line.partition(":")[0].partition(" gave")[0]: line for line in of_records}
        for name, files in sorted(self.by_source.items()):
            size = sum(n for reasons in files.values() for n in reasons.values())
            named = ", ".join(_first([s.partition(": ")[2] for s in self.listed(name)]))
            source = f"source '{name}'"
            unread = (f"{len(files)} input files could not be read, whole or in part ({size:,} bytes): {named}; "
                      f"tokenmill inspect DATASET --quarantined --stage read lists them")
            yield f"{lines.pop(source)}; {unread}" if source in lines else f"{source}: {unread}"
        yield from lines.values()

    def check_source(self, source: str, files: int, detail: str = "") -> None:
        """Raise TooManyBadFiles if the reader of `source` failed in every one of its `files` files: the reader's
        settings or code must then be wrong. Callers use this for sources that yielded no document. `detail` is the
        reader's message about the first file."""
        failed = [file for file, reasons in self.by_source.get(source, {}).items() if any(map(_of_the_reader, reasons))]
        if files and len(failed) >= files:
            named = ", ".join(_first(list(self.listed(source)))) + (f": {detail.rstrip('.')}" if detail else "")
            raise TooManyBadFiles(f"source '{source}': its reader failed in every file: {named}; see that `read:` and "
                                  f"the settings of the source fit its files")


def _first(names: list[str]) -> list[str]:
    return names[:NAMED] + ([f"and {len(names) - NAMED} more"] if len(names) > NAMED else [])


def _of_the_reader(reason: str) -> bool:
    """Whether the fault is the reader's when an input file could not be read. `reason` is the recorded reason. The
    reader is at fault if it raised an exception, died, exceeded a limit, or could not begin. Other reasons mean that
    the reader has found the file to be damaged."""
    return reason.startswith(("error:", "crash:")) or reason in (
        "memory", "cpu_limit", "wrong_schema", "no_permission")
