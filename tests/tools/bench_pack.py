"""Packs against batches of one shape and against padding: images per second, interleaved in one run.

Packs run by one kernel for all images (`use_kernel("triton")`) and, as `by_kind`, as they do by default: a batch for
each kind of image, without CUDA graphs, as there are too many kinds to record.

`python tests/tools/bench_pack.py --model veca_base` on a GPU; `--device cpu --model veca_tiny --images 2` to try it.

- aspects: images of about 1024 patches (512 px) with the aspect ratios of COCO, against as many of 512 × 512 px
- sides: sides from 256 to 1024 px, against padding all to the largest
- training: forward and backward of the images of `aspects`, against as many of 512 × 512 px
"""

from __future__ import annotations

import argparse
import itertools
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


def compare(calls: Mapping[str, Callable[[], object]], device: str, repeats: int, warm: int = 3) -> dict[str, float]:
    """Median milliseconds of each call, in turns after `warm` calls of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + warm):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if i >= warm:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def train_step(model: Callable[..., object], batch: object) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):  # type: ignore[attr-defined]
            out = model(batch, cores=64)
        (out.patches.float().square().mean() + out.cls.float().square().mean()).backward()  # type: ignore[attr-defined]
        model.zero_grad()  # type: ignore[attr-defined]

    return step


class PackBench:
    """A model and packs of it; each method of `CASES` measures one comparison and returns it as a row."""

    def __init__(self, model: str, device: str, images: int = 32, cores: int = 64, repeats: int = 20, mixes: int = 4):
        torch.manual_seed(0)
        self.device, self.count, self.cores, self.repeats, self.mixes = device, images, cores, repeats, mixes
        self._random, self._kernel = random.Random(0), ("triton" if device == "cuda" else "auto")
        self.model = veca.create_model(model, pretrained=False).to(device)
        self.fast = self.unrecorded = self.model.eval()
        if device == "cuda":
            self.fast, self.unrecorded = (veca.optimize(self.model, cuda_graphs=graphs) for graphs in (True, False))
        self.by_aspect = self._packs(
            lambda: grid_of(self._random.choices(list(ASPECTS), list(ASPECTS.values()))[0], 1024)
        )
        self.squares = torch.randn(images, 3, 512, 512, device=device)

    def _packs(self, grid: Callable[[], tuple[int, int]]) -> list[veca.PackedImages]:
        """Packs of `mixes` mixes, which take turns."""
        return [veca.pack(make_images([grid() for _ in range(self.count)], self.device)) for _ in range(self.mixes)]

    def _run(self, batch: object) -> object:
        with torch.inference_mode(), use_kernel(self._kernel):
            return self.fast(batch, self.cores)

    def _run_by_kind(self, batch: object) -> object:
        with torch.inference_mode():
            return self.unrecorded(batch, self.cores)

    def _share(self, packs: list[veca.PackedImages]) -> float:
        """Patches of the packs relative to those of squares of 512 px."""
        return statistics.mean(len(pack.pixels) for pack in packs) / (self.count * 1024)

    def _compare(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        # Each mix is compiled and recorded before it is timed.
        return compare(calls, self.device, self.repeats, warm=2 * self.mixes + 1)

    def _packed(self, packs: list[veca.PackedImages]) -> dict[str, Callable[[], object]]:
        return {"pack": in_turns(packs, self._run), "by_kind": in_turns(packs, self._run_by_kind)}

    def aspects(self) -> dict[str, object]:
        calls = {"same": lambda: self._run(self.squares), **self._packed(self.by_aspect)}
        times = self._compare(calls)
        rate = times["same"] / times["pack"] * self._share(self.by_aspect)
        return {"case": "aspects", "ms": times, "of_same_shape_by_patches": round(rate, 3)}

    def sides(self) -> dict[str, object]:
        packs = self._packs(lambda: (round(16 * 4 ** self._random.random()), round(16 * 4 ** self._random.random())))
        largest = torch.randn(self.count, 3, 1024, 1024, device=self.device)
        times = self._compare({"padded": lambda: self._run(largest), **self._packed(packs)})
        return {"case": "sides", "ms": times, "times_padding": round(times["padded"] / times["pack"], 3)}

    def training(self) -> dict[str, object]:
        model = torch.compile(self.model.train(), dynamic=True) if self.device == "cuda" else self.model.train()
        with use_kernel(self._kernel):
            same = train_step(model, self.squares)
            times = self._compare(
                {"same": same, "pack": in_turns(self.by_aspect, lambda pack: train_step(model, pack)())}
            )
        rate = times["same"] / times["pack"] * self._share(self.by_aspect)
        return {"case": "training", "ms": times, "of_same_shape_by_patches": round(rate, 3)}


CASES = "aspects", "sides", "training"


def in_turns(packs: list[veca.PackedImages], call: Callable[[veca.PackedImages], object]) -> Callable[[], object]:
    order = itertools.cycle(packs)
    return lambda: call(next(order))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="veca_base")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--mixes", type=int, default=4, help="packs, each of another mix, which take turns")
    parser.add_argument("--only", choices=CASES, nargs="*", default=CASES)
    options = vars(parser.parse_args())
    cases = options.pop("only")
    bench = PackBench(**options)
    for case in cases:
        print(json.dumps(getattr(bench, case)()), flush=True)


if __name__ == "__main__":
    main()
