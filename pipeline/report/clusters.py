"""Makes the report's section about groups of duplicates. It shows the sizes of the groups, the largest groups with the
differences between their texts, and the pairs of sources between which duplicates were found.

A group is a kept document with the documents that were removed because of it. Groups are put together from the rows of
the removed documents. If only a sample of these rows is read (`pipeline.report.sampled`), the sizes count only
documents of the sample.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from pipeline.report import sampled
from pipeline.report.marks import verdict
from pipeline.report.nodes import NodeFigures, batches
from pipeline.report.sampled import Stratum
from pipeline.report.samples import Place, rows_at, sample
from pipeline.store.fs import Store
from pipeline.store.records import FileInfo
from stages.scrub.pii import scrub_text

#: most groups shown for a barrier (here: a deduplication), most removed documents shown for a group
LARGEST, MEMBERS = 4, 2
#: most pairs of sources that are listed
PAIRS = 40
#: of two texts, at most CHARS characters are read, and at most WORDS words after their first difference are compared.
#: AROUND words are shown on each side of a difference, SHOWN words in all
CHARS, WORDS, AROUND, SHOWN = 1 << 15, 1500, 6, 160
#: number of characters left out at the end of a text that was cut; most characters shown of a word
MARGIN, WORD = 512, 80
#: texts whose words have more than LONG characters on average are in a script without spaces; they are compared by
#: characters, and LETTERS characters count as one word
LONG, LETTERS = 15, 5

COLUMNS = ["id", "url", "source", "text", "meta", "locator"]


def cluster_section(store: Store, barrier: NodeFigures, nodes: list[NodeFigures]) -> dict[str, Any]:
    """Make the report's section about the groups of duplicates that one deduplication found: {barrier, step, read,
    groups, sizes, largest, pairs, unknown} and, for near-duplicates, `components`.

    * `read` says how many removed documents were read.
    * `groups` is the number of groups among them, and `largest` describes the largest ones.
    * `sizes` counts the groups by log2 of their number of documents, the kept one included.
    * `pairs` counts removed documents by their source and the source of the kept document.
    * `unknown` counts the removed documents whose kept document was not found. Either its part (file of documents) was
      not read, or a later step dropped it.
    * `components` counts the connected groups of candidates for comparison, by log2 of their number of documents.
      Unlike the other figures, it covers all documents.
    """
    step = barrier.steps[0]
    appliers = [n for n in nodes if barrier.name in n.deps]
    removed = _removed(appliers, step)
    groups: Counter[str] = Counter()
    sources: Counter[tuple[str, str]] = Counter()
    rows_read = 0
    for _, _, _, source, kept in _rows(store, removed, step):
        groups[kept] += 1
        sources[source, kept] += 1
        rows_read += 1
    total = sum(n for node in appliers for by in node.counters.get("stages", {}).get(f"barrier:{step}", {}).get(
        "dropped", {}).values() for n in by.values())
    old = [n for n in nodes if n.kind == "pass" and not set(barrier.against).isdisjoint(n.deps)]
    texts = {info.path: (key, info) for node in (*appliers, *old) for key, info in _texts(node, nodes)}
    kept_files = [info for _, info in heapq.nsmallest(sampled.PARTS, texts.values(), key=lambda text: text[0])]
    largest = heapq.nsmallest(LARGEST, groups.items(), key=lambda group: (-group[1], group[0]))
    places, origin = _look_up(store, kept_files, {kept for _, kept in sources}, {kept for kept, _ in largest})
    pairs: Counter[tuple[str, str]] = Counter()
    for (source, kept), docs in sources.items():
        if kept in origin:
            pairs[source, origin[kept]] += docs
    sizes = Counter((docs + 1).bit_length() - 1 for docs in groups.values())
    components = barrier.counters.get("clusters", {}).get("cluster_sizes")
    return {
        "barrier": barrier.name, "step": step, "read": {"docs": rows_read, "of": total, "exact": rows_read == total},
        "groups": len(groups), "sizes": {str(b): n for b, n in sorted(sizes.items())},
        **({"components": components} if components else {}),
        "largest": [_group(store, step, kept, docs + 1, removed, kept_files, places.get(kept))
                    for kept, docs in largest],
        "pairs": [{"removed": one, "kept": other, "docs": docs} for (one, other), docs in
                  sorted(pairs.items(), key=lambda p: (-p[1], p[0]))[:PAIRS]],
        "unknown": rows_read - sum(pairs.values())}


def _removed(appliers: list[NodeFigures], step: str) -> list[FileInfo]:
    """Return the files with the documents that the deduplication `step` removed. `appliers` are the passes that carried
    out the removal. Only files of the tasks that the report samples are returned."""
    files = [record.files["dropped.parquet"] for node in appliers for record in node.choose(sampled.PARTS)
             if record.counters.get("stages", {}).get(f"barrier:{step}", {}).get("dropped")]
    return [info for info in files if info.rows]


def _rows(store: Store, files: list[FileInfo], step: str) -> Iterator[tuple[int, int, str, str, str]]:
    """Yield a tuple for each document that the deduplication `step` removed: (number of the file, row, id, source, id
    of the kept document)."""
    quota = Stratum(False, 0, tuple(files)).quota
    for number, info in enumerate(files):
        row = 0
        for batch in batches(store, info, ["id", "source", "stage", "meta"]):
            columns = (batch.column(name).to_pylist() for name in ("id", "source", "stage", "meta"))
            for id, source, stage, meta in zip(*columns, strict=True):
                if stage == step and (stated := verdict(meta, step)) is not None:
                    yield number, row, id, source, stated["kept"]
                row += 1
                if row >= quota:
                    break
            if row >= quota:
                break


def _texts(node: NodeFigures, nodes: list[NodeFigures]) -> list[tuple[str, FileInfo]]:
    """Return files with the texts of the documents that a pass (a group of steps that run together) kept, as (key of
    the task, file). These are the files of at most PARTS tasks, those with the smallest keys. A pass may have written
    no texts, but only lists of the rows that are gone (row sets); the files of the passes before it are then returned.
    """
    if "gone.parquet" not in node.writes:
        return [(record.key, info) for record in node.choose(sampled.PARTS)
                if (info := record.files["kept.parquet"]).rows]
    return [text for before in nodes if before.kind == "pass" and before.name in node.deps
            for text in _texts(before, nodes)]


def _look_up(store: Store, files: list[FileInfo], ids: set[str],
             placed: set[str]) -> tuple[dict[str, Place], dict[str, str]]:
    """Find documents in `files`. Returns the places (file and row) of the documents with the ids `placed`, and the
    sources of the documents with the ids `ids`. Documents that are not found are left out."""
    places: dict[str, Place] = {}
    origin: dict[str, str] = {}
    quota = Stratum(True, 0, tuple(files)).quota
    for number, info in enumerate(files):
        row = 0
        for batch in batches(store, info, ["id", "source"]):
            for id, source in zip(batch.column("id").to_pylist(), batch.column("source").to_pylist(), strict=True):
                if id in ids:
                    origin[id] = source
                    if id in placed:
                        places[id] = (id, number, row)
                row += 1
            if row >= quota:
                break
    return places, origin


def _group(store: Store, step: str, kept: str, size: int, removed: list[FileInfo], kept_files: list[FileInfo],
           place: Place | None) -> dict[str, Any]:
    """Describe a group of `size` documents that the deduplication `step` found: the kept document, whose id is `kept`,
    and its duplicates. Of the duplicates, those with the smallest ids are described, each with its difference from the
    kept document. The kept document is described if it was found (at `place`)."""
    members = heapq.nsmallest(MEMBERS, ((id, number, row) for number, row, id, _, of in _rows(store, removed, step)
                                        if of == kept))
    rows = rows_at(store, removed, members, COLUMNS)
    twin = next(iter(rows_at(store, kept_files, [place], COLUMNS).values())) if place else None
    members_shown = []
    for member in members:
        row = rows[member]
        excerpt = sample(row, step)
        excerpt["similarity"] = (json.loads(row["meta"])[step] or {}).get("similarity")
        members_shown.append({**excerpt, "diff": difference(twin["text"], row["text"]) if twin else None})
    return {"kept_id": kept, "size": size, "kept": sample(twin) if twin else None, "removed": members_shown}


def difference(kept: str, removed: str) -> list[list[str]]:
    """Compare a removed text with the kept one, word by word. Returns a list of [kind, words]. The kinds are "both",
    "kept" (words only in the kept text), "removed" (words only in the removed text) and "cut" (words that are left
    out). Personal data is removed from the texts before they are compared. For equal texts, the beginning is returned
    as "both". Texts in a script without spaces are compared by characters."""
    kept_words, removed_words = (_words(text) for text in (kept, removed))
    around, most, gap = AROUND, SHOWN, " "
    if sum(map(len, kept_words + removed_words)) > LONG * len(kept_words + removed_words):
        kept_words, removed_words = list(" ".join(kept_words)), list(" ".join(removed_words))
        around, most, gap = AROUND * LETTERS, SHOWN * LETTERS, ""

    def joined_words(words: list[str]) -> str:
        return gap.join(map(_short, words))

    if kept_words == removed_words:
        return [["both", joined_words(kept_words[:most // 2])], *([["cut", ""]] if len(kept_words) > most // 2 else [])]
    out: list[list[str]] = []
    remaining = most
    codes = _opcodes(kept_words, removed_words)
    for place, (kind, i, j, k, m) in enumerate(codes):
        if remaining <= 0:
            out.append(["cut", ""])
            break
        if kind == "equal":
            head, tail = (0 if place == 0 else around), (0 if place == len(codes) - 1 else around)
            if j - i <= head + tail:
                out.append(["both", joined_words(kept_words[i:j])])
            else:
                out += [["both", joined_words(kept_words[i:i + head])], ["cut", ""],
                        ["both", joined_words(kept_words[j - tail:j] if tail else [])]]
            remaining -= min(j - i, head + tail)
            continue
        for word, words in (("kept", kept_words[i:j]), ("removed", removed_words[k:m])):
            if words:
                out.append([word, joined_words(words[:most // 4])])
                if len(words) > most // 4:
                    out.append(["cut", ""])
                remaining -= min(len(words), most // 4)
    return [entry for entry in out if entry[0] == "cut" or entry[1]]


def _opcodes(kept_words: list[str], removed_words: list[str]) -> list[tuple[str, int, int, int, int]]:
    """Return the opcodes of `SequenceMatcher` for two lists of words. The common beginning and the common end are found
    directly. Between them, only the first WORDS words are compared."""
    least = min(len(kept_words), len(removed_words))
    same = next((n for n in range(least) if kept_words[n] != removed_words[n]), least)
    end = next((n for n in range(least - same) if kept_words[-1 - n] != removed_words[-1 - n]), least - same)
    kept_middle, removed_middle = kept_words[same:len(kept_words) - end], removed_words[same:len(removed_words) - end]
    codes: list[tuple[str, int, int, int, int]] = [("equal", 0, same, 0, same)] if same else []
    middle = SequenceMatcher(None, kept_middle[:WORDS], removed_middle[:WORDS], autojunk=False).get_opcodes()
    if max(len(kept_middle), len(removed_middle)) > WORDS:
        if len(middle) > 1 and middle[-1][0] != "equal":
            middle.pop()                            # a difference at the end may only be the limit WORDS
        end = 0
    codes += [(kind, i + same, j + same, k + same, m + same) for kind, i, j, k, m in middle]
    tail = ("equal", len(kept_words) - end, len(kept_words), len(removed_words) - end, len(removed_words))
    return [*codes, *([tail] if end else [])]


def _short(word: str) -> str:
    return word if len(word) <= WORD else f"{word[:WORD // 2]}…{word[-WORD // 2:]}"


def _words(text: str) -> list[str]:
    head = scrub_text(text[:CHARS])
    if len(text) > CHARS:
        head = head[:-MARGIN]                       # the end may be half an address, which scrubbing would miss
        split = head.rsplit(None, 1)
        if len(split) == 2 and len(split[1]) <= MARGIN:
            head = split[0]
    return head.split()
