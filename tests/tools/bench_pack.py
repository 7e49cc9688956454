"""Packs against batches of one shape and against padding: images per second, interleaved in one run.

`python tests/tools/bench_pack.py --model veca_base` on a GPU; `--device cpu --model veca_tiny --images 2` to try it.

- aspects: images of about 1024 patches (512 px) with the aspect ratios of COCO, against as many of 512 × 512 px
- sides: sides from 256 to 1024 px, against padding all to the largest
- training: forward and backward of the images of `aspects`, against as many of 512 × 512 px
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import veca
from veca.attention import use_kernel

ASPECTS = {(4, 3): 50, (3, 4): 25, (3, 2): 12, (2, 3): 8, (1, 1): 3, (16, 9): 2}
"""Of width and height, with their shares in COCO in percent, about."""


def grid_of(aspect: tuple[int, int], patches: int) -> tuple[int, int]:
    """(rows, columns) of about so many patches."""
    columns = (patches * aspect[0] / aspect[1]) ** 0.5
    return max(1, round(patches / columns)), max(1, round(columns))


def make_images(grids: list[tuple[int, int]], device: str) -> list[Tensor]:
    return [torch.randn(3, 16 * rows, 16 * columns, device=device) for rows, columns in grids]


def compare(calls: Mapping[str, Callable[[], object]], device: str, repeats: int) -> dict[str, float]:
    """Median milliseconds of each call, in turns after three calls of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 3):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if i >= 3:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def train_step(model: Callable[..., object], batch: object) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):  # type: ignore[attr-defined]
            out = model(batch, cores=64)
        (out.patches.float().square().mean() + out.cls.float().square().mean()).backward()  # type: ignore[attr-defined]
        model.zero_grad()  # type: ignore[attr-defined]

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="veca_base")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--mixes", type=int, default=4, help="packs, each of another mix, which take turns")
    parser.add_argument("--only", choices=["aspects", "sides", "training"], nargs="*")
    arguments = parser.parse_args()
    device, count, cores = arguments.device, arguments.images, arguments.cores
    torch.manual_seed(0)
    draw, kernel = random.Random(0), "triton" if device == "cuda" else "auto"
    model = veca.create_model(arguments.model, pretrained=False).to(device)
    fast = veca.optimize(model.eval()) if device == "cuda" else model.eval()
    wanted = arguments.only or ["aspects", "sides", "training"]

    def run(batch: object) -> object:
        with torch.inference_mode(), use_kernel(kernel):
            return fast(batch, cores)

    def in_turns(packs: list[veca.PackedImages], call: Callable[[object], object]) -> Callable[[], object]:
        order = iter(range(10**9))
        return lambda: call(packs[next(order) % len(packs)])

    def packs_of(grids: Callable[[], tuple[int, int]]) -> list[veca.PackedImages]:
        return [veca.pack(make_images([grids() for _ in range(count)], device)) for _ in range(arguments.mixes)]

    def share(packs: list[veca.PackedImages]) -> float:
        return statistics.mean(len(pack.pixels) for pack in packs) / (count * 1024)

    by_aspect = packs_of(lambda: grid_of(draw.choices(list(ASPECTS), list(ASPECTS.values()))[0], 1024))
    squares = torch.randn(count, 3, 512, 512, device=device)
    if "aspects" in wanted:
        times = compare({"same": lambda: run(squares), "pack": in_turns(by_aspect, run)}, device, arguments.repeats)
        rate = times["same"] / times["pack"] * share(by_aspect)
        print(json.dumps({"case": "aspects", "ms": times, "of_same_shape_by_patches": round(rate, 3)}), flush=True)
    if "sides" in wanted:
        sides = packs_of(lambda: (round(16 * 4 ** draw.random()), round(16 * 4 ** draw.random())))
        largest = torch.randn(count, 3, 1024, 1024, device=device)
        times = compare({"padded": lambda: run(largest), "pack": in_turns(sides, run)}, device, arguments.repeats)
        faster = round(times["padded"] / times["pack"], 3)
        print(json.dumps({"case": "sides", "ms": times, "times_padding": faster}), flush=True)
        del largest
    if "training" in wanted:
        compiled = torch.compile(model.train(), dynamic=True) if device == "cuda" else model.train()
        with use_kernel(kernel):
            steps = {
                "same": train_step(compiled, squares),
                "pack": in_turns(by_aspect, lambda pack: train_step(compiled, pack)()),
            }
            times = compare(steps, device, arguments.repeats)
        rate = times["same"] / times["pack"] * share(by_aspect)
        print(json.dumps({"case": "training", "ms": times, "of_same_shape_by_patches": round(rate, 3)}), flush=True)


if __name__ == "__main__":
    main()
