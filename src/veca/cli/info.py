"""`veca info`: what a model is and costs."""

import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from rich.table import Table

from veca.checkpoint.loading import load_or_random, pretrained_name
from veca.cli.common import out, print_cost_table, warn_if_random
from veca.cli.options import Cores, Model, Size, Width, option
from veca.compute import TABLE_KEY, resolve_compute
from veca.config import size_name
from veca.errors import ArgumentError
from veca.flops import model_flops
from veca.inputs import resolve_width
from veca.model import Veca
from veca.utils.text import origin, printable, quoted, shorten

MAX_SIDE = 2**20  # pixels; the cost beyond it would not be meaningful

SHARES = (0.75, 0.5, 0.25)  # of the full cost, of which the settings are shown


def info_command(
    model: Model = "veca_tiny",
    size: Size = 512,
    cores: Cores = None,
    width: Width = None,
    as_json: Annotated[bool, option("info.json")] = False,
) -> None:
    """Show what a model is: sizes, budgets, provenance, parameters, and its FLOPs at a resolution.

    Without --cores and --width, FLOPs are shown for every trained one. Example: veca info --model veca_base --size 1024
    """
    loaded = load_or_random(model, device="meta", dtype=None)  # facts do not depend on the values of the weights
    config = loaded.config
    if not config.patch_size <= size <= MAX_SIDE or size % config.patch_size:
        raise ArgumentError(f"size={quoted(size)}: must be a multiple of {config.patch_size} up to {MAX_SIDE:,}")
    if cores is not None and not 1 <= cores <= config.num_cores:
        rule = f"a budget is an integer from 1 to {config.num_cores}; leave it out for every trained one"
        raise ArgumentError(f"cores={quoted(cores)}; {rule}")
    resolve_width(width, config, set())
    budgets, widths = [cores] if cores else config.budgets, config.widths if width is None else [width]
    settings = {f"{c}" if w == 1 else f"{c}, width {w:g}": (c, w) for w in widths for c in budgets}
    facts: dict[str, Any] = {
        "size": size_name(config) or "custom",
        "parameters": sum(p.numel() for p in loaded.parameters()),
        "dtype": str(loaded.norm.weight.dtype).removeprefix("torch."),
        "provenance": loaded.provenance,
        "config": config.to_dict(),
        "gflops": {name: model_flops(config, size, size, c, w) / 1e9 for name, (c, w) in settings.items()},
    }
    facts["compute"] = {share: _describe_choice(loaded, share, size) for share in SHARES}
    if as_json:
        print(json.dumps({**facts, "pixels": size}))
        return
    table = Table("", _cell(pretrained_name(model) or model), box=None, header_style="bold")
    table.add_row("size", facts["size"])
    table.add_row("parameters", f"{facts['parameters']:,} ({facts['dtype']})")
    weights = {"weights": phrase} if (phrase := origin(loaded.provenance)) else {}
    described = {**config.to_dict(), **loaded.provenance, **weights}
    for key, text in _describe_facts({key: value for key, value in described.items() if key != TABLE_KEY}):
        table.add_row(_cell(key), text if len(text) <= 100 else f"{text[:80]}… (all of it: --json)")
    for setting, gflops in facts["gflops"].items():
        table.add_row(f"GFLOPs, {size} px, C = {setting}", f"{gflops:,.2f}")
    for share, choice in facts["compute"].items():
        setting = f"C = {choice['cores']}, width {choice['width']:g}, {choice['size'][0]} px"
        worth = "" if choice["quality"] is None else f", quality {choice['quality']:.3f}"
        table.add_row(f"compute {share:g}", f"{setting}: {choice['cost']:.2f} of the cost by {choice['by']}{worth}")
    out.print(table)
    if loaded.quality_cost:
        print_cost_table(loaded.quality_cost)
    warn_if_random(loaded.provenance, model)


def _describe_facts(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Facts by name, as text. Sections of a section, as of a recipe, are named SECTION: PART; deeper ones stay in line.

    >>> list(_describe_facts({"step": 9000, "recipe": {"batch": 64, "ema": None, "schedule": {"peak": 0.001}}}))
    [('step', '9,000'), ('recipe', 'batch 64'), ('recipe: schedule', 'peak 0.001')]
    """
    for key, value in facts.items():
        name = prefix + printable(str(key)).replace("_", " ")
        parts = value if isinstance(value, Mapping) and not prefix else {}
        sections = {part: inner for part, inner in parts.items() if isinstance(inner, Mapping) and inner}
        rest = {part: inner for part, inner in parts.items() if part not in sections} if sections else value
        if text := _describe_value(rest):
            yield name, text
        yield from _describe_facts(sections, f"{name}: ")


def _describe_value(value: Any, separator: str = ", ") -> str:
    """A value of JSON as a phrase, without what is empty or null; items of a list are separated by `separator`."""
    if isinstance(value, Mapping):
        parts = {printable(str(key)).replace("_", " "): _describe_value(each, " ") for key, each in value.items()}
        nested = [printable(str(key)).replace("_", " ") for key, each in value.items() if isinstance(each, Mapping)]
        phrases = {key: f"({text})" if key in nested else text for key, text in parts.items() if text}
        return ", ".join(f"{key}{':' * key.isdigit()} {text}" for key, text in phrases.items())
    if isinstance(value, list | tuple):
        return separator.join(filter(None, map(_describe_value, value)))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return "" if value is None else printable(str(value))


def _describe_choice(model: Veca, compute: float, size: int) -> dict[str, Any]:
    with warnings.catch_warnings():  # the cost is shown
        warnings.simplefilter("ignore")
        return resolve_compute(model, compute, size, resize=True)._asdict()


def _cell(text: str) -> str:
    return shorten(printable(text), 100)
