"""Files of weights that nobody vouches for. Those of `fuzz_checkpoints.py` are tried in a process of their own."""

from __future__ import annotations

import collections
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import fuzz_checkpoints as fuzz
import pytest
import torch
from conftest import GOLDEN, make_tiny
from fuzz_checkpoints import Case, archive, call, checkpoint, laughs, tensor
from torch import Tensor, nn

import veca
from veca import CheckpointError
from veca.checkpoint.released import save_released
from veca.checkpoint.torch_file import Unsupported, read_torch_file


def contents() -> dict[str, Any]:
    base = torch.arange(24.0).view(4, 6)
    with_attribute = torch.ones(2)
    with_attribute.note = "kept by pickle"  # type: ignore[attr-defined]
    layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return {
        "views": [base, base[1:3, ::2], base.t(), base[:0], base[0, 0]],
        "parameter": nn.Parameter(base),
        "attribute": with_attribute,
        "types": [base.to(t) for t in (torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool)],
        "complex": torch.tensor([1j]),
        "state_dict": layers.state_dict(),
        "optimizer": torch.optim.AdamW(layers.parameters()).state_dict(),
        "numbers": [1, -5, 2**40, -(2**70), 1.5, float("inf"), None, True, False],
        "text": ["é\ud800", ""],
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "dictionaries": {1: 2, "x": {}, None: 1.0, "ordered": collections.OrderedDict(a=1)},
        "torch": [torch.Size([1, 2]), torch.float16],
    }


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        alike = found.shape == expected.shape and found.dtype == expected.dtype
        return alike and torch.equal(found, expected)
    if isinstance(expected, dict):
        return type(found) is type(expected) and same([*found.items()], [*expected.items()])
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


@pytest.mark.parametrize("legacy", [False, True])
def test_reads_what_torch_load_reads(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "x.pt"
    torch.save(contents(), path, _use_new_zipfile_serialization=not legacy)
    assert same(read_torch_file(path), torch.load(path, weights_only=True))
    float8 = torch.ones(3).to(torch.float8_e4m3fn)
    torch.save([float8, torch.zeros(2, dtype=torch.uint16)], path)
    found = read_torch_file(path)
    assert [each.dtype for each in found] == [torch.float8_e4m3fn, torch.uint16]
    assert torch.equal(found[0].float(), float8.float())


def test_reads_the_released_file() -> None:
    path = GOLDEN / "official_checkpoint.pt"
    assert same(read_torch_file(path), torch.load(path, weights_only=True))


@pytest.mark.filterwarnings("ignore")  # torch has second thoughts about its own tensors
@pytest.mark.parametrize("legacy", [False, True])
def test_other_harmless_contents_do_not_keep_a_file_from_being_read(tmp_path: Path, legacy: bool) -> None:
    extra = {
        "a set": {1, 2},
        "bytes": b"abc",
        "a device": torch.device("cpu"),
        "a complex number": 1j,
        "a counter": collections.Counter("aab"),
        "a bytearray": bytearray(b"abc"),
        "a torch.sparse_coo tensor": torch.eye(2).to_sparse(),
        "a meta tensor": torch.empty(3, device="meta"),
        "a quantized tensor": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }
    path = tmp_path / "x.pt"
    contents = {**extra, (1, 2): "a tuple as key", "last": torch.ones(3)}
    torch.save(contents, path, _use_new_zipfile_serialization=not legacy)
    found = read_torch_file(path)
    for kind in extra:
        assert isinstance(found[kind], Unsupported)
        assert found[kind].kind == kind
    assert torch.equal(found["last"], torch.ones(3))


HUGE = torch.zeros(1).expand(2**31)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (fuzz.saved({**fuzz.released(), "extra": HUGE}), r"a tensor of \(2147483648,\) in a storage of 1 numbers"),
        (archive(checkpoint(extra=tensor("0", 2**40, [1], [1]))), "has not the 4,398,046,511,104 bytes"),
        (archive(checkpoint(extra=b"\x96" + bytes([255] * 7) + b"\0")), "damaged or truncated"),
        (
            archive(checkpoint(), {"data/0": bytes(2**24)}, zipfile.ZIP_DEFLATED),
            "entries of the archive are compressed",
        ),
        (archive(checkpoint(config={"a": laughs("lists")})), "nested more than 20 levels deep"),
        (archive(checkpoint(config={"num_heads": fuzz.integer(10**400)})), r"num_heads=1000\d*\.\.\.0*: must be"),
        (archive(checkpoint(extra=call("os system", fuzz.text("true")))), "refused, .*: it names os.system$"),
        (archive(checkpoint({"module." * 400_000: tensor("0", 0, [0], [1])}), {"data/0": b""}), "unknown $"),
    ],
    ids=["stride 0", "storage", "bytearray", "compressed", "laughs", "number", "code", "prefixes"],
)
def test_hostile_files_are_refused_in_a_sentence(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        veca.load(path)


@pytest.mark.filterwarnings("ignore")  # torch has second thoughts about its own tensors
def test_hundreds_of_hostile_files(tmp_path: Path) -> None:
    report = fuzz.run(600, 0, tmp_path)
    print(report)
    assert report.problems == []
    assert sum(report.outcomes.values()) == 600
    assert report.outcomes[fuzz.MODEL] >= 60
    assert report.outcomes[fuzz.REFUSAL] >= 300


def test_the_fuzz_finds_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = fuzz.ours()
    found = [Case("good", good, fuzz.MODEL), Case("taken", good, fuzz.REFUSAL), Case("refused", b"text", fuzz.MODEL)]
    monkeypatch.setattr(fuzz, "cases", lambda count, seed: found)
    (tmp_path / "a").mkdir()
    report = fuzz.run(3, 0, tmp_path / "a")
    assert [problem.partition(":")[0] for problem in report.problems] == ["taken", "refused"]
    (tmp_path / "b" / fuzz.CANARY).mkdir(parents=True)
    monkeypatch.setattr(fuzz, "MAX_MIB", -1e9)
    ended = subprocess.CompletedProcess([], -14)
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: run(*args, **options) and ended)
    problems = fuzz.run(3, 0, tmp_path / "b").problems
    assert "code in a file was executed" in problems
    assert any(problem.startswith("good: took") for problem in problems)
    assert any("child ended with -14 at the end" in problem for problem in problems)


def test_the_command_says_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(fuzz.saved({**fuzz.released(), "extra": HUGE}))
    command = [
        sys.executable,
        "-m",
        "veca",
        "convert",
        "--model",
        str(tmp_path / "x.pt"),
        "--out",
        str(tmp_path / "y.pt"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "x.pt: damaged or truncated checkpoint: a tensor of (2147483648,)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "y.pt").exists()


def test_a_large_released_file_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = make_tiny(embed_dim=1152, num_heads=3, depth=1)
    save_released(model, tmp_path / "x.pt")
    again = veca.load(tmp_path / "x.pt")
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
