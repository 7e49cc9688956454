"""VECA as a model of transformers, held against DINOv3's classes there and against our own files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDEN, make_tiny
from processes import assert_ddp_trains
from safetensors.torch import load_file, save_file
from sample_images import fractal_image, random_images
from torch import Tensor
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
    BitImageProcessorPil,
    Dinov2Backbone,
    Dinov2Config,
    DINOv3ViTBackbone,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    ResNetBackbone,
    ResNetConfig,
    pipeline,
)

import veca
from veca.hub.transformers import (
    VecaBackbone,
    VecaConfig,
    VecaForImageClassification,
    VecaForSemanticSegmentation,
    VecaImageProcessor,
    VecaModel,
)
from veca.images.resize import pad_to_multiple
from veca.inspect import core_maps
from veca.teachers.outputs import keep_output

SHAPE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}


def assert_equal(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_configuration_has_both_names_and_is_checked(tmp_path: Path) -> None:
    config = VecaConfig(**SHAPE, cores=16, num_labels=7)
    assert (config.embed_dim, config.depth, config.num_heads) == (64, 3, 2)
    assert config.veca() == make_tiny().config
    assert config.num_register_tokens == 15
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, VecaConfig)
    assert again.to_json_string() == config.to_json_string()
    assert VecaConfig(**make_tiny(num_classes=5).config.to_dict()).num_labels == 5
    with pytest.raises(veca.ConfigError, match="embed_dim=65"):
        VecaConfig(**{**SHAPE, "hidden_size": 65})


@torch.no_grad()
def test_outputs_are_those_of_the_plain_model_and_like_dinov3() -> None:
    plain = make_tiny()
    model = VecaModel.from_veca(plain, cores=16)
    theirs = DINOv3ViTModel(DINOv3ViTConfig(**SHAPE, num_register_tokens=15, attn_implementation="eager")).eval()
    asked = {"output_hidden_states": True, "output_attentions": True}
    out, expected, other = model(random_images(), **asked), plain(random_images(), 16), theirs(random_images(), **asked)
    assert list(out) == list(other)
    assert out.last_hidden_state.shape == other.last_hidden_state.shape
    assert [h.shape for h in out.hidden_states] == [h.shape for h in other.hidden_states]
    assert len(out.attentions) == len(other.attentions)
    assert out.attentions[0].shape == other.attentions[0][:, :, :16].shape, "the rows of the cores"
    torch.testing.assert_close(out.last_hidden_state, torch.cat([expected.cores, expected.patches], 1))
    torch.testing.assert_close(out.pooler_output, expected.cls)
    torch.testing.assert_close(plain.norm(out.hidden_states[-1]), out.last_hidden_state)
    blocks = plain.forward_intermediates(random_images(), output_fmt="NLC", intermediates_only=True, cores=16)
    for a, b in zip(out.hidden_states[1:], blocks, strict=True):
        torch.testing.assert_close(a[:, 16:], b)
    torch.testing.assert_close(out.hidden_states[0][:, 16:], plain.patch_embed(random_images()))
    maps = core_maps(plain, random_images(), 16, layers=(0, 1, 2), per_head=True).flatten(-2)
    torch.testing.assert_close(torch.stack(out.attentions)[..., 16:], maps)
    torch.testing.assert_close(out.attentions[1].sum(-1), torch.ones(2, 2, 16))
    assert isinstance(model(random_images(), return_dict=False), tuple)


def test_budget_at_the_call() -> None:
    model = VecaModel.from_veca(make_tiny())
    assert model(random_images()).last_hidden_state.shape[1] == 64 + 15
    assert model(random_images(), cores=8).last_hidden_state.shape[1] == 8 + 15
    with pytest.raises(ValueError, match="cores=65"):
        model(random_images(), cores=65)


def test_width_in_the_configuration_and_at_the_call(tmp_path: Path) -> None:
    plain, images = make_tiny(num_classes=7, mlp_ratio=4.0, widths=(1, 0.25)), random_images()
    expected = plain(images, 8, width=0.25)
    VecaModel.from_veca(plain, cores=8, width=0.25).save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    assert veca.load(tmp_path).config.widths == model.config.veca().widths == (1.0, 0.25)
    assert_close = torch.testing.assert_close
    assert_close(model(images).last_hidden_state, torch.cat([expected.cores, expected.patches], 1))
    assert_close(model(images, width=1).last_hidden_state[:, 8:], plain(images, 8).patches)
    classifier, backbone = VecaForImageClassification.from_veca(plain), VecaBackbone.from_veca(plain)
    assert_close(classifier(images, cores=8, width=0.25).logits, expected.logits)
    assert_close(backbone(images, cores=8, width=0.25).feature_maps[-1], expected.feature_map)


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    """Saved and loaded by transformers, then by `veca.load`, which needs no transformers."""
    plain = make_tiny(output_dim=40)
    plain.provenance = {"teacher": "none"}
    model = VecaModel.from_veca(plain, cores=16)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert isinstance(again, VecaModel)
    assert not again.training
    assert_equal(again(random_images()).last_hidden_state, model(random_images()).last_hidden_state)
    back = veca.load(tmp_path)
    assert back.config == plain.config
    assert back.provenance == plain.provenance
    assert_equal(dict(back.state_dict()), dict(plain.state_dict()))
    assert (
        AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)(random_images()).pooler_output.dtype == torch.bfloat16
    )


def test_a_folder_of_ours(tmp_path: Path) -> None:
    """What `veca.save` wrote is read by every Auto class."""
    plain = make_tiny(num_classes=5)
    plain.provenance = {"teacher": "none"}
    veca.save(plain, tmp_path)
    classifier, info = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(classifier(random_images(), cores=8).logits, plain(random_images(), 8).logits)
    assert classifier.veca.provenance == plain.provenance
    veca.save(classifier.veca, tmp_path / "again")
    assert_equal(dict(veca.load(tmp_path / "again").state_dict()), dict(plain.state_dict()))
    assert_equal(AutoModel.from_pretrained(tmp_path)(random_images()).pooler_output, plain(random_images()).cls)


def test_a_folder_of_ours_in_half_precision_is_float32_too(tmp_path: Path) -> None:
    veca.save(make_tiny().half(), tmp_path)
    assert {p.dtype for p in AutoModel.from_pretrained(tmp_path).parameters()} == {torch.float32}
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.float16)
    assert {p.dtype for p in half.parameters()} == {torch.float16}


def test_released_weights_come_along(tmp_path: Path) -> None:
    plain = veca.load(GOLDEN / "official_checkpoint.pt")
    VecaModel.from_veca(plain).save_pretrained(tmp_path)
    images = torch.randn(1, 3, 2 * plain.config.patch_size, 3 * plain.config.patch_size)
    assert_equal(AutoModel.from_pretrained(tmp_path)(images).pooler_output, plain(images).cls)
    assert veca.load(tmp_path).provenance == plain.provenance


def test_what_a_file_lacks_is_drawn_and_nothing_else(tmp_path: Path) -> None:
    plain = make_tiny()
    VecaModel.from_veca(plain).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    classifier = VecaForImageClassification.from_pretrained(tmp_path, num_labels=50)
    head = classifier.veca.head
    assert head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert head.bias.eq(0).all()
    kept = {name: t for name, t in classifier.veca.state_dict().items() if not name.startswith("head.")}
    assert_equal(kept, dict(plain.state_dict()))
    tensors = load_file(file)
    for name in ("cores.1", "core_states.1", "coordinate_alpha", "blocks.0.norm1.weight"):
        tensors.pop(f"veca.{name}")
    save_file(tensors, file, {"format": "pt"})
    found = VecaModel.from_pretrained(tmp_path).veca
    assert found.coordinate_alpha.tolist() == pytest.approx([0.01, 0.01])
    assert found.blocks[0].norm1.weight.eq(1).all()
    assert found.cores[1].std().item() == pytest.approx(64**-0.5, rel=0.2)
    assert 0.1 < found.core_states[1].tanh().norm(dim=1).min() < found.core_states[1].tanh().abs().max() < 1
    for name, tensor in tensors.items():
        assert_equal(found.state_dict()[name.removeprefix("veca.")], tensor)


def test_a_new_model_is_as_the_paper_draws_it() -> None:
    torch.manual_seed(0)
    model = VecaModel(VecaConfig(**SHAPE)).veca
    assert model.blocks[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.core_states[0][0].tanh().norm() < 0.1, "the first core starts at the centre"
    assert model.core_states[0][1:].tanh().norm(dim=1).min() > 0.5
    assert model.coordinate_alpha.tolist() == pytest.approx([0.01, 0.01])


def test_foreign_folders_are_refused(tmp_path: Path) -> None:
    DINOv3ViTModel(DINOv3ViTConfig(**SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(veca.CheckpointError, match="not of a VECA"):
        veca.load(tmp_path)
    VecaModel.from_veca(make_tiny()).save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**told, "depth": 4}))
    with pytest.raises(veca.CheckpointError, match="do not fit its configuration: missing"):
        veca.load(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(veca.CheckpointError, match="no config.json of one beside it"):
        veca.load(tmp_path)


def test_backbone_gives_feature_maps_as_dinov3_does(tmp_path: Path) -> None:
    plain = make_tiny()
    stages = ["stem", "stage2", "stage3"]
    VecaModel.from_veca(plain).save_pretrained(tmp_path)
    backbone = VecaBackbone.from_pretrained(tmp_path, out_features=stages)
    theirs = DINOv3ViTBackbone(DINOv3ViTConfig(**SHAPE, out_features=stages)).eval()
    out, other = backbone(random_images(), cores=8), theirs(random_images())
    assert list(out) == list(other)
    assert [m.shape for m in out.feature_maps] == [m.shape for m in other.feature_maps]
    assert (backbone.channels, backbone.stage_names) == (theirs.channels, theirs.stage_names)
    expected = plain.forward_intermediates(random_images(), [1, 2], norm=True, intermediates_only=True, cores=8)
    for a, b in zip(out.feature_maps[1:], expected, strict=True):
        torch.testing.assert_close(a, b)
    config = VecaConfig(**SHAPE, out_indices=[2], apply_layernorm=False, reshape_hidden_states=False)
    flat = AutoBackbone.from_config(config).eval()
    assert isinstance(flat, VecaBackbone)
    flat.veca.load_state_dict(plain.state_dict())
    (found,) = flat(random_images(), cores=8).feature_maps
    ((patches, cores),) = plain.forward_intermediates(random_images(), [1], True, False, True, "NLC", True, cores=8)
    torch.testing.assert_close(found, torch.cat([cores[:, :1], patches], 1))
    like = {**SHAPE, "patch_size": 16, "out_indices": [2], "apply_layernorm": False, "reshape_hidden_states": False}
    assert found.shape == Dinov2Backbone(Dinov2Config(**like)).eval()(random_images()).feature_maps[0].shape
    assert len(flat(random_images(), output_hidden_states=True).hidden_states) == 4


def test_backbone_runs_and_trains_what_its_maps_need() -> None:
    backbone = VecaBackbone(VecaConfig(**SHAPE, out_indices=[1, 2], apply_layernorm=False, cores=8)).train()
    ran = []
    for i, block in enumerate(backbone.veca.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    sum(m.square().sum() for m in backbone(random_images()).feature_maps).backward()
    assert ran == [0, 1]
    trained = {name for name, p in backbone.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in backbone.named_parameters() if p.grad is not None}
    assert {"veca.cores.0", "veca.coordinate_heads.0.weight", "veca.blocks.1.mlp.fc2.bias"} <= trained
    assert not trained & {"veca.cores.1", "veca.norm.weight", "veca.coordinate_heads.1.weight"}
    stem = VecaBackbone(VecaConfig(**SHAPE, out_features=["stem"])).eval()
    torch.testing.assert_close(
        stem(random_images()).feature_maps[0].flatten(2).mT, stem.veca.norm(stem.veca.patch_embed(random_images()))
    )
    assert len(stem(random_images(), output_hidden_states=True).hidden_states) == 4


@pytest.mark.parametrize("kind", [VecaForImageClassification, VecaBackbone])
def test_a_budget_trains_under_plain_ddp(kind: Any, tmp_path: Path) -> None:
    """DDP stops in the second step if a parameter had no gradient in the first. Loading makes new parameters."""
    kind(VecaConfig(**SHAPE, num_labels=2, cores=16, output_dim=40)).save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path)
    model.gradient_checkpointing_enable()
    model.train()
    assert_ddp_trains(model, lambda out: out[0][0].square().sum() if kind is VecaBackbone else out.logits.sum())


def test_without_the_output_projection(tmp_path: Path) -> None:
    """The width that other libraries read is that of the tokens they get."""
    plain, images = make_tiny(output_dim=40), random_images()
    narrow = copy.deepcopy(plain)
    keep_output(narrow, "none")
    model = VecaModel.from_veca(plain)
    assert model.config.hidden_size == model(images).pooler_output.shape[-1] == 40
    model.save_pretrained(tmp_path)
    for without in (
        AutoModel.from_pretrained(tmp_path, output_dim=None),
        AutoModel.from_pretrained(tmp_path, config=VecaConfig.from_pretrained(tmp_path, out_indices=[1, 3])),
        VecaModel.from_veca(plain, output_dim=None),
    ):
        assert without.config.hidden_size == 64
        assert_equal(without(images).pooler_output, narrow(images).cls)
    backbone, info = VecaBackbone.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert backbone.config.hidden_size == backbone.channels[0] == 64
    assert_equal(backbone(images).feature_maps[0], narrow(images).feature_map)
    classifier = VecaForImageClassification.from_veca(make_tiny(output_dim=40, num_classes=5), output_dim=None)
    assert classifier(images).logits.shape == (2, 5)


@torch.no_grad()
def test_sides_that_are_no_whole_patches() -> None:
    """Shapes are those of DINO, and nothing of the images is left out."""
    images, stages = random_images(2, 57, 85), ["stage1", "stage3"]
    plain = make_tiny()
    backbone = VecaBackbone.from_veca(plain, out_features=stages)
    theirs = DINOv3ViTBackbone(DINOv3ViTConfig(**SHAPE, out_features=stages)).eval()
    maps = backbone(images).feature_maps
    assert [m.shape for m in maps] == [m.shape for m in theirs(images).feature_maps]
    padded = plain(pad_to_multiple(images))
    torch.testing.assert_close(maps[-1], padded.feature_map[..., :3, :5])
    out = VecaModel.from_veca(plain)(images, output_hidden_states=True)
    assert {t.shape for t in (out.last_hidden_state, *out.hidden_states)} == {(2, 64 + 15, 64)}
    torch.testing.assert_close(
        VecaForImageClassification.from_veca(make_tiny(num_classes=3))(images).logits,
        make_tiny(num_classes=3)(pad_to_multiple(images)).logits,
    )
    assert backbone(images[..., :9, :]).feature_maps[0].shape == (2, 64, 0, 5), "no whole patch"
    with pytest.raises(TypeError, match="images are list"):
        VecaModel.from_veca(plain)([images])
    with pytest.raises(ValueError, match="image is 57×85; sides must be multiples of 16"):
        VecaModel.from_veca(plain, pad_images=False)(images)


def test_backbone_with_a_pyramid(tmp_path: Path) -> None:
    plain, images, strides = make_tiny(), random_images(2, 57, 85), ["stride8", "stride32"]
    backbone = VecaBackbone(VecaConfig(**SHAPE, pyramid=32, out_features=strides, cores=16))
    backbone.veca.load_state_dict(plain.state_dict())
    backbone.save_pretrained(tmp_path)
    again = VecaBackbone.from_pretrained(tmp_path)
    assert_equal(dict(again.state_dict()), dict(backbone.state_dict()))
    maps = again(images).feature_maps
    resnet = ResNetBackbone(ResNetConfig(out_features=["stage2", "stage4"], depths=[1, 1, 1, 1]))
    assert [m.shape[2:] for m in maps] == [m.shape[2:] for m in resnet(images).feature_maps]
    assert again.channels == [m.shape[1] for m in maps] == [32, 32]
    expected = again.pyramid(plain(pad_to_multiple(images), cores=16).feature_map, (57, 85))
    torch.testing.assert_close(list(maps), expected)
    assert_equal(dict(veca.load(tmp_path).state_dict()), dict(plain.state_dict()))
    assert_ddp_trains(again.train(), lambda out: sum(m.square().sum() for m in out.feature_maps))
    VecaModel.from_veca(plain).save_pretrained(tmp_path)
    fresh = VecaBackbone.from_pretrained(tmp_path, pyramid=32, out_features=strides)
    assert_equal(fresh.veca.norm.weight, plain.norm.weight)
    assert all(0 < p.std() < 1 for name, p in fresh.pyramid.named_parameters() if p.ndim == 4), "drawn, not left empty"


@pytest.mark.parametrize("kind", [VecaBackbone, VecaForSemanticSegmentation])
def test_new_heads_of_a_plain_model_are_drawn(kind: Any) -> None:
    model = kind.from_veca(make_tiny().double(), pyramid=32, num_labels=3)
    heads = {name: p for name, p in model.named_parameters() if not name.startswith("veca.")}
    assert heads
    assert all((p.device.type, p.dtype) == ("cpu", torch.float64) for p in heads.values())
    assert all(0 < p.std() < 1 for p in heads.values() if p.ndim > 1)


def test_segmentation_learns_and_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = VecaForSemanticSegmentation(VecaConfig(**SHAPE, num_labels=3, cores=8))
    images, labels = random_images(2, 50, 80), torch.full((2, 50, 80), 255)
    labels[..., :40], labels[..., 48:] = 0, 2
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(5):
        losses.append(model(images, labels=labels).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.eval().save_pretrained(tmp_path)
    again = AutoModelForSemanticSegmentation.from_pretrained(tmp_path)
    logits = again(images).logits
    assert logits.shape == (2, 3, 3, 5)
    assert_equal(logits, model(images).logits)
    ignored = torch.nn.functional.cross_entropy(
        torch.nn.functional.interpolate(logits, (50, 80), mode="bilinear"), labels, ignore_index=255
    )
    torch.testing.assert_close(again(images, labels=labels).loss, ignored)
    assert_equal(dict(veca.load(tmp_path).state_dict()), dict(model.veca.state_dict()))


@torch.no_grad()
def test_tokens_in_the_layout_of_a_vit() -> None:
    """LLaVA and others take all tokens after the first for patches."""
    plain = make_tiny()
    model, whole = VecaModel.from_veca(plain, cores=8, return_cores=False), VecaModel.from_veca(plain, cores=8)
    asked = {"output_hidden_states": True}
    out, expected = model(random_images(), **asked), whole(random_images(), **asked)
    assert model.config.num_register_tokens == 0
    for tokens, every in zip((out[0], *out.hidden_states), (expected[0], *expected.hidden_states), strict=True):
        torch.testing.assert_close(tokens, torch.cat([every[:, :1], every[:, 8:]], 1))


def test_gradient_checkpointing_changes_nothing() -> None:
    model = VecaForImageClassification.from_veca(make_tiny(num_classes=3)).train()
    labels = torch.tensor([0, 2])

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        loss = model(random_images(), labels, output_attentions=True).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = gradients()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    torch.testing.assert_close(gradients(), expected)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_pictures_are_prepared_as_by_veca(tmp_path: Path) -> None:
    VecaConfig(**SHAPE).save_pretrained(tmp_path)
    VecaImageProcessor(size=64).save_pretrained(tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    assert isinstance(processor, VecaImageProcessor)
    assert processor.size == {"height": 64, "width": 64}
    expected = veca.images.load_image(fractal_image(), 64)
    fractal_image().save(tmp_path / "photo.png")
    array = np.asarray(fractal_image())
    for source in (
        fractal_image(),
        array,
        torch.from_numpy(array.copy()).permute(2, 0, 1),
        str(tmp_path / "photo.png"),
    ):
        assert_equal(processor(source, return_tensors="pt").pixel_values, expected[None])
    both = processor([fractal_image(), fractal_image().convert("L")], return_tensors="pt").pixel_values
    assert both.shape == (2, 3, 64, 64)
    wide = processor(fractal_image(), size={"height": 32, "width": 64}, fit="stretch", return_tensors="pt").pixel_values
    assert_equal(wide[0], veca.images.load_image(fractal_image(), (32, 64), "stretch"))
    kept = processor(fractal_image(), size={"shortest_edge": 64}, fit="keep", return_tensors="pt").pixel_values
    assert_equal(kept[0], veca.images.load_image(fractal_image(), 64, "keep"))
    with pytest.raises(ValueError, match="size is 50; it must be a positive multiple of 16"):
        processor(fractal_image(), size=50)


@pytest.mark.parametrize(
    "options",
    [
        {"do_resize": False},
        {"do_resize": False, "do_center_crop": True},
        {"do_center_crop": False},
        {"do_center_crop": False, "resample": 2},
        {"do_resize": False, "do_rescale": False},
        {"do_resize": False, "rescale_factor": 0.5},
        {"do_resize": False, "do_normalize": False},
    ],
)
def test_options_mean_what_they_do_in_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    ours = VecaImageProcessor(size=64)
    common = {"size": {"height": 64, "width": 64}, "crop_size": 64, "resample": 3, "do_center_crop": False}
    theirs = BitImageProcessorPil(**common, image_mean=ours.image_mean, image_std=ours.image_std)
    array = np.asarray(fractal_image()).astype(np.float32) / 255
    for source in (fractal_image(), array) if options.get("do_rescale") is False else (fractal_image(),):
        found = ours(source, return_tensors="pt", **options).pixel_values
        torch.testing.assert_close(
            found, theirs(source, return_tensors="pt", **options).pixel_values, rtol=0, atol=1e-4
        )
    VecaImageProcessor(size=64, **options).save_pretrained(tmp_path)
    again = AutoImageProcessor.from_pretrained(tmp_path)(fractal_image(), return_tensors="pt").pixel_values
    assert_equal(again, ours(fractal_image(), return_tensors="pt", **options).pixel_values)


def test_options_of_the_result() -> None:
    ours = VecaImageProcessor(size=64)
    first, last = (ours(fractal_image(), return_tensors="pt", data_format=f"channels_{c}") for c in ("first", "last"))
    assert_equal(last.pixel_values, first.pixel_values.permute(0, 2, 3, 1))
    assert ours(fractal_image(), return_tensors="pt", device="meta").pixel_values.device.type == "meta"
    with pytest.raises(ValueError, match=r"unknown option 'do_resise' \(did you mean 'do_resize'"):
        ours(fractal_image(), do_resise=False)


def test_pipelines_of_transformers_run(tmp_path: Path) -> None:
    plain = make_tiny(num_classes=3)
    VecaForImageClassification.from_veca(plain).save_pretrained(tmp_path)
    VecaImageProcessor(size=32).save_pretrained(tmp_path)
    image = veca.images.load_image(fractal_image(), 32)[None]
    with torch.no_grad():
        out = plain(image)
    features = pipeline("image-feature-extraction", model=str(tmp_path), device="cpu")
    assert np.shape(features(fractal_image())) == (1, 64 + 4, 64)
    assert features(fractal_image(), pool=True)[0] == pytest.approx(out.cls[0].tolist(), abs=1e-4)
    labels = pipeline("image-classification", model=str(tmp_path), device="cpu")
    assert labels(fractal_image())[0]["label"] == f"LABEL_{int(out.logits.argmax())}"


def test_trainer_fine_tunes_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = VecaForImageClassification(VecaConfig(**SHAPE, num_labels=2, cores=16))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = [{"pixel_values": random_images(1, 32, 32)[0], "labels": i % 2} for i in range(4)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=0.01, report_to=[], use_cpu=True,
        gradient_checkpointing=True, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)  # type: ignore[arg-type]
    assert trainer.train().global_step == 2
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    still = set(before) - changed
    assert still == {f"veca.{bank}.{i}" for bank in ("cores", "core_states") for i in range(2, 8)}, "beyond the budget"
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(str(tmp_path / "best"))
    assert veca.load(tmp_path / "best").num_classes == 2
