"""The version of this package, which is recorded in the files that veca writes."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def _find_version() -> str:
    try:
        return version("veca")
    except PackageNotFoundError:  # not installed: run from its sources, as by torch.hub
        pass
    try:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == "veca":
            return f"{project['version']}+sources"
    except (OSError, ValueError, KeyError):
        pass
    return "0+sources"


__version__ = _find_version()
