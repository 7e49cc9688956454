"""`veca explore`: the local web page."""

from __future__ import annotations

import secrets
import signal
import socket
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from veca.checkpoint.loading import pretrained_name
from veca.cli.common import err, load_model, out
from veca.cli.options import Device, Models, Words, parse_words
from veca.errors import ArgumentError, needs_extra
from veca.model import Veca
from veca.utils.signals import drop_lost_terminal
from veca.utils.text import quoted
from veca.web.security import is_loopback, names_of

if TYPE_CHECKING:
    from uvicorn import Server


def explore_command(
    model: Models = Words(["veca_tiny"]),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8642,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines reach requires a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(help="Token that clients must send.", show_default="random where one is required"),
    ] = None,
    allow_host: Annotated[
        Words | None,
        typer.Option(parser=parse_words, metavar="HOST,…", help="Other host names of this server, as behind a proxy."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Serve a local page that shows what a model does with your images at any budget and resolution."""
    with needs_extra("the explorer needs", "web"):
        from veca.web.app import create_app
        from veca.web.connections import create_server

    if token is not None and not (
        len(token) >= 8 and token.isascii() and token.replace("-", "").replace("_", "").isalnum()
    ):
        raise ArgumentError("--token: at least 8 letters, digits, - or _, so that it fits into an address")
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(16)
    with _bind(host, port) as listening:
        models: dict[str, Veca] = {}
        for source in model:
            models[_unique_name(pretrained_name(source) or source, models)] = load_model(source, device)
        hosts = names_of(host) | {name.lower() for name in allow_host or ()}
        app = create_app(models, hosts=hosts, token=token)
        shown = f"[{host}]" if ":" in host else socket.gethostname() if host in ("0.0.0.0", "") else host
        address = f"http://{shown}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else "")
        out.print(f"Explorer: {address}", soft_wrap=True)
        err.print("Ctrl-C ends it.")
        server = create_server(app)
        with _shut_down_on_hangup(server):
            server.run(sockets=[listening])


@contextmanager
def _shut_down_on_hangup(server: Server) -> Iterator[None]:
    """Shut the server down on SIGHUP as uvicorn does on SIGINT and SIGTERM, where a command ends on SIGHUP."""
    number = getattr(signal, "SIGHUP", None)
    if number is None or not callable(before := signal.getsignal(number)):
        yield
        return
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        drop_lost_terminal(number)
        received.append(number)
        server.handle_exit(number, frame)

    signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)
    if received:
        before(number, None)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)  # clients wait from now on, while the models are loaded, and are not refused
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ArgumentError(
            f"cannot listen on {quoted(host)}, port {port}: {reason}; choose another --port or --host"
        ) from error
    return bound


def _unique_name(source: str, taken: Container[str]) -> str:
    """Name of a model on the page: the last part of its path, made unique."""
    name = Path(source).name or source
    while name in taken:
        name += "′"
    return name
