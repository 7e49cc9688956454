"""Packs for the fast inference model: padded to a bucket of sizes, so that one CUDA graph serves many mixes of images.

Tokens lie in the order of the images, all cores, then all patches. Padding is rows that belong to no image: layers
compute them, attention does not.

Shapes: ΣC cores and ΣN patches of all images, both as padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from veca.config import VecaConfig
from veca.kernels.ops import ROW_MULTIPLE
from veca.packed import PackedImages
from veca.rope import packed_coordinates

_EMPTY_SPAN_CORES = 1
"""Of spans without patches, which pad the table: a kernel reads one core, and writes nothing that is used."""


class PackBucket(NamedTuple):
    """Sizes to which packs are padded."""

    patches: int
    cores: int
    images: int
    spans: int
    max_cores: int
    """Largest budget of an image that the attention kernel is launched for."""


class PackTensors(NamedTuple):
    """What the kernels read of a pack. A CUDA graph reads it from fixed memory."""

    pixels: Tensor
    """(ΣC + ΣN, channels · p · p), rows padded to a multiple of `ROW_MULTIPLE`; those of the cores are empty."""
    bank_rows: Tensor
    """(ΣC): which row of the bank each core is."""
    patch_points: Tensor
    """(ΣN, 2)"""
    spans: Tensor
    images: Tensor


class PackInputs:
    """A pack on its way to the kernels."""

    def __init__(self, batch: PackedImages, budgets: Sequence[int], like: Tensor, config: VecaConfig) -> None:
        from veca.kernels.packed_attention import plan_spans, span_programs

        self.batch, self.budgets, self.like = batch, budgets, like
        patches, programs = batch.num_patches, span_programs(like, config.num_heads)
        cores, images = _round_up(sum(budgets), 4, 64), _round_up(len(batch), 4, 4)
        max_cores = max(16, 1 << (max(budgets) - 1).bit_length())
        self.spans, self.images = plan_spans(budgets, patches, programs, cores)
        spans = max(programs + images, _round_up(len(self.spans), 4, 4))  # the first is larger but for huge images
        self.bucket = PackBucket(_round_up(sum(patches), 16, 64), cores, images, spans, max_cores)

    def fill(self, out: PackTensors | None = None) -> PackTensors:
        """The tensors of the pack; `out` are those of another of the same bucket, to be overwritten."""
        out = out or self._allocate()
        patches, cores = len(self.batch.pixels), sum(self.budgets)
        out.pixels[self.bucket.cores :][:patches, : self.batch.pixels.shape[1]] = self.batch.pixels
        starts = torch.tensor(list(accumulate(self.budgets[:-1], initial=0)))
        _upload(torch.arange(cores) - starts.repeat_interleave(torch.tensor(self.budgets)), out.bank_rows[:cores])
        shapes = torch.empty(len(self.batch), 2, dtype=torch.int64, device=self.like.device)
        _upload(torch.tensor(self.batch.grids), shapes)
        out.patch_points[:patches] = packed_coordinates(shapes, patches)
        _upload(self._padded_spans(), out.spans)
        _upload(self._padded_images(), out.images)
        return out

    def _allocate(self) -> PackTensors:
        bucket, device = self.bucket, self.like.device
        width = -(-self.batch.pixels.shape[1] // ROW_MULTIPLE) * ROW_MULTIPLE
        return PackTensors(
            self.like.new_zeros(bucket.cores + bucket.patches, width),
            torch.zeros(bucket.cores, dtype=torch.int64, device=device),
            torch.zeros(bucket.patches, 2, device=device),
            torch.empty(bucket.spans, 6, dtype=torch.int32, device=device),
            torch.empty(bucket.images, 4, dtype=torch.int32, device=device),
        )

    def _padded_spans(self) -> Tensor:
        padding = torch.zeros(self.bucket.spans - len(self.spans), 6, dtype=torch.int32)
        padding[:, 1] = _EMPTY_SPAN_CORES
        return torch.cat([self.spans, padding])

    def _padded_images(self) -> Tensor:
        return torch.cat([self.images, self.images.new_zeros(self.bucket.images - len(self.images), 4)])


def _upload(values: Tensor, to: Tensor) -> None:
    """Copy to a device without waiting for it: it may still be at work on the pack before."""
    to.copy_(values.pin_memory() if to.is_cuda else values, non_blocking=True)


def _round_up(count: int, parts: int, least: int) -> int:
    """The next multiple of 1/`parts` of the power of two at or below `count`, or of `least` if that is larger."""
    step = max(least, (1 << (count.bit_length() - 1)) // parts)
    return -(-count // step) * step
