"""Features of an image of any size, exact, a tile at a time: `veca.stream`.

Patches attend only to cores, and of all patches the cores need no more than a softmax, which can be taken tile by tile.
So each block is one pass over the tiles: a tile's patches are updated, and their keys and values are added to the
running softmax of the cores; after the last tile the cores are updated. Between blocks the patches wait in host memory,
or in files. What is computed is what the model computes for the whole image, up to rounding.

The keys and values of the cores in every block are all that other patches depend on: `StreamedFeatures.read` computes
any region anew from its pixels and these.

Shapes: C cores, N patches of a tile, D width, H heads, d = D / H, L blocks, p patch size.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from veca.checkpoint.format import weights_hash
from veca.errors import ArgumentError, NonFiniteError
from veca.images.geotiff import scale_geo_tags
from veca.images.tiles import PixelSource, open_pixels
from veca.inputs import resolve_budget, resolve_width
from veca.model import Block, Veca
from veca.rope import Rotary, make_rotary, rotate
from veca.streaming.storage import FeatureOutput, FileStates, MemoryStates, Tile, check_space
from veca.utils.console import bar


class CoreKeys(NamedTuple):
    """Rotated keys and values of the cores in a block: (1, H, C, d)."""

    key: Tensor
    value: Tensor


@dataclass
class OnlineSoftmax:
    """The attention of the cores, (1, H, C, d), over keys and values that come in parts; in float32."""

    query: Tensor
    max: Tensor
    """(1, H, C, 1): largest logit so far."""
    sum: Tensor
    """Of the weights, relative to it."""
    total: Tensor
    """Of the weighted values."""

    @classmethod
    def start(cls, query: Tensor) -> OnlineSoftmax:
        query = query.float() / query.shape[-1] ** 0.5
        largest = torch.full_like(query[..., :1], -math.inf)
        return cls(query, largest, torch.zeros_like(largest), torch.zeros_like(query))

    def add(self, key: Tensor, value: Tensor) -> None:
        with torch.autocast(key.device.type, enabled=False):
            logits = self.query @ key.float().mT
            new_max = torch.maximum(self.max, logits.amax(dim=-1, keepdim=True))
            shrink, weights = (self.max - new_max).exp(), (logits - new_max).exp()
            self.sum = self.sum * shrink + weights.sum(dim=-1, keepdim=True)
            self.total = self.total * shrink + weights @ value.float()
            self.max = new_max

    def result(self) -> Tensor:
        return self.total / self.sum

    def tensors(self) -> dict[str, Tensor]:
        return {f"softmax.{name}": tensor for name, tensor in vars(self).items()}

    @classmethod
    def load(cls, tensors: dict[str, Tensor]) -> OnlineSoftmax:
        return cls(*(tensors[f"softmax.{name}"] for name in ("query", "max", "sum", "total")))


@dataclass
class StreamedFeatures:
    """What `stream` returns. D is the output width: the model's, or `output_dim` where it has one."""

    cores: Tensor
    """(C, D), on the CPU; the first is the global feature."""
    coordinates: Tensor
    """(L, C, 2): the (x, y) in [-1, 1] of each core in each block."""
    grid: tuple[int, int]
    """(rows, columns) of the patches."""
    patches: Any = None
    """(rows, columns, D): an array, or what maps it from its file; None without `dense`."""
    _reader: Any = field(default=None, repr=False)

    @property
    def cls(self) -> Tensor:
        """(D): the global feature."""
        return self.cores[0]

    def read(
        self, box: tuple[int, int, int, int] | None = None, points: Sequence[tuple[float, float]] | None = None
    ) -> Tensor:
        """Features of a region or of points, computed from their pixels; no other patch is computed.

        `box` is (left, top, width, height) in pixels: the patches it touches, (rows, columns, D). `points` are (x, y)
        in pixels: those of the patches they lie in, (points, D).
        """
        if (box is None) == (points is None):
            raise ArgumentError("read takes a box or points: give one of the two")
        result: Tensor = self._reader(box, points)
        return result


def stream(
    model: Veca,
    source: Any,
    *,
    cores: int | None = None,
    width: float | None = None,
    dense: bool = True,
    out: str | os.PathLike[str] | None = None,
    save_dtype: str = "float32",
    states: str | os.PathLike[str] | None = None,
    tile: int = 1024,
    precision: torch.dtype = torch.float32,
    progress: bool = True,
) -> StreamedFeatures:
    """Features of an image of any size, as the model computes them for the whole image, a tile of it at a time.

    `source` is a path (TIFF and its relatives, `.zarr`, `.npy`, or an image of another format), an array (height,
    width, 3) or a tensor (3, height, width), uint8, or of normalised floats; other objects with a shape and slices, as
    of zarr or h5py, are arrays too. Sides that are not multiples of the patch size are continued by repeating the last
    row and column. With `dense`, features of all patches are returned as an array (rows, columns, D) of `save_dtype`,
    or written to `out`: a `.npy` file, or a `.zarr` array or a tiled `.tif` file, which keep the georeference of a
    GeoTIFF.

    Patches wait between blocks in memory or, with a folder `states`, in files there. A run with `states` that was
    interrupted continues when it is called again with the same arguments; when it is done, the folder is removed.
    `tile` is the side of a tile in pixels, and `precision` that of the computation (autocast).

    >>> import veca
    >>> model = veca.create_model("veca_tiny").eval()
    >>> found = stream(model, np.zeros((100, 130, 3), np.uint8), cores=8, tile=64, progress=False)
    >>> found.cls.shape, found.patches.shape, found.read(points=[(99, 5)]).shape
    (torch.Size([192]), (7, 9, 192), torch.Size([1, 192]))
    """
    run = _Stream(model, open_pixels(source), cores, width, tile, precision)
    save_type = np.dtype(save_dtype)
    if save_type not in (np.float16, np.float32):
        raise ArgumentError(f"save_dtype={save_dtype!r}; it must be 'float16' or 'float32'")
    if out is not None and not dense:
        raise ArgumentError(f"out={os.fspath(out)!r} goes with dense=True; leave it out for the global feature alone")
    if states is not None and dense and out is None:
        raise ArgumentError("a run with states can be resumed, for which features must be in a file: name it with out")
    output = FeatureOutput(out, (*run.grid, model.config.num_features), save_type) if dense else None
    with torch.inference_mode():
        return run.run(output, None if states is None else Path(states), progress)


@dataclass
class _Progress:
    """How far a run has come, and all it needs to go on but the patches."""

    cores: Tensor
    """(1, C, D): before the block."""
    state: Tensor
    """(1, C, 2): free coordinates of the cores, of the block if that has begun, or else of the one before."""
    coordinates: Tensor
    """(blocks begun, C, 2)"""
    keys: list[CoreKeys]
    """Of the blocks begun."""
    block: int = 0
    tile: int = 0
    """The next of the block."""
    softmax: OnlineSoftmax | None = None
    """Of the block, if that has begun."""

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"cores": self.cores, "state": self.state, "coordinates": self.coordinates}
        tensors |= self.softmax.tensors() if self.softmax else {}
        for i, (key, value) in enumerate(self.keys):
            tensors |= {f"key.{i}": key, f"value.{i}": value}
        return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}

    @classmethod
    def load(cls, block: int, tile: int, tensors: dict[str, Tensor], device: torch.device) -> _Progress:
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        keys = [
            CoreKeys(tensors[f"key.{i}"], tensors[f"value.{i}"]) for i in range(len(tensors)) if f"key.{i}" in tensors
        ]
        softmax = OnlineSoftmax.load(tensors) if "softmax.query" in tensors else None
        return cls(tensors["cores"], tensors["state"], tensors["coordinates"], keys, block, tile, softmax)


class _Stream:
    """A model and an image; `run` computes its features."""

    progress: _Progress

    def __init__(
        self,
        model: Veca,
        source: PixelSource,
        cores: int | None,
        width: float | None,
        tile: int,
        precision: torch.dtype,
    ) -> None:
        config = self.config = model.config
        if not all(isinstance(block, Block) for block in model.blocks):
            raise ArgumentError("stream takes the plain model; pass the one that veca.optimize was given")
        if tile < config.patch_size:
            raise ArgumentError(f"tile={tile}; a tile has at least {config.patch_size} pixels a side, those of a patch")
        self.model, self.source, self.precision = model, source, precision
        self.budget = resolve_budget(model.budget if cores is None else cores, config, model._warned)
        self.hidden = resolve_width(model.width if width is None else width, config, model._warned)
        self.grid, self.step = source.grid(config.patch_size), tile // config.patch_size
        self.device = model.patch_embed.proj.weight.device

    def run(self, output: FeatureOutput | None, folder: Path | None, progress: bool) -> StreamedFeatures:
        model, depth, dim = self.model, len(self.model.blocks), self.config.embed_dim
        was_training = model.training
        model.eval()
        tiles = [tile for row in self._split(Tile(0, 0, *self.grid)) for tile in row]
        store = (
            MemoryStates(self.grid, dim) if folder is None else FileStates(folder, self.grid, dim, self._job(output))
        )
        check_space(store.sizes() | (output.sizes() if output else {}))
        saved = store.load()
        now = self.progress = self._start() if saved is None else _Progress.load(*saved, self.device)
        if output is not None:
            begun = now.block == depth or (now.block == depth - 1 and now.tile > 0)
            tags = scale_geo_tags(self.source.geo_tags, self.config.patch_size)
            output.open(begun, self.step, self._about(), tags)
        try:
            name = os.path.basename(self.source.name)
            with self._autocast(), bar(f"streaming {name}", depth * len(tiles), "tiles", progress) as advance:
                advance(now.block * len(tiles) + now.tile, counted=0)
                while now.block < depth:
                    if now.softmax is None:
                        self._begin_block()
                    for tile in tiles[now.tile :]:
                        self._run_tile(tile, store, output)
                        advance(1)
                        store.save(now.block, now.tile, now.tensors)
                    self._end_block()
                    store.save(now.block, now.tile, now.tensors, due=True)
                cores = self._finish(now.cores)[0].float().cpu()
        finally:
            model.train(was_training)
        patches = None if output is None else output.close()
        store.remove()
        return StreamedFeatures(cores, now.coordinates.cpu(), self.grid, patches, self.read)

    def _start(self) -> _Progress:
        cores, states = (
            torch.cat(list(each))[None, : self.budget] for each in (self.model.cores, self.model.core_states)
        )
        state = states.to(torch.promote_types(states.dtype, torch.float32))
        return _Progress(cores, state, state.new_empty(0, *state.shape[1:]), [])

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32)

    # Parts of a block; compare `veca.model.Block`

    def _begin_block(self) -> None:
        """Move the cores, keep their keys and values, and begin their softmax."""
        model, now = self.model, self.progress
        block, i = cast(Block, model.blocks[now.block]), now.block
        if i:
            step = model.coordinate_heads[i - 1](now.cores).to(now.state.dtype)
            now.state = now.state + model.coordinate_alpha[i - 1].to(step.dtype) * step
        points = now.state.tanh()
        rotary = make_rotary(points[:, None], self.config.head_dim, self.config.rope_zero_fraction)
        query, key, value = (x.contiguous() for x in self._project(block, now.cores, rotary))
        now.keys.append(CoreKeys(key, value))
        now.coordinates, now.softmax = torch.cat([now.coordinates, points]), OnlineSoftmax.start(query)
        now.softmax.add(key, value)

    def _run_tile(self, tile: Tile, store: MemoryStates | FileStates, output: FeatureOutput | None) -> None:
        """Update the patches of a tile, and add them to the softmax of the cores."""
        now, last = self.progress, self.progress.block == len(self.model.blocks) - 1
        x = store.read(now.block, tile).to(now.cores) if now.block else self._embed([tile])
        x, key, value = self._patches(x, self._rotary([tile]), now.block, update=not last or output is not None)
        assert now.softmax is not None
        now.softmax.add(key, value)
        if not last:
            store.write(now.block, tile, x.cpu())
        elif output is not None:
            output.write(tile, self._finish(x)[0].float().cpu())
        now.tile += 1

    def _end_block(self) -> None:
        """Update the cores."""
        now = self.progress
        block = cast(Block, self.model.blocks[now.block])
        assert now.softmax is not None
        out = now.softmax.result().to(now.cores.dtype).transpose(1, 2).flatten(2)
        now.cores = self._mlp(block, now.cores + block.attn.proj(out), None)
        if not now.cores.isfinite().all():
            where = f"{self.source.name}: the cores have NaN or infinite values after block {now.block}"
            raise NonFiniteError(f"{where}; check the image, the weights and the precision, {self.precision}")
        now.block, now.tile, now.softmax = now.block + 1, 0, None

    def _project(self, block: Block, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, (1, H, N, d)."""
        qkv = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = rotate(qkv[:2], rotary)
        return query, key, qkv[2]

    def _patches(self, x: Tensor, rotary: Rotary, i: int, update: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Patches (1, N, D) after block `i`, if they are needed, and their keys and values in it."""
        block = cast(Block, self.model.blocks[i])
        query, key, value = self._project(block, x, rotary)
        if update:
            out = F.scaled_dot_product_attention(query, *self.progress.keys[i])
            x = self._mlp(block, x + block.attn.proj(out.transpose(1, 2).flatten(2)), self.hidden)
        return x, key, value

    def _mlp(self, block: Block, x: Tensor, hidden: int | None) -> Tensor:
        update: Tensor = block.mlp(block.norm2(x), 0, hidden)
        return x + update

    def _finish(self, x: Tensor) -> Tensor:
        result: Tensor = self.model.output_proj(self.model.norm(x))
        return result

    # Patches of tiles, of one shape where there are several

    def _embed(self, tiles: Sequence[Tile]) -> Tensor:
        """Patches (1, N, D) of tiles, from their pixels."""
        side, weight = self.config.patch_size, self.model.patch_embed.proj.weight
        pixels = torch.stack([self.source.read(*(side * each for each in tile)) for tile in tiles])
        # The residual stream has the type of the cores, as in `Veca._run`.
        patches: Tensor = self.model.patch_embed(pixels.to(self.device, weight.dtype))
        return patches.flatten(0, 1)[None].to(self.model.cores[0].dtype)

    def _rotary(self, tiles: Sequence[Tile]) -> Rotary:
        points = torch.cat([self._points(tile) for tile in tiles])
        return make_rotary(points, self.config.head_dim, self.config.rope_zero_fraction)

    def _points(self, tile: Tile) -> Tensor:
        rows, columns = self.grid
        y, x = (
            (torch.arange(low, high, device=self.device, dtype=torch.float32) + 0.5) / count * 2 - 1
            for low, high, count in ((tile.top, tile.bottom, rows), (tile.left, tile.right, columns))
        )
        height, width = tile.shape
        return torch.stack([x.expand(height, width), y[:, None].expand(height, width)], dim=-1).flatten(0, 1)

    def _features_of(self, tiles: Sequence[Tile]) -> Tensor:
        """Features (N, D) of the patches of tiles, from their pixels and the keys of the cores."""
        with torch.inference_mode(), self._autocast():
            x, rotary = self._embed(tiles), self._rotary(tiles)
            for i in range(len(self.model.blocks)):
                x, _, _ = self._patches(x, rotary, i, update=True)
            return self._finish(x)[0].float().cpu()

    def read(self, box: tuple[int, int, int, int] | None, points: Sequence[tuple[float, float]] | None) -> Tensor:
        """`StreamedFeatures.read`."""
        side, (height, width) = self.config.patch_size, (self.source.height, self.source.width)
        if box is not None:
            try:
                left, top, across, down = map(operator.index, box)
            except (TypeError, ValueError) as error:
                raise ArgumentError(f"box={box!r}; it must be four integers, (left, top, width, height)") from error
            if across < 1 or down < 1 or left < 0 or top < 0 or left + across > width or top + down > height:
                raise ArgumentError(f"box={tuple(box)}; (left, top, width, height) must lie in {width}×{height} pixels")
            ends = (-(-(top + down) // side), -(-(left + across) // side))
            parts = [
                [self._features_of([tile]).unflatten(0, tile.shape) for tile in row]
                for row in self._split(Tile(top // side, left // side, *ends))
            ]
            return torch.cat([torch.cat(row, dim=1) for row in parts])
        assert points is not None
        for x, y in points:
            if not (0 <= x < width and 0 <= y < height):
                raise ArgumentError(f"point ({x}, {y}) lies outside the image of {width}×{height} pixels")
        spots = [(int(y // side), int(x // side)) for x, y in points]
        tiles = [Tile(row, column, row + 1, column + 1) for row, column in sorted(set(spots))]
        if not tiles:
            return torch.empty(0, self.config.num_features)
        count = self.step**2  # at a time, as of a tile
        found = torch.cat([self._features_of(tiles[first : first + count]) for first in range(0, len(tiles), count)])
        place = {(tile.top, tile.left): i for i, tile in enumerate(tiles)}
        return found[[place[spot] for spot in spots]]

    def _split(self, whole: Tile) -> list[list[Tile]]:
        """A rectangle in rows of tiles."""
        rows = range(whole.top, whole.bottom, self.step)
        columns = range(whole.left, whole.right, self.step)
        ends = whole.bottom, whole.right
        return [[Tile(i, j, min(i + self.step, ends[0]), min(j + self.step, ends[1])) for j in columns] for i in rows]

    # Runs that are resumed

    def _about(self) -> dict[str, Any]:
        """What an array of features says about itself."""
        source = self.source
        about = {"patch_size": self.config.patch_size, "image_height": source.height, "image_width": source.width}
        return about | ({"georeference": source.georeference} if source.georeference else {})

    def _job(self, output: FeatureOutput | None) -> str:
        """A digest of what must be equal for a run to be resumed."""
        about = [weights_hash(self.model), self.source.name, self.source.identity, self.budget, self.hidden, self.step]
        about += [str(self.precision), None if output is None else [str(output.path), str(output.dtype)]]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()
