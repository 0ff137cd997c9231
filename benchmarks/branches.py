"""Which branches of each package do the tests execute?

    python benchmarks/branches.py DATA --measure -m "not slow and not chaos and not gpu"       # fills the folder DATA
    python benchmarks/branches.py DATA                                   # the table of an earlier run of this tree

All arguments after `--measure` are passed to pytest. DATA gets the files that `mutants.py` needs: `coverage` (which
tests executed each line) and `durations.txt`. Needs pytest-cov 7. Measuring takes about twice the time of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("pipeline", "stages", "tokenizer", "trainer")
#: pytest-cov names the test in its own process only. A child takes the name from the environment that it inherits.
CONFIG = """[run]
branch = true
parallel = true
sigterm = true
patch = _exit
source_pkgs = pipeline, stages, tokenizer, trainer
data_file = {}/coverage
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-imported, module-not-measured, previously-imported
"""


def measure(folder: Path, tree: Path, arguments: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "coveragerc"
    config.write_text(CONFIG.format(folder))
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    with (folder / "durations.txt").open("w", encoding="utf-8") as log:
        return subprocess.call(
            [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "--durations", "0", "--cov",
             f"--cov-config={config}", "--cov-context=test", "--cov-report=", *arguments],
            cwd=tree, stdout=log, env={**env, "PYTHONPATH": str(tree), "COVERAGE_PROCESS_START": str(config)})


def report(folder: Path, tree: Path) -> None:
    """Print the number of statements and branches, and the share that the tests executed: in total, for each package,
    and for each subfolder of a package."""
    from coverage import Coverage

    coverage = Coverage(str(folder / "coverage"), config_file=False, branch=True,
                        source=[str(tree / name) for name in PRODUCT])
    coverage.load()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        coverage.json_report(outfile=file.name, include=[f"{tree / name}/*" for name in PRODUCT])
        files = json.loads(Path(file.name).read_text(encoding="utf-8"))["files"]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, values in files.items():
        folders = Path(name).resolve().relative_to(tree).parts[:-1]
        for package in ("total", *{folders[0], "/".join([*folders, "*.py"][:2])}):
            counts[package].update({k: v for k, v in values["summary"].items() if isinstance(v, int)})
    print(f"{'package':24}{'statements':>12}{'% run':>8}{'branches':>12}{'not taken':>12}{'% taken':>9}")
    for package, n in sorted(counts.items()):
        print(f"{package:24}{n['num_statements']:12,}{100 * n['covered_lines'] / max(n['num_statements'], 1):8.1f}"
              f"{n['num_branches']:12,}{n['num_branches'] - n['covered_branches']:12,}"
              f"{100 * n['covered_branches'] / max(n['num_branches'], 1):9.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree to measure")
    parser.add_argument("--measure", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="run pytest with these")
    options = parser.parse_args()
    tree, folder = options.tree.resolve(), options.data.resolve()
    status = 0 if options.measure is None else measure(folder, tree, options.measure)
    report(folder, tree)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
