"""Weights on disk: our safetensors files, and the checkpoints the paper's authors released.

Our file holds the tensors and, in its header, the configuration and provenance, so it needs nothing beside it; a
folder of ours is that file as `model.safetensors` with a `config.json` for people, and transformers, to read; folders
that transformers wrote are read too. Nobody vouches for a file: nothing in it is executed, no more memory is allocated
than its own size accounts for, and whatever is wrong with it is a `CheckpointError`.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from veca.checkpoint.pretrained import find_shipped, list_models
from veca.checkpoint.released import (
    config_from_released,
    from_official,
    is_literal,
    released_config,
    strip_prefixes,
    to_official,
)
from veca.checkpoint.torch_file import Unsupported, read_torch_file
from veca.config import SIZES, ConfigError, VecaConfig, did_you_mean, get_config
from veca.errors import ArgumentError, VecaError, warn_caller
from veca.model import Veca
from veca.utils.files import atomic_path
from veca.utils.text import excerpt, quoted

_MAX_DESCRIPTION = 2**24
"""Characters of the JSON that describes a model. Ours have some hundred, or some for each class."""
_MAX_CONFIG = 2**20
"""Characters of a released configuration when it is written out. Those of the authors have 3,000."""
_MAX_DEPTH = 20
"""Nesting of a configuration or of provenance."""
_MAX_STEP = 2**63
_MANY_LAYERS = 100
"""So many layers take a noticeable time to build, and are built only if the file has tensors for them."""
_FLOATS = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
}

_LOOKALIKES = {
    b"version https://git-lfs": "a Git LFS pointer, not the weights (run `git lfs pull`)",
    b"<!doctype html": "a web page, not weights",
    b"<html": "a web page, not weights",
}
"""What often arrives under the name of a checkpoint, by its first bytes."""


class CheckpointError(VecaError, ValueError):
    """A file that cannot be loaded: the message says which and what is wrong with it."""


def create_model(name: str, pretrained: bool = False, **overrides: Any) -> Veca:
    """A new model of a named size with random weights; `overrides` are fields of `VecaConfig`.

    With `pretrained`, the weights that ship under the name, as `load` has them; of the fields only `num_classes` can
    then be given, for a new classifier.

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
    shipped = find_shipped(name)
    if shipped is None:
        raise CheckpointError(_not_shipped(name))
    model = load(shipped).train()
    if "num_classes" in overrides:
        model.reset_classifier(overrides["num_classes"])
    return model


def load(
    source: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Veca:
    """The model in `source`: a shipped name, a file or folder of ours, or a released `.pt`. It comes in eval mode.

    Whatever a file is stored in, the model is float32 unless another `dtype` is asked for; None: as stored. A file that
    cannot be loaded raises `CheckpointError`; nothing in one is executed. Weights with NaN or infinities come with a
    warning.

    >>> model = load("veca_tiny")  # weights that ship
    >>> model(torch.zeros(1, 3, 64, 64), cores=32).cls.shape
    torch.Size([1, 1280])
    >>> load("veca_tiny", dtype=None).norm.weight.dtype
    torch.float16
    """
    path = _find(source)
    tensors, config, provenance = _read(path)
    if config.depth > max(_MANY_LAYERS, len(tensors)):
        raise CheckpointError(
            f"{path}: its configuration says {config.depth} layers, but it has {len(tensors)} tensors"
        )
    with torch.device("meta"):
        model = Veca(config)
    _check_tensors(path, tensors, {name: tensor.shape for name, tensor in model.state_dict().items()})
    model.load_state_dict(tensors, assign=True)
    model.provenance = provenance
    model = model.to(device=device, dtype=dtype).eval()
    if problem := _not_finite(model):
        warn_caller(f"{path}: {problem}")
    return model


@torch.no_grad()
def _not_finite(model: Veca) -> str:
    """What is to be said of NaN and infinities in the weights; empty if there are none."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    # A sum is quicker than a test of every value; it may overflow where all are finite.
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors.values()]
    if not sums or torch.stack(sums).isfinite().all():
        return ""
    counts = {name: int((~tensor.cpu().double().isfinite()).sum()) for name, tensor in tensors.items()}
    total, first = sum(counts.values()), next((name for name in counts if counts[name]), "")
    values = "value" if total == 1 else "values"
    return f"its weights hold {total:,} NaN or infinite {values}, the first in {first}" if total else ""


def load_or_random(
    source: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Veca:
    """`load`, but a named size whose weights do not ship gets random ones, always the same; `provenance` says so."""
    if str(source) not in SIZES or Path(source).exists() or find_shipped(source):
        return load(source, device, dtype)
    # Drawn on the CPU wherever the model goes, so that the weights are the same there; on meta nothing is drawn.
    with torch.random.fork_rng(devices=[]), torch.device("meta" if str(device) == "meta" else "cpu"):
        torch.manual_seed(0)
        model = create_model(str(source))
    model.provenance = {"weights": "random", "seed": 0}
    return model.to(device=device, dtype=dtype).eval()


def save(model: Veca, path: str | os.PathLike[str]) -> None:
    """Write `path` (a `.safetensors` file, or else a folder) so that it is whole or untouched, whatever happens.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(create_model("veca_tiny", num_classes=10), f"{folder}/mine")
    ...     load(f"{folder}/mine").num_classes
    10
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_tensors(tensors, model.config.to_dict(), model.provenance, path)


def save_tensors(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    path: str | os.PathLike[str],
) -> None:
    """`save` for what is no model at hand: its tensors, on the CPU, and what describes them."""
    path = Path(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise ArgumentError(
            f"{path}: weights are written as a .safetensors file or a folder; for a .pt as the authors release it, "
            "veca convert"
        )
    description = {"config": config, "provenance": provenance}
    file = path if path.suffix == ".safetensors" else path / "model.safetensors"
    with atomic_path(file) as part:
        write_tensors(part, tensors, {"format": "pt", "veca": json.dumps(description)})
    if file is not path:
        kind = "VecaForImageClassification" if config.get("num_classes") else "VecaModel"
        # `dtype`: what transformers loads it as, whatever it is stored in, like `load`.
        told = {"model_type": "veca", "architectures": [kind], "dtype": "float32", **config, "provenance": provenance}
        classes = provenance.get("classes", ())
        if classes and len(classes) == config.get("num_classes"):  # their names, where transformers looks for them
            told |= {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
        with atomic_path(path / "config.json") as part:
            part.write_text(json.dumps(told, indent=2) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, for others to read as any other; where the disk does not take it, an `OSError`."""
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(dict(tensors), path, metadata=metadata)
        path.chmod(mode)  # safetensors makes it private
    except SafetensorError as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
        raise


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of all tensors with their names, types and shapes."""
    digest = hashlib.sha256()
    for key, tensor in model.state_dict().items():
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def save_official(model: Veca, path: str | os.PathLike[str]) -> None:
    """Write `path` in the released format: `student` under the released names, and `config`."""
    model = getattr(model, "_orig_mod", model)
    config = model.config
    if config.num_classes:
        raise CheckpointError("the released format has no classifier; call model.reset_classifier(0) first")
    student = to_official({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}, config)
    written = released_config(config, _original_config(model.provenance))
    _check_reads_back(written, student, config)
    contents: dict[str, Any] = {"student": student, "config": written}
    if _is_step(step := model.provenance.get("global_step")):
        contents["global_step"] = step
    with atomic_path(path) as part:
        torch.save(contents, part)


def _check_reads_back(written: Mapping[str, Any], student: Mapping[str, Tensor], config: VecaConfig) -> None:
    try:
        same = config_from_released(written, student) == config
    except ConfigError as error:
        raise CheckpointError(f"cannot be written in the released format: {error}") from error
    if not same:
        raise CheckpointError("the released format cannot hold this configuration; write .safetensors or a folder")


def _original_config(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the released file that a model came from; empty if it came from none."""
    try:
        config = ast.literal_eval(provenance.get("official_config", "{}"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # somebody else's words
        return {}
    return config if isinstance(config, dict) else {}


def _is_step(step: object) -> bool:
    return type(step) is int and 0 <= step < _MAX_STEP


def _find(source: str | os.PathLike[str]) -> Path:
    path = Path(source)
    if not path.exists():
        shipped = find_shipped(source)
        if shipped is None:
            raise CheckpointError(_not_shipped(str(source)))
        path = shipped
    if path.is_dir():
        path = path / "model.safetensors"
        if not path.is_file():
            raise CheckpointError(f"{source}: the folder holds no model.safetensors{_below(path.parent)}")
    if not path.is_file():
        raise CheckpointError(f"{source}: not a regular file")
    return path


def _below(folder: Path) -> str:
    """Where below a folder there are weights: of a run that is under way or died, or of several runs."""
    found = [path.parent for place in ("", "checkpoints/") for path in folder.glob(f"{place}*/model.safetensors")]
    return f"; name one of {', '.join(map(str, sorted(found)[:4]))}" if found else ""


def _not_shipped(name: str) -> str:
    if name in SIZES:
        return f"no weights ship for {name}; veca.create_model({name!r}) makes one with random weights"
    names = [*SIZES, *list_models(pretrained=True)]
    close = did_you_mean(name, names)
    return f"{excerpt(name, 1000)}: no such file or folder, and no model of that name{close}. Names: {', '.join(names)}"


def _read(path: Path) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    with open(path, "rb") as file:
        start = file.read(64)
    if path.suffix in (".onnx", ".pt2"):
        raise CheckpointError(f"{path}: an exported file, which holds no weights to load; name what it was made from")
    try:
        if start[8:9] == b"{":
            return _read_safetensors(path)
        if start[:2] == b"PK" or start[:1] == b"\x80":
            return _read_pickle(path)
    except ConfigError as error:
        raise CheckpointError(f"{path}: its configuration is not a VECA's: {error}") from error
    if not start:
        raise CheckpointError(f"{path}: is empty")
    for magic, what in _LOOKALIKES.items():
        if start.lower().startswith(magic):
            raise CheckpointError(f"{path}: is {what}")
    raise CheckpointError(f"{path}: neither a safetensors file nor a PyTorch checkpoint; it starts with {start[:16]!r}")


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file and its metadata; `ValueError` where it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            return tensors, file.metadata() or {}
    except Exception as error:  # a damaged file surfaces as almost anything
        raise ValueError(excerpt(str(error) or type(error).__name__)) from error


def read_description(text: str) -> Any:
    """JSON that somebody else wrote; `ValueError` where it is damaged, too long or nested too deeply."""
    if len(text) > _MAX_DESCRIPTION:
        raise ValueError(f"its description has {len(text):,} characters; at most {_MAX_DESCRIPTION:,} are read")
    try:
        description = json.loads(text)
        if _fits(description, len(text)):
            return description
    except RecursionError:
        pass
    raise ValueError(f"its description is nested more than {_MAX_DEPTH} levels deep")


def _fits(value: object, characters: int) -> bool:
    """Whether plain data can be written out in so many characters and is not nested deeply.

    Parts that are shared count each time: twenty lists that each hold the one before twice are a million.
    """
    todo = [(value, 0)]
    while todo:
        value, depth = todo.pop()
        if isinstance(value, str):
            characters -= len(value)
        elif isinstance(value, int):
            characters -= value.bit_length() // 4
        elif isinstance(value, list | tuple | dict):
            characters -= len(value)
            if depth > _MAX_DEPTH or characters < 0:
                return False
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            todo.extend((part, depth + 1) for part in parts)
        if characters < 0:
            return False
    return True


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    try:
        tensors, metadata = read_safetensors(path)
        key = next((key for key in ("veca", "config") if key in metadata), None)
        described = read_description(metadata[key]) if key else None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged or truncated safetensors file: {error}") from error
    if not isinstance(described, dict):
        return _from_transformers(path, tensors)
    if key == "config":
        return _from_released(path, tensors, described)
    config, provenance = described.get("config"), described.get("provenance", {})
    if not isinstance(config, dict) or not isinstance(provenance, dict):
        raise CheckpointError(f"{path}: its `veca` header has no configuration, or no provenance, that is a dictionary")
    return tensors, VecaConfig.from_dict(config), provenance


def _from_transformers(
    path: Path, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    """What `veca.hub.transformers` saved: names begin with `veca.`, and the configuration is in a file beside."""
    try:
        with open(path.parent / "config.json", encoding="utf-8") as file:
            told = read_description(file.read(_MAX_DESCRIPTION + 1))
    except (OSError, ValueError):
        told = None
    if not isinstance(told, dict) or told.get("model_type") != "veca":
        raise CheckpointError(
            f"{path}: a safetensors file, but not of a VECA: its header has no `veca` entry, and there is no "
            "config.json of one beside it"
        )
    tensors = {name.removeprefix("veca."): tensor for name, tensor in tensors.items()}
    fields = {field.name: told[field.name] for field in dataclasses.fields(VecaConfig) if field.name in told}
    classifier = tensors.get("head.weight")
    fields["num_classes"] = classifier.shape[0] if classifier is not None and classifier.dim() else 0
    provenance = told.get("provenance")
    return tensors, VecaConfig.from_dict(fields), provenance if isinstance(provenance, dict) else {}


def _read_pickle(path: Path) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    try:
        contents = read_torch_file(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused, it holds more than tensors and plain data, or is damaged: {error}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged or truncated checkpoint: {error}") from error
    student, config = (contents.get("student"), contents.get("config")) if isinstance(contents, dict) else (None, None)
    if not isinstance(student, dict) or not isinstance(config, dict):
        keys = ", ".join(excerpt(str(key), 40) for key in [*contents][:8]) if isinstance(contents, dict) else ""
        found = f"keys {keys}" if isinstance(contents, dict) else quoted(contents)
        raise CheckpointError(f"{path}: a checkpoint, but not a released VECA: no `student` and `config` ({found})")
    tensors, shape, provenance = _from_released(path, student, config)
    if _is_step(step := contents.get("global_step")):
        provenance["global_step"] = step
    return tensors, shape, provenance


def _from_released(
    path: Path, student: Mapping[Any, Any], official: Mapping[str, Any]
) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    student = {strip_prefixes(str(n)): each for n, each in student.items() if isinstance(each, Tensor | Unsupported)}
    if "query_token_chunks.0" not in student:
        raise CheckpointError(f"{path}: not a VECA's weights: it has no tensor `query_token_chunks.0`")
    if not _fits(official, _MAX_CONFIG):
        raise ConfigError(
            f"it has more than {_MAX_CONFIG:,} characters, or is nested more than {_MAX_DEPTH} levels deep"
        )
    config = config_from_released(official, student)
    depth = len({name.split(".", 2)[1] for name in student if name.startswith("blocks.")})
    if depth != config.depth:
        raise CheckpointError(f"{path}: its config says {config.depth} layers, its tensors have {depth}")
    with torch.device("meta"):
        expected = to_official(Veca(config).state_dict(), config)
    _check_tensors(path, student, {name: tensor.shape for name, tensor in expected.items()})
    plain = {key: value for key, value in official.items() if is_literal(key) and is_literal(value)}
    provenance = {"source": path.name, "official_config": repr(plain)}
    return from_official(student, config), config, provenance


def _check_tensors(path: Path, found: Mapping[str, Tensor | Unsupported], expected: Mapping[str, torch.Size]) -> None:
    def listed(names: list[str]) -> str:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return ", ".join(excerpt(name, 100) for name in names[:4]) + more

    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing {listed(missing)}")
    if foreign := [name for name in found if name not in expected]:
        problems.append(f"unknown {listed(foreign)}")
    for name, shape in expected.items():
        tensor = found.get(name)
        if tensor is None or (isinstance(tensor, Tensor) and _is_dense(tensor) and tensor.shape == shape):
            continue
        what = tensor.kind if isinstance(tensor, Unsupported) else f"{quoted(tuple(tensor.shape))} {tensor.dtype}"
        problems.append(f"{name} is {what}, expected {tuple(shape)}, floating point, dense")
    if problems:
        raise CheckpointError(f"{path}: its tensors do not fit its configuration: {'; '.join(problems[:4])}")


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is of floating-point numbers that can be computed with."""
    return tensor.dtype in _FLOATS and tensor.layout == torch.strided and not tensor.is_meta
