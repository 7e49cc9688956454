"""The classification benchmarks beside ImageNet: layout, origin, licence and size of each.

Sizes are those of the published splits. Where a benchmark has no validation split, a tenth of each class of train is
held out for it (`veca.data.datasets.base.held_out`) when it is loaded.
"""

from __future__ import annotations

from veca.data.datasets import classification as read
from veca.data.datasets.layout import Spec

_TOP1 = {"metric": "top-1"}

SPECS = [
    Spec(
        name="places365",
        title="Places365-Standard",
        task="classify",
        classes=365,
        sizes={"train": 1_803_460, "val": 36_500},
        tree="""
places365/
├── categories_places365.txt
├── places365_train_standard.txt
├── places365_val.txt
├── data_256_standard/a/airfield/00000001.jpg …   or data_large_standard
└── val_256/Places365_val_00000001.jpg …          or val_large
or the "easy" archive:
├── train/airfield/00000001.jpg …
└── val/airfield/Places365_val_00000435.jpg …
""",
        marks=("categories_places365.txt|train",),
        folders=("places365", "places365_standard"),
        source="the Places2 page of MIT CSAIL",
        licence="research and education only",
        read=read.places365,
        protocol=_TOP1,
    ),
    Spec(
        name="food101",
        title="Food-101",
        task="classify",
        classes=101,
        sizes={"train": 75_750, "test": 25_250},
        tree="""
food-101/
├── images/apple_pie/1005649.jpg …
└── meta/classes.txt, train.txt, test.txt
""",
        marks=("images", "meta"),
        folders=("food-101", "food101"),
        source="the Food-101 page of ETH Zürich's Computer Vision Lab",
        licence="pictures are their owners' on Foodspotting; fair use in research",
        read=read.food101,
        hold_out=True,
        protocol=_TOP1,
    ),
    Spec(
        name="cifar10",
        title="CIFAR-10, the binary version (the one for Python is pickles, which can run code and are not opened)",
        task="classify",
        classes=10,
        sizes={"train": 50_000, "test": 10_000},
        tree="""
cifar-10-batches-bin/
├── batches.meta.txt
├── data_batch_1.bin … data_batch_5.bin
└── test_batch.bin
""",
        marks=("batches.meta.txt", "test_batch.bin"),
        folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
        source="Alex Krizhevsky's CIFAR page",
        licence="none stated",
        read=read.cifar10,
        hold_out=True,
        protocol=_TOP1,
    ),
    Spec(
        name="cifar100",
        title="CIFAR-100, the binary version (the one for Python is pickles, which can run code and are not opened)",
        task="classify",
        classes=100,
        sizes={"train": 50_000, "test": 10_000},
        tree="""
cifar-100-binary/
├── coarse_label_names.txt
├── fine_label_names.txt
├── train.bin
└── test.bin
""",
        marks=("fine_label_names.txt", "train.bin"),
        folders=("cifar-100-binary", "cifar100/cifar-100-binary"),
        source="Alex Krizhevsky's CIFAR page",
        licence="none stated",
        read=read.cifar100,
        hold_out=True,
        protocol={**_TOP1, "labels": "fine"},
    ),
    Spec(
        name="sun397",
        title="SUN397",
        task="classify",
        classes=397,
        sizes={"train": 19_850, "test": 19_850},
        tree="""
SUN397/
├── ClassName.txt
├── a/abbey/sun_aaalbzqrimafwbiv.jpg …
└── Partitions/Training_01.txt, Testing_01.txt    or beside ClassName.txt, or beside SUN397
""",
        marks=("ClassName.txt", "a"),
        folders=("SUN397", "sun397/SUN397", "sun397"),
        source="the SUN database page of MIT CSAIL; the partitions are an archive of their own",
        licence="research only",
        read=read.sun397,
        hold_out=True,
        protocol={**_TOP1, "partition": 1},
    ),
    Spec(
        name="cars",
        title="Stanford Cars",
        task="classify",
        classes=196,
        sizes={"train": 8_144, "test": 8_041},
        tree="""
stanford_cars/
├── cars_train/00001.jpg …
├── cars_test/00001.jpg …
├── cars_test_annos_withlabels.mat
└── devkit/cars_meta.mat, cars_train_annos.mat
""",
        marks=("cars_train", "devkit"),
        folders=("stanford_cars", "cars"),
        source="copies on Kaggle and the Hugging Face hub, as Stanford's page is gone",
        licence="research, non-commercial",
        read=read.cars,
        hold_out=True,
        protocol=_TOP1,
    ),
    Spec(
        name="aircraft",
        title="FGVC-Aircraft",
        task="classify",
        classes=100,
        sizes={"train": 3_334, "val": 3_333, "test": 3_333},
        tree="""
fgvc-aircraft-2013b/
└── data/
    ├── images/0034309.jpg …
    ├── variants.txt
    └── images_variant_train.txt, images_variant_val.txt, images_variant_test.txt
""",
        marks=("data/variants.txt", "data/images"),
        folders=("fgvc-aircraft-2013b", "aircraft/fgvc-aircraft-2013b", "aircraft"),
        source="the FGVC-Aircraft page of Oxford's Visual Geometry Group",
        licence="research, non-commercial",
        read=read.aircraft,
        protocol={**_TOP1, "labels": "variant"},
    ),
    Spec(
        name="voc2007",
        title="PASCAL VOC 2007, classification",
        task="multilabel",
        classes=20,
        sizes={"train": 2_501, "val": 2_510, "test": 4_952},
        tree="""
VOCdevkit/VOC2007/
├── JPEGImages/000005.jpg …
└── ImageSets/Main/
    ├── train.txt, val.txt, test.txt
    └── aeroplane_train.txt … tvmonitor_test.txt
""",
        marks=("JPEGImages", "ImageSets/Main"),
        folders=("VOC2007", "VOCdevkit/VOC2007"),
        source="the PASCAL VOC 2007 page, trainval and test archives unpacked to one folder",
        licence="pictures under Flickr's terms of use",
        read=read.voc2007,
        ignore=-1,
        protocol={
            "metric": "mean average precision",
            "rule": "where every object of a class is marked difficult, the picture does not count for that class",
        },
    ),
    Spec(
        name="dtd",
        title="Describable Textures (DTD)",
        task="classify",
        classes=47,
        sizes={"train": 1_880, "val": 1_880, "test": 1_880},
        tree="""
dtd/
├── images/banded/banded_0002.jpg …
└── labels/train1.txt, val1.txt, test1.txt
""",
        marks=("images", "labels"),
        folders=("dtd", "dtd/dtd"),
        source="the DTD page of Oxford's Visual Geometry Group",
        licence="research only",
        read=read.dtd,
        protocol={**_TOP1, "partition": 1},
    ),
    Spec(
        name="caltech101",
        title="Caltech-101",
        task="classify",
        classes=102,
        sizes={"train": 3_060, "test": 6_084},
        tree="""
caltech101/
└── 101_ObjectCategories/
    ├── BACKGROUND_Google/image_0001.jpg …
    └── accordion/image_0001.jpg …
""",
        marks=("101_ObjectCategories",),
        folders=("caltech101", "caltech-101"),
        source="Caltech's research data repository",
        licence="CC BY 4.0",
        read=read.caltech101,
        hold_out=True,
        protocol={
            **_TOP1,
            "rule": f"{read.CALTECH_TRAIN} pictures of each class for train, fixed by a hash of their names, the rest "
            "for test; the background is a class, as in most published results",
        },
    ),
    Spec(
        name="pets",
        title="Oxford-IIIT Pet",
        task="classify",
        classes=37,
        sizes={"train": 3_680, "test": 3_669},
        tree="""
oxford-iiit-pet/
├── images/Abyssinian_1.jpg …
└── annotations/trainval.txt, test.txt
""",
        marks=("images", "annotations"),
        folders=("oxford-iiit-pet", "pets"),
        source="the Pets page of Oxford's Visual Geometry Group",
        licence="CC BY-SA 4.0",
        read=read.pets,
        hold_out=True,
        protocol=_TOP1,
    ),
    Spec(
        name="cub200",
        title="Caltech-UCSD Birds-200-2011 (CUB-200)",
        task="classify",
        classes=200,
        sizes={"train": 5_994, "test": 5_794},
        tree="""
CUB_200_2011/
├── images/001.Black_footed_Albatross/Black_Footed_Albatross_0001_796111.jpg …
├── classes.txt
├── images.txt
├── image_class_labels.txt
└── train_test_split.txt
""",
        marks=("images", "images.txt"),
        folders=("CUB_200_2011", "cub200/CUB_200_2011", "cub200"),
        source="Caltech's research data repository",
        licence="research, non-commercial",
        read=read.cub200,
        hold_out=True,
        protocol=_TOP1,
    ),
    Spec(
        name="flowers102",
        title="Oxford 102 Flowers",
        task="classify",
        classes=102,
        sizes={"train": 1_020, "val": 1_020, "test": 6_149},
        tree="""
flowers-102/
├── jpg/image_00001.jpg …
├── imagelabels.mat
└── setid.mat
""",
        marks=("jpg", "setid.mat"),
        folders=("flowers-102", "flowers102"),
        source="the 102 Flowers page of Oxford's Visual Geometry Group",
        licence="none stated",
        read=read.flowers102,
        protocol=_TOP1,
    ),
]
