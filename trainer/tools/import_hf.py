"""`tokenmill train import`: prints the recipe entries that continue training from a model in Hugging Face's layout."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainer.base.arguments import say


def add_parser(commands: Any) -> None:
    adopt = commands.add_parser(
        "import", description="Check a model in Hugging Face's layout and print the train: section that goes on "
                              "training it.")
    adopt.add_argument("folder", metavar="HF_FOLDER", help="a folder with config.json and safetensors")


def run(options: argparse.Namespace) -> int:
    from dataclasses import fields

    import yaml

    from trainer.checkpoint import hf, hf_config

    folder = Path(options.folder)
    config, vocab = hf_config.read_config(folder)
    hf.check(folder, config, vocab)
    plain = config.identity()
    unused = {f.name for f in fields(config) if plain.get(f.name) == f.default}
    section = {"model": {k: v for k, v in plain.items() if k not in unused and k != "init_std"},
               "init": {"from": str(folder.absolute())}}
    if config.rope_scaling:
        section["model"]["rope_scaling"] = {k: v for k, v in plain["rope_scaling"].items() if v is not None}
    tokenizer = next((n for n in ("tokenizer.json", "tokenizer.model") if (folder / n).is_file()), None)
    say(f"# {config.parameters(vocab):,} parameters; the embedding has {vocab:,} rows: shards for it are encoded with "
        f"its own tokenizer")
    if tokenizer:
        say(yaml.safe_dump({"tokenizer": {"load": str((folder / tokenizer).absolute())}}, sort_keys=False).rstrip())
    say(yaml.safe_dump({"train": section}, sort_keys=False, default_flow_style=None, width=110).rstrip())
    return 0
