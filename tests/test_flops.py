from __future__ import annotations

import pytest
import torch
from conftest import make_tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from veca.bench.flops import attention_flops, model_flops
from veca.config import SIZES

PAPER = {
    "veca_small": [434110464, 874512384, 1491075072, 3252682752, 5718933504],
    "veca_base": [1623195648, 3258974208, 5549064192, 12092178432, 21252538368],
    "veca_large": [2835349504, 5687476224, 9680453632, 21088960512, 37060870144],
}


@pytest.mark.parametrize("name", PAPER)
def test_attention_path_equals_the_paper(name: str) -> None:
    found = [attention_flops(SIZES[name], size, size, 64) for size in (256, 384, 512, 768, 1024)]
    assert found == PAPER[name]


@pytest.mark.parametrize(("cores", "height", "width"), [(8, 64, 96), (64, 48, 48)])
def test_whole_model_equals_torch_counting(cores: int, height: int, width: int) -> None:
    model = make_tiny(output_dim=40, num_classes=5)
    # Not every release counts the fused kernels; the plain products of the same attention are counted by all.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, height, width), cores)
    assert counter.get_total_flops() == model_flops(model.config, height, width, cores)
