"""The `veca` command: its verbs, and how errors are shown."""

import io
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import torch
import typer

import veca
from veca.cli.bench import bench_app
from veca.cli.common import Command, Commands, err, out, warn
from veca.cli.convert import convert_command
from veca.cli.cores import cores_command
from veca.cli.demo import demo_command
from veca.cli.distill import distill_command
from veca.cli.embed import embed_command
from veca.cli.explore import explore_command
from veca.cli.export import export_command
from veca.cli.figure import figure_app
from veca.cli.finetune import finetune_app
from veca.cli.info import info_command
from veca.cli.probe import probe_app
from veca.cli.report import report_command
from veca.errors import VecaError
from veca.utils.console import as_message
from veca.utils.signals import terminable

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="VECA: a vision backbone with linear cost in the number of patches and a budget of cores chosen at inference.",
    epilog="Start with `veca demo`. Exit status: 0 done, 1 failed, 2 wrong usage, 3 done but some images failed, "
    "130 interrupted (Ctrl-C), 143 or 129 stopped by SIGTERM or SIGHUP.",
)
# By the panels of `veca --help`.
COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Look": {"demo": demo_command, "explore": explore_command, "figure": figure_app, "cores": cores_command},
    "Use": {"embed": embed_command, "info": info_command, "convert": convert_command, "export": export_command},
    "Train": {"distill": distill_command, "finetune": finetune_app},
    "Measure": {"probe": probe_app, "report": report_command, "bench": bench_app},
}
for _panel, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, cls=Command, rich_help_panel=_panel)(_command)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    if version:
        out.print(f"veca {veca.__version__}, torch {torch.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; errors a user can mend are one line, all others a traceback."""
    for stream in (sys.stdout, sys.stderr):
        # Where the terminal only takes ASCII, other characters are escaped. Not every stream can be reconfigured.
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_: warn(f"warning: {message}")
    try:
        try:
            with terminable():
                app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe is gone, as `head` is after ten lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries to flush again as it exits
        sys.exit(1)
    except (VecaError, OSError, MemoryError, RuntimeError) as error:
        message = _user_message(error)
        if os.environ.get("VECA_DEBUG") or not message:
            raise
        err.print(f"error: {as_message(message)}", style="red", soft_wrap=True)
        sys.exit(1)


def _user_message(error: Exception) -> str:
    """The line to print for an error that a user can mend; empty for a defect of the program."""
    if isinstance(error, VecaError | OSError):
        return str(error)
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    if not out_of_memory:
        return ""
    detail = str(error).partition("\n")[0]
    reason = f" ({detail})" if detail else ""
    return f"out of memory{reason}. Use a smaller --size or --batch-size, fewer --workers, or another --device"
