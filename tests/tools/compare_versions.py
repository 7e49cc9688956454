"""Race this version's kernels against another's on a GPU, taking turns in one process, and compare their bits.

    git archive 5e0555c src/veca | tar x -C /tmp/other
    python tests/tools/compare_versions.py /tmp/other/src/veca

The other version is copied under another package name, so that both can be imported at once.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import veca
from veca.rope import make_rotary, patch_coordinates

MODELS = (
    ("veca_base", 256, 64),
    ("veca_base", 1024, 16),
    ("veca_base", 1024, 1),
    ("veca_small", 1024, 16),
    ("veca_tiny", 256, 256),
)
ATTENTION = ((12, 16, 64), (12, 64, 16), (6, 384, 16), (6, 96, 32))
"""Heads, images, patches along a side."""


def import_other(source: Path, folder: Path) -> Any:
    """The package in `source` as `veca_other`, with operators of its own."""
    package = folder / "veca_other"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__", "weights", "web"))
    for path in package.rglob("*.py"):
        text = re.sub(r"\bfrom veca(\.| )", r"from veca_other\1", path.read_text())
        text = re.sub(r"^import veca$", "import veca_other as veca", text, flags=re.M)
        text = re.sub(r'"veca(::|\.hub)', r'"veca_other\1', text)
        text = text.replace('f"veca.', 'f"veca_other.').replace("torch.ops.veca.", "torch.ops.veca_other.")
        path.write_text(text)
    sys.path.insert(0, str(folder))
    return importlib.import_module("veca_other")


def milliseconds(call: Callable[[], Any], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def race(name: str, this: Callable[[], Any], other: Callable[[], Any], count: int, rounds: int = 15) -> None:
    calls = {"this": this, "other": other}
    for call in (*calls.values(),) * 3:  # the first calls compile, and record CUDA graphs
        call()
    times: dict[str, list[float]] = {"this": [], "other": []}
    for turn in range(rounds):
        for key in sorted(calls, reverse=bool(turn % 2)):
            times[key].append(milliseconds(calls[key], count))
    mine, theirs = (statistics.median(times[key]) for key in ("this", "other"))
    print(f"{name:48s} {mine:9.4f} ms, other {theirs:9.4f} ms, ratio {mine / theirs:.3f}", flush=True)


def bits(a: Tensor, b: Tensor) -> str:
    return "same bits" if torch.equal(a, b) else "OTHER BITS"


def race_models(other: Any) -> None:
    for size, pixels, batch in MODELS:
        model, theirs = veca.create_model(size).cuda().eval(), other.create_model(size).cuda().eval()
        theirs.load_state_dict(model.state_dict())
        fast, fast_other = veca.optimize(model), other.optimize(theirs)
        images = torch.randn(batch, 3, pixels, pixels, device="cuda")
        for cores in (64, 8):
            with torch.inference_mode():
                same = bits(fast(images, cores=cores).patches, fast_other(images, cores=cores).patches)
                race(
                    f"{size} {pixels} px × {batch}, C = {cores}, {same}",
                    lambda: fast(images, cores=cores),  # noqa: B023
                    lambda: fast_other(images, cores=cores),  # noqa: B023
                    20,
                )


def as_graph(call: Callable[[], Any]) -> Callable[[], None]:
    """`call` recorded, so that the time to launch it does not count."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.output = call()  # type: ignore[attr-defined]  # must live as long
    return graph.replay


def race_attention() -> None:
    namespaces = torch.ops.veca, torch.ops.veca_other
    for heads, batch, side in ATTENTION:
        qkv = torch.randn(batch, 64 + side**2, 3, heads, 64, device="cuda", dtype=torch.bfloat16)
        points = make_rotary(torch.rand(batch, 1, 64, 2, device="cuda") * 2 - 1, 64, 0.125)
        patches = make_rotary(patch_coordinates(side, side, qkv.device, torch.float32), 64, 0.125)
        more = points.coordinates[:, 0].contiguous(), patches.coordinates, patches.frequencies
        out, lse = torch.ops.veca.core_attention(qkv, *more)
        d_out = torch.randn_like(out)
        label = f"attention, {heads} heads, {batch} × {side**2}"
        passes = {
            "forward": [lambda o=o: o.core_attention(qkv, *more) for o in namespaces],  # noqa: B023
            "backward": [
                lambda o=o: o.core_attention_backward(d_out, qkv, *more, out, lse)  # noqa: B023
                for o in namespaces
            ],
        }
        for name, (mine, theirs) in passes.items():
            race(f"{label}, {name}, {bits(mine()[0], theirs()[0])}", as_graph(mine), as_graph(theirs), 50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the package folder of the other version, .../src/veca")
    source = parser.parse_args().source
    if not (source / "kernels").is_dir():
        parser.error(f"{source} is not the package folder of a version: it has no kernels/")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        other = import_other(source, Path(folder))
        importlib.import_module("veca_other.kernels.ops")  # registers its operators
        race_attention()
        race_models(other)


if __name__ == "__main__":
    main()
