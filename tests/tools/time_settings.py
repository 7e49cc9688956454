"""Times of a model at budgets and widths that take turns.

`python tests/tools/time_settings.py veca_base --size 512 --batch 1,4`
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch

import veca
from veca.utils.device import choose_device
from veca.utils.timing import measure

SETTINGS = (64, 1.0), (64, 0.25), (8, 1.0), (8, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    device = choose_device()
    model = veca.create_model(arguments.model, widths=sorted({width for _, width in SETTINGS})).eval().to(device)
    for batch in arguments.batch:
        images = torch.randn(batch, 3, arguments.size, arguments.size, device=device)
        calls = {f"C = {c}, width {w:g}": partial(model, images, cores=c, width=w) for c, w in SETTINGS}
        with torch.inference_mode():
            seconds = measure(calls, device, arguments.repeats, warmup=2)
        medians = [statistics.median(samples) for samples in seconds.values()]
        for setting, median in zip(calls, medians, strict=True):
            print(f"batch {batch}, {setting}: {1e3 * median:,.1f} ms, {medians[0] / median:.2f} ×")


if __name__ == "__main__":
    main()
