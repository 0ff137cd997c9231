"""`tokenmill run`, `plan`, `list`, `report`, `inspect`: a recipe and what became of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli import fail

RecipeArg = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a ready recipe.")]
StoreOpt = Annotated[str, typer.Option("--store", envvar="TOKENMILL_STORE", help="Folder or URL of the store.")]
SetOpt = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe.")]
InputOpt = Annotated[list[str] | None, typer.Option("--input", help="Files for the recipe's input source.")]
CodeOpt = Annotated[bool, typer.Option("--allow-custom-stages", help="Let the recipe run code of its own.")]
QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout, for scripts.")]


def register(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("plan")(plan)
    app.command("list")(list_runs)
    app.command("report")(report)
    app.command("inspect")(inspect)


def run(recipe: RecipeArg, store: StoreOpt = "store", input: InputOpt = None, set: SetOpt = None,
        workers: Annotated[int | None, typer.Option(help="Child processes (default: all cores).")] = None,
        address: Annotated[str | None, typer.Option(help="Attach to this Ray cluster.")] = None,
        backend: Annotated[str, typer.Option(help="ray, process (no Ray) or inline (to debug).")] = "ray",
        name: Annotated[str | None, typer.Option("--name", help="Name of the run (default: from the recipe).")] = None,
        takeover: Annotated[bool, typer.Option(help="Fence another driver that seems to hold the store.")] = False,
        verify_inputs: Annotated[bool, typer.Option(help="Hash inputs instead of trusting size and time.")] = False,
        dispatch_seed: Annotated[int | None, typer.Option(hidden=True)] = None,
        allow_custom_stages: CodeOpt = False, quiet: QuietOpt = False, json_lines: JsonOpt = False) -> None:
    """Run a recipe. Rerunning does only what is not done yet."""
    from pipeline.engine.scheduler import Interrupted
    from pipeline.recipe import load_recipe
    from pipeline.run import default_workers, make_backend, run_recipe

    loaded = load_recipe(recipe, set or [], inputs=input or [], allow_custom=allow_custom_stages)
    if backend not in ("ray", "process", "inline"):
        fail(f"--backend {backend}: choose ray, process or inline", 2)
    show = "json" if json_lines else "quiet" if quiet else "rich"
    count = workers or default_workers()
    try:
        summary = run_recipe(loaded, store, make_backend=make_backend(backend, count, address), show=show, run=name,
                             dispatch_seed=dispatch_seed, takeover=takeover, verify_inputs=verify_inputs)
    except Interrupted as e:
        fail(str(e))
    if json_lines:
        typer.echo(json.dumps({"event": "done", **summary.__dict__}))
    elif not quiet:
        for warning in summary.warnings:
            typer.echo(f"warning: {warning}", err=True)
        rows = ", ".join(f"{d} {n:,}" for d, n in summary.datasets.items())
        typer.echo(f"{summary.run}: {summary.executed} tasks run, {summary.reused} reused; documents: {rows}")
        if summary.shards:
            typer.echo("tokens: " + ", ".join(f"{s} {n:,}" for s, n in summary.shards.items()))
        typer.echo(f"report: {Path(summary.store) / 'runs' / summary.run / 'report.html'}")


def plan(recipe: RecipeArg, store: StoreOpt = "store", input: InputOpt = None, set: SetOpt = None,
         allow_custom_stages: CodeOpt = False, json_lines: JsonOpt = False) -> None:
    """Show what a run would do: passes, partitions, what is fresh or stale, bytes, an estimate of time and disk."""
    from pipeline.plan.estimate import survey_recipe
    from pipeline.plan.show import print_plan
    from pipeline.recipe import load_recipe

    loaded = load_recipe(recipe, set or [], inputs=input or [], allow_custom=allow_custom_stages)
    document = survey_recipe(loaded, store)
    if json_lines:
        typer.echo(json.dumps(document))
    else:
        print_plan(document)


def list_runs(store: StoreOpt = "store", json_lines: JsonOpt = False) -> None:
    """The runs of a store."""
    from pipeline.store.fs import Store

    at = Store(store)
    names = sorted({p.split("/")[1] for p in at.list("runs") if p.count("/") >= 2})
    for name in names:
        state: dict[str, Any] = {}
        if at.exists(f"runs/{name}/progress.json"):
            state = json.loads(at.read(f"runs/{name}/progress.json"))
        state["report"] = at.exists(f"runs/{name}/report.html")
        typer.echo(json.dumps({"run": name, **state}) if json_lines else
                   f"{name}  {state.get('state', '?')}{'  report' if state['report'] else ''}")
    if not names and not json_lines:
        typer.echo(f"no runs in {at.root}")


def report(run: Annotated[str, typer.Argument(help="Name of a run in the store, or its folder.")],
           store: StoreOpt = "store", json_lines: JsonOpt = False) -> None:
    """Write runs/RUN/report.html and report.json anew from the log and the parts."""
    from pipeline.report.collect import write_report
    from pipeline.store.fs import Store
    from pipeline.store.log import Log

    at, name = resolve_run(run, store)
    root = Store(at)
    document = write_report(root, name, Log.read(root).get)
    typer.echo(json.dumps(document) if json_lines else str(Path(root.at(f"runs/{name}/report.html"))))


def resolve_run(run: str, store: str) -> tuple[str, str]:
    """(store root, run name) of a run given by name or as the folder STORE/runs/RUN."""
    path = Path(run)
    if path.parent.name == "runs" and path.is_dir():
        return str(path.parent.parent), path.name
    if not (Path(store) / "runs" / run).is_dir() and "://" not in store:
        known = sorted(p.name for p in (Path(store) / "runs").glob("*")) if Path(store).is_dir() else []
        fail(f"no run '{run}' in store '{store}'; " + (f"it has: {', '.join(known)}" if known else "give --store"), 2)
    return store, run


def inspect(dataset: Annotated[str, typer.Argument(help="A dataset of the store.")], store: StoreOpt = "store",
            dropped: Annotated[bool, typer.Option(help="Show dropped documents instead of kept ones.")] = False,
            quarantined: Annotated[bool, typer.Option(help="Show quarantined records.")] = False,
            reason: Annotated[str | None, typer.Option(help="Only documents dropped for this reason.")] = None,
            stage: Annotated[str | None, typer.Option(help="Only documents dropped by this stage.")] = None,
            source: Annotated[str | None, typer.Option(help="Only documents of this source.")] = None,
            id: Annotated[str | None, typer.Option(help="Only the document with this id (or its beginning).")] = None,
            limit: Annotated[int, typer.Option("-n", help="How many.")] = 5,
            chars: Annotated[int, typer.Option(help="Characters of text shown; 0 shows everything.")] = 400,
            json_lines: JsonOpt = False) -> None:
    """Show documents of a dataset: kept, dropped with their reasons, or quarantined."""
    from pipeline.report.collect import rows_of
    from pipeline.store.fs import Store
    from stages.scrub.pii import scrub_text

    folder = "quarantine" if quarantined else "dropped" if dropped or reason or stage else "datasets"
    wanted = {k: v for k, v in {"reason": reason, "stage": stage, "source": source}.items() if v}
    shown = 0
    for row in rows_of(Store(store), f"{folder}/{dataset}"):
        if any(row.get(k) != v for k, v in wanted.items()) or (id and not row["id"].startswith(id)):
            continue
        if "text" in row:
            row["text"] = scrub_text(row["text"] if chars == 0 else row["text"][:chars])
        if row.get("url"):
            row["url"] = scrub_text(row["url"])
        typer.echo(json.dumps(row, default=str, ensure_ascii=False) if json_lines else _card(row))
        shown += 1
        if shown >= limit:
            break
    if not shown and not json_lines:
        typer.echo("nothing matches")


def _card(row: dict[str, Any]) -> str:
    """A document for people."""
    head = [row["id"], row.get("source") or "", row.get("language") or "", row.get("url") or row.get("file") or ""]
    lines = ["── " + "  ".join(h for h in head if h)]
    if row.get("reason"):
        lines.append(f"   {row['stage']}: {row['reason']}  {row.get('detail') or ''}".rstrip())
    signals = {k: v for k, v in (row.get("signals") or {}).items() if v is not None}
    if signals:
        lines.append("   " + "  ".join(f"{k}={v:.4g}" for k, v in signals.items()))
    if row.get("meta") not in (None, "", "{}"):
        lines.append(f"   {row['meta']}")
    if row.get("text"):
        lines.append(row["text"])
    return "\n".join(lines)
