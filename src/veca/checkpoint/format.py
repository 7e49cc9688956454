"""Our checkpoint format: a safetensors file whose header holds the configuration and provenance.

A folder of ours is that file as `model.safetensors`, with a `config.json` for people and for transformers to read.
Folders that transformers wrote are read too. Files are not trusted: nothing in them is executed, and no more memory is
allocated than their own size accounts for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from veca.checkpoint.torch_file import Unsupported
from veca.config import VecaConfig
from veca.errors import ArgumentError, VecaError
from veca.model import Veca
from veca.utils.files import atomic_path
from veca.utils.text import excerpt, quoted

StrPath: TypeAlias = str | os.PathLike[str]
MAX_NESTING = 20
"""Levels of a configuration or of provenance."""
_MAX_DESCRIPTION = 2**24
"""Characters of the JSON that describes a model. Ours have some hundred, plus one name per class."""
_FLOATS = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
}


class CheckpointError(VecaError, ValueError):
    """A checkpoint that cannot be loaded: the message says which and what is wrong with it."""


class Contents(NamedTuple):
    """What a checkpoint holds, whatever its format."""

    tensors: dict[str, Tensor]
    config: VecaConfig
    provenance: dict[str, Any]


def save(model: Veca, path: StrPath) -> None:
    """Write a model to `path`, a `.safetensors` file or else a folder, atomically.

    >>> import tempfile, veca
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(veca.create_model("veca_tiny", num_classes=10), f"{folder}/mine")
    ...     veca.load(f"{folder}/mine").num_classes
    10
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_tensors(tensors, model.config.to_dict(), model.provenance, path)


def save_tensors(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], provenance: Mapping[str, Any], path: StrPath
) -> None:
    """`save` without a model: from its tensors, on the CPU, its configuration and provenance."""
    path = Path(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        way_out = "for a .pt as the authors release it, veca convert"
        raise ArgumentError(f"{path}: weights are written as a .safetensors file or a folder; {way_out}")
    # The header makes the file self-contained; config.json beside it is for people and transformers.
    description = {"config": config, "provenance": provenance}
    file = path if path.suffix == ".safetensors" else path / "model.safetensors"
    with atomic_path(file) as part:
        write_tensors(part, tensors, {"format": "pt", "veca": json.dumps(description)})
    if file is not path:
        architecture = "VecaForImageClassification" if config.get("num_classes") else "VecaModel"
        # `dtype`: what transformers loads the weights as, whatever they are stored in, like `load`.
        fields: dict[str, Any] = {"model_type": "veca", "architectures": [architecture], "dtype": "float32"}
        fields |= {**config, "provenance": provenance}
        classes = provenance.get("classes", ())
        if classes and len(classes) == config.get("num_classes"):
            fields |= {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
        with atomic_path(path / "config.json") as part:
            part.write_text(json.dumps(fields, indent=2) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of an ordinary file; `OSError` if the disk refuses it."""
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(dict(tensors), path, metadata=metadata)
        path.chmod(mode)  # safetensors makes its files private
    except SafetensorError as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise


def weights_hash(model: nn.Module, prefix: str = "") -> str:
    """SHA-256 of `prefix` and of all tensors with their names, dtypes and shapes."""
    digest = hashlib.sha256(prefix.encode())
    for key, tensor in model.state_dict().items():
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; `ValueError` if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            return tensors, file.metadata() or {}
    except Exception as error:  # a damaged file raises almost anything
        raise ValueError(excerpt(str(error) or type(error).__name__)) from error


def read_description(text: str) -> Any:
    """Parse untrusted JSON; `ValueError` if it is damaged, too long or nested too deeply."""
    if len(text) > _MAX_DESCRIPTION:
        raise ValueError(f"its description has {len(text):,} characters; at most {_MAX_DESCRIPTION:,} are read")
    try:
        description = json.loads(text)
        if is_small(description, len(text)):
            return description
    except RecursionError:
        pass
    raise ValueError(f"its description is nested more than {MAX_NESTING} levels deep")


def is_small(value: object, characters: int) -> bool:
    """Whether plain data takes at most so many characters when written out, and is not nested deeply.

    Shared parts count each time: twenty lists that each hold the one before twice would be a million.
    """
    stack = [(value, 0)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, str):
            characters -= len(value)
        elif isinstance(value, int):
            characters -= value.bit_length() // 4  # a little less than its decimal digits
        elif isinstance(value, list | tuple | dict):
            characters -= len(value)
            if depth > MAX_NESTING or characters < 0:
                return False
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            stack.extend((part, depth + 1) for part in parts)
        if characters < 0:
            return False
    return True


def parse_contents(path: Path, tensors: dict[str, Tensor], description: Mapping[str, Any]) -> Contents:
    """The contents of a file of ours: its tensors and the `veca` entry of its header."""
    config, provenance = description.get("config"), description.get("provenance", {})
    if not isinstance(config, dict) or not isinstance(provenance, dict):
        raise CheckpointError(f"{path}: its `veca` header has no configuration, or no provenance, that is a dictionary")
    return Contents(tensors, VecaConfig.from_dict(config), provenance)


def parse_transformers(path: Path, tensors: Mapping[str, Tensor]) -> Contents:
    """The contents of a folder `veca.hub.transformers` saved: names begin with `veca.`, config.json is beside."""
    try:
        with open(path.parent / "config.json", encoding="utf-8") as file:
            described = read_description(file.read(_MAX_DESCRIPTION + 1))
    except (OSError, ValueError):
        described = None
    if not isinstance(described, dict) or described.get("model_type") != "veca":
        problem = "its header has no `veca` entry, and there is no config.json of one beside it"
        raise CheckpointError(f"{path}: a safetensors file, but not of a VECA: {problem}")
    tensors = {name.removeprefix("veca."): tensor for name, tensor in tensors.items()}
    # Fields of transformers are ignored.
    fields = {field.name: described[field.name] for field in dataclasses.fields(VecaConfig) if field.name in described}
    # transformers counts labels even where there is no classifier, so the tensor decides.
    classifier = tensors.get("head.weight")
    fields["num_classes"] = classifier.shape[0] if classifier is not None and classifier.dim() else 0
    provenance = described.get("provenance")
    return Contents(tensors, VecaConfig.from_dict(fields), provenance if isinstance(provenance, dict) else {})


def check_tensors(path: Path, tensors: Mapping[str, Tensor | Unsupported], expected: Mapping[str, Tensor]) -> None:
    """Raise unless a file has exactly the tensors `expected`, dense and floating point, in their shapes."""
    problems = []
    if missing := [name for name in expected if name not in tensors]:
        problems.append(f"missing {join_names(missing)}")
    if foreign := [name for name in tensors if name not in expected]:
        problems.append(f"unknown {join_names(foreign)}")
    for name, wanted in expected.items():
        tensor = tensors.get(name)
        if tensor is None or (isinstance(tensor, Tensor) and _is_dense(tensor) and tensor.shape == wanted.shape):
            continue
        kind = tensor.kind if isinstance(tensor, Unsupported) else f"{quoted(tuple(tensor.shape))} {tensor.dtype}"
        problems.append(f"{name} is {kind}, expected {tuple(wanted.shape)}, floating point, dense")
    if problems:
        raise CheckpointError(f"{path}: its tensors do not fit its configuration: {'; '.join(problems[:4])}")


def join_names(names: Sequence[str]) -> str:
    """The first four names of a file's tensors, for a message."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(excerpt(name, 100) for name in names[:4]) + more


def _is_dense(tensor: Tensor) -> bool:
    return tensor.dtype in _FLOATS and tensor.layout == torch.strided and not tensor.is_meta
