"""`veca info`, `veca convert` and `veca export`: what a model is, and its files in other formats."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.table import Table

import veca
from veca.checkpoint import load_or_random, save_released
from veca.checkpoint.pretrained import pretrained_name
from veca.checkpoint.release import HEAD, carry_along, cast, without_paths
from veca.cli.common import check_absent, err, load_model, out, warn, warn_if_random
from veca.cli.options import Cores, Model, Overwrite, Size, option
from veca.config import size_name
from veca.errors import ArgumentError
from veca.flops import model_flops
from veca.hub.export import OUTPUTS, ExportDtype, ExportFormat, export, format_of, parse_size
from veca.utils.files import check_writable
from veca.utils.text import origin, printable, quoted, shorten

MAX_SIDE = 2**20  # pixels; the cost beyond it would not be meaningful


def info_command(
    model: Model = "veca_tiny",
    size: Size = 512,
    cores: Cores = None,
    as_json: Annotated[bool, option("info.json")] = False,
) -> None:
    """Show what a model is: sizes, budgets, provenance, parameters, and its FLOPs at a resolution.

    Without --cores, FLOPs are shown for every trained budget. Example: veca info --model veca_base --size 1024
    """
    loaded = load_or_random(model, device="meta", dtype=None)  # facts do not depend on the values of the weights
    config = loaded.config
    if not config.patch_size <= size <= MAX_SIDE or size % config.patch_size:
        raise ArgumentError(f"size={quoted(size)}: must be a multiple of {config.patch_size} up to {MAX_SIDE:,}")
    if cores is not None and not 1 <= cores <= config.num_cores:
        raise ArgumentError(f"cores={quoted(cores)}; a budget is an integer from 1 to {config.num_cores}")
    budgets = [cores] if cores else list(config.budgets)
    facts: dict[str, Any] = {
        "size": size_name(config) or "custom",
        "parameters": sum(p.numel() for p in loaded.parameters()),
        "dtype": str(loaded.norm.weight.dtype).removeprefix("torch."),
        "provenance": loaded.provenance,
        "config": config.to_dict(),
        "gflops": {str(c): model_flops(config, size, size, c) / 1e9 for c in budgets},
    }
    if as_json:
        print(json.dumps({**facts, "pixels": size}))
        return
    table = Table("", _cell(pretrained_name(model) or model), box=None, header_style="bold")
    table.add_row("size", facts["size"])
    table.add_row("parameters", f"{facts['parameters']:,} ({facts['dtype']})")
    weights = {"weights": phrase} if (phrase := origin(loaded.provenance)) else {}
    for key, value in {**config.to_dict(), **loaded.provenance, **weights}.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        text = text if len(text) <= 100 else f"{text[:80]}… (all of it: --json)"
        table.add_row(_cell(key.replace("_", " ")), printable(text))
    for budget, gflops in facts["gflops"].items():
        table.add_row(f"GFLOPs, {size} px, C = {budget}", f"{gflops:,.2f}")
    out.print(table)
    warn_if_random(loaded.provenance, model)


def _cell(text: str) -> str:
    return shorten(printable(text), 100)


def convert_command(
    model: Model,
    to: Annotated[Path, option("convert.out")],
    dtype: Annotated[Literal["float32", "float16", "bfloat16"] | None, option("convert.dtype")] = None,
    paths: Annotated[bool, option("convert.paths")] = True,
    overwrite: Overwrite = False,
) -> None:
    """Convert released checkpoints to ours and back; tensors stay the same bit for bit.

    Example: veca convert --model released.pt --out my-model

    To hand out weights of a run: veca convert --model runs/mine --out mine --dtype float16 --no-paths
    """
    target = to if to.suffix in (".pt", ".pth", ".safetensors") else to / "model.safetensors"
    check_absent(target, overwrite)
    check_writable(target)
    loaded = veca.load(model, dtype=None)
    stored = getattr(torch, dtype) if dtype else None
    loaded = cast(loaded, stored) if stored else loaded
    loaded.provenance = loaded.provenance if paths else without_paths(loaded.provenance)
    # A fine-tuned model has the weights of its head in a file of their own beside it.
    if (source := Path(model)).is_dir() and target != to:
        carry_along(source, to, stored)
    elif source.exists() and (head := (source if source.is_dir() else source.parent) / HEAD).is_file():
        warn(f"{head} is left behind: it is only copied from folder to folder")
    if to.suffix in (".pt", ".pth"):
        save_released(loaded, to)
    else:
        veca.save(loaded, to)
    out.print(f"Wrote {to}", soft_wrap=True)


def export_command(
    to: Annotated[Path, option("export.out")],
    model: Model = "veca_tiny",
    cores: Cores = None,
    size: Annotated[str, option("export.size")] = "dynamic",
    dtype: Annotated[ExportDtype, option("export.dtype")] = "float32",
    form: Annotated[ExportFormat | None, option("export.format")] = None,
    check: Annotated[bool, option("export.check")] = True,
    overwrite: Overwrite = False,
) -> None:
    """Write a model at one budget as a file that runs without veca: ONNX, torch.export or AOTInductor.

    Example: veca export --model veca_tiny --out veca.onnx --cores 32
    """
    chosen, pixels = format_of(to, form), parse_size(size)
    check_absent(to, overwrite)
    loaded, name = load_model(model, "cpu"), pretrained_name(model) or Path(model).stem
    if classes := loaded.config.num_classes:
        warn(f"The classifier of {classes:,} classes will not be in the file, which gives {', '.join(OUTPUTS)}.")
    with err.status(f"Exporting {model} ({chosen}, {dtype}): from seconds to minutes"):
        checks = export(loaded, to, cores=cores, size=pixels, form=chosen, dtype=dtype, name=name, check=check)
    out.print(f"Wrote {to}, {to.stat().st_size / 1e6:,.1f} MB", soft_wrap=True)
    if not check:
        return
    runtime = "onnxruntime" if chosen == "onnx" else chosen
    table = Table("images", *(f"error of {key}" for key in OUTPUTS), runtime, "PyTorch", box=None)
    for each in checks:
        errors = (f"{each.errors[key]:.1e}" for key in OUTPUTS)
        times = (f"{1e3 * seconds:,.1f} ms" for seconds in (each.seconds, each.torch_seconds))
        table.add_row(f"{each.batch} × {each.size[0]}×{each.size[1]}", *errors, *times)
    out.print(table)
    out.print("Errors are relative to PyTorch in float32; times are per image on this CPU.")
