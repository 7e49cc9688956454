from __future__ import annotations

import pytest
import timm
import torch
from conftest import make_tiny
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from veca.attention import use_kernel
from veca.checkpoint import create_model
from veca.config import SIZES
from veca.flops import attention_flops, dense_attention_flops, dense_model_flops, model_flops
from veca.model import Attention
from veca.rope import make_rotary
from veca.teachers.from_timm import DENSE_VITS, create_dense_vit

RESOLUTIONS = (256, 384, 512, 768, 1024)
PAPER = {
    "veca_small": [434110464, 874512384, 1491075072, 3252682752, 5718933504],
    "veca_base": [1623195648, 3258974208, 5549064192, 12092178432, 21252538368],
    "veca_large": [2835349504, 5687476224, 9680453632, 21088960512, 37060870144],
}
PAPER_DENSE = {
    "veca_small": [412521984, 1203869184, 2840237568, 10912962048, 30670493184],
    "veca_base": [1440820224, 3778489344, 8108190720, 27273538560, 71016459264],
    "veca_large": [2468450304, 6256431104, 12968890368, 41207042048, 103289032704],
}


def count(module: nn.Module, *inputs: object, **options: object) -> int:
    """What torch counts. Not every release counts the fused kernels; the plain products are counted by all."""
    with sdpa_kernel(SDPBackend.MATH), use_kernel("sdpa"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*inputs, **options)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", PAPER)
def test_attention_path_equals_the_paper(name: str) -> None:
    config = SIZES[name]
    assert [attention_flops(config, size, size, 64) for size in RESOLUTIONS] == PAPER[name]
    assert [dense_attention_flops(config, size, size) for size in RESOLUTIONS] == PAPER_DENSE[name]


@pytest.mark.parametrize("name", PAPER)
def test_attention_path_counted_equals_the_paper(name: str) -> None:
    config, found = SIZES[name], []
    with torch.device("meta"):
        attention = Attention(config)
        for size in RESOLUTIONS:
            patches = (size // 16) ** 2
            core, patch = (make_rotary(torch.empty(*n, 2), config.head_dim, 0.125) for n in ((1, 1, 64), (patches,)))
            found.append(count(attention, torch.empty(1, 64 + patches, config.embed_dim), core, patch))
    assert found == PAPER[name]


@pytest.mark.parametrize("name", PAPER_DENSE)
def test_dense_attention_path_counted_equals_the_paper(name: str) -> None:
    config, found = SIZES[name], []
    with torch.device("meta"):
        attention = timm.create_model(DENSE_VITS[name], num_classes=0).blocks[0].attn
        for size in RESOLUTIONS:
            patches = (size // 16) ** 2
            rope = torch.empty(patches, 2 * config.head_dim)
            found.append(count(attention, torch.empty(1, 5 + patches, config.embed_dim), rope=rope))
    assert found == PAPER_DENSE[name]


@pytest.mark.parametrize(("cores", "height", "width"), [(8, 64, 96), (64, 48, 48)])
def test_whole_model_equals_torch_counting(cores: int, height: int, width: int) -> None:
    model = make_tiny(output_dim=40, num_classes=5)
    assert count(model, torch.zeros(1, 3, height, width), cores) == model_flops(model.config, height, width, cores)


@pytest.mark.parametrize("name", DENSE_VITS)
def test_whole_models_at_full_size_equal_torch_counting(name: str) -> None:
    config = SIZES[name]
    with torch.device("meta"):
        images = torch.empty(1, 3, 512, 768)
        dense = create_dense_vit(config).eval()
        assert count(create_model(name).eval(), images, 64) == model_flops(config, 512, 768, 64)
        assert count(dense, images) == dense_model_flops(config, 512, 768)


def test_the_dense_vit_of_a_size_that_dinov3_lacks_equals_torch_counting() -> None:
    config = make_tiny(depth=2).config
    with torch.device("meta"):
        assert count(create_dense_vit(config).eval(), torch.empty(1, 3, 64, 96)) == dense_model_flops(config, 64, 96)
