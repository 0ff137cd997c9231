"""Detects pages whose extracted text has other letters than the page shows, because a font's map to Unicode is shifted.

Such a page looks right, but its extracted text is `Sgd bnlonrhshnm ne` where the page shows "The composition of". The
shift keeps the lengths of words, so only the frequencies of letters reveal it. In Latin script, pairs of letters such
as `th` are frequent, and pairs such as `gd` are rare. A text counts as shifted if its pairs become much more frequent
ones when all letters are moved by the same number of places in the alphabet.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np

#: cost of each pair of letters, a to z by a to z, which is -4 log2 of its frequency, as digits in base 64. It is the
#: mean of 50 languages in Latin script (75 sentences each, without accents).
_TABLE = """
    XXXUbcXZVaUQTMdZkPSRYZdjZb SmsuV/zjXquexqYx/dmtZrn/gz WzmrYz+VWqhipmYvxiofdvuymn SpvdQtqfTqohphXs+chmZml/je
    ZbaWZfYeXeWSVOhdqORSeciigb azwscjvrbuxkwqay+eske/vzmz UjqpWuigYlnhrkYuucjkawjuhy TutqVwwzWpofnlWuwiqfZnk/ly
    VcXXUfZfcbVTXOXdlVRTfbgmeb XwvpWx/ueupvtldv/zmpcur/wx QspqWwlfWngfqmUuzfedUme+iv QkoeQnjkShhXhjVouufcYliygu
    RbrqTplkVqplflWcwoimYslykt QobUSjQdSedilaVssnYTalntZg fbbYgfZhbcYVVRbbrSWYcafpkf UurrXruebtvdssXi/Wkidvwypy
    l/zun//up//uz/n/yvzwczx/x/ QggbQlfhRlegedUlqdaYYhkuhj TodmSppaTlYegiXctnbRZgfzih QpqtQqsWRnleniUqxXYaVimvfj
    adebblejciaXXUedpWWXgjlnif VwuqVzusXrvlxkavyjotfw//ju U+wvZ+wid/zsvnex/pown/w/ix h/xym++uj/yyx/or/zyqowyzzz
    Wojgconqeuliidctzigkjrqzpr Zouma+upYxooojesyqqmgko/mr
"""
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz+/"
_COST = np.array([_DIGITS.index(c) for c in "".join(_TABLE.split())], np.int32).reshape(26, 26)
#: the same costs for letters moved by 0 to 25 places
_MOVED = np.stack([np.roll(_COST, (-k, -k), (0, 1)).ravel() for k in range(26)])
#: fewest pairs of letters by which a page, and a stretch of a line, is judged
_PAGE, _STRETCH = 80, 16
#: A text is shifted if moving its letters back gains at least this many quarter bits per pair of letters. For 36,000
#: pieces of 300 and 1,500 characters of real text in some 400 languages, of code and of lists, the gain stays below
#: 3.5; for shifted pieces it is 5 or more.
_LIKELIER = 4
#: The stretches (parts of lines) that determine the shift of a page each gain at least this many quarter bits in all,
#: and together have half of `_PAGE` pairs. Other stretches are shifted if they gain half of `_LIKELIER` per pair.
_SURE = 100
#: percentage of a page's pairs that shifted stretches must hold
_SHARE = 10
#: Letters that were moved back read like a language if they have at most this many quarter bits per pair (keys in base
#: 64 have 40 and more), and at least this many different pairs (a table repeats the same few names).
_LANGUAGE, _DIFFERENT = 37, 45
_LETTERS = str.maketrans({"ß": "ss", "ø": "o", "đ": "d", "ł": "l", "æ": "ae", "œ": "oe", "ı": "i", "ð": "d",
                          "þ": "th"})


def is_shifted(stretches: Sequence[str]) -> bool:
    """Whether letters of a page's extracted text are shifted: every letter is moved by the same number of places in the
    alphabet. `stretches` are parts of the page's lines. Only Latin letters count.

    If only one font is at fault, only some stretches are shifted. They must then hold at least 80 pairs of letters and
    a tenth of all pairs of the page. The result is False for a page with fewer than 80 pairs. It is also False if the
    letters do not read like a language after they were moved back.
    """
    pairs, owner = _pairs("\n".join(stretches))
    if len(pairs) < _PAGE:
        return False
    cost = _MOVED[:, pairs]
    costs = cost.sum(1)
    if costs[0] - costs.min() >= _LIKELIER * len(pairs):
        return _reads_like_language(cost[int(costs.argmin())], pairs)
    starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
    sums, sizes = np.add.reduceat(cost, starts, 1), np.diff(np.r_[starts, len(pairs)])
    gain = sums[0] - sums
    sure = (gain >= np.maximum(_SURE, _LIKELIER * sizes)) & (sizes >= _STRETCH)
    place = int((sure * gain).sum(1).argmax())
    if (sure[place] * sizes).sum() < _PAGE // 2:
        return False
    in_shifted = np.repeat((gain[place] >= _LIKELIER // 2 * sizes) & (place > 0), sizes)
    shifted_cost, pairs, few = cost[:, in_shifted], pairs[in_shifted], max(_PAGE, _SHARE * len(pairs) // 100)
    better = shifted_cost[0].sum() - shifted_cost[place].sum() >= _LIKELIER * len(pairs)
    return len(pairs) >= few and bool(better) and _reads_like_language(shifted_cost[place], pairs)


def _reads_like_language(cost: np.ndarray, pairs: np.ndarray) -> bool:
    """Whether a shifted text reads like a language after its letters were moved back: its pairs of letters are likely
    enough, and it has enough different pairs. `cost` holds the cost of each pair after the move (in quarter bits, small
    for a likely pair), and `pairs` the pairs before the move."""
    return int(cost.sum()) <= _LANGUAGE * len(pairs) and len(np.unique(pairs)) >= _DIFFERENT


def _pairs(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairs of adjacent Latin letters in a text, without accents, as two arrays: the number of each pair
    (26 times the first letter plus the second, with a = 0), and the number of the line that contains it."""
    text = text.lower()
    if not text.isascii():
        text = unicodedata.normalize("NFD", text.translate(_LETTERS))
        text = "".join(c for c in text if c.isascii() or not unicodedata.combining(c))
    code = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)
    letter = code - ord("a")
    is_letter = (letter >= 0) & (letter < 26)
    both = np.flatnonzero(is_letter[:-1] & is_letter[1:])
    return 26 * letter[both] + letter[both + 1], np.cumsum(code == ord("\n"))[both]
