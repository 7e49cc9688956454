"""VECA for `trust_remote_code=True`: the classes of the installed package `veca`.

`save_pretrained` copies this file into the folders that it writes.
"""

try:
    from veca.hub.transformers import (
        VecaBackbone,
        VecaConfig,
        VecaForImageClassification,
        VecaForSemanticSegmentation,
        VecaImageProcessor,
        VecaModel,
    )
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "veca":
        raise
    raise ImportError(
        "this folder is of a VECA, whose code is the Python package `veca` and not in the folder. "
        "Install it (in a clone of its repository: pip install '.[hub]') and load the folder again"
    ) from error

__all__ = [
    "VecaBackbone",
    "VecaConfig",
    "VecaForImageClassification",
    "VecaForSemanticSegmentation",
    "VecaImageProcessor",
    "VecaModel",
]
