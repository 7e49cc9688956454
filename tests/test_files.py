from __future__ import annotations

import os
from pathlib import Path

import pytest

from veca.files import atomic_path


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
