from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from veca.utils import files
from veca.utils.files import InUseError, atomic_path, check_writable, locked


def test_the_file_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.txt"
    with atomic_path(target) as part:
        part.write_text("first half")
        assert not target.exists()
    assert target.read_text() == "first half"
    assert os.listdir(target.parent) == ["a.txt"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "a.txt") as part:
        part.write_text("new")
        raise KeyboardInterrupt
    assert (tmp_path / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_cannot_be_written_is_said_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a file")
    for folder in (False, True):
        with pytest.raises(ValueError, match=r"b.txt cannot be written \(.*: not a folder\); choose another place"):
            check_writable(tmp_path / "a.txt" / "b.txt", folder)
    with pytest.raises(ValueError, match="a.txt cannot be written"):
        check_writable(tmp_path / "a.txt", folder=True)
    check_writable(tmp_path / "a.txt")  # a file may take its place
    check_writable(tmp_path / "new" / "b.txt")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "new"]
    assert not os.listdir(tmp_path / "new")


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there" / "a.txt")  # which is still to be made
    for text in ("first", "second"):
        with atomic_path(tmp_path / "link") as part:
            part.write_text(text)
        assert (tmp_path / "there" / "a.txt").read_text() == text
    assert (tmp_path / "link").is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has pipes")
def test_a_pipe_is_no_file_and_stays_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is a device, a pipe or a socket"):
        check_writable(tmp_path / "pipe")
    with pytest.raises(ValueError, match="name a file"), atomic_path(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo()


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"), atomic_path(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not os.listdir(tmp_path)


# Locks


def refused(folder: Path) -> bool:
    try:
        with locked(folder):
            return False
    except InUseError:
        return True


def refused_elsewhere(folder: Path) -> bool:
    """Whether another process is refused."""
    pid = os.fork()
    if pid == 0:
        os._exit(10 + refused(folder))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (10, 11)
    return code == 11


forks = pytest.mark.skipif(sys.platform != "linux", reason="forks")


@forks
def test_one_run_at_a_time_is_in_a_folder(tmp_path: Path) -> None:
    """Another process, another thread and the same one are refused; then nothing remains of it."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with locked(tmp_path / "run"):
        assert refused(tmp_path / "run")
        assert refused(tmp_path / "link")
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(refused(tmp_path / "run")))
        thread.start()
        thread.join()
        assert found == [True]
        assert refused_elsewhere(tmp_path / "run")
        assert not refused(tmp_path / "another")
    assert os.listdir(tmp_path / "run") == []
    assert not refused_elsewhere(tmp_path / "run")
    assert not refused(tmp_path / "run")


@forks
def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with locked(tmp_path):
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.listdir(tmp_path) == ["lock"]
    assert not refused(tmp_path)
    assert os.listdir(tmp_path) == []


@forks
def test_a_lock_file_that_is_removed_while_another_run_opens_it_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run opened the file of the first, which ends and removes it: that lock would exclude nobody."""
    real, calls = files.fcntl.lockf, 0

    def lockf(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (tmp_path / "lock").unlink()
        real(*arguments)

    monkeypatch.setattr(files.fcntl, "lockf", lockf)
    with locked(tmp_path):
        assert calls == 2
        assert refused_elsewhere(tmp_path)


@forks
def test_the_lock_file_of_another_run_stays(tmp_path: Path) -> None:
    """When somebody has cleared the folder of a run, the next is not to lose its lock with the end of the first."""
    with locked(tmp_path):
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").touch()
    assert os.listdir(tmp_path) == ["lock"]


def test_a_file_system_without_locks_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("veca.utils.files.fcntl.lockf", lockf)
    with locked(tmp_path):
        assert refused(tmp_path)  # in this process it is known
