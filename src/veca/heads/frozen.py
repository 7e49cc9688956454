"""The interface of frozen backbones that heads are trained on, and a frozen VECA.

Images come in as uint8 and every backbone normalises them its own way. Features come back as float32.

Shapes: B images, D width of the features, rows × columns patches.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from veca.checkpoint.format import weights_hash
from veca.config import is_budget
from veca.errors import VecaError
from veca.images import MAX_PIXELS, MEAN, STD, nearest_sizes, normalize
from veca.model import Veca
from veca.optimized import optimize, supports_fused
from veca.utils.text import quoted

FrozenPrecision: TypeAlias = Literal["float32", "bfloat16", "float16"]
FeatureKind: TypeAlias = Literal["cls", "cls+mean"]
"""Global feature: the backbone's own, or that concatenated with the mean of the patches."""


class BackboneError(VecaError, ValueError):
    """A backbone that cannot be loaded or run as asked; the message says what to do."""


class FrozenBackbone(ABC):
    """A frozen model that gives a global feature and a feature map.

    `name` is as the user gave it, `kind` the library its code comes from, `patch` the pixels per cell of its map,
    `width` that of its features. `budgets` are those it was trained at; None: it has no budget. `about` is plain data
    for reports, including a hash of the weights.
    """

    budgets: tuple[int, ...] | None = None
    rounds_sizes = False
    """Whether a size that is no multiple of the patch is rounded to one, or refused."""

    def __init__(
        self,
        name: str,
        kind: str,
        patch: int,
        width: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        precision: FrozenPrecision,
        about: Mapping[str, Any],
    ) -> None:
        self.name, self.kind, self.patch, self.width = name, kind, patch, width
        self.mean, self.std = tuple(mean), tuple(std)
        self.device, self.precision, self.autocast = device, precision, precision != "float32"
        self.about = {**about, "width": width, "patch": patch, "mean": list(self.mean), "std": list(self.std)}

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the features, for cache keys: not the name or path."""
        about = {key: value for key, value in self.about.items() if key not in ("weights", "provenance")}
        # `running` too: precision and device change the last bits.
        return {"kind": self.kind, **about, **self.running}

    @property
    def running(self) -> dict[str, Any]:
        """Return how it is run, for protocols and cache keys."""
        return {"precision": self.precision, "device": self.device.type}

    @property
    def forks(self) -> bool:
        """Whether forked worker processes can run it, each on one core."""
        return self.device.type == "cpu" and sys.platform == "linux"

    def as_forked(self) -> AbstractContextManager[Any]:
        """Context in which a forked worker process runs it."""
        return nullcontext()

    def side(self, size: int) -> int:
        """Return the side in pixels of the input when `size` is asked for."""
        if not 1 <= size <= (limit := math.isqrt(MAX_PIXELS)):
            raise BackboneError(f"size {quoted(size)}: a side has at least {self.patch} and at most {limit:,} pixels")
        near = nearest_sizes(size, size, self.patch)[0]
        if size != near and not self.rounds_sizes:
            raise BackboneError(f"size {size}: {self.name} takes multiples of {self.patch}. Nearest: {near}")
        return near

    def cores(self, requested: Sequence[int] | None) -> tuple[int | None, ...]:
        """Return the budgets to run at: those asked for, or the default when None."""
        return (None,)

    def prepare(self, pixels: Tensor) -> Tensor:
        """Normalise images (B, 3, height, width) uint8 for this backbone, on its device."""
        return normalize(pixels.to(self.device, non_blocking=True), self.mean, self.std)

    def features(self, images: Tensor, cores: int | None, dense: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return the global feature (B, D) and, if `dense`, the map (B, D, rows, columns) of prepared images."""
        dtype = getattr(torch, self.precision)
        with torch.inference_mode(), torch.autocast(self.device.type, dtype, enabled=self.autocast):
            cls, patches = self._run(images, cores, dense)
        # Copies: a view of one token would keep all tokens in memory, and inference tensors take no gradient.
        return cls.to(torch.float32, copy=True), None if patches is None else patches.to(torch.float32, copy=True)

    def dense_features(self, images: Tensor, cores: int | None) -> tuple[Tensor, Tensor]:
        """Return the map and the global feature, in the order dense heads take them."""
        cls, patches = self.features(images, cores)
        assert patches is not None
        return patches, cls

    def global_feature(self, images: Tensor, cores: int | None, kind: FeatureKind = "cls") -> Tensor:
        """Return (B, D), or with the mean of the patches (B, 2 D)."""
        cls, patches = self.features(images, cores, dense=kind == "cls+mean")
        return cls if patches is None or kind == "cls" else torch.cat([cls, patches.mean((2, 3))], 1)

    @abstractmethod
    def _run(self, images: Tensor, cores: int | None, dense: bool) -> tuple[Tensor, Tensor | None]: ...


class FrozenVeca(FrozenBackbone):
    """A VECA, optimized where its fused kernels run or with `compile`."""

    def __init__(
        self, model: Veca, name: str, device: torch.device, precision: FrozenPrecision, compile: bool = False
    ) -> None:
        config = model.config
        self.budgets, self.num_cores = tuple(config.budgets), config.num_cores
        # Without the classes, so that fine-tuned weights and their backbone share a cache.
        architecture = {**config.to_dict(), "num_classes": 0}
        about = {"sha256": weights_hash(model), "config": architecture, "provenance": model.provenance}
        super().__init__(name, "veca", config.patch_size, config.num_features, MEAN, STD, device, precision, about)
        dtype: torch.dtype = getattr(torch, precision)
        fused = supports_fused(config, device, dtype)
        self.optimized = compile or fused
        self.autocast = self.autocast and (fused or not compile)  # a compiled model has that dtype itself
        self.model = optimize(model, dtype=dtype) if self.optimized else model.eval().requires_grad_(False)

    @property
    def running(self) -> dict[str, Any]:
        return {**super().running, "optimized": self.optimized}

    def as_forked(self) -> AbstractContextManager[Any]:
        # After a fork the compiler would wait forever for its threads, so a new shape must run eagerly.
        return torch.compiler.set_stance("eager_on_recompile") if self.optimized else nullcontext()

    def cores(self, requested: Sequence[int] | None) -> tuple[int | None, ...]:
        if requested is None:
            return (self.num_cores,)
        if wrong := [budget for budget in requested if not is_budget(budget, self.num_cores)]:
            raise BackboneError(f"cores {wrong[0]}: a budget of {self.name} is an integer from 1 to {self.num_cores}")
        return tuple(dict.fromkeys(requested))

    def _run(self, images: Tensor, cores: int | None, dense: bool) -> tuple[Tensor, Tensor | None]:
        try:
            output = self.model(images, cores=cores, cls_only=not dense)
        except RuntimeError as error:
            if "InvalidCxxCompiler" not in str(error):
                raise
            way = "install g++, or leave it out"
            raise BackboneError(f"--compile needs a C++ compiler and finds none: {way}") from error
        return output.cls, output.feature_map if dense else None
