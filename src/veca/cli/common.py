"""Helpers shared by the commands: consoles, usage errors, options of settings, models, interruption."""

import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from veca.config import SIZES
from veca.errors import ArgumentError, needs_extra
from veca.utils.console import PlainConsole, as_message
from veca.utils.cuda import start_cuda
from veca.utils.files import remove_empty
from veca.utils.signals import Interrupted, exit_status
from veca.utils.text import did_you_mean, origin

if TYPE_CHECKING:
    from veca.compute import Choice, CostTable
    from veca.model import Veca

out, err = PlainConsole(), PlainConsole(stderr=True)

# Click's class: Typer does not export it, and some versions bring their own Click.
_UsageError: Any = typer.BadParameter.__mro__[1]

# Spellings of version 0.1 and what replaced them.
RENAMED_OPTIONS = {
    "--at-once": ["--batch-size"],
    "--batch": ["--head-batch-size", "--batch-size"],  # the first one that the command has
    "--dtype": ["--precision"],
    "--pictures": ["--images"],
    "--restart": ["--overwrite"],
    "--save-dtype": ["--dtype"],
    "--sizes": ["--size"],
}


class Command(TyperCommand):
    """A command that refuses old spellings and names the new ones, and says which folder it made for --out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name: param for param in self.params for name in param.opts if name.startswith("-")}
        given = [word.partition("=")[0] for word in args if word.startswith("--") and word != "--"]
        for name in given:
            renamed = [new for new in RENAMED_OPTIONS.get(name, ()) if new in options]
            if renamed and name not in options:
                ctx.fail(f"{name} is now {renamed[0]}")
            # Lists were repeated options once; click would silently take the last of them.
            is_list = name in options and (options[name].metavar or "").endswith(",…")
            if is_list and given.count(name) > 1:
                ctx.fail(f"{name} is given more than once; separate several values by commas")
        words = [part for word in args for part in word.split("=", 1)]
        if "--fit" in options and ("--size", "native") in pairwise(words):
            limit = ", of up to --max-patches patches" * ("--max-patches" in options)
            ctx.fail(f"--size is a number of pixels; images keep their own size by --fit native{limit}")
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if "--model" in options and str(error.message).startswith("Got unexpected extra argument"):
                error.message += ". The model is named by --model" + (", the output by --out" * ("--out" in options))
            raise

    def invoke(self, ctx: Any) -> Any:
        target = ctx.params.get("to")
        folder = None if target is None or "://" in str(target) else Path(target).parent
        if folder is None or folder.exists() or os.environ.get("RANK", "0") != "0":  # of torchrun
            return super().invoke(ctx)
        try:
            with remove_empty(folder):
                return super().invoke(ctx)
        finally:
            if folder.is_dir():
                err.print(f"Made the folder {folder}", soft_wrap=True)


class LazyCommand(TyperCommand):
    """A command, or group of them, whose module `veca.cli.NAME` is imported when it is used.

    `veca --help` imports none of them, and each command only what it needs: that of all would take seconds.
    """

    def load(self) -> Any:
        """Import the command itself."""
        with resumable("Interrupted."):
            module = importlib.import_module(f"veca.cli.{self.name}")
        if group := getattr(module, f"{self.name}_app", None):
            return typer.main.get_group(group)
        holder = typer.Typer(add_completion=False)
        holder.command(self.name, cls=Command)(getattr(module, f"{self.name}_command"))
        return typer.main.get_command(holder)

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **options: Any) -> Any:
        if self.name in ("demo", "explore"):
            # Read when torch is imported. On a busy machine, threads that spin while they wait take most of the time.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        named = ("--device", "--engine", "--help", "-h")
        if self.name == "embed" and args and not any(arg.startswith(named) for arg in args):
            start_cuda()  # while torch is imported: the first features are there a second earlier
        return self.load().make_context(info_name, args, *more, **options)


class Commands(TyperGroup):
    """A group of commands. Errors in their usage are printed with control characters escaped."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _printable_usage():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _printable_usage():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            close = did_you_mean(args[0], self.commands)
            ctx.fail(f"no command {args[0]!r}{close}; choose one of {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


@contextmanager
def _printable_usage() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        error.message = as_message(error.message)
        raise


def make_group(help: str) -> typer.Typer:
    """A group of commands such as `veca probe`."""
    return typer.Typer(cls=Commands, no_args_is_help=True, help=help)


def with_settings(
    run: Callable[..., None], options: Mapping[str, Any], settings: Callable[..., Any] | None = None, **defaults: Any
) -> Callable[..., None]:
    """A command of the parameters of `run`, and in place of its `**values` those of `settings` and `defaults`.

    `options` declares them by name: fields of the class `settings` that are not in it have no option.
    """
    own = list(inspect.signature(run).parameters.values())[:-1]
    fields = inspect.signature(settings).parameters if settings else {}
    values = {name: each.default for name, each in fields.items()} | defaults
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [each.replace(kind=keyword) for each in own]
    parameters += [
        inspect.Parameter(name, keyword, default=default, annotation=options[name])
        for name, default in values.items()
        if name in options
    ]

    def command(**given: Any) -> None:
        run(**given)

    command.__doc__, command.__signature__ = run.__doc__, inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def load_model(source: str, device: str) -> "Veca":
    """Load the model a user named onto a device; say so where the weights are random or the pretrained ones."""
    from veca.checkpoint.loading import load_or_random, pretrained_name
    from veca.utils.device import choose_device

    model = load_or_random(source, device=choose_device(device))
    warn_if_random(model.provenance, source)
    if name := pretrained_name(source):
        err.print(f"Weights: {name}, {origin(model.provenance)}.", soft_wrap=True)
    return model


def load_models(sources: Sequence[str], device: str) -> "dict[str, Veca]":
    """Models to serve, by their names; those of equal names are told apart by a prime."""
    models: dict[str, Veca] = {}
    for source in sources:
        name = display_name(source)
        while name in models:
            name += "′"
        models[name] = load_model(source, device)
    return models


def display_name(source: str) -> str:
    """What a model is called in results: its pretrained name, or the last part of its path."""
    from veca.checkpoint.loading import pretrained_name

    return pretrained_name(source) or Path(source).name or source


def choose_compute(model: "Veca", compute: float, size: int, cores: object, width: object) -> "Choice":
    """What `--compute` stands for, at a size or a smaller one; say so, and refuse --cores and --width beside it."""
    from veca.compute import resolve_compute

    if cores is not None or width is not None:
        raise ArgumentError("--compute chooses cores and width: leave out --cores and --width, or --compute")
    choice = resolve_compute(model, compute, size, resize=True)
    setting = f"C = {choice.cores}, width {choice.width:g}, {choice.size[0]} px"
    err.print(f"compute {compute:g}: {setting}, {choice.cost:.2f} of the full cost by {choice.by}.", soft_wrap=True)
    return choice


def print_cost_table(table: "CostTable") -> None:
    """Print the Pareto front of a quality-cost table."""
    from rich.table import Table

    full = max(table.settings, key=lambda row: (row.size, row.cores, row.width))
    title = f"Pareto front of {len(table.settings)} settings; cost: {table.by}"
    columns = ("size", "cores", "width", "GFLOPs", *["ms"] * bool(table.device), "cost", "quality", *full.scores)
    shown = Table(*columns, title=title, header_style="bold", title_justify="left")
    for row in table.front():
        cost = (row.ms or row.gflops) / (full.ms or full.gflops)
        numbers = [row.gflops, *[row.ms] * bool(table.device), cost, row.quality, *row.scores.values()]
        shown.add_row(str(row.size), str(row.cores), f"{row.width:g}", *(f"{number:.4g}" for number in numbers))
    out.print(shown)


def warn_if_random(provenance: dict[str, Any], source: str) -> None:
    if provenance.get("weights") == "random":
        err.print(
            f"The weights are random: there are no pretrained ones for {source} yet. "
            "Name trained weights for meaningful features.",
            style="bold yellow",
        )


def check_sources(sources: Sequence[str | Path]) -> None:
    """Refuse the name of a model where images are expected: it was the first argument of some commands once."""
    from veca.checkpoint.loading import pretrained_name

    first = str(sources[0]) if sources else ""
    if not Path(first).exists() and (first in SIZES or pretrained_name(first)):
        raise ArgumentError(f"{first} is a model, not an image; name the model by --model {first}")


def check_absent(path: Path, overwrite: bool) -> None:
    """Refuse to replace a file unless `--overwrite` is given."""
    if path.exists() and not overwrite:
        raise ArgumentError(f"{path} exists; choose another name, or pass --overwrite")


def register_timm_models(teacher: str) -> None:
    """Register our own models with timm if a backbone of timm named by the user is one of them."""
    if teacher.startswith("timm:veca_"):
        with needs_extra(f"{teacher} needs", "train"):
            import veca.hub.timm  # noqa: F401 (importing it registers them)


def count_workers(workers: int | None, limit: int | None = 8) -> int:
    """The number given, else one per CPU this process may use, up to `limit`."""
    from veca.utils.device import usable_cpus

    if workers is not None:
        return workers
    return usable_cpus() if limit is None else min(limit, usable_cpus())


def warn(text: str) -> None:
    err.print(as_message(text), style="yellow", soft_wrap=True)


def print_path(label: str, path: Path) -> None:
    """One line with an absolute path, not wrapped, so that it can be copied."""
    out.print(f"{label}: {path.resolve()}", soft_wrap=True)


@contextmanager
def resumable(message: str, saved: str = "", log: Callable[[str], None] = warn) -> Iterator[None]:
    """Around work that the same command continues: when it is stopped, say so and set the exit status.

    `saved` is said instead where a run has saved everything first; of several processes, only the first speaks.
    """
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        if os.environ.get("RANK", "0") == "0":  # set by torchrun
            log(saved if isinstance(stop, Interrupted) else message)
        raise typer.Exit(exit_status(stop)) from None


def resumable_run(folder: Path, log: Callable[[str], None], overwrite: bool = False) -> AbstractContextManager[None]:
    """`resumable`, for training."""
    command = "The same command" + " without --overwrite" * overwrite
    stopped = f"Stopped at once. {command} continues from the last checkpoint in {folder}."
    return resumable(stopped, f"Stopped, and saved in {folder}. {command} continues where this one stopped.", log)
