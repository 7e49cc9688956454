"""Fine-tuning with `fit: native`: mixed sizes in one batch, labels in their own geometry, the same when resumed."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny, relative_error
from PIL import Image
from runs import table
from safetensors.torch import load_file

import veca
from veca.data.crops import CropReader
from veca.data.datasets import load_dataset
from veca.data.transforms import plan_native_crop
from veca.heads.networks import load_segmenter
from veca.hub.transformers import VecaForImageClassification, VecaImageProcessor
from veca.images import load_image, normalize
from veca.train.finetune.run import Finetuning, finetune
from veca.train.finetune.settings import FinetuneClassifySettings, FinetuneSegmentSettings, FinetuneSettings
from veca.train.finetune.tasks import ClassifyTask, SegmentTask
from veca.utils.signals import Interrupted

SIZES = (40, 90), (75, 33), (64, 64), (30, 150), (100, 140)
LIMIT = 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, pictures of two classes, and pictures with masks: boxes, brighter than their ground."""
    folder = tmp_path_factory.mktemp("native")
    veca.save(make_tiny(), folder / "model")
    rng = np.random.default_rng(0)
    for i in range(24):
        height, width = SIZES[i % len(SIZES)]
        mask = np.zeros((height, width), np.uint8)
        mask[height // 4 : height * 3 // 4, : width // 2] = 1
        pixels = (mask * 130 + 40)[..., None] + rng.normal(0, 20, (height, width, 3))
        split = "val" if i % 3 == 0 else "train"
        ignored = mask.copy()
        ignored[0] = 255
        files = {f"masks/images/{split}": pixels, f"masks/masks/{split}": ignored}
        files |= {f"classes/{split}/grey": pixels, f"classes/{split}/red": pixels + np.array([80, 0, -30])}
        for parent, values in files.items():
            (folder / parent).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(folder / parent / f"{i}.png")
    return folder


def asked(task: str, **changes: Any) -> FinetuneSettings:
    kind: Any = FinetuneClassifySettings if task == "classes" else FinetuneSegmentSettings
    common: dict[str, Any] = {"size": 64, "fit": "native", "max_patches": LIMIT, "cores": (8, 64), "batch": 5}
    return kind(**{**common, "epochs": 3, "rate": 2e-3, "every": 6, "head_epochs": 2, "progress": False, **changes})


def tune(place: Path, folder: Path, settings: FinetuneSettings) -> dict[str, Any]:
    data = "classes" if settings.task == "classify" else "masks"
    finetune(str(place / "model"), str(place / data), folder, settings, device="cpu", say=lambda text: None)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def make_task(place: Path, name: str, **changes: Any) -> Any:
    kind: Any = ClassifyTask if name == "classes" else SegmentTask
    task = "classify" if name == "classes" else "segment"
    return kind(
        veca.load(place / "model"), load_dataset(str(place / name), task=task), asked(name, **changes), CropReader()
    )


# Data


def test_random_parts_keep_about_the_aspect_ratio_and_the_limit() -> None:
    rng = random.Random(0)
    grids, areas = set(), []
    for _ in range(300):
        crop = plan_native_crop(640, 320, 100, rng, area=(0.3, 1.0), scales=(0.5, 1.0))
        left, top, right, bottom = crop.box
        assert 0 <= left < right <= 640
        assert 0 <= top < bottom <= 320
        assert 1.45 < (right - left) / (bottom - top) < 2.75
        assert crop.columns / crop.rows == pytest.approx((right - left) / (bottom - top), rel=0.35), "whole patches"
        assert crop.columns % 16 == crop.rows % 16 == 0
        grids.add((crop.rows, crop.columns))
        areas.append(crop.rows * crop.columns // 256)
    assert min(areas) < 30
    assert 90 < max(areas) <= 100
    assert len(grids) > 10
    whole = plan_native_crop(640, 320, 100, rng, area=(1.0, 1.0))
    assert (whole.box, whole.rows, whole.columns) == ((0, 0, 640, 320), 112, 224)


def test_labels_follow_their_images(place: Path) -> None:
    """Through scaling, cropping and flipping: what is bright in an image is a box in its label."""
    grids = set()
    for batch in make_task(place, "masks").training(steps=6):
        ends = np.cumsum([rows * columns for rows, columns in batch.size])
        for pixels, size, label in zip(batch.pixels, batch.size, np.split(batch.labels[0, 0], ends[:-1]), strict=True):
            assert tuple(pixels.shape[1:]) == size
            assert size[0] % 16 == size[1] % 16 == 0
            assert size[0] * size[1] <= LIMIT * 256
            grids.add(size)
            bright, box = pixels.float().mean(0) > 105, torch.as_tensor(label).view(size)
            assert ((bright == box.bool()) | (box == 255)).float().mean() > 0.9
    assert len(grids) > 6


# Steps


@pytest.mark.parametrize("name", ["classes", "masks"])
def test_gradients_are_the_mean_over_images_or_pixels(place: Path, name: str) -> None:
    task = make_task(place, name)
    network = task.network
    batch = next(task.training(steps=1))
    images = [normalize(pixels) for pixels in batch.pixels]

    def gradients(loss: Any) -> torch.Tensor:
        network.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])

    packed = gradients(task.loss(network(veca.pack(images), 8, batch.size), batch.labels.long()))
    if name == "classes":
        parts = [(image, batch.labels[i : i + 1], None) for i, image in enumerate(images)]
    else:
        flat = batch.labels[0, 0].split([rows * columns for rows, columns in batch.size])
        pairs = zip(images, flat, batch.size, strict=True)
        parts = [(image, label.view(1, *size), size) for image, label, size in pairs]
    counts = [int((labels != task.ignore).sum()) for _, labels, _ in parts]
    losses = [task.loss(network(image[None], 8, size), labels.long()) for image, labels, size in parts]
    alone = gradients(sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts))
    assert len({image.shape for image in images}) > 2
    assert relative_error(packed, alone) < 1e-6


@pytest.mark.parametrize("name", ["classes", "masks"])
def test_a_run_learns_and_resumes_bit_for_bit(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings = asked(name, augment="colour", batch=8 if name == "classes" else 4)
    whole = tune(place, tmp_path / "whole", settings)
    assert whole["after"]["64"][whole["metric"]] > (90 if name == "classes" else 60)
    step = Finetuning.train_step

    def stop(self: Finetuning, batches: Any) -> None:
        if self.step == 7:
            signal.raise_signal(signal.SIGTERM)
        step(self, batches)

    monkeypatch.setattr(Finetuning, "train_step", stop)
    with pytest.raises(Interrupted):
        tune(place, tmp_path / "again", settings)
    monkeypatch.undo()
    assert tune(place, tmp_path / "again", dataclasses.replace(settings, workers=1))["after"] == whole["after"]
    for file in ("metrics.csv", "validation.csv"):
        assert table(tmp_path / "again" / file) == table(tmp_path / "whole" / file)
    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "again"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    (check_classes if name == "classes" else check_masks)(place, tmp_path / "whole", whole)


def check_classes(place: Path, run: Path, result: dict[str, Any]) -> None:
    """The saved image processor makes of each image what was scored."""
    files = sorted((place / "classes/val").glob("*/*.png"))
    processor, model = VecaImageProcessor.from_pretrained(run), VecaForImageClassification.from_pretrained(run)
    with torch.inference_mode():
        scores = model(**processor([Image.open(file) for file in files], return_tensors="pt"), cores=8).logits
    hits = [
        model.config.id2label[int(best)] == file.parent.name for best, file in zip(scores.argmax(1), files, strict=True)
    ]
    assert 100 * np.mean(hits) == pytest.approx(result["after"]["8"]["top1"])


def check_masks(place: Path, run: Path, result: dict[str, Any]) -> None:
    """Every image alone, at the size of its label."""
    segmenter, split = load_segmenter(run), load_dataset(str(place / "masks"), task="segment").splits["val"]
    hits = []
    for i in range(len(split)):
        label = split.label(i)
        image = load_image(split.image(i), fit="native", max_patches=LIMIT)
        with torch.inference_mode():
            predicted = segmenter(image[None], cores=64, size=label.shape).argmax(1)[0].numpy()
        hits.append((predicted == label)[1:].ravel())  # the first row does not count
    assert 100 * np.concatenate(hits).mean() == pytest.approx(result["after"]["64"]["pixel_accuracy"], abs=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixup": 0.2}, "mixup=0.2: must be 0 with fit native"),
        ({"fit": "crop"}, "max_patches=20: must be null unless fit is native"),
        ({"fit": "crop", "max_patches": None, "scales": (1, 1)}, r"must be \[0.5, 1.0\] unless fit is native"),
        ({"scales": (1, 0.5)}, "scales=.*: must be two numbers above 0, at most 8, the lower first"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked("classes", **changes)
