"""`veca explore`: the local web page."""

import re
import secrets
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from veca.checkpoint.loading import pretrained_name
from veca.cli import common
from veca.cli import options as opt
from veca.cli.common import err, load_model, out
from veca.data.index import ImageIndex
from veca.errors import ArgumentError, needs_extra
from veca.model import Veca
from veca.utils.text import quoted


def explore_command(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE…",
            help="Your images, to find neighbours in: files, folders, globs, tar shards.",
            show_default="none",
        ),
    ] = None,
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
        from veca.web.connections import create_server
        from veca.web.folder import MAX_IMAGES, Folder
        from veca.web.security import is_loopback, names_of

    if token is not None and not re.fullmatch("[A-Za-z0-9_-]{8,}", token):
        raise ArgumentError("--token: at least 8 letters, digits, - or _, so that it fits into an address")
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(16)
    common.check_sources(sources or [])
    folder = Folder(ImageIndex.build(sources)) if sources else None
    if folder and len(folder) == MAX_IMAGES:
        err.print(f"Neighbours are looked for in the first {MAX_IMAGES:,} images.")
    with _bind(host, port) as listening:
        models: dict[str, Veca] = {}
        for source in model:
            name = Path(pretrained_name(source) or source).name or source
            while name in models:
                name += "′"
            models[name] = load_model(source, device)
        hosts = names_of(host) | {name.lower() for name in allow_host or ()}
        app = create_app(models, hosts=hosts, token=token, folder=folder)
        shown = f"[{host}]" if ":" in host else socket.gethostname() if host in ("0.0.0.0", "") else host
        address = f"http://{shown}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else "")
        out.print(f"Explorer: {address}", soft_wrap=True)
        err.print("Ctrl-C ends it.")
        create_server(app).run(sockets=[listening])


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)  # clients wait from now on, while the models are loaded, and are not refused
        return bound
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ArgumentError(
            f"cannot listen on {quoted(host)}, port {port}: {reason}; choose another --port or --host"
        ) from error
