"""lm-evaluation-harness' side of task_eval.py; runs in an environment of its own and imports nothing of this project.

    python peer_task_eval.py MODEL TASKS OUT.json BATCH DTYPE

TASKS is a folder with task files (YAML) and their data. OUT.json maps each task to

    items    for each item, the log-likelihood of each answer and whether it is the greedy continuation; or the
             generated text
    metrics  the task's metrics
    seconds  CPU seconds of all requests to the model
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402


def main(model: str, folder: str, out: str, batch: str, dtype: str) -> None:
    lm = HFLM(pretrained=model, device="cpu", dtype=dtype, batch_size=int(batch))
    spent: list[float] = []
    for name in ("loglikelihood", "generate_until"):
        setattr(lm, name, timed(getattr(lm, name), spent))
    manager = TaskManager(include_path=folder, include_defaults=False)
    tasks = {}
    for path in sorted(Path(folder).glob("*.yaml")):
        spent.clear()
        result = simple_evaluate(model=lm, tasks=[path.stem], task_manager=manager, log_samples=True, bootstrap_iters=0,
                                 random_seed=None, numpy_random_seed=None, torch_random_seed=None)
        samples = sorted(result["samples"][path.stem], key=lambda sample: sample["doc_id"])
        tasks[path.stem] = {"seconds": sum(spent), "metrics": result["results"][path.stem],
                            "items": [sample["filtered_resps"] for sample in samples]}
        print(path.stem, f"{sum(spent):.1f} s", flush=True)
    Path(out).write_text(json.dumps(tasks))


def timed(whole: Any, spent: list[float]) -> Any:
    """Return the function `whole`, changed so that each call appends its CPU seconds to `spent`."""
    def call(*args: Any, **options: Any) -> Any:
        began = time.process_time()
        result = whole(*args, **options)
        spent.append(time.process_time() - began)
        return result

    return call


if __name__ == "__main__":
    main(*sys.argv[1:])
