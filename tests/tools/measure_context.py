"""What the context of a whole image gives against independent tiles, at several sizes, with pretrained weights.

`python tests/tools/measure_context.py CAMVID_TRAIN.tar CAMVID_TEST.tar PHOTOS.tar --images 60`

- CamVid enlarged 1 to 4 times, and mosaics of 1 to 4² of its images: a linear classifier of patches, fitted to features
  of the same kind as it is tested on; mIoU over the patches' central pixels.
- Photos enlarged, and in mosaics: the mean of a photo's patches looks for the photo among those of all photos as they
  are (256 px); the share that finds itself first, and the mean cosine.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tarfile
from collections.abc import Callable
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchmetrics.functional.segmentation import mean_iou

import veca
from veca.images import fit_image, normalize, to_tensor

CLASSES, IGNORED, PATCH = 11, 255, 16


def read_shard(path: str, count: int) -> tuple[list[Image.Image], list[Tensor]]:
    """The first images of a shard, and their label maps if it has them."""
    images, labels = {}, {}
    with tarfile.open(path) as shard:
        for member in islice(shard, 2 * count):
            file = shard.extractfile(member)
            if file is None:
                continue
            data, (name, _, kind) = file.read(), member.name.partition(".")
            if kind == "seg.png":
                labels[name] = torch.from_numpy(np.array(Image.open(io.BytesIO(data)))).long()
            else:
                images[name] = Image.open(io.BytesIO(data)).convert("RGB")
    names = list(images)[:count]
    return [images[name] for name in names], [labels[name] for name in names if name in labels]


def features(model: veca.Veca, image: Tensor) -> Tensor:
    """(D, rows, columns) of an image (3, height, width)."""
    return model(image[None]).feature_map[0]


def features_of_tiles(model: veca.Veca, image: Tensor, side: int) -> Tensor:
    """The same, of tiles that know nothing of each other; they have at most `side` pixels a side."""
    rows = [
        torch.cat([features(model, tile) for tile in row.split(side, dim=2)], dim=2) for row in image.split(side, dim=1)
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


def linear_miou(train: list[tuple[Tensor, Tensor]], test: list[tuple[Tensor, Tensor]]) -> float:
    """MIoU of a linear classifier of patches, fitted by L-BFGS; both are maps (D, …) and labels (…)."""
    x, y = (torch.cat(parts) for parts in zip(*((f.flatten(1).T, t.flatten()) for f, t in train), strict=True))
    chosen = torch.nonzero(y != IGNORED)[:, 0]
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))[:60_000]]
    x, y = x[chosen], y[chosen]
    mean, std = x.mean(0), x.std(0) + 1e-6
    weight = torch.zeros(CLASSES, x.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(F.linear((x - mean) / std, weight[:, :-1], weight[:, -1]), y)
        value = value + 1e-4 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    guesses, truths = [], []
    for f, t in test:
        guess = F.linear((f.flatten(1).T - mean) / std, weight[:, :-1], weight[:, -1]).argmax(1).detach()
        labelled = t.flatten() != IGNORED
        guesses.append(guess[labelled])
        truths.append(t.flatten()[labelled])
    result = mean_iou(torch.cat(guesses)[None], torch.cat(truths)[None], CLASSES, input_format="index")
    return round(100 * float(result.mean()), 1)


def measure_camvid(model: veca.Veca, train_shard: str, test_shard: str, count: int, tile: int) -> None:
    splits = [read_shard(path, count) for path in (train_shard, test_shard)]
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "whole": lambda image: features(model, image),
        "tiles": lambda image: features_of_tiles(model, image, tile),
    }
    for factor in (1, 2, 4):
        scores = {}
        for kind, extract in kinds.items():
            data = []
            for images, labels in splits:
                maps = (extract(enlarge(image, factor)) for image in images)
                data.append([(f, patch_labels(t, f.shape[1:])) for f, t in zip(maps, labels, strict=True)])
            scores[kind] = linear_miou(*data)
        print(json.dumps({"CamVid enlarged": factor, "tile": tile, "mIoU": scores}), flush=True)
    for per_side in (1, 2, 4):
        data = []
        for images, labels in splits:
            tensors, pairs = [enlarge(image, 1) for image in images], []
            grid = tensors[0].shape[1] // PATCH, tensors[0].shape[2] // PATCH
            for members in mosaics(len(images), per_side, 0):
                maps = features(model, tile_together([tensors[i] for i in members], per_side))
                pairs.append((maps, tile_together([patch_labels(labels[i], grid) for i in members], per_side)))
            data.append(pairs)
        print(json.dumps({"CamVid mosaic": f"{per_side}×{per_side}", "mIoU": linear_miou(*data)}), flush=True)


def retrieval(queries: Tensor, keys: Tensor) -> dict[str, float]:
    """Share of rows that find the row of the same number first, and their mean cosine."""
    queries, keys = (F.normalize(x - keys.mean(0), dim=1) for x in (queries, keys))
    similarity = queries @ keys.T
    first = (similarity.argmax(1) == torch.arange(len(keys))).float().mean()
    return {"found %": round(100 * float(first), 1), "cosine": round(float(similarity.diagonal().mean()), 3)}


def measure_photos(model: veca.Veca, shard: str, count: int, tile: int) -> None:
    images = [enlarge(image, 1) for image in read_shard(shard, count)[0]]
    alone = torch.stack([features(model, image).mean((1, 2)) for image in images])
    for factor in (2, 4):
        large = [F.interpolate(image[None], scale_factor=factor, mode="bicubic")[0] for image in images]
        rows = {
            "whole": torch.stack([features(model, image).mean((1, 2)) for image in large]),
            "tiles": torch.stack([features_of_tiles(model, image, tile).mean((1, 2)) for image in large]),
        }
        scores = {kind: retrieval(x, alone) for kind, x in rows.items()}
        print(json.dumps({"photos enlarged": factor, "tile": tile, **scores}), flush=True)
    for per_side in (2, 4, 8):
        found = torch.empty_like(alone)
        side = images[0].shape[1] // PATCH
        for members in mosaics(len(images), per_side, 0):
            maps = features(model, tile_together([images[i] for i in members], per_side))
            means = maps.unfold(1, side, side).unfold(2, side, side).mean((-2, -1)).flatten(1).T
            found[torch.tensor(members)] = means
        print(json.dumps({"photos mosaic": f"{per_side}×{per_side}", **retrieval(found, alone)}), flush=True)


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
    with torch.no_grad():
        measure_camvid(model, arguments.train, arguments.test, arguments.images, arguments.tile)


if __name__ == "__main__":
    main()
