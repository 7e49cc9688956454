"""`veca serve`: models behind an HTTP API."""

from pathlib import Path
from typing import Annotated, Any, Literal

from veca.cli import options as opt
from veca.cli.common import err, load_models, out
from veca.errors import needs_extra
from veca.images import Fit
from veca.search.index import SearchIndex
from veca.utils.supervisor import Supervised

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
        from veca.web.serve.app import create_service, run_service
        from veca.web.serve.schemas import ServeSettings

    worker = Supervised.attach()
    again = worker is not None and worker.listening is not None
    given = token
    token = worker.notes["token"] if worker and again else choose_token(token, host)
    settings = ServeSettings(
        cores=cores, width=width, size=size, fit=fit, precision=precision, max_batch=max_batch, max_wait=max_wait,
        queue=queue,
    )  # fmt: skip
    with (worker and worker.listening) or listen(host, port) as listening:
        hosts = names_of(host) | {name.lower() for name in allow_host or ()}
        searched = None if index is None else SearchIndex.open(index)
        app = create_service(load_models(model, device), settings, index=searched, hosts=hosts, token=token)
        if worker:
            worker.report_ready(listening, token=token)
        if not again:
            out.print(f"Serving: {printed_address(host, listening)}", soft_wrap=True)
            if token and not given:
                out.print(f"Token: {token}", soft_wrap=True)
            err.print("Ctrl-C ends it.")
        run_service(app, listening)
