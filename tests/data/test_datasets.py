"""Datasets for the probes: tiny copies of the real layouts, read back, and against torchvision where it reads them."""

from __future__ import annotations

import pickle
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_datasets as tiny
import torchvision.datasets as tv
from PIL import Image
from tiny_datasets import BUILDERS, colour, picture, text

from veca.data.datasets import SPECS, DatasetError, ProbeData, Split, base, load_dataset
from veca.data.datasets.base import held_out, load_mat
from veca.data.index import ImageIndex
from veca.images import open_image


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that has the tiny copy of a dataset below it."""
    made: dict[str, Path] = {}

    def copy(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            BUILDERS[name](made[name])
        return made[name]

    return copy


def rows(data: ProbeData, *splits: str) -> list[tuple[str, Any]]:
    """Names and labels, sorted."""
    found = [(data.splits[s].name(i), data.splits[s].label(i)) for s in splits for i in range(len(data.splits[s]))]
    return sorted(found, key=lambda row: row[0])


def names(split: Split) -> list[str]:
    return [split.name(i) for i in range(len(split))]


# All of them.


def test_there_is_a_copy_of_each() -> None:
    assert set(BUILDERS) == set(SPECS)
    assert len({spec.title for spec in SPECS.values()}) == len(SPECS) == 16 + 8 + 2  # VOC2012 and NYUv2 come in two


def test_the_page_tells_their_sizes() -> None:
    page = (Path(__file__).parents[2] / "docs/datasets.md").read_text()
    for spec in SPECS.values():
        counts = ", ".join(f"{split} {count:,}" for split, count in spec.sizes.items())
        val = ", val of train" if spec.hold_out else ""
        assert re.search(rf"\| `{spec.name}` \| .* \| {spec.classes or '–'} \| {counts}{val} \|", page), spec.name


@pytest.mark.parametrize("name", BUILDERS)
def test_pictures_come_whole_and_labels_in_range(name: str, copies: Callable[[str], Path]) -> None:
    data = load_dataset(name, copies(name))
    assert (data.name, data.task) == (name, SPECS[name].task)
    for split in data.splits.values():
        assert len(split)
        for i in range(len(split)):
            image = open_image(split.image(i))
            if name.startswith("cifar"):
                assert image.size == (32, 32)
                continue
            assert image.getpixel((3, 3)) == colour(split.name(i))
            label = split.label(i)
            if data.task == "depth":
                assert label.dtype == np.float32
                assert label.shape == image.size[::-1]
            elif data.task == "segment":
                assert label.dtype == np.uint8
                assert label.shape == image.size[::-1]
                assert set(np.unique(label)) <= {*range(len(data.classes)), data.ignore}
            elif data.task == "multilabel":
                assert label.shape == (len(data.classes),)
                assert set(np.unique(label)) <= {0, 1, data.ignore}
            else:
                assert isinstance(label, int)
                assert 0 <= label < len(data.classes)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_copy_goes_to_workers_and_stays_itself_elsewhere(
    name: str, copies: Callable[[str], Path], tmp_path: Path
) -> None:
    data = load_dataset(name, copies(name))
    for split in data.splits.values():
        there = pickle.loads(pickle.dumps(split))
        assert names(there) == names(split)
        np.testing.assert_array_equal(there.label(0), split.label(0))
    shutil.copytree(copies(name), tmp_path / "moved")
    moved = load_dataset(name, tmp_path / "moved")
    assert moved.fingerprint == data.fingerprint
    assert {k: names(v) for k, v in moved.splits.items()} == {k: names(v) for k, v in data.splits.items()}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_small_copy_is_told_from_the_published_one(name: str, copies: Callable[[str], Path]) -> None:
    data = load_dataset(name, copies(name))
    told = " ".join(data.problems)
    for split, count in SPECS[name].sizes.items():
        assert f"{split} has " in told
        assert f"{count:,} were published" in told
    assert data.protocol["counts"] == {split: len(found) for split, found in data.splits.items()}
    assert data.protocol["published"] == SPECS[name].sizes
    assert data.report == ("test" if "test" in SPECS[name].sizes else "val")


@pytest.mark.parametrize("name", BUILDERS)
def test_a_missing_folder_shows_the_layout(name: str, tmp_path: Path) -> None:
    for root, reason in ((tmp_path / "nowhere", "no folder"), (tmp_path, "has no")):
        with pytest.raises(DatasetError) as caught:
            load_dataset(name, root)
        message = str(caught.value)
        assert message.startswith(f"{name}: {reason}" if reason == "no folder" else f"{name}: {tmp_path}")
        assert reason in message
        for line in SPECS[name].tree.strip().splitlines():
            assert line in message
        assert f"Get it from {SPECS[name].source} ({SPECS[name].licence})" in message


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in ("cifar10", "cifar100")])
def test_missing_pictures_show_the_layout(name: str, copies: Callable[[str], Path], tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(copies(name), root)
    data = load_dataset(name, root)
    split = data.splits[data.report]
    for i in range(len(split)):
        Path(str(split.image(i))).unlink()
    if name == "caltech101":  # which has no list: fewer pictures are another split
        assert load_dataset(name, root).fingerprint != data.fingerprint
        return
    with pytest.raises(DatasetError, match="(missing, such as|has no )(.|\n)*is expected in the folder"):
        load_dataset(name, root)


def test_the_root_may_be_the_folder_itself_or_from_the_environment(
    copies: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    above = load_dataset("cub200", copies("cub200"))
    assert load_dataset("cub200", copies("cub200") / "CUB_200_2011").fingerprint == above.fingerprint
    monkeypatch.setenv("VECA_DATA", str(copies("cub200")))
    assert load_dataset("CUB200").fingerprint == above.fingerprint


def test_a_dataset_for_another_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="food101 has no labels to depth; these have: nyuv2, nyuv2-labelled, kitti"):
        load_dataset("food101", tmp_path, "depth")


def test_an_unknown_dataset_name_suggests_a_known_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DatasetError, match="'food10' is neither the name of a dataset.*did you mean .food101.*(.|\n)*CLASS/7.jpg"
    ):
        load_dataset("food10")


def test_lists_do_not_lead_outside(copies: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(copies("dtd"), tmp_path / "copy")
    text(tmp_path / "copy/dtd/dtd/labels/val1.txt", "banded/../../../../secret.jpg")
    with pytest.raises(DatasetError, match="outside the dataset's folder"):
        load_dataset("dtd", tmp_path / "copy")


# Against torchvision. With `loader=str` it gives the path of a picture instead of the picture.


def theirs(dataset: Any, root: Path) -> list[tuple[str, int]]:
    pairs = (dataset[i] for i in range(len(dataset)))
    return sorted((str(Path(path).relative_to(root)), label) for path, label in pairs)


CASES: dict[str, tuple[Callable[..., Any], str, dict[str, str]]] = {
    "food101": (tv.Food101, "food-101", {"train": "train,val", "test": "test"}),
    "cars": (tv.StanfordCars, "stanford_cars", {"train": "train,val", "test": "test"}),
    "aircraft": (tv.FGVCAircraft, "fgvc-aircraft-2013b", {"train": "train", "val": "val", "test": "test"}),
    "dtd": (tv.DTD, "dtd/dtd", {"train": "train", "val": "val", "test": "test"}),
    "flowers102": (tv.Flowers102, "flowers-102", {"train": "train", "val": "val", "test": "test"}),
    "places365": (tv.Places365, "places365", {"train-standard": "train", "val": "val"}),
}


@pytest.mark.parametrize("name", CASES)
def test_torchvision_reads_the_same(name: str, copies: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, folder, splits = CASES[name]
    root, options = copies(name), dict[str, Any]()
    if name in ("flowers102", "places365"):  # they want the checksums of the real lists
        monkeypatch.setattr(reader, "_check_integrity", lambda *args: True)
    if name == "places365":
        root, options = root / folder, {"small": True}
    data = load_dataset(name, root)
    for split, ours in splits.items():
        base = root if name == "places365" else root / folder
        assert rows(data, *ours.split(",")) == theirs(reader(root, split=split, loader=str, **options), base)
    if name not in ("flowers102", "places365"):
        assert data.classes == reader(root, split="test", loader=str).classes or name == "dtd"


def test_torchvision_reads_the_same_of_others(copies: Callable[[str], Path]) -> None:
    data, root = load_dataset("imagenet", copies("imagenet")), copies("imagenet") / "imagenet"
    assert rows(data, "train") == theirs(tv.ImageFolder(root / "train", loader=str), root)
    assert [label for _, label in rows(data, "val")] == [0, 2]
    data, root = load_dataset("sun397", copies("sun397")), copies("sun397")
    whole = tv.SUN397(root, loader=str)
    assert rows(data, "train", "val", "test") == theirs(whole, root / "SUN397")
    assert data.classes == whole.classes
    data, root = load_dataset("pets", copies("pets")), copies("pets")
    for split, ours in {"trainval": ("train", "val"), "test": ("test",)}.items():
        whole = tv.OxfordIIITPet(root, split)
        found = sorted((np.asarray(image)[0, 0].tolist(), label) for image, label in whole)
        assert found == sorted((list(colour(name)), label) for name, label in rows(data, *ours))
    assert [name.replace("_", " ").title() for name in data.classes] == whole.classes


# One by one.


def test_imagenet_as_kaggle_has_it(tmp_path: Path) -> None:
    tiny.imagenet_kaggle(tmp_path)
    data = load_dataset("imagenet", tmp_path)
    assert data.classes == ["tench, Tinca tinca", "goldfish, Carassius auratus"]
    assert rows(data, "val") == [("val/ILSVRC2012_val_00000001.JPEG", 0), ("val/ILSVRC2012_val_00000002.JPEG", 1)]
    assert [label for _, label in rows(data, "train")] == [0, 1]
    (tmp_path / "LOC_val_solution.csv").unlink()
    with pytest.raises(DatasetError, match="no LOC_val_solution.csv with the labels"):
        load_dataset("imagenet", tmp_path)


def test_imagenetv2_folders_are_numbers(copies: Callable[[str], Path]) -> None:
    data = load_dataset("imagenetv2", copies("imagenetv2"))
    assert data.splits["test"].labels.tolist() == [0, 2, 10, 999]  # not in the order of their names
    assert names(data.splits["test"]) == ["0/a.jpeg", "2/b.jpeg", "10/c.jpeg", "999/d.jpeg"]
    assert data.protocol["head"] == "imagenet"


def test_real_labels_are_sets_and_empty_ones_left_out(copies: Callable[[str], Path]) -> None:
    data = load_dataset("imagenet-real", copies("imagenet-real"))
    test = data.splits["test"]
    assert names(test) == [
        f"val/{n}.JPEG" for n in ("n15075141/ILSVRC2012_val_00000001", "n01443537/ILSVRC2012_val_00000002")
    ]
    assert [np.flatnonzero(row).tolist() for row in test.labels] == [[5, 999], [1]]


def test_places_in_folders_of_classes(tmp_path: Path) -> None:
    picture(tmp_path, "train/airfield/1.jpg", "train/zoo/1.jpg", "val/zoo/Places365_val_00000001.jpg")
    data = load_dataset("places365", tmp_path)
    assert data.classes == ["airfield", "zoo"]
    assert rows(data, "train", "val") == [
        ("train/airfield/1.jpg", 0),
        ("train/zoo/1.jpg", 1),
        ("val/zoo/Places365_val_00000001.jpg", 1),
    ]


def test_places_classes_keep_their_numbers(copies: Callable[[str], Path]) -> None:
    data = load_dataset("places365", copies("places365"))
    assert data.classes == ["airfield", "airplane_cabin", "apartment_building/outdoor"]


@pytest.mark.parametrize(("name", "train", "test"), [("cifar10", [1, 2, 3, 4, 5, *[9] * 5], [3, 0, 9])])
def test_cifar_pictures_are_put_together(
    name: str, train: list[int], test: list[int], copies: Callable[[str], Path]
) -> None:
    data = load_dataset(name, copies(name))
    both = [*data.splits["train"].labels, *data.splits["val"].labels]
    assert sorted(both) == train
    assert data.splits["test"].labels.tolist() == test
    assert data.classes[9] == "truck"
    for split in data.splits.values():
        for i in range(len(split)):
            pixels = np.asarray(open_image(split.image(i)))
            assert (pixels[..., 0] == split.label(i)).all()
            assert (pixels[..., 1].ravel() == np.arange(1024) % 256).all()
            assert (pixels[..., 2] == 7).all()


def test_cifar100_takes_the_fine_labels(copies: Callable[[str], Path]) -> None:
    data = load_dataset("cifar100", copies("cifar100"))
    assert sorted([*data.splits["train"].labels, *data.splits["val"].labels]) == [40, 40, 99]
    assert data.classes[40] == "fine40"


def test_cifar_pickles_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py/data_batch_1").write_bytes(pickle.dumps({b"labels": [1]}))
    with pytest.raises(DatasetError, match="the binary version .*pickles, which can run code and are not opened"):
        load_dataset("cifar10", tmp_path)


def test_cut_cifar_is_refused(copies: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(copies("cifar10"), tmp_path / "copy")
    path = tmp_path / "copy/cifar-10-batches-bin/data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match="6,145 bytes, not a multiple of 3,073"):
        load_dataset("cifar10", tmp_path / "copy")


def test_voc2007_marks_what_is_only_difficult(copies: Callable[[str], Path]) -> None:
    data = load_dataset("voc2007", copies("voc2007"))
    assert data.classes == tiny.VOC20
    assert data.ignore == -1
    marks = {name: dict(zip(data.classes, row.tolist(), strict=True)) for name, row in rows(data, "val", "test")}
    two = marks["JPEGImages/000001.jpg"]
    assert [name for name, value in two.items() if value == 1] == ["dog", "person"]
    assert -1 not in two.values()
    assert marks["JPEGImages/000002.jpg"] == dict.fromkeys(data.classes, 0) | {"train": -1}
    assert marks["JPEGImages/000005.jpg"] == dict.fromkeys(data.classes, 0) | {"chair": 1, "sofa": -1}
    assert data.splits["train"].labels.shape == (1, 20)


def test_voc2007_lists_must_be_whole(copies: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(copies("voc2007"), tmp_path / "copy")
    text(tmp_path / "copy/VOCdevkit/VOC2007/ImageSets/Main/cat_test.txt", "000001 -1")
    with pytest.raises(DatasetError, match="cat_test.txt has no 1, 0 or -1 for picture 000002"):
        load_dataset("voc2007", tmp_path / "copy")


def test_caltech_trains_on_thirty_of_each(copies: Callable[[str], Path]) -> None:
    data = load_dataset("caltech101", copies("caltech101"))
    assert data.classes == ["BACKGROUND_Google", "Faces", "accordion"]
    both = np.concatenate([data.splits["train"].labels, data.splits["val"].labels])
    assert np.bincount(both).tolist() == [2, 30, 30]
    assert np.bincount(data.splits["test"].labels).tolist() == [1, 4, 2]
    assert np.bincount(data.splits["val"].labels).tolist() == [1, 3, 3]


def test_cub_splits_and_names(copies: Callable[[str], Path]) -> None:
    data = load_dataset("cub200", copies("cub200"))
    assert data.classes == ["Black_footed_Albatross", "Laysan_Albatross"]
    assert [(name[-8:], label) for name, label in rows(data, "test")] == [("0003.jpg", 0), ("0003.jpg", 1)]
    assert len(rows(data, "train", "val")) == 6


def test_flowers_go_by_the_lists(copies: Callable[[str], Path]) -> None:
    data = load_dataset("flowers102", copies("flowers102"))
    assert {k: rows(data, k) for k in data.splits} == {
        "train": [("jpg/image_00002.jpg", 0), ("jpg/image_00004.jpg", 4)],
        "val": [("jpg/image_00001.jpg", 76), ("jpg/image_00005.jpg", 8)],
        "test": [("jpg/image_00003.jpg", 101), ("jpg/image_00006.jpg", 7)],
    }
    assert data.classes[76] == "77"


def test_cars_without_test_labels_say_what_is_missing(copies: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(copies("cars"), tmp_path / "copy")
    base = tmp_path / "copy/stanford_cars"
    shutil.copy(base / "devkit/cars_test_annos.mat", base / "cars_test_annos_withlabels.mat")
    with pytest.raises(DatasetError, match="has no fname and class; for test take the file with labels"):
        load_dataset("cars", tmp_path / "copy")


def test_numbers_out_of_range_name_the_list(copies: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(copies("cub200"), tmp_path / "copy")
    listed = tmp_path / "copy/CUB_200_2011/image_class_labels.txt"
    listed.write_text(listed.read_text().replace("1 1\n", "1 3\n", 1))
    with pytest.raises(DatasetError, match="image_class_labels.txt has the class '3'; the 2 classes are 1 to 2"):
        load_dataset("cub200", tmp_path / "copy")


# What is held out.


def test_a_tenth_of_every_class_is_held_out_for_ever(tmp_path: Path) -> None:
    base = tmp_path / "oxford-iiit-pet"
    lines = [f"cat_{i} 1 1 1" for i in range(40)] + [f"dog_{i} 2 2 1" for i in range(15)] + ["fox_1 3 2 2"]
    text(base / "annotations/trainval.txt", *lines)
    text(base / "annotations/test.txt", "cat_99 1 1 1")
    picture(base, *(f"images/{line.split()[0]}.jpg" for line in lines), "images/cat_99.jpg")
    data = load_dataset("pets", tmp_path)
    assert np.bincount(data.splits["val"].labels, minlength=3).tolist() == [4, 2, 0]  # of one, none
    assert not set(names(data.splits["train"])) & set(names(data.splits["val"]))
    assert len(data.splits["train"]) == 50
    val = [Path(name).stem for name in names(data.splits["val"])]
    assert val == ["cat_8", "cat_11", "cat_22", "cat_38", "dog_4", "dog_9"]  # and stays so in versions to come
    assert data.protocol["val"] == "6 of train, 10% of every class, fixed by a hash of their names"
    text(base / "annotations/trainval.txt", *lines[::-1])  # in whatever order they are listed
    again = load_dataset("pets", tmp_path)
    assert sorted(names(again.splits["val"])) == sorted(names(data.splits["val"]))


def test_groups_are_held_out_whole() -> None:
    split = Split(ImageIndex.of_files("", [f"{i}.jpg" for i in range(30)]), np.zeros(30, int))
    groups = [f"scene{i // 5}" for i in range(30)]
    train, val = held_out(split, 0.3, groups)
    kept, taken = ({groups[int(Path(name).stem)] for name in names(part)} for part in (train, val))
    assert not kept & taken
    assert len(val) == 10
    assert len(train) == 20


# MATLAB's files.


def test_mat_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_MAX_LIST_BYTES", 10**6)
    tiny.mat(tmp_path / "bomb.mat", labels=np.zeros(3 * 10**6, np.uint8))
    assert (tmp_path / "bomb.mat").stat().st_size < 10**5
    with pytest.raises(DatasetError, match="more than 1,000,000 bytes when unpacked"):
        load_mat(tmp_path / "bomb.mat", "labels")
    (tmp_path / "junk.mat").write_bytes(b"junk" * 100)
    with pytest.raises(DatasetError, match="not a MATLAB file, or damaged"):
        load_mat(tmp_path / "junk.mat", "labels")
    tiny.mat(tmp_path / "other.mat", numbers=[1])
    with pytest.raises(DatasetError, match="has no labels"):
        load_mat(tmp_path / "other.mat", "labels")


def test_a_folder_of_ones_own_with_the_name_of_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        Path("pets", name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (8, 8), (i, i, i)).save(f"pets/{name}/{i}.png")
    with pytest.raises(DatasetError, match="The folder pets is taken for one of your own if you write pets/"):
        load_dataset("pets")
    assert load_dataset("pets/").classes == ["cat", "dog"]


def test_pictures_in_formats_that_are_not_read_are_told_of_folders_of_ones_own(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "IMG_1.HEIC").write_bytes(b"no matter what")
    with pytest.raises(DatasetError, match=r"no pictures in folders of classes. 2 files were left out: .heic \(2\)"):
        load_dataset(str(tmp_path))
    for i in range(20):
        Image.new("RGB", (8, 8)).save(tmp_path / ("cat", "dog")[i % 2] / f"{i}.png")
    with pytest.warns(UserWarning, match=r"^2 files were left out: .heic \(2\)\.") as said:
        data = load_dataset(str(tmp_path))
    assert len(said) == 1
    assert sum(map(len, data.splits.values())) == 20


# Datasets of one's own that are not what was meant.


def own(folder: Path, **counts: int) -> str:
    """A folder of classes, each with so many pictures."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / name / f"{i}.png")
    return str(folder)


def test_too_few_pictures_to_hold_some_out(tmp_path: Path) -> None:
    way = r"held out of train: that takes 3 pictures of a class\. Add some, or make the splits yourself"
    with pytest.raises(DatasetError, match=f"photos: no picture is left for val and test, which is {way}"):
        load_dataset(own(tmp_path / "photos", cat=1, dog=1))
    with pytest.raises(DatasetError, match=f"two: no picture is left for val, which is {way}"):
        load_dataset(own(tmp_path / "two", cat=2, dog=2))
    assert {name: len(split) for name, split in load_dataset(own(tmp_path / "three", cat=3, dog=3)).splits.items()} == {
        "train": 2, "val": 2, "test": 2,
    }  # fmt: skip
    for kind in ("images", "masks"):
        (tmp_path / "one" / kind).mkdir(parents=True)
        Image.fromarray(np.eye(8, dtype=np.uint8)).save(tmp_path / "one" / kind / "7.png")
    with pytest.raises(DatasetError, match="no picture is left for val and test, which .* takes 3 pictures in all"):
        load_dataset(str(tmp_path / "one"))


def test_one_class_is_none(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="photos: all pictures are of one class, cat; at least two are needed"):
        load_dataset(own(tmp_path / "photos", cat=5))
    with pytest.raises(DatasetError, match="all pictures are of one class, dog"):
        load_dataset(own(tmp_path / "other", cat=0, dog=5))


def test_classes_without_a_picture_to_learn_from_are_named(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="photos: 1 of 3 classes have no picture to learn from: bird. Add some"
    ) as said:
        data = load_dataset(own(tmp_path / "photos", bird=0, cat=5, dog=5))
    assert len(said) == 1
    assert data.classes == ["bird", "cat", "dog"]
    own(tmp_path / "split/train", cat=3, dog=3)
    own(tmp_path / "split/val", cat=3, fox=3)
    with pytest.warns(UserWarning, match="1 of 3 classes have no picture to learn from: fox"):
        load_dataset(str(tmp_path / "split"))


def test_pictures_without_a_label_are_counted(tmp_path: Path) -> None:
    own(tmp_path / "photos", cat=5, dog=5)
    for name in ("stray.png", ".hidden.png", "notes.txt"):
        (tmp_path / "photos" / name).touch()
    with pytest.warns(UserWarning, match=r"^1 picture has no label and is left out, such as .*/stray\.png: ") as said:
        load_dataset(str(tmp_path / "photos"))
    assert len(said) == 1
    for split in ("train", "val"):
        own(tmp_path / "split" / split, cat=3, dog=3)
        (tmp_path / "split" / split / "stray.jpg").touch()
    with pytest.warns(UserWarning, match=r"^2 pictures have no label and are left out, such as .*/train/stray\.jpg: "):
        load_dataset(str(tmp_path / "split"))


def test_samples_of_shards_without_a_label_are_counted(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "pets-train.tar", "w") as archive:
        for i in range(8):
            Image.new("RGB", (8, 8)).save(tmp_path / "picture.png")
            archive.add(tmp_path / "picture.png", f"{i}.png")
            if i < 6:
                (tmp_path / "label").write_text(str(i % 2))
                archive.add(tmp_path / "label", f"{i}.cls")
    with pytest.warns(UserWarning, match=r"^2 pictures have no label and are left out, such as pets-train.tar/6.png: "):
        data = load_dataset(str(tmp_path / "pets"))
    assert sum(map(len, data.splits.values())) == 6
