"""`veca.search`: what an index holds, what a query finds, and that an index stays true to the images."""

from __future__ import annotations

import csv
import io
import json
import pickle
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny
from PIL import Image
from sample_images import smooth_image, write_video
from sklearn.metrics.pairwise import cosine_similarity
from torch.nn.functional import avg_pool2d
from typer.testing import CliRunner

import veca
from veca import Veca, images
from veca.cli.main import app
from veca.embed import EmbedSettings
from veca.search import SearchError, SearchIndex, build, update_index

SETTINGS = EmbedSettings(cores=16, size=64, fit="stretch", decode="pillow", dense=True, cells=2)


@pytest.fixture(scope="module")
def model() -> Veca:
    return make_tiny()


def picture(seed: int) -> Image.Image:
    return smooth_image(seed, 112, 96)


def make_photos(folder: Path, count: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(count):
        picture(seed).save(folder / f"{seed}.png")
    return folder


def index_of(sources: Any, out: Path, model: Veca, **options: Any) -> build.IndexReport:
    settings = options.pop("settings", SETTINGS)
    return update_index(
        sources, out, model=model, model_name="tiny", settings=settings, workers=0, progress=False, **options
    )


def counts(report: build.IndexReport) -> tuple[int, ...]:
    return report.images, report.added, report.changed, report.dropped, report.failures


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def index_folder(photos: Path, model: Veca, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("search") / "index"
    assert counts(index_of(photos, out, model)) == (6, 6, 0, 0, 0)
    return out


@pytest.fixture
def index(index_folder: Path, model: Veca) -> SearchIndex:
    return SearchIndex.open(index_folder, model=model)


@torch.inference_mode()
def features(model: Veca, image: Any, cores: int = 16, size: Any = 64) -> Any:
    return model(images.load_image(image, size, "stretch")[None], cores=cores)


@pytest.mark.parametrize("cores", [None, 8])
def test_a_query_ranks_all_images_by_the_cosine_of_their_features(
    index: SearchIndex, photos: Path, model: Veca, cores: int | None
) -> None:
    """At another budget than that of the index too."""
    found = index.query(photos / "3.png", 6, cores=cores)
    query = features(model, photos / "3.png", cores or 16).cls
    expected = {
        str(path): float(cosine_similarity(query, features(model, path).cls)[0, 0]) for path in photos.iterdir()
    }
    assert {match.path: match.score for match in found} == pytest.approx(expected, abs=2e-3)
    assert [match.score for match in found] == sorted((match.score for match in found), reverse=True)
    assert found[0].path == str(photos / "3.png")
    assert (found[0].width, found[0].height, found[0].box, found[0].missing) == (112, 96, None, False)
    assert index.query(photos / "3.png", 2, cores=cores) == found[:2]


def test_a_region_is_compared_with_the_cells_of_each_image(index: SearchIndex, photos: Path, model: Veca) -> None:
    box = (56, 0, 56, 48)  # the cell on the top right
    found = index.query(photos / "2.png", 6, box=box)
    region = Image.open(photos / "2.png").crop((56, 0, 112, 48))
    query = features(model, region, size=images.nearest_sizes(64 * (48 / 56) ** 0.5, 64 * (56 / 48) ** 0.5)).patches
    for match in found:
        cells = avg_pool2d(features(model, match.path).feature_map, 2)[0].flatten(1).T
        scores = cosine_similarity(query.mean(1), cells)[0]
        assert match.score == pytest.approx(scores.max(), abs=2e-3)
        row, column = divmod(int(scores.argmax()), 2)
        assert match.box == (56 * column, 48 * row, 56, 48)
    assert len(found) == 6


def test_an_index_without_regions_takes_the_global_feature_of_a_region(
    photos: Path, model: Veca, tmp_path: Path
) -> None:
    settings = EmbedSettings(cores=16, size=64, fit="stretch", decode="pillow")
    index_of(photos, tmp_path / "index", model, settings=settings)
    index = SearchIndex.open(tmp_path / "index", model=model)
    found = index.query(photos / "2.png", 1, box=(0, 0, 96, 96))[0]
    query = features(model, Image.open(photos / "2.png").crop((0, 0, 96, 96))).cls
    assert not index.has_regions
    assert found.box is None
    assert found.score == pytest.approx(cosine_similarity(query, features(model, found.path).cls)[0, 0], abs=2e-3)


def test_an_update_embeds_what_is_new_or_changed_and_drops_what_is_gone(
    model: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, out, embedded = make_photos(tmp_path / "photos"), tmp_path / "index", []
    embed = build.embed
    monkeypatch.setattr(build, "embed", lambda paths, *a, **k: (embedded.extend(paths), embed(paths, *a, **k)))
    index_of(photos, out, model)
    embedded.clear()
    assert counts(index_of(photos, out, model)) == (6, 0, 0, 0, 0)
    assert embedded == []
    picture(7).save(photos / "7.png")
    picture(8).save(photos / "1.png")
    (photos / "broken.png").write_bytes(b"none")
    (photos / "4.png").unlink()
    report = index_of(photos, out, model)
    assert counts(report) == (6, 1, 1, 1, 1)
    assert sorted(embedded) == [str(photos / name) for name in ("1.png", "7.png", "broken.png")]
    failures = list(csv.reader((out / "failures.csv").open()))
    assert [row[0] for row in failures] == ["path", str(photos / "broken.png")]
    # The same as an index that is made at once.
    index_of(photos, tmp_path / "new", model)
    updated, new = (SearchIndex.open(each, model=model) for each in (out, tmp_path / "new"))
    assert updated.query(photos / "1.png", 9, box=(0, 0, 50, 50)) == new.query(photos / "1.png", 9, box=(0, 0, 50, 50))
    (photos / "broken.png").unlink()
    for path in photos.glob("[02-6].png"):
        path.unlink()
    assert counts(index_of(photos, out, model)) == (2, 0, 0, 4, 0)
    assert len(list((out / "runs").glob("*.files"))) == 1  # nothing of the first run is left
    assert not (out / "failures.csv").exists()


def test_an_update_that_was_interrupted_continues(model: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, out, embedded = make_photos(tmp_path / "photos"), tmp_path / "index", []
    embed = build.embed

    def stop_in_the_second(paths: list[str], *args: Any, **options: Any) -> None:
        if embedded:
            raise KeyboardInterrupt
        embedded.extend(paths)
        embed(paths, *args, **options)

    monkeypatch.setattr(build, "RUN_FILES", 2)
    monkeypatch.setattr(build, "embed", stop_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        index_of(photos, out, model)
    with pytest.raises(SearchError, match="is not complete; the same `veca search index` continues it"):
        SearchIndex.open(out)
    monkeypatch.setattr(build, "embed", lambda paths, *a, **k: (embedded.extend(paths), embed(paths, *a, **k)))
    picture(9).save(photos / "5.png")  # the run that has it must begin anew, the others go on
    assert counts(index_of(photos, out, model)) == (6, 6, 0, 0, 0)
    assert sorted(embedded) == sorted(map(str, photos.iterdir()))  # none of them twice
    assert SearchIndex.open(out, model=model).query(photos / "5.png", 1)[0].path == str(photos / "5.png")


def test_images_in_archives_are_found_and_shown(model: Veca, tmp_path: Path) -> None:
    shard = tmp_path / "shard.tar"
    with tarfile.open(shard, "w") as tar:
        for seed in range(3):
            data = io.BytesIO()
            picture(seed).save(data, "PNG")
            member = tarfile.TarInfo(f"some/{seed}.png")
            member.size = len(data.getvalue())
            tar.addfile(member, io.BytesIO(data.getvalue()))
    assert counts(index_of(shard, tmp_path / "index", model)) == (3, 3, 0, 0, 0)
    index = SearchIndex.open(tmp_path / "index", model=model)
    found = index.query(picture(1), 1)[0]
    assert (found.path, found.missing) == (f"{shard}/some/1.png", False)
    model_file = tmp_path / "tiny.safetensors"
    veca.save(model, model_file)
    picture(1).save(tmp_path / "query.png")
    sheet = tmp_path / "sheet.html"
    run = CliRunner().invoke(
        app,
        [
            *("search", "query", str(tmp_path / "query.png"), str(tmp_path / "index"), "--model", str(model_file)),
            *("--box", "0,0,60,60", "--out", str(sheet), "--format", "json", "--device", "cpu", "--cores", "8"),
        ],
    )
    assert run.exit_code == 0, run.output
    rows = json.loads(run.stdout.splitlines()[0])
    assert {row["path"] for row in rows} == {f"{shard}/some/{seed}.png" for seed in range(3)}
    assert "Query at C = 8, width 1; index at C = 16, width 1." in run.stderr
    assert sheet.read_text().count('<img src="data:image/webp') == 4
    shard.rename(tmp_path / "moved.tar")
    assert index.query(picture(1), 1)[0].missing
    assert index.query(picture(1), 1)[0].path == found.path


def test_frames_of_videos_are_found_by_their_times(model: Veca, tmp_path: Path) -> None:
    clip, settings = write_video(tmp_path / "clip.mp4", 2), EmbedSettings(**{**SETTINGS.to_dict(), "fps": 2})
    assert counts(index_of(clip, tmp_path / "index", model, settings=settings)) == (4, 4, 0, 0, 0)
    assert counts(index_of(clip, tmp_path / "index", model, settings=settings)) == (4, 0, 0, 0, 0)
    index, frame = SearchIndex.open(tmp_path / "index", model=model), Image.new("RGB", (96, 64))
    frame.paste((5 * 15,) * 3, (0, 0, 48, 64))  # as after a second and a half
    assert index.query(frame, 1)[0].path == f"{clip}#1.5"
    assert not index.query(frame, 1)[0].missing
    clip.unlink()
    assert index.query(frame, 1)[0].missing


def test_duplicates_are_grouped_with_the_first_image_they_are_like(model: Veca, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos")
    for seed in (0, 3):
        picture(seed).save(photos / f"{seed}-again.bmp")
    shutil.copy(photos / "0.png", photos / "<b>copy.png")
    index_of(photos, tmp_path / "index", model)
    index = SearchIndex.open(tmp_path / "index")
    vectors = np.concatenate([features(model, path).cls for path in sorted(photos.iterdir())])
    cosines = cosine_similarity(vectors)
    threshold = 0.99
    groups = list(index.duplicates(threshold))
    pairs = {(a, b) for a, b in np.argwhere(np.triu(cosines >= threshold, 1)).tolist()}
    names = [str(path) for path in sorted(photos.iterdir())]
    found = {(names.index(g.images[0].path), names.index(m.path)) for g in groups for m in g.images[1:]}
    assert found <= pairs
    assert {b for _, b in pairs} <= {b for _, b in found}  # every image that is like an earlier one is in a group
    assert [Path(m.path).name for m in groups[0].images] == ["0-again.bmp", "0.png", "<b>copy.png"]
    sheet = tmp_path / "sheet.html"
    run = CliRunner().invoke(
        app, ["search", "duplicates", str(tmp_path / "index"), "--threshold", "0.99", "--out", str(sheet)]
    )
    assert run.exit_code == 0, run.output
    text = sheet.read_text()
    assert "<b>copy" not in text
    assert "&lt;b&gt;copy.png" in text
    run = CliRunner().invoke(app, ["search", "duplicates", str(tmp_path / "index"), "--format", "csv"])
    assert run.stdout.splitlines()[0] == "group,path,score,width,height,box,missing"


def test_what_cannot_be_answered_is_an_error(index: SearchIndex, photos: Path, tmp_path: Path) -> None:
    photo = photos / "0.png"
    with pytest.raises(SearchError, match="top=0: must be at least 1"):
        index.query(photo, 0)
    for box in ((0, 0, 113, 10), (-1, 0, 5, 5), (5, 5, 0, 5)):
        with pytest.raises(SearchError, match="within the image, which has 112×96 pixels"):
            index.query(photo, box=box)
    (tmp_path / "broken.png").write_bytes(b"none")
    with pytest.raises(veca.ImageError, match="not one of JPEG"):
        index.query(tmp_path / "broken.png")
    with pytest.raises(SearchError, match="is not an index: it has no index.json"):
        SearchIndex.open(tmp_path)
    with pytest.raises(SearchError, match=r"threshold=1.5: must be from -1 to 1"):
        index.duplicates(1.5)


def test_another_model_is_refused(index_folder: Path, photos: Path, model: Veca) -> None:
    other = make_tiny(depth=2)
    with pytest.raises(SearchError, match="is of another model"):
        SearchIndex.open(index_folder, model=other).query(photos / "0.png")
    with pytest.raises(SearchError, match="is an index of another model"):
        index_of(photos, index_folder, other)
    with pytest.raises(SearchError, match="is of the model tiny, which cannot be loaded"):
        SearchIndex.open(index_folder).query(photos / "0.png")
    with pytest.raises(SearchError, match="cores was 16, now 8"):
        index_of(photos, index_folder, model, settings=EmbedSettings(**{**SETTINGS.to_dict(), "cores": 8}))


def test_sources_are_not_dropped_unasked(photos: Path, model: Veca, tmp_path: Path) -> None:
    more, out = make_photos(tmp_path / "more", 2), tmp_path / "index"
    index_of([photos, more], out, model)
    with pytest.raises(SearchError, match=f"is also of {more}: name all sources"):
        index_of(photos, out, model)
    assert counts(index_of(photos, out, model, drop_sources=True)) == (6, 0, 0, 2, 0)
    shutil.rmtree(more)
    more.mkdir()
    with pytest.raises(SearchError, match="no images there"):
        index_of([photos, more], out, model)
    (tmp_path / "index" / "index.json").unlink()
    with pytest.raises(SearchError, match="is what is left of an index"):
        index_of(photos, out, model)
    with pytest.raises(SearchError, match="holds other files"):
        index_of(photos, tmp_path, model)


def test_damaged_tables_are_refused_and_made_again(photos: Path, model: Veca, tmp_path: Path) -> None:
    out, calls = tmp_path / "index", []
    index_of(photos, out, model)
    expected = SearchIndex.open(out, model=model).query(photos / "0.png")

    class Bomb:
        def __reduce__(self) -> Any:
            return calls.append, (1,)

    vectors = out / "tables" / "00000001" / "vectors.npy"
    for damage in (vectors.read_bytes()[:-2000], b"", pickle.dumps(Bomb())):
        vectors.write_bytes(damage)
        with pytest.raises(SearchError, match="is damaged or missing"):
            SearchIndex.open(out, model=model)
    np.save(vectors, np.array([Bomb()] * 6), allow_pickle=True)
    with pytest.raises(SearchError, match="is damaged or missing"):
        SearchIndex.open(out, model=model)
    with open(vectors, "wb") as file:
        np.savez(file, vectors=np.zeros((6, 64), np.float16))
    with pytest.raises(SearchError, match="is damaged or missing"):
        SearchIndex.open(out, model=model)
    assert calls == []
    assert counts(index_of(photos, out, model))[:1] == (6,)
    assert SearchIndex.open(out, model=model).query(photos / "0.png") == expected
    (out / "index.json").write_text("{")
    with pytest.raises(SearchError, match="index.json is damaged"):
        SearchIndex.open(out)


def test_a_missing_extra_is_named(index: SearchIndex, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "usearch.compiled", None)
    with pytest.raises(veca.VecaError, match=r"a search needs usearch.*pip install 'veca\[search\]'"):
        index.query(photos / "0.png")
