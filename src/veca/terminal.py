"""What the commands share: the two consoles, the options every model takes, and the model these name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from veca.checkpoint import load_or_random
from veca.device import choose_device
from veca.model import Veca
from veca.shipped import shipped_name
from veca.text import origin

out, err = Console(highlight=False), Console(stderr=True, highlight=False)

Model = Annotated[
    str, typer.Option(help="A shipped name, a .safetensors file or folder, or a released .pt checkpoint.")
]


def _budget(text: str) -> int | None:
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no budget; it takes one whole number, as 32, or all") from None


Budget = Annotated[
    int | None,
    typer.Option(parser=_budget, metavar="N", help="Budget: how many cores, 1 to 64, or all; not given: all."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps …; auto takes an accelerator where there is one.")]


def load_model(source: str, device: str) -> Veca:
    """The model a user named, where it was asked for; random weights and those that ship are announced."""
    model = load_or_random(source, device=choose_device(device))
    say_if_random(model, source)
    if name := shipped_name(source):
        err.print(f"Weights: {name}, {origin(model.provenance)}.", markup=False, soft_wrap=True)
    return model


def say_if_random(model: Veca, source: str) -> None:
    if model.provenance.get("weights") == "random":
        err.print(
            f"The weights are random: none ship for {source} yet. Name trained ones for features that mean something.",
            style="bold yellow",
        )
