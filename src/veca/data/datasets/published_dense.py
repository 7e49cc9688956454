"""The segmentation and depth benchmarks: layout, origin, licence and size of each.

In segmentation the official val is what is scored, as the labels of test are not public. In depth, whole scenes of
train are held out as val.
"""

from __future__ import annotations

from veca.data.datasets import dense as read
from veca.data.datasets.base import IGNORE, DepthRules
from veca.data.datasets.layout import Spec

_MIOU = {"metric": "mean intersection over union"}
_RMSE = {"metric": "root mean squared error in metres"}
_NYU = DepthRules(1e-3, 10, "eigen")
_COCO_TREE = """
coco/
├── images/train2017/000000000009.jpg …     or train2017
├── images/val2017/000000000139.jpg …       or val2017
├── annotations/train2017/000000000009.png …   or stuffthingmaps/train2017
└── annotations/val2017/000000000139.png …     or stuffthingmaps/val2017
"""
_COCO = {
    "sizes": {"train": 118_287, "val": 5_000},
    "marks": (
        "images/val2017|val2017",
        "annotations/val2017|stuffthingmaps/val2017|stuffthingmaps_trainval2017/val2017",
    ),
    "folders": ("coco", "coco_stuff164k", "coco2017"),
    "source": "the COCO site, and stuffthingmaps_trainval2017 from the COCO-Stuff page",
    "licence": "CC BY 4.0 for the labels; pictures under Flickr's terms of use",
}

SPECS = [
    Spec(
        name="voc2012",
        title="PASCAL VOC 2012, segmentation",
        task="segment",
        classes=21,
        sizes={"train": 1_464, "val": 1_449},
        tree="""
VOCdevkit/VOC2012/
├── JPEGImages/2007_000032.jpg …
├── SegmentationClass/2007_000032.png …
└── ImageSets/Segmentation/train.txt, val.txt
""",
        marks=("JPEGImages", "SegmentationClass"),
        folders=("VOC2012", "VOCdevkit/VOC2012"),
        source="the PASCAL VOC 2012 page",
        licence="pictures under Flickr's terms of use",
        read=read.voc2012,
        ignore=IGNORE,
        protocol=_MIOU,
    ),
    Spec(
        name="voc2012-aug",
        title="PASCAL VOC 2012 with the masks of SBD (trainaug)",
        task="segment",
        classes=21,
        sizes={"train": 10_582, "val": 1_449},
        tree="""
VOCdevkit/VOC2012/
├── JPEGImages/2007_000032.jpg …
├── SegmentationClass/2007_000033.png …      val
├── SegmentationClassAug/2007_000032.png …   train
└── ImageSets/Segmentation/trainaug.txt, val.txt
""",
        marks=("JPEGImages", "SegmentationClassAug", "ImageSets/Segmentation/trainaug.txt"),
        folders=("VOC2012", "VOCdevkit/VOC2012"),
        source="the PASCAL VOC 2012 page, and SegmentationClassAug as DeepLab's users share it",
        licence="pictures under Flickr's terms of use",
        read=read.voc2012_aug,
        ignore=IGNORE,
        protocol=_MIOU,
    ),
    Spec(
        name="context60",
        title="PASCAL Context, 59 classes and background",
        task="segment",
        classes=60,
        sizes={"train": 4_998, "val": 5_105},
        tree="""
VOCdevkit/VOC2010/
├── JPEGImages/2008_000002.jpg …
├── SegmentationClassContext/2008_000002.png …       0 background, 1 to 59 in alphabetical order
└── ImageSets/SegmentationContext/train.txt, val.txt   or those of ImageSets/Main
or with the masks of the release instead:
├── trainval/2008_000002.mat …
└── labels.txt                                       "1: accordion" … , 459 of them
""",
        marks=("JPEGImages", "SegmentationClassContext|trainval"),
        folders=("VOC2010", "VOCdevkit/VOC2010"),
        source="the PASCAL VOC 2010 and PASCAL-Context pages",
        licence="pictures under Flickr's terms of use",
        read=read.context60,
        ignore=IGNORE,
        protocol={**_MIOU, "rule": "background is a class"},
    ),
    Spec(
        name="ade20k",
        title="ADE20K, the 150 classes of the scene parsing challenge",
        task="segment",
        classes=150,
        sizes={"train": 20_210, "val": 2_000},
        tree="""
ADEChallengeData2016/
├── images/training/ADE_train_00000001.jpg …
├── images/validation/ADE_val_00000001.jpg …
├── annotations/training/ADE_train_00000001.png …
├── annotations/validation/ADE_val_00000001.png …
└── objectInfo150.txt
""",
        marks=("images/validation", "annotations/validation"),
        folders=("ADEChallengeData2016", "ade/ADEChallengeData2016", "ade20k/ADEChallengeData2016"),
        source="the scene parsing benchmark page of MIT CSAIL",
        licence="BSD-3-Clause for the labels; pictures for research only",
        read=read.ade20k,
        ignore=IGNORE,
        protocol=_MIOU,
    ),
    Spec(
        name="coco-stuff",
        title="COCO-Stuff 164k, 171 classes",
        task="segment",
        classes=171,
        tree=_COCO_TREE,
        read=read.coco_stuff,
        ignore=IGNORE,
        protocol=_MIOU,
        **_COCO,  # type: ignore[arg-type]
    ),
    Spec(
        name="coco-object",
        title="COCO-Object, 80 things and background, from the masks of COCO-Stuff",
        task="segment",
        classes=81,
        tree=_COCO_TREE,
        read=read.coco_object,
        ignore=IGNORE,
        protocol={**_MIOU, "rule": "background is a class: stuff and what is unlabelled, as in GroupViT"},
        **_COCO,  # type: ignore[arg-type]
    ),
    Spec(
        name="cityscapes",
        title="Cityscapes, fine annotations",
        task="segment",
        classes=19,
        sizes={"train": 2_975, "val": 500},
        tree="""
cityscapes/
├── leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png …
├── leftImg8bit/val/…
├── gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png …
└── gtFine/val/…
""",
        marks=("leftImg8bit", "gtFine"),
        folders=("cityscapes",),
        source="the Cityscapes site, after registration",
        licence="research, non-commercial",
        read=read.cityscapes,
        ignore=IGNORE,
        protocol=_MIOU,
    ),
    Spec(
        name="nyuv2",
        title="NYU Depth V2, the frames of the depth literature (BTS, AdaBins, DINOv2)",
        task="depth",
        classes=0,
        sizes={"train": 24_231, "test": 654},
        tree="""
nyu_depth_v2/
├── sync/kitchen_0028b/rgb_00045.jpg, sync_depth_00045.png …
├── official_splits/test/bathroom/rgb_00045.jpg, sync_depth_00045.png …
├── nyudepthv2_train_files_with_gt.txt      lines "picture depth focal"; or nyu_train.txt
└── nyudepthv2_test_files_with_gt.txt       or nyu_test.txt
or all scenes beside the lists, without the folders sync and official_splits/test
""",
        marks=("nyudepthv2_train_files_with_gt.txt|nyu_train.txt", "nyudepthv2_test_files_with_gt.txt|nyu_test.txt"),
        folders=("nyu_depth_v2", "nyu"),
        source="the preparation steps and lists of BTS, or those of the Monocular-Depth-Estimation-Toolbox",
        licence="none stated",
        read=read.nyuv2,
        hold_out=True,
        depth=_NYU,
        protocol={**_RMSE, "depth": "16-bit millimetres"},
    ),
    Spec(
        name="nyuv2-labelled",
        title="NYU Depth V2, the labelled pictures in their official split",
        task="depth",
        classes=0,
        sizes={"train": 795, "test": 654},
        tree="""
nyu_depth_v2/
└── official_splits/
    ├── train/bathroom/rgb_00003.jpg, sync_depth_00003.png …
    └── test/bathroom/rgb_00045.jpg, sync_depth_00045.png …
""",
        marks=("official_splits/train", "official_splits/test"),
        folders=("nyu_depth_v2", "nyu"),
        source="the NYU Depth V2 page, nyu_depth_v2_labeled.mat unpacked with the script of BTS",
        licence="none stated",
        read=read.nyuv2_labelled,
        hold_out=True,
        depth=_NYU,
        protocol={**_RMSE, "depth": "16-bit millimetres"},
    ),
    Spec(
        name="kitti",
        title="KITTI, Eigen split with the annotated depths",
        task="depth",
        classes=0,
        sizes={"train": 23_158, "test": 652},
        tree="""
kitti/
├── 2011_09_26/2011_09_26_drive_0001_sync/image_02/data/0000000069.png …   or below raw or input
├── data_depth_annotated/…/2011_09_26_drive_0001_sync/proj_depth/groundtruth/image_02/0000000069.png …
│                                           with train and val between or without; or gt_depth
├── eigen_train_files_with_gt.txt           lines "picture depth focal"; or kitti_eigen_train.txt
└── eigen_test_files_with_gt.txt            or kitti_eigen_test.txt
""",
        marks=(
            "eigen_train_files_with_gt.txt|kitti_eigen_train.txt",
            "eigen_test_files_with_gt.txt|kitti_eigen_test.txt",
        ),
        folders=("kitti", "kitti_dataset"),
        source="the KITTI site (raw data and annotated depths), and the lists of BTS",
        licence="CC BY-NC-SA 3.0",
        read=read.kitti,
        hold_out=True,
        depth=DepthRules(1e-3, 80, "garg", (352, 1216)),
        protocol={**_RMSE, "depth": "16-bit, 256 to the metre"},
    ),
]
