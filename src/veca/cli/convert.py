"""`veca convert`: released checkpoints to ours and back, and weights made fit for others."""

from pathlib import Path
from typing import Annotated, Literal

import torch

import veca
from veca.checkpoint.format import HEAD, carry_along, cast, without_paths
from veca.checkpoint.released import save_released
from veca.cli.common import check_absent, out, warn
from veca.cli.options import Model, Overwrite, option
from veca.compute import TABLE_KEY, CostTable
from veca.teachers.outputs import attach_classifier, keep_output
from veca.utils.files import check_writable


def convert_command(
    model: Model,
    to: Annotated[Path, option("convert.out")],
    dtype: Annotated[Literal["float32", "float16", "bfloat16"] | None, option("convert.dtype")] = None,
    table: Annotated[Path | None, option("convert.table")] = None,
    output: Annotated[str | None, option("convert.output")] = None,
    classifier: Annotated[Path | None, option("convert.classifier")] = None,
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
    if output is not None:
        keep_output(loaded, output)
    if classifier is not None:
        attach_classifier(loaded, classifier)
    stored = getattr(torch, dtype) if dtype else None
    loaded = cast(loaded, stored) if stored else loaded
    if table is not None:
        loaded.provenance = {**loaded.provenance, TABLE_KEY: CostTable.read(table).to_dict()}
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
