"""VECA: a vision backbone whose patches talk through a few elastic cores."""

from importlib.metadata import PackageNotFoundError, version

from veca import hub, images
from veca.checkpoint import CheckpointError, create_model, load, save
from veca.config import ConfigError, VecaConfig
from veca.errors import VecaError
from veca.fast import optimize
from veca.images import ImageError
from veca.model import Veca, VecaOutput
from veca.shipped import list_models

try:
    __version__ = version("veca")
except PackageNotFoundError:  # run from its sources, as torch.hub does
    __version__ = "0+sources"
__all__ = [
    "CheckpointError",
    "ConfigError",
    "ImageError",
    "Veca",
    "VecaConfig",
    "VecaError",
    "VecaOutput",
    "create_model",
    "hub",
    "images",
    "list_models",
    "load",
    "optimize",
    "save",
]
