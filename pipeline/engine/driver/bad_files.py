"""Input files that could not be read, whole or in part, against how many a run may have (`run.max_bad_files`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.base.errors import TokenmillError
from pipeline.engine.task import TaskSpec
from pipeline.store.records import READING, PartRecord

#: files of an error message
NAMED = 3
#: of a budget that is a share, files that are always allowed
ALWAYS = 10


class TooManyBadFiles(TokenmillError):
    """More input files could not be read than `run.max_bad_files` allows, or none of a source."""


class BadFiles:
    """Collects bad files while a run goes on. A big file that was split counts once for each piece that is bad.

    `allowed` as in the recipe: a number of files, or a share of the `files` that the run reads (which always allows
    ALWAYS).
    """

    def __init__(self, allowed: int | float, files: int) -> None:
        self.written = allowed
        self.allowed = allowed if isinstance(allowed, int) else max(ALWAYS, int(allowed * files))
        #: source → file → reason → bytes that were not read
        self.found: dict[str, dict[str, dict[str, int]]] = {}
        self._dying: dict[tuple[str, int], str] = {}         # (task, its file) that killed children, no record yet

    def done(self, record: PartRecord) -> None:
        """Count what a committed record says."""
        for source, files in record.counters.get("bad_files", {}).items():
            known = self.found.setdefault(source, {})
            for file, reasons in files.items():
                known[file] = dict(reasons)                  # two datasets may read one source
        for task in [t for t in self._dying if t[0] == record.key]:
            del self._dying[task]

    def quarantined(self, spec: TaskSpec, stage: int, reason: str) -> None:
        """Count a file that a supervisor has just found to kill its reader."""
        if stage <= READING:
            self._dying[spec.key, READING - stage] = f"{spec.label} ({reason})"

    def check(self) -> None:
        """Raise TooManyBadFiles beyond the budget."""
        count = sum(map(len, self.found.values())) + len(self._dying)
        if count > self.allowed:
            named = ", ".join(_first([*self.listed(), *self._dying.values()]))
            raise TooManyBadFiles(
                f"{count} input files could not be read, whole or in part: {named}. `run.max_bad_files` allows "
                f"{self.allowed}: mend these files, or leave them out of `path:`, or raise run.max_bad_files")

    def listed(self, source: str | None = None) -> Iterator[str]:
        """'SOURCE: FILE (reasons)' of each."""
        for name, files in sorted(self.found.items()):
            for file, reasons in sorted(files.items() if source in (None, name) else ()):
                yield f"{name}: {file} ({', '.join(sorted(reasons))})"

    def warnings(self, of_records: Iterable[str] = ()) -> Iterator[str]:
        """What a user should hear at the end, one line a source: `of_records`, what is to be said of its records (lines
        that begin with the source), with the files that could not be read."""
        lines = {line.partition(":")[0].partition(" gave")[0]: line for line in of_records}
        for name, files in sorted(self.found.items()):
            size = sum(n for reasons in files.values() for n in reasons.values())
            named = ", ".join(_first([s.partition(": ")[2] for s in self.listed(name)]))
            source = f"source '{name}'"
            unread = (f"{len(files)} input files could not be read, whole or in part ({size:,} bytes): {named}; "
                      f"tokenmill inspect DATASET --quarantined --stage read lists them")
            yield f"{lines.pop(source)}; {unread}" if source in lines else f"{source}: {unread}"
        yield from lines.values()

    def check_source(self, source: str, files: int, detail: str = "") -> None:
        """Raise TooManyBadFiles for a source whose reader failed in each of its files: its settings are wrong, or its
        code. To be asked of a source that gave no document; `detail` is what its reader said of the first."""
        failed = [file for file, reasons in self.found.get(source, {}).items() if any(map(_of_the_reader, reasons))]
        if files and len(failed) >= files:
            named = ", ".join(_first(list(self.listed(source)))) + (f": {detail.rstrip('.')}" if detail else "")
            raise TooManyBadFiles(f"source '{source}': its reader failed in every file: {named}; see that `read:` and "
                                  f"the settings of the source fit its files")


def _first(names: list[str]) -> list[str]:
    return names[:NAMED] + ([f"and {len(names) - NAMED} more"] if len(names) > NAMED else [])


def _of_the_reader(reason: str) -> bool:
    """Whether the reader raised, died or could not begin; otherwise it has said itself that the file is damaged."""
    return reason.startswith(("error:", "crash:")) or reason in (
        "memory", "cpu_limit", "wrong_schema", "no_permission")
