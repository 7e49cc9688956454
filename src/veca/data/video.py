"""Frames of untrusted videos, named by their times as `clip.mp4#12.5`: decoded in bounded memory by PyAV's FFmpeg."""

import math
import re
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from veca.data.remote import as_text, is_remote, open_source
from veca.errors import VecaError, needs_extra
from veca.images import MAX_PIXELS
from veca.images.decode import open_regular
from veca.images.formats import VIDEOS

MAX_FPS = 1000
"""Names of frames have times in milliseconds."""
_FRAME = re.compile(rf"(.*(?:{'|'.join(map(re.escape, sorted(VIDEOS)))}))#(\d+(?:\.\d+)?)", re.IGNORECASE | re.DOTALL)
# What files of these suffixes hold. Other formats, such as playlists, would make FFmpeg open more files and addresses.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts"
_MISSING_SECONDS = 0.5
"""A video is truncated if its frames end so much, a twentieth of it and two frames before its duration."""


class FrameError(VecaError, ValueError):
    """A video that cannot be read, or not to its end."""


def frame_time(name: str) -> float:
    """Time in seconds of a frame by its name, NaN of other images.

    >>> frame_time("clips/a.mp4#12.5"), frame_time("a#1.jpg")
    (12.5, nan)
    """
    match = _FRAME.fullmatch(name)
    return float(match[2]) if match else math.nan


def file_of_frame(name: str) -> str:
    """The video that a frame is of, by its name; that name for other images.

    >>> file_of_frame("clips/a.mp4#12.5"), file_of_frame("a.jpg")
    ('clips/a.mp4', 'a.jpg')
    """
    match = _FRAME.fullmatch(name)
    return match[1] if match else name


def read_frames(path: str, fps: float, max_pixels: int = MAX_PIXELS) -> Iterator[tuple[str, bytes]]:
    """Yield name and PPM file of `fps` frames per second, upright; the first after each tick, at most all there are.

    After the frames that can be decoded, FrameError says why there are no more.
    """
    with needs_extra("videos need", "video"):
        import av
    last, due = "its start", 0
    try:
        with _open_file(path) as file, _open_video(av, file, max_pixels) as container:
            stream, end = container.streams.video[0], 0.0
            for number, frame in enumerate(container.decode(stream)):
                time = _time_of(frame, stream, number)
                end = max(end, time)
                if time * fps >= due - 1e-6:
                    due = math.floor(time * fps + 1e-6) + 1
                    _check_size(frame.width, frame.height, max_pixels)
                    last = f"{round(time, 3):g} s"
                    yield as_text(f"{path}#{round(time, 3):.12g}"), _to_ppm(frame)
            duration = _duration(container, stream)
            if duration - end > max(_MISSING_SECONDS, duration / 20, 2 / float(stream.average_rate or 25)):
                raise FrameError(f"truncated: its frames end at {end:.1f} s of {duration:.1f} s")
    except VecaError:  # also of what is no regular file, or an address that cannot be reached
        raise
    except (av.error.FFmpegError, OSError, ValueError, IndexError, ArithmeticError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FrameError(f"damaged video, nothing was read after {last}: {reason}") from error


def _open_file(path: str) -> IO[bytes]:
    return open_source(path) if is_remote(path) else open(path, "rb", opener=open_regular)


def _open_video(av: Any, file: IO[bytes], max_pixels: int) -> Any:
    """Open the first video stream of a file; frames that are too large are refused before memory is taken for them."""
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": ""}
    container = av.open(file, options=options, metadata_errors="ignore")
    try:
        if not container.streams.video:
            raise FrameError("a video file without pictures in it")
        context = container.streams.video[0].codec_context
        _check_size(context.width, context.height, max_pixels)
        context.options = {"max_pixels": str(max_pixels)}
    except BaseException:
        container.close()
        raise
    return container


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise FrameError(f"frames of {width}×{height}; at most {max_pixels:,} pixels are read. Raise max_pixels")


def _time_of(frame: Any, stream: Any, number: int) -> float:
    """Seconds from the start of the stream; of a frame without a time, by its number."""
    if frame.pts is None or frame.time_base is None:
        return number / float(stream.average_rate or 25)
    return max(0.0, float((frame.pts - (stream.start_time or 0)) * frame.time_base))


def _duration(container: Any, stream: Any) -> float:
    """Seconds that the frames should last, 0 where that is unknown: sound may last longer."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return container.duration / 1e6 if container.duration and len(container.streams) == 1 else 0.0


def _to_ppm(frame: Any) -> bytes:
    """An upright frame as an image file, uncompressed."""
    pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    if turns := round(frame.rotation / 90) % 4:
        pixels = np.ascontiguousarray(np.rot90(pixels, turns))
    height, width, _ = pixels.shape
    return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()
