"""The fast inference model: on a CPU through Triton's interpreter in float32, on a GPU as it is."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_tiny, relative_error
from interpreter import interpreted
from sample_images import random_images
from torch import Tensor, nn

import veca
from veca import fast_block, optimized
from veca.attention import core_probabilities, use_kernel
from veca.config import SWIGLU_GROUP
from veca.fast_block import fold_norm, interleave_swiglu, to_float8
from veca.inspect import core_maps
from veca.model import VecaOutput
from veca.optimized import FastVeca
from veca.outputs import PackedOutput
from veca.rope import grid_rotary, make_rotary, patch_coordinates


def make(**overrides: object) -> veca.Veca:
    """A tiny model whose biases and norms matter too, and which warns of no budget."""
    model = make_tiny(**{"budgets": tuple(range(1, 65)), **overrides})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name != "coordinate_alpha":
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def make_small(**overrides: object) -> veca.Veca:
    """Small enough for the interpreter: patches of 4 × 4 pixels in two blocks."""
    return make(**{"depth": 2, "patch_size": 4, **overrides})


def exact(model: veca.Veca, images: Tensor, cores: int) -> VecaOutput:
    """The definition in float64."""
    with torch.no_grad(), use_kernel("reference"):
        return copy.deepcopy(model).double()(images.double(), cores)


def parts(out: VecaOutput) -> list[Tensor]:
    """All that is to be compared of an output; of a short one, with the first core alone, what it has."""
    found = [out.cores, out.coordinates] if not out.patches.shape[1] else [out.cores, out.patches, out.coordinates]
    return found if out.logits is None else [*found, out.logits]


def shorten(out: VecaOutput) -> VecaOutput:
    """What `cls_only` leaves of an output."""
    return out._replace(cores=out.cores[:, :1], patches=out.patches[:, :0])


def errors(found: Iterable[Tensor], expected: Iterable[Tensor]) -> list[float]:
    pairs = list(zip(found, expected, strict=True))
    for a, b in pairs:
        assert a.shape == b.shape
    return [relative_error(a, b) for a, b in pairs]


def shortcut(monkeypatch: pytest.MonkeyPatch, on: bool) -> list[int]:
    """Switch the shortcut for few cores on or off for every budget; the list gets the budget whenever it is taken."""
    from veca.kernels import few_cores

    taken: list[int] = []

    def mix(*arguments: Any) -> Any:
        taken.append(arguments[-1])
        return original(*arguments)

    original = few_cores.mix_residual
    monkeypatch.setattr(few_cores, "mix_residual", mix)
    monkeypatch.setattr(fast_block, "FEW_CORES_MAX_RATIO", math.inf if on else 0.0)
    monkeypatch.setattr(fast_block, "FEW_CORES_MIN_TOKENS", 0)
    return taken


# The whole model in the interpreter.


class ReplayedCall:
    """In place of a CUDA graph, on a CPU: the call itself, on the same inputs each time."""

    def __init__(self, call: Any, inputs: Any, neighbour: Any) -> None:
        self.inputs, self.replay = inputs, functools.partial(call, inputs)


MIXES = [([(3, 2), (1, 1)], [8, 40]), ([(2, 5), (1, 3)], [13, 50])]
"""Grids and budgets of packs of one bucket."""


def pack_errors(model: veca.Veca, out: PackedOutput, images: list[Tensor], budgets: list[int], **options: Any) -> float:
    """The largest error of a pack against its images alone in float64."""
    exact_model, largest = copy.deepcopy(model).double(), 0.0
    for alone, image, budget in zip(out, images, budgets, strict=True):
        with torch.no_grad(), use_kernel("reference"):
            expected = exact_model(image[None].double(), budget, **options)
        pairs = (alone.cores, expected.cores), (alone.patches, expected.patches), (alone.logits, expected.logits)
        largest = max(largest, *(relative_error(found, wanted) for found, wanted in pairs))
    return largest


@interpreted
def test_packs_of_a_bucket_match_their_images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized, "Graph", ReplayedCall)
    model = make_small(num_classes=20, output_dim=48, widths=(1, 0.5))
    fast = FastVeca(model, torch.float32, None, True)
    for mix, width, cls_only in ((0, 0.5, False), (1, 1, True), (1, 1, False), (0, 1, False)):
        grids, budgets = MIXES[mix]
        images = [random_images(1, 4 * rows, 4 * columns, seed=rows)[0] for rows, columns in grids]
        with use_kernel("triton"):
            out = fast(veca.pack(images, patch_size=4), budgets, width=width, cls_only=cls_only)
        if cls_only:
            first = out.cls
            continue
        assert pack_errors(model, out, images, budgets, width=width) <= 5e-6
        if mix == width == 1:
            torch.testing.assert_close(out.cls, first)
    assert len(fast._graphs) == 1


@interpreted
@pytest.mark.parametrize(
    ("cores", "size", "few", "overrides"),
    [
        (1, (3, 8, 12), False, {}),
        (1, (1, 12, 8), True, {}),
        (8, (2, 8, 20), False, {"mlp_ratio": 90 / 64}),  # not a multiple of half a tile
        (8, (3, 12, 8), True, {"output_dim": 48, "num_classes": 5}),
        (13, (1, 20, 8), False, {"output_dim": 48, "num_classes": 5}),
        (13, (2, 4, 4), True, {}),
        (24, (1, 8, 8), False, {"depth": 1, "num_heads": 1}),
        (24, (1, 8, 20), True, {"mlp_ratio": 90 / 64}),
        (64, (1, 8, 12), False, {}),
        (64, (1, 12, 8), True, {"depth": 1}),
    ],
    ids=str,
)
def test_optimized_features_match_float64(
    cores: int, size: tuple[int, int, int], few: bool, overrides: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = make_small(**overrides), random_images(*size)
    assert ("mlp_ratio" in overrides) == (model.config.mlp_dim == 90)
    taken = shortcut(monkeypatch, few)
    found = FastVeca(model, torch.float32, None, False)(images, cores)
    assert taken == [cores] * (model.config.depth if few else 0)
    expected = exact(model, images, cores)
    assert found.grid == expected.grid
    assert max(errors(parts(found), parts(expected))) <= 3e-6


@interpreted
@pytest.mark.parametrize(
    ("cores", "size", "few", "overrides"),
    [
        (1, (3, 8, 12), False, {}),
        (13, (1, 12, 8), False, {"output_dim": 48, "num_classes": 5}),
        (24, (2, 8, 8), True, {"mlp_ratio": 90 / 64}),
    ],
    ids=str,
)
def test_same_global_feature_alone(
    cores: int, size: tuple[int, int, int], few: bool, overrides: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = make_small(**overrides), random_images(*size)
    taken = shortcut(monkeypatch, few)
    found = FastVeca(model, torch.float32, None, False)(images, cores, cls_only=True)
    assert taken == [cores] * few
    assert max(errors(parts(found), parts(shorten(exact(model, images, cores))))) <= 3e-6


@interpreted
def test_same_features_by_the_names_timm_and_dinov3_users_know() -> None:
    model, images = make_small(embed_dim=32, num_heads=1, output_dim=48), random_images(2, 8, 12)
    fast = FastVeca(model, torch.float32, None, False)
    assert isinstance(fast, veca.Veca)
    with torch.no_grad(), use_kernel("sdpa"):
        assert relative_error(fast.forward_features(images, 8), model.forward_features(images, 8)) <= 3e-6
        asked = {"return_prefix_tokens": True, "norm": True, "cores": 8}
        (last, found), (expected_last, expected) = (m.forward_intermediates(images, **asked) for m in (fast, model))
        assert len(found) == len(expected) == 2
        for a, b in zip([last, *sum(found, ())], [expected_last, *sum(expected, ())], strict=True):
            assert a.shape == b.shape
            assert relative_error(a, b) <= 3e-6
        a, b = (m.get_intermediate_layers(images, [0], reshape=True, norm=False, cores=13)[0] for m in (fast, model))
        assert a.shape == b.shape == (2, 32, 2, 3)
        assert relative_error(a, b) <= 3e-6


@interpreted
def test_takes_what_the_model_takes() -> None:
    """Images of any float type, anywhere in memory; a bad size or budget is the same error."""
    model, images = make_small(depth=1), random_images(1, 8, 8)
    fast = FastVeca(model, torch.float32, None, False)
    expected = fast(images, 1).patches
    laid_out = torch.cat([images.double(), images.double()], dim=3)[..., :8].to(memory_format=torch.channels_last)
    assert torch.equal(fast(laid_out, 1).patches, expected)
    with pytest.raises(ValueError, match="image is 8×10; sides must be multiples of 4"):
        fast(torch.zeros(1, 3, 8, 10), 1)
    with pytest.raises(ValueError, match="cores=65; a budget is an integer from 1 to 64"):
        fast(images, 65)


@interpreted
def test_takes_compute_by_the_table_of_the_model() -> None:
    model, images = make_small(depth=1), random_images(1, 16, 16)
    rows = [(64, 16, 4.0, 1.0), (8, 16, 3.0, 0.9), (64, 8, 1.0, 0.8)]
    settings = [{"cores": c, "size": s, "gflops": cost, "quality": quality} for c, s, cost, quality in rows]
    model.provenance = {"quality_cost": {"settings": settings}}
    fast = FastVeca(model, torch.float32, None, False)
    assert torch.equal(fast(images, compute=0.75).patches, fast(images, 8).patches)
    assert fast(images, compute=0.25, resize=True).grid == (2, 2)


@interpreted
def test_does_not_change_with_the_model_it_was_made_from() -> None:
    model, images = make_small(embed_dim=32, num_heads=1), random_images(1, 8, 8)
    fast = FastVeca(model, torch.float32, None, False)
    before = parts(fast(images, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(a, b) for a, b in zip(parts(fast(images, 8)), before, strict=True))


@interpreted
def test_an_empty_batch_is_no_error() -> None:
    model = make_small(depth=1)
    assert FastVeca(model, torch.float32, None, False)(random_images(0, 8, 8), 8).patches.shape == (0, 4, 64)


@interpreted
def test_any_patch_size_is_supported() -> None:
    model, images = make_small(depth=1, patch_size=5), random_images(1, 10, 15)
    found = FastVeca(model, torch.float32, None, False)(images, 8)
    assert max(errors(parts(found), parts(exact(model, images, 8)))) <= 3e-6


# The kernels in the interpreter, against torch in float64.


def layer(inputs: int, outputs: int) -> tuple[nn.LayerNorm, nn.Linear]:
    torch.manual_seed(inputs + outputs)
    norm, linear = nn.LayerNorm(inputs), nn.Linear(inputs, outputs)
    with torch.no_grad():
        norm.weight += 0.3 * torch.randn(inputs)
        norm.bias += 0.3 * torch.randn(inputs)
    return norm.requires_grad_(False), linear.requires_grad_(False)


def tokens(rows: int, width: int) -> Tensor:
    """Rows with a mean, as a residual stream has."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)) * 2 + 0.5


def folded(norm: nn.LayerNorm, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    weight, bias = fold_norm(norm, linear)
    return weight.float(), bias.float()


@interpreted
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "tiling"),
    [(5, 64, 64, None), (130, 96, 200, None), (257, 48, 260, None), (130, 64, 300, "WIDE_TILES")],
    ids=str,
)
def test_linear_and_the_norm_before_it(rows: int, inputs: int, outputs: int, tiling: str | None) -> None:
    from veca.kernels import linear as kernels

    (norm, linear), x = layer(inputs, outputs), tokens(rows, inputs)
    chosen = getattr(kernels, tiling) if tiling else None
    expected = linear.double()(x.double())
    linear.float()
    assert relative_error(kernels.linear(x, linear.weight, linear.bias, tiling=chosen), expected) <= 1e-6
    sums = kernels.moments(x)
    assert sums.shape == (1, 2, rows)
    assert relative_error(sums[0], torch.stack([x.double().sum(1), x.double().square().sum(1)])) <= 1e-6
    weight, bias = folded(norm, linear)
    found = kernels.linear(x, weight, bias, moments=sums, eps=norm.eps, tiling=chosen)
    assert relative_error(found, linear.double()(norm.double()(x.double()))) <= 2e-6


@interpreted
@pytest.mark.parametrize(("rows", "inputs", "hidden"), [(5, 64, 64), (131, 48, 90), (130, 64, 150)])
def test_linear_and_the_gate_after_it(rows: int, inputs: int, hidden: int) -> None:
    from veca.kernels.linear import linear as kernel
    from veca.kernels.linear import moments

    (norm, linear), x = layer(inputs, 2 * hidden), tokens(rows, inputs)
    weight, bias = interleave_swiglu(*folded(norm, linear))
    found = kernel(x, weight, bias, moments=moments(x), eps=norm.eps, swiglu=True)
    u, v = linear.double()(norm.double()(x.double())).chunk(2, dim=-1)
    assert relative_error(found[:, :hidden], F.silu(u) * v) <= 2e-6
    assert found.shape == (rows, math.ceil(hidden / SWIGLU_GROUP) * SWIGLU_GROUP)
    assert not found[:, hidden:].any(), "the padding must add nothing to the layer behind it"


@interpreted
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "tiling"),
    [(5, 64, 64, None), (130, 48, 96, None), (257, 64, 200, None), (130, 64, 512, "WIDE_TILES")],
    ids=str,
)
def test_linear_and_the_sum_after_it(rows: int, inputs: int, outputs: int, tiling: str | None) -> None:
    from veca.kernels import linear as kernels

    (_, linear), x, residual = layer(inputs, outputs), tokens(rows, inputs), tokens(rows, outputs)
    kept, chosen = residual.clone(), getattr(kernels, tiling) if tiling else None
    out, sums = kernels.linear_residual(x, linear.weight, linear.bias, residual, tiling=chosen)
    expected = residual.double() + linear.double()(x.double())
    assert relative_error(out, expected) <= 1e-6
    assert torch.equal(residual, kept)
    assert relative_error(sums.sum(0), torch.stack([expected.sum(1), expected.square().sum(1)])) <= 1e-6
    # And a norm takes the moments, however many tiles of columns left them.
    assert sums.shape == (math.ceil(outputs / (256 if tiling else 128)), 2, rows)
    norm, after = layer(outputs, 32)
    found = kernels.linear(out, *folded(norm, after), moments=sums, eps=norm.eps)
    assert relative_error(found, after.double()(norm.double()(expected))) <= 2e-6


@interpreted
def test_linear_in_float8_is_close_to_float64() -> None:
    from veca.kernels.linear import linear as kernel
    from veca.kernels.linear import quantize_normalized

    (norm, linear), x = layer(96, 200), tokens(130, 96) * torch.logspace(-3, 3, 130)[:, None]
    values, scale = quantize_normalized(x, norm.eps)
    assert values.dtype == torch.float8_e4m3fn
    assert relative_error(values.float() * scale[:, None], F.layer_norm(x, (96,), eps=norm.eps)) <= 0.08
    weight, bias = folded(norm, linear)
    rounded, weight_scale = to_float8(weight)
    found = kernel(values, rounded, bias, scales=(scale, weight_scale), dtype=torch.float32)
    expected = (values.double() * scale[:, None]) @ (rounded.double() * weight_scale[:, None]).T + bias
    assert relative_error(found, expected) <= 1e-6
    assert relative_error(found, linear(norm(x))) <= 0.1


@interpreted
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (7, 96), (6, 100)])
def test_layer_norm_kernel_matches_float64(rows: int, width: int) -> None:
    from veca.kernels.linear import layer_norm as kernel

    (norm, _), x = layer(width, 1), tokens(rows, width) + 30
    found = kernel(x, norm.weight, norm.bias, norm.eps)
    assert relative_error(found, norm.double()(x.double())) <= 3e-6


@interpreted
def test_a_row_without_variance_is_no_error() -> None:
    """The variance is a difference of large numbers there, and must not come out below zero."""
    from veca.kernels.linear import linear as kernel
    from veca.kernels.linear import moments

    norm, linear = layer(96, 32)
    x = torch.linspace(-300, 300, 40)[:, None].expand(40, 96).contiguous()
    found = kernel(x, *folded(norm, linear), moments=moments(x), eps=norm.eps)
    assert found.isfinite().all()


@interpreted
@pytest.mark.parametrize(
    ("layout", "patch"), [("contiguous", 4), ("contiguous", 6), ("channels last", 4), ("slice", 4), ("one for all", 3)]
)
def test_patchify_matches_unfold_in_any_layout(layout: str, patch: int) -> None:
    from veca.kernels.linear import patchify

    images = random_images(2, 2 * patch, 3 * patch)
    if layout == "channels last":
        images = images.to(memory_format=torch.channels_last)
    elif layout == "slice":
        images = torch.cat([images, images], dim=3)[:, :, :, 5 : 5 + 3 * patch]
    elif layout == "one for all":
        images = images[:1].expand(2, -1, -1, -1)
    assert images.is_contiguous() == (layout == "contiguous")
    out, width = patchify(images, patch, 5, torch.float32), 3 * patch**2
    for sign in (1, -1):
        if sign < 0:
            assert patchify(-images, patch, 5, torch.float32, out=out) is out
        assert torch.equal(out[:, 5:, :width], F.unfold(sign * images, patch, stride=patch).mT)
        assert not out[:, :5].any()
        assert not out[:, :, width:].any()
        assert out.shape[2] % 8 == 0


@interpreted
def test_patchify_of_a_wide_picture() -> None:
    """More patches in a row than a program takes at a time."""
    from veca.kernels.linear import patchify

    images = random_images(1, 4, 4 * 67)[:, :1]
    assert torch.equal(patchify(images, 4, 0, torch.float32), F.unfold(images, 4, stride=4).mT)


@interpreted
@pytest.mark.parametrize(("cores", "grid", "width"), [(1, (1, 3), 32), (8, (7, 10), 32), (20, (5, 13), 64)], ids=str)
def test_logits_and_averaging_weights_match_float64(cores: int, grid: tuple[int, int], width: int) -> None:
    from veca.kernels.few_cores import averaging_weights, core_logits

    torch.manual_seed(cores)
    batch, heads, patches, dim = 2, 2, math.prod(grid), 2 * width
    qk = torch.randn(batch, cores + patches, 2, heads, width)
    points = torch.rand(batch, cores, 2) * 2 - 1
    patch = make_rotary(patch_coordinates(*grid, points.device, points.dtype), width, 0.125)
    q, k = qk.unbind(2)
    logits = core_logits(q[:, :cores], k, points, patch.coordinates, patch.frequencies)
    assert logits.shape == (batch, heads * cores, cores + patches)
    core64, patch64 = (make_rotary(p.double(), width, 0.125) for p in (points[:, None], patch.coordinates))
    core_to_all = core_probabilities(qk.double(), core64, patch64)[1]
    assert relative_error((logits.double() * math.log(2)).softmax(-1), core_to_all) <= 2e-6

    first = core_logits(q[:, :1], k, points, patch.coordinates, patch.frequencies)
    assert relative_error(first, logits.unflatten(1, (heads, cores))[:, :, 0]) <= 1e-6

    # Averages are of normed tokens, without the mean: the value projection behind takes that out.
    x, eps = tokens(batch * (cores + patches), dim).view(batch, -1, dim), 1e-3
    sums = torch.stack([x.flatten(0, 1).sum(1), x.flatten(0, 1).square().sum(1)])
    shares = torch.stack([0.25 * sums, 0.75 * sums])  # as two tiles of columns leave them
    weights = averaging_weights(logits, shares, dim, eps, torch.float32)
    variance = x.double().var(-1, correction=0)[:, None]
    assert relative_error(weights, core_to_all * (variance + eps).rsqrt()) <= 2e-6


@interpreted
@pytest.mark.parametrize(("cores", "patches", "heads", "dim"), [(1, 3, 2, 64), (13, 70, 2, 96), (8, 9, 3, 100)])
def test_mix_residual_matches_float64(cores: int, patches: int, heads: int, dim: int) -> None:
    from veca.kernels.few_cores import mix_residual

    torch.manual_seed(cores)
    batch, width = 2, heads * cores
    probabilities = torch.rand(batch, cores + patches, width)
    probabilities[:, :cores] = math.nan  # left open by the kernel before
    vectors, bias = torch.randn(batch, width + cores, dim), torch.randn(dim)
    x = tokens(batch * (cores + patches), dim).view(batch, -1, dim)
    out, sums = mix_residual(probabilities, vectors, bias, x, cores)
    mixed = probabilities[:, cores:].double() @ vectors[:, :width].double()
    expected = x.double() + torch.cat([vectors[:, width:].double(), mixed], dim=1) + bias.double()
    assert relative_error(out, expected) <= 1e-6
    assert sums.shape == (1, 2, batch * (cores + patches))
    rows = expected.flatten(0, 1)
    assert relative_error(sums[0], torch.stack([rows.sum(1), rows.square().sum(1)])) <= 1e-6


@interpreted
@pytest.mark.parametrize("cores", [1, 7, 16])
def test_cores_move_as_in_the_model(cores: int) -> None:
    from veca.kernels.coordinates import move_cores

    model = make(depth=2)
    head, alpha = model.coordinate_heads[0].requires_grad_(False), model.coordinate_alpha.detach()[0]
    x, start = tokens(2 * (cores + 5), 64).view(2, -1, 64), torch.cat(list(model.core_states)).detach()[:cores]
    state, coordinates = move_cores(x, cores, start, None)
    assert torch.equal(state, start.expand(2, -1, -1))
    torch.testing.assert_close(coordinates, start.tanh().expand(2, -1, -1), rtol=0, atol=2e-7)
    for _ in range(2):  # from a state that all images share, then from each one's own
        expected = state + alpha * head(x[:, :cores])
        state, coordinates = move_cores(x, cores, state, (head.weight, head.bias, alpha))
        torch.testing.assert_close(state, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(coordinates, expected.tanh(), rtol=0, atol=1e-6)


@interpreted
def test_cores_stay_inside_the_picture() -> None:
    """Far out, the exponential overflows; its tanh must not."""
    from veca.kernels.coordinates import move_cores

    far = torch.tensor([[-1e4, 1e4], [50.0, -50.0], [0.0, 1e-6]])
    _, coordinates = move_cores(torch.zeros(1, 3, 64), 3, far, None)
    torch.testing.assert_close(coordinates[0], far.tanh(), rtol=1e-6, atol=2e-7)


# What is done to the weights beforehand.


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (48, 7)])
def test_fold_norm_leaves_one_factor_per_row(inputs: int, outputs: int) -> None:
    (norm, linear), x = layer(inputs, outputs), tokens(9, inputs).double()
    weight, bias = fold_norm(norm, linear)
    sigma = (x.var(1, correction=0, keepdim=True) + norm.eps).sqrt()
    found = x @ weight.T / sigma + bias
    torch.testing.assert_close(found, linear.double()(norm.double()(x)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("hidden", [1, 64, 90, 128, 2730])
def test_interleave_swiglu_alternates_groups_of_rows(hidden: int) -> None:
    weight, bias = torch.randn(2 * hidden, 5), torch.randn(2 * hidden)
    paired, paired_bias = interleave_swiglu(weight, bias)
    turns = math.ceil(hidden / 64)
    assert paired.shape == (2 * turns * 64, 5)
    for rows, found in ((weight, paired), (bias, paired_bias)):
        u, v = found.view(turns, 2, 64, -1).transpose(0, 1).flatten(1, 2)
        for mine, theirs in zip((u, v), rows.view(2, hidden, -1), strict=True):
            assert torch.equal(mine[:hidden], theirs)
            assert not mine[hidden:].any()


def test_to_float8_scales_rows_to_its_range() -> None:
    weight = torch.randn(6, 512) * torch.logspace(-6, 3, 6)[:, None]
    weight[3] = 0
    values, scale = to_float8(weight)
    assert values.dtype == torch.float8_e4m3fn
    found = values.float() * scale[:, None]
    assert found.isfinite().all()
    assert not found[3].any()
    for a, b in zip(found, weight, strict=True):
        assert relative_error(a, b) <= 0.03  # three bits: at most 1/16, on average half of that


# A CPU without the interpreter.


def state_of(model: veca.Veca) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_cpu_model_is_the_same_and_serves_every_batch_and_resolution() -> None:
    """The one test that turns a model into machine code."""
    torch.compiler.reset()
    model = make(embed_dim=32, num_heads=1, depth=2, num_classes=3)
    before = state_of(model)
    fast = veca.optimize(model.train())
    assert model.training
    assert not fast.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.eval()
    with torch.no_grad():
        for batch, height, width in [(2, 32, 48), (3, 48, 64)]:  # the second shows that sizes vary
            images = random_images(batch, height, width)
            assert max(errors(parts(fast(images, 24)), parts(model(images, 24)))) <= 5e-6
        with torch.compiler.set_stance("fail_on_recompile"):
            for batch, height, width in [(5, 80, 32), (2, 64, 64), (7, 32, 112)]:
                images = random_images(batch, height, width)
                found, expected = fast(images, 24), model(images, 24)
                assert found.grid == expected.grid
                assert max(errors(parts(found), parts(expected))) <= 5e-6


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are traced as for compiling, but not turned into machine code."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def test_cpu_model_serves_every_budget(uncompiled: None) -> None:
    model = make(depth=1)
    fast = veca.optimize(model)
    with torch.no_grad():
        for cores in (48, 8):  # many and few, neither a width of the model
            fast(random_images(3, 32, 48), cores)
        with torch.compiler.set_stance("fail_on_recompile"):
            for cores in (40, 4, 24, 13, 64):
                images = random_images(4, 48, 64, seed=cores)
                assert max(errors(parts(fast(images, cores)), parts(model(images, cores)))) <= 5e-6


def test_cpu_model_takes_compute(uncompiled: None) -> None:
    model, images = make(depth=1), random_images(2, 64, 64)
    fast, share = veca.optimize(model), veca.resolve_compute(model, 0.6, 64)
    with torch.no_grad():
        found, expected = fast(images, compute=0.6), model(images, share.cores)
    assert share.cores < 64
    assert max(errors(parts(found), parts(expected))) <= 5e-6


def test_a_copy_of_its_own() -> None:
    model = make(depth=2).double().train()
    model.blocks[0].requires_grad_(False)
    before, gradients = state_of(model), [p.requires_grad for p in model.parameters()]
    fast = veca.optimize(model)
    assert type(fast) is veca.Veca
    assert {p.dtype for p in fast.parameters()} == {torch.float32}
    assert not fast.training
    assert not any(p.requires_grad for p in fast.parameters())
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.zero_()
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == gradients
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert {p.dtype for p in veca.optimize(model, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_what_optimize_cannot_do_is_named(tmp_path: Path) -> None:
    model = make_tiny()
    for weights in ("float8", "int3"):
        with pytest.raises(
            ValueError, match=f"weights='{weights}' in torch.float32 on cpu: the only choice is 'float8', in"
        ):
            veca.optimize(model, weights=weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the model is on the meta device and has no weights; load them first"):
        veca.optimize(copy.deepcopy(model).to("meta"))
    fast = FastVeca(model, torch.float32, None, False)
    for use in (fast.state_dict, functools.partial(veca.save, fast, tmp_path / "model")):
        with pytest.raises(ValueError, match="has no weights to save: save the model it was made from"):
            use()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="keeps no attention; give the model it was made from"):
        core_maps(fast, random_images(1, 32, 32))


def test_cpu_model_can_be_saved(tmp_path: Path) -> None:
    model = make_tiny()
    veca.save(veca.optimize(model), tmp_path / "model")
    for a, b in zip(veca.load(tmp_path / "model").parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


# From here on the GPU. A kernel takes seconds to compile, so the models share one width.

SIZE = (2, 80, 144)
"""Batch, height and width of most images here: 45 patches, no whole tile."""


def on_gpu(batch: int, height: int, width: int, seed: int = 1) -> Tensor:
    return random_images(batch, height, width, seed).cuda()


def compare(model: veca.Veca, fast: veca.Veca, dtype: torch.dtype, cores: int, seeds: int = 6) -> Tensor:
    """Mean errors of the fast and of the plain model in half precision: (2, parts), of cores, patches, coordinates."""
    plain, found = copy.deepcopy(model).to(dtype), []
    for seed in range(seeds):
        images = on_gpu(4, 144, 176, seed)
        expected = parts(exact(model, images, cores))
        with torch.no_grad(), use_kernel("sdpa"):
            found.append([errors(parts(run(images.to(dtype), cores)), expected) for run in (fast, plain)])
    return torch.tensor(found).mean(0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cores", "few"), [(64, False), (24, False), (24, True), (8, False), (8, True)])
def test_gpu_is_as_exact_as_the_plain_model(
    dtype: torch.dtype, cores: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make().cuda()
    taken = shortcut(monkeypatch, few)
    fast = veca.optimize(model, dtype=dtype)
    assert isinstance(fast, FastVeca)
    mine, theirs = compare(model, fast, dtype, cores)
    assert bool(taken) == few
    assert (mine <= 1.2 * theirs).all(), (mine, theirs)
    assert (mine < (0.1 if dtype == torch.bfloat16 else 0.015)).all(), mine


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cores", "few"), [(64, False), (8, True)])
def test_gpu_global_feature_alone_is_as_exact_as_the_plain_model(
    dtype: torch.dtype, cores: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(num_classes=16).cuda()
    shortcut(monkeypatch, few)
    fast, plain, found = veca.optimize(model, dtype=dtype), copy.deepcopy(model).to(dtype), []
    for seed in range(12):  # one core per image is not much to average over
        images = on_gpu(4, 144, 176, seed)
        expected = parts(shorten(exact(model, images, cores)))
        with torch.no_grad(), use_kernel("sdpa"):
            short, whole = fast(images, cores, cls_only=True), shorten(plain(images.to(dtype), cores))
        found.append([errors(parts(out), expected) for out in (short, whole)])
    mine, theirs = torch.tensor(found).mean(0)
    assert (mine <= 1.2 * theirs).all(), (mine, theirs)


@pytest.mark.gpu
def test_gpu_takes_a_width_of_the_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(embed_dim=1024, num_heads=16, depth=1, mlp_ratio=2.66667).cuda()
    assert model.config.mlp_dim == 2730
    for cores, few in ((64, False), (8, True)):
        shortcut(monkeypatch, few)
        mine, theirs = compare(model, veca.optimize(model), torch.bfloat16, cores, seeds=1)
        assert (mine <= 1.2 * theirs + 1e-6).all(), (cores, mine, theirs)  # coordinates do not move: no error at all


@pytest.mark.gpu
def test_gpu_same_features_by_the_names_timm_and_dinov3_users_know() -> None:
    model = make(output_dim=48).cuda()
    fast, images = veca.optimize(model), on_gpu(*SIZE)
    for _ in range(3):  # recorded or not
        assert relative_error(fast.forward_features(images, 64), model.forward_features(images, 64)) <= 0.1
    asked = {"return_prefix_tokens": True, "cores": 64}
    (last, found), (expected_last, expected) = (m.forward_intermediates(images, **asked) for m in (fast, model))
    for a, b in zip([last, *sum(found, ())], [expected_last, *sum(expected, ())], strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) <= 0.1


def assert_same(found: VecaOutput, expected: VecaOutput) -> None:
    assert max(errors(parts(found), parts(expected))) <= 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("cls_only", [False, True])
def test_gpu_replays_are_right_and_leave_earlier_results_alone(cls_only: bool) -> None:
    model = make(num_classes=16).cuda()
    fast, unrecorded = veca.optimize(model), veca.optimize(model, cuda_graphs=False)
    assert isinstance(fast, FastVeca)
    assert isinstance(unrecorded, FastVeca)
    images = [on_gpu(*SIZE, seed=seed) for seed in range(5)]
    images[3] = images[3].to(memory_format=torch.channels_last)
    images[4] = images[4].half()
    found, copies = [], []
    for i, one in enumerate(images):  # the first as it comes, the second recorded, the others replayed
        with torch.inference_mode(i == 1 or i == 3):
            out = fast(one, 64, cls_only=cls_only)
        assert len(fast._graphs) == (i > 0)
        found.append(out)
        copies.append([part.clone() for part in parts(out)])
    for one, out, kept in zip(images, found, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(parts(out), kept, strict=True))
        assert_same(out, unrecorded(one, 64, cls_only=cls_only))
    assert not unrecorded._graphs
    assert relative_error(found[3].cores, found[2].cores) > 0.1, "another image is another result"


def test_graphs_are_recorded_for_shapes_that_come_often() -> None:
    cache, recorded = optimized.GraphCache(), list[Any]()

    def call(shape: Any) -> bool:
        return cache.find(shape, lambda other: recorded.append(shape) or graph) is not None  # type: ignore[func-returns-value]

    graph: Any = object()
    assert [call("a"), call("a"), call("a"), call("b")] == [False, True, True, False]
    for _ in range(10):  # more shapes than are kept: none is recorded twice
        replayed = [call(shape) for shape in range(20)]
    assert replayed == [True] * 16 + [False] * 4
    assert recorded == ["a", *range(16)]  # the last in place of "a", which is no longer in use
    for _ in range(100):
        call("c")
    for shape in range(3):  # graphs that are not in use make room
        assert [call(f"new {shape}"), call(f"new {shape}")] == [False, True]
    assert len(cache) == optimized.MAX_GRAPHS
    assert not any(call(shape) for _ in range(3) for shape in range(1000, 1100))  # shapes that come seldom


@pytest.mark.gpu
def test_gpu_replays_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized, "MAX_GRAPHS", 2)
    model = make().cuda()
    fast, unrecorded = veca.optimize(model), veca.optimize(model, cuda_graphs=False)
    assert isinstance(fast, FastVeca)
    shapes: list[tuple[int, int, int, int]] = [(2, 80, 144, 64), (3, 80, 144, 64), (2, 144, 80, 64), (2, 80, 144, 40)]
    for seed in range(4):
        for batch, height, width, cores in [*shapes, shapes[0]]:
            images = on_gpu(batch, height, width, seed)
            assert_same(fast(images, cores), unrecorded(images, cores))
    assert len(fast._graphs) == 2
    fast._graphs.clear()
    images = on_gpu(*SIZE, seed=9)
    for _ in range(2):
        assert_same(fast(images, 64), unrecorded(images, 64))


@pytest.mark.gpu
def test_gpu_replay_does_not_need_what_others_may_drop() -> None:
    """Tables of a grid are kept for a few grids only: a recorded call must hold its own."""
    model = make().cuda()
    fast, images = veca.optimize(model), on_gpu(*SIZE)
    for _ in range(2):
        expected = fast(images, 64)
    for columns in range(20, 40):
        grid_rotary(1, columns, 32, 0.125, images.device, torch.float32)
    torch.cuda.synchronize()
    held = [torch.full((count,), math.nan, device="cuda") for count in (8, 45, 90, 256, 720) for _ in range(500)]
    assert_same(fast(images, 64), expected)
    assert held


@pytest.mark.gpu
def test_gpu_compiles_for_no_batch_resolution_or_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once whole and broken tiles of patches and of cores have been seen, few and many, with one chunk of cores."""
    knobs = pytest.importorskip("triton.knobs")
    compiled: list[str] = []

    def count(*_: object, **about: object) -> None:
        compiled.append(str(about.get("repr")))

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", count)
    fast = veca.optimize(make(embed_dim=96, num_heads=3, depth=6).cuda(), cuda_graphs=False)  # a width of its own
    for cores in (64, 48):
        for batch, height, width in ((2, 128, 128), (3, 80, 144), (2, 256, 256), (3, 144, 240)):
            fast(on_gpu(batch, height, width), cores)
    assert compiled, "the hook is not called: nothing is counted"
    compiled.clear()
    for cores in (64, 40, 56):
        for batch, height, width in ((1, 64, 64), (5, 144, 80), (1, 384, 512), (3, 16, 32), (16, 48, 16)):
            fast(on_gpu(batch, height, width), cores)
    assert not compiled


@pytest.mark.gpu
def test_gpu_float8_is_less_exact_and_not_far_off(capsys: pytest.CaptureFixture[str]) -> None:
    model = make().cuda()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.ndim == 2:
                parameter *= 0.7  # errors neither grow nor fade from block to block
    half, eighth = (compare(model, veca.optimize(model, weights=w), torch.bfloat16, 64)[0] for w in (None, "float8"))
    with capsys.disabled():
        print(f"\nerrors of cores, patches, coordinates: {half.tolist()} in bfloat16, {eighth.tolist()} in float8")
    assert (eighth > 1.2 * half).all()
    assert (eighth < 0.15).all()


@pytest.mark.gpu
def test_gpu_what_optimize_cannot_do_is_named() -> None:
    model = make().cuda()
    with pytest.raises(ValueError, match="weights='int3' in torch.bfloat16 on cuda: the only choice is 'float8'"):
        veca.optimize(model, weights="int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no weights to save"):
        veca.optimize(model).state_dict()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_model_is_left_as_it_is_and_so_is_the_copy(dtype: torch.dtype) -> None:
    model = make().cuda().to(dtype).train()
    before, images = state_of(model), on_gpu(*SIZE)
    fast = veca.optimize(model)
    expected = fast(images, 64)
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for _ in range(2):
        assert_same(fast(images, 64), expected)


@interpreted
def test_compiling_runs_all_kernels_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's interpreter takes one thread.
    monkeypatch.setattr(optimized, "ThreadPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    fast, images = FastVeca(make_small(), torch.float32, None, False), random_images(2, 8, 8)
    before = fast(images, 8, cls_only=True).cls
    fast.compile_kernels(2, 8, 8, cls_only=True)
    assert torch.equal(fast(images, 8, cls_only=True).cls, before)


@pytest.mark.gpu
def test_kernels_are_compiled_before_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a pass needs: it compiles nothing more."""
    import triton

    model = veca.optimize(veca.create_model("veca_tiny").cuda().eval(), dtype=torch.bfloat16)
    model.compile_kernels(16, 256, cores=32, cls_only=True)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *_, repr, **__: compiled.append(repr))
    with torch.inference_mode():
        model(torch.rand(16, 3, 256, 256, device="cuda"), cores=32, cls_only=True)
    assert compiled == []
