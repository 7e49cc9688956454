from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from veca.data.transforms import random_window, slide_windows
from veca.heads import dense
from veca.heads.dense import (
    DenseBatch,
    DenseHead,
    DenseSweep,
    DepthHead,
    Norm,
    SegmentationHead,
    evaluate,
    fit_dense,
    gradient_loss,
    log_error,
    polynomial,
    scale_invariant_loss,
)
from veca.images.resize import resize_maps

WIDTH = 6
Batches = Callable[[], Iterator[DenseBatch]]


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(count: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(count, WIDTH, 4, 5, generator=draw(seed)), torch.randn(count, WIDTH, generator=draw(seed + 1))


def scenes(seed: int, count: int, depth: bool = False) -> Batches:
    """Batches whose labels a linear head can find: in a channel of the patches plus that of the global feature."""

    def batches() -> Iterator[DenseBatch]:
        for i in range(count):
            patches, cls = features(4, seed=1000 * seed + 2 * i)
            truth = resize_maps(patches[:, :1] + cls[:, :1, None, None], (16, 20))[:, 0]
            if depth:
                labels = (truth + 4).clamp(0, 9)
                labels[:, :3] = 0
            else:
                labels = (truth > -0.5).long() + (truth > 0.5).long()
                labels[:, :3] = 255
            yield DenseBatch(patches, cls, labels)

    return batches


def fit_one(head: DenseHead, train: Batches, validation: Batches, **options: Any) -> DenseSweep:
    def checked() -> Iterator[list[list[DenseBatch]]]:
        for batch in train():
            head.check(batch.labels)
            yield [[batch]]

    (sweep,) = fit_dense([head], checked, lambda stacks: [evaluate(stacks[0], validation())], **options)
    return sweep


def best_scores(sweep: DenseSweep) -> dict[str, float]:
    return sweep.scores[sweep.evaluated.index(sweep.best_step)][sweep.best]


def test_a_head_is_a_linear_layer_over_patch_and_global_feature() -> None:
    patches, cls = features()
    head = SegmentationHead(WIDTH, 3, norm="none", seed=1)
    assert float(head.weight.detach().std()) == pytest.approx(0.01, rel=0.3)
    scores = head(patches, cls, (4, 5))
    for row, column in ((0, 0), (3, 2)):
        token = torch.cat([patches[1, :, row, column], cls[1]])
        assert torch.allclose(scores[1, :, row, column], head.weight @ token + head.bias, atol=1e-6)
    assert head(patches, cls, (32, 40)).shape == (2, 3, 32, 40)


@pytest.mark.parametrize("norm", ["batchnorm", "standardize"])
def test_norms_undo_scale_and_shift(norm: str) -> None:
    train = scenes(1, 8)

    def shifted() -> Iterator[DenseBatch]:
        return (DenseBatch(100 * patches + 7, cls * 50 - 3, labels) for patches, cls, labels in train())

    outputs = []
    for source in (train, shifted):
        head = SegmentationHead(WIDTH, 3, norm=norm)  # type: ignore[arg-type]
        if norm == "standardize":
            head.use_moments(head.moments(batch) for batch in source())
        patches, cls, _ = next(iter(source()))
        outputs.append(head(patches, cls, (4, 5)).detach())
    assert torch.allclose(outputs[0], outputs[1], atol=1e-3 * float(outputs[0].abs().max()))
    assert outputs[0].std() > 0.005


def test_segmentation_loss_is_cross_entropy_over_the_pixels_that_count() -> None:
    patches, cls = features()
    head = SegmentationHead(WIDTH, 3)
    labels = torch.randint(3, (2, 16, 20), generator=draw(5))
    labels[0, :9] = 255
    output = head(patches, cls, (16, 20))
    assert float(head.loss(output, labels).detach()) == pytest.approx(
        float(F.cross_entropy(output, labels, ignore_index=255).detach()), rel=1e-5
    )
    nothing = head.loss(output, torch.full_like(labels, 255))
    nothing.backward()
    assert float(nothing.detach()) == 0
    assert not head.weight.grad.any()  # type: ignore[union-attr]


def test_bins_of_depth_are_weighed_by_what_is_above_zero() -> None:
    patches, cls = features()
    head = DepthHead(WIDTH, 1.0, 9.0, bins=5, norm="none")
    head.upsample = 1
    assert head.depths.tolist() == [1, 3, 5, 7, 9]
    weights = (head.scores(head.normed(patches, cls), slice(None)).relu() + 0.1).detach()
    expected = (weights * head.depths[:, None, None]).sum(1) / weights.sum(1)
    assert torch.allclose(head(patches, cls, (4, 5)), expected, atol=1e-5)
    with torch.no_grad():
        head.weight.normal_(std=30, generator=draw(0))
    found = head(patches, cls, (16, 20))
    assert found.min() >= 1
    assert found.max() <= 9


def test_regression_begins_in_the_middle_of_the_range() -> None:
    assert torch.allclose(DepthHead(WIDTH, 1.0, 9.0, bins=0)(*features(), (16, 20)), torch.tensor(5.0))


def test_scale_invariant_loss_by_its_definition() -> None:
    predicted, depth = torch.rand(2, 16, 20, generator=draw(0)) + 0.5, torch.rand(2, 16, 20, generator=draw(1)) + 0.5
    valid = torch.rand(2, 16, 20, generator=draw(2)) < 0.7
    error = (predicted.log() - depth.log())[valid]
    expected = (error.var(correction=0) + 0.15 * error.mean() ** 2).sqrt()
    found = log_error(predicted, depth, valid)
    assert float(scale_invariant_loss([found], [valid])) == pytest.approx(float(expected), rel=1e-5)
    assert gradient_loss([found], [valid]) > 0.1
    # One factor for the whole picture counts 0.15 of it, and does not change how depth changes from pixel to pixel.
    twice = log_error(2 * depth, depth, valid)
    assert float(scale_invariant_loss([twice], [valid])) == pytest.approx(0.15**0.5 * 0.6931, rel=1e-3)
    assert float(gradient_loss([twice], [valid])) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("loss", ["sig", "l1", "l2"])
def test_a_batch_without_a_reading_moves_nothing(loss: str) -> None:
    head = DepthHead(WIDTH, 0.1, 10, bins=8, loss=loss)  # type: ignore[arg-type]
    found = head.loss(head(*features(), (16, 20)), torch.zeros(2, 16, 20))
    found.backward()
    assert float(found.detach()) == pytest.approx(0, abs=1e-5)
    assert not head.weight.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("norm", ["none", "batchnorm", "standardize"])
def test_segmentation_is_learnt_from_patch_and_global_feature(norm: str) -> None:
    head = SegmentationHead(WIDTH, 3, norm=norm)  # type: ignore[arg-type]
    found = fit_one(head, scenes(1, 150), scenes(2, 5), rates=(1e-6, 0.05), steps=150, every=50)
    assert found.best == 1
    assert found.evaluated == [50, 100, 150]
    assert best_scores(found)["miou"] > 0.75
    assert found.scores[-1][0]["miou"] < 0.5
    assert evaluate(found.head.stack(1), scenes(2, 5)()) == [best_scores(found)]


@pytest.mark.parametrize(
    "head",
    [
        DepthHead(WIDTH, 0.5, 8, bins=32),
        DepthHead(WIDTH, 0.5, 8, bins=0, loss="l1"),
        DepthHead(WIDTH, 0.5, 8, bins=0, loss="l2"),
        DepthHead(WIDTH, 0.5, 8, bins=0, loss="sig"),
    ],
    ids=["bins", "l1", "l2", "regression-sig"],
)
def test_a_depth_head_learns_synthetic_scenes(head: DepthHead) -> None:
    found = fit_one(head, scenes(1, 150, depth=True), scenes(2, 5, depth=True), rates=(0.02,), steps=150, every=150)
    guess = evaluate(head.stack(1), scenes(2, 5, depth=True)())[0]
    assert best_scores(found)["rmse"] < 0.6 * guess["rmse"]
    assert best_scores(found)["delta1"] > 0.75


def alone(head: DenseHead, rate: float, steps: int, depth: bool) -> tuple[DenseHead, dict[str, float]]:
    """Trained as `fit_dense` trains, by itself."""
    head = copy.deepcopy(head)
    if head.norm == "standardize":
        head.use_moments(head.moments(batch) for batch in scenes(1, steps, depth)())
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=0.01)
    for step, (patches, cls, labels) in enumerate(scenes(1, steps, depth)()):
        optimizer.param_groups[0]["lr"] = rate * polynomial(step, steps, 0.9)
        loss = head.loss(head(patches, cls, (16, 20)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    meter = head.eval().metrics()
    for patches, cls, labels in scenes(2, 3, depth)():
        meter.update(head.predict(head(patches, cls, (16, 20))), labels)
    return head, meter.compute()


@pytest.mark.parametrize("at_once", [2**27, 2 * 4 * 16 * 20 * 12], ids=["all", "some"])
@pytest.mark.parametrize("norm", ["none", "batchnorm", "standardize"])
@pytest.mark.parametrize("task", ["segment", "bins", "regression"])
def test_heads_learn_together_as_each_would_alone(
    task: str, norm: Norm, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "MAX_OUTPUTS", at_once if task != "regression" else at_once // 12)
    depth, rates, before = task != "segment", (0.001, 0.003, 0.01), torch.get_rng_state()
    head: DenseHead = SegmentationHead(WIDTH, 12, norm=norm, seed=4)
    if depth:
        head = DepthHead(WIDTH, 0.5, 8, bins=12 if task == "bins" else 0, norm=norm, seed=4)
    first = copy.deepcopy(head.state_dict())
    x = head.normed(*features(4))
    assert len(head.stack(3).split_heads((x, (16, 20)))) == (1 if at_once == 2**27 else 2)
    head.load_state_dict(first)
    found, again = (
        fit_one(head, scenes(1, 12, depth), scenes(2, 3, depth), rates=rates, steps=12, decay=0.01) for _ in range(2)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(found.stack.weight, again.stack.weight)
    assert found.scores == again.scores
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, first[name])  # the one given is left as it was
    for k, rate in enumerate(rates):
        expected, scores = alone(head, rate, 12, depth)
        assert found.scores[-1][k] == pytest.approx(scores, abs=2e-3)
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(found.heads[k].state_dict()[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_batch_norm_is_that_of_torch() -> None:
    head = SegmentationHead(WIDTH, 3, norm="batchnorm").stack(2)
    assert head.gain is not None
    assert head.shift is not None
    with torch.no_grad():
        head.gain.copy_(torch.rand(2, 2 * WIDTH, generator=draw(0)))
        head.shift.copy_(torch.randn(2, 2 * WIDTH, generator=draw(1)))
    own = [torch.nn.BatchNorm2d(2 * WIDTH) for _ in range(2)]
    for k, norm in enumerate(own):
        norm.weight.data, norm.bias.data = head.gain.data[k], head.shift.data[k]
    for mode in (True, False):
        patches, cls = features(3, seed=int(mode))
        found = head.train(mode)(patches, cls, (4, 5))
        x = torch.cat([patches, cls[:, :, None, None].expand_as(patches)], 1)
        for k, norm in enumerate(own):
            expected = torch.einsum("bdhw,cd->bchw", norm.train(mode)(x), head.weight[k])
            torch.testing.assert_close(found[k], expected + head.bias[k, :, None, None], rtol=1e-4, atol=1e-6)


def test_each_head_is_kept_at_its_best_step() -> None:
    """Towards the end the labels are nonsense: the heads of before are the better ones."""
    turned = scenes(1, 40)

    def spoilt() -> Iterator[DenseBatch]:
        for i, batch in enumerate(turned()):
            yield batch if i < 20 else batch._replace(labels=torch.where(batch.labels < 3, 2 - batch.labels, 255))

    head = SegmentationHead(WIDTH, 3, norm="batchnorm")
    found = fit_one(head, spoilt, scenes(2, 3), rates=(0.1,), steps=40, every=10)
    assert found.best_step == 20
    assert evaluate(found.head.stack(1), scenes(2, 3)())[0] == best_scores(found)
    assert best_scores(found)["miou"] > found.scores[-1][0]["miou"] + 0.05


def test_trained_as_by_torch_with_its_polynomial_schedule() -> None:
    head = SegmentationHead(WIDTH, 3, norm="none")
    found = fit_one(head, scenes(1, 8), scenes(2, 1), rates=(0.05,), steps=8, decay=0.1, power=0.9)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=8, power=0.9)
    for patches, cls, labels in scenes(1, 8)():
        optimizer.zero_grad()
        F.cross_entropy(head(patches, cls, (16, 20)), labels, ignore_index=255).backward()
        optimizer.step()
        schedule.step()
    assert torch.allclose(found.head.weight, head.weight, atol=1e-5)
    assert [polynomial(step, 8, 1.0, warmup=4) for step in range(3)] == [0.25, 0.5 * 7 / 8, 0.75 * 6 / 8]


def test_a_rate_that_breaks_down_is_not_the_best() -> None:
    class Broken(SegmentationHead):
        def batch_loss(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
            broken = self.weight.abs().amax((-2, -1)) > 100
            return super().batch_loss(outputs, labels) * torch.where(broken, torch.nan, 1.0)

    found = fit_one(Broken(WIDTH, 3), scenes(1, 20), scenes(2, 3), rates=(1e4, 0.05), steps=20, every=5)
    assert found.stack.weight[0].isnan().all()
    assert found.best == 1


def test_errors_of_training_say_what_to_do() -> None:
    head: DenseHead = SegmentationHead(WIDTH, 2)
    with pytest.raises(ValueError, match="a label is 2; this head takes 0…1 and 255"):
        fit_one(head, scenes(1, 2), scenes(2, 1), rates=(0.1,), steps=2)
    head = SegmentationHead(WIDTH, 3)
    with pytest.raises(ValueError, match="the training batches ended after 2 of 5 steps"):
        fit_one(head, scenes(1, 2), scenes(2, 1), rates=(0.1,), steps=5)
    with pytest.raises(ValueError, match="0 rates"):
        fit_one(head, scenes(1, 2), scenes(2, 1), rates=(), steps=5)
    with pytest.raises(ValueError, match="this head takes \\(B, 6, h, w\\) and \\(B, 6\\)"):
        head(torch.zeros(1, 5, 2, 2), torch.zeros(1, 5), (4, 4))
    with pytest.raises(ValueError, match="choose none, batchnorm or standardize"):
        SegmentationHead(WIDTH, 3, norm="layernorm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 < low < high"):
        DepthHead(WIDTH, 0, 10)


def test_sliding_over_everything_is_what_it_slid_over() -> None:
    images = torch.rand(2, 3, 23, 31, generator=draw(0))
    seen: list[tuple[int, ...]] = []

    def double(window: Tensor) -> Tensor:
        seen.append(tuple(window.shape[-2:]))
        return 2 * window[:, :1]

    found = slide_windows(double, images, window=(10, 12), stride=(6, 7))
    assert torch.allclose(found, 2 * images[:, :1])
    assert set(seen) == {(10, 12)}
    assert len(seen) == 4 * 4
    assert torch.equal(slide_windows(double, images, window=(50, 50), stride=(50, 50)), 2 * images[:, :1])
    assert seen[-1] == (23, 31)


def test_sliding_averages_where_windows_overlap() -> None:
    answers = iter([1.0, 4.0])
    found = slide_windows(
        lambda window: torch.full_like(window[:, 0], next(answers)), torch.zeros(1, 3, 4, 6), (4, 4), (4, 3)
    )
    assert found[0, 0].tolist() == [1, 1, 2.5, 2.5, 4, 4]  # the second window moved from 3 to 2
    with pytest.raises(ValueError, match="its last two sides must stay"):
        slide_windows(lambda window: window[..., ::2], torch.zeros(1, 3, 4, 6), (4, 4), (4, 4))
    with pytest.raises(ValueError, match="pixels are missed"):
        slide_windows(lambda window: window, torch.zeros(1, 3, 4, 6), (4, 4), (5, 4))


def test_crops_of_image_and_label_stay_together() -> None:
    label = torch.arange(20 * 30).view(20, 30)
    image = label.float().expand(3, 20, 30)
    generator, corners, flips = draw(0), set(), 0
    for _ in range(40):
        window = random_window(20, 30, (8, 12), generator)
        part, own = window.cut(image), window.cut(label)
        assert part.shape == (3, 8, 12)
        assert torch.equal(part[0].long(), own)
        flips += int(own[0, 0] > own[0, 1])
        corners.add(int(own.min()))
    assert 8 < flips < 32
    assert len(corners) > 20
    assert random_window(20, 30, (8, 12), draw(1)) == random_window(20, 30, (8, 12), draw(1))


def test_a_crop_larger_than_the_picture_is_filled_with_what_does_not_count() -> None:
    window = random_window(4, 6, (8, 6), draw(0))
    part, own = window.cut(torch.ones(3, 4, 6)), window.cut(torch.ones(4, 6), fill=255)
    assert int((own == 255).sum()) == 4 * 6
    assert part[:, own == 255].sum() == 0
    assert part[:, own == 1].mean() == 1
