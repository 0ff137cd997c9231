"""Books: Gutenberg's header and footer gone, broken lines joined, verse and tables as they are."""

from __future__ import annotations

import gzip
import textwrap

import pytest

from stages.document import Document
from stages.extract.book import Book, unwrapped, without_gutenberg, wrapped_at
from tests.conftest import shared_data

PROSE = ("It was a bright morning in the small town by the river, and nobody who lived there had yet heard what the "
         "well-known traveller was about to say--least of all the mayor, who slept. ") * 3
VERSE = ("  O small machine that reads the night,\n  And joins no line of mine,\n  Leave every verse as it is right,\n"
         "  And end it where I sign.")
TABLE = "Year      Sheep      Wolves\n1801      1,200      14\n1802      1,100      19\n1803        990      23"
HEAD = ("The Project Gutenberg eBook of A Small Town\n\nThis ebook is for the use of anyone anywhere.\n\n"
        "Title: A Small Town\n\nAuthor: A. Nonymous\n\nLanguage: English\n\n"
        "*** START OF THE PROJECT GUTENBERG EBOOK A SMALL TOWN ***\n\n\n\nProduced by Somebody and the Online\n"
        "Distributed Proofreading Team at https://www.pgdp.net\n\n\n")
FOOT = "\n\nEnd of the Project Gutenberg EBook of A Small Town\n\n*** END OF THE PROJECT GUTENBERG EBOOK ***\nLicence."


def wrap(text: str, width: int = 72) -> str:
    return textwrap.fill(text.strip(), width, break_on_hyphens=True, break_long_words=False)


BODY = "\n\n".join(["A SMALL TOWN", "CHAPTER I\nThe Morning", *[wrap(PROSE)] * 4, VERSE, wrap(PROSE), TABLE,
                    wrap(PROSE), "[Illustration]\n\nTHE END"])
CLEAN = "\n\n".join(["A SMALL TOWN", "CHAPTER I\nThe Morning", *[PROSE.strip()] * 4, VERSE, PROSE.strip(), TABLE,
                     PROSE.strip(), "\nTHE END"])


def test_a_book():
    doc = Document("0" * 32, (HEAD + BODY + FOOT).replace("\n", "\r\n"))
    assert Book().process(doc) is None
    assert doc.text.rstrip() == CLEAN
    assert 68 <= doc.meta.pop("wrapped_at") <= 72
    assert doc.meta == {"title": "A Small Town", "author": "A. Nonymous", "language": "English"}


def test_what_is_asked_for_alone():
    doc = Document("0" * 32, HEAD + BODY + FOOT)
    Book(unwrap=False).process(doc)
    assert "\nCHAPTER I\nThe Morning\n" in doc.text and wrap(PROSE) in doc.text and "Gutenberg" not in doc.text
    doc = Document("0" * 32, HEAD + BODY + FOOT)
    Book(gutenberg=False).process(doc)
    assert doc.text.startswith("The Project Gutenberg") and PROSE.strip() in doc.text
    assert Book().process(Document("0" * 32, HEAD + FOOT)) == "no_text"


@pytest.mark.parametrize("text", [
    PROSE * 30, "\n\n".join([PROSE] * 30), (VERSE + "\n\n") * 30, "short\n" * 100, "", "x" * 100_000, "a\n\nb",
    "\n".join(f"{i}: value {i}" for i in range(500)), BODY[:300]])
def test_what_is_not_broken_stays(text):
    doc = Document("0" * 32, text)
    Book().process(doc)
    assert doc.text == text and doc.meta == {}


def test_the_header_is_known_by_its_marks_only():
    talk = "We read a Project Gutenberg book.\n\nTitle: none\n\nIt was good."
    assert without_gutenberg(talk) == (talk, {})
    old = ("Project Gutenberg Etext\n\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\nStory.\n\n"
           "End of Project Gutenberg's Story\n")
    assert without_gutenberg(old) == ("Story.\n", {})


@pytest.mark.parametrize("width", [60, 66, 72, 78])
def test_real_books_wrapped_and_unwrapped_are_themselves(width):
    """Broken at a width and joined again, prose is what it was; verse was never joined."""
    for name in ("Greenmantle", "At the Earth's Core", "The Sea Wolf"):
        with gzip.open(shared_data("text", "books", f"{name}.md.gz"), "rt", encoding="utf-8") as f:
            lines = f.read()[:150_000].split("\n")
        broken = "\n".join(textwrap.fill(line, width, break_long_words=False) if len(line) > width else line
                           for line in lines)
        assert abs(wrapped_at(broken) - width) <= 2
        joined = unwrapped(broken, wrapped_at(broken)).split("\n")
        same = {" ".join(line.split()) for line in lines}
        assert sum(" ".join(line.split()) in same for line in joined) > 0.985 * len(joined)
    for name in ("Faust", "Aurora Leigh"):
        with gzip.open(shared_data("text", "books", f"{name}.md.gz"), "rt", encoding="utf-8") as f:
            text = f.read()
        assert wrapped_at(text) == 0
