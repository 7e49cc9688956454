"""What a setting costs beside the dense ViT of the same size: counted at once, measured when nothing else is to do.

Shapes: B images, N patches, S = 5 + N tokens, D width, H heads.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from veca.config import VecaConfig
from veca.flops import DENSE_PREFIX, dense_model_flops, model_flops
from veca.model import PatchEmbed, Veca
from veca.rope import grid_rotary, rotate
from veca.utils.timing import synchronize, timed

RUNS = 3
ENOUGH = 1.0
"""Seconds of measuring after which no further run is made. The quickest run counts: others shared the machine."""


class Count(NamedTuple):
    """What one picture takes, counted."""

    tokens: int
    gflops: float


class Measure(NamedTuple):
    """What one picture takes, measured."""

    seconds: float
    mebibytes: float
    """The most that is held at once, above the weights."""


def count(config: VecaConfig, height: int, width: int, cores: int) -> tuple[Count, Count]:
    """Of VECA, and of the dense ViT."""
    patches = (height // config.patch_size) * (width // config.patch_size)
    return (
        Count(cores + patches, model_flops(config, height, width, cores) / 1e9),
        Count(DENSE_PREFIX + patches, dense_model_flops(config, height, width) / 1e9),
    )


def measure_veca(model: Veca, images: Tensor, cores: int) -> Generator[None, None, Measure]:
    def call() -> None:
        with torch.inference_mode():
            model(images, cores=cores)

    held = peak_bytes(call, images.device)
    seconds: list[float] = []
    while len(seconds) < RUNS and sum(seconds) < ENOUGH:
        yield
        seconds.append(timed(call, images.device))
    return Measure(min(seconds), held / 2**20)


def measure_dense(config: VecaConfig, images: Tensor) -> Generator[None, None, Measure]:
    """Layer by layer, so that more urgent work need not wait for all of them."""
    dense = DenseVit(config).to(images.device, images.dtype).eval()
    with torch.inference_mode():
        held = peak_bytes(lambda: dense.block(dense.embed(images)), images.device)
    seconds: list[float] = []
    while len(seconds) < RUNS and sum(seconds) < ENOUGH:
        total, x = 0.0, None
        for _ in range(config.depth):
            yield
            synchronize(images.device)
            start = time.perf_counter()
            with torch.inference_mode():
                x = dense.block(dense.embed(images) if x is None else x)
            synchronize(images.device)
            total += time.perf_counter() - start
        seconds.append(total)
    return Measure(min(seconds), held / 2**20)


class DenseVit(nn.Module):
    """The DINOv3-shaped ViT of the size of `config`, as far as its cost goes: one block, which is every layer's."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        dim, self.config = config.embed_dim, config
        self.patches = PatchEmbed(config)
        self.prefix = nn.Parameter(torch.zeros(DENSE_PREFIX, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.gated = config.mlp_dim == 4 * dim  # small+ alone, as in `veca.flops`
        self.fc1, self.fc2 = nn.Linear(dim, (8 if self.gated else 4) * dim), nn.Linear(4 * dim, dim)
        self.grid = (0, 0)

    def embed(self, images: Tensor) -> Tensor:
        side = self.config.patch_size
        self.grid = (images.shape[-2] // side, images.shape[-1] // side)
        return torch.cat([self.prefix.expand(len(images), -1, -1), self.patches(images)], dim=1)

    def block(self, x: Tensor) -> Tensor:
        config = self.config
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, config.num_heads, -1)).permute(2, 0, 3, 1, 4)
        table = grid_rotary(*self.grid, config.head_dim, config.rope_zero_fraction, x.device, torch.float32)
        turned = torch.cat([qkv[:2, :, :, :DENSE_PREFIX], rotate(qkv[:2, :, :, DENSE_PREFIX:], table)], dim=3)
        mixed = F.scaled_dot_product_attention(turned[0], turned[1], qkv[2])
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        hidden = self.fc1(self.norm2(x))
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            return x + self.fc2(F.silu(gate) * hidden)
        return x + self.fc2(F.gelu(hidden))


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most that `call` holds at once: CUDA's allocator knows it; elsewhere every new tensor is counted."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return int(torch.cuda.max_memory_allocated(device) - before)
    with _Ledger() as ledger:
        call()
    return ledger.most


class _Ledger(TorchDispatchMode):
    """Counts the bytes of tensors that operators return, while they live; what is used inside of one is unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage not in inputs and storage not in self._known:
                    self._known.add(storage)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._release, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _release(self, count: int) -> None:
        self.now -= count
