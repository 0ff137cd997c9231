"""Counts repeated word n-grams (for Gopher's rules) and hashes all word n-grams of a text (for MinHash), compiled by
numba.

The functions take words as numbers. Which number a word has changes no result. The results are integers, so they are
equal on every machine. numba stores the compiled code in NUMBA_CACHE_DIR. Arguments such as `lengths` and `hashes` are
the columns of a `stages.text.words.Vocabulary`, indexed by word number.
"""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit

_MIX = np.uint64(0x9E3779B97F4A7C15)


# -- Gopher: repeated n-grams ------------------------------------------------------------------------------------------
@njit(cache=True, nogil=True)
def top_ngrams(ids: np.ndarray, lengths: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return, for each n from `low` to `high`, the length of the most frequent word n-gram times its count, int64[high
    - low + 1]. The length is in characters, with words joined by one space. The value is -1 if the text has fewer than
    n words.

    `ids` are the word numbers of the text, and `lengths[i]` is the number of characters of the word with number i. Of
    n-grams with equal counts, the first one in the text counts (as with `Counter.most_common`).
    """
    words = ids.shape[0]
    out = np.full(high - low + 1, -1, np.int64)
    size = 16
    while size < 2 * words:
        size *= 2
    mask = size - 1
    table = np.empty(size, np.int32)
    counts = np.empty(words, np.int32)
    hashes = np.empty(words, np.uint64)
    # an n-gram can occur twice only if the (n-1)-gram at its place does; other n-grams are not looked up
    may_repeat = np.ones(words, np.bool_)
    firsts = np.empty(words, np.int32)
    for i in range(words):
        h = np.uint64(1469598103934665603)
        for k in range(min(low - 1, words - i)):
            h = (h ^ np.uint64(ids[i + k])) * _MIX
            h ^= h >> np.uint64(29)
        hashes[i] = h
    for n in range(low, high + 1):
        total = words - n + 1
        if total <= 0:
            break
        table[:] = -1
        counts[:total] = 0
        for i in range(total):
            if not may_repeat[i]:
                continue
            h = (hashes[i] ^ np.uint64(ids[i + n - 1])) * _MIX
            h ^= h >> np.uint64(29)
            hashes[i] = h
            slot = np.int64(h & np.uint64(mask))
            while True:
                first = table[slot]
                if first < 0:
                    table[slot] = first = i
                    break
                equal = hashes[first] == h
                if equal:
                    for k in range(n):
                        if ids[first + k] != ids[i + k]:
                            equal = False
                            break
                if equal:
                    break
                slot = (slot + 1) & mask
            firsts[i] = first
            counts[first] += 1
        best = 1
        best_at = 0
        for i in range(total):
            if counts[i] > best:
                best = counts[i]
                best_at = i
        for i in range(total):
            may_repeat[i] = may_repeat[i] and counts[firsts[i]] > 1
        characters = n - 1
        for k in range(n):
            characters += lengths[ids[best_at + k]]
        out[n - low] = characters * best
    return out


@njit(cache=True, nogil=True)
def _same_characters(ids: np.ndarray, i: int, j: int, n: int, offsets: np.ndarray, sizes: np.ndarray,
                     blob: np.ndarray) -> bool:
    """Return whether the n words from word i on, and the n words from word j on, spell the same string when they are
    joined without spaces. The words' UTF-8 bytes are compared; `offsets` and `sizes` say where `blob` holds them."""
    equal = True
    for k in range(n):
        if ids[i + k] != ids[j + k]:
            equal = False
            break
    if equal:
        return True
    a = 0
    pa = 0
    b = 0
    pb = 0
    while a < n and b < n:
        wa = ids[i + a]
        wb = ids[j + b]
        if blob[offsets[wa] + pa] != blob[offsets[wb] + pb]:
            return False
        pa += 1
        pb += 1
        if pa == sizes[wa]:
            a += 1
            pa = 0
        if pb == sizes[wb]:
            b += 1
            pb = 0
    return a == n and b == n


@njit(cache=True, nogil=True)
def duplicate_ngrams(ids: np.ndarray, lengths: np.ndarray, hashes: np.ndarray, powers: np.ndarray, offsets: np.ndarray,
                     sizes: np.ndarray, blob: np.ndarray, ns: np.ndarray) -> np.ndarray:
    """Return, for each n of `ns`, the number of characters of a text that lie in a copy of an earlier word n-gram, each
    character counted once.

    As in datatrove, an n-gram is its words joined *without* spaces ("ab c" equals "a bc"). When a copy is found, the
    search continues after the copy's last word. `hashes` and `powers` are the words' polynomial hashes and
    base**length, so that an n-gram's hash is computed from the difference of two prefix hashes. If hashes are equal,
    the characters are compared, too.
    """
    words = ids.shape[0]
    # prefix[i] is the hash of the first i words, divided by base**length. The difference of two prefixes, multiplied by
    # a power of the base, is then the hash of an n-gram.
    power = np.empty(words + 1, np.uint64)
    inverse = np.empty(words + 1, np.uint64)
    prefix = np.empty(words + 1, np.uint64)
    length = np.empty(words + 1, np.int64)
    power[0] = np.uint64(1)
    length[0] = 0
    for i in range(words):
        power[i + 1] = power[i] * powers[ids[i]]
        length[i + 1] = length[i] + lengths[ids[i]]
    odd = power[words]
    value = odd                                   # Newton's method modulo 2**64, from three correct bits on
    for _ in range(5):
        value *= np.uint64(2) - odd * value
    inverse[words] = value
    for i in range(words - 1, -1, -1):
        inverse[i] = inverse[i + 1] * powers[ids[i]]
    prefix[0] = np.uint64(0)
    for i in range(words):
        prefix[i + 1] = prefix[i] + hashes[ids[i]] * inverse[i + 1]
    size = 16
    while size < 2 * words:
        size *= 2
    mask = size - 1
    keys = np.empty(size, np.uint64)
    firsts = np.empty(size, np.int32)
    out = np.zeros(ns.shape[0], np.int64)
    for row in range(ns.shape[0]):
        n = ns[row]
        firsts[:] = -1
        i = int(np.int64(0))                      # not 0: see `njit`
        while i < words - n + 1:
            h = (prefix[i + n] - prefix[i]) * power[i + n]
            characters = length[i + n] - length[i]
            x = h ^ (h >> np.uint64(32))
            x *= np.uint64(0xD6E8FEB86659FD93)
            x ^= x >> np.uint64(32)
            slot = np.int64(x & np.uint64(mask))
            is_copy = False
            while firsts[slot] >= 0:
                first = firsts[slot]
                if (keys[slot] == h and length[first + n] - length[first] == characters
                        and _same_characters(ids, first, i, n, offsets, sizes, blob)):
                    is_copy = True
                    break
                slot = (slot + 1) & mask
            if is_copy:
                out[row] += characters
                i += n
            else:
                keys[slot] = h
                firsts[slot] = i
                i += 1
    return out


@njit(cache=True, nogil=True)
def hash_words(hashes: np.ndarray, powers: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, blob: np.ndarray,
               first: int, last: int) -> None:
    """Compute the polynomial hash of the bytes of each word (into `hashes`) and base**size (into `powers`). This is
    done for the words from `first` up to, but not including, `last`. The bytes of a word are in `blob`; `offsets` and
    `sizes` say where."""
    for word in range(first, last):
        value = np.uint64(0)
        power = np.uint64(1)
        for i in range(offsets[word], offsets[word] + sizes[word]):
            value = value * _MIX + np.uint64(blob[i]) + np.uint64(1)
            power *= _MIX
        hashes[word] = value
        powers[word] = power


@njit(cache=True, nogil=True)
def distinct_words(ids: np.ndarray, targets: np.ndarray) -> int:
    """Return how many of the word numbers in `targets` occur in a text. `ids` holds the word numbers of the text. No
    number may occur twice in `targets`."""
    count = 0
    for k in range(targets.shape[0]):
        for i in range(ids.shape[0]):
            if ids[i] == targets[k]:
                count += 1
                break
    return count


@njit(cache=True, nogil=True)
def word_counts(ids: np.ndarray, lengths: np.ndarray, kinds: np.ndarray) -> tuple[int, int, int]:
    """Count the words of a text by kind. Returns (number of words that do not consist of symbols alone, number of
    characters in these words, number of words with a letter)."""
    plain = 0
    characters = 0
    letters = 0
    for i in range(ids.shape[0]):
        w = ids[i]
        if kinds[w] & 1:
            plain += 1
            characters += lengths[w]
        if kinds[w] & 2:
            letters += 1
    return plain, characters, letters


# -- MinHash: shingles -------------------------------------------------------------------------------------------------
@njit(cache=True, nogil=True)
def _sha1_first8(message: np.ndarray, length: int, block: np.ndarray, w: np.ndarray) -> np.uint64:
    """Return the first 8 bytes of the SHA-1 digest (FIPS 180-4) of the first `length` bytes of `message`, as a
    little-endian integer. `block` and `w` are scratch arrays."""
    blocks = (length + 9 + 63) // 64
    for i in range(blocks * 64):
        block[i] = message[i] if i < length else 0
    block[length] = 0x80
    bits = np.uint64(length) * np.uint64(8)
    for i in range(8):
        block[blocks * 64 - 1 - i] = np.uint8((bits >> np.uint64(8 * i)) & np.uint64(255))
    h0 = np.uint32(0x67452301)
    h1 = np.uint32(0xEFCDAB89)
    h2 = np.uint32(0x98BADCFE)
    h3 = np.uint32(0x10325476)
    h4 = np.uint32(0xC3D2E1F0)
    for number in range(blocks):
        o = number * 64
        for i in range(16):
            w[i] = ((np.uint32(block[o + 4 * i]) << np.uint32(24)) | (np.uint32(block[o + 4 * i + 1]) << np.uint32(16))
                    | (np.uint32(block[o + 4 * i + 2]) << np.uint32(8)) | np.uint32(block[o + 4 * i + 3]))
        for i in range(16, 80):
            x = w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16]
            w[i] = np.uint32((x << np.uint32(1)) | (x >> np.uint32(31)))
        a = h0
        b = h1
        c = h2
        d = h3
        e = h4
        for i in range(80):
            if i < 20:
                f = (b & c) | (~b & d)
                k = np.uint32(0x5A827999)
            elif i < 40:
                f = b ^ c ^ d
                k = np.uint32(0x6ED9EBA1)
            elif i < 60:
                f = (b & c) | (b & d) | (c & d)
                k = np.uint32(0x8F1BBCDC)
            else:
                f = b ^ c ^ d
                k = np.uint32(0xCA62C1D6)
            t = np.uint32(np.uint32((a << np.uint32(5)) | (a >> np.uint32(27))) + np.uint32(f) + e + k + w[i])
            e = d
            d = c
            c = np.uint32((b << np.uint32(30)) | (b >> np.uint32(2)))
            b = a
            a = t
        h0 = np.uint32(h0 + a)
        h1 = np.uint32(h1 + b)
        h2 = np.uint32(h2 + c)
        h3 = np.uint32(h3 + d)
        h4 = np.uint32(h4 + e)
    out = np.uint64(0)
    for i in range(4):
        out |= np.uint64((h0 >> np.uint32(24 - 8 * i)) & np.uint32(255)) << np.uint64(8 * i)
        out |= np.uint64((h1 >> np.uint32(24 - 8 * i)) & np.uint32(255)) << np.uint64(32 + 8 * i)
    return out


@njit(cache=True, nogil=True)
def sha1_shingles(ids: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, blob: np.ndarray, n: int) -> np.ndarray:
    """Return a hash, uint64, of each run of n words (a shingle) of a text: the first 8 bytes, little-endian, of the
    SHA-1 digest of the words joined by single spaces. The result is empty if the text has fewer than n words."""
    total = ids.shape[0] - n + 1
    if total <= 0:
        return np.zeros(0, np.uint64)
    longest = 0
    for i in range(total):
        length = n - 1
        for k in range(n):
            length += sizes[ids[i + k]]
        longest = max(longest, length)
    out = np.empty(total, np.uint64)
    message = np.empty(longest, np.uint8)
    block = np.empty(longest + 128, np.uint8)
    w = np.empty(80, np.uint32)
    for i in range(total):
        p = np.int64(0)
        for k in range(n):
            if k:
                message[p] = 32
                p += 1
            o = offsets[ids[i + k]]
            for q in range(sizes[ids[i + k]]):
                message[p] = blob[o + q]
                p += 1
        out[i] = _sha1_first8(message, p, block, w)
    return out
