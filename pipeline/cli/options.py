"""Command-line options that several commands share, and checks of their values."""

from __future__ import annotations

import os
import shlex
from enum import StrEnum
from typing import Annotated

import typer

from pipeline.cli.errors import BadUsage
from pipeline.cluster.attempts import bad_name, run_names
from pipeline.store.fs import Store


class BackendName(StrEnum):
    """The values of --backend, which say where tasks run: on Ray, in child processes, or in this process."""

    ray = "ray"
    process = "process"
    inline = "inline"


StoreOpt = Annotated[str, typer.Option("--store", envvar="TOKENMILL_STORE", help="Folder or URL of the store.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="JSON on stdout, one object per line, for scripts.")]
QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
RecipeArg = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a ready recipe.")]
RunArg = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run in the store, or its folder.")]
NameOpt = Annotated[str | None, typer.Option(
    "--name", metavar="RUN", help="Name of the run (default: from the recipe).")]
SetOpt = Annotated[list[str] | None, typer.Option(
    "--set", metavar="KEY=VALUE", help="Override a key of the recipe; repeatable.")]
InputOpt = Annotated[list[str] | None, typer.Option(
    "--input", metavar="FILES", help="Files or a glob for the recipe's input source; repeatable.")]
CodeOpt = Annotated[bool, typer.Option("--allow-custom-stages", help="Let the recipe run its own code.")]
VerifyOpt = Annotated[bool, typer.Option("--verify-inputs", help="Hash input files instead of trusting size and time.")]
BackendOpt = Annotated[BackendName, typer.Option(help="ray, process (no Ray) or inline (one process, to debug).")]
WorkersOpt = Annotated[int | None, typer.Option(min=1, metavar="N", help="Child processes (default: one per core).")]
AddressOpt = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Attach to this Ray cluster.")]
ShipOpt = Annotated[bool, typer.Option("--ship-code", help="Send this installation's code to the nodes.")]
PythonOpt = Annotated[str, typer.Option(metavar="PYTHON", help="Python on the head node that runs the driver.")]
InsecureOpt = Annotated[bool, typer.Option("--insecure-local", help="Accept a cluster without token authentication on "
                                                                   "this machine's loopback.")]
TakeoverOpt = Annotated[bool, typer.Option("--takeover", help="Take the store over from another driver that holds it.")]
LimitOpt = Annotated[int, typer.Option("-n", "--limit", min=0, metavar="N", help="Documents shown; 0 shows all.")]
CharsOpt = Annotated[int, typer.Option(min=0, metavar="N", help="Characters of each text shown; 0 shows all.")]


def check_backend(backend: BackendName, address: str | None, insecure_local: bool = False,
                  ship_code: bool = False) -> None:
    """Check that --backend, --address, --insecure-local and --ship-code fit together, and raise BadUsage if they do
    not. Raises ClusterError when the cluster cannot be reached, or demands no token, since anybody could run code on
    it. With `insecure_local`, a cluster without a token is allowed on loopback addresses."""
    if address is None:
        if insecure_local or ship_code:
            raise BadUsage(f"{'--ship-code' if ship_code else '--insecure-local'} is about a cluster: give --address")
        return
    if backend is not BackendName.ray:
        raise BadUsage(f"--address {address} attaches to a Ray cluster; leave out --backend {backend.value}")
    from pipeline.cluster.connect import check_cluster

    check_cluster(address, insecure_local)


def check_name(name: str | None) -> None:
    """Raise BadUsage when `name` is not a valid name of a run."""
    if name is not None and (reason := bad_name(name)) is not None:
        raise BadUsage(f"--name {name[:80]!r}: {reason}")


def check_root(root: str, option: str = "--store") -> None:
    """Raise BadUsage when `root`, the value of the command-line option `option`, is a URL that holds a secret. Such
    URLs would be printed, and written to logs and manifests."""
    from pipeline.base.redact import redact, secret_in

    what = secret_in(root)
    if what is not None:
        raise BadUsage(f"{option} {redact(root)}: this has {what}; give credentials in the environment "
                       f"(AWS_ACCESS_KEY_ID …) or fsspec's configuration")


def open_store(root: str) -> Store:
    """Open the store at `root` for reading. Raises BadUsage for a local folder that does not exist, and for a URL that
    holds a secret."""
    check_root(root)
    store = Store(root)
    if store.local is not None and not store.local.is_dir():
        raise BadUsage(f"there is no store at {store.root}; give --store, or set TOKENMILL_STORE")
    return store


def resolve_run(run: str, root: str) -> tuple[Store, str]:
    """Return (store, name of the run). `run` is the name of a run in the store at `root`, or the run's folder
    STORE/runs/RUN. Raises BadUsage when the store has no such run."""
    top, _, name = run.rstrip("/").rpartition("/")
    if os.path.basename(top) == "runs":
        store, name = open_store(os.path.dirname(top) or "."), name
    else:
        store, name = open_store(root), run
    names = run_names(store)
    if name not in names:
        raise BadUsage(f"there is no run '{name}' in the store {store.root}; "
                       + (f"it has: {', '.join(names)}" if names else "nothing was run there yet"))
    return store, name


def as_typed(command: str, run: str, store: Store) -> str:
    """Return the command line `tokenmill COMMAND RUN --store STORE`, quoted so that it can be pasted into a shell."""
    return f"tokenmill {command} {shlex.quote(run)} --store {shlex.quote(store.root)}"
