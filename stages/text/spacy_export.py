"""Exports spaCy's tokenizer rules as data, so that no worker imports spaCy (1 s of CPU and up to 290 MB each).

`cache.rules_path(language)` returns a JSON file with the rules. When the file is first needed, a separate process
writes it: `python -m stages.text.spacy_export LANGUAGE FILE [LANGUAGE FILE …]`. The file stays in the cache folder, and
its name holds the versions on which it depends. The environment variable TOKENMILL_CACHE names the folder (default
~/.cache/tokenmill). Before the export writes anything, it compares `stages.text.spacy_rules` with spaCy on some
thousands of awkward strings. If the rules of a future spaCy need another algorithm, the export therefore fails, and no
step gets wrong words.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.base.files import replacing

#: most special cases of a language used for the check; Indonesian has 16,000
CHECKED = 300


def export(language: str, path: Path) -> None:
    """Write spaCy's tokenizer rules for a language (those of `spacy.blank(language)`) to the file `path` as JSON. The
    file is written atomically."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # thinc would import it: 1.5 s for nothing
    import spacy
    from spacy.attrs import ORTH

    from stages.text.spacy_rules import SpacyRules

    nlp = spacy.blank(language)
    tokenizer: Any = nlp.tokenizer
    if type(tokenizer) is not spacy.tokenizer.Tokenizer:
        raise ValueError(f"spaCy splits '{language}' by a tokenizer of its own, which is no set of rules")
    patterns = {"prefix": tokenizer.prefix_search, "suffix": tokenizer.suffix_search,
                "infix": tokenizer.infix_finditer, "url": tokenizer.url_match, "token": tokenizer.token_match}
    sentencizer: Any = nlp.add_pipe("sentencizer")
    rules: dict[str, Any] = {
        "spacy": spacy.__version__, "language": language,
        **{name: _pattern(method) for name, method in patterns.items()},
        "specials": {chunk: [part.get(ORTH, part.get("ORTH")) for part in parts]
                     for chunk, parts in tokenizer.rules.items()},
        "sentence_ends": sorted(sentencizer.punct_chars),
        "suffix_window": suffix_window(tokenizer.suffix_search.__self__.pattern),
        "plain_letters": language == "en",
    }
    rebuilt = SpacyRules(rules)
    with nlp.memory_zone():
        for text in samples(rules):
            expected = [token.text for token in tokenizer(text)]
            actual = rebuilt.tokens(text)
            if expected != actual:
                raise ValueError(f"spaCy {spacy.__version__} ({language}) splits {text!r} into {expected}, we into "
                                 f"{actual}")
        for code in range(sys.maxunicode + 1) if rules["plain_letters"] else ():
            letter = chr(code)
            if letter.isalpha() and not rebuilt.quiet(letter):
                raise ValueError(f"the letter {letter!r} is an affix to spaCy {spacy.__version__}")
    data = json.dumps(rules, ensure_ascii=True, sort_keys=True).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(data)


def _pattern(method: Any) -> str | None:
    """Return the source text of a compiled regular expression, given one of its bound methods (`re.compile(…).search`,
    say). For None, the result is None."""
    if method is None:
        return None
    compiled = method.__self__
    if re.compile(compiled.pattern).flags != compiled.flags:
        raise ValueError("spaCy's patterns carry flags that stages.text.spacy_rules does not know")
    return compiled.pattern


def suffix_window(pattern: str) -> int | None:
    r"""Return the length in characters of the longest suffix that a pattern for suffixes can match, not counting full
    stops at the end. spaCy searches the whole string for a suffix. A search in only this many characters at the end of
    the string finds the same suffixes faster.

    Returns None if the length has no limit, so that the whole string must be searched. The alternative `\.\.+$`, which
    matches full stops alone, is no reason for this.
    """
    from re import _parser  # type: ignore[attr-defined]

    longest = 0
    for piece in _alternatives(pattern):
        low, high = _parser.parse(piece).getwidth()
        if high > 64:
            if piece != r"\.\.+$":
                return None
        else:
            longest = max(longest, high, low)
    return longest


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the top-level alternatives of a regular expression: for `a|(b|c)`, these are `a` and `(b|c)`."""
    depth = start = i = 0
    in_class = False
    while i < len(pattern):
        c = pattern[i]
        if c == "\\":
            i += 1
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
        elif c in "()":
            depth += 1 if c == "(" else -1
        elif c == "|" and depth == 0:
            yield pattern[start:i]
            start = i + 1
        i += 1
    yield pattern[start:]


def samples(rules: dict[str, Any]) -> Iterator[str]:
    """Yield awkward strings on which two tokenizers are compared: words and signs of many kinds, and at most `CHECKED`
    of spaCy's special cases. All are put inside brackets, quotes and numbers, and next to each other."""
    specials = sorted(rules["specials"])
    specials = specials[::1 + len(specials) // CHECKED]
    for chunk in specials:
        for form in ("{}", "({}", "{})", "({})", "'{}'", "“{}”", "{},", "{}...", "1{}", "{}1", "x{}", "{}x", "x-{}-y",
                     "{}/{}", "{} {}", "({} {})", "{}: {}"):
            yield form.replace("{}", chunk)
    for a, b in zip(specials, specials[7:] + specials[:7]):
        yield f"{a}{b}"
        yield f"{a} {b} ({a}{b})"
    words = ("can't", "U.S.A.", "10km/h", "$9.99", "e-mail", "foo.Bar", "foo.bar", "http://a.b/c?d=e,f", "a@b.co",
             "3:30pm", "C++", "x=y", "a--b", "a…b", "....", "..", "-", "--", "---", "'tis", "rock'n'roll", "O'Neill's",
             "2019-20", "1,000", "1.000.000", "50%", "#tag", "@name", "[1]", "{x}", "<b>", "a/b", "und/oder", "naïve",
             "Straße.", "ÅÄÖ.", "日本語。", "你好，世界", "привет,мир", "10°C", "5'10\"", "«quote»", "IS_ALPHA",
             "LOWER", "\ufeffa", "a\u200bb", "👍👍", "🇩🇪", "x²")
    for word in words:
        for form in ("{}", "({})", "{}.", "{},", "\"{}\"", "{}'s", "{}?!", "  {} \n {}\t", "\u00a0{}\u3000"):
            yield form.replace("{}", word)
    for code in (*range(0x21, 0x250), *range(0x2000, 0x2070), *range(0x20A0, 0x20C0), *range(0x3000, 0x3040)):
        if unicodedata.category(chr(code)) not in ("Cs", "Cn"):
            c = chr(code)
            for form in ("{}", "a{}", "{}a", "A{}B", "1{}", "{}1", "a{}b", "1{}2", "{}.", "AB{}"):
                yield form.replace("{}", c)


if __name__ == "__main__":
    for name, file in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        try:
            export(name, Path(file))
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from e
