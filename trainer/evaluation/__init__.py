"""Scores models on benchmark tasks, such as HellaSwag or LAMBADA.

`task_file` reads the description of a task, `rows` the data, `items` makes items and their prompts from both. `queries`
tokenises prompts, `scoring` computes log-likelihoods, `generation` continues prompts greedily, and `measures` turns the
results of items into scores. `evaluate` combines them; `models` opens checkpoints and exported models. Needs torch and
a tokenizer, but neither Ray nor transformers.
"""
