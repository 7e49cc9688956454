"""Base classes of our errors, and warnings that point at the caller's line."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARIES = ("veca", "torch", "timm", "transformers")
"""Packages whose frames may be between the caller's line and ours."""


class VecaError(Exception):
    """A mistake that the caller can correct: the message names the value, the rule and the way out.

    The command line prints it as one line; any other exception is a bug and shows a traceback.

    >>> import veca
    >>> try:
    ...     veca.load("veca_tinny")
    ... except veca.VecaError as error:
    ...     print(type(error).__name__)
    CheckpointError
    """


class ArgumentError(VecaError, ValueError):
    """An invalid value of an argument or option."""


class NonFiniteError(VecaError, ValueError):
    """Features with NaN or infinity in them."""


def warn_caller(message: str) -> None:
    """Warn at the line of the program that called into veca, however deep the call stack below it is."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Context manager for imports of optional packages: a missing one raises an error that names its extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "veca").partition(".")[0] == "veca":  # a module of ours is missing: a bug
            raise
        raise ArgumentError(f"{what} {error.name}, which is not installed: pip install 'veca[{extra}]'") from error
