"""The operator `veca::packed_attention`: on a CPU through Triton's interpreter in float32, on a GPU as it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from interpreter import interpreted
from torch import Tensor

import veca
from veca.attention import core_attention, use_kernel
from veca.kernels import ops
from veca.rope import make_rotary, patch_coordinates

Pack = Sequence[tuple[int, tuple[int, int]]]
"""Budget and grid of each image."""

PACKS: list[Pack] = [
    [(8, (4, 5))],
    [(8, (1, 1)), (64, (9, 8)), (1, (1, 64)), (13, (3, 7))],
    [(64, (12, 11)), (64, (2, 2)), (40, (12, 11))],
]


def inputs(pack: Pack, width: int, heads: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """Queries, keys and values, coordinates of cores and patches, frequencies, and a gradient of the output."""
    torch.manual_seed(0)
    cores, patches = sum(budget for budget, _ in pack), sum(rows * columns for _, (rows, columns) in pack)
    qkv, d_out = torch.randn(cores + patches, 3, heads, width), torch.randn(cores + patches, heads * width)
    points = torch.rand(cores, 2) * 2 - 1
    grids = torch.cat([patch_coordinates(*grid, torch.device("cpu"), torch.float32) for _, grid in pack])
    frequencies = make_rotary(points, width, 0.25).frequencies
    tensors = [qkv.to(dtype), points, grids, frequencies, d_out.to(dtype)]
    return [tensor.to(device) for tensor in tensors]


def by_image(pack: Pack, qkv: Tensor, points: Tensor, d_out: Tensor) -> list[Tensor]:
    """Output, and gradients of qkv and of the cores' coordinates, one image after the other, by the reference."""
    qkv, points = (x.detach().double().requires_grad_() for x in (qkv, points))
    core, patch = 0, len(points)
    cores, patches = [], []
    for budget, grid in pack:
        count = grid[0] * grid[1]
        own = torch.cat([qkv[core : core + budget], qkv[patch : patch + count]])[None]
        tables = points[None, None, core : core + budget], patch_coordinates(*grid, qkv.device, torch.float64)
        with use_kernel("reference"):
            out = core_attention(own, *(make_rotary(table, qkv.shape[-1], 0.25) for table in tables))[0]
        cores.append(out[:budget])
        patches.append(out[budget:])
        core, patch = core + budget, patch + count
    out = torch.cat(cores + patches)
    return [out.detach(), *torch.autograd.grad(out, [qkv, points], d_out.double())]


def together(pack: Pack, tensors: list[Tensor], programs: int) -> list[Tensor]:
    from veca.kernels.packed_attention import plan_spans

    qkv, points, grids, frequencies, d_out = tensors
    qkv, points = qkv.detach().requires_grad_(), points.detach().requires_grad_()
    patches = [rows * columns for _, (rows, columns) in pack]
    spans, images = (x.to(qkv.device) for x in plan_spans([budget for budget, _ in pack], patches, programs))
    out = ops.packed_attention_op(qkv, points, grids, frequencies, spans, images, ops.KERNELS)[0]
    return [out.detach(), *torch.autograd.grad(out, [qkv, points], d_out)]


def errors(pack: Pack, tensors: list[Tensor], programs: int) -> list[float]:
    qkv, points, _, _, d_out = tensors
    pairs = zip(together(pack, tensors, programs), by_image(pack, qkv, points, d_out), strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


@interpreted
@pytest.mark.parametrize("programs", [1, 100])
@pytest.mark.parametrize(("number", "width", "heads"), [(0, 128, 1), (1, 32, 2), (1, 64, 1), (2, 32, 1)])
def test_packed_attention_matches_the_reference(number: int, width: int, heads: int, programs: int) -> None:
    pack = PACKS[number]
    assert max(errors(pack, inputs(pack, width, heads), programs)) <= 1e-6


@interpreted
def test_packed_operators_keep_to_the_rules() -> None:
    from veca.kernels.packed_attention import plan_spans

    pack: Pack = [(8, (1, 3)), (8, (2, 2))]
    *tensors, d_out = inputs(pack, 32, 1)
    arguments = [*tensors, *plan_spans([8, 8], [3, 4], 1), ops.KERNELS]
    out, lse = ops.packed_attention_op(*arguments)
    backward = [d_out, *arguments[:-1], out, lse]
    torch.library.opcheck(torch.ops.veca.packed_attention_backward.default, backward)
    for tensor in arguments[:2]:
        tensor.requires_grad_()
    torch.library.opcheck(torch.ops.veca.packed_attention.default, arguments)


def test_spans_cover_every_patch_once() -> None:
    pytest.importorskip("triton")
    from veca.kernels.packed_attention import plan_spans

    budgets, patches = [8, 64, 1], [1, 1000, 130]
    for programs in (1, 3, 7, 1000):
        spans, images = plan_spans(budgets, patches, programs)
        first = [0, 1, 1001]
        for (core, budget, start, count), patch, number in zip(images.tolist(), first, patches, strict=True):
            own = spans[start : start + count].tolist()
            assert sum(span[4] for span in own) == number
            assert [span[3] for span in own] == [patch + sum(span[4] for span in own[:i]) for i in range(count)]
            assert all(span[:3] == [core, budget, 73 + span[3]] for span in own)
            assert [span[5] for span in own] == ([2] if count == 1 else [1, *[0] * (count - 1)])


@interpreted
def test_a_model_runs_packs_by_the_kernel() -> None:
    model = veca.create_model("veca_tiny", pretrained=False, embed_dim=64, depth=2, num_heads=2).eval()
    batch = veca.pack([torch.randn(3, 32, 48), torch.randn(3, 80, 16), torch.randn(3, 32, 48)])
    with use_kernel("triton"):
        out = model(batch, cores=[8, 40, 8])
    with use_kernel("sdpa"):
        expected = model(batch, cores=[8, 40, 8])
    torch.testing.assert_close(out.patches, expected.patches, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.cores, expected.cores, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 50, 10_000])
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-6)], ids=str)
def test_gpu_packed_attention(dtype: torch.dtype, limit: float, width: int, programs: int) -> None:
    pack: Pack = [(64, (19, 23)), (8, (1, 1)), (13, (40, 30)), (64, (2, 64))]
    assert max(errors(pack, inputs(pack, width, 2, dtype, "cuda"), programs)) <= limit
