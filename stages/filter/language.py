"""Language identification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.filter.models import FastText, default_lid176, labels_of, lid176
from stages.stage import Stage, StageConfig, decision, resource

if TYPE_CHECKING:
    from stages.document import Document


class Language(Stage):
    """Name the language of a document and keep those of some languages that are sure enough (fastText lid.176).

    Dialect: datatrove 0.10.1 (`LanguageFilter`, ft176 backend): the whole text with line breaks as spaces, score
    strictly above `min`. The score is rounded to 4 digits *before* it is compared and stored, so that other machines,
    whose last float32 digits differ, decide alike. Only the most probable language counts (datatrove lets a document
    pass, too, whose second language is among those wanted; that takes a `min` below 0.5).

    Sets `doc.language` for every document. Reasons: `language` (not wanted), `language_score` (not sure).
    """

    name = "language"
    version = 1
    exact = False
    grid = 1e-4
    libraries = ("fasttext-numpy2",)
    signals = ("language_score",)
    memory_mb = 120

    class Config(StageConfig):
        keep: tuple[str, ...] | None = decision(
            None, "languages kept, named as lid.176 does (ISO 639-1 or -3); null: all")
        min: float = decision(0.65, "keep documents whose language is more probable than this")
        model: str | None = resource(None, "fastText model; null: lid.176.ftz, see `tokenmill fetch lid176`")

    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        if self.config.model is None and "resource" in roles:
            # the content of the default model counts like that of a named one
            return Language(self.config.model_copy(update={"model": str(lid176())})).key(roles)
        return super().key(roles)

    def resource_files(self) -> dict[str, str]:
        return {"model": self.config.model or str(lid176())}

    def problems(self) -> dict[str, str]:
        known = labels_of(self.config.model or default_lid176()) if self.config.keep else None
        unknown = sorted(set(self.config.keep or ()) - known) if known is not None else []
        return {"keep": f"the model knows no language {', '.join(unknown)}; it names them as ISO 639-1 does where "
                        f"there is a code: en, de, zh"} if unknown else {}

    def setup(self) -> None:
        self._model = FastText(self.config.model or lid176())
        for field, message in self.problems().items():
            raise ValueError(f"language: {field}: {message}")

    def process(self, doc: Document) -> str | None:
        found = self._model.predict(doc.text)
        doc.language, score = found[0] if found else ("", 0.0)
        doc.signals["language_score"] = self.round(score)
        return self.verdict(doc)

    def verdict(self, doc: Document) -> str | None:
        if self.config.keep is not None and doc.language not in self.config.keep:
            return "language"
        return None if doc.signals["language_score"] > self.config.min else "language_score"
