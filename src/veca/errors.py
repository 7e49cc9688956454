"""The base of every error that veca raises on purpose, and warnings that point at the caller."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARIES = ("veca", "torch", "timm", "transformers")
"""Packages whose frames lie between a caller's line and ours."""


class VecaError(Exception):
    """A mistake the caller can correct: the message names the value, the rule and the way out.

    The command line prints such an error as one line; any other exception is a defect and shows its traceback.

    >>> import veca
    >>> try:
    ...     veca.load("veca_tinny")
    ... except veca.VecaError as error:
    ...     print(type(error).__name__)
    CheckpointError
    """


class ArgumentError(VecaError, ValueError):
    """An argument or option has a value that cannot be used."""


class NonFiniteError(VecaError, ValueError):
    """A model gave features with NaN or infinity in them."""


def warn_caller(message: str) -> None:
    """Warn, pointing at the line of the program that called into veca, however deep inside this is called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Around imports of optional packages: one that is not installed is an error that names the extra with it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "veca").partition(".")[0] == "veca":  # a module of ours is missing: a defect
            raise
        raise ArgumentError(f"{what} {error.name}, which is not installed: pip install 'veca[{extra}]'") from error
