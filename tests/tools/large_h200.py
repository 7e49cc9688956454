"""All measurements of packs and of large images that need a GPU, in one run of nine minutes at most.

    python tests/tools/large_h200.py --out results   # large.json, large.csv
    python tests/tools/large_h200.py --tiny          # on a CPU, to see that it runs

- pack: the cases of `bench_pack.py`: mixed aspects against one shape, mixed sides against padding, a training step
- memory: one image in memory in bfloat16, against the streamed result, and the dense ViT beside it up to the side whose
  time, which grows with the fourth power of the side, is left
- stream: an image of twice the side, streamed: time and bytes of each part, peak memory of the device
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from bench_pack import CASES, PackBench
from numpy.typing import NDArray

import veca
from veca.images import normalize
from veca.images.tiles import ArraySource
from veca.streaming import storage
from veca.streaming.run import OnlineSoftmax, _Stream
from veca.teachers.from_timm import create_dense_vit

GOALS = {"aspects": 0.92, "sides": 1.8, "training": 0.85}
PARTS = {
    "read pixels": (ArraySource, "read"),
    "read patches": (storage.MemoryStates, "read"),
    "write patches": (storage.MemoryStates, "write"),
    "write features": (storage.FeatureOutput, "write"),
    "patches of a block": (_Stream, "_patches"),
    "softmax of the cores": (OnlineSoftmax, "add"),
}


class Large:
    """The rows of a run, and how much of its time is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device, self.end = options, options.device, time.monotonic() + options.seconds
        self.rows: list[dict[str, Any]] = []

    def add(self, case: str, **values: Any) -> None:
        self.rows.append({"case": case, **values})
        print(json.dumps(self.rows[-1]), flush=True)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def attempt(self, case: str, call: Callable[[], None], seconds: float = 0.0) -> None:
        """Measure unless it would take more time than is left; running out of memory is a result too."""
        if seconds > self.left:
            return self.add(case, skipped=f"about {seconds:.0f} s; {self.left:.0f} s are left")
        try:
            call()
        except torch.OutOfMemoryError as error:
            self.add(case, failed=str(error).splitlines()[0][:200])
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def measure(self, call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """What a call returns; its seconds, and the peak memory of the device during it."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.synchronize()
        began = time.perf_counter()
        result = call()
        self.synchronize()
        found = {"seconds": round(time.perf_counter() - began, 3)}
        if self.device == "cuda":
            found["device_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return result, found

    @contextmanager
    def parts(self) -> Iterator[dict[str, list[float]]]:
        """Seconds and bytes of each of `PARTS` while the block runs, with the device waited for around each."""
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

        def timed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                self.synchronize()
                began = time.perf_counter()
                result = real(*arguments, **options)
                self.synchronize()
                found[name][0] += time.perf_counter() - began
                moved = result if isinstance(result, torch.Tensor) else arguments[-1]
                found[name][1] += moved.nbytes if isinstance(moved, torch.Tensor) else 0
                return result

            return call

        patches = [
            patch.object(owner, name, timed(part, getattr(owner, name))) for part, (owner, name) in PARTS.items()
        ]
        for each in patches:
            each.start()
        try:
            yield found
        finally:
            for each in patches:
                each.stop()


def make_image(side: int) -> NDArray[np.uint8]:
    """Smooth colours with grain, another in every tile of 512 px."""
    random, tile = np.random.default_rng(0), min(side, 512)
    coarse = torch.from_numpy(random.random((1, 3, tile // 32, tile // 32), np.float32))
    smooth = (
        torch.nn.functional.interpolate(coarse, (tile, tile), mode="bicubic")[0].clamp(0, 1).permute(1, 2, 0).numpy()
    )
    base = (255 * smooth + random.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8)
    image = np.empty((side, side, 3), np.uint8)
    for i in range(0, side, tile):
        for j in range(0, side, tile):
            image[i : i + tile, j : j + tile] = np.roll(base, (7 * i // tile, 13 * j // tile), (0, 1))
    return image


def measure_packs(run: Large) -> None:
    options = run.options
    size = {"images": 2, "repeats": 2, "mixes": 2} if options.tiny else {}
    bench = PackBench(options.model, run.device, **size)
    for case in CASES:
        run.attempt(case, lambda case=case: run.add(**getattr(bench, case)(), goal=GOALS[case]))  # type: ignore[misc]


def measure_memory(run: Large, model: veca.Veca, side: int) -> None:
    """One image in memory by the fast model in bfloat16, twice, and the same streamed."""
    image = make_image(side)
    fast = veca.optimize(model, dtype=torch.bfloat16, cuda_graphs=False) if run.device == "cuda" else model

    def forward() -> veca.VecaOutput:
        with torch.inference_mode():
            pixels = torch.from_numpy(image).to(run.device).permute(2, 0, 1)[None]
            return fast(normalize(pixels), 64)

    forward()
    out, found = run.measure(forward)
    whole = out.feature_map[0].float().cpu().permute(1, 2, 0)
    del out
    streamed, times = run.measure(lambda: veca.stream(model, image, cores=64, precision=torch.bfloat16, progress=False))
    other = torch.from_numpy(streamed.patches)
    cosine = torch.nn.functional.cosine_similarity(whole, other, dim=-1)
    difference = float((whole - other).norm() / other.norm())
    agreement = {"relative_difference": round(difference, 5), "lowest_cosine": round(float(cosine.min()), 5)}
    run.add(f"in memory, {side} px", **found, patches=cosine.numel(), **agreement)
    run.add(f"streamed, {side} px", **times)


def measure_dense(run: Large, model: veca.Veca, sides: list[int]) -> None:
    """The dense ViT of the model's size and the model, at growing sides, as long as there is time."""
    dense = create_dense_vit(model.config).to(run.device).eval()
    last = 0.0
    for side in sides:
        images = torch.randn(1, 3, side, side, device=run.device)

        def forward(network: Any, images: torch.Tensor = images) -> Any:
            with torch.inference_mode(), torch.autocast(run.device, torch.bfloat16):
                return network(images)

        def both(side: int = side, forward: Callable[[Any], Any] = forward) -> None:
            nonlocal last
            ours = run.measure(lambda: forward(model))[1]
            theirs = run.measure(lambda: forward(dense.forward_features))[1]
            last = theirs["seconds"]
            run.add(f"dense ViT, {side} px", **theirs, veca_seconds=ours["seconds"])

        if not last:
            forward(model), forward(dense.forward_features)  # what compiles or is loaded at first
        run.attempt(f"dense ViT, {side} px", both, seconds=16 * last * 1.2)


def measure_stream(run: Large, model: veca.Veca, side: int, folder: Path) -> None:
    image, out = make_image(side), folder / "streamed.npy"
    out.unlink(missing_ok=True)
    options: dict[str, Any] = {"cores": 64, "precision": torch.bfloat16, "save_dtype": "float16", "progress": False}
    with run.parts() as parts:
        _, found = run.measure(lambda: veca.stream(model, image, out=out, tile=run.options.tile, **options))
    out.unlink()
    by_part = {name: {"seconds": round(a, 2), "gb": round(b / 1e9, 2)} for name, (a, b) in parts.items()}
    run.add(f"streamed, {side} px", **found, tile=run.options.tile, parts=by_part)


def flatten(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}: ")
        elif key != "case":
            yield f"{prefix}{key}", value


def write_results(run: Large, folder: Path) -> None:
    (folder / "large.json").write_text(json.dumps(run.rows, indent=1))
    cells = [(row["case"], name, value) for row in run.rows for name, value in flatten(row)]
    with open(folder / "large.csv", "w", newline="") as file:
        csv.writer(file).writerows([("case", "what", "value"), *cells])
    print()
    for case, name, value in cells:
        print(f"{case:24} {name:36} {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--model", default="veca_base")
    parser.add_argument("--side", type=int, default=16_384, help="of the image in memory; twice that is streamed")
    parser.add_argument("--tile", type=int, default=2048, help="side of a tile of the larger image")
    parser.add_argument("--seconds", type=float, default=520, help="no measurement begins that would take longer")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for the results")
    options = parser.parse_args()
    options.device = "cpu" if options.tiny else "cuda"
    if options.tiny:
        options.model, options.side, options.tile = "veca_tiny", 512, 256
    run = Large(options)
    model = veca.create_model(options.model, pretrained=False).to(options.device).eval()
    try:
        run.attempt("memory", lambda: measure_memory(run, model, options.side))
        run.attempt(
            "stream", lambda: measure_stream(run, model, 2 * options.side, options.out), 0 if options.tiny else 60
        )
        run.attempt("pack", lambda: measure_packs(run), 0 if options.tiny else 60)
        sides = [options.side // 4, options.side // 2, options.side]
        run.attempt("dense", lambda: measure_dense(run, model, sides))
    finally:
        write_results(run, options.out)


if __name__ == "__main__":
    main()
