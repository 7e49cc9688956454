"""Tasks of fine-tuning, classify and segment: network, batches, loss, scores and files of each.

Shapes: B images of H × W pixels, C classes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import veca
from veca.checkpoint.format import CheckpointError, read_description, read_safetensors, save_tensors, write_tensors
from veca.data.crops import CropReader
from veca.data.datasets import batches
from veca.data.datasets.base import ProbeData, Split
from veca.data.datasets.batches import CroppedImages, CropTransform, DenseLoader, LabelledBatch
from veca.data.datasets.native import NativeDenseLoader, NativeTransform, PackedBatch, native_side
from veca.heads.dense import DenseBatch, SegmentationHead, evaluate, fit_dense
from veca.heads.features import Extraction, FrozenVeca, drop_unreadable
from veca.heads.linear import DECAYS, RATES, train_linear
from veca.heads.metrics import Confusion
from veca.images import MEAN, STD
from veca.images.pack import pack
from veca.model import Veca
from veca.packed import PackedImages
from veca.report.gallery import colour_classes
from veca.train.checkpoints import module_tensors
from veca.train.finetune.settings import FinetuneClassifySettings, FinetuneSegmentSettings
from veca.utils.console import bar
from veca.utils.files import atomic_path
from veca.utils.text import excerpt, quoted

AnyBatch: TypeAlias = LabelledBatch | PackedBatch
DENSE_RATES = (1e-3, 3e-3, 1e-2)
"""Learning rates tried for dense heads, which get few steps."""


class Classifier(nn.Module):
    """A backbone with its linear classifier: images and a budget → scores (B, C), float32."""

    def __init__(self, backbone: Veca) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor | PackedImages, cores: int | None = None, size: Any = None) -> Tensor:
        cls = self.backbone(images, cores, cls_only=True).cls
        with torch.autocast(cls.device.type, enabled=False):  # scores in float32
            return self.backbone.head(cls.float())


class Segmenter(nn.Module):
    """A backbone with a linear head on its map: images and a budget → scores (B, C, H, W), float32.

    Of a pack, the scores of the pixels of all images are in one row, image by image: (1, C, 1, ΣHW).

    >>> segmenter = Segmenter(veca.create_model("veca_tiny"), ["sky", "road"]).eval()
    >>> segmenter(torch.zeros(1, 3, 32, 48), cores=8).argmax(1).shape
    torch.Size([1, 32, 48])
    """

    def __init__(self, backbone: Veca, classes: Sequence[str], ignore: int = 255, seed: int = 0) -> None:
        super().__init__()
        self.backbone, self.classes = backbone, list(classes)
        self.head = SegmentationHead(backbone.num_features, len(self.classes), ignore=ignore, seed=seed)

    def forward(self, images: Tensor | PackedImages, cores: int | None = None, size: Any = None) -> Tensor:
        """`size` of the scores is (H, W), or one for each image of a pack; by default that of the images."""
        if isinstance(images, PackedImages):
            return self._forward_packed(images, cores, size)
        rows, columns = size or images.shape[-2:]
        out = self.backbone(images, cores)
        with torch.autocast(images.device.type, enabled=False):
            return self.head(out.feature_map.float(), out.cls.float(), (rows, columns))

    def _forward_packed(self, images: PackedImages, cores: int | None, sizes: Any) -> Tensor:
        patch = self.backbone.config.patch_size
        sizes = sizes or [(rows * patch, columns * patch) for rows, columns in images.grids]
        out = self.backbone(images, cores)
        with torch.autocast(images.pixels.device.type, enabled=False):
            scores = [
                self.head(each.feature_map.float(), each.cls.float(), size)
                for each, size in zip(out, sizes, strict=True)
            ]
        return torch.cat([each.flatten(2) for each in scores], dim=2)[:, :, None]


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


class FinetuneTask:
    """What both tasks share. `processor` says in the terms of transformers how images are resized."""

    metric: ClassVar[str]
    """The score by which weights are selected."""
    metric_names: ClassVar[Mapping[str, str]]
    """Names of the scores, and those that `Confusion` has for them."""

    def __init__(self, backbone: Veca, data: ProbeData, settings: Any, processor: Mapping[str, Any]) -> None:
        self.backbone, self.data, self.settings, self.processor = backbone, data, settings, processor
        self.skipped: dict[str, set[str]] = {}
        """Unreadable images, by split."""

    def metrics(self, confusion: Confusion) -> dict[str, float]:
        """Scores in percent."""
        scores = confusion.compute()
        return {name: 100 * scores[key] for name, key in self.metric_names.items()}

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Save the backbone as `veca.load`, timm and transformers take it, and the head."""
        save_tensors(module_tensors(self.backbone), self.backbone.config.to_dict(), provenance, folder)
        processor = {"image_processor_type": "VecaImageProcessor", **self.processor}
        processor |= {"image_mean": MEAN, "image_std": STD}
        with atomic_path(folder / "preprocessor_config.json") as part:
            part.write_text(json.dumps(processor, indent=2) + "\n")


def _crop(split: Split, index: tuple[CropTransform, int]) -> Any:
    transform, i = index
    return transform(split, i)


class ClassifyTask(FinetuneTask):
    """One class per image."""

    metric, metric_names = "top1", {"top1": "pixel_accuracy", "mean_per_class": "class_accuracy"}
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
        """Random crops for the steps from `start`, others in each epoch; each step follows from the seed alone.

        Each of `size` processes gets its share of a batch, in which there may be no readable image.
        """
        settings, count = self.settings, len(self.data.splits["train"])
        seed, area = settings.seed, (settings.least_area, 1.0)
        order = batches.shuffled_batches(count, settings.batch, range(start, steps), seed, rank, size)
        crops = (
            [(replace(self.transform, epoch=position // count, seed=seed, area=area), i) for position, i in batch]
            for batch in order
        )
        return self._batches("train", crops)

    def scoring(self, split: str, rank: int = 0, size: int = 1) -> Iterator[AnyBatch]:
        """All images of a split once, as `transform` has them; the batches are distributed over `size` processes."""
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

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels, label_smoothing=self.settings.smoothing)

    def probe(self, frozen: FrozenVeca, cores: int, folder: Path) -> None:
        """Start the head from a linear probe of the frozen features, the one `veca probe classify` would fit."""
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
        """Image `i` as `scoring` has it; None where it cannot be read."""
        images = CroppedImages(self.data.splits[split], self.transform)
        ((_, pixels),) = images.finish([images[i]], self.transform.reader.device)
        labels = torch.tensor([images.split.label(i)])
        return None if isinstance(pixels, str) else LabelledBatch(torch.as_tensor(pixels)[None], labels)

    def illustrate(self, scores: Tensor, label: Tensor) -> dict[str, Any]:
        """Images or a caption that show the prediction for one image and its label."""
        (share, best), classes = scores.softmax(0).max(0), self.data.classes
        truth = "right" if best == label else f"it is {classes[int(label)]}"
        return {"said": f"{classes[int(best)]}, {float(share):.0%}: {truth}"}

    def per_class(self, confusion: Confusion) -> Tensor:
        """Recall of each class (C)."""
        return confusion.counts.diagonal().double() / confusion.counts.sum(1)

    def load(self, folder: Path) -> nn.Module:
        """Load the network that `save` saved."""
        return Classifier(veca.load(folder))


class SegmentTask(FinetuneTask):
    """One class per pixel."""

    metric, load = "mIoU", staticmethod(load_segmenter)
    metric_names: ClassVar = {"mIoU": "miou", "pixel_accuracy": "pixel_accuracy", "class_accuracy": "class_accuracy"}

    def __init__(self, backbone: Veca, data: ProbeData, settings: FinetuneSegmentSettings, reader: CropReader) -> None:
        patch, processor = backbone.config.patch_size, dict[str, Any](size={"shortest_edge": settings.size}, fit="keep")
        if limit := settings.patch_limit(patch):
            processor |= {"fit": "native", "max_num_patches": limit}
        super().__init__(backbone, data, settings, processor)
        how = settings.batch, settings.seed, settings.workers, settings.skip_bad, settings.scales
        rest = patch, *how, self.skipped, reader
        self.loader = loader = DenseLoader(data, settings.size, *rest)
        if limit:
            self.loader = loader = NativeDenseLoader(data, native_side(limit, patch), *rest, max_patches=limit)
        self.ignore, self.training = loader.ignore, loader.training
        self.scoring, self.load_one = loader.scoring, loader.one
        backbone.reset_classifier(0)
        self.network = Segmenter(backbone, data.classes, self.ignore, settings.seed)
        self.loss, self.per_class = self.network.head.loss, Confusion.iou

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

    def illustrate(self, scores: Tensor, label: Tensor) -> dict[str, Any]:
        maps = {"label": label, "prediction": scores.argmax(0)}
        return {name: colour_classes(each.cpu().numpy(), len(self.data.classes)) for name, each in maps.items()}

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        super().save(folder, provenance)
        description = json.dumps({"classes": self.data.classes, "ignore": self.ignore})
        with atomic_path(folder / "head.safetensors") as part:
            write_tensors(part, module_tensors(self.network.head), {"format": "pt", "veca": description})
