"""What the context of a whole image gives against independent tiles, at several sizes, with pretrained weights.

`python tests/tools/measure_context.py CAMVID_TRAIN.tar CAMVID_TEST.tar PHOTOS.tar --images 60`

- CamVid enlarged, and mosaics of its images: a linear classifier of patches, fitted to features of the same kind as it
  is tested on; mIoU over the central pixels of the patches.
- Photos enlarged, and in mosaics: the mean of a photo's patches looks for the photo among those of all photos as they
  are (256 px); the share that finds itself first, and the mean cosine.

The tiles of a mosaic are its images. Prints the two tables of results/probes.md as CSV.
"""

from __future__ import annotations

import argparse
import io
import random
import tarfile
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import veca
from veca.heads.metrics import Confusion
from veca.images import fit_image, normalize, to_tensor

CLASSES, IGNORED, PATCH = 11, 255, 16
FIT_PATCHES = 1000
"""Of an image, to fit a classifier to."""


def read_shard(path: str, count: int) -> tuple[list[Image.Image], list[Tensor]]:
    """Images of a shard, evenly spaced, and their label maps if it has them."""
    images, labels = dict[str, bytes](), dict[str, bytes]()
    with tarfile.open(path) as shard:
        for member in shard:
            if (file := shard.extractfile(member)) is not None:
                name, _, kind = member.name.partition(".")
                (labels if kind == "seg.png" else images)[name] = file.read()
    names = list(images)
    names = names if count >= len(names) else [names[i * len(names) // count] for i in range(count)]
    maps = [Image.open(io.BytesIO(labels[name])) for name in names if name in labels]
    opened = [Image.open(io.BytesIO(images[name])).convert("RGB") for name in names]
    return opened, [torch.from_numpy(np.array(each)).long() for each in maps]


def features(model: veca.Veca, image: Tensor) -> Tensor:
    """(D, rows, columns) of an image (3, height, width)."""
    return model(image[None]).feature_map[0]


def features_of_tiles(model: veca.Veca, image: Tensor, side: int) -> Tensor:
    """The same, of tiles that know nothing of each other: as equal as patches allow, sides of at most `side` pixels."""
    parts = [-(-length // side) for length in image.shape[1:]]
    sizes = [
        [PATCH * (length // PATCH * (i + 1) // count - length // PATCH * i // count) for i in range(count)]
        for length, count in zip(image.shape[1:], parts, strict=True)
    ]
    rows = [
        torch.cat([features(model, tile) for tile in row.split(sizes[1], dim=2)], dim=2)
        for row in image.split(sizes[0], dim=1)
    ]
    return torch.cat(rows, dim=1)


def enlarge(image: Image.Image, factor: int) -> Tensor:
    """A Pillow image enlarged to sides that are multiples of a patch, normalised."""
    width, height = (factor * side // PATCH * PATCH for side in image.size)
    return normalize(to_tensor(fit_image(image, (height, width), fit="stretch")))


def patch_labels(label: Tensor, grid: tuple[int, int]) -> Tensor:
    """The class at the centre of each patch."""
    return F.interpolate(label[None, None].float(), grid, mode="nearest-exact")[0, 0].long()


def mosaics(count: int, per_side: int, seed: int) -> list[list[int]]:
    """Numbers of images in random groups of `per_side`²; the last of a group that is not full come again."""
    order = random.Random(seed).sample(range(count), count)
    size = per_side**2
    return [(order[i : i + size] + order * size)[:size] for i in range(0, count, size)]


def tile_together(tensors: list[Tensor], per_side: int) -> Tensor:
    return torch.cat([torch.cat(tensors[i : i + per_side], -1) for i in range(0, len(tensors), per_side)], -2)


Pairs = Iterable[tuple[Tensor, Tensor]]
"""Features (D, rows, columns) and labels (rows, columns) of images, one after the other."""


def fit_classifier(pairs: Pairs) -> Callable[[Tensor], Tensor]:
    """A linear classifier of patches, by L-BFGS, of up to `FIT_PATCHES` patches of each image."""
    random, features, labels = torch.Generator().manual_seed(0), [], []
    for f, t in pairs:
        chosen = torch.nonzero(t.flatten() != IGNORED)[:, 0]
        chosen = chosen[torch.randperm(len(chosen), generator=random)[:FIT_PATCHES]]
        features.append(f.flatten(1).T[chosen])
        labels.append(t.flatten()[chosen])
    x, y = torch.cat(features), torch.cat(labels)
    mean, std = x.mean(0), x.std(0) + 1e-6
    x = (x - mean) / std
    weight = torch.zeros(CLASSES, x.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(F.linear(x, weight[:, :-1], weight[:, -1]), y) + 1e-4 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    weight.requires_grad_(False)
    return lambda f: F.linear((f.flatten(1).T - mean) / std, weight[:, :-1], weight[:, -1]).argmax(1)


def count_confusions(train: Pairs, test: Pairs) -> Tensor:
    """Confusions (images, classes, classes) of the test images by a classifier fitted to the others."""
    classify, counts = fit_classifier(train), []
    for f, t in test:
        confusion = Confusion(CLASSES, IGNORED)
        confusion.update(classify(f), t.flatten())
        counts.append(confusion.counts)
    return torch.stack(counts)


def miou(counts: Tensor) -> Tensor:
    """MIoU in percent of confusions (..., images, classes, classes)."""
    counts = counts.sum(-3).double()
    right = counts.diagonal(dim1=-2, dim2=-1)
    return 100 * (right / (counts.sum(-1) + counts.sum(-2) - right)).nanmean(-1)


def write_camvid_row(name: str, size: str, whole: Tensor, others: Tensor) -> None:
    """MIoU of both, and their difference with its 95 % interval over test images, by 2,000 resamplings of pairs."""
    drawn = torch.randint(len(whole), (2000, len(whole)), generator=torch.Generator().manual_seed(0))
    low, high = (miou(whole[drawn]) - miou(others[drawn])).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    scores = float(miou(whole)), float(miou(others))
    gain = f"{scores[0] - scores[1]:+.1f} ({low:+.1f} to {high:+.1f})"
    print(f"{name},{size},{scores[0]:.1f},{scores[1]:.1f},{gain}".replace("-", "−"), flush=True)


def measure_camvid(model: veca.Veca, train_shard: str, test_shard: str, count: int, tile: int) -> None:
    print("CamVid,px,whole,tiles,difference (95 %)", flush=True)
    splits = [read_shard(path, count) for path in (train_shard, test_shard)]

    def maps(split: int, extract: Callable[[Tensor], Tensor], factor: int = 1) -> Pairs:
        for image, label in zip(*splits[split], strict=True):
            with torch.inference_mode():
                found = extract(enlarge(image, factor))
            yield found, patch_labels(label, (found.shape[1], found.shape[2]))

    def maps_of_mosaics(split: int, per_side: int) -> Pairs:
        """Of the images in mosaics, in the order of the split."""
        images, labels = splits[split]
        tensors, found = [enlarge(image, 1) for image in images], dict[int, Tensor]()
        rows, columns = tensors[0].shape[1] // PATCH, tensors[0].shape[2] // PATCH
        for members in mosaics(len(images), per_side, 0):
            with torch.inference_mode():
                whole = features(model, tile_together([tensors[i] for i in members], per_side))
            for place, i in enumerate(members):
                top, left = place // per_side * rows, place % per_side * columns
                found[i] = whole[:, top : top + rows, left : left + columns].clone()
        return ((found[i], patch_labels(label, (rows, columns))) for i, label in enumerate(labels))

    def extract_whole(image: Tensor) -> Tensor:
        return features(model, image)

    def extract_tiles(image: Tensor) -> Tensor:
        return features_of_tiles(model, image, tile)

    for factor in (2, 4):
        kinds = [
            count_confusions(*(maps(i, extract, factor) for i in (0, 1))) for extract in (extract_whole, extract_tiles)
        ]
        height, width = enlarge(splits[0][0][0], factor).shape[1:]
        write_camvid_row(f"enlarged {factor} times", f"{width} × {height}", *kinds)
    alone = count_confusions(maps(0, extract_whole), maps(1, extract_whole))
    for per_side in (2, 4):
        height, width = (per_side * side for side in enlarge(splits[0][0][0], 1).shape[1:])
        together = count_confusions(maps_of_mosaics(0, per_side), maps_of_mosaics(1, per_side))
        write_camvid_row(f"mosaic of {per_side**2} images", f"{width} × {height}", together, alone)


def write_photo_row(name: str, side: int, whole: Tensor, tiles: Tensor, keys: Tensor) -> None:
    """The share of photos that are found first by their features, and the mean cosine, of both."""
    cells = list[str]()
    for queries in (whole, tiles):
        similarity = F.normalize(queries - keys.mean(0), dim=1) @ F.normalize(keys - keys.mean(0), dim=1).T
        first = (similarity.argmax(1) == torch.arange(len(keys))).float().mean()
        cells.append(f"{100 * float(first):.1f} ({float(similarity.diagonal().mean()):.3f})")
    print(",".join([name, str(side), *cells]), flush=True)


def measure_photos(model: veca.Veca, shard: str, count: int, tile: int) -> None:
    print("COCO,px,whole: % found (cosine),tiles: % found (cosine)", flush=True)
    images = [enlarge(image, 1) for image in read_shard(shard, count)[0]]
    alone = torch.stack([features(model, image).mean((1, 2)) for image in images])
    side = images[0].shape[1]
    for factor in (2, 4):
        kinds = list[list[Tensor]]([[], []])
        for image in images:
            large = F.interpolate(image[None], scale_factor=factor, mode="bicubic")[0]
            kinds[0].append(features(model, large).mean((1, 2)))
            kinds[1].append(features_of_tiles(model, large, tile).mean((1, 2)))
        write_photo_row(f"enlarged {factor} times", factor * side, *map(torch.stack, kinds), alone)  # type: ignore[arg-type]
    for per_side in (2, 4, 8):
        found, patches = torch.empty_like(alone), side // PATCH
        for members in mosaics(len(images), per_side, 0):
            maps = features(model, tile_together([images[i] for i in members], per_side))
            found[torch.tensor(members)] = (
                maps.unfold(1, patches, patches).unfold(2, patches, patches).mean((-2, -1)).flatten(1).T
            )
        write_photo_row(f"mosaic of {per_side**2} photos", per_side * side, found, alone, alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("photos")
    parser.add_argument("--model", default="veca_tiny")
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--photo-count", type=int, default=128)
    parser.add_argument("--tile", type=int, default=512)
    arguments = parser.parse_args()
    model = veca.load(arguments.model).eval()
    with torch.inference_mode():
        measure_photos(model, arguments.photos, arguments.photo_count, 256)
    measure_camvid(model, arguments.train, arguments.test, arguments.images, arguments.tile)


if __name__ == "__main__":
    main()
