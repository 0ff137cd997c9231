"""No planted value of any kind of personal data is in anything that is shown: reports, logs (also those of child
processes and of Ray), samples, quarantine, dropped texts, manifests, plans, and the output of commands as text and
JSON. This holds with placeholders and with pseudonyms, and also if the recipe does not scrub. `tokenmill extract` is an
exception, because its purpose is to show a file as it is."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.cli.app import run_command
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from stages.text.normalize import simplify
from tests.corpus import sentences
from tests.e2e.report_site import STAGES
from tests.stages.pii_benchmark import GENERATED, cases

RECIPE = """
version: 1
sources: {{web: {{read: jsonl, path: in.jsonl, keep: [title, note]}}}}
datasets:
  raw: {{from: web, steps: []}}
  left: {{from: raw, steps: ["{module}:Fragile", {{gopher_quality: {{min_doc_words: 40}}}}]}}
  clean: {{from: raw, steps: ["{module}:Fragile", {{pii: {config}}}, {{gopher_quality: {{min_doc_words: 40}}}}]}}
  pick: {{from: raw, steps: [{{pii: {dropping}}}]}}
code: [./{module}.py]
run: {{max_error_rate: 90%}}
"""
ON = "ipv6: true, cards: true, ibans: true, phones: true, ids: [all], secrets: true, wallets: true, audit: true"
KEY = "the-key-of-this-test-0123456789abcdef"


def planted(folder: Path) -> list[str]:
    """Write in.jsonl. Returns the values that must not be seen, without the words around them."""
    rng = random.Random(2)
    prose = sentences()
    values: list[str] = []
    with (folder / "in.jsonl").open("w", encoding="utf-8") as out:
        for kind in GENERATED:
            for i, case in enumerate(cases(kind, 12, seed=9)[:12]):
                values += [re.sub(r"^.*?(?=[0-9]|$)", "", v) if kind == "ids" else v for v in case.values]
                words = " ".join(rng.sample(prose, 12 if i % 3 else 2))
                text = f"{'FRAGILE ' if i % 4 == 1 else ''}{case.text}\n{words}\n{case.text}"
                row = {"text": text, "title": case.text, "note": {"of": [case.text]}, "url": f"https://x.net/{kind}/{i}"}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
    return [v for v in values if len(v) > 6]


def seen(store: Path) -> str:
    """Return everything in the store as text, except the datasets that are kept unchanged on purpose. Tables are
    converted to text."""
    as_it_came = {p.stat().st_ino for name in ("raw", "left") for p in (store / "datasets" / name).iterdir()}
    said = []
    for path in sorted(p for p in store.rglob("*") if p.is_file() and p.stat().st_ino not in as_it_came):
        said.append(str(path.relative_to(store)))
        if path.suffix == ".parquet":
            said.append("\n".join(str(row) for row in pq.read_table(path).to_pylist()))
        else:
            said.append(path.read_bytes().decode("utf-8", "replace"))
    return "\n".join(said)


@pytest.mark.parametrize(("mode", "backend"), [
    ("placeholder", "inline"), pytest.param("pseudonym", "inline", marks=pytest.mark.slow),
    pytest.param("placeholder", "process", marks=pytest.mark.slow),
    pytest.param("placeholder", "ray", marks=[pytest.mark.slow, pytest.mark.ray])])
def test_no_planted_value_is_seen_anywhere(tmp_path, capfd, caplog, request, mode, backend):
    logs = ray_logs(request.getfixturevalue("ray_session")) if backend == "ray" else None
    values = planted(tmp_path)
    assert len(values) > 90
    (tmp_path / "key").write_text(KEY, encoding="utf-8")
    more = f", mode: pseudonym, key_file: {tmp_path / 'key'}" if mode == "pseudonym" else ""
    module = f"leaky_{mode}_{backend}"
    (tmp_path / f"{module}.py").write_text(STAGES, encoding="utf-8")
    config, dropping = f"{{{ON}{more}}}", f"{{{ON}{more}, drop: [ids, secrets]}}"
    (tmp_path / "r.yaml").write_text(RECIPE.format(module=module, config=config, dropping=dropping), encoding="utf-8")
    store = tmp_path / "store"
    run_recipe(load_recipe(str(tmp_path / "r.yaml"), [], allow_custom=True), str(store),
               make_backend=make_backend(backend, 1, None))
    printed = capfd.readouterr()
    shown = [seen(store), printed.out, printed.err, caplog.text]
    if logs is not None:
        written = [path for path in logs.rglob("*") if path.is_file()]
        assert written, "Ray keeps logs"
        shown += [path.read_bytes().decode("utf-8", "replace") for path in written]
    for name, which in (("raw", ()), ("left", ("--dropped",)), ("left", ("--quarantined",))) if not more else ():
        assert run_command(["inspect", name, "--store", str(store), "--json", "-n", "0", "--chars", "0", *which]) == 0
        shown.append(capfd.readouterr().out)
        assert len(shown[-1]) > 1000
    report = json.loads((store / "report.json").read_text(encoding="utf-8"))
    assert report["datasets"]["clean"]["pii"]["pii_cards"] > 0
    assert sum(report["datasets"]["left"]["quarantined"].values()) > 0, "errors hold texts, too"
    assert {"pii_ids", "pii_secrets"} <= set(re.findall(r"pii_\w+", json.dumps(report["datasets"]["pick"])))
    assert all(KEY not in what for what in shown)
    nothing_of(values, shown)


def ray_logs(ray) -> Path:
    """Return the folder to which the processes of the session's Ray write their logs."""
    return Path(ray._private.worker.global_worker.node.get_session_dir_path()) / "logs"


def nothing_of(values: list[str], shown: list[str]) -> None:
    for what in shown:
        leaked = [v for v in values if v in what]
        assert leaked == [], [what[max(0, what.index(v) - 200):what.index(v) + 60] for v in leaked[:3]]


COMMANDS = """
version: 1
sources: {web: {read: jsonl, path: in.jsonl, keep: [title]}}
datasets:
  raw: {from: web, steps: []}
  deduped: {from: raw, steps: [{minhash: {verify: 0.5}}]}
tokenizer: {train: {kind: bpe, vocab: 400, from: raw}}
shards: {web: {from: raw, longest: 64, val: 0%}}
"""


@pytest.mark.slow
def test_commands_print_no_planted_value(tmp_path, capfd):
    """Each value stands in two documents that are nearly the same, so that one is a duplicate of the other."""
    rng, values, prose = random.Random(5), [], sentences()
    with (tmp_path / "in.jsonl").open("w", encoding="utf-8") as out:
        for kind in GENERATED:
            for case in cases(kind, 4, seed=11)[:2]:
                values += [re.sub(r"^.*?(?=[0-9]|$)", "", v) if kind == "ids" else v for v in case.values]
                words = " ".join(rng.sample(prose, 14))
                for text in (f"{words}\n{case.text}", f"{words}\n{case.text}\nOnce more: {case.text}"):
                    out.write(json.dumps({"text": text, "title": case.text}, ensure_ascii=False) + "\n")
    values = [v for v in values if len(v) > 6]
    recipe, store = tmp_path / "r.yaml", tmp_path / "store"
    recipe.write_text(COMMANDS, encoding="utf-8")
    shown: list[str] = []

    def run(*words: object, rc: int = 0) -> str:
        assert run_command([str(word) for word in words]) == rc, words
        printed = capfd.readouterr()
        shown.extend((printed.out, printed.err))
        return printed.out

    run("plan", recipe, "--store", store, "--json")
    run("plan", recipe, "--sample", "50%", "--workers", 1, "--store", store)
    run("run", recipe, "--store", store, "--backend", "inline", "--json")
    run("plan", recipe, "--store", store, "--why", "deduped", "--set", "datasets.deduped.steps.minhash.verify=0.6")
    for as_json in ((), ("--json",)):
        run("list", "--store", store, *as_json)
        run("inspect", "raw", "--store", store, "-n", 0, "--chars", 0, *as_json)
        run("shards", "head", store / "shards" / "web" / "split=train", "-n", 0, "--chars", 0, *as_json)
    removed = [json.loads(line)["id"] for line in
               run("inspect", "deduped", "--dropped", "--store", store, "-n", 0, "--json").splitlines()]
    assert len(removed) >= 10
    for id in removed:
        for as_json in ((), ("--json",)):
            assert "once more" in run("dedup", "explain", id, "--store", store, *as_json).lower()
    assert len("".join(shown)) > 25_000
    nothing_of(values, shown)
    # as deduplication sees them: without punctuation, digits as 0
    nothing_of([v for v in map(simplify, values) if any(map(str.isalpha, v))], shown)
