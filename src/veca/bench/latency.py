"""VECA beside timm's dense DINOv3-shaped ViT, in one run: `python -m veca.bench.latency --size 1024`.

The two take turns, so that whatever else the machine does falls on both; the medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from veca.config import list_models
from veca.model import create_model

DENSE = {
    "veca_small": "vit_small_patch16_dinov3",
    "veca_small_plus": "vit_small_plus_patch16_dinov3",
    "veca_base": "vit_base_patch16_dinov3",
    "veca_large": "vit_large_patch16_dinov3",
}


def measure(calls: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, round after round; a first round warms up and is dropped."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    wait = (lambda: None) if device.type == "cpu" else lambda: torch.accelerator.synchronize(device)
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="veca_base", choices=[name for name in list_models() if name in DENSE])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cores", type=int, nargs="+", default=[64])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--compile", action="store_true", help="torch.compile both models")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    import timm

    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    images = torch.randn(args.batch, 3, args.size, args.size, device=device, dtype=dtype)
    veca = create_model(args.model).to(device, dtype).eval()
    dense = timm.create_model(DENSE[args.model], num_classes=0, dynamic_img_size=True).to(device, dtype).eval()
    if args.compile:
        veca, dense = torch.compile(veca), torch.compile(dense)  # type: ignore[assignment]
    calls: dict[str, Callable[[], object]] = {DENSE[args.model]: lambda: dense(images)}
    for cores in args.cores:
        calls[f"{args.model} C={cores}"] = lambda cores=cores: veca(images, cores)  # type: ignore[misc]
    with torch.inference_mode():
        times = measure(calls, device, args.repeats)

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}; torch {torch.__version__}; {args.batch} × {args.size} px, {args.dtype}", end="")
    print(", compiled" if args.compile else ", eager")
    baseline = statistics.median(times[DENSE[args.model]])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name:28} {1e3 * middle:9.1f} ms  (best {1e3 * min(seconds):9.1f})  {baseline / middle:5.2f} ×")


if __name__ == "__main__":
    main()
