"""What is learned: classes of pictures, or of pixels. A task has the network, its pictures, its loss and its files.

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
    LabelledBatch,
    UnreadableImageError,
    decode_batches,
    join_some,
    shuffled_batches,
)
from veca.data.datasets.dense_batches import DenseLoader
from veca.heads.dense import DenseBatch, SegmentationHead
from veca.heads.dense_fit import fit_dense
from veca.heads.features import Extraction, drop_unreadable
from veca.heads.frozen import FrozenVeca
from veca.heads.linear import DECAYS, RATES, train_linear
from veca.heads.metrics import Confusion
from veca.images import MEAN, STD, open_image
from veca.model import Veca
from veca.report.gallery import colour_classes
from veca.train.finetune.settings import ClassifySettings, SegmentSettings, Settings
from veca.train.parallel import whole
from veca.utils.files import atomic_path
from veca.utils.progress import bar
from veca.utils.text import excerpt, quoted

DENSE_RATES = (1e-3, 3e-3, 1e-2)
"""Of heads over maps, which start from few steps."""


class Classifier(nn.Module):
    """A backbone with its classifier: images and a budget → scores (B, C), float32."""

    def __init__(self, backbone: Veca) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor, cores: int | None = None, size: Sequence[int] | None = None) -> Tensor:
        cls = self.backbone(images, cores, cls_only=True).cls
        with torch.autocast(images.device.type, enabled=False):
            return self.backbone.head(cls.float())


class Segmenter(nn.Module):
    """A backbone with a linear head over its map: images and a budget → scores (B, C, H, W), float32.

    >>> segmenter = Segmenter(veca.create_model("veca_tiny"), ["sky", "road"]).eval()
    >>> segmenter(torch.zeros(1, 3, 32, 48), cores=8).argmax(1).shape
    torch.Size([1, 32, 48])
    """

    def __init__(self, backbone: Veca, classes: Sequence[str], ignore: int = 255, seed: int = 0) -> None:
        super().__init__()
        self.backbone, self.classes = backbone, list(classes)
        self.head = SegmentationHead(backbone.num_features, len(self.classes), ignore=ignore, seed=seed)

    def forward(self, images: Tensor, cores: int | None = None, size: Sequence[int] | None = None) -> Tensor:
        """`size` of the scores: (H, W), that of the images if none is given."""
        rows, columns = size or images.shape[-2:]
        out = self.backbone(images, cores)
        with torch.autocast(images.device.type, enabled=False):
            return self.head(out.feature_map.float(), out.cls.float(), (rows, columns))


def load_segmenter(folder: str | Path, device: str | torch.device | None = None) -> Segmenter:
    """What `veca finetune segment` left in a folder, in eval mode."""
    file = Path(folder) / "head.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{folder}: has no head.safetensors; name a folder that `veca finetune segment` wrote to")
    backbone = veca.load(folder)
    try:
        tensors, metadata = read_safetensors(file)
        told = read_description(metadata["veca"])
        classes, ignore = [str(name) for name in told["classes"]], int(told["ignore"])
        expected = (len(classes), 2 * backbone.num_features)
        if tuple(tensors["weight"].shape) != expected:  # before memory is taken for so many classes
            raise ValueError(f"its weight is {quoted(tuple(tensors['weight'].shape))}, expected {expected}")
        segmenter = Segmenter(backbone, classes, ignore)
        segmenter.head.load_state_dict(tensors)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{file}: damaged, or no head of `veca finetune segment`: {excerpt(str(error))}"
        ) from error
    return segmenter.to(device).eval()


class _Task:
    """What both tasks share. `seen` tells transformers how to look at pictures, `skipped` which could not be read."""

    def __init__(self, data: ProbeData, seen: Mapping[str, Any]) -> None:
        self.data, self.seen = data, seen
        self.skipped: dict[str, set[str]] = {}

    def _save(self, backbone: Veca, folder: Path, provenance: Mapping[str, Any]) -> None:
        """The backbone, as `veca.load`, timm and transformers take it."""
        tensors = {name: whole(tensor) for name, tensor in backbone.state_dict().items()}
        save_tensors(tensors, backbone.config.to_dict(), provenance, folder)
        told = {"image_processor_type": "VecaImageProcessor", **self.seen, "image_mean": MEAN, "image_std": STD}
        with atomic_path(folder / "preprocessor_config.json") as part:
            part.write_text(json.dumps(told, indent=2) + "\n")


class Classify(_Task):
    metric, ignore = "top1", -1

    def __init__(self, backbone: Veca, data: ProbeData, settings: ClassifySettings) -> None:
        side = {"height": settings.size, "width": settings.size}
        super().__init__(data, {"size": side, "fit": "crop"})
        self.settings = settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            backbone.reset_classifier(len(data.classes))
        self.network = Classifier(backbone)

    def training(self, start: int, steps: int, rank: int = 0, size: int = 1) -> Iterator[LabelledBatch]:
        """Batches of the steps from `start`; each follows from the seed and its step alone.

        Of `size` processes each has its share of a batch, in which there may be no picture that can be read.
        """
        split, asked = self.data.splits["train"], self.settings
        order = shuffled_batches(len(split), asked.batch, range(start, steps), asked.seed, rank, size)
        return self._batches("train", _Parts(self.data, asked), order, empty=size > 1)

    def scoring(self, split: str, rank: int = 0, size: int = 1) -> Iterator[LabelledBatch]:
        """All pictures of a split once; of `size` processes each has some of the batches."""
        count, batch = len(self.data.splits[split]), 2 * self.settings.batch
        order = [range(first, min(first + batch, count)) for first in range(0, count, batch)][rank::size]
        pictures = CroppedImages(self.data.splits[split], CropTransform(self.settings.size))
        return (found for found in self._batches(split, pictures, order, empty=True) if len(found.labels))

    def _batches(
        self, split: str, pictures: Dataset[Any], order: Iterable[Sequence[Any]], empty: bool
    ) -> Iterator[LabelledBatch]:
        """`empty`: there may be batches in which no picture can be read."""
        side = self.settings.size
        labels = torch.from_numpy(self.data.splits[split].labels).long()
        with decode_batches(pictures, order, self.settings.workers) as batches:
            for found in batches:
                bad = [pixels for _, pixels in found if isinstance(pixels, str)]
                good = [(i, pixels) for i, pixels in found if not isinstance(pixels, str)]
                if bad and not self.settings.skip_bad:
                    raise UnreadableImageError(
                        f"pictures of {self.data.name} {split} cannot be read: {join_some(bad)}. Mend them, or leave "
                        "such out with --skip-bad"
                    )
                if not (good or empty):
                    raise UnreadableImageError(
                        f"a whole batch of {self.data.name} {split} cannot be read: {join_some(bad)}. Mend them, or "
                        "take a larger --batch"
                    )
                self.skipped.setdefault(split, set()).update(bad)
                pixels = np.stack([pixels for _, pixels in good]) if good else np.empty((0, 3, side, side), np.uint8)
                yield LabelledBatch(torch.from_numpy(pixels), labels[[i for i, _ in good]])

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels, label_smoothing=self.settings.smoothing)

    def probe(self, frozen: FrozenVeca, cores: int, folder: Path) -> None:
        """Start the head from a linear probe of the frozen features, the one `veca probe classify` would find."""
        asked, data, view = self.settings, self.data, CropTransform(self.settings.size)
        extraction = Extraction(frozen, folder, workers=asked.workers, progress=asked.progress)
        sets: list[Tensor] = []
        for name in ("train", "val"):
            split = data.splits[name]
            extraction.run(split, view, [cores], f"features of {name}")
            labels = torch.from_numpy(split.labels).long()
            sets += drop_unreadable(extraction.load(split, view, cores), labels, asked.skip_bad, f"{data.name} {name}")
        with bar("linear probe", asked.head_epochs, "epochs", asked.progress) as advance:
            head = train_linear(
                sets[0], sets[1], sets[2], sets[3], classes=len(data.classes), rates=RATES, decays=DECAYS,
                epochs=asked.head_epochs, seed=asked.seed, device=frozen.device, progress=lambda *_: advance(1),
            ).head  # fmt: skip
        self.network.backbone.head.load_state_dict({"weight": head.weight, "bias": head.bias})

    def one(self, split: str, i: int) -> LabelledBatch | None:
        """Picture `i` as `scoring` has it; None where it cannot be read."""
        _, pixels = CroppedImages(self.data.splits[split], CropTransform(self.settings.size))[i]
        if isinstance(pixels, str):
            return None
        return LabelledBatch(torch.from_numpy(pixels)[None], torch.tensor([self.data.splits[split].label(i)]))

    def shown(self, split: str, i: int, scores: Tensor, label: Tensor) -> dict[str, Any]:
        """CroppedImages, and words, of what was said of one picture and what is right."""
        share, best = scores.softmax(0).max(0)
        image = open_image(self.data.splits[split].image(i))
        said = f"{self.data.classes[int(best)]}, {float(share):.0%}"
        right = "right" if best == label else f"it is {self.data.classes[int(label)]}"
        return {"image": image, "said": f"{said}: {right}"}

    def metrics(self, meter: Confusion) -> dict[str, float]:
        """In percent."""
        found = meter.compute()
        return {"top1": 100 * found["pixel_accuracy"], "mean_per_class": 100 * found["class_accuracy"]}

    def per_class(self, meter: Confusion) -> Tensor:
        """The share of each class that was found (C)."""
        return meter.counts.diagonal().double() / meter.counts.sum(1)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        self._save(self.network.backbone, folder, provenance)

    def load(self, folder: Path) -> None:
        self.network.backbone.load_state_dict(veca.load(folder).state_dict())


class _Parts(Dataset[Any]):
    """Random parts of pictures, others in each epoch."""

    def __init__(self, data: ProbeData, settings: ClassifySettings) -> None:
        self.split, self.asked = data.splits["train"], settings

    def __getitem__(self, place_and_picture: tuple[int, int]) -> Any:
        place, i = place_and_picture
        view = CropTransform(self.asked.size, place // len(self.split), self.asked.seed, (self.asked.least_area, 1.0))
        return CroppedImages(self.split, view)[i]


class Segment(_Task):
    metric = "mIoU"

    def __init__(self, backbone: Veca, data: ProbeData, settings: SegmentSettings) -> None:
        super().__init__(data, {"size": {"shortest_edge": settings.size}, "fit": "keep"})
        self.settings = settings
        self.pictures = DenseLoader(
            data, settings.size, backbone.config.patch_size, settings.batch, settings.seed, settings.workers,
            settings.skip_bad, settings.scales, self.skipped,
        )  # fmt: skip
        self.ignore = self.pictures.ignore
        backbone.reset_classifier(0)
        self.network = Segmenter(backbone, data.classes, self.ignore, settings.seed)

    def training(self, start: int, steps: int, rank: int = 0, size: int = 1) -> Iterator[LabelledBatch]:
        return self.pictures.training(steps, start, rank, size)

    def scoring(self, split: str, rank: int = 0, size: int = 1) -> Iterator[LabelledBatch]:
        return self.pictures.scoring(split, rank, size)

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.network.head.loss(scores, labels)

    def probe(self, frozen: FrozenVeca, cores: int, folder: Path) -> None:
        asked = self.settings
        steps = max(1, round(asked.head_epochs * len(self.data.splits["train"]) / asked.batch))

        def features(batches: Iterator[LabelledBatch]) -> Iterator[DenseBatch]:
            for pixels, labels in batches:
                cls, patches = frozen.features(frozen.prepare(pixels), cores)
                assert patches is not None
                yield DenseBatch(patches, cls, labels.to(frozen.device))

        with bar("linear probe", steps, "steps", asked.progress) as advance:
            sweep = fit_dense(
                self.network.head, lambda: features(self.training(0, steps)), lambda: features(self.scoring("val")),
                rates=DENSE_RATES, steps=steps, device=frozen.device, progress=lambda *_: advance(1),
            )  # fmt: skip
        self.network.head.load_state_dict(sweep.head.state_dict())

    def one(self, split: str, i: int) -> LabelledBatch | None:
        return self.pictures.one(split, i)

    def shown(self, split: str, i: int, scores: Tensor, label: Tensor) -> dict[str, Any]:
        image = open_image(self.data.splits[split].image(i))
        count = len(self.data.classes)
        said, right = scores.argmax(0).cpu().numpy(), label.cpu().numpy()
        return {"image": image, "label": colour_classes(right, count), "prediction": colour_classes(said, count)}

    def metrics(self, meter: Confusion) -> dict[str, float]:
        return {name.replace("miou", "mIoU"): 100 * value for name, value in meter.compute().items()}

    def per_class(self, meter: Confusion) -> Tensor:
        return meter.iou()

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        self._save(self.network.backbone, folder, provenance)
        tensors = {name: whole(tensor) for name, tensor in self.network.head.state_dict().items()}
        told = {"classes": self.data.classes, "ignore": self.ignore}
        with atomic_path(folder / "head.safetensors") as part:
            write_tensors(part, tensors, {"format": "pt", "veca": json.dumps(told)})

    def load(self, folder: Path) -> None:
        self.network.load_state_dict(load_segmenter(folder).state_dict())


def frozen_copy(backbone: Veca, name: str, device: torch.device, precision: Any) -> FrozenVeca:
    """The backbone as the probes take it, without a head and apart from the one that learns."""
    own = copy.deepcopy(backbone)
    own.reset_classifier(0)
    return FrozenVeca(own, name, device, precision)


def make_task(backbone: Veca, data: ProbeData, settings: Settings) -> Classify | Segment:
    if isinstance(settings, SegmentSettings):
        return Segment(backbone, data, settings)
    assert isinstance(settings, ClassifySettings)
    return Classify(backbone, data, settings)
