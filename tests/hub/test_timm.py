"""VECA as a model of timm: what timm's own tests of models ask for, and the budget."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import GOLDEN, make_tiny
from PIL import Image
from processes import assert_ddp_trains
from sample_images import random_images
from timm.data import create_transform, resolve_model_data_config
from timm.models import FeatureInfo, group_parameters
from timm.optim import create_optimizer_v2
from torch import nn

import veca
from veca.config import get_config
from veca.hub.timm import TimmVeca
from veca.inspect import core_maps, draw_budgets, draw_features, draw_paths, measure_cores

SMALL = {"embed_dim": 64, "depth": 3, "num_heads": 2}
NAMES = [f"{size}_patch16" for size in veca.list_models()]


def create(name: str = "veca_tiny_patch16", **options: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL, **options).eval()


def same_weights(model: nn.Module) -> None:
    """Weights that make every path matter, the same for every model of one shape."""
    source = make_tiny(num_classes=model.num_classes)
    model.load_state_dict(source.state_dict())


def test_registered_by_an_import_of_its_own() -> None:
    """Importing veca costs no import of timm, transformers or the compiler, and does not act when timm is imported."""
    program = """
import sys
import veca
assert not {"timm", "transformers", "torch._dynamo", "torch._inductor"} & set(sys.modules), "loaded too early"
import timm
assert not timm.is_model("veca_small_patch16")
sys.modules["transformers"] = None  # as if it were not installed
import veca.hub
assert timm.is_model("veca_small_patch16")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_every_size_is_registered_in_timm() -> None:
    assert sorted(timm.list_models("veca*")) == sorted([*NAMES, *(f"{name}_pyramid" for name in NAMES)])
    for name in NAMES:
        model = timm.create_model(name, device="meta")
        assert model.config == get_config(name.removesuffix("_patch16"), num_classes=1000)
        assert model.pretrained_cfg["architecture"] == name


def test_gives_logits_equal_to_the_plain_model() -> None:
    plain, model = make_tiny(num_classes=1000), create()
    model.load_state_dict(plain.state_dict())
    expected = plain(random_images(), 16)
    for cores in (None, 16):
        torch.testing.assert_close(model(random_images(), cores=cores), plain(random_images(), cores).logits)
    tokens = model.forward_features(random_images(), cores=16)
    torch.testing.assert_close(tokens, torch.cat([expected.cores, expected.patches], 1))
    torch.testing.assert_close(model.forward_head(tokens), expected.logits)
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), expected.cls)


def test_budget_at_creation_and_later() -> None:
    model = create(cores=16)
    same_weights(model)
    whole = create()
    same_weights(whole)
    torch.testing.assert_close(model(random_images()), whole(random_images(), cores=16))
    torch.testing.assert_close(model(random_images(), cores=64), whole(random_images()))
    assert not torch.allclose(model(random_images()), whole(random_images()))
    assert model.num_prefix_tokens == 16
    model.budget = 8
    assert model.forward_features(random_images()).shape[1] == 8 + 15
    with pytest.raises(ValueError, match="cores=65; a budget is an integer from 1 to 64"):
        create(cores=65)


def test_without_weights_pretrained_says_so() -> None:
    with pytest.raises(RuntimeError, match="No pretrained weights exist for veca_large_patch16"):
        create("veca_large_patch16", pretrained=True)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ValueError, match="unknown key 'qkv_biass'"):
        create(qkv_biass=True)
    with pytest.raises(ValueError, match="global_pool='map'"):
        create(global_pool="map")


def test_gradient_reaches_every_parameter() -> None:
    model = create(num_classes=42).train()
    out = model(random_images())
    assert out.shape == (2, 42)
    out.square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_gradient_checkpointing_changes_nothing() -> None:
    model = create()
    same_weights(model)
    expected, (final, _) = model(random_images()), model.forward_intermediates(random_images())
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(random_images()), expected)
    torch.testing.assert_close(model.forward_intermediates(random_images())[0], final)


def test_classifier_is_replaced_and_pooling_with_it() -> None:
    model = create(cores=16)
    assert (model.num_classes, model.num_features, model.head_hidden_size) == (1000, 64, 64)
    model.reset_classifier(0)
    tokens = model.forward_features(random_images())
    assert model.num_classes == 0
    torch.testing.assert_close(model(random_images()), tokens[:, 0])
    model.reset_classifier(0, "avg")
    torch.testing.assert_close(model(random_images()), tokens[:, 16:].mean(1))
    torch.testing.assert_close(
        model(random_images(), cores=8), model.forward_features(random_images(), cores=8)[:, 8:].mean(1)
    )
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(random_images()), tokens)
    model.reset_classifier(5, "token")
    assert model(random_images()).shape == (2, 5)
    assert create(num_classes=0, global_pool="")(random_images()).shape == (2, 64 + 15, 64)


def test_a_new_classifier_is_like_the_model() -> None:
    model = create().to(device="meta", dtype=torch.float64)
    model.reset_classifier(0)
    model.reset_classifier(2)
    assert all((p.device.type, p.dtype) == ("meta", torch.float64) for p in model.get_classifier().parameters())
    assert not any(module.training for module in model.modules())


def test_configuration_names_what_is_there() -> None:
    model = create()
    cfg, state = model.default_cfg, model.state_dict()
    assert cfg is model.pretrained_cfg
    for layer in (cfg["classifier"], cfg["first_conv"]):
        assert f"{layer}.weight" in state


def test_made_on_the_meta_device_and_filled_later() -> None:
    model = create(device="meta", dtype=torch.float64, num_classes=5)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float64)}
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan"))
    model.init_weights()
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert model(random_images().double()).isfinite().all()


def test_features_only_gives_maps_of_the_blocks() -> None:
    model = create(features_only=True, out_indices=(0, 1), cores=16)
    same = create(cores=16)
    assert model.feature_info.channels() == [64, 64]
    assert model.feature_info.reduction() == [16, 16]
    found = model(random_images())
    expected = same.forward_intermediates(random_images(), [0, 1], intermediates_only=True)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == (2, 64, 3, 5)
        torch.testing.assert_close(a, b)
    assert len(model.model.blocks) == 2, "what is not needed is not kept"
    sum(f.square().mean() for f in found).backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert all(name.startswith(("model.cores.", "model.core_states.")) for name in unused), unused
    assert len(create(features_only=True)(random_images())) == 3


def test_features_of_a_model_with_output_map() -> None:
    model = create(features_only=True, out_indices=[-1], output_dim=48)
    assert model(random_images())[0].shape == (2, 64, 3, 5)
    assert not any("output_proj" in name for name, _ in model.named_parameters())


def test_intermediates_agree_with_feature_info() -> None:
    model = create()
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    final, found = model.forward_intermediates(random_images())
    assert [f.shape[1] for f in found] == info.channels()
    assert [48 // f.shape[2] for f in found] == info.reduction()
    torch.testing.assert_close(final, model.forward_features(random_images()))
    vit = timm.create_model("vit_tiny_patch16_224", depth=3, img_size=(48, 80), embed_dim=64, num_heads=2).eval()
    for options in ({}, {"return_prefix_tokens": True, "output_fmt": "NLC"}, {"intermediates_only": True}):
        ours, theirs = (
            m.forward_intermediates(random_images(), [0, 2], output_dict=True, **options) for m in (model, vit)
        )
        assert sorted(ours) == sorted(theirs)
        assert [t.shape for t in ours["image_intermediates"]] == [t.shape for t in theirs["image_intermediates"]]


def test_set_input_size_checks_its_arguments() -> None:
    model = create(img_size=64, dynamic_img_size=True)
    assert model.patch_embed.grid_size == (4, 4)
    model.set_input_size((48, 80))
    assert (model.patch_embed.img_size, model.patch_embed.num_patches) == ((48, 80), 15)
    model.set_input_size(patch_size=16)
    assert model.patch_embed.grid_size == (3, 5)
    assert model(random_images(1, 32, 32)).shape == (1, 1000), "any size is taken"
    with pytest.raises(ValueError, match="img_size=250; sides must be positive multiples of 16"):
        create(img_size=250)
    with pytest.raises(ValueError, match="patch_size=14; the weights are for patches of 16"):
        model.set_input_size(patch_size=14)


def test_pictures_are_prepared_as_by_veca(tmp_path: Path) -> None:
    from PIL import Image

    image = Image.effect_mandelbrot((900, 600), (-2, -1, 1, 1), 50).convert("RGB")
    data = resolve_model_data_config(create())
    assert data["input_size"] == (3, 512, 512)
    ours, theirs = veca.images.load_image(image), create_transform(**data)(image)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)


def test_weight_decay_and_layers() -> None:
    model = create()
    spared = {"cores.0", "core_states.7", "coordinate_alpha"}
    assert spared <= model.no_weight_decay() <= {name for name, _ in model.named_parameters()}
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    assert {layers[name] for name in ("cores.0", "core_states.0", "coordinate_alpha", "patch_embed.proj.bias")} == {0}
    assert layers["blocks.0.attn.qkv.weight"] == layers["coordinate_heads.0.bias"] == 1
    assert layers["blocks.2.mlp.fc1.weight"] == layers["norm.weight"] == 3
    assert layers["head.weight"] == 4
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    group = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    assert group[id(model.cores[0])]["weight_decay"] == 0
    assert group[id(model.blocks[0].mlp.fc1.weight)]["weight_decay"] == 0.05
    assert group[id(model.cores[0])]["lr_scale"] == pytest.approx(0.5**4)


@pytest.mark.parametrize("options", [{}, {"features_only": True, "out_indices": (0, 1)}, {"global_pool": "avg"}])
def test_a_budget_trains_under_plain_ddp(options: dict[str, Any]) -> None:
    model = create(cores=16, **options).train()
    assert_ddp_trains(model, lambda out: sum(each.square().sum() for each in out))


def test_names_mean_one_architecture_with_or_without_weights(tmp_path: Path) -> None:
    """A run that began with pretrained weights is validated by name, as timm's scripts do."""
    name, torch_file = "veca_tiny_patch16", tmp_path / "last.pth.tar"
    model = timm.create_model(name, pretrained=True, num_classes=2)
    assert (model.num_features, model.config.output_dim) == (192, None)
    torch.save({"state_dict": model.state_dict()}, torch_file)
    again = timm.create_model(name, num_classes=2, checkpoint_path=str(torch_file))
    torch.testing.assert_close(again.head.weight, model.head.weight, rtol=0, atol=0)
    projected = timm.create_model(name, pretrained=True, output_dim=1280).eval()
    assert_close = torch.testing.assert_close
    assert_close(projected(random_images(), cores=8), veca.load("veca_tiny")(random_images(), 8).cls)
    narrow = projected.output_proj(model.eval().forward_features(random_images(), cores=8)[:, 0])
    assert_close(narrow, projected(random_images(), cores=8))


def test_dynamic_img_pad_as_of_timm() -> None:
    model, images = create(dynamic_img_pad=True, num_classes=0), random_images(1, 57, 85)
    options = {"embed_dim": 64, "depth": 3, "num_heads": 2, "dynamic_img_size": True, "dynamic_img_pad": True}
    theirs = timm.create_model("vit_tiny_patch16_224", **options).eval()
    expected, found = theirs.forward_intermediates(images)[1], model.forward_intermediates(images)[1]
    assert [m.shape for m in found] == [m.shape for m in expected] == [(1, 64, 4, 6)] * 3
    whole = veca.images.resize.pad_to_multiple(images)
    torch.testing.assert_close(model(images), create(num_classes=0)(whole))
    assert model.get_intermediate_layers(images, reshape=True)[0].shape == (1, 64, 4, 6)
    with pytest.raises(ValueError, match="image is 57×85; sides must be multiples of 16"):
        create()(images)


def test_a_pyramid_has_the_maps_of_a_convolutional_network() -> None:
    options = {"features_only": True, "out_indices": (1, 2, 3, 4)}
    resnet, images = timm.create_model("resnet18", **options), random_images(2, 57, 85)
    name = "veca_tiny_patch16_pyramid"
    model = create(name, features_only=True, dynamic_img_pad=True, pyramid_channels=32, cores=16)
    assert [m.shape[2:] for m in model(images)] == [m.shape[2:] for m in resnet(images)]
    assert model.feature_info.reduction() == resnet.feature_info.reduction()
    assert model.feature_info.channels() == [m.shape[1] for m in model(images)] == [32] * 4
    two = create(name, features_only=True, out_indices=(0, 2), cores=16).train()
    assert two.feature_info.reduction() == [4, 16]
    assert_ddp_trains(two, lambda maps: sum(m.square().sum() for m in maps))
    assert isinstance(create(name), TimmVeca), "without features_only there is no pyramid"


def test_stochastic_depth_acts_in_training_only() -> None:
    model = create(drop_path_rate=0.5, coordinate_shift=0.0, coordinate_rescale=1.0)
    same_weights(model)
    plain = create()
    same_weights(plain)
    torch.testing.assert_close(model(random_images()), plain(random_images()))
    twin = copy.deepcopy(model)  # as an average of weights is kept
    model.train()
    torch.manual_seed(0)
    draws = torch.stack([model(random_images()) for _ in range(8)]).detach()
    assert draws.std(0).max() > 0.01
    torch.testing.assert_close(twin(random_images()), plain(random_images()))


def test_width_at_creation_and_at_the_call(tmp_path: Path) -> None:
    source, images = make_tiny(num_classes=7, mlp_ratio=4.0, widths=(0.25, 1.0)), random_images()
    veca.save(source, tmp_path / "model.safetensors")
    path = str(tmp_path / "model.safetensors")
    options = {"num_classes": 7, "mlp_ratio": 4.0, "widths": (0.25, 1.0), "checkpoint_path": path}
    model = create(width=0.25, **options)
    loaded = create(num_classes=7, mlp_ratio=4.0)
    loaded.load_pretrained(path)
    assert loaded.config == model.config == source.config
    expected = source(images, 8, width=0.25)
    torch.testing.assert_close(model(images, cores=8), expected.logits)
    torch.testing.assert_close(create(**options)(images, cores=8, width=0.25), expected.logits)
    torch.testing.assert_close(model(images, cores=8, width=1), source(images, 8).logits)
    model.reset_classifier(0, "avg")
    torch.testing.assert_close(model(images, cores=8), expected.patches.mean(1))
    with pytest.raises(ValueError, match="width=0; a width is a number above 0"):
        create(width=0)


def test_checkpoint_path_takes_files_of_ours(tmp_path: Path) -> None:
    source = make_tiny(num_classes=7)
    veca.save(source, tmp_path / "model.safetensors")
    model = create(num_classes=7, checkpoint_path=str(tmp_path / "model.safetensors"))
    torch.testing.assert_close(model(random_images(), cores=8), source(random_images(), 8).logits)
    veca.save(model, tmp_path / "again")
    again = veca.load(tmp_path / "again")
    torch.testing.assert_close(again(random_images(), 8).patches, source(random_images(), 8).patches, rtol=0, atol=0)


def test_pretrained_from_a_released_file() -> None:
    file = GOLDEN / "official_checkpoint.pt"
    source = veca.load(file)
    images = torch.randn(1, 3, 2 * source.config.patch_size, 3 * source.config.patch_size)
    fields = {**source.config.to_dict(), "num_classes": 3}
    overlay = {"file": str(file)}
    name = "veca_small_patch16"
    model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **fields).eval()
    assert model(images).shape == (1, 3)
    torch.testing.assert_close(model.forward_features(images)[:, 0], source(images).cls)
    assert model.provenance == source.provenance
    grey = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **{**fields, "in_chans": 1}).eval()
    same = images[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(grey.forward_features(images[:, :1])[:, 0], source(same).cls, rtol=1e-4, atol=1e-4)
    with pytest.raises(veca.CheckpointError, match="its depth is"):
        timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **{**fields, "depth": 7})


def test_a_folder_of_timm_comes_back(tmp_path: Path) -> None:
    model = create(num_classes=4)
    timm.models.save_for_hf(model, tmp_path, model_args=SMALL)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert isinstance(again, TimmVeca)
    torch.testing.assert_close(again(random_images()), model(random_images()), rtol=0, atol=0)


def test_tools_of_veca_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = create(cores=16)
    assert core_maps(model, random_images()).shape == (1, 2, 16, 3, 5)
    Image.new("RGB", (48, 32), "orange").save(tmp_path / "a.png")
    draw_budgets(model, tmp_path / "a.png", size=32)
    draw_features(model, tmp_path / "a.png", sizes=(32,))
    draw_paths(model, tmp_path / "a.png", size=32)
    measure_cores(model, tmp_path / "a.png", budgets=(8,), size=32)
    veca.embed.embed(tmp_path / "a.png", tmp_path / "a.parquet", model=model, model_name="mine", progress=False)
    monkeypatch.setattr("veca.optimized.supports_fused", lambda *_: True)
    with pytest.raises(ValueError, match="a TimmVeca is not called as a Veca is"):
        veca.optimize(model)


def test_the_timm_model_compiles_as_one_graph() -> None:
    model = create(num_classes=3)
    same_weights(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(random_images()), model(random_images()))
