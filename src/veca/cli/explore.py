"""`veca explore`: the local web page."""

from pathlib import Path
from typing import Annotated, Any

import typer

from veca.cli import common
from veca.cli import options as opt
from veca.cli.common import err, load_models, out
from veca.data.index import ImageIndex
from veca.errors import needs_extra


def explore_command(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE…",
            help="Your images, to find neighbours in: files, folders, globs, tar shards.",
            show_default="none",
        ),
    ] = None,
    index: Annotated[Path | None, opt.option("explore.index")] = None,
    model: opt.Models = ("veca_tiny",),
    port: Annotated[int, opt.option("explore.port")] = 8642,
    host: Annotated[str, opt.option("explore.host")] = "127.0.0.1",
    token: Annotated[str | None, opt.option("explore.token")] = None,
    allow_host: Annotated[Any, opt.option("explore.allow-host")] = None,
    device: opt.Device = "auto",
) -> None:
    """Serve a local page that shows what a model does with your images at any budget and resolution."""
    with needs_extra("the explorer needs", "web"):
        from veca.web.app import create_app
        from veca.web.connections import create_server, listen, printed_address
        from veca.web.folder import MAX_IMAGES, Folder
        from veca.web.searched import open_searched
        from veca.web.security import choose_token, names_of

    token = choose_token(token, host)
    common.check_sources(sources or [])
    folder = Folder(ImageIndex.build(sources)) if sources else None
    if folder and len(folder) == MAX_IMAGES:
        err.print(f"Neighbours are looked for in the first {MAX_IMAGES:,} images.")
    with listen(host, port) as listening:
        models = load_models(model, device)
        searched = None if index is None else open_searched(index, models)
        hosts = names_of(host) | {name.lower() for name in allow_host or ()}
        app = create_app(models, hosts=hosts, token=token, folder=folder, index=searched)
        address = printed_address(host, listening) + (f"?token={token}" if token else "")
        out.print(f"Explorer: {address}", soft_wrap=True)
        err.print("Ctrl-C ends it.")
        create_server(app).run(sockets=[listening])
