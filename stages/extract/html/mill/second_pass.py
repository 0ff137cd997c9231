"""Computes the features for the second pass of the extraction engine `mill` over a page. In this pass the model judges
each block (stretch of text between block-level tags) again, and then also knows the probabilities that the first pass
gave to the blocks."""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit
from stages.extract.html.mill.columns import B_BOX, B_FLAGS, B_UNITS, E_BOX, E_PARENT, E_SIGNATURE
from stages.extract.html.mill.tags import IN_HEADING

#: features of the second pass: the first pass's probabilities (0..1000) around a block
SECOND = ["own", "before1", "before2", "before3", "after1", "after2", "after3", "box", "up1", "up2", "up3", "page",
          "near", "alike", "section_before", "section_after", "tag_alike"]


def structures(elements: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Returns a number for each block (int64[blocks]) that stands for its structure. Two blocks get the same number
    when their block-level elements have the same tag and classes, and the parents of these elements also have the same
    tag and classes. The function is not compiled, since numba takes three seconds to compile a sort."""
    signature = elements[:, E_SIGNATURE].astype(np.int64)
    box = blocks[:, B_BOX]
    keys = signature[elements[box, E_PARENT]] << 32 ^ signature[box] & 0xFFFFFFFF
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)


@njit(cache=True, nogil=True)
def second_features(elements, n_el, blocks, n_bl, structure, first, out):
    """Write the features for the second pass of the model to `out` (int32[blocks, len(SECOND)]). They are computed from
    the probabilities that the first pass gave to the blocks (`first`, int32[blocks], 0..1000): the probabilities of the
    block and its neighbours, and means over larger parts of the page.

    Means are weighted by the lengths of the blocks. The mean of an element is over all blocks inside it. `structure[k]`
    is the number that the function `structures` gave to block k.
    """
    total = np.zeros(n_el, np.int64)
    weight = np.zeros(n_el, np.int64)
    page = np.int64(0)
    page_weight = np.int64(0)
    alike = np.zeros(n_bl, np.int64)
    alike_weight = np.zeros(n_bl, np.int64)
    for k in range(n_bl):
        w = np.int64(blocks[k, B_UNITS]) + 5
        alike[structure[k]] += w * first[k]
        alike_weight[structure[k]] += w
        box = blocks[k, B_BOX]
        total[box] += w * first[k]
        weight[box] += w
        page += w * first[k]
        page_weight += w
    for i in range(n_el - 1, 0, -1):
        total[elements[i, E_PARENT]] += total[i]
        weight[elements[i, E_PARENT]] += weight[i]
    run = np.int64(0)
    for k in range(n_bl):
        row = out[k]
        box = blocks[k, B_BOX]
        row[0] = first[k]
        for d in range(1, 4):
            row[d] = first[k - d] if k >= d else -1
            row[3 + d] = first[k + d] if k + d < n_bl else -1
        row[7] = total[box] // max(weight[box], 1)
        up = box
        for d in range(3):
            up = elements[elements[up, E_PARENT], E_BOX]
            row[8 + d] = total[up] // max(weight[up], 1)
        row[11] = page // max(page_weight, np.int64(1))
        t_sum = np.int64(0)
        w_sum = np.int64(0)
        for j in range(max(0, k - 6), min(n_bl, k + 7)):
            w = np.int64(blocks[j, B_UNITS]) + 5
            t_sum += w * first[j]
            w_sum += w
        row[12] = t_sum // w_sum
        row[13] = alike[structure[k]] // alike_weight[structure[k]]
        row[14] = run
        run = (run * 7 + first[k]) // 8
    run = np.int64(0)
    for k in range(n_bl - 1, -1, -1):
        out[k, 15] = run
        run = (run * 7 + first[k]) // 8
    for k in range(n_bl):
        heading = -1
        j = k
        while j >= 0 and k - j < 12:
            if blocks[j, B_FLAGS] & IN_HEADING:
                heading = first[j]
                break
            j -= 1
        out[k, 16] = heading
