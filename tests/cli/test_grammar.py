"""One grammar for all commands: the same option is spelled, described and parsed the same everywhere."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import veca.cli
from veca.cli.common import LazyCommand
from veca.cli.main import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands that can be run, with the words that name them."""
    command = command.load() if isinstance(command, LazyCommand) else command
    nested = getattr(command, "commands", None)
    if nested is None:
        yield path, command
    for name, each in (nested or {}).items():
        yield from commands(each, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"})


def test_summaries_are_the_first_lines_of_the_commands() -> None:
    """`veca --help` shows those of a table, because the commands themselves are slow to import."""
    group: Any = typer.main.get_command(app)
    summaries = {name: command.load().help.partition("\n\n")[0] for name, command in group.commands.items()}
    assert {name: command.help for name, command in group.commands.items()} == summaries


def test_every_option_has_help_and_one_of_few_declarations() -> None:
    helps: dict[str, set[str]] = defaultdict(set)
    for path, command in COMMANDS.items():
        for param in command.params:
            assert param.help, (path, param.name)
            helps[param.opts[0]].add(param.help)
    shared = ("--device", "--overwrite", "--progress", "--limit", "--skip-bad", "--root", "--data", "--seed", "--set")
    assert {name: len(helps[name]) for name in shared} == dict.fromkeys(shared, 1)
    # One value or a list of them; a VECA or any backbone; images per forward pass or per optimizer step.
    assert len(helps["--cores"]) == 2
    assert len(helps["--batch-size"]) == 2


def test_every_declared_option_is_used() -> None:
    folder = Path(veca.cli.__file__).parent
    declared = tomllib.loads((folder / "options.toml").read_text(encoding="utf-8"))
    used = {key for file in folder.glob("*.py") for key in re.findall(r'option\("([\w.-]+)"', file.read_text("utf-8"))}
    keys = {name if group == "shared" else f"{group}.{name}" for group, names in declared.items() for name in names}
    assert keys <= used


def test_models_and_outputs_are_options_everywhere() -> None:
    for path, command in COMMANDS.items():
        arguments = {param.name for param in command.params if param.param_type_name == "argument"}
        assert arguments <= {"image", "images", "sources", "recipe", "folder", "results"}, path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed", "photos", "--out", "f.parquet", "--batch", "4"], "--batch is now --batch-size"),
        (["embed", "photos", "--out", "f.parquet", "--save-dtype=float16"], "--save-dtype is now --dtype"),
        (["probe", "knn", "--data", "pets", "--sizes", "256"], "--sizes is now --size"),
        (["probe", "knn", "--data", "pets", "--at-once", "8"], "--at-once is now --batch-size"),
        (["probe", "classify", "--data", "pets", "--batch", "8"], "--batch is now --head-batch-size"),
        (["finetune", "classify", "--data", "x", "--out", "r", "--restart"], "--restart is now --overwrite"),
        (["distill", "r.yaml", "--dry-run", "--pictures", "9"], "--pictures is now --images"),
        (["bench", "model", "--dtype", "float32"], "--dtype is now --precision"),
        (["info", "veca_tiny"], "The model is named by --model"),
        (["convert", "a.pt", "b"], "Missing option '--model'"),
        (["export", "veca_tiny", "--out", "b.onnx"], "The model is named by --model, the output by --out"),
        (["probe", "knn", "veca_tiny", "--data", "pets"], "The model is named by --model"),
    ],
)
def test_old_spellings_are_refused_and_the_new_ones_named(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", [["cores"], ["embed", "--out", "f.parquet"], ["demo"], ["figure", "paths"]])
def test_a_model_in_place_of_an_image_is_refused(command: list[str]) -> None:
    result = run(*command, "veca_tiny", "photos")
    assert result.exit_code == 1
    assert "name the model by --model veca_tiny" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "model", "--case", "tiny:32:1", "--case", "tiny:64:1"], "separate several values by commas"),
        (["figure", "layers", "b.png", "--cores", "8;16"], "'8;16': expected whole numbers separated by commas"),
        (["figure", "features", "b.png", "--size", "big"], "'big': expected whole numbers"),
        (["figure", "similarity", "b.png", "--patch", "7"], "'7': expected ROWxCOLUMN"),
        (["figure", "similarity", "b.png", "--patch", "8,5"], "'8,5': expected ROWxCOLUMN"),
        (["probe", "classify", "--data", "mine", "--cores", "8,x"], "'8,x': expected whole numbers"),
        (["probe", "classify", "--data", "mine", "--rates", "nan"], "'nan': expected numbers"),
        (["explore", "--model", "a,,b"], "'a,,b': expected names separated by commas"),
    ],
)
def test_lists_are_separated_by_commas(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())
