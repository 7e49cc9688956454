"""Triton kernels: core-periphery attention, forward; each tile of q, k and v is read once.

A program walks over tiles of patches of one image and head in one of two roles. The roles read different tensors, so
nothing is read twice:

- patch queries, core keys: a softmax over the cores, which stay on chip; reads q, writes the patches' output;
- core queries, patch keys: the cores' running softmax (as in FlashAttention); reads k and v. Where several programs
  split the patches, each leaves a partial result, and a second kernel combines them.

Rotary embedding is applied to q and k as they are loaded, with angles computed from the tokens' coordinates. More cores
than fit on chip are processed in chunks.

Shapes: B images, C cores, N patches, S = C + N tokens (cores first), H heads, d width of a head. qkv is (B, S, 3, H, d)
with any strides but the last; the cores' coordinates (B, C, 2), the patches' (N, 2) and the frequencies (d/4) are
float32. Softmax works in base 2: `lse` (B, H, S) is the log2 of each row's sum of exponentials.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.launch import launchable, multiprocessors
from veca.kernels.rotary import load_frequency, load_rotated, load_rows, rotary_table

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_STRIDE = 2**22
"""Largest stride of tokens, heads, and q, k, v: up to 256 steps of it are addressed with 32-bit offsets."""


@triton.jit
def dot_scores(a, b, PRECISION: tl.constexpr):
    """A bᵀ: logits (rows, columns) of queries (rows, d) and keys (columns, d)."""
    return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@triton.jit
def _running_softmax(s, v, row_max, row_sum, acc, scale, PRECISION: tl.constexpr):
    """One step of an online softmax: unscaled logits `s` (rows, columns), values `v` (columns, d)."""
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
    rescale = tl.exp2(row_max - new_max)
    p = tl.exp2(s * scale - new_max[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return new_max, row_sum * rescale + tl.sum(p, 1), acc


@triton.jit
def patch_queries(
    base, cores, patches, frequency, out, lse, C, token, count, scale, stride_s, stride_3, stride_o,
    D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, FULL_C: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of `count` patches, `token` tokens after the first core: each attends to all cores."""
    HALF: tl.constexpr = D // 2
    c, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    own, out, lse = base + token * stride_s, out + token * stride_o, lse + token
    if CHUNKS == 1:
        cos, sin = rotary_table(cores, frequency, tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
        k = load_rotated(base + stride_3 + c * stride_s, c < C, cos, sin, HALF)
        v = load_rows(base + 2 * stride_3 + c * stride_s, c < C, D)
    for tile in tl.range(0, tl.cdiv(count, TILE), num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        mask = (n < count)[:, None]
        patch_cos, patch_sin = rotary_table(patches, frequency, n[:, None], count - 1, HALF, EXACT)
        q = load_rotated(own + n[:, None] * stride_s, mask, patch_cos, patch_sin, HALF)
        if CHUNKS == 1:
            s = dot_scores(q, k, PRECISION)
            if not FULL_C:
                s = tl.where(column < C, s, float("-inf"))
            row_max = tl.max(s, 1) * scale
            p = tl.exp2(s * scale - row_max[:, None])
            row_sum = tl.sum(p, 1)
            o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        else:
            row_max = tl.full([TILE], float("-inf"), tl.float32)
            row_sum = tl.zeros([TILE], tl.float32)
            o = tl.zeros([TILE, D], tl.float32)
            for first in range(0, C, CHUNK):
                row = base + (first + c) * stride_s
                cos, sin = rotary_table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
                k = load_rotated(row + stride_3, first + c < C, cos, sin, HALF)
                v = load_rows(row + 2 * stride_3, first + c < C, D)
                s = tl.where(first + column < C, dot_scores(q, k, PRECISION), float("-inf"))
                row_max, row_sum, o = _running_softmax(s, v, row_max, row_sum, o, scale, PRECISION)
        o *= (1.0 / row_sum)[:, None]
        tl.store(out + n[:, None] * stride_o + tl.arange(0, D)[None, :], o.to(q.dtype), mask)
        tl.store(lse + n, row_max + tl.log2(row_sum), n < count)


@triton.jit
def core_queries(
    base, cores, patches, frequency, out, lse, partial, chunk, C, token, is_first, count, scale,
    stride_s, stride_3, stride_o, single_split,
    D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, FULL_N: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A chunk of cores attends to `count` patches from `token` on; the first program of an image adds the cores."""
    HALF: tl.constexpr = D // 2
    c, column = tl.arange(0, CHUNK), tl.arange(0, CHUNK)[None, :]
    row = chunk * CHUNK + c[:, None]
    own = base + token * stride_s
    cos, sin = rotary_table(cores, frequency, chunk * CHUNK + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
    q = load_rotated(base + row * stride_s, row < C, cos, sin, HALF)
    row_max = tl.full([CHUNK], float("-inf"), tl.float32)
    row_sum = tl.zeros([CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, D], tl.float32)
    if is_first:  # one split also takes the cores' own keys
        for first in range(0, C, CHUNK):
            key = base + (first + c)[:, None] * stride_s
            mask = (first + c < C)[:, None]
            cos, sin = rotary_table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
            k = load_rotated(key + stride_3, mask, cos, sin, HALF)
            v = load_rows(key + 2 * stride_3, mask, D)
            s = tl.where(first + column < C, dot_scores(q, k, PRECISION), float("-inf"))
            row_max, row_sum, acc = _running_softmax(s, v, row_max, row_sum, acc, scale, PRECISION)
    for tile in tl.range(0, tl.cdiv(count, TILE), num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        mask = (n < count)[:, None]
        key = own + n[:, None] * stride_s
        patch_cos, patch_sin = rotary_table(patches, frequency, n[:, None], count - 1, HALF, EXACT)
        k = load_rotated(key + stride_3, mask, patch_cos, patch_sin, HALF)
        v = load_rows(key + 2 * stride_3, mask, D)
        s = dot_scores(q, k, PRECISION)
        if not FULL_N:
            s = tl.where((n < count)[None, :], s, float("-inf"))
        row_max, row_sum, acc = _running_softmax(s, v, row_max, row_sum, acc, scale, PRECISION)
    channel = tl.arange(0, D)[None, :]
    if single_split:
        tl.store(out + row * stride_o + channel, (acc / row_sum[:, None]).to(q.dtype), row < C)
        tl.store(lse + chunk * CHUNK + c, row_max + tl.log2(row_sum), chunk * CHUNK + c < C)
    else:  # a partial is acc (CHUNK, d), then row_max and row_sum (CHUNK each)
        tl.store(partial + c[:, None] * D + channel, acc)
        tl.store(partial + CHUNK * D + c, row_max)
        tl.store(partial + CHUNK * (D + 1) + c, row_sum)


@triton.jit(do_not_specialize=["C", "N", "tiles", "single_split"])
def _core_attention_kernel(
    qkv, cores, patches, frequencies, out, lse, partials, C, N, tiles, single_split,
    stride_b, stride_s, stride_3, stride_h,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    FULL_C: tl.constexpr, FULL_N: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Role 0: patch queries. Role r > 0: queries of chunk r - 1 of the cores.
    bh, split, role = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    base = qkv + b.to(tl.int64) * stride_b + h * stride_h
    cores += b.to(tl.int64) * (2 * C)
    frequency = load_frequency(frequencies, D // 2)
    first_patch = split * (tiles * TILE)
    count = min(N - first_patch, tiles * TILE)
    token = (C + first_patch).to(tl.int64)
    patches += 2 * first_patch
    out += b.to(tl.int64) * (C + N) * (H * D) + h * D
    lse += bh.to(tl.int64) * (C + N)
    if role == 0:
        patch_queries(
            base, cores, patches, frequency, out, lse, C, token, count, SCALE * LOG2_E,
            stride_s, stride_3, H * D, D, CHUNK, CHUNKS, TILE, FULL_C, EXACT, PRECISION, STAGES,
        )  # fmt: skip
    else:
        partial = partials + ((split * tl.num_programs(0) + bh).to(tl.int64) * CHUNKS + role - 1) * (CHUNK * (D + 2))
        core_queries(
            base, cores, patches, frequency, out, lse, partial, role - 1, C, token, split == 0, count, SCALE * LOG2_E,
            stride_s, stride_3, H * D, single_split, D, CHUNK, TILE, FULL_N, EXACT, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def combine_partials(first, c, splits, step, D: tl.constexpr, CHUNK: tl.constexpr):
    """Maximum, sum and weighted sum of rows `c` of a chunk of cores over `splits` partials, `step` apart."""
    channel = tl.arange(0, D)[None, :]
    # The first partial includes the cores' own keys, so no row is empty.
    row_max = tl.load(first + CHUNK * D + c)
    row_sum = tl.load(first + CHUNK * (D + 1) + c)
    acc = tl.load(first + c[:, None] * D + channel)
    for split in tl.range(1, splits, num_stages=4):
        partial = first + split * step
        their_max = tl.load(partial + CHUNK * D + c)
        new_max = tl.maximum(row_max, their_max)
        rescale, weight = tl.exp2(row_max - new_max), tl.exp2(their_max - new_max)
        acc = acc * rescale[:, None] + tl.load(partial + c[:, None] * D + channel) * weight[:, None]
        row_sum = row_sum * rescale + tl.load(partial + CHUNK * (D + 1) + c) * weight
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["C", "N", "splits"])
def _combine_partials_kernel(
    partials, out, lse, C, N, splits,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The cores' output from the partials of all splits; few cores per program, so that many programs run."""
    bh, chunk, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    c, channel = part * ROWS + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    step = tl.num_programs(0).to(tl.int64) * CHUNKS * (CHUNK * (D + 2))
    first = partials + (bh * CHUNKS + chunk).to(tl.int64) * (CHUNK * (D + 2))
    row_max, row_sum, acc = combine_partials(first, c, splits, step, D, CHUNK)
    c += chunk * CHUNK
    at = (b.to(tl.int64) * (C + N) + c)[:, None] * (H * D) + h * D + channel
    tl.store(out + at, (acc / row_sum[:, None]).to(out.dtype.element_ty), c[:, None] < C)
    tl.store(lse + bh.to(tl.int64) * (C + N) + c, row_max + tl.log2(row_sum), c < C)


class AttentionTiling(NamedTuple):
    """How a launch divides the work."""

    chunk: int
    """Cores on chip at once."""
    tile: int
    """Patches per step."""
    warps: int
    stages: int
    programs: int
    """Programs to aim at per multiprocessor."""


def choose_attention_tiling(qkv: Tensor, cores: int, backward: bool) -> AttentionTiling:
    """The fastest measured on an H200; float32 and wide heads need smaller tiles to fit on chip."""
    wide = qkv.shape[-1] > 64
    largest = 64 if qkv.dtype != torch.float32 else 16 if wide else 32
    # A traced budget is a symbol: the largest chunk holds any.
    chunk = min(max(16, triton.next_power_of_2(cores)), largest) if isinstance(cores, int) else largest
    if qkv.dtype == torch.float32:
        return AttentionTiling(chunk, 32, 4, 1, 4)
    if wide:
        return AttentionTiling(chunk, 64, 8, 1, 2) if backward else AttentionTiling(chunk, 64, 4, 2, 4)
    return AttentionTiling(chunk, 64, 4, 3 if backward else 4, 8)


class LaunchConfig(NamedTuple):
    """Arguments with which the kernels of one pass are launched."""

    constants: dict[str, Any]
    options: dict[str, Any]
    splits: int
    """Programs that share the tiles of one image and head, in each role."""
    tiles: int
    """Tiles of each of them."""

    @property
    def single_split(self) -> bool:
        """Whether it is known that there is one split: a traced number is a symbol."""
        return isinstance(self.splits, int) and self.splits == 1


def launch_config(
    qkv: Tensor, cores: int, backward: bool, tiling: AttentionTiling | None, stride: int = 0
) -> LaunchConfig:
    """How to launch the kernels of a pass; `stride` is the largest token stride of tensors other than qkv.

    Traced sizes are symbols: choices that would need their values are made without them.
    """
    batch, tokens, _, heads, width = qkv.shape
    tiling = tiling or choose_attention_tiling(qkv, cores, backward)
    chunks = int(triton.cdiv(cores, tiling.chunk))
    patches = tokens - cores
    tiles = triton.cdiv(patches, tiling.tile)
    wanted = tiling.programs * multiprocessors(qkv) // torch.sym_max(1, 2 * batch * heads)
    splits = torch.sym_max(1, torch.sym_min(tiles, wanted))
    # A program addresses its first patch with a 64-bit offset, and all others relative to it with 32 bits.
    within_32_bits = (2**31 - 1) // (tiling.tile * max(stride, qkv.stride(1), 3 * heads * width))
    per_split = torch.sym_min(triton.cdiv(tiles, splits), within_32_bits)
    splits = triton.cdiv(tiles, torch.sym_max(1, per_split))
    constants = {
        "H": heads, "D": width, "CHUNK": tiling.chunk, "CHUNKS": chunks, "TILE": tiling.tile, "STAGES": tiling.stages,
        "FULL_C": _is_multiple(cores, tiling.chunk), "FULL_N": _is_multiple(patches, tiling.tile),
        "SCALE": width**-0.5, "EXACT": qkv.dtype == torch.float32, "PRECISION": "ieee",
    }  # fmt: skip
    return LaunchConfig(constants, {"num_warps": tiling.warps}, splits, per_split)


def _is_multiple(count: int, size: int) -> bool:
    """Whether `count` is a number, not a symbol, and a multiple of `size`."""
    return isinstance(count, int) and count % size == 0


def as_kernel_input(x: Tensor, max_stride: int = MAX_STRIDE) -> Tensor:
    """`x`, copied if its strides do not fit the kernels: contiguous channels, offsets within a tile below 2³¹."""
    return x if x.stride(-1) == 1 and max(x.stride()[1:]) <= max_stride else x.contiguous()


def launch_core_attention(
    qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor, tiling: AttentionTiling | None = None
) -> tuple[Tensor, Tensor]:
    """Attention (B, S, H·d) and log-sum-exp (B, H, S)."""
    qkv = as_kernel_input(qkv)
    batch, tokens, _, heads, width = qkv.shape
    cores = core_points.shape[1]
    constants, options, splits, tiles = config = launch_config(qkv, cores, False, tiling)
    chunk, chunks, single_split = constants["CHUNK"], constants["CHUNKS"], config.single_split
    out = qkv.new_empty(batch, tokens, heads * width)
    lse = qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    partial_size = chunk * (width + 2)  # acc, row_max and row_sum of each core
    partials = qkv.new_empty(0 if single_split else splits * batch * heads * chunks * partial_size, dtype=torch.float32)
    launchable(_core_attention_kernel, qkv)[batch * heads, splits, 1 + chunks](
        qkv, core_points, patch_points, frequencies, out, lse, partials, cores, tokens - cores, tiles,
        int(single_split), qkv.stride(0), qkv.stride(1), qkv.stride(2), qkv.stride(3), **constants, **options,
    )  # fmt: skip
    if not single_split:
        launchable(_combine_partials_kernel, qkv)[batch * heads, chunks, chunk // 16](
            partials, out, lse, cores, tokens - cores, splits, H=heads, D=width, CHUNK=chunk, CHUNKS=chunks, ROWS=16
        )
    return out, lse
