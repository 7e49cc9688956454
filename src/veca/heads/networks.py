"""Fine-tuned networks, each a backbone with its head: `Classifier`, `Segmenter` and `DepthEstimator`; saved and loaded.

Shapes: B images of H × W pixels, C classes, D width of the features.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from veca.checkpoint.format import HEAD, CheckpointError, StrPath, read_description, read_safetensors, write_tensors
from veca.checkpoint.loading import load
from veca.heads.dense import DenseHead, DepthHead, SegmentationHead
from veca.model import Veca
from veca.packed import PackedImages
from veca.utils.files import atomic_path
from veca.utils.text import excerpt, quoted


class Classifier(nn.Module):
    """A backbone with its linear classifier: images and a budget → scores (B, C), float32."""

    def __init__(self, backbone: Veca) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor | PackedImages, cores: int | None = None, size: Any = None) -> Tensor:
        cls = self.backbone(images, cores, cls_only=True).cls
        with torch.autocast(cls.device.type, enabled=False):  # scores in float32
            return self.backbone.head(cls.float())


class DenseNetwork(nn.Module, ABC):
    """A backbone with a linear head on its map: images and a budget → the output of the head, float32.

    Of a pack, the outputs of the pixels of all images are in one row, image by image: 1 × ΣHW in place of H × W.
    """

    head: DenseHead

    def __init__(self, backbone: Veca) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor | PackedImages, cores: int | None = None, size: Any = None) -> Tensor:
        """`size` of the output is (H, W), or one for each image of a pack; by default that of the images."""
        out: Any = self.backbone(images, cores)
        with torch.autocast(out.cores.device.type, enabled=False):
            if not isinstance(images, PackedImages):
                rows, columns = size or images.shape[-2:]
                return self.head(out.feature_map.float(), out.cls.float(), (rows, columns))
            patch = self.backbone.config.patch_size
            sizes = size or [(rows * patch, columns * patch) for rows, columns in images.grids]
            maps = [
                self.head(each.feature_map.float(), each.cls.float(), own) for each, own in zip(out, sizes, strict=True)
            ]
        return torch.cat([each.flatten(-2) for each in maps], dim=-1).unsqueeze(-2)

    def predict(
        self, images: Tensor | PackedImages, sizes: Sequence[tuple[int, int]], cores: int | None = None
    ) -> list[Tensor]:
        """The prediction (H, W) for each image at its size in `sizes`: class numbers, or metres."""
        out: Any = self.backbone(images, cores)
        if isinstance(images, PackedImages):
            features = [(each.feature_map, each.cls) for each in out]
        else:
            features = list(zip(out.feature_map.split(1), out.cls.split(1), strict=True))
        with torch.autocast(out.cores.device.type, enabled=False):
            pairs = zip(features, sizes, strict=True)
            return [self.head.predict_map(patches.float(), cls.float(), size)[0] for (patches, cls), size in pairs]

    @abstractmethod
    def describe_head(self) -> dict[str, Any]:
        """Plain data from which `load_network` makes the head."""

    def save_head(self, folder: Path) -> None:
        """Write the head into the folder of the backbone."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.head.state_dict().items()}
        with atomic_path(folder / HEAD) as part:
            write_tensors(part, tensors, {"format": "pt", "veca": json.dumps(self.describe_head())})


class Segmenter(DenseNetwork):
    """A backbone with a linear head on its map: images and a budget → scores (B, C, H, W), float32.

    >>> import veca
    >>> segmenter = Segmenter(veca.create_model("veca_tiny"), ["sky", "road"]).eval()
    >>> segmenter(torch.zeros(1, 3, 32, 48), cores=8).argmax(1).shape
    torch.Size([1, 32, 48])
    """

    head: SegmentationHead

    def __init__(self, backbone: Veca, classes: Sequence[str], ignore: int = 255, seed: int = 0) -> None:
        super().__init__(backbone)
        self.classes = list(classes)
        self.head = SegmentationHead(backbone.num_features, len(self.classes), ignore=ignore, seed=seed)

    def describe_head(self) -> dict[str, Any]:
        return {"classes": self.classes, "ignore": self.head.ignore}


class DepthEstimator(DenseNetwork):
    """A backbone with a linear head on its map: images and a budget → metres (B, H, W), float32.

    `low` and `high` are the range of depths; `options` are those of `DepthHead`.

    >>> import veca
    >>> estimator = DepthEstimator(veca.create_model("veca_tiny"), low=0.1, high=10.0).eval()
    >>> estimator(torch.zeros(1, 3, 32, 48), cores=8).shape
    torch.Size([1, 32, 48])
    """

    head: DepthHead

    def __init__(self, backbone: Veca, low: float, high: float, **options: Any) -> None:
        super().__init__(backbone)
        self.head = DepthHead(backbone.num_features, low, high, **options)

    def describe_head(self) -> dict[str, Any]:
        return {"low": self.head.low, "high": self.head.high, "bins": self.head.bins}


Network: TypeAlias = Classifier | Segmenter | DepthEstimator


def load_network(source: StrPath, device: str | torch.device | None = None) -> Network:
    """Load what `veca finetune` saved in a folder, or any model with classes as `veca.load` takes it, in eval mode."""
    backbone, file = load(source), Path(source) / HEAD
    network: Network
    if file.is_file():
        network = _load_dense(backbone, file)
    elif backbone.num_classes:
        network = Classifier(backbone)
    else:
        way_out = "name a folder that `veca finetune` wrote to, or a model with classes"
        raise CheckpointError(f"{source}: a backbone without a head, which predicts nothing; {way_out}")
    return network.to(device).eval()


def load_segmenter(folder: StrPath, device: str | torch.device | None = None) -> Segmenter:
    """Load the segmenter that `veca finetune segment` saved in a folder, in eval mode."""
    way_out = "name a folder that `veca finetune segment` wrote to"
    if not (Path(folder) / HEAD).is_file():
        raise CheckpointError(f"{folder}: has no {HEAD}; {way_out}")
    network = load_network(folder, device)
    if not isinstance(network, Segmenter):
        raise CheckpointError(f"{folder}: its head measures depth; {way_out}")
    return network


def _load_dense(backbone: Veca, file: Path) -> Segmenter | DepthEstimator:
    try:
        tensors, metadata = read_safetensors(file)
        description = read_description(metadata["veca"])
        segments = "classes" in description
        # Checked before memory is allocated for that many outputs.
        outputs = len(description["classes"]) if segments else int(description["bins"]) or 1
        expected = (outputs, 2 * backbone.num_features)
        if tuple(tensors["weight"].shape) != expected:
            raise ValueError(f"its weight is {quoted(tuple(tensors['weight'].shape))}, expected {expected}")
        network = (_make_segmenter if segments else _make_estimator)(backbone, description)
        network.head.load_state_dict(tensors)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = excerpt(str(error))
        raise CheckpointError(f"{file}: damaged, or no head of `veca finetune`: {reason}") from error
    return network


def _make_segmenter(backbone: Veca, description: Mapping[str, Any]) -> Segmenter:
    return Segmenter(backbone, [str(name) for name in description["classes"]], int(description["ignore"]))


def _make_estimator(backbone: Veca, description: Mapping[str, Any]) -> DepthEstimator:
    low, high = float(description["low"]), float(description["high"])
    return DepthEstimator(backbone, low, high, bins=int(description["bins"]))
