"""The command `veca explore`."""

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

from veca.checkpoint.pretrained import pretrained_name
from veca.cli.common import Device, err, load_model, out
from veca.errors import ArgumentError, needs_extra
from veca.model import Veca
from veca.utils.signals import drop_lost_terminal
from veca.utils.text import quoted
from veca.web.security import is_loopback, names_of

if TYPE_CHECKING:
    from uvicorn import Server


def explore(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A name, a .safetensors file or folder, or a released .pt checkpoint; repeat to compare.",
            show_default="veca_tiny",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to answer at; 0: any that is free.")] = 8642,
    host: Annotated[str, typer.Option(help="Address to answer at; one that others can reach demands a token.")] = (
        "127.0.0.1"
    ),
    token: Annotated[
        str | None,
        typer.Option(help="What clients must know.", show_default="made up where one is needed"),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name this server is asked by, as behind a proxy; repeat.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Open a local page that shows, while you drag, what a model does with your picture at any budget."""
    with needs_extra("the explorer needs", "web"):
        from veca.web.app import create_app
        from veca.web.connections import create_server

    if token is not None and not (
        len(token) >= 8 and token.isascii() and token.replace("-", "").replace("_", "").isalnum()
    ):
        raise ArgumentError("--token: at least 8 letters, digits, - or _, so that it fits into an address")
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(16)
    with _bound(host, port) as bound:
        models: dict[str, Veca] = {}
        for source in model or ["veca_tiny"]:
            models[_name(pretrained_name(source) or source, models)] = load_model(source, device)
        hosts = names_of(host) | {name.lower() for name in allow_host or ()}
        app = create_app(models, hosts=hosts, token=token)
        shown = f"[{host}]" if ":" in host else socket.gethostname() if host in ("0.0.0.0", "") else host
        address = f"http://{shown}:{bound.getsockname()[1]}/" + (f"?token={token}" if token else "")
        out.print(f"Explorer: {address}", soft_wrap=True)
        err.print("Ctrl-C ends it.")
        server = create_server(app)
        with _ended_by_hangup(server):
            server.run(sockets=[bound])


@contextmanager
def _ended_by_hangup(server: Server) -> Iterator[None]:
    """Have SIGHUP end the server as it ends itself on SIGINT and SIGTERM, where a command ends on SIGHUP."""
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


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)  # from now on clients wait, and are not refused
    except (OSError, UnicodeError) as error:  # the latter: no host has such a name
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ArgumentError(
            f"cannot answer at {quoted(host)}, port {port}: {reason}; choose another --port or --host"
        ) from error
    return bound


def _name(source: str, taken: Container[str]) -> str:
    """What a model is called on the page: the end of its path, told apart where two have the same."""
    name = Path(source).name or source
    while name in taken:
        name += "′"
    return name
