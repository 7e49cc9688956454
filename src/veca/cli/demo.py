"""`veca demo`: one HTML page about a model on a few images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veca.checkpoint.loading import pretrained_name
from veca.cli.common import check_sources, load_model, print_path
from veca.cli.options import Device, Model, Size
from veca.inspect.demo import write_demo


def demo_command(
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGE…]", help="Your images.", show_default="four sample photos")
    ] = None,
    to: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("veca-demo/report.html"),
    model: Model = "veca_tiny",
    size: Size = 512,
    device: Device = "auto",
) -> None:
    """Run a model on a few photos at every budget and write one HTML page that shows what it sees and costs."""
    check_sources(images or [])
    name = pretrained_name(model) or model
    print_path("Report", write_demo(images, to, model=load_model(model, device), model_name=name, size=size))
