"""Triton kernels: core-periphery attention, backward. Roles and shapes are those of `core_attention`.

The first role reads q and the output's gradient, writes dq of the patches, and accumulates dk and dv of the cores; the
second reads k and v, writes dk and dv of the patches, and accumulates dq of the cores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.core_attention import LOG2_E, AttentionTiling, as_kernel_input, dot_scores, launch_config
from veca.kernels.launch import launchable
from veca.kernels.rotary import (
    load_frequency,
    load_rotated,
    load_rows,
    rotary_table,
    rotate_pair,
    split_halves,
    store_unrotated,
)


@triton.jit
def _load_core_gradient(out, d_out, lse, first, C, stride_o, stride_d, D: tl.constexpr, CHUNK: tl.constexpr):
    """Of a chunk of core queries: the gradient of their output, their log-sum-exp, and delta = o · do."""
    c = first + tl.arange(0, CHUNK)
    mask = (c < C)[:, None]
    do = load_rows(d_out + c[:, None] * stride_d, mask, D)
    o = load_rows(out + c[:, None] * stride_o, mask, D)
    return do, tl.load(lse + c, c < C, float("inf")), tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)


@triton.jit
def store_core_gradient(
    d, raw, to, d_points, cores, frequency, first, C, stride_s, stride_to,
    SCALE: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Store gradients of the `raw` queries or keys of a chunk and of its coordinates; `d` is that after rotation."""
    HALF: tl.constexpr = D // 2
    c, half = first + tl.arange(0, CHUNK), tl.arange(0, HALF)[None, :]
    mask = (c < C)[:, None]
    cos, sin = rotary_table(cores, frequency, c[:, None], C - 1, HALF, EXACT)
    a, b = load_rows(raw + c[:, None] * stride_s, mask, HALF), load_rows(raw + c[:, None] * stride_s + HALF, mask, HALF)
    a, b = rotate_pair(a, b, cos, sin)
    d *= SCALE
    d1, d2 = split_halves(d, HALF)
    # Rotation by dθ changes the rotated pair (a, b) by (-b, a) dθ; each angle is a coordinate times a frequency.
    d_angle = (d2 * a - d1 * b) * frequency
    tl.store(d_points + 2 * c, tl.sum(tl.where(half < HALF // 2, d_angle, 0.0), 1), c < C)
    tl.store(d_points + 2 * c + 1, tl.sum(tl.where(half < HALF // 2, 0.0, d_angle), 1), c < C)
    store_unrotated(to + c[:, None] * stride_to, d, mask, cos, sin, HALF)


@triton.jit
def patch_queries_backward(
    base, cores, patches, frequency, out, lse, d_out, d_qkv, d_points, partial, chunk, C, token, is_first, count,
    stride_s, stride_3, stride_d, single_split,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    PATCHES: tl.constexpr, CORES: tl.constexpr, FULL_C: tl.constexpr, SCALE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backward of patch queries: dq of the patches, dk and dv of a chunk of cores, which all tokens attend to."""
    HALF: tl.constexpr = D // 2
    c, channel = tl.arange(0, CHUNK)[:, None], tl.arange(0, D)[None, :]
    dk_core = tl.zeros([CHUNK, D], tl.float32)
    dv_core = tl.zeros([CHUNK, D], tl.float32)
    own, own_d, own_lse = base + token * stride_s, d_out + token * stride_d, lse + token
    own_out, to = out + token * (H * D), d_qkv + token * (3 * H * D)
    NUM_CHUNKS: tl.constexpr = CHUNKS if PATCHES else 1
    if NUM_CHUNKS == 1:
        core = base + (chunk * CHUNK + c) * stride_s
        cos, sin = rotary_table(cores, frequency, chunk * CHUNK + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
        k = load_rotated(core + stride_3, chunk * CHUNK + c < C, cos, sin, HALF)
        v = load_rows(core + 2 * stride_3, chunk * CHUNK + c < C, D)
    if CORES and is_first:  # one split also takes the cores among themselves
        for first in range(0, C, CHUNK):
            cos, sin = rotary_table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
            q = load_rotated(base + (first + c) * stride_s, first + c < C, cos, sin, HALF)
            do, core_lse, delta = _load_core_gradient(out, d_out, lse, first, C, H * D, stride_d, D, CHUNK)
            p = tl.exp2(dot_scores(q, k, PRECISION) * (SCALE * LOG2_E) - core_lse[:, None])
            ds = (p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])).to(q.dtype)
            dv_core = tl.dot(tl.trans(p.to(q.dtype)), do, dv_core, input_precision=PRECISION)
            dk_core = tl.dot(tl.trans(ds), q, dk_core, input_precision=PRECISION)
    for tile in tl.range(0, tl.cdiv(count, TILE), num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        mask = (n < count)[:, None]
        row = n[:, None]
        patch_cos, patch_sin = rotary_table(patches, frequency, row, count - 1, HALF, EXACT)
        q = load_rotated(own + row * stride_s, mask, patch_cos, patch_sin, HALF)
        do = load_rows(own_d + row * stride_d, mask, D)
        row_lse = tl.load(own_lse + n, n < count, float("inf"))
        if CHUNKS > 1:
            o = load_rows(own_out + row * (H * D), mask, D)
            delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        dq = tl.zeros([TILE, D], tl.float32)
        for other in range(NUM_CHUNKS):
            first = other * CHUNK if NUM_CHUNKS > 1 else chunk * CHUNK
            if NUM_CHUNKS > 1:
                core = base + (first + c) * stride_s
                cos, sin = rotary_table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
                k = load_rotated(core + stride_3, first + c < C, cos, sin, HALF)
                v = load_rows(core + 2 * stride_3, first + c < C, D)
            p = tl.exp2(dot_scores(q, k, PRECISION) * (SCALE * LOG2_E) - row_lse[:, None])
            if not FULL_C:
                p = tl.where(first + tl.arange(0, CHUNK)[None, :] < C, p, 0.0)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if CHUNKS == 1:
                delta = tl.sum(p * dp, 1)
            ds = (p * (dp - delta[:, None])).to(q.dtype)
            if CORES:
                dv_core = tl.dot(tl.trans(p.to(q.dtype)), do, dv_core, input_precision=PRECISION)
                dk_core = tl.dot(tl.trans(ds), q, dk_core, input_precision=PRECISION)
            if PATCHES:
                dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        if PATCHES:
            store_unrotated(to + row * (3 * H * D), dq * SCALE, mask, patch_cos, patch_sin, HALF)
    if CORES:
        if single_split:
            store_core_gradient(
                dk_core, base + stride_3, d_qkv + H * D, d_points, cores, frequency, chunk * CHUNK, C,
                stride_s, 3 * H * D, SCALE, D, CHUNK, EXACT,
            )  # fmt: skip
            value = d_qkv + (chunk * CHUNK + c) * (3 * H * D) + 2 * H * D
            tl.store(value + channel, dv_core.to(d_qkv.dtype.element_ty), chunk * CHUNK + c < C)
        else:
            tl.store(partial + CHUNK * D + c * D + channel, dk_core)
            tl.store(partial + 2 * CHUNK * D + c * D + channel, dv_core)


@triton.jit
def core_queries_backward(
    base, cores, patches, frequency, out, lse, d_out, d_qkv, d_points, partial, chunk, C, token, is_first, count,
    stride_s, stride_3, stride_d, single_split,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    PATCHES: tl.constexpr, CORES: tl.constexpr, FULL_N: tl.constexpr, SCALE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backward of core queries: dk and dv of the patches, dq of a chunk of cores, which attend to all tokens."""
    HALF: tl.constexpr = D // 2
    c, channel = tl.arange(0, CHUNK)[:, None], tl.arange(0, D)[None, :]
    dq_core = tl.zeros([CHUNK, D], tl.float32)
    own, own_d_qkv = base + token * stride_s, d_qkv + token * (3 * H * D)
    NUM_CHUNKS: tl.constexpr = CHUNKS if PATCHES else 1
    if NUM_CHUNKS == 1:
        cos, sin = rotary_table(cores, frequency, chunk * CHUNK + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
        q = load_rotated(base + (chunk * CHUNK + c) * stride_s, chunk * CHUNK + c < C, cos, sin, HALF)
        do, core_lse, delta = _load_core_gradient(out, d_out, lse, chunk * CHUNK, C, H * D, stride_d, D, CHUNK)
    if CORES and is_first:  # one split also takes the cores among themselves
        for first in range(0, C, CHUNK):
            key = base + (first + c) * stride_s
            cos, sin = rotary_table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
            k = load_rotated(key + stride_3, first + c < C, cos, sin, HALF)
            v = load_rows(key + 2 * stride_3, first + c < C, D)
            p = tl.exp2(dot_scores(k, q, PRECISION) * (SCALE * LOG2_E) - core_lse[None, :])
            p = tl.where(first + c < C, p, 0.0)
            ds = (p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])).to(k.dtype)
            dq_core = tl.dot(tl.trans(ds), k, dq_core, input_precision=PRECISION)
    for tile in tl.range(0, tl.cdiv(count, TILE), num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)[:, None]
        mask = n < count
        key = own + n * stride_s
        patch_cos, patch_sin = rotary_table(patches, frequency, n, count - 1, HALF, EXACT)
        k = load_rotated(key + stride_3, mask, patch_cos, patch_sin, HALF)
        v = load_rows(key + 2 * stride_3, mask, D)
        dk = tl.zeros([TILE, D], tl.float32)
        dv = tl.zeros([TILE, D], tl.float32)
        for other in range(NUM_CHUNKS):
            if NUM_CHUNKS > 1:
                first = other * CHUNK
                cos, sin = rotary_table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
                q = load_rotated(base + (first + c) * stride_s, first + c < C, cos, sin, HALF)
                do, core_lse, delta = _load_core_gradient(out, d_out, lse, first, C, H * D, stride_d, D, CHUNK)
            # Patches are rows, cores are columns: only dq of the cores needs a transpose.
            p = tl.exp2(dot_scores(k, q, PRECISION) * (SCALE * LOG2_E) - core_lse[None, :])
            if not FULL_N:
                p = tl.where(mask, p, 0.0)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            ds = (p * (dp - delta[None, :])).to(k.dtype)
            if CORES:
                dq_core = tl.dot(tl.trans(ds), k, dq_core, input_precision=PRECISION)
            if PATCHES:
                dv = tl.dot(p.to(k.dtype), do, dv, input_precision=PRECISION)
                dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if PATCHES:
            to = own_d_qkv + n * (3 * H * D) + H * D
            store_unrotated(to, dk * SCALE, mask, patch_cos, patch_sin, HALF)
            tl.store(to + H * D + channel, dv.to(k.dtype), mask)
    if CORES:
        if single_split:
            store_core_gradient(
                dq_core, base, d_qkv, d_points, cores, frequency, chunk * CHUNK, C, stride_s, 3 * H * D,
                SCALE, D, CHUNK, EXACT,
            )  # fmt: skip
        else:
            tl.store(partial + c * D + channel, dq_core)


@triton.jit(do_not_specialize=["C", "N", "tiles"])
def _core_attention_backward_kernel(
    qkv, cores, patches, frequencies, out, lse, d_out, d_qkv, d_points, partials, C, N, tiles,
    stride_b, stride_s, stride_3, stride_h, stride_db, stride_ds,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    PATCHES: tl.constexpr, CORES: tl.constexpr, SINGLE_SPLIT: tl.constexpr, FULL_C: tl.constexpr, FULL_N: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`PATCHES`: write gradients of the patches, over all chunks of cores. `CORES`: accumulate those of one chunk."""
    bh, split, role_chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    S = C + N
    chunk = role_chunk // 2  # even: patch queries, odd: core queries
    base = qkv + b.to(tl.int64) * stride_b + h * stride_h
    cores += b.to(tl.int64) * (2 * C)
    frequency = load_frequency(frequencies, D // 2)
    out += b.to(tl.int64) * S * (H * D) + h * D
    lse += bh.to(tl.int64) * S
    d_out += b.to(tl.int64) * stride_db + h * D
    d_qkv += b.to(tl.int64) * S * (3 * H * D) + h * D
    d_points += (2 * bh + role_chunk % 2).to(tl.int64) * (2 * C)
    # A partial is dq, dk and dv of the chunk, (CHUNK, d) each.
    partial = partials + ((split * tl.num_programs(0) + bh).to(tl.int64) * CHUNKS + chunk) * (3 * CHUNK * D)
    first_patch = split * (tiles * TILE)
    count = min(N - first_patch, tiles * TILE)
    token = (C + first_patch).to(tl.int64)
    patches += 2 * first_patch
    if role_chunk % 2 == 0:
        patch_queries_backward(
            base, cores, patches, frequency, out, lse, d_out, d_qkv, d_points, partial, chunk, C, token,
            split == 0, count, stride_s, stride_3, stride_ds, SINGLE_SPLIT, H, D, CHUNK, CHUNKS, TILE, PATCHES, CORES,
            FULL_C, SCALE,
            EXACT, PRECISION, STAGES,
        )  # fmt: skip
    else:
        core_queries_backward(
            base, cores, patches, frequency, out, lse, d_out, d_qkv, d_points, partial, chunk, C, token,
            split == 0, count, stride_s, stride_3, stride_ds, SINGLE_SPLIT, H, D, CHUNK, CHUNKS, TILE, PATCHES, CORES,
            FULL_N, SCALE,
            EXACT, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def combine_core_gradients(
    first, splits, step, role, raw, d_qkv, d_points, cores, frequency, chunk, C, stride_s, stride_3,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk of cores over `splits` partials, `step` apart: keys and values (role 0), or queries (1)."""
    channel = tl.arange(0, D)[None, :]
    first += tl.arange(0, CHUNK)[:, None] * D
    d = tl.zeros([CHUNK, D], tl.float32)
    partial = first + (1 - role) * CHUNK * D
    for _ in range(splits):
        d += tl.load(partial + channel)
        partial += step
    store_core_gradient(
        d, raw + (1 - role) * stride_3, d_qkv + (1 - role) * H * D, d_points, cores, frequency, chunk * CHUNK, C,
        stride_s, 3 * H * D, SCALE, D, CHUNK, EXACT,
    )  # fmt: skip
    if role == 0:
        dv = tl.zeros([CHUNK, D], tl.float32)
        partial = first + 2 * CHUNK * D
        for _ in range(splits):
            dv += tl.load(partial + channel)
            partial += step
        c = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
        tl.store(d_qkv + c * (3 * H * D) + 2 * H * D + channel, dv.to(d_qkv.dtype.element_ty), c < C)


@triton.jit(do_not_specialize=["C", "N", "splits"])
def _combine_partials_backward_kernel(
    qkv, cores, frequencies, d_qkv, d_points, partials, C, N, splits, stride_b, stride_s, stride_3, stride_h,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SCALE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The cores' gradients from the partials of all splits: keys and values in one program, queries in another."""
    bh, chunk, role = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    combine_core_gradients(
        partials + (bh.to(tl.int64) * CHUNKS + chunk) * (3 * CHUNK * D), splits,
        tl.num_programs(0).to(tl.int64) * CHUNKS * (3 * CHUNK * D), role,
        qkv + b * stride_b + h * stride_h, d_qkv + b * (C + N) * (3 * H * D) + h * D,
        d_points + (2 * bh + role).to(tl.int64) * (2 * C), cores + b * (2 * C), load_frequency(frequencies, D // 2),
        chunk, C, stride_s, stride_3, H, D, CHUNK, SCALE, EXACT,
    )  # fmt: skip


def launch_core_attention_backward(
    d_out: Tensor, qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor,
    out: Tensor, lse: Tensor, tiling: AttentionTiling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv (B, S, 3, H, d) and of the cores' coordinates (B, C, 2)."""
    qkv, d_out = as_kernel_input(qkv), as_kernel_input(d_out)
    batch, tokens, _, heads, width = qkv.shape
    cores = core_points.shape[1]
    constants, options, splits, tiles = config = launch_config(qkv, cores, True, tiling, d_out.stride(1))
    chunk, chunks, single_split = constants["CHUNK"], constants["CHUNKS"], config.single_split
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    partial_size = 3 * chunk * width  # dq, dk and dv of each core
    partials = qkv.new_empty(0 if single_split else splits * batch * heads * chunks * partial_size, dtype=torch.float32)
    d_points = qkv.new_empty(batch, heads, 2, cores, 2, dtype=torch.float32)  # through keys, and through queries
    strides = qkv.stride(0), qkv.stride(1), qkv.stride(2), qkv.stride(3)
    # Patch gradients need all chunks, those of a chunk need all patches: with several chunks that is two launches.
    for patches, core in [(True, True)] if chunks == 1 else [(True, False), (False, True)]:
        launchable(_core_attention_backward_kernel, qkv)[batch * heads, splits, 2 * chunks if core else 2](
            qkv, core_points, patch_points, frequencies, out, lse, d_out, d_qkv, d_points, partials,
            cores, tokens - cores, tiles, *strides, d_out.stride(0), d_out.stride(1),
            PATCHES=patches, CORES=core, SINGLE_SPLIT=single_split, **constants, **options,
        )  # fmt: skip
    if not single_split:
        launchable(_combine_partials_backward_kernel, qkv)[batch * heads, chunks, 2](
            qkv, core_points, frequencies, d_qkv, d_points, partials, cores, tokens - cores, splits, *strides,
            H=heads, D=width, CHUNK=chunk, CHUNKS=chunks, SCALE=constants["SCALE"], EXACT=constants["EXACT"],
        )  # fmt: skip
    return d_qkv, d_points.sum((1, 2))
