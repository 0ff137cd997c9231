"""Compare each filter on real texts with datatrove 0.10.1: decision, reason, text and every signal.

    python benchmarks/filter_parity.py --texts FILE.jsonl [...] [--every N] [--lists naughty-words-1.2.0.tgz]

A file holds JSON lines with `text`, like those that `benchmarks/fineweb_vs_datatrove.py` writes to its scratch folder.
datatrove's filters run with their defaults, except that C4's has no rule on terminal punctuation, as in FineWeb. They
get words from datatrove's own tokenizer; each text is split once for all filters. Both sides use the same lists of bad
words.

datatrove does not return the values that its filters compare with thresholds. They are computed here, with datatrove's
own functions (`get_n_grams`, `find_duplicates`, …), or with the same expressions as in its filters.

Prints a row per filter: texts, kept texts, and differences in decision or reason, in text, in signals. Exits 1 when a
difference is not one of those explained in docs/filters.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from stages.catalog import stage_class  # noqa: E402
from stages.document import Document  # noqa: E402
from stages.text.spacy_rules import LONGEST  # noqa: E402
from stages.text.wordlists import read_lists  # noqa: E402

#: a stage's reason → the reason datatrove gives, where they differ
THEIR_REASON = {"too_few_paragraphs": "< 3 paragraphs"}


class Peer:
    """datatrove's filters, and the numbers that they compare with thresholds."""

    def __init__(self, lists: Path | None) -> None:
        from datatrove.pipeline import filters
        from datatrove.pipeline.filters import (
            c4_filters,
            fineweb_quality_filter,
            gopher_quality_filter,
            gopher_repetition_filter,
        )
        from datatrove.utils import text as theirs

        words = lru_cache(maxsize=4)(theirs.split_into_words)
        for module in (fineweb_quality_filter, gopher_quality_filter, gopher_repetition_filter):
            module.split_into_words = words
        self.words, self.repetition = words, gopher_repetition_filter
        self.symbols, self.ends = theirs.PUNCTUATION_SET, tuple(theirs.TERMINAL_PUNCTUATION)
        self.sentences: list[int] = []
        split = c4_filters.split_into_sentences

        def counted(line: str, language: str) -> list[str]:
            found = split(line, language)
            self.sentences.append(len(found))
            return found

        c4_filters.split_into_sentences = counted
        self.blocks = {
            "gopher_repetition": filters.GopherRepetitionFilter(), "gopher_quality": filters.GopherQualityFilter(),
            "fineweb": filters.FineWebQualityFilter(), "c4": filters.C4QualityFilter(filter_no_terminal_punct=False),
            "c4_paragraphs": filters.C4ParagraphFilter()}
        self.scratch = tempfile.TemporaryDirectory(prefix="lists.")
        if lists is not None:
            entries = read_lists(lists)
            folder = Path(self.scratch.name)
            for language, held in entries.items():
                (folder / language).write_text("\n".join(held), encoding="utf-8")
            c4_filters.cached_asset_path_or_download = lambda url, **kw: str(folder / url.rpartition("/")[2])
            self.blocks["c4_badwords"] = c4_filters.C4BadWordsFilter()

    def judge(self, name: str, text: str) -> tuple[str | None, str]:
        from datatrove.data import Document as Theirs

        if name == "gopher_repetition" and not text:
            return "empty", text
        doc = Theirs(text=text, id="id", metadata={"language": "en"})
        self.sentences.clear()
        result = self.blocks[name].filter(doc)
        return (None, doc.text) if result is True else (result[1], text)

    def signals(self, name: str, text: str, reason: str | None) -> dict[str, float]:
        """Return the numbers that the filter `name` compares with thresholds for a text, as {name of our signal:
        number}. `judge` must have been called with the same filter and text just before."""
        if name == "gopher_repetition":
            return self._repetition(text)
        if name == "gopher_quality":
            return self._quality(text)
        if name == "fineweb":
            return self._lines(text)
        if name == "c4" and reason in (None, "too_few_sentences"):
            lines = text.splitlines()
            return {"c4_sentences": sum(self.sentences),
                    "c4_lines_kept": len(self.sentences) / len(lines) if lines else 0.0}
        return {}

    def _repetition(self, text: str) -> dict[str, float]:
        block, theirs = self.blocks["gopher_repetition"], self.repetition
        out: dict[str, float] = {}
        for kind, parts in (("para", block.paragraph_exp.split(text.strip())),
                            ("line", block._line_splitter.split(text))):
            copies, characters = theirs.find_duplicates(parts)
            out |= {f"gopher_rep_dup_{kind}_frac": copies / len(parts),
                    f"gopher_rep_dup_{kind}_char_frac": characters / len(text)}
        words = self.words(text, "eng")
        for n, _ in block.top_n_grams:
            grams = theirs.get_n_grams(words, n)
            if grams:
                out[f"gopher_rep_top_{n}_gram"] = theirs.find_top_duplicate(grams) / len(text)
        for n, _ in block.dup_n_grams:
            out[f"gopher_rep_dup_{n}_gram"] = theirs.find_all_duplicate(words, n) / len(text)
        return out

    def _quality(self, text: str) -> dict[str, float]:
        words, lines = self.words(text, "eng"), text.splitlines()
        plain = [w for w in words if any(c not in self.symbols for c in w)]
        out: dict[str, float] = {"gopher_words": len(plain)}
        if not words:
            return out
        if plain:
            out["gopher_mean_word_length"] = sum(map(len, plain)) / len(plain)
        starts = sum(s.lstrip().startswith("•") or s.lstrip().startswith("-") for s in lines)
        return out | {
            "gopher_hash_ratio": text.count("#") / len(words),
            "gopher_ellipsis_ratio": (text.count("...") + text.count("…")) / len(words),
            "gopher_bullet_lines_ratio": starts / len(lines),
            "gopher_ellipsis_lines_ratio":
                sum(s.rstrip().endswith("...") or s.rstrip().endswith("…") for s in lines) / len(lines),
            "gopher_alpha_words_ratio": sum(any(c.isalpha() for c in w) for w in words) / len(words),
            "gopher_stop_words": len(self.blocks["gopher_quality"].stop_words.intersection(words))}

    def _lines(self, text: str) -> dict[str, float]:
        lines = [line for line in text.split("\n") if line.strip() != ""]
        if not lines:
            return {}
        return {"fineweb_line_punct_ratio": sum(line.endswith(self.ends) for line in lines) / len(lines),
                "fineweb_short_line_ratio": sum(len(line) <= 30 for line in lines) / len(lines),
                "fineweb_char_dup_ratio":
                    self.repetition.find_duplicates(lines)[1] / len(text.replace("\n", "")),
                "fineweb_list_ratio": text.count("\n") / len(self.words(text, "eng"))}


def explained(text: str) -> str:
    """The known reason why both sides may split a text into different words (docs/filters.md); "" if there is none."""
    if any(len(chunk) > LONGEST for chunk in text.split()):
        return "a chunk of more than 2,000 characters"
    return "a word spaCy fails on" if "IS_ALPHA" in text else ""


def compare(texts: Iterator[str], lists: Path | None = None) -> dict[str, Counter[str]]:
    """Judge texts with each filter on both sides. Returns {filter: counts}. The keys of the counts are `texts`, `kept`,
    `reason`, `text` and `signals` (texts that differ in these), `explained` (texts that differ for a known reason), and
    each such reason."""
    peer, out = Peer(lists), {}
    ours = {name: stage_class(name)(**({"lists": str(lists)} if name == "c4_badwords" else {})) for name in peer.blocks}
    for name, stage in ours.items():
        stage.setup()
        out[name] = Counter()
    for text in texts:
        for name, stage in ours.items():
            doc = Document("id", text, language="en")
            reason = stage.process(doc)
            said, edited = peer.judge(name, text)
            count = out[name]
            count["texts"] += 1
            count["kept"] += reason is None
            found = {"reason": THEIR_REASON.get(reason, reason) != said, "text": doc.text != edited}
            if name not in ("c4_paragraphs", "c4_badwords") and reason != "empty":
                found["signals"] = doc.signals != peer.signals(name, text, said)
            if any(found.values()) and explained(text):
                count["explained"] += 1
                count[explained(text)] += 1
                continue
            for kind, differs in found.items():
                count[kind] += differs
            if any(found.values()):
                print(f"{name}: {reason} / {said}: {text[:100]!r}", file=sys.stderr)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="JSON lines with text")
    parser.add_argument("--every", type=int, default=1, help="only every n-th text")
    parser.add_argument("--lists", type=Path, help="lists of bad words, for c4_badwords")
    options = parser.parse_args()
    failed = 0
    for path in options.texts:
        with open(path, encoding="utf-8") as lines:
            found = compare((json.loads(line)["text"] for i, line in enumerate(lines) if i % options.every == 0),
                            options.lists)
        print(path.name)
        for name, count in found.items():
            bad = count["reason"] + count["text"] + count["signals"]
            failed += bad
            why = ", ".join(f"{n} {why}" for why, n in sorted(count.items()) if " " in why)
            print(f"  {name:18s}{count['texts']:6d} texts {count['kept']:6d} kept   differ: reason {count['reason']}, "
                  f"text {count['text']}, signals {count['signals']}" + (f"; explained: {why}" if why else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
