"""Prepare weights for publication: half precision, and provenance without local paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from veca.checkpoint.format import CheckpointError, read_safetensors, write_tensors
from veca.errors import ArgumentError
from veca.model import Veca
from veca.utils.files import atomic_path
from veca.utils.text import excerpt

HEAD, PREPROCESSOR = "head.safetensors", "preprocessor_config.json"
# A path inside a text: after white space, punctuation or the start of it.
_PATH = re.compile(r"(?<![^\s@=,;:'\"(\[])(?:file://)?(?:~\w*|\.\.|[A-Za-z]:)?(?:[/\\][^/\\\s@,;:'\")\]]+)+[/\\]?")
# A text that is a path as a whole.
_WHOLE = re.compile(r"(?:file://)?(?:/|~|\.\.[/\\]|[A-Za-z]:[/\\]|\\\\).*", re.DOTALL)


@torch.no_grad()
def cast(model: Veca, dtype: torch.dtype) -> Veca:
    """Convert a model in place; `ArgumentError` if a value does not fit, or bfloat16 would lose less."""
    _check_values_fit(model.state_dict(), dtype)
    return model.to(dtype)


def carry_along(source: Path, to: Path, dtype: torch.dtype | None) -> None:
    """Copy what `veca finetune` wrote beside the weights to another folder: preprocessing, and a segmenter's head.

    The head is converted to `dtype` as `cast` does. Such files of a model that was there before are removed.
    """
    for name in (HEAD, PREPROCESSOR):
        if not (source / name).is_file():
            if (to / "model.safetensors").is_file():  # of the model to be replaced
                (to / name).unlink(missing_ok=True)
        elif name == HEAD:
            _copy_head(source / HEAD, to / HEAD, dtype)
        else:
            with atomic_path(to / name) as part:
                part.write_bytes((source / name).read_bytes())


def _copy_head(file: Path, to: Path, dtype: torch.dtype | None) -> None:
    try:
        tensors, metadata = read_safetensors(file)
        if dtype:
            _check_values_fit(tensors, dtype)
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    except ArgumentError:
        raise
    except (ValueError, RuntimeError) as error:
        problem = f"damaged, or no head of `veca finetune segment`: {excerpt(str(error))}"
        raise CheckpointError(f"{file}: {problem}") from error
    with atomic_path(to) as part:
        write_tensors(part, tensors, metadata)


def _check_values_fit(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise if a value is not finite or overflows in `dtype`, or float16 loses more than bfloat16 would."""
    lost = {torch.float16: 0.0, torch.bfloat16: 0.0}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ArgumentError(f"{excerpt(name)} has values that are not finite; such weights are of no use")
        if not tensor.to(dtype).isfinite().all():
            values = f"a value of {float(tensor.abs().max()):.4g}, {dtype} ends at {torch.finfo(dtype).max:.4g}"
            raise ArgumentError(f"{excerpt(name)} has {values}; choose bfloat16 instead")
        for kind in lost:
            lost[kind] += float((tensor.double() - tensor.to(kind).double()).square().sum())
    half, brain = (lost[kind] ** 0.5 for kind in (torch.float16, torch.bfloat16))
    if dtype == torch.float16 and half > brain:
        raise ArgumentError(f"float16 is off by {half:.2g} in all, bfloat16 by {brain:.2g}; choose bfloat16 instead")


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
    return _file_name(value) if _WHOLE.fullmatch(value) else _PATH.sub(lambda match: _file_name(match[0]), value)


def _file_name(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]
