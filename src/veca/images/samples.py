"""Sample photographs that need no download: those that scikit-image ships."""

from importlib.util import find_spec
from pathlib import Path

from veca.errors import ArgumentError

SAMPLES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")


def sample_images() -> list[Path]:
    """Return the paths of the sample photographs, without importing scikit-image."""
    spec = find_spec("skimage")
    folders = [Path(folder) / "data" for folder in (spec and spec.submodule_search_locations) or ()]
    paths = [folder / name for folder in folders for name in SAMPLES if (folder / name).is_file()]
    if not paths:
        reason = "the sample photos come with scikit-image, which is not installed"
        raise ArgumentError(f"no pictures given, and {reason}: pip install 'veca[viz]', or pass pictures of your own")
    return paths
