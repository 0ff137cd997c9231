"""The filter `perplexity`: drops documents by their perplexity, which says how far a text is from the texts that a
language model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from stages.stage import Stage, StageConfig, decision, resource, signal

if TYPE_CHECKING:
    from stages.document import Document
    from stages.text.ccnet import TextModel


class Perplexity(Stage):
    """Measure the perplexity of documents under an n-gram model of their language, and drop those outside given bounds
    (CCNet, arXiv 1911.00359, section 3.4). The lower the perplexity, the closer a document is to the texts that the
    model was trained on (in CCNet, Wikipedia).

    The dialect (how texts are normalised before they are scored) is a property of the model. By default it is that of
    cc_net; another dialect can be chosen when a model is made (`stages.text.ccnet`). Models are made by `tokenmill lm
    train`, or from any ARPA file by `tokenmill lm compile`. The perplexity is stored as the signal `perplexity`,
    rounded to one decimal place as in cc_net. CCNet divides the documents of each language at percentiles of the
    perplexity, into head, middle and tail. `tokenmill buckets fit --score perplexity --by language --at 30,60` finds
    these percentiles, and the step `buckets` gives head, middle and tail the numbers 0, 1 and 2.

    A document without text, or in a language without a model, has no perplexity and is kept (CCNet puts it into a
    bucket `all`). Reasons: `low_perplexity` (texts that repeat themselves), `high_perplexity`.
    """

    name = "perplexity"
    version = 2
    cost_ms, drops = 2.0, True
    exact = False
    grid = 0.1
    libraries = ("sentencepiece",)
    signals = ("perplexity",)

    class Config(StageConfig):
        model: str | None = resource(None, "model for all languages that `models` does not name")
        models: dict[str, str] = resource({}, "language, as the step `language` labels it → model")
        min: float | dict[str, float] | None = decision(
            None, "smallest perplexity kept; or language → smallest", at_least="perplexity")
        max: float | dict[str, float] | None = decision(
            None, "largest perplexity kept; or language → largest", at_most="perplexity")
        max_chars: int = signal(1_000_000, "characters that are scored, from the beginning of a text", gt=0)

        @model_validator(mode="after")
        def _has_model(self) -> Perplexity.Config:
            if self.model is None and not self.models:
                raise ValueError("needs a model: `model: FILE`, or `models: {en: FILE, …}`; `tokenmill lm train` makes "
                                 "them")
            return self

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        files = {path for path in (self.config.model, *self.config.models.values()) if path and Path(path).is_file()}
        self.memory_mb = 200 + sum(Path(path).stat().st_size * 2 >> 20 for path in files)

    def setup(self) -> None:
        from stages.text.ccnet import TextModel

        loaded = {path: TextModel(path) for path in {self.config.model, *self.config.models.values()} if path}
        self._models: dict[str, TextModel] = {language: loaded[path] for language, path in self.config.models.items()}
        self._other: TextModel | None = loaded.get(self.config.model or "")

    def process(self, doc: Document) -> str | None:
        doc.signals.pop("perplexity", None)        # an earlier dataset may have stored one
        model = self._models.get(doc.language, self._other)
        if model is not None and doc.text:
            doc.signals["perplexity"] = model.perplexity(doc.text[:self.config.max_chars])
        return self.verdict(doc)

    def verdict(self, doc: Document) -> str | None:
        value = doc.signals.get("perplexity")
        low, high = _limit_for(self.config.min, doc.language), _limit_for(self.config.max, doc.language)
        if value is not None and low is not None and value < low:
            return "low_perplexity"
        return "high_perplexity" if value is not None and high is not None and value > high else None

    def reads(self) -> dict[str, str]:
        by_language = next((field for field in ("min", "max") if isinstance(getattr(self.config, field), dict)), None)
        return {"language": by_language} if by_language else {}


def _limit_for(limit: float | dict[str, float] | None, language: str) -> float | None:
    return limit.get(language) if isinstance(limit, dict) else limit
