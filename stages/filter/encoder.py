"""The filter `encoder`: scores documents by a transformer with a sequence-classification head, and drops those with a
low score. The score may measure educational value, quality, toxicity or how well a topic fits."""

from __future__ import annotations

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stages.stage import Bound, Stage, StageConfig, decision, resource
from stages.stage import signal as setting

if TYPE_CHECKING:
    from stages.document import Document

#: a text is cut to this many characters for each token that may be read
CHARACTERS_A_TOKEN = 40
#: tokens of a text that are read if neither the recipe nor the model sets a limit
DEFAULT_TOKENS = 512
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class Encoder(Stage):
    """Score documents by a transformer encoder and keep those that reach `min` (FineWeb-Edu, arXiv 2406.17557).

    `model` is the folder of a Hugging Face model for sequence classification, as `save_pretrained` writes it. If the
    model has one output (a regression), the output is the score. FineWeb-Edu's model was trained on grades from 0 to 5;
    FineWeb-Edu's rule `int_score >= 3` is `min: 2.5` here. If the model has several outputs, the score is the
    probability of the label in the setting `label`. The probability is computed by softmax, or by sigmoid if
    `problem_type` in the model's config.json is `multi_label_classification`.

    Only the beginning of a text is scored, as FineWeb-Edu does: its first `max_tokens` tokens, which include the
    special tokens that the tokenizer adds. Only the first 40 characters per allowed token are tokenized, so that a very
    long text costs no more time.

    On a CPU the model scores one text at a time, with one thread per worker, which was measured to be as fast as
    batches. A score therefore depends only on the text. On a GPU (`gpus` above 0) texts are sorted by length, and the
    model scores `batch` of them at a time, padded to the longest. The other texts of a batch may then change the last
    digits of a score. This change is far below 0.001, the step to which scores are rounded before they are compared and
    stored.

    The step trusts the model's folder only as data: weights are read from safetensors files alone, no code in the
    folder is run, and nothing is fetched from the network.
    """

    name = "encoder"
    version = 1
    cost_ms = 300.0
    leaves = 0.5
    drops = True
    exact = False
    grid = 1e-3
    batched = True
    libraries = ("safetensors", "tokenizers", "torch", "transformers")
    signals = ("encoder_score",)

    class Config(StageConfig):
        model: str = resource(..., "folder of the model: config.json, model.safetensors, tokenizer.json …")
        label: str | None = setting(None, "the label whose probability is the score; null: a model with one output")
        max_tokens: int | None = setting(None, "tokens of a text that are read; null: as many as the model can, at "
                                               "most 512", ge=8)
        dtype: Literal["float32", "bfloat16"] = setting("float32", "numbers the model computes with")
        gpus: float = setting(0.0, "GPUs a worker takes, a share of one or whole ones; 0: it runs on the CPU", ge=0)
        batch: int = setting(64, "texts at a time on a GPU", ge=1, le=4096)
        signal: str = setting("encoder_score", "name of the signal, where a dataset is scored by several models",
                              pattern=r"^[a-z][a-z0-9_]{0,62}$")
        min: float = decision(2.5, "keep documents that score at least this")

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self.signals = (self.config.signal,)
        self.gpus = self.config.gpus
        weights = sum(path.stat().st_size for path in Path(self.config.model).glob("*.safetensors"))
        self.memory_mb = (3_000 if self.gpus else 1_200) + 3 * (weights >> 20)

    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        self._need_libraries()
        if self.config.gpus not in (0.0, 1.0):           # the share of a GPU does not change scores
            return Encoder(self.config.model_copy(update={"gpus": 1.0})).key(roles)
        return super().key(roles)

    def problems(self) -> dict[str, str]:
        try:
            self._need_libraries()
            self._check(_read_config(Path(self.config.model)))
        except FileNotFoundError:
            return {}                                                # not on this machine: `setup` raises the error
        except _Unfit as e:
            return {e.field: str(e)}
        return {}

    def _need_libraries(self) -> None:
        missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
        if missing:
            raise _Unfit("model", f"transformers need {', '.join(missing)}: pip install 'tokenmill[encoder]'")

    def _check(self, config: dict[str, Any]) -> None:
        labels = _labels(config)
        if self.config.label is None and len(labels) > 1:
            raise _Unfit("label", f"{self.config.model} tells {', '.join(labels[:30])} apart; say which of them is the "
                                  f"score")
        if self.config.label is not None and len(labels) == 1:
            raise _Unfit("label", f"{self.config.model} has one output, which is the score; leave out `label`")
        if self.config.label is not None and self.config.label not in labels:
            raise _Unfit("label", f"{self.config.model} has no label '{self.config.label}'; it has "
                                  f"{', '.join(labels[:30])}")
        longest = config.get("max_position_embeddings")
        if isinstance(longest, int) and (self.config.max_tokens or 0) > longest:
            raise _Unfit("max_tokens", f"{self.config.model} reads {longest} tokens at most")

    def setup(self) -> None:
        self._need_libraries()
        folder = Path(self.config.model)
        config = _read_config(folder)
        self._check(config)
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        longest = min(self._tokenizer.model_max_length, config.get("max_position_embeddings") or DEFAULT_TOKENS)
        self._most = self.config.max_tokens or min(longest, DEFAULT_TOKENS)
        if self._most > self._tokenizer.model_max_length:
            raise _Unfit("max_tokens", f"{folder} reads {self._tokenizer.model_max_length} tokens at most")
        self._pad = self._tokenizer.pad_token_id or 0
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, use_safetensors=True, dtype=getattr(torch, self.config.dtype), output_loading_info=True, **local)
        if info["missing_keys"] or info["mismatched_keys"]:
            missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
            raise _Unfit("model", f"{folder} lacks weights, which would be random: {', '.join(missing[:5])}; was it "
                                  f"saved with its classification head?")
        if self.gpus and not torch.cuda.is_available():
            raise _Unfit("gpus", "no GPU is visible to torch here; set `gpus: 0`, or install torch with CUDA")
        if not self.gpus:
            torch.set_num_threads(1)                     # one worker per core, and a fixed order of summation
        self._device = "cuda" if self.gpus else "cpu"
        self._model = model.to(self._device).eval()
        self._sigmoid = config.get("problem_type") == "multi_label_classification"
        self._column = 0 if self.config.label is None else _labels(config).index(self.config.label)

    def process_batch(self, docs: list[Document]) -> list[str | None]:
        for doc, score in zip(docs, self.score_texts([doc.text for doc in docs])):
            doc.signals[self.config.signal] = self.round(score)
        return [self.verdict(doc) for doc in docs]

    def bounds(self) -> list[Bound]:
        return [Bound(self.config.signal, "min", "min", self.config.min)]

    def verdict(self, doc: Document) -> str | None:
        return None if doc.signals[self.config.signal] >= self.config.min else "encoder"

    def score_texts(self, texts: list[str]) -> list[float]:
        """Return the score of each text, in the order of the texts. The scores are not rounded yet."""
        rows = [self._tokens(text) for text in texts]
        at_once = self.config.batch if self.gpus else 1
        scores = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda number: (-len(rows[number]), number))
        for start in range(0, len(order), at_once):
            part = order[start:start + at_once]
            for number, score in zip(part, self._forward([rows[number] for number in part])):
                if not math.isfinite(score):
                    raise ValueError(f"{self.config.model} gives {score} for a text of {len(texts[number])} characters")
                scores[number] = score
        return scores

    def _tokens(self, text: str) -> list[int]:
        encoded = self._tokenizer(text[:CHARACTERS_A_TOKEN * self._most], truncation=True, max_length=self._most)
        return encoded["input_ids"] or [self._pad]

    def _forward(self, rows: list[list[int]]) -> list[float]:
        """Run the model on a batch of tokenized texts, and return their scores, in order. The first text must be the
        longest; all others are padded to its length."""
        import torch

        longest = len(rows[0])
        ids = torch.tensor([row + [self._pad] * (longest - len(row)) for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
        if logits.shape[1] > 1:
            logits = logits.sigmoid() if self._sigmoid else logits.softmax(dim=1)
        return logits[:, self._column].tolist()


class _Unfit(ValueError):
    """Raised when a model or a setting cannot be used. `field` is the setting that the user must change."""

    permanent = True

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json in a model's folder, after a check that the model may be loaded.

    Raises:
        FileNotFoundError: the folder or its config.json is missing.
        _Unfit: config.json cannot be read, the model has no sequence-classification head, its weights are not in
        safetensors files, or its files name code of its own to be run (`auto_map`).
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no folder of a transformer: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError("it holds no object")
        longest = config.get("max_position_embeddings")
        if not isinstance(longest, int | None):
            raise TypeError(f"max_position_embeddings is not a number: {str(longest)[:40]!r}")
        code = "auto_map" in config or "auto_map" in _read_json(folder / "tokenizer_config.json")
        heads = config.get("architectures") or []
    except (ValueError, RecursionError, AttributeError, TypeError) as e:
        raise _Unfit("model", f"{path} cannot be read: {e}") from None
    if code:
        raise _Unfit("model", f"{folder} wants code of its own to be run (auto_map), which is never done")
    if not any(str(name).endswith("ForSequenceClassification") for name in heads):
        raise _Unfit("model", f"{folder} has no head for sequences (it is {', '.join(map(str, heads)) or 'nameless'}); "
                              f"take one saved as …ForSequenceClassification")
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise _Unfit("model", f"{folder} has no model.safetensors, and other weights can hold code; load it once where "
                              f"you trust it, and save_pretrained(…) writes safetensors")
    return config


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _labels(config: dict[str, Any]) -> list[str]:
    """Return the labels of a model's outputs, in the order of the outputs, from its config.json. Raises _Unfit if the
    labels are not numbered, or if `num_labels` is not a number."""
    names, count = config.get("id2label"), config.get("num_labels", 2)
    if isinstance(names, dict) and names:
        if not all(key.isdecimal() for key in names):
            raise _Unfit("model", f"config.json: id2label numbers its labels 0, 1, …; it has {', '.join(names)[:100]}")
        return [str(names[key]) for key in sorted(names, key=int)]
    if not isinstance(count, int):
        raise _Unfit("model", f"config.json: num_labels is not a number: {str(count)[:40]!r}")
    # transformers writes no labels for its default of two outputs
    return [f"LABEL_{i}" for i in range(count)]
