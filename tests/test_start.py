"""How the package and its command start: what is imported when, interrupted or not installed."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import make_tiny
from PIL import Image

import veca

SOURCES = Path(veca.__file__).parent


def start(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Python with `path` before everything else that can be imported, but the package."""
    places = f"{path}{os.pathsep}{SOURCES.parent}"
    environment = {**os.environ, "PYTHONPATH": places}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", [["-m", "veca"], ["-c", "from veca.__main__ import main; main()"]])
def test_an_interrupt_during_imports_is_one_line(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n")
    ended = start(*command, "info", "--model", "veca_tiny", path=tmp_path)
    assert ended.returncode == 130
    assert ended.stderr == "Interrupted.\n"


def test_the_command_starts_in_the_module_that_can_be_interrupted() -> None:
    assert 'veca = "veca.__main__:main"' in (SOURCES.parents[1] / "pyproject.toml").read_text()


def test_importing_the_package_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    ended = start("-c", "import veca; print(veca.__version__, dir(veca))", path=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(veca.__version__)
    assert all(repr(name) in ended.stdout for name in veca.__all__)


# Slow to import, and needed by few commands or none
HEAVY = {"torch", "numpy", "pyarrow", "PIL", "fsspec", "pandas", "scipy", "matplotlib", "jinja2", "datasets", "ray"}
HEAVY |= {"timm", "transformers", "torchvision", "onnx", "onnxruntime", "sklearn"}
REPORT_IMPORTS = """
import sys
from veca.__main__ import main
sys.argv = ["veca", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("imported", *sys.modules)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_the_overview_of_commands_imports_nothing_slow(arguments: list[str], tmp_path: Path) -> None:
    ended = start("-c", REPORT_IMPORTS, *arguments, path=tmp_path)
    assert ended.returncode == 0, ended.stderr
    imported = set(ended.stdout.rpartition("imported ")[2].split())
    assert "typer" in imported
    assert not imported & HEAVY
    assert not {name for name in imported if name.startswith("veca.cli.")} - {"veca.cli.common", "veca.cli.main"}


def test_embed_imports_only_what_it_needs(tmp_path: Path) -> None:
    ended = start("-c", REPORT_IMPORTS, "embed", "--help", path=tmp_path)
    assert ended.returncode == 0, ended.stderr
    imported = set(ended.stdout.rpartition("imported ")[2].split())
    assert "veca.embed" in imported
    needed = {"torch", "numpy", "pyarrow", "PIL", "fsspec"}
    assert imported & HEAVY == needed
    assert not {"pyarrow.compute", "pyarrow.dataset", "torch._dynamo", "torch._inductor", "sympy"} & imported
    assert not {f"veca.{task}" for task in ("train", "probe", "inspect", "bench", "heads", "hub", "web")} & imported


def test_the_backbone_does_not_import_pillow(tmp_path: Path) -> None:
    (tmp_path / "PIL.py").write_text("raise SystemExit('Pillow was imported')\n")
    code = "import veca.optimized; print(veca.Veca(veca.config.SIZES['veca_tiny']).num_features)"
    ended = start("-c", code, path=tmp_path)
    assert ended.stdout == "192\n", ended.stderr


def test_public_names_are_found_when_they_are_used(tmp_path: Path) -> None:
    code = f"""
import pickle, veca
assert veca.config.SIZES and veca.images.PATCH and veca.checkpoint.load is veca.load
from veca import {", ".join(veca.__all__)}
from veca import *
assert pickle.loads(pickle.dumps(veca.VecaConfig())) == VecaConfig()
assert not hasattr(veca, "lod") and not hasattr(veca, "a.b") and not hasattr(veca, "__wrapped__")
"""
    ended = start("-c", code, path=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert pickle.loads(pickle.dumps(veca.VecaError("a"))).args == ("a",)


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "safetensors.py").write_text("import no_such_package\n")
    ended = start("-c", "import veca; veca.checkpoint", path=tmp_path)
    assert "No module named 'no_such_package'" in ended.stderr


HIDE = """
import importlib.metadata as metadata
found = metadata.version
def version(name):
    if name == "veca":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
"""


def test_the_version_of_a_source_copy_is_that_of_pyproject(tmp_path: Path) -> None:
    """As from a copy of the sources, or through torch.hub: the version is that of the sources, and says so."""
    copy = tmp_path / "copy"
    shutil.copytree(SOURCES, copy / "src" / "veca", ignore=shutil.ignore_patterns("*.pyc", "weights"))
    (copy / "pyproject.toml").write_text('[project]\nname = "veca"\nversion = "7.8"\n')
    veca.save(make_tiny(), tmp_path / "model")
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    embed = ["embed", "a.png", "--out", "f.parquet", "--model", "model", "--size", "32", "--workers", "0"]
    code = f"""{HIDE}
import sys
from veca.__main__ import main
for arguments in (["--version"], ["info", "--model", "model", "--size", "32"], {embed}):
    sys.argv = ["veca", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
"""
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}

    def run(code: str) -> str:
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    shown = run(code)
    assert shown.startswith("veca 7.8+sources, torch ")
    assert "GFLOPs" in shown
    assert b'"veca": "7.8+sources"' in pq.read_schema(tmp_path / "f.parquet").metadata[b"veca"]
    (copy / "pyproject.toml").unlink()
    assert run(f"{HIDE}\nimport veca; print(veca.__version__)") == "0+sources\n"
