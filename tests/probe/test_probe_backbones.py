from __future__ import annotations

import functools
import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from conftest import make_tiny, relative_error
from PIL import Image
from sample_images import fractal_image
from torch import Tensor

import veca
from veca.checkpoint.format import weights_hash
from veca.data.transforms import plan_random_crop, plan_short_side, resize_nearest, seeded_random
from veca.heads.features import BackboneError, FrozenPrecision, FrozenVeca
from veca.images import fit_image, normalize, to_tensor
from veca.images.load import crop_pixels, plan_centre
from veca.probe.backbones import TeacherBackbone, load_backbone
from veca.teachers import TeacherError
from veca.teachers.from_timm import timm_teacher

CPU = torch.device("cpu")


def pixels(height: int = 32, width: int = 48) -> Tensor:
    return torch.randint(256, (2, 3, height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_a_veca_gives_the_features_of_the_model_at_each_budget(tmp_path: Path) -> None:
    model = make_tiny()
    veca.save(model, tmp_path)
    backbone = load_backbone(str(tmp_path), "cpu")
    assert (backbone.kind, backbone.patch, backbone.width, backbone.precision) == ("veca", 16, 64, "float32")
    images = backbone.prepare(pixels())
    assert torch.equal(images, normalize(pixels()))
    for cores in (8, 64):
        with torch.inference_mode():
            out = model(normalize(pixels()), cores=cores)
        cls, patches = backbone.features(images, cores)
        assert patches is not None
        assert torch.equal(cls, out.cls)
        assert torch.equal(patches, out.feature_map)
        assert torch.allclose(backbone.global_feature(images, cores), out.cls, atol=1e-5)
        both = backbone.global_feature(images, cores, "cls+mean")
        assert torch.allclose(both, torch.cat([out.cls, out.patches.mean(1)], 1), atol=1e-5)
        torch.nn.functional.linear(cls, torch.ones(1, 64, requires_grad=True)).sum().backward()  # a head can learn


def test_a_compiled_veca_gives_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no machine code
    veca.save(make_tiny(depth=2), tmp_path)
    for precision, limit in (("float32", 1e-5), ("bfloat16", 3e-2)):
        plain, compiled = (load_backbone(str(tmp_path), "cpu", precision, compile) for compile in (False, True))
        assert plain.identity != compiled.identity
        assert compiled.running["optimized"]
        images = plain.prepare(pixels())
        for cores in (8, 64):
            for a, b in zip(compiled.features(images, cores), plain.features(images, cores), strict=True):
                assert a is not None
                assert b is not None
                assert a.dtype == torch.float32
                assert float((a - b).norm() / b.norm()) <= limit
    model = FrozenVeca(make_tiny(), "tiny", CPU, "float32")
    none = Mock(side_effect=RuntimeError("InvalidCxxCompiler: No working C++ compiler found"))
    monkeypatch.setattr(model, "model", none)
    with pytest.raises(
        BackboneError, match="needs a C\\+\\+ compiler and finds none: install g\\+\\+, or leave it out"
    ):
        model.features(pixels().float(), 8)
    with pytest.raises(BackboneError, match="cannot be compiled, which is for a VECA: leave out --compile"):
        load_backbone("timm:resnet18", "cpu", compile=True)


def test_budgets_and_sizes_of_a_veca(tmp_path: Path) -> None:
    veca.save(make_tiny(), tmp_path)
    backbone = load_backbone(str(tmp_path), "cpu")
    assert backbone.cores(None) == (64,)
    assert backbone.cores((8, 16, 8)) == (8, 16)
    assert backbone.side(512) == 512
    with pytest.raises(BackboneError, match="cores 65.*1 to 64"):
        backbone.cores((8, 65))
    with pytest.raises(BackboneError, match="size 250.*multiples of 16. Nearest: 256"):
        backbone.side(250)


def test_another_backbone_is_seen_its_own_way() -> None:
    torch.manual_seed(0)
    options = {"depth": 2, "embed_dim": 64, "num_heads": 2, "pretrained": False}
    teacher = timm_teacher("vit_base_patch14_dinov2", **options)
    teacher.mean, teacher.std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    backbone = TeacherBackbone(teacher, "timm:x", CPU, "float32")
    assert [backbone.side(size) for size in (256, 512, 5)] == [252, 518, 14]
    assert backbone.budgets is None
    assert backbone.cores((8, 16)) == (None,)
    images = backbone.prepare(pixels(28, 42))
    mean, std = torch.tensor([teacher.mean, teacher.std]).view(2, 3, 1, 1)
    expected = (pixels(28, 42) / 255 - mean) / std
    assert torch.allclose(images, expected)
    cls, patches = backbone.features(images, None)
    assert patches is not None
    assert (cls.shape, patches.shape) == ((2, 64), (2, 64, 2, 3))
    tokens = teacher.model.forward_features(expected)
    assert torch.allclose(cls, tokens[:, 0], atol=1e-5)
    assert torch.allclose(patches[:, :, 1, 0], tokens[:, 1 + 3], atol=1e-5)  # row by row


def test_folders_of_transformers_are_told_from_ours(tmp_path: Path) -> None:
    config = transformers.Dinov2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    transformers.Dinov2Model(config).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    backbone = load_backbone(str(tmp_path), "cpu")
    assert (backbone.kind, backbone.patch, backbone.mean) == ("transformers", 14, (0.5,) * 3)
    assert str(tmp_path) not in json.dumps(backbone.identity)  # a key is the same wherever the folder lies


def test_weights_decide_the_hash() -> None:
    model = make_tiny()
    before = weights_hash(model)
    assert before == weights_hash(make_tiny())
    with torch.no_grad():
        model.norm.bias[3] += 1e-6
    assert weights_hash(model) != before


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("veca_tin", BackboneError, "did you mean 'veca_tiny'"),
        ("efficientnet-lite", BackboneError, "did you mean 'efficientnet-lite2'"),
        ("runs/gone.safetensors", ValueError, "no such file"),
        ("timm:vit_smal_patch16_dinov3", TeacherError, "did you mean"),
    ],
)
def test_unknown_backbones_are_refused(name: str, error: type[ValueError], says: str) -> None:
    with pytest.raises(error, match=says):
        load_backbone(name, "cpu")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device 'nonsense' cannot be used"):
        load_backbone("veca_tiny", "nonsense")


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (64, 64)])
def test_the_centre_is_the_evaluation_view(size: tuple[int, int]) -> None:
    image = fractal_image(*size)
    assert torch.equal(crop_pixels(plan_centre(*size, 128), image), to_tensor(fit_image(image, 128, "crop")))
    assert crop_pixels(plan_centre(*size, 126), image).shape == (3, 126, 126)


def random_part(image: Image.Image, side: int, *numbers: int) -> Tensor:
    return crop_pixels(plan_random_crop(*image.size, side, seeded_random(*numbers)), image)


def test_random_parts_follow_from_their_numbers_alone() -> None:
    image = fractal_image(120, 80)
    parts = [random_part(image, 32, 0, turn, 7) for turn in range(8)]
    assert all(part.shape == (3, 32, 32) for part in parts)
    assert torch.equal(parts[3], random_part(image, 32, 0, 3, 7))
    assert not torch.equal(parts[3], random_part(image, 32, 1, 3, 7))
    assert len({part.numpy().tobytes() for part in parts}) == 8
    assert random_part(fractal_image(400, 4), 32, 1).shape == (3, 32, 32)


def test_random_parts_are_mirrored_in_half_the_cases() -> None:
    ramp = Image.linear_gradient("L").rotate(90).convert("RGB")
    edges = [random_part(ramp, 16, 0, 0, i)[0].float().mean(0)[[0, -1]] for i in range(200)]
    assert 70 < sum(bool(left < right) for left, right in edges) < 130


def test_a_whole_picture_and_its_mask() -> None:
    assert crop_pixels(plan_short_side(300, 200, 64, 16), fractal_image(300, 200)).shape == (3, 64, 96)
    assert plan_short_side(200, 300, 70, 14)[1:] == (70, 112, 70, 112, 1, False)  # 105 is halfway, which goes up
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert np.array_equal(resize_nearest(values, (4, 6)), values.repeat(2, 0).repeat(2, 1))
    assert resize_nearest(values, (2, 3)).dtype == torch.int32
    assert resize_nearest(values.astype("float32"), (1, 1)).item() == 4.0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_gpu_gives_the_same_features(tmp_path: Path, precision: FrozenPrecision) -> None:
    model = make_tiny()
    veca.save(model, tmp_path)
    there, here = load_backbone(str(tmp_path), "cuda", precision), load_backbone(str(tmp_path), "cpu")
    images = pixels(64, 96)
    limit = 4e-2 if precision == "bfloat16" else 1e-4  # the plain model of this test in bfloat16: 2e-2 to 3.2e-2
    for cores in (8, 64):
        expected = here.features(here.prepare(images), cores)
        first, again = (there.features(there.prepare(images), cores) for _ in range(2))
        for found, repeated, exact in zip(first, again, expected, strict=True):
            assert isinstance(found, Tensor)
            assert isinstance(repeated, Tensor)
            assert isinstance(exact, Tensor)
            assert torch.equal(found, repeated)
            assert relative_error(found.cpu(), exact) < limit
        alone = there.features(there.prepare(images), cores, dense=False)[0]
        assert relative_error(alone.cpu(), expected[0]) < limit
