"""`make demo`: runs the whole pipeline on real input. It fetches pages, runs a recipe on them, and trains a small
model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from demo.fetch import main as fetch_main
from pipeline.base.errors import TokenmillError
from pipeline.engine.driver.endings import Interrupted
from pipeline.recipe import load_recipe
from pipeline.run import default_workers, make_backend, run_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPE = Path(__file__).with_name("recipe.yaml")


def main(store: str | None = None) -> int:
    """Run the demo, with results in the folder `store` (default: demo-store in the repository). A second call continues
    where an interrupted one stopped. Returns the exit status."""
    began = time.monotonic()
    print("1. input", flush=True)
    if fetch_main():
        return 1
    fetched = time.monotonic()
    print("\n2. from raw bytes to tokens", flush=True)
    recipe = load_recipe(RECIPE, [])
    at = Path(store or ROOT / "demo-store")
    try:
        workers = make_backend("ray", min(2, default_workers()), None)
        made = run_recipe(recipe, str(at), make_backend=workers, show="rich", run="demo")
    except (TokenmillError, Interrupted) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    for warning in made.warnings:
        print(f"warning: {warning}")
    milled = time.monotonic()
    folder = at / "runs" / made.run
    print(f"\nThe data is finished. While the model trains, you can already\n"
          f"  read the report         {folder / 'report.html'}\n"
          f"  try other thresholds    {serve_command(at)}   (in a second terminal; run › Tune clean)\n"
          f"  see what was dropped    {tokenmill()} inspect clean --dropped --store {at}\n\n3. training", flush=True)
    # in a process of its own, because the trainer sets the number of its threads for its whole process
    code = subprocess.run([sys.executable, "-m", "pipeline.cli", "train", "run", str(folder)], cwd=ROOT).returncode
    if code:
        return code
    trained = time.monotonic()
    print(closing(folder, made.datasets, made.shards))
    print(f"\ninput {fetched - began:.0f} s, tokens {milled - fetched:.0f} s, training {trained - milled:.0f} s")
    return 0


def closing(folder: Path, datasets: dict[str, int], shards: dict[str, int]) -> str:
    """Return the text that is printed at the end: path of the report, loss before and after training, number of tokens
    and documents, and a sample of generated text."""
    import json

    summary = json.loads((folder / "train" / "summary.json").read_text())
    lines = [
        "",
        f"report   {folder / 'report.html'}",
        f"loss     {summary['heldout_loss_before']:.2f} before, {summary['heldout_loss']:.2f} after, on held-out text "
        f"({summary['ratio']:.2f} of its unigram entropy); curve: {folder / 'train' / 'loss.svg'}",
        "tokens   " + ", ".join(f"{name} {n:,}" for name, n in shards.items()),
        "documents " + ", ".join(f"{name} {n:,}" for name, n in datasets.items()),
    ]
    if summary.get("sample"):
        lines.append(f"sample   {' '.join(summary['sample'].split())}")
    else:
        lines.append(f"sample   skipped: {summary.get('sample_skipped')}")
    store = os.path.relpath(folder.parents[1])
    lines += ["", f"browse   {serve_command(folder.parents[1])}   "
                  "(run › Tune clean: change a threshold, see what moves, run it, compare)",
              f"or type  edit a threshold in {os.path.relpath(RECIPE)}, then",
              f"         {tokenmill()} run {os.path.relpath(RECIPE)} --store {store} --name changed",
              f"compare  {tokenmill()} report --compare {folder.name} changed --store {store}"]
    return "\n".join(lines)


def tokenmill() -> str:
    """The path of the command `tokenmill` in the environment of the demo, as one types it in the current folder."""
    return os.path.relpath(Path(sys.executable).with_name("tokenmill"))


def serve_command(store: Path) -> str:
    """The command that starts the web service for the folder `store`. Runs that the service starts may read the demo's
    inputs."""
    return (f"{tokenmill()} serve --store {os.path.relpath(store)} "
            f"--allow-root {os.path.relpath(RECIPE.parents[1])}")


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:2]))
