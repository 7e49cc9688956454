"""Fine-tuning for depth, and that no run ends with a model worse than its start."""

from __future__ import annotations

import dataclasses
import json
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
from torch import Tensor

import veca
from veca.data.crops import CropReader
from veca.data.datasets import load_dataset
from veca.heads.networks import DepthEstimator, load_network, load_segmenter
from veca.images import load_image, normalize
from veca.train.finetune.run import Finetuning, finetune
from veca.train.finetune.settings import FinetuneDepthSettings, FinetuneSegmentSettings
from veca.train.finetune.tasks import DepthTask
from veca.utils.signals import Interrupted

SIZES = (40, 90), (75, 33), (64, 64), (30, 100)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and images of boxes before a wall: the nearer, the brighter."""
    folder = tmp_path_factory.mktemp("depth")
    veca.save(make_tiny(), folder / "model")
    rng = np.random.default_rng(0)
    for i in range(20):
        height, width = SIZES[i % len(SIZES)]
        depth = np.full((height, width), 4.0)
        depth[height // 4 : height * 3 // 4, : width // 2] = rng.uniform(1, 2)
        pixels = 400 / (1 + depth)[..., None] + rng.normal(0, 10, (height, width, 3))
        depth[0] = 0  # not measured
        split = "val" if i % 4 == 0 else "train"
        values = {"images": pixels.clip(0, 255).astype(np.uint8), "depths": (1000 * depth).astype(np.uint16)}
        values["masks"] = (depth > 3).astype(np.uint8)
        for kind, each in values.items():
            (folder / "rooms" / kind / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(each).save(folder / "rooms" / kind / split / f"{i}.png")
    return folder


def asked(**changes: Any) -> FinetuneDepthSettings:
    common: dict[str, Any] = {"size": 32, "cores": (8, 64), "epochs": 2, "batch": 3, "rate": 2e-3, "head_epochs": 2}
    return FinetuneDepthSettings(**{**common, "bins": 32, "every": 4, "progress": False, **changes})


def tune(place: Path, folder: Path, settings: Any, said: list[str] | None = None) -> dict[str, Any]:
    data, say = str(place / "rooms"), (said if said is not None else []).append
    finetune(str(place / "model"), data, folder, settings, device="cpu", say=say)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def rmse_alone(place: Path, run: Path, cores: int, **fit: Any) -> float:
    """Each image of val alone, at the size of its depths."""
    estimator, split = load_network(run), load_dataset(str(place / "rooms"), task="depth").splits["val"]
    errors = []
    for i in range(len(split)):
        depth = torch.as_tensor(split.label(i))
        with torch.inference_mode():
            predicted = estimator(load_image(split.image(i), **fit)[None], cores, depth.shape)[0]
        valid = depth > 0
        errors.append(float((predicted - depth)[valid].square().mean().sqrt()))
    return float(np.mean(errors))


@pytest.mark.parametrize("native", [False, True], ids=["squares", "native"])
def test_a_run_learns_depth_and_resumes_bit_for_bit(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    settings = asked(fit="native", max_patches=12, augment="colour", head="new") if native else asked(epochs=3)
    whole = tune(place, tmp_path / "whole", settings)
    assert (whole["metric"], whole["unit"], whole["classes"]) == ("rmse", "m", [])
    fit: dict[str, Any] = {"fit": "native", "max_patches": 12} if native else {"fit": "keep", "size": 32}
    assert rmse_alone(place, tmp_path / "whole", 64, **fit) == pytest.approx(whole["after"]["64"]["rmse"], rel=1e-4)
    scores = [float(row["rmse"]) for row in table(tmp_path / "whole/validation.csv")]
    means = [sum(pair) / 2 for pair in zip(scores[::2], scores[1::2], strict=True)]
    assert whole["best"]["score"] == pytest.approx(min(means)), "the lowest error is the best"
    assert min(means) < 0.8 * means[0]
    page = (tmp_path / "whole/report.html").read_text()
    assert "rmse, m" in page
    assert page.count("data:image/png;base64,iVBOR") == 2 * len(whole["gallery"])

    step = Finetuning.train_step

    def stop(self: Finetuning, batches: Any) -> None:
        if self.step == 5:
            signal.raise_signal(signal.SIGTERM)
        step(self, batches)

    monkeypatch.setattr(Finetuning, "train_step", stop)
    with pytest.raises(Interrupted):
        tune(place, tmp_path / "again", settings)
    monkeypatch.undo()
    assert "rmse, m" in (tmp_path / "again/report.html").read_text(), "also of a run that goes on"
    assert tune(place, tmp_path / "again", dataclasses.replace(settings, workers=1))["after"] == whole["after"]
    for file in ("metrics.csv", "validation.csv"):
        assert table(tmp_path / "again" / file) == table(tmp_path / "whole" / file)
    for name in ("model", "head"):
        one, two = (load_file(tmp_path / run / f"{name}.safetensors") for run in ("whole", "again"))
        assert all(torch.equal(one[key], two[key]) for key in one)
    with pytest.raises(veca.CheckpointError, match="its head measures depth; name a folder"):
        load_segmenter(tmp_path / "whole")


def test_the_loss_of_a_pack_is_that_of_its_images(place: Path) -> None:
    """Their maps together, as depth probes compute it: errors between neighbours do not cross from image to image."""
    data = load_dataset(str(place / "rooms"), task="depth")
    task = DepthTask(veca.load(place / "model"), data, asked(fit="native", max_patches=12, batch=4), CropReader())
    batch = next(iter(task.training(steps=1)))
    images = [normalize(pixels) for pixels in batch.pixels]
    assert len({image.shape for image in images}) > 1
    parts = batch.labels[0, 0].split([rows * columns for rows, columns in batch.size])
    labels = [part.view(1, *size) for part, size in zip(parts, batch.size, strict=True)]

    def gradients(loss: Tensor) -> Tensor:
        task.network.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in task.network.parameters() if p.grad is not None])

    packed = gradients(task.loss(task.network(veca.pack(images), 8, batch.size), batch.labels, batch.size))
    outputs = [task.network(image[None], 8, size) for image, size in zip(images, batch.size, strict=True)]
    alone = gradients(task.network.head.batch_loss(outputs, labels))
    assert relative_error(packed, alone) < 1e-5


# The start


@pytest.mark.parametrize("kind", [FinetuneSegmentSettings, FinetuneDepthSettings])
def test_a_run_that_only_gets_worse_keeps_its_start(place: Path, tmp_path: Path, kind: Any) -> None:
    said: list[str] = []
    settings = kind(size=32, cores=(64,), epochs=0.5, batch=4, rate=1.0, head_epochs=20, progress=False)
    result = tune(place, tmp_path, settings, said)
    assert result["best"]["step"] == 0
    assert result["steps"] > 0
    assert result["after"] == result["before"]
    start, kept = load_file(place / "model/model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(start[name], kept[name]) for name in start)
    note = "No step of training was better than the start: the weights of step 0 are kept"
    assert any(note in text for text in said)
    assert note in result["note"]
    assert note in (tmp_path / "report.html").read_text()
    assert note in (tmp_path / "events.txt").read_text()
    assert {row["step"] for row in table(tmp_path / "validation.csv")} >= {"0", str(result["steps"])}
    assert veca.load(tmp_path).provenance["step"] == 0


def test_settings_and_heads_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bins=1: must be 0, or at least 2"):
        asked(bins=1)
    with pytest.raises(ValueError, match="augment='trivial': must be flip or colour"):
        asked(augment="trivial")
    network = DepthEstimator(make_tiny(depth=1), 0.1, 5.0, bins=8)
    veca.save(network.backbone, tmp_path)
    network.head.low = 7.0  # above the highest
    network.save_head(tmp_path)
    with pytest.raises(veca.CheckpointError, match="damaged, or no head of `veca finetune`: low is 7"):
        load_network(tmp_path)
