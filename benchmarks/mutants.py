"""Do the tests notice when the product is wrong? Plants small mistakes (mutants) and counts those that a test finds.

    python benchmarks/branches.py DATA --measure -m "not slow and not chaos and not gpu"
    python benchmarks/mutants.py DATA --count 90 --out mutants.json             # plants 90, spread like the statements
    python benchmarks/mutants.py DATA --replay mutants.json --out now.json      # the killed ones again, in another tree

DATA says which tests execute each line; it must come from the same tree. Each mutant is planted in a scratch copy. The
tests that execute its line run up to the first failure, those of the cheapest file first. If none fails, the other
tests of the same files run: they may depend on a fixture whose execution was recorded for another test. A test that
also fails without the mutant does not count.

A mutant is stored with its file, function and lines of text, so a replay finds it again when the code has moved. It
gets the status `gone` if this text is nowhere, or in several places. Then edit `old` and `new` of the mutant in the
file of mutants, or remove the mutant if its code no longer exists.

A mutant survives for one of three reasons: a test is missing, the code has no effect, or the mutant behaves like the
original.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from mutations import Function, Mutant, locate, plant, statements

ROOT = Path(__file__).resolve().parents[1]
#: runs the tests of a list in its order, and notes those that fail
PLUGIN = """import json, os, pathlib
tests, failed = (pathlib.Path(__file__).with_name(name) for name in ("tests.json", "failed.txt"))
order = {test: n for n, test in enumerate(json.loads(tests.read_text()))}
def pytest_collection_modifyitems(items):
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
def pytest_runtest_logreport(report):
    if report.failed:
        with failed.open("a") as file:
            file.write(json.dumps(report.nodeid) + "\\n")
pytest_collectreport = pytest_runtest_logreport
"""




class Measured:
    """What `branches.py` has measured: which tests executed each line, and how long each test took."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        self.coverage = CoverageData(str(folder / "coverage"))
        self.coverage.read()
        self.tests = self.names(list(self.coverage.measured_contexts()))
        self.seconds: dict[str, float] = defaultdict(float)
        for line in (folder / "durations.txt").read_text(encoding="utf-8").splitlines():
            if row := re.fullmatch(r"([\d.]+)s?\s+(?:call|setup)\s+(?:\w+\s+)?(tests/.*\S)\s*", line):
                self.seconds[row[2]] += float(row[1])

    @staticmethod
    def names(contexts: list[str]) -> set[str]:
        return {re.sub(r"(\|\w+| \(\w+\))$", "", context) for context in contexts} - {""}

    def executing(self, function: Function, at: int) -> set[str]:
        """The tests that executed a line. For the second line of a statement, for instance, no test is recorded. The
        result is then that of the nearest line above it in the same statement."""
        path = next((p for p in self.coverage.measured_files() if p.endswith(f"/{function.file}")), "")
        contexts = self.coverage.contexts_by_lineno(path) if path else {}
        first = max(s.lineno for s in statements(function.node) if s.lineno <= at + 1)
        return next((tests for n in range(at + 1, first - 1, -1) if (tests := self.names(contexts.get(n, [])))), set())

    def order(self, tests: set[str], limit: float) -> list[list[str]]:
        """The order in which tests are run: first `tests`, then the other tests of the same files. Each list in the
        result has tests of one file. Cheaper files come first, and within a file cheaper tests. Tests are left out if
        all chosen ones would take more than `limit` seconds; the imports of a file count as two seconds."""
        files, result = {test.partition("::")[0] for test in tests}, []
        for among in (tests, {test for test in self.tests if test.partition("::")[0] in files} - tests):
            groups = defaultdict(list)
            for test in sorted(among, key=lambda test: (self.seconds[test], test)):
                groups[test.partition("::")[0]].append(test)
            for group in sorted(groups.values(), key=lambda group: (sum(self.seconds[test] for test in group), group)):
                chosen, left = [], limit - 2
                for test in group:
                    if (left := left - self.seconds[test]) >= 0:
                        chosen.append(test)
                        limit = left
                result += [chosen] if chosen else []
        return result


class Trial:
    """Runs tests in a scratch copy of the tree."""

    def __init__(self, tree: Path, folder: Path, prefix: str, limit: float) -> None:
        self.tree, self.folder, self.copy, self.limit = tree, folder, folder / "tree", limit
        self.command = [*shlex.split(prefix), "timeout", "--kill-after=5", str(int(2 * limit + 20)), sys.executable,
                        "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "mutants_plugin"]
        shutil.copytree(tree, self.copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache"))
        (folder / "mutants_plugin.py").write_text(PLUGIN, encoding="utf-8")

    def run(self, tests: list[str], *options: str) -> tuple[str, list[str]]:
        """Runs tests. Returns ("killed", "survived" or "timeout"; the tests that failed)."""
        (self.folder / "tests.json").write_text(json.dumps(tests), encoding="utf-8")
        (self.folder / "failed.txt").write_text("", encoding="utf-8")
        code = subprocess.call([*self.command, *options, *dict.fromkeys(test.partition("::")[0] for test in tests)],
                               cwd=self.copy, env={**os.environ, "PYTHONPATH": f"{self.copy}{os.pathsep}{self.folder}"},
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        failed = [json.loads(line) for line in (self.folder / "failed.txt").read_text(encoding="utf-8").splitlines()]
        if not failed and code in (3, 4, 5):
            raise SystemExit(f"pytest exited with {code}; the tests: {tests}")
        return "timeout" if not failed and code in (124, 137) else "killed" if code else "survived", failed

    def decide(self, mutant: Mutant, measured: Measured, unsound: set[str]) -> None:
        if not (place := locate(mutant, self.tree)):
            return
        executing = measured.executing(*place)
        groups = measured.order(executing - unsound, self.limit)
        mutant.tests, mutant.by, mutant.status = len(executing), "", "too slow" if executing else "uncovered"
        path = self.copy / mutant.file
        for tests in ([*chain(*groups[:4])], [*chain(*groups[4:])]):        # most die in the first files
            if not tests or mutant.status in ("killed", "timeout"):
                break
            path.write_text(place[0].mutated(mutant, place[1]), encoding="utf-8")
            mutant.status, failed = self.run(tests, "-x")
            mutant.by = "".join(failed[:1])
            path.write_text(place[0].source, encoding="utf-8")
            for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                stale.unlink()                                              # Python sees no change within one second


def show(mutants: list[Mutant]) -> None:
    results: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        for package in ("total", "/".join(mutant.file.split("/")[:-1][:2])):
            results[package][mutant.status] += 1
        if mutant.status != "killed":
            print(f"{mutant.status}: {mutant.file} {mutant.function} ({mutant.kind}; {mutant.tests} tests)\n"
                  f"    {mutant.old}\n    {mutant.new}" + (f"\n    now: {mutant.by}" if mutant.by else ""))
    columns = sorted(results["total"])
    print(f"{'package':24}" + "".join(f"{column:>11}" for column in columns))
    for package, counts in sorted(results.items()):
        print(f"{package:24}" + "".join(f"{counts[column]:11}" for column in columns))


def judge(mutants: list[Mutant], trial: Trial, measured: Measured, out: Path | None) -> None:
    """Decide about all mutants that have no status yet. Then check the tests that killed mutants, by running them on
    the unchanged tree. If a test fails there, too, it proves nothing: the mutants that it killed are decided again
    without it."""
    sound, unsound = set[str](), set[str]()
    while True:
        for n, mutant in enumerate(mutants, 1):
            if not mutant.status or mutant.by in unsound:
                trial.decide(mutant, measured, unsound)
                print(f"{n}/{len(mutants)} {mutant.status}: {mutant.file} {mutant.function} {mutant.by}", flush=True)
                if out:
                    rows = json.dumps([asdict(m) for m in mutants], indent=1, ensure_ascii=False)
                    out.write_text(rows, encoding="utf-8")
        killers = sorted({m.by for m in mutants if m.status == "killed" and "::" in m.by} - sound)
        failed = {test for n in range(0, len(killers), 10) for test in trial.run(killers[n:n + 10])[1]}
        sound.update(set(killers) - failed)
        unsound |= failed
        if not failed:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, metavar="DATA", help="what branches.py has measured of this tree")
    parser.add_argument("--count", type=int, default=60, help="how many to plant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, metavar="FILE", help="plant the killed mutants of this file again")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results; if it exists, what is decided there stays")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree to mutate a copy of")
    parser.add_argument("--limit", type=float, default=90, help="seconds of tests for each mutant")
    parser.add_argument("--prefix", default="", help="command before each call of pytest: `nice`, a lock")
    options = parser.parse_args()
    tree = options.tree.resolve()
    if options.out and options.out.exists():
        mutants = read(options.out)
    elif options.replay:
        mutants = [replace(m, status="", by="") for m in read(options.replay) if m.status == "killed"]
    else:
        mutants = plant(tree, options.count, options.seed)
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        judge(mutants, Trial(tree, Path(folder), options.prefix, options.limit), Measured(options.data), options.out)
    show(mutants)
    return int(options.replay is not None and any(m.status != "killed" for m in mutants))


def read(path: Path) -> list[Mutant]:
    return [Mutant(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    raise SystemExit(main())
