"""Statistics of the cores: every number against its definition, the file, the chart and the command."""

from __future__ import annotations

import json
import math
import sys
import tarfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_tiny
from PIL import Image
from sample_images import smooth_image
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import veca
from veca.cli.main import app
from veca.images import load_image
from veca.inspect import core_maps, core_profiles, draw_story, measure_cores, story_table, write_story
from veca.inspect.core_stats import Alignment, CoreAccumulator, Moments
from veca.inspect.maps import as_maps, effective_area, overlap, pair_overlap, winners

run = CliRunner().invoke
SIZE = 64
COUNT = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images that differ much, and a model."""
    folder = tmp_path_factory.mktemp("story")
    (folder / "images").mkdir()
    for i in range(COUNT):
        smooth_image(i, 90, 75).save(folder / f"images/{i}.png")
    veca.save(make_tiny(), folder / "model")
    return folder


@pytest.fixture(scope="module")
def pictures(folder):
    return folder / "images"


@pytest.fixture(scope="module")
def images(pictures):
    return torch.stack([load_image(pictures / f"{i}.png", SIZE) for i in range(COUNT)])


@pytest.fixture(scope="module")
def story(pictures):
    return measure_cores(make_tiny(), pictures, budgets=(16, 64), size=SIZE, batch=2)


# The arithmetic


def test_measures_of_known_maps_are_right():
    apart, half = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]), torch.tensor([[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0]])
    even = torch.full((3, 4), 0.25)
    assert [float(pair_overlap(maps)) for maps in (apart, half, even)] == [0, 0.5, 1]
    assert math.isnan(pair_overlap(even[:1]))
    torch.testing.assert_close(effective_area(apart), torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(effective_area(even), torch.ones(3))
    assert winners(torch.stack([apart, even[:2]])).tolist() == [1, 0.5]
    assert overlap(apart, 1 / 4).tolist() == [0.5, 0.5]
    assert as_maps(torch.tensor([[0.1, 0.3], [0.0, 0.0]])).tolist() == [[0.25, 0.75], [0.5, 0.5]]


def test_pair_overlap_is_the_mean_of_minima():
    torch.manual_seed(0)
    maps = as_maps(torch.rand(3, 6, 11, dtype=torch.float64) ** 3)
    pairs = [(i, j) for i in range(6) for j in range(i)]
    expected = torch.stack([torch.minimum(maps[:, i], maps[:, j]).sum(-1) for i, j in pairs]).mean(0)
    torch.testing.assert_close(pair_overlap(maps), expected)


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 4]])
def test_moments_and_alignment_are_those_of_all_at_once(pieces):
    rng = np.random.default_rng(1)
    x = rng.normal(100, 1, (7, 3))
    y = x @ rng.normal(size=(3, 3)) + rng.normal(size=(7, 3))
    moments, alignment = Moments(), Alignment()
    for a, b in zip(torch.from_numpy(x).split(pieces), torch.from_numpy(y).split(pieces), strict=True):
        moments.add(a)
        alignment.add(a, b)
    np.testing.assert_allclose(moments.mean, x.mean(0))
    np.testing.assert_allclose(moments.variance, x.var(0))
    gram_x, gram_y = ((z - z.mean(0)) @ (z - z.mean(0)).T for z in (x, y))
    hsic = (gram_x * gram_y).sum() / np.sqrt((gram_x**2).sum() * (gram_y**2).sum())  # by pictures, not channels
    assert alignment.value == pytest.approx(hsic)
    assert 0.1 < hsic < 0.99


def test_alignment_does_not_see_a_rotation_or_a_shift():
    torch.manual_seed(0)
    x, alignment = torch.randn(20, 4, dtype=torch.float64), Alignment()
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    alignment.add(x, 3 * x @ turn + 7)
    assert alignment.value == pytest.approx(1)
    still = Alignment()
    still.add(x, torch.ones_like(x))
    assert math.isnan(still.value)
    assert math.isnan(Alignment().value)


# The numbers of a model


def close(found, values, layers=slice(None)):
    """`LayerStats` of these values, (images, layers)."""
    values = values.double()
    np.testing.assert_allclose(found.mean, values.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.std, values.std(0, correction=0), rtol=1e-3, atol=1e-6)
    overall = values[:, layers].mean(1)
    assert found.overall.mean == pytest.approx(float(overall.mean()), rel=1e-4)
    assert found.overall.std == pytest.approx(float(overall.std(correction=0)), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("budget", [16, 64])
@torch.no_grad()
def test_maps_are_measured_as_defined(story, images, budget):
    found = story.budgets[budget].maps
    attention = core_maps(make_tiny(), images, budget, range(3)).flatten(-2).transpose(0, 1)
    maps = attention / attention.sum(-1, keepdim=True)  # (pictures, layers, cores, patches)
    but_last = slice(0, 2)
    both = torch.minimum(maps[:, :, :, None], maps[:, :, None]).sum(-1)
    close(found.overlap, (both.sum((-2, -1)) - budget) / (budget * (budget - 1)), but_last)
    close(found.same_core, torch.minimum(maps[1:], maps[:-1]).sum(-1).mean(-1), but_last)
    close(found.even, maps.clamp(max=1 / 16).sum(-1).mean(-1), but_last)
    close(found.area, (-(maps * maps.log()).sum(-1)).exp().mean(-1) / 16, but_last)
    won = torch.tensor([[len(set(layer.argmax(0).tolist())) / budget for layer in each] for each in maps])
    close(found.winners, won, but_last)
    assert 0.2 < found.overlap.overall.mean < 0.9, "maps all alike would prove nothing"
    patches = attention.sum(-1)
    told = story.budgets[budget]
    close(told.first_core.patches, patches[..., 0])
    close(told.other_cores.patches, patches[..., 1:].mean(-1))
    for looks in (told.first_core, told.other_cores):
        parts = np.array([looks.itself.mean, looks.cores.mean, looks.patches.mean])
        np.testing.assert_allclose(parts.sum(0), 1, rtol=1e-5)
        assert parts.min() > 0


@torch.no_grad()
def test_profiles_are_measured_as_defined(story, images):
    found = story.budgets[16].heard
    profiles = core_profiles(make_tiny(), images, 16, range(3)).mean((2, 3)).transpose(0, 1)
    close(found.first, profiles[..., 0])
    assert len(found.chunks) == 2
    for chunk, expected in zip(found.chunks, (profiles[..., :8], profiles[..., 8:]), strict=True):
        close(chunk, expected.sum(-1))
    np.testing.assert_allclose(found.cores, profiles.mean(0), rtol=1e-4)
    assert len(story.budgets[64].heard.chunks) == 8


@torch.inference_mode()
def test_places_are_measured_as_defined(story, images):
    model = make_tiny()
    found = story.budgets[16].places
    way = model(images, cores=16).coordinates.transpose(0, 1).double() / 2  # (pictures, layers, cores, 2), in sides
    moved = way - way[:, :1]
    close(found.distance, moved.norm(dim=-1).mean(-1))
    steps = F.pad((way[:, 1:] - way[:, :-1]).norm(dim=-1).mean(-1), (1, 0))
    close(found.path, steps.cumsum(1))
    square = moved.square().sum(-1).mean((0, 2))
    np.testing.assert_allclose(np.square(found.shift) + np.square(found.scatter), square, rtol=1e-6)
    np.testing.assert_allclose(found.shift, moved.mean(0).square().sum(-1).mean(-1).sqrt(), rtol=1e-6)
    np.testing.assert_allclose(found.picture_share[1:], np.square(found.scatter[1:]) / square[1:].numpy(), rtol=1e-6)
    assert 0.01 < found.picture_share[-1] < 0.99
    np.testing.assert_allclose(found.start, 2 * way[0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.end, 2 * way[:, -1].mean(0), rtol=1e-6)
    near = [min(float((a - b).norm()) for j, b in enumerate(way[0, 0]) if i != j) for i, a in enumerate(way[0, 0])]
    assert found.spacing == pytest.approx(np.mean(near))


@torch.no_grad()
def test_what_is_kept_is_measured_as_defined(story, images):
    few, all_ = (make_tiny()(images, cores=budget) for budget in (16, 64))
    found = story.budgets[16].kept
    cls = F.cosine_similarity(few.cls, all_.cls)
    patches = F.cosine_similarity(few.patches, all_.patches, dim=-1).mean(1)
    for spread, values in ((found.cls, cls), (found.patches, patches)):
        assert spread.mean == pytest.approx(float(values.mean()), rel=1e-5)
        assert spread.std == pytest.approx(float(values.std(correction=0)), rel=1e-3)
    x, y = (each.cls.double() - each.cls.double().mean(0) for each in (few, all_))
    cka = (x.T @ y).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())
    assert found.cka == pytest.approx(float(cka), rel=1e-5)
    assert cka < 0.999
    between = F.cosine_similarity(all_.cls[1:], all_.cls[:-1])
    assert story.between.cls.mean == pytest.approx(float(between.mean()), rel=1e-5)
    dense = F.cosine_similarity(all_.patches[1:], all_.patches[:-1], dim=-1).mean()
    assert story.between.patches.mean == pytest.approx(float(dense), rel=1e-5)


def test_the_whole_bank_keeps_everything(story):
    kept = story.budgets[64].kept
    assert (kept.cls.mean, kept.patches.mean, kept.cka) == pytest.approx((1, 1, 1), abs=1e-6)
    assert kept.cls.std < 1e-6


def numbers(story):
    """All numbers of a story, flat; what a run has of its own left out."""
    found = []

    def walk(value):
        if isinstance(value, dict):
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)
        else:
            found.append(math.nan if value is None else value)

    walk({key: value for key, value in story.items() if key in ("budgets", "between")})
    return np.array(found, float)


def test_batches_and_processes_do_not_matter(story, pictures, tmp_path):
    files = [write_story(story, tmp_path / "2.json")]
    for batch, workers in ((1, 0), (16, 1)):
        again = measure_cores(make_tiny(), pictures, budgets=(64, 16), size=SIZE, batch=batch, workers=workers)
        files.append(write_story(again, tmp_path / f"{batch}.json"))
    first, *others = (numbers(json.loads(file.read_text())) for file in files)
    assert first.size > 500
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-4, atol=1e-5)


class Operations(TorchDispatchMode):
    """Counts them while the block runs."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_larger_batches_take_no_more_operations(images):
    counts = []
    for few in (2, COUNT):
        stats = CoreAccumulator(make_tiny(), [8, 64])
        stats.add(images[:1])
        with Operations() as seen:
            stats.add(images[:few])
        counts.append(seen.count)
    assert counts[0] == counts[1]


def test_the_whole_bank_need_not_be_asked_for(story, pictures):
    alone = measure_cores(make_tiny(), pictures, budgets=[16], size=SIZE)
    assert list(alone.budgets) == [16]
    assert alone.budgets[16].kept.cls.mean == pytest.approx(story.budgets[16].kept.cls.mean, rel=1e-5)
    assert alone.between.cls.mean == pytest.approx(story.between.cls.mean, rel=1e-5)


def test_cores_that_do_not_move_have_no_path(pictures, tmp_path):
    model = make_tiny()
    torch.nn.init.zeros_(model.coordinate_alpha)
    story = measure_cores(model, pictures, budgets=[8], size=SIZE)
    places = story.budgets[8].places
    assert places.distance.mean == places.path.mean == places.scatter == places.shift == [0, 0, 0]
    assert all(map(math.isnan, places.picture_share))
    saved = json.loads(write_story(story, tmp_path / "a.json").read_text())
    assert saved["budgets"]["8"]["places"]["picture_share"] == [None] * 3


def test_cores_that_move_alike_in_all_images_have_no_scatter(pictures):
    model = make_tiny()
    with torch.no_grad():
        for head in model.coordinate_heads:
            head.weight.zero_()
            head.bias.fill_(0.3)
    places = measure_cores(model, pictures, budgets=[8], size=SIZE).budgets[8].places
    assert places.shift[-1] > 0.05
    assert max(places.scatter) < 1e-7
    assert max(places.picture_share[1:]) < 1e-10
    assert places.distance.std[-1] < 1e-7


def test_identical_cores_have_identical_maps(pictures):
    model = make_tiny()
    with torch.no_grad():
        for bank in (model.cores, model.core_states):
            for chunk in bank:
                chunk.copy_(bank[0][:1].expand_as(chunk))
    told = measure_cores(model, pictures, budgets=[16], size=SIZE).budgets[16]
    np.testing.assert_allclose(told.maps.overlap.mean, 1, atol=1e-5)
    np.testing.assert_allclose(told.heard.cores, 1 / 16, rtol=1e-4)
    np.testing.assert_allclose([chunk.overall.mean for chunk in told.heard.chunks], 0.5, rtol=1e-4)
    assert told.maps.same_core.overall.mean < 0.95
    assert told.kept.cls.mean < 1


@pytest.mark.filterwarnings("ignore:cores=1 was not trained")
def test_one_core_and_one_image_give_null_where_undefined(pictures, tmp_path):
    story = measure_cores(make_tiny(), pictures / "0.png", budgets=[1], size=SIZE)
    told = json.loads(write_story(story, tmp_path / "one.json").read_text())
    assert told["budgets"]["1"]["maps"]["overlap"]["mean"] == [None] * 3
    assert told["budgets"]["1"]["other_cores"]["patches"]["overall"] == {"mean": None, "std": None}
    assert told["budgets"]["1"]["heard"]["first"]["overall"]["mean"] == 1
    assert told["between"] == {"cls": {"mean": None, "std": None}, "patches": {"mean": None, "std": None}, "cka": None}
    draw_story(story)


def test_limits_are_spread_and_bad_pictures_counted(pictures, tmp_path):
    shard = tmp_path / "s.tar"
    (tmp_path / "bad.png").write_bytes(b"no picture")
    with tarfile.open(shard, "w") as tar:
        tar.add(tmp_path / "bad.png", "bad.png")
        for i in range(COUNT):
            tar.add(pictures / f"{i}.png", f"{i}.png")
    model = make_tiny().train()
    story = measure_cores(model, [shard], budgets=[8], size=SIZE, batch=3)
    assert (story.about["pictures"], story.about["failed"]) == (COUNT, 1)
    assert story.failures[0][0].endswith("bad.png")
    assert model.training
    whole = measure_cores(model, pictures, budgets=[8], size=SIZE)
    assert story.budgets[8].maps.overlap.overall.mean == pytest.approx(whole.budgets[8].maps.overlap.overall.mean)
    two = measure_cores(model, [pictures], budgets=[8], size=SIZE, limit=2)
    those = measure_cores(model, [pictures / "2.png", pictures / "4.png"], budgets=[8], size=SIZE)
    assert two.about["pictures"] == 2
    assert two.budgets[8].maps == those.budgets[8].maps
    with pytest.raises(ValueError, match="none of the 1 pictures could be read. The first: .*bad.png: "):
        measure_cores(model, tmp_path / "bad.png", budgets=[8], size=SIZE)


def test_the_file_says_what_it_is_of(story, pictures, tmp_path):
    about = json.loads(write_story(story, tmp_path / "new" / "a.json").read_text())["about"]
    assert about["sources"] == [str(pictures)]
    assert about["config"]["num_cores"] == 64
    assert (about["size"], about["pictures"], about["failed"], about["dtype"]) == (SIZE, COUNT, 0, "float32")
    assert {"veca", "torch"} <= about["versions"].keys()
    assert len(about["sha256"]) == 64
    with pytest.raises(ValueError, match="a.txt: numbers are written as .json"):
        write_story(story, tmp_path / "a.txt")


def lines_of(chart):
    """Points of the lines of a chart, in pixels; dotted ones apart."""
    strokes = [mark for mark in chart.marks if getattr(mark, "role", "") == "line"]
    return [[np.array(s.runs[0]) for s in strokes if bool(s.dash) == dotted] for dotted in (False, True)]


def along_y(points, values):
    """Whether pixel heights are an affine image of values, higher values further up."""
    values = np.array(values, float)
    slope, offset = np.polyfit(values, points[:, 1], 1)
    np.testing.assert_allclose(slope * values + offset, points[:, 1], atol=0.1)
    assert slope < 0


def test_the_chart_shows_the_numbers(story):
    chart = draw_story(story)
    moves, maps, heard, kept = (panel for _, _, panel in chart.panels)
    at = story.budgets[64]
    (_, distance), (_, scatter) = lines_of(moves)
    along_y(distance, 100 * np.array(at.places.distance.mean))
    along_y(scatter, 100 * np.array(at.places.scatter))
    along_y(lines_of(maps)[0][1], at.maps.overlap.mean)
    along_y(lines_of(heard)[0][1], 64 * np.mean(at.heard.cores, 0))
    assert len(lines_of(kept)[0]) == 3
    assert lines_of(kept)[0][1][0, 1] > lines_of(kept)[0][1][1, 1], "64 cores keep more than 16"
    assert {m.text for m in maps.marks if getattr(m, "full", "")} == {"16 cores", "64 cores"}
    words = " ".join(mark.text for mark in chart.marks if hasattr(mark, "text"))
    assert "5 pictures of 64 px" in words
    assert "random" not in words


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers(pictures, tmp_path):
    files = []
    for device in ("cpu", "cuda"):
        story = measure_cores(make_tiny().to(device), pictures, budgets=(8, 64), size=SIZE)
        files.append(write_story(story, tmp_path / f"{device}.json"))
    first, second = (numbers(json.loads(file.read_text())) for file in files)
    np.testing.assert_allclose(second, first, rtol=1e-2, atol=5e-3)


# The command


def test_the_command_writes_numbers_and_a_chart(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [
        "--model",
        str(folder / "model"),
        str(folder / "images"),
        "--cores",
        "16,8",
        "--size",
        "64",
        "--workers",
        "0",
    ]
    result = run(app, ["cores", *given, "--chart", "c.svg"])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "cores.json").read_text())
    assert list(found["budgets"]) == ["8", "16"]
    assert found["about"]["model"] == "model"
    assert "<svg" in (tmp_path / "c.svg").read_text()
    assert f"5/{COUNT}" in result.stderr
    assert "images/s" in result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("overlap of two cores' maps")]
    overlap = [found["budgets"][budget]["maps"]["overlap"]["overall"]["mean"] for budget in ("8", "16")]
    assert [cell.split(" ±")[0] for cell in rows[0].split("  ")[1:] if cell.strip()] == [
        f"{100 * each:.1f}" for each in overlap
    ]
    assert max(map(len, result.stdout.split("Numbers:")[0].splitlines())) <= 80


def test_command_tells_of_bad_pictures_and_random_weights(folder, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    given = [
        "--model",
        "veca_small",
        str(folder / "images/0.png"),
        str(bad),
        "--cores",
        "8",
        "--size",
        "32",
        "--workers",
        "0",
    ]
    result = run(app, ["cores", *given, "--out", str(tmp_path / "a.json"), "--no-progress"])
    assert result.exit_code == 3
    assert "1 failed" in result.stderr
    assert "weights are random" in result.stderr
    assert json.loads((tmp_path / "a.json").read_text())["failures"][0][0] == str(bad)


def test_pictures_in_formats_that_are_not_read_are_told(pictures, tmp_path):
    (tmp_path / "0.png").write_bytes((pictures / "0.png").read_bytes())
    (tmp_path / "1.jxl").write_bytes(b"no matter what")
    with pytest.warns(UserWarning, match=r"^1 file was left out: .jxl \(1\)"):
        measure_cores(make_tiny(), tmp_path, budgets=(8,), size=32, limit=1)
    (tmp_path / "0.png").unlink()
    with pytest.raises(ValueError, match=r"no pictures there.*1 file was left out: .jxl \(1\)"):
        measure_cores(make_tiny(), tmp_path, budgets=(8,), size=32)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["images", "--size", "60"], "size=60: must be a positive multiple of 16. Nearest: 64"),
        (["images", "--cores", "65"], "cores=65; a budget is an integer from 1 to 64"),
        (["images", "--out", "a.txt"], "a.txt: numbers are written as .json"),
        (["images", "--out", "a.json/"], "a.json is a folder"),
        (["images", "--chart", "a.gif"], "a.gif: a figure is written as .png or .svg"),
        (["nowhere"], "'nowhere': no such file or folder"),
        (["model"], "model: no pictures there"),
    ],
)
def test_invalid_options_of_cores_are_refused(folder, options, says, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "a.json").mkdir(exist_ok=True)
    before = sorted(folder.iterdir())
    result = run(app, ["cores", "--model", "model", *options])
    assert result.exit_code == 1
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)
    assert sorted(folder.iterdir()) == before, "nothing is written"


def test_a_chart_needs_no_matplotlib(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    given = [
        "--model",
        str(folder / "model"),
        str(folder / "images"),
        "--out",
        str(tmp_path / "a.json"),
        "--size",
        "32",
    ]
    result = run(app, ["cores", *given, "--cores", "8", "--workers", "0", "--chart", str(tmp_path / "a.png")])
    assert result.exit_code == 0, result.output
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"


def test_the_table_has_a_column_for_each_budget(story):
    table = story_table(story)
    assert [column.header for column in table.columns] == ["cores", "16", "64"]
    assert 10 < table.row_count < 20
