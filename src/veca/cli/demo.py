"""`veca demo`: one HTML page about a model on a few images."""

from pathlib import Path
from typing import Annotated

import typer

from veca.checkpoint.loading import pretrained_name
from veca.cli import common
from veca.cli import options as opt
from veca.cli.common import load_model, print_path
from veca.inspect.demo import write_demo


def demo_command(
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGE…]", help="Your images.", show_default="four sample photos")
    ] = None,
    to: Annotated[Path, opt.option("demo.out")] = Path("veca-demo/report.html"),
    model: opt.Model = "veca_tiny",
    size: opt.Size = 512,
    device: opt.Device = "auto",
) -> None:
    """Run a model on a few photos at every budget and write one HTML page that shows what it sees and costs."""
    common.check_sources(images or [])
    name = pretrained_name(model) or model
    print_path("Report", write_demo(images, to, model=load_model(model, device), model_name=name, size=size))
