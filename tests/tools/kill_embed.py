"""Runs of `veca embed` that are killed (SIGKILL) at random moments and begun again: their rows against a whole run's.

    python tests/tools/kill_embed.py SHARDS… --kills 20 --device cuda

Processes are forked from this one, which has imported everything, so that most of their time is work.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
import traceback
from pathlib import Path

import pyarrow.parquet as pq

import veca
import veca.embed.run
from veca.embed import EmbedSettings, embed


def begin(shards: list[str], out: Path, device: str, workers: int) -> int:
    """Fork a process that embeds the shards, and return its number."""
    if pid := os.fork():
        return pid
    try:
        settings = EmbedSettings(size=128, cores=16, precision="bfloat16" if device == "cuda" else "float32", batch=64)
        model = veca.load("veca_tiny").to(device)
        embed(shards, out, model=model, model_name="veca_tiny", settings=settings, progress=False, workers=workers)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ends_within(pid: int, seconds: float) -> bool:
    """Whether a process ends in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    return False


def check_kills(shards: list[str], folder: Path, device: str, workers: int, kills: int, seed: int) -> list[str]:
    """Kill runs until there were so many kills; return what is wrong with their results."""
    began, done, runs, problems = time.monotonic(), 0, 0, list[str]()
    os.waitpid(begin(shards, folder / "whole.parquet", device, workers), 0)
    whole, longest = pq.read_table(folder / "whole.parquet"), time.monotonic() - began
    rng = random.Random(seed)
    while done < kills:
        runs += 1
        out = folder / f"{runs}.parquet"
        while not out.exists():
            pid = begin(shards, out, device, workers)
            if done == kills:
                os.waitpid(pid, 0)
            elif not ends_within(pid, rng.uniform(0.1, longest)):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                done += 1
            elif not out.exists():
                return [*problems, f"run {runs} ended without a result"]
        if not pq.read_table(out).equals(whole):
            problems.append(f"run {runs} has other rows than a whole run")
    left = sorted(path.name for path in folder.iterdir() if path.suffix != ".parquet")
    print(f"{done} kills in {runs} runs of {whole.num_rows:,} rows; a whole run took {longest:.1f} s")
    return problems + [f"{name} is left over" for name in left]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    veca.embed.run._SAVE_SECONDS = 0.2  # so that partitions are left half done too
    with tempfile.TemporaryDirectory() as folder:
        problems = check_kills(args.shards, Path(folder), args.device, args.workers, args.kills, args.seed)
    print("\n".join(problems) or "no problem")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
