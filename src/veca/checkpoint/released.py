"""The format of the paper's released checkpoints (`.pt`): reading, writing, and the state-dict adapter.

A released file holds `student`, tensors under the authors' names, and `config`, a dictionary under their keys.
"""

import ast
import itertools
import math
import pickle
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from veca.checkpoint.format import MAX_NESTING, CheckpointError, StrPath, check_tensors, is_small, join_names
from veca.checkpoint.torch_file import Unsupported, read_torch_file
from veca.config import SIZES, ConfigError, VecaConfig, size_name
from veca.model import Veca
from veca.utils.files import atomic_path
from veca.utils.text import quoted

Contents: TypeAlias = tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]
"""What a checkpoint holds, whatever its format: tensors under our names, configuration, provenance."""
_MAX_CONFIG = 2**20
"""Characters of a released configuration when it is written out. Those of the authors have 3,000."""
_STEPS = range(2**63)
_NAMES = tomllib.loads(Path(__file__).with_name("released_names.toml").read_text("utf-8"))
_KEYS: dict[str, list[str]] = _NAMES["keys"]
_PREFIXES = re.compile(r"^(?:(?:module|student|_orig_mod)\.)+")
"""Of tensor names, by DistributedDataParallel, the authors' trainer and torch.compile."""
_CORES = ("cores.", "core_states.")
"""Tensors with a batch axis of one in released files."""
_OPTIONAL = ("in_chans", "budgets", "widths", "coordinate_shift", "coordinate_rescale")
"""Fields that are written only where they differ from the default of a file without them."""
_OFF = {"coordinate_shift": 0.0, "coordinate_rescale": 1.0}
"""What None stands for in a released file."""


def read_released(path: Path) -> Contents:
    """The contents of a released `.pt`."""
    try:
        contents = read_torch_file(path)
    except pickle.UnpicklingError as error:
        problem = "refused, it holds more than tensors and plain data, or is damaged"
        raise CheckpointError(f"{path}: {problem}: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged or truncated checkpoint: {error}") from error
    match contents:
        case {"student": dict() as student, "config": dict() as config}:
            tensors, ours, provenance = parse_released(path, student, config)
            if type(step := contents.get("global_step")) is int and step in _STEPS:
                provenance["global_step"] = step
            return tensors, ours, provenance
    held = f"keys {join_names([*map(str, contents)])}" if isinstance(contents, dict) else quoted(contents)
    raise CheckpointError(f"{path}: a checkpoint, but not a released VECA: no `student` and `config` ({held})")


def parse_released(path: Path, student: Mapping[Any, Any], released: Mapping[str, Any]) -> Contents:
    """The contents of a released file, given its tensors and its configuration."""
    tensors = {name: each for name, each in student.items() if isinstance(each, Tensor | Unsupported)}
    student = {_PREFIXES.sub("", str(name)): each for name, each in tensors.items()}
    if "query_token_chunks.0" not in student:
        raise CheckpointError(f"{path}: not a VECA's weights: it has no tensor `query_token_chunks.0`")
    if not is_small(released, _MAX_CONFIG):
        limits = f"more than {_MAX_CONFIG:,} characters, or is nested more than {MAX_NESTING} levels deep"
        raise ConfigError(f"it has {limits}")
    config = config_from_released(released, student)
    depth = len({name.split(".", 2)[1] for name in student if name.startswith("blocks.")})
    if depth != config.depth:
        raise CheckpointError(f"{path}: its config says {config.depth} layers, its tensors have {depth}")
    with torch.device("meta"):
        ours = Veca(config).state_dict()
        check_tensors(path, student, to_released(ours, config))
    literal = {key: value for key, value in released.items() if is_literal(key) and is_literal(value)}
    # As text, so that tuples and non-text keys survive JSON: `save_released` writes them back.
    provenance = {"source": path.name, "official_config": repr(literal)}
    return from_released(student, config, ours), config, provenance


def save_released(model: Veca, path: StrPath) -> None:
    """Write `path` in the released format, atomically."""
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps
    config = model.config
    if config.num_classes:
        raise CheckpointError("the released format has no classifier; call model.reset_classifier(0) first")
    student = to_released({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}, config)
    original: Any = None
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # provenance is not trusted
        original = ast.literal_eval(model.provenance.get("official_config", "{}"))
    written = released_config(config, original if isinstance(original, dict) else {})
    try:
        reads_back = config_from_released(written, student) == config
    except ConfigError as error:
        raise CheckpointError(f"cannot be written in the released format: {error}") from error
    if not reads_back:
        raise CheckpointError("the released format cannot hold this configuration; write .safetensors or a folder")
    contents: dict[str, Any] = {"student": student, "config": written}
    if type(step := model.provenance.get("global_step")) is int and step in _STEPS:
        contents["global_step"] = step
    with atomic_path(path) as part:
        torch.save(contents, part)


def is_literal(value: object) -> bool:
    """Whether `ast.literal_eval(repr(value))` is the value again; for data that is not nested deeply."""
    if type(value) is dict:
        return all(is_literal(key) and is_literal(each) for key, each in value.items())
    if type(value) in (list, tuple):
        return all(map(is_literal, value))  # type: ignore[call-overload]
    return type(value) in (str, int, bool, type(None)) or (type(value) is float and math.isfinite(value))


def config_from_released(released: Mapping[str, Any], tensors: Mapping[str, Tensor | Unsupported]) -> VecaConfig:
    """Our form of a released configuration; `output_dim` is read from the tensors."""
    read = ("model_family", "rope_zero_freqs_from", "patch_embed_use_ln", *itertools.chain(*_KEYS.values()))
    for key in read:
        if key in released and not is_literal(released[key]):
            raise ConfigError(f"{key} is {quoted(released[key])}, which is not plain data")
    if released.get("rope_zero_freqs_from", "low") != "low" or released.get("patch_embed_use_ln"):
        raise ConfigError("it needs rope_zero_freqs_from='low' and patch_embed_use_ln=False, as released models have")
    fields = _fields(released)
    if missing := [field for field in ("embed_dim", "depth", "num_heads", "mlp_ratio") if field not in fields]:
        raise ConfigError(f"it has no {_KEYS[missing[0]][0]!r}")
    projection = tensors.get("output_proj.weight")
    if isinstance(projection, Tensor) and projection.dim():
        fields["output_dim"] = projection.shape[0]
    return VecaConfig.from_dict(fields)


def _fields(released: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields that a released configuration sets."""
    family = _NAMES["families"].get(str(released.get("model_family")))
    fields = SIZES[family].to_dict() if family else {}
    for field, keys in _KEYS.items():
        for key in keys:
            if key in released:
                fields[field] = released[key] or _OFF[field] if field in _OFF else released[key]
    return fields


def released_config(config: VecaConfig, original: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration for a released file: `original`, that of the file the model came from, updated to `config`."""
    families = {ours: theirs for theirs, ours in _NAMES["families"].items()}
    family = original.get("model_family", families.get(size_name(config) or "", "custom"))
    written = {**original, "model_family": family, "rope_zero_freqs_from": "low"}
    for field, keys in _KEYS.items():
        value = getattr(config, field)
        implied = _fields(written).get(field, getattr(VecaConfig(), field))
        if field in _OPTIONAL and (tuple(implied) if isinstance(implied, list) else implied) == value:
            continue
        for key in [key for key in keys if key in original] or keys[:1]:
            written[key] = value
    return written


def _released_names(name: str) -> list[str]:
    """The state-dict adapter: the released tensors that one of ours is made of."""
    for pattern, released in _NAMES["tensors"].items():
        name = re.sub(pattern, released, name)
    return [name.replace("qkv", f"{part}_proj") for part in "qkv"] if ".qkv." in name else [name]


def from_released(student: Mapping[str, Tensor], config: VecaConfig, names: Iterable[str]) -> dict[str, Tensor]:
    """Released tensors under our `names`.

    Released q and k rotate adjacent channels (2j, 2j + 1) of a head; ours rotate (j, j + d/2). Permuting the rows of
    both projections alike leaves every q·k unchanged.
    """
    tensors = {}
    for ours in names:
        parts = [student[name] for name in _released_names(ours)]
        tensor = torch.cat(_swap_channels(parts, config, (config.head_dim // 2, 2)))
        tensors[ours] = tensor.squeeze(0) if ours.startswith(_CORES) else tensor
    return tensors


def _swap_channels(parts: list[Tensor], config: VecaConfig, shape: tuple[int, int]) -> list[Tensor]:
    """Transpose the channels of each head, seen in this shape, in q and k of (q, k, v); other tensors stay."""
    if len(parts) == 3:
        parts[:2] = [part.unflatten(0, (config.num_heads, *shape)).transpose(1, 2).flatten(0, 2) for part in parts[:2]]
    return parts


def to_released(tensors: Mapping[str, Tensor], config: VecaConfig) -> dict[str, Tensor]:
    """The inverse of `from_released`, bit for bit."""
    student: dict[str, Tensor] = {}
    for ours, tensor in tensors.items():
        released = _released_names(ours)
        parts = list((tensor[None] if ours.startswith(_CORES) else tensor).chunk(len(released)))
        parts = _swap_channels(parts, config, (2, config.head_dim // 2))
        # Cloned: torch.save would write the whole storage of a slice.
        student |= {name: part.clone() for name, part in zip(released, parts, strict=True)}
    return student
