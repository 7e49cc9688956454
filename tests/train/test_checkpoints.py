"""Checkpoint files: whole or not there, and never believed when a byte of them is not as it was written."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from veca.train import checkpoints
from veca.train.checkpoints import (
    DamagedError,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    remove_old_checkpoints,
    write_checkpoint,
)

FILES = ("model.safetensors", "optimizers.safetensors", "state.json")


def contents(step: int) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(step)
    return {"model": {"a": torch.randn(40, 30), "b": torch.tensor(3)}, "optimizers": {"adamw/a/step": torch.ones(())}}


def write(folder: Path, *steps: int) -> list[Path]:
    facts = {"recipe": {"seed": 1, "budgets": {8: 0.1, 16: 0.9, 64: 1}}, "best": 0.1 + 0.2, "nothing": None}
    return [write_checkpoint(folder, step, {**facts, "step": step}, contents(step)) for step in steps]


def read(folder: Path) -> tuple[int | None, list[str]]:
    """The step of the checkpoint that is used, and what was said."""
    said: list[str] = []
    saved = newest_checkpoint(folder, said.append)
    return None if saved is None else saved.step, said


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def cut(path: Path, at: float) -> None:
    os.truncate(path, int(at * path.stat().st_size))


def remove(path: Path, _: float) -> None:
    path.unlink()


def test_a_checkpoint_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path, 7)[0]
    saved = read_checkpoint(path)
    assert (path.name, saved.step, saved.facts["best"], saved.facts["nothing"]) == ("step-00000007", 7, 0.1 + 0.2, None)
    assert saved.tensors.keys() == contents(7).keys()
    for name, tensors in contents(7).items():
        assert saved.tensors[name].keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert torch.equal(saved.tensors[name][key], tensor)
            assert saved.tensors[name][key].dtype == tensor.dtype


def test_a_folder_without_checkpoints_gives_none(tmp_path: Path) -> None:
    assert read(tmp_path) == read(tmp_path / "nowhere") == (None, [])


def test_by_number_and_not_by_name(tmp_path: Path) -> None:
    write(tmp_path, 100_000_000, 99_999_999)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-99999999", "step-100000000"]
    assert read(tmp_path)[0] == 100_000_000


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("damage", "at"), [(flip, 0), (flip, 0.02), (flip, 0.5), (flip, 1), (cut, 0), (cut, 0.5), (cut, 0.99), (remove, 0)]
)
def test_a_damaged_one_is_named_and_the_one_before_it_used(
    tmp_path: Path, damage: Callable[[Path, float], None], file: str, at: float
) -> None:
    newest = write(tmp_path, 8, 16, 24)[-1]
    damage(newest / file, at)
    step, said = read(tmp_path)
    assert step == 16
    assert len(said) == 1
    assert "damaged: checkpoint step-00000024" in said[0]
    assert "the one before it" in said[0]


@pytest.mark.parametrize("text", ["", "{}", "null", "[]", '{"sha256": 1}', "[" * 100_000, "\0" * 64])
def test_an_invalid_state_file_is_damage(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 8, 16)[-1]
    (path / "state.json").write_text(text)
    assert read(tmp_path)[0] == 8


def test_a_fact_that_was_edited_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path, 8, 16)[-1] / "state.json"
    state = json.loads(path.read_text())
    state["facts"]["best"] = 0.0
    path.write_text(json.dumps(state))
    step, said = read(tmp_path)
    assert step == 8
    assert "state.json is not as it was written" in said[0]


def test_damaged_checkpoints_are_named_and_passed_over(tmp_path: Path) -> None:
    paths = write(tmp_path, 8, 16, 24)
    for path in paths[1:]:
        flip(path / "model.safetensors", 0.5)
    step, said = read(tmp_path)
    assert step == 8
    assert ["step-00000024" in said[0], "step-00000016" in said[1], len(said)] == [True, True, 2]


def test_all_damaged_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    for path in write(tmp_path, 8, 16):
        cut(path / "optimizers.safetensors", 0.5)
    with pytest.raises(DamagedError, match="none of the 2 checkpoints in .* can be read.*backup, or .*--overwrite"):
        read(tmp_path)


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 8)
    for name in ("step-00000099.bak", "notes", ".step-00000016.part"):
        (tmp_path / name).mkdir()
    assert read(tmp_path) == (8, [])
    write(tmp_path, 24, 32)
    remove_old_checkpoints(list_checkpoints(tmp_path)[-1], 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000032", "step-00000099.bak"]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_only_the_newest_checkpoints_stay(tmp_path: Path, keep: int) -> None:
    write(tmp_path, 8, 16, 24)
    remove_old_checkpoints(list_checkpoints(tmp_path)[-1], keep)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"step-{step:08d}" for step in (8, 16, 24)][-keep:]


def test_an_old_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path, 8)[0]
    (path / "extra.safetensors").write_bytes(b"of another run")
    flip(path / "model.safetensors", 0.5)
    write(tmp_path, 8)
    assert read(tmp_path) == (8, [])
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("limit", [0, 1000, 4000])
def test_a_full_disk_leaves_no_partial_checkpoint(tmp_path: Path, limit: int) -> None:
    """What cannot be written is an OSError, and nothing is left of it. A limit on file sizes stands in for the disk."""
    write(tmp_path, 8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write(tmp_path, 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008"]
    assert read(tmp_path) == (8, [])


def test_not_there_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    digest = checkpoints._hash_file
    monkeypatch.setattr(
        checkpoints, "_hash_file", lambda path: (seen.append(list_checkpoints(tmp_path)), digest(path))[1]
    )
    write(tmp_path, 8)
    assert seen == [[], []]
    assert len(list_checkpoints(tmp_path)) == 1


def test_half_of_one_is_swept_away(tmp_path: Path) -> None:
    """What a killed run left half written is no checkpoint, and goes with the next."""
    shutil.copytree(write(tmp_path, 8)[0], tmp_path / ".step-00000016.part")
    assert read(tmp_path) == (8, [])
    write(tmp_path, 16)
    remove_old_checkpoints(list_checkpoints(tmp_path)[-1], 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000008", "step-00000016"]
