"""`veca report`: the page of a run or of probes."""

from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import print_path, warn
from veca.errors import ArgumentError, needs_extra


def report_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or of probes, as runs/small-stage1 or results.")],
) -> None:
    """Write report.html again from what `veca distill`, `veca finetune` or `veca probe` left in a folder.

    For probes also report.md, rows.csv and the curves.
    """
    from veca.probe.results import is_results_folder
    from veca.train.logger import is_finetune_run, is_run

    tuned, results = is_finetune_run(folder), is_results_folder(folder)
    run = is_run(folder) and not tuned
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder; name one that `veca distill` or `veca probe` wrote to")
    if run and results:
        raise ArgumentError(f"{folder} holds a run of `veca distill` and rows of `veca probe`: move rows/ elsewhere")
    if not (run or results or tuned):
        raise ArgumentError(
            f"{folder} is neither the folder of a run of `veca distill`, which has a recipe.yaml, nor of results of "
            "`veca probe`, which has rows/, nor of `veca finetune`, which has a finetune.json: name one of these"
        )
    if results and not tuned:
        from veca.probe.report import write_probe_report

        path, left_out = write_probe_report(folder)
        for problem in left_out:
            warn(f"left out: {problem}")
    else:
        with needs_extra("reports need", "train"):
            from veca.train.report import write_distill_report, write_finetune_report
        path = write_finetune_report(folder) if tuned else write_distill_report(folder)
    print_path("Report", path)
