"""The step `language`: identifies the language of documents and of their paragraphs, and the script in which they are
written."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from stages.scoring.models import default_lid176, labels_of, lid176, load
from stages.stage import Bound, Stage, StageConfig, decision, resource, signal
from stages.text.language_codes import names, scripts_of, tag
from stages.text.marks import MOST, Span
from stages.text.scripts import CODES, NUMBERS, fits, main_script, other_letters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stages.document import Document

#: threshold of a language that `min` does not name, when it names others
DEFAULT = 0.65
#: signals that exist only with `paragraphs`
PARAGRAPHS = ("language_paragraphs", "languages", "language_share", "language_cut")


class Language(Stage):
    """Name the language of each document (fastText); keep those in a language named in `keep` with a score above `min`.

    Dialect (the code it follows): datatrove 0.10.1 (`LanguageFilter`, ft176 backend). The model gets the whole text
    with line breaks as spaces, and the score must be strictly above `min`. The score is rounded to 4 digits *before* it
    is compared and stored, so that machines whose last float32 digits differ decide alike. Only the most probable
    language counts (datatrove also keeps a document whose second language is wanted, which can happen only with a `min`
    below 0.5).

    `doc.language` is the model's own label: lid.176 writes `fr`, GlotLID `fra_Latn`. Settings may name languages in
    either form (`stages.text.language_codes`): `keep: [fr]` and `keep: [fra_Latn]` mean the same with either model. If
    the labels of a model have no script, a script in the settings is compared with the script of the text's letters.

    Signals (numbers stored with the document): `language_score`; `script`, the script of most letters as its ISO 15924
    number (215 Latn, 220 Cyrl, 500 Hani; 0 without letters); `script_share`, the share of letters in that script.
    Scripts are stored as numbers so that verdicts about them can be derived again from the signals.

    With `paragraphs`, the model also identifies every line of at least `paragraph_chars` characters on its own, as in
    Dolma and DCLM. A line counts if the probability of its language is above `paragraph_min`. Three signals describe
    the lines that count: `language_paragraphs` is their number, `languages` the number of their languages, and
    `language_share` the share of their characters that is in the document's language (null without such lines).

    With `drop_foreign`, lines that count and are not in the document's language are deleted from documents that are
    kept. The signal `language_cut` is the number of characters in such lines, also in documents that are dropped; it is
    0 without `drop_foreign`. All signals describe the text before the deletion.

    Reasons: `language` (not in `keep`), `language_score` (not above `min`), `language_script` (not in a script of its
    language), `script_share` (below `min_script_share`), `language_share` (below `min_share`), `languages` (more than
    `max_languages`).
    """

    name = "language"
    version = 2
    cost_ms = 0.3
    leaves = 0.6
    drops = True
    keeps = "keep"
    exact = False
    grid = 1e-4
    libraries = ("fasttext-numpy2",)
    signals: tuple[str, ...] = ("language_score", "script", "script_share")
    scores = ("language_score",)
    sets_language = True
    memory_mb = 250

    class Config(StageConfig):
        keep: tuple[str, ...] | None = decision(
            None, "languages kept: codes of ISO 639-1 or -3, with a script or without (fr, fra, fra_Latn); null: all")
        min: float | dict[str, float] = decision(
            DEFAULT, f"keep documents whose language is more probable than this; or by language, {{default: {DEFAULT}, "
                     f"de: 0.5, fra_Latn: 0.824}}", at_least="language_score")
        script: bool = decision(False, "drop documents in a script in which their language is not written")
        min_script_share: float | None = decision(
            None, "smallest share of letters in the main script", ge=0, le=1, at_least="script_share")
        min_share: float | None = decision(
            None, "smallest share of characters in the document's language (needs `paragraphs`)", ge=0, le=1,
            at_least="language_share")
        max_languages: int | None = decision(
            None, "most languages of paragraphs (needs `paragraphs`)", ge=1, at_most="languages")
        paragraphs: bool = signal(False, "identify every paragraph, too: doubles the time")
        paragraph_chars: int = signal(40, "shortest paragraph that is identified, characters", ge=1)
        paragraph_min: float = signal(0.5, "a paragraph counts if its language is more probable than this", ge=0, le=1)
        drop_foreign: bool = signal(False, "delete paragraphs that are in another language (needs `paragraphs`)")
        model: str | None = resource(None, "fastText model (lid.176.ftz, lid.176.bin, GlotLID, …); null: lid.176.ftz, "
                                           "see `tokenmill fetch lid176`")

        @field_validator("keep", mode="before")
        @classmethod
        def _listed(cls, value: Any) -> Any:
            return [value] if isinstance(value, str) else value

        @field_validator("min", mode="before")
        @classmethod
        def _thresholds(cls, value: Any) -> Any:
            for threshold in value.values() if isinstance(value, dict) else (value,):
                if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold < 1:
                    raise ValueError(f"must be a probability below 1, or one by language such as {{default: {DEFAULT}, "
                                     f"de: 0.5}}; got {threshold!r}")
            return value

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self._demands_config: Any = None
        self._demands: dict[tuple[str, str], tuple[bool, float, bool]] = {}
        if self.config.paragraphs:
            self.signals = (*self.signals, *PARAGRAPHS)
        if self.config.model is not None and os.path.isfile(self.config.model):
            # a mapped model takes memory for the pages in use, a model read by the library for all of it
            self.memory_mb = 250 + (os.path.getsize(self.config.model) >> 20) * 6 // 5

    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        if self.config.model is None and "resource" in roles:
            # the key covers the content of the default model, as it does for a named model
            return Language(self.config.model_copy(update={"model": str(lid176())})).key(roles)
        return super().key(roles)

    def bounds(self) -> list[Bound]:
        return [bound._replace(side="above") if bound.key == "min" else bound for bound in super().bounds()]

    def resource_files(self) -> dict[str, str]:
        return {"model": self.config.model or str(lid176())}

    # -- settings ------------------------------------------------------------------------------------------------
    def problems(self) -> dict[str, str]:
        config, result = self.config, {}
        for field in ("drop_foreign", "min_share", "max_languages"):
            if getattr(config, field) and not config.paragraphs:
                result[field] = "asks for paragraphs, which are not identified; add `paragraphs: true`"
        labels = labels_of(config.model or default_lid176()) if config.keep or isinstance(config.min, dict) else None
        return result if labels is None else result | self._unknown(labels)

    def _unknown(self, labels: Iterable[str]) -> dict[str, str]:
        """Return the languages that the settings name but the model does not know, as {setting: what is wrong and what
        to do}. `labels` are those of the model."""
        labels, result = sorted(labels), {}
        thresholds = self.config.min if isinstance(self.config.min, dict) else {}
        for field, requested in (("keep", self.config.keep or ()), ("min", [k for k in thresholds if k != "default"])):
            missing = sorted(code for code in set(requested) if not any(names(code, label) for label in labels))
            if missing:
                near = sorted({label for code in missing for label in _near(code, labels)})
                result[field] = (f"the model knows no language {', '.join(missing)}; it has {len(labels):,}, such as "
                                f"{', '.join(near or labels[:3])}; languages are named by ISO 639-1 or -3, with a "
                                f"script or without: fr, fra, fra_Latn")
        return result

    def setup(self) -> None:
        self._model = load(self.config.model or lid176())
        for field, message in (self.problems() | self._unknown(self._model.labels())).items():
            raise ValueError(f"language: {field}: {message}")

    def warm(self) -> None:
        self._model.predict("")

    # -- documents -----------------------------------------------------------------------------------------------
    def process(self, doc: Document) -> str | None:
        predictions = self._model.predict(doc.text)
        doc.language, score = predictions[0] if predictions else ("", 0.0)
        doc.signals["language_score"] = self.round(score)
        script, share = main_script(doc.text)
        doc.signals["script"] = NUMBERS.get(script, 0)
        doc.signals["script_share"] = share
        edited = self._paragraphs(doc) if self.config.paragraphs else None
        reason = self.verdict(doc)
        if reason is None and edited is not None:
            doc.text = edited
        return reason

    def _paragraphs(self, doc: Document) -> str | None:
        """Identify the language of each long line of a document, and write the signals (stored numbers) about these
        languages to the document. With the setting `drop_foreign`, returns the text without the lines that are not in
        the document's language. Returns None if no line is deleted."""
        lines = doc.text.split("\n")
        sizes: dict[str, int] = {}
        foreign, identified = [], 0
        for number, line in enumerate(lines):
            language = self._language_of(line)
            if language is None:
                continue
            identified += 1
            sizes[language] = sizes.get(language, 0) + len(line)
            if language != doc.language:
                foreign.append(number)
        doc.signals["language_paragraphs"] = identified
        doc.signals["languages"] = len(sizes)
        doc.signals.pop("language_share", None)             # an earlier step may have written it
        if identified:
            doc.signals["language_share"] = sizes.get(doc.language, 0) / sum(sizes.values())
        cut = set(foreign) if self.config.drop_foreign else set()
        doc.signals["language_cut"] = sum(len(lines[number]) for number in cut)
        if not cut:
            return None
        kept: list[str] = []
        gap = False                                         # a line was deleted since the last kept one
        for number, line in enumerate(lines):
            if number in cut:
                gap = True
            elif not gap or line or (kept and kept[-1]):    # of the empty lines around a deleted line, one is kept
                kept.append(line)
                gap = False
        while gap and kept and not kept[-1]:
            kept.pop()
        return "\n".join(kept)

    def _language_of(self, line: str) -> str | None:
        """Return the language of a line, or None if the line is too short or its language is not probable enough."""
        predictions = self._model.predict(line) if len(line) >= self.config.paragraph_chars else []
        if predictions and self.round(predictions[0][1]) > self.config.paragraph_min:
            return predictions[0][0]
        return None

    def matches(self, doc: Document, reason: str) -> list[Span]:
        if reason == "script_share":
            return other_letters(doc.text)
        if reason not in ("language_share", "languages"):
            return []
        if not hasattr(self, "_model"):
            self.setup()
        spans: list[Span] = []
        begin = 0
        for line in doc.text.split("\n"):
            if self._language_of(line) not in (None, doc.language):
                spans.append((begin, begin + len(line)))
                if len(spans) == MOST:
                    break
            begin += len(line) + 1
        return spans

    def verdict(self, doc: Document) -> str | None:
        config, signals, language = self.config, doc.signals, doc.language
        script = CODES.get(int(signals["script"]), "")
        if self._demands_config is not config:                       # a replay of stored signals sets another config
            self._demands_config, self._demands = config, {}
        demands = self._demands.get((language, script))
        if demands is None:
            demands = self._demands[language, script] = self._demands_of(language, script)
        kept, min_score, fits_script = demands
        if not kept:
            return "language"
        if not signals["language_score"] > min_score:
            return "language_score"
        if not fits_script:
            return "language_script"
        for reason, low, high in (("script_share", config.min_script_share, None),
                                  ("language_share", config.min_share, None),
                                  ("languages", None, config.max_languages)):
            value = signals.get(reason)
            if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
                return reason
        return None

    def _demands_of(self, language: str, script: str) -> tuple[bool, float, bool]:
        """Return what the settings demand of a document whose label is `language` and whose text is written in
        `script`: (whether `keep` admits the document, the score that the label must exceed, whether the language is
        written in that script). The last value is also True if the scripts of the language or of the text are unknown,
        or the setting `script` is off."""
        config = self.config
        kept = config.keep is None or any(names(name, language, script) for name in config.keep)
        declared = scripts_of(language) if config.script and script else ()
        return kept, self.min_score(language, script), not declared or any(fits(script, other) for other in declared)

    def min_score(self, language: str, script: str) -> float:
        """Return the score that a document of this language and script must exceed, by the setting `min`. If `min` is a
        table, several names in it may fit the language: a name with a script is preferred, and then the label
        `language` itself. If no name fits, the table's `default` is used, or DEFAULT if it has none."""
        thresholds = self.config.min
        if not isinstance(thresholds, dict):
            return thresholds
        fitting = [name for name in thresholds if name != "default" and names(name, language, script)]
        best = min(fitting, key=lambda name: (not _has_script(name), name != language, name), default="default")
        return thresholds.get(best, DEFAULT)


def _near(name: str, labels: list[str]) -> list[str]:
    """Return labels of a model that a user may have meant by a language name that the model does not know. These are
    labels of the same language in other scripts. If there are none, these are labels that are spelt like the name."""
    same_language = [label for label in labels if names(name.partition("_")[0], label)]
    return same_language or difflib.get_close_matches(name, labels)


def _has_script(name: str) -> bool:
    parsed = tag(name)
    return parsed is not None and parsed.script != ""
