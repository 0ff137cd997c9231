"""`tokenmill dedup`: shows which documents and passages deduplications removed, and why. The module `dedup_index` has
the commands for indexes of the documents that they kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.base.files import replacing
from pipeline.base.humanize import plural
from pipeline.base.visible import json_text, visible
from pipeline.base.word_diff import rows as paragraph_pairs
from pipeline.cli.compare import stacked
from pipeline.cli.dedup_index import forget, index, merge
from pipeline.cli.errors import UserError, writing
from pipeline.cli.inspect import check_published, rows
from pipeline.cli.options import (
    JsonOpt,
    LimitOpt,
    StoreOpt,
    open_store,
)

if TYPE_CHECKING:
    from pipeline.store.fs import Store
    from stages.dedup.explain import Explanation

#: characters of two texts that are compared word by word
COMPARED = 20_000
DatasetArg = Annotated[str, typer.Argument(metavar="DATASET", help="A dataset of the store.")]


def register(app: typer.Typer) -> None:
    dedup = typer.Typer(help="Look at duplicates, and make indexes for later documents.", no_args_is_help=True,
                        rich_markup_mode=None)
    dedup.callback()(lambda: None)
    dedup.command("explain")(explain)
    dedup.command("stats")(stats)
    dedup.command("index")(index)
    dedup.command("merge")(merge)
    dedup.command("forget")(forget)
    app.add_typer(dedup, name="dedup")


def explain(id: Annotated[str, typer.Argument(metavar="ID", help="Id of a removed or cut document, or its beginning.")],
            dataset: Annotated[str, typer.Option(metavar="NAME", help="Dataset that dropped or kept the "
                                                                "document.")] = "deduped",
            store: StoreOpt = "store",
            html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write the explanation as a "
                                                      "page. Words in which the two texts differ are marked.")] = None,
            json_texts: JsonOpt = False) -> None:
    """Explain why a document was removed as a duplicate, or what was cut out of it.

    Names the document that was kept in its place, and says how similar the two are. Their texts are shown as one,
    paragraph by paragraph: words in [-...-] are only in the removed text, words in {+...+} only in the kept one. The
    texts are compared with the settings in the recipe of the latest run.

    If passages were cut out of the document, they are listed, each with the document that keeps it.

    \b
    Examples:
      tokenmill dedup explain 3f2a91c0 --store store
      tokenmill dedup explain 3f2a91c0 --html pair.html
    """
    from stages.dedup.explain import explain as compare
    from stages.scrub.pii import scrub_text
    from stages.scrub.rows import mask

    at = open_store(store)
    removed = _document(at, dataset, id)
    verdict: dict[str, Any] = json.loads(removed["meta"] or "{}").get(removed.get("stage")) or {}
    if not verdict.get("kept"):
        _explain_cuts(at, dataset, removed, html, json_texts)
        return
    place, kept = _kept(at, dataset, verdict["kept"])
    config = minhash_config(at, dataset)
    # personal data is masked first, because the differences are shown without punctuation, and personal data cannot be
    # recognised in such text
    texts = scrub_text(removed["text"]), scrub_text(kept["text"])
    comparison = compare(*texts, config, languages=(removed["language"] or "", kept["language"] or ""),
                         recorded=verdict.get("similarity"))
    for row in (removed, kept):
        mask(row)
    heads = [_one_line(f"{what:8} {row['id']}  {row['source']}  {row['url'] or ''}")
             for row, what in ((removed, "removed"), (kept, "kept" if place == dataset else f"kept in {place}"))]
    verdict_line = _verdict_line(removed["reason"], comparison)
    shown = visible(texts[0][:COMPARED]), visible(texts[1][:COMPARED])
    if html is not None:
        from pipeline.report.pair_page import render

        _write_page(html, render(heads, verdict_line, *shown))
    if json_texts:
        document = {"removed": removed["id"], "kept": kept["id"], "kept_in": place, "reason": removed["reason"],
                    "config": config or {}, **comparison.to_json()}
        typer.echo(json_text(document))
        return
    for head in heads:
        typer.echo(visible(head))
    typer.echo(visible(verdict_line))
    for line in stacked(paragraph_pairs(*shown)):
        typer.echo(line)


def _kept(store: Store, dataset: str, id: str) -> tuple[str, dict[str, Any]]:
    """Find the document with the id `id`, which was kept when a duplicate in `dataset` was removed. It is in this
    dataset, or in a dataset with which this one was compared. Returns (name of the dataset that has it, the document).
    Raises UserError when it is in neither."""
    from pipeline.report.removals import compared_with

    old, folders = compared_with(store, dataset)
    for place in (dataset, *old):
        for kind in ("datasets", "dropped"):
            if (row := next(rows(store, kind, place, None, id), None)) is not None:
                return place, row
    if folders:
        raise UserError(f"the document {id}, which was kept in its place, is not in this store but in the index "
                        f"{' or '.join(folders)}; look at it in the store that the index was made from")
    raise UserError(f"the document {id}, which was kept in its place, is not in {dataset} any more, because the store "
                    f"has changed since; run the recipe again")


def _document(store: Store, dataset: str, id: str) -> dict[str, Any]:
    """Return the first document of a dataset whose id begins with `id`. The documents that the dataset dropped are
    searched first, then those that it kept. Raises UserError when there is none."""
    for kind in ("dropped", "datasets"):
        if (row := next(rows(store, kind, dataset, None, id), None)) is not None:
            return row
    raise UserError(f"{dataset} has no document {id}, neither dropped nor kept; `tokenmill inspect {dataset} "
                    f"--dropped` lists some")


def _explain_cuts(store: Store, dataset: str, row: dict[str, Any], html: Path | None, json_texts: bool) -> None:
    """Show the passages that deduplications have cut out of a document: on the terminal and, if `html` is given, as a
    page in this file."""
    from pipeline.report.cuts import explain_cuts
    from stages.scrub.rows import mask

    steps = explain_cuts(store, dataset, row)
    stage, reason = row.get("stage"), row.get("reason")
    if not steps:
        fate = f"was dropped by {stage} ({reason}), not as a duplicate" if stage else f"was kept in {dataset}"
        raise UserError(f"{row['id']} {fate}, and no deduplication of the latest run cut it")
    mask(row, 1)
    head = f"{row['id']}  {row['source']}  {row['url'] or ''}".rstrip()
    fate = f"dropped by {stage}: {reason}" if stage else f"kept in {dataset}"
    if html is not None:
        from pipeline.report.pair_page import render_cuts

        _write_page(html, render_cuts(head, fate, steps))
    if json_texts:
        typer.echo(json_text({"id": row["id"], "source": row["source"], "url": row["url"], "stage": stage,
                              "reason": reason, "cuts": steps}))
        return
    typer.echo(visible(f"{head}\n{fate}"))
    for step in steps:
        more = step["passages"] - len(step["listed"])
        typer.echo(visible(f"\n{step['step']} cut {plural(step['passages'], 'passage')}, {step['bytes']:,} bytes"
                           + (f"; the first {len(step['listed'])} of them:" if more else ":")))
        for passage in step["listed"]:
            typer.echo(visible(f"  {passage['reason']}, {passage['bytes']:,} bytes from byte {passage['start']:,} on"
                               f"{_keeper(passage['kept'])}\n    {passage['beginning'] or _GONE}"))


_GONE = "(the store no longer has the text before the cuts)"


def _keeper(kept: dict[str, Any] | None) -> str:
    """Return text for the end of a line about a cut passage: the id, source and URL of the document that keeps the
    passage. Returns "" if this document is not known (`kept` is None)."""
    if kept is None:
        return ""
    place = "(not in the dataset any more)" if kept["source"] is None else f"{kept['source']}  {kept['url'] or ''}"
    return f"; kept in {kept['id']}  {place}".rstrip()


def _write_page(path: Path, page: str) -> None:
    with writing(path, "--html"), replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _verdict_line(reason: str, comparison: Explanation) -> str:
    """Return a line that says how similar the text of a removed document is to the text that was kept in its place, and
    which thresholds the deduplication has. `reason` is the reason for which the document was removed."""
    recorded = comparison.recorded_similarity
    return (f"{reason}: similarity {comparison.similarity:.4f}"
            + (f" ({recorded:.4f} recorded{', without boilerplate' if comparison.boilerplate else ''})"
               if recorded else "")
            + (f", threshold {comparison.threshold}" if comparison.threshold else "")
            + (f", {comparison.contained:.4f} of the removed one contained, threshold {comparison.containment}"
               if comparison.containment else "")
            + f"; {comparison.common_ngrams:,} of {comparison.removed_ngrams:,} n-grams in common, "
              f"{comparison.shared_bands} of {comparison.bands} bands"
            + ("; the texts are the same but for white space and case" if comparison.equal_text else ""))


def minhash_config(store: Store, dataset: str) -> dict[str, Any] | None:
    """Return the settings of the step `minhash` (a deduplication) for this dataset, in the recipe of the latest run.
    Returns None when the dataset has no such step."""
    from pipeline.plan.changes import latest_run, run_recipe_of

    run = latest_run(store)
    steps = run_recipe_of(store, run).get("datasets", {}).get(dataset, {}).get("steps", []) if run else []
    return next((step["minhash"] for step in steps if isinstance(step, dict) and "minhash" in step), None)


def stats(dataset: DatasetArg = "deduped", store: StoreOpt = "store",
          step: Annotated[str | None, typer.Option(metavar="STEP", help="Only what this step did, e.g. minhash "
                                                   "(default: all deduplications).")] = None,
          limit: LimitOpt = 20, json_lines: JsonOpt = False) -> None:
    """Count what the deduplications of a dataset removed or cut.

    Counts removed documents by step, by language, by pair of sources, and by domain. Warns of domains that lost more
    than half of their documents. Shows the largest groups of duplicates with the words that differ. Counts what was cut
    out of documents by source, by pair of sources, by domain, and by the document that keeps the passage. Warns of
    sources and domains that lost more than half of their text.

    \b
    Examples:
      tokenmill dedup stats deduped --store store
      tokenmill dedup stats deduped --step minhash -n 5 --json
    """
    from pipeline.report.cuts import cut_stats
    from pipeline.report.removals import removal_stats

    at = open_store(store)
    check_published(at, "datasets", dataset)
    check_published(at, "dropped", dataset)
    result = removal_stats(at, dataset, step, most=limit or 10**9)
    result["cuts"] = cut_stats(at, dataset, step, most=limit or 10**9)
    if step is not None and not result["removed"] and not result["cuts"]:
        raise UserError(f"--step {step}: this step removed no duplicate from {dataset} and cut nothing; leave it out "
                        f"to see all steps")
    typer.echo(json_text(result) if json_lines else visible("\n".join(_lines(result))))


def _lines(result: dict[str, Any]) -> list[str]:
    """Format the counts of removed documents, the result of `removal_stats`, as lines for a terminal."""
    lines = [f"{result['dataset']}: {result['kept']:,} documents kept, {result['removed']:,} removed as duplicates in "
             f"{result['groups']:,} groups"]

    def table(title: str, rows: list[tuple[int, str]]) -> None:
        lines.extend(_table(title, rows))

    table("removed by", [(r["docs"], f"{r['stage']}: {r['reason']}") for r in result["by_reason"]])
    table("in language", [(n, language or "(unknown)") for language, n in result["by_language"].items()])
    table("by source  →  source of the kept document",
          [(p["docs"], f"{p['removed']}  →  {p['kept']}") for p in result["pairs"]]
          + ([(result["unknown"], "the kept document was dropped later")] if result["unknown"] else []))
    for title, key in (("from a domain", "domains"), ("ALARM: domains that lost more than half", "alarms")):
        table(title, [(d["removed"], f"of {d['of']:,}  {d['domain']}") for d in result[key]])
    table("groups by size", [(n, f"{2**int(bin):,} to {2**(int(bin) + 1) - 1:,} documents")
                             for bin, n in result["sizes"].items()])
    for group in result["largest"]:
        place = _one_line(f"  {group['kept']['source']}  {group['kept']['url'] or ''}") if group["kept"] else ""
        lines += ["", f"{group['size']:,} documents like {group['kept_id']}{place}"]
        for member in group["removed"]:
            similarity = f"  similarity {member['similarity']:.3f}" if member["similarity"] else ""
            lines.append(_one_line(f"  - {member['id']}  {member['source']}  {member['url'] or ''}") + similarity)
            if member["diff"]:
                lines.append("    " + " ".join(_MARK[kind].format(words) for kind, words in member["diff"]))
    return lines + (_cut_lines(result["cuts"]) if result["cuts"] else [])


def _table(title: str, rows: list[tuple[int, str]]) -> list[str]:
    return ["", title, *(f"  {n:>12,}  {text}" for n, text in rows)] if rows else []


def _cut_lines(cuts: dict[str, Any]) -> list[str]:
    """Format the counts of passages cut out of documents, the result of `cut_stats`, as lines for a terminal."""
    lines = ["", f"{cuts['docs']:,} documents cut: {cuts['passages']:,} passages, {cuts['bytes']:,} bytes"]
    lines += _table("bytes cut by", [(row["bytes"], f"{row['step']}: {row['reason']}, {row['passages']:,} passages")
                                     for row in cuts["by_reason"]])
    lines += _table("bytes cut by source  →  source of the document that keeps the passage",
                    [(pair["bytes"], f"{pair['cut']}  →  {pair['kept']}") for pair in cuts["pairs"]]
                    + ([(cuts["unknown"], "the document that keeps the passage is not known")]
                       if cuts["unknown"] else []))
    for title, key in (("bytes cut from a source", "sources"), ("bytes cut from a domain", "domains"),
                       ("ALARM: lost more than half of their text to cuts", "alarms")):
        lines += _table(title, [(row["bytes"], f"of {row['of']:,}  " + (
            row["domain"] if "domain" in row else row["source"])) for row in cuts[key]])
    return lines + _table("bytes of cut passages by the document that keeps them", [
        (row["bytes"], f"{row['passages']:,} passages  {row['id']}  {row['source'] or '(gone)'}  {row['url'] or ''}"
         .rstrip()) for row in cuts["keepers"]])


def _one_line(text: str) -> str:
    """Return a text on one line. A URL with a line feed could otherwise print a line that looks like output of this
    program."""
    return text.rstrip().replace("\n", "\\n")


_MARK = {"both": "{}", "kept": "{{+{}+}}", "removed": "[-{}-]", "cut": "…"}
