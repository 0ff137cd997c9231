"""`tokenmill run`, `plan`, `list`, `report`, `materialize` and `recipes`: commands about recipes and their runs."""

from __future__ import annotations

import json
import logging
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.base.visible import visible
from pipeline.cli import options as opt
from pipeline.cli.errors import BadUsage, UserError, stoppable

if TYPE_CHECKING:
    from pipeline.recipe.model import Recipe
    from pipeline.store.fs import Store


class RowFormat(StrEnum):
    """The values of --format: the file formats in which `tokenmill materialize` writes samples."""

    bytes = "bytes"
    parquet = "parquet"


def register(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("plan")(plan)
    app.command("list")(list_runs)
    app.command("report")(report)
    app.command("materialize")(materialize)
    app.command("recipes")(recipes)


def run(recipe: opt.RecipeArg, store: opt.StoreOpt = "store", input: opt.InputOpt = None, set: opt.SetOpt = None,
        workers: opt.WorkersOpt = None, backend: opt.BackendOpt = opt.BackendName.ray, address: opt.AddressOpt = None,
        name: opt.NameOpt = None, takeover: opt.TakeoverOpt = False, verify_inputs: opt.VerifyOpt = False,
        dispatch_seed: Annotated[int | None, typer.Option(hidden=True)] = None,
        allow_custom_stages: opt.CodeOpt = False, ship_code: opt.ShipOpt = False,
        insecure_local: opt.InsecureOpt = False, quiet: opt.QuietOpt = False, json_lines: opt.JsonOpt = False) -> None:
    """Run a recipe. Work that an earlier run in the same store has done is not repeated.

    \b
    Examples:
      tokenmill run fineweb --input 'crawl/*.warc.gz' --store store --workers 2
      tokenmill run recipe.yaml --set datasets.clean.steps.language.min=0.8
    """
    from pipeline.recipe import load_recipe

    opt.check_backend(backend, address, insecure_local, ship_code)
    opt.check_name(name)
    opt.check_root(store)
    loaded = load_recipe(recipe, set or [], inputs=input or [], allow_custom=allow_custom_stages)
    with stoppable(address):
        drive(loaded, store, name, backend, workers, address, quiet=quiet, json_lines=json_lines, takeover=takeover,
              verify_inputs=verify_inputs, ship_code=ship_code, dispatch_seed=dispatch_seed)


def drive(recipe: Recipe, store: str, run: str | None, backend: opt.BackendName, workers: int | None,
          address: str | None, *, quiet: bool, json_lines: bool, takeover: bool, verify_inputs: bool,
          ship_code: bool = False, dispatch_seed: int | None = None, attempt: int | None = None) -> None:
    """Run a recipe with this process as the driver (the process that schedules the run), and print the result.
    `workers` is the number of child processes; None means one per core of this machine or, with `address`, of the
    cluster."""
    from pipeline.plan.changes import comparable_run, compare_command
    from pipeline.run import default_workers, make_backend, run_recipe

    if address is None:
        workers = workers or default_workers()
    summary = run_recipe(recipe, store, run=run, show=shown(quiet, json_lines), dispatch_seed=dispatch_seed,
                         make_backend=make_backend(backend.value, workers, address, ship_code), takeover=takeover,
                         verify_inputs=verify_inputs, attempt=attempt)
    report_at = f"{summary.store}/runs/{summary.run}/report.html"
    if json_lines:
        typer.echo(json.dumps({"event": "done", **summary.__dict__, "report": report_at}))
    elif not quiet:
        for warning in summary.warnings:
            typer.echo(visible(f"warning: {warning}"), err=True)
        typer.echo(f"{summary.run}: {summary.executed:,} tasks run, {summary.reused:,} reused")
        typer.echo("documents kept: " + ", ".join(f"{d} {n:,}" for d, n in summary.datasets.items()))
        if summary.shards:
            typer.echo("tokens: " + ", ".join(f"{s} {n:,}" for s, n in summary.shards.items()))
        typer.echo(f"report: {report_at}")
        at = opt.open_store(store)
        if (before := comparable_run(at, summary.run)) is not None:
            command = compare_command(at, before, summary.run)
            typer.echo(visible(f"what changed since the run before: {command}"))


def shown(quiet: bool, json_lines: bool) -> str:
    """Return how progress is shown: 'json', 'quiet' or 'rich'. With `quiet`, warnings are silenced, too."""
    logging.getLogger("tokenmill").setLevel(logging.ERROR if quiet else logging.NOTSET)
    return "json" if json_lines else "quiet" if quiet else "rich"


def plan(recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="A recipe file, or the name of a ready "
                                                                                "recipe.")] = None,
         store: opt.StoreOpt = "store", input: opt.InputOpt = None, set: opt.SetOpt = None,
         why: Annotated[str | None, typer.Option("--why", metavar="NODE",
                                                 help="Say why this node, or dataset, is stale.")] = None,
         sample: Annotated[str | None, typer.Option("--sample", metavar="SHARE",
                                                    help="Run this share of the inputs, say 0.1%, and forecast the "
                                                         "cost of all.")] = None,
         cores: Annotated[int | None, typer.Option(min=1, metavar="N", help="Cores the forecast is for (default: those "
                                                                            "of this machine).")] = None,
         price: Annotated[float | None, typer.Option(min=0, metavar="P", help="Price of a core-hour, for the "
                                                                              "forecast.")] = None,
         workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Child processes that run the sample "
                                                                              "(default: all cores).")] = None,
         tokens: Annotated[list[str] | None, typer.Option("--tokens", metavar="STREAM=COUNT,…|FILE",
                                                          help="Numbers of tokens of the streams, or a file with "
                                                               "a table of them: print how often a training would read "
                                                               "each stream. Reads no input; repeatable.")] = None,
         mixture: Annotated[str | None, typer.Option("--mixture", metavar="NAME",
                                                     help="Print the mixture of a known training instead of planning a "
                                                          "recipe: deepseek, gpt3, llama, olmo3, smollm3.")] = None,
         verify_inputs: opt.VerifyOpt = False, allow_custom_stages: opt.CodeOpt = False, quiet: opt.QuietOpt = False,
         json_lines: opt.JsonOpt = False) -> None:
    """Show what a run would do, and what it will cost.

    Shows the nodes of the plan in order. For each node it says how many partitions are fresh (the store has the result)
    or stale (to be computed), and how many bytes they read. It also estimates their CPU time and disk space. Nothing is
    run and nothing is written. With --sample the recipe is run on a part of its inputs, in a temporary store. A cost
    forecast then says what the whole input would yield and need. With --tokens no input is read: the curriculum is
    planned for streams of these sizes.

    \b
    Examples:
      tokenmill plan fineweb --input 'crawl/*.warc.gz'
      tokenmill plan recipe.yaml --set datasets.clean.steps.gopher_quality.min_stop_words=3
      tokenmill plan recipe.yaml --why clean
      tokenmill plan recipe.yaml --sample 0.1% --cores 64 --price 0.04
      tokenmill plan recipe.yaml --tokens web=8T,code=1T
      tokenmill plan --mixture gpt3
    """
    from pipeline.forecast import epochs
    from pipeline.plan import why as explanation
    from pipeline.plan.estimate import survey_recipe
    from pipeline.plan.show import print_plan
    from pipeline.recipe import load_recipe

    if (recipe is None) == (mixture is None):
        raise BadUsage("give a RECIPE to plan, or the --mixture of a known training")
    if mixture is not None:
        _known_mixture(mixture, tokens or [], json_lines)
        return
    assert recipe is not None
    opt.check_root(store)
    loaded = load_recipe(recipe, set or [], inputs=input or [], allow_custom=allow_custom_stages)
    if tokens:
        uses, notes = epochs.phase_uses(loaded, epochs.given_tokens(tokens, loaded))
        typer.echo(json.dumps(epochs.as_document(uses, notes)) if json_lines
                   else visible("\n".join(epochs.as_lines(uses, notes))))
        return
    if why is not None:
        try:
            document = explanation.explain(loaded, store, why, verify_inputs=verify_inputs)
        except explanation.UnknownNode as e:
            raise BadUsage(str(e)) from None
        typer.echo(json.dumps(document) if json_lines else visible("\n".join(explanation.lines(document))))
        return
    if sample is not None:
        _forecast(loaded, sample, cores, price, workers, verify_inputs, quiet, json_lines)
        return
    if cores or price is not None or workers:
        raise BadUsage("--cores, --price and --workers belong to the cost forecast: add --sample 1%")
    document = survey_recipe(loaded, store, verify_inputs=verify_inputs)
    if json_lines:
        typer.echo(json.dumps(document))
    else:
        print_plan(document)


def _known_mixture(name: str, tokens: list[str], json_lines: bool) -> None:
    """Print a mixture (weights of streams in the phases of a training) that comes with Tokenmill as YAML. Comments
    after it say how many epochs of each stream are read."""
    from pipeline.forecast import epochs
    from pipeline.forecast.mixtures import load_mixture

    mixture = load_mixture(name)
    missing = sorted(mixture.recipe.shards.keys() - mixture.tokens.keys())
    if missing and not tokens:
        document: dict[str, Any] = {"mixture": [], "notes": [f"give the tokens of {', '.join(missing)} with --tokens"]}
        lines = [f"note: {note}" for note in document["notes"]]
    else:
        uses, notes = epochs.phase_uses(mixture.recipe, epochs.given_tokens(tokens, mixture.recipe, mixture.tokens))
        document, lines = epochs.as_document(uses, notes), epochs.as_lines(uses, notes)
    if json_lines:
        typer.echo(json.dumps({**document, "curriculum": mixture.recipe.plain()["curriculum"]}))
    else:
        typer.echo(visible("\n".join([mixture.text.rstrip(), "", *(f"# {line}" for line in lines)])))


def _forecast(recipe: Recipe, sample: str, cores: int | None, price: float | None, workers: int | None,
              verify_inputs: bool, quiet: bool, json_lines: bool) -> None:
    """Run the recipe on a sample of its inputs, and print a forecast of what the whole input costs and yields."""
    from rich.console import Console

    from pipeline.base.quantities import parse_share
    from pipeline.engine.driver.endings import Interrupted
    from pipeline.forecast.cost import forecast
    from pipeline.forecast.sample import run_sample
    from pipeline.forecast.show import lines
    from pipeline.plan.lint import lint
    from pipeline.run import default_workers

    try:
        share = parse_share(sample)
    except ValueError as e:
        raise BadUsage(f"--sample {sample}: {e}") from None
    if not share:
        raise BadUsage("--sample 0%: a cost forecast needs a sample; give a share, e.g. 0.1%")
    try:
        run = run_sample(recipe, share, workers=workers or default_workers(), verify_inputs=verify_inputs,
                         show="quiet" if quiet or json_lines else "rich")
    except Interrupted:
        raise UserError("stopped; nothing of a sample is kept") from None
    cost = forecast(run, cores=cores or default_workers(), price=price)
    warnings = [*recipe.warnings, *lint(recipe)]
    if json_lines:
        typer.echo(json.dumps({"recipe": recipe.name, "digest": recipe.digest(), **cost.to_json(),
                               "warnings": warnings}))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in lines(cost, warnings):
        console.print(line)


def list_runs(store: opt.StoreOpt = "store", json_lines: opt.JsonOpt = False) -> None:
    """List the runs of a store and their states.

    A star marks the run that finished last. The state `died` means that the driver of the run (the process that
    schedules it) ended without reporting a result; the run can be resumed.

    \b
    Example:
      tokenmill list --store store
    """
    from pipeline.cluster.attempts import run_names
    from pipeline.plan.changes import latest_run

    at = opt.open_store(store)
    latest, names = latest_run(at), run_names(at)
    rows = [_standing(at, name) | {"latest": name == latest} for name in names]
    if json_lines:
        for row in rows:
            typer.echo(json.dumps(row))
    elif not rows:
        typer.echo(f"nothing was run in {at.root} yet", err=True)
    width = max((len(n) for n in names), default=0)
    for row in rows if not json_lines else []:
        parts = f"{row['done']}/{row['parts']} tasks" if row["parts"] is not None else ""
        typer.echo(f"{'*' if row['latest'] else ' '} {row['run']:<{width}}  {row['state']:<9} {parts:<16}"
                   f"{row['report'] or ''}".rstrip())


def _standing(store: Store, name: str) -> dict[str, Any]:
    """Return the state of a run as a row of `tokenmill list`: {run, state, attempt (number of its latest start), parts
    (number of tasks), done (finished tasks), report}. A value that is not known is None."""
    from pipeline.cluster.attempts import standing

    current = standing(store, name)
    report_at = f"runs/{name}/report.html"
    return {"run": name, "state": current.state, "attempt": current.attempt, "parts": current.progress.get("parts"),
            "done": current.progress.get("done"),
            "report": f"{store.root}/{report_at}" if store.exists(report_at) else None}


def report(run: opt.RunArg, store: opt.StoreOpt = "store",
           compare: Annotated[str | None, typer.Option("--compare", metavar="BEFORE", help=
                                                       "Compare RUN with this run, given by its name or its "
                                                       "folder, instead of writing a report.")] = None,
           html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the comparison as a page.")]
           = None,
           examples: Annotated[int, typer.Option(min=0, max=20, metavar="N", help=
                                                 "Documents shown of each change of a dataset in a comparison.")] = 5,
           full: Annotated[bool, typer.Option("--full", help="Print the whole comparison, not a summary.")] = False,
           json_lines: opt.JsonOpt = False) -> None:
    """Write the report of a run again, or compare two runs.

    report.html and report.json are made from the results in the store; no document is processed again. With --compare,
    nothing is written to a store. The comparison tells how the recipes differ, and puts the figures of both reports
    side by side. It lists documents that only one of the runs kept, or that differ in their text. Documents nearest to
    a threshold come first.

    \b
    Examples:
      tokenmill report fineweb-3f2a91c0 --store store
      tokenmill report store/runs/fineweb-3f2a91c0 --json
      tokenmill report --compare fineweb-3f2a91c0 fineweb-77b0c2d1 --store store
      tokenmill report --compare old/runs/first new/runs/second --html compare.html
    """
    if compare is not None:
        from pipeline.cli.compare_runs import compare as compare_runs

        compare_runs(compare, run, store, examples, html, json_lines, full)
        return
    if html is not None:
        raise BadUsage("--html writes a comparison; give the other run with --compare (a report's page is written to "
                       "STORE/runs/RUN/report.html)")
    from pipeline.report.collect import write_report
    from pipeline.store.log import Log

    at, name = opt.resolve_run(run, store)
    if not at.exists(f"runs/{name}/plan.json"):
        raise UserError(f"run '{name}' has not finished, so there is nothing to report yet; run its recipe again "
                        f"({opt.as_typed('resume', name, at)})")

    def what_ran() -> list[bytes]:
        return [at.read(f"runs/{name}/{file}") for file in ("plan.json", "tasks.parquet")]

    before = what_ran()

    def verify() -> None:
        if what_ran() != before:                     # the other run has written a newer report, or is about to
            raise UserError(f"run '{name}' was run again meanwhile; that run writes the report itself")

    document = write_report(at, name, Log.read(at).get, verify)
    typer.echo(json.dumps(document) if json_lines else f"{at.root}/runs/{name}/report.html")


def materialize(run: opt.RunArg, store: opt.StoreOpt = "store",
                format: Annotated[RowFormat, typer.Option(help="bytes (raw tokens) or parquet (input_ids).")] =
                RowFormat.bytes,
                out: Annotated[str | None, typer.Option(
                    "--out", metavar="FOLDER", help="Copy the rows to this folder or URL as well.")] = None,
                workers: opt.WorkersOpt = None, backend: opt.BackendOpt = opt.BackendName.ray,
                address: opt.AddressOpt = None, takeover: opt.TakeoverOpt = False,
                insecure_local: opt.InsecureOpt = False, quiet: opt.QuietOpt = False,
                json_lines: opt.JsonOpt = False) -> None:
    """Write the training samples of a run in the order in which a training reads them.

    A training can then read them from front to back, for example from object storage. The samples are written to the
    store, in runs/RUN/rows-FORMAT. After an interruption, the same command continues where it stopped.

    \b
    Examples:
      tokenmill materialize fineweb-3f2a91c0 --store store --format parquet
      tokenmill materialize store/runs/demo --out s3://bucket/demo-rows
    """
    from pipeline.materialize import copy_rows
    from pipeline.materialize import materialize as write
    from pipeline.run import default_workers, make_backend
    from pipeline.store.copies import note_copy

    opt.check_backend(backend, address, insecure_local)
    if out is not None:
        opt.check_root(out, "--out")
    workers = workers or (default_workers() if address is None else None)
    at, name = opt.resolve_run(run, store)
    with stoppable(address):
        result, folder = write(at.root, name, format.value, show=shown(quiet, json_lines), takeover=takeover,
                             make_backend=make_backend(backend.value, workers, address))
        if out is not None:
            note_copy(at, "rows", name, out)
            copy_rows(at, folder, out)
    place = out if out is not None else f"{at.root}/{folder}"
    if json_lines:
        typer.echo(json.dumps({"event": "done", "folder": folder, "path": place, "rows": result.rows,
                               "files": len(result.files)}))
    elif not quiet:
        typer.echo(f"{result.rows:,} samples in {len(result.files)} files: {place}")


def recipes(name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe; without one, all are "
                                                                            "listed.")] = None,
            json_lines: opt.JsonOpt = False) -> None:
    """List the ready recipes, or print one.

    A printed recipe is a recipe file like any other: save it, change it and run it. The report of its run lists what
    was changed.

    \b
    Examples:
      tokenmill recipes
      tokenmill recipes fineweb > my.yaml
    """
    from pipeline.recipe.load import READY, nearest, ready_recipes
    from pipeline.recipe.marks import parse_yaml

    if name is not None and name not in ready_recipes():
        raise BadUsage(f"there is no ready recipe '{name}': {nearest(name, ready_recipes())}")
    texts = {n: (READY / f"{n}.yaml").read_text(encoding="utf-8") for n in ([name] if name else ready_recipes())}
    if name is not None and not json_lines:
        typer.echo(texts[name], nl=False)
        return
    width = max(map(len, texts))
    for each, text in texts.items():
        document = parse_yaml(text, each)[0]
        if json_lines:
            typer.echo(json.dumps({**document["about"], "wants": document.get("wants") or {}, "text": text}))
            continue
        typer.echo(f"{each:<{width}}  {document['about']['version']}  {document['about']['title']}")
        for key, how in (document.get("wants") or {}).items():
            typer.echo(f"{'':<{width}}     wants --set {key}=PATH: {' '.join(how.split())}")
