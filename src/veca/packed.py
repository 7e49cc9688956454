"""Packed batches: images of any mix of sizes in one forward pass, each with its own budget and width.

Patches meet only the cores of their own image, so a pack needs no padding and no mask: the cores of all images lie one
after the other, then all patches. Layers that treat tokens one by one see one long sequence; attention runs once for
each kind of image, those of the same budget and grid.

Shapes: B images of a pack, C cores and N patches of an image, ΣC and ΣN of all, D width, p patch size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from veca.attention import runs_packed
from veca.block_ops import Tokens, add_and_norm, checkpoint_block, has_hooks, pass_layer
from veca.errors import ArgumentError, NonFiniteError
from veca.inputs import resolve_budget, resolve_width
from veca.kernels import ops
from veca.outputs import PackedOutput, PatchGrid
from veca.rope import Rotary, augment_coordinates, grid_rotary, make_rotary, patch_coordinates

if TYPE_CHECKING:
    from veca.model import Veca

_NAFLEX = {"patches": "BNX", "patch_coord": "BN2", "patch_valid": "BN"}
_SIGLIP2 = {"pixel_values": "BNX", "pixel_attention_mask": "BN", "spatial_shapes": "B2"}
"""Of dictionaries that can be packed: names, and their shapes, of X numbers for each patch."""
_skip_frame = functools.partial(_disable_dynamo, recursive=False)
"""Not traced itself, as it loops over images; what it calls is, as the blocks."""


@dataclass(frozen=True)
class PackedImages:
    """Images of any mix of sizes, cut into patches; `veca.pack` makes them.

    >>> import veca
    >>> batch = veca.pack([torch.zeros(3, 64, 96), torch.zeros(3, 16, 32)])
    >>> batch.pixels.shape, batch.grids
    (torch.Size([26, 768]), ((4, 6), (1, 2)))
    """

    pixels: Tensor
    """(ΣN, channels · p · p), float: the patches of each image row by row, in the order of the images."""
    grids: tuple[PatchGrid, ...]

    def __post_init__(self) -> None:
        if not self.grids:
            raise ArgumentError("the pack has no images; give at least one")
        for rows, columns in self.grids:
            if rows < 1 or columns < 1:
                raise ArgumentError(f"an image of the pack has {rows}×{columns} patches; each needs at least one")
        if self.pixels.ndim != 2 or len(self.pixels) != sum(self.num_patches):
            shape, expected = tuple(self.pixels.shape), sum(self.num_patches)
            raise ArgumentError(f"pixels of the pack have shape {shape}; its grids need ({expected}, channels · p · p)")
        if not self.pixels.is_floating_point():
            raise ArgumentError(f"pixels of the pack are {self.pixels.dtype}; they must be normalised floats")

    @classmethod
    def from_padded(cls, images: Mapping[str, Any], patch: int = 16) -> PackedImages:
        """A dictionary with padded patches (B, N, patch · patch · channels), channels last, of timm or SigLIP 2."""
        if all(name in images for name in _NAFLEX):
            pixels, coordinates, valid = _padded_tensors(images, _NAFLEX)
            shapes = torch.where(valid[..., None], coordinates, -1).amax(dim=1) + 1
            for i, columns in enumerate(shapes[:, 1].tolist()):
                own = coordinates[i][valid[i]]
                order = torch.arange(len(own), device=own.device)
                if not torch.equal(own, torch.stack([order // columns, order % columns], dim=1).to(own)):
                    raise ArgumentError(f"patch_coord of image {i} are not those of a whole grid, row by row")
        elif all(name in images for name in _SIGLIP2):
            pixels, valid, shapes = _padded_tensors(images, _SIGLIP2)
        else:
            names = " or ".join(", ".join(each) for each in (_NAFLEX, _SIGLIP2))
            raise ArgumentError(f"the dictionary has {', '.join(images) or 'nothing'}; a pack is made of {names}")
        grids = [cast(PatchGrid, tuple(shape)) for shape in shapes.tolist()]
        for i, ((rows, columns), count) in enumerate(zip(grids, valid.sum(dim=1).tolist(), strict=True)):
            if rows * columns != count:
                counted = f"{count} valid patches, and a grid of {rows}×{columns}"
                raise ArgumentError(f"image {i} has {counted}; they must agree")
        if pixels.shape[2] % patch**2:
            raise ArgumentError(f"patches have {pixels.shape[2]} numbers, not a multiple of {patch}² = {patch**2}")
        flat = pixels[valid].unflatten(1, (patch, patch, -1)).permute(0, 3, 1, 2).flatten(1)  # channels first
        # Only on the CPU: elsewhere the device would have to be waited for.
        if flat.device.type == "cpu" and not flat.isfinite().all():
            raise NonFiniteError("patches of the dictionary have values that are NaN or infinite; replace them")
        return cls(flat, tuple(grids))

    def __len__(self) -> int:
        return len(self.grids)

    @property
    def num_patches(self) -> tuple[int, ...]:
        """N of each image."""
        return tuple(rows * columns for rows, columns in self.grids)

    def to(self, *args: Any, **options: Any) -> PackedImages:
        """As `Tensor.to`: on another device, or in another precision."""
        return replace(self, pixels=self.pixels.to(*args, **options))


class ImageKind(NamedTuple):
    """What images have in common that run together: the MLP's channels for their patches, their budget and grid."""

    hidden: int
    budget: int
    grid: PatchGrid


class PackedGroup(NamedTuple):
    """Images of one kind, which lie next to each other in a pack that is sorted by kind."""

    kind: ImageKind
    images: tuple[int, ...]
    """Their numbers in the pack as it was given."""
    cores: slice
    """Where their cores are among the cores of the sorted pack."""
    patches: slice


class SpanTables(NamedTuple):
    """What `veca.kernels.packed_attention` takes beside queries, keys, values and coordinates of the cores."""

    patch_points: Tensor
    """(ΣN, 2)"""
    spans: Tensor
    images: Tensor
    max_cores: int


class PackedLayout:
    """Where the tokens of a pack lie: sorted by kind, all cores (ΣC), then all patches (ΣN).

    Compiled blocks read tensors and numbers of tokens from it, which may change without compiling again; what loops
    over images or kinds is not traced.
    """

    def __init__(self, kinds: Sequence[ImageKind], mlp_dim: int) -> None:
        self.rotaries = list[Rotary]()
        """Tables of the patches (N, …) of each group."""
        self.tables: SpanTables | None = None
        """Where one kernel attends for all images."""
        self.groups: list[PackedGroup] = []
        order = sorted(range(len(kinds)), key=kinds.__getitem__)
        core = patch = 0
        for kind, members in itertools.groupby(order, key=kinds.__getitem__):
            images = tuple(members)
            next_core, next_patch = core + len(images) * kind.budget, patch + len(images) * _patches(kind)
            self.groups.append(PackedGroup(kind, images, slice(core, next_core), slice(patch, next_patch)))
            core, patch = next_core, next_patch
        self.num_cores, self.order = core, order
        self.kinds = [kinds[i] for i in order]
        """Of the images, sorted."""
        self.patches_by_width: dict[int | None, int] = {}
        """How many patches use so many channels of the MLP, in the order of the tokens; None: all channels."""
        for kind in self.kinds:
            hidden = None if kind.hidden == mlp_dim else kind.hidden
            self.patches_by_width[hidden] = self.patches_by_width.get(hidden, 0) + _patches(kind)

    def sort(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of the images as given, so many of each image, in the order of the layout."""
        return _reorder(x, counts, self.order)

    def restore(self, x: Tensor, counts: Sequence[int], dim: int = 0) -> Tensor:
        """Rows in the order of the layout, so many of each image as given, in the order in which they were given."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return _reorder(x, [counts[i] for i in self.order], back, dim)

    def by_image(self, cores: Tensor, group: PackedGroup) -> Tensor:
        """Of all cores (ΣC, …), those of a group: (images, C, …)."""
        return cores[group.cores].unflatten(0, (len(group.images), -1))

    def tokens(self, x: Tensor, group: PackedGroup) -> Tensor:
        """Of all tokens (1, ΣC + ΣN, D), those of a group as a batch: (images, C + N, D)."""
        cores, patches = x[0].split([self.num_cores, x.shape[1] - self.num_cores])
        patches = patches[group.patches].unflatten(0, (len(group.images), -1))
        return torch.cat([self.by_image(cores, group), patches], dim=1)

    def core_rotary(self, rotary: Rotary, group: PackedGroup) -> Rotary:
        """Of the table of all cores (1, 1, ΣC, …), that of a group: (images, 1, C, …)."""
        cos, sin, coordinates = (self.by_image(part[0, 0], group)[:, None] for part in rotary[:3])
        return Rotary(cos, sin, coordinates, rotary.frequencies)

    def attend(self, attention: Any, x: Tensor, core_rotary: Rotary) -> Tensor:
        """The attention of a block on all tokens (1, ΣC + ΣN, D): by one kernel, or one group after the other."""
        if self.tables is None or has_hooks(attention):
            return self._attend_by_group(attention, x, core_rotary)
        qkv = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1))[0]
        patch_points, *spans = self.tables
        points = core_rotary.coordinates[0, 0].contiguous(), patch_points
        out = ops.packed_attention_op(qkv, *points, core_rotary.frequencies, *spans, ops.KERNELS)[0]
        update: Tensor = attention.proj(out[None])
        return update

    @_disable_dynamo
    def _attend_by_group(self, attention: Any, x: Tensor, core_rotary: Rotary) -> Tensor:
        cores, patches = [], []
        for group, patch_rotary in zip(self.groups, self.rotaries, strict=True):
            out = attention(self.tokens(x, group), self.core_rotary(core_rotary, group), patch_rotary)
            cores.append(out[:, : group.kind.budget].flatten(0, 1))
            patches.append(out[:, group.kind.budget :].flatten(0, 1))
        return torch.cat(cores + patches)[None]

    def make_tables(self, x: Tensor, heads: int) -> SpanTables:
        """Tables for tokens `x`, from `rotaries`."""
        from veca.kernels.packed_attention import plan_spans, span_programs

        budgets, patches = zip(*((kind.budget, _patches(kind)) for kind in self.kinds), strict=True)
        spans, images = plan_spans(budgets, patches, span_programs(x, heads))
        pairs = zip(self.groups, self.rotaries, strict=True)
        points = [rotary.coordinates.repeat(len(group.images), 1) for group, rotary in pairs]
        return SpanTables(torch.cat(points), spans.to(x.device), images.to(x.device), max(budgets))

    def run_mlp(self, mlp: nn.Module, x: Tensor, num_cores: int) -> Tensor:
        """The MLP of a block on all tokens (1, ΣC + ΣN, D): cores use all channels, patches those of their kind."""
        if len(self.patches_by_width) == 1:  # all tokens together
            out: Tensor = mlp(x, num_cores, *self.patches_by_width)
            return out
        cores, *patches = x.split([num_cores, *self.patches_by_width.values()], dim=1)
        parts = (mlp(part, 0, hidden) for part, hidden in zip(patches, self.patches_by_width, strict=True))
        return torch.cat([mlp(cores), *parts], dim=1)


@_skip_frame
def forward_packed(
    model: Veca, batch: PackedImages, cores: Any = None, cls_only: bool = False, width: Any = None
) -> PackedOutput:
    """`model(batch, cores, width=width)`: one budget and width for all images, or a sequence with one for each."""
    layout, budgets, _ = _disable_dynamo(plan_pack)(model, batch, cores, width)
    x, state = _start(model, layout, batch)
    alphas = model.coordinate_alpha.to(state.dtype, copy=True)
    tokens, states, full_blocks = Tokens(x), [], model.blocks[:-1] if cls_only else model.blocks
    for i, block in enumerate(full_blocks):
        head = (pass_layer(model.coordinate_heads[i - 1]), alphas[i - 1]) if i else None
        args = tokens, state, head, layout
        if model.grad_checkpointing and torch.is_grad_enabled():
            tokens, state = checkpoint_block(block, *args)
        else:
            tokens, state = block(*args)
        states.append(state)
    if cls_only:  # the last block as in a batch of one kind, which can stop at the first core
        tokens, state = _first_cores(model, layout, tokens, state, alphas)
        states.append(state)
    x = model.output_proj(add_and_norm(tokens, model.norm)[1][0])
    return _finish(model, layout, batch, budgets, x, states, cls_only)


@_disable_dynamo
def _start(model: Veca, layout: PackedLayout, batch: PackedImages) -> tuple[Tensor, Tensor]:
    """Tokens (1, ΣC + ΣN, D) and coordinates of the cores (1, ΣC, 2) before the first block; completes the layout."""
    embed, largest, side = model.patch_embed.proj, max(kind.budget for kind in layout.kinds), model.config.patch_size
    pixels = layout.sort(batch.pixels, batch.num_patches).to(embed.weight.dtype)
    patches = embed(pixels.unflatten(1, (-1, side, side))).flatten(1)
    bank, state = (each(largest) for each in (model.cores, model.core_states))
    x = torch.cat([*(bank[: kind.budget] for kind in layout.kinds), patches])[None]
    state = state.to(torch.promote_types(state.dtype, torch.float32))  # as in `Veca._run`
    state = torch.cat([state[: kind.budget] for kind in layout.kinds])[None]
    layout.rotaries = _patch_rotaries(model, [group.kind.grid for group in layout.groups], state)
    if runs_packed(x, model.config.head_dim, largest):
        layout.tables = layout.make_tables(x, model.config.num_heads)
    return x, state


@_disable_dynamo
def _finish(
    model: Veca, layout: PackedLayout, batch: PackedImages, budgets: Sequence[int], x: Tensor, states: list[Tensor],
    cls_only: bool,
) -> PackedOutput:  # fmt: skip
    """Tokens (ΣC + ΣN, D), or one per image, and coordinates after each block, in the order of the images."""
    counts = [1] * len(batch) if cls_only else budgets
    by_core, by_patch = x.split([sum(counts), len(x) - sum(counts)])
    by_core = layout.restore(by_core, counts)
    by_patch = by_patch if cls_only else layout.restore(by_patch, batch.num_patches)
    coordinates = layout.restore(torch.stack(states).tanh()[:, 0], budgets, dim=1)
    out = PackedOutput(by_core, by_patch, coordinates, batch.grids, tuple(budgets), cls_only=cls_only)
    return replace(out, logits=model.head(out.cls)) if model.config.num_classes else out


def forward_by_kind(
    model: Veca, batch: PackedImages, cores: Any = None, cls_only: bool = False, width: Any = None
) -> PackedOutput:
    """`forward_packed` by a model that takes batches of one kind: it runs once for each kind of image."""
    layout, budgets, widths = plan_pack(model, batch, cores, width)
    pixels, side = layout.sort(batch.pixels, batch.num_patches), model.config.patch_size
    outputs = []
    for (_, budget, grid), members, _, patches in layout.groups:
        images = pixels[patches].view(len(members), *grid, -1, side, side).permute(0, 3, 1, 4, 2, 5)
        images = images.flatten(4).flatten(2, 3)
        outputs.append(model(images, budget, cls_only=cls_only, width=widths[members[0]]))
    by_core, by_patch = (torch.cat([out[i].flatten(0, 1) for out in outputs]) for i in (0, 1))
    by_core = layout.restore(by_core, [1] * len(batch) if cls_only else budgets)
    by_patch = by_patch if cls_only else layout.restore(by_patch, batch.num_patches)
    coordinates = layout.restore(torch.cat([out.coordinates.flatten(1, 2) for out in outputs], dim=1), budgets, dim=1)
    logits = None
    if model.config.num_classes:
        logits = layout.restore(torch.cat([out.logits for out in outputs]), [1] * len(batch))
    return PackedOutput(by_core, by_patch, coordinates, batch.grids, tuple(budgets), logits, cls_only)


def plan_pack(model: Veca, batch: PackedImages, cores: Any, width: Any) -> tuple[PackedLayout, list[int], list[Any]]:
    """The layout of a pack, and the budget and width of each image."""
    config = model.config
    channels = config.in_chans * config.patch_size**2
    if batch.pixels.shape[1] != channels:
        rule = f"{config.in_chans} channels × {config.patch_size}² pixels = {channels} numbers"
        raise ArgumentError(f"patches of the pack have {batch.pixels.shape[1]} numbers; the model takes {rule}")
    budgets = _one_each(model.budget if cores is None else cores, len(batch), "cores")
    widths = _one_each(model.width if width is None else width, len(batch), "width")
    budgets = [resolve_budget(each, config, model._warned) for each in budgets]
    hidden = [resolve_width(each, config, model._warned) or config.mlp_dim for each in widths]
    kinds = [ImageKind(*parts) for parts in zip(hidden, budgets, batch.grids, strict=True)]
    return PackedLayout(kinds, config.mlp_dim), budgets, widths


@_disable_dynamo
def _first_cores(
    model: Veca, layout: PackedLayout, tokens: Tokens, state: Tensor, alphas: Tensor
) -> tuple[Tokens, Tensor]:
    """Of each image the first core after the last block (1, B, D), and the coordinates of all (1, ΣC, 2)."""
    head = (pass_layer(model.coordinate_heads[-1]), alphas[-1]) if len(model.coordinate_heads) else None
    x, firsts, states = tokens.total(), [], []
    for group, rotary in zip(layout.groups, layout.rotaries, strict=True):
        own, moved = model.blocks[-1](
            Tokens(layout.tokens(x, group)), layout.by_image(state[0], group), head, rotary, True
        )
        firsts.append(own.total()[:, 0])
        states.append(moved.flatten(0, 1))
    return Tokens(torch.cat(firsts)[None]), torch.cat(states)[None]


def _patch_rotaries(model: Veca, grids: Sequence[PatchGrid], like: Tensor) -> list[Rotary]:
    """A rotary table (N, …) for each grid; augmented coordinates, in training, are moved alike for the whole pack."""
    config, options = model.config, (like.device, like.dtype)
    shape = config.head_dim, config.rope_zero_fraction
    if not model.training or (config.coordinate_shift <= 0 and config.coordinate_rescale <= 1):
        return [grid_rotary(*grid, *shape, *options) for grid in grids]
    plain = [patch_coordinates(*grid, *options) for grid in grids]
    moved = augment_coordinates(torch.cat(plain), config.coordinate_shift, config.coordinate_rescale)
    return [make_rotary(part, *shape) for part in moved.split([len(part) for part in plain])]


def _padded_tensors(images: Mapping[str, Any], shapes: Mapping[str, str]) -> list[Tensor]:
    """The tensors of a dictionary by name, of these shapes: floats first, masks as booleans, the others integers."""
    tensors, sizes = list[Tensor](), {"2": 2}
    for name, letters in shapes.items():
        try:
            tensor = torch.as_tensor(images[name])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(f"{name} is {type(images[name]).__name__}; it must be a tensor") from error
        if letters == "BNX" and tensor.ndim == 5:  # patches with their two sides
            tensor = tensor.flatten(2)
        matches = tensor.ndim == len(letters) and all(
            sizes.setdefault(letter, size) == size for letter, size in zip(letters, tensor.shape, strict=True)
        )
        if not matches or (len(tensor) and 0 in tensor.shape):
            expected = ", ".join(str(sizes.get(letter) or letter) for letter in letters)
            rule = "B images in N ≥ 1 patches, with padding, of X ≥ 1 numbers"
            raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; expected ({expected}): {rule}")
        if letters == "BN":
            tensor = tensor.bool()
        elif letters != "BNX" and tensor.is_floating_point():
            raise ArgumentError(f"{name} is {tensor.dtype}; it must be of integers")
        tensors.append(tensor)
    return tensors


def _one_each(values: Any, count: int, name: str) -> list[Any]:
    """A value for each of `count` images: the same, or one each from a sequence."""
    if hasattr(values, "tolist"):  # of torch or NumPy
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [values] * count
    if len(values) != count:
        raise ArgumentError(f"{name} has {len(values)} values for {count} images; give one for each, or one for all")
    return list(values)


def _patches(kind: ImageKind) -> int:
    return kind.grid[0] * kind.grid[1]


def _reorder(x: Tensor, counts: Sequence[int], order: Sequence[int], dim: int = 0) -> Tensor:
    """The parts of `x`, `counts` long, in another order."""
    if list(order) == sorted(order):
        return x
    parts = x.split(list(counts), dim)
    return torch.cat([parts[i] for i in order], dim)
