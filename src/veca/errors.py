"""The base of every error that veca raises on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Around imports of optional packages: one that is not installed is an error that names the extra with it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "veca").partition(".")[0] == "veca":  # a module of ours is missing: a defect
            raise
        raise ArgumentError(f"{what} {error.name}, which is not installed: pip install 'veca[{extra}]'") from error
