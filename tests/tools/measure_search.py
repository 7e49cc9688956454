"""How fast and how right `veca search` is, with the pretrained weights: python tests/tools/measure_search.py DATA WORK.

DATA has coco256-mini.tar, coco256-val.tar and pets-trainval.tar, or is a folder of images, of which time and recall are
measured alone; the indices are made in WORK, and used again.

- time: a query in a process that runs, and a command from its start to its end
- recall: for 200 images of the index, the share of the 20 nearest by float64 that a query finds, at several budgets
- duplicates: 200 images re-encoded, halved, cropped and flipped, beside the others: precision and recall of pairs
- regions: a part of an image is pasted into another at 0.7 to 1.3 times its size and saved as JPEG; by its box the
  image it is of is looked for among 1,000, by several features and cells: the share found first, and among 20
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import veca
from veca.embed import EmbedSettings
from veca.images import normalize, to_tensor
from veca.search import SearchIndex, update_index

SHARDS = ("coco256-mini.tar", "coco256-val.tar", "pets-trainval.tar")
SETTINGS = EmbedSettings(size=224, cores=64, dense=True, cells=4)
TOP, ASKED = 20, 200


def read_shard(path: Path, count: int) -> dict[str, Image.Image]:
    """The first images of a shard."""
    with tarfile.open(path) as shard:
        members = (member for member in shard if member.name.endswith(".webp"))
        files = ((member.name, shard.extractfile(member)) for member in islice(members, count))
        return {name: Image.open(io.BytesIO(file.read())).convert("RGB") for name, file in files if file}


def asked_images(data: Path, work: Path) -> list[Path]:
    """Files of images that are in the index, of all shards alike, or of the folder."""
    if files := sorted(data.glob("*.jpg")):
        return files[:: max(1, len(files) // ASKED)][:ASKED]
    folder, each = work / "asked", ASKED // len(SHARDS) + 1
    folder.mkdir(parents=True, exist_ok=True)
    for shard in SHARDS:
        for name, image in read_shard(data / shard, each).items():
            if not (path := folder / f"{shard}-{Path(name).stem}.png").exists():
                image.save(path)
    return sorted(folder.iterdir())[:ASKED]


def make_index(sources: list[Path], out: Path, settings: EmbedSettings) -> SearchIndex:
    model = veca.load("veca_tiny")
    report = update_index(sources, out, model=model, model_name="veca_tiny", settings=settings)
    added = f"{report.added:,} added in {report.seconds:.0f} s"
    print(f"{out}: {report.images:,} images, {added}; {size_of(out / 'tables') / report.images / 1e3:.1f} kB each")
    return SearchIndex.open(out, model=model)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def milliseconds(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered) * 1e3:.1f} ms median, {ordered[int(len(ordered) * 0.95)] * 1e3:.1f} ms at 95 %"


def measure_time(index: SearchIndex, paths: list[Path]) -> None:
    for cores in (64, 32, 8):
        for what, box in (("image", None), ("region", (40, 40, 120, 120))):
            index.query(paths[0], TOP, cores=cores, box=box)
            seconds = []
            for path in paths[:50]:
                began = time.perf_counter()
                index.query(path, TOP, cores=cores, box=box)
                seconds.append(time.perf_counter() - began)
            print(f"query by {what}, C = {cores}: {milliseconds(seconds)}")
    for rows, what in ((index._tables.vectors, "vectors"), (index._tables.regions, "regions")):
        seconds = []
        for row in range(50):
            began = time.perf_counter()
            index._rank(rows, torch.from_numpy(index._tables.vectors[row].astype(np.float32)), TOP)
            seconds.append(time.perf_counter() - began)
        print(f"of it, scan of {rows.size // rows.shape[-1]:,} {what}: {milliseconds(seconds)}")
    began = time.perf_counter()
    command = [sys.executable, "-m", "veca", "search", "query", str(paths[0]), str(index.folder), "--cores", "8"]
    subprocess.run([*command, "--device", "cpu"], check=True, capture_output=True)
    print(f"the command, from start to end: {time.perf_counter() - began:.1f} s")


def measure_recall(index: SearchIndex, paths: list[Path]) -> None:
    vectors = index._tables.vectors.astype(np.float64)
    names, found = index._tables.images["path"].to_pylist(), dict[int, list[list[str]]]()
    recall = []
    for path in paths:
        for cores in (64, 32, 8):
            found.setdefault(cores, []).append([match.path for match in index.query(path, TOP, cores=cores)])
        query = index.embed_query(path).numpy().astype(np.float64)
        exact = {names[row] for row in np.argsort(-(vectors @ query), kind="stable")[:TOP]}
        recall.append(len(exact & set(found[64][-1])) / TOP)
    print(f"recall@{TOP} against exact search in float64: {np.mean(recall):.4f}, least {min(recall):.2f}")
    for cores, lists in found.items():
        firsts = zip(paths, (some[0] for some in lists), strict=True)
        first = np.mean([asked.stem.rpartition(".tar-")[2] == Path(path).stem for asked, path in firsts])
        pairs = zip(lists, found[64], strict=True)
        same = np.mean([len(set(some) & set(others)) / TOP for some, others in pairs])
        print(f"queries at C = {cores}: the image itself first {first:.3f}, of the {TOP} of C = 64 found {same:.3f}")


def alter(image: Image.Image) -> Iterator[tuple[str, Image.Image]]:
    width, height = image.size
    data = io.BytesIO()
    image.save(data, "JPEG", quality=30)
    yield "JPEG, quality 30", Image.open(data).convert("RGB")
    yield "half the size", image.resize((width // 2, height // 2), Image.Resampling.BICUBIC)
    yield "centre, 80 %", image.crop((width // 10, height // 10, width - width // 10, height - height // 10))
    yield "flipped", image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def write_altered(data: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """Write altered copies of images of the index; by path of these and of their images: which image, what was done."""
    shard, origins = data / "coco256-val.tar", dict[str, tuple[str, str]]()
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in read_shard(shard, ASKED).items():
        origins[f"{shard}/{name}"] = (name, "")
        for number, (kind, altered) in enumerate(alter(image)):
            path = folder / f"{Path(name).stem}-{number}.png"
            if not path.exists():
                altered.save(path)
            origins[str(path)] = (name, kind)
    return origins


def measure_duplicates(index: SearchIndex, origins: dict[str, tuple[str, str]]) -> None:
    names = [str(name) for name in index._tables.images["path"].to_pylist()]
    vectors = index._tables.vectors.astype(np.float32)
    rows, kinds = {name: row for row, name in enumerate(names)}, sorted({kind for _, kind in origins.values() if kind})
    originals = {name: path for path, (name, kind) in origins.items() if not kind}
    cosines: dict[str, list[float]] = {kind: [] for kind in kinds}
    for path, (name, kind) in origins.items():
        if kind:
            cosines[kind].append(float(vectors[rows[path]] @ vectors[rows[originals[name]]]))
    print(f"threshold,groups,precision,{','.join(kinds)},other pairs")
    for threshold in (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98):
        groups = list(index.duplicates(threshold))
        pairs = [(group.images[0].path, match.path) for group in groups for match in group.images[1:]]
        # Of pairs of which neither is one of the 200 or made of them nothing is known: photos taken in a row are alike.
        images = [[origins[path][0] if path in origins else "" for path in pair] for pair in pairs]
        known = [(a, b) for a, b in images if a or b]
        precision = sum(a == b for a, b in known) / max(1, len(known))
        recalls = ",".join(f"{np.mean([cosine >= threshold for cosine in cosines[kind]]):.3f}" for kind in kinds)
        print(f"{threshold},{len(groups)},{precision:.3f},{recalls},{len(pairs) - len(known)}")


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@torch.inference_mode()
def measure_regions(data: Path, work: Path, count: int = 1000) -> None:
    folder = work / "gallery"
    folder.mkdir(exist_ok=True)
    shown = read_shard(data / "coco256-mini.tar", count)
    for name, image in shown.items():
        if not (path := folder / f"{Path(name).stem}.png").exists():
            image.save(path)
    index = make_index(
        [folder], work / "regions", EmbedSettings(size=256, fit="stretch", cores=32, dense=True, cells=8)
    )
    rows = {Path(str(path)).stem: row for row, path in enumerate(index._tables.images["path"].to_pylist())}
    cells = index._tables.regions.astype(np.float32).reshape(count, 8, 8, -1)
    galleries = {"whole image": index._tables.vectors.astype(np.float32)[:, None]}
    for side in (1, 2, 4, 8):
        means = cells.reshape(count, side, 8 // side, side, 8 // side, -1).mean((2, 4))
        galleries[f"{side} × {side} cells"] = unit(means.reshape(count, side**2, -1))
    rng, images, ranks = random.Random(0), list(shown.items()), dict[tuple[str, str], list[int]]()
    for name, image in rng.sample(images, ASKED):
        side, host = int(256 * rng.uniform(0.3, 0.6)), rng.choice(images)[1].copy()
        x, y = rng.randrange(256 - side), rng.randrange(256 - side)
        pasted = int(side * rng.uniform(0.7, 1.3))
        left, top = rng.randrange(256 - pasted), rng.randrange(256 - pasted)
        host.paste(image.crop((x, y, x + side, y + side)).resize((pasted, pasted)), (left, top))
        file = io.BytesIO()
        host.save(file, "JPEG", quality=70)
        host = Image.open(file).convert("RGB")
        region = host.crop((left, top, left + pasted, top + pasted)).resize((256, 256), Image.Resampling.BICUBIC)
        alone, around = (index.model(normalize(to_tensor(each))[None], cores=32) for each in (region, host))
        edges = slice(top // 16, -(-(top + pasted) // 16)), slice(left // 16, -(-(left + pasted) // 16))
        queries = {
            "global feature of the region": alone.cls[0],
            "patches of the region alone": alone.patches[0].mean(0),
            "patches of the region in its image": around.feature_map[0][:, *edges].mean((1, 2)),
        }
        for query, feature in queries.items():
            for gallery, features in galleries.items():
                if gallery == "whole image" or "patches" in query:
                    scores = (features @ unit(feature.numpy())).max(1)
                    ranks.setdefault((query, gallery), []).append(int((scores > scores[rows[Path(name).stem]]).sum()))
    print(f"query,compared with,kB per image,first,among {TOP}")
    for (query, gallery), places in ranks.items():
        first, among = (np.mean([place < limit for place in places]) for limit in (1, TOP))
        size = galleries[gallery].shape[1] * galleries[gallery].shape[2] * 2 / 1e3
        print(f"{query},{gallery},{size:.1f},{first:.3f},{among:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", choices=("time", "recall", "duplicates", "regions"))
    args = parser.parse_args()
    shards = (args.data / SHARDS[0]).exists()
    if args.only != "regions":
        origins = write_altered(args.data, args.work / "altered") if shards else {}
        sources = [*(args.data / shard for shard in SHARDS), args.work / "altered"] if shards else [args.data]
        index, paths = make_index(sources, args.work / "index", SETTINGS), asked_images(args.data, args.work)
        if args.only in (None, "time"):
            measure_time(index, paths)
        if args.only in (None, "recall"):
            measure_recall(index, paths)
        if shards and args.only in (None, "duplicates"):
            measure_duplicates(index, origins)
    if shards and args.only in (None, "regions"):
        measure_regions(args.data, args.work)


if __name__ == "__main__":
    main()
