"""Chooses the blocks that make up the text of a page, from the probability of each."""

from __future__ import annotations

import numpy as np

from stages.extract.html.mill.columns import B_BOX, B_FLAGS, B_LINKED, B_STOPS, B_TITLED, B_UNITS, B_WORDS, E_TAG
from stages.extract.html.mill.features import makes
from stages.extract.html.mill.page import Page
from stages.extract.html.mill.tags import IN_BUTTON, IN_COMMENT, IN_FORM, IN_HEADING, IN_HIDDEN, IN_NAV, IN_TITLE, TAG

#: weight of recall against precision: β² of F_β, in 1/1000
FAVORS = {"precision": 250, "balanced": 1000, "recall": 4000}
#: no block of a smaller probability (1/1000) is kept
LEAST = 20
#: resolution of F_β: distinct fractions
SCALE = 1_000_000
#: share of a heading's words (1/1000) in the page's title that makes it the headline
TITLED = 600
#: a page with more paragraphs of the same tags and classes than this counts as a book
MANY = 300
#: characters of a comment without spaces: shorter texts are buttons, names and dates
COMMENT = 25


def choose(blocks: np.ndarray, chances: np.ndarray, shifts: np.ndarray, recall: int = 1000) -> tuple[np.ndarray, int]:
    """Which blocks to keep (bool), and the F1 of their words (1/1000) that the unshifted chances predict.

    With words w and chances p, F_β of a choice S is about (1 + β²) Σ_S wp / (Σ_S w + β² Σ wp), and the best S holds the
    blocks above some chance (Lipton et al. 2014, arXiv 1402.1892). The errors on one page are correlated: where a
    template misleads the model, all chances are too high, or all are too low. The choice is therefore the one with the
    largest mean of F_β over several shifts of all chances. A page that the model is sure of is cut as its chances say.
    An uncertain page keeps more, since losing the text costs more than some words around it.

    `shifts` (int[shifts, 1001]) maps a chance to a shifted chance, in 1/1000. `recall` is β² in 1/1000. The title is
    never chosen.
    """
    chosen = np.zeros(len(blocks), np.bool_)
    which = np.flatnonzero(blocks[:, B_FLAGS] & IN_TITLE == 0)
    order = which[np.argsort(-chances[which], kind="stable")]
    likely = int((chances[order] >= LEAST).sum())
    if not likely:
        return chosen, 0
    words = np.maximum(blocks[order, B_WORDS], 1).astype(np.int64)
    hit, size = np.cumsum(shifts[:, chances[order]] * words, 1, np.int64), np.cumsum(words)
    whole = hit[:, -1:]
    plain = chances[order].astype(np.int64) * words
    n = int(np.argmax((SCALE * hit // (1000 * size + recall * whole // 1000)).sum(0)[:likely]))
    chosen[order[:n + 1]] = True
    return chosen, int(2000 * plain[:n + 1].sum() // (1000 * size[n] + plain.sum()))


def select(page: Page, chances: np.ndarray, shifts: np.ndarray, *, favor: str = "balanced",
           comments: bool = False) -> tuple[np.ndarray, int]:
    """Which blocks make the text of a page (bool), and the expected F1 of their words (1/1000). The text consists of
    the best blocks by probability and the headline above them. With `comments` all readers' comments are added.
    Otherwise comments are left out, unless they hold at least half of the chosen words (a forum)."""
    chosen, expected = choose(page.blocks, level(page, chances), shifts, FAVORS[favor])
    if (at := headline(page, chosen)) is not None:
        chosen[at] = True
    of_readers = page.blocks[:, B_FLAGS] & IN_COMMENT != 0
    if comments:
        chosen |= of_readers & comment_texts(page)
    elif page.blocks[chosen & of_readers, B_WORDS].sum() * 2 < page.blocks[chosen, B_WORDS].sum():
        chosen &= ~of_readers                   # in a forum, where most of the text is comments, they are the main text
    return chosen, expected


def level(page: Page, chances: np.ndarray) -> np.ndarray:
    """The chances, levelled: where more than MANY paragraphs have the same tags and classes, as in a book, each of them
    gets their mean.

    The model did not learn from pages that long. Its trees tell such paragraphs apart by their place alone, which would
    cut a book in the middle."""
    b = page.blocks
    if len(b) <= MANY:
        return chances
    prose = (b[:, B_UNITS] >= 40) & (3 * b[:, B_LINKED] < b[:, B_UNITS]) & (b[:, B_STOPS] > 0)
    make = makes(page.elements, b)
    many = np.bincount(make, prose) > MANY
    total = np.bincount(make, np.where(prose, chances, 0))
    mean = (total // np.maximum(np.bincount(make, prose), 1)).astype(chances.dtype)
    return np.where(prose & many[make], mean[make], chances)


def headline(page: Page, chosen: np.ndarray) -> int | None:
    """The block of the headline above the chosen blocks; None when it is already chosen or there is none.

    It is the last of the headings above the first chosen block that repeat words of the page's title. If no heading of
    the page does, it is the last h1 above that block.
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


def comment_texts(page: Page) -> np.ndarray:
    """Which blocks could be readers' comments (bool): those with enough text that is not in a link, form or button."""
    b = page.blocks
    return ((b[:, B_UNITS] >= COMMENT) & (2 * b[:, B_LINKED] < b[:, B_UNITS])
            & (b[:, B_FLAGS] & (IN_TITLE | IN_FORM | IN_BUTTON | IN_NAV | IN_HIDDEN) == 0))
