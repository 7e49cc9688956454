"""Features of many images: `embed` writes them to a file, in one process or on Ray."""

from veca.embed.partitions import EmbedError, EmbedSettings, Precision, SaveDtype
from veca.embed.run import EmbedReport, embed

__all__ = ["EmbedError", "EmbedReport", "EmbedSettings", "Precision", "SaveDtype", "embed"]
