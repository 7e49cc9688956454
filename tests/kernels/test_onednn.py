"""Linear layers by oneDNN, against float64; and that they run only where nobody can ask for a gradient."""

from unittest.mock import Mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import veca
from veca.attention import use_kernel
from veca.block_ops import apply_linear, gated_linear
from veca.kernels.onednn import AVAILABLE, PackedWeights, inference_linear, inference_swiglu, supports_onednn

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs oneDNN on an x86 CPU")


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 34).requires_grad_(False)


@pytest.mark.parametrize("shape", [(48,), (1, 48), (3, 5, 48)])
def test_layers_are_those_of_torch(layer: nn.Linear, shape: tuple[int, ...]) -> None:
    x = 3 * torch.randn(shape)
    with torch.inference_mode():
        assert supports_onednn(x, layer.weight)
        found, gated = apply_linear(x, layer), gated_linear(x, layer)
    expected = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    u, v = expected.chunk(2, dim=-1)
    assert relative_error(found, expected) <= 3e-7
    assert relative_error(gated, F.silu(u) * v) <= 3e-7


@pytest.mark.parametrize("cores", [8, 64])
@pytest.mark.parametrize("cls_only", [False, True])
def test_a_model_has_the_features_of_the_reference(cores: int, cls_only: bool) -> None:
    torch.manual_seed(0)
    model, images = veca.create_model("veca_tiny").eval(), torch.randn(2, 3, 48, 80)
    with torch.inference_mode():
        found = model(images, cores, cls_only=cls_only)
    with torch.no_grad(), use_kernel("reference"):
        expected = model.double()(images.double(), cores, cls_only=cls_only)
    assert relative_error(found.cores, expected.cores) <= 1e-6
    assert relative_error(found.coordinates, expected.coordinates) <= 1e-6
    assert cls_only or relative_error(found.patches, expected.patches) <= 1e-6


@pytest.mark.parametrize("cores", [8, 64])
@pytest.mark.parametrize("cls_only", [False, True])
def test_packed_weights_give_the_same_features(cores: int, cls_only: bool) -> None:
    torch.manual_seed(0)
    model, other = (veca.create_model("veca_tiny").eval() for _ in range(2))
    packed = PackedWeights(model)
    for batch in (1, 3):
        images = torch.randn(batch, 3, 48, 80)
        with torch.inference_mode():
            expected, expected_other = model(images, cores, cls_only=cls_only), other(images, cores)
            for _ in range(2):
                with packed:
                    found, found_other = model(images, cores, cls_only=cls_only), other(images, cores)
                assert relative_error(found.cores, expected.cores) <= 1e-6
                assert cls_only or relative_error(found.patches, expected.patches) <= 1e-6
                assert torch.equal(found_other.cores, expected_other.cores)
    with torch.inference_mode():  # after the block weights may change
        model.blocks[0].mlp.fc1.weight.mul_(2)
        assert relative_error(model(images, cores).cores, expected.cores) > 1e-3


def test_packed_weights_are_those_of_the_model_alone(layer: nn.Linear) -> None:
    x, packed = torch.randn(2, 48), PackedWeights(layer)
    with torch.inference_mode(), packed:
        for factor in (1, 2, 3):  # new weights, that may come to lie where others were
            weight = layer.weight * factor
            expected = F.linear(x, weight, layer.bias)
            assert relative_error(inference_linear(x, weight, layer.bias), expected) <= 1e-6
        assert relative_error(inference_linear(x, layer.weight[:8], None), F.linear(x, layer.weight[:8])) <= 1e-6
        assert relative_error(inference_linear(x, layer.weight[8:16], None), F.linear(x, layer.weight[8:16])) <= 1e-6


def test_onednn_is_given_weights_without_gaps(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, given = torch.ops.mkldnn._linear_pointwise, list[Tensor]()
    spy = Mock(side_effect=lambda x, weight, *rest: (given.append(weight), operator(x, weight, *rest))[1])
    monkeypatch.setattr("veca.kernels.onednn.torch.ops.mkldnn._linear_pointwise", spy)
    x, part = torch.randn(2, 16), layer.weight[:, :16]
    with torch.inference_mode():
        assert relative_error(inference_linear(x, part, layer.bias), F.linear(x, part, layer.bias)) <= 1e-6
    assert [weight.is_contiguous() for weight in given] == [True]


def test_flops_are_counted(layer: nn.Linear) -> None:
    counter, x = FlopCounterMode(display=False), torch.randn(3, 48)
    with torch.inference_mode(), counter:
        inference_linear(x, layer.weight, layer.bias)
        inference_swiglu(x, *zip(layer.weight.chunk(2), layer.bias.chunk(2), strict=True))
        with PackedWeights(layer):
            inference_linear(x, layer.weight, layer.bias)
    assert counter.get_total_flops() == 3 * (2 * 3 * 48 * 34)


def test_hooks_see_the_layers(layer: nn.Linear) -> None:
    calls = list[tuple[int, ...]]()
    layer.register_forward_hook(lambda _, inputs, output: calls.append(tuple(output.shape)))
    with torch.inference_mode():
        apply_linear(torch.randn(2, 48), layer)
        gated_linear(torch.randn(2, 48), layer)
    assert calls == [(2, 34), (2, 34)]


def test_forward_derivatives_are_not_lost(layer: nn.Linear) -> None:
    x = torch.randn(2, 48)
    with torch.no_grad(), forward_ad.dual_level():
        out = apply_linear(forward_ad.make_dual(x, torch.ones_like(x)), layer)
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, layer.weight.sum(1).expand(2, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(layer: nn.Linear, dtype: torch.dtype) -> None:
    x = torch.randn(2, 48, dtype=dtype)
    with torch.inference_mode():
        assert torch.equal(apply_linear(x, layer.to(dtype)), F.linear(x, layer.weight, layer.bias))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert apply_linear(torch.randn(2, 48), layer.float()).dtype == torch.bfloat16
