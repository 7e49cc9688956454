"""Teacher features of all cached images, computed once and cut to the crops of a batch.

Shapes: N images, B of them in a batch, D width of the features, G rows and columns of a crop's targets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veca.data.device_cache import DeviceImageCache
from veca.data.index import DataError
from veca.images import normalize
from veca.teachers import Standardized, Targets
from veca.train.validation import TeacherRunner
from veca.utils.console import bar


class TeacherMaps:
    """Teacher maps (N, cells, cells, D) of all cached images, on their device.

    A crop is a square of cells, whatever resolution the student sees it at: its map is resized. Its global feature is
    the mean of its map if the teacher pools (of the map of its second pass, where it has one), and that of the whole
    image if not.
    """

    def __init__(
        self, cache: DeviceImageCache, runner: TeacherRunner, dtype: torch.dtype, progress: bool = True
    ) -> None:
        images, teacher = cache.images, runner.teacher
        count, self.patch, width = len(images), runner.patch_size, teacher.width
        self.cells = cache.side // self.patch
        # Side of the whole over that of a crop.
        zoom = self.cells / max(1, round(self.cells / runner.recipe.data.short_side))
        self.standardized = teacher if isinstance(teacher, Standardized) else None
        own = teacher.teacher if isinstance(teacher, Standardized) else teacher
        self.pooled, second = own.pooled, own.pooled and own.glance is not None
        cells = self.cells**2 + (max(1, round((own.glance or 0) * zoom / own.stride)) ** 2 if second else 0)
        needed = count * cells * width * dtype.itemsize
        if images.is_cuda and needed > 0.9 * (free := torch.cuda.mem_get_info(images.device)[0]):
            room = f"and {images.device} has {free / 2**30:.1f} GiB free. Take float8, smaller or fewer pictures"
            raise DataError(f"teacher.resident: {count:,} maps take {needed / 2**30:.1f} GiB in {dtype}, {room}")
        self.maps = torch.empty(count, self.cells, self.cells, width, dtype=dtype, device=images.device)
        self.cls = torch.empty(count, width, dtype=torch.bfloat16, device=images.device)
        # Not standardized: zeros, most of a CNN's map, are exact in float8, so means are not biased by rounding.
        self.glimpses: Tensor | None = None
        batch_size = runner.micro_batch(cache.side)
        with bar("asking the teacher", count, "images", progress) as advance:
            for start in range(0, count, batch_size):
                part = slice(start, start + batch_size)
                pixels = normalize(images[part])
                targets = runner.targets(pixels, zoom=zoom)
                self.maps[part] = _clamp_to(targets.patches.unflatten(1, (self.cells, self.cells)), dtype)
                self.cls[part] = targets.cls
                if second:
                    with torch.no_grad(), runner.autocast():
                        glimpse = own.glimpse(pixels, zoom).permute(0, 2, 3, 1)
                    if self.glimpses is None:
                        self.glimpses = torch.empty(count, *glimpse.shape[1:], dtype=dtype, device=images.device)
                    self.glimpses[part] = _clamp_to(glimpse, dtype)
                advance(len(pixels))

    def _standardize_cls(self, values: Tensor) -> Tensor:
        """Standardize the teacher's own features as its global one."""
        if self.standardized is None:
            return values
        return (values - self.standardized.means[0]) / self.standardized.deviations[0]

    def crop(self, index: Tensor, rows: Tensor, columns: Tensor) -> Targets:
        """Return targets (B, G · G, D) of crops of the images `index` (B), by matrices (B, G, cells) of their sides."""
        maps = _take(self.maps, index)
        resized = (rows @ maps.flatten(2)).unflatten(2, maps.shape[2:])
        patches = (columns[:, None] @ resized).flatten(1, 2)
        if not self.pooled:
            return Targets(self.cls[index], patches)
        if self.glimpses is not None:
            glimpses = _take(self.glimpses, index).float()
            top, left = (side.float().mean(1) @ _overlaps(side, glimpses.shape[1]) for side in (rows, columns))
            return Targets(self._standardize_cls(torch.einsum("br,bc,brcd->bd", top, left, glimpses)), patches)
        cls = patches.mean(1, dtype=torch.float32)
        if self.standardized is not None:
            cls = self._standardize_cls(cls * self.standardized.deviations[1] + self.standardized.means[1])
        return Targets(cls, patches)


def _clamp_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to `dtype`, clamped to its range: float8 overflows to NaN."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def _take(maps: Tensor, index: Tensor) -> Tensor:
    """Return `maps[index]` in bfloat16. float8 has no indexing of its own, and int64 words are gathered faster."""
    words = maps.view(torch.int64 if maps.shape[-1] * maps.dtype.itemsize % 8 == 0 else torch.uint8)
    return words[index].view(maps.dtype).to(torch.bfloat16)


def _overlaps(sides: Tensor, cells: int) -> Tensor:
    """Return the share of each of K cells of a side (as in B, G, K) that lies in each of `cells` others: (K, cells)."""
    edges = (torch.linspace(0, 1, count + 1, device=sides.device) for count in (sides.shape[-1], cells))
    (start, end), (low, high) = ((each[:-1], each[1:]) for each in edges)
    return (torch.minimum(end[:, None], high) - torch.maximum(start[:, None], low)).clamp_min(0) * sides.shape[-1]
