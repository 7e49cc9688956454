"""Checkpoints of a run: all it takes to go on as if it had never stopped, written whole or not at all.

A checkpoint is a folder `step-00001000` with a safetensors file per kind of tensors and a `state.json` that holds the
rest and the checksums of the files. It is written under another name and renamed when it is complete. Nothing in it is
a pickle; `veca.load` takes the folder as a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from veca.checkpoint import write_tensors
from veca.errors import VecaError

_NAME = re.compile(r"step-(\d{8,})")


class DamagedError(VecaError, ValueError):
    """A checkpoint that is not what was written."""


class Saved(NamedTuple):
    step: int
    facts: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def write_checkpoint(
    folder: Path,
    step: int,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
    metadata: Mapping[str, dict[str, str]] | None = None,
) -> Path:
    """Write `folder/step-…`; `tensors` and the `metadata` of their files go by file name. An old one is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:08d}"
    part, final = folder / f".{name}.part", folder / name
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        sums = {}
        for file, named in tensors.items():
            path = part / f"{file}.safetensors"
            write_tensors(path, named, (metadata or {}).get(file))
            sums[path.name] = _checksum(path)
        # As it will be read: JSON makes keys text, and text sorts otherwise than numbers do.
        body = json.loads(json.dumps({"step": step, "facts": facts, "files": sums}))
        _write_whole(part / "state.json", json.dumps({**body, "sha256": _digest(body)}, indent=1))
        for path in part.iterdir():
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(part, final)
        _sync(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def read_checkpoint(path: Path) -> Saved:
    """What `write_checkpoint` wrote, checked; `DamagedError` if a byte of it is not as it was."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        claimed = state.pop("sha256")
        if claimed != _digest(state):
            raise DamagedError("state.json is not as it was written")
        for name, known in state["files"].items():
            if _checksum(path / name) != known:
                raise DamagedError(f"{name} is not as it was written")
        tensors = {Path(name).stem: load_file(path / name) for name in state["files"]}
        return Saved(state["step"], state["facts"], tensors)
    except DamagedError as error:
        raise DamagedError(f"{path.name}: {error}") from None
    except Exception as error:  # what damage does to a parser, nobody can list
        raise DamagedError(f"{path.name}: {type(error).__name__}: {error}") from error


def newest_checkpoint(folder: Path, say: Callable[[str], None]) -> Saved | None:
    """The newest that is whole; `say` hears of those that are not. None if there is none at all."""
    found = listed(folder)
    for path in reversed(found):
        try:
            return read_checkpoint(path)
        except DamagedError as error:
            say(f"damaged: checkpoint {error}; trying the one before it")
    if found:
        raise DamagedError(
            f"none of the {len(found)} checkpoints in {folder} can be read. "
            "Restore one from a backup, or begin anew with --overwrite"
        )
    return None


def listed(folder: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def forget_old(folder: Path, keep: int, newest: int | None = None) -> None:
    """Remove all but the newest `keep`, and what a run that was killed left half written.

    `newest` is the step that was just written: what is later could not be read when the run went on from before it.
    """
    found = listed(folder)
    later = [path for path in found if newest is not None and int(path.name.removeprefix("step-")) > newest]
    for path in [*later, *[path for path in found if path not in later][:-keep]]:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".step-*.part"):
        shutil.rmtree(path, ignore_errors=True)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_whole(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Have the disk hold it, not only the system."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
