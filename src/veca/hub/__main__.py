"""Run a script of timm or transformers with VECA registered: `python -m veca.hub train.py …`, or by torchrun `-m`."""

import runpy
import sys
from pathlib import Path


def main() -> None:
    script, *_ = [*sys.argv[1:], ""]
    if not Path(script).is_file():
        found = f"no file {script!r}: " if script else ""
        raise SystemExit(f"{found}python -m veca.hub SCRIPT [its arguments]; torchrun -m veca.hub SCRIPT …")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).parent.resolve())  # as Python itself does for a script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
