"""Load and create models: by pretrained name, from our files and from released checkpoints.

Pretrained weights are folders `weights/SIZE.TAG` of this package. SIZE.TAG is how timm names weights; SIZE alone means
the first of its tags in alphabetical order.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from veca.checkpoint.format import CheckpointError, StrPath, check_tensors, read_description, read_safetensors
from veca.checkpoint.released import Contents, parse_released, read_released
from veca.config import SIZES, ConfigError, VecaConfig, get_config
from veca.errors import ArgumentError, warn_caller
from veca.model import Veca
from veca.utils.text import did_you_mean, excerpt

WEIGHTS = Path(__file__).parents[1] / "weights"
"""In each folder: `model.safetensors` in half precision, `config.json`, and `README.md`, the model card."""
_MANY_LAYERS = 100
"""More layers than this take a noticeable time to build: they are built only if the file has tensors for them."""
_OTHER_FILES = {
    b"version https://git-lfs": "is a Git LFS pointer, not the weights (run `git lfs pull`)",
    b"<": "is a web page, not weights",
}
"""What is often mistaken for a checkpoint, by its first bytes."""


def list_models(pretrained: bool = False) -> list[str]:
    """Names that `create_model` takes; with `pretrained`, those of pretrained weights, as `load` takes them.

    >>> list_models()
    ['veca_tiny', 'veca_small', 'veca_small_plus', 'veca_base', 'veca_large']
    >>> list_models(pretrained=True)
    ['veca_tiny.effnetlite2_coco']
    """
    if not pretrained:
        return list(SIZES)
    # Ordered by size, then by tag; folders that begin with another name are not models.
    tagged = sorted(file.parent.name for file in WEIGHTS.glob("*.*/model.safetensors"))
    return [name for size in SIZES for name in tagged if name.partition(".")[0] == size]


def find_pretrained(name: StrPath) -> Path | None:
    """The folder of pretrained weights, named SIZE.TAG; None: there are none of that name."""
    names = list_models(pretrained=True)
    return next((WEIGHTS / full for full in names if str(name) in (full, full.partition(".")[0])), None)


def pretrained_name(source: str) -> str | None:
    """SIZE.TAG of the pretrained weights that `load` takes for `source`; None: it takes a file, or fails."""
    folder = None if Path(source).exists() else find_pretrained(source)
    return folder.name if folder else None


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
    model = load(_find_named(name)).train()
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
    path = _find_file(source)
    tensors, config, provenance = _read_contents(path)
    if config.depth > max(_MANY_LAYERS, len(tensors)):
        raise CheckpointError(f"{path}: its configuration says {config.depth} layers; it has {len(tensors)} tensors")
    # On meta nothing is allocated before the tensors have been checked; `assign` then takes them without a copy.
    with torch.device("meta"):
        model = Veca(config)
    check_tensors(path, tensors, model.state_dict())
    model.load_state_dict(tensors, assign=True)
    try:
        model.provenance = provenance
    except ArgumentError as error:
        raise CheckpointError(f"{path}: its quality-cost table: {error}") from error
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
    counts = {name: int((~tensor.float().isfinite()).sum()) for name, tensor in tensors.items()}
    if total := sum(counts.values()):
        first = next(name for name in counts if counts[name])
        values = "value" if total == 1 else "values"
        warn_caller(f"{path}: its weights hold {total:,} NaN or infinite {values}, the first in {first}")


def _find_named(name: str) -> Path:
    """The folder of pretrained weights."""
    if folder := find_pretrained(name):
        return folder
    if name in SIZES:
        raise CheckpointError(f"no weights ship for {name}; veca.create_model({name!r}) makes one with random weights")
    names = [*SIZES, *list_models(pretrained=True)]
    problem = f"no such file or folder, and no model of that name{did_you_mean(name, names)}"
    raise CheckpointError(f"{excerpt(name, 1000)}: {problem}. Names: {', '.join(names)}")


def _find_file(source: StrPath) -> Path:
    """The file that `source` names."""
    path = Path(source) if Path(source).exists() else _find_named(str(source))
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
    problem = (
        f"neither a safetensors file nor a PyTorch checkpoint; it starts with {start[:16]!r}" if start else "is empty"
    )
    problem = next((other for magic, other in _OTHER_FILES.items() if start.lower().startswith(magic)), problem)
    raise CheckpointError(f"{path}: {problem}")


def _read_safetensors_file(path: Path) -> Contents:
    """A file of ours (`veca` in its header), a released one (`config`), or one that transformers wrote (neither)."""
    try:
        tensors, metadata = read_safetensors(path)
        key = next((key for key in ("veca", "config") if key in metadata), None)
        description = read_description(metadata[key]) if key else None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged or truncated safetensors file: {error}") from error
    if not isinstance(description, dict):
        return _parse_transformers(path, tensors)
    if key == "config":
        return parse_released(path, tensors, description)
    config, provenance = description.get("config"), description.get("provenance", {})
    if not isinstance(config, dict) or not isinstance(provenance, dict):
        raise CheckpointError(f"{path}: its `veca` header has no configuration, or no provenance, that is a dictionary")
    return tensors, VecaConfig.from_dict(config), provenance


def _parse_transformers(path: Path, tensors: dict[str, Tensor]) -> Contents:
    """The contents of a folder `veca.hub.transformers` saved: names begin with `veca.`, config.json is beside.

    Other names are of a dense head or a feature pyramid, which belong to its classes.
    """
    try:
        described = read_description((path.parent / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        described = None
    if not isinstance(described, dict) or described.get("model_type") != "veca":
        problem = "its header has no `veca` entry, and there is no config.json of one beside it"
        raise CheckpointError(f"{path}: a safetensors file, but not of a VECA: {problem}")
    tensors = {name.removeprefix("veca."): each for name, each in tensors.items() if name.startswith("veca.")}
    # Fields of transformers are ignored.
    fields = {field.name: described[field.name] for field in dataclasses.fields(VecaConfig) if field.name in described}
    # transformers counts labels even where there is no classifier, so the tensor decides.
    classifier = tensors.get("head.weight")
    fields["num_classes"] = classifier.shape[0] if classifier is not None and classifier.dim() else 0
    provenance = described.get("provenance")
    return tensors, VecaConfig.from_dict(fields), provenance if isinstance(provenance, dict) else {}
