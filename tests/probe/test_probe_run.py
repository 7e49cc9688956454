from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny
from tiny_datasets import make_folder

from veca.data.datasets import DatasetError, ProbeData, Split, limit_splits, load_dataset
from veca.data.datasets.batches import CropTransform
from veca.heads.features import Extraction, FrozenVeca
from veca.heads.linear import train_linear
from veca.heads.metrics import percent_by_class
from veca.probe import run
from veca.probe.backbones import TeacherBackbone
from veca.probe.run import ClassifySettings, KnnSettings, classify, knn, knn_accuracy, read_row
from veca.teachers.from_timm import timm_teacher

QUICK = ClassifySettings(sizes=(32,), cores=(8, 64), epochs=4, rates=(0.01, 0.1), decays=(0.0,), progress=False)
NEAR = KnnSettings(sizes=(32,), cores=(8, 64), ks=(1, 3), progress=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ProbeData:
    return load_dataset(str(make_folder(tmp_path_factory.mktemp("data") / "mine", 7)))


def backbone() -> FrozenVeca:
    return FrozenVeca(make_tiny(), "tiny", torch.device("cpu"), "float32")


def ask(settings: Any, **changes: Any) -> Any:
    return dataclasses.replace(settings, **changes)


def several(data: ProbeData) -> ProbeData:
    """The same pictures with labels as VOC2007 has them: 1, 0, and -1 for what does not count."""
    marks = {name: np.eye(2, dtype=np.int8)[split.labels] for name, split in data.splits.items()}
    marks["test"][0] = -1
    splits = {name: Split(split.images, marks[name]) for name, split in data.splits.items()}
    return dataclasses.replace(data, name="several", task="multilabel", splits=splits)


def test_classify_writes_a_row_for_every_budget_and_size(data: ProbeData, tmp_path: Path) -> None:
    rows = classify(backbone(), data, tmp_path, ask(QUICK, sizes=(32, 48)))
    assert [(row["cores"], row["size"]) for row in rows] == [(8, 32), (64, 32), (8, 48), (64, 48)]
    row = rows[0]
    assert row["metrics"]["top1"] == 100  # red and blue
    assert row["per_class"] == {"blue": 100, "red": 100}
    assert (row["metric"], row["scored_on"], row["task"]) == ("top1", "test", "classify")
    assert row["data"] | {"fingerprint": ""} == {
        "name": "mine", "train": 14, "val": 14, "test": 14, "classes": ["blue", "red"], "fingerprint": "",
    }  # fmt: skip
    assert [(pair["rate"], pair["decay"]) for pair in row["sweep"]] == [(0.01, 0.0), (0.1, 0.0)]
    assert {"rate": row["best"]["rate"], "decay": 0.0, "val": 100} in row["sweep"]
    assert len(row["curve"]["val"]) == 4
    assert row["protocol"]["preprocessing"]["short_side"] == 36
    assert row["protocol"]["precision"] == "float32"
    assert len(row["model"]["about"]["sha256"]) == 64
    files = sorted((tmp_path / "rows").iterdir())
    assert len(files) == 4
    assert files[0].name.startswith("classify-tiny-mine-c64-s32-")
    assert rows[0] == read_row(next(path for path in files if "c8-s32" in path.name))


@pytest.mark.parametrize("change", [{"metrics": None}, {"metrics": {}}, {"schema": 2}, {"size": "32"}, {"digest": ""}])
def test_a_row_that_was_touched_is_computed_again(data: ProbeData, tmp_path: Path, change: dict[str, Any]) -> None:
    first = knn(backbone(), data, tmp_path, ask(NEAR, cores=(8,)))
    (path,) = (tmp_path / "rows").iterdir()
    path.write_text(json.dumps(first[0] | change))
    again = knn(backbone(), data, tmp_path, ask(NEAR, cores=(8,)))
    assert again[0]["metrics"] == first[0]["metrics"]
    assert read_row(path) == again[0]


def test_the_same_again_is_the_same_and_costs_nothing(
    data: ProbeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = classify(backbone(), data, tmp_path / "a", QUICK)
    other = classify(backbone(), data, tmp_path / "b", QUICK)
    same = ("metrics", "sweep", "best", "curve", "per_class", "protocol")
    assert [[row[key] for key in same] for row in first] == [[row[key] for key in same] for row in other]
    monkeypatch.setattr(run, "train_linear", None)
    monkeypatch.setattr(Extraction, "run", None)
    assert classify(backbone(), data, tmp_path / "a", QUICK) == first


def test_a_run_that_died_ends_with_the_same_rows(
    data: ProbeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = classify(backbone(), data, tmp_path / "whole", QUICK)
    calls = []

    def dies(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train_linear(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(run, "train_linear", dies)
        with pytest.raises(KeyboardInterrupt):
            classify(backbone(), data, tmp_path / "f", QUICK)
    (path,) = (tmp_path / "f/rows").iterdir()
    path.write_bytes(path.read_bytes()[:100])  # and the disk was full
    again = classify(backbone(), data, tmp_path / "f", QUICK)
    assert [row["metrics"] | row["best"] for row in again] == [row["metrics"] | row["best"] for row in whole]
    assert len(list((tmp_path / "f/rows").iterdir())) == 2


def test_other_settings_are_other_rows(data: ProbeData, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"epochs": 2}, {"passes": 2}, {"feature": "cls+mean"},
                                     {"standardize": True}, {"rates": (0.1,)}, {"batch": 4}]  # fmt: skip
    for change in changes:
        classify(backbone(), data, tmp_path, ask(QUICK, cores=(8,), **change))
    classify(backbone(), limit_splits(data, 6), tmp_path, ask(QUICK, cores=(8,)))
    assert len(list((tmp_path / "rows").iterdir())) == len(changes) + 1


def test_passes_train_on_random_parts(data: ProbeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def counted(*sets: Any, **options: Any) -> Any:
        counts.append(tuple(len(features) for features, _ in sets))
        return train_linear(*sets, **options)

    monkeypatch.setattr(run, "train_linear", counted)
    (row,) = classify(backbone(), data, tmp_path, ask(QUICK, cores=(8,), passes=3))
    assert counts == [(3 * 14, 14)]
    assert row["protocol"]["train_view"]["view"] == "random resized crop and flip"
    assert row["metrics"]["top1"] == 100


def test_several_labels_for_a_picture(data: ProbeData, tmp_path: Path) -> None:
    (row,) = classify(backbone(), several(data), tmp_path, ask(QUICK, cores=(8,)))
    assert row["metric"] == "mAP"
    assert row["metrics"] == {"mAP": 100.0, "mAP11": 100.0}
    with pytest.raises(DatasetError, match="labels to multilabel: `veca probe classify` is the probe for it"):
        knn(backbone(), several(data), tmp_path, NEAR)


def test_further_sets_are_scored_with_the_same_head(data: ProbeData, tmp_path: Path) -> None:
    """As ImageNetV2, and as ImageNet-ReaL, where each picture has a set of labels."""
    test = data.splits["test"]
    wrong = Split(test.images, 1 - test.labels)
    v2 = dataclasses.replace(data, name="v2", splits={"test": wrong})
    real = dataclasses.replace(
        data, name="real", task="multilabel", splits={"test": Split(test.images, np.ones((14, 2), np.int8))}
    )
    (row,) = classify(backbone(), data, tmp_path, ask(QUICK, cores=(8,)), also=(v2, real))
    assert row["also"] == {"v2": {"top1": 0.0, "top5": 100.0}, "real": {"top1": 100.0}}
    three = dataclasses.replace(v2, classes=["a", "b", "c"])
    with pytest.raises(DatasetError, match="v2 has 3 classes, mine 2"):
        classify(backbone(), data, tmp_path, QUICK, also=(three,))
    with pytest.raises(DatasetError, match="no train and no val"):
        classify(backbone(), v2, tmp_path, QUICK)


def test_knn_is_that_of_the_features(data: ProbeData, tmp_path: Path) -> None:
    rows = knn(backbone(), data, tmp_path, NEAR)
    extraction = Extraction(backbone(), tmp_path / "features", progress=False)
    for row in rows:
        train, val, test = (
            extraction.load(data.splits[name], CropTransform(32), row["cores"]).values
            for name in ("train", "val", "test")
        )
        labels = [torch.from_numpy(data.splits[name].labels) for name in ("train", "val", "test")]
        found = knn_accuracy((torch.cat([train, val]), torch.cat(labels[:2])), (test, labels[2]), (1, 3))
        assert row["metrics"]["top1_k1"] == round(100 * found[1], 4)
        assert row["metrics"]["top1"] == row["metrics"]["top1_k3"] == round(100 * found[3], 4)
    assert [row["cores"] for row in rows] == [8, 64]


def test_a_backbone_without_budgets(data: ProbeData, tmp_path: Path) -> None:
    torch.manual_seed(0)
    teacher = timm_teacher("vit_small_patch14_dinov2", pretrained=False, depth=1, embed_dim=32, num_heads=2)
    other, said = TeacherBackbone(teacher, "a/b", torch.device("cpu"), "float32"), list[str]()
    (row,) = knn(other, data, tmp_path, NEAR, said.append)
    assert (row["cores"], row["size"], row["protocol"]["side"]) == (None, 32, 28)
    assert "32 is no multiple" in row["protocol"]["note"]
    assert "a/b has no budget" in said[0]
    (path,) = (tmp_path / "rows").iterdir()
    assert path.name.startswith("knn-a-b-mine-cnone-s32-")


def test_bad_pictures_stop_a_run_or_are_left_out_and_said(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine", 7)
    (folder / "test/red/2.png").write_bytes(b"nothing")
    data, said = load_dataset(str(folder)), list[str]()
    with pytest.raises(ValueError, match="1 of 14 pictures of mine test cannot be read: test/red/2.png"):
        knn(backbone(), data, tmp_path / "f", ask(NEAR, cores=(8,)))
    assert not (tmp_path / "f/rows").exists()
    (row,) = knn(backbone(), data, tmp_path / "f", ask(NEAR, cores=(8,), skip_bad=True), said.append)
    assert "test/red/2.png" in row["protocol"]["skipped"]["mine test"][0]
    assert "left out 1 picture of mine test that cannot be read: test/red/2.png" in said[0]


def test_limited_takes_pictures_from_all_over(data: ProbeData) -> None:
    small = limit_splits(data, 4)
    assert {name: len(split) for name, split in small.splits.items()} == {"train": 4, "val": 4, "test": 4}
    assert sorted(small.splits["train"].labels) == [0, 0, 1, 1]
    assert small.protocol["limit"] == 4
    assert small.fingerprint != data.fingerprint
    assert limit_splits(data, None) is data
    assert len(limit_splits(data, 10**6).splits["train"]) == 14
    with pytest.raises(ValueError, match="limit is 0"):
        limit_splits(data, 0)


def test_what_a_row_cannot_hold() -> None:
    assert percent_by_class(["crane", "crane", "dog"], [0.5, 1.0, float("nan")]) == {
        "crane (0)": 50.0,
        "crane (1)": 100.0,
    }


def test_problems_of_a_copy_are_said(data: ProbeData, tmp_path: Path) -> None:
    said: list[str] = []
    part = dataclasses.replace(data, problems=["train has 14 pictures; 20 were published"])
    (row,) = knn(backbone(), part, tmp_path, ask(NEAR, cores=(8,)), said.append)
    assert said == ["mine: train has 14 pictures; 20 were published. The score is not the benchmark's."]
    assert row["protocol"]["problems"] == part.problems


def test_the_decoder_is_recorded_and_rows_of_two_do_not_mix(data: ProbeData, tmp_path: Path) -> None:
    rows = {}
    for decode in ("pillow", "cpu", "auto"):
        (rows[decode],) = knn(backbone(), data, tmp_path, ask(NEAR, cores=(8,), decode=decode))
    assert [rows[decode]["protocol"]["decode"] for decode in rows] == ["pillow", "cpu", "cpu"]
    assert rows["auto"] == rows["cpu"]
    assert len(list((tmp_path / "rows").iterdir())) == 2
    assert len(list((tmp_path / "features").iterdir())) == 2 * len(data.splits)
    with pytest.raises(ValueError, match="--decode gpu .*cpu is no NVIDIA GPU"):
        knn(backbone(), data, tmp_path, ask(NEAR, decode="gpu"))


@pytest.mark.gpu
def test_gpu_the_same_command_twice_gives_the_same_rows(data: ProbeData, tmp_path: Path) -> None:
    def rows(folder: str) -> list[Any]:
        found = FrozenVeca(make_tiny().cuda(), "tiny", torch.device("cuda"), "bfloat16")
        made = [*classify(found, data, tmp_path / folder, QUICK), *knn(found, data, tmp_path / folder, NEAR)]
        return [{key: value for key, value in row.items() if key not in ("seconds", "date", "digest")} for row in made]

    assert rows("first") == rows("second")
