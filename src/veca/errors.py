"""The base of every error that veca raises on purpose."""

from __future__ import annotations


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
