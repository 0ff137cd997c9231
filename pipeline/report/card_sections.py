"""Writes the sections of the dataset card, as lines of Markdown. Each function takes the report. Functions that
describe what the recipe does also take the recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.base.humanize import percent, plural, size
from pipeline.report.markdown import block, code, plain, table
from pipeline.report.recipe_words import inputs_of, steps_of, unscrubbed
from pipeline.report.totals import shared
from pipeline.store.tombstones import TAKEN_DOWN

#: most rows of a table, names in a list, and lines of the recipe
ROWS, NAMES, RECIPE_LINES = 50, 20, 400
#: DOMINANT: a source with more than this share of the kept text is named as a limitation. SMALL: a larger share of
#: documents of unknown language, or of unreadable records, is named as a limitation
DOMINANT, SMALL = 0.5, 0.01

#: sentence for a corpus in which several final datasets have documents of the same source
IN_SEVERAL = "Documents may be in several of these datasets, and then count in each."

Report = Mapping[str, Any]


def listed(names: Iterable[str]) -> str:
    """Return the first NAMES of the names as text, separated by commas, and the number of further names."""
    all_names = list(names)
    omitted = len(all_names) - NAMES
    return ", ".join(map(plain, all_names[:NAMES])) + (f" and {omitted:,} more" if omitted > 0 else "")


def share(part: float, whole: float) -> str:
    return percent(part / whole) if whole else "–"


def more(rows: Sequence[Any], what: str) -> list[str]:
    """Return the lines of a sentence that says how many of `rows` are missing in a table of the first ROWS; [] if none
    is missing. `what` is the word for a row."""
    omitted = len(rows) - ROWS
    return [f"The largest {ROWS} are shown; {plural(omitted, what)} more in `report.json`.", ""] if omitted > 0 else []


def language_counts(document: Report) -> dict[str, int]:
    """Return the number of documents in the final datasets (from which no other dataset is made) by language, the most
    frequent language first. Documents whose language was not identified are counted under ''."""
    counts: dict[str, int] = {}
    for name in document["names"]["final"]:
        for by_language in document["datasets"][name]["languages"].values():
            for language, docs in by_language.items():
                counts[language] = counts.get(language, 0) + docs
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def licence_counts(document: Report) -> dict[str, int]:
    """Return the number of documents in the final datasets (from which no other dataset is made) by the licence that
    they state. The most frequent licence comes first."""
    counts: dict[str, int] = {}
    for name in document["names"]["final"]:
        for by_licence in document["licences"].get(name, {}).values():
            for licence, docs in by_licence.items():
                counts[licence] = counts.get(licence, 0) + docs
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def kept_docs(document: Report) -> int:
    return sum(document["datasets"][name]["docs"] for name in document["names"]["final"])


def sources(document: Report, recipe: Mapping[str, Any]) -> list[str]:
    by_source = document["totals"]["by_source"]
    names = sorted(by_source, key=lambda name: (-by_source[name]["read"], document["names"]["sources"].index(name)))
    readers, several = recipe.get("sources", {}), shared(document)
    rows = [[plain(name), plain(readers.get(name, {}).get("read", "")), f"{row['files']:,}", size(row["bytes"]),
             f"{row['read']:,}", f"{row['kept']:,}", share(row["kept"], 0 if name in several else row["read"]),
             f"{row['tokens']:,}"]
            for name in names[:ROWS] for row in [by_source[name]]]
    all_of = document["totals"]
    rows.append(["**all**", "", f"{all_of['files']:,}", size(all_of["bytes"]), f"{all_of['read']:,}",
                 f"{all_of['kept']:,}", share(all_of["kept"], 0 if several else all_of["read"]),
                 f"{all_of['tokens']:,}"])
    head = ["source", "reader", "files", "size", "documents read", "kept", "share kept", "tokens"]
    return ["## Sources", "", *table(head, rows, 2), *more(names, "source"),
            *([f"No share is given where several datasets have documents of a source. {IN_SEVERAL}", ""]
              if several else [])]


def steps(document: Report, recipe: Mapping[str, Any]) -> list[str]:
    """Write the section on how the corpus was made: the steps of each dataset in words, with their thresholds."""
    lines = ["## How it was made", ""]
    if not recipe:
        return [*lines, "The recipe of this run is not known.", ""]
    for dataset in document["names"]["datasets"]:
        chain, section = steps_of(recipe, dataset), recipe["datasets"].get(dataset, {})
        lines += [f"### {plain(dataset)}", "", f"Made from {listed(inputs_of(recipe, dataset))}"
                  + "".join(f", only documents whose {plain(k)} is {listed(v if isinstance(v, list) else [v])}"
                            for k, v in (section.get("where") or {}).items())
                  + (f"; of duplicates the one from the first of {listed(section['priority'])} stays"
                     if section.get("priority") else "") + ("." if chain else ", without any step."), ""]
        for number, step in enumerate(chain, 1):
            lines.append(f"{number}. **{plain(step.name)}**" + (f": {plain(step.does)}." if step.does else
                                                                ": a step of the recipe's author."))
            lines += [f"   - {plain(meaning)}: {plain(value)}" for meaning, value in step.settings]
        lines += [""] if chain else []
    return lines


def drops(document: Report) -> list[str]:
    """Write the section on what was dropped and why. For each dataset it lists the reasons, with their share of the
    judged documents. A judged document was kept or dropped, but not quarantined."""
    lines = ["## What was dropped and why", ""]
    for dataset in document["names"]["datasets"]:
        section = document["datasets"][dataset]
        judged = section["docs"] + sum(r["docs"] for r in section["reasons"])
        rows = [(r["stage"], r["reason"], r["docs"], share(r["docs"], judged)) for r in section["reasons"]]
        rows += [("quarantine", reason, docs, "–") for reason, docs in
                 sorted(section["quarantined"].items(), key=lambda item: (-item[1], item[0]))]
        failed = sum(section["quarantined"].values())
        lines += [f"**{plain(dataset)}** kept {section['docs']:,} of {plural(judged, 'document')} that were judged "
                  f"({share(section['docs'], judged)}){f'; {failed:,} more were quarantined' if failed else ''}.", ""]
        lines += table(["step", "reason", "documents", "share of the judged"],
                       [[plain(stage), plain(reason), f"{docs:,}", of] for stage, reason, docs, of in rows[:ROWS]], 2)
        lines += more(rows, "reason")
        if taken_down := section["quarantined"].get(TAKEN_DOWN):
            lines += [f"Of the quarantined ones, {plural(taken_down, 'document')} had been taken down: somebody asked "
                      "for it.", ""]
    totals = document["totals"]
    bad = sum(totals["unreadable"].values())
    if bad or totals["bad_files"]:
        why = ", ".join(f"{plain(reason)} {n:,}" for reason, n in sorted(totals["unreadable"].items()))
        lines += [f"Before that, {bad:,} of {plural(totals['records'], 'record')} could not be read"
                  + (f" ({why})" if why else "") + (f", and {plural(totals['bad_files'], 'file')} not or only in part"
                                                    if totals["bad_files"] else "") + ".", ""]
    return lines


def languages(document: Report) -> list[str]:
    counts = language_counts(document)
    total = sum(counts.values())
    lines = ["## Languages", ""]
    if not any(counts):
        return [*lines, "Not known: no step of the recipe identifies languages, and the sources name none.", ""]
    rows = [[plain(name) if name else "not identified", f"{docs:,}", share(docs, total)]
            for name, docs in list(counts.items())[:ROWS]]
    return [*lines, *table(["language", "documents", "share"], rows), *more(list(counts), "language")]


def duplicates(document: Report) -> list[str]:
    lines = ["## Duplicates", ""]
    if not document["duplicates"]:
        return [*lines, "No step of the recipe removes duplicates.", ""]
    rows = []
    for dup in document["duplicates"][:ROWS]:
        removed = sum(n for by in dup["removed"].values() for n in by.values())
        compared = sum(dup["looked_at"].values())
        largest = f"{dup['max_cluster']:,}" if dup.get("max_cluster") is not None else "–"
        rows.append([plain(dup["dataset"]), plain(dup["step"]), f"{compared:,}", f"{removed:,}",
                     share(removed, compared), largest])
    cuts = [[plain(dup["dataset"]), plain(dup["step"]), f"{dup['cut']['docs']:,}",
             f"{sum(dup['cut']['cuts'].values()):,}", f"{sum(dup['cut']['bytes'].values()):,}"]
            for dup in document["duplicates"][:ROWS] if dup.get("cut")]
    return [*lines, *table(["dataset", "step", "compared", "removed", "share", "largest cluster"], rows, 2),
            *more(document["duplicates"], "deduplication"),
            *table(["dataset", "step", "documents cut", "passages", "bytes"], cuts, 2)]


def personal_data(document: Report, recipe: Mapping[str, Any]) -> list[str]:
    lines = ["## Personal data", ""]
    values: dict[str, int] = {}
    for name in document["names"]["final"]:
        for kind, n in document["datasets"][name]["pii"].items():
            values[kind] = values.get(kind, 0) + n
    bare = unscrubbed(recipe, document["names"]["final"]) if recipe else []
    steps_with = [name for name in document["names"]["datasets"] if any(s.scrubs for s in steps_of(recipe, name))]
    if steps_with:
        lines += [f"Personal data is replaced in the steps of {listed(steps_with)}. Found in the documents kept: "
                  + (", ".join(f"{plain(kind.removeprefix('pii_').replace('_', ' '))} {n:,}"
                               for kind, n in sorted(values.items()) if n) or "nothing") + ".", ""]
    elif recipe:
        lines += ["No step of the recipe replaces personal data.", ""]
    else:
        lines += ["Not known: the recipe of this run is not known.", ""]
    if bare and steps_with:
        lines += [f"Nothing replaces it in the documents of {listed(bare)}.", ""]
    return lines


def licences(document: Report) -> list[str]:
    counts, docs = licence_counts(document), kept_docs(document)
    stated = sum(counts.values())
    lines = ["## Licences", ""]
    if not stated:
        return [*lines, "Not known: no document states a licence where Tokenmill looks for one.", ""]
    rows = [[plain(name), f"{n:,}", share(n, docs)] for name, n in counts.items()]
    rows += [["none stated", f"{docs - stated:,}", share(docs - stated, docs)]] if stated < docs else []
    return [*lines, "As the documents state them; nobody has checked that they hold.", "",
            *table(["licence", "documents", "share"], rows[:ROWS]), *more(rows, "licence")]


def contamination(document: Report) -> list[str]:
    """Write the section on how many documents were removed because they contain test data of benchmarks, or resemble
    held-out documents."""
    lines = ["## Contamination", ""]
    sentences = [
        f"{plain(dataset)}: {plain(r['stage'])} removed {plural(r['docs'], 'document')} ({plain(r['reason'])})."
        for dataset in document["names"]["datasets"] for r in document["datasets"][dataset]["reasons"]
        if "contamin" in f"{r['stage']} {r['reason']}".lower()]
    sentences += [
        f"{plain(dataset)} held {plural(sum(map(len, figures['items'].values())), 'item')} of {plain(name)}: "
        f"{plural(figures['dropped'], 'document')} dropped, {figures['cut']:,} cut, "
        f"{figures['noted']:,} with items that are too short to count."
        for dataset in document["names"]["datasets"]
        for name, figures in sorted(document["datasets"][dataset].get("contamination", {}).items())]
    near = sum(t["near_held_out"] for t in document["tokens"].values())
    if near:
        left_out = plural(near, "training document")
        sentences.append(f"{left_out} that resemble a held-out one were left out of the tokens.")
    if not any(" removed " in line or " held " in line for line in sentences):
        sentences.append("Overlap with benchmarks is not known: no step of the recipe looks for it.")
    return [*lines, " ".join(sentences), ""]


def tokens(document: Report) -> list[str]:
    if not document["tokens"]:
        return []
    streams = sorted(document["tokens"].items(), key=lambda item: -item[1]["tokens"])
    rows = [[plain(name), f"{t['docs']:,}", f"{t['tokens']:,}", f"{t['val_docs']:,}", f"{t['val_tokens']:,}"]
            for name, t in streams[:ROWS]]
    lines = ["## Tokens and mixture", "",
             *table(["stream", "documents", "tokens", "held-out documents", "held-out tokens"], rows),
             *more(streams, "stream")]
    of_phase: dict[str, int] = {}
    for row in document["mixture"]:
        of_phase[row["phase"]] = of_phase.get(row["phase"], 0) + row["realised"]
    mixed = [[plain(row["phase"]), plain(row["stream"]), f"{row['tokens']:,}", share(row["realised"],
              of_phase[row["phase"]]), f"{row['epochs']:.2f}"] for row in document["mixture"]]
    if mixed:
        lines += ["What the curriculum draws. Epochs say how often a stream has been read by the end of the phase.", "",
                  *table(["phase", "stream", "tokens", "share", "epochs"], mixed[:ROWS], 2)]
        lines += ([f"The first {ROWS} are shown; {plural(len(mixed) - ROWS, 'row')} more in `report.json`.", ""]
                  if len(mixed) > ROWS else [])
    return lines


def reproduce(document: Report, recipe: Mapping[str, Any]) -> list[str]:
    """Write the section on how to make the corpus again: program, hashes, command and recipe."""
    origin = document["made"]
    final = {name: node["content"] for name in document["names"]["final"] for node in document["lineage"]
             if node["kind"] == "pass" and node["name"] == name}
    program = " ".join(filter(None, ["Tokenmill", plain(origin["version"] or "of an unknown version")]))
    lines = ["## How to reproduce", "", f"- Made with {program}"
             + (f" and Python {plain(origin['python'])}." if origin["python"] else "."),
             f"- Hash of the recipe: {code(document['recipe'])}"]
    lines += [f"- Hash of the order of all samples: {code(document['order'])}"] if document["order"] else []
    lines += [f"- Content of {plain(name)}: {code(content)}" for name, content in final.items()]
    own = " --allow-custom-stages" if recipe.get("code") else ""
    lines += ["", "The same recipe, input, version and quarantined documents give the same documents and hashes. "
              "Scores of models may also depend on the kind of CPU.", "",
              *block(f"tokenmill run recipe.yaml --store STORE{own}", "sh"), ""]
    if origin["recipe"]:
        text = origin["recipe"].split("\n")
        lines += ["`recipe.yaml` as it ran, with secrets and personal data masked:", "",
                  *block("\n".join(text[:RECIPE_LINES]), "yaml"), ""]
        lines += ([f"The beginning is shown; {plural(len(text) - RECIPE_LINES, 'line')} more in `recipe.yaml` of the "
                   "run.", ""] if len(text) > RECIPE_LINES else [])
    return lines


def limitations(document: Report, recipe: Mapping[str, Any]) -> list[str]:
    """Write the section on limitations: first those that follow from the report's figures, then the warnings of the
    run."""
    totals, docs, sentences = document["totals"], kept_docs(document), []
    if totals["kept_bytes"]:
        sentences += [f"{share(row['kept_bytes'], totals['kept_bytes'])} of the text is from the source {plain(name)}."
                 for name, row in totals["by_source"].items()
                 if len(totals["by_source"]) > 1 and row["kept_bytes"] > DOMINANT * totals["kept_bytes"]]
    empty = [name for name, row in totals["by_source"].items() if row["read"] and not row["kept"]]
    if empty:
        sentences.append(f"Nothing was kept of {listed(empty)}.")
    counts = language_counts(document)
    if any(counts) and counts.get("", 0) > SMALL * docs:
        sentences.append(f"The language of {share(counts[''], docs)} of the documents is not known.")
    if sum(totals["unreadable"].values()) > SMALL * totals["records"]:
        sentences.append(f"{share(sum(totals['unreadable'].values()), totals['records'])} of the records could not be "
                         f"read.")
    unstated = docs - sum(licence_counts(document).values())
    if unstated:
        sentences.append(f"The licence of {share(unstated, docs)} of the documents is not known.")
    if recipe and (bare := unscrubbed(recipe, document["names"]["final"])):
        sentences.append(f"Personal data was left as it is in the documents of {listed(bare)}.")
    if not document["duplicates"]:
        sentences.append("Duplicates were not removed.")
    sentences += [f"{plain(dup['step'])} removed {share(alarm['removed'], alarm['of'])} of the documents of "
                  f"{plain(alarm['source'])}; look at its samples."
                  for dup in document["duplicates"] for alarm in dup["alarms"]][:NAMES]
    sentences += [f"{plain(dup['step'])} cut {share(alarm['cut'], alarm['of'])} of the text of "
                  f"{plain(alarm['source'])}." for dup in document["duplicates"] if dup.get("cut")
                  for alarm in dup["cut"]["alarms"]][:NAMES]
    repeated = sorted({row["stream"] for row in document["mixture"] if row["repeats_from"] is not None})
    if repeated:
        sentences.append(f"The curriculum reads {listed(repeated)} more than once.")
    lines = ["## Limitations", "", *(f"- {line}" for line in sentences)]
    warnings = document["warnings"]
    lines += [f"- {plain(warning)}" for warning in warnings[:ROWS]]
    lines += [f"- {plural(len(warnings) - ROWS, 'warning')} more in `report.json`"] if len(warnings) > ROWS else []
    return [*lines, ""] if sentences or warnings else [*lines, "None that follow from the figures.", ""]
