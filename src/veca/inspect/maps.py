"""Attention maps of the cores, their contributions to the patches (the paper's equation 5), and measures of maps.

Attention alone misleads: a core may get much attention and still add little. The contribution of token j to token i is
the norm of what j adds to i, c_ij = ‖Σ_h A^h_ij v^h_j W_O^h‖; a patch's *profile* is each core's share of these.

Shapes: B images, rows × columns = N patches, C active cores, S = C + N tokens (cores first), H heads, d width of a
head, D = H·d; Q queries (tokens that receive), K keys (tokens that contribute).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from veca.attention import core_probabilities
from veca.errors import ArgumentError, NonFiniteError
from veca.model import Veca
from veca.outputs import VecaOutput
from veca.rope import Rotary

Captured = TypeVar("Captured")
CHUNK_SIZE = 2**20
"""About this many float64 numbers per intermediate tensor: 8 MiB."""


@contextmanager
def inspecting(model: Veca) -> Iterator[None]:
    """Eval mode without gradients; afterwards the model is in its former mode again."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def check_finite(model: Veca, *outputs: Tensor) -> None:
    """Raise `NonFiniteError` if an output of `model` is not finite, saying whether its weights are."""
    if all(output.isfinite().all() for output in outputs):
        return
    # Tell broken weights from overflow: the way out differs.
    weights = dict(model.named_parameters())
    broken = [name for name, weight in weights.items() if not weight.isfinite().all()]
    reason = f", though its weights are: its numbers overflow in {model.norm.weight.dtype}; load it in float32"
    if broken:
        count = f"{len(broken)} of its {len(weights)} weight tensors"
        reason = f": {count} hold NaN or infinity, the first {broken[0]}; load another checkpoint"
    raise NonFiniteError(f"the model's features are not finite{reason}")


@torch.no_grad()
def core_maps(
    model: Veca, images: Tensor, cores: int | None = None, layers: Sequence[int] = (-1,), per_head: bool = False
) -> Tensor:
    """Attention of each active core over the patches, in the blocks numbered `layers` (negative: from the end).

    Returns (layers, B, C, rows, columns), the mean over heads, or with `per_head` (layers, B, H, C, rows, columns).
    These are probabilities of a softmax over all S tokens, so a map sums to what the core does not spend on cores.
    They are float32 or better; memory is linear in N. The model is run as it is: put it in eval mode first.

    >>> from veca import create_model
    >>> core_maps(create_model("veca_tiny").eval(), torch.zeros(1, 3, 64, 96), cores=16, layers=(0, -1)).shape
    torch.Size([2, 1, 16, 4, 6])
    """

    def capture(attn: Any, x: Tensor, *rotaries: Rotary) -> Tensor:
        attention = block_attention(attn, x, *rotaries)[0][..., rotaries[0].cos.shape[-2] :]
        return attention if per_head else attention.mean(1)

    captured, out = capture_attention(model, images, cores, layers, capture)
    return torch.stack(captured).unflatten(-1, out.grid)


@torch.no_grad()
def core_profiles(model: Veca, images: Tensor, cores: int | None = None, layers: Sequence[int] = (-1,)) -> Tensor:
    """Each patch's profile over the active cores, in the blocks numbered `layers` (negative: from the end).

    Returns (layers, B, rows, columns, C), float32 or better. The C shares of a patch sum to 1: patches attend to
    nothing else. Memory is linear in N. The model is run as it is: put it in eval mode first.

    >>> from veca import create_model
    >>> core_profiles(create_model("veca_tiny").eval(), torch.zeros(1, 3, 64, 96), cores=16, layers=(3, -1)).shape
    torch.Size([2, 1, 4, 6, 16])
    """

    def capture(attn: Any, x: Tensor, *rotaries: Rotary) -> Tensor:
        return patch_profiles(attn, *block_attention(attn, x, *rotaries)[1:])

    captured, out = capture_attention(model, images, cores, layers, capture)
    return torch.stack(captured).unflatten(2, out.grid)


class Inside(NamedTuple):
    """Output, maps and profiles of one forward pass."""

    output: VecaOutput
    maps: Tensor
    """(layers, B, C, rows, columns), as from `core_maps`."""
    profiles: Tensor
    """(layers, B, rows, columns, C), as from `core_profiles`."""


@torch.no_grad()
def look_inside(
    model: Veca,
    images: Tensor,
    cores: int | None = None,
    layers: Sequence[int] = (-1,),
    width: float | None = None,
) -> Inside:
    """`core_maps` and `core_profiles` of one forward pass, and its output."""
    captured, out = capture_attention(model, images, cores, layers, mean_attention_and_profiles, width)
    attention, profiles = (torch.stack(parts) for parts in zip(*captured, strict=True))
    return Inside(out, attention[..., out.cores.shape[1] :].unflatten(-1, out.grid), profiles.unflatten(2, out.grid))


def capture_attention(
    model: Veca,
    images: Tensor,
    cores: int | None,
    layers: Sequence[int],
    capture: Callable[..., Captured],
    width: float | None = None,
) -> tuple[list[Captured], VecaOutput]:
    """Run the model and call `capture(attn, x, core_rotary, patch_rotary)` before the attention of each block.

    `x` (B, S, D) are the normalised tokens that attention gets. Returns one result per layer, and the model's output.
    """
    model = getattr(model, "_orig_mod", model)  # a graph compiled by torch.compile may skip hooks
    blocks: Any = model.blocks
    if not layers:
        raise ArgumentError("asked for the maps of no block; name at least one")
    for layer in layers:
        if not -len(blocks) <= layer < len(blocks):
            raise ArgumentError(f"asked for the maps of block {layer}; the model has blocks 0 to {len(blocks) - 1}")
    if not hasattr(blocks[0], "attn"):
        raise ArgumentError("an optimized model keeps no attention; give the model it was made from")
    indices = [layer % len(blocks) for layer in layers]
    captured: dict[int, Captured] = {}

    def run_capture(index: int, attn: Any, args: tuple[Any, ...]) -> None:
        captured[index] = capture(attn, *args[:3])

    with ExitStack() as hooks:
        if blocks[0]._compiled_call_impl is not None:  # `veca.optimize` compiles blocks on a CPU
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for index in set(indices):
            hooks.enter_context(blocks[index].attn.register_forward_pre_hook(partial(run_capture, index)))
        out = Veca.forward(
            model, images, cores, width=width
        )  # subclasses, as timm's, return something else when called
    return [captured[index] for index in indices], out


def block_attention(attn: Any, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities core → all (B, H, C, S) and patch → core (B, H, N, C), and the values of the cores (B, H, C, d).

    From the inputs of a block's attention; all are float32 or better.
    """
    qkv = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1))  # (B, S, 3, H, d)
    qkv = qkv.to(torch.promote_types(qkv.dtype, torch.float32))  # rounded only where the model rounds
    patch_to_core, core_to_all = core_probabilities(qkv[:, :, :2], core_rotary, patch_rotary)
    values = qkv[:, : core_rotary.cos.shape[-2], 2].transpose(1, 2)
    patch_to_core = patch_to_core.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
    return core_to_all.unflatten(1, (attn.num_heads, -1)), patch_to_core, values


def mean_attention_and_profiles(attn: Any, x: Tensor, *rotaries: Rotary) -> tuple[Tensor, Tensor]:
    """Attention of the cores (B, C, S), the mean over heads, and profiles of the patches (B, N, C)."""
    core_to_all, patch_to_core, values = block_attention(attn, x, *rotaries)
    return core_to_all.mean(1), patch_profiles(attn, patch_to_core, values)


def patch_profiles(attn: Any, patch_to_core: Tensor, values: Tensor) -> Tensor:
    """Profiles of the patches (B, N, C), from what `block_attention` returns."""
    if type(attn.proj) is not nn.Linear:
        kind = f"the output projection is a {type(attn.proj).__name__} here and not a Linear"
        raise ArgumentError(f"{kind}; merge adapters into the model to see contributions, or take it unquantised")
    device = "cpu" if values.device.type == "mps" else values.device  # MPS has no float64
    parts = patch_to_core.to(device), values.to(device), attn.proj.weight.to(device)
    # Fewer, larger steps keep a GPU busy.
    norms = contributions(*parts, CHUNK_SIZE if values.device.type == "cpu" else 16 * CHUNK_SIZE)
    # A patch to which no core adds anything gets equal shares.
    norms = torch.where(norms.sum(-1, keepdim=True) == 0, 1.0, norms)
    return (norms / norms.sum(-1, keepdim=True)).to(values.device, values.dtype)


def contributions(attention: Tensor, values: Tensor, weight: Tensor, chunk_size: int = CHUNK_SIZE) -> Tensor:
    """c_ij of every query and key, (..., Q, K), not yet divided by its sum over j. Exact, float64.

    `attention` (..., H, Q, K), `values` (..., H, K, d), `weight` (D, H·d) of the output projection.
    """
    heads = attention.shape[-3]
    # ‖Σ_h a_h u_h‖² = aᵀ G a, where G (H, H) is the Gram matrix of a key's vectors u_h = v^h W_O^h: H numbers per pair
    # of tokens instead of D. In float64 cancellation in the sum leaves no visible error.
    slices = weight.double().unflatten(1, (heads, -1)).permute(1, 2, 0)  # (H, d, D)
    # Keys of all images in one dimension and queries last: (H, H) @ (H, Q) is fast, with Q first it is slow.
    keys = values.movedim(-3, 0).flatten(1, -2)  # (H, keys, d)
    shares = attention.movedim(-1, -3)  # (..., K, H, Q)
    rows = shares.reshape(-1, *shares.shape[-2:])
    norms = []
    step = max(1, chunk_size // (heads * (weight.shape[0] + rows.shape[-1])))
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        vectors = (keys[:, chunk].double() @ slices).transpose(0, 1)  # (keys, H, D)
        share = rows[chunk].double()
        norms.append(((vectors @ vectors.mT @ share) * share).sum(-2).clamp(min=0).sqrt())
    return torch.cat(norms).reshape(*shares.shape[:-2], -1).mT


# Measures of maps (..., C, N), which sum to 1 over N.


def as_maps(attention: Tensor) -> Tensor:
    """Attention over the patches (..., N), divided by its sum; uniform where the sum is 0."""
    total = attention.sum(-1, keepdim=True)
    return torch.where(total > 0, attention / total, 1 / attention.shape[-1])


def overlap(a: Tensor, b: Tensor | float) -> Tensor:
    """Σᵢ min(aᵢ, bᵢ) over the last axis: 1 where both maps are the same, 0 where they have nothing in common."""
    return torch.clamp(a, max=b).sum(-1)


def pair_overlap(maps: Tensor) -> Tensor:
    """The mean overlap of all pairs of cores, (...); nan for a single core.

    >>> pair_overlap(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])).item()
    0.5
    """
    cores = maps.shape[-2]
    # Σ min(a, b) = 1 − Σ |a − b| / 2, as both sum to 1: avoids a tensor of size C × C × N.
    distances = torch.cdist(maps, maps, p=1.0).sum((-2, -1))
    return 1 - distances / (2 * cores * (cores - 1)) if cores > 1 else torch.full_like(distances, math.nan)


def effective_area(maps: Tensor) -> Tensor:
    """exp(entropy) / N of each map, (..., C): 1 if it is uniform, k / N if uniform over k patches and 0 elsewhere."""
    return torch.special.entr(maps).sum(-1).exp() / maps.shape[-1]


def winners(maps: Tensor) -> Tensor:
    """The share of cores whose map is the largest of all at some patch, (...)."""
    return maps.new_zeros(maps.shape[:-1]).scatter_(-1, maps.argmax(-2), 1.0).mean(-1)
