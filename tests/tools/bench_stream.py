"""Time and memory of `veca.stream` on a tiled TIFF that is made first.

`python tests/tools/bench_stream.py --height 9000 --width 12000`
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

import veca

TILE = 512


def make_tiles(height: int, width: int) -> Iterator[NDArray[np.uint8]]:
    noise = np.random.default_rng(0).integers(0, 256, (TILE, TILE, 3), np.uint8)
    for i in range(-(-height // TILE)):
        for j in range(-(-width // TILE)):
            yield np.roll(noise, (7 * i, 13 * j), (0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="veca_tiny")
    parser.add_argument("--height", type=int, default=9000)
    parser.add_argument("--width", type=int, default=12000)
    parser.add_argument("--cores", type=int)
    parser.add_argument("--files", action="store_true", help="keep patches in files")
    arguments = parser.parse_args()
    model, (height, width) = veca.load(arguments.model), (arguments.height, arguments.width)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.tif"
        options = {"shape": (height, width, 3), "dtype": np.uint8, "tile": (TILE, TILE), "photometric": "rgb"}
        tifffile.imwrite(path, make_tiles(height, width), compression="zlib", **options)
        states = Path(folder) / "states" if arguments.files else None
        began = time.perf_counter()
        found = veca.stream(
            model, path, cores=arguments.cores, out=Path(folder) / "features.npy", save_dtype="float16", states=states
        )
        seconds = time.perf_counter() - began
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{width} × {height} px, {found.patches.shape} features: {seconds:.1f} s, {memory:.2f} GiB resident")


if __name__ == "__main__":
    main()
