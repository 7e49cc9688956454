"""Triton kernels: core-periphery attention of packed images, forward and backward.

Tokens of all images are one sequence: all cores, then all patches (`veca.packed`). A program takes a *span*,
consecutive patches of one image, in one of the roles of `core_attention`, whose functions do the work. Where an image
has several spans, each leaves a partial result for its cores, and a second kernel combines them.

Shapes: ΣC cores and ΣN patches of all images, S = ΣC + ΣN tokens, H heads, d width of a head. qkv is (S, 3, H, d) with
any strides but the last; coordinates are (ΣC, 2) and (ΣN, 2). `spans` (spans, 6) and `images` (images, 4) are int32, as
`plan_spans` makes them; `lse` is (H, S).
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.core_attention import (
    LOG2_E,
    AttentionTiling,
    as_kernel_input,
    choose_attention_tiling,
    combine_partials,
    core_queries,
    patch_queries,
)
from veca.kernels.core_attention_backward import (
    combine_core_gradients,
    core_queries_backward,
    patch_queries_backward,
)
from veca.kernels.launch import launchable, multiprocessors
from veca.kernels.rotary import load_frequency

_TILE = 64
"""Patches that a span has a multiple of."""
_MAX_PATCHES, _MAX_STRIDE = 2**15, 2**16 - 1
"""Of a span, and of its tokens: a program addresses them relative to the first with 32 bits."""


def plan_spans(
    budgets: Sequence[int], patches: Sequence[int], programs: int, first_patch: int | None = None
) -> tuple[Tensor, Tensor]:
    """Spans and images of a pack whose images have so many cores and patches, for about `programs` spans.

    A span is (its image's first core, number of cores, first token, first patch among all, number of patches, place):
    2 the only one of its image, 1 the first, 0 another. An image is (first core, number of cores, first span, number of
    spans). Large images come first, so that no program is left to run alone at the end. `first_patch` is the token of
    the first patch, if not the one after the last core.
    """
    total = sum(-(-count // _TILE) for count in patches)
    length = min(_MAX_PATCHES, _TILE * max(1, -(-total // max(1, programs))))
    first_patch = sum(budgets) if first_patch is None else first_patch
    places = zip(accumulate(budgets, initial=0), budgets, accumulate(patches, initial=0), patches, strict=False)
    spans, images = list[list[int]](), list[list[int]]()
    for core, budget, patch, count in sorted(places, key=lambda place: -place[3]):
        starts = range(0, count, length)
        images.append([core, budget, len(spans), len(starts)])
        for start in starts:
            place, first = 0 if start else 2 if len(starts) == 1 else 1, patch + start
            spans.append([core, budget, first_patch + first, first, min(length, count - start), place])
    return torch.tensor(spans, dtype=torch.int32), torch.tensor(images, dtype=torch.int32)


def span_programs(x: Tensor, heads: int) -> int:
    """How many spans to aim at for tokens `x`."""
    return max(1, 8 * multiprocessors(x) // (2 * heads))


@triton.jit
def _load_span(spans, span):
    """First core, number of cores, tokens from there to the first patch, first patch, number of patches, place."""
    at = spans + span * 6
    core = tl.load(at).to(tl.int64)
    return core, tl.load(at + 1), tl.load(at + 2) - core, tl.load(at + 3).to(tl.int64), tl.load(at + 4), tl.load(at + 5)


@triton.jit(do_not_specialize=["S"])
def _packed_attention_kernel(
    qkv, cores, patches, frequencies, out, lse, partials, spans, S, stride_s, stride_3, stride_h,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Role 0: patch queries. Role r > 0: queries of chunk r - 1 of the cores.
    span, h, role = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    core, C, token, patch, count, place = _load_span(spans, span)
    base = qkv + core * stride_s + h * stride_h
    cores += 2 * core
    patches += 2 * patch
    frequency = load_frequency(frequencies, D // 2)
    out += core * (H * D) + h * D
    lse += h * S.to(tl.int64) + core
    if role == 0:
        patch_queries(
            base, cores, patches, frequency, out, lse, C, token, count, SCALE * LOG2_E,
            stride_s, stride_3, H * D, D, CHUNK, CHUNKS, TILE, False, EXACT, PRECISION, STAGES,
        )  # fmt: skip
    elif (role - 1) * CHUNK < C:
        partial = partials + ((span * H + h).to(tl.int64) * CHUNKS + role - 1) * (CHUNK * (D + 2))
        core_queries(
            base, cores, patches, frequency, out, lse, partial, role - 1, C, token, place > 0, count, SCALE * LOG2_E,
            stride_s, stride_3, H * D, place == 2, D, CHUNK, TILE, False, EXACT, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["S"])
def _combine_packed_kernel(
    partials, out, lse, images, S,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The cores' output from the partials of all spans of an image, where there are several."""
    image, h = tl.program_id(0) // H, tl.program_id(0) % H
    chunk, part = tl.program_id(1), tl.program_id(2)
    core, C = tl.load(images + 4 * image).to(tl.int64), tl.load(images + 4 * image + 1)
    first_span, splits = tl.load(images + 4 * image + 2), tl.load(images + 4 * image + 3)
    if (splits > 1) & (chunk * CHUNK + part * ROWS < C):
        c = part * ROWS + tl.arange(0, ROWS)
        first = partials + ((first_span * H + h).to(tl.int64) * CHUNKS + chunk) * (CHUNK * (D + 2))
        row_max, row_sum, acc = combine_partials(first, c, splits, H * CHUNKS * (CHUNK * (D + 2)), D, CHUNK)
        c += chunk * CHUNK
        at = (core + c)[:, None] * (H * D) + h * D + tl.arange(0, D)[None, :]
        tl.store(out + at, (acc / row_sum[:, None]).to(out.dtype.element_ty), c[:, None] < C)
        tl.store(lse + h * S.to(tl.int64) + core + c, row_max + tl.log2(row_sum), c < C)


@triton.jit(do_not_specialize=["S", "num_cores"])
def _packed_attention_backward_kernel(
    qkv, cores, patches, frequencies, out, lse, d_out, d_qkv, d_points, partials, spans, S, num_cores,
    stride_s, stride_3, stride_h, stride_ds,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    PATCHES: tl.constexpr, CORES: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`PATCHES`: write gradients of the patches, over all chunks of cores. `CORES`: accumulate those of one chunk."""
    span, h, role_chunk = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    chunk = role_chunk // 2  # even: patch queries, odd: core queries
    core, C, token, patch, count, place = _load_span(spans, span)
    base = qkv + core * stride_s + h * stride_h
    cores += 2 * core
    patches += 2 * patch
    frequency = load_frequency(frequencies, D // 2)
    out += core * (H * D) + h * D
    lse += h * S.to(tl.int64) + core
    d_out += core * stride_ds + h * D
    d_qkv += core * (3 * H * D) + h * D
    d_points += 2 * ((2 * h + role_chunk % 2) * num_cores.to(tl.int64) + core)
    # A partial is dq, dk and dv of the chunk, (CHUNK, d) each.
    partial = partials + ((span * H + h).to(tl.int64) * CHUNKS + chunk) * (3 * CHUNK * D)
    if chunk * CHUNK < C:
        if role_chunk % 2 == 0:
            patch_queries_backward(
                base, cores, patches, frequency, out, lse, d_out, d_qkv, d_points, partial, chunk, C, token,
                place > 0, count, stride_s, stride_3, stride_ds, place == 2, H, D, CHUNK, CHUNKS, TILE, PATCHES, CORES,
                False, SCALE, EXACT, PRECISION, STAGES,
            )  # fmt: skip
        else:
            core_queries_backward(
                base, cores, patches, frequency, out, lse, d_out, d_qkv, d_points, partial, chunk, C, token,
                place > 0, count, stride_s, stride_3, stride_ds, place == 2, H, D, CHUNK, CHUNKS, TILE, PATCHES, CORES,
                False, SCALE, EXACT, PRECISION, STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_cores"])
def _combine_packed_backward_kernel(
    qkv, cores, frequencies, d_qkv, d_points, partials, images, num_cores, stride_s, stride_3, stride_h,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SCALE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The cores' gradients from the partials of all spans: keys and values in one program, queries in another."""
    image, h = tl.program_id(0) // H, tl.program_id(0) % H
    chunk, role = tl.program_id(1), tl.program_id(2)
    core, C = tl.load(images + 4 * image).to(tl.int64), tl.load(images + 4 * image + 1)
    first_span, splits = tl.load(images + 4 * image + 2), tl.load(images + 4 * image + 3)
    if (splits > 1) & (chunk * CHUNK < C):
        combine_core_gradients(
            partials + ((first_span * H + h).to(tl.int64) * CHUNKS + chunk) * (3 * CHUNK * D), splits,
            H * CHUNKS * (3 * CHUNK * D), role,
            qkv + core * stride_s + h * stride_h, d_qkv + core * (3 * H * D) + h * D,
            d_points + 2 * ((2 * h + role) * num_cores.to(tl.int64) + core), cores + 2 * core,
            load_frequency(frequencies, D // 2), chunk, C, stride_s, stride_3, H, D, CHUNK, SCALE, EXACT,
        )  # fmt: skip


def _constants(qkv: Tensor, tiling: AttentionTiling, chunks: int) -> dict[str, object]:
    _, _, heads, width = qkv.shape
    constants = {"H": heads, "D": width, "CHUNK": tiling.chunk, "CHUNKS": chunks, "TILE": tiling.tile}
    exact = {"SCALE": width**-0.5, "EXACT": qkv.dtype == torch.float32, "PRECISION": "ieee", "STAGES": tiling.stages}
    return constants | exact


def launch_packed_attention(
    qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor, spans: Tensor, images: Tensor,
    max_cores: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention (S, H·d) and log-sum-exp (H, S). No image has more than `max_cores` cores.

    Traced sizes are symbols, of which `len` would make constants: a graph for each mix of images.
    """
    qkv = as_kernel_input(qkv[None], _MAX_STRIDE)[0]
    tokens, _, heads, width = qkv.shape
    tiling = choose_attention_tiling(qkv, max_cores, backward=False)
    chunk, chunks = tiling.chunk, int(triton.cdiv(max_cores, tiling.chunk))
    constants = _constants(qkv, tiling, chunks)
    out, lse = qkv.new_empty(tokens, heads * width), qkv.new_empty(heads, tokens, dtype=torch.float32)
    partials = qkv.new_empty(spans.shape[0] * heads * chunks * chunk * (width + 2), dtype=torch.float32)
    launchable(_packed_attention_kernel, qkv)[spans.shape[0] * heads, 1 + chunks](
        qkv, core_points, patch_points, frequencies, out, lse, partials, spans, tokens,
        qkv.stride(0), qkv.stride(1), qkv.stride(2), **constants, num_warps=tiling.warps,
    )  # fmt: skip
    launchable(_combine_packed_kernel, qkv)[images.shape[0] * heads, chunks, chunk // 16](
        partials, out, lse, images, tokens, H=heads, D=width, CHUNK=chunk, CHUNKS=chunks, ROWS=16
    )
    return out, lse


def launch_packed_attention_backward(
    d_out: Tensor, qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor, spans: Tensor,
    images: Tensor, out: Tensor, lse: Tensor, max_cores: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv (S, 3, H, d) and of the cores' coordinates (ΣC, 2)."""
    qkv, d_out = (as_kernel_input(x[None], _MAX_STRIDE)[0] for x in (qkv, d_out))
    tokens, _, heads, width = qkv.shape
    cores = core_points.shape[0]
    tiling = choose_attention_tiling(qkv, max_cores, backward=True)
    chunk, chunks = tiling.chunk, int(triton.cdiv(max_cores, tiling.chunk))
    constants = _constants(qkv, tiling, chunks)
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    partials = qkv.new_empty(spans.shape[0] * heads * chunks * 3 * chunk * width, dtype=torch.float32)
    d_points = qkv.new_empty(heads, 2, cores, 2, dtype=torch.float32)  # through keys, and through queries
    # Patch gradients need all chunks, those of a chunk need all patches: with several chunks that is two launches.
    for patches, core in [(True, True)] if chunks == 1 else [(True, False), (False, True)]:
        launchable(_packed_attention_backward_kernel, qkv)[spans.shape[0] * heads, 2 * chunks if core else 2](
            qkv, core_points, patch_points, frequencies, out, lse, d_out, d_qkv, d_points, partials, spans, tokens,
            cores, qkv.stride(0), qkv.stride(1), qkv.stride(2), d_out.stride(0), PATCHES=patches, CORES=core,
            **constants, num_warps=tiling.warps,
        )  # fmt: skip
    launchable(_combine_packed_backward_kernel, qkv)[images.shape[0] * heads, chunks, 2](
        qkv, core_points, frequencies, d_qkv, d_points, partials, images, cores,
        qkv.stride(0), qkv.stride(1), qkv.stride(2), H=heads, D=width, CHUNK=chunk, CHUNKS=chunks,
        SCALE=constants["SCALE"], EXACT=constants["EXACT"],
    )  # fmt: skip
    return d_qkv, d_points.sum((0, 1))
