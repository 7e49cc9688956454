"""Copies of the published datasets with a handful of pictures: the real names, lists and file formats.

Every function makes one below `root`, in the folder the real archive unpacks to. Each picture is of one colour, which
its name gives (`colour`), so that a test sees whether the right one came.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import scipy.io
from PIL import Image

from veca.data.datasets.published import CLASS_NAMES

SIZE = (8, 6)
VOC = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep"
)
VOC20 = [*VOC.split(), "sofa", "train", "tvmonitor"]


def colour(name: str) -> tuple[int, int, int]:
    """By the last two parts of a path, as file names alone repeat."""
    red, green, blue = hashlib.sha256("/".join(name.split("/")[-2:]).encode()).digest()[:3]
    return red, green, blue


def write(path: Path, image: Image.Image) -> None:
    """As PNG, whatever the name says: files are opened by what is in them, and this keeps every value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, "PNG")


def picture(root: Path, *names: str) -> None:
    for name in names:
        write(root / name, Image.new("RGB", SIZE, colour(name)))


def values(path: Path, numbers: list[int], dtype: type = np.uint8, palette: bool = False) -> None:
    """A mask or depth whose first pixels have these values and whose others the last of them."""
    flat = np.full(SIZE[0] * SIZE[1], numbers[-1], dtype)
    flat[: len(numbers)] = numbers
    image = Image.fromarray(flat.reshape(SIZE[1], SIZE[0]))
    if palette:
        image.putpalette(np.arange(768, dtype=np.uint8).tobytes())
    write(path, image)


def text(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def mat(path: Path, **variables: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, variables, do_compression=True)


def imagenet(root: Path) -> None:
    base = root / "imagenet"
    for wnid in ("n01440764", "n01443537", "n15075141"):
        picture(base, *(f"train/{wnid}/{wnid}_{i}.JPEG" for i in (7, 10026)))
    picture(base, "val/n01440764/ILSVRC2012_val_00000003.JPEG", "val/n15075141/ILSVRC2012_val_00000001.JPEG")


def imagenet_kaggle(root: Path) -> None:
    data = root / "ILSVRC/Data/CLS-LOC"
    picture(data, "train/n01443537/n01443537_2.JPEG", "train/n01440764/n01440764_1.JPEG")
    picture(data, *(f"val/ILSVRC2012_val_0000000{i}.JPEG" for i in (1, 2)))
    rows = ("ILSVRC2012_val_00000002,n01443537 85 1 499 272 ", "ILSVRC2012_val_00000001,n01440764 1 2 3 4 1 2 3 4 ")
    text(root / "LOC_val_solution.csv", "ImageId,PredictionString", *rows)
    text(root / "LOC_synset_mapping.txt", "n01440764 tench, Tinca tinca", "n01443537 goldfish, Carassius auratus")


def imagenetv2(root: Path) -> None:
    base = root / "imagenetv2-matched-frequency-format-val"
    picture(base, "0/a.jpeg", "2/b.jpeg", "10/c.jpeg", "999/d.jpeg")


def imagenet_real(root: Path) -> None:
    imagenet(root)
    (root / "imagenet/real.json").write_text(json.dumps([[5, 999], [1], []]))
    picture(root / "imagenet", "val/n01443537/ILSVRC2012_val_00000002.JPEG")


def places365(root: Path) -> None:
    base = root / "places365"
    text(base / "categories_places365.txt", "/a/airfield 0", "/a/airplane_cabin 1", "/a/apartment_building/outdoor 2")
    train = ["/a/airfield/00000001.jpg 0", "/a/apartment_building/outdoor/00000001.jpg 2", "/a/airfield/00000002.jpg 0"]
    val = ["Places365_val_00000001.jpg 1", "Places365_val_00000002.jpg 0"]
    text(base / "places365_train_standard.txt", *train)
    text(base / "places365_val.txt", *val)
    picture(base, *(f"data_256_standard{row.split()[0]}" for row in train), *(f"val_256/{r.split()[0]}" for r in val))


def food101(root: Path) -> None:
    base, split = root / "food-101", {"train": range(4), "test": range(4, 6)}
    text(base / "meta/classes.txt", "apple_pie", "waffles")
    for name, numbers in split.items():
        rows = {food: [f"{food}/{i}" for i in numbers] for food in ("apple_pie", "waffles")}
        text(base / f"meta/{name}.txt", *rows["apple_pie"], *rows["waffles"])
        (base / f"meta/{name}.json").write_text(json.dumps(rows))
        picture(base, *(f"images/{row}.jpg" for both in rows.values() for row in both))


def _records(path: Path, labels: list[list[int]]) -> None:
    """Pictures whose red is the label, green a ramp and blue 7."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ramp = bytes(i % 256 for i in range(1024))
    path.write_bytes(b"".join(bytes(row) + bytes([row[-1]]) * 1024 + ramp + b"\7" * 1024 for row in labels))


def cifar10(root: Path) -> None:
    base = root / "cifar-10-batches-bin"
    names = "airplane automobile bird cat deer dog frog horse ship truck"
    text(base / "batches.meta.txt", *names.split(), "")
    for i in range(1, 6):
        _records(base / f"data_batch_{i}.bin", [[i], [9]])
    _records(base / "test_batch.bin", [[3], [0], [9]])


def cifar100(root: Path) -> None:
    base = root / "cifar-100-binary"
    text(base / "fine_label_names.txt", *(f"fine{i}" for i in range(100)))
    text(base / "coarse_label_names.txt", *(f"coarse{i}" for i in range(20)))
    _records(base / "train.bin", [[1, 99], [2, 40], [2, 40]])
    _records(base / "test.bin", [[3, 0]])


def sun397(root: Path) -> None:
    base = root / "SUN397"
    text(base / "ClassName.txt", "/a/abbey", "/a/apartment_building/outdoor", "/b/bar")
    parts = {"Training_01": "aaa aab", "Testing_01": "aac"}
    for part, keys in parts.items():
        rows = [
            f"{c}/sun_{k}.jpg" for c in ("/a/abbey", "/a/apartment_building/outdoor", "/b/bar") for k in keys.split()
        ]
        text(base / f"Partitions/{part}.txt", *rows)
        picture(base, *(row.lstrip("/") for row in rows))


def _annotations(rows: list[tuple[str, int]], labelled: bool = True) -> np.ndarray:
    """As in the devkit: a structure of boxes, class and file name."""
    fields = ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", *(["class"] if labelled else []), "fname"]
    made = np.zeros((1, len(rows)), [(name, object) for name in fields])
    for i, (name, label) in enumerate(rows):
        made[0, i] = (1, 2, 3, 4, np.uint8(label), name) if labelled else (1, 2, 3, 4, name)
    return made


def cars(root: Path) -> None:
    base = root / "stanford_cars"
    names = np.array(["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Acura TL Sedan 2012"], object)
    mat(base / "devkit/cars_meta.mat", class_names=names.reshape(1, -1))
    train = [("00001.jpg", 3), ("00002.jpg", 1), ("00003.jpg", 3), ("00004.jpg", 2), ("00005.jpg", 1)]
    mat(base / "devkit/cars_train_annos.mat", annotations=_annotations(train))
    mat(base / "devkit/cars_test_annos.mat", annotations=_annotations([("00001.jpg", 0)], labelled=False))
    mat(base / "cars_test_annos_withlabels.mat", annotations=_annotations([("00001.jpg", 2), ("00002.jpg", 1)]))
    picture(base, *(f"cars_train/{name}" for name, _ in train), "cars_test/00001.jpg", "cars_test/00002.jpg")


def aircraft(root: Path) -> None:
    data = root / "fgvc-aircraft-2013b/data"
    text(data / "variants.txt", "707-320", "A300B4", "Boeing 717")
    rows = {"train": ["1 707-320", "2 Boeing 717"], "val": ["3 A300B4"], "test": ["4 Boeing 717", "5 707-320"]}
    for split, lines in rows.items():
        text(data / f"images_variant_{split}.txt", *(f"003430{line}" for line in lines))
        picture(data, *(f"images/003430{line[0]}.jpg" for line in lines))


def voc2007(root: Path) -> None:
    base = root / "VOCdevkit/VOC2007"
    has = {"train": {"000012": {"car": 1}}, "val": {"000005": {"chair": 1, "sofa": 0}}}
    has["test"] = {"000001": {"dog": 1, "person": 1}, "000002": {"train": 0}}
    for split, rows in has.items():
        text(base / f"ImageSets/Main/{split}.txt", *rows)
        for name in VOC20:
            marks = [f"{key} {there.get(name, -1):2d}" for key, there in rows.items()]
            text(base / f"ImageSets/Main/{name}_{split}.txt", *marks)
        picture(base, *(f"JPEGImages/{key}.jpg" for key in rows))


def dtd(root: Path) -> None:
    base = root / "dtd/dtd"
    for n, split in enumerate(("train", "val", "test")):
        rows = [f"{name}/{name}_000{n}.jpg" for name in ("banded", "zigzagged")]
        text(base / f"labels/{split}1.txt", *rows)
        text(base / f"labels/{split}2.txt", "banded/other_0001.jpg")
        picture(base, *(f"images/{row}" for row in rows))


def caltech101(root: Path) -> None:
    base = root / "caltech101/101_ObjectCategories"
    for name, count in {"BACKGROUND_Google": 3, "Faces": 34, "accordion": 32}.items():
        picture(base, *(f"{name}/image_{i:04d}.jpg" for i in range(1, count + 1)))


def pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    trains = [f"Abyssinian_{i} 1 1 1" for i in range(3)] + [f"american_bulldog_{i} 2 2 1" for i in range(3)]
    tests = ["american_bulldog_9 2 2 1", "Abyssinian_9 1 1 1"]
    text(base / "annotations/trainval.txt", *trains)
    text(base / "annotations/test.txt", *tests)
    picture(base, *(f"images/{row.split()[0]}.jpg" for row in trains + tests))


def cub200(root: Path) -> None:
    base = root / "CUB_200_2011"
    classes = ["001.Black_footed_Albatross", "002.Laysan_Albatross"]
    names = [f"{name}/{name[4:]}_000{i}.jpg" for name in classes for i in range(4)]
    text(base / "classes.txt", *(f"{i} {name}" for i, name in enumerate(classes, 1)))
    text(base / "images.txt", *(f"{i} {name}" for i, name in enumerate(names, 1)))
    text(base / "image_class_labels.txt", *(f"{i} {1 + (i > 4)}" for i in range(1, 9)))
    text(base / "train_test_split.txt", *(f"{i} {int(i % 4 != 0)}" for i in range(1, 9)))
    picture(base, *(f"images/{name}" for name in names))


def flowers102(root: Path) -> None:
    base = root / "flowers-102"
    mat(base / "imagelabels.mat", labels=np.array([[77, 1, 102, 5, 9, 8]], np.uint8))
    mat(base / "setid.mat", trnid=np.array([[2, 4]]), valid=np.array([[1, 5]]), tstid=np.array([[6, 3]]))
    picture(base, *(f"jpg/image_{i:05d}.jpg" for i in range(1, 7)))


def voc2012(root: Path) -> None:
    base = root / "VOCdevkit/VOC2012"
    for split, stems in {"train": ["2007_000032", "2007_000039"], "val": ["2007_000033"]}.items():
        text(base / f"ImageSets/Segmentation/{split}.txt", *stems)
        for stem in stems:
            picture(base, f"JPEGImages/{stem}.jpg")
            values(base / f"SegmentationClass/{stem}.png", [0, 1, 20, 255, 15], palette=True)


def voc2012_aug(root: Path) -> None:
    voc2012(root)
    base = root / "VOCdevkit/VOC2012"
    picture(base, "JPEGImages/2008_000002.jpg")
    stems = ["2007_000032", "2007_000039", "2008_000002"]
    text(
        base / "ImageSets/Segmentation/trainaug.txt",
        *(f"/JPEGImages/{s}.jpg /SegmentationClassAug/{s}.png" for s in stems),
    )
    for stem in stems:
        values(base / f"SegmentationClassAug/{stem}.png", [0, 2, 255])


def context60(root: Path) -> None:
    base = root / "VOCdevkit/VOC2010"
    for split, stem in {"train": "2008_000002", "val": "2008_000003"}.items():
        text(base / f"ImageSets/SegmentationContext/{split}.txt", stem)
        picture(base, f"JPEGImages/{stem}.jpg")
        values(base / f"SegmentationClassContext/{stem}.png", [0, 1, 59, 37])


def context459(root: Path) -> None:
    """The release: 459 labels in alphabetical order, of which the 59 are some."""
    base = root / "VOCdevkit/VOC2010"
    fillers = [f"xx{i:03d}" for i in range(400)]
    labels = sorted([*CLASS_NAMES["context"][1:], *fillers])
    text(base / "labels.txt", *(f"{i}: {name}" for i, name in enumerate(labels, 1)))
    for split, stem in {"train": "2008_000002", "val": "2008_000003"}.items():
        text(base / f"ImageSets/Main/{split}.txt", stem)
        picture(base, f"JPEGImages/{stem}.jpg")
        numbers = [1 + labels.index(name) for name in ("aeroplane", "wood", "person", "xx007")]
        made = np.full((SIZE[1], SIZE[0]), numbers[-1], np.uint16)
        made[0, :4] = numbers
        mat(base / f"trainval/{stem}.mat", LabelMap=made)


def ade20k(root: Path) -> None:
    base = root / "ADEChallengeData2016"
    # Some numbers and names of the real list have a space after them.
    rows = [f"{i}{' ' * (i == 22)}\t0.1\t10\t1\t{i % 2}\t{'wall' if i == 1 else f'thing, {i}'}" for i in range(1, 151)]
    text(base / "objectInfo150.txt", "Idx\tRatio\tTrain\tVal\tStuff\tName", *rows)
    for folder, stem in {"training": "ADE_train_00000001", "validation": "ADE_val_00000001"}.items():
        picture(base, f"images/{folder}/{stem}.jpg")
        values(base / f"annotations/{folder}/{stem}.png", [0, 1, 150, 12])


def coco(root: Path, maps: str = "annotations", images: str = "images/", end: str = ".png") -> None:
    for folder, stem in {"train2017": "000000000009", "val2017": "000000000139"}.items():
        picture(root / "coco", f"{images}{folder}/{stem}.jpg")
        values(root / "coco" / maps / folder / f"{stem}{end}", [0, 10, 12, 89, 91, 181, 255, 255])


def cityscapes(root: Path) -> None:
    base = root / "cityscapes"
    for split, city in {"train": "aachen", "val": "frankfurt", "test": "berlin"}.items():
        stem = f"{split}/{city}/{city}_000000_000019"
        picture(base, f"leftImg8bit/{stem}_leftImg8bit.png")
        values(base / f"gtFine/{stem}_gtFine_labelIds.png", list(range(34)))
        values(base / f"gtFine/{stem}_gtFine_instanceIds.png", [26001], np.uint16)


def nyuv2(root: Path) -> None:
    base = root / "nyu_depth_v2"
    trains = [
        f"{s}/rgb_0000{i}.jpg" for s in ("cafe_0001a", "cafe_0001b", "kitchen_0028b", "office_0003") for i in (1, 2)
    ]
    for listed, folder, names in (
        ("train", "sync", trains),
        ("test", "official_splits/test", ["bathroom/rgb_00045.jpg"]),
    ):
        depths = [name.replace("rgb", "sync_depth").replace("jpg", "png") for name in names]
        slash = "/" if listed == "train" else ""
        rows = [f"{slash}{n} {slash}{d} 518.8579" for n, d in zip(names, depths, strict=True)]
        text(base / f"nyudepthv2_{listed}_files_with_gt.txt", *rows)
        picture(base / folder, *names)
        for name in depths:
            values(base / folder / name, [0, 1, 9999, 2345], np.uint16)


def nyuv2_labelled(root: Path) -> None:
    base = root / "nyu_depth_v2/official_splits"
    for split, names in {"train": ["basement/00489", "bathroom/00003"], "test": ["bathroom/00045"]}.items():
        for name in names:
            scene, frame = name.split("/")
            picture(base, f"{split}/{scene}/rgb_{frame}.jpg")
            values(base / split / scene / f"sync_depth_{frame}.png", [0, 1500], np.uint16)


def kitti(root: Path) -> None:
    base = root / "kitti"
    drives = {
        "train": ["2011_09_26_drive_0001_sync", "2011_09_28_drive_0021_sync"],
        "test": ["2011_09_26_drive_0002_sync"],
    }
    for split, names in drives.items():
        rows = []
        for drive in names:
            for frame in ("0000000069", "0000000054"):
                image = f"{drive[:10]}/{drive}/image_02/data/{frame}.png"
                depth = f"{drive}/proj_depth/groundtruth/image_02/{frame}.png"
                picture(base, image)
                missing = split == "test" and frame == "0000000054"
                rows.append(f"{image} {'None' if missing else depth} 721.5377")
                if not missing:
                    part = "val" if split == "test" else "train"
                    values(base / f"data_depth_annotated/{part}/{depth}", [0, 256, 20480, 640], np.uint16)
        text(base / f"eigen_{split}_files_with_gt.txt", *rows)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    image.save(buffer := io.BytesIO(), kind, lossless=True) if kind == "WEBP" else image.save(
        buffer := io.BytesIO(), kind
    )
    return buffer.getvalue()


def shard(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            (info := tarfile.TarInfo(name)).size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def make_folder(root: Path, count: int) -> Path:
    """A user's own folder: train, val and test with two classes, red and blue, in noise."""
    draw = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for name, colour in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                noise = draw.integers(-10, 10, (40, 60, 3))
                pixels = (np.array(colour) + noise).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


BUILDERS = {
    "imagenet": imagenet,
    "imagenetv2": imagenetv2,
    "imagenet-real": imagenet_real,
    "places365": places365,
    "food101": food101,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "sun397": sun397,
    "cars": cars,
    "aircraft": aircraft,
    "voc2007": voc2007,
    "dtd": dtd,
    "caltech101": caltech101,
    "pets": pets,
    "cub200": cub200,
    "flowers102": flowers102,
    "voc2012": voc2012,
    "voc2012-aug": voc2012_aug,
    "context60": context60,
    "ade20k": ade20k,
    "coco-stuff": coco,
    "coco-object": coco,
    "cityscapes": cityscapes,
    "nyuv2": nyuv2,
    "nyuv2-labelled": nyuv2_labelled,
    "kitti": kitti,
}
