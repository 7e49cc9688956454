"""Suffixes of image files: those that are decoded, and those that are reported as not supported."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from veca.errors import warn_caller

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".avif", ".avifs"}
    | {".tif", ".tiff", ".gif", ".bmp", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm"}
)
# Suffixes of image files that are not decoded: they are counted, so that nobody assumes they were read
UNSUPPORTED = frozenset(
    {".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".jpx", ".jxr", ".svg", ".psd", ".psb", ".xcf", ".tga", ".exr"}
    # Raw files of cameras
    | {".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dng", ".erf", ".iiq", ".kdc", ".mrw", ".nef", ".nrw", ".orf", ".pef"}
    | {".raf", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"}
)

# Suffixes of video files, whose frames are read if a command is told how many
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".m2ts", ".3gp")


def unsupported_suffix(source: object) -> str:
    """Return the suffix of a path or named stream if it is in `UNSUPPORTED`, else an empty string."""
    name = getattr(source, "name", source)
    suffix = os.path.splitext(os.fspath(name))[1].lower() if isinstance(name, str | os.PathLike) else ""
    return suffix if suffix in UNSUPPORTED else ""


class UnsupportedFiles(dict[str, Counter[str]]):
    """Files of unsupported formats that directory walks found: the count of each suffix, by source.

    `str()` gives a sentence for the user, or an empty string.
    """

    def __str__(self) -> str:
        total = sum(self.values(), Counter[str]())
        if not total:
            return ""
        suffixes = ", ".join(f"{suffix} ({number:,})" for suffix, number in total.most_common())
        files = f"{total.total():,} file{'s were' if total.total() != 1 else ' was'} left out"
        images = "Such formats are not read: convert to JPEG or PNG first" * bool(total.keys() - set(VIDEOS))
        videos = "Frames of videos are read by veca embed --fps 2 (fps=2)" * bool(total.keys() & set(VIDEOS))
        return f"{files}: {suffixes}. {'. '.join(filter(None, [images, videos]))}"

    def append_to(self, message: str) -> str:
        """Return `message` followed by the sentence, if there is one."""
        return f"{message}. {self}" if str(self) else message

    def warn(self) -> None:
        """Warn the caller of veca if there are any."""
        if text := str(self):
            warn_caller(text)


_current: ContextVar[UnsupportedFiles | None] = ContextVar("unsupported_files", default=None)


@contextmanager
def collect_unsupported() -> Iterator[UnsupportedFiles]:
    """Collect what directory walks that end inside the block report; repeated walks of one source count once."""
    collected = UnsupportedFiles()
    token = _current.set(collected)
    try:
        yield collected
    finally:
        _current.reset(token)


def select_images(paths: Iterable[str], source: str, also: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the paths of images and of files with suffixes in `also`.

    Those in unsupported formats are at the end reported to the innermost `collect_unsupported` block.
    """
    unsupported = Counter[str]()
    for path in paths:
        suffix = os.path.splitext(path)[1].lower()
        if suffix in EXTENSIONS or path.lower().endswith(also):
            yield path
        elif suffix in UNSUPPORTED or suffix in VIDEOS:
            unsupported[suffix] += 1
    if (collected := _current.get()) is not None:
        collected[source] = unsupported
