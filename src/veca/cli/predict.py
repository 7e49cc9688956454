"""`veca predict`: what a fine-tuned model says of many images."""

from pathlib import Path
from typing import Annotated, Any

import typer

from veca.cli import options as opt
from veca.cli.common import count_workers, out, resumable, warn, with_settings
from veca.images import Fit
from veca.predict import load_finetuned
from veca.predict.run import predict_files
from veca.utils.device import choose_device

OF_RUN = "as the run was validated"
# Settings of the predictor.
PREDICT_OPTIONS = {
    "cores": Annotated[int | None, opt.option("cores", show_default=OF_RUN)],
    "width": Annotated[float | None, opt.option("width", show_default=OF_RUN)],
    "size": Annotated[int | None, opt.option("size", show_default=OF_RUN)],
    "fit": Annotated[Fit | None, opt.option("fit", show_default=OF_RUN)],
    "max_patches": Annotated[int | None, opt.option("max-patches", show_default=OF_RUN)],
    "batch": Annotated[int | None, opt.option("batch-size", show_default="that of the run")],
}
Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run of `veca finetune`, or a model with classes.")]
SHOWN_FAILURES = 5


def _run_predict(
    folder: Run, sources: opt.Sources, to: Annotated[Path, opt.option("predict.out")],
    top: Annotated[int | None, opt.option("predict.top")] = None, device: opt.Device = "auto",
    workers: opt.Workers = None, column: opt.Column = None, overwrite: opt.Overwrite = False,
    progress: opt.ShowProgress = True, **values: Any,
) -> None:  # fmt: skip
    """Predict classes, masks or depths of many images with a model that `veca finetune` made.

    Classes are written to a .csv file; masks and depths to a folder of PNG files in the pixels of the images.

    Example: veca predict runs/street photos/ --out predicted

    Unreadable images are listed in failures.csv and do not stop the run; the exit status is then 3.

    Interrupted? Run the same command again: a folder is continued, a .csv file is begun anew.
    """
    with resumable("Interrupted. The same command continues a folder, and begins a .csv file anew."):
        predictor = load_finetuned(folder, choose_device(device), **values)
        report = predict_files(
            predictor, sources, to, top=top, column=column, workers=count_workers(workers), overwrite=overwrite,
            progress=progress,
        )  # fmt: skip
    earlier = f", {report.resumed:,} of them in an earlier run" if report.resumed else ""
    count = f"{report.images:,} image{'s' * (report.images != 1)}"
    out.print(f"{report.out}: {count}{earlier}, {report.seconds:.1f} s", soft_wrap=True)
    if report.failures:
        for name, reason in report.failures[:SHOWN_FAILURES]:
            warn(f"{name}: {reason}")
        warn(f"{len(report.failures):,} failed: see {report.failure_file}")
        raise typer.Exit(3)


predict_command = with_settings(_run_predict, PREDICT_OPTIONS, **dict.fromkeys(PREDICT_OPTIONS))
