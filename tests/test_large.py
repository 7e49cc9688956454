"""Every kernel beyond the limits of 16 and 32 bits: grids of more than 65,535, tensors of more than 2³¹ numbers.

Each is compared with the same numbers in small pieces, or for one large image with PyTorch's own attention. All of it
needs a GPU with some 80 GB.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from test_kernels import operands
from torch import Tensor

import veca
from veca.attention import core_attention, use_kernel
from veca.kernels import ops
from veca.rope import make_rotary, patch_coordinates

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HEADS, WIDTH, CORES = 12, 64, 64
DIM = HEADS * WIDTH
MANY = 2**16 + 32
"""Images: more than the second and third dimension of a grid may count."""


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    if torch.cuda.get_device_properties(0).total_memory < 75 * 2**30:
        pytest.skip("needs a GPU with 80 GB")
    torch.manual_seed(0)
    yield
    gc.collect()
    torch.cuda.empty_cache()


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """In float64, a piece at a time: of tensors as large as these there is no room for copies."""
    assert found.shape == expected.shape
    difference = total = 0.0
    for a, b in zip(found.detach().flatten().split(2**28), expected.detach().flatten().split(2**28), strict=True):
        difference += float((a.double() - b.double()).square().sum())
        total += float(b.double().square().sum())
    return (difference / max(total, 1e-30)) ** 0.5


def same(call: Callable[..., Tensor | tuple[Tensor, ...]], pieces: int, *batched: Tensor, tolerance: float) -> None:
    """`call` of tensors whose first dimension is the batch gives what it gives of pieces of them."""
    whole = call(*batched)
    whole = (whole,) if isinstance(whole, Tensor) else whole
    rows = zip(*(tensor.chunk(pieces) for tensor in batched), strict=True)
    done = 0
    for parts in rows:
        expected = call(*parts)
        expected = (expected,) if isinstance(expected, Tensor) else expected
        count = len(parts[0])
        for found, want in zip(whole, expected, strict=True):
            assert found.shape[0] == len(batched[0])
            assert relative_error(found[done : done + count], want) <= tolerance
        done += count
    assert done == len(batched[0])


def learn(call: Callable[..., Tensor], d_out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """A forward and backward pass: the output and the gradients of all inputs."""
    inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    out = call(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, d_out)


# The operators of the plain model, which training uses too.


def attention_of(grid: tuple[int, int]) -> Callable[..., tuple[Tensor, ...]]:
    """Output and gradients of attention of qkv (B, S, 3, H, d) and coordinates (B, 1, C, 2)."""

    def run(qkv: Tensor, points: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
        more = operands(points, grid, qkv.shape[-1])
        out, lse = ops.core_attention_op(qkv, *more)
        return out, *ops.core_attention_backward_op(d_out, qkv, *more, out, lse)

    return run


def points_of(batch: int, cores: int = CORES) -> Tensor:
    return torch.rand(batch, 1, cores, 2, device="cuda") * 2 - 1


def test_attention_of_many_images() -> None:
    batch, tokens = 1024, CORES + 32 * 32
    qkv = randn(batch, tokens, 3, HEADS, WIDTH)
    assert qkv.numel() > 2**31
    same(attention_of((32, 32)), 8, qkv, points_of(batch), randn(batch, tokens, DIM), tolerance=2e-3)


def test_attention_of_more_images_than_a_grid_counts() -> None:
    qkv = randn(MANY, 8 + 4, 3, 2, 32)
    same(attention_of((2, 2)), 4, qkv, points_of(MANY, 8), randn(MANY, 12, 64), tolerance=2e-3)


def test_attention_of_one_large_image() -> None:
    grid = 1024, 1024
    tokens = CORES + grid[0] * grid[1]
    qkv, points, d_out = randn(1, tokens, 3, HEADS, WIDTH), points_of(1), randn(1, tokens, DIM)
    assert qkv.numel() > 2**31
    on_patches = make_rotary(patch_coordinates(*grid, qkv.device, torch.float32), WIDTH, 0.125)

    def attend(qkv: Tensor, points: Tensor) -> Tensor:
        return core_attention(qkv, make_rotary(points, WIDTH, 0.125), on_patches)

    results = []
    for kernel in ("triton", "sdpa"):
        with use_kernel(kernel):
            results.append(learn(attend, d_out, qkv, points))
    (out, d_qkv, d_points), (want, want_qkv, want_points) = results
    assert relative_error(out, want) <= 1e-2
    # The cores are few among the rows and would vanish in an error over all of them.
    for rows in (slice(None, CORES), slice(CORES, None), slice(-1000, None)):
        assert relative_error(out[:, rows], want[:, rows]) <= 1e-2
        assert relative_error(d_qkv[:, rows], want_qkv[:, rows]) <= 3e-2
    assert relative_error(d_points, want_points) <= 3e-2


def test_attention_of_a_large_pack() -> None:
    """As many images as a batch of one shape has, their tokens in another order."""
    from veca.kernels.packed_attention import plan_spans

    batch, patches = 1024, 32 * 32
    qkv, points = randn(batch, CORES + patches, 3, HEADS, WIDTH), points_of(batch)
    assert qkv.numel() > 2**31
    d_out = randn(batch, CORES + patches, DIM)
    core_points, patch_points, frequencies = operands(points, (32, 32), WIDTH)[:3]
    spans = [table.cuda() for table in plan_spans([CORES] * batch, [patches] * batch, 100)]

    def pack(x: Tensor) -> Tensor:
        return torch.cat([x[:, :CORES].flatten(0, 1), x[:, CORES:].flatten(0, 1)])

    more = core_points.flatten(0, 1), patch_points.repeat(batch, 1), frequencies, *spans
    packed, gradient = pack(qkv), pack(d_out)
    out, lse = ops.packed_attention_op(packed, *more, CORES)
    found = out, *ops.packed_attention_backward_op(gradient, packed, *more, out, lse, CORES)
    del packed, gradient, lse
    want = attention_of((32, 32))(qkv, points, d_out)
    for mine, theirs in zip(found[:2], want[:2], strict=True):
        assert relative_error(mine, pack(theirs)) <= 2e-3
    assert relative_error(found[2], want[2].flatten(0, 1)) <= 2e-3


def test_attention_of_rows_far_apart() -> None:
    """Tokens first, images second: the stride from token to token times a tile passes 2³¹."""
    batch, tokens = 2**16, CORES + 64
    far = randn(tokens, batch, 3, 4, 32).transpose(0, 1)
    assert far.stride(1) * tokens > 2**31
    run = attention_of((8, 8))
    points, d_out = points_of(batch), randn(batch, tokens, 128)
    for found, want in zip(run(far, points, d_out), run(far.contiguous(), points, d_out), strict=True):
        assert torch.equal(found, want)


def test_swiglu_beyond_32_bit_offsets() -> None:
    rows, width = 1024 * 1088, 2048
    assert rows // 16 > 2**16
    h, bias, d_out = randn(rows, 2 * width), randn(2 * width), randn(rows, width)
    assert h.numel() > 2**31
    same(lambda h: ops.swiglu_op(h, bias), 8, h, tolerance=0)
    d_h, d_bias = ops.swiglu_backward_op(d_out, h, bias)
    want = torch.zeros(2 * width, device="cuda")
    for part, (d, x) in enumerate(zip(d_out.chunk(8), h.chunk(8), strict=True)):
        dx, db = ops.swiglu_backward_op(d, x, bias)
        assert torch.equal(d_h.chunk(8)[part], dx)
        want += db.float()
    assert relative_error(d_bias, want) <= 1e-2


def test_add_norm_beyond_32_bit_offsets() -> None:
    batch, tokens = 2720, CORES + 1024
    x, update = randn(batch, tokens, DIM), randn(batch, tokens, DIM)
    assert x.numel() > 2**31
    weight, bias = randn(DIM), randn(DIM)

    def forward(x: Tensor, update: Tensor) -> tuple[Tensor, ...]:
        return ops.add_norm_op(x, update, weight, bias, 1e-5, BF16, CORES)

    same(forward, 8, x, update, tolerance=0)
    total, d_total, d_normed, d_cores = x, update, randn(batch, tokens, DIM), randn(batch, CORES, DIM)
    d_x, d_update, d_affine = ops.add_norm_backward_op(d_total, d_normed, d_cores, total, weight, 1e-5, BF16)
    want = torch.zeros(2, DIM, device="cuda")
    parts = zip(*(tensor.chunk(8) for tensor in (d_total, d_normed, d_cores, total)), strict=True)
    for i, (dt, dn, dc, t) in enumerate(parts):
        dx, du, da = ops.add_norm_backward_op(dt, dn, dc, t, weight, 1e-5, BF16)
        assert torch.equal(d_x.chunk(8)[i], dx)
        assert torch.equal(d_update.chunk(8)[i], du)
        want += da.float()
    assert relative_error(d_affine, want) <= 1e-2


def test_narrow_linear_beyond_32_bit_offsets() -> None:
    batch = 2**31 // (CORES * DIM) + 100
    x, weight, bias, d_out = randn(batch, CORES, DIM), randn(2, DIM), randn(2), randn(batch, CORES, 2)
    assert x.numel() > 2**31
    same(lambda x: ops.narrow_linear_op(x, weight, bias), 8, x, tolerance=0)
    d_x, d_affine = ops.narrow_linear_backward_op(d_out, x, weight)
    want = torch.zeros(2 * DIM + 2, device="cuda")
    for i, (d, part) in enumerate(zip(d_out.chunk(8), x.chunk(8), strict=True)):
        dx, da = ops.narrow_linear_backward_op(d, part, weight)
        assert torch.equal(d_x.chunk(8)[i], dx)
        want += da.float()
    assert relative_error(d_affine, want) <= 1e-2


# The kernels of `veca.optimize`.


def test_linear_beyond_32_bit_offsets() -> None:
    from veca.kernels.linear import linear, linear_residual, moments

    rows = 1024 * 1100
    x, weight, bias = randn(rows, DIM), randn(3 * DIM, DIM) / DIM**0.5, randn(3 * DIM, dtype=torch.float32)
    assert rows * 3 * DIM > 2**31
    sums = moments(x)
    out = linear(x, weight, bias, moments=sums, eps=1e-5)
    for part in (slice(0, 4096), slice(rows // 2, rows // 2 + 4096), slice(rows - 4096, rows)):
        want = linear(x[part], weight, bias, moments=moments(x[part]), eps=1e-5)
        assert relative_error(out[part], want) <= 1e-4
    wide = linear(out, randn(DIM, 3 * DIM) / DIM**0.5, bias[:DIM])  # reads more than 2³¹ numbers
    assert wide.isfinite().all()
    gate = randn(4096, DIM) / DIM**0.5
    hidden = linear(x, gate, bias.new_zeros(4096), moments=sums, swiglu=True)
    fc2 = randn(DIM, 2048) / 2048**0.5
    total, sums_out = linear_residual(hidden, fc2, bias[:DIM], x)
    assert hidden.numel() > 2**31
    for part in (slice(0, 4096), slice(rows - 4096, rows)):
        near = linear(x[part], gate, bias.new_zeros(4096), moments=moments(x[part]), swiglu=True)
        assert relative_error(hidden[part], near) <= 1e-4
        want, want_sums = linear_residual(near, fc2, bias[:DIM], x[part])
        assert relative_error(total[part], want) <= 1e-4
        assert relative_error(sums_out[:, :, part], want_sums) <= 1e-3


def test_norm_moments_and_quantize() -> None:
    from veca.kernels.linear import layer_norm, moments, quantize_normalized

    x = randn(2_900_000, DIM)
    assert x.numel() > 2**31
    weight, bias = randn(DIM, dtype=torch.float32), randn(DIM, dtype=torch.float32)
    same(lambda x: layer_norm(x, weight, bias, 1e-5), 8, x, tolerance=0)
    same(lambda x: moments(x)[0].T, 8, x, tolerance=0)
    same(lambda x: tuple(part.float() for part in quantize_normalized(x, 1e-5)), 8, x[:2_800_000], tolerance=0)


@pytest.mark.parametrize(("batch", "side"), [(1, 32_768), (MANY, 16)])
def test_patchify_beyond_32_bit_offsets(batch: int, side: int) -> None:
    from veca.kernels.linear import patchify

    images = randn(batch, 3, side, side)
    found = patchify(images, 16, 8, BF16)
    patches = images.unflatten(3, (-1, 16)).unflatten(2, (-1, 16)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    assert torch.equal(found[:, 8:], patches)
    assert not found[:, :8].any()


def test_move_of_more_images_than_a_grid_counts() -> None:
    from veca.kernels.coordinates import move_cores

    x, state = randn(MANY, 10, 64), randn(MANY, 8, 2, dtype=torch.float32)
    head = randn(2, 64, dtype=torch.float32), randn(2, dtype=torch.float32), randn(1, dtype=torch.float32)
    same(lambda x, state: move_cores(x, 8, state, head), 4, x, state, tolerance=0)


@pytest.mark.parametrize(("batch", "grid", "heads"), [(MANY, (2, 2), 4), (1, (1536, 1024), 12)])
def test_few_cores_beyond_32_bit_offsets(batch: int, grid: tuple[int, int], heads: int) -> None:
    from veca.kernels.core_products import core_projection
    from veca.kernels.few_cores import averaging_weights, core_logits, projected_probabilities
    from veca.kernels.linear import moments
    from veca.rope import rotate

    cores, patches, dim = 8, grid[0] * grid[1], heads * WIDTH
    tokens = cores + patches
    x, k = randn(batch, tokens, dim), randn(batch, tokens, heads, WIDTH)
    w, bias = randn(3 * dim, dim) * dim**-0.5, randn(3 * dim, dtype=torch.float32)
    points = points_of(batch, cores)
    more, sums = operands(points, grid, WIDTH), moments(x.flatten(0, 1))
    core_qkv = core_projection(x, sums, w, bias, 1e-5, cores)
    half = w[: 2 * dim], bias[: 2 * dim]
    patch_to_core, logits = projected_probabilities(x, sums, *half, 1e-5, core_qkv, heads, *more)
    first = core_logits(randn(batch, 1, heads, WIDTH).fill_(1), k, *more)
    weights = averaging_weights(logits, torch.ones(1, 2, batch * tokens, device="cuda"), dim, 1e-5, BF16)
    # Against the definition, for the first and last images and patches.
    core, patch = (
        make_rotary(points, WIDTH, 0.125),
        make_rotary(patch_coordinates(*grid, x.device, torch.float32), WIDTH, 0.125),
    )
    for b in {0, batch - 1}:
        inverse = (x[b].float().var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
        qk = (x[b].float() @ half[0].float().T * inverse + half[1]).unflatten(-1, (2, heads, WIDTH))
        q, key = qk.permute(1, 2, 0, 3)  # (H, S, d)
        turn = core.cos[b], core.sin[b]
        q_core, k_core = rotate(q[:, :cores], turn), rotate(key[:, :cores], turn)
        k_patch = rotate(key[:, cores:], (patch.cos, patch.sin))
        want = torch.cat([q_core @ k_core.mT, q_core @ k_patch.mT], -1) * WIDTH**-0.5 * 1.4426950408889634
        assert relative_error(logits[b].view(heads, cores, -1), want) <= 2e-2
        scale = (1.0 / dim - 1.0 / dim**2 + 1e-5) ** -0.5
        spread = (logits[b].view(heads, cores, -1) * 0.6931471805599453).softmax(-1) * scale
        assert relative_error(weights[b].view(heads, cores, -1), spread) <= 2e-2
        tail = slice(patches - min(patches, 4096), patches)
        q_patch = rotate(q[:, cores:][:, tail], (patch.cos[tail], patch.sin[tail]))
        share = (q_patch @ k_core.mT * WIDTH**-0.5).softmax(-1)
        found = patch_to_core[b, cores:][tail].unflatten(-1, (heads, cores)).transpose(0, 1)
        assert relative_error(found, share) <= 3e-2
        one = rotate(torch.ones(heads, 1, WIDTH, device="cuda"), (core.cos[b, :1], core.sin[b, :1]))
        keys = torch.cat([rotate(t, r) for t, r in zip(k[b].float().transpose(0, 1).split([cores, patches], 1),
                                                       (turn, (patch.cos, patch.sin)), strict=True)], 1)  # fmt: skip
        want = (one @ keys.mT)[:, 0] * WIDTH**-0.5 * 1.4426950408889634
        assert relative_error(first[b].view(heads, -1), want) <= 1e-2


@pytest.mark.parametrize(("batch", "tokens", "dim"), [(MANY, 12, 64), (1, 3_000_000, DIM)])
def test_mix_residual_beyond_32_bit_offsets(batch: int, tokens: int, dim: int) -> None:
    from veca.kernels.few_cores import mix_residual

    cores, width = 8, 8 * dim // WIDTH
    x, bias = randn(batch, tokens, dim), randn(dim, dtype=torch.float32)
    p, vectors = torch.rand(batch, tokens, width, device="cuda").to(BF16), randn(batch, width + cores, dim)
    out, sums = mix_residual(p, vectors, bias, x, cores)
    for rows in (slice(cores, min(tokens, 5000)), slice(max(cores, tokens - 5000), tokens)):
        for b in {0, batch - 1}:
            want = x[b, rows].float() + p[b, rows].float() @ vectors[b, :width].float() + bias
            assert relative_error(out[b, rows], want) <= 1e-2
            place = slice(b * tokens + rows.start, b * tokens + rows.stop)
            assert relative_error(sums[0, 1, place], want.square().sum(-1)) <= 1e-2
    assert relative_error(out[-1, :cores], x[-1, :cores].float() + vectors[-1, width:].float() + bias) <= 1e-2


# Whole models.


@torch.inference_mode()
def test_plain_model_of_many_images() -> None:
    model = veca.create_model("veca_base", depth=2).cuda().bfloat16().eval()
    images = randn(1024, 3, 512, 512)

    def features(images: Tensor) -> tuple[Tensor, ...]:
        out = model(images, cores=64)
        return out.cores, out.patches

    same(features, 8, images, tolerance=5e-3)


@torch.inference_mode()
@pytest.mark.parametrize("cores", [64, 8])
@pytest.mark.parametrize("cls_only", [False, True])
def test_optimized_model_of_many_small_images(cores: int, cls_only: bool) -> None:
    model = veca.create_model("veca_tiny", depth=2).cuda().eval()
    fast = veca.optimize(model)
    images = randn(MANY, 3, 32, 32)
    same(lambda images: fast(images, cores=cores, cls_only=cls_only).cores, 4, images, tolerance=2e-2)


@torch.inference_mode()
@pytest.mark.parametrize("cores", [64, 8])
def test_optimized_model_of_one_large_image(cores: int) -> None:
    model = veca.create_model("veca_base", depth=2).cuda().eval()
    image = F.interpolate(randn(1, 3, 64, 64, dtype=torch.float32), (16_384, 16_384), mode="bilinear").to(BF16)
    fast = veca.optimize(model)
    out = fast(image, cores=cores)
    cls = fast(image, cores=cores, cls_only=True).cls
    plain = model.bfloat16()
    with use_kernel("sdpa"):
        want = plain(image, cores=cores)
    assert relative_error(out.cores, want.cores) <= 2e-2
    assert relative_error(out.patches, want.patches) <= 2e-2
    assert relative_error(out.patches[:, -1000:], want.patches[:, -1000:]) <= 2e-2
    assert relative_error(cls, want.cls) <= 2e-2


def test_training_a_model_with_more_than_2_31_numbers_in_a_layer() -> None:
    model = veca.create_model("veca_tiny", depth=2).cuda().eval()
    images = randn(576, 3, 1024, 1024)
    hidden = len(images) * (CORES + 64 * 64) * 2 * model.config.mlp_dim
    assert hidden > 2**31
    target = randn(576, 192, dtype=torch.float32)

    def gradients(pieces: int) -> dict[str, Tensor]:
        model.zero_grad()
        for part, want in zip(images.chunk(pieces), target.chunk(pieces), strict=True):
            with torch.autocast("cuda", BF16):
                out = model(part, cores=64)
                loss = (out.cls.float() * want).sum() + out.patches.float().mean((1, 2)).square().sum()
            loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    whole, pieces = gradients(1), gradients(8)
    for name, gradient in whole.items():
        assert relative_error(gradient, pieces[name]) <= 3e-2, name
