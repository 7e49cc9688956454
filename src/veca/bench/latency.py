"""VECA beside timm's dense DINOv3-shaped ViT, in one run: `python -m veca.bench.latency --size 1024`.

The two take turns, so that whatever else the machine does falls on both; the medians and their ratio are printed. With
`--profile` also where the time goes, and what VECA's linear products take with nothing else around them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from veca.config import SIZES, VecaConfig, list_models
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


def operator_seconds(call: Callable[[], object], device: torch.device) -> list[tuple[str, float]]:
    """The operators that take most of one call, longest first, each without what it calls."""
    with torch.profiler.profile() as profile:
        call()
    on_cpu = device.type == "cpu"
    spent = [
        (e.key, (e.self_cpu_time_total if on_cpu else e.self_device_time_total) / 1e6) for e in profile.key_averages()
    ]
    return sorted(spent, key=lambda entry: -entry[1])[:10]


def linear_call(config: VecaConfig, tokens: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """The linear products of all blocks and nothing else: the floor under any way of computing the rest."""
    dim, hidden = config.embed_dim, config.mlp_dim
    shapes = [(dim, 3 * dim), (dim, dim), (dim, 2 * hidden), (hidden, dim)]
    x = {width: torch.randn(tokens, width, device=device, dtype=dtype) for width in (dim, hidden)}
    weights = [torch.randn(wide, narrow, device=device, dtype=dtype) for narrow, wide in shapes]

    def run() -> None:
        for _ in range(config.depth):
            for weight in weights:
                F.linear(x[weight.shape[1]], weight)

    return run


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
    parser.add_argument("--profile", action="store_true", help="print where the time goes and the floor of VECA")
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
    if args.profile:
        tokens = args.batch * (args.cores[-1] + (args.size // 16) ** 2)
        calls["linear products of VECA alone"] = linear_call(SIZES[args.model], tokens, device, dtype)
    with torch.inference_mode():
        times = measure(calls, device, args.repeats)

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}; torch {torch.__version__}; {args.batch} × {args.size} px, {args.dtype}", end="")
    print(", compiled" if args.compile else ", eager")
    baseline = statistics.median(times[DENSE[args.model]])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name:30} {1e3 * middle:9.1f} ms  (best {1e3 * min(seconds):9.1f})  {baseline / middle:5.2f} ×")
    if args.profile:
        for name, call in calls.items():
            with torch.inference_mode():
                spent = operator_seconds(call, device)
            print(
                f"{name}:", ", ".join(f"{key.removeprefix('aten::')} {1e3 * seconds:.1f} ms" for key, seconds in spent)
            )


if __name__ == "__main__":
    main()
