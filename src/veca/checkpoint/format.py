"""Our checkpoint format: a safetensors file whose header holds the configuration and provenance.

A folder of ours is that file as `model.safetensors`, with a `config.json` for people and for transformers to read.
Files are not trusted: nothing in them is executed, and no more memory is allocated than their own size accounts for.
The last functions prepare weights for publication: half precision, and provenance without local paths.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from veca.checkpoint.torch_file import Unsupported
from veca.errors import ArgumentError, VecaError
from veca.model import Veca
from veca.utils.files import atomic_path
from veca.utils.text import excerpt, quoted

StrPath: TypeAlias = str | os.PathLike[str]
MAX_NESTING = 20
"""Levels of a configuration or of provenance."""
_MAX_DESCRIPTION = 2**24
"""Characters of the JSON that describes a model. Ours have some hundred, plus one name per class."""
HEAD, PREPROCESSOR = "head.safetensors", "preprocessor_config.json"
FINETUNE_SETTINGS, FINETUNE_RESULT = "finetune.json", "result.json"
"""Files of a fine-tuning run beside its weights; the latter of a finished one."""
# A path inside a text: after white space, punctuation or the start of it.
_PATH = re.compile(r"(?<![^\s@=,;:'\"(\[])(?:file://)?(?:~\w*|\.\.|[A-Za-z]:)?(?:[/\\][^/\\\s@,;:'\")\]]+)+[/\\]?")
# A text that is a path as a whole.
_WHOLE = re.compile(r"(?:file://)?(?:/|~|\.\.[/\\]|[A-Za-z]:[/\\]|\\\\).*", re.DOTALL)


class CheckpointError(VecaError, ValueError):
    """A checkpoint that cannot be loaded: the message says which and what is wrong with it."""


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
    header = json.dumps({"config": config, "provenance": provenance})
    file = path if path.suffix == ".safetensors" else path / "model.safetensors"
    with atomic_path(file) as part:
        write_tensors(part, tensors, {"format": "pt", "veca": header})
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
    while stack and characters >= 0:
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
    return characters >= 0


def check_tensors(path: Path, tensors: Mapping[str, Tensor | Unsupported], expected: Mapping[str, Tensor]) -> None:
    """Raise unless a file has exactly the tensors `expected`, dense and floating point, in their shapes."""
    problems = []
    if missing := [name for name in expected if name not in tensors]:
        problems.append(f"missing {join_names(missing)}")
    if foreign := [name for name in tensors if name not in expected]:
        problems.append(f"unknown {join_names(foreign)}")
    for name, wanted in expected.items():
        match tensors.get(name):
            case Unsupported() as other:
                kind = other.kind
            # An element of float4 is two numbers: its shape says nothing.
            case Tensor() as t if (
                t.shape != wanted.shape or not t.is_floating_point() or t.dtype == torch.float4_e2m1fn_x2
            ):
                kind = f"{quoted(tuple(t.shape))} {t.dtype}"
            case _:
                continue
        problems.append(f"{name} is {kind}, expected {tuple(wanted.shape)}, floating point, dense")
    if problems:
        raise CheckpointError(f"{path}: its tensors do not fit its configuration: {'; '.join(problems[:4])}")


def join_names(names: Sequence[str]) -> str:
    """The first four names of a file's tensors, for a message."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(excerpt(name, 100) for name in names[:4]) + more


@torch.no_grad()
def cast(model: Veca, dtype: torch.dtype) -> Veca:
    """Convert a model in place; `ArgumentError` if a value is not finite or overflows."""
    _check_values_fit(model.state_dict(), dtype)
    return model.to(dtype)


def carry_along(source: Path, to: Path, dtype: torch.dtype | None) -> None:
    """Copy what `veca finetune` wrote beside the weights to another folder: preprocessing, and the head of pixels.

    The head is converted to `dtype` as `cast` does. Such files of a model that was there before are removed.
    """
    for file in (source / HEAD, source / PREPROCESSOR):
        if not file.is_file():
            if (to / "model.safetensors").is_file():  # of the model to be replaced
                (to / file.name).unlink(missing_ok=True)
            continue
        with atomic_path(to / file.name) as part:
            if file.name == PREPROCESSOR:
                part.write_bytes(file.read_bytes())
                continue
            try:
                tensors, metadata = read_safetensors(file)
                if dtype:
                    _check_values_fit(tensors, dtype)
            except ArgumentError:
                raise
            except (ValueError, RuntimeError) as error:
                problem = f"damaged, or no head of `veca finetune`: {excerpt(str(error))}"
                raise CheckpointError(f"{file}: {problem}") from error
            write_tensors(part, {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}, metadata)


def _check_values_fit(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ArgumentError(f"{excerpt(name)} has values that are not finite; such weights are of no use")
        if not tensor.to(dtype).isfinite().all():
            values = f"a value of {float(tensor.abs().max()):.4g}, {dtype} ends at {torch.finfo(dtype).max:.4g}"
            raise ArgumentError(f"{excerpt(name)} has {values}; choose bfloat16 instead")


def without_paths(value: Any) -> Any:
    """Plain data in which local paths are reduced to file names; URLs and other names stay.

    >>> without_paths({"train": ["/root/data/coco/*.tar", "s3://bucket/*.tar"], "teacher": "timm:vit@/opt/w.pt"})
    {'train': ['*.tar', 's3://bucket/*.tar'], 'teacher': 'timm:vit@w.pt'}
    """
    if isinstance(value, dict):
        return {without_paths(key): without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(each) for each in value]
    if not isinstance(value, str):
        return value
    pattern = _WHOLE if _WHOLE.fullmatch(value) else _PATH
    return pattern.sub(lambda path: re.split(r"[/\\]", path[0].rstrip("/\\"))[-1], value)
