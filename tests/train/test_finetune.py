"""Fine-tuning, on folders made here: what is learned, what is left, and how it goes on after a kill."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from conftest import make_tiny
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.optim import param_groups_layer_decay
from transformers import pipeline
from typer.testing import CliRunner

import veca
import veca.hub.timm
from veca.cli.main import app
from veca.data.crops import CropReader
from veca.data.datasets import DatasetError, load_dataset
from veca.data.datasets.batches import UnreadableImageError
from veca.heads.networks import Classifier, Segmenter, load_segmenter
from veca.hub.transformers import VecaForImageClassification, VecaModel
from veca.probe.backbones import load_backbone
from veca.probe.run import ClassifySettings as ProbeSettings
from veca.probe.run import classify as probe_classify
from veca.train.checkpoints import write_checkpoint
from veca.train.finetune.run import Finetuning, finetune
from veca.train.finetune.settings import FinetuneClassifySettings, FinetuneSegmentSettings, check_same_settings
from veca.train.finetune.tasks import SegmentTask
from veca.train.optimizers import layer_decay_groups
from veca.utils.signals import Interrupted

COLOURS = {"blue": (60, 70, 160), "green": (70, 140, 80), "red": (170, 70, 60)}
TIMES = {"time", "seconds", "images_per_s", "memory_gib"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, pictures of three classes, and pictures with masks."""
    folder = tmp_path_factory.mktemp("tune")
    veca.save(make_tiny(), folder / "model")
    rng = np.random.default_rng(0)

    def noisy(means: Any) -> Image.Image:
        return Image.fromarray((means + rng.normal(0, 40, (40, 48, 3))).clip(0, 255).astype(np.uint8))

    for split, count in (("train", 16), ("val", 6), ("test", 8)):
        for name, colour in COLOURS.items():
            (folder / "classes" / split / name).mkdir(parents=True)
            for i in range(count):
                light = rng.uniform(0.4, 1.4, (2, 2, 1)).repeat(20, 0).repeat(24, 1)
                noisy(light * colour).save(folder / "classes" / split / name / f"{i}.png")
    for kind in ("images", "masks"):
        (folder / "masks" / kind).mkdir(parents=True)
    for i in range(24):
        mask = np.zeros((40, 48), np.uint8)
        top, left = rng.integers(0, 20), rng.integers(0, 20)
        mask[top : top + 20, left : left + 28] = 1
        noisy(np.where(mask[..., None], COLOURS["red"], COLOURS["blue"])).save(folder / f"masks/images/{i}.png")
        mask[0] = 255
        Image.fromarray(mask).save(folder / f"masks/masks/{i}.png")
    (folder / "masks/classes.txt").write_text("ground\nbox\n")
    return folder


def settings(**changes: Any) -> FinetuneClassifySettings:
    asked: dict[str, Any] = {"size": 32, "cores": (8, 64), "epochs": 5, "batch": 8, "rate": 1e-3, "head": "new"}
    return FinetuneClassifySettings(**{**asked, "every": 6, "progress": False, **changes})


def tune(place: Path, folder: Path, asked: Any, data: str = "classes", **how: Any) -> dict[str, Any]:
    """A run, and its result."""
    finetune(str(place / "model"), str(place / data), folder, asked, device="cpu", say=lambda text: None, **how)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def tuned(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    tune(place, folder, settings())
    return folder


# Layers


@pytest.mark.parametrize("output_dim", [None, 48])
def test_rates_by_depth_are_those_of_timm(output_dim: int | None) -> None:
    theirs = timm.create_model("veca_tiny_patch16", num_classes=5, output_dim=output_dim)
    plain = veca.create_model("veca_tiny", num_classes=5, output_dim=output_dim)
    groups = layer_decay_groups(Classifier(plain), 12, layer_decay=0.7, decay=0.05)
    ours = {n: (g["scale"], g["weight_decay"]) for g in groups for n in g["names"]}
    names = {id(parameter): name for name, parameter in theirs.named_parameters()}
    found = param_groups_layer_decay(theirs, 0.05, theirs.no_weight_decay(), layer_decay=0.7)
    expected = {
        f"backbone.{names[id(p)]}": (pytest.approx(g["lr_scale"]), g["weight_decay"])
        for g in found
        for p in g["params"]
    }
    assert ours == expected
    assert ours["backbone.blocks.11.mlp.fc1.weight"] == (pytest.approx(0.7), 0.05)
    assert ours["backbone.cores.0"] == (pytest.approx(0.7**13), 0.0)


def test_every_parameter_is_in_one_group(tiny: veca.Veca) -> None:
    network = Segmenter(tiny, ["a", "b"])
    groups = layer_decay_groups(network, 3, layer_decay=0.5, decay=0.1)
    list_checkpoints = [id(p) for g in groups for p in g["params"]]
    assert sorted(list_checkpoints) == sorted(id(p) for p in network.parameters())
    of = {n: g for g in groups for n in g["names"]}
    assert (of["head.weight"]["scale"], of["head.weight"]["weight_decay"]) == (1.0, 0.1)
    assert (of["head.bias"]["weight_decay"], of["backbone.patch_embed.proj.weight"]["scale"]) == (0.0, 0.5**4)


# Classes


def test_it_learns_at_every_budget(tuned: Path) -> None:
    result = json.loads((tuned / "result.json").read_text())
    assert [result["after"][c]["top1"] > 80 for c in ("8", "64")] == [True, True], "chance is 33"
    assert result["scored_on"] == "test"
    assert sum(map(sum, result["matrix"])) == 24
    assert result["per_class"].keys() == COLOURS.keys()
    losses = [float(row["loss"]) for row in rows(tuned / "validation.csv") if row["budget"] == "64"]
    assert losses[-1] < 0.7 * losses[0]
    drawn = rows(tuned / "metrics.csv")
    assert sum(float(row["budget_8"]) for row in drawn) > 0
    assert sum(float(row["budget_64"]) for row in drawn) > sum(float(row["budget_8"]) for row in drawn)


@pytest.mark.filterwarnings("ignore:width=0.5 was not trained")
def test_it_learns_at_a_width(place: Path, tuned: Path, tmp_path: Path) -> None:
    result = tune(place, tmp_path, settings(width=0.5))
    assert result["asked"]["width"] == 0.5
    assert result["after"]["64"]["top1"] > 80
    first, whole = (rows(folder / "validation.csv")[0] for folder in (tmp_path, tuned))
    assert first["loss"] != whole["loss"], "it is scored at that width too, from the start"


@torch.no_grad()
def test_what_it_left_loads_everywhere_with_the_same_scores(tuned: Path, place: Path) -> None:
    plain = veca.load(tuned)
    assert plain.provenance["weights"] == "fine-tuned"
    assert plain.provenance["classes"] == list(COLOURS)
    assert plain.config.budgets == (8, 64)
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    expected = plain(images, 8).logits
    assert expected is not None
    shape: dict[str, Any] = {"embed_dim": 64, "depth": 3, "num_heads": 2, "num_classes": 3}
    file = str(tuned / "model.safetensors")
    theirs = timm.create_model("veca_tiny_patch16", checkpoint_path=file, **shape).eval()
    torch.testing.assert_close(theirs(images, cores=8), expected)
    model = VecaForImageClassification.from_pretrained(tuned)
    torch.testing.assert_close(model(images, cores=8).logits, expected)
    picture = place / "classes/test/red/0.png"
    said = pipeline("image-classification", model=str(tuned))(str(picture))
    with torch.inference_mode():
        own = plain(veca.images.load_image(picture, size=32)[None]).logits
    assert own is not None
    assert said[0]["label"] == list(COLOURS)[int(own.argmax())]
    assert said[0]["score"] == pytest.approx(float(own.softmax(-1).max()), abs=1e-5)


def test_the_head_starts_as_the_linear_probe(place: Path, tmp_path: Path) -> None:
    asked = settings(head="probe", cores=(64,), epochs=0.2, rate=1e-9, head_epochs=10)
    result = tune(place, tmp_path / "out", asked)
    backbone = load_backbone(str(place / "model"), "cpu")
    same = ProbeSettings(cores=(64,), sizes=(32,), epochs=10, progress=False)
    (row,) = probe_classify(backbone, load_dataset(str(place / "classes")), tmp_path / "rows", same)
    assert row["metrics"]["top1"] == pytest.approx(result["before"]["64"]["top1"], abs=1e-3)
    assert result["after"]["64"]["top1"] == result["before"]["64"]["top1"], "nothing has moved"
    assert not (tmp_path / "out/features").exists()


def test_a_run_that_was_stopped_and_killed_gives_the_same(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings(epochs=3, ema=0.8, mixup=0.3, augment="trivial")
    whole = tune(place, tmp_path / "whole", asked)
    learn = Finetuning.train_step

    def when(step: int, what: Callable[[], object]) -> None:
        def learning(self: Finetuning, batch: Any) -> None:
            if self.step == step:
                what()
            learn(self, batch)

        monkeypatch.setattr(Finetuning, "train_step", learning)

    def killed() -> None:
        raise MemoryError

    when(4, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted):
        tune(place, tmp_path / "again", asked)
    when(15, killed)
    with pytest.raises(MemoryError):
        tune(place, tmp_path / "again", asked)
    assert CliRunner().invoke(app, ["report", str(tmp_path / "again")]).exit_code == 0
    assert "has not come to its end" in (tmp_path / "again/report.html").read_text()
    monkeypatch.setattr(Finetuning, "train_step", learn)
    again = tune(place, tmp_path / "again", asked)
    assert again["after"] == whole["after"]
    for name in ("metrics.csv", "validation.csv"):
        assert rows(tmp_path / "again" / name) == rows(tmp_path / "whole" / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    events = (tmp_path / "again/events.txt").read_text()
    assert "resumed: from step 5" in events
    assert "resumed: from step 12" in events


def test_a_finished_run_is_left_as_it_is(tuned: Path, place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(tuned, folder)
    (folder / "report.html").unlink()
    before = (folder / "result.json").read_bytes()
    tune(place, folder, settings(workers=1))
    assert (folder / "result.json").read_bytes() == before
    assert (folder / "report.html").is_file()
    with pytest.raises(ValueError, match=r"other settings \(epochs: 5, now 6\). Take another --out, or --overwrite"):
        tune(place, folder, settings(epochs=6))
    assert tune(place, folder, settings(epochs=0.5), restart=True)["steps"] == 3


def test_a_run_keeps_its_decoder(tuned: Path, place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(tuned, folder)
    assert json.loads((folder / "finetune.json").read_text())["decode"] == "pillow"
    with pytest.raises(ValueError, match=r"other settings \(decode: 'pillow', now 'cpu'\)"):
        tune(place, folder, settings(decode="auto"))
    check_same_settings({}, {"decode": "pillow", "fit": "crop"}, folder)  # a run before there was a choice
    with pytest.raises(ValueError, match="decode: 'pillow', now 'gpu'"):
        check_same_settings({}, {"decode": "gpu"}, folder)
    with pytest.raises(ValueError, match="--decode gpu .*cpu is no NVIDIA GPU"):
        tune(place, tmp_path / "other", settings(decode="gpu"))
    assert tune(place, tmp_path / "other", settings(decode="cpu", epochs=0.5))["asked"]["decode"] == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["classes", "masks"])
def test_gpu_a_run_learns_the_same_from_workers_and_from_none(kind: str, place: Path, tmp_path: Path) -> None:
    make = settings if kind == "classes" else lambda **changes: FinetuneSegmentSettings(size=32, epochs=1, **changes)
    found = []
    for workers in (0, 2):
        asked, folder = make(workers=workers, decode="gpu", progress=False), tmp_path / str(workers)
        finetune(str(place / "model"), str(place / kind), folder, asked, device="cuda", say=lambda text: None)
        found.append(json.loads((folder / "result.json").read_text()))
    assert found[0]["after"] == found[1]["after"]
    assert found[0]["asked"]["decode"] == "gpu"


def test_a_signal_before_the_first_step_loses_no_head(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = Finetuning.validate

    def then_stop(self: Finetuning) -> None:
        validate(self)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Finetuning, "validate", then_stop)
    with pytest.raises(Interrupted):
        tune(place, tmp_path / "run", settings())
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000000", "step-00000001"]


def test_a_restart_that_was_stopped_leaves_nothing_of_the_old_run(
    tuned: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tuned, tmp_path / "tuned")
    (folder / "head.safetensors").touch()  # as if it had been one of pixels
    (folder / "notes.txt").write_text("mine")
    assert veca.load(folder).provenance["step"] > 0

    def stopped(*_: object) -> None:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(Finetuning, "train_step", stopped)
    with pytest.raises(Interrupted):
        tune(place, folder, settings(epochs=6), restart=True)
    assert veca.load(folder).provenance["step"] == 0, "the weights are those the new run starts from"
    left = {path.name for path in folder.iterdir() if path.is_file()}
    model = {"model.safetensors", "config.json", "preprocessor_config.json"}
    logs = {"finetune.json", "metrics.csv", "validation.csv", "events.txt", "report.html"}
    assert left == {*model, *logs, "notes.txt"}
    assert not rows(folder / "metrics.csv")


@pytest.mark.parametrize("restart", [False, True])
def test_folders_that_are_not_to_be_written_over(place: Path, tmp_path: Path, restart: bool) -> None:
    model = shutil.copytree(place / "model", tmp_path / "model")
    (tmp_path / "link").symlink_to(model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for source, folder in ((model, model), (model / "model.safetensors", model), (model, tmp_path / "link")):
        with pytest.raises(ValueError, match=f"--out {folder} is the model's own folder, .*; take another --out"):
            finetune(str(source), str(place / "classes"), folder, settings(), device="cpu", restart=restart)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    write_checkpoint(tmp_path / "distilled/checkpoints", 7, {"recipe": {}}, {"model": {"weight": torch.zeros(2)}})
    (tmp_path / "distilled/recipe.yaml").touch()
    with pytest.raises(ValueError, match="distilled holds a run of `veca distill`; take another --out"):
        tune(place, tmp_path / "distilled", settings(), restart=restart)
    assert (tmp_path / "distilled/checkpoints/step-00000007/state.json").is_file()


def test_batches_without_a_picture_that_can_be_read(place: Path, tmp_path: Path) -> None:
    data = shutil.copytree(place / "classes", tmp_path / "classes")
    shutil.copytree(place / "model", tmp_path / "model")
    asked = settings(epochs=0.1, batch=3, skip_bad=True)  # six at once are scored: all of a class

    def tear(split: str) -> None:
        for file in data.glob(split):
            file.write_bytes(b"torn")

    tear("val/red/*")
    result = tune(tmp_path, tmp_path / "out", asked)
    assert ["6 of val cannot be read" in problem for problem in result["problems"]] == [True]
    tear("val/*/*")
    with pytest.raises(UnreadableImageError, match="no picture of classes val can be read; mend them"):
        tune(tmp_path, tmp_path / "none", asked)
    shutil.copytree(place / "classes/val", data / "val", dirs_exist_ok=True)
    tear("train/*/*")
    with pytest.raises(UnreadableImageError, match="a whole batch of classes train cannot be read: ") as failed:
        tune(tmp_path, tmp_path / "batch", asked)
    assert "--skip-bad" not in str(failed.value)
    assert "larger --batch-size" in str(failed.value)


# Pixels


def test_segmentation_learns_synthetic_masks(place: Path, tmp_path: Path) -> None:
    asked = FinetuneSegmentSettings(
        size=64, cores=(16, 64), epochs=5, batch=4, rate=2e-3, scales=(0.8, 1.5), every=7, progress=False
    )
    result = tune(place, tmp_path, asked, "masks")
    assert result["metric"] == "mIoU"
    assert min(result["after"][c]["mIoU"] for c in ("16", "64")) > 75
    assert result["before"]["64"]["mIoU"] < 60, "there was something to learn"
    assert result["per_class"].keys() == {"ground", "box"}
    segmenter = load_segmenter(tmp_path)
    assert segmenter.classes == ["ground", "box"]
    split = load_dataset(str(place / "masks")).splits["test"]
    hits = []
    for i in range(len(split)):
        image = veca.images.load_image(split.image(i), size=64, fit="keep")
        with torch.inference_mode():
            said = segmenter(image[None], cores=64, size=(40, 48)).argmax(1)[0].numpy()
        hits.append((said == split.label(i))[1:].mean())  # the first row does not count
    assert np.mean(hits) * 100 == pytest.approx(result["after"]["64"]["pixel_accuracy"], abs=0.01)
    image = torch.randn(1, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        same = VecaModel.from_pretrained(tmp_path)(image, cores=16).pooler_output
        torch.testing.assert_close(same, segmenter.backbone(image, 16).cls)
    page = (tmp_path / "report.html").read_text()
    ET.fromstring(page)
    assert page.count("data:image/png;base64,iVBOR") == 2 * len(result["gallery"])
    (tmp_path / "head.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(veca.CheckpointError, match="damaged, or no head"):
        load_segmenter(tmp_path)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("{", "damaged, or no head"),
        ("[" * 100_000, "damaged, or no head"),
        ('{"classes": ["a"], "ignore": "none"}', "damaged, or no head"),
        (json.dumps({"classes": ["a"] * 10**6, "ignore": 255}), r"weight is \(2, 192\), expected \(1000000, 128\)"),
    ],
    ids=["broken", "deep", "text", "classes"],
)
def test_a_damaged_head_is_refused(tmp_path: Path, told: str, message: str) -> None:
    veca.save(make_tiny(depth=1), tmp_path)
    save_file({"weight": torch.zeros(2, 192)}, tmp_path / "head.safetensors", {"veca": told})
    with pytest.raises(veca.CheckpointError, match=message):
        load_segmenter(tmp_path)


def test_a_converted_folder_has_its_head(place: Path, tmp_path: Path) -> None:
    source, asked = tmp_path / "tuned", FinetuneSegmentSettings(size=64)
    SegmentTask(
        veca.load(place / "model"), load_dataset(str(place / "masks"), task="segment"), asked, CropReader()
    ).save(source, {})
    whole = load_segmenter(source).state_dict()

    def convert(name: str, *more: str) -> Any:
        return CliRunner().invoke(app, ["convert", "--model", str(source), "--out", str(tmp_path / name), *more])

    assert convert("same").exit_code == 0
    assert all(
        torch.equal(value, whole[name]) for name, value in load_segmenter(tmp_path / "same").state_dict().items()
    )
    assert convert("half", "--dtype", "float16").exit_code == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "half/head.safetensors").values()} == {torch.float16}
    half = load_segmenter(tmp_path / "half")
    assert half.classes == ["ground", "box"]
    assert all(torch.equal(value, whole[name].half().float()) for name, value in half.state_dict().items())
    assert "head.safetensors is left behind" in convert("file.safetensors").stderr
    assert not (tmp_path / "head.safetensors").exists()
    assert convert("tuned", "--overwrite").exit_code == 0  # onto itself
    assert all(torch.equal(value, whole[name]) for name, value in load_segmenter(source).state_dict().items())
    (source / "preprocessor_config.json").write_text("{}")
    (source / "head.safetensors").rename(tmp_path / "kept")
    assert convert("same", "--overwrite").exit_code == 0  # as the source is: without a head
    assert not (tmp_path / "same/head.safetensors").exists()
    assert (tmp_path / "same/preprocessor_config.json").read_text() == "{}"
    (source / "head.safetensors").write_bytes(b"no tensors at all")
    assert "damaged, or no head" in str(convert("damaged").exception)
    assert not (tmp_path / "damaged/model.safetensors").exists()


# The command


def test_the_command_says_what_it_does(place: Path, tmp_path: Path) -> None:
    for name, told in (("blue", "blue & <b>"), ("red", "red")):
        shutil.copytree(place / "classes/train" / name, tmp_path / "mine" / told)
    (tmp_path / "mine/red/3.png").write_bytes(b"\x89PNG torn")
    command = [
        "finetune",
        "classify",
        "--model",
        str(place / "model"),
        "--data",
        str(tmp_path / "mine"),
        "--device",
        "cpu",
    ]
    command += ["--out", str(tmp_path / "out"), "--size", "32", "--cores", "8", "--epochs", "1", "--batch-size", "8"]
    command += ["--workers", "0", "--set", "head_epochs=5", "--set", "progress=false"]
    failed = CliRunner().invoke(app, command)
    assert "red/3.png" in str(failed.exception)
    assert "--skip-bad" in str(failed.exception)
    done = CliRunner().invoke(app, [*command, "--skip-bad"])
    assert done.exit_code == 0, done.exception
    assert "report.html" in done.stdout
    assert "Left out: 1 of " in done.stderr
    assert re.search(r"top1 on test, C = 8: \d+\.\d\d ± \d.* %; the linear probe it began from ", done.stderr)
    page = (tmp_path / "out/report.html").read_text()
    ET.fromstring(page)  # stricter than HTML asks: every tag closed, every text escaped
    for text in (
        "red/3.png",
        "linear probe",
        "Against the budget",
        "top1 on val",
        "± is half of the 95 % confidence interval",
        "Taken for each other",
        "data:image/webp",
    ):
        assert text in page
    assert veca.load(tmp_path / "out").config.num_classes == 2
    unknown = CliRunner().invoke(app, [*command, "--set", "smoohting=0"])
    assert "did you mean 'smoothing'" in str(unknown.exception)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 40}, "size=40: must be a multiple of 16. Nearest: 48"),
        ({"cores": (8, 65)}, r"cores=\(8, 65\): must be from 1 to 64"),
        ({"layer_decay": 0}, "layer_decay=0: must be above 0, at most 1"),
        ({"ema": 1}, "ema=1: must be null, or between 0 and 1"),
    ],
)
def test_impossible_settings_are_refused(place: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune(place, tmp_path, settings(**changes))
    assert not list(tmp_path.iterdir())


def test_folders_of_the_wrong_layout_are_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="has no folders of classes. Expected:"):
        finetune(str(place / "model"), str(tmp_path / "empty"), tmp_path, settings(), device="cpu")
    with pytest.raises(DatasetError, match="has no folder images beside masks"):
        finetune(str(place / "model"), str(place / "classes"), tmp_path, FinetuneSegmentSettings(), device="cpu")
    with pytest.raises(DatasetError, match="has pictures all in one folder"):
        finetune(str(place / "model"), str(place / "masks"), tmp_path, settings(), device="cpu")
    with pytest.raises(veca.CheckpointError, match="no such file or folder"):
        finetune(str(tmp_path / "nothing"), str(place / "classes"), tmp_path, settings(), device="cpu")
    with pytest.raises(veca.CheckpointError, match="has no head.safetensors"):
        load_segmenter(place / "model")
    with pytest.raises(ValueError, match="augment='trivial': must be flip or colour"):
        FinetuneSegmentSettings(augment="trivial")
