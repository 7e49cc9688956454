"""VECA as the backbone of other libraries' models: how each is made, what it learns, what it predicts, how it loads.

Tests train and save them, and load them again in a process of its own, which imports this module too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import transformers
from conftest import make_tiny
from sample_images import random_images
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import veca.hub  # noqa: F401 (registers)
from veca.hub.transformers import VecaConfig, VecaForImageClassification

SHAPE: dict[str, Any] = {"embed_dim": 64, "depth": 3, "num_heads": 2}
SIZE = 64
BLOCKS = {"out_indices": [1, 2, 3]}
PYRAMID = {"pyramid": 32, "out_features": ["stride4", "stride8", "stride16", "stride32"]}
DETECTION = {"pyramid": 32, "out_features": ["stride8", "stride16", "stride32"]}
TOKENS = {"out_indices": [0, 1, 2, 3], "reshape_hidden_states": False}
NECK: dict[str, Any] = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}
BOX = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.3, 0.2]])}
QUERIES: dict[str, Any] = {
    "num_labels": 3, "encoder_in_channels": [32] * 3, "decoder_in_channels": [32] * 3, "d_model": 32,
    "encoder_hidden_dim": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 10, "num_denoising": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_n_points": 2,
}  # fmt: skip
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
WORDS = torch.ones(2, 4).long()
PROMPT = torch.tensor([1, *[39] * (SIZE // 16) ** 2, 2]).expand(2, -1)
"""One token for each patch: none for cores."""


class Recipe(NamedTuple):
    make: Callable[[], Any]
    loss: Callable[[Any], Tensor]
    predict: Callable[[Any], Tensor]
    load: Callable[[Path], Any]
    """From the folder where `save` has put it."""
    unused: tuple[str, ...] = ()
    """Parts of the backbone that the model does not use, with any backbone."""


def images() -> Tensor:
    return random_images(2, SIZE, SIZE)


def backbone(**fields: Any) -> VecaConfig:
    return VecaConfig(**SHAPE, cores=16, **fields)


def save(model: Any, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        folder.mkdir()
        torch.save(model.state_dict(), folder / "model.pt")


def of_transformers(
    model: Any, make_config: Callable[[], Any], labels: dict[str, Any], output: str, **more: Any
) -> Recipe:
    """A model that computes its loss itself."""
    given = more.pop("given", {})
    return Recipe(
        lambda: model(make_config()),
        lambda made: made(pixel_values=images(), **given, **labels).loss,
        lambda made: made(pixel_values=images(), **given)[output],
        model.from_pretrained,
        **more,
    )


def of_depth(model: Any, make_config: Callable[[], Any]) -> Recipe:
    """A model of transformers that only predicts."""

    def predict(made: Any) -> Tensor:
        depth: Tensor = made(images()).predicted_depth
        return depth

    def loss(made: Any) -> Tensor:
        return (predict(made) - 1).square().mean()

    return Recipe(lambda: model(make_config()), loss, predict, model.from_pretrained)


def make_upernet() -> Any:
    return transformers.UperNetConfig(
        backbone_config=backbone(**BLOCKS), hidden_size=16, pool_scales=[1, 2], num_labels=3, use_auxiliary_head=False
    )


def make_mask2former() -> Any:
    return transformers.Mask2FormerConfig(
        backbone_config=backbone(**PYRAMID), num_labels=3, hidden_dim=32, feature_size=32, mask_feature_size=32,
        encoder_layers=1, decoder_layers=2, num_queries=5, dim_feedforward=32, encoder_feedforward_dim=32,
        num_attention_heads=2,
    )  # fmt: skip


def make_detr() -> Any:
    return transformers.DetrConfig(
        backbone_config=backbone(out_indices=[3]), num_labels=3, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=5,
    )  # fmt: skip


def make_dpt() -> Any:
    return transformers.DPTConfig(backbone_config=backbone(**TOKENS), readout_type="project", **NECK)


def make_depth_anything() -> Any:
    return transformers.DepthAnythingConfig(
        backbone_config=backbone(**TOKENS), reassemble_hidden_size=64, patch_size=16, **NECK
    )


def make_zoe_depth() -> Any:
    return transformers.ZoeDepthConfig(
        backbone_config=backbone(**TOKENS), bottleneck_features=16, num_relative_features=16,
        num_attractors=[4, 4, 4, 1], bin_embedding_dim=16, **NECK,
        bin_configurations=[{"n_bins": 8, "min_depth": 0.1, "max_depth": 10.0, "name": "rooms"}],
    )  # fmt: skip


def make_dual_encoder() -> Any:
    """The text and image towers have the widths that `hidden_size` says, whether there is a projection or not."""
    return transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        backbone(output_dim=48), BERT, projection_dim=16
    )


def make_captions() -> Any:
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(backbone(output_dim=48), GPT2)
    config.decoder_start_token_id = config.pad_token_id = 0
    return config


def make_llava() -> Any:
    vision = backbone(output_dim=None, return_cores=False)
    return transformers.LlavaConfig(vision_config=vision, text_config=LLAMA, image_token_index=39)


class Pyramid(nn.Module):
    """As in docs/ecosystem.md."""

    def __init__(self) -> None:
        super().__init__()
        fields = {**SHAPE, "pyramid_channels": 32, "cores": 16}
        self.body = timm.create_model("veca_tiny_patch16_pyramid", features_only=True, **fields)
        self.out_channels = 32

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return OrderedDict((str(i), each) for i, each in enumerate(self.body(x)))


def of_torchvision(kind: Any) -> Recipe:
    def make() -> Any:
        anchors = AnchorGenerator(((16,), (32,), (64,), (128,)), ((1.0,),) * 4)
        levels = list("0123")
        pools = {"box_roi_pool": MultiScaleRoIAlign(levels, 3, 2)}
        pools |= {"mask_roi_pool": MultiScaleRoIAlign(levels, 4, 2)} if kind is MaskRCNN else {}
        return kind(Pyramid(), 2, rpn_anchor_generator=anchors, min_size=SIZE, max_size=SIZE, **pools)

    def loss(model: Any) -> Tensor:
        target = {"boxes": torch.tensor([[4.0, 4.0, 30.0, 30.0]]), "labels": torch.tensor([1])}
        targets = [{**target, "masks": torch.ones(1, *photo.shape[1:]).byte()} for photo in photos()]
        return torch.stack(list(model(photos(), targets).values())).sum()

    def predict(model: Any) -> Tensor:
        found = model(photos())
        kinds = ("boxes", "scores", *(("masks",) if kind is MaskRCNN else ()))
        return torch.cat([each[name].flatten() for each in found for name in kinds])

    def load(folder: Path) -> Any:
        model = make()
        model.load_state_dict(torch.load(folder / "model.pt"))
        return model.eval()

    return Recipe(make, loss, predict, load)


def photos() -> list[Tensor]:
    return [random_images(1, 50, 70)[0].sigmoid(), random_images(1, 64, 40)[0].sigmoid()]


def make_unet() -> Any:
    fields = {"decoder_channels": (16, 16, 8, 8, 8), "pyramid_channels": 16, "cores": 16, "encoder_weights": None}
    return import_module("segmentation_models_pytorch").Unet("tu-veca_tiny_patch16_pyramid", classes=2, **fields)


def make_adapted() -> Any:
    """Low-rank adapters of peft on a classifier."""
    peft = import_module("peft")
    settings = peft.LoraConfig(r=2, target_modules=["qkv", "proj", "fc1", "fc2"], modules_to_save=["head"])
    return peft.get_peft_model(VecaForImageClassification.from_veca(make_tiny(num_classes=3), cores=16), settings)


def load_adapted(folder: Path) -> Any:
    base = VecaForImageClassification.from_veca(make_tiny(num_classes=3), cores=16)
    return import_module("peft").PeftModel.from_pretrained(base, folder)


BOXES = {"labels": [BOX, BOX]}
RECIPES = {
    "UperNet": of_transformers(
        transformers.UperNetForSemanticSegmentation, make_upernet,
        {"labels": torch.ones(2, SIZE, SIZE).long()}, "logits",
    ),
    "Mask2Former": of_transformers(
        transformers.Mask2FormerForUniversalSegmentation, make_mask2former,
        {"mask_labels": [torch.ones(1, SIZE, SIZE)] * 2, "class_labels": [torch.tensor([1])] * 2},
        "masks_queries_logits",
    ),
    "DETR": of_transformers(transformers.DetrForObjectDetection, make_detr, BOXES, "pred_boxes"),
    "RT-DETR": of_transformers(
        transformers.RTDetrForObjectDetection,
        lambda: transformers.RTDetrConfig(backbone_config=backbone(**DETECTION), decoder_layers=1, **QUERIES),
        BOXES, "pred_boxes",
    ),
    "D-FINE": of_transformers(
        transformers.DFineForObjectDetection,
        lambda: transformers.DFineConfig(backbone_config=backbone(**DETECTION), decoder_layers=2, **QUERIES),
        BOXES, "pred_boxes",
    ),
    "DPT": of_depth(transformers.DPTForDepthEstimation, make_dpt),
    "Depth Anything": of_depth(transformers.DepthAnythingForDepthEstimation, make_depth_anything),
    "ZoeDepth": of_depth(transformers.ZoeDepthForDepthEstimation, make_zoe_depth),
    "VisionTextDualEncoder": of_transformers(
        transformers.VisionTextDualEncoderModel, make_dual_encoder, {"return_loss": True}, "logits_per_image",
        given={"input_ids": WORDS},
    ),
    "VisionEncoderDecoder": of_transformers(
        transformers.VisionEncoderDecoderModel, make_captions, {"labels": WORDS}, "logits",
        given={"decoder_input_ids": WORDS},
    ),
    "LLaVA": of_transformers(
        transformers.LlavaForConditionalGeneration, make_llava, {"labels": PROMPT.clamp(max=38)}, "logits",
        given={"input_ids": PROMPT}, unused=("blocks.2.", "coordinate_heads.1.", "veca.norm."),
    ),
    "Faster R-CNN": of_torchvision(FasterRCNN),
    "Mask R-CNN": of_torchvision(MaskRCNN),
    "segmentation_models_pytorch": Recipe(
        make_unet, lambda model: model(images()).square().mean(), lambda model: model(images()),
        lambda folder: import_module("segmentation_models_pytorch").from_pretrained(folder),
    ),
    "peft": Recipe(
        make_adapted, lambda model: model(pixel_values=images(), labels=torch.tensor([0, 2])).loss,
        lambda model: model(images()).logits, load_adapted,
    ),
}  # fmt: skip
PACKAGES = {"segmentation_models_pytorch", "peft"}
"""Recipes that need a package of their name."""
