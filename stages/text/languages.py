"""Finds the tokenizer that splits texts in a language into words, by datatrove's table (`tokenizer_assignment.csv`,
2,000 languages). The table is a file of datatrove, and is read without an import of datatrove.

Languages are named as models and data sets name them: `fra_Latn` (GlotLID, FineWeb-2), `fra`, or `fr` (lid.176). A name
without a script means the language in its usual script. Here datatrove 0.10.1 may choose another script, because it
reads "FALSE" in the table as true: its `ar` is in Latin script. For names with a script, datatrove chooses the same
tokenizer as this module.

Most languages are split by rules of spaCy, often those of a related language, and need no further package
(`stages.text.words`). Korean, Thai, Chinese, Japanese, Vietnamese, the languages of India and some more have tokenizers
in other packages. For these, this module calls datatrove's functions.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

#: spaCy's languages without rules, and the distribution whose tokenizer they use
_NO_RULES = {"ja": "sudachipy", "zh": "jieba", "vi": "pyvi"}
#: datatrove's other tokenizer classes and the distributions they need
_PACKAGES = {"StanzaTokenizer": "stanza", "ThaiTokenizer": "pythainlp", "IndicNLPTokenizer": "indic-nlp-library",
             "KiwiTokenizer": "kiwipiepy", "KhmerTokenizer": "khmer-nltk", "LaoTokenizer": "laonlp",
             "TibetanTokenizer": "botok", "BurmeseTokenizer": "pyidaungsu-numpy2"}


class Splitter(NamedTuple):
    """How texts in a language are split into words: by spaCy's rules or by another package."""

    #: full name of the language: ISO 639-3 and script, e.g. fra_Latn
    language: str
    #: the spaCy language whose rules split the language into words; None if another package splits it
    rules: str | None
    #: distribution that must be installed to split the language, "" if none
    needs: str


@cache
def _table() -> dict[str, Splitter]:
    """Return datatrove's table as {name of a language: how texts in it are split into words}. If several rows of the
    table have the same name, the first of them counts, as in datatrove."""
    spec = importlib.util.find_spec("datatrove")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the table of languages and their tokenizers comes with datatrove, which is not "
                                  "installed: `pip install datatrove`")
    path = Path(next(iter(spec.submodule_search_locations))) / "assets" / "tokenizer_assignment.csv"
    result: dict[str, Splitter] = {}
    with open(path, encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            kind, code, script = row["type"], row["tok_code"], row["script"]
            if not kind:
                continue
            if kind == "WhitespaceTokenizer":           # datatrove's class uses spaCy's rules for any language
                kind, code = "SpaCyTokenizer", "xx"
            rules = code if kind == "SpaCyTokenizer" and code not in _NO_RULES else None
            needs = "" if rules else _NO_RULES[code] if kind == "SpaCyTokenizer" else _PACKAGES[kind]
            splitter = Splitter(f"{row['code_3']}_{script}", rules, needs)
            # the first row with a name wins
            names = [f"{row['code_3']}_{script}", *([row["code_3"]] if row["default_script"] == "TRUE" else [])]
            if result.setdefault(names[0], splitter) is splitter and len(names) > 1:
                result[names[1]] = splitter
            if row["code_1"] and row["default_code_1"] == "TRUE":
                short = f"{row['code_1']}_{script}"
                if result.setdefault(short, splitter) is splitter and row["default_script"] == "TRUE":
                    result[row["code_1"]] = splitter
    return result


def installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def splitter(language: str) -> Splitter | None:
    """Return how texts in a language are split into words. The language may be given by any of its names. The result is
    None if datatrove's table lacks the name."""
    return _table().get(language)


def rule_names() -> list[str]:
    """Return spaCy's codes of all rules that split a language of datatrove's table into words, sorted."""
    return sorted({splitter.rules for splitter in _table().values() if splitter.rules})


@cache
def split_words(language: str) -> Callable[[str], list[str]]:
    """Return datatrove's own function that splits texts in the given language into words. It is for languages that need
    a package besides spaCy.

    Raises:
        ModuleNotFoundError: the package is not installed; the message names it.
        LookupError: datatrove has no tokenizer for the language.
    """
    assigned = splitter(language)
    if assigned is None:
        raise LookupError(f"datatrove has no tokenizer for the language '{language}'")
    if assigned.needs and not installed(assigned.needs):
        raise ModuleNotFoundError(f"words of {language} are found by the package {assigned.needs}, which is not "
                                  f"installed; install it, or take {language} out of the step's languages")
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    return load_word_tokenizer(assigned.language).word_tokenize
