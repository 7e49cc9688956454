"""Times of a model at budgets, widths and sizes that take turns, and of the dense ViT and of teachers beside it.

`python tests/tools/time_settings.py veca_base --size 512 --batch 1,4`
`python tests/tools/time_settings.py veca_tiny --size 256,384,512 --beside dense,efficientnet-lite2 --cpu-time`

With `--cpu-time` calls run in one thread and waiting for a CPU does not count, so shares of the first row's time hold
on a machine that other programs use; milliseconds do not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import veca
from veca.checkpoint.loading import pretrained_name
from veca.model import Veca
from veca.teachers import load_teacher
from veca.teachers.from_timm import create_dense_vit
from veca.utils.device import choose_device
from veca.utils.timing import measure

Calls = dict[str, Callable[[], object]]
WARMUP = 2


def parse_arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a size, with random weights and widths 1 and 0.25, or pretrained weights")
    parser.add_argument("--size", type=numbers, default=[512])
    parser.add_argument("--batch", type=numbers, default=[1])
    parser.add_argument("--cores", type=numbers, default=[64, 8])
    parser.add_argument("--beside", type=lambda text: text.split(","), default=[], help="dense, or names of teachers")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true")
    return parser.parse_args()


def load_model(name: str) -> Veca:
    return veca.load(name) if pretrained_name(name) else veca.create_model(name, widths=(0.25, 1.0)).eval()


def make_calls(model: Veca, others: dict[str, Any], images: torch.Tensor, cores: list[int]) -> Calls:
    """Every setting of the model and everything beside it on the same images."""
    settings = [(c, width) for c in cores for width in sorted(model.config.widths, reverse=True)]
    calls: Calls = {f"C = {c}, width {width:g}": partial(model, images, cores=c, width=width) for c, width in settings}
    return calls | {name: partial(call, images) for name, call in others.items()}


def measure_cpu_time(calls: Calls, repeats: int) -> dict[str, list[float]]:
    """Seconds of CPU time of each call in rounds, as `measure` does for wall-clock time."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(WARMUP + repeats):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            if round_ >= WARMUP:
                seconds[name].append(time.process_time() - begin)
    return seconds


def main() -> None:
    arguments = parse_arguments()
    device = choose_device("cpu" if arguments.cpu_time else "auto")
    model = load_model(arguments.model).to(device)
    others: dict[str, Any] = {}
    for name in arguments.beside:
        network = create_dense_vit(model.config) if name == "dense" else load_teacher(name)
        network = network.to(device).eval()
        others[name] = network.forward_features if name == "dense" else network.features
    if arguments.cpu_time:
        torch.set_num_threads(1)
    for batch in arguments.batch:
        calls: Calls = {}
        for size in sorted(arguments.size, reverse=True):
            images = torch.randn(batch, 3, size, size, device=device)
            at_size = make_calls(model, others, images, arguments.cores)
            calls |= {f"{size} px, {name}": call for name, call in at_size.items()}
        with torch.inference_mode():
            if arguments.cpu_time:
                seconds = measure_cpu_time(calls, arguments.repeats)
            else:
                seconds = measure(calls, device, arguments.repeats, warmup=WARMUP)
        first = next(iter(seconds.values()))
        for name, samples in seconds.items():
            # Within a round calls follow each other closely: their ratio is steadier than that of two medians.
            share = statistics.median(own / full for own, full in zip(samples, first, strict=True))
            print(f"batch {batch}, {name}: {1e3 * statistics.median(samples):,.1f} ms, {share:.3f} of the first")


if __name__ == "__main__":
    main()
