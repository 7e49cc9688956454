"""Triton kernels: the convolutions of mobile networks, for inference: a network's first, depthwise, 1×1, whole blocks.

A block of such a network widens a map by a 1×1 convolution, convolves each channel alone, and narrows it again. Biases,
ReLU6 and the residual sum are part of the kernel before them. Where the wide map has few channels, one kernel computes
all of a block.

Shapes: B images, maps (B, H, W, channels), side × side taps, E channels, N outputs; in 1×1 convolutions M = B·H·W rows,
K inputs.
"""
# Triton has tuples in kernels, but does not unpack them; mypy knows no tuple that grows.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,var-annotated"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.launch import program_pair, row_pointers


@triton.jit
def _relu6(a):
    return tl.minimum(tl.maximum(a, 0.0), 6.0)


@triton.jit(do_not_specialize=["M"])
def _pointwise_kernel(
    x, weight, bias, residual, out, M, K: tl.constexpr, N: tl.constexpr, RELU6: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)[:, None]
    rows = row_pointers(x, first, K, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    if K <= BLOCK_K:  # read once for all outputs
        a = tl.load(rows + k[None, :], (m < M) & (k < K)[None, :], 0.0)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if K <= BLOCK_K:
            w = tl.load(weight + k[:, None] * N + n[None, :], (k < K)[:, None] & (n < N)[None, :], 0.0)
            acc = tl.dot(a, w, input_precision="ieee")
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for step in range(0, K, BLOCK_K):
                at = step + k
                part = tl.load(rows + at[None, :], (m < M) & (at < K)[None, :], 0.0)
                w = tl.load(weight + at[:, None] * N + n[None, :], (at < K)[:, None] & (n < N)[None, :], 0.0)
                acc = tl.dot(part, w, acc, input_precision="ieee")
        acc += tl.load(bias + n, n < N, 0.0)[None, :]
        inside = (m < M) & (n < N)[None, :]
        if RELU6:
            acc = _relu6(acc)
        if RESIDUAL:
            acc += tl.load(row_pointers(residual, first, N, BLOCK_M) + n[None, :], inside, 0.0).to(tl.float32)
        tl.store(row_pointers(out, first, N, BLOCK_M) + n[None, :], acc.to(out.dtype.element_ty), inside)


@triton.jit
def _load_line(at, y, z, c, H, W, E: tl.constexpr, PIXELS: tl.constexpr):
    """`PIXELS` neighbouring pixels from each of `at`, in line y of a map, from columns z on; zeros outside of it."""
    inside = c < tl.where((y >= 0) & (y < H), E, 0)
    values = ()
    for j in tl.static_range(PIXELS):
        values = values + (tl.load(at + j * E, inside & (z + j >= 0) & (z + j < W), 0.0),)
    return values


@triton.jit(do_not_specialize=["H", "W", "rows", "columns", "top", "left", "height", "across", "tiles"])
def _depthwise_kernel(
    x, taps, bias, out, H, W, rows, columns, top, left, height, across, tiles, E: tl.constexpr, SIDE: tl.constexpr,
    STRIDE: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # A program goes down a strip of the map, `EACH` neighbouring pixels for each row of its tensors. Every line is read
    # once, while the one before it is computed, and added to all output lines that it is part of.
    LIVE: tl.constexpr = (SIDE + STRIDE - 1) // STRIDE  # output lines under way: line n is in slot n % LIVE
    PIXELS: tl.constexpr = SIDE + (EACH - 1) * STRIDE
    chunk, image_tile = program_pair((E + CHANNELS - 1) // CHANNELS)
    tile, b = image_tile % tiles, (image_tile // tiles).to(tl.int64)
    c = chunk * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    row, column = tile // across * height, (tile % across * GROUPS + tl.arange(0, GROUPS)[:, None]) * EACH
    y, z = row * STRIDE - top, column * STRIDE - left
    at = x + b * H * W * E + (y * W + z) * E + c
    to = out + b * rows * columns * E + column * E + c
    empty = tl.zeros([GROUPS, CHANNELS], tl.float32) + tl.load(bias + c, c < E, 0.0)
    weights, sums = (), ()
    for k in tl.static_range(SIDE * SIDE):
        weights = weights + (tl.load(taps + k * E + c, c < E, 0.0),)
    for _ in tl.static_range(LIVE * EACH):
        sums = sums + (empty,)
    values = _load_line(at, y, z, c, H, W, E, PIXELS)
    for first in range(0, height * STRIDE + SIDE - STRIDE, LIVE * STRIDE):
        for u in tl.static_range(LIVE * STRIDE):
            line = first + u
            ahead = _load_line(at + (line + 1) * W * E, y + line + 1, z, c, H, W, E, PIXELS)
            for j in tl.static_range(PIXELS):
                value, more = values[j].to(tl.float32), ()
                for k in tl.static_range(LIVE * EACH):
                    a = sums[k]
                    # The row of taps that takes this line to slot k // EACH, if there is one
                    if (u - k // EACH * STRIDE) % (LIVE * STRIDE) < SIDE:  # noqa: SIM102
                        if j - k % EACH * STRIDE >= 0 and j - k % EACH * STRIDE < SIDE:
                            tap = weights[(u - k // EACH * STRIDE) % (LIVE * STRIDE) * SIDE + j - k % EACH * STRIDE]
                            a += value * tap
                    more = more + (a,)
                sums = more
            values = ahead
            if (u - SIDE + 1) % STRIDE == 0:  # an output line is complete
                done, more = row + (line - SIDE + 1) // STRIDE, ()
                inside = c < tl.where((done >= row) & (done < row + height) & (done < rows), E, 0)
                for k in tl.static_range(LIVE * EACH):
                    a = sums[k]
                    if (u - SIDE + 1) // STRIDE % LIVE == k // EACH:
                        pixel = to + (done * columns + k % EACH) * E
                        in_map = inside & (column + k % EACH < columns)
                        tl.store(pixel, _relu6(a).to(out.dtype.element_ty), in_map)
                        a = empty
                    more = more + (a,)
                sums = more


@triton.jit(do_not_specialize=["H", "W", "rows", "columns", "top", "left", "blocks"])
def _block_kernel(
    x, wide_weight, wide_bias, taps, taps_bias, narrow_weight, bias, out, H, W, rows, columns, top, left, blocks,
    K: tl.constexpr, E: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, PIXELS: tl.constexpr,
    INPUTS: tl.constexpr, CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    # The wide map stays on chip, some channels at a time: it is computed anew for every tap.
    block, b = program_pair(blocks)
    p = block * PIXELS + tl.arange(0, PIXELS)
    y, z, in_map = p // columns * STRIDE - top, p % columns * STRIDE - left, p < rows * columns
    k, n = tl.arange(0, INPUTS), tl.arange(0, OUTPUTS)
    x += b.to(tl.int64) * H * W * K
    acc = tl.zeros([PIXELS, OUTPUTS], tl.float32) + tl.load(bias + n, n < N, 0.0)[None, :]
    for first in range(0, E, CHANNELS):
        c = first + tl.arange(0, CHANNELS)
        widen = tl.load(wide_weight + k[:, None] * E + c[None, :], (k < K)[:, None] & (c < E)[None, :], 0.0)
        offset = tl.load(wide_bias + c, c < E, 0.0)[None, :]
        sums = tl.zeros([PIXELS, CHANNELS], tl.float32) + tl.load(taps_bias + c, c < E, 0.0)[None, :]
        for tap in range(SIDE * SIDE):
            i, j = y + tap // SIDE, z + tap % SIDE
            inside = in_map & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            a = tl.load(x + ((i * W + j) * K)[:, None] + k[None, :], inside[:, None] & (k < K)[None, :], 0.0)
            wide = _relu6(tl.dot(a, widen, input_precision="ieee") + offset)
            # Zeros pad the wide map, not the narrow one.
            weight = tl.where(inside[:, None], tl.load(taps + tap * E + c, c < E, 0.0)[None, :], 0.0)
            sums += wide * weight
        w = tl.load(narrow_weight + c[:, None] * N + n[None, :], (c < E)[:, None] & (n < N)[None, :], 0.0)
        acc = tl.dot(_relu6(sums).to(w.dtype), w, acc, input_precision="ieee")
    to = out + b.to(tl.int64) * rows * columns * N + (p * N)[:, None] + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), in_map[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["H", "W", "rows", "columns", "top", "left", "blocks"])
def _first_convolution_kernel(
    images, weight, bias, out, H, W, rows, columns, top, left, blocks, stride_b, stride_c, stride_y, stride_x,
    INPUTS: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, PIXELS: tl.constexpr,
    TAPS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    block, b = program_pair(blocks)
    p = block * PIXELS + tl.arange(0, PIXELS)
    k, o = tl.arange(0, TAPS), tl.arange(0, OUTPUTS)
    # Taps in the order of the weights: channel, row, column.
    channel, i, j = k // (SIDE * SIDE), k // SIDE % SIDE, k % SIDE
    y = (p // columns * STRIDE - top)[:, None] + i[None, :]
    z = (p % columns * STRIDE - left)[:, None] + j[None, :]
    inside = (y >= 0) & (y < H) & (z >= 0) & (z < W) & (channel < INPUTS)[None, :]
    images += b.to(tl.int64) * stride_b
    a = tl.load(images + channel[None, :] * stride_c + y * stride_y + z * stride_x, inside, 0.0)
    taken: tl.constexpr = INPUTS * SIDE * SIDE
    w = tl.load(weight + k[:, None] * N + o[None, :], (k < taken)[:, None] & (o < N)[None, :], 0.0)
    acc = _relu6(tl.dot(a.to(w.dtype), w, input_precision="ieee") + tl.load(bias + o, o < N, 0.0)[None, :])
    to = out + b.to(tl.int64) * rows * columns * N + (p * N)[:, None] + o[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), (p < rows * columns)[:, None] & (o < N)[None, :])


class PointwiseTiling(NamedTuple):
    """How a 1×1 convolution is divided into tiles."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


class DepthwiseTiling(NamedTuple):
    """What a program of a depthwise convolution computes: rows, groups of neighbouring pixels, and channels."""

    height: int
    """At most."""
    groups: int
    each: int
    """Pixels of a group."""
    channels: int


def choose_pointwise_tiling(inputs: int, outputs: int) -> PointwiseTiling:
    """The fastest measured on an H200 for the layers of EfficientNet-Lite2."""
    if inputs > outputs:  # all outputs at once: inputs are read once
        columns = min(256, max(16, triton.next_power_of_2(outputs)))
        return PointwiseTiling(128, columns, 32 if columns <= 32 else 64, 8, 3 if 32 < columns < 256 else 4)
    whole = max(16, triton.next_power_of_2(inputs))
    if whole > 256:
        return PointwiseTiling(64, 128, 32, 4, 3)
    return PointwiseTiling(128, 64, whole, 4, 1 if whole >= 128 else 3)


def choose_depthwise_tiling(side: int) -> DepthwiseTiling:
    """The fastest measured on an H200 for the layers of EfficientNet-Lite2, or near it: 128 numbers for one warp.

    With more than three taps on a side, larger groups of pixels would take more registers than there are.
    """
    return DepthwiseTiling(64, 4, 4, 32) if side <= 3 else DepthwiseTiling(64, 8, 2, 16)


def same_padding(size: int, side: int, stride: int) -> tuple[int, int]:
    """Output size, and zeros before the first pixel, of a convolution padded as TensorFlow's "same".

    >>> same_padding(256, 3, 2), same_padding(255, 3, 2), same_padding(256, 5, 1)
    ((128, 0), (128, 1), (256, 2))
    """
    after = -(-size // stride)
    return after, max(0, (after - 1) * stride + side - size) // 2


def launch_pointwise(
    x: Tensor, weight: Tensor, bias: Tensor, relu6: bool, residual: Tensor | None = None,
    tiling: PointwiseTiling | None = None,
) -> Tensor:  # fmt: skip
    """`x W + bias`, then ReLU6 or plus the residual: rows (M, K) and a weight (K, N) → (M, N)."""
    (count, inputs), outputs = x.shape, weight.shape[1]
    tiling = tiling or choose_pointwise_tiling(inputs, outputs)
    out = x.new_empty(count, outputs)
    _pointwise_kernel[triton.cdiv(count, tiling.rows),](
        x, weight, bias, x if residual is None else residual, out, count, K=inputs, N=outputs, RELU6=relu6,
        RESIDUAL=residual is not None, BLOCK_M=tiling.rows, BLOCK_N=tiling.outputs, BLOCK_K=tiling.inputs,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out


def launch_depthwise(
    x: Tensor, taps: Tensor, bias: Tensor, stride: int, tiling: DepthwiseTiling | None = None
) -> Tensor:
    """`relu6(depthwise(x) + bias)`: maps (B, H, W, E) → (B, H / stride, W / stride, E).

    Taps are (side, side, E) in float32, padding is TensorFlow's "same".
    """
    (batch, lines, width, channels), side = x.shape, taps.shape[0]
    (rows, top), (columns, left) = (same_padding(size, side, stride) for size in (lines, width))
    height, groups, each, some = tiling or choose_depthwise_tiling(side)
    height = min(height, rows)
    down, across = triton.cdiv(rows, height), triton.cdiv(columns, groups * each)
    out = x.new_empty(batch, rows, columns, channels)
    _depthwise_kernel[triton.cdiv(channels, some) * down * across * batch,](
        x, taps, bias, out, lines, width, rows, columns, top, left, height, across, down * across,
        E=channels, SIDE=side, STRIDE=stride, GROUPS=groups, EACH=each, CHANNELS=some,
        num_warps=triton.cdiv(groups * some, 128), num_stages=1,
    )  # fmt: skip
    return out


def launch_block(
    x: Tensor, wide_weight: Tensor, wide_bias: Tensor, taps: Tensor, taps_bias: Tensor, weight: Tensor, bias: Tensor,
    stride: int, pixels: int = 128, channels: int = 32, warps: int = 4,
) -> Tensor:  # fmt: skip
    """All convolutions of a block, without residual: maps (B, H, W, K) → (B, H / stride, W / stride, N).

    Arguments are as in `launch_pointwise`, `launch_depthwise` and again `launch_pointwise`.
    """
    (batch, height, width, inputs), side, outputs = x.shape, taps.shape[0], weight.shape[1]
    (rows, top), (columns, left) = (same_padding(size, side, stride) for size in (height, width))
    out = x.new_empty(batch, rows, columns, outputs)
    blocks = triton.cdiv(rows * columns, pixels)
    _block_kernel[blocks * batch,](
        x, wide_weight, wide_bias, taps, taps_bias, weight, bias, out, height, width, rows, columns, top, left,
        blocks, K=inputs, E=taps.shape[2], N=outputs, SIDE=side, STRIDE=stride, PIXELS=pixels,
        INPUTS=max(16, triton.next_power_of_2(inputs)), CHANNELS=channels,
        OUTPUTS=max(16, triton.next_power_of_2(outputs)), num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out


def launch_first_convolution(images: Tensor, weight: Tensor, bias: Tensor, side: int, stride: int) -> Tensor:
    """`relu6(convolution(images) + bias)`: (B, c, H, W) of any strides → (B, H / stride, W / stride, N).

    The weight is (c·side·side, N), padding is TensorFlow's "same".
    """
    (batch, inputs, height, width), outputs = images.shape, weight.shape[1]
    (rows, top), (columns, left) = (same_padding(size, side, stride) for size in (height, width))
    out = torch.empty(batch, rows, columns, outputs, dtype=weight.dtype, device=images.device)
    blocks = triton.cdiv(rows * columns, 128)
    _first_convolution_kernel[blocks * batch,](
        images, weight, bias, out, height, width, rows, columns, top, left, blocks, *images.stride(),
        INPUTS=inputs, N=outputs, SIDE=side, STRIDE=stride, PIXELS=128,
        TAPS=max(16, triton.next_power_of_2(len(weight))), OUTPUTS=max(16, triton.next_power_of_2(outputs)),
    )  # fmt: skip
    return out
