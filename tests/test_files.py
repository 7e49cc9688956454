from __future__ import annotations

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
