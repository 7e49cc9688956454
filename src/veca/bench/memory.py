"""Peak memory of a forward pass against resolution: `python -m veca.bench.memory --sizes 1024 2048`.

Each size runs in a process of its own. On CUDA the peak is the allocator's; on CPU (Linux) it is the process's resident
peak less what was resident before the pass. Weights count in neither.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from veca.checkpoint import create_model
from veca.checkpoint.pretrained import list_models


def peak_bytes(model_name: str, size: int, cores: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes one image of `size` px needs above the weights, in this process, which should do nothing else."""
    model = create_model(model_name).to(device, dtype).eval()
    images = torch.randn(1, 3, size, size, device=device, dtype=dtype)
    with torch.inference_mode():
        model(torch.zeros_like(images[..., :32, :32]), cores)  # libraries load and thread pools start here
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            model(images, cores)
            return torch.cuda.max_memory_allocated(device) - before
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of loading, is forgotten
        before = _resident("VmRSS")
        model(images, cores)
        return _resident("VmHWM") - before


def _resident(key: str) -> int:
    """Bytes this process holds now (VmRSS) or held at most (VmHWM), as Linux counts them."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith(key)).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="veca_base", choices=list_models())
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--here", action="store_true", help="measure the first size in this process, print bytes")
    args = parser.parse_args()
    if args.here:
        dtype = getattr(torch, args.dtype)
        print(peak_bytes(args.model, args.sizes[0], args.cores, torch.device(args.device), dtype))
        return
    first = None
    print(f"{args.model}, C = {args.cores}, batch 1, {args.dtype}, {args.device}, torch {torch.__version__}")
    for size in args.sizes:
        options = ["--model", args.model, "--cores", str(args.cores), "--device", args.device, "--dtype", args.dtype]
        command = [sys.executable, "-m", "veca.bench.memory", "--here", "--sizes", str(size), *options]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        first = first or peak
        print(f"{size:5} px  {peak / 2**20:8.0f} MiB  {peak / first:5.2f} ×")


if __name__ == "__main__":
    main()
