"""VECA, Visual Elastic Core Attention: a vision backbone whose patches communicate through a few cores.

Public names are imported when they are first used: `import veca` alone does not import torch, which takes seconds.
"""

import importlib
from typing import TYPE_CHECKING

from veca.errors import VecaError

if TYPE_CHECKING:
    from veca import images
    from veca.checkpoint import CheckpointError, create_model, list_models, load, save
    from veca.compute import resolve_compute
    from veca.config import ConfigError, VecaConfig
    from veca.elastic import make_elastic
    from veca.images import ImageError, pack
    from veca.model import Veca
    from veca.optimized import optimize
    from veca.outputs import PackedOutput, VecaOutput
    from veca.packed import PackedImages
    from veca.predict import ClassPrediction, DepthPrediction, MaskPrediction, Predictor, load_finetuned
    from veca.search import SearchIndex
    from veca.streaming import StreamedFeatures, stream
    from veca.version import __version__ as __version__

__all__ = [
    "CheckpointError",
    "ClassPrediction",
    "ConfigError",
    "DepthPrediction",
    "ImageError",
    "MaskPrediction",
    "PackedImages",
    "PackedOutput",
    "Predictor",
    "SearchIndex",
    "StreamedFeatures",
    "Veca",
    "VecaConfig",
    "VecaError",
    "VecaOutput",
    "create_model",
    "images",
    "list_models",
    "load",
    "load_finetuned",
    "make_elastic",
    "optimize",
    "pack",
    "resolve_compute",
    "save",
    "stream",
]

_MODULES = {
    "checkpoint": ("CheckpointError", "create_model", "list_models", "load", "save"),
    "compute": ("resolve_compute",),
    "config": ("ConfigError", "VecaConfig"),
    "elastic": ("make_elastic",),
    "optimized": ("optimize",),
    "images": ("ImageError", "pack"),
    "model": ("Veca",),
    "outputs": ("PackedOutput", "VecaOutput"),
    "packed": ("PackedImages",),
    "predict": ("ClassPrediction", "DepthPrediction", "MaskPrediction", "Predictor", "load_finetuned"),
    "search": ("SearchIndex",),
    "streaming": ("StreamedFeatures", "stream"),
    "version": ("__version__",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # with `__getattr__` a type checker would accept any attribute

    def __getattr__(name):
        """Import a public name, or a module of this package such as `veca.config`, on first use."""
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
