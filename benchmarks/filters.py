"""Measure the cost of FineWeb's filters alone, here and in datatrove 0.10.1: each gets a text and gives a verdict.

    python benchmarks/filters.py [--texts FILE.jsonl] [--work DIR] [--repeat N] [--limit N] [--chain-only]

Both sides judge the same texts, by default those that datatrove extracts from the WARC file of
fineweb_vs_datatrove.py. Two chains of filters run in the recipe's order; a text that one filter drops does not reach
the next. Then each filter runs alone on every text. Each chain or filter runs in a fresh process, the two sides in
turn, and goes over all texts twice:
  cold  the first pass: our cache of words is empty except for one sentence, so every word is new once;
  warm  the second pass over the same texts: every word is known.
datatrove has no such cache; its second pass is compared with our second. The figures are CPU seconds of the process
(process_time) per text, as medians of the repeats. `setup` is separate. It covers loading models, lists and compiled
kernels, and the first document, because both sides load some things only when they need them. The same runs compare
the verdicts, reasons and edited texts of both sides (fineweb_vs_datatrove.py lists the expected differences).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from fineweb_vs_datatrove import DATA, ROOT, Bench, chained, rows
from our_fineweb import NAMES

RULES = NAMES[2:6]
#: the chains: all filters, and the four rules about text without URL, language model and personal data
CHAINS = {"all seven in a row": NAMES, "the four rules in a row": RULES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="JSON lines of id, url, text; default: what datatrove extracts")
    parser.add_argument("--input", type=Path, default=DATA / "bench" / "realweb.warc.gz", help="WARC file")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "fineweb_vs_datatrove", help="scratch folder")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each row of filters and side")
    parser.add_argument("--limit", type=int, help="only so many texts")
    parser.add_argument("--chain-only", action="store_true", help="not each filter alone")
    parser.add_argument("--model", type=Path, help="lid.176.ftz; default: where `tokenmill fetch lid176` puts it")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0",
                   "HF_HOME": str(options.work / "hf"), "PYTHONPATH": str(ROOT)}
    from stages.scoring.models import lid176

    bench = Bench(options.input.resolve(), options.work.resolve(), str((options.model or lid176()).resolve()))
    texts = options.texts or options.work / "texts.peer.jsonl"
    if not texts.exists():
        bench.theirs("texts", bench.warc, texts)
    if options.limit:
        part = options.work / f"texts.first-{options.limit}.jsonl"
        with open(texts, encoding="utf-8") as lines, open(part, "w", encoding="utf-8") as f:
            f.writelines(line for _, line in zip(range(options.limit), lines))
        texts = part
    texts, total = texts.resolve(), len(rows(texts))
    print(f"{total} texts; CPU ms a text; load {os.getloadavg()[0]:.1f}")
    print(f"  {'':26s}{'datatrove':>18s}{'ours':>18s}{'ratio':>16s}   setup s     differ")
    print(f"  {'':26s}" + f"{'cold':>9s}{'warm':>9s}" * 2 + f"{'cold':>8s}{'warm':>8s}")
    result = {}
    for label, names in (CHAINS if options.chain_only else {**CHAINS, **{name: (name,) for name in NAMES}}).items():
        found: dict[str, list[dict]] = {"datatrove": [], "ours": []}
        for _ in range(options.repeat):
            for side, call in (("datatrove", bench.theirs), ("ours", bench.ours)):
                out = options.work / f"filters.{side}.json"
                call("filters", texts, out, bench.model, *names)
                found[side].append(json.loads(out.read_text()))
        result[label] = line(label, found, total)
    (options.work / "filters.json").write_text(json.dumps(result, indent=1))
    return 0


def line(label: str, found: dict[str, list[dict]], total: int) -> dict[str, object]:
    """Print the costs of one chain or filter on both sides, and the number of texts that they judge differently.
    Returns the same figures."""
    out: dict[str, object] = {side: {
        "cold_ms": 1e3 * statistics.median(run["seconds"][0] for run in runs) / total,
        "warm_ms": 1e3 * statistics.median(run["seconds"][1] for run in runs) / total,
        "setup": statistics.median(run["setup"] for run in runs)} for side, runs in found.items()}
    peer, ours = out["datatrove"], out["ours"]
    out["cold"], out["warm"] = (peer[key] / ours[key] for key in ("cold_ms", "warm_ms"))
    out["differ"] = sum(judgement(*a) != judgement(*b)
                        for a, b in zip(found["datatrove"][-1]["verdicts"], found["ours"][-1]["verdicts"]))
    print(f"  {label:26s}" + "".join(f"{side[key]:9.3f}" for side in (peer, ours) for key in ("cold_ms", "warm_ms"))
          + f"{out['cold']:8.1f}{out['warm']:8.1f}   {peer['setup']:4.1f} {ours['setup']:4.1f}   {out['differ']:5d}",
          flush=True)
    return out


def judgement(reason: str | None, text: str) -> tuple[str | None, str]:
    return chained(reason), text


if __name__ == "__main__":
    sys.exit(main())
