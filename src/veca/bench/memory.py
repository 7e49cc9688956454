"""Peak memory of a forward pass at several resolutions."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from veca.checkpoint import create_model
from veca.utils.device import choose_device, peak_device_bytes, process_bytes


def bench_memory(
    model: str, sizes: Sequence[int], cores: int = 64, device: str = "cpu", dtype: str = "float32"
) -> list[int]:
    """Print and return the peak bytes of a forward pass of one image at each size, weights not counted.

    On CUDA the peak is the allocator's. On a CPU (Linux) it is the peak of the process's resident memory less what was
    resident before the pass, so every size runs in a new process.
    """
    chosen = choose_device(device)
    print(f"{model}, C = {cores}, batch 1, {dtype}, {device}, torch {torch.__version__}")
    peaks: list[int] = []
    for size in sizes:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            job = process.submit(forward_peak_bytes, model, size, cores, chosen, getattr(torch, dtype))
            peaks.append(peak := job.result())
        print(f"{size:5} px  {peak / 2**20:8.0f} MiB  {peak / peaks[0]:5.2f} ×", flush=True)
    return peaks


def forward_peak_bytes(model_name: str, size: int, cores: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes one image of `size` px needs above the weights, in this process, which should do nothing else."""
    model = create_model(model_name).to(device, dtype).eval()
    images = torch.randn(1, 3, size, size, device=device, dtype=dtype)
    with torch.inference_mode():
        model(torch.zeros_like(images[..., :32, :32]), cores)  # libraries load and thread pools start here
        peak = peak_device_bytes(lambda: model(images, cores), device)
        if peak is not None:
            return peak
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, which still holds the peak of loading
        before = process_bytes("VmRSS")
        model(images, cores)
        return process_bytes("VmHWM") - before
