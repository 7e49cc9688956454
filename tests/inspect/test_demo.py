import base64
import io
import os
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from conftest import make_tiny
from PIL import Image
from sklearn.metrics.pairwise import cosine_similarity

import veca.inspect.demo
from veca import ImageError, create_model
from veca.flops import model_flops
from veca.images import fit_image, load_image, open_image
from veca.images.samples import sample_images
from veca.inspect import pca, scaling
from veca.inspect.demo import write_demo

NAME = '<b>"cat" & dog.png'
BUDGETS = (8, 16)
SIZE = 64


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small gain nothing from more, and on a busy machine threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = create_model("veca_tiny", depth=4).eval()
    with torch.no_grad():
        model.coordinate_alpha.fill_(2.0)  # cores that move visibly
    return model


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / NAME
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    Image.fromarray(np.stack([rows * 3, columns * 3, rows + columns], axis=-1).astype(np.uint8)).save(path)
    return path


def report(model, pictures, out, **changes):
    settings = {"model_name": "a<i>name", "size": SIZE, "budgets": BUDGETS, "progress": False}
    path = write_demo(pictures, out, model=model, **(settings | changes))
    assert path == out
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(model, picture, tmp_path_factory):
    return report(model, [picture], tmp_path_factory.mktemp("out") / "new" / "demo.html")


@pytest.fixture(scope="module")
def tree(page):
    return ET.fromstring(page)  # stricter than HTML asks: every tag closed, every name escaped


def decode(image):
    kind, data = re.fullmatch(r"data:image/(jpeg|png);base64,(.+)", image.get("src")).groups()
    picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    assert picture.format.lower() == kind
    return np.asarray(picture.convert("RGB")).astype(float)


def test_every_picture_decodes_and_says_what_it_shows(tree, picture):
    images = list(tree.iter("img"))
    assert len(images) == (1 + 2) + (1 + 1 + len(BUDGETS) + 1 + 8), "the opening, and what is shown of each image"
    pictures = [decode(image) for image in images]
    given = fit_image(open_image(picture), SIZE).resize((512, 512))
    shown = [decode(image) for image in images if image.get("alt").endswith(("a patch of it", "the model is given"))]
    assert [np.abs(picture - np.asarray(given)).mean() < 2 for picture in shown] == [True, True]
    assert all(shown.std() > 5 for shown in pictures)
    assert all(NAME in image.get("alt") for image in images)
    assert len({image.get("alt") for image in images}) == len(images)


def test_feature_colours_are_the_joint_pca(tree, model, picture):
    images = load_image(picture, size=SIZE)[None]
    with torch.no_grad():
        features = torch.stack([model(images, cores=budget).patches[0] for budget in BUDGETS])
    colours = pca(features).unflatten(1, (4, 4)) * 255
    tiles = [image for image in tree.iter("img") if image.get("alt").startswith("principal components")]
    for tile, expected in zip(tiles, colours, strict=True):
        np.testing.assert_allclose(decode(tile), expected.numpy(), atol=2)  # browsers smooth it


def test_the_page_opens_with_what_is_like_the_patch_in_the_middle(tree, model, picture):
    opening = next(each for each in tree.iter("div") if each.get("class") == "opening")
    tiles = [image for image in opening.iter("img") if "like the marked one" in image.get("alt")]
    assert [re.search(r"with (\d+) cores", tile.get("alt"))[1] for tile in tiles] == ["16", "8"]
    with torch.no_grad():
        features = model(load_image(picture, size=SIZE)[None], cores=16).patches[0].numpy()
    expected = cosine_similarity(features[2 * 4 + 2 :][:1], features)[0]  # the patch in row 3, column 3 of 4 × 4
    shown = decode(tiles[0]).sum(-1).flatten()  # colours become brighter with similarity
    assert np.argsort(shown)[-1] == 10
    assert np.corrcoef(shown, expected)[0, 1] > 0.9
    marks = [tuple(float(mark.get(key)) for key in ("x", "y", "width", "height")) for mark in opening.iter("rect")]
    assert set(marks) >= {(50.0, 50.0, 25.0, 25.0)}
    assert len([chart for chart in opening.iter("svg") if chart.get("role") == "img"]) == 2


def test_a_patch_is_found_again_in_other_pictures(model, page, picture, tmp_path):
    assert "The same patch" not in page
    # Of a picture and itself the best match is the patch itself.
    elastic = create_model("veca_tiny", depth=1, widths=(0.25, 1.0)).eval()
    pictures = [picture, picture]
    tree = ET.fromstring(report(elastic, pictures, tmp_path / "two.html"))
    (match,) = [
        div
        for div in tree.iter("div")
        if (div.find("div/img") is not None) and "best match" in div.find("div/img").get("alt")
    ]
    assert [span.text for span in match.iter("span")][1:] == ["1.000"]
    assert {(mark.get("x"), mark.get("y")) for mark in match.iter("rect")} == {("50.0", "50.0")}
    charts = [chart for chart in tree.iter("svg") if "against resolution" in (chart.get("aria-label") or "")]
    assert all("VECA, C = 8, width 0.25" in "".join(chart.itertext()) for chart in charts), "elastic settings"


def test_nothing_is_fetched_from_elsewhere(page, tree):
    text = re.sub(r";base64,[\w+/=]+", "", page)
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<iframe", text)
    assert all(image.get("src").startswith("data:") for image in tree.iter("img"))
    assert "{{" not in text, "an unfilled place in the template"


def test_names_are_escaped_in_the_page(page, tree):
    assert "<b>" not in page
    assert "<i>name" not in page
    assert [heading.text for heading in tree.iter("h2")] == [NAME, "What a budget costs"]
    assert "a<i>name" in tree.findtext("head/title")


def test_charts_compare_with_the_dense_vit_over_resolution(tree, model, monkeypatch):
    charts = [chart for chart in tree.iter("svg") if "against resolution" in (chart.get("aria-label") or "")]
    assert [chart.get("aria-label").partition(" of ")[0] for chart in charts] == ["time, ms", "GFLOPs"]
    for chart in charts:
        text = "".join(chart.itertext())
        assert all(word in text for word in ("VECA, C = 16", "dense ViT", "32", "64", "96", "128"))
    monkeypatch.setattr(scaling, "CPU_SECONDS", 0.0)
    points = scaling.measure_scaling(model, [scaling.ScalingSetting(8, 1.0)], [32, 64])
    assert [scaling.DENSE in point.seconds for point in points] == [True, False], "counted where timing would take long"


def test_table_holds_the_flops_and_times_of_every_budget(tree, model):
    rows = [list(row) for row in tree.iter("tr")][1:]
    assert [row[0].text for row in rows] == ["8", "16"]
    flops = [model_flops(model.config, SIZE, SIZE, budget) for budget in BUDGETS]
    for row, expected in zip(rows, flops, strict=True):
        seconds, counted = row[1].find("data"), row[3].find("data")
        assert int(counted.get("value")) == expected
        assert float(counted.text) == pytest.approx(expected / 1e9, abs=5e-4)
        assert 0 < float(seconds.get("value")) < 60
        assert float(seconds.text) == pytest.approx(1000 * float(seconds.get("value")), abs=0.06)
        assert row[4].find("div/span").text == f"{100 * expected / flops[-1]:.0f}%"
    assert rows[-1][2].find("div/span").text == "100%"
    assert rows[-1][5].text == "1.000"
    assert float(rows[0][5].text) < 1


def test_cores_are_drawn_where_they_stand(tree, model, picture):
    with torch.no_grad():
        found = model(load_image(picture, size=SIZE)[None], cores=16).coordinates[:, 0]
    places = ((found + 1) * 50).numpy()
    ways = [group for group in tree.iter("g") if group.find("polyline") is not None][::-1]
    assert len(ways) == 16
    for core, way in enumerate(ways):
        drawn = np.array([point.split(",") for point in way.find("polyline").get("points").split()], dtype=float)
        np.testing.assert_allclose(drawn, places[:, core], atol=0.02)
        circles = [(float(circle.get("cx")), float(circle.get("cy"))) for circle in way.iter("circle")]
        np.testing.assert_allclose(circles, places[[0, -1], core], atol=0.02)
    rings = [(float(c.get("cx")), float(c.get("cy"))) for c in tree.iter("circle") if c.get("class") == "ring"]
    np.testing.assert_allclose(rings, places[3, :8], atol=0.02)
    assert np.abs(places[3] - places[0]).max() > 1, "cores that stand still would prove nothing"


def test_short_ways_are_drawn_longer_and_the_page_says_so(picture, tmp_path, page):
    page_new = report(create_model("veca_tiny", depth=4), [picture], tmp_path / "demo.html")
    assert re.search(r"drawn \d+ times as long", page_new)
    assert "times as long" not in page


def test_a_model_with_classes_names_the_most_probable(picture, tmp_path):
    torch.manual_seed(1)
    model = create_model("veca_tiny", depth=2, num_classes=4).eval()
    model.head.bias.data.copy_(torch.tensor([0.0, 9.0, 5.0, 7.0]))
    asked = {"model": model, "model_name": "tiny", "size": SIZE, "budgets": BUDGETS, "progress": False}
    page = write_demo([picture], tmp_path / "numbers.html", **asked).read_text()
    assert re.findall(r"<span>(class \d)</span>", page) == ["class 1", "class 3", "class 2"]
    model.provenance = {"classes": ["dog", "tabby <cat>", "cow", "tiger"]}
    page = write_demo([picture], tmp_path / "names.html", **asked).read_text()
    odds = model(load_image(picture, size=SIZE)[None], cores=BUDGETS[-1]).logits[0].detach().softmax(-1).tolist()
    shown = re.findall(r"<span>(tabby &lt;cat&gt;|tiger|cow)</span><span>([\d.]+)</span>", page)
    expected = (1, "tabby &lt;cat&gt;"), (3, "tiger"), (2, "cow")
    assert shown == [(name, f"{odds[i]:.2f}") for i, name in expected]


def test_random_weights_are_announced(model, picture, page, tmp_path, monkeypatch):
    assert 'class="banner"' not in page
    assert "weights are random" not in page
    assert "of unrecorded origin" in page
    monkeypatch.setattr(model, "provenance", {"weights": "random", "seed": 7})
    page = report(model, [picture], tmp_path / "demo.html")
    banner = next(e for e in ET.fromstring(page).iter("div") if e.get("class") == "banner")
    assert "weights are random" in "".join(banner.itertext())
    assert "random, seed 7" in page


def test_provenance_is_told_without_what_is_too_long(model, picture, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "provenance", {"source": "a<b.pt", "global_step": 9, "official_config": "x" * 200})
    page = report(model, [picture], tmp_path / "demo.html")
    assert "source: a&lt;b.pt, global step: 9" in page
    assert "xxx" not in page


def test_model_and_output_streams_are_left_as_they_were(model, picture, tmp_path, capsys):
    model.train()
    try:
        report(model, [picture], tmp_path / "quiet.html")
        assert model.training
    finally:
        model.eval()
    assert capsys.readouterr() == ("", "")
    report(model, [picture], tmp_path / "loud.html", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "timing" in err
    assert sorted(os.listdir(tmp_path)) == ["loud.html", "quiet.html"]


def test_an_unreadable_picture_is_named_and_nothing_is_written(model, picture, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"not a picture")
    with pytest.raises(ImageError, match=r"bad\.png"):
        report(model, [picture, bad], tmp_path / "demo.html")
    assert os.listdir(tmp_path) == ["bad.png"]


def test_what_is_not_finite_is_not_reported(picture, tmp_path):
    broken = make_tiny()
    torch.nn.init.constant_(broken.blocks[1].attn.qkv.weight, torch.nan)
    with pytest.raises(veca.VecaError, match=r"not finite: .* blocks\.1\.attn\.qkv\.weight"):
        report(broken, [picture], tmp_path / "demo.html")
    assert os.listdir(tmp_path) == []


def test_a_failure_leaves_the_old_report(model, picture, tmp_path, monkeypatch):
    out = tmp_path / "demo.html"
    out.write_text("old")

    def fail(*args):
        raise RuntimeError("no flops today")

    monkeypatch.setattr(veca.inspect.demo, "model_flops", fail)
    with pytest.raises(RuntimeError, match="no flops"):
        report(model, [picture], out)
    assert out.read_text() == "old"
    assert os.listdir(tmp_path) == ["demo.html"]


@pytest.mark.parametrize(("changes", "says"), [({"budgets": ()}, "no budget"), ({"budgets": (8, 65)}, "65")])
def test_impossible_budgets_are_refused(model, picture, tmp_path, changes, says):
    with pytest.raises(ValueError, match=says):
        report(model, [picture], tmp_path / "demo.html", **changes)


def test_a_folder_is_not_a_file_to_write(model, picture, tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        report(model, [picture], tmp_path)


def test_a_name_that_is_not_text_does_not_stop_the_report(model, picture, tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.png")
    try:
        path.write_bytes(picture.read_bytes())
    except OSError:
        pytest.skip("this file system takes text only")
    assert r"<h2>caf\udce9.png</h2>" in report(model, [path], tmp_path / "demo.html")


def test_sample_photos_are_taken_when_none_are_named(model, tmp_path, monkeypatch):
    pytest.importorskip("skimage")
    assert len(sample_images()) == 4
    assert all(Image.open(path).mode == "RGB" for path in sample_images())
    monkeypatch.setattr("veca.images.samples.SAMPLES", ("coffee.png",))
    page = report(model, None, tmp_path / "demo.html", budgets=(8,))
    assert "<h2>coffee.png</h2>" in page
    assert "Features with 8 cores" in page


def test_without_scikit_image_the_way_out_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setattr("veca.images.samples.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'veca\[viz\]'.*your own"):
        report(model, None, tmp_path / "demo.html")
