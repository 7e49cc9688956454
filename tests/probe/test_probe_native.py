"""Segmentation and depth probes at native sizes, beside a plain computation, image by image."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from conftest import make_tiny
from PIL import Image
from probe_rows import row, write_rows
from torch import Tensor
from torchmetrics.functional.classification import multiclass_jaccard_index
from typer.testing import CliRunner

import veca
from veca.cli.common import out as console
from veca.cli.main import app
from veca.data.datasets import ProbeData, load_dataset
from veca.data.datasets.batches import shuffled_batches
from veca.data.datasets.native import NativeDenseLoader
from veca.data.transforms import random_window, seeded_random
from veca.heads.dense import DepthHead, SegmentationHead, polynomial
from veca.heads.features import BackboneError, FrozenVeca
from veca.images import fit_image, load_image, normalize, open_image, to_tensor
from veca.probe.backbones import OnnxBackbone, TeacherBackbone
from veca.probe.dense_run import DenseSettings, DepthSettings, ProbeFit, probe_dense
from veca.probe.paper import compare_with_paper
from veca.probe.pareto import collect_scores
from veca.probe.report import draw_curves, group_rows, write_probe_report
from veca.probe.results import parse_row, read_results
from veca.teachers.from_timm import timm_teacher

CPU = torch.device("cpu")
LIMIT, STEPS = 24, 16
SHAPES = (40, 130), (96, 33), (50, 60), (200, 90)  # of the last, native size has more patches than the limit
QUICK: dict[str, Any] = {"cores": (8,), "steps": STEPS, "every": STEPS, "batch": 3, "progress": False}


def make_mixed(root: Path, kind: str) -> ProbeData:
    """Blue discs on red ground, in pictures of several shapes; labels as in `make_pairs`, the first rows without."""
    draw = np.random.default_rng(1)
    for split in ("train", "val", "test"):
        for i, (height, width) in enumerate(SHAPES):
            y, x = np.mgrid[:height, :width]
            disc = (y - height * draw.uniform(0.3, 0.7)) ** 2 + (x - width * draw.uniform(0.3, 0.7)) ** 2 < 22**2
            pixels = np.where(disc[..., None], (30, 30, 220), (220, 30, 30)) + draw.integers(-9, 9, (height, width, 3))
            label = (disc * 2000 + 1000).astype(np.uint16) if kind == "depths" else disc.astype(np.uint8)
            label[:7] = 0 if kind == "depths" else 255
            for folder, values in (("images", pixels.astype(np.uint8)), (kind, label)):
                (root / split / folder).mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(root / split / folder / f"{i}.png")
    return load_dataset(str(root))


def native(settings: Any, **changes: Any) -> Any:
    return dataclasses.replace(settings, fit="native", max_patches=LIMIT, **changes)


def backbone() -> FrozenVeca:
    return FrozenVeca(make_tiny(), "tiny", CPU, "float32")


class OneByOne:
    """The same probe: each image alone through the model, a linear layer, and torch's own interpolation."""

    def __init__(self, data: ProbeData, weight: Tensor, bias: Tensor) -> None:
        self.data, self.model = data, make_tiny().eval()
        self.weight, self.bias = (each.detach().clone().requires_grad_() for each in (weight, bias))

    def maps(self, image: Image.Image, flip: bool = False) -> tuple[Tensor, tuple[int, int]]:
        """Return the outputs (1, channels, h, w) of an image, and its size as the model sees it."""
        pixels = normalize(to_tensor(fit_image(image, None, "native", max_patches=LIMIT)))
        pixels = pixels.flip(-1) if flip else pixels
        with torch.no_grad():
            out = self.model(pixels[None], cores=8)
        inputs = torch.cat([out.feature_map, out.cls[..., None, None].expand_as(out.feature_map)], 1)
        return torch.einsum("bdhw,cd->bchw", inputs, self.weight) + self.bias[:, None, None], pixels.shape[1:]

    def label(self, split: str, i: int) -> Tensor:
        return torch.from_numpy(self.data.splits[split].label(i).astype(np.float32))

    def train(self, loss: Any, rate: float) -> None:
        optimizer = torch.optim.AdamW([self.weight, self.bias], weight_decay=1e-4)
        split = self.data.splits["train"]
        for step, places in enumerate(shuffled_batches(len(split), 3, range(STEPS), 0)):
            outputs, labels = [], []
            for position, i in places:
                generator = torch.Generator().manual_seed(seeded_random(0, position).getrandbits(62))
                flip = random_window(9, 9, (9, 9), generator).flip
                found, size = self.maps(open_image(split.image(i)), flip)
                label = F.interpolate(self.label("train", i)[None, None], size, mode="nearest-exact")[0, 0]
                outputs.append(F.interpolate(found, size, mode="bilinear").flatten(2)[0])
                labels.append((label.flip(-1) if flip else label).flatten())
            optimizer.param_groups[0]["lr"] = rate * polynomial(step, STEPS, 0.9)
            optimizer.zero_grad()
            loss(torch.cat(outputs, 1), torch.cat(labels)).backward()
            optimizer.step()

    def test(self) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs (channels, H, W) and the label of each image of test, at the size of the label."""
        split, pairs = self.data.splits["test"], []
        for i in range(len(split)):
            label = self.label("test", i)
            found = F.interpolate(self.maps(open_image(split.image(i)))[0], label.shape[-2:], mode="bilinear")
            pairs.append((found[0].detach(), label))
        return pairs


def test_segmentation_is_that_of_a_plain_computation(tmp_path: Path) -> None:
    data = make_mixed(tmp_path / "discs", "masks")
    head = SegmentationHead(64, 2)
    plain = OneByOne(data, head.weight, head.bias)
    plain.train(lambda scores, labels: F.cross_entropy(scores.T, labels.long(), ignore_index=255), 0.1)
    pairs = plain.test()
    found = torch.cat([scores.argmax(0).flatten() for scores, _ in pairs])
    labels = torch.cat([label.flatten() for _, label in pairs]).long()
    expected = 100 * multiclass_jaccard_index(found, labels, num_classes=2, ignore_index=255)
    (row,) = probe_dense(backbone(), data, tmp_path / "out", native(DenseSettings(rates=(0.1,), **QUICK)))
    assert row["metrics"]["mIoU"] == pytest.approx(float(expected), abs=0.02)
    assert row["metrics"]["mIoU"] > 60
    assert (row["size"], row["grid"], row["protocol"]["max_patches"]) == (64, None, LIMIT)
    shown = [Image.open(tmp_path / "out" / files["prediction"]).size for files in row["gallery"]]
    assert shown == [(width, height) for height, width in SHAPES]


def test_depth_is_that_of_a_plain_computation(tmp_path: Path) -> None:
    data = make_mixed(tmp_path / "discs", "depths")
    assert data.depth is not None
    low, high = data.depth.min_depth, data.depth.max_depth
    head = DepthHead(64, low, high, bins=0)
    plain = OneByOne(data, head.weight, head.bias)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        valid = (labels > low) & (labels < high)
        return (low + (high - low) * outputs[0] - labels)[valid].abs().mean()

    plain.train(loss, 0.003)
    errors = []
    for outputs, label in plain.test():
        depth, valid = (low + (high - low) * outputs[0]).clamp(low, high), (label > low) & (label < high)
        errors.append(float((depth - label)[valid].square().mean().sqrt()))
    settings = native(DepthSettings(head="regression", loss="l1", rates=(0.003,), **QUICK))
    (row,) = probe_dense(backbone(), data, tmp_path / "out", settings)
    assert row["metrics"]["rmse"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert row["metrics"]["rmse"] < 1
    expected = scipy.stats.t.interval(0.95, len(errors) - 1, loc=np.mean(errors), scale=scipy.stats.sem(errors))
    assert row["interval"]["rmse"] == pytest.approx(expected, rel=5e-3)  # of four images


def padded(groups: list[Tensor], fill: float) -> Tensor:
    """Return maps of several sizes as one batch."""
    height, width = (max(each.shape[dim] for each in groups) for dim in (-2, -1))
    return torch.cat(
        [F.pad(each, (0, width - each.shape[-1], 0, height - each.shape[-2]), value=fill) for each in groups]
    )


@pytest.mark.parametrize("head", [SegmentationHead(3, 5), DepthHead(3, 0.5, 9.0), DepthHead(3, 0.5, 9.0, loss="l2")])
def test_the_loss_of_several_sizes_is_that_of_padding_that_does_not_count(head: Any) -> None:
    torch.manual_seed(0)
    sizes, segments = ((2, 12, 30), (1, 40, 9), (1, 17, 17)), isinstance(head, SegmentationHead)
    labels = [torch.randint(5, size) if segments else 10 * torch.rand(size) for size in sizes]
    labels[0][:, :4] = 255 if segments else 0
    outputs = [
        torch.randn(len(each), 5, *each.shape[1:]) if segments else 9 * torch.rand(each.shape) for each in labels
    ]
    whole = head.loss(padded(outputs, 1.0), padded(labels, 255 if segments else 0))
    torch.testing.assert_close(head.batch_loss(outputs, labels), whole)


def test_a_batch_norm_sees_all_sizes_at_once() -> None:
    torch.manual_seed(0)
    head, norm = SegmentationHead(4, 3, norm="batchnorm").train(), torch.nn.BatchNorm1d(8, affine=False)
    features = [(torch.randn(2, 4, 3, 5) + 1, torch.randn(2, 4)), (3 * torch.randn(1, 4, 6, 2), torch.randn(1, 4))]
    found = head.normed_groups(features)
    expected = norm(torch.cat([head.inputs(*each).flatten(0, 2) for each in features]))
    torch.testing.assert_close(torch.cat([each.flatten(0, 2) for each in found]), expected)
    assert [each.shape for each in found] == [(2, 3, 5, 8), (1, 6, 2, 8)]


@pytest.mark.parametrize("kind", ["veca", "timm"])
def test_features_are_those_of_each_image_alone(kind: str) -> None:
    model: Any = backbone()
    if kind == "timm":
        options = {"depth": 1, "embed_dim": 64, "num_heads": 2, "pretrained": False}
        model = TeacherBackbone(timm_teacher("vit_base_patch16_224", **options), "timm:x", CPU, "float32")
    model.check_native()
    groups = [torch.randn(2, 3, 32, 128), torch.randn(1, 3, 96, 32), torch.randn(1, 3, 48, 64)]
    cores = 8 if kind == "veca" else None
    for images, (patches, cls) in zip(groups, model.grouped_features(groups, cores), strict=True):
        assert not patches.is_inference()
        for i, image in enumerate(images):
            alone, own = model.dense_features(image[None], cores)
            torch.testing.assert_close(patches[i], alone[0], rtol=0, atol=1e-6)
            torch.testing.assert_close(cls[i], own[0], rtol=0, atol=1e-6)


def test_backbones_of_one_size_are_refused(tmp_path: Path) -> None:
    options = {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 16, "pretrained": False}
    swin = TeacherBackbone(timm_teacher("swin_tiny_patch4_window7_224", **options), "timm:swin", CPU, "float32")
    data = make_mixed(tmp_path / "discs", "masks")
    with pytest.raises(BackboneError, match="timm:swin takes one size only; leave out --fit native"):
        probe_dense(swin, data, tmp_path / "out", native(DenseSettings(**QUICK)))
    exported = Mock(export_size="256x256")
    exported.name = "tiny.onnx"
    with pytest.raises(BackboneError, match="tiny.onnx takes 256x256 only; export with --size dynamic"):
        OnnxBackbone.check_native(exported)


@pytest.mark.parametrize(
    ("fit", "changes", "says"),
    [
        ("crop", {"max_patches": 9}, "max_patches=9: must be None unless fit is 'native'"),
        ("native", {"slide": True}, "slide=True: must be False with fit 'native'"),
        ("native", {"max_patches": 9, "sizes": (32, 48)}, "max_patches=9: must be None with several sizes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fit: ProbeFit, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DenseSettings(fit=fit, **changes)


def test_rows_of_native_sizes_stand_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files, tables, charts and the comparison with the paper, and outside of quality-cost tables."""
    monkeypatch.setattr(console, "width", 300)  # COLUMNS is read once, when a process imports the console
    make_mixed(tmp_path / "discs", "masks")
    veca.save(make_tiny(), tmp_path / "model")
    where = ["--model", tmp_path / "model", "--data", tmp_path / "discs", "--out", tmp_path / "out"]
    quick = ["--cores", "8", "--steps", "1", "--workers", "0", "--no-progress", "--device", "cpu"]
    for options in (
        ["--size", "32,48"],
        ["--size", "32,48", "--fit", "native"],
        ["--fit", "native", "--max-patches", 9],
    ):
        result = CliRunner().invoke(app, ["probe", "segment", *map(str, [*where, *quick, *options])])
        assert result.exit_code == 0, f"{result.output}{result.exception}"
    assert "native ≤ 9" in result.output
    files = sorted((tmp_path / "out/rows").iterdir())
    assert [path.name.split("-")[-2] for path in files] == ["n4", "n9", "s32", "s48"]  # 9 patches: 48 px, computed once
    protocols = [json.loads(path.read_text())["protocol"] for path in files]
    assert [each.get("fit") for each in protocols] == ["native", "native", None, None]
    sha256 = json.loads(files[0].read_text())["model"]["about"]["sha256"]
    assert {setting.size for setting in collect_scores(tmp_path / "out", sha256)} == {32, 48}
    groups = group_rows(read_results(tmp_path / "out")[0])
    assert [(group.native, len(group.rows)) for group in groups] == [(False, 2), (True, 2)]
    assert len({curve["name"] for group in groups for curve in draw_curves(group)}) == 2
    write_probe_report(tmp_path / "out")
    text = (tmp_path / "out/report.md").read_text()
    assert "segment, mIoU, native sizes" in text
    assert "native ≤ 9 patches" in text


def test_native_sizes_are_not_compared_with_the_paper(tmp_path: Path) -> None:
    plain = row("segment", "ade20k", size=512, value=30.0)
    protocol = plain["protocol"] | {"fit": "native", "max_patches": 1024}
    assert compare_with_paper(parse_row(plain, "a.json")) is not None
    assert compare_with_paper(parse_row(plain | {"protocol": protocol}, "b.json")) is None
    write_probe_report(write_rows(tmp_path, [plain | {"protocol": protocol}]))
    assert "VECA-S" not in (tmp_path / "report.md").read_text()


def test_pixels_of_native_sizes(tmp_path: Path) -> None:
    data = make_mixed(tmp_path / "discs", "masks")
    loader = NativeDenseLoader(data, 48, 16, 4, max_patches=LIMIT)
    (groups,) = loader.scoring_groups("val")
    assert [tuple(each.pixels.shape[2:]) for each in groups] == [(48, 128), (96, 32), (48, 64), (112, 48)]
    assert [tuple(each.labels.shape[1:]) for each in groups] == list(SHAPES)
    path = tmp_path / "discs/val/images/3.png"
    expected = load_image(path, None, "native", max_patches=LIMIT)
    assert torch.equal(normalize(groups[3].pixels[0]), expected)
