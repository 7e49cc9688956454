"""`veca export`: a model as a file that runs without veca."""

from pathlib import Path
from typing import Annotated

from rich.table import Table

from veca.checkpoint.loading import pretrained_name
from veca.cli.common import check_absent, err, load_model, out, warn
from veca.cli.options import Cores, Model, Overwrite, Width, option
from veca.export import OUTPUTS, ExportDtype, ExportFormat, export, format_of, parse_size


def export_command(
    to: Annotated[Path, option("export.out")],
    model: Model = "veca_tiny",
    cores: Cores = None,
    width: Width = None,
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
        checks = export(
            loaded, to, cores=cores, width=width, size=pixels, form=chosen, dtype=dtype, name=name, check=check
        )
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
