"""Tasks of fine-tuning, classify, segment and depth: network, batches, loss, scores and files of each.

Shapes: B images of H × W pixels, C classes.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from veca.checkpoint.format import PREPROCESSOR, save_tensors
from veca.data.crops import CropReader
from veca.data.datasets import batches
from veca.data.datasets.base import DepthRules, ProbeData, Split
from veca.data.datasets.batches import CroppedImages, CropTransform, DenseLoader, LabelledBatch, open_pair
from veca.data.datasets.native import NativeDenseLoader, NativeTransform, PackedBatch, native_side
from veca.heads.dense import DenseBatch, DenseMetrics, Total, evaluate, fit_dense, own_alone
from veca.heads.features import Extraction, FrozenVeca, drop_unreadable
from veca.heads.linear import DECAYS, RATES, train_linear
from veca.heads.metrics import Confusion, DepthErrors, percent_by_class
from veca.heads.networks import Classifier, DenseNetwork, DepthEstimator, Segmenter
from veca.images import MEAN, STD, open_image
from veca.images.pack import pack
from veca.model import Veca
from veca.report.gallery import colour_classes, colour_depth, depth_range
from veca.train.checkpoints import module_tensors
from veca.train.finetune.settings import (
    TASK_METRICS,
    FinetuneClassifySettings,
    FinetuneDenseSettings,
    FinetuneDepthSettings,
    FinetuneSegmentSettings,
)
from veca.utils.console import bar
from veca.utils.files import atomic_path

AnyBatch: TypeAlias = LabelledBatch | PackedBatch
DENSE_RATES = (1e-3, 3e-3, 1e-2)
"""Learning rates tried for dense heads, which get few steps."""
MAX_CONFUSIONS, MAX_MATRIX = 30, 40
"""Pairs of confused classes; largest number of classes with a whole confusion matrix."""


class FinetuneTask(ABC):
    """What all tasks share. `processor` says in the terms of transformers how images are resized."""

    metric: ClassVar[str]
    """The score by which weights are selected."""
    unit: ClassVar[str]
    higher_is_better, digits = True, 2
    """Of that score; decimals that are shown."""
    metric_names: ClassVar[Mapping[str, str]]
    """Names of the scores, and those that `Confusion` has for them."""
    ignore: int
    """The label that does not count."""
    network: nn.Module

    def __init__(self, backbone: Veca, data: ProbeData, settings: Any, processor: Mapping[str, Any]) -> None:
        self.backbone, self.data, self.settings, self.processor = backbone, data, settings, processor
        self.skipped: dict[str, set[str]] = {}
        """Unreadable images, by split."""

    # Batches

    @abstractmethod
    def training(self, steps: int, start: int = 0, rank: int = 0, size: int = 1) -> Iterator[AnyBatch]:
        """Batches to learn from for the steps from `start`, others in each epoch; each follows from the seed alone.

        Each of `size` processes gets its share of a batch, in which there may be no readable image.
        """

    @abstractmethod
    def scoring(self, split: str, rank: int = 0, size: int = 1) -> Iterator[AnyBatch]:
        """All images of a split once; the batches are distributed over `size` processes."""

    @abstractmethod
    def load_one(self, split: str, i: int) -> LabelledBatch | None:
        """Image `i` as `scoring` has it; None where it cannot be read."""

    # Losses and scores: `size` is that of the batch.

    @abstractmethod
    def probe(self, frozen: FrozenVeca, cores: int, folder: Path) -> None:
        """Start the head from a linear probe of the frozen features, which may be cached in `folder`."""

    @abstractmethod
    def loss(self, scores: Tensor, labels: Tensor, size: Any = (), total: Total = own_alone) -> Tensor:
        """The mean loss over what counts in a batch, of which each of several processes may have a part."""

    def make_metrics(self, device: torch.device) -> DenseMetrics:
        return Confusion(len(self.data.classes), self.ignore, device)

    def update_metrics(self, metrics: DenseMetrics, scores: Tensor, labels: Tensor, size: Any = ()) -> None:
        metrics.update(scores.argmax(1), labels)

    def read_metrics(self, metrics: DenseMetrics) -> dict[str, float]:
        """Scores by name; shares are in percent."""
        scores = metrics.compute()
        return {name: 100 * scores[key] for name, key in self.metric_names.items()}

    def describe_errors(self, metrics: Any) -> dict[str, Any]:
        """For the report: the score of each class in percent, and which classes are taken for which.

        `scored` images, where each of them is right or wrong.
        """
        counts, classes = metrics.counts.cpu(), self.data.classes
        return {
            "per_class": percent_by_class(classes, self.score_classes(metrics).tolist()),
            "confusions": _confused_pairs(counts),
            "matrix": counts.tolist() if len(classes) <= MAX_MATRIX else None,
        }

    def score_classes(self, confusion: Confusion) -> Tensor:
        """The score of each class (C), as a share."""
        return confusion.iou()

    # Files

    def open_image(self, split: str, i: int) -> Image.Image:
        """Image `i` for people."""
        return open_image(self.data.splits[split].image(i))

    @abstractmethod
    def illustrate(self, scores: Tensor, label: Tensor) -> dict[str, Any]:
        """Images or a caption that show the prediction for one image and its label."""

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Save the backbone as `veca.load`, timm and transformers take it, and the head."""
        save_tensors(module_tensors(self.backbone), self.backbone.config.to_dict(), provenance, folder)
        processor = {"image_processor_type": "VecaImageProcessor", **self.processor}
        processor |= {"image_mean": MEAN, "image_std": STD}
        with atomic_path(folder / PREPROCESSOR) as part:
            part.write_text(json.dumps(processor, indent=2) + "\n")


def _confused_pairs(counts: Tensor) -> list[list[int]]:
    """(class, predicted class, how often) of the most frequent errors."""
    wrong = counts.clone().fill_diagonal_(0).flatten()
    top = wrong.topk(min(MAX_CONFUSIONS, len(wrong)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [[index // len(counts), index % len(counts), count] for index, count in pairs if count]


def _crop(split: Split, index: tuple[CropTransform, int]) -> Any:
    transform, i = index
    return transform(split, i)


class ClassifyTask(FinetuneTask):
    """One class per image."""

    metric, unit = TASK_METRICS["classify"]
    metric_names: ClassVar = {"top1": "pixel_accuracy", "mean_per_class": "class_accuracy"}
    ignore = -1

    def __init__(self, backbone: Veca, data: ProbeData, settings: FinetuneClassifySettings, reader: CropReader) -> None:
        side, patch = settings.size, backbone.config.patch_size
        processor: dict[str, Any] = {"size": {"height": side, "width": side}, "fit": "crop"}
        self.network, self.transform = Classifier(backbone), CropTransform(side, reader=reader)
        if limit := settings.patch_limit(patch):
            processor |= {"fit": "native", "max_num_patches": limit}
            self.transform = NativeTransform(
                native_side(limit, patch), reader=reader, max_patches=limit, patch=patch, scales=settings.scales
            )
        super().__init__(backbone, data, settings, processor)
        with torch.random.fork_rng(devices=[]):  # a new head follows from the seed, and disturbs no other draws
            torch.manual_seed(settings.seed)
            backbone.reset_classifier(len(data.classes))

    def training(self, steps: int, start: int = 0, rank: int = 0, size: int = 1) -> Iterator[AnyBatch]:
        settings, count = self.settings, len(self.data.splits["train"])
        seed, area = settings.seed, (settings.least_area, 1.0)
        order = batches.shuffled_batches(count, settings.batch, range(start, steps), seed, rank, size)
        crops = (
            [(replace(self.transform, epoch=position // count, seed=seed, area=area), i) for position, i in batch]
            for batch in order
        )
        return self._batches("train", crops)

    def scoring(self, split: str, rank: int = 0, size: int = 1) -> Iterator[AnyBatch]:
        images, batch = range(len(self.data.splits[split])), 2 * self.settings.batch
        order = [images[first : first + batch] for first in images[::batch]][rank::size]
        crops = ([(self.transform, i) for i in batch] for batch in order)
        return (batch for batch in self._batches(split, crops) if len(batch.labels))

    def _batches(self, name: str, crops: Iterable[Sequence[tuple[CropTransform, int]]]) -> Iterator[AnyBatch]:
        split, settings = self.data.splits[name], self.settings
        labels, device = torch.from_numpy(split.labels).long(), self.transform.reader.device
        images = CroppedImages(split, _crop)
        with batches.decode_batches(images, crops, settings.workers, device=device) as decoded:
            for batch in decoded:
                bad = {i: pixels for i, pixels in batch if isinstance(pixels, str)}
                if bad and not settings.skip_bad:
                    problem = (
                        f"pictures of {self.data.name} {name} cannot be read: {batches.join_some([*bad.values()])}"
                    )
                    raise batches.UnreadableImageError(f"{problem}. Mend them, or leave such out with --skip-bad")
                self.skipped.setdefault(name, set()).update(bad.values())
                readable = [(i, pixels) for i, pixels in batch if i not in bad]
                yield self._collate(readable, labels[[i for i, _ in readable]])

    def _collate(self, crops: Sequence[tuple[int, Any]], labels: Tensor) -> AnyBatch:
        if isinstance(self.transform, NativeTransform):
            return PackedBatch([torch.as_tensor(pixels) for _, pixels in crops], labels)
        if crops:
            return LabelledBatch(batches.stack_crops(self.transform.side, crops)[0], labels)
        return LabelledBatch(torch.zeros(0, 3, self.transform.side, self.transform.side, dtype=torch.uint8), labels)

    def loss(self, scores: Tensor, labels: Tensor, size: Any = (), total: Total = own_alone) -> Tensor:
        how: Any = {"ignore_index": self.ignore, "label_smoothing": self.settings.smoothing}
        losses = F.cross_entropy(scores, labels, reduction="sum", **how)
        return total(losses) / total((labels != self.ignore).sum()).clamp_min(1)

    def probe(self, frozen: FrozenVeca, cores: int, folder: Path) -> None:
        """As `veca probe classify` would fit it."""
        settings, data = self.settings, self.data
        native = isinstance(self.transform, NativeTransform)
        sets = [
            self._packed_features(frozen, cores, name) if native else self._features(frozen, cores, name, folder)
            for name in ("train", "val")
        ]
        with bar("linear probe", settings.head_epochs, "epochs", settings.progress) as advance:
            head = train_linear(
                *sets, classes=len(data.classes), rates=RATES, decays=DECAYS, epochs=settings.head_epochs,
                seed=settings.seed, device=frozen.device, progress=advance,
            ).head  # fmt: skip
        self.backbone.head.load_state_dict({"weight": head.weight, "bias": head.bias})

    def _features(self, frozen: FrozenVeca, cores: int, name: str, folder: Path) -> tuple[Tensor, Tensor]:
        """Features of the readable images of a split (N, D), and their labels (N)."""
        settings, split = self.settings, self.data.splits[name]
        extraction = Extraction(frozen, folder, workers=settings.workers, progress=settings.progress)
        extraction.run(split, self.transform, [cores], f"features of {name}")
        features, labels = extraction.load(split, self.transform, cores), torch.from_numpy(split.labels).long()
        return drop_unreadable(features, labels, settings.skip_bad, f"{self.data.name} {name}")

    def _packed_features(self, frozen: FrozenVeca, cores: int, name: str) -> tuple[Tensor, Tensor]:
        """The same of images that keep their aspect ratio, which are not cached."""
        features, labels = list[Tensor](), list[Tensor]()
        title, count = f"features of {name}", len(self.data.splits[name])
        with bar(title, count, "pictures", self.settings.progress) as advance:
            for batch in self.scoring(name):
                images: Any = pack(list(batch.pixels), patch_size=frozen.patch, device=frozen.device)
                features.append(frozen.features(images, cores, dense=False)[0].cpu())
                labels.append(batch.labels)
                advance(len(batch.pixels))
        return torch.cat(features), torch.cat(labels)

    def load_one(self, split: str, i: int) -> LabelledBatch | None:
        images = CroppedImages(self.data.splits[split], self.transform)
        ((_, pixels),) = images.finish([images[i]], self.transform.reader.device)
        labels = torch.tensor([images.split.label(i)])
        return None if isinstance(pixels, str) else LabelledBatch(torch.as_tensor(pixels)[None], labels)

    def illustrate(self, scores: Tensor, label: Tensor) -> dict[str, Any]:
        (share, best), classes = scores.softmax(0).max(0), self.data.classes
        truth = "right" if best == label else f"it is {classes[int(label)]}"
        return {"said": f"{classes[int(best)]}, {float(share):.0%}: {truth}"}

    def describe_errors(self, metrics: Any) -> dict[str, Any]:
        return {**super().describe_errors(metrics), "scored": int(metrics.counts.sum())}

    def score_classes(self, confusion: Confusion) -> Tensor:
        """Recall of each class."""
        return confusion.counts.diagonal().double() / confusion.counts.sum(1)


class DenseTask(FinetuneTask):
    """What the tasks with a label for each pixel share."""

    network: DenseNetwork

    def __init__(self, backbone: Veca, data: ProbeData, settings: FinetuneDenseSettings, reader: CropReader) -> None:
        patch, processor = backbone.config.patch_size, dict[str, Any](size={"shortest_edge": settings.size}, fit="keep")
        if limit := settings.patch_limit(patch):
            processor |= {"fit": "native", "max_num_patches": limit}
        super().__init__(backbone, data, settings, processor)
        how = settings.batch, settings.seed, settings.workers, settings.skip_bad, settings.scales
        rest = patch, *how, self.skipped, reader
        self.loader = loader = DenseLoader(data, settings.size, *rest)
        if limit:
            self.loader = loader = NativeDenseLoader(data, native_side(limit, patch), *rest, max_patches=limit)
        self.ignore = loader.ignore
        backbone.reset_classifier(0)

    def training(self, steps: int, start: int = 0, rank: int = 0, size: int = 1) -> Iterator[AnyBatch]:
        return self.loader.training(steps, start, rank, size)

    def scoring(self, split: str, rank: int = 0, size: int = 1) -> Iterator[AnyBatch]:
        return self.loader.scoring(split, rank, size)

    def load_one(self, split: str, i: int) -> LabelledBatch | None:
        return self.loader.one(split, i)

    def probe(self, frozen: FrozenVeca, cores: int, folder: Path) -> None:
        settings, head = self.settings, self.network.head
        steps = max(1, round(settings.head_epochs * len(self.data.splits["train"]) / settings.batch))

        def features(batches: Iterator[list[LabelledBatch]]) -> Iterator[list[DenseBatch]]:
            for groups in batches:
                for _, labels in groups:
                    head.check(labels)
                maps = frozen.grouped_features([frozen.prepare(pixels) for pixels, _ in groups], cores)
                pairs = zip(maps, groups, strict=True)
                yield [DenseBatch(*each, labels.to(frozen.device)) for each, (_, labels) in pairs]

        def scored() -> Iterator[DenseBatch]:
            return (batch for groups in features(self.loader.scoring_groups("val")) for batch in groups)

        with bar("linear probe", steps, "steps", settings.progress) as advance:
            (sweep,) = fit_dense(
                [head], lambda: zip(features(self.loader.training_groups(steps)), strict=True),
                lambda stacks: [evaluate(stacks[0], scored())],
                rates=DENSE_RATES, steps=steps, progress=advance,
            )  # fmt: skip
        head.load_state_dict(sweep.head.state_dict())

    def open_image(self, split: str, i: int) -> Image.Image:
        return open_pair(self.data.splits[split], i, self.data.depth, scored=True)[0]  # cropped as its label

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        super().save(folder, provenance)
        self.network.save_head(folder)


class SegmentTask(DenseTask):
    """One class per pixel."""

    metric, unit = TASK_METRICS["segment"]
    metric_names: ClassVar = {"mIoU": "miou", "pixel_accuracy": "pixel_accuracy", "class_accuracy": "class_accuracy"}

    def __init__(self, backbone: Veca, data: ProbeData, settings: FinetuneSegmentSettings, reader: CropReader) -> None:
        super().__init__(backbone, data, settings, reader)
        self.network = Segmenter(backbone, data.classes, self.ignore, settings.seed)

    def loss(self, scores: Tensor, labels: Tensor, size: Any = (), total: Total = own_alone) -> Tensor:
        return self.network.head.batch_loss([scores], [labels], total)

    def illustrate(self, scores: Tensor, label: Tensor) -> dict[str, Any]:
        maps = {"label": label, "prediction": scores.argmax(0)}
        return {name: colour_classes(each.cpu().numpy(), len(self.data.classes)) for name, each in maps.items()}


class DepthTask(DenseTask):
    """Metres at each pixel. Its scores are errors in metres, and shares in percent."""

    metric, unit = TASK_METRICS["depth"]
    higher_is_better, digits = False, 3
    network: DepthEstimator

    def __init__(self, backbone: Veca, data: ProbeData, settings: FinetuneDepthSettings, reader: CropReader) -> None:
        super().__init__(backbone, data, settings, reader)
        self.ignore = 0  # not measured
        rules, options = data.depth or DepthRules(), {"bins": settings.bins, "loss": settings.loss}
        self.network = DepthEstimator(backbone, rules.min_depth, rules.max_depth, seed=settings.seed, **options)

    def loss(self, scores: Tensor, labels: Tensor, size: Any = (), total: Total = own_alone) -> Tensor:
        return self.network.head.batch_loss(_split_maps(scores, size), _split_maps(labels, size), total)

    def make_metrics(self, device: torch.device) -> DenseMetrics:
        return DepthErrors(self.network.head.low, self.network.head.high, device)

    def update_metrics(self, metrics: DenseMetrics, scores: Tensor, labels: Tensor, size: Any = ()) -> None:
        for predicted, depth in zip(_split_maps(scores, size), _split_maps(labels, size), strict=True):
            metrics.update(predicted, depth)

    def read_metrics(self, metrics: DenseMetrics) -> dict[str, float]:
        return {name: 100 * x if name.startswith("delta") else x for name, x in metrics.compute().items()}

    def describe_errors(self, metrics: Any) -> dict[str, Any]:
        return {}

    def illustrate(self, scores: Tensor, label: Tensor) -> dict[str, Any]:
        depth = label.cpu().numpy()
        low, high = depth_range(depth, self.network.head.high)
        return {"label": colour_depth(depth, low, high), "prediction": colour_depth(scores.cpu().numpy(), low, high)}


def _split_maps(maps: Tensor, size: Any) -> list[Tensor]:
    """Maps of one size (B, H, W) as they are; of a pack (1, 1, ΣHW), whose `size` has that of each image, (1, H, W)."""
    if not size or isinstance(size[0], int):
        return [maps]
    parts = maps[0, 0].split([rows * columns for rows, columns in size])
    return [part.view(1, *own) for part, own in zip(parts, size, strict=True)]


TASK_CLASSES: dict[str, Any] = {"classify": ClassifyTask, "segment": SegmentTask, "depth": DepthTask}
"""The class of each task."""
