"""Chooses which blocks of a page are its main text, from the probability that the model of the engine `mill` gave to
each block. A block is a stretch of text between block-level tags."""

from __future__ import annotations

import numpy as np

from stages.extract.html.mill.columns import B_BOX, B_FLAGS, B_LINKED, B_STOPS, B_TITLED, B_UNITS, B_WORDS, E_TAG
from stages.extract.html.mill.page import PageArrays
from stages.extract.html.mill.second_pass import structures
from stages.extract.html.mill.tags import IN_BUTTON, IN_COMMENT, IN_FORM, IN_HEADING, IN_HIDDEN, IN_NAV, IN_TITLE, TAG

#: weight of recall against precision: β² of F_β, in 1/1000
FAVORS = {"precision": 250, "balanced": 1000, "recall": 4000}
#: smallest probability (1/1000) of a chosen block
LEAST = 20
#: F_β is computed in integers, as a multiple of 1 / SCALE
SCALE = 1_000_000
#: a heading can be the headline if at least this share of its words (1/1000) occurs in the page's title
TITLED = 600
#: a page with more paragraphs of the same tags and classes than this counts as a book
MANY = 300
#: fewest characters of a comment, spaces not counted: shorter texts are buttons, names and dates
COMMENT = 25


def choose(blocks: np.ndarray, chances: np.ndarray, shifts: np.ndarray, recall: int = 1000) -> tuple[np.ndarray, int]:
    """Chooses the blocks (stretches of text between block-level tags) that make up the main text of a page. Returns
    (chosen blocks, as bool[blocks]; the expected F1 of their words, in 1/1000).

    `blocks` are the rows of `PageArrays.blocks`. `chances` holds the probability that each block is main text, in
    1/1000. `shifts` (int[shifts, 1001]) has rows of lowered and raised probabilities: shifts[k, p] replaces p, both in
    1/1000. `recall` is β² in 1/1000, the weight of recall in F_β. Blocks in the page's <title> and blocks with a
    probability below LEAST are never chosen. If no block reaches LEAST, none is chosen, and the expected F1 is 0.

    The choice maximises an approximate F_β. If w are the numbers of words of the blocks, p their probabilities and S
    the chosen blocks, F_β is about (1 + β²) Σ_S wp / (Σ_S w + β² Σ wp). The best S holds all blocks above some
    probability (Lipton et al. 2014, arXiv 1402.1892).

    The model's errors on one page are correlated: where a template misleads it, all probabilities are too high, or all
    are too low. The choice with the largest mean F_β over all rows of `shifts` therefore wins. Where the model is sure,
    the shifts hardly change the choice. Where it is unsure, they lead to more blocks, since losing text costs more than
    including some words around it. The expected F1 is computed from `chances` themselves.
    """
    chosen = np.zeros(len(blocks), np.bool_)
    which = np.flatnonzero(blocks[:, B_FLAGS] & IN_TITLE == 0)
    order = which[np.argsort(-chances[which], kind="stable")]
    likely = int((chances[order] >= LEAST).sum())
    if not likely:
        return chosen, 0
    words = np.maximum(blocks[order, B_WORDS], 1).astype(np.int64)
    hit, size = np.cumsum(shifts[:, chances[order]] * words, 1, np.int64), np.cumsum(words)
    all_hits = hit[:, -1:]
    plain = chances[order].astype(np.int64) * words
    n = int(np.argmax((SCALE * hit // (1000 * size + recall * all_hits // 1000)).sum(0)[:likely]))
    chosen[order[:n + 1]] = True
    return chosen, int(2000 * plain[:n + 1].sum() // (1000 * size[n] + plain.sum()))


def select(page: PageArrays, chances: np.ndarray, shifts: np.ndarray, *, favor: str = "balanced",
           comments: bool = False) -> tuple[np.ndarray, int]:
    """Selects the main text of a page: the blocks (stretches of text between block-level tags) that `choose` picks, and
    the headline above them. Returns (selected blocks, as bool[blocks]; the expected F1 of their words, in 1/1000).

    `chances` and `shifts` are as in `choose`. `favor` weighs precision against recall (a key of `FAVORS`). With
    `comments`, readers' comments are added. Otherwise comments are left out, except on a page where they hold at least
    half of the chosen words, such as a forum.
    """
    chosen, expected = choose(page.blocks, level(page, chances), shifts, FAVORS[favor])
    if (at := headline(page, chosen)) is not None:
        chosen[at] = True
    of_readers = page.blocks[:, B_FLAGS] & IN_COMMENT != 0
    if comments:
        chosen |= of_readers & comment_texts(page)
    elif page.blocks[chosen & of_readers, B_WORDS].sum() * 2 < page.blocks[chosen, B_WORDS].sum():
        chosen &= ~of_readers                   # in a forum, where most of the text is comments, they are the main text
    return chosen, expected


def level(page: PageArrays, chances: np.ndarray) -> np.ndarray:
    """Returns the chances (the probability of each block, in 1/1000), levelled over similar paragraphs. If more than
    MANY paragraphs have the same tags and classes, as in a book, each of these paragraphs gets the mean of their
    chances.

    The model was not trained on pages with so many paragraphs. On such a page it would tell the paragraphs apart only
    by their position, and would thus cut a book in the middle.
    """
    b = page.blocks
    if len(b) <= MANY:
        return chances
    prose = (b[:, B_UNITS] >= 40) & (3 * b[:, B_LINKED] < b[:, B_UNITS]) & (b[:, B_STOPS] > 0)
    structure = structures(page.elements, b)
    many = np.bincount(structure, prose) > MANY
    total = np.bincount(structure, np.where(prose, chances, 0))
    mean = (total // np.maximum(np.bincount(structure, prose), 1)).astype(chances.dtype)
    return np.where(prose & many[structure], mean[structure], chances)


def headline(page: PageArrays, chosen: np.ndarray) -> int | None:
    """Returns the number of the block that is the headline above the chosen blocks; None if there is none.

    Candidates are headings that consist mainly of words of the page's title. They must have more than 8 characters
    (without spaces, Han and kana counted three times). If a page has no such heading, all its h1 are candidates. The
    headline is the last candidate before the first chosen block. There is none if a candidate is itself chosen.
    """
    b = page.blocks
    heading = b[:, B_FLAGS] & (IN_HEADING | IN_TITLE) == IN_HEADING
    heads = np.flatnonzero(heading & (b[:, B_TITLED] >= TITLED) & (b[:, B_UNITS] > 8))
    if not len(heads):
        heads = np.flatnonzero(heading & (page.elements[b[:, B_BOX], E_TAG] == TAG["h1"]))
    if not chosen.any() or chosen[heads].any():
        return None
    above = heads[heads < np.argmax(chosen)]
    return int(above[-1]) if len(above) else None


def comment_texts(page: PageArrays) -> np.ndarray:
    """Returns which blocks could be readers' comments, as bool[blocks]. Such a block has enough text, mostly outside
    links. It is not in a form, a button, navigation or a hidden element."""
    b = page.blocks
    return ((b[:, B_UNITS] >= COMMENT) & (2 * b[:, B_LINKED] < b[:, B_UNITS])
            & (b[:, B_FLAGS] & (IN_TITLE | IN_FORM | IN_BUTTON | IN_NAV | IN_HIDDEN) == 0))
