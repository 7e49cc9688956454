"""What the commands say when something is wrong, and that they say it in text a terminal can show."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
from conftest import make_tiny
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from safetensors.torch import save_file
from sample_images import noise_image

import veca
import veca.cli.main
from veca.config import ConfigError
from veca.errors import ArgumentError, needs_extra
from veca.utils.console import PlainConsole, progress_bar

HUGE = "1" + "0" * 400
LONG = "a" * 5000
HOSTILE = "[/b][red]x\x1b[31m\x9b\u202e\r"
SHOWN = r"[/b][red]x\x1b[31m\x9b\u202e\r"
RECIPE = """model: {size: veca_tiny}
teacher: {name: nobody}
data: {train: photos}
schedule: {epochs: null, steps: 9, warmup: 1}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, a few pictures, and files of every kind that are empty, of noise or of the wrong kind."""
    place = tmp_path_factory.mktemp("place")
    veca.save(make_tiny(), place / "m")
    rng = np.random.default_rng(0)
    image = noise_image(0, 60, 40)
    labelled = [f"lab/{split}/{kind}/0.png" for split in ("train", "val", "test") for kind in ("cat", "dog")]
    for name in ("a.png", "photos/0.png", "few/cat/0.png", *labelled):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(place / name)
    for name in ("folder.png", "folder.yaml", "folder.parquet", "empty"):
        (place / name).mkdir()
    for kind in ("parquet", "yaml", "json", "safetensors", "pt", "png", "onnx", "tar"):
        (place / f"empty.{kind}").touch()
        (place / f"noise.{kind}").write_bytes(rng.bytes(400))
    deep = "[" * 100_000
    (place / "deep.json").write_text(deep)
    (place / "deep.yaml").write_text("batch: " + deep[:3000])
    (place / "torn.yaml").write_text("a: [1, 2\nb: {")
    (place / "list.yaml").write_text("- 1\n")
    (place / "recipe.yaml").write_text(RECIPE)
    # Aliases of aliases: a few lines whose repr would fill the memory.
    nested = "".join(f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    (place / "nested.yaml").write_text(f"{RECIPE}budgets:\n  a0: &a0 [x, x]\n{nested}")
    pq.write_table(pa.table({"number": [1, 2]}), place / "numbers.parquet")
    (place / "tuned").mkdir()
    (place / "tuned" / "finetune.json").write_text(deep)
    (place / "wrong").mkdir()
    (place / "wrong" / "finetune.json").write_text('{"data": 3}')
    (place / "rows").mkdir()
    (place / "rows" / "rows").mkdir()
    (place / "rows" / "rows" / "one.json").write_text(deep)
    return place


def call(arguments: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["veca", *arguments])
    with pytest.raises(SystemExit) as caught:
        veca.cli.main.main()
    return int(caught.value.code or 0)


def check_plain(text: str) -> None:
    """Nothing in it moves a cursor, changes a colour or turns the direction of writing."""
    assert [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t"] == []


EMBED = ["embed", "photos", "--model", "m", "--size", "32", "--workers", "0", "--out"]
KNN = ["probe", "knn", "--model", "m", "--data", "lab", "--workers", "0", "--k", "1"]
TUNE = ["finetune", "classify", "--model", "m", "--data", "lab", "--size", "32", "--workers", "0", "--out", "tuned-out"]
PLAN = ["distill", "recipe.yaml", "--dry-run", "--images", "9", "--set"]

WRONG: list[tuple[list[str], str]] = [
    (["nonsense"], "no command 'nonsense'"),
    (["--" + HOSTILE], r"No such option: --[/b][red]x\x1b[31m\x9b\u202e"),
    ([*EMBED, "f.parquet", "--cores", HOSTILE], "'[/b][red]x\\x1b[31m\\x9b\\u202e\\r' is no budget"),
    ([*EMBED, "f.parquet", "--fit", "[/b]"], "'[/b]' is not one of 'crop'"),
    ([*EMBED, "f.parquet", "--workers", HUGE], "--workers"),
    ([*EMBED, "f.parquet", "--size", "1" * 5000], "--size"),
    ([*EMBED, "f.parquet", "--size", "-16"], "size=-16"),
    ([*EMBED, "f.parquet", "--cores", HUGE], "cores=1000"),
    ([*EMBED, "f.parquet", "--batch-size", "0"], "--batch-size"),
    ([*EMBED, "f.parquet", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
    ([*EMBED, "f.parquet", "--device", "foo"], "device 'foo' cannot be used"),
    ([*EMBED, "f.parquet", "--device", "meta"], "device 'meta' cannot be used: it holds no numbers"),
    ([*EMBED, "f.parquet", "--device", "hpu"], "device 'hpu' cannot be used"),
    ([*EMBED, "f.parquet", "--device", HOSTILE], SHOWN),
    ([*EMBED, "f\0.parquet"], r"'f\x00.parquet' cannot be written"),
    ([*EMBED, "f\udce9.parquet"], r"f\udce9.parquet is no name in UTF-8"),
    ([*EMBED, f"{LONG}.parquet"], "File name too long"),
    ([*EMBED, "photos"], "photos holds files that no run of this left"),
    ([*EMBED, "a.png/f.parquet"], "a.png/f.parquet cannot be written"),
    ([*EMBED, "/dev/null"], "/dev/null cannot be written"),
    (["embed", "nowhere" + HOSTILE, *EMBED[2:], "f.parquet"], r"nowhere[/b][red]x\x1b[31m\x9b\u202e\r"),
    (["embed", "numbers.parquet", *EMBED[2:], "f.parquet", "--column", "[b]"], "no column of pictures '[b]'"),
    (["embed", "nope://a/b", *EMBED[2:], "f.parquet"], "nope://a/b"),
    (["embed", "empty", *EMBED[2:], "f.parquet"], "empty: no images there"),
    (["info", "--model", "m", "--size", f"16{HUGE[1:]}"], "must be a multiple of 16 up to 1,048,576"),
    (["info", "--model", "m", "--cores", HUGE], "a budget is an integer from 1 to 64"),
    (["info", "--model", HOSTILE], f"{SHOWN}: no such file or folder"),
    (["info", "--model", LONG], "File name too long"),
    (["info", "--model", "m\0"], r"m\x00: no such file or folder"),
    (["info", "--model", "empty.safetensors"], "empty.safetensors: is empty"),
    (["info", "--model", "noise.safetensors"], "noise.safetensors: "),
    (["info", "--model", "noise.pt"], "noise.pt: "),
    (["info", "--model", "photos"], "photos: the folder holds no model.safetensors"),
    (["convert", "--model", "noise.pt", "--out", "x"], "noise.pt: "),
    (["demo", "noise.png", "--model", "m", "--size", "32"], "noise.png: not one of JPEG"),
    (["demo", "folder.png", "--model", "m", "--size", "32"], "folder.png: a directory"),
    (["demo", "a.png", "--model", "m", "--size", "33"], "size is 33"),
    (["demo", "a.png", "--model", "m", "--device", "meta"], "device 'meta' cannot be used"),
    (
        ["cores", "--model", "m", "noise.tar", "--size", "32", "--workers", "0", "--out", "c.json"],
        "noise.tar: damaged archive",
    ),
    (["cores", "--model", "m", "photos", "--out", "c.txt"], "c.txt: numbers are written as .json"),
    (["figure", "[/b]"], "no command '[/b]'"),
    (["figure", "paths", "a.png", "--model", "m", "--cores", "x"], "--cores"),
    (["figure", "similarity", "a.png", "--model", "m", "--size", "32", "--patch", f"{HUGE}x1"], "--patch"),
    (["figure", "similarity", "a.png", "--patch", "foo"], "expected ROWxCOLUMN, both counted from 1, as 8x5"),
    (["figure", "cores", "a.png", "--model", "m", "--cores", "65"], "from 1 to 64; take one of these, or leave it out"),
    ([*EMBED, "f.parquet", "--cores", "65"], "cores=65: must be from 1 to 64; leave it out for all 64"),
    ([*EMBED, "f.parquet", "--size", "native"], "images keep their own size by --fit native, of up to --max-patches"),
    (["distill"], "name a recipe: veca distill recipes/quick.yaml."),
    (["distill", "nowhere.yaml"], "nowhere.yaml: no such recipe"),
    (["distill", "folder.yaml"], "folder.yaml cannot be read"),
    (["distill", "empty.yaml"], "empty.yaml holds NoneType"),
    (["distill", "noise.yaml"], "noise.yaml cannot be read"),
    (["distill", "torn.yaml"], "torn.yaml cannot be read"),
    (["distill", "deep.yaml"], "deep.yaml cannot be read: maximum recursion depth"),
    (["distill", "list.yaml"], "list.yaml holds list"),
    (["distill", "nested.yaml", "--dry-run"], "budgets"),
    ([*PLAN, "data.train=2020-13-45"], "--set data.train=2020-13-45: the value is not YAML"),
    ([*PLAN, f"batch={'1' * 5000}"], "the value is not YAML"),
    ([*PLAN, f"batch=0x{'f' * 9000}"], "batch=<int>: must be an integer of 64 bits"),
    ([*PLAN, f"schedule.peak={HUGE}"], "must be a finite number"),
    ([*PLAN, f"model.overrides.mlp_ratio={HUGE}"], "must be a finite number"),
    ([*PLAN, "budgets={8: 1e308, 16: 1e308}"], "budgets={8: 1e+308, 16: 1e+308}"),
    ([*PLAN, "batch=1", "--processes", HUGE], "a plan is for at least 1 of each"),
    ([*PLAN, "[/b]=1"], "unknown key '[/b]'"),
    (["report", "nowhere"], "nowhere is not a folder"),
    (["report", "wrong"], "wrong: finetune.json or result.json is not as `veca finetune` wrote it"),
    (["report", "rows"], "rows/one.json is not whole JSON"),
    (["export", "--model", "m", "--out", "x.doc"], "x.doc: format onnx is written to files that end in .onnx"),
    (["export", "--model", "m", "--out", "x.onnx", "--size", "0x0"], "size 0x0"),
    (["bench", "plot", "deep.json", "--out", "plots"], "deep.json is no results.json"),
    (["bench", "plot", "folder.png", "--out", "plots"], "folder.png"),
    (["bench", "model", "--case", "[/b]"], "case '[/b]'"),
    (["bench", "model", "--case", "tiny:16:1", "--out", "a.png"], "a.png cannot be written"),
    (["explore", "--host", "a..b", "--port", "0"], "cannot listen on 'a..b'"),
    (["explore", "--host", "\udce9", "--port", "0"], r"cannot listen on '\udce9'"),
    (["explore", "--port", "99999"], "--port"),
    (["serve", "--port", "0", "--size", "70"], "size=70: must be a multiple of 16"),
    (["serve", "--port", "0", "--token", "short"], "--token: at least 8 letters"),
    ([*KNN, "--size", f"16{HUGE[1:]}"], "must be an integer of 64 bits"),
    ([*KNN, "--size", "32", "--batch-size", HUGE], "--batch-size"),
    ([*KNN, "--size", "32", "--seed", "-1"], "--seed"),
    (["probe", "knn", "--model", "m", "--data", "lab", "--size", "32", "--k", "20"], "which is 4: name a smaller k"),
    ([*KNN, "--size", "32", "--out", "r\udce9"], r"r\udce9 is no name in UTF-8"),
    ([*KNN, "--size", "32", "--device", "meta"], "device 'meta' cannot be used"),
    (["probe", "knn", "--model", "m", "--data", "few", "--size", "32"], "few: no picture is left for"),
    (["probe", "knn", "--model", "noise.onnx", "--data", "lab"], "noise.onnx is not a file that `veca export` wrote"),
    (["probe", "knn", "--model", "m", "--data", HOSTILE], SHOWN),
    (["probe", "classify", "--model", "m", "--data", "lab", "--rates", "nan"], "'nan': expected numbers"),
    (["probe", "segment", "--model", "m", "--data", "lab", "--batch-size", HUGE], "--batch-size"),
    ([*TUNE, "--epochs", "nan"], "epochs=nan"),
    ([*TUNE, "--set", f"seed={HUGE}"], "seed=1000"),
    ([*TUNE, "--set", f"size=16{HUGE[1:]}"], "size=16000"),
    ([*TUNE, "--batch-size", "100000000"], "--batch-size"),
    ([*TUNE, "--device", "meta"], "device 'meta' cannot be used"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=[re.sub(r"[^\w.:=/ -]", "_", " ".join(a))[:90] for a, _ in WRONG]
)
def test_a_mistake_is_a_short_message_that_names_it(
    arguments: list[str],
    message: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = call(arguments, place, monkeypatch)
    shown = "".join(capsys.readouterr())
    assert status in (1, 2)
    assert "Traceback" not in shown
    unboxed = " ".join(shown.replace("│", "").split())  # usage errors come in a box
    assert " ".join(message.split()) in unboxed
    assert len(shown) < 10_000
    check_plain(shown)


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), TypeError("x"), RuntimeError("x"), ImportError("x")])
def test_a_defect_shows_its_traceback(
    error: Exception, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("veca.cli.info.load_or_random", fail)
    monkeypatch.setattr(sys, "argv", ["veca", "info", "--model", "m"])
    with pytest.raises(type(error)):
        veca.cli.main.main()
    assert "error:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        veca.VecaError("a mistake\x1b[31m " + "x" * 3_000_000 + " the way out"),
        FileNotFoundError(2, "No such file", "\x1b[31mx"),
    ],
)
def test_what_a_user_can_mend_is_short(
    error: Exception, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("veca.cli.info.load_or_random", fail)
    assert call(["info", "--model", "m"], place, monkeypatch) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert len(shown) < 2_100
    check_plain(shown)
    if isinstance(error, veca.VecaError):
        assert r"a mistake\x1b[31m" in shown
        assert shown.endswith("the way out\n")
    elif not isinstance(error, OSError):
        assert "out of memory" in shown
        assert "smaller --size or --batch-size" in shown
    monkeypatch.setenv("VECA_DEBUG", "1")
    with pytest.raises(type(error)):
        veca.cli.main.main()


def test_a_missing_package_names_its_extra(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    features = ["figure", "features", "a.png", "--model", "m", "--size", "32", "--beside"]
    for module, arguments, extra in (
        ("timm", [*features, "timm:resnet10t"], "train"),
        ("transformers", [*features, "empty"], "train"),
        ("uvicorn", ["explore", "--port", "0"], "web"),
        ("prometheus_client", ["serve", "--port", "0"], "web"),
    ):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            for name in ("connections", "serve.app", "serve.state", "serve.metrics"):
                patched.delitem(sys.modules, f"veca.web.{name}", raising=False)  # may be imported already
            assert call(arguments, place, patched) == 1
        shown = capsys.readouterr().err
        assert f"{module}, which is not installed: pip install 'veca[{extra}]'" in shown


def test_a_missing_module_of_ours_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("this needs", "train"):
        import veca.no_such_module  # noqa: F401
    with pytest.raises(ArgumentError, match="this needs no_such_package, which"), needs_extra("this needs", "train"):
        import no_such_package  # noqa: F401


def test_names_are_printed_as_they_are(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bracket is a bracket, in every command that names what it wrote; what cannot be printed is escaped."""

    def shown(*arguments: str) -> str:
        status = call(list(arguments), place, monkeypatch)
        text = "".join(capsys.readouterr())
        assert status == 0, text
        check_plain(text)
        return text

    for name in ("[/b].parquet", "[red]x.parquet", ":dog:\x1b[31m.parquet"):
        printed = name.replace("\x1b", r"\x1b")
        assert f"o{printed}: 1 image," in shown(*EMBED, f"o{name}")
    assert f"Wrote c{SHOWN}" in shown("convert", "--model", "m", "--out", f"c{HOSTILE}")
    assert f"c{SHOWN}" in shown("info", "--model", f"c{HOSTILE}", "--size", "32")
    assert f"Wrote {SHOWN}.pt" in shown("convert", "--model", "m", "--out", f"{HOSTILE}.pt")
    assert "/[/b].png" in shown("figure", "paths", "a.png", "--model", f"c{HOSTILE}", "--size", "32", "--cores", "8",
                                "--out", "[/b].png")  # fmt: skip
    assert "Rows: r[/b]/rows" in shown(*KNN, "--size", "32", "--out", "r[/b]")
    plan = shown(*PLAN, "teacher.name='[/b][red]t'", "--set", "model.start='[red]s'")
    assert "[/b][red]t, " in plan
    assert "[red]s" in plan
    assert "/tuned/report.html" in shown("report", "tuned")


def test_a_hostile_model_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny()
    model.provenance = {
        HOSTILE: HOSTILE, "weights": "distilled", "teacher": {"name": HOSTILE}, "list": [HOSTILE, "x" * 3_000_000],
        "k" * 3_000_000: {"a\nb": HOSTILE},
    }  # fmt: skip
    veca.save(model, tmp_path / "m")
    assert call(["info", "--model", "m", "--size", "32"], tmp_path, monkeypatch) == 0
    shown = capsys.readouterr().out
    assert r"x\x1b[31m\x9b\u202e\r" in "".join(shown.split())
    assert len(shown) < 10_000
    check_plain(shown)
    assert call(["info", "--model", "m", "--size", "32", "--json"], tmp_path, monkeypatch) == 0
    told = capsys.readouterr().out
    check_plain(told)
    assert json.loads(told)["provenance"] == json.loads(json.dumps(model.provenance))

    def broken(config: dict[str, object]) -> str:
        described = {"veca": json.dumps({"config": config, "provenance": {}})}
        save_file({"a": torch.zeros(1)}, tmp_path / "b.safetensors", described)
        assert call(["info", "--model", "b.safetensors"], tmp_path, monkeypatch) == 1
        shown = capsys.readouterr().err
        assert len(shown) < 2_100
        check_plain(shown)
        return shown

    assert "unknown key" in broken({HOSTILE: 1})
    assert "must be an integer" in broken({"depth": HOSTILE + "x" * 3_000_000})
    assert "must be a finite number" in broken({"mlp_ratio": int(HUGE)})


def test_warnings_are_escaped_and_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    veca.cli.main.warn("see " + HOSTILE + "x" * 3_000_000 + " end")
    shown = capsys.readouterr().err
    assert shown.startswith(f"see {SHOWN}")
    assert shown.endswith(" end\n")
    assert len(shown) < 2_100
    check_plain(shown)


def test_everything_printed_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole(stderr=True, force_terminal=False, width=200)
    with console.status(HOSTILE):
        pass
    with progress_bar("{task.description}", "{task.fields[more]}", console=console) as bar:
        bar.add_task(HOSTILE, total=1, more=HOSTILE)
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    console.print(table)
    console.print(HOSTILE)
    shown = capsys.readouterr().err
    assert shown.count(SHOWN) == 6
    check_plain(shown)


def test_no_other_console_is_made() -> None:
    """Consoles and text columns that read markup are used nowhere but where the safe ones are defined."""
    folder = Path(veca.__file__).parent
    for file in folder.rglob("*.py"):
        if file != folder / "utils" / "console.py":
            text = file.read_text(encoding="utf-8")
            for made in (Console, Progress, TextColumn):
                assert not re.search(rf"(?<![\w.]){made.__name__}\(", text), file
            assert not re.search(r"markup=True|from_markup|rich\.markup", text), file


def test_a_reader_that_leaves_is_no_error(place: Path) -> None:
    end, start = os.pipe()
    os.close(end)
    command = [sys.executable, "-m", "veca", "info", "--model", "m", "--size", "32", "--json"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # so that it is noticed at the end alone
    ended = subprocess.run(command, cwd=place, env=environment, stdout=start, stderr=subprocess.PIPE, text=True)
    os.close(start)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_terminal_of_ascii(place: Path) -> None:
    command = [sys.executable, "-m", "veca", "convert", "--model", "m", "--out", "wö×"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "Wrote w\\xf6\\xd7\n", "")


def test_errors_have_one_base() -> None:
    assert issubclass(ConfigError, veca.VecaError)
    assert issubclass(ArgumentError, ValueError)
    assert not issubclass(typer.BadParameter, veca.VecaError)


def test_a_report_of_hostile_results_has_no_markup_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "<script>alert(1)</script>"
    asked = {"model": bad, "task": "classify", "data": {"name": bad, "train": 1}}
    result = {
        "metric": bad, "cores": bad, "after": {bad: {bad: 1.0}, "8": {bad: 1.0}}, "before": {"8": {bad: 1.0}},
        "scored_on": bad, "best": {"score": 1.0, "step": 1}, "steps": 1, "classes": [bad], "per_class": {bad: 1.0},
        "confusions": [[0, 0, 1]], "matrix": [[1]], "gallery": [], "asked": asked, "problems": [bad],
    }  # fmt: skip
    (tmp_path / "finetune.json").write_text(json.dumps(asked))
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert call(["report", "."], tmp_path, monkeypatch) == 1  # budgets are numbers
    assert "could not convert" in capsys.readouterr().err
    for key in ("cores", "after"):
        result[key] = json.loads(json.dumps(result[key]).replace(json.dumps(bad), '"64"', 1))
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert call(["report", "."], tmp_path, monkeypatch) == 0
    page = (tmp_path / "report.html").read_text()
    assert "&lt;script&gt;" in page
    assert bad not in page


def test_all_errors_have_one_base() -> None:
    """Also a ValueError where callers have known them as one; what stops a run is no error."""
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(veca.__path__, "veca.")]
    errors = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__.startswith("veca.")
    }
    assert {veca.CheckpointError, veca.ConfigError, veca.ImageError} < errors
    assert [error.__qualname__ for error in errors if not issubclass(error, veca.VecaError)] == []
    assert issubclass(veca.CheckpointError, ValueError)
