"""Students that start with the weights of their teacher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import veca
from veca.images import MEAN, STD
from veca.teachers import Standardized, Teacher, TeacherError, inherit_weights
from veca.teachers.from_timm import timm_teacher
from veca.teachers.from_transformers import HfTeacher

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 16}


def vit(kind: str) -> Teacher:
    """A ViT of 3 blocks, 64 wide, with random weights; its MLP has 256 channels, a gated one 192."""
    torch.manual_seed(0)
    if kind == "timm":
        options = {"embed_dim": 64, "depth": 3, "num_heads": 2, "init_values": 1.0}
        teacher: Teacher = timm_teacher("vit_small_patch16_224", pretrained=False, **options)
    elif kind == "dinov2":
        teacher = HfTeacher(transformers.Dinov2Model(transformers.Dinov2Config(**SIZES, image_size=48)), MEAN, STD)
    else:
        gated = kind == "gated"
        more = {"intermediate_size": 192, "use_gated_mlp": True, "hidden_act": "silu"} if gated else {}
        config = transformers.DINOv3ViTConfig(**SIZES, **{"intermediate_size": 256, **more})
        teacher = HfTeacher(transformers.DINOv3ViTModel(config), MEAN, STD)
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if name.endswith("bias") or "scale" in name or "ls" in name or "lambda" in name or "gamma" in name:
                parameter.normal_(0.5, 0.3)
            elif parameter.ndim == 2:
                parameter.normal_(std=0.15)
    return teacher


def student(mlp_dim: int, **options: Any) -> veca.Veca:
    torch.manual_seed(1)
    sizes = {"embed_dim": 64, "num_heads": 2, "depth": 4, "mlp_ratio": mlp_dim / 64}
    return veca.create_model("veca_tiny", **{**sizes, **options}).eval()


def branches(teacher: Teacher, kind: str, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """What attention's values and the MLP of block i add to tokens x, if each token attends to itself alone."""
    model = teacher.model
    if kind == "timm":
        block = model.blocks[i]
        value = block.attn.qkv(block.norm1(x))[..., 128:]
        return block.ls1(block.attn.proj(value)), block.ls2(block.mlp(block.norm2(x)))
    block = (model.encoder if kind == "dinov2" else model.model).layer[i]
    attention: Any = block.attention
    if hasattr(attention, "v_proj"):
        value = attention.o_proj(attention.v_proj(block.norm1(x)))
    else:
        value = attention.output.dense(attention.attention.value(block.norm1(x)))
    return block.layer_scale1(value), block.layer_scale2(block.mlp(block.norm2(x)))


@pytest.mark.parametrize(("kind", "mlp_dim"), [("timm", 256), ("dinov2", 256), ("dinov3", 256), ("gated", 192)])
def test_blocks_compute_what_the_teachers_do(kind: str, mlp_dim: int) -> None:
    teacher, model = vit(kind), student(mlp_dim)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert inherit_weights(model, Standardized(teacher)) == 3
    x = torch.randn(2, 5, 64)
    for i in range(3):
        block: Any = model.blocks[i]
        attended, gated = branches(teacher, kind, i, x)
        value = block.attn.qkv(block.norm1(x))[..., 128:]
        torch.testing.assert_close(block.attn.proj(value), attended, rtol=1e-4, atol=1e-4)
        found = block.mlp(block.norm2(x))
        if kind == "gated":
            torch.testing.assert_close(found, gated, rtol=1e-4, atol=1e-4)
        else:  # GELU and its approximation differ by 0.02 at most in each of 256 channels
            assert F.cosine_similarity(found, gated, dim=-1).min() > 0.999
            assert (found - gated).norm() < 0.03 * gated.norm()
    after = model.state_dict()
    fresh = [name for name in after if torch.equal(after[name], before[name])]
    assert any(name.startswith("blocks.3.") for name in fresh)
    assert not any(name.startswith(("blocks.0.", "patch_embed", "norm.")) and "norm" not in name for name in fresh)
    token = teacher.model.cls_token if kind == "timm" else teacher.model.embeddings.cls_token
    torch.testing.assert_close(model.cores[0][0], token.flatten())
    assert torch.equal(after["cores.0"][1:], before["cores.0"][1:])


def test_a_narrower_mlp_keeps_the_largest_channels_and_a_wider_one_adds_nothing() -> None:
    teacher, x = vit("gated"), torch.randn(2, 5, 64)
    block: Any = teacher.model.model.layer[0]
    sizes = block.mlp.gate_proj.weight.norm(dim=1) * block.mlp.down_proj.weight.norm(dim=0)
    small = sizes.argsort()[:64]
    with torch.no_grad():
        block.mlp.down_proj.weight[:, small] *= 1e-4
    expected = branches(teacher, "gated", 0, x)[1]
    for mlp_dim in (128, 256):
        model = student(mlp_dim)
        inherit_weights(model, teacher)
        own: Any = model.blocks[0]
        torch.testing.assert_close(own.mlp(own.norm2(x)), expected, rtol=1e-2, atol=1e-2)


def test_teachers_that_nothing_can_be_taken_from() -> None:
    with pytest.raises(TeacherError, match=r"the patch embedding of .* is 64 wide, the student's 128"):
        inherit_weights(student(256, embed_dim=128), vit("dinov2"))
    with pytest.raises(TeacherError, match="has 2 heads, the student 1: take a student with as many"):
        inherit_weights(student(256, num_heads=1), vit("dinov2"))
    with pytest.raises(TeacherError, match="no patch embedding to start from; leave model.start out"):
        inherit_weights(student(256), timm_teacher("resnet18", pretrained=False))
