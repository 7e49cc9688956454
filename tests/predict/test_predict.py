"""Predictions of fine-tuned models: in Python, and as files of many images in their own pixels."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_tiny
from PIL import Image
from sample_images import encode, smooth_image
from transformers import pipeline
from typer.testing import CliRunner

import veca
import veca.hub.transformers
import veca.predict.run
from veca.cli.main import app
from veca.data.datasets import load_dataset
from veca.heads import dense
from veca.heads.networks import DepthEstimator, Segmenter
from veca.images import load_image
from veca.predict.run import _Names
from veca.report.gallery import class_colours

CLASSES = ["cat", "dog", "emu"]
SIZE = 32


def save_run(folder: Path, task: str, **asked: Any) -> Path:
    """A folder as `veca finetune` leaves it, of a network that was not trained."""
    settings = {"task": task, "size": SIZE, "fit": "crop", "batch": 4, **asked}
    backbone = make_tiny(depth=2, budgets=(8, 16), num_classes=3 if task == "classify" else 0)
    backbone.provenance = {"weights": "fine-tuned", "classes": CLASSES, "finetune": settings}
    veca.save(backbone, folder)
    network: Segmenter | DepthEstimator | None = None
    if task == "segment":
        network = Segmenter(backbone, CLASSES)
    elif task == "depth":
        network = DepthEstimator(backbone, 0.5, 9.0, bins=16)
    if network is not None:
        torch.nn.init.normal_(network.head.weight, std=1.0, generator=torch.Generator().manual_seed(1))
        network.save_head(folder)
    for name in ("finetune.json", "result.json"):
        (folder / name).write_text("{}")
    processor = {"image_processor_type": "VecaImageProcessor", "size": {"height": SIZE, "width": SIZE}, "fit": "crop"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each task, and photos: odd sizes, turned by EXIF, grey, a single pixel, the same names, broken."""
    folder = tmp_path_factory.mktemp("predict")
    for task in ("classify", "segment", "depth"):
        save_run(folder / task, task)
    save_run(folder / "native", "segment", fit="native", max_patches=9)
    for name in ("a", "b"):
        (folder / "photos" / name).mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    smooth_image(0, 61, 40).save(folder / "photos/a/7.png")
    smooth_image(1, 37, 53).save(folder / "photos/b/7.png")
    smooth_image(2, 50, 50).save(folder / "photos/a/7.bmp")
    smooth_image(3, 64, 31).save(folder / "photos/turned.jpg", exif=exif)
    smooth_image(4, 44, 45).convert("L").save(folder / "photos/grey.png")
    smooth_image(5, 1, 1).save(folder / "photos/dot.png")
    (folder / "photos/broken.png").write_bytes(encode(smooth_image(6))[:200])
    return folder


READABLE = ["dot.png", "grey.png", "turned.jpg", "a/7.bmp", "a/7.png", "b/7.png"]
MAPS = ["dot.png", "grey.png", "turned.png", "a/7.png", "a/7.png.png", "b/7.png"]
"""The names of the files made of `READABLE`."""


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["predict", *map(str, arguments), "--device", "cpu", "--workers", "0"])


def read_csv(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def upright(path: Path) -> Image.Image:
    return veca.images.open_image(path)


# Files


def test_a_table_has_the_classes_that_transformers_finds(place: Path, tmp_path: Path) -> None:
    done = invoke(place / "classify", place / "photos", "--out", tmp_path / "said.csv", "--top", 2, "--cores", 16)
    assert done.exit_code == 3, done.exception
    assert "broken.png: damaged or truncated" in done.stderr
    header, *rows = read_csv(tmp_path / "said.csv")
    assert header == ["image", "class", "probability", "class_2", "probability_2"]
    assert [Path(row[0]) for row in rows] == [place / "photos" / name for name in READABLE]
    classify = pipeline("image-classification", model=str(place / "classify"))
    classify.model.config.cores = 16
    for path, *cells in rows:
        expected = classify(upright(Path(path)), top_k=2)
        assert cells[::2] == [each["label"] for each in expected]
        assert list(map(float, cells[1::2])) == pytest.approx([each["score"] for each in expected], abs=2e-6)
    (_, (name, reason)) = read_csv(tmp_path / "said.csv.failures.csv")
    assert name == str(place / "photos/broken.png")
    assert reason.startswith("damaged or truncated")
    again = invoke(place / "classify", place / "photos/dot.png", "--out", tmp_path / "said.csv")
    assert "said.csv exists; choose another name, or pass --overwrite" in str(again.exception)
    assert (
        invoke(place / "classify", place / "photos/dot.png", "--out", tmp_path / "said.csv", "--overwrite").exit_code
        == 0
    )
    assert len(read_csv(tmp_path / "said.csv")) == 2
    assert not (tmp_path / "said.csv.failures.csv").exists()


@pytest.mark.parametrize("task", ["segment", "native"])
def test_masks_are_in_the_pixels_of_the_images(place: Path, tmp_path: Path, task: str) -> None:
    """At each pixel the class of highest score, scores resized as torch does it."""
    assert invoke(place / task, place / "photos", "--out", tmp_path / "out").exit_code == 3
    network = veca.load_finetuned(place / task).network
    fit: dict[str, Any] = {"fit": "native", "max_patches": 9} if task == "native" else {"fit": "keep", "size": SIZE}
    for name, map_name in zip(READABLE, MAPS, strict=True):
        photo = upright(place / "photos" / name)
        mask = Image.open(tmp_path / "out/masks" / map_name)
        assert (mask.size, mask.mode) == (photo.size, "L")
        with torch.inference_mode():
            out = network.backbone(load_image(place / "photos" / name, **fit)[None], 16)
            scores = network.head.scores(network.head.normed(out.feature_map, out.cls), slice(None))
            expected = F.interpolate(scores, photo.size[::-1], mode="bilinear").argmax(1)[0]
        assert (np.asarray(mask) == expected.numpy()).mean() > 0.999
        assert Image.open(tmp_path / "out/overlays" / map_name).size == photo.size
    table = read_csv(tmp_path / "out/predictions.csv")
    assert table[0] == ["image", "mask", "overlay"]
    assert [row[1:] for row in table[1:]] == [[f"masks/{name}", f"overlays/{name}"] for name in MAPS]
    assert (tmp_path / "out/classes.txt").read_text().split() == CLASSES
    assert Image.open(tmp_path / "out/legend.png").width > 100


def test_pictures_of_large_images_are_smaller(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes do not mix, and the overlay lies over the image."""
    monkeypatch.setattr(veca.predict.run, "PICTURE_SIDE", 20)
    assert invoke(place / "segment", place / "photos/b/7.png", "--out", tmp_path / "out").exit_code == 0
    mask, overlay = (np.asarray(Image.open(tmp_path / f"out/{kind}/7.png")) for kind in ("masks", "overlays"))
    assert (mask.shape, overlay.shape) == ((53, 37), (20, 14, 3))
    small = upright(place / "photos/b/7.png").resize((14, 20), Image.Resampling.BICUBIC)
    colours = 2 * overlay.astype(int) - np.asarray(small)
    allowed = class_colours(3).astype(int)
    distance = np.abs(colours[:, :, None] - allowed).max(-1)
    assert (distance.min(-1) <= 3).all()
    rows, columns = (np.arange(20) * 53 // 20 + 1, np.arange(14) * 37 // 14 + 1)
    assert (distance.argmin(-1) == mask[np.ix_(rows, columns)]).mean() > 0.9


def test_masks_are_labels_for_another_run(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "photos/b", tmp_path / "images")
    smooth_image(8).save(tmp_path / "images/8.png")
    smooth_image(9).save(tmp_path / "images/9.jpg")
    assert invoke(place / "segment", tmp_path / "images", "--out", tmp_path / "out").exit_code == 0
    shutil.move(tmp_path / "images", tmp_path / "out/images")
    data = load_dataset(str(tmp_path / "out"), task="segment")
    assert data.classes == CLASSES
    assert sum(len(split) for split in data.splits.values()) == 3


def test_depths_are_millimetres_in_the_pixels_of_the_images(place: Path, tmp_path: Path) -> None:
    assert invoke(place / "depth", place / "photos", "--out", tmp_path / "out", "--cores", 8).exit_code == 3
    network: Any = veca.load_finetuned(place / "depth").network
    for name, map_name in zip(READABLE, MAPS, strict=True):
        photo = upright(place / "photos" / name)
        depth = veca.images.open_values(tmp_path / "out/depths" / map_name)
        assert depth.dtype == np.uint16
        image = load_image(place / "photos" / name, size=SIZE, fit="keep")
        with torch.inference_mode():
            metres = network(image[None], 8, photo.size[::-1])[0].numpy()
        np.testing.assert_allclose(depth, 1000 * metres, atol=2)
        picture = Image.open(tmp_path / "out/pictures" / map_name)
        assert picture.width >= photo.width
        assert picture.height > photo.height, "the range of its colours is below"


def test_an_interrupted_folder_is_continued(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = place / "segment", place / "photos", "--out", tmp_path / "out"
    assert invoke(*command[:3], tmp_path / "whole").exit_code == 3
    predict, shown = veca.Predictor.predict_pixels, list[int]()

    def stop_second(self: veca.Predictor, pixels: Any, sizes: Any) -> Any:
        shown.append(len(pixels))
        if len(shown) == 2:
            raise KeyboardInterrupt
        return predict(self, pixels, sizes)

    monkeypatch.setattr(veca.Predictor, "predict_pixels", stop_second)
    stopped = invoke(*command)
    assert stopped.exit_code == 130
    assert "The same command continues a folder" in stopped.stderr
    assert not (tmp_path / "out/predictions.csv").exists()
    other = invoke(*command, "--cores", 8)
    assert "interrupted, with other settings (cores)" in str(other.exception)
    done = invoke(*command)
    assert shown == [4, 2, 2], "the first four were not predicted again"
    assert "6 images, 4 of them in an earlier run" in done.stdout
    files = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()} == files
    assert all((tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes() for file in files)
    assert "has predictions already; choose another folder, or pass --overwrite" in str(invoke(*command).exception)
    few = invoke(place / "segment", place / "photos/dot.png", "--out", tmp_path / "out", "--overwrite")
    assert few.exit_code == 0
    assert [path.name for path in (tmp_path / "out/masks").iterdir()] == ["dot.png"]
    assert not (tmp_path / "out/failures.csv").exists()


def test_an_archive_writes_nowhere_else(place: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    with tarfile.open(tmp_path / "deep/shard.tar", "w") as shard:
        for i, name in enumerate(("../../above.png", "/root.png", "x/../7.png", f"{'n' * 240}.png")):
            data = encode(smooth_image(i))
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))
    assert invoke(place / "segment", tmp_path / "deep/shard.tar", "--out", tmp_path / "deep/out").exit_code == 0
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png") if "masks" in path.parts)
    folder = "deep/out/masks/shard.tar"
    assert made == [f"{folder}/above.png", f"{folder}/{'n' * 196}.png", f"{folder}/root.png", f"{folder}/x/7.png"]


def test_names_never_meet(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    names = _Names([str(tmp_path / "one"), str(tmp_path / "two")])
    given = ["one/7.jpg", "two/7.jpg", "one/7.png", "one/7.jpg", "one/7.jpg.png", "one/x/.9"]
    chosen = [names.choose(str(tmp_path / name)) for name in given]
    assert chosen == ["one/7", "two/7", "one/7.png", "one/7.jpg", "one/7.jpg.png", "one/x/.9"]
    assert names.choose(str(tmp_path / "one/7.jpg")) == "one/7.jpg-2"


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "photos", "--out", "p.csv"], "no such file or folder, and no model of that name"),
        (["photos", "photos", "--out", "p.csv"], "the folder holds no model.safetensors"),
        (["veca_tiny", "photos", "--out", "p.csv"], "a backbone without a head, which predicts nothing; name a folder"),
        (["unfinished", "photos", "--out", "p.csv"], "its run has not come to its end; the same `veca finetune`"),
        (["classify", "missing.jpg", "--out", "p.csv"], "'missing.jpg': no such file or folder"),
        (["classify", "empty", "--out", "p.csv"], "empty: no images there"),
        (["classify", "photos", "--out", "p.csv", "--top", "4"], "--top 4: must be from 1 to 3, the number of classes"),
        (["segment", "photos", "--out", "p", "--top", "2"], "--top 2: classes of images are counted"),
        (["classify", "photos", "--out", "empty"], "empty is a folder; classes are written to a file"),
        (["classify", "photos", "--out", "p.txt"], r"p.txt does not end with .csv"),
        (["segment", "photos", "--out", "photos/a/7.png"], "7.png is a file; masks and depths are written to a folder"),
        (["depth", "photos", "--out", "classify"], "classify holds other files; name a new folder or an empty one"),
        (["depth", "photos", "--out", "photos/depths"], "photos/depths is inside photos, where the images are"),
        (["depth", "photos", "--out", "p", "--fit", "crop"], "fit='crop': must be keep, stretch or native"),
        (["classify", "photos", "--out", "p.csv", "--size", "40"], "size=40: must be a multiple of 16"),
        (["classify", "photos", "--out", "p.csv", "--cores", "65"], "cores=65: must be from 1 to 64"),
        (["classify", "photos", "--out", "p.csv", "--max-patches", "9"], "max_patches=9: must be None unless fit"),
    ],
)
def test_what_cannot_be_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    for path in place.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "empty").mkdir()
    shutil.copytree(place / "classify", tmp_path / "unfinished")
    (tmp_path / "unfinished/result.json").unlink()
    monkeypatch.chdir(tmp_path)
    failed = invoke(*arguments)
    assert failed.exit_code == 1
    assert message in str(failed.exception)
    assert not (tmp_path / "p.csv").exists()


# Python


def test_predictions_in_python(place: Path) -> None:
    path = place / "photos/turned.jpg"
    classifier = veca.load_finetuned(place / "classify", size=48, cores=8)
    one, two = classifier.predict([path, Image.open(path)])
    assert one.classes == two.classes
    assert one.probabilities == two.probabilities == tuple(sorted(one.probabilities, reverse=True))
    with torch.inference_mode():
        logits = veca.load(place / "classify")(load_image(path, size=48)[None], 8).logits
    assert isinstance(logits, torch.Tensor)
    assert one.classes[0] == CLASSES[int(logits.argmax())]
    mask = veca.load_finetuned(place / "segment").predict(path)
    assert isinstance(mask, veca.MaskPrediction)
    assert (mask.mask.shape, mask.mask.dtype, mask.classes) == ((64, 31), torch.uint8, tuple(CLASSES))
    depth = veca.load_finetuned(place / "depth").predict(str(path))
    assert isinstance(depth, veca.DepthPrediction)
    assert depth.depth.shape == (64, 31)
    assert 0.5 <= float(depth.depth.min()) < float(depth.depth.max()) <= 9
    assert isinstance(veca.load(place / "segment"), veca.Veca)
    with pytest.raises(veca.ImageError, match="broken.png: damaged"):
        classifier.predict([path, place / "photos/broken.png"])


def test_settings_are_those_of_the_run(place: Path, tmp_path: Path) -> None:
    settings = veca.load_finetuned(place / "native").settings
    assert (settings.fit, settings.max_patches, settings.cores, settings.batch) == ("native", 9, 16, 4)
    assert veca.load_finetuned(place / "native", size=64).settings.max_patches is None
    released = make_tiny(depth=1, num_classes=2)  # as a converted student of a classifier: no run, no names
    veca.save(released, tmp_path / "plain")
    assert sorted(veca.load_finetuned(tmp_path / "plain").predict(smooth_image()).classes) == ["0", "1"]
    veca.save(make_tiny(depth=1, num_classes=2, patch_size=8), tmp_path / "fine")
    with pytest.raises(veca.CheckpointError, match="fine: its patches have 8 pixels; images"):
        veca.load_finetuned(tmp_path / "fine")
    released.provenance = {"finetune": {"size": "large"}}
    veca.save(released, tmp_path / "damaged")
    with pytest.raises(veca.CheckpointError, match="its provenance has no settings of `veca finetune`: size='large'"):
        veca.load_finetuned(tmp_path / "damaged")


def test_large_masks_are_made_in_bands(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = veca.load_finetuned(place / "segment"), smooth_image(2, 300, 211)
    whole = model.predict(image).mask
    monkeypatch.setattr(dense, "BAND_OUTPUTS", 300 * 3 * 50)
    bands = model.predict(image).mask
    assert (bands == whole).float().mean() > 0.9999
    assert bands.shape == (211, 300)
