"""All measurements and checks of packs and of large images that need a GPU, in one run of nine minutes at most.

    python tests/tools/large_h200.py --out results         # large.json, large.csv
    python tests/tools/large_h200.py --only pack,tests     # parts of it
    python tests/tools/large_h200.py --tiny --out FOLDER  # on a CPU, to see that it runs

- pack: the cases of `bench_pack.py`: mixed aspects against one shape, mixed sides against padding, a training step
- tests: those of packs and of one large image that are marked `gpu`
- memory: one image in memory in bfloat16 against the streamed result, and both at a quarter of the side against the
  streamed result in float32
- stream: an image of twice the side, streamed: time and bytes of each part, peak memory of the device
- dense: the dense ViT and the model at growing sides, as long as its time, which grows with their fourth power, is left

The parts take turns in this order; one that would take longer than is left is skipped, and the files say so. What is
measured is compared with its goal; the status is 1 where one is missed or not measured, on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import subprocess
import sys
import time
import traceback
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

ROOT = Path(__file__).resolve().parents[2]
GOALS = {"aspects": 0.92, "sides": 1.8, "training": 0.85}
"""At least, of the last number of each case of `bench_pack.py`."""
MAX_SECONDS, MAX_GIB = 0.45, 6.0
"""Of the image in memory, and of the device while the larger one is streamed."""
MAX_DIFFERENCE = 2e-2
"""Between two computations in bfloat16, relative."""
TESTS = "packed or pack or large_image"
PARTS = {
    "read pixels": (ArraySource, "read"),
    "read patches": (storage.MemoryStates, "read"),
    "write patches": (storage.MemoryStates, "write"),
    "write features": (storage.FeatureOutput, "write"),
    "patches of a block": (_Stream, "_patches"),
    "softmax of the cores": (OnlineSoftmax, "add"),
}


PARTS_OF_RUN = "pack", "tests", "memory", "stream", "dense"


class Large:
    """The rows of a run, and how much of its time is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device, self.end = options, options.device, time.monotonic() + options.seconds
        self.rows: list[dict[str, Any]] = []
        self.checks: dict[str, bool] = {}

    def check(self, what: str, value: float, least: float | None = None, most: float | None = None) -> None:
        """Compare with a goal."""
        self.checks[what] = bool((least is None or value >= least) and (most is None or value <= most))
        goal = f"at least {least}" if most is None else f"at most {most}"
        self.add(f"goal: {what}", value=value, goal=goal, met=self.checks[what])

    def add(self, case: str, **values: Any) -> None:
        self.rows.append({"case": case, **values})
        print(json.dumps(self.rows[-1]), flush=True)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def attempt(self, case: str, call: Callable[[], None], seconds: float = 0.0) -> None:
        """Measure unless it would take more time than is left; an error, as for lack of memory, is a result too."""
        if seconds > self.left:
            return self.add(case, skipped=f"about {seconds:.0f} s; {self.left:.0f} s are left")
        try:
            call()
        except Exception as error:  # the other parts are still to be measured
            self.add(case, failed=f"{type(error).__name__}: {error}"[:500], trace=traceback.format_exc()[-3000:])
        torch.compiler.reset()  # it keeps what it has compiled, and the model with it
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

    def measure(case: str) -> None:
        run.add(**getattr(bench, case)())
        run.check(case, list(run.rows[-1].values())[-1], least=GOALS[case])

    for case in CASES:
        run.attempt(case, lambda case=case: measure(case))  # type: ignore[misc]


def run_tests(run: Large) -> None:
    files = ["tests/kernels/test_packed_attention.py", "tests/test_large.py"]
    report = run.options.out / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
    command += [files[0], "-k", "spans"] if run.options.tiny else [*files, "-m", "gpu", "-k", TESTS]
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=run.left)
        status, lines = done.returncode, done.stdout.strip().splitlines()
    except subprocess.TimeoutExpired:
        status, lines = 124, ["stopped: the time is over"]
    run.add("tests", seconds=round(time.monotonic() - began, 1), summary=lines[-1] if lines else "", tail=lines[-30:-1])
    run.check("tests", status, most=0)


def upload(run: Large, image: NDArray[np.uint8]) -> torch.Tensor:
    return normalize(torch.from_numpy(image).to(run.device).permute(2, 0, 1)[None])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def measure_memory(run: Large, model: veca.Veca, side: int) -> None:
    """One image in memory by the fast model in bfloat16, and the same streamed; the smaller also in float32."""
    fast = veca.optimize(model, dtype=torch.bfloat16, cuda_graphs=False) if run.device == "cuda" else model

    def forward(pixels: torch.Tensor) -> veca.VecaOutput:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=run.device == "cpu"):
            return fast(pixels, 64)

    def whole(image: NDArray[np.uint8]) -> torch.Tensor:
        return forward(upload(run, image)).feature_map[0].float().cpu().permute(1, 2, 0)

    def time_whole(image: NDArray[np.uint8]) -> tuple[dict[str, Any], float]:
        """Of the second of four passes; and the median of the last three, the image being there."""
        pixels, copied = run.measure(lambda: upload(run, image))
        forward(pixels)
        found = [run.measure(lambda: forward(pixels))[1] for _ in range(3)]
        seconds = sorted(each["seconds"] for each in found)[1]
        return found[0] | {"median_seconds": seconds, "upload_seconds": copied["seconds"]}, seconds

    def stream(image: NDArray[np.uint8], precision: torch.dtype) -> torch.Tensor:
        found = veca.stream(model, image, cores=64, precision=precision, tile=run.options.tile, progress=False)
        return torch.from_numpy(found.patches)

    small = make_image(side // 4)
    exact = stream(small, torch.float32)
    of_whole, of_stream = relative(whole(small), exact), relative(stream(small, torch.bfloat16), exact)
    run.add(f"against float32, {side // 4} px", in_memory=round(of_whole, 5), streamed=round(of_stream, 5))
    run.check("error of the streamed features, of that in memory", of_stream / max(of_whole, 1e-6), most=1.5)

    image = make_image(side)
    times, seconds = time_whole(image)
    streamed, found = run.measure(lambda: stream(image, torch.bfloat16))
    in_memory = whole(image)
    cosine = torch.nn.functional.cosine_similarity(in_memory, streamed, dim=-1)
    difference = relative(in_memory, streamed)
    agreement = {"relative_difference": round(difference, 5), "lowest_cosine": round(float(cosine.min()), 5)}
    run.add(f"in memory, {side} px", **times, **agreement)
    run.add(f"streamed, {side} px", **found)
    run.check("seconds in memory", seconds, most=MAX_SECONDS)
    run.check("difference of memory and stream", difference, most=MAX_DIFFERENCE)


def measure_dense(run: Large, model: veca.Veca, sides: list[int]) -> None:
    """The dense ViT of the model's size and the model, at growing sides, as long as there is time."""
    from veca.teachers.from_timm import create_dense_vit  # needs timm, as no other part does

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
    run.check("GiB of the device, streamed", found.get("device_gib", 0.0), most=MAX_GIB)


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
        print(f"{case:52} {name:36} {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--only", default=",".join(PARTS_OF_RUN), help="parts, separated by commas")
    parser.add_argument("--model", default="veca_base")
    parser.add_argument("--side", type=int, default=16_384, help="of the image in memory; twice that is streamed")
    parser.add_argument("--tile", type=int, default=2048, help="side of a tile")
    parser.add_argument("--seconds", type=float, default=520, help="no measurement begins that would take longer")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for the results")
    options = parser.parse_args()
    options.device, only = "cpu" if options.tiny else "cuda", options.only.split(",")
    if unknown := set(only) - set(PARTS_OF_RUN):
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(PARTS_OF_RUN)}")
    if options.tiny:
        options.model, options.side, options.tile = "veca_tiny", 256, 64
    options.out.mkdir(parents=True, exist_ok=True)
    run, side = Large(options), options.side
    name = "CPU" if options.tiny else torch.cuda.get_device_name()
    run.add("machine", device=name, torch=torch.__version__, model=options.model, tiny=options.tiny)
    model = veca.create_model(options.model, pretrained=False).to(options.device).eval()
    calls = {
        "pack": lambda: measure_packs(run),
        "tests": lambda: run_tests(run),
        "memory": lambda: measure_memory(run, model, side),
        "stream": lambda: measure_stream(run, model, 2 * side, options.out),
        "dense": lambda: measure_dense(run, model, [side // 4, side // 2, side]),
    }
    try:
        for part in (part for part in PARTS_OF_RUN if part in only):
            streamed = next((row["seconds"] for row in run.rows if row["case"] == f"streamed, {side} px"), 0.0)
            run.attempt(part, calls[part], 5 * streamed if part == "stream" else 0 if options.tiny else 30)
    finally:
        write_results(run, options.out)
    missed = [what for what, met in run.checks.items() if not met]
    print("missed:", ", ".join(missed) or "nothing")
    skipped = any("skipped" in row or "failed" in row for row in run.rows if not row["case"].startswith("dense"))
    sys.exit(0 if options.tiny else bool(missed or skipped))


if __name__ == "__main__":
    main()
