"""VECA as the backbone of other libraries' models: each trains a few steps, is saved, loaded again and predicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from conftest import make_tiny
from processes import run_program
from safetensors.torch import load_file, save_file
from sample_images import random_images
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from veca.hub.transformers import VecaBackbone, VecaConfig, VecaForImageClassification

SHAPE: dict[str, Any] = {"embed_dim": 64, "depth": 3, "num_heads": 2}
SIZE = 64
BLOCKS = {"out_indices": [1, 2, 3]}
PYRAMID = {"pyramid": 32, "out_features": ["stride4", "stride8", "stride16", "stride32"]}
BOX = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.3, 0.2]])}


def train(model: nn.Module, loss_of: Callable[[], Tensor], steps: int = 3) -> None:
    """A few steps, in which the loss is a number and every parameter of the backbone that is not frozen learns."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=1e-2)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
    assert not [name for name, p in trained.items() if p.grad is None and ("veca" in name or "body" in name)]
    model.eval()


def images() -> Tensor:
    return random_images(2, SIZE, SIZE)


def make_upernet(backbone: Any) -> tuple[Any, dict[str, Any]]:
    config = transformers.UperNetConfig(
        backbone_config=backbone(**BLOCKS), hidden_size=16, pool_scales=[1, 2], num_labels=3,
        use_auxiliary_head=False,
    )  # fmt: skip
    return transformers.UperNetForSemanticSegmentation(config), {"labels": torch.ones(2, SIZE, SIZE).long()}


def make_mask2former(backbone: Any) -> tuple[Any, dict[str, Any]]:
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone(**PYRAMID), num_labels=3, hidden_dim=32, feature_size=32, mask_feature_size=32,
        encoder_layers=1, decoder_layers=2, num_queries=5, dim_feedforward=32, encoder_feedforward_dim=32,
        num_attention_heads=2,
    )  # fmt: skip
    labels = {"mask_labels": [torch.ones(1, SIZE, SIZE)] * 2, "class_labels": [torch.tensor([1])] * 2}
    return transformers.Mask2FormerForUniversalSegmentation(config), labels


def make_detr(backbone: Any) -> tuple[Any, dict[str, Any]]:
    config = transformers.DetrConfig(
        backbone_config=backbone(out_indices=[3]), num_labels=3, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=5,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config), {"labels": [BOX, BOX]}


def make_rt_detr(backbone: Any) -> tuple[Any, dict[str, Any]]:
    config = transformers.RTDetrConfig(
        backbone_config=backbone(pyramid=32, out_features=["stride8", "stride16", "stride32"]), num_labels=3,
        encoder_in_channels=[32] * 3, decoder_in_channels=[32] * 3, d_model=32, encoder_hidden_dim=32,
        encoder_ffn_dim=32, decoder_ffn_dim=32, decoder_layers=1, num_queries=10, num_denoising=2,
        encoder_attention_heads=2, decoder_attention_heads=2, decoder_n_points=2,
    )  # fmt: skip
    return transformers.RTDetrForObjectDetection(config), {"labels": [BOX, BOX]}


MAKERS = [make_upernet, make_mask2former, make_detr, make_rt_detr]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of trained models of transformers, and what each predicts."""
    folder, outputs = tmp_path_factory.mktemp("recipes"), {}
    for make in MAKERS:
        torch.manual_seed(0)
        model, labels = make(lambda **fields: VecaConfig(**SHAPE, cores=16, **fields))
        train(model, lambda: model(images(), **labels).loss)  # noqa: B023 (called at once)
        model.save_pretrained(folder / type(model).__name__)
        with torch.no_grad():
            outputs[type(model).__name__] = predicted(model(images()))
    save_file({"images": images(), **outputs}, folder / "outputs.safetensors")
    return folder


def predicted(out: Any) -> Tensor:
    return next(out[key] for key in ("pred_boxes", "masks_queries_logits", "logits") if key in out).contiguous()


def test_models_of_transformers_train_and_are_saved(saved: Path) -> None:
    assert len(load_file(saved / "outputs.safetensors")) == 1 + len(MAKERS)


LOAD = """
import sys
import torch, transformers
from safetensors.torch import load_file
import veca.hub
expected = load_file("outputs.safetensors")
images = expected.pop("images")
for name, output in expected.items():
    model = getattr(transformers, name).from_pretrained(name)
    with torch.no_grad():
        out = model(images)
    keys = ("pred_boxes", "masks_queries_logits", "logits")
    found = next(out[key] for key in keys if key in out)
    torch.testing.assert_close(found, output)
    print(name)
"""


def test_models_of_transformers_predict_in_a_fresh_process(saved: Path) -> None:
    assert len(run_program(LOAD, folder=saved).split()) == len(MAKERS)


BERT = transformers.BertConfig(
    vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
)
GPT2 = transformers.GPT2Config(
    vocab_size=20, n_embd=32, n_layer=1, n_head=2, n_positions=16, is_decoder=True, add_cross_attention=True,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
LLAMA = transformers.LlamaConfig(
    vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
)
NECK = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}
TOKENS = {"out_indices": [0, 1, 2, 3], "reshape_hidden_states": False}


def dual_encoder() -> Tensor:
    """The text and image towers have the widths that `hidden_size` says, whether there is a projection or not."""
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        VecaConfig(**SHAPE, output_dim=48), BERT, projection_dim=16
    )
    model = transformers.VisionTextDualEncoderModel(config)
    return model(input_ids=torch.ones(2, 4).long(), pixel_values=images(), return_loss=True).loss


def captions() -> Tensor:
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        VecaConfig(**SHAPE, output_dim=48), GPT2
    )
    model = transformers.VisionEncoderDecoderModel(config)
    model.config.decoder_start_token_id = model.config.pad_token_id = 0
    return model(pixel_values=images(), labels=torch.ones(2, 4).long()).loss


def llava() -> Tensor:
    """One token of the prompt for each patch: none for cores."""
    vision = VecaConfig(**SHAPE, cores=32, output_dim=None, return_cores=False)
    config = transformers.LlavaConfig(vision_config=vision, text_config=LLAMA, image_token_index=39)
    prompt = torch.tensor([1, *[39] * (SIZE // 16) ** 2, 2]).expand(2, -1)
    model = transformers.LlavaForConditionalGeneration(config)
    return model(input_ids=prompt, pixel_values=images(), labels=prompt.clamp(max=38)).loss


def depth_anything() -> Tensor:
    backbone = VecaConfig(**SHAPE, **TOKENS)
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=64, patch_size=16, **NECK
    )
    return transformers.DepthAnythingForDepthEstimation(config)(images()).predicted_depth.mean()


def zoe_depth() -> Tensor:
    config = transformers.ZoeDepthConfig(
        backbone_config=VecaConfig(**SHAPE, **TOKENS), bottleneck_features=16, num_relative_features=16,
        num_attractors=[4, 4, 4, 1], bin_embedding_dim=16, **NECK,
        bin_configurations=[{"n_bins": 8, "min_depth": 0.1, "max_depth": 10.0, "name": "rooms"}],
    )  # fmt: skip
    return transformers.ZoeDepthForDepthEstimation(config)(images()).predicted_depth.mean()


def d_fine() -> Tensor:
    config = transformers.DFineConfig(
        backbone_config=VecaConfig(**SHAPE, pyramid=32, out_features=["stride8", "stride16", "stride32"]),
        encoder_in_channels=[32] * 3, decoder_in_channels=[32] * 3, num_labels=3, d_model=32, encoder_hidden_dim=32,
        encoder_ffn_dim=32, decoder_ffn_dim=32, decoder_layers=2, num_queries=10, num_denoising=2,
        encoder_attention_heads=2, decoder_attention_heads=2, decoder_n_points=2,
    )  # fmt: skip
    return transformers.DFineForObjectDetection(config)(images(), labels=[BOX, BOX]).loss


@pytest.mark.parametrize("loss_of", [dual_encoder, captions, llava, depth_anything, zoe_depth, d_fine])
def test_other_models_of_transformers_run(loss_of: Callable[[], Tensor]) -> None:
    loss = loss_of()
    assert loss.isfinite()
    loss.backward()


def test_plain_weights_become_the_backbone() -> None:
    plain = make_tiny()
    backbone = VecaBackbone.from_veca(plain, **BLOCKS)
    model, _ = make_upernet(lambda **_: backbone.config)
    model.backbone = backbone
    model.eval()
    expected = plain.forward_intermediates(images(), norm=True, intermediates_only=True)
    torch.testing.assert_close(list(model.backbone(images()).feature_maps), expected)


def test_depth_from_dpt(tmp_path: Path) -> None:
    config = transformers.DPTConfig(
        backbone_config=VecaConfig(**SHAPE, out_indices=[0, 1, 2, 3], reshape_hidden_states=False, cores=16),
        neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, readout_type="project",
    )  # fmt: skip
    model = transformers.DPTForDepthEstimation(config)
    train(model, lambda: (model(images()).predicted_depth - 1).square().mean())
    model.save_pretrained(tmp_path)
    again = transformers.DPTForDepthEstimation.from_pretrained(tmp_path)
    depth = again(images()).predicted_depth
    assert depth.shape == (2, SIZE, SIZE)
    torch.testing.assert_close(depth, model(images()).predicted_depth)


def test_detr_takes_batches_of_its_processor() -> None:
    """Padded to sizes that are no multiples of 16, with a mask."""
    model, _ = make_detr(lambda **fields: VecaConfig(**SHAPE, **fields))
    processor = transformers.DetrImageProcessor(size={"shortest_edge": 57, "longest_edge": 90})
    batch = processor([image.numpy() for image in random_images(2, 50, 70).sigmoid()], return_tensors="pt")
    assert batch.pixel_values.shape[-1] % 16
    assert model(**batch).pred_boxes.shape == (2, 5, 4)


@pytest.mark.parametrize("targets", [["qkv", "proj", "fc1", "fc2"], "all-linear"])
def test_low_rank_adapters_of_peft(targets: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = make_tiny(num_classes=3)
    settings = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["head"])
    model = peft.get_peft_model(VecaForImageClassification.from_veca(plain, cores=16), settings)
    labels = torch.tensor([0, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(pixel_values=images(), labels=labels).loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        optimizer.step()
    model.save_pretrained(tmp_path)
    base = VecaForImageClassification.from_veca(plain, cores=16)
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        expected = model.eval()(images()).logits
        torch.testing.assert_close(again(images()).logits, expected)
        torch.testing.assert_close(again.merge_and_unload()(images()).logits, expected)


class Pyramid(nn.Module):
    """As in docs/ecosystem.md."""

    def __init__(self) -> None:
        super().__init__()
        fields = {**SHAPE, "pyramid_channels": 32, "cores": 16}
        self.body = timm.create_model("veca_tiny_patch16_pyramid", features_only=True, **fields)
        self.out_channels = 32

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return OrderedDict((str(i), each) for i, each in enumerate(self.body(x)))


@pytest.mark.parametrize("kind", [FasterRCNN, MaskRCNN])
def test_detectors_of_torchvision(kind: Any, tmp_path: Path) -> None:
    def make() -> Any:
        anchors = AnchorGenerator(((16,), (32,), (64,), (128,)), ((1.0,),) * 4)
        levels = list("0123")
        pools = {"box_roi_pool": MultiScaleRoIAlign(levels, 3, 2)}
        pools |= {"mask_roi_pool": MultiScaleRoIAlign(levels, 4, 2)} if kind is MaskRCNN else {}
        return kind(Pyramid(), 2, rpn_anchor_generator=anchors, min_size=SIZE, max_size=SIZE, **pools)

    torch.manual_seed(0)
    model, photos = make(), [random_images(1, 50, 70)[0].sigmoid(), random_images(1, 64, 40)[0].sigmoid()]
    target = {"boxes": torch.tensor([[4.0, 4.0, 30.0, 30.0]]), "labels": torch.tensor([1])}
    targets = [{**target, "masks": torch.ones(1, *photo.shape[1:]).byte()} for photo in photos]
    train(model, lambda: sum(model(photos, targets).values()))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = make().eval()
    again.load_state_dict(torch.load(tmp_path / "model.pt"))
    for found, expected in zip(again(photos), model(photos), strict=True):
        torch.testing.assert_close(found, expected)


def test_decoders_of_segmentation_models_pytorch(tmp_path: Path) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    fields = {"pyramid_channels": 16, "cores": 16, "encoder_weights": None}

    def make() -> Any:
        return smp.Unet("tu-veca_tiny_patch16_pyramid", decoder_channels=(16, 16, 8, 8, 8), classes=2, **fields)

    model = make()
    train(model, lambda: model(images()).square().mean())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = make().eval()
    again.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert again(images()).shape == (2, 2, SIZE, SIZE)
    torch.testing.assert_close(again(images()), model(images()))
