from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny
from PIL import Image

from veca.data.datasets import DatasetError, DepthRules, ProbeData, load_dataset
from veca.data.datasets.batches import DenseLoader, LabelledBatch, UnreadableImageError, shuffled_batches
from veca.heads.dense import DenseBatch, SegmentationHead, evaluate, fit_dense
from veca.heads.features import FrozenVeca
from veca.probe import dense_run
from veca.probe.dense_run import DenseSettings, DepthSettings, probe_dense
from veca.report.gallery import class_colours, colour_classes, colour_depth

QUICK: dict[str, Any] = {"cores": (8, 64), "sizes": (48,), "steps": 8, "every": 4, "batch": 4, "progress": False}
SEGMENT = DenseSettings(rates=(0.01, 0.03), **QUICK)
DEPTH = DepthSettings(rates=(0.001, 0.03), bins=32, **QUICK)


def make_pairs(root: Path, kind: str, count: int = 6) -> Path:
    """Red on the left and blue on the right, where the edge is anywhere; classes 0 and 1, or 1 and 3 metres.

    The lowest rows have no label. Pictures have two shapes.
    """
    draw = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for i in range(count):
            height, width = (60, 90) if i % 2 else (70, 60)
            right = np.zeros((height, width), bool)
            right[:, draw.integers(width // 4, 3 * width // 4) :] = True
            pixels = np.where(right[..., None], (30, 30, 220), (220, 30, 30)) + draw.integers(-9, 9, (height, width, 3))
            label = (right * 2000 + 1000).astype(np.uint16) if kind == "depths" else right.astype(np.uint8)
            label[-5:] = 0 if kind == "depths" else 255
            for folder, values in (("images", pixels.astype(np.uint8)), (kind, label)):
                (root / split / folder).mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(root / split / folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> ProbeData:
    return load_dataset(str(make_pairs(tmp_path_factory.mktemp("data") / "halves", "masks")))


@pytest.fixture(scope="module")
def depths(tmp_path_factory: pytest.TempPathFactory) -> ProbeData:
    return load_dataset(str(make_pairs(tmp_path_factory.mktemp("data") / "steps", "depths")))


def backbone() -> FrozenVeca:
    return FrozenVeca(make_tiny(), "tiny", torch.device("cpu"), "float32")


def ask(settings: Any, **changes: Any) -> Any:
    return dataclasses.replace(settings, **changes)


def test_segment_learns_and_writes_rows(masks: ProbeData, tmp_path: Path) -> None:
    rows = probe_dense(backbone(), masks, tmp_path, ask(SEGMENT, steps=30, every=12))
    assert [(row["cores"], row["size"], row["grid"]) for row in rows] == [(8, 48, [3, 3]), (64, 48, [3, 3])]
    row = rows[0]
    assert (row["metric"], row["scored_on"]) == ("mIoU", "test")
    assert row["metrics"]["mIoU"] > 75
    assert row["metrics"]["mIoU"] == pytest.approx(np.mean(list(row["per_class"].values())), abs=1e-3)
    low, high = row["interval"]["mIoU"]
    assert 0 < low < row["metrics"]["mIoU"] < high <= 100
    assert list(row["per_class"]) == ["0", "1"]
    assert len(row["curve"]["val"]) == 3  # after every 12 of 30 steps, and the last
    assert max(row["curve"]["val"]) == max(pair["val"] for pair in row["sweep"])
    assert row["protocol"]["ignore"] == 255
    assert len(row["gallery"]) == 6
    for shown in row["gallery"]:
        sizes = [Image.open(tmp_path / shown[name]).size for name in ("image", "label", "prediction")]
        assert sizes[0] == sizes[1] == sizes[2]


def test_depth_learns_and_writes_rows(depths: ProbeData, tmp_path: Path) -> None:
    rows = probe_dense(backbone(), depths, tmp_path, ask(DEPTH, steps=40, every=10, cores=(8,)))
    (plain,) = probe_dense(backbone(), depths, tmp_path, ask(DEPTH, steps=40, every=10, cores=(8,), head="regression"))
    for row in (*rows, plain):
        assert row["metric"] == "rmse"
        assert row["metrics"]["rmse"] < 0.75  # 1 m for the middle everywhere
        assert 50 < row["metrics"]["delta1"] <= 100
        assert min(row["curve"]["val"]) == min(pair["val"] for pair in row["sweep"])
        assert row["per_class"] is None
    assert len(list((tmp_path / "rows").iterdir())) == 2


def test_a_budget_alone_or_among_others_is_the_same(masks: ProbeData, tmp_path: Path) -> None:
    together = probe_dense(backbone(), masks, tmp_path / "a", SEGMENT)
    alone = probe_dense(backbone(), masks, tmp_path / "b", ask(SEGMENT, cores=(64,)))
    same = ("metrics", "sweep", "best", "curve", "per_class")
    assert [alone[0][key] for key in same] == [together[1][key] for key in same]
    more = probe_dense(backbone(), masks, tmp_path / "b", SEGMENT)  # what is there is kept, the other is added
    assert more[1] == alone[0]
    assert [more[0][key] for key in same] == [together[0][key] for key in same]


def test_a_run_that_died_ends_with_the_same_rows(
    masks: ProbeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = probe_dense(backbone(), masks, tmp_path / "whole", SEGMENT)
    with monkeypatch.context() as patch:
        saved = []

        def dies(*args: Any) -> Any:
            saved.append(args)
            if len(saved) > 20:  # in the gallery of the second row
                raise KeyboardInterrupt
            return save_picture(*args)

        save_picture = dense_run.save_picture
        patch.setattr(dense_run, "save_picture", dies)
        with pytest.raises(KeyboardInterrupt):
            probe_dense(backbone(), masks, tmp_path / "f", SEGMENT)
    assert len(list((tmp_path / "f/rows").iterdir())) == 1
    again = probe_dense(backbone(), masks, tmp_path / "f", SEGMENT)
    assert [row["metrics"] | row["best"] for row in again] == [row["metrics"] | row["best"] for row in whole]


@pytest.mark.parametrize("changes", [{"slide": True}, {"norm": "batch"}, {"norm": "standard"}])
def test_other_ways_to_score_and_to_norm(masks: ProbeData, tmp_path: Path, changes: dict[str, Any]) -> None:
    (row,) = probe_dense(backbone(), masks, tmp_path, ask(SEGMENT, cores=(8,), steps=30, every=10, **changes))
    assert row["metrics"]["mIoU"] > 70
    assert row["protocol"] | changes == row["protocol"]
    assert ("windows of 48×48, stride 32" in row["protocol"]["preprocessing"]["score"]) == ("slide" in changes)


def test_a_window_as_large_as_the_picture_is_the_whole(tmp_path: Path) -> None:
    root = make_pairs(tmp_path / "square", "masks", 2)
    for split in ("train", "val", "test"):
        for i in range(2):
            for folder in ("images", "masks"):
                path = root / split / folder / f"{i}.png"
                Image.open(path).crop((0, 0, 60, 60)).save(path)
    data = load_dataset(str(root))
    rows = [
        probe_dense(backbone(), data, tmp_path / "f", ask(SEGMENT, cores=(8,), slide=slide))[0]
        for slide in (False, True)
    ]
    assert rows[1]["metrics"]["mIoU"] == pytest.approx(rows[0]["metrics"]["mIoU"], abs=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_squares_and_their_labels_belong_together(masks: ProbeData, workers: int) -> None:
    pictures = DenseLoader(masks, 32, 16, 4, seed=3, workers=workers)
    batches, again = list(pictures.training(6)), list(DenseLoader(masks, 32, 16, 4, seed=3).training(6))
    other = next(DenseLoader(masks, 32, 16, 4, seed=4).training(1))
    assert [batch.pixels.shape for batch in batches] == [(4, 3, 32, 32)] * 6
    assert {batch.labels.dtype for batch in batches} == {torch.int32}  # of bytes or not
    mirrored = 0
    for batch, same in zip(batches, again, strict=True):
        assert torch.equal(batch.pixels, same.pixels)
        assert torch.equal(batch.labels, same.labels)
        blue = batch.pixels[:, 2].int() > batch.pixels[:, 0].int()
        counts = batch.labels != 255
        assert (blue == (batch.labels == 1))[counts].float().mean() > 0.96  # but for the pixels at the edge
        mirrored += int((blue[:, 0, 0] & ~blue[:, 0, -1]).sum())
    assert mirrored > 0
    assert not torch.equal(batches[0].pixels, other.pixels)


def test_training_goes_on_from_any_step_and_at_any_scale(masks: ProbeData) -> None:
    pictures, plain = DenseLoader(masks, 32, 16, 4, seed=3, scales=(0.5, 2.0)), DenseLoader(masks, 32, 16, 4, seed=3)
    batches, later = list(pictures.training(6)), list(pictures.training(6, start=4))
    assert [torch.equal(a.pixels, b.pixels) for a, b in zip(batches[4:], later, strict=True)] == [True, True]

    def beside(found: list[LabelledBatch]) -> int:
        """Squares wider than what was left of their picture."""
        return sum(int((batch.labels[:, 0] == 255).any(1).sum()) for batch in found)

    assert 0 < beside(batches) < 24
    assert beside(list(plain.training(6))) == 0
    for batch in batches:
        blue, counts = batch.pixels[:, 2].int() > batch.pixels[:, 0].int(), batch.labels != 255
        assert (blue == (batch.labels == 1))[counts].float().mean() > 0.93


def test_every_picture_is_seen_once_an_epoch() -> None:
    places = [place for batch in shuffled_batches(6, 4, range(9), seed=0) for place in batch]
    assert [place for place, _ in places] == list(range(36))
    assert [sorted(i for _, i in places[start : start + 6]) for start in range(0, 36, 6)] == [list(range(6))] * 6
    assert len({tuple(i for _, i in places[start : start + 6]) for start in range(0, 36, 6)}) > 1


def test_pictures_are_scored_whole_with_their_own_labels(masks: ProbeData) -> None:
    batches = list(DenseLoader(masks, 32, 16, 2).scoring("val"))
    shapes = [(tuple(batch.pixels.shape), tuple(batch.labels.shape)) for batch in batches]
    tall, wide = ((3, 32, 32), (70, 60)), ((3, 32, 48), (60, 90))  # in turns; four pictures are looked at at once
    expected = ((*tall, 2), (*wide, 2), (*tall, 1), (*wide, 1))
    assert shapes == [((n, *pixels), (n, *label)) for pixels, label, n in expected]
    assert np.array_equal(batches[0].labels[0], masks.splits["val"].label(0))


def test_depths_count_where_the_benchmark_looks(depths: ProbeData) -> None:
    """As in the literature: the crop is that of the whole frame, of which only a part is seen."""
    rules = DepthRules(crop="garg", input_crop=(50, 80))
    data = dataclasses.replace(depths, depth=rules)
    own = depths.splits["val"].label(1)  # 60 × 90
    batch = DenseLoader(data, 48, 16, 2).one("val", 1)
    assert batch is not None
    assert batch.labels.shape == (1, 50, 80)
    top, bottom, left, right = rules.box(60, 90)
    expected = np.zeros_like(own)
    expected[top:bottom, left:right] = own[top:bottom, left:right]
    assert np.array_equal(batch.labels[0], expected[10:, 5:85])
    assert (batch.labels > 0).sum() < own.size
    learned = next(DenseLoader(data, 48, 16, 6).training(1)).labels
    assert (learned > 0).float().mean() > 0.8


def test_unreadable_pairs_stop_or_are_skipped(tmp_path: Path) -> None:
    root = make_pairs(tmp_path / "halves", "masks")
    (root / "val/images/3.png").write_bytes(b"nothing")
    Image.new("L", (7, 7)).save(root / "train/masks/2.png")
    data, said = load_dataset(str(root)), list[str]()
    with pytest.raises(UnreadableImageError, match="halves train cannot be read: .*2.png.*label 7×7; they must match"):
        probe_dense(backbone(), data, tmp_path / "f", ask(SEGMENT, cores=(8,)))
    (row,) = probe_dense(backbone(), data, tmp_path / "f", ask(SEGMENT, cores=(8,), skip_bad=True), said.append)
    assert list(row["protocol"]["skipped"]) == ["halves train", "halves val"]
    assert "left out 1 picture of halves val that cannot be read: val/images/3.png" in said[1]


def test_a_dataset_of_another_task_is_refused(masks: ProbeData, depths: ProbeData, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="labels to segment: `veca probe segment`"):
        probe_dense(backbone(), masks, tmp_path, DEPTH)
    with pytest.raises(DatasetError, match="labels to depth: `veca probe depth`"):
        probe_dense(backbone(), depths, tmp_path, SEGMENT)


def test_many_heads_learn_as_each_would_alone() -> None:
    torch.manual_seed(0)
    streams = [
        [DenseBatch(torch.randn(2, 5, 3, 4) * scale, torch.randn(2, 5), torch.randint(3, (2, 6, 8))) for _ in range(6)]
        for scale in (1, 4)
    ]
    heads = [SegmentationHead(5, 3, norm="standardize", seed=seed) for seed in (0, 1)]
    options: dict[str, Any] = {"rates": (0.01, 0.1), "steps": 6, "every": 2}
    many = fit_dense(
        heads, lambda: ([[batch] for batch in step] for step in zip(*streams, strict=True)),
        lambda groups: [evaluate(group, stream) for group, stream in zip(groups, streams, strict=True)], **options,
    )  # fmt: skip
    for head, stream, found in zip(heads, streams, many, strict=True):
        (alone,) = fit_dense(
            [head],
            lambda stream=stream: ([[batch]] for batch in stream),
            lambda groups, stream=stream: [evaluate(groups[0], stream)],
            **options,
        )
        assert torch.equal(found.stack.weight, alone.stack.weight)
        assert found.scores == alone.scores
        assert torch.equal(found.head.weight, alone.head.weight)


def test_class_colours_are_distinct() -> None:
    colours = class_colours(150)
    assert len({tuple(colour) for colour in colours.tolist()}) == 150
    assert colours.any(1).all()
    shown = np.asarray(colour_classes(np.array([[0, 1, 255]]), 2))
    assert shown[0].tolist() == [*colours[:2].tolist(), [0, 0, 0]]
    ramp = np.asarray(colour_depth(np.array([[0.0, 1.0, 5.0, 9.0]]), 1.0, 9.0)).astype(int).sum(-1)[0]
    assert ramp[0] == 0
    assert ramp[1] > ramp[2] > ramp[3] > 0
