"""Masks, depths and datasets of one's own: class mappings of the benchmarks, folders and shards."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_datasets as tiny
import torchvision.datasets as tv
from PIL import Image
from tiny_datasets import SIZE, colour, encoded, picture, shard, text, values

from veca.data.datasets import DatasetError, DepthRules, ProbeData, Split, load_dataset
from veca.data.index import ImageIndex
from veca.images import ImageError, open_image


def loaded(name: str, build: Callable[[Path], None], root: Path) -> ProbeData:
    build(root)
    return load_dataset(name, root)


def first(data: ProbeData, split: str, count: int) -> list[int]:
    """The first values of the first mask."""
    return data.splits[split].label(0).ravel()[:count].tolist()


def sizes(data: ProbeData) -> dict[str, int]:
    return {name: len(split) for name, split in data.splits.items()}


# Class mappings.


def test_cityscapes_ids_become_train_ids_as_torchvision_has_them(tmp_path: Path) -> None:
    data = loaded("cityscapes", tiny.cityscapes, tmp_path)
    published = sorted((c for c in tv.Cityscapes.classes if 0 <= c.train_id < 255), key=lambda c: c.train_id)
    assert data.classes == [c.name for c in published]
    expected = {c.id: 255 if c.train_id in (-1, 255) else c.train_id for c in tv.Cityscapes.classes}
    assert first(data, "val", 34) == [expected[i] for i in range(34)]
    assert sizes(data) == {"train": 1, "val": 1}
    theirs = tv.Cityscapes(tmp_path / "cityscapes", "train", target_type="semantic")
    assert [Path(path).name for path in theirs.images] == [Path(data.splits["train"].name(0)).name]


def test_ade_has_150_classes_and_ignores_the_rest(tmp_path: Path) -> None:
    data = loaded("ade20k", tiny.ade20k, tmp_path)
    assert first(data, "train", 4) == first(data, "val", 4) == [255, 0, 149, 11]
    assert len(data.classes) == 150
    assert (data.classes[0], data.classes[149]) == ("wall", "thing, 150")
    values(tmp_path / "ADEChallengeData2016/annotations/validation/ADE_val_00000001.png", [151])
    with pytest.raises(
        ImageError, match="ADE_val_00000001.png: the mask has value 151, which is not a class of this dataset"
    ):
        load_dataset("ade20k", tmp_path).splits["val"].label(0)
    text(tmp_path / "ADEChallengeData2016/objectInfo150.txt", "Idx\tName", "1\twall")
    with pytest.raises(DatasetError, match="has 1 classes in columns set apart by tabs; 150 are expected"):
        load_dataset("ade20k", tmp_path)


def test_context_is_59_classes_in_alphabetical_order_and_background(tmp_path: Path) -> None:
    data = loaded("context60", tiny.context60, tmp_path / "converted")
    assert len(data.classes) == 60
    assert data.classes[0] == "background"
    assert data.classes[1:] == sorted(data.classes[1:])
    assert {"table", *tiny.VOC20} - {"diningtable"} <= set(data.classes)
    assert first(data, "val", 4) == [0, 1, 59, 37]
    assert data.classes[37] == "person"
    release = loaded("context60", tiny.context459, tmp_path / "release")
    assert first(release, "val", 4) == [1, 59, 37, 0]
    assert release.splits["val"].label(0).dtype == np.uint8


def test_context_labels_go_by_their_names(tmp_path: Path) -> None:
    tiny.context459(tmp_path)
    listed = tmp_path / "VOCdevkit/VOC2010/labels.txt"
    listed.write_text(listed.read_text().replace(": person", ": people"))
    with pytest.raises(DatasetError, match="the list of labels has no person(.|\n)*SegmentationClassContext"):
        load_dataset("context60", tmp_path)


def test_voc2012_masks_are_indices_not_colours(tmp_path: Path) -> None:
    data = loaded("voc2012", tiny.voc2012, tmp_path)
    assert data.classes == ["background", *tiny.VOC20]
    assert first(data, "val", 5) == [0, 1, 20, 255, 15]
    theirs = tv.VOCSegmentation(tmp_path, "2012", "train")
    assert sizes(data)["train"] == len(theirs) == 2
    for i, (image, mask) in enumerate(theirs):
        np.testing.assert_array_equal(np.asarray(open_image(data.splits["train"].image(i))), np.asarray(image))
        np.testing.assert_array_equal(data.splits["train"].label(i), np.asarray(mask))


def test_voc2012_with_more_masks(tmp_path: Path) -> None:
    data = loaded("voc2012-aug", tiny.voc2012_aug, tmp_path)
    assert sizes(data) == {"train": 3, "val": 1}
    assert first(data, "train", 3) == [0, 2, 255]
    assert first(data, "val", 5) == [0, 1, 20, 255, 15]
    assert sizes(load_dataset("voc2012", tmp_path)) == {"train": 2, "val": 1}


def test_coco_stuff_is_171_of_182(tmp_path: Path) -> None:
    data = loaded("coco-stuff", tiny.coco, tmp_path)
    assert len(data.classes) == len(set(data.classes)) == 171
    named = dict(zip((0, 10, 12, 89, 91, 181), first(data, "val", 6), strict=True))
    assert {i: data.classes[label] for i, label in named.items()} == {
        0: "person",
        10: "fire hydrant",
        12: "stop sign",
        89: "toothbrush",
        91: "banner",
        181: "wood",
    }
    assert named == {0: 0, 10: 10, 12: 11, 89: 79, 91: 80, 181: 170}
    assert first(data, "val", 7)[6] == 255


def test_coco_object_is_80_things_and_background(tmp_path: Path) -> None:
    data = loaded("coco-object", tiny.coco, tmp_path)
    assert len(data.classes) == 81
    assert first(data, "val", 7) == [1, 11, 12, 80, 0, 0, 0]
    assert (data.classes[1], data.classes[12], data.classes[80]) == ("person", "stop sign", "toothbrush")
    assert data.classes[1:] == load_dataset("coco-stuff", tmp_path).classes[:80]


@pytest.mark.parametrize(("maps", "images"), [("stuffthingmaps", ""), ("stuffthingmaps_trainval2017", "images/")])
def test_coco_lies_in_several_ways(maps: str, images: str, tmp_path: Path) -> None:
    tiny.coco(tmp_path, maps, images)
    assert first(load_dataset("coco-stuff", tmp_path), "train", 3) == [0, 10, 11]


def test_coco_masks_of_the_toolboxes(tmp_path: Path) -> None:
    tiny.coco(tmp_path, end="_labelTrainIds.png")
    for folder, stem in {"train2017": "000000000009", "val2017": "000000000139"}.items():
        values(tmp_path / f"coco/annotations/{folder}/{stem}_labelTrainIds.png", [0, 170, 255])
        values(tmp_path / f"coco/annotations/{folder}/{stem}_instanceTrainIds.png", [0, 80])
    assert first(load_dataset("coco-stuff", tmp_path), "val", 3) == [0, 170, 255]
    assert first(load_dataset("coco-object", tmp_path), "val", 2) == [0, 80]


@pytest.mark.parametrize(
    ("name", "count"), [("cityscapes", 19), ("ade20k", 150), ("coco-stuff", 171), ("coco-object", 81)]
)
def test_every_mapping_is_onto_its_classes(name: str, count: int, tmp_path: Path) -> None:
    maps = loaded(name, tiny.BUILDERS[name], tmp_path).splits["val"].maps
    assert maps is not None
    assert maps.train_ids is not None
    assert set(range(count)) <= set(maps.train_ids.tolist()) <= {-1, *range(count), 255}


# Depth.


def test_nyu_depth_is_in_metres_and_scenes_stay_together(tmp_path: Path) -> None:
    data = loaded("nyuv2", tiny.nyuv2, tmp_path)
    depth = data.splits["test"].label(0)
    np.testing.assert_allclose(depth.ravel()[:4], [0, 0.001, 9.999, 2.345], rtol=1e-6)
    assert data.depth == DepthRules(1e-3, 10, "eigen")
    assert data.depth.box(480, 640) == (45, 471, 41, 601)
    scenes = [{s.name(i).split("/")[1].rstrip("ab") for i in range(len(s))} for s in data.splits.values()]
    assert not scenes[0] & scenes[1]
    assert sum(sizes(data).values()) == 9
    assert "whole scenes" in data.protocol["val"]
    assert (data.protocol["max_depth"], data.protocol["crop"]) == (10, "eigen")


def test_nyu_with_all_scenes_beside_the_lists(tmp_path: Path) -> None:
    tiny.nyuv2(tmp_path)
    base = tmp_path / "nyu_depth_v2"
    for folder in (base / "sync", base / "official_splits/test"):
        for scene in folder.iterdir():
            scene.rename(base / scene.name)
    for split in ("train", "test"):
        (base / f"nyudepthv2_{split}_files_with_gt.txt").rename(base / f"nyu_{split}.txt")
    base.rename(tmp_path / "nyu")
    data = load_dataset("nyuv2", tmp_path)
    assert data.splits["test"].name(0) == "bathroom/rgb_00045.jpg"
    assert data.splits["test"].label(0).max() == np.float32(9.999)


def test_kitti_depth_garg_crop_and_pictures_without_depth(tmp_path: Path) -> None:
    data = loaded("kitti", tiny.kitti, tmp_path)
    assert sizes(data) == {"train": 2, "val": 2, "test": 1}
    assert data.splits["test"].name(0).endswith("drive_0002_sync/image_02/data/0000000069.png")
    np.testing.assert_array_equal(data.splits["test"].label(0).ravel()[:4], [0, 1, 80, 2.5])
    assert data.depth is not None
    assert (data.depth.max_depth, data.depth.input_crop) == (80, (352, 1216))
    assert data.depth.box(352, 1216) == (143, 349, 43, 1172)
    drives = [{s.name(i).split("/")[1] for i in range(len(s))} for s in data.splits.values()]
    assert len(set.union(*drives)) == 3  # each in one split


def test_kitti_as_the_toolbox_has_it(tmp_path: Path) -> None:
    tiny.kitti(tmp_path)
    base = tmp_path / "kitti"
    (base / "input").mkdir()
    for day in base.glob("2011_*"):
        day.rename(base / "input" / day.name)
    (base / "gt_depth").mkdir()
    for drive in base.glob("data_depth_annotated/*/*"):
        drive.rename(base / "gt_depth" / drive.name)
    for split in ("train", "test"):
        (base / f"eigen_{split}_files_with_gt.txt").rename(base / f"kitti_eigen_{split}.txt")
    data = load_dataset("kitti", tmp_path)
    assert sizes(data) == {"train": 2, "val": 2, "test": 1}
    assert data.splits["train"].label(0).max() == 80


# Masks are trusted no more than pictures.


def test_damaged_masks_are_named(tmp_path: Path) -> None:
    data = loaded("voc2012", tiny.voc2012, tmp_path)
    mask = tmp_path / "VOCdevkit/VOC2012/SegmentationClass/2007_000033.png"
    mask.write_bytes(mask.read_bytes()[:-30])
    with pytest.raises(ImageError, match="^SegmentationClass/2007_000033.png: (damaged|truncated)"):
        data.splits["val"].label(0)
    tiny.write(mask, Image.new("RGB", SIZE))
    with pytest.raises(ImageError, match="mode RGB; labels are one channel"):
        data.splits["val"].label(0)


def test_masks_and_pictures_cannot_be_mixed_up() -> None:
    with pytest.raises(DatasetError, match="2 pictures but 1 labels"):
        Split(ImageIndex.of_files("", ["a", "b"]), np.zeros(1))


# Folders of one's own.


def test_folders_of_classes_with_splits(tmp_path: Path) -> None:
    picture(tmp_path, *(f"train/{c}/{i}.jpg" for c in ("cat", "dog") for i in range(10)), "valid/dog/x/y.png")
    data = load_dataset(str(tmp_path))
    assert (data.task, data.classes, data.name) == ("classify", ["cat", "dog"], tmp_path.name)
    assert sizes(data) == {"train": 20, "val": 1}
    assert data.splits["val"].label(0) == 1
    assert open_image(data.splits["val"].image(0)).getpixel((0, 0)) == colour("x/y.png")


def test_folders_of_classes_are_split_the_same_way_every_time(tmp_path: Path) -> None:
    picture(tmp_path / "a", *(f"{c}/{i}.jpg" for c in ("cat", "dog") for i in range(20)))
    data = load_dataset(str(tmp_path / "a"), task="classify")
    assert sizes(data) == {"train": 28, "val": 4, "test": 8}
    assert np.bincount(data.splits["test"].labels).tolist() == [4, 4]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert load_dataset("b", tmp_path).fingerprint == data.fingerprint
    assert data.protocol["test"] == "20%, fixed by a hash of the names"


@pytest.mark.parametrize("form", ["{kind}/{split}/", "{split}/{kind}/"])
def test_pictures_and_masks_with_splits(form: str, tmp_path: Path) -> None:
    for split, count in {"train": 4, "val": 2}.items():
        for i in range(count):
            picture(tmp_path, form.format(kind="images", split=split) + f"{i}.jpg")
            values(tmp_path / form.format(kind="masks", split=split) / f"{i}.png", [0, 255, i])
    text(tmp_path / "classes.txt", "sky", "road", "car", "tree")
    data = load_dataset(str(tmp_path))
    assert (data.task, data.ignore, data.classes) == ("segment", 255, ["sky", "road", "car", "tree"])
    assert sizes(data) == {"train": 4, "val": 2}
    assert data.splits["train"].label(3).ravel()[:3].tolist() == [0, 255, 3]
    assert open_image(data.splits["train"].image(3)).getpixel((0, 0)) == colour(data.splits["train"].name(3))


def test_pictures_and_masks_without_anything_else(tmp_path: Path) -> None:
    for i in range(10):
        picture(tmp_path, f"images/{i}.jpg")
        values(tmp_path / f"masks/{i}.png", [255, 0, 1, 6])
    data = load_dataset(str(tmp_path), task="segment")
    assert sizes(data) == {"train": 7, "val": 1, "test": 2}
    assert data.classes == [str(i) for i in range(7)]
    name = data.splits["test"].name(0)
    values(tmp_path / f"masks/{Path(name).stem}.png", [7])
    with pytest.raises(ImageError, match="the mask has value 7, which is not a class of this dataset"):
        data.splits["test"].label(0)
    (tmp_path / "masks/3.png").unlink()
    with pytest.raises(DatasetError, match="3 is missing in masks"):
        load_dataset(str(tmp_path))


def test_folders_of_images_and_depths_are_read(tmp_path: Path) -> None:
    for i in range(10):
        picture(tmp_path, f"images/{i}.jpg")
        values(tmp_path / f"depths/{i}.png", [0, 65535, 1234], np.uint16)
    data = load_dataset(str(tmp_path))
    assert (data.task, data.depth, data.classes) == ("depth", DepthRules(), [])
    np.testing.assert_allclose(data.splits["train"].label(0).ravel()[:3], [0, 65.535, 1.234], rtol=1e-6)
    values(tmp_path / "masks/0.png", [0])
    with pytest.raises(DatasetError, match="has masks and depths; say which with task="):
        load_dataset(str(tmp_path))


def test_a_wrong_folder_shows_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("")
    with pytest.raises(DatasetError, match="has no folders of classes. Expected:\n.*FOLDER/train/CLASS/7.jpg"):
        load_dataset(str(tmp_path))
    with pytest.raises(DatasetError, match="has no folder images beside depths or depth. Expected:\n"):
        load_dataset(str(tmp_path), task="depth")
    (tmp_path / "images").mkdir()
    with pytest.raises(DatasetError, match="has no folder masks or annotations or labels. Expected:\n"):
        load_dataset(str(tmp_path))
    with pytest.raises(DatasetError, match="has pictures all in one folder, images. Expected:\n"):
        load_dataset(str(tmp_path), task="classify")
    picture(tmp_path, "images/train/1.jpg")
    (tmp_path / "masks").mkdir()
    with pytest.raises(DatasetError, match="has no folder masks/train"):
        load_dataset(str(tmp_path))


# Shards.


def sample(key: str, label: int) -> dict[str, bytes]:
    grey = np.full((SIZE[1], SIZE[0]), label, np.uint8)
    return {
        f"{key}.webp": encoded(Image.new("RGB", SIZE, colour(key)), "WEBP"),
        f"{key}.cls": f"{label}\n".encode(),
        f"{key}.seg.png": encoded(Image.fromarray(grey)),
        f"{key}.depth.png": encoded(Image.fromarray(grey.astype(np.uint16) * 1000)),
        f"{key}.json": b"{}",
    }


def members(keys: str, *ends: str) -> dict[str, bytes]:
    made = {k: v for i, key in enumerate(keys.split()) for k, v in sample(key, i % 3).items()}
    return {name: data for name, data in made.items() if name.partition(".")[2] in ("webp", *ends)}


def test_shards_with_classes_are_read(tmp_path: Path) -> None:
    paths = [
        shard(tmp_path / "zoo-trainval-00.tar", members("a b c d e f", "cls", "json")),
        shard(tmp_path / "zoo-trainval-01.tar", members("g h i", "cls")),
        shard(tmp_path / "zoo-test.tar", members("x/y z", "cls")),
    ]
    data = load_dataset(",".join(map(str, paths)), task="classify")
    assert (data.name, data.task, data.classes) == ("zoo", "classify", ["0", "1", "2"])
    assert sizes(data) == {"train": 6, "val": 3, "test": 2}
    for split in data.splits.values():
        for i in range(len(split)):
            key = split.name(i).partition(".tar/")[2].removesuffix(".webp")
            assert open_image(split.image(i)).getpixel((0, 0)) == colour(key)
            assert split.label(i) == {"x/y": 0, "z": 1}.get(key, "abcdefghi".find(key) % 3)
    for same in (tmp_path, tmp_path / "zoo", tmp_path / "*.tar"):
        assert load_dataset(str(same)).fingerprint == data.fingerprint
    text(tmp_path / "zoo-classes.txt", "ape", "bee", "cow")
    assert load_dataset(str(tmp_path)).classes == ["ape", "bee", "cow"]


def test_shards_of_masks_and_depths(tmp_path: Path) -> None:
    for split, keys in {"train": "a b c", "val": "d e f"}.items():
        shard(tmp_path / f"rooms-{split}.tar", members(keys, "cls", "seg.png", "depth.png"))
    with pytest.raises(DatasetError, match="labels to classify and to segment and to depth; say which with task="):
        load_dataset(str(tmp_path))
    masks = load_dataset(str(tmp_path), task="segment")
    assert (len(masks.classes), masks.ignore, sizes(masks)) == (3, 255, {"train": 3, "val": 3})
    assert [int(masks.splits["val"].label(i).max()) for i in range(3)] == [0, 1, 2]
    depths = load_dataset(str(tmp_path), task="depth")
    assert [float(depths.splits["val"].label(i).max()) for i in range(3)] == [0, 1, 2]
    assert depths.splits["val"].name(2) == "rooms-val.tar/f.webp"


def test_one_shard_is_split(tmp_path: Path) -> None:
    path = shard(tmp_path / "all.tar", members(" ".join(f"k{i}" for i in range(60)), "cls"))
    data = load_dataset(str(path))
    assert sizes(data) == {"train": 42, "val": 6, "test": 12}


def test_shards_that_are_no_dataset_say_why(tmp_path: Path) -> None:
    plain = shard(tmp_path / "plain-train.tar", members("a b"))
    with pytest.raises(DatasetError, match="no labels beside its pictures. Expected:(.|\n)*NAME-train.tar"):
        load_dataset(str(plain))
    masks = shard(tmp_path / "masks-train.tar", members("a b", "seg.png"))
    with pytest.raises(DatasetError, match="labels to segment, not to classify"):
        load_dataset(str(masks), task="classify")
    with pytest.raises(DatasetError, match="masks, plain are shards of several datasets; name one of them"):
        load_dataset(str(tmp_path))
    with pytest.raises(DatasetError, match="missing.tar: no such file"):
        load_dataset(str(tmp_path / "missing.tar"))
    packed = shard(tmp_path / "x-train.tar.gz", members("a b", "cls"), "w:gz")
    with pytest.raises(DatasetError, match="decompress it to .tar with gunzip"):
        load_dataset(str(packed))
    damaged = shard(tmp_path / "bad-train.tar", members("a b", "cls"))
    damaged.write_bytes(damaged.read_bytes()[:1500])
    with pytest.raises(DatasetError, match="bad-train.tar: damaged archive"):
        load_dataset(str(damaged))


@pytest.mark.parametrize("content", [b"", b"cat", b"-1", b"1.5", b"99999", b"1" * 100])
def test_class_numbers_in_shards_are_numbers(content: bytes, tmp_path: Path) -> None:
    path = shard(tmp_path / "x-train.tar", {**members("a b", "cls"), "b.cls": content})
    with pytest.raises(DatasetError, match="x-train.tar/b.cls: must hold a class number, 0 to 65535, as text"):
        load_dataset(str(path))


def test_a_link_in_a_shard_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x-train.tar"
    with tarfile.open(path, "w") as archive:
        (info := tarfile.TarInfo("a.webp")).type = tarfile.SYMTYPE
        info.linkname = "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(DatasetError, match="a.webp: a link or special file"):
        load_dataset(str(path))


def test_relative_paths_give_the_same_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path / "zoo-train.tar", members("a b c d", "cls"))
    monkeypatch.chdir(tmp_path)
    data = load_dataset("zoo-train.tar")
    assert data.fingerprint == load_dataset(str(tmp_path)).fingerprint
    monkeypatch.chdir(os.sep)
    assert open_image(data.splits["train"].image(0)).size == SIZE
