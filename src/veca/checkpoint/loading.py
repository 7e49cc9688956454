"""Load and create models: by pretrained name, from our files and from released checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from veca.checkpoint.format import (
    CheckpointError,
    Contents,
    StrPath,
    check_tensors,
    parse_contents,
    parse_transformers,
    read_description,
    read_safetensors,
)
from veca.checkpoint.pretrained import find_pretrained, list_models
from veca.checkpoint.released import parse_released, read_released
from veca.config import SIZES, ConfigError, get_config
from veca.errors import warn_caller
from veca.model import Veca
from veca.utils.text import did_you_mean, excerpt

_MANY_LAYERS = 100
"""More layers than this take a noticeable time to build: they are built only if the file has tensors for them."""
_LOOKALIKES = {
    b"version https://git-lfs": "a Git LFS pointer, not the weights (run `git lfs pull`)",
    b"<!doctype html": "a web page, not weights",
    b"<html": "a web page, not weights",
}
"""What is often mistaken for a checkpoint, by its first bytes."""


def create_model(name: str, pretrained: bool = False, **overrides: Any) -> Veca:
    """A new model of a named size with random weights; `overrides` are fields of `VecaConfig`.

    With `pretrained`, the weights that `load` has under this name; the only field that can then be given is
    `num_classes`, for a new classifier.

    >>> create_model("veca_tiny", num_classes=10).head.out_features
    10
    """
    if not pretrained:
        if name in list_models(pretrained=True):
            size = name.partition(".")[0]
            raise ConfigError(f"{name} names trained weights: pass pretrained=True, or {size!r} for random ones")
        return Veca(get_config(name, **overrides))
    if fixed := [field for field in overrides if field != "num_classes"]:
        raise ConfigError(f"{', '.join(fixed)}: fixed by the weights of {name}; leave it out, or pass pretrained=False")
    folder = find_pretrained(name)
    if folder is None:
        raise CheckpointError(_unknown_name(name))
    model = load(folder).train()
    if "num_classes" in overrides:
        model.reset_classifier(overrides["num_classes"])
    return model


def load(source: StrPath, device: str | torch.device | None = None, dtype: torch.dtype | None = torch.float32) -> Veca:
    """The model in `source`, in eval mode: a pretrained name, a file or folder of ours, or a released `.pt`.

    The model is float32, whatever the file is stored in, unless another `dtype` is given; None: as stored. A file that
    cannot be loaded raises `CheckpointError`; nothing in it is executed. Weights with NaN or infinities come with a
    warning.

    >>> model = load("veca_tiny")  # pretrained weights that come with the package
    >>> model(torch.zeros(1, 3, 64, 64), cores=32).cls.shape
    torch.Size([1, 1280])
    >>> load("veca_tiny", dtype=None).norm.weight.dtype
    torch.float16
    """
    path = _find(source)
    tensors, config, provenance = _read_contents(path)
    if config.depth > max(_MANY_LAYERS, len(tensors)):
        raise CheckpointError(f"{path}: its configuration says {config.depth} layers; it has {len(tensors)} tensors")
    # On meta nothing is allocated before the tensors have been checked; `assign` then takes them without a copy.
    with torch.device("meta"):
        model = Veca(config)
    check_tensors(path, tensors, model.state_dict())
    model.load_state_dict(tensors, assign=True)
    model.provenance = provenance
    model = model.to(device=device, dtype=dtype).eval()
    _warn_if_not_finite(model, path)
    return model


def load_or_random(
    source: StrPath, device: str | torch.device | None = None, dtype: torch.dtype | None = torch.float32
) -> Veca:
    """`load`, but a named size without pretrained weights gets random ones, always the same; `provenance` says so."""
    if str(source) not in SIZES or Path(source).exists() or find_pretrained(source):
        return load(source, device, dtype)
    # Drawn on the CPU whatever the device, so that the weights are the same there; on meta nothing is drawn.
    with torch.random.fork_rng(devices=[]), torch.device("meta" if str(device) == "meta" else "cpu"):
        torch.manual_seed(0)
        model = create_model(str(source))
    model.provenance = {"weights": "random", "seed": 0}
    return model.to(device=device, dtype=dtype).eval()


@torch.no_grad()
def _warn_if_not_finite(model: Veca, path: Path) -> None:
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    # Sums are quicker than a test of every value; they may overflow where all values are finite.
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors.values()]
    if not sums or torch.stack(sums).isfinite().all():
        return
    counts = {name: int((~tensor.cpu().double().isfinite()).sum()) for name, tensor in tensors.items()}
    if total := sum(counts.values()):
        first = next(name for name in counts if counts[name])
        values = "value" if total == 1 else "values"
        warn_caller(f"{path}: its weights hold {total:,} NaN or infinite {values}, the first in {first}")


def _find(source: StrPath) -> Path:
    """The file that `source` names."""
    path = Path(source)
    if not path.exists():
        folder = find_pretrained(source)
        if folder is None:
            raise CheckpointError(_unknown_name(str(source)))
        path = folder
    if path.is_dir():
        path = path / "model.safetensors"
        if not path.is_file():
            # The folder of a run that goes on or died has its weights one or two levels below.
            below = [*path.parent.glob("*/model.safetensors"), *path.parent.glob("checkpoints/*/model.safetensors")]
            hint = f"; name one of {', '.join(sorted(str(file.parent) for file in below)[:4])}" if below else ""
            raise CheckpointError(f"{source}: the folder holds no model.safetensors{hint}")
    if not path.is_file():
        raise CheckpointError(f"{source}: not a regular file")
    return path


def _unknown_name(name: str) -> str:
    if name in SIZES:
        return f"no weights ship for {name}; veca.create_model({name!r}) makes one with random weights"
    names = [*SIZES, *list_models(pretrained=True)]
    close = did_you_mean(name, names)
    return f"{excerpt(name, 1000)}: no such file or folder, and no model of that name{close}. Names: {', '.join(names)}"


def _read_contents(path: Path) -> Contents:
    """The contents of a file, whose format is told by its first bytes."""
    with open(path, "rb") as file:
        start = file.read(64)
    if path.suffix in (".onnx", ".pt2"):
        raise CheckpointError(f"{path}: an exported file, which holds no weights to load; name what it was made from")
    try:
        if start[8:9] == b"{":  # safetensors: eight bytes of length, then JSON
            return _read_safetensors_file(path)
        if start[:2] == b"PK" or start[:1] == b"\x80":  # torch.save: a zip archive, or the older pickle
            return read_released(path)
    except ConfigError as error:
        raise CheckpointError(f"{path}: its configuration is not a VECA's: {error}") from error
    if not start:
        raise CheckpointError(f"{path}: is empty")
    for magic, kind in _LOOKALIKES.items():
        if start.lower().startswith(magic):
            raise CheckpointError(f"{path}: is {kind}")
    raise CheckpointError(f"{path}: neither a safetensors file nor a PyTorch checkpoint; it starts with {start[:16]!r}")


def _read_safetensors_file(path: Path) -> Contents:
    """A file of ours (`veca` in its header), a released one (`config`), or one that transformers wrote (neither)."""
    try:
        tensors, metadata = read_safetensors(path)
        key = next((key for key in ("veca", "config") if key in metadata), None)
        description = read_description(metadata[key]) if key else None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged or truncated safetensors file: {error}") from error
    if not isinstance(description, dict):
        return parse_transformers(path, tensors)
    return (parse_released if key == "config" else parse_contents)(path, tensors, description)
