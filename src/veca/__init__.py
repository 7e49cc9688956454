"""VECA: a vision backbone whose patches talk through a few elastic cores.

Public names are imported when they are first used: `import veca` alone does not import torch, which takes seconds.
"""

import importlib
from typing import TYPE_CHECKING

from veca import hub
from veca.errors import VecaError

if TYPE_CHECKING:
    from veca import images
    from veca.checkpoint import CheckpointError, create_model, load, save
    from veca.checkpoint.pretrained import list_models
    from veca.config import ConfigError, VecaConfig
    from veca.images import ImageError
    from veca.model import Veca, VecaOutput
    from veca.optimized import optimize
    from veca.version import __version__ as __version__

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

_MODULES = {
    "checkpoint": ("CheckpointError", "create_model", "load", "save"),
    "config": ("ConfigError", "VecaConfig"),
    "optimized": ("optimize",),
    "images": ("ImageError",),
    "model": ("Veca", "VecaOutput"),
    "checkpoint.pretrained": ("list_models",),
    "version": ("__version__",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take any attribute to exist

    def __getattr__(name):
        """A public name, or a module of this package, as `veca.config`."""
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(f"veca.{_MODULE_OF[name]}"), name)
            globals()[name] = value
            return value
        if name.isidentifier() and not name.startswith("_"):
            try:
                return importlib.import_module(f"veca.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"veca.{name}":
                    raise
        raise AttributeError(f"module 'veca' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *_MODULE_OF, *__all__})
