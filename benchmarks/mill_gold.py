"""Reads web pages with gold text (their main text, selected by people), aligns this text with the pages' blocks, and
divides the pages into folds by site. For train_mill.py and html_extraction.py."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numba
import numpy as np
import tldextract

from benchmarks.html_engines import load
from stages.document import Document
from stages.extract.html.mill import columns
from stages.extract.html.mill import features as f
from stages.extract.html.mill.page import serialised, table, walk
from stages.extract.html.mill.second_pass import SECOND, second_features, structures
from stages.extract.html.mill.tags import IN_TITLE, fnv
from stages.read.reader import Slice
from stages.read.warc import Warc
from stages.text.encoding import decode

#: each character of scripts that write without spaces is a word of its own
_ALONE = "\\u0e00-\\u0e7f\\u3040-\\u30ff\\u3400-\\u9fff\\uf900-\\ufaff"
WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")
FOLDS, INNER = 5, 2
#: a page must hold this share of the words of its gold text
COVERED = 0.9
CANONICAL = re.compile(rb"""<link[^>]+rel=["']?canonical["']?[^>]*>|<meta[^>]+og:url[^>]*>""", re.IGNORECASE)
ADDRESS = re.compile(rb"""(?:href|content)=["']?(https?://[^"' >]+)""", re.IGNORECASE)
_DOMAIN = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
#: most cells of an alignment (bytes of memory); larger pages are left out of training
LARGEST = 400_000_000


class Gold:
    """A web page with gold text (its main text, selected by people): its markup, site, page type and gold text, and the
    labels of its blocks, which `label` fills in."""

    def __init__(self, raw: bytes, charset: str, told: dict[str, Any], site: str) -> None:
        self.page = decode(raw, charset)[0]
        self.raw = raw
        self.site, self.url = site, told["url"]
        self.kind = told["_internal"]["page_type"]["primary"]
        self.truth = told["ground_truth"]
        self.text = self.truth["main_content"]
        self.labels = self.sizes = np.zeros(0)


def site_of(url: str) -> str:
    """The registered domain of a URL."""
    return _DOMAIN(url).top_domain_under_public_suffix or url


def read(warc: Path, gold: Path, news: Path | None = None) -> list[Gold]:
    """All pages with gold text: those of WCXB sorted by URL, then news."""
    pages: list[Gold] = []
    record_of: dict[str, dict[str, Any]] = {}
    for file in sorted(gold.rglob("*.json*")):
        record = json.loads(load(file))
        page = next(iter((file.parent.parent / "html").glob(f"{file.name.split('.')[0]}.html*")), None)
        if page is not None and file.parent.name == "gold":
            pages.append(Gold(load(page), "", record, site_of(record["url"])))
        else:
            record_of[record["url"]] = record
    for item in Warc().read(str(warc), Slice("web", warc.name)):
        if isinstance(item, Document) and item.raw is not None and (record := record_of.pop(item.url, None)):
            pages.append(Gold(item.raw, item.charset, record, site_of(item.url)))
    return sorted(pages, key=lambda g: g.url) + (read_news(news) if news else [])


def read_news(folder: Path) -> list[Gold]:
    """Reads the news pages of Fundus' tests. A page is in the file FOLDER/COUNTRY/PAPER_DATE.html.gz.
    FOLDER/COUNTRY/PAPER.json holds the gold texts of several versions of the page.

    The gold text of a page is the version that fits it best: the one with the largest share of its words on the page. A
    page is left out if this share is below COVERED."""
    pages: list[Gold] = []
    for file in sorted(folder.glob("*/*.json")):
        versions = [v for v in json.loads(file.read_text(encoding="utf-8")).values() if v["body"]]
        for page in sorted(file.parent.glob(f"{file.stem}_2*.html.gz")):
            raw = load(page)
            words = Counter(WORD.findall(decode(raw, "")[0].lower()))
            best: tuple[float, str, str] = (0.0, "", "")
            for version in versions:
                body = version["body"]
                text = "\n".join([*body.get("summary", ()), *(
                    part for s in body["sections"] for part in (*s.get("headline", ()), *s["paragraphs"]))])
                wanted = Counter(WORD.findall(text.lower()))
                best = max(best, ((wanted & words).total() / max(1, wanted.total()), text, version.get("title") or ""),
                           key=lambda b: b[0])
            link = next((m[1] for tag in CANONICAL.finditer(raw) if (m := ADDRESS.search(tag[0]))), b"").decode()
            record = {"url": link or page.name, "_internal": {"page_type": {"primary": "news"}},
                      "ground_truth": {"main_content": best[1], "title": best[2]}}
            if best[0] >= COVERED:
                pages.append(Gold(raw, "", record, site_of(link) if link else file.stem))
    return pages


@numba.njit(cache=True)
def align(page: np.ndarray, place: np.ndarray, gold: np.ndarray, hit: np.ndarray, used: np.ndarray) -> None:
    """Match the words of a page with the words of its gold text, without changing their order. `page` and `gold` have a
    number for each word. `place` says which word of the whole page each word of `page` is, because words that are not
    in the gold text were left out. The matched words are marked in `hit` (page) and `used` (gold).

    The matching with the highest score is chosen. A match counts 1, and 3 if the words before it on both sides are also
    matched with each other."""
    n, m = len(page), len(gold)
    trace = np.zeros((m + 1, n + 1), np.uint8)
    best = np.zeros(n + 1, np.int32)
    matched = np.full(n + 1, -1000000, np.int32)
    for j in range(1, m + 1):
        diagonal, run = best[0], matched[0]
        for i in range(1, n + 1):
            above, above_run = best[i], matched[i]
            bit = 0
            here = -1000000
            if page[i - 1] == gold[j - 1] and not used[j - 1]:
                here = diagonal + 1
                if i > 1 and place[i - 1] == place[i - 2] + 1 and run + 3 >= here:
                    here = run + 3
                    bit = 4
            score, choice = above, 1
            if best[i - 1] > score:
                score, choice = best[i - 1], 2
            if here > score:
                score, choice = here, 3
            trace[j, i] = choice | bit
            diagonal, run = above, above_run
            best[i], matched[i] = score, here
    i, j, forced = n, m, False
    while i > 0 and j > 0:
        step = trace[j, i]
        if forced or step & 3 == 3:
            hit[i - 1] = 1
            used[j - 1] = 1
            forced = step & 4 != 0
            i -= 1
            j -= 1
        elif step & 3 == 1:
            j -= 1
        else:
            i -= 1


def label(g: Gold) -> bool:
    """Fill in the label and the size of each block of a page. The label is the share of the block's words that are in
    the gold text, and the size is the number of its words. Returns False if the page nests too deep, has no text, or is
    too large for the alignment."""
    g.markup = serialised(g.page)
    arrays = walk(g.markup, collect=True)
    if arrays is None or not len(arrays.blocks):
        return False
    body = arrays.text.tobytes()
    words: list[str] = []
    owner: list[int] = []
    for k, b in enumerate(arrays.blocks):
        if not b[columns.B_FLAGS] & IN_TITLE:
            found = WORD.findall(body[b[columns.B_START]:b[columns.B_END]].decode("utf-8", "replace").lower())
            words += found
            owner += [k] * len(found)
    truth = WORD.findall(g.text.lower())
    number = {w: n for n, w in enumerate(dict.fromkeys(truth))}
    gold = np.array([number[w] for w in truth], np.int32)
    place = np.array([n for n, w in enumerate(words) if w in number], np.int32)
    page = np.array([number[words[n]] for n in place], np.int32)
    if not len(gold) or len(gold) * max(len(page), 1) > LARGEST:
        return False
    hit, used = np.zeros(len(page), np.uint8), np.zeros(len(gold), np.uint8)
    align(page, place, gold, hit, used)
    # a second pass over the unmatched words finds those in another order
    rest = hit == 0
    again = np.zeros(int(rest.sum()), np.uint8)
    if used.sum() < 0.9 * len(used) and len(again):
        left = np.flatnonzero(used == 0)
        align(page[rest], place[rest], gold[left], again, np.zeros(len(left), np.uint8))
        hit[rest] = again
    owners = np.array(owner, np.int64)
    m = len(arrays.blocks)
    g.sizes = np.bincount(owners, minlength=m).astype(float) if len(owners) else np.zeros(m)
    hits = np.bincount(owners[place], weights=hit, minlength=m) if len(place) else np.zeros(m)
    g.labels = hits / np.maximum(g.sizes, 1)
    g.gold_words = len(truth)
    # this page's votes for its class words: the share of main text below the elements that have the class
    inside, below = np.zeros(len(arrays.elements)), np.zeros(len(arrays.elements))
    np.add.at(inside, arrays.blocks[:, columns.B_BOX], hits)
    np.add.at(below, arrays.blocks[:, columns.B_BOX], g.sizes)
    for i in range(len(inside) - 1, 0, -1):
        up = arrays.elements[i, columns.E_PARENT]
        inside[up] += inside[i]
        below[up] += below[i]
    kinds, which = np.unique(arrays.words, return_inverse=True)
    g.words = kinds
    g.votes = np.bincount(which, weights=inside[arrays.words_of], minlength=len(kinds))
    g.voters = np.bincount(which, weights=below[arrays.words_of], minlength=len(kinds))
    return True


#: pieces that the pages of `features_digest` are made of
PIECES = ("<div class='post main'>", "</div>", "<p>", "</p>", "<a href=x>a link", "</a>", "<b>", "</b>", "<br>",
          "<ul><li>one, two; three", "</ul>", "<table><tr><td>1,234 $", "<td>", "</table>", "<h1>A page of words</h1>",
          "<h2>A heading</h2>", "<form><input><button>Go</button></form>", "<img alt=x>", "<nav id=menu>", "</nav>",
          "<article>", "</article>", "<main>", "</main>", "<footer class=sideBar>", "</footer>", "<blockquote>",
          "</blockquote>", "<ol class=comment-list><li>", "</ol>", "<p style='display:none'>", "<pre>x = 1;\n  y</pre>",
          "<dl><dt>T<dd>M</dl>", "<aside role=complementary>", "</aside>", "<p>A page of words. "
          + "It goes on, and on. " * 9,
          "\u6f22\u5b57\u3002", "2024-05-03", "word ", "Words. ")


def features_digest() -> bytes:
    """SHA-256 of all features that the code computes for 40 fixed pages. The file of the model's weights holds the
    digest that the code had when the model was trained. If the two differ, the features have changed, and the model
    must be trained again."""
    weights = table(np.array([fnv(w) for w in (b"post", b"main", b"menu", b"side")], np.uint32),
                    np.array([90, 40, -120, -60], np.int32))
    digest = hashlib.sha256("\n".join((*f.NAMES, *SECOND)).encode())
    for n in range(40):
        rng = random.Random(n)
        body = "".join(rng.choices(PIECES, k=20 + 4 * n))
        page = walk(serialised(f"<title>A page of words</title><body class=x>{body}"), weights)
        assert page is not None
        first = np.empty((len(page.blocks), f.FEATURES), np.int32)
        f.describe(page.elements, len(page.elements), page.blocks, len(page.blocks), page.text, first)
        chances = (np.arange(len(page.blocks)) * 389 % 1001).astype(np.int32)
        second = np.empty((len(page.blocks), len(SECOND)), np.int32)
        second_features(page.elements, len(page.elements), page.blocks, len(page.blocks),
                        structures(page.elements, page.blocks), chances, second)
        digest.update(first.astype("<i4").tobytes() + second.astype("<i4").tobytes())
    return digest.digest()


def folds_of(sites: list[str], folds: int, salt: str) -> dict[str, int]:
    order = sorted(set(sites), key=lambda s: hashlib.sha256(f"{salt}/{s}".encode()).hexdigest())
    return {site: n % folds for n, site in enumerate(order)}


def word_scores(found: str, gold: str) -> tuple[float, float, float]:
    """Returns (F1, precision, recall) of bags of words."""
    a, b = (Counter(WORD.findall(t.lower())) for t in (found, gold))
    common, sizes = (a & b).total(), (a.total(), b.total())
    return (2 * common / max(sum(sizes), 1), common / max(sizes[0], 1), common / max(sizes[1], 1))
