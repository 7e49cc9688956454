"""Print the largest differences of packs from their images one at a time, for results/exactness/packs.csv.

    python tests/tools/pack_errors.py --mixes 200

Random mixes of sizes, 1 × 1 and 1 × 64 patches among them, with a budget and a width for each image, in float32 on a
CPU: every mix forward and backward, in reversed order, and without its first image. Relative to the norm of a tensor;
gradients are of a random sum over all outputs. The small model is that of tests/test_packed.py. The last rows are what
rounding does to images alone.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import veca

sys.path.insert(0, str(Path(__file__).parent.parent))

from test_packed import gradients, make_model, random_mix, relative, tensors, together

OUTPUTS = "cores", "patches", "core coordinates"


def compare(model: veca.Veca, exact: veca.Veca, seed: int, worst: dict[str, float]) -> None:
    images, budgets, widths = random_mix(seed)

    def pack(order: list[int]) -> Any:
        chosen = ([values[i] for i in order] for values in (images, budgets, widths))
        packed, cores, width = chosen
        return model(veca.pack(packed), cores=cores, width=width)

    def note(what: str, error: float) -> None:
        worst[what] = max(worst[what], error)

    def note_outputs(found: veca.VecaOutput, expected: veca.VecaOutput, how: str = "") -> None:
        for name, a, b in zip(OUTPUTS, tensors(found), tensors(expected), strict=True):
            note(how or name, relative(a, b))

    everything = list(range(len(images)))
    out = pack(everything)
    factors = [[torch.randn_like(x) for x in tensors(each)] for each in out]
    packed = gradients(model, out, factors)
    alone = [model(x[None], cores=c, width=w) for x, c, w in zip(images, budgets, widths, strict=True)]
    expected = gradients(model, alone, factors)
    for found, own in zip(out, alone, strict=True):
        note_outputs(found, own)
    note("gradients, all parameters together", relative(together(packed), together(expected)))
    note("gradient of a single parameter", max(relative(packed[name], expected[name]) for name in expected))
    references = [exact(x[None].double(), cores=c, width=w) for x, c, w in zip(images, budgets, widths, strict=True)]
    precise = gradients(exact, references, [[w.double() for w in own] for own in factors])
    note("gradients alone, against float64", relative(together(expected), together(precise)))
    note("single gradient alone, against float64", max(relative(expected[name], precise[name]) for name in precise))
    for own, reference in zip(alone, references, strict=True):
        note_outputs(own, reference, "outputs alone, against float64")
    with torch.no_grad():
        for i, found in zip(reversed(everything), pack(everything[::-1]), strict=True):
            note_outputs(found, out[i], "outputs, in another order")
        if len(images) > 1:
            for i, found in enumerate(pack(everything[1:]), 1):
                note_outputs(found, out[i], "outputs, in other company")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=200)
    parser.add_argument("--model", default="veca_tiny", help="of these weights, beside the small model")
    options = parser.parse_args()
    found: list[dict[str, float]] = []
    for model in (make_model(), veca.load(options.model).eval()):
        worst: dict[str, float] = defaultdict(float)
        exact = copy.deepcopy(model).double()
        for seed in range(options.mixes):
            compare(model, exact, seed, worst)
        found.append(worst)
    writer = csv.writer(sys.stdout)
    writer.writerow([f"largest of {options.mixes} mixes", "small model", options.model])
    for what in sorted(found[0], key=lambda what: "alone" in what):
        writer.writerow([what, *(f"{worst[what]:.1e}".replace("e-0", "e-") for worst in found)])


if __name__ == "__main__":
    main()
