from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from veca.images.resize import Mode, resize_maps


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(64, 96), (20, 17), (32, 48), (3, 300)])
def test_resize_maps_matches_interpolate(size: tuple[int, int], mode: Mode, antialias: bool) -> None:
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(images, size, mode=mode, antialias=antialias)
    torch.testing.assert_close(resize_maps(images, size, mode, antialias), expected, rtol=1e-5, atol=1e-5)
    assert resize_maps(images.bfloat16(), size, mode, antialias).dtype == torch.bfloat16


def test_what_is_kept_from_inference_serves_training() -> None:
    maps = torch.randn(1, 2, 7, 11, requires_grad=True)
    with torch.inference_mode():
        resize_maps(maps, (13, 17))
    resize_maps(maps, (13, 17)).sum().backward()
    assert maps.grad is not None
    assert float(maps.grad.sum()) == pytest.approx(2 * 13 * 17, rel=1e-5)
