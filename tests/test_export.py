"""Exported files give what the model gives, at sizes and batches they were not traced at."""

from __future__ import annotations

import copy
import importlib
import json
import re
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny, relative_error
from typer.testing import CliRunner

import veca
from veca import export as module
from veca.cli.main import app
from veca.export import (
    BudgetModel,
    ExportCheck,
    ExportFormat,
    RunFile,
    check_file,
    export,
    format_of,
    open_file,
    parse_size,
)
from veca.heads.features import BackboneError
from veca.probe.backbones import OnnxBackbone, load_backbone

pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")

SHAPES = [(1, 48, 32), (3, 32, 128), (2, 64, 96)]  # only the last was seen at export


@pytest.fixture(scope="module")
def model() -> veca.Veca:
    return make_tiny(depth=2)


@pytest.fixture(scope="module")
def shallow() -> veca.Veca:
    """Tracing takes its time per block."""
    return make_tiny(depth=1)


@pytest.fixture(scope="module")
def folder(model: veca.Veca, shallow: veca.Veca, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, made once."""
    path = tmp_path_factory.mktemp("exported")
    veca.save(model, path / "my-model")
    result = CliRunner().invoke(
        app, ["export", "--model", str(path / "my-model"), "--out", str(path / "32.onnx"), "--cores", "32"]
    )
    assert result.exit_code == 0, result.output
    (path / "said.txt").write_text(result.output)
    few = module.trace(BudgetModel(shallow, 8), None)
    with pytest.MonkeyPatch.context() as patch:  # what takes long is done once for two files
        patch.setattr(module, "trace", lambda *args, **kwargs: few)
        export(shallow, path / "8.pt2", cores=8, check=False)
        export(shallow, path / "8.onnx", cores=8, check=False)
        patch.setattr(module, "to_onnx", lambda program: onnx.load(path / "32.onnx"))
        checks = export(model, path / "int8.onnx", cores=32, dtype="int8")
    (path / "int8.json").write_text(json.dumps(checks))
    return path


def worst(run: RunFile, model: veca.Veca, cores: int, shape: tuple[int, ...]) -> float:
    batch, height, width = shape
    images = torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(height))
    with torch.no_grad():
        found, expected = run(images), model(images, cores=cores)
    assert [each.dtype for each in found] == 3 * [torch.float32]
    pairs = list(zip(found, (expected.cls, expected.patches, expected.coordinates), strict=True))
    assert all(f.shape == e.shape for f, e in pairs)
    return max(relative_error(f, e) for f, e in pairs)


@pytest.mark.parametrize("shape", [*SHAPES, (1, 16, 16)])
def test_onnx_is_the_model(folder: Path, model: veca.Veca, shape: tuple[int, ...]) -> None:
    assert worst(open_file(folder / "32.onnx", "onnx"), model, 32, shape) <= 1e-4


@pytest.mark.parametrize("form", ["onnx", "export"])
def test_a_small_budget_is_the_model_too(folder: Path, shallow: veca.Veca, form: ExportFormat) -> None:
    """In these the few-cores algebra is what is written."""
    run = open_file(folder / ("8.onnx" if form == "onnx" else "8.pt2"), form)
    assert max(worst(run, shallow, 8, shape) for shape in SHAPES) <= 1e-4


def test_one_size_any_batch(shallow: veca.Veca, tmp_path: Path) -> None:
    checks = export(shallow, tmp_path / "64.pt2", size=(32, 64))
    assert [(each.batch, each.size) for each in checks] == [(1, (32, 64)), (2, (32, 64))]
    run = open_file(tmp_path / "64.pt2", "export")
    assert max(worst(run, shallow, 64, (batch, 32, 64)) for batch in (1, 3)) <= 1e-4
    with pytest.raises(Exception, match="64"):
        worst(run, shallow, 64, (1, 32, 96))


@pytest.mark.parametrize("form", ["onnx", "export"])
def test_a_width_is_the_model_too(form: ExportFormat, tmp_path: Path) -> None:
    model = make_tiny(depth=1, mlp_ratio=4.0, widths=(0.25, 1.0))
    path = tmp_path / ("narrow.onnx" if form == "onnx" else "narrow.pt2")
    export(model, path, cores=16, width=0.25)
    run = open_file(path, form)
    assert worst(run, model, 16, SHAPES[0]) > 0.1
    model.width = 0.25
    assert max(worst(run, model, 16, shape) for shape in SHAPES) <= 1e-4
    if form == "onnx":
        written = onnx.load(path)
        assert {entry.key: entry.value for entry in written.metadata_props}["width"] == "0.25"
        weights = {tuple(tensor.dims) for tensor in written.graph.initializer}
        assert {(64, 64), (192, 64)} <= weights, "no slice of a weight is left to the runtime"
    with pytest.raises(veca.VecaError, match="width=2; a width is"):
        export(model, path, cores=16, width=2)


def test_what_the_onnx_file_tells_of_itself(folder: Path) -> None:
    written = onnx.load(folder / "32.onnx")
    onnx.checker.check_model(written, full_check=True)
    facts = {entry.key: entry.value for entry in written.metadata_props}
    assert (facts["model"], facts["cores"], facts["size"]) == ("my-model", "32", "dynamic")
    assert json.loads(facts["mean"]) == list(veca.images.MEAN)
    assert json.loads(facts["std"]) == list(veca.images.STD)
    assert facts["veca_version"] == veca.__version__
    assert facts["licence"].startswith("Apache-2.0")
    assert written.opset_import[0].version == module.OPSET

    def shape(value: Any) -> list[Any]:
        return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]

    assert [shape(value) for value in written.graph.input] == [["batch", 3, "height", "width"]]
    assert {value.name: shape(value) for value in written.graph.output} == {
        "cls": ["batch", 64],
        "patches": ["batch", "patches", 64],
        "coordinates": [2, "batch", 32, 2],
    }


def test_no_file_tells_where_it_was_made(folder: Path) -> None:
    home = str(Path(veca.__file__).parent).encode()
    assert home not in (folder / "32.onnx").read_bytes()
    with zipfile.ZipFile(folder / "8.pt2") as archive:
        assert not any(home in archive.read(name) for name in archive.namelist())


def test_the_archive_tells_of_itself(folder: Path) -> None:
    with zipfile.ZipFile(folder / "8.pt2") as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("veca.json"))
        assert json.loads(archive.read(name))["cores"] == "8"


def test_the_command_says_how_far_and_how_fast(folder: Path) -> None:
    said = (folder / "said.txt").read_text()
    assert all(word in said for word in ("1 × 224×224", "2 × 160×288", "onnxruntime", "PyTorch", " ms"))
    again = CliRunner().invoke(app, ["export", "--model", "veca_tiny", "--out", str(folder / "32.onnx")])
    assert "--overwrite" in str(again.exception)


def test_the_command_says_that_classes_stay_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veca.cli.export.export", lambda model, to, **_: to.touch())
    for classes in (0, 3):
        veca.save(make_tiny(num_classes=classes), tmp_path / str(classes))
        done = CliRunner().invoke(
            app,
            [
                "export",
                "--model",
                str(tmp_path / str(classes)),
                "--out",
                str(tmp_path / f"{classes}.onnx"),
                "--no-check",
            ],
        )
        assert done.exit_code == 0, done.exception
        assert ("classifier of 3 classes will not be in the file" in done.stderr) == bool(classes)


def test_int8_files_are_close_to_the_model(folder: Path, model: veca.Veca) -> None:
    checks = [ExportCheck(*each) for each in json.loads((folder / "int8.json").read_text())]
    assert [each.batch for each in checks] == [1, 2]
    assert all(1e-4 < each.errors[key] < 0.3 for each in checks for key in ("cls", "patches"))  # felt, not fatal
    assert worst(open_file(folder / "int8.onnx", "onnx"), model, 32, (3, 32, 64)) < 0.3
    written = onnx.load(folder / "int8.onnx")
    kinds = [node.op_type for node in written.graph.node]
    assert kinds.count("MatMulInteger") == 2 * 3  # qkv, proj, fc1; not fc2, pixels and the head of the cores
    assert {entry.key: entry.value for entry in written.metadata_props}["dtype"] == "int8"


def test_a_file_can_be_probed(folder: Path, model: veca.Veca, tmp_path: Path) -> None:
    backbone = load_backbone(str(folder / "32.onnx"))
    assert isinstance(backbone, OnnxBackbone)
    assert (backbone.kind, backbone.patch, backbone.width, backbone.device.type) == ("onnx", 16, 64, "cpu")
    pixels = torch.randint(256, (2, 3, 32, 48), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images = backbone.prepare(pixels)
    with torch.no_grad():
        expected = model(veca.images.normalize(pixels), cores=32)
    cls, patches = backbone.features(images, 32)
    assert patches is not None
    assert max(relative_error(cls, expected.cls), relative_error(patches, expected.feature_map)) < 1e-4
    assert relative_error(backbone.global_feature(images, 32), expected.cls) < 1e-4
    assert (backbone.budgets, backbone.cores(None), backbone.cores((32,)), backbone.side(48)) == (
        (32,),
        (32,),
        (32,),
        48,
    )
    assert backbone.identity != load_backbone(str(folder / "int8.onnx")).identity
    with pytest.raises(BackboneError, match="cores 8.*was exported for 32; export a file for each budget"):
        backbone.cores((8,))
    with pytest.raises(BackboneError, match="size 50.*multiples of 16. Nearest: 48"):
        backbone.side(50)
    with pytest.raises(BackboneError, match="runs on the CPU, in the type it was exported in"):
        load_backbone(str(folder / "32.onnx"), precision="bfloat16")
    with pytest.raises(BackboneError, match="gone.onnx is not a file that `veca export` wrote"):
        load_backbone(str(tmp_path / "gone.onnx"))
    backbone.export_size = "64x96"
    with pytest.raises(BackboneError, match="takes 64x96 only"):
        backbone.side(64)


def test_sizes_and_budgets_side_by_side(folder: Path, model: veca.Veca) -> None:
    for name, most in (("32", 1e-4), ("int8", 0.3)):
        (found,) = check_file(folder / f"{name}.onnx", "onnx", BudgetModel(model, 32), [(1, (32, 48))], repeats=1)
        assert max(found.errors.values()) < most
        assert (max(found.errors.values()) > 1e-4) == (name == "int8")
        assert min(found.seconds, found.torch_seconds) > 0


def test_a_file_that_is_wrong_is_not_kept(model: veca.Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "trace", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.export, "save", lambda program, file, extra_files: file.write_text("no model"))
    far = ExportCheck(1, (32, 32), {"cls": 0.0, "patches": float("nan"), "coordinates": 0.0}, 1.0, 1.0)
    monkeypatch.setattr(module, "check_file", lambda *args: [far])
    (tmp_path / "m.pt2").write_text("before")
    with pytest.raises(ValueError, match=r"m\.pt2 was not written: at 1 × 32×32 its patches is nan away"):
        export(model, tmp_path / "m.pt2")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("m.pt2", "before")]
    export(model, tmp_path / "m.pt2", check=False)
    assert (tmp_path / "m.pt2").read_text() == "no model"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("m.onnx", {"size": (500, 768)}, "size 500x768: sides must be positive multiples of 16. Nearest: 496x768"),
        ("m.onnx", {"size": (0, 16)}, "size 0x16"),
        ("m.onnx", {"cores": 65}, "cores=65; a budget is an integer from 1 to 64"),
        ("m.onnx", {"cores": 0}, "cores=0"),
        ("m.trt", {}, "m.trt: format onnx is written to files that end in .onnx"),
        ("m.onnx", {"form": "aoti"}, "with format 'aoti': format onnx is written to files that end in .onnx, export"),
        ("m.pt2", {"form": "tensorrt"}, "with format 'tensorrt': format onnx is written"),
        ("m.onnx", {"dtype": "bfloat16"}, "choose float16"),
        ("m.onnx", {"dtype": "int4"}, "dtype 'int4' is unknown"),
        ("m.pt2", {"dtype": "int8"}, "ends in .onnx"),
    ],
)
def test_invalid_export_options_are_refused(
    model: veca.Veca, tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        export(model, tmp_path / name, **options)
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_exported(model: veca.Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="export the model it was made from"):
        export(veca.optimize(model), tmp_path / "m.onnx")
    timm = pytest.importorskip("timm")
    pytest.importorskip("veca.hub.timm")  # registers
    with pytest.raises(ValueError, match="export what veca.load gives"):
        export(timm.create_model("veca_tiny_patch16", depth=1), tmp_path / "m.onnx")
    with torch.device("meta"):
        nothing = veca.Veca(model.config)
    with pytest.raises(ValueError, match="has no weights"):
        export(nothing, tmp_path / "m.onnx")
    monkeypatch.setattr(module, "ONNX_BYTES", 1000)
    with pytest.raises(ValueError, match="holds at most 2"):
        export(model, tmp_path / "m.onnx")


def test_a_missing_extra_is_named(model: veca.Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str) -> Any:
        if name == "onnxscript":
            raise ModuleNotFoundError(name=name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"need onnxscript, which is not installed: pip install 'veca\[export\]'"):
        export(model, tmp_path / "m.onnx")


def test_sizes_are_parsed_as_height_by_width() -> None:
    assert parse_size("512x768") == (512, 768)
    for wrong in ("512x", "big", "-16x16", "16x16x16", ""):
        with pytest.raises(ValueError, match="give HEIGHTxWIDTH"):
            parse_size(wrong)
    assert format_of(Path("a.b.onnx")) == "onnx"


def documented(start: str) -> str:
    """The block of docs/export.md that begins so; it is not among those that run everywhere."""
    blocks = re.findall(r"```py\n(.*?)```", (Path(__file__).parents[1] / "docs/export.md").read_text(), re.DOTALL)
    (block,) = (each for each in blocks if each.startswith(start))
    return str(block)


def test_core_ml_can_hold_the_model(shallow: veca.Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of docs/export.md up to the conversion: no operator that coremltools lacks, and five axes at most."""
    monkeypatch.chdir(tmp_path)
    steps = documented("import coremltools").partition("names = ")[0].replace("import coremltools\n", "")
    names: dict[str, Any] = {"model": copy.deepcopy(shallow)}
    exec(steps, names)
    nodes = names["program"].graph.nodes
    assert not {torch.ops.aten.where.ScalarOther, torch.ops.aten.addcmul.default} & {node.target for node in nodes}
    values = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert 0 < max(value.ndim for value in values) <= 5
    images = torch.randn(1, 3, 224, 224)
    for found, expected in zip(names["program"].module()(images), BudgetModel(shallow, 32)(images), strict=True):
        assert relative_error(found, expected) < 1e-4
    if find_spec("coremltools"):
        exec(documented("import coremltools"), {"model": copy.deepcopy(shallow)})
        assert Path("veca.mlpackage").is_dir()


def test_openvino_and_nncf_take_the_file(
    folder: Path, model: veca.Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino = pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "veca.onnx").write_bytes((folder / "32.onnx").read_bytes())
    images = [torch.randn(1, 3, 48, 64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    exec(documented("import nncf"), {"images": images})
    assert load_backbone("veca-nncf.onnx").budgets == (32,)

    def run(path: str) -> RunFile:
        compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return lambda x: [torch.from_numpy(compiled({"images": x.numpy()})[name].copy()) for name in module.OUTPUTS]

    assert max(worst(run("veca.onnx"), model, 32, shape) for shape in SHAPES) < 1e-4
    assert 1e-4 < worst(run("veca-nncf.onnx"), model, 32, (1, 48, 64)) < 0.3
    assert 1e-4 < worst(open_file(Path("veca-nncf.onnx"), "onnx"), model, 32, (1, 48, 64)) < 0.3
