"""Texts for tests of words and filters: difficult ones written by hand, random ones from a seed, and real pages where
available."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

from stages.document import Document
from stages.read.reader import Slice
from stages.read.warc import Warc
from tests.conftest import real_files, shared_data

#: CPU seconds that the loop of `_loop_seconds` takes on a usual machine
LOOP_SECONDS = 0.01
PROSE = """The house stood at the end of a long road, and nobody had lived in it for years. Mr. Hill, who owned it,
didn't care; he'd moved to the U.S. in 1999 (or so they say). "What's to be done with it?" he asked.

That question was never answered. People came and went, with plans and without: a shop, a school, a garden ... none of
them stayed. In the end the rain and the wind did what no one else would have done — they took it apart, slowly.
"""

AWKWARD = (
    "", " ", "\n\n", "a", ".", "…", "see LOWER here", "a\u00a0b  c\u3000d", " lead", "trail ",
    "It's (10%): fine :) ok ): x :( y", "foo) :bar ( : ) :-) ):", ":) ) ) : ( :", "8) 8 ) a.m. (9 a.m.) 10a.m.)",
    "((:))):):", "http://example.com/a?b=c,d. www.x.org! me@x.org; C++/C# naïve—yes", "日本語。テキスト！ あ",
    "один,два. Три! и т.д.", "don't can't won't y'all'd've rock'n'roll 'tis O'Neill's", "x\x1cy\x85z\u2028w",
    "👍👍 🇩🇪 x² ½ 10°C 5'10\" $9.99 €5,00", "[1] [2] [3]", "One. Two! Three?  Four.\tFive… \u00a0 Six", "end.  \n.",
    "a ... b .. c .... d.", "word." * 40, "- " * 50, "ab c a bc ab c a bc " * 5, "\ufeffbom \u200bzero\u200bwidth",
    PROSE, PROSE * 3, PROSE.replace(" ", "\n"), PROSE.upper(),
)


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Return random texts made of pieces that are difficult for word tokenizers."""
    rng = random.Random(seed)
    pieces = ["the", "and", "to", "U.S.", "don't", "it's", "10km", "e.g.", ":)", "):", "(:", "...", "…", "--", "—",
              "a.b", "http://a.b/c", "A.B", "x,y", "(", ")", "[", "]", "{", "}", "'", "’", "“", "#", "-", "•", "\"",
              "é", "ß", "日本", "語。", "привет", "1,000.5", "50%", "\u00a0", "\u3000", "\t", "word", "Word",
              "WORD", "v.s.", "a.m.", "m.", "c++", "lorem", "ipsum"]
    ends = [" ", " ", " ", " ", "\n", "", "", "  ", "\n\n", ". ", ", ", "? ", " \n "]
    return ["".join(rng.choice(pieces) + rng.choice(ends) for _ in range(rng.randrange(1, 120))) for _ in range(count)]


def real_texts(limit: int = 200) -> list[str]:
    """Return texts of real web documents; [] without the folder of real data (`make test DATA=FOLDER`)."""
    texts = []
    for path in real_files("dclm_human_dev.jsonl.gz", "quality"):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            texts += [json.loads(line)["text"] for line in lines]
    return texts[:limit]


@cache
def crawled_pages() -> list[Document]:
    """Return 150 pages of a crawl: every fourth of the first 600. The test is skipped without real data."""
    items = Warc().read(str(shared_data("bench", "realweb.warc.gz")), Slice("web", "a"))
    return list(islice((i for i in items if isinstance(i, Document)), 1, 600, 4))


def assert_quick(read: Callable[[], Any], seconds: float) -> Any:
    """Check that `read()` takes less than `seconds` of CPU time, and return its result. On a machine that is slow or
    busy, the limit is higher: as many times as a loop takes longer there than usual. The loop is measured before and
    afterwards. The best of three measurements counts."""
    for _ in range(3):
        usual = _loop_seconds()
        began = time.process_time()
        result = read()
        took = time.process_time() - began
        limit = seconds * max(1.0, max(usual, _loop_seconds()) / LOOP_SECONDS)
        if took < limit:
            return result
    raise AssertionError(f"{took:.1f} s of CPU time, not {limit:.1f} s")


def _loop_seconds() -> float:
    began = time.process_time()
    sum(i * i % 7 for i in range(200_000))
    return time.process_time() - began


def assert_linear(read: Callable[[Any], object], make: Callable[[int], Any], least: int = 1_000, most: float = 40,
                  floor: float = 0.02) -> None:
    """Check that `read` takes about ten times as long for ten times the text, and not a hundred times. Times below
    `floor` seconds count as `floor`.

    The best of five pairs of measurements counts, because other programs may slow down one measurement and not the
    other.
    """
    for _ in range(5):
        took = []
        for n in (least, 10 * least):
            text = make(n)
            began = time.process_time()
            read(text)
            took.append(time.process_time() - began)
        if took[1] < most * max(took[0], floor):
            return
    raise AssertionError(f"10 times the text, not 100 times the time: {took}")
