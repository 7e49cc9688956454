"""What the commands share: the two consoles, options, the model that these name, and how a run stops."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from veca.checkpoint import load_or_random
from veca.checkpoint.pretrained import pretrained_name
from veca.errors import needs_extra
from veca.model import Veca
from veca.utils.console import PlainConsole, as_message
from veca.utils.device import choose_device
from veca.utils.signals import exit_status
from veca.utils.text import origin

out, err = PlainConsole(), PlainConsole(stderr=True)

MOST_WORKERS = 1024

_NAMED = "A name, a .safetensors file or folder, or a released .pt checkpoint."
Model = Annotated[str, typer.Option(help=_NAMED)]
Source = Annotated[str, typer.Argument(help=_NAMED)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps …; auto takes an accelerator where there is one.")]


def _budget(text: str) -> int | None:
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no budget; it takes one whole number, as 32, or all") from None


Cores = Annotated[
    int | None,
    typer.Option(parser=_budget, metavar="N", help="Budget: how many cores, 1 to 64, or all.", show_default="all"),
]
Size = Annotated[int, typer.Option(help="Side in pixels, a multiple of 16.")]
AtOnce = Annotated[
    int | None, typer.Option(min=1, max=65_536, help="Pictures per forward pass.", show_default="by their size")
]
Workers = Annotated[
    int | None, typer.Option(min=0, max=MOST_WORKERS, help="Decoding processes.", show_default="one per CPU, at most 8")
]
Restart = Annotated[bool, typer.Option("--restart", help="Begin anew, whatever the folder holds.")]


_UsageError: Any = typer.BadParameter.__mro__[1]
"""Click's class. Typer does not export it, and some versions bring their own Click."""


class Commands(TyperGroup):
    """The commands of the command line. What is wrong with their usage is said in printable text."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _printable_usage():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _printable_usage():
            return super().invoke(ctx)


@contextmanager
def _printable_usage() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        error.message = as_message(error.message)
        raise


def load_model(source: str, device: str) -> Veca:
    """The model a user named, where it was asked for; random weights and those that ship are announced."""
    model = load_or_random(source, device=choose_device(device))
    say_if_random(model, source)
    if name := pretrained_name(source):
        err.print(f"Weights: {name}, {origin(model.provenance)}.", soft_wrap=True)
    return model


def say_if_random(model: Veca, source: str) -> None:
    if model.provenance.get("weights") == "random":
        err.print(
            f"The weights are random: none ship for {source} yet. Name trained ones for features that mean something.",
            style="bold yellow",
        )


def workers_of(asked: int | None, most: int | None = 8) -> int:
    """As asked for; else one for each CPU that this process may use, up to `most`."""
    if asked is not None:
        return asked
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return usable if most is None else min(most, usable)


def warn(text: str) -> None:
    err.print(as_message(text), style="yellow", soft_wrap=True)


def register_timm_models(teacher: str) -> None:
    """Make our own models known to timm if the name of a teacher is one of theirs."""
    if teacher.startswith("timm:veca_"):
        with needs_extra(f"{teacher} needs", "train"):
            import veca.hub.timm  # noqa: F401 (registers them)


@contextmanager
def stoppable(folder: Path, say: Callable[[str], None], restart: bool = False) -> Iterator[None]:
    """While a run trains in the block: if it is stopped, how to go on is said, by the first process."""
    from veca.train.stop import Interrupted

    first = os.environ.get("RANK", "0") == "0"  # of those torchrun started
    command = "The same command without --restart" if restart else "The same command"
    try:
        yield
    except Interrupted as stop:
        if first:
            say(f"Stopped, and saved in {folder}. {command} continues where this one stopped.")
        raise typer.Exit(128 + stop.number) from None
    except KeyboardInterrupt as stop:
        if first:
            say(f"Stopped at once. {command} continues from the last checkpoint in {folder}.")
        raise typer.Exit(exit_status(stop)) from None
