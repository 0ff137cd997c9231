"""Books: Gutenberg's header and footer are removed, broken lines are joined, and verse and tables stay as they are."""

from __future__ import annotations

import gzip
import re
import textwrap

import pytest

from stages.document import Document
from stages.extract.book import Book, unwrapped, without_gutenberg, wrapped_at
from tests.conftest import shared_data
from tests.stages.texts import assert_linear

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


# -- eras of Project Gutenberg, and other languages --------------------------------------------------------------------
@pytest.mark.parametrize(("head", "foot"), [
    ("*** START OF THE PROJECT GUTENBERG EBOOK X ***", "*** END OF THE PROJECT GUTENBERG EBOOK X ***\nLicence"),
    ("*** START OF THIS PROJECT GUTENBERG EBOOK A LONG\nTITLE ***\n\n\n\n\nE-text prepared by A. Person",
     "End of Project Gutenberg's X, by Y\n\n*** END OF THIS PROJECT GUTENBERG EBOOK X ***"),
    ("***START OF THE PROJECT GUTENBERG EBOOK X***", "***END OF THE PROJECT GUTENBERG EBOOK X***"),
    ("The Project Gutenberg Etext of X by Y\n\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*",
     "*End of The Project Gutenberg Etext of X"),
    ("*END THE SMALL PRINT! FOR PUBLIC DOMAIN EBOOKS*Ver.02/11/02*END*", "The End of the Project Gutenberg Etext of X"),
    ("The Project Gutenberg Etext of X", "End of this Project Gutenberg Etext of X"),
    ("*** START OF THE PROJECT GUTENBERG EBOOK FAUST ***", "Ende dieses Projekt Gutenberg Etextes Faust"),
    ("*** START OF THE PROJECT GUTENBERG EBOOK X ***", "Fin de l'Etexte de Project Gutenberg de X"),
    ("Title: X\nTo contact Project Gutenberg of Australia go to http://gutenberg.net.au", ""),
    ("Produced by A. Person and the Online Distributed\nProofreading Team at http://www.pgdp.net\n\n\n", ""),
])
def test_headers_and_footers_of_all_eras(head, foot):
    assert without_gutenberg(f"{head}\n\n\n  THE BOOK\n\nIt begins.\n\n{foot}\n")[0] == "  THE BOOK\n\nIt begins.\n"


def processed(text: str) -> str:
    doc = Document("0" * 32, text)
    Book().process(doc)
    return doc.text


@pytest.mark.parametrize("note", [
    "[Transcriber's Note: Obvious errors were corrected,\nand accents added.]",
    "+--------------------------------+\n| Transcriber's Note:            |\n| Errors were corrected.         |\n"
    "+--------------------------------+"])
def test_notes_of_transcribers(note):
    book = "\n\n".join([wrap(PROSE)] * 12)
    assert processed(f"{book}\n\n{note}\n\n{book}").count("Transcriber") == 0
    end = "TRANSCRIBER'S NOTES\n\nErrors were corrected.\n\nPage 12: teh changed to the."
    assert "corrected" not in processed(f"{book}\n\n{end}\n") and "Page 12" not in processed(f"{book}\n\n{end}\n")
    start = "Transcriber's Note:\n\nErrors were corrected.\n\nCHAPTER I\n\n"
    assert processed(start + book).startswith("CHAPTER I")
    assert processed(f"{book}\n\nThe transcriber's note was short.\n\n{book}").count("transcriber's note") == 1


# -- pages and words that were cut -------------------------------------------------------------------------------------
def test_numbers_of_pages():
    words = (PROSE * 40).split()
    pages = [" ".join(words[i:i + 90]) for i in range(0, len(words) - 90, 90)]
    whole = " ".join(" ".join(pages).split())
    for mark in ("[Pg {}]", "{{{}}}", "[Page {}]", "[S. {}]"):
        text = "".join(f" {mark.format(n)} {page}" for n, page in enumerate(pages, 11)).strip()
        assert " ".join(processed(wrap(text)).split()) == whole, mark
    alone = "\n".join(f"{wrap(page)}\n\n{n:>40}\n" for n, page in enumerate(pages, 11))
    assert not any(line.strip().isdigit() for line in processed(alone).split("\n"))
    # chapters, sonnets, verses and references are no pages
    for text in ("\n\n".join(f"{n}\n\n{wrap(PROSE)}" for n in range(1, 30)),
                 "\n\n".join(f"{n}\n\n{VERSE}" for n in range(1, 30)), "see Smith [p. 12] and {3}.\n\n" * 20):
        assert re.findall("[0-9]+", processed(text)) == re.findall("[0-9]+", text)


def test_words_cut_at_the_end_of_a_line():
    lines = ["The well-known traveller asked for one of the things that they",
             "meant, that evening by the river, and was told of another well-",
             "known case of a town that had a mayor, which was not an exam-",
             "ple at all of what was meant here"]
    text = "\n\n".join(["\n".join(lines), *[wrap(PROSE + " example well-known ", 64)] * 8])
    joined = unwrapped(text, 64).split("\n\n")[0]
    assert "another well-known case" in joined and "not an example at all" in joined


PLAY = """ACT I

SCENE I.  A room.

[Enter Anna and Bert, who carries a lamp with both hands and looks as if
he had not slept]

ANNA.  You are late again, and nobody in this house has closed an eye for
the whole of the night; where have you been?

BERT.
  I walked the hill
  Till all was still.

* * * * *

     'Yes,' she said at last, when he had stopped, and there was nothing more
to be heard.
     'But that will not do at all, as you know very well yourself, and as I
have told you often enough.'"""
PLAY_TEXT = """ACT I

SCENE I.  A room.

[Enter Anna and Bert, who carries a lamp with both hands and looks as if he had not slept]

ANNA. You are late again, and nobody in this house has closed an eye for the whole of the night; where have you been?

BERT.
  I walked the hill
  Till all was still.

* * * * *

'Yes,' she said at last, when he had stopped, and there was nothing more to be heard.
'But that will not do at all, as you know very well yourself, and as I have told you often enough.'"""


def test_a_play_and_paragraphs_without_blank_lines():
    assert unwrapped(PLAY, 73) == PLAY_TEXT


@pytest.mark.parametrize("unit", ["[Pg 1] ", "{1}", "1\n", "[Transcriber's Note: ", "+----------+\n|",
 "\nTranscriber's Note\n\n", "a-\n", "\f", "*** START OF", "\n\n  a", "End of Project Gutenberg\n", "[",
                                   "\n1\n2\n"])
def test_hostile_books_take_linear_time(unit):
    assert_linear(processed, lambda n: unit * n, 500)


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
