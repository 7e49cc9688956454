"""Tasks of fine-tuning, classify and segment: network, batches, loss, scores and files of each.

Shapes: B images of H × W pixels, C classes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import veca
from veca.checkpoint import CheckpointError, read_description, read_safetensors, save_tensors, write_tensors
from veca.data.datasets.base import ProbeData
from veca.data.datasets.batches import (
    CroppedImages,
    CropTransform,
    DenseLoader,
    LabelledBatch,
    UnreadableImageError,
    decode_batches,
    join_some,
    shuffled_batches,
)
from veca.heads.dense import DenseBatch, SegmentationHead
from veca.heads.dense_fit import fit_dense
from veca.heads.features import Extraction, drop_unreadable
from veca.heads.frozen import FrozenVeca
from veca.heads.linear import DECAYS, RATES, train_linear
from veca.heads.metrics import Confusion
from veca.images import MEAN, STD, open_image
from veca.model import Veca
from veca.report.gallery import colour_classes
from veca.train.checkpoints import module_tensors
from veca.train.finetune.settings import FinetuneClassifySettings, FinetuneSegmentSettings, FinetuneSettings
from veca.utils.console import bar
from veca.utils.files import atomic_path
from veca.utils.text import excerpt, quoted

DENSE_RATES = (1e-3, 3e-3, 1e-2)
"""Learning rates tried for dense heads, which get few steps."""


class Classifier(nn.Module):
    """A backbone with its linear classifier: images and a budget → scores (B, C), float32."""

    def __init__(self, backbone: Veca) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor, cores: int | None = None, size: Sequence[int] | None = None) -> Tensor:
        cls = self.backbone(images, cores, cls_only=True).cls
        with torch.autocast(images.device.type, enabled=False):  # scores in float32
            return self.backbone.head(cls.float())


class Segmenter(nn.Module):
    """A backbone with a linear head on its map: images and a budget → scores (B, C, H, W), float32.

    >>> segmenter = Segmenter(veca.create_model("veca_tiny"), ["sky", "road"]).eval()
    >>> segmenter(torch.zeros(1, 3, 32, 48), cores=8).argmax(1).shape
    torch.Size([1, 32, 48])
    """

    def __init__(self, backbone: Veca, classes: Sequence[str], ignore: int = 255, seed: int = 0) -> None:
        super().__init__()
        self.backbone, self.classes = backbone, list(classes)
        self.head = SegmentationHead(backbone.num_features, len(self.classes), ignore=ignore, seed=seed)

    def forward(self, images: Tensor, cores: int | None = None, size: Sequence[int] | None = None) -> Tensor:
        """`size` of the scores is (H, W); by default that of the images."""
        rows, columns = size or images.shape[-2:]
        out = self.backbone(images, cores)
        with torch.autocast(images.device.type, enabled=False):
            return self.head(out.feature_map.float(), out.cls.float(), (rows, columns))


def load_segmenter(folder: str | Path, device: str | torch.device | None = None) -> Segmenter:
    """Load the segmenter that `veca finetune segment` saved in a folder, in eval mode."""
    file = Path(folder) / "head.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{folder}: has no head.safetensors; name a folder that `veca finetune segment` wrote to")
    backbone = veca.load(folder)
    try:
        tensors, metadata = read_safetensors(file)
        description = read_description(metadata["veca"])
        classes, ignore = [str(name) for name in description["classes"]], int(description["ignore"])
        expected = (len(classes), 2 * backbone.num_features)
        if tuple(tensors["weight"].shape) != expected:  # checked before memory is allocated for that many classes
            raise ValueError(f"its weight is {quoted(tuple(tensors['weight'].shape))}, expected {expected}")
        segmenter = Segmenter(backbone, classes, ignore)
        segmenter.head.load_state_dict(tensors)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = excerpt(str(error))
        raise CheckpointError(f"{file}: damaged, or no head of `veca finetune segment`: {reason}") from error
    return segmenter.to(device).eval()


class _FinetuneTask:
    """What both tasks share. `processor` says in the terms of transformers how images are resized."""

    def __init__(self, backbone: Veca, data: ProbeData, processor: Mapping[str, Any]) -> None:
        self.backbone, self.data, self.processor = backbone, data, processor
        self.skipped: dict[str, set[str]] = {}
        """Unreadable images, by split."""

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Save the backbone as `veca.load`, timm and transformers take it, and the head."""
        save_tensors(module_tensors(self.backbone), self.backbone.config.to_dict(), provenance, folder)
        processor = {"image_processor_type": "VecaImageProcessor", **self.processor}
        processor |= {"image_mean": MEAN, "image_std": STD}
        with atomic_path(folder / "preprocessor_config.json") as part:
            part.write_text(json.dumps(processor, indent=2) + "\n")


class ClassifyTask(_FinetuneTask):
    """One class per image."""

    metric, ignore = "top1", -1

    def __init__(self, backbone: Veca, data: ProbeData, settings: FinetuneClassifySettings) -> None:
        super().__init__(backbone, data, {"size": {"height": settings.size, "width": settings.size}, "fit": "crop"})
        self.settings, self.network = settings, Classifier(backbone)
        with torch.random.fork_rng(devices=[]):  # a new head follows from the seed, and disturbs no other draws
            torch.manual_seed(settings.seed)
            backbone.reset_classifier(len(data.classes))

    def training(self, start: int, steps: int, rank: int = 0, size: int = 1) -> Iterator[LabelledBatch]:
        """Batches of the steps from `start`; each follows from the seed and its step alone.

        Each of `size` processes gets its share of a batch, in which there may be no readable image.
        """
        split, settings = self.data.splits["train"], self.settings
        order = shuffled_batches(len(split), settings.batch, range(start, steps), settings.seed, rank, size)
        return self._batches("train", _RandomCrops(self.data, settings), order, allow_empty=size > 1)

    def scoring(self, split: str, rank: int = 0, size: int = 1) -> Iterator[LabelledBatch]:
        """All images of a split once; the batches are distributed over `size` processes."""
        count, batch = len(self.data.splits[split]), 2 * self.settings.batch
        order = [range(first, min(first + batch, count)) for first in range(0, count, batch)][rank::size]
        images = CroppedImages(self.data.splits[split], CropTransform(self.settings.size))
        return (each for each in self._batches(split, images, order, allow_empty=True) if len(each.labels))

    def _batches(
        self, split: str, images: Dataset[Any], order: Iterable[Sequence[Any]], allow_empty: bool
    ) -> Iterator[LabelledBatch]:
        """Decoded batches; `allow_empty`: also those in which no image can be read."""
        side = self.settings.size
        labels = torch.from_numpy(self.data.splits[split].labels).long()
        with decode_batches(images, order, self.settings.workers) as batches:
            for batch in batches:
                bad = [pixels for _, pixels in batch if isinstance(pixels, str)]
                good = [(i, pixels) for i, pixels in batch if not isinstance(pixels, str)]
                problem = f"of {self.data.name} {split} cannot be read: {join_some(bad)}. Mend them, or"
                if bad and not self.settings.skip_bad:
                    raise UnreadableImageError(f"pictures {problem} leave such out with --skip-bad")
                if not (good or allow_empty):
                    raise UnreadableImageError(f"a whole batch {problem} take a larger --batch-size")
                self.skipped.setdefault(split, set()).update(bad)
                pixels = np.stack([pixels for _, pixels in good]) if good else np.empty((0, 3, side, side), np.uint8)
                yield LabelledBatch(torch.from_numpy(pixels), labels[[i for i, _ in good]])

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels, label_smoothing=self.settings.smoothing)

    def probe(self, frozen: FrozenVeca, cores: int, folder: Path) -> None:
        """Start the head from a linear probe of the frozen features, the one `veca probe classify` would fit."""
        settings, data, view = self.settings, self.data, CropTransform(self.settings.size)
        extraction = Extraction(frozen, folder, workers=settings.workers, progress=settings.progress)
        sets: list[Tensor] = []
        for name in ("train", "val"):
            split = data.splits[name]
            extraction.run(split, view, [cores], f"features of {name}")
            found, labels = extraction.load(split, view, cores), torch.from_numpy(split.labels).long()
            sets += drop_unreadable(found, labels, settings.skip_bad, f"{data.name} {name}")
        with bar("linear probe", settings.head_epochs, "epochs", settings.progress) as advance:
            head = train_linear(
                sets[0], sets[1], sets[2], sets[3], classes=len(data.classes), rates=RATES, decays=DECAYS,
                epochs=settings.head_epochs, seed=settings.seed, device=frozen.device, progress=lambda *_: advance(1),
            ).head  # fmt: skip
        self.backbone.head.load_state_dict({"weight": head.weight, "bias": head.bias})

    def load_one(self, split: str, i: int) -> LabelledBatch | None:
        """Image `i` as `scoring` has it; None where it cannot be read."""
        _, pixels = CroppedImages(self.data.splits[split], CropTransform(self.settings.size))[i]
        if isinstance(pixels, str):
            return None
        return LabelledBatch(torch.from_numpy(pixels)[None], torch.tensor([self.data.splits[split].label(i)]))

    def illustrate(self, split: str, i: int, scores: Tensor, label: Tensor) -> dict[str, Any]:
        """Images and a caption that show the prediction for one image and its label."""
        (share, best), classes = scores.softmax(0).max(0), self.data.classes
        truth = "right" if best == label else f"it is {classes[int(label)]}"
        said = f"{classes[int(best)]}, {float(share):.0%}: {truth}"
        return {"image": open_image(self.data.splits[split].image(i)), "said": said}

    def metrics(self, confusion: Confusion) -> dict[str, float]:
        """Scores in percent."""
        scores = confusion.compute()
        return {"top1": 100 * scores["pixel_accuracy"], "mean_per_class": 100 * scores["class_accuracy"]}

    def per_class(self, confusion: Confusion) -> Tensor:
        """Recall of each class (C)."""
        return confusion.counts.diagonal().double() / confusion.counts.sum(1)

    def load(self, folder: Path) -> None:
        self.backbone.load_state_dict(veca.load(folder).state_dict())


class _RandomCrops(Dataset[Any]):
    """Random crops of the training images, others in each epoch."""

    def __init__(self, data: ProbeData, settings: FinetuneClassifySettings) -> None:
        self.split, self.settings = data.splits["train"], settings

    def __getitem__(self, position_and_index: tuple[int, int]) -> Any:
        position, i = position_and_index
        settings, epoch = self.settings, position // len(self.split)
        view = CropTransform(settings.size, epoch, settings.seed, (settings.least_area, 1.0))
        return CroppedImages(self.split, view)[i]


class SegmentTask(_FinetuneTask):
    """One class per pixel."""

    metric = "mIoU"

    def __init__(self, backbone: Veca, data: ProbeData, settings: FinetuneSegmentSettings) -> None:
        super().__init__(backbone, data, {"size": {"shortest_edge": settings.size}, "fit": "keep"})
        self.settings = settings
        self.dense_data = dense_data = DenseLoader(
            data, settings.size, backbone.config.patch_size, settings.batch, settings.seed, settings.workers,
            settings.skip_bad, settings.scales, self.skipped,
        )  # fmt: skip
        self.ignore, self.scoring, self.load_one = dense_data.ignore, dense_data.scoring, dense_data.one
        backbone.reset_classifier(0)
        self.network = Segmenter(backbone, data.classes, self.ignore, settings.seed)

    def training(self, start: int, steps: int, rank: int = 0, size: int = 1) -> Iterator[LabelledBatch]:
        return self.dense_data.training(steps, start, rank, size)

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.network.head.loss(scores, labels)

    def probe(self, frozen: FrozenVeca, cores: int, folder: Path) -> None:
        settings = self.settings
        steps = max(1, round(settings.head_epochs * len(self.data.splits["train"]) / settings.batch))

        def features(batches: Iterator[LabelledBatch]) -> Iterator[DenseBatch]:
            for pixels, labels in batches:
                cls, patches = frozen.features(frozen.prepare(pixels), cores)
                assert patches is not None
                yield DenseBatch(patches, cls, labels.to(frozen.device))

        with bar("linear probe", steps, "steps", settings.progress) as advance:
            sweep = fit_dense(
                self.network.head, lambda: features(self.training(0, steps)), lambda: features(self.scoring("val")),
                rates=DENSE_RATES, steps=steps, device=frozen.device, progress=lambda *_: advance(1),
            )  # fmt: skip
        self.network.head.load_state_dict(sweep.head.state_dict())

    def illustrate(self, split: str, i: int, scores: Tensor, label: Tensor) -> dict[str, Any]:
        maps = {"label": label, "prediction": scores.argmax(0)}
        pictures = {name: colour_classes(each.cpu().numpy(), len(self.data.classes)) for name, each in maps.items()}
        return {"image": open_image(self.data.splits[split].image(i)), **pictures}

    def metrics(self, confusion: Confusion) -> dict[str, float]:
        return {name.replace("miou", "mIoU"): 100 * value for name, value in confusion.compute().items()}

    def per_class(self, confusion: Confusion) -> Tensor:
        return confusion.iou()

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        super().save(folder, provenance)
        description = json.dumps({"classes": self.data.classes, "ignore": self.ignore})
        with atomic_path(folder / "head.safetensors") as part:
            write_tensors(part, module_tensors(self.network.head), {"format": "pt", "veca": description})

    def load(self, folder: Path) -> None:
        self.network.load_state_dict(load_segmenter(folder).state_dict())


def frozen_backbone(backbone: Veca, name: str, device: torch.device, precision: Any) -> FrozenVeca:
    """A copy of the backbone for the probe, without a head."""
    frozen = copy.deepcopy(backbone)
    frozen.reset_classifier(0)
    return FrozenVeca(frozen, name, device, precision)


def make_task(backbone: Veca, data: ProbeData, settings: FinetuneSettings) -> ClassifyTask | SegmentTask:
    if isinstance(settings, FinetuneSegmentSettings):
        return SegmentTask(backbone, data, settings)
    assert isinstance(settings, FinetuneClassifySettings)
    return ClassifyTask(backbone, data, settings)
