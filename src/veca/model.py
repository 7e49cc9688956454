"""The VECA backbone, top to bottom.

A Vision Transformer in which patches never attend to patches. They communicate through C ≤ 64 learned *cores*:

- cores attend to every token, patches attend to the cores: cost is linear in the number of patches;
- the cores are an ordered bank trained at many budgets, so the first C of them are a model for every C;
- the first core is the global feature; all patches are kept and refined in every block, so dense features come out;
- each core has coordinates on the image, which are moved before each block by a step read from the core itself;
- the channels of the MLPs are ordered too: patches may use the first of them only, cores use all (not in the paper).

How blocks run fast (fused kernels, shortcuts) is in `veca.block_ops`, argument checks are in `veca.inputs`.

Shapes: B images, rows × columns = N patches, C active cores, S = C + N tokens (cores first), D width, H heads,
d = D / H, L blocks, p patch size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from veca.attention import core_attention
from veca.block_ops import (
    CoordinateHead,
    Tokens,
    add_and_norm,
    apply_linear,
    attention_shortcut,
    checkpoint_block,
    coordinate_step,
    gated_linear,
    nested_mlp,
    pass_layer,
)
from veca.compute import CostTable, apply_compute, choose_each
from veca.config import VecaConfig
from veca.errors import ArgumentError
from veca.inputs import patch_grid, resolve_block_indices, resolve_budget, resolve_width
from veca.kernels.onednn import inference_linear
from veca.outputs import PackedOutput, VecaOutput
from veca.packed import PackedImages, PackedLayout, forward_packed
from veca.rope import Rotary, augment_coordinates, grid_rotary, initial_core_states, make_rotary, patch_coordinates


class CoreBank(nn.ParameterList):
    """A learned row for each core, in chunks: an inactive chunk gets no gradient at all, not one of zeros.

    It is called as other layers are, for libraries that load the weights of a layer when it is called.
    """

    __call__ = nn.Module.__call__

    def forward(self, budget: int) -> Tensor:
        """The first `budget` rows; with gradients on, later chunks are left out of the graph."""
        chunks = math.ceil(budget / len(self[0])) if torch.is_grad_enabled() else len(self)
        return torch.cat(list(self)[:chunks])[:budget]


class PatchConv(nn.Conv2d):
    """A convolution whose stride is its kernel, as one matrix product: cuDNN would round float32 to TF32."""

    def forward(self, images: Tensor) -> Tensor:
        side = self.kernel_size[0]
        patches = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # (B, 3, rows, p, columns, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (B, rows, columns, 3·p·p)
        return inference_linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class PatchEmbed(nn.Module):
    """Images (B, 3, height, width) → patch tokens (B, N, D)."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.proj = PatchConv(config.in_chans, config.embed_dim, config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).mT


class Attention(nn.Module):
    """Multi-head core-periphery attention, rotary embedding included."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary, cls_only: bool = False) -> Tensor:
        """Tokens (B, S, D) → the same shape, or with `cls_only` the first core's (B, 1, D)."""
        out = attention_shortcut(x, self.qkv, self.proj, self.num_heads, core_rotary, patch_rotary, cls_only)
        if out is not None:
            return out
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, S, 3, H, d)
        out = self.proj(core_attention(qkv, core_rotary, patch_rotary))
        return out[:, :1] if cls_only else out


class SwiGlu(nn.Module):
    """The MLP of a block: `fc2(silu(u) * v)`, where [u, v] = `fc1(x)`."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.embed_dim, 2 * config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, config.embed_dim)

    def forward(self, x: Tensor, cores: int = 0, hidden: int | None = None) -> Tensor:
        """Tokens (B, S, D) → the same shape; with `hidden`, those after the first `cores` use so many channels only."""
        if hidden is not None:
            return nested_mlp(x, self.fc1, self.fc2, cores, hidden)
        return apply_linear(gated_linear(x, self.fc1), self.fc2)


class Block(nn.Module):
    """Coordinate update, then attention and MLP, each after a LayerNorm and with a residual connection."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.head_dim, self.rope_zero_fraction = config.head_dim, config.rope_zero_fraction
        self.norm1 = nn.LayerNorm(config.embed_dim)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.embed_dim)
        self.mlp = SwiGlu(config)

    def forward(
        self,
        tokens: Tokens,
        state: Tensor,
        coordinate_head: tuple[Callable[[Tensor], Tensor], Tensor] | None,
        patch_rotary: Rotary | PackedLayout,
        cls_only: bool = False,
        hidden: int | None = None,
    ) -> tuple[Tokens, Tensor]:
        """Tokens (B, S, D) and free core coordinates (B, C, 2) → the same after this block.

        `coordinate_head` is the layer that reads a core's step from its token, and the factor of the step; None in the
        first block, where cores stay at their learned coordinates. `cls_only` computes the first token only. `hidden`
        is the number of MLP channels that patches use; None: all. The tokens of a pack are (1, ΣC + ΣN, D); its layout
        has the rotary tables of the patches.
        """
        x, normed, cores = add_and_norm(tokens, self.norm1, state.shape[1])
        if coordinate_head is not None:  # the coordinate update
            head, alpha = coordinate_head
            state = state + alpha * coordinate_step(cores, head).to(state)
        core_rotary = make_rotary(state.tanh()[:, None], self.head_dim, self.rope_zero_fraction)
        if isinstance(patch_rotary, PackedLayout):
            x, normed, _ = add_and_norm(Tokens(x, patch_rotary.attend(self.attn, normed, core_rotary)), self.norm2)
            return Tokens(x, patch_rotary.run_mlp(self.mlp, normed, state.shape[1])), state
        update = self.attn(normed, core_rotary, patch_rotary, cls_only=cls_only)  # (B, S, D), or (B, 1, D)
        x, normed, _ = add_and_norm(Tokens(x[:, : update.shape[1]], update), self.norm2)
        narrow = () if hidden is None or cls_only else (state.shape[1], hidden)
        return Tokens(x, self.mlp(normed, *narrow)), state


class Veca(nn.Module):
    """The backbone: `model(images, cores=C)` → `VecaOutput`.

    >>> import veca
    >>> model = veca.create_model("veca_tiny").eval()
    >>> out = model(torch.zeros(1, 3, 64, 96), cores=16)
    >>> out.cls.shape, out.feature_map.shape
    (torch.Size([1, 192]), torch.Size([1, 192, 4, 6]))
    """

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        dim, chunks = config.embed_dim, config.num_cores // config.core_chunk
        self.config = config
        self.provenance = {}
        self.budget: int | None = None
        """The budget of a call that names none; None: all cores."""
        self.width: float | None = None
        """The width of a call that names none; None: the whole MLP."""
        self.embed_dim = dim
        self.num_features = config.num_features
        self.grad_checkpointing = False
        self._warned: set[str] = set()  # untrained budgets and widths that have been warned about

        self.patch_embed = PatchEmbed(config)
        self.cores = CoreBank(torch.empty(config.core_chunk, dim) for _ in range(chunks))
        self.core_states = CoreBank(torch.empty(config.core_chunk, 2) for _ in range(chunks))
        self.coordinate_heads = nn.ModuleList(CoordinateHead(dim, 2) for _ in range(config.depth - 1))
        self.coordinate_alpha = nn.Parameter(torch.empty(config.depth - 1))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(dim)
        self.output_proj = nn.Linear(dim, config.output_dim) if config.output_dim else nn.Identity()
        self.head = nn.Linear(self.num_features, config.num_classes) if config.num_classes else nn.Identity()
        if not self.coordinate_alpha.is_meta:  # on meta there is nothing to initialise: a checkpoint will be loaded
            self.init_weights()

    @property
    def provenance(self) -> dict[str, Any]:
        """Plain data on where the weights come from; saved and loaded with them."""
        return self._provenance

    @provenance.setter
    def provenance(self, value: dict[str, Any]) -> None:
        self.quality_cost = CostTable.from_provenance(value, self.config)
        """What `compute` chooses from; None: FLOPs alone."""
        self._provenance = value

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise all weights as the paper does."""
        self.apply(init_layer)
        self.init_cores()

    @torch.no_grad()
    def init_cores(self) -> None:
        """Initialise the parameters that belong to no layer: the core bank, its coordinates, the step factors."""
        for chunk in self.cores:
            nn.init.normal_(chunk, std=self.embed_dim**-0.5)
        states = initial_core_states(self.config.num_cores).split(self.config.core_chunk)
        for chunk, state in zip(self.core_states, states, strict=True):
            chunk.copy_(state)
        nn.init.constant_(self.coordinate_alpha, 0.01)

    @overload
    def forward(
        self,
        images: Tensor,
        cores: int | None = ...,
        cls_only: bool = ...,
        width: float | None = ...,
        compute: float | None = ...,
        resize: bool = ...,
    ) -> VecaOutput: ...
    @overload
    def forward(
        self,
        images: PackedImages | Mapping[str, Tensor],
        cores: int | Sequence[int] | None = ...,
        cls_only: bool = ...,
        width: float | Sequence[float] | None = ...,
        compute: float | None = ...,
        resize: bool = ...,
    ) -> PackedOutput: ...
    def forward(
        self,
        images: Tensor | PackedImages | Mapping[str, Tensor],
        cores: Any = None,
        cls_only: bool = False,
        width: Any = None,
        compute: float | None = None,
        resize: bool = False,
    ) -> VecaOutput | PackedOutput:
        """Features of normalised images (B, 3, height, width), sides multiples of 16; or of a pack (`veca.pack`),
        or of a dictionary that can be packed, of timm's NaFlex or SigLIP 2.

        `cores` is the budget C, from 1 to `config.num_cores` (64); None: all. An untrained budget warns once.
        `cls_only` skips what the global feature does not need: the output has one core and no patches. `width` is the
        share of the MLP's channels that patches use, above 0, at most 1; None: all. An untrained width warns once.
        `compute` chooses cores and width instead: the best that cost at most this share of the full cost
        (`veca.resolve_compute`). With `resize` it may also resize the images to a smaller size: the maps that come out
        then have a smaller grid. For a pack, `cores` and `width` may have a value for each image.

        >>> import veca
        >>> model, images = veca.create_model("veca_tiny").eval(), torch.zeros(2, 3, 64, 64)
        >>> model(images).cores.shape, model(images, cores=8).cores.shape
        (torch.Size([2, 64, 192]), torch.Size([2, 8, 192]))
        >>> out = model(images, cores=8, cls_only=True)
        >>> out.cls.shape, out.patches.shape
        (torch.Size([2, 192]), torch.Size([2, 0, 192]))
        """
        if isinstance(images, Mapping):
            images = PackedImages.from_padded(images, self.config.patch_size)
        if isinstance(images, PackedImages):
            cores, width = choose_each(self, images.grids, cores, width, compute, resize)
            return self._forward_packed(images, cores, cls_only, width)
        images, cores, width = apply_compute(self, images, cores, width, compute, resize)
        x, coordinates, _ = self._run(images, cores, cls_only=cls_only, width=width)
        x = self.output_proj(x)
        budget = 1 if cls_only else coordinates.shape[2]
        logits = self.forward_head(x) if self.config.num_classes else None
        core_tokens, patches = x.split([budget, x.shape[1] - budget], dim=1)  # slices would each have a whole gradient
        return VecaOutput(core_tokens, patches, coordinates, patch_grid(images, self.config), logits)

    def _forward_packed(self, batch: PackedImages, cores: Any, cls_only: bool, width: Any) -> PackedOutput:
        return forward_packed(self, batch, cores, cls_only, width)

    def _run(
        self,
        images: Tensor,
        cores: int | None,
        take: Sequence[int] = (),
        stop: int | None = None,
        cls_only: bool = False,
        width: float | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run all blocks, or the first `stop`: normalised tokens (B, S, D), coordinates (L, B, C, 2), intermediates.

        Intermediates are the tokens after the blocks numbered in `take`; -1 is before the first block.
        """
        rows, columns = patch_grid(images, self.config)
        budget = resolve_budget(self.budget if cores is None else cores, self.config, self._warned)
        hidden = resolve_width(self.width if width is None else width, self.config, self._warned)
        patches = self.patch_embed(images.to(self.patch_embed.proj.weight.dtype))
        bank, state = self.cores(budget), self.core_states(budget)
        x = torch.cat([bank.expand(len(images), -1, -1), patches], dim=1)

        # Coordinates and angles stay in float32 or better, whatever the dtype of the model or autocast.
        state = state.to(torch.promote_types(state.dtype, torch.float32))
        state = state.expand(len(images), -1, -1).contiguous()  # strides as blocks return them: no recompilation
        alphas = self.coordinate_alpha.to(state.dtype, copy=True)  # hooks take no slice of a parameter in inference
        patch_rotary = self._patch_rotary(rows, columns, state)
        tokens, states, taken = Tokens(x), [], [x] if -1 in take else []
        for i, block in enumerate(self.blocks[:stop]):
            coordinate_head = (pass_layer(self.coordinate_heads[i - 1]), alphas[i - 1]) if i else None
            # Earlier blocks need all tokens, for their keys; the last one can stop at the first core.
            last = cls_only and block is self.blocks[-1]
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens, state = checkpoint_block(block, tokens, state, coordinate_head, patch_rotary, last, hidden)
            else:
                tokens, state = block(tokens, state, coordinate_head, patch_rotary, last, hidden)
            states.append(state)
            if i in take:
                taken.append(tokens.total())
        return add_and_norm(tokens, self.norm)[1], torch.stack(states).tanh(), taken

    def freeze_inactive_cores(self, budget: int) -> None:
        """Freeze what no budget up to `budget` uses: DDP waits for the gradient of every parameter not frozen."""
        for bank in (self.cores, self.core_states):
            for chunk in list(bank)[math.ceil(budget / self.config.core_chunk) :]:
                chunk.requires_grad_(False)

    def _patch_rotary(self, rows: int, columns: int, like: Tensor) -> Rotary:
        """The rotary table of the patches; in training their coordinates are augmented, alike for the whole batch."""
        head_dim, zero_fraction = self.config.head_dim, self.config.rope_zero_fraction
        shift, rescale = self.config.coordinate_shift, self.config.coordinate_rescale
        if self.training and (shift > 0 or rescale > 1):
            coordinates = augment_coordinates(patch_coordinates(rows, columns, like.device, like.dtype), shift, rescale)
            return make_rotary(coordinates, head_dim, zero_fraction)
        return grid_rotary(rows, columns, head_dim, zero_fraction, like.device, like.dtype)

    # The API of timm and DINOv3.

    def forward_features(self, images: Tensor, cores: int | None = None, width: float | None = None) -> Tensor:
        """Final, normalised tokens (B, C + N, D), the C = `cores` cores first."""
        return self.output_proj(self._run(images, cores, width=width)[0])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (B, num_classes) of the tokens of `forward_features`; `pre_logits` stops at the global feature."""
        return x[:, 0] if pre_logits else self.head(x[:, 0])

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        cores: int | None = None,
        width: float | None = None,
    ) -> Any:
        """Features of several blocks, as in timm: (final tokens, intermediates), intermediates only, or a dictionary.

        `indices`: the last n blocks, or their numbers (negative from the end); None: all. Prefix tokens are the
        cores. Intermediates have the model's width: they are taken before `output_proj`. `stop_early` runs no block
        after the last of `indices`; the final tokens are then that block's.

        >>> import veca
        >>> model = veca.create_model("veca_tiny").eval()
        >>> tokens, maps = model.forward_intermediates(torch.zeros(1, 3, 64, 96), indices=[5, 11], cores=16)
        >>> tokens.shape, [tuple(m.shape) for m in maps]
        (torch.Size([1, 40, 192]), [(1, 192, 4, 6), (1, 192, 4, 6)])
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ArgumentError(f"output_fmt={output_fmt!r}; choose 'NCHW' or 'NLC'")
        take = resolve_block_indices(indices, len(self.blocks))
        stop = max(take) + 1 if stop_early else None
        x, coordinates, taken = self._run(images, cores, take, stop, width=width)
        budget = coordinates.shape[2]
        taken = [self.norm(t) for t in taken] if norm else taken
        features = [t[:, budget:] for t in taken]
        if output_fmt == "NCHW":
            grid = patch_grid(images, self.config)
            features = [t.mT.unflatten(-1, grid).contiguous() for t in features]
        prefixes = [t[:, :budget] for t in taken]
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": features}
            result |= {"image_intermediates_prefix": prefixes} if return_prefix_tokens else {}
            return result if intermediates_only else {**result, "image_features": self.output_proj(x)}
        intermediates = list(zip(features, prefixes, strict=True)) if return_prefix_tokens else features
        return intermediates if intermediates_only else (self.output_proj(x), intermediates)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_class_token: bool = False,
        norm: bool = True,
        cores: int | None = None,
        width: float | None = None,
    ) -> tuple[Any, ...]:
        """Features of the last `n` blocks (or of those listed), as in DINOv3: patches, or (patches, cls) pairs.

        Patches are (B, N, D), or with `reshape` (B, D, rows, columns); D is the model's width, before `output_proj`.

        >>> import veca
        >>> model = veca.create_model("veca_tiny").eval()
        >>> layers = model.get_intermediate_layers(torch.zeros(1, 3, 64, 96), n=4, reshape=True, cores=16)
        >>> len(layers), layers[-1].shape
        (4, torch.Size([1, 192, 4, 6]))
        """
        pairs = self.forward_intermediates(
            x, n, True, norm, True, "NCHW" if reshape else "NLC", intermediates_only=True, cores=cores, width=width
        )
        return tuple((patches, prefix[:, 0]) if return_class_token else patches for patches, prefix in pairs)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Store only block inputs for the backward pass and recompute the rest: less memory, more time."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one; 0 removes it. The only `global_pool` is "token": the first core."""
        if global_pool not in (None, "token"):
            raise ArgumentError(f"global_pool={global_pool!r}; the global feature is the first core: 'token' or None")
        self.config = VecaConfig.from_dict({**self.config.to_dict(), "num_classes": num_classes})
        like = self.patch_embed.proj.weight
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            init_layer(self.head)
        self.head.train(self.training)


def init_layer(module: nn.Module) -> None:
    """Initialise a Linear, Conv2d or LayerNorm; other modules are left as they are."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # every layer here has one
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()
