"""Model weights on disk: our safetensors format, released checkpoints, pretrained names."""

from veca.checkpoint.format import (
    CheckpointError,
    read_description,
    read_safetensors,
    save,
    save_tensors,
    weights_hash,
    write_tensors,
)
from veca.checkpoint.loading import create_model, load, load_or_random
from veca.checkpoint.pretrained import list_models
from veca.checkpoint.released import save_released

__all__ = [
    "CheckpointError",
    "create_model",
    "list_models",
    "load",
    "load_or_random",
    "read_description",
    "read_safetensors",
    "save",
    "save_released",
    "save_tensors",
    "weights_hash",
    "write_tensors",
]
