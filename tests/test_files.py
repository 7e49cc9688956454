from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from veca.files import atomic_path, check_writable


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
