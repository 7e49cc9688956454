"""Features of many images: `embed` writes them to a file or a folder, in one process or on Ray."""

from veca.embed.run import embed
from veca.embed.settings import EmbedError, EmbedReport, EmbedSettings, Precision, SaveDtype

__all__ = ["EmbedError", "EmbedReport", "EmbedSettings", "Precision", "SaveDtype", "embed"]
