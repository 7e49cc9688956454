"""The `veca` command: its verbs, and how errors are shown."""

import io
import os
import sys
import warnings
from contextlib import suppress
from typing import Annotated, Any

import typer

import veca
from veca.cli.common import Commands, LazyCommand, err, out, warn
from veca.errors import VecaError
from veca.utils.console import as_message
from veca.utils.signals import terminable

# Name and summary of each command, by the panels of `veca --help`
COMMANDS = {
    "Look": {
        "demo": "Run a model on a few photos at every budget and write one HTML page that shows what it sees and "
        "costs.",
        "explore": "Serve a local page that shows what a model does with your images at any budget and resolution.",
        "figure": "Draw what a model does with images.",
        "cores": "Measure what the cores do over many images: how far they move, where they look, which ones patches "
        "attend to.",
    },
    "Use": {
        "embed": "Write features of many images to one file, or with Ray to a folder of files.",
        "predict": "Predict classes, masks or depths of many images with a model that `veca finetune` made.",
        "search": "Find images like an image or a region of one, and duplicates, by an index of their features.",
        "serve": "Serve features and classes of images, and images like them, over HTTP, in batches gathered from all "
        "requests.",
        "info": "Show what a model is: sizes, budgets, provenance, parameters, and its FLOPs at a resolution.",
        "convert": "Convert released checkpoints to ours and back; tensors stay the same bit for bit.",
        "export": "Write a model at one budget as a file that runs without veca: ONNX, torch.export or AOTInductor.",
    },
    "Train": {
        "distill": "Train a VECA to reproduce its teacher's features, as a recipe says.",
        "finetune": "Fine-tune a VECA on your own labelled images; the result is a model and a report.",
    },
    "Measure": {
        "probe": "Measure what the features of a frozen model are worth, at all budgets and sizes; rows are added to a "
        "folder.",
        "report": "Write report.html again from what `veca distill`, `veca finetune` or `veca probe` left in a folder.",
        "bench": "Measure speed and memory beside the dense ViT of the same size, and against the limits of this "
        "machine.",
    },
}


class _AllCommands(Commands):
    """The group of all commands, none of them imported."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for panel, summaries in COMMANDS.items():
            for name, summary in summaries.items():
                self.add_command(LazyCommand(name, help=summary, rich_help_panel=panel))


app = typer.Typer(
    cls=_AllCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="VECA: a vision backbone with linear cost in the number of patches and a budget of cores chosen at inference.",
    epilog="Start with `veca demo`. Exit status: 0 done, 1 failed, 2 wrong usage, 3 done but some images failed, "
    "130 interrupted (Ctrl-C), 143 or 129 stopped by SIGTERM or SIGHUP.",
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    if version:
        import torch

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
    # Triton's default so far. It warns where none is set, because a later version will have another.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
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
    import torch

    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    if not out_of_memory:
        return ""
    detail = str(error).partition("\n")[0]
    reason = f" ({detail})" if detail else ""
    return f"out of memory{reason}. Use a smaller --size or --batch-size, fewer --workers, or another --device"
