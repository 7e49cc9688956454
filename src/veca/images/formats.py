"""Pictures in formats that are not read: known by their suffix, so that nobody takes them for read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from veca.errors import warn_caller

UNREAD = frozenset(
    {".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".jpx", ".jxr", ".svg", ".psd", ".psb", ".xcf", ".tga", ".exr"}
    | {".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dng", ".erf", ".iiq", ".kdc", ".mrw", ".nef", ".nrw", ".orf", ".pef"}
    | {".raf", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"}
)
"""Their suffixes, the second half of them raw ones of cameras."""


def unread_suffix(source: object) -> str:
    """The suffix of a file that is one of `UNREAD`, or nothing."""
    name = getattr(source, "name", source)
    suffix = os.path.splitext(os.fspath(name))[1].lower() if isinstance(name, str | os.PathLike) else ""
    return suffix if suffix in UNREAD else ""


class LeftOut(dict[tuple[str, ...], Counter[str]]):
    """Pictures that walks passed by because their format is not read: how many of each suffix, by walk.

    As text it is a sentence that says so, or nothing.
    """

    def __str__(self) -> str:
        kinds = sum(self.values(), Counter[str]())
        found = ", ".join(f"{suffix} ({number:,})" for suffix, number in kinds.most_common())
        number = f"{kinds.total():,} file{'s were' if kinds.total() != 1 else ' was'} left out"
        return f"{number}: {found}. Such formats are not read: convert to JPEG or PNG first" if kinds else ""

    def after(self, text: str) -> str:
        """`text`, and then the sentence."""
        return f"{text}. {self}" if str(self) else text

    def warn(self) -> None:
        if text := str(self):
            warn_caller(text)


_left_out: ContextVar[LeftOut | None] = ContextVar("left_out", default=None)


@contextmanager
def noting_left_out() -> Iterator[LeftOut]:
    """What the walks that come to their end in the block leave out; one that is made twice counts once."""
    noted = LeftOut()
    token = _left_out.set(noted)
    try:
        yield noted
    finally:
        _left_out.reset(token)


def note_left_out(walk: tuple[str, ...], kinds: Counter[str]) -> None:
    """For a walk that has come to its end."""
    if (noted := _left_out.get()) is not None:
        noted[walk] = kinds
