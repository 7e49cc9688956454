"""Options of the command line that mean the same in several commands, each declared once."""

import math
import re
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.models import OptionInfo

from veca.data.records import DecodeChoice
from veca.images import Fit

_ENTRIES = tomllib.loads((files("veca.cli") / "options.toml").read_text(encoding="utf-8"))


def option(key: str, **more: Any) -> OptionInfo:
    """The option of that key in options.toml: "workers", or "embed.workers" for one of a single command.

    The type of one with several values is to be Any: Typer takes a tuple type for an option of several words.
    """
    group, _, name = key.rpartition(".")
    entry = _ENTRIES[group or "shared"][name] | more
    if parser := entry.pop("parser", None):
        entry["parser"] = _PARSERS[parser]
    return typer.Option(*entry.pop("names", ()), **entry)


def _parse_patch(text: str) -> tuple[int, ...]:
    if match := re.fullmatch(r"(\d{1,9})x(\d{1,9})", text):
        return tuple(map(int, match.groups()))
    raise ValueError


def _parse_box(text: Any) -> tuple[int, ...]:
    if isinstance(text, tuple):  # a default, which Typer parses too
        return text
    if match := re.fullmatch(r"(\d{1,9}),(\d{1,9}),(\d{1,9}),(\d{1,9})", text):
        return tuple(map(int, match.groups()))
    raise typer.BadParameter(f"{text!r}: expected X,Y,WIDTH,HEIGHT in pixels, as 40,60,200,120")


def _parse_budget(text: str) -> int | None:
    try:
        return None if text == "all" else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no budget; expected one whole number, as 32, or all") from None


def _parse_served_budget(text: str) -> int | str | None:
    return text if text == "auto" else _parse_budget(text)


def _parse_image_size(text: Any) -> tuple[int, ...]:
    if isinstance(text, tuple):  # a default, which Typer parses too
        return text
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if match and all(16 <= int(side) <= 16_384 for side in match.groups()):
        return tuple(map(int, match.groups()))
    raise typer.BadParameter(f"{text!r}: expected WIDTHxHEIGHT, sides of 16 to 16,384 pixels, as 640x480")


def _list_parser(kind: Callable[[str], Any], expected: str, **words: Any) -> Callable[[Any], Any]:
    """A parser of values separated by commas, or of one of `words`. Numbers are finite and not below 0."""

    def parse(text: Any) -> Any:
        if isinstance(text, tuple):  # a default, which Typer parses too
            return text
        if kind is str and Path(text).exists():  # a path may have commas in it
            return (text,)
        try:
            values = [kind(part.strip()) for part in text.split(",")] if text not in words else words[text]
            if all(0 <= value < math.inf if kind in (int, float) else value for value in values):
                return tuple(values if kind is str else dict.fromkeys(values))
        except ValueError:
            pass
        raise typer.BadParameter(f"{text!r}: expected {expected}")

    return parse


_WHOLE_NUMBERS = "whole numbers separated by commas, none below 0, as 8,16"
_PARSERS = {
    "box": _parse_box,
    "budget": _parse_budget,
    "served-budget": _parse_served_budget,
    "image-size": _parse_image_size,
    "budgets": _list_parser(int, _WHOLE_NUMBERS, all=()),  # no budget stands for "all", which depends on the model
    "widths": _list_parser(float, "numbers above 0, at most 1, separated by commas, as 1,0.25; or all", all=()),
    "ints": _list_parser(int, _WHOLE_NUMBERS),
    "floats": _list_parser(float, "numbers separated by commas, none below 0, as 0.1,0.01"),
    "words": _list_parser(str, "names separated by commas"),
    "patches": _list_parser(_parse_patch, "ROWxCOLUMN, both counted from 1, as 8x5; several separated by commas"),
}

Model = Annotated[str, option("model")]
Models = Annotated[Any, option("models")]
Backbone = Annotated[str, option("backbone")]
Images = Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Image files.", show_default=False)]
_KINDS = "Image files, folders (recursive), quoted globs, tar shards, Parquet files; addresses such as s3://… too."
Sources = Annotated[list[str], typer.Argument(metavar="SOURCE…", help=_KINDS)]
OptionalSources = Annotated[
    list[str] | None, typer.Argument(metavar="SOURCE…", help=_KINDS, show_default="JPEGs made on the spot")
]

Cores = Annotated[int | None, option("cores")]
Width = Annotated[float | None, option("width")]
Widths = Annotated[Any, option("widths")]
ComputeShare = Annotated[float | None, option("compute")]
Budgets = Annotated[Any, option("budgets")]
Size = Annotated[int, option("size")]
Sizes = Annotated[Any, option("sizes")]
FitOption = Annotated[Fit, option("fit")]
CropOrNative = Annotated[Literal["crop", "native"], option("crop-or-native")]
MaxPatches = Annotated[int | None, option("max-patches")]
Device = Annotated[str, option("device")]
BatchSize = Annotated[int, option("batch-size")]
AutoBatchSize = Annotated[int | None, option("auto-batch-size")]
TrainBatchSize = Annotated[int, option("train-batch-size")]
Workers = Annotated[int | None, option("workers")]
Column = Annotated[str | None, option("column")]
Decoding = Annotated[DecodeChoice, option("decode")]
Overwrite = Annotated[bool, option("overwrite")]
ShowProgress = Annotated[bool, option("show-progress")]

Data = Annotated[str, option("data")]
DataRoot = Annotated[Path | None, option("data-root")]
Limit = Annotated[int | None, option("limit")]
SkipBad = Annotated[bool, option("skip-bad")]
Seed = Annotated[int, option("seed")]
Changes = Annotated[list[str] | None, option("changes")]
