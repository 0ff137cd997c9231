"""`tokenmill serve`: runs the web service for one or more stores."""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Annotated

import typer

from pipeline.cli.errors import BadUsage, UserError
from pipeline.cli.options import AddressOpt, BackendName, CodeOpt, InsecureOpt, WorkersOpt, open_store

StoresOpt = Annotated[list[str] | None, typer.Option(
    "--store", metavar="[NAME=]STORE", help="Folder or URL of a store, and the name it is shown under (default: its "
                                            "last folder); repeatable. Also `TOKENMILL_STORE`. Default: `store`.")]


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(store: StoresOpt = None,
          host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
          port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="Port to listen on.")] = 8700,
          token_file: Annotated[str | None, typer.Option(metavar="FILE", help=
              "File with the operators' token. Also the variable `TOKENMILL_OPERATOR_TOKEN`.")] = None,
          viewer_token_file: Annotated[str | None, typer.Option(metavar="FILE", help=
              "File with the viewers' token. Also the variable `TOKENMILL_VIEWER_TOKEN`.")] = None,
          certificate: Annotated[str | None, typer.Option(metavar="FILE", help="TLS certificate (PEM).")] = None,
          key: Annotated[str | None, typer.Option(metavar="FILE", help="Private key of the certificate (PEM).")] = None,
          behind_proxy: Annotated[bool, typer.Option(
              "--behind-proxy", help="A proxy in front of the server speaks TLS.")] = False,
          proxy: Annotated[str, typer.Option(
              metavar="ADDRESS", help="Address of the proxy of --behind-proxy. Only its header X-Forwarded-For is "
                                      "trusted.")] = "127.0.0.1",
          name: Annotated[list[str] | None, typer.Option(metavar="HOST", help=
              "Host name under which browsers open the server; repeatable.")] = None,
          allow_root: Annotated[list[str] | None, typer.Option(metavar="PLACE", help=
              "Folder or URL that submitted recipes may read; repeatable.")] = None,
          trainings: Annotated[list[str] | None, typer.Option(metavar="[STORE=]DIR", help=
              "Folder of trainings (`--out` folders of `tokenmill train run`) on the shards of a store, beside those "
              "in its runs; repeatable. STORE is the name of a store (default: the first).")] = None,
          backend: Annotated[BackendName, typer.Option(help="Where submitted runs run, as for `tokenmill run`.")] =
          BackendName.process,
          workers: WorkersOpt = None, address: AddressOpt = None, allow_custom_stages: CodeOpt = False,
          insecure_local: InsecureOpt = False) -> None:
    """Serve stores to browsers and programs, over HTTP.

    By default, only programs on this machine can connect. With another --host the server needs a token, and TLS or a
    proxy that speaks TLS. The server keeps no data of its own: everything is in the stores. See docs/service.md.

    \b
    Examples:
      tokenmill serve --store store
      tokenmill serve --store web=s3://bucket/store --token-file token --behind-proxy --name mill.example
    """
    try:
        from pipeline.service.serve import run_server
        from pipeline.service.settings import OPERATOR_TOKEN, VIEWER_TOKEN, ServiceSettings, read_token
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise UserError(f"the service needs the package '{e.name}', which is not installed; pip install "
                        f"'tokenmill[service]'") from None
    stores = named_stores(store or [os.environ.get("TOKENMILL_STORE", "store")])
    settings = ServiceSettings(stores,
                               host,
                               port,
                               viewer_token=read_token(VIEWER_TOKEN, viewer_token_file),
                               operator_token=read_token(OPERATOR_TOKEN, token_file),
                               certificate=certificate,
                               key=key,
                               behind_proxy=behind_proxy,
                               proxy=proxy,
                               names=tuple(name or ()),
                               allowed_roots=tuple(allow_root or ()),
                               backend=backend.value,
                               workers=workers,
                               address=address,
                               insecure_local=insecure_local,
                               allow_code=allow_custom_stages,
                               trainings=training_folders(trainings or [], stores))
    run_server(settings, lambda url: typer.echo(f"serving {', '.join(settings.stores)} at {url} (Ctrl-C ends it)"))


def named_stores(options: list[str]) -> dict[str, str]:
    """Parse the values of --store (STORE, or NAME=STORE) into {name: folder or URL}. Raises BadUsage for a local store
    that does not exist, for two stores with one name, and for a name that cannot be part of a page's address."""
    stores: dict[str, str] = {}
    for each in options:
        name, equals, root = each.partition("=")
        if not equals or "/" in name:                             # no name, or an `=` in the path
            root = each
            name = PurePosixPath(open_store(root).root).name or "store"
        if not name.isprintable() or name in ("", ".", "..") or "/" in name or len(name) > 80:
            raise BadUsage(f"--store {each!r}: {name!r} cannot be the name of a store; give --store NAME=STORE")
        if name in stores:
            raise BadUsage(f"--store {each}: there is a store called '{name}' already; give --store NAME=STORE")
        stores[name] = open_store(root).root
    return stores


def training_folders(given: list[str], stores: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Parse the values of --trainings (DIR, or STORE=DIR) into {name of a store: folders of trainings}. A folder
    without the name of a store belongs to the first store."""
    folders: dict[str, tuple[str, ...]] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals or name not in stores:                      # no name, or an `=` in the path
            name, folder = next(iter(stores)), each
        folders[name] = (*folders.get(name, ()), os.path.abspath(folder))
    return folders
