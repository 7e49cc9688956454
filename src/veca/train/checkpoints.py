"""Training checkpoints: everything needed to resume bit for bit, written atomically.

A checkpoint is a folder `step-00001000` with one safetensors file per kind of tensor and a `state.json` that holds the
rest and the checksums of the files; nothing in it is a pickle. It is written under a temporary name and renamed when
complete. `veca.load` takes the folder of a distillation run as a model.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from veca.checkpoint import write_tensors
from veca.errors import VecaError
from veca.train.parallel import copy_into, to_host

_STEP_FOLDER = re.compile(r"step-\d{8,}")
TensorFiles = Mapping[str, Mapping[str, Tensor]]
"""Tensors by name, by file."""


class DamagedError(VecaError, ValueError):
    """A checkpoint that is not what was written."""


class Checkpoint(NamedTuple):
    """What `write_checkpoint` was given."""

    step: int
    facts: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def write_checkpoint(
    folder: Path, step: int, facts: Mapping[str, Any], tensors: TensorFiles, metadata: dict[str, str] | None = None
) -> Path:
    """Write `folder/step-…`, replacing an older one: `tensors` by file, and the `metadata` of the file `model`."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:08d}"
    part, final = folder / f".{name}.part", folder / name
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        checksums = {}
        for file, named in tensors.items():
            path = part / f"{file}.safetensors"
            write_tensors(path, named, metadata if file == "model" else None)
            checksums[path.name] = _hash_file(path)
        # Through JSON once, as it will be read: keys become text there, and text sorts differently from numbers.
        body = json.loads(json.dumps({"step": step, "facts": facts, "files": checksums}))
        text = json.dumps({**body, "sha256": _hash_json(body)}, indent=1)
        (part / "state.json").write_text(text + "\n", encoding="utf-8")
        # On disk before the rename: after a power failure a complete name must mean complete files.
        for path in part.iterdir():
            _sync_to_disk(path)
        # A folder cannot be replaced atomically, but an old one of the same step is only there after a repeated step.
        shutil.rmtree(final, ignore_errors=True)
        os.replace(part, final)
        _sync_to_disk(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify what `write_checkpoint` wrote; `DamagedError` if any byte differs."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        damaged = ["state.json"] if state.pop("sha256") != _hash_json(state) else []
        damaged += [name for name, checksum in state["files"].items() if _hash_file(path / name) != checksum]
        if not damaged:
            tensors = {Path(name).stem: load_file(path / name) for name in state["files"]}
            return Checkpoint(state["step"], state["facts"], tensors)
    except Exception as error:  # damaged files make parsers raise almost anything
        raise DamagedError(f"{path.name}: {type(error).__name__}: {error}") from error
    raise DamagedError(f"{path.name}: {damaged[0]} is not as it was written")


def newest_checkpoint(folder: Path, warn: Callable[[str], object]) -> Checkpoint | None:
    """The newest undamaged checkpoint, with a warning for each damaged one; None where there are none at all."""
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except DamagedError as error:
            warn(f"damaged: checkpoint {error}; trying the one before it")
    if paths:
        way_out = "Restore one from a backup, or begin anew with --overwrite"
        raise DamagedError(f"none of the {len(paths)} checkpoints in {folder} can be read. {way_out}")
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    paths = [path for path in folder.glob("step-*") if _STEP_FOLDER.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (len(path.name), path.name))  # by step: more digits are a larger number


def remove_old_checkpoints(newest: Path, keep: int) -> None:
    """Keep the last `keep` checkpoints up to `newest`, which was just written, and remove all others beside it.

    Later ones were damaged when the run resumed from an earlier one. Partial ones are what a killed run left.
    """
    paths = list_checkpoints(newest.parent)
    end = paths.index(newest) + 1
    for path in (*paths[end:], *paths[:end][:-keep], *newest.parent.glob(".step-*.part")):
        shutil.rmtree(path, ignore_errors=True)


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's state on the host, unsharded. Sharded tensors are gathered: every process must call this."""
    return {name: to_host(tensor) for name, tensor in module.state_dict().items()}


def optimizer_tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """State of an optimizer by parameter name and entry, on the host, unsharded."""
    return {
        f"{name}/{entry}": to_host(value)
        for name, parameter in module.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(module: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave."""
    for key, value in tensors.items():
        name, entry = key.split("/")
        parameter = module.get_parameter(name)
        state = optimizer.state[parameter]
        if value.shape == parameter.shape:  # sharded as the parameter is
            state[entry] = torch.empty_like(parameter, dtype=value.dtype)
            copy_into(state[entry], value)
        else:
            # The step count is a scalar, which fused optimizers keep on the device and others on the host.
            on_host = value.ndim == 0 and not optimizer.defaults.get("fused")
            state[entry] = value if on_host else value.to(parameter.device)


def _hash_json(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_to_disk(path: Path) -> None:
    """fsync: a file in the page cache alone is lost with the power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
