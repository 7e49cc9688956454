"""What the fuzz scripts share: damaging good files, peak memory of a process, and the command line."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def damage(data: bytes, way: str, position: int, good: Mapping[str, bytes], dice: random.Random) -> bytes:
    """`data` with flipped bits, noise, a hole, a repetition, the rest of another good file, or a cut tail."""
    changed = bytearray(data)
    if way == "flips":
        for _ in range(dice.choice((1, 3, 30))):
            changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif way == "noise":
        changed[position : position + 16] = dice.randbytes(16)
    elif way == "hole":
        del changed[position : position + dice.choice((1, 7, 100))]
    elif way == "repeat":
        changed[position:position] = changed[position : position + dice.choice((1, 7, 100))]
    elif way == "splice":
        changed[position:] = dice.choice(list(good.values()))[position:]
    elif way == "cut":
        del changed[position:]
    else:
        raise ValueError(way)
    return bytes(changed)


def peak_mib(reset: bool = False) -> float:
    """Peak memory of this process, or since the last reset where the system allows one."""
    if sys.platform == "linux":
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    import resource

    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def run_script(
    doc: str | None, run: Callable[..., Any], child: Callable[..., None] | None = None, **options: int
) -> int:
    """The command line of a fuzz script, with integer `options` and their defaults; exit status 1 after problems.

    `run(folder=…, **options)` returns a report with `problems`; `child(folder, **options)` has a process of its own.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    folder = given.pop("child")
    if folder and child:
        child(folder, **given)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        report = run(folder=Path(scratch), **given)
    for problem in report.problems:
        print(problem)
    print(report)
    return bool(report.problems)
