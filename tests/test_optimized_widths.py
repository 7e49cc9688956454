"""The fast inference model at MLP widths below 1, and its kernels: in Triton's interpreter and on a GPU."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from conftest import relative_error
from interpreter import interpreted
from sample_images import random_images
from test_optimized import (
    assert_same,
    errors,
    folded,
    layer,
    make,
    make_small,
    on_gpu,
    parts,
    shortcut,
    shorten,
    tokens,
)
from torch import Tensor

import veca
from veca import fast_block, optimized
from veca.attention import core_probabilities, use_kernel
from veca.fast_block import interleave_swiglu
from veca.model import VecaOutput
from veca.optimized import FastVeca
from veca.rope import make_rotary, patch_coordinates

WIDTHS = (0.25, 0.5, 1.0)
elastic = functools.partial(make_small, mlp_ratio=4.0, widths=WIDTHS)


def exact(model: veca.Veca, images: Tensor, cores: int, width: float) -> VecaOutput:
    """The definition in float64."""
    with torch.no_grad(), use_kernel("reference"):
        return copy.deepcopy(model).double()(images.double(), cores, width=width)


def choose_mlp(monkeypatch: pytest.MonkeyPatch, fused: bool) -> list[int]:
    """Use the fused MLP always or never; the list gets the channels of patches whenever it runs."""
    from veca.kernels import fused_mlp as kernels

    taken: list[int] = []

    def run(*arguments: object) -> tuple[Tensor, Tensor]:
        taken.append(arguments[-1])  # type: ignore[arg-type]
        return original(*arguments)  # type: ignore[arg-type]

    original = kernels.fused_mlp
    monkeypatch.setattr(kernels, "fused_mlp", run)
    monkeypatch.setattr(kernels, "FUSED_MAX_HIDDEN", 2**16 if fused else 0)
    return taken


# The whole model in the interpreter.


@interpreted
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize(
    ("cores", "width", "few", "overrides"),
    [
        (1, 0.25, False, {}),
        (8, 0.5, False, {"output_dim": 48, "num_classes": 5}),
        (13, 0.25, True, {}),
        (24, 0.7, True, {"mlp_ratio": 90 / 64}),  # not a multiple of a group
        (64, 0.25, False, {"depth": 1}),
        (8, 0.25, True, {"embed_dim": 96, "num_heads": 3}),  # never fused
    ],
    ids=str,
)
def test_widths_match_float64(
    cores: int, width: float, few: bool, overrides: dict[str, object], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = elastic(**{"widths": (*sorted({*WIDTHS[:2], width}), 1.0), **overrides})
    images, shortcuts = random_images(2, 8, 20), shortcut(monkeypatch, few)
    narrow = choose_mlp(monkeypatch, fused)
    fast = FastVeca(model, torch.float32, None, False)
    expected = exact(model, images, cores, width)
    assert max(errors(parts(fast(images, cores, width=width)), parts(expected))) <= 3e-6
    supported = fused and model.embed_dim == 64
    assert narrow == [model.config.hidden_width(width)] * (model.config.depth if supported else 0)
    assert bool(shortcuts) == few
    short = fast(images, cores, cls_only=True, width=width)
    assert max(errors(parts(short), parts(shorten(expected)))) <= 3e-6
    assert relative_error(expected.patches, exact(model, images, cores, 1.0).patches) > 1e-2


@interpreted
def test_width_of_a_call_or_of_the_model_and_of_intermediates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = elastic(), random_images(2, 8, 12)
    model.width = 0.25
    fast = FastVeca(model, torch.float32, None, False)
    assert max(errors(parts(fast(images, 8)), parts(exact(model, images, 8, 0.25)))) <= 3e-6
    assert max(errors(parts(fast(images, 8, width=1)), parts(exact(model, images, 8, 1.0)))) <= 3e-6
    with torch.no_grad(), use_kernel("sdpa"):
        for fused, width in itertools.product((False, True), (0.25, 0.5)):
            choose_mlp(monkeypatch, fused)
            found, expected = (
                m.forward_intermediates(images, intermediates_only=True, cores=8, width=width) for m in (fast, model)
            )
            assert max(errors(found, expected)) <= 3e-6
    with pytest.raises(ValueError, match="width=2; a width is a number above 0"):
        fast(images, 8, width=2)


@interpreted
def test_an_empty_batch_at_a_width() -> None:
    fast = FastVeca(elastic(depth=1), torch.float32, None, False)
    assert fast(random_images(0, 8, 8), 8, width=0.25).patches.shape == (0, 4, 64)


@interpreted
def test_float8_is_no_less_exact_at_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = elastic(depth=1), random_images(2, 8, 8)
    choose_mlp(monkeypatch, False)
    fast = FastVeca(model, torch.float32, "float8", False)
    narrow, whole = (
        max(errors(parts(fast(images, 8, width=width)), parts(exact(model, images, 8, width)))) for width in (0.25, 1.0)
    )
    assert 1e-3 < narrow < 1.5 * whole < 0.5


@interpreted
@pytest.mark.parametrize("fused", [False, True])
def test_compiling_runs_all_kernels_of_a_width(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's interpreter takes one thread.
    monkeypatch.setattr(optimized, "ThreadPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    choose_mlp(monkeypatch, fused)
    fast, images = FastVeca(elastic(), torch.float32, None, False), random_images(2, 8, 8)
    before = fast(images, 8, width=0.25).cls
    for few in (False, True):
        shortcut(monkeypatch, few)
        fast.compile_kernels(2, 8, 8, True, 0.25)
    shortcut(monkeypatch, False)
    assert torch.equal(fast(images, 8, width=0.25).cls, before)


# The kernels in the interpreter, against torch in float64.


@interpreted
@pytest.mark.parametrize(
    ("batch", "count", "cores", "dim", "channels", "hidden", "tiling"),
    [
        (1, 5, 1, 64, 128, 64, None),
        (3, 47, 13, 128, 192, 64, (64, 32, 4, 2)),
        (2, 70, 8, 192, 192, 128, None),
        (2, 70, 8, 192, 128, 128, (64, 16, 4, 1)),  # all channels for all tokens
        (1, 67, 64, 320, 128, 64, None),
    ],
    ids=str,
)
def test_fused_mlp_matches_float64(
    batch: int, count: int, cores: int, dim: int, channels: int, hidden: int, tiling: tuple[int, ...] | None
) -> None:
    from veca.kernels.fused_mlp import FusedTiling, fused_mlp, prefers_fused
    from veca.kernels.linear import moments

    norm, fc1 = layer(dim, 2 * channels)
    _, fc2 = layer(channels, dim)
    x = tokens(batch * count, dim).view(batch, count, dim)
    weights = interleave_swiglu(*folded(norm, fc1)), (fc2.weight, fc2.bias)
    chosen = FusedTiling(*tiling) if tiling else None  # type: ignore[arg-type]
    kept, whole = x.clone(), moments(x.flatten(0, 1))
    sums = torch.cat([0.25 * whole, 0.75 * whole])  # as two tiles of columns leave them
    out, found = fused_mlp(x, sums, *weights, norm.eps, cores, hidden, chosen)
    assert torch.equal(x, kept)
    u, v = fc1.double()(norm.double()(x.double())).chunk(2, dim=-1)
    gated = F.silu(u) * v
    gated[:, cores:, hidden:] = 0
    expected = x.double() + fc2.double()(gated)
    assert relative_error(out, expected) <= 1e-6
    rows = expected.flatten(0, 1)
    assert relative_error(found[0], torch.stack([rows.sum(1), rows.square().sum(1)])) <= 1e-6
    assert prefers_fused(dim, hidden) == (dim <= 192)
    assert not prefers_fused(96, hidden)
    assert not prefers_fused(448, hidden), "256 + 192: the rest is no power of two"


@interpreted
@pytest.mark.parametrize(("batch", "cores", "dim", "channels"), [(1, 1, 64, 64), (3, 13, 96, 128), (9, 64, 64, 192)])
def test_channels_of_the_cores_alone_match_float64(batch: int, cores: int, dim: int, channels: int) -> None:
    from veca.kernels.core_products import add_core_channels, core_channels
    from veca.kernels.linear import moments

    norm, fc1 = layer(dim, 2 * channels)
    _, fc2 = layer(channels + 64, dim)
    x = tokens(batch * (cores + 5), dim).view(batch, -1, dim)
    hidden = core_channels(
        x, moments(x.flatten(0, 1)), *interleave_swiglu(*folded(norm, fc1)), eps=norm.eps, cores=cores
    )
    u, v = fc1.double()(norm.double()(x[:, :cores].double())).chunk(2, dim=-1)
    gated = (F.silu(u) * v).flatten(0, 1)
    assert relative_error(hidden, gated) <= 2e-6
    expected = x.double()
    expected[:, :cores] += (gated @ fc2.weight[:, 64:].double().T).view(batch, cores, dim)
    add_core_channels(hidden, fc2.weight[:, 64:], x, cores)
    assert relative_error(x, expected) <= 1e-6


@interpreted
@pytest.mark.parametrize(
    ("cores", "grid", "heads", "width"), [(1, (1, 3), 2, 32), (8, (7, 19), 2, 32), (20, (5, 13), 1, 64)], ids=str
)
def test_projected_probabilities_match_float64(cores: int, grid: tuple[int, int], heads: int, width: int) -> None:
    from veca.kernels.core_products import core_projection, core_vectors
    from veca.kernels.few_cores import projected_probabilities
    from veca.kernels.linear import moments

    batch, dim, count = 2, heads * width, cores + math.prod(grid)
    (norm, qkv), (_, proj) = layer(dim, 3 * dim), layer(dim, dim)
    weight, bias = folded(norm, qkv)
    x, points = tokens(batch * count, dim).view(batch, count, dim), torch.rand(batch, cores, 2) * 2 - 1
    patch = make_rotary(patch_coordinates(*grid, points.device, points.dtype), width, 0.125)
    sums = moments(x.flatten(0, 1))
    core_qkv = core_projection(x, sums, weight, bias, norm.eps, cores)
    expected = qkv.double()(norm.double()(x.double())).unflatten(-1, (3, heads, width))
    assert relative_error(core_qkv, expected[:, :cores].flatten(0, 1).flatten(1)) <= 2e-6

    half, rotary = (weight[: 2 * dim], bias[: 2 * dim]), (points, patch.coordinates, patch.frequencies)
    asked, logits = projected_probabilities(x, sums, *half, norm.eps, core_qkv, heads, *rotary)
    core64, patch64 = (make_rotary(p.double(), width, 0.125) for p in (points[:, None], patch.coordinates))
    patch_to_core, core_to_all = core_probabilities(expected[:, :, :2], core64, patch64)
    assert relative_error(asked[:, cores:], patch_to_core) <= 5e-6
    assert relative_error((logits.double() * math.log(2)).softmax(-1), core_to_all) <= 5e-6

    averages = torch.randn(batch, heads * cores, dim)
    vectors = core_vectors(averages, core_qkv, (weight[2 * dim :], bias[2 * dim :]), proj.weight, heads)
    per_head = proj.weight.double().unflatten(1, (heads, width))
    own = torch.einsum("bchd,ohd->bhco", expected[:, :cores, 2], per_head).flatten(1, 2)
    values = averages.double().unflatten(1, (heads, cores)), weight[2 * dim :].double().unflatten(0, (heads, width))
    averaged = torch.einsum("bhck,hdk->bchd", *values) + bias[2 * dim :].double().unflatten(0, (heads, width))
    all_heads = torch.einsum("bchd,ohd->bco", averaged, per_head)
    assert relative_error(vectors, torch.cat([own, all_heads], dim=1)) <= 2e-6


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "float8"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("cores", "few"), [(64, False), (8, True)])
def test_gpu_widths_are_as_exact_as_the_plain_model(
    cores: int, few: bool, fused: bool, weights: fast_block.Weights | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(mlp_ratio=4.0, widths=WIDTHS, embed_dim=192, num_heads=3, depth=2).cuda()
    shortcut(monkeypatch, few)
    choose_mlp(monkeypatch, fused)
    fast, plain, found = veca.optimize(model, weights=weights), copy.deepcopy(model).bfloat16(), []
    for seed, width in itertools.product(range(4), (0.25, 0.5)):
        images = on_gpu(4, 144, 176, seed)
        expected = parts(exact(model, images, cores, width))
        with torch.no_grad(), use_kernel("sdpa"):
            outputs = [run(images.bfloat16(), cores, width=width) for run in (fast, plain)]
        found.append([errors(parts(out), expected) for out in outputs])
    mine, theirs = torch.tensor(found).mean(0)
    assert (mine <= (1.2 if weights is None else 20) * theirs).all(), (mine, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_gpu_replays_each_width_as_its_own_graph(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_mlp(monkeypatch, fused)
    model = make(mlp_ratio=4.0, widths=WIDTHS).cuda()
    fast, unrecorded = veca.optimize(model), veca.optimize(model, cuda_graphs=False)
    assert isinstance(fast, FastVeca)
    for seed in range(4):
        images = on_gpu(2, 80, 144, seed)
        for width, cls_only in itertools.product(WIDTHS, (False, True)):
            expected = unrecorded(images, 64, cls_only=cls_only, width=width)
            assert_same(fast(images, 64, cls_only=cls_only, width=width), expected)
    assert len(fast._graphs) == 2 * len(WIDTHS)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_gpu_compiles_for_no_batch_resolution_or_budget_of_a_width(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused MLP compiles for no width either."""
    knobs = pytest.importorskip("triton.knobs")
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *_, repr, **__: compiled.append(repr))
    choose_mlp(monkeypatch, fused)
    model = make(embed_dim=128, num_heads=4, depth=6, mlp_ratio=4.0, widths=WIDTHS).cuda()
    fast = veca.optimize(model, cuda_graphs=False)
    for cores, width in itertools.product((64, 48), (0.25,) if fused else WIDTHS):
        for batch, height, breadth in ((2, 128, 128), (3, 80, 144), (2, 256, 256), (16, 144, 240)):
            fast(on_gpu(batch, height, breadth), cores, width=width)
    assert compiled, "the hook is not called: nothing is counted"
    compiled.clear()
    for cores, width in itertools.product((64, 40, 56), WIDTHS):
        for batch, height, breadth in ((1, 64, 64), (5, 144, 80), (16, 48, 16)):
            fast(on_gpu(batch, height, breadth), cores, width=width)
    assert not compiled


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "cores"), [("veca_tiny", 8), ("veca_base", 32)])
def test_gpu_kernels_of_a_width_are_compiled_before_the_first_pass(
    name: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    model = veca.optimize(veca.create_model(name, widths=WIDTHS).cuda().eval())
    assert isinstance(model, FastVeca)
    model.compile_kernels(16, 256, cores, cls_only=True, width=0.25)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *_, repr, **__: compiled.append(repr))
    with torch.inference_mode():
        model(torch.rand(16, 3, 256, 256, device="cuda"), cores=cores, cls_only=True, width=0.25)
    assert compiled == []
