"""A small crawl for the tests of the report, with everything that a report can show: sources, recipe, and one finished
run."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import duckdb

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from tests.corpus import Page, pages, sentences, warc, write_warcs

#: e-mail addresses planted in places that a report shows; no report may contain them
SECRETS = ("dropped.person@leak.example", "url.person@leak.example", "coded.person@leak.example",
           "title.person@leak.example", "kept.person@leak.example", "failed.person@leak.example",
           "file.person@leak.example")
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"
EVIL_URL = "javascript:alert('x')//\"><b onmouseover=alert(3) c=d"

STAGES = '''
from stages.stage import Stage


class Fragile(Stage):
    """Fails on some documents, with their text in the message."""

    name = "fragile"

    def process(self, doc):
        if "FRAGILE" in doc.text:
            raise ValueError(doc.text)
'''

RECIPE = """
version: 1
sources:
  web: {read: warc, path: crawl/*.warc.gz}
  docs: {read: text, path: docs}
  notes: {read: jsonl, path: notes/*.jsonl}
datasets:
  extracted: {from: web, steps: [{html: {engine: resiliparse}}]}
  clean: {from: extracted, steps: [c4, gopher_repetition, gopher_quality, pii]}
  plain: {from: notes, steps: ["report_stages:Fragile", pii]}
  deduped: {from: [clean, docs, plain], steps: [{exact: {}}, {minhash: {verify: 0.75}}], priority: [docs, clean, plain]}
tokenizer: {train: {kind: bpe, vocab: 800, from: deduped, sample: 200KB}}
shards:
  web: {from: deduped, where: {source: web}, longest: 512, val: 5%}
  rest: {from: deduped, where: {source: [docs, notes]}, longest: 512, val: 5%}
curriculum:
  seed: 3
  total: 140k
  phases:
    - {name: stable, until: 70%, sequence: 128, batch: 1024, mix: {web: 80, rest: 20}, on_exhausted: repeat}
    - {name: anneal, until: 100%, sequence: 256, mix: {web: 30, rest: 70}, lr: decay}
train: {model: {layers: 1, width: 32, heads: 2, kv_heads: 1, ffn: 64, qk_norm: true}}
run: {partition: 150KB, max_error_rate: 50%}
code: [./report_stages.py]
"""


@dataclass(frozen=True)
class Site:
    """What the inputs contain, and where the run is."""

    top: Path
    store: Path
    run: str
    web_files: list[Path]
    responses: list[Page]               # whole ones, of all WARC files
    docs: list[str]
    notes: list[str]                    # texts of the good lines

    @property
    def folder(self) -> Path:
        return self.store / "runs" / self.run

    @property
    def report(self) -> dict:
        return json.loads((self.folder / "report.json").read_text())

    def sql(self, query: str) -> list[tuple]:
        """Return the rows of an SQL query. {kept:NAME}, {dropped:NAME} and {quarantine:NAME} in the query stand for the
        dataset's published parts."""
        for word, folder in (("kept", "datasets"), ("dropped", "dropped"), ("quarantine", "quarantine")):
            while f"{{{word}:" in query:
                name = query.partition(f"{{{word}:")[2].partition("}")[0]
                parts = f"{self.store}/{folder}/{name}/part-*.parquet"
                query = query.replace(f"{{{word}:{name}}}", f"read_parquet('{parts}', union_by_name=true)")
        return duckdb.sql(query).fetchall()

    def plan(self) -> dict:
        """Return the contents of plan.json. Each node has its tasks' keys added, under `keys`."""
        plan = json.loads((self.folder / "plan.json").read_text())
        for node in plan["nodes"]:
            node["keys"] = [k.hex() for k, in duckdb.execute(
                f"select key from '{self.folder}/tasks.parquet' where node = ?", [node["name"]]).fetchall()]
            assert len(node["keys"]) == node["tasks"]
        return plan

    def records(self) -> dict[str, dict]:
        """Return {key: commit record}, read from the files of the log."""
        return {r["key"]: r for p in sorted((self.store / "log").glob("0*.json"))
                for r in json.loads(p.read_text())["body"].get("records", ())}


def build(top: Path) -> Site:
    """Write the sources, and run the recipe in this process."""
    rng, prose = random.Random(5), sentences()
    found = write_warcs(top / "crawl", 260, 3)
    planted = planted_pages(prose)
    (top / "crawl" / "planted.warc.gz").write_bytes(warc(planted))
    whole = pages(12, seed=9)
    data = warc(whole)
    (top / "crawl" / "torn.warc.gz").write_bytes(data[:-150])        # inside the last record
    docs: list[str] = []
    (top / "docs").mkdir()
    for i in range(40):
        near = docs and rng.random() < 0.3
        # no step scrubs this source, so the report must
        docs.append(rng.choice(docs) + " One more sentence." if near else
                    f"Ask {SECRETS[4]} from 8.8.4.4. " + " ".join(rng.sample(prose, 25)))
        (top / "docs" / f"d{i:02d}.txt").write_text(docs[i])
    (top / "docs" / f"{SECRETS[6]}.txt").write_bytes(b"")
    notes, lines = [], []
    for i in range(30):                                              # more than half repeat a document of `docs`
        text = docs[i % 10] if i < 20 else f"Note {i}. " + " ".join(rng.sample(prose, 12))
        notes.append(text)
        lines.append(json.dumps({"text": text, "url": f"https://notes.example/{i}"}))
    twin = f"{SECRETS[4]} wrote this on 8.8.4.4: " + " ".join(rng.sample(prose, 20))
    for text in (twin + " And something at the end, to be longer.", twin, f"FRAGILE {SECRETS[5]} here"):
        notes.append(text)
        lines.append(json.dumps({"text": text, "url": f"https://notes.example/?q={SECRETS[2].replace('@', '%40')}"}))
    lines += ['{"text": "broken ' + SECRETS[5], json.dumps({"body": SECRETS[5]}), ""]
    (top / "notes").mkdir()
    (top / "notes" / f"{SECRETS[6]}.jsonl").write_text("\n".join(lines) + "\n")
    (top / "report_stages.py").write_text(STAGES)
    (top / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(top / "recipe.yaml", [], allow_custom=True)
    summary = run_recipe(recipe, str(top / "store"), make_backend=make_backend("inline", 1, None))
    return Site(top, top / "store", summary.run, sorted((top / "crawl").iterdir()), [*found, *planted, *whole[:-1]],
                docs, notes)


def planted_pages(prose: list[str]) -> list[Page]:
    """Return pages that the step c4 drops because of 'lorem ipsum'. They have e-mail addresses and hostile markup in
    text, title and URL."""
    rng = random.Random(8)

    def page(url: str, first: str, title: str) -> Page:
        body = "".join(f"<p>{' '.join(rng.sample(prose, 6))}</p>" for _ in range(4))
        escaped = first.replace("<", "&lt;").replace(">", "&gt;")
        return Page(url, f"<html><head><title>{title}</title></head><body><article><p>{escaped} This is the first "
                         f"sentence of the page and it says lorem ipsum to be dropped.</p>{body}</article></body>"
                         f"</html>",
                    "planted")

    return [page("https://a.example/?u=" + SECRETS[1], f"Write to {SECRETS[0]} at once.", f"From {SECRETS[3]}"),
            page("https://b.example/?u=" + SECRETS[2].replace("@", "%40"), SCRIPT, SCRIPT),
            page(EVIL_URL, f"{SCRIPT} and \"quotes\" 'too' & more.", "t")]
