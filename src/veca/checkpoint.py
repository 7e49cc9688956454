"""Weights on disk: our safetensors files, and the checkpoints the paper's authors released.

Our file holds the tensors and, in its header, the configuration and provenance, so it needs nothing beside it; a
folder of ours is that file as `model.safetensors` with a `config.json` for people, and transformers, to read; folders
that transformers wrote are read too. Released files are pickles: only tensors and plain data are ever taken from them,
nothing in a file is executed.
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

from veca.config import SIZES, ConfigError, VecaConfig, did_you_mean, get_config, size_name
from veca.errors import ArgumentError, VecaError
from veca.files import atomic_path
from veca.model import Veca
from veca.shipped import find_shipped, list_models

_FAMILIES = {"small": "veca_small", "splus": "veca_small_plus", "base": "veca_base", "large": "veca_large"}

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
    cannot be loaded raises `CheckpointError`; nothing in one is executed.

    >>> model = load("veca_tiny")  # weights that ship
    >>> model(torch.zeros(1, 3, 64, 64), cores=32).cls.shape
    torch.Size([1, 1280])
    >>> load("veca_tiny", dtype=None).norm.weight.dtype
    torch.float16
    """
    path = _find(source)
    tensors, config, provenance = _read(path)
    with torch.device("meta"):
        model = Veca(config)
    _check_tensors(path, tensors, {name: tensor.shape for name, tensor in model.state_dict().items()})
    model.load_state_dict(tensors, assign=True)
    model.provenance = provenance
    return model.to(device=device, dtype=dtype).eval()


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
    original = ast.literal_eval(model.provenance.get("official_config", "{}"))
    contents = {"student": student, "config": {**original, **_official_config(config, original)}}
    if "global_step" in model.provenance:
        contents["global_step"] = model.provenance["global_step"]
    with atomic_path(path) as part:
        torch.save(contents, part)


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
    return f"{name}: no such file or folder, and no model of that name{close}. Names: {', '.join(names)}"


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


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        key = next((key for key in ("veca", "config") if key in metadata), None)
        described = json.loads(metadata[key]) if key else None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged or truncated safetensors file: {error}") from error
    if not isinstance(described, dict):
        return _from_transformers(path, tensors)
    if key == "config":
        return _from_released(path, tensors, described)
    config, provenance = described.get("config"), described.get("provenance", {})
    if not isinstance(config, dict) or not isinstance(provenance, dict):
        raise CheckpointError(f"{path}: its `veca` header has no configuration")
    return tensors, VecaConfig.from_dict(config), provenance


def _from_transformers(
    path: Path, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    """What `veca.hub.transformers` saved: names begin with `veca.`, and the configuration is in a file beside."""
    try:
        told = json.loads((path.parent / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or told.get("model_type") != "veca":
        raise CheckpointError(
            f"{path}: a safetensors file, but not of a VECA: its header has no `veca` entry, and there is no "
            "config.json of one beside it"
        )
    tensors = {name.removeprefix("veca."): tensor for name, tensor in tensors.items()}
    fields = {field.name: told[field.name] for field in dataclasses.fields(VecaConfig) if field.name in told}
    fields["num_classes"] = len(tensors["head.weight"]) if "head.weight" in tensors else 0
    provenance = told.get("provenance")
    return tensors, VecaConfig.from_dict(fields), provenance if isinstance(provenance, dict) else {}


def _read_pickle(path: Path) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("Please file an issue")[0].split("WeightsUnpickler error:")[-1].strip()
        raise CheckpointError(
            f"{path}: refused, it holds more than tensors and plain data, or is damaged: {reason}"
        ) from error
    except Exception as error:  # a damaged archive surfaces as almost anything
        raise CheckpointError(f"{path}: damaged or truncated checkpoint: {error}") from error
    student, config = (contents.get("student"), contents.get("config")) if isinstance(contents, dict) else (None, None)
    if not isinstance(student, dict) or not isinstance(config, dict):
        found = f"keys {', '.join(map(str, list(contents)[:8]))}" if isinstance(contents, dict) else type(contents)
        raise CheckpointError(f"{path}: a checkpoint, but not a released VECA: no `student` and `config` ({found})")
    tensors, shape, provenance = _from_released(path, student, config)
    if isinstance(contents.get("global_step"), int):
        provenance["global_step"] = contents["global_step"]
    return tensors, shape, provenance


def _from_released(
    path: Path, student: Mapping[str, Any], official: Mapping[str, Any]
) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    student = {_strip(str(name)): tensor for name, tensor in student.items() if isinstance(tensor, Tensor)}
    if "query_token_chunks.0" not in student:
        raise CheckpointError(f"{path}: not a VECA's weights: it has no tensor `query_token_chunks.0`")
    config = _config_from_official(official, student)
    depth = len({name.split(".")[1] for name in student if name.startswith("blocks.")})
    if depth != config.depth:
        raise CheckpointError(f"{path}: its config says {config.depth} layers, its tensors have {depth}")
    with torch.device("meta"):
        expected = to_official(Veca(config).state_dict(), config)
    _check_tensors(path, student, {name: tensor.shape for name, tensor in expected.items()})
    plain = {key: value for key, value in official.items() if _is_plain(key) and _is_plain(value)}
    provenance = {"source": path.name, "official_config": repr(plain)}
    return from_official(student, config), config, provenance


def _check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    def listed(names: list[str]) -> str:
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing {listed(missing)}")
    if foreign := [name for name in found if name not in expected]:
        problems.append(f"unknown {listed(foreign)}")
    for name, shape in expected.items():
        tensor = found.get(name)
        if tensor is None or (tensor.shape == shape and tensor.is_floating_point() and tensor.layout == torch.strided):
            continue
        what = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.layout}"
        problems.append(f"{name} is {what}, expected {tuple(shape)}, floating point, dense")
    if problems:
        raise CheckpointError(f"{path}: its tensors do not fit its configuration: {'; '.join(problems[:4])}")


def _strip(name: str) -> str:
    while name.startswith(("module.", "student.", "_orig_mod.")):
        name = name.partition(".")[2]
    return name


def _is_plain(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, RuntimeError):
        return False


def _config_from_official(official: Mapping[str, Any], student: Mapping[str, Tensor]) -> VecaConfig:
    """Older files say `matryoshka_…` where newer ones say `nested_…`."""
    if official.get("rope_zero_freqs_from", "low") != "low" or official.get("patch_embed_use_ln"):
        raise ConfigError(
            "it needs rope_zero_freqs_from='low' and patch_embed_use_ln=False, as all released models have"
        )
    family = _FAMILIES.get(str(official.get("model_family")))
    fields = SIZES[family].to_dict() if family else {}
    names = {
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
    }
    for field, keys in names.items():
        for key in keys:
            if key in official:
                fields[field] = official[key]
    for field in ("embed_dim", "depth", "num_heads", "mlp_ratio"):
        if field not in fields:
            raise ConfigError(f"it has no {names[field][0]!r}")
    if "rope_shift_coords" in official:
        fields["coordinate_shift"] = official["rope_shift_coords"] or 0.0
    if "rope_rescale_coords" in official:
        fields["coordinate_rescale"] = official["rope_rescale_coords"] or 1.0
    if "output_proj.weight" in student:
        fields["output_dim"] = student["output_proj.weight"].shape[0]
    return VecaConfig.from_dict(fields)


def _official_config(config: VecaConfig, original: Mapping[str, Any]) -> dict[str, Any]:
    families = {ours: theirs for theirs, ours in _FAMILIES.items()}
    chunk = "matryoshka_chunk_size" if "matryoshka_chunk_size" in original else "nested_chunk_size"
    return {
        "model_family": original.get("model_family", families.get(size_name(config) or "", "custom")),
        "num_query_tokens": config.num_cores,
        "hidden_dim": config.embed_dim,
        "num_heads": config.num_heads,
        "num_layers": config.depth,
        "mlp_ratio": config.mlp_ratio,
        "patch_size": config.patch_size,
        chunk: config.core_chunk,
        "rope_p_zero_freqs": config.rope_zero_fraction,
        "rope_zero_freqs_from": "low",
    }


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
