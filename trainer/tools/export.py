"""`tokenmill train export`: writes the model of a checkpoint in Hugging Face's layout, by means of
`trainer.checkpoint.hf`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainer.base.arguments import positive, say


def add_parser(commands: Any) -> None:
    export = commands.add_parser(
        "export", description="Write the model of a checkpoint as config.json, safetensors and tokenizer, which "
                              "transformers, vLLM and others load.")
    export.add_argument("run", metavar="RUN", help="folder of the run (STORE/runs/RUN), or its name with --store")
    export.add_argument("--store", help="the store the tokenizer is in (default: two folders above RUN)")
    export.add_argument("--trained", metavar="FOLDER", help="the --out of the training (default: RUN/train)")
    export.add_argument("--step", type=positive, metavar="N", help="the checkpoint of step N (default: the latest)")
    export.add_argument("--out", required=True, metavar="FOLDER", help="the new folder for the exported model")
    export.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16",
                        help="dtype of the exported weights (default: bf16; training uses fp32)")


def run(options: argparse.Namespace) -> int:
    from trainer.base.config import ConfigError
    from trainer.checkpoint import checkpoints as ckpt
    from trainer.checkpoint import hf

    folder = Path(options.run)
    if options.store and not folder.is_dir():
        folder = Path(options.store) / "runs" / options.run
    checkpoints = (Path(options.trained) if options.trained else folder / "train") / "checkpoints"
    by_step = {c.step: c for c in ckpt.complete(checkpoints)}
    if not by_step:
        raise ConfigError(f"{checkpoints}: no checkpoint there; where the training had another --out, give it as "
                          f"--trained")
    step = options.step or max(by_step)
    if step not in by_step:
        raise ConfigError(f"--step {step}: {checkpoints} has steps {', '.join(map(str, sorted(by_step)))}")
    store = Path(options.store) if options.store else folder.absolute().parent.parent
    tokenizer = store / by_step[step].meta["curriculum"]["tokenizer"]["path"]
    for line in hf.export(by_step[step], Path(options.out), options.dtype, tokenizer):
        say(line)
    return 0
