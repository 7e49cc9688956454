"""The format in which the paper's authors release weights: its tensor names and its configuration, and ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from veca.checkpoint.torch_file import Unsupported
from veca.config import SIZES, ConfigError, VecaConfig, size_name
from veca.utils.text import quoted

_FAMILIES = {"small": "veca_small", "splus": "veca_small_plus", "base": "veca_base", "large": "veca_large"}
_PREFIXES = ("module.", "student.", "_orig_mod.")
_KEYS = {
    "embed_dim": ("hidden_dim",),
    "depth": ("num_layers",),
    "num_heads": ("num_heads",),
    "mlp_ratio": ("mlp_ratio",),
    "patch_size": ("patch_size",),
    "in_chans": ("in_channels",),
    "num_cores": ("num_query_tokens",),
    "core_chunk": ("nested_chunk_size", "matryoshka_chunk_size"),
    "budgets": ("nested_budgets", "matryoshka_budgets"),
    "rope_zero_fraction": ("rope_p_zero_freqs",),
    "coordinate_shift": ("rope_shift_coords",),
    "coordinate_rescale": ("rope_rescale_coords",),
}
"""Fields of ours by their released keys; older files say `matryoshka_…` where newer ones say `nested_…`."""
_OPTIONAL = ("in_chans", "budgets", "coordinate_shift", "coordinate_rescale")
"""Fields that are written only where they are not what a file without them is taken to have."""
_OFF = {"coordinate_shift": 0.0, "coordinate_rescale": 1.0}
"""What None stands for in a released file."""


def strip_prefixes(name: str) -> str:
    """A tensor's name without what DistributedDataParallel, torch.compile and the trainer put before it."""
    start = 0
    while name.startswith(_PREFIXES, start):
        start = name.index(".", start) + 1
    return name[start:]


def is_literal(value: object) -> bool:
    """Whether `ast.literal_eval(repr(value))` is the value again; for data that is not nested deeply."""
    if type(value) is dict:
        return all(is_literal(key) and is_literal(each) for key, each in value.items())
    if type(value) in (list, tuple):
        return all(map(is_literal, value))  # type: ignore[call-overload]
    return type(value) in (str, int, bool, type(None)) or (type(value) is float and math.isfinite(value))


def config_from_released(
    official: Mapping[str, Any], tensors: Mapping[str, Tensor | Unsupported] | None = None
) -> VecaConfig:
    """The configuration that a released one stands for; `output_dim` is read off the tensors."""
    for key in (
        "model_family",
        "rope_zero_freqs_from",
        "patch_embed_use_ln",
        *(k for keys in _KEYS.values() for k in keys),
    ):
        if key in official and not is_literal(official[key]):
            raise ConfigError(f"{key} is {quoted(official[key])}, which is not plain data")
    if official.get("rope_zero_freqs_from", "low") != "low" or official.get("patch_embed_use_ln"):
        raise ConfigError(
            "it needs rope_zero_freqs_from='low' and patch_embed_use_ln=False, as all released models have"
        )
    fields = _fields(official)
    for field in ("embed_dim", "depth", "num_heads", "mlp_ratio"):
        if field not in fields:
            raise ConfigError(f"it has no {_KEYS[field][0]!r}")
    projection = (tensors or {}).get("output_proj.weight")
    if isinstance(projection, Tensor) and projection.dim():
        fields["output_dim"] = projection.shape[0]
    return VecaConfig.from_dict(fields)


def _fields(official: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ours that a released configuration fixes."""
    family = _FAMILIES.get(str(official.get("model_family")))
    fields = SIZES[family].to_dict() if family else {}
    for field, keys in _KEYS.items():
        for key in keys:
            if key in official:
                fields[field] = official[key] or _OFF[field] if field in _OFF else official[key]
    return fields


def released_config(config: VecaConfig, original: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration for a released file: what still holds of `original`, that of the file the model came from, and
    the fields that fix the model.
    """
    families = {ours: theirs for theirs, ours in _FAMILIES.items()}
    family = original.get("model_family", families.get(size_name(config) or "", "custom"))
    written = {**original, "model_family": family, "rope_zero_freqs_from": "low"}
    for field, keys in _KEYS.items():
        value = getattr(config, field)
        if field in _OPTIONAL and _as_tuple(_fields(written).get(field, getattr(VecaConfig(), field))) == value:
            continue
        for key in [key for key in keys if key in original] or keys[:1]:
            written[key] = value
    return written


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _released_names(config: VecaConfig) -> dict[str, tuple[str, ...]]:
    """Our tensor names, and the released tensors each is made of."""
    names: dict[str, tuple[str, ...]] = {}

    def layer(ours: str, *released: str) -> None:
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = tuple(f"{name}.{kind}" for name in released)

    layer("patch_embed.proj", "patch_embed.proj")
    for i in range(config.num_cores // config.core_chunk):
        names[f"cores.{i}"] = (f"query_token_chunks.{i}",)
        names[f"core_states.{i}"] = (f"qcoord_chunks.{i}",)
    for i in range(config.depth - 1):
        layer(f"coordinate_heads.{i}", f"pos_linears.{i}")
    names["coordinate_alpha"] = ("pos_alpha",)
    for i in range(config.depth):
        block = f"blocks.{i}."
        layer(block + "norm1", block + "norm_attn")
        layer(block + "attn.qkv", *(block + f"attn.{part}_proj" for part in "qkv"))
        layer(block + "attn.proj", block + "attn.out_proj")
        layer(block + "norm2", block + "norm_ffn")
        layer(block + "mlp.fc1", block + "fc1")
        layer(block + "mlp.fc2", block + "fc2")
    layer("norm", "final_norm")
    if config.output_dim:
        layer("output_proj", "output_proj")
    return names


def from_official(student: Mapping[str, Tensor], config: VecaConfig) -> dict[str, Tensor]:
    """Released tensors under our names.

    Released q and k rotate adjacent channels (2j, 2j + 1) of a head; ours rotate (j, j + d/2). Reordering the rows of
    both projections alike leaves every q·k as it was.
    """
    tensors = {}
    for ours, released in _released_names(config).items():
        parts = [student[name] for name in released]
        if len(parts) == 3:
            shape = (config.num_heads, config.head_dim // 2, 2)
            parts[:2] = [part.unflatten(0, shape).transpose(1, 2).flatten(0, 2) for part in parts[:2]]
        tensor = torch.cat(parts)
        tensors[ours] = tensor.squeeze(0) if ours.startswith(("cores.", "core_states.")) else tensor
    return tensors


def to_official(tensors: Mapping[str, Tensor], config: VecaConfig) -> dict[str, Tensor]:
    """The inverse of `from_official`, bit for bit."""
    student: dict[str, Tensor] = {}
    for ours, released in _released_names(config).items():
        tensor = tensors[ours]
        parts = [tensor[None] if ours.startswith(("cores.", "core_states.")) else tensor]
        if len(released) == 3:
            shape = (config.num_heads, 2, config.head_dim // 2)
            parts = list(tensor.chunk(3))
            parts[:2] = [part.unflatten(0, shape).transpose(1, 2).flatten(0, 2) for part in parts[:2]]
        # A slice of a larger tensor would drag all of it into the file.
        student |= {name: part.clone() for name, part in zip(released, parts, strict=True)}
    return student
