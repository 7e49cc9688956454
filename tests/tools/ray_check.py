"""Compare `veca embed` plain, on Ray, and on Ray with an interruption and a killed worker.

    python tests/tools/ray_check.py FOLDER [--images 2000]

Makes images (JPEGs of 64 to 128 px in tar shards of 100, two of them broken) and a `veca_tiny` of random weights
in FOLDER, runs the four commands, and prints how long they took and whether the rows are equal.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image

import veca


def make_inputs(root: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for start in range(0, count, 100):
        with tarfile.open(root / f"{start:06}.tar", "w") as shard:
            for number in range(start, min(start + 100, count)):
                width, height = map(int, rng.integers(64, 129, 2))
                coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                buffer = io.BytesIO()
                coarse.resize((width, height), Image.Resampling.BICUBIC).save(buffer, "jpeg", quality=90)
                data = buffer.getvalue()[: 40 if number in (17, 1500) else None]
                info = tarfile.TarInfo(f"{number:06}.jpg")
                info.size = len(data)
                shard.addfile(info, io.BytesIO(data))
    torch.manual_seed(0)
    veca.save(veca.create_model("veca_tiny"), root / "tiny")


def start_embed(root: Path, out: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "veca", "embed", str(root / "*.tar"), "--out", str(root / out), *more]
    options = ["--model", str(root / "tiny"), "--size", "128", "--cores", "32"]
    return subprocess.Popen(command + options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def count_partitions(out: Path) -> int:
    return len(list(out.glob("0*.parquet")))


def wait_for_partitions(process: subprocess.Popen[str], out: Path, least: int) -> None:
    while count_partitions(out) < least:
        if process.poll() is not None:
            sys.exit(f"ended too early: {process.communicate()[0]}")
        time.sleep(0.05)


def find_workers(ancestor: int) -> list[int]:
    """Processes with a model that a run has started through Ray."""
    parents, models = {}, []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            if b"ray::MapWorker" in Path(f"/proc/{name}/cmdline").read_bytes():
                models.append(int(name))
        except OSError:
            pass
    descendants = []
    for model in models:
        above = model
        while above in parents and above != ancestor:
            above = parents[above]
        descendants += [model] if above == ancestor else []
    return descendants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    args = parser.parse_args()
    root = args.folder
    root.mkdir(parents=True)
    make_inputs(root, args.images)

    def finish(what: str, process: subprocess.Popen[str], began: float) -> None:
        lines = process.communicate()[0].splitlines()
        print(f"{what}: status {process.returncode}, {time.perf_counter() - began:.1f} s, {lines[-2:]}", flush=True)

    began = time.perf_counter()
    finish("plain", start_embed(root, "plain.parquet"), began)
    began = time.perf_counter()
    finish("ray", start_embed(root, "ray", "--engine", "ray"), began)

    out, began = root / "interrupted", time.perf_counter()
    process = start_embed(root, "interrupted", "--engine", "ray")
    wait_for_partitions(process, out, 3)
    process.send_signal(signal.SIGINT)
    finish(f"ray, interrupted with {count_partitions(out)} partitions done", process, began)
    began, before = time.perf_counter(), count_partitions(out)
    process = start_embed(root, "interrupted", "--engine", "ray")
    wait_for_partitions(process, out, before + 2)
    killed = find_workers(process.pid)[0]
    os.kill(killed, signal.SIGKILL)
    finish(f"ray, continued, worker {killed} killed with {count_partitions(out)} partitions done", process, began)

    plain, failed = pq.read_table(root / "plain.parquet"), (root / "plain.parquet.failures.csv").read_text()
    for name in ("ray", "interrupted"):
        table = pq.read_table(root / name)
        same = table == plain and table.schema.equals(plain.schema, check_metadata=True)
        same &= (root / f"{name}.failures.csv").read_text() == failed
        print(f"{name}: {len(table):,} of {len(plain):,} rows, {'identical' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
