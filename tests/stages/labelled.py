"""Texts with labels, for classifiers that are trained in a second."""

from __future__ import annotations

GOOD = [f"The river {word} runs through the valley, and people have lived beside it for {i} hundred years."
        for i in range(2, 42) for word in ("Elbe", "Thames", "Danube")]
POOR = [f"BUY {i} cheap {word} now!!! click here best {word} price $$$ win win" for i in range(2, 42)
        for word in ("pills", "watches", "bags")]


def own_word(i: int) -> str:
    """Return a word that only `i` has. It has letters only, because all digits are the same to a shingle."""
    return "".join(chr(97 + (i // 26**k + 7 * k) % 26) for k in range(4))


def shaped(text: str, i: int) -> str:
    """Return the text with a unique word after each word, so that the same text with another `i` is not a
    near-duplicate."""
    return " ".join(f"{word} {own_word(50 * i + k)}" for k, word in enumerate(text.split()))


LABELLED = [("hq", shaped(text, i)) for i, text in enumerate(GOOD)] + [
    ("lq", shaped(text, 500 + i)) for i, text in enumerate(POOR)]
#: grades 0 … 3: the more of a text is about rivers, the higher
GRADED = [(str(grade), shaped(" ".join([*GOOD[i].split()[:4 * grade], *POOR[i].split()[:12 - 4 * grade]]),
                              1000 + 4 * i + grade)) for grade in range(4) for i in range(60)]
