"""Atomic writes, checks before writing, and locks on folders."""

import errno
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from veca.errors import ArgumentError, VecaError

if sys.platform != "win32":
    import fcntl

_LOCK_TRIES = 100


class InUseError(VecaError, ValueError):
    """Another run writes to the folder."""


def check_writable(path: str | os.PathLike[str], folder: bool = False) -> None:
    """Raise ArgumentError if the file `path`, or with `folder` a file in it, cannot be written. Creates the folders."""
    if "\0" in os.fspath(path):
        raise ArgumentError(f"{os.fspath(path)!r} cannot be written: no name holds a NUL; choose another")
    parent = Path(path) if folder else _resolve_file(path).parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        reason = "not a folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise ArgumentError(f"{path} cannot be written ({parent}: {reason}); choose another place") from error


@contextmanager
def remove_empty(folder: str | os.PathLike[str]) -> Iterator[None]:
    """If the block fails, remove the folder and those above it that it created, as far as they are empty."""
    path = Path(folder).absolute()
    created = [each for each in (path, *path.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty, or never created
            for each in created:
                each.rmdir()
        raise


def check_utf8(path: str | os.PathLike[str]) -> None:
    """Raise ArgumentError if the name is not UTF-8: pyarrow and safetensors cannot open such files."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{path} is no name in UTF-8, as files of features need; choose another") from None


def list_paths(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """One path or several, as a list of strings."""
    return [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


@contextmanager
def temporary_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path in the folder of `path`, which is created; what is still there when the block ends is removed."""
    path = _resolve_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Move a complete file to `path` in the same file system, replacing what is there."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())  # else a power cut could leave the name without the content
    os.replace(temporary, path)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path that replaces `path` when the block succeeds, and is removed when it raises.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_path(folder + "/a.txt") as part:
    ...         _ = part.write_text("whole")
    ...     os.listdir(folder)
    ['a.txt']
    """
    with temporary_path(path) as temporary:
        yield temporary
        publish(temporary, _resolve_file(path))


# (process, path) of the lock files that this process holds: locks of the system exclude other processes only.
_held: set[tuple[int, str]] = set()
_held_guard = threading.Lock()


@contextmanager
def locked(folder: str | os.PathLike[str], name: str = "lock") -> Iterator[None]:
    """Hold a lock on `folder` while the block runs; raises InUseError if another run holds it.

    It excludes this process, others, and other machines that share the folder. The system releases the lock of a
    process that dies. The lock file is removed after the block.
    """
    path = Path(os.path.realpath(folder), name)
    holder = os.getpid(), str(path)
    busy = InUseError(f"another run is at work in {folder}; wait for it, or choose another name")
    with _held_guard:
        if holder in _held:
            raise busy
        _held.add(holder)
    try:
        with _open_locked(path, busy) as file:
            try:
                yield
            finally:
                # Removed while locked, and only if it is still the same file: never one that another run has locked.
                with suppress(OSError):
                    if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                        path.unlink()
    finally:
        _held.discard(holder)


def _open_locked(path: Path, busy: InUseError) -> IO[bytes]:
    """Open and lock the lock file."""
    for _ in range(_LOCK_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), ExitStack() as stack:  # another run has just removed it
            file, lockable = stack.enter_context(open(path, "ab")), True
            if sys.platform != "win32":
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: forked workers would inherit it
                except (BlockingIOError, PermissionError):
                    raise busy from None
                except OSError:
                    lockable = False  # the file system has no locks
            # If the run that held it has removed it meanwhile, the lock is on a file that others do not see: try again.
            if not lockable or os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                stack.pop_all()
                return file
    raise busy


def _resolve_file(path: str | os.PathLike[str]) -> Path:
    """The target of `path`, links resolved. Raises ArgumentError for a device or pipe: a file would replace it."""
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise ArgumentError(f"{path} is a device, a pipe or a socket, which a file would replace; name a file")
    return target
