"""Class names of published datasets, and the mapping of the values in their masks to train ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from veca.data.datasets.base import IGNORE
from veca.errors import ArgumentError

TrainIds = NDArray[np.int16]
"""The train id of each value of a mask; -1 for a value that must not occur."""


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", " ").split(",") if part.strip())


VOC = _split_names("""
aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, diningtable, dog, horse, motorbike, person,
pottedplant, sheep, sofa, train, tvmonitor
""")

CONTEXT = _split_names("""
background, aeroplane, bag, bed, bedclothes, bench, bicycle, bird, boat, book, bottle, building, bus, cabinet, car,
cat, ceiling, chair, cloth, computer, cow, cup, curtain, dog, door, fence, floor, flower, food, grass, ground,
horse, keyboard, light, motorbike, mountain, mouse, person, plate, platform, pottedplant, road, rock, sheep,
shelves, sidewalk, sign, sky, snow, sofa, table, track, train, tree, truck, tvmonitor, wall, water, window, wood
""")
"""The 59 most frequent of 459 labels, in alphabetical order, after the background."""

CITYSCAPES = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
"""The evaluated ids, in the order of the train ids. The other ids, up to 33, are ignored."""

_COCO_LABELS = _split_names("""
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, street sign, stop
sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, hat, backpack,
umbrella, shoe, eye glasses, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat,
baseball glove, skateboard, surfboard, tennis racket, bottle, plate, wine glass, cup, fork, knife, spoon, bowl,
banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed,
mirror, dining table, window, desk, toilet, door, tv, laptop, mouse, remote, keyboard, cell phone, microwave, oven,
toaster, sink, refrigerator, blender, book, clock, vase, scissors, teddy bear, hair drier, toothbrush, hair brush,
banner, blanket, branch, bridge, building-other, bush, cabinet, cage, cardboard, carpet, ceiling-other,
ceiling-tile, cloth, clothes, clouds, counter, cupboard, curtain, desk-stuff, dirt, door-stuff, fence, floor-marble,
floor-other, floor-stone, floor-tile, floor-wood, flower, fog, food-other, fruit, furniture-other, grass, gravel,
ground-other, hill, house, leaves, light, mat, metal, mirror-stuff, moss, mountain, mud, napkin, net, paper,
pavement, pillow, plant-other, plastic, platform, playingfield, railing, railroad, river, road, rock, roof, rug,
salad, sand, sea, shelf, sky-other, skyscraper, snow, solid-other, stairs, stone, straw, structural-other, table,
tent, textile-other, towel, tree, vegetable, wall-brick, wall-concrete, wall-other, wall-panel, wall-stone,
wall-tile, wall-wood, water-other, waterdrops, window-blind, window-other, wood
""")
"""COCO's 182 labels; masks hold their numbers, counted from 0."""
_THINGS = 91
"""How many of them are things."""
_UNUSED = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83, 91})
"""Labels that no image has, counted from 1 as COCO does."""
_USED = [i for i in range(len(_COCO_LABELS)) if i + 1 not in _UNUSED]

COCO_STUFF = tuple(_COCO_LABELS[i] for i in _USED)
COCO_OBJECT = ("background", *(_COCO_LABELS[i] for i in _USED if i < _THINGS))


def make_train_ids(pairs: Iterable[tuple[int, int]], size: int = 256) -> TrainIds:
    """Map mask values to train ids by pairs; other values must not occur."""
    train_ids = np.full(size, -1, np.int16)
    for value, train_id in pairs:
        train_ids[value] = train_id
    return train_ids


def identity(classes: int) -> TrainIds:
    """Map masks that hold train ids already, and 255 for ignored pixels."""
    return make_train_ids([*((i, i) for i in range(classes)), (255, IGNORE)])


def ade20k_ids() -> TrainIds:
    """1 to 150 become 0 to 149; 0 is everything else and ignored."""
    return make_train_ids([(0, IGNORE), *((i, i - 1) for i in range(1, 151))])


def cityscapes_ids() -> TrainIds:
    ids = dict.fromkeys(range(34), IGNORE) | {value: i for i, value in enumerate(CITYSCAPES)}
    return make_train_ids(ids.items())


def coco_stuff_ids() -> TrainIds:
    """The 171 used labels in their order; unlabelled pixels are ignored."""
    ids = dict.fromkeys((*range(len(_COCO_LABELS)), 255), IGNORE) | {value: i for i, value in enumerate(_USED)}
    return make_train_ids(ids.items())


def coco_object_ids() -> TrainIds:
    """The 80 things are 1 to 80; stuff and unlabelled pixels are background, which is a class: nothing is ignored."""
    ids = dict.fromkeys((*range(len(_COCO_LABELS)), 255), 0)
    return make_train_ids((ids | {value: i + 1 for i, value in enumerate(_USED) if value < _THINGS}).items())


def context_ids(labels: dict[int, str]) -> TrainIds:
    """Map the numbers of the 459 labels; 0 and all but the 59 classes are background."""
    index = {name: i for i, name in enumerate(CONTEXT)}
    if missing := set(CONTEXT[1:]) - set(labels.values()):
        raise ArgumentError(f"the list of labels has no {', '.join(sorted(missing))}")
    return make_train_ids([(0, 0), *((value, index.get(name, 0)) for value, name in labels.items())], max(labels) + 1)
