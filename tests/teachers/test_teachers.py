from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from conftest import relative_error
from safetensors.torch import save_file
from sample_images import random_pixels
from torch import Tensor

from veca.images import MEAN, STD
from veca.teachers import Standardized, Teacher, TeacherError, load_teacher
from veca.teachers.from_timm import TimmTeacher, timm_teacher
from veca.teachers.from_transformers import hf_teacher

# Small, with random weights: name, options, pixels per cell, prefix tokens (None: a map, no tokens).
SMALL: list[tuple[str, dict[str, Any], int, int | None]] = [
    ("vit_small_patch16_dinov3", {"depth": 2, "embed_dim": 64, "num_heads": 2}, 16, 5),
    ("vit_small_patch14_dinov2", {"depth": 2, "embed_dim": 64, "num_heads": 2}, 14, 1),
    ("vit_small_patch14_reg4_dinov2", {"depth": 2, "embed_dim": 64, "num_heads": 2}, 14, 5),
    ("vit_base_patch16_clip_224", {"depth": 2, "embed_dim": 64, "num_heads": 2}, 16, 1),
    ("vit_base_patch16_clip_quickgelu_224", {"depth": 2, "embed_dim": 64, "num_heads": 2}, 16, 1),
    ("naflexvit_base_patch16_siglip", {"depth": 2, "embed_dim": 64, "num_heads": 2}, 16, 0),
    ("vit_base_patch16_siglip_256", {"depth": 2, "embed_dim": 64, "num_heads": 2}, 16, 0),
    ("resnet18", {}, 32, None),
    ("efficientnet_lite0", {}, 32, None),
    ("swin_tiny_patch4_window7_224", {"embed_dim": 24, "depths": (1, 1, 1, 1), "strict_img_size": False}, 32, None),
]


def make(name: str, options: dict[str, Any], **more: Any) -> TimmTeacher:
    torch.manual_seed(0)
    return timm_teacher(name, pretrained=False, **options, **more)


def normalized(images: Tensor, mean: Any = MEAN, std: Any = STD) -> Tensor:
    return (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


@pytest.mark.parametrize(("name", "options", "stride", "prefix"), SMALL, ids=[case[0] for case in SMALL])
def test_targets_lie_on_the_students_grid(name: str, options: dict[str, Any], stride: int, prefix: int | None) -> None:
    """And are the model's own tokens, of the same pictures normalised its own way and sized to give that grid."""
    teacher = make(name, options)
    assert teacher.stride == stride
    cls, patches = teacher(normalized(random_pixels()), (4, 6))
    assert cls.shape == (2, teacher.width)
    assert patches.shape == (2, 24, teacher.width)
    model: Any = teacher.model
    about = timm.data.resolve_data_config({}, model=model)
    images = normalized(random_pixels(), about["mean"], about["std"])
    if stride != 16:
        size = 4 * stride, 6 * stride
        images = torch.nn.functional.interpolate(images, size, mode="bicubic", antialias=True)
    with torch.no_grad():
        found = model.forward_features(images)
    if prefix is None:
        found = found.permute(0, 3, 1, 2) if name.startswith("swin") else found
        expected_cls, expected = found.mean((2, 3)), found.flatten(2).mT
    else:
        assert found.shape[1] == prefix + 24
        expected = found[:, prefix:]
        expected_cls = found[:, 0] if prefix else model.forward_head(found, pre_logits=True)
    assert relative_error(patches, expected) <= 1e-5
    assert relative_error(cls, expected_cls) <= 1e-5


def test_registers_without_a_class_token() -> None:
    """The first token is then a register, and says nothing: the model pools its patches."""
    teacher = make("vit_medium_patch16_reg4_gap_256", {"depth": 2, "embed_dim": 64, "num_heads": 2})
    cls, patches = teacher(normalized(random_pixels()), (4, 6))
    model: Any = teacher.model
    about = timm.data.resolve_data_config({}, model=model)
    with torch.no_grad():
        tokens = model.forward_features(normalized(random_pixels(), about["mean"], about["std"]))
        expected = model.fc_norm(tokens[:, 4:].mean(1))
    assert relative_error(patches, tokens[:, 4:]) <= 1e-5
    assert relative_error(cls, expected) <= 1e-5


def test_the_map_can_be_resized_instead() -> None:
    """A convolutional teacher then runs at the pictures' own size, which is much less work."""
    teacher = make("resnet18", {}, meet="map")
    seen = []
    features = teacher.features
    teacher.features = lambda images: (seen.append(tuple(images.shape)), features(images))[1]  # type: ignore[method-assign]
    _, patches = teacher(normalized(random_pixels(128, 192)), (8, 12))
    assert seen == [(2, 3, 128, 192)]
    assert patches.shape == (2, 96, 512)


def test_a_teacher_can_see_every_picture_at_one_size() -> None:
    teacher = make("resnet18", {}, meet=96)
    seen = []
    features = teacher.features
    teacher.features = lambda images: (seen.append(tuple(images.shape[-2:])), features(images))[1]  # type: ignore[method-assign]
    for side in (64, 128):
        assert teacher(normalized(random_pixels(side, 2 * side)), (8, 16)).patches.shape == (2, 128, 512)
    teacher(normalized(random_pixels(64, 64)), (8, 8), zoom=4 / 3)  # a crop of three quarters is seen with 96
    assert seen == [(96, 192), (96, 192), (128, 128)]


def test_the_global_feature_can_come_from_a_second_look() -> None:
    one, two = make("resnet18", {}, meet=128), make("resnet18", {}, meet=128)
    two.load_state_dict(one.state_dict())
    two.glance = 64
    images = normalized(random_pixels(128, 192))
    first, both = one(images, (8, 12)), two(images, (8, 12))
    one.meet = 64
    second = one(images, (8, 12))
    assert torch.equal(both.patches, first.patches)
    assert torch.equal(both.cls, second.cls)
    assert not torch.allclose(both.cls, first.cls)
    assert relative_error(two.glimpse(images).mean((2, 3)), second.cls) <= 1e-5
    assert (two.about["glance"], "glance" in one.about) == (64, False)


def test_cells_are_where_the_picture_is() -> None:
    """What is bright in one corner of the picture stands out in that corner of the grid."""
    teacher = make("resnet18", {})
    dark, spot = torch.full((2, 3, 128, 192), 0.4), torch.full((2, 3, 128, 192), 0.4)
    spot[:, :, 96:, :32] = 1.0  # below, left
    difference = teacher(normalized(spot), (8, 12)).patches - teacher(normalized(dark), (8, 12)).patches
    strength = difference.norm(dim=-1)[0].unflatten(0, (8, 12))
    assert strength[5:, :4].mean() > 2 * strength[:3, 8:].mean()


def test_teachers_are_frozen() -> None:
    teacher = make("resnet18", {}).train()
    assert not teacher.training
    assert not teacher.model.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert not teacher(normalized(random_pixels()).requires_grad_(), (4, 6)).patches.requires_grad


class Fixed(Teacher):
    """Features that are known: the pixels' own channels, times ten, and one channel that never moves."""

    def __init__(self) -> None:
        super().__init__(4, 16, MEAN, STD, raw=True)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        dense = torch.nn.functional.avg_pool2d(images, 16) * 10
        dense = torch.cat([dense, torch.full_like(dense[:, :1], 7.0)], dim=1)
        return dense.mean((2, 3)), dense


def test_standardized_features_have_zero_mean_and_unit_variance() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(count, 3, 64, 96) for count in (3, 5, 1)]
    standard = Standardized(Fixed())
    standard.fit(iter(batches), (4, 6))
    targets = [standard(images, (4, 6)) for images in batches]
    for part in (torch.cat([t.cls for t in targets]), torch.cat([t.patches for t in targets]).flatten(0, 1)):
        assert float(part.mean(0).abs().max()) <= 1e-5
        deviations = part.std(0, correction=0)
        assert torch.all((deviations[:3] - 1).abs() <= 0.02)  # a thousandth is added to each, so none is divided by 0
        assert float(part[:, 3].abs().max()) <= 1e-3
    again = Standardized(Fixed())
    again.load_state_dict(standard.state_dict())
    assert torch.equal(again(batches[0], (4, 6)).patches, targets[0].patches)


def test_statistics_need_images() -> None:
    with pytest.raises(TeacherError, match="no images"):
        Standardized(Fixed()).fit([], (4, 6))


def test_unknown_models_are_named() -> None:
    with pytest.raises(TeacherError, match=r"timm has no model 'resnet18x' .did you mean 'resnet"):
        timm_teacher("resnet18x", pretrained=False)


WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
HF: dict[str, tuple[str, dict[str, Any], int]] = {
    "DINOv3ViT": ("Model", {"patch_size": 16, "num_register_tokens": 4, "intermediate_size": 128}, 5),
    "Dinov2": ("Model", {"patch_size": 14, "image_size": 70}, 1),
    "Dinov2WithRegisters": ("Model", {"patch_size": 14, "image_size": 70, "num_register_tokens": 4}, 5),
    "CLIPVision": ("Model", {"patch_size": 16, "image_size": 48, "intermediate_size": 128}, 1),
    "SiglipVision": ("Model", {"patch_size": 16, "image_size": 48, "intermediate_size": 128}, 0),
}
TEXT = {**WIDTHS, "intermediate_size": 128, "vocab_size": 99, "max_position_embeddings": 8}


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, int]:
    """A small model of a family with random weights, in a folder as people have it."""
    kind, options, prefix = HF[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**WIDTHS, **options)
    model = getattr(transformers, f"{request.param}{kind}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    about = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.8, 0.7], "image_processor_type": "ViTImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    return tmp_path, model, prefix


@pytest.mark.parametrize("saved", HF, indirect=True)
def test_transformers_teachers_give_their_tokens(saved: tuple[Path, Any, int]) -> None:
    folder, model, prefix = saved
    teacher = load_teacher(str(folder))
    stride = teacher.stride
    cls, patches = teacher(normalized(random_pixels()), (4, 6))
    images = normalized(random_pixels(), [0.1, 0.2, 0.3], [0.9, 0.8, 0.7])
    if stride != 16:
        images = torch.nn.functional.interpolate(images, (4 * stride, 6 * stride), mode="bicubic", antialias=True)
    options = {} if type(model).__name__.startswith(("DINO", "Dino")) else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        out = model(pixel_values=images, **options)
    assert patches.shape == (2, 24, 64)
    assert out.last_hidden_state.shape[1] == prefix + 24
    assert relative_error(cls, out.pooler_output) <= 1e-5  # the class token after the last norm, or the pooling head's
    tokens = out.last_hidden_state[:, prefix:]
    if type(model).__name__.startswith("CLIP"):
        tokens = getattr(model, "vision_model", model).post_layernorm(tokens)
    assert relative_error(patches, tokens) <= 1e-5


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_of_two_towers_the_one_that_sees(family: str, tmp_path: Path) -> None:
    """Checkpoints of CLIP and SigLIP, and of SigLIP 2, come with a text tower."""
    torch.manual_seed(0)
    vision = {**WIDTHS, "patch_size": 16, "image_size": 48, "intermediate_size": 128}
    config = getattr(transformers, f"{family}Config")(vision_config=vision, text_config=TEXT)
    model = getattr(transformers, f"{family}Model")(config).eval()
    model.save_pretrained(tmp_path)
    about = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "ViTImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    teacher = load_teacher(str(tmp_path))
    images = normalized(random_pixels(48, 48), [0.5] * 3, [0.5] * 3)
    with torch.no_grad():
        expected = model.vision_model(pixel_values=images).pooler_output
    assert relative_error(teacher(normalized(random_pixels(48, 48)), (3, 3)).cls, expected) <= 1e-5


def test_naflex_is_told_apart(tmp_path: Path) -> None:
    vision = {**WIDTHS, "patch_size": 16, "num_patches": 16, "intermediate_size": 128}
    transformers.Siglip2Config(vision_config=vision, text_config=TEXT).save_pretrained(tmp_path)
    with pytest.raises(TeacherError, match="NaFlex model of SigLIP 2.*take one of a fixed resolution"):
        load_teacher(str(tmp_path))


RADIO_CODE = """
from typing import NamedTuple
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class RADIOConfig(PretrainedConfig):
    def __init__(self, args=None, patch_size=16, **kwargs):
        self.args, self.patch_size = args, patch_size
        super().__init__(**kwargs)

class Output(NamedTuple):
    summary: torch.Tensor
    features: torch.Tensor

class Conditioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("norm_mean", torch.tensor([0.4, 0.5, 0.6]).view(-1, 1, 1))
        self.register_buffer("norm_std", torch.tensor([0.2, 0.3, 0.4]).view(-1, 1, 1))

    def forward(self, x):
        return (x - self.norm_mean) / self.norm_std

class RADIOModel(PreTrainedModel):
    config_class = RADIOConfig

    def __init__(self, config):
        super().__init__(config)
        self.input_conditioner, self.embed = Conditioner(), nn.Conv2d(3, 8, 16, 16)
        self.patch_size = config.patch_size
        self.post_init()

    def make_preprocessor_external(self):
        given, self.input_conditioner = self.input_conditioner, nn.Identity()
        return given

    def forward(self, x):
        tokens = self.embed(self.input_conditioner(x)).flatten(2).mT
        return Output(torch.cat([tokens.mean(1), tokens.amax(1), tokens.amin(1)], 1), tokens)
"""


def test_radio_with_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As older ones come: the code is run when it is trusted, and only then."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    folder, ran = tmp_path / "radio", tmp_path / "ran"
    folder.mkdir()
    (folder / "hf_model.py").write_text(f"open({str(ran)!r}, 'w').close()\n{RADIO_CODE}")
    code = {"AutoConfig": "hf_model.RADIOConfig", "AutoModel": "hf_model.RADIOModel"}
    (folder / "config.json").write_text(json.dumps({"architectures": ["RADIOModel"], "auto_map": code}))
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 8, 16, 16)
    norms = {"mean": torch.tensor([0.4, 0.5, 0.6]), "std": torch.tensor([0.2, 0.3, 0.4])}
    tensors = {f"input_conditioner.norm_{name}": value.view(-1, 1, 1) for name, value in norms.items()}
    tensors |= {f"embed.{name}": value.detach() for name, value in conv.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TeacherError, match="If you trust who wrote that code.*teacher.trust_remote_code: true"):
        load_teacher(str(folder))
    assert not ran.exists()
    teacher = load_teacher(str(folder), trust_remote_code=True)
    assert ran.exists()
    assert (teacher.width, teacher.stride, teacher.raw) == (8, 16, True)
    cls, patches = teacher(normalized(random_pixels()), (4, 6))
    with torch.no_grad():
        tokens = conv(normalized(random_pixels(), norms["mean"].tolist(), norms["std"].tolist())).flatten(2).mT
    assert relative_error(patches, tokens) <= 1e-5
    assert relative_error(cls, (tokens.mean(1) + tokens.amax(1) + tokens.amin(1)) / 3) <= 1e-5


def test_radio_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Transformers' own: class tokens and registers dropped, the picture normalised once."""
    shape = {**WIDTHS, "max_img_size": 128, "num_cls_tokens": 3, "num_registers": 7, "summary_idxs": [0, 2]}
    config = transformers.RadioConfig(**shape)
    torch.manual_seed(0)
    model = transformers.RadioModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    teacher = load_teacher(str(tmp_path))
    assert teacher.raw
    cls, patches = teacher(normalized(random_pixels()), (4, 6))
    with torch.no_grad():
        tokens = model(random_pixels()).last_hidden_state  # it takes pixels from 0 to 1
    assert tokens.shape[1] == 10 + 24
    assert relative_error(patches, tokens[:, 10:]) <= 1e-5
    assert relative_error(cls, (tokens[:, 0] + tokens[:, 2]) / 2) <= 1e-5


def test_folders_that_hold_no_teacher(tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match="Name a model of the hub or a local folder"):
        hf_teacher(str(tmp_path))
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(TeacherError, match="of type 'bert': teachers are dinov3_vit.*timm:NAME"):
        hf_teacher(str(tmp_path))


def test_names_say_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("veca.teachers.load.timm_teacher", lambda *args: called.append(("timm", *args)))
    monkeypatch.setattr("veca.teachers.load.hf_teacher", lambda *args: called.append(("hf", *args)))
    load_teacher("timm:resnet18", "map")
    load_teacher("timm:resnet18@a/file.safetensors")
    load_teacher("facebook/dinov3-vits16-pretrain-lvd1689m")
    assert called == [
        ("timm", "resnet18", "map", None),
        ("timm", "resnet18", "input", "a/file.safetensors"),
        ("hf", "facebook/dinov3-vits16-pretrain-lvd1689m", "input", False),
    ]
