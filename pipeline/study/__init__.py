"""A study says which of several data sets trains the better model (`tokenmill train ablate --data`, docs/studies.md).

A *variant* is a recipe: a file, or the first file with some keys changed (`--vary NAME KEY=VALUE`). Variants run as one
plan with one driver (`pipeline.run.run_recipes`). Tasks have content keys, so what variants have in common runs once,
and what an ordinary run has done already does not run again. Each variant is also a run of its own:

    STORE/runs/STUDY@VARIANT/              recipe, curriculum, report; `tokenmill report --compare` compares two
    STORE/datasets/NAME@VARIANT/           and dropped/, quarantine/
    STORE/shards/STREAM@VARIANT/
    STORE/studies/STUDY/study.json         the variants, what they are judged by
    STORE/studies/STUDY/ablate/            the trainings (arms) and their results (`trainer.tools.experiment_arms`)

All variants have the tokenizer of the first one, so that a token means the same in all; with `--tokenizers` each has
its own. Variants are judged by the text of one more stream, `held-out`, of which nothing is trained on.

This package only makes the data. The command line then calls the trainer's `ablate` with the runs, and the trainer
starts `python -m trainer run` for each arm. So the trainer needs neither Ray nor the pipeline.
"""
