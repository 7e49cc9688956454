from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from veca.rope import (
    augment_coordinates,
    farthest_points,
    grid_rotary,
    initial_core_states,
    make_rotary,
    patch_coordinates,
    rotate,
)

CPU = torch.device("cpu")


def test_patch_coordinates_are_row_major_x_first() -> None:
    found = patch_coordinates(2, 4, CPU, torch.float64)
    expected = [[(j + 0.5) / 4 * 2 - 1, (i + 0.5) / 2 * 2 - 1] for i in range(2) for j in range(4)]
    assert found.tolist() == expected


def test_angles_follow_the_formula() -> None:
    d, point = 64, (0.3, -0.7)
    cos, sin = make_rotary(torch.tensor([point], dtype=torch.float64), d, 0.125)[:2]
    for axis in range(2):
        for i in range(16):
            period = 100 ** (2 * i / (d / 2))
            angle = 0.0 if i >= 14 else 2 * math.pi * point[axis] / period
            assert cos[0, axis * 16 + i] == pytest.approx(math.cos(angle), abs=1e-12)
            assert sin[0, axis * 16 + i] == pytest.approx(math.sin(angle), abs=1e-12)


def test_rotation_is_a_complex_product() -> None:
    torch.manual_seed(0)
    x, points = torch.randn(5, 32, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64) * 2 - 1
    cos, sin = make_rotary(points, 32, 0.125)[:2]
    turned = torch.complex(x[:, :16], x[:, 16:]) * torch.complex(cos, sin)
    torch.testing.assert_close(rotate(x, (cos, sin)), torch.cat([turned.real, turned.imag], dim=-1))


def test_attention_depends_on_displacement_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 64, dtype=torch.float64)
    a, b, move = torch.tensor([[0.1, 0.4], [-0.5, 0.2], [0.3, -0.25]], dtype=torch.float64)

    def product(at_q: torch.Tensor, at_k: torch.Tensor) -> float:
        return float(rotate(q, make_rotary(at_q, 64, 0.125)) @ rotate(k, make_rotary(at_k, 64, 0.125)))

    assert product(a, b) == pytest.approx(product(a + move, b + move), rel=1e-12)
    assert product(a, b) != pytest.approx(product(a + move, b), rel=1e-3)


def test_tables_are_kept_and_trainable_after_inference() -> None:
    with torch.inference_mode():
        first = grid_rotary(3, 5, 32, 0.125, CPU, torch.float32)
    again = grid_rotary(3, 5, 32, 0.125, CPU, torch.float32)
    assert first[0] is again[0]
    x = torch.randn(15, 32, requires_grad=True)
    rotate(x, again).square().sum().backward()
    assert x.grad is not None


def test_fake_tensors_and_real_ones_do_not_mix() -> None:
    with FakeTensorMode():
        assert isinstance(grid_rotary(2, 7, 32, 0.125, CPU, torch.float32)[0], FakeTensor)
    assert type(grid_rotary(2, 7, 32, 0.125, CPU, torch.float32)[0]) is torch.Tensor
    with FakeTensorMode():
        assert isinstance(grid_rotary(2, 7, 32, 0.125, CPU, torch.float32)[0], FakeTensor)


def test_half_precision_rotates_in_float32() -> None:
    x, points = torch.randn(9, 64), torch.rand(9, 2) * 2 - 1
    table = make_rotary(points, 64, 0.125)
    half = x.to(torch.bfloat16)
    found = rotate(half, table)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, rotate(half.float(), table).to(torch.bfloat16), rtol=0, atol=0)


def test_augmentation_is_one_shift_and_one_scale_for_all() -> None:
    torch.manual_seed(0)
    points = patch_coordinates(4, 6, CPU, torch.float64)
    scales, shifts = [], []
    for _ in range(2000):
        moved = augment_coordinates(points, 0.08, 2.0)
        scale = (moved[-1] - moved[0]) / (points[-1] - points[0])
        torch.testing.assert_close(scale[0], scale[1])
        shift = moved[0] / scale - points[0]
        torch.testing.assert_close(moved, (points + shift) * scale)
        scales.append(scale[0].log())
        shifts.append(shift)
    log_scale, shift = torch.stack(scales) / math.log(2), torch.stack(shifts) / 0.08
    for draws in (log_scale, shift[:, 0], shift[:, 1]):
        assert -1 <= draws.min() < -0.98
        assert 0.98 < draws.max() <= 1
        assert abs(draws.mean()) < 0.05
        assert draws.std() == pytest.approx(1 / math.sqrt(3), rel=0.05)
    assert abs(torch.corrcoef(shift.T)[0, 1]) < 0.1, "the axes shift independently"


def test_farthest_points_breaks_ties_by_lowest_index() -> None:
    corners = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert farthest_points(corners, 5).tolist() == [0, 1, 2, 3, 4]


def test_every_prefix_of_cores_covers_the_plane() -> None:
    torch.manual_seed(0)
    points = initial_core_states(64).tanh()
    assert points.abs().max() <= 0.9501
    probes = torch.rand(500, 2) * 1.9 - 0.95
    for count in (8, 16, 32, 64):
        gap = torch.cdist(probes, points[:count]).min(dim=1).values.max()
        assert gap < 3.2 / math.sqrt(count)
