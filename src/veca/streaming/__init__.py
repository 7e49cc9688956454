"""Features of images that are too large for the GPU, or for memory."""

from veca.streaming.run import StreamedFeatures, stream
from veca.streaming.storage import StreamError

__all__ = ["StreamError", "StreamedFeatures", "stream"]
