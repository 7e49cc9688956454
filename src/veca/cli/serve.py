"""`veca serve`: models behind an HTTP API."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from veca.cli import options as opt
from veca.cli.common import err, load_models, out, warn
from veca.errors import needs_extra
from veca.images import Fit

if TYPE_CHECKING:
    from veca.web.serve.schemas import ServeSettings

_DEFAULT = "{}, or as it was fine-tuned"


def serve_command(
    model: opt.Models = ("veca_tiny",),
    index: Annotated[Path | None, opt.option("serve.index")] = None,
    port: Annotated[int, opt.option("explore.port")] = 8643,
    host: Annotated[str, opt.option("explore.host")] = "127.0.0.1",
    token: Annotated[str | None, opt.option("explore.token")] = None,
    allow_host: Annotated[Any, opt.option("explore.allow-host")] = None,
    cores: Annotated[Any, opt.option("cores", parser="served-budget", show_default=_DEFAULT.format(32))] = "auto",
    width: opt.Width = None,
    size: Annotated[int | None, opt.option("size", show_default=_DEFAULT.format(256))] = None,
    fit: Annotated[Fit | None, opt.option("fit", show_default=_DEFAULT.format("crop"))] = None,
    device: opt.Device = "auto",
    precision: Annotated[Literal["float32", "bfloat16"], opt.option("embed.precision")] = "float32",
    max_batch: Annotated[int, opt.option("serve.max-batch")] = 16,
    max_wait: Annotated[float, opt.option("serve.max-wait")] = 2.0,
    queue: Annotated[int, opt.option("serve.queue")] = 256,
) -> None:
    """Serve features and classes of images, and images like them, over HTTP, in batches gathered from all requests.

    Example: veca serve --cores 32, then curl --data-binary @photo.jpg http://127.0.0.1:8643/embed
    """
    with needs_extra("the server needs", "web"):
        from veca.web.connections import listen, printed_address
        from veca.web.security import choose_token, names_of
        from veca.web.serve.schemas import ServeSettings
        from veca.web.serve.supervisor import supervise

    given = token
    token = choose_token(token, host)
    settings = ServeSettings(
        cores=cores, width=width, size=size, fit=fit, precision=precision, max_batch=max_batch, max_wait=max_wait,
        queue=queue,
    )  # fmt: skip
    with listen(host, port) as listening:
        hosts = names_of(host) | {name.lower() for name in allow_host or ()}

        def announce() -> None:
            out.print(f"Serving: {printed_address(host, listening)}", soft_wrap=True)
            if token and not given:
                out.print(f"Token: {token}", soft_wrap=True)
            err.print("Ctrl-C ends it.")

        supervise(_serve, (tuple(model), device, index, settings, hosts, token), listening, announce, warn)


def _serve(
    listening: socket.socket,
    on_ready: Callable[[], None],
    model: Sequence[str],
    device: str,
    index: Path | None,
    settings: "ServeSettings",
    hosts: set[str],
    token: str | None,
) -> None:
    """What the worker process does."""
    from veca.search.index import SearchIndex
    from veca.web.serve.app import create_service, run_service

    searched = None if index is None else SearchIndex.open(index)
    app = create_service(load_models(model, device), settings, index=searched, hosts=hosts, token=token)
    on_ready()
    run_service(app, listening)
