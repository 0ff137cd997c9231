"""`tokenmill dedup index`, `merge` and `forget`: make and change indexes of the documents that deduplications kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.base.humanize import plural
from pipeline.base.visible import visible
from pipeline.cli.errors import BadUsage, UserError
from pipeline.cli.options import (
    BackendName,
    BackendOpt,
    CodeOpt,
    QuietOpt,
    RunArg,
    StoreOpt,
    WorkersOpt,
    check_root,
    open_store,
    resolve_run,
)

if TYPE_CHECKING:
    from stages.dedup.index import DedupIndex

OutFolder = Annotated[str, typer.Option("--out", metavar="FOLDER", help="Folder or URL to write to; new or empty.")]


def index(run: RunArg, dataset: Annotated[str, typer.Argument(metavar="DATASET", help="A dataset of the run.")],
          out: OutFolder, store: StoreOpt = "store", backend: BackendOpt = BackendName.process,
          workers: WorkersOpt = None, allow_custom_stages: CodeOpt = False, quiet: QuietOpt = False) -> None:
    """Write indexes of the documents that the deduplications of a dataset kept, to a new folder.

    With `against: FOLDER` in their settings, the deduplications `exact` and `minhash` of later datasets compare
    documents with these indexes. Such a dataset may be in any store, and this store need not exist any more. The run is
    repeated first; results that the store has are not computed again.

    An index of `minhash` holds the texts of the documents that it kept, so take as much care of it as of the dataset. A
    takedown does not change it: run `tokenmill dedup forget` after each takedown.

    \b
    Examples:
      tokenmill dedup index may-1f2e3d4c clean --out may.index --store store
    """
    from pipeline.cli.cluster import kept_recipe
    from pipeline.cli.runs import shown
    from pipeline.index_folders import export_indexes, new_folder
    from pipeline.plan.indexes import WantedIndex
    from pipeline.run import NamedRecipe, default_workers, make_backend, run_recipes
    from pipeline.store.copies import note_copy
    from stages.catalog import stage_class
    from stages.dedup.index import IndexedBarrier

    at, name = resolve_run(run, store)
    check_root(out, "--out")
    folder = new_folder(out)
    taken: list[DedupIndex] = []
    with kept_recipe(at, name, allow_custom_stages) as recipe:
        if dataset not in recipe.datasets:
            raise UserError(f"run '{name}' has no dataset '{dataset}'; it has: {', '.join(recipe.datasets)}")
        stages = [stage_class(step.name)(dict(step.config)) for step in recipe.datasets[dataset].steps]
        steps = [stage for stage in stages if isinstance(stage, IndexedBarrier)]
        refused = [f"no index can be made of the step {step.name} of '{dataset}': {step.no_index}" for step in steps
                   if step.no_index]
        if len(refused) == len(steps):
            raise UserError("; ".join(refused) or f"'{dataset}' has no step `exact` or `minhash`, of which an index "
                                                  f"could be made; add one to its steps")
        for message in refused:
            typer.echo(visible(f"warning: {message}"), err=True)
        run_recipes([NamedRecipe(name, recipe, index=WantedIndex(dataset, taken.extend))], at.root,
                    show=shown(quiet, False),
                    make_backend=make_backend(backend.value, workers or default_workers(), None))
    note_copy(at, "index", dataset, out)
    export_indexes(at, taken, folder)
    _print_indexes(folder.root, taken, quiet)


def merge(folders: Annotated[list[str], typer.Argument(metavar="FOLDER…", help="Folders of `tokenmill dedup index`, "
                                                       "the one whose documents come first in priority first.")],
          out: OutFolder, quiet: QuietOpt = False) -> None:
    """Merge several folders of indexes into one folder, which is read faster.

    \b
    Examples:
      tokenmill dedup merge may.index june.index --out both.index
    """
    from pipeline.index_folders import merge_folders, new_folder

    if len(folders) < 2:
        raise BadUsage("merging needs at least two folders; name the second one, too")
    check_root(out, "--out")
    _print_indexes(out, merge_folders(folders, new_folder(out)), quiet)


def forget(folders: Annotated[list[str], typer.Argument(metavar="FOLDER…", help="Folders of `tokenmill dedup index` or "
                                                        "`merge`.")],
           store: StoreOpt = "store", quiet: QuietOpt = False) -> None:
    """Remove the documents that takedowns have removed from a store from folders of indexes, too.

    An index of `minhash` loses the text, the id and the band keys of each such document, and an index of `exact` the
    hashes. The folders are changed in place, so let no run read them meanwhile. If the command was interrupted, run it
    again.

    \b
    Examples:
      tokenmill dedup forget may.index both.index --store corpus
    """
    from pipeline.index_folders import forget as forget_documents
    from pipeline.index_folders import indexes_in
    from pipeline.store.tombstones import Tombstones, takedowns

    at, gone = open_store(store), Tombstones()
    for takedown in takedowns(at):
        gone |= takedown.tombstones()
    if not gone.ids:
        raise UserError(f"{at.root}: no takedown has removed documents from this store; name the store of the takedown "
                        f"with --store")
    for folder in folders:
        indexes_in(folder)                                       # a wrong name changes none of the folders
    for folder in folders:
        removed = forget_documents(folder, gone)
        if not quiet:
            parts = (f"{plural(count, 'hash', 'hashes') if step == 'exact' else plural(count, 'document')} of {step}"
                     for step, count in removed.items())
            typer.echo(visible(f"{folder}: {' and '.join(parts)} removed"))


def _print_indexes(root: str, indexes: list[DedupIndex], quiet: bool) -> None:
    """Print which indexes a folder holds, and how many documents each of them has. Prints nothing if `quiet`."""
    if not quiet:
        typer.echo(visible(f"{root}: " + "; ".join(f"index of {index.step} with {plural(index.documents, 'document')}"
                                                   for index in indexes)))
