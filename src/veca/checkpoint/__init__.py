"""Model weights on disk: our safetensors format, released checkpoints, pretrained names."""

from veca.checkpoint.format import CheckpointError, save
from veca.checkpoint.loading import create_model, list_models, load

__all__ = ["CheckpointError", "create_model", "list_models", "load", "save"]
