"""Normalises texts before the search for near-duplicates, exactly as datatrove's `simplify_text` does with its default
settings (datatrove.utils.text). The steps run in datatrove's order, which matters:

1. lower case
2. numbers to "0"
3. punctuation to spaces
4. white space to single spaces
5. canonical decomposition without nonspacing marks

A kernel (a function that numba compiles) does all steps in one pass over the UTF-8 bytes. It looks each character up in
a table that says what becomes of it. The table has pages of 256 code points; a page is filled when a text first has one
of its characters. A few texts have characters whose replacement depends on neighbouring characters in a way that the
kernel does not know. Such texts are simplified by `by_rules`, with the functions of Python's standard library.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import regex

from pipeline.base.compiled import njit
from stages.text.characters import PUNCTUATION, nonspacing_marks
from stages.text.chunks import utf8

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

# regex, not re: the decimal digits of all scripts, in the Unicode version datatrove uses
_NUMBER = regex.compile(r"\p{Nd}+([.,،٫⎖⎗⎘]{1}\p{Nd}+)?", regex.VERBOSE | regex.UNICODE)
_SEPARATORS = ".,،٫⎖⎗⎘"
# joining the runs of all other characters equals turning punctuation into spaces and collapsing white space
_RUN = re.compile(rf"[^\s{re.escape(PUNCTUATION)}]+")
# the first nonspacing mark is U+0300, so a scan for one range finds the few stretches that can hold marks
_HIGH = re.compile("[\u0300-\U0010ffff]+")

#: kinds of characters, as flags: white space or punctuation; decimal digit; mark that may stand inside a number
_GAP, _DIGIT, _SEPARATOR = 1, 2, 4
#: kinds that decide how `str.lower` writes a capital sigma beside them: cased; ignorable for case
_CASED, _IGNORABLE = 8, 16
#: a character for `by_rules`: it may change places with its neighbours in a decomposition
_UNSURE = 32
_SIGMA = 0x3A3
_SIGMA_BYTES = np.frombuffer("σς".encode(), np.uint8)
_SPACE, _ZERO = 32, 48
#: a byte that is in no UTF-8 text
_RARE = 255
_U = np.uint64
#: Integers of eight equal bytes: 1; the highest bit; a space. The last four are added to bytes below 128, to set the
#: highest bit of each that is at least "0", greater than "9", at least "a", greater than "z".
_EACH = _U(0x0101010101010101)
_HIGHEST, _SPACES = _EACH * _U(128), _EACH * _U(_SPACE)
_FROM_0, _AFTER_9, _FROM_A, _AFTER_Z = (_EACH * _U(128 - byte) for byte in b"0:a{")
#: Results of `_simplified` that are no number of bytes: _BY_RULES if only `by_rules` can simplify the text, and -2 - p
#: if the table of characters lacks page p.
_BY_RULES = -1


@cache
def _marks() -> dict[int, None]:
    """Return a table for `str.translate` that deletes nonspacing marks (accents, for instance)."""
    return {code: None for first, last in nonspacing_marks() for code in range(first, last + 1)}


def by_rules(text: str) -> str:
    """Simplify a text by the functions of Python's standard library. The result is the same as that of `simplify`, but
    takes longer."""
    text = " ".join(_RUN.findall(_NUMBER.sub("0", text.lower())))
    if not text.isascii():
        marks = _marks()
        text = _HIGH.sub(lambda run: run.group().translate(marks), unicodedata.normalize("NFD", text))
    # a mark standing alone leaves a space behind, which may now be the first or the last character
    return text.strip()


class _Characters(NamedTuple):
    """A table that says, for each character, what replaces it in a simplified text. The table has pages of 256
    characters. `pages` maps a code point >> 8 to the number of its page, or to -1 if the table does not have this page
    yet. A page has 256 entries in `kinds` (flags), `starts` and `sizes`. The bytes that replace a character inside a
    word are the `sizes` bytes of `blob` from `starts` on."""

    pages: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    starts: NDArray[np.int32]
    sizes: NDArray[np.uint8]
    blob: Bytes

    def with_page(self, page: int) -> _Characters:
        described = [_describe(chr(code)) for code in range(page << 8, (page + 1) << 8)]
        sizes = np.array([len(data) for _, data in described], np.uint8)
        pages = self.pages.copy()
        pages[page] = len(self.kinds) >> 8
        return _Characters(
            pages, np.r_[self.kinds, np.array([kind for kind, _ in described], np.uint8)],
            np.r_[self.starts, (len(self.blob) + np.cumsum(sizes, dtype=np.int32) - sizes).astype(np.int32)],
            np.r_[self.sizes, sizes], np.r_[self.blob, np.frombuffer(b"".join(d for _, d in described), np.uint8)])


def _describe(char: str) -> tuple[int, bytes]:
    """Return the entry of a character in the table of characters: (its flags, the UTF-8 bytes that replace it inside a
    word)."""
    kind = _DIGIT if _NUMBER.fullmatch(char) else 0
    kind |= _SEPARATOR if char in _SEPARATORS else 0
    # str.lower turns a sigma after a cased letter into ς, unless another cased letter follows (Unicode: Final_Sigma)
    if f"aΣ{char}".lower()[1] == "σ":
        kind |= _CASED
    elif f"aΣ{char}a".lower()[1] == "σ":
        kind |= _IGNORABLE
    lowered = char.lower()
    if _RUN.match(lowered) is None:
        return kind | _GAP, b""
    letters = [c for c in unicodedata.normalize("NFD", lowered) if unicodedata.category(c) != "Mn"]
    data = "".join(letters).encode("utf-8", "surrogatepass")
    if (_RUN.fullmatch(lowered) is None or any(c.isspace() or unicodedata.combining(c) for c in letters)
            or len(data) > 3 * len(char.encode("utf-8", "surrogatepass"))):
        return kind | _UNSURE, b""
    return kind, data


_NO_BYTES = np.zeros(0, np.uint8)
_characters = _Characters(np.full(0x1100, -1, np.int32), _NO_BYTES, np.zeros(0, np.int32), _NO_BYTES, _NO_BYTES)


@njit(cache=True, nogil=True)
def _code(data, i):
    """Return (code point, number of bytes) of the character that begins at byte `i` of a text in UTF-8."""
    lead = np.int64(data[i])
    if lead < 0x80:
        return lead, 1
    if lead < 0xE0:
        return (lead & 31) << 6 | np.int64(data[i + 1]) & 63, 2
    code = (np.int64(data[i + 1]) & 63) << 6 | np.int64(data[i + 2]) & 63
    if lead < 0xF0:
        return (lead & 15) << 12 | code, 3
    return (lead & 7) << 18 | code << 6 | np.int64(data[i + 3]) & 63, 4


@njit(cache=True, nogil=True)
def _entry(code, pages):
    """Return the index of a code point's entry in the table of characters. If the table does not have its page (code
    point >> 8) yet, the result is negative: -2 - page."""
    page = np.int64(pages[code >> 8])
    return page << 8 | code & 255 if page >= 0 else -2 - (code >> 8)


@njit(cache=True, nogil=True)
def _final_sigma(data, i, pages, kinds):
    """Return 1 if `str.lower` turns the capital sigma at byte `i` into its final form, otherwise 0. `str.lower` uses
    the final form if a cased letter precedes the sigma and none follows it; characters that are ignorable for case
    (apostrophes, marks) are skipped. If the table of characters lacks a page that is needed, the result is -2 -
    page."""
    cased = 0
    for direction in (-1, 1):
        place, cased = i, 0
        while True:
            if direction > 0:
                place += _code(data, place)[1]
            else:
                place -= 1
                while place >= 0 and data[place] & 0xC0 == 0x80:
                    place -= 1
            if place < 0 or place >= data.shape[0]:
                break
            entry = _entry(_code(data, place)[0], pages)
            if entry < 0:
                return entry
            if not kinds[entry] & _IGNORABLE:
                cased = 1 if kinds[entry] & _CASED else 0
                break
        if direction < 0 and not cased:
            return 0
    return 1 - cased


@njit(cache=True, nogil=True)
def _after_number(data, i, pages, kinds):
    """Return the position of the byte after a number. `i` is the position of the number's first digit. A number is a
    run of digits, after which one separator and more digits may follow. If the table of characters lacks a page that is
    needed, the result is -2 - page."""
    separated, last = False, i
    while i < data.shape[0]:
        code, width = _code(data, i)
        entry = _entry(code, pages)
        if entry < 0:
            return entry
        kind = kinds[entry]
        i += width
        if kind & _DIGIT:
            last = i
        elif separated or not kind & _SEPARATOR or i - width != last:
            break
        else:
            separated = True
    return last


@njit(cache=True, nogil=True)
def _ascii_stretch(data, i, ascii_bytes, gaps, out, size, last):
    """Simplify a text from byte `i` on, up to the next digit or character outside ASCII. The result is written to `out`
    after its first `size` bytes. Returns (i, size, last) after the stretch.

    `last` is the byte before the stretch in the result. After a space, no further space is written. `last` is _RARE
    after a character outside ASCII, even one that left no byte. If `gaps` is true, several spaces may follow one
    another, and `last` does not matter.

    The loops have no branch that depends on where words end, because processors would often mispredict it.
    """
    if gaps:
        done = _ascii_blocks(data[i:], out[size:])
        i, size = i + done, size + done
        while i < data.shape[0] and ascii_bytes[data[i]] != _RARE:
            out[size] = ascii_bytes[data[i]]
            i, size = i + 1, size + 1
        return i, size, _RARE
    while i < data.shape[0]:
        byte = np.int64(ascii_bytes[data[i]])
        if byte == _RARE:
            break
        out[size] = byte
        size += (byte != _SPACE) | (last != _SPACE)
        last = byte
        i += 1
    return i, size, last


@njit(cache=True, nogil=True)
def _ascii_blocks(data, out):
    """Copy the bytes of an ASCII text to `out`: a letter in lower case, and any other byte as a space. The function
    stops at the first block of eight bytes that holds a digit or a part of a character outside ASCII. Returns the
    number of bytes written.

    The eight bytes of a block are compared at once, in one addition of 64-bit integers. A byte b below 128 plus 128 - k
    has its highest bit set exactly if b ≥ k. No sum of two such bytes overflows into the next byte.
    """
    blocks = data.shape[0] // 8
    source, target = data[:8 * blocks].view(np.uint64), out[:8 * blocks].view(np.uint64)
    done = _U(0)
    while done < _U(blocks):
        eight = source[done]
        plain = eight & ~_HIGHEST
        if (eight | ((plain + _FROM_0) & ~(plain + _AFTER_9))) & _HIGHEST:
            break
        lower = plain | _SPACES
        letters = (((lower + _FROM_A) & ~(lower + _AFTER_Z) & _HIGHEST) >> _U(7)) * _U(255)
        target[done] = (lower & letters) | (_SPACES & ~letters)
        done += _U(1)
    return 8 * np.int64(done)


@njit(cache=True, nogil=True)
def _simplified(data, ascii_bytes, pages, kinds, starts, sizes, blob, gaps, out):
    """Write the simplified form of the text `data` (UTF-8) to `out`, and return its number of bytes. The form may have
    spaces at its ends and, if `gaps` is true, several spaces between words. If only `by_rules` can simplify the text,
    the result is _BY_RULES. If the table of characters lacks a page that is needed, the result is -2 - page."""
    i, size, last = _ascii_stretch(data, np.int64(0), ascii_bytes, gaps, out, np.int64(0), np.int64(_SPACE))
    while i < data.shape[0]:
        code, width = _code(data, i)
        entry = _entry(code, pages)
        if entry < 0:
            return entry
        kind = kinds[entry]
        if kind & _UNSURE:
            return _BY_RULES
        if kind & _DIGIT:
            i = _after_number(data, i, pages, kinds)
            if i < 0:
                return i
            out[size] = last = _ZERO
            size, width = size + 1, 0
        elif kind & _GAP:
            out[size] = _SPACE
            size += last != _SPACE
            last = _SPACE
        elif code == _SIGMA:
            final = _final_sigma(data, i, pages, kinds)
            if final < 0:
                return final
            out[size], out[size + 1] = _SIGMA_BYTES[2 * final], _SIGMA_BYTES[2 * final + 1]
            size += 2
            last = _RARE
        else:
            start = starts[entry]
            for place in range(start, start + sizes[entry]):
                out[size] = blob[place]
                size += 1
            last = _RARE                                 # a deleted mark still separates the spaces around it
        i, size, last = _ascii_stretch(data, i + width, ascii_bytes, gaps, out, size, last)
    return size


@cache
def _ascii_bytes() -> Bytes:
    """Return a table with an entry for each byte of a text in UTF-8: the byte that replaces it, or _RARE if the byte is
    a digit or part of a character outside ASCII."""
    table = np.full(256, _RARE, np.uint8)
    for code in range(128):
        kind, replacement = _describe(chr(code))
        if not kind & _DIGIT:
            table[code] = replacement[0] if replacement else _SPACE
    return table


def simplified_utf8(data: Bytes, gaps: bool = False) -> Bytes:
    """Return the simplified form of a text (as `simplify` does). Both are UTF-8, in which a lone surrogate takes three
    bytes. If `gaps` is true, there may be several spaces between words. This option takes less time, and is enough to
    find the words."""
    global _characters
    out = np.empty(3 * len(data) + 1, np.uint8)          # the decomposition of a Hangul syllable is 3 times as long
    size = int(_simplified(data, _ascii_bytes(), *_characters, gaps, out))
    while size < _BY_RULES:
        _characters = _characters.with_page(-2 - size)
        size = int(_simplified(data, _ascii_bytes(), *_characters, gaps, out))
    if size == _BY_RULES:
        return utf8(by_rules(data.tobytes().decode("utf-8", "surrogatepass")))
    first = 0                                            # a mark that stands alone leaves a space behind
    while first < size and out[first] == 32:
        first += 1
    while size > first and out[size - 1] == 32:
        size -= 1
    return out[first:size]


@njit(cache=True, nogil=True)
def _simplified_texts(data, starts, stops, ascii_bytes, pages, kinds, page_starts, sizes, blob, gaps, out, ends, odd):
    """Write the simplified forms of the texts data[starts[n]:stops[n]] to `out`, one after another, without spaces at
    their ends. The position where each form ends goes to `ends`. Texts that only `by_rules` can simplify are left out,
    and marked in `odd`. Returns 0, or -2 - page if the table of characters lacks a page that is needed."""
    end = 0
    for number in range(starts.shape[0]):
        text, source = out[end:], data[starts[number]:stops[number]]
        size = _simplified(source, ascii_bytes, pages, kinds, page_starts, sizes, blob, gaps, text)
        if size < _BY_RULES:
            return size
        odd[number] = size == _BY_RULES
        size = max(size, 0)
        first = 0
        while first < size and text[first] == _SPACE:
            first += 1
        while size > first and text[size - 1] == _SPACE:
            size -= 1
        for i in range(first, size if first else 0):
            text[i - first] = text[i]
        end += size - first
        ends[number] = end
    return 0


def simplified_texts(data: Bytes, starts: NDArray[np.int64], stops: NDArray[np.int64],
                     gaps: bool = False) -> tuple[Bytes, NDArray[np.int64]]:
    """Simplify many texts at once, in half the time that `simplified_utf8` takes for many short texts. Text n is
    data[starts[n]:stops[n]] in UTF-8. Returns (the simplified texts, one after another; the position where each ends).
    `gaps` has the same meaning as for `simplified_utf8`."""
    global _characters
    out = np.empty(3 * int((stops - starts).sum()) + 1, np.uint8)
    ends, odd = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.bool_)
    while code := int(_simplified_texts(data, starts, stops, _ascii_bytes(), *_characters, gaps, out, ends, odd)):
        _characters = _characters.with_page(-2 - code)
    out = out[:ends[-1] if len(ends) else 0]
    if not odd.any():
        return out, ends
    places = np.flatnonzero(odd)
    simplified = [utf8(by_rules(data[start:stop].tobytes().decode("utf-8", "surrogatepass")))
                  for start, stop in zip(starts[places].tolist(), stops[places].tolist())]
    more = np.zeros(len(ends), np.int64)
    more[places] = [len(text) for text in simplified]
    between = np.split(out, ends[places])
    return np.concatenate([piece for pair in zip(between, simplified) for piece in pair] + between[-1:]), (
        ends + np.cumsum(more))


def simplify(text: str) -> str:
    """Return a text in the form in which MinHash signatures are computed: lower case, numbers as 0, no punctuation, no
    accents, single spaces.

    >>> simplify("Café, 3.14  and\\nMORE…")
    'cafe 0 and more'
    """
    return simplified_utf8(utf8(text)).tobytes().decode("utf-8", "surrogatepass")
