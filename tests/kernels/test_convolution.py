"""`veca.kernels.convolution` and the teachers that run by it, against PyTorch's convolutions in float64."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpreted
from torch import Tensor, nn

from veca.attention import use_kernel
from veca.teachers.mobile import FirstConvolution, MobileBlock, Pointwise, fuse_mobile_network, is_dense


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def convolve(maps: Tensor, weight: Tensor, bias: Tensor, stride: int, groups: int = 1) -> Tensor:
    """relu6 of a convolution of (B, c, H, W), padded by timm as TensorFlow pads, as (B, rows, columns, outputs)."""
    same = pytest.importorskip("timm.layers").conv2d_same
    out: Tensor = same(maps.double(), weight.double(), bias.double(), (stride, stride), (0, 0), (1, 1), groups)
    return out.clamp(0, 6).permute(0, 2, 3, 1)


@interpreted
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [3, 5])
@pytest.mark.parametrize(("rows", "columns", "channels"), [(9, 17, 24), (10, 20, 40), (1, 3, 33)], ids=str)
def test_depthwise_matches_float64(rows: int, columns: int, channels: int, side: int, stride: int) -> None:
    from veca.kernels.convolution import launch_depthwise

    torch.manual_seed(rows)
    x, weight, bias = (
        torch.randn(2, rows, columns, channels),
        torch.randn(channels, 1, side, side),
        torch.randn(channels),
    )
    out = launch_depthwise(x, weight[:, 0].permute(1, 2, 0).contiguous(), bias, stride)
    assert relative_error(out, convolve(x.permute(0, 3, 1, 2), weight, bias, stride, channels)) <= 1e-6


@interpreted
@pytest.mark.parametrize(("count", "inputs", "outputs"), [(1, 16, 16), (130, 24, 100), (300, 300, 24), (70, 400, 300)])
def test_pointwise_matches_float64(count: int, inputs: int, outputs: int) -> None:
    from veca.kernels.convolution import launch_pointwise

    torch.manual_seed(count)
    x, weight, bias = torch.randn(count, inputs), torch.randn(inputs, outputs), torch.randn(outputs)
    residual, expected = torch.randn(count, outputs), x.double() @ weight.double() + bias
    assert relative_error(launch_pointwise(x, weight, bias, relu6=True), expected.clamp(0, 6)) <= 1e-6
    assert relative_error(launch_pointwise(x, weight, bias, False, residual), expected + residual) <= 1e-6
    assert relative_error(launch_pointwise(x, weight, bias, False), expected) <= 1e-6


@interpreted
@pytest.mark.parametrize(("height", "width", "side", "stride"), [(20, 34, 3, 2), (7, 9, 3, 1), (11, 13, 5, 2)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_first_convolution_matches_float64(
    height: int, width: int, side: int, stride: int, channels_last: bool
) -> None:
    from veca.kernels.convolution import launch_first_convolution

    torch.manual_seed(height)
    images, weight, bias = torch.randn(2, 3, height, width), torch.randn(20, 3, side, side), torch.randn(20)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    by_taps = weight.flatten(1).T.contiguous()
    out = launch_first_convolution(images.contiguous(memory_format=layout), by_taps, bias, side, stride)
    assert relative_error(out, convolve(images, weight, bias, stride)) <= 1e-6


def mobile_network(small: bool = False) -> nn.Module:
    """A timm EfficientNet-Lite, or a `small` one of the same blocks, with statistics as after training."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("tf_efficientnet_lite0", num_classes=0)
    if small:
        arch = [["ds_r1_k3_s1_e1_c8"], ["ir_r2_k3_s2_e3_c16"], ["ir_r2_k5_s2_e2_c24"]]
        blocks = import_module("timm.models._efficientnet_builder").decode_arch_def(arch)
        options: dict[str, Any] = {"num_features": 40, "stem_size": 16, "pad_type": "same", "act_layer": nn.ReLU6}
        model = type(model)(blocks, num_classes=0, **options)
    model.eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]
            nn.init.normal_(norm.bias, std=0.1)
    return model


@interpreted
def test_a_mobile_network_by_kernels_matches_float64() -> None:
    model = mobile_network(small=True)
    images = torch.randn(2, 3, 24, 40)
    with torch.no_grad():
        expected = copy.deepcopy(model).double().forward_features(images.double())
        fuse_mobile_network(model)
        assert all(isinstance(block, MobileBlock) for stage in model.blocks for block in stage)
        assert relative_error(model.forward_features(images), expected) <= 1e-5
        compiled = torch.compile(model.forward_features, backend="aot_eager")
        assert relative_error(compiled(images), expected) <= 1e-5
        with use_kernel("reference"):
            assert relative_error(model.forward_features(images), expected) <= 1e-5


def test_all_of_a_mobile_network_is_by_kernels_and_what_they_do_not_compute_is_left() -> None:
    model = mobile_network()
    fuse_mobile_network(model)
    assert isinstance(model.conv_stem, FirstConvolution)
    assert isinstance(model.conv_head, Pointwise)
    assert all(isinstance(block, MobileBlock) for stage in model.blocks for block in stage)
    timm = pytest.importorskip("timm")
    other = timm.create_model("efficientnet_b0", num_classes=0).eval()  # SiLU, squeeze-and-excitation
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = other.forward_features(images)
        fuse_mobile_network(other)
        assert not any(isinstance(module, MobileBlock | FirstConvolution) for module in other.modules())
        assert relative_error(other.forward_features(images), expected.double()) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_mobile_network_is_as_exact_as_the_plain_one(compiled: bool) -> None:
    model, images = mobile_network().cuda(), torch.randn(3, 3, 224, 160, device="cuda")
    with torch.no_grad():
        expected = copy.deepcopy(model).double().forward_features(images.double())
        fuse_mobile_network(model)
        run = torch.compile(model.forward_features) if compiled else model.forward_features
        with torch.autocast("cuda", torch.bfloat16):
            error = relative_error(run(images), expected)
            with use_kernel("reference"):
                plain = relative_error(model.forward_features(images), expected)
    assert error <= 1.2 * plain


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [24, 1280])
def test_gpu_maps_beyond_32_bit_offsets(channels: int) -> None:
    from veca.kernels.convolution import launch_depthwise, launch_pointwise

    side = 64
    batch = 2**31 // (side * side * channels) + 2
    x = torch.randn(1, side, side, channels, device="cuda", dtype=torch.bfloat16).expand(batch, -1, -1, -1).contiguous()
    taps, bias = torch.randn(3, 3, channels, device="cuda"), torch.randn(channels, device="cuda")
    out = launch_depthwise(x, taps, bias, 2)
    assert torch.equal(out[-1], launch_depthwise(x[:1], taps, bias, 2)[0])
    del out
    weight, narrow = torch.randn(channels, 16, device="cuda", dtype=torch.bfloat16), torch.randn(16, device="cuda")
    rows = launch_pointwise(x.flatten(0, 2), weight, narrow, relu6=True)
    assert torch.equal(rows[-64:], launch_pointwise(x[0].flatten(0, 1)[-64:].contiguous(), weight, narrow, relu6=True))


@pytest.mark.parametrize(
    ("conv", "known"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), True),
        (nn.Conv2d(3, 8, 3, stride=2, padding=1), False),  # PyTorch's padding: one pixel on either side
        (nn.Conv2d(4, 8, 3, padding=1, groups=2), False),
        (nn.Conv2d(3, 8, 3, padding=2, dilation=2), False),
        (nn.Conv2d(3, 8, 3, padding=1, bias=False), False),
        (nn.Conv2d(3, 8, (3, 1), padding=(1, 0)), False),
    ],
)
def test_only_convolutions_that_kernels_compute_are_taken(conv: nn.Conv2d, known: bool) -> None:
    assert is_dense(conv) == known


@interpreted
@pytest.mark.parametrize(("rows", "columns"), [(9, 14), (8, 5)])
@pytest.mark.parametrize(("inputs", "channels", "outputs", "stride"), [(16, 96, 24, 2), (5, 20, 7, 1)])
def test_a_block_in_one_kernel_matches_float64(
    rows: int, columns: int, inputs: int, channels: int, outputs: int, stride: int
) -> None:
    from veca.kernels.convolution import launch_block

    torch.manual_seed(0)
    x = torch.randn(2, inputs, rows, columns, dtype=torch.double)
    first, second = torch.randn(channels, inputs, 1, 1).double(), torch.randn(channels, 1, 3, 3).double()
    third, biases = torch.randn(outputs, channels, 1, 1).double(), torch.randn(3, channels).double()
    wide = F.conv2d(x, first, biases[0]).clamp(0, 6)
    wide = convolve(wide, second, biases[1], stride, channels).permute(0, 3, 1, 2)
    expected = F.conv2d(wide, third, biases[2, :outputs]).permute(0, 2, 3, 1)
    maps, taps = x.permute(0, 2, 3, 1).float().contiguous(), second[:, 0].permute(1, 2, 0).float().contiguous()
    widening = first[..., 0, 0].T.float().contiguous(), biases[0].float()
    narrowing = third[..., 0, 0].T.float().contiguous(), biases[2, :outputs].float()
    out = launch_block(maps, *widening, taps, biases[1].float(), *narrowing, stride, pixels=16)
    assert relative_error(out, expected) <= 1e-6
