"""The filter `madlad400`: applies MADLAD-400's rules, and drops documents in which too many sentences are
questionable."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from stages.scoring.models import FastText, lid176
from stages.stage import Stage, StageConfig, decision, resource, signal
from stages.text.language_codes import names
from stages.text.marks import MOST, Span
from stages.text.segments import segments
from stages.text.trie import trie_pattern

if TYPE_CHECKING:
    from stages.document import Document

Rule = Literal["consistency", "list_case", "length", "technical", "cursed"]

#: the end of a sentence. A run of . ! ? is matched only from its beginning, so that a long run is not searched again
#: from each of its marks.
_BREAK = re.compile(r"(?<![.!?])[.!?]++\s+")
_TECHNICAL = re.compile(r"[0-9{}+/()>]")
#: "cursed substrings": found by auditors on pages without proper text
_CURSED = (" №", "\ufffd\ufffd\ufffd", "aute irure dolor ", " sunt in culpa qui ", "orem ipsum ", " quis nostrud ",
           " adipisicing ", " dolore eu ", " cupidatat ", "autem vel eum", "wisi enim ad", " sex ", " porn ",
           "黄色电影", "mp3", "ownload", "Vol.", " Ep.", "Episode", " шт.", "Develop", "Facebook", " crusher ", " xxx ")
#: cursed patterns at the end of a sentence
_CURSED_END = (r"\|\s*$", r" nr\.$", r" г\.\s*$", r" кг\.\s*$")
#: cursed rows: nine groups of three or of four characters, nine single characters, four pairs between commas
_CURSED_ROWS = (r"(?: ...){9}", r"(?: ....){9}", r"(?: [^ ]){9}", r", ..,,? ..,,? ..,,? ..,,?")


class Madlad400(Stage):
    """Drop documents of which more than a fifth of the sentences are questionable, and documents of fewer than five
    sentences (MADLAD-400, arXiv 2309.04662, 2.3).

    Dialect (whose rules it follows): the paper and the data set's card. A sentence is questionable under one of these
    rules:

    * `consistency`: its language is not the document's (fastText, most probable label);
    * `list_case`: it has 12 words or more, and more than half of them begin with a capital;
    * `length`: it has fewer than 20 characters or more than 500;
    * `technical`: more than a fifth of its characters are of `0123456789{}+/()>`;
    * `cursed`: it holds one of 32 strings and patterns that the paper's audit found on pages without proper text.

    The rule `consistency` needs a model, so it is applied only if `rules` names it. An earlier step must have set the
    document's language, `doc.language`.

    Where the paper and the card leave something open, the step follows allenai/datamap-rs
    (`madlad400_sentence_annotator`, used for OLMo 3). Sentences end at a run of . ! ? before white space; the run and
    the white space are cut off, and blank sentences do not count. Words are those of Unicode's word boundaries (UAX
    #29). The step differs from datamap-rs in two points. Lengths are measured in characters and not in bytes of UTF-8,
    so that all scripts have the same limits. Documents with a share of exactly a fifth are kept, not dropped.

    The rules are not meant for scripts with other full stops than `.`. A document in such a script counts as one
    sentence, and so is dropped (`madlad400_few_sentences`), unless `min_sentences` is 1 or less.
    """

    name = "madlad400"
    version = 2
    cost_ms, drops = 2.0, True
    libraries: tuple[str, ...] = ("regex",)
    signals = ("madlad400_sentences", "madlad400_questionable", "madlad400_consistency", "madlad400_list_case",
               "madlad400_length", "madlad400_technical", "madlad400_cursed")
    memory_mb = 60

    class Config(StageConfig):
        rules: tuple[Rule, ...] = signal(("list_case", "length", "technical", "cursed"), "what makes a sentence "
                                                                                        "questionable", min_length=1)
        min_sentences: int = decision(5, "fewest sentences", at_least="madlad400_sentences")
        max_questionable: float = decision(
            0.2, "largest share of questionable sentences", at_most="madlad400_questionable")
        list_case_words: int = signal(12, "fewest words of a sentence that can be a list")
        list_case_share: float = signal(0.5, "largest share of its words that begin with a capital")
        min_length: int = signal(20, "shortest sentence, characters")
        max_length: int = signal(500, "longest sentence, characters")
        max_technical: float = signal(0.2, "largest share of technical characters")
        model: str | None = resource(None, "fastText model for `consistency`; null: lid.176.ftz")

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self._model: FastText | None = None
        if "consistency" in self.config.rules:
            # the numbers of the model may differ in their last digits between machines
            self.exact = False
            self.libraries = ("fasttext-numpy2", "regex")
            self.memory_mb = 180

    def resource_files(self) -> dict[str, str]:
        return {} if self.exact else {"model": self.config.model or str(lid176())}

    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        if not self.exact and self.config.model is None and "resource" in roles:
            # the key covers the content of the default model, as it does for a named model
            return Madlad400(self.config.model_copy(update={"model": str(lid176())})).key(roles)
        return super().key(roles)

    def reads(self) -> dict[str, str]:
        return {} if self.exact else {"language": "rules"}

    def setup(self) -> None:
        if not self.exact:
            self._model = FastText(self.config.model or lid176())

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        doc.signals.update(self.measure(doc))
        return self.verdict(doc)

    def measure(self, doc: Document) -> dict[str, float]:
        sentences = [s for s in _BREAK.split(doc.text) if s.strip()]
        out: dict[str, float] = {"madlad400_sentences": len(sentences)}
        if not sentences:
            return out
        questionable = 0
        counts = dict.fromkeys(self.config.rules, 0)
        for sentence in sentences:
            hits = [rule for rule in counts if getattr(self, f"_{rule}")(sentence, doc.language)]
            questionable += bool(hits)
            for rule in hits:
                counts[rule] += 1
        out["madlad400_questionable"] = questionable / len(sentences)
        out.update((f"madlad400_{rule}", count / len(sentences)) for rule, count in counts.items())
        return out

    def verdict(self, doc: Document) -> str | None:
        signals = doc.signals
        if signals["madlad400_sentences"] < self.config.min_sentences:
            return "madlad400_few_sentences"
        share = signals.get("madlad400_questionable")
        return "madlad400_questionable" if share is not None and share > self.config.max_questionable else None

    def matches(self, doc: Document, reason: str) -> list[Span]:
        """Return the spans (first character, one past the last) of the questionable sentences, at most MOST. For a
        sentence that is questionable only by the rule `cursed`, the span is that of the cursed string. Sentences in
        another language than the document's are not marked, because that needs the model."""
        if reason != "madlad400_questionable":
            return []
        rules = [rule for rule in self.config.rules if rule not in ("consistency", "cursed")]
        spans: list[Span] = []
        begin = 0
        for end in (*(match.span() for match in _BREAK.finditer(doc.text)), (len(doc.text), len(doc.text))):
            sentence = doc.text[begin:end[0]]
            if sentence.strip():
                if any(getattr(self, f"_{rule}")(sentence, doc.language) for rule in rules):
                    spans.append((begin, end[0]))
                elif "cursed" in self.config.rules and (match := _CURSE.search(sentence)) is not None:
                    spans.append((begin + match.start(), begin + match.end()))
            begin = end[1]
        return spans[:MOST]

    # -- the rules: each tells whether a sentence is questionable ----------------------------------------------------
    def _consistency(self, sentence: str, language: str) -> bool:
        if self._model is None:
            self.setup()
        assert self._model is not None
        result = [(self.round(score), label) for label, score in self._model.predict(sentence, k=2)]
        # labels whose probabilities round to the same step of the grid count as equally probable
        return not any(names(label, language) for score, label in result if score == result[0][0])

    def _list_case(self, sentence: str, language: str) -> bool:
        capitals = sum(map(str.isupper, sentence))
        if capitals <= self.config.list_case_share * self.config.list_case_words:
            return False                     # even a sentence of `list_case_words` words would need more capitals
        words = segments(sentence)
        if len(words) < self.config.list_case_words:
            return False
        return sum(word[0].isupper() for word in words) > self.config.list_case_share * len(words)

    def _length(self, sentence: str, language: str) -> bool:
        return not self.config.min_length <= len(sentence) <= self.config.max_length

    def _technical(self, sentence: str, language: str) -> bool:
        return len(_TECHNICAL.findall(sentence)) > self.config.max_technical * len(sentence)

    def _cursed(self, sentence: str, language: str) -> bool:
        return _CURSE.search(sentence) is not None


_CURSE = re.compile("|".join((trie_pattern(_CURSED), *_CURSED_END, *_CURSED_ROWS)))
