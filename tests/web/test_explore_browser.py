"""The explorer in a real browser: Debian's Chromium, driven by Playwright. VECA_BROWSER=required forbids skipping."""

from __future__ import annotations

import base64
import io
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny
from PIL import Image
from safetensors.numpy import load
from sample_images import encode, fractal_image

from veca.bench.explorer import ask
from veca.data.index import ImageIndex
from veca.embed import EmbedSettings
from veca.images.samples import sample_images
from veca.report.page import DARK, LIGHT
from veca.search import update_index
from veca.web.app import create_app
from veca.web.connections import create_server
from veca.web.folder import Folder
from veca.web.searched import open_searched

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REQUIRED = os.environ.get("VECA_BROWSER") == "required"
sync_api = import_module("playwright.sync_api") if REQUIRED else pytest.importorskip("playwright.sync_api")
LOUD = "NO BROWSER: the tests of the explorer's page did not run. Install one: apt-get install chromium"
pytestmark = pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason=LOUD)

PHOTO = encode(fractal_image(), "JPEG")
DESKTOP = {"width": 1280, "height": 720}


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of an app that is served by a thread."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()  # so that the first page waits for the server
        server = create_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    broken = make_tiny()
    torch.nn.init.constant_(broken.blocks[1].attn.qkv.weight, torch.nan)
    other = make_tiny(num_cores=32, budgets=(8, 32), mlp_ratio=4.0, widths=(0.25, 1))
    sorting = make_tiny(num_classes=3)
    sorting.provenance = {"classes": ["ant", "bee", "cat"]}
    with serving(create_app({"tiny": make_tiny(), "other": other, "broken": broken, "sorting": sorting})) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert CHROMIUM, LOUD
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page that was opened; whatever its console complains about is a failure, unless it was asked for."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.heard: list[str] = []
        self.refusals = ["409 (Conflict)"]  # answers that are meant to come, each of which Chromium reports
        self.elsewhere: list[str] = []
        page.set_default_timeout(60000)
        page.on("console", lambda message: self._heard(message.type, message.text))
        page.on("pageerror", lambda error: self.heard.append(str(error)))
        page.on("request", lambda request: self._went(request.url))

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.heard.append(text)

    @property
    def complaints(self) -> list[str]:
        return [text for text in self.heard if not any(refusal in text for refusal in self.refusals)]

    def _went(self, url: str) -> None:
        if not url.startswith((self.address, "blob:", "data:")):
            self.elsewhere.append(url)

    def open(self, state: str = "") -> Visit:
        self.page.goto(self.address + (f"#{state}" if state else ""))
        self.page.wait_for_selector("html[data-ready]")
        return self

    def shown(self, text: str, pane: int = 0) -> None:
        """Waits until a pane shows "picture cores size layer"."""
        self.page.wait_for_selector(f'.pane:nth-child({pane + 1})[data-shown="{text}"]')

    def slide(self, selector: str, value: int) -> None:
        self.page.locator(selector).fill(str(value))

    def pixels(self, selector: str) -> str:
        return str(self.page.evaluate("(selector) => document.querySelector(selector).toDataURL()", selector))

    def until(self, truth: str) -> None:
        """Waits for an expression to hold; Playwright's own way would need eval, which the page forbids."""
        deadline = time.monotonic() + 60
        while not self.page.evaluate(truth):
            assert time.monotonic() < deadline, truth
            time.sleep(0.03)

    def changed(self, selector: str, before: str) -> str:
        """Waits until a canvas shows something else, and gives that."""
        deadline = time.monotonic() + 60
        while (now := self.pixels(selector)) == before:
            assert time.monotonic() < deadline, f"{selector} stayed as it was"
            time.sleep(0.03)
        return now

    def drawn(self) -> None:
        """Waits until what has happened so far is on the page."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def value(self, name: str) -> str | None:
        return self.page.evaluate("(name) => new URLSearchParams(location.hash.slice(1)).get(name)", name)

    def remembered(self, name: str, value: str | None) -> None:
        deadline = time.monotonic() + 60
        while self.value(name) != value and time.monotonic() < deadline:
            time.sleep(0.03)
        assert self.value(name) == value


@pytest.fixture
def visit(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Visit]:
    context = browser.new_context(**{"viewport": DESKTOP, **getattr(request, "param", {})})
    visit = Visit(context.new_page(), address)
    yield visit
    context.close()
    assert visit.complaints == []
    assert visit.elsewhere == [], "the page asked another machine"


FEATURES, SIMILAR, LOOKS, BARS = (f".{name} canvas" for name in ("features", "similar", "looks", "listens"))


PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "color_scheme": "dark"}


@pytest.mark.parametrize("visit", [{}, PHONE], indirect=True, ids=["desktop", "phone"])
def test_costs_charts_and_a_chosen_patch_are_there_from_the_start(visit: Visit) -> None:
    visit.open("picture=astronaut")
    visit.shown("astronaut 64 512 2")
    assert " to " in visit.page.inner_text(".similar figcaption span"), "a patch is chosen"
    bottom = visit.page.viewport_size["height"]
    if visit.page.viewport_size["width"] < 800:
        bottom = visit.page.locator(".controls").bounding_box()["y"]
    for selector in (".numbers", ".charts", ".keys-of-lines"):
        box = visit.page.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= bottom, f"{selector} is seen without scrolling"
    times, flops = (visit.page.locator(".charts svg").nth(i) for i in range(2))
    told = str(flops.get_attribute("aria-label"))
    assert all(name in told for name in ("VECA, C = 64", "C = 8", "dense ViT", "at 1024 px"))
    visit.until("document.querySelectorAll('.charts svg:first-child circle').length >= 3")
    assert "at 256 px" in str(times.get_attribute("aria-label")), "measured"
    colours = visit.page.evaluate(
        "['.line.veca', '.line.dense'].map((line) => getComputedStyle(document.querySelector(line)).stroke)"
    )
    scheme = LIGHT if visit.page.viewport_size["width"] > 800 else DARK
    assert colours == [f"rgb{tuple(bytes.fromhex(scheme[name][1:]))}" for name in ("c1", "c0")], "as in every report"


def test_samples_and_sliders_change_what_is_shown(visit: Visit) -> None:
    visit.open()
    visit.shown("astronaut 64 512 2")
    assert "random" not in visit.page.inner_text("#notice"), "these weights are not announced as random"
    visit.page.click("#samples button[value=chelsea]")
    visit.shown("chelsea 64 512 2")
    assert visit.page.get_attribute("#samples button[value=chelsea]", "aria-pressed") == "true"
    before = visit.pixels(FEATURES)
    visit.slide(".cores", 0)
    visit.shown("chelsea 8 512 2")
    few = visit.pixels(FEATURES)
    assert few != before, "another budget has other features"
    visit.slide(".size", 0)
    visit.shown("chelsea 8 128 2")
    assert "12 × 8 patches" in visit.page.inner_text(".features figcaption")
    visit.slide("#opacity", 0)
    plain = visit.pixels(FEATURES)
    visit.slide("#opacity", 100)
    visit.changed(FEATURES, plain)
    visit.slide("#layer", 3)
    visit.shown("chelsea 8 128 3")
    rows = visit.page.locator(".numbers tbody tr")
    visit.until("document.querySelector('.numbers .dense').cells[1].textContent.match(/m?s$/)")
    assert rows.nth(0).locator("td").nth(3).inner_text() == str(8 + 96)
    assert rows.nth(1).locator("td").nth(3).inner_text() == str(5 + 96)
    for name, value in {"picture": "chelsea", "cores": "8", "size": "128", "layer": "3", "overlay": "100"}.items():
        visit.remembered(name, value)


def test_models_of_several_widths_have_a_slider_for_them(visit: Visit) -> None:
    visit.open("picture=coffee&size=128&cores=8&model=other&width=0.25")
    visit.shown("coffee 8 128 2 0.25")
    assert visit.page.is_visible(".width")
    assert visit.page.inner_text(".widths output") == "25 %"
    assert "25 % of the MLP" in str(visit.page.get_attribute(".features .frame", "aria-label"))
    narrow = visit.pixels(FEATURES)
    visit.slide(".width", 1)
    visit.shown("coffee 8 128 2")
    assert visit.pixels(FEATURES) != narrow, "another width has other features"
    visit.remembered("width", None)
    visit.slide(".width", 0)
    visit.remembered("width", "0.25")
    visit.page.select_option("select", "tiny")
    visit.shown("coffee 8 128 2")
    assert not visit.page.is_visible(".width")
    visit.remembered("width", None)


def test_patches_are_hovered_and_held_and_cores_picked(visit: Visit) -> None:
    visit.open("picture=coffee&size=128&cores=16&overlay=60")
    visit.shown("coffee 16 128 2")
    assert " to " in visit.page.inner_text(".similar figcaption span"), "a patch is chosen from the start"
    visit.page.keyboard.press("Escape")
    visit.until("document.querySelector('.similar span').textContent === 'point at one'")
    box = visit.page.locator(FEATURES).bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.4)
    visit.until("document.querySelector('.similar span').textContent.includes(' to ')")
    here = visit.pixels(SIMILAR)
    heard = visit.page.inner_text(".listens figcaption span")
    assert heard.count("%") == 3
    strongest = heard.split()[0]
    assert visit.page.inner_text(".looks b") == f"Where core {strongest} looks"
    visit.page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * 0.7)
    there = visit.changed(SIMILAR, here)
    visit.page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
    visit.until("document.querySelector('#spoken').textContent")
    visit.drawn()
    held = visit.pixels(SIMILAR)
    assert held != there
    visit.page.mouse.move(box["x"] + 5, box["y"] + 5)
    visit.drawn()
    assert visit.pixels(SIMILAR) == held, "a patch that was clicked is held"
    looks = visit.pixels(LOOKS)
    bars = visit.page.locator(BARS).bounding_box()
    visit.page.mouse.click(bars["x"] + bars["width"] * 5.5 / 16, bars["y"] + bars["height"] / 2)
    visit.until("document.querySelector('.looks b').textContent === 'Where core 6 looks'")
    assert visit.page.input_value("#core") == "6"
    if strongest != "6":
        assert visit.pixels(LOOKS) != looks
    visit.remembered("core", "6")
    visit.page.keyboard.press("Escape")
    visit.remembered("at", None)


def test_panes_share_a_cursor_and_a_link_restores_them(visit: Visit, browser: Any, address: str) -> None:
    visit.open("picture=astronaut&size=128")
    visit.page.click("#compare")
    visit.shown("astronaut 32 512 2", pane=1)
    visit.page.locator(".pane:nth-child(2) select").select_option("tiny")
    visit.page.locator(".pane:nth-child(2) .cores").fill("0")
    visit.shown("astronaut 8 512 2", pane=1)
    visit.page.locator(f".pane:nth-child(2) {FEATURES}").click(position={"x": 40, "y": 40})
    for pane in (1, 2):
        caption = visit.page.locator(f".pane:nth-child({pane}) .similar span")
        sync_api.expect(caption).to_contain_text(" to ")
    visit.remembered("cores2", "8")
    visit.until("location.hash.includes('at=')")
    visit.drawn()
    told = [visit.page.locator(".listens span").nth(i).inner_text() for i in range(2)]
    again = Visit(browser.new_page(viewport=DESKTOP), address).open(visit.page.url.partition("#")[2])
    again.shown("astronaut 64 128 2")
    again.shown("astronaut 8 512 2", pane=1)
    again.drawn()
    assert [again.page.locator(".listens span").nth(i).inner_text() for i in range(2)] == told
    again.page.close()
    assert again.complaints == []
    visit.page.click("#compare")
    assert visit.page.locator(".pane").count() == 1


def test_a_patch_of_one_picture_is_found_in_another(visit: Visit, address: str) -> None:
    visit.open("picture=coffee&size=128&cores2=64&size2=192&model2=tiny&picture2=chelsea")
    visit.shown("coffee 64 128 2")
    visit.shown("chelsea 64 192 2", pane=1)
    left, right = (visit.page.locator(f".pane:nth-child({i}) .features .frame") for i in (1, 2))
    box = left.bounding_box()
    left.click(position={"x": box["width"] * 2.5 / 12, "y": box["height"] * 4.5 / 8})
    visit.until("location.hash.includes('at=')")
    visit.drawn()
    caption = visit.page.locator(".pane:nth-child(2) .similar")
    sync_api.expect(caption).to_contain_text("Best match")

    def features(query: str) -> np.ndarray:
        port = int(address.rsplit(":")[-1].strip("/"))
        found = load(ask(port, "GET", f"/api/features?model=tiny&cores=64&{query}")[1])["patches"]
        return found / np.linalg.norm(found, axis=-1, keepdims=True)

    one = features("picture=coffee&size=128")
    cosines = features("picture=chelsea&size=192") @ one[4, 2]
    assert one.shape[:2] == (8, 12)
    words = str(right.get_attribute("aria-label")).split("row ")[1].replace(",", "").split(".")[0].split()
    row, column = int(words[0]) - 1, int(words[2]) - 1
    assert cosines[row, column] >= cosines.max() - 0.01, "features are sent as bytes"
    assert f"cosine {cosines.max():.2f}"[:-1] in caption.inner_text()
    box = right.bounding_box()
    right.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    visit.drawn()
    assert "Best match" in caption.inner_text(), "a patch that was clicked is held"
    right.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    sync_api.expect(visit.page.locator(".pane:nth-child(1) .similar")).to_contain_text("Best match")
    visit.remembered("picture2", "chelsea")
    visit.remembered("source", "2")
    visit.page.locator("#target label", has_text="left").click()
    visit.page.click("#samples button[value=rocket]")
    visit.shown("rocket 64 128 2")
    visit.shown("chelsea 64 192 2", pane=1)


def test_neighbours_in_the_folder_can_be_opened(browser: Any, tmp_path: Path) -> None:
    for path in sample_images():  # parts of the samples, so that it is known which of them is nearest to one
        with Image.open(path) as image:
            part = image.convert("RGB").crop((8, 8, image.width - 8, image.height - 8))
        part.save(tmp_path / f"part of {path.stem}.png")
    (tmp_path / "unreadable.png").write_bytes(PHOTO[:200])
    folder = Folder(ImageIndex.build(str(tmp_path), progress=False))
    page = browser.new_page(viewport=DESKTOP)
    with serving(create_app({"tiny": make_tiny()}, folder=folder)) as address:
        visit = Visit(page, address).open("picture=coffee&size=128")
        visit.shown("coffee 64 128 2")
        sync_api.expect(page.locator(".neighbours h3")).to_contain_text("by global feature", timeout=60000)
        nearest = page.locator(".neighbours button")
        assert nearest.count() == 4, "what cannot be read is left out"
        assert nearest.first.get_attribute("title").startswith("part of coffee.png, cosine ")
        nearest.first.click()
        page.wait_for_selector("#folder-pictures button[title='part of coffee.png'][aria-pressed=true]")
        visit.until("/^[0-9a-f]{32} 64 128/.test(document.querySelector('.pane').dataset.shown)")
        sync_api.expect(page.locator("#folder-pictures button")).to_have_count(4)
        assert all("404" in text for text in visit.complaints), "Chromium itself reports the unreadable file"
        page.close()


def test_an_index_is_searched_by_a_picture_and_by_a_box_drawn_over_it(browser: Any, tmp_path: Path) -> None:
    photos, model = tmp_path / "photos", make_tiny()
    photos.mkdir()
    for path in sample_images():
        with Image.open(path) as image:
            image.convert("RGB").save(photos / f"copy of {path.stem}.png")
    settings = EmbedSettings(cores=64, size=64, fit="stretch", dense=True, cells=2)
    update_index(
        [photos], tmp_path / "index", model=model, model_name="tiny", settings=settings, workers=0, progress=False
    )
    models = {"tiny": model, "other": make_tiny(depth=2)}
    app = create_app(models, index=open_searched(tmp_path / "index", models))
    page = browser.new_page(viewport=DESKTOP)
    with serving(app) as address:
        visit = Visit(page, address).open("picture=coffee&size=128")
        visit.shown("coffee 64 128 2")
        found = page.locator(".found .strip button")
        sync_api.expect(page.locator(".found h3")).to_contain_text("by global feature", timeout=60000)
        assert found.first.get_attribute("title").startswith("copy of coffee.png, cosine 1.00")
        assert page.locator(".found i").count() == 0
        frame = page.locator(".features .frame").bounding_box()
        held = visit.value("at")
        page.mouse.move(frame["x"] + 0.55 * frame["width"], frame["y"] + 0.05 * frame["height"])
        page.mouse.down()
        page.mouse.move(frame["x"] + 0.75 * frame["width"], frame["y"] + 0.3 * frame["height"])
        page.mouse.move(frame["x"] + 0.95 * frame["width"], frame["y"] + 0.45 * frame["height"])
        page.mouse.up()
        sync_api.expect(page.locator(".found h3")).to_contain_text("by the part in the box")
        sync_api.expect(page.locator(".found i")).to_have_count(4)
        visit.until("new URLSearchParams(location.hash.slice(1)).has('box')")
        box = visit.value("box").split(",")
        assert box[0] == "coffee"
        assert [float(value) for value in box[1:]] == pytest.approx([0.55, 0.05, 0.4, 0.4], abs=0.02)
        assert visit.value("at") == held, "a drag holds no patch"
        page.keyboard.press("Escape")
        sync_api.expect(page.locator(".found h3")).to_contain_text("by global feature")
        page.click(".found .whole")
        sync_api.expect(page.locator(".found h3")).to_contain_text("by the part in the box")
        page.locator(".found .strip button").first.click()
        sync_api.expect(page.locator(".found h3")).to_contain_text("by global feature")
        visit.until("/^[0-9a-f]{32} 64 128/.test(document.querySelector('.pane').dataset.shown)")
        page.select_option(".pane select", "other")
        sync_api.expect(page.locator(".found")).to_be_hidden()
        assert visit.complaints == []
        page.close()


def test_classes_smooth_views_and_the_foreground_are_shown(visit: Visit) -> None:
    visit.open("picture=chelsea&size=128&model=sorting&overlay=100")
    visit.shown("chelsea 64 128 2")
    sync_api.expect(visit.page.locator(".classes li")).to_have_count(3)
    shown = [item.split() for item in visit.page.locator(".classes li").all_inner_texts()]
    assert {name for name, *_ in shown} == {"ant", "bee", "cat"}
    shares = [float(share) for _, share, _ in shown]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=1)

    def count_colours() -> int:
        url = visit.pixels(FEATURES)
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
        return len(image.crop((0, 0, image.width, image.height // 3)).getcolors(2**20))

    smooth = count_colours()
    visit.page.click("#smooth")
    visit.drawn()
    assert count_colours() < 100 < smooth, "one colour for each patch, or interpolated ones"
    before = visit.pixels(FEATURES)
    visit.page.click("#foreground")
    visit.changed(FEATURES, before)
    visit.remembered("foreground", "1")
    visit.remembered("smooth", "0")


def test_a_slow_setting_shows_a_preview_first(visit: Visit) -> None:
    def answer(route: Any) -> None:
        route.fulfill(json={"seconds": [0.2 if "size=256" in route.request.url else 0.5, None, None]})

    visit.page.route("**/api/scaling/times*", answer)
    visit.open("picture=coffee&size=128")
    visit.until("document.querySelectorAll('.charts svg:first-child circle').length === 4")
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url) if "/api/view" in request.url else None)
    visit.slide(".size", 6)
    visit.shown("coffee 64 512 2")
    assert [url.rpartition("size=")[2] for url in asked] == ["192", "512"]
    assert visit.page.evaluate("performance.getEntriesByName('veca-preview').length") == 1
    assert "patches" in visit.page.inner_text(".features figcaption")


def test_a_dropped_image_is_shown_and_a_broken_one_refused(visit: Visit) -> None:
    visit.refusals.append("415")
    visit.open("size=128")
    drop = """async ([bytes, name]) => {
      const carried = new DataTransfer();
      carried.items.add(new File([new Uint8Array(bytes)], name, { type: "image/jpeg" }));
      for (const kind of ["dragover", "drop"]) {
        document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true }));
      }
    }"""
    visit.page.evaluate(drop, [list(PHOTO), "mine.jpg"])
    visit.page.wait_for_selector("#samples button[title='mine.jpg'][aria-pressed=true]")
    visit.until("/^[0-9a-f]{32} 64 128/.test(document.querySelector('.pane').dataset.shown)")
    mine = visit.page.get_attribute(".pane", "data-shown")
    visit.page.set_input_files("#file", {"name": "bad.jpg", "mimeType": "image/jpeg", "buffer": PHOTO[:900]})
    visit.page.wait_for_selector("#problem:not([hidden])")
    assert "cannot be used" in visit.page.inner_text("#problem span")
    assert visit.page.get_attribute(".pane", "data-shown") == mine, "what was there stays"
    assert any("415" in text for text in visit.heard)
    visit.page.click("#problem button")
    visit.page.evaluate(
        """(bytes) => {
          const carried = new DataTransfer();
          carried.items.add(new File([new Uint8Array(bytes)], "pasted.png", { type: "image/png" }));
          dispatchEvent(new ClipboardEvent("paste", { clipboardData: carried }));
        }""",
        list(encode(fractal_image(200, 200), "JPEG")),
    )
    visit.page.wait_for_selector("#samples button[title='pasted.png'][aria-pressed=true]")
    assert visit.page.is_hidden("#problem")


def test_a_link_to_an_expired_upload_shows_a_sample(visit: Visit) -> None:
    visit.refusals.append("404")
    visit.open(f"picture={'a' * 32}&size=128")
    visit.shown("astronaut 64 128 2")
    assert "no longer on the server" in visit.page.inner_text("#status")
    assert visit.page.is_hidden("#problem")
    visit.page.click("#share")
    visit.until("document.querySelector('#status').textContent.match(/copied|Copy/)")
    visit.until("!document.querySelector('#status').textContent")


def test_everything_works_with_the_keyboard_only(visit: Visit) -> None:
    visit.open("size=128")
    press = visit.page.keyboard.press

    def tab_to(selector: str) -> None:
        for _ in range(30):
            if visit.page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
                return
            press("Tab")
        raise AssertionError(f"Tab does not lead to {selector}")

    tab_to("#samples button[value=rocket]")
    press("Enter")
    visit.shown("rocket 64 128 2")
    tab_to("#layer")
    press("ArrowRight")
    visit.shown("rocket 64 128 3")
    tab_to(".cores")
    press("Home")
    visit.shown("rocket 8 128 3")
    assert visit.page.get_attribute(".cores", "aria-valuetext") == "8 cores"
    tab_to(".size")
    press("ArrowRight")
    visit.shown("rocket 8 192 3")
    tab_to(".features .frame")
    press("ArrowRight")
    press("ArrowDown")
    press("Enter")
    spoken = visit.page.locator("#spoken")
    sync_api.expect(spoken).to_contain_text("Row 8, column 11: listens most to cores")
    visit.until("location.hash.includes('at=')")
    tab_to(".downloads .npz")
    names = visit.page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, a, [tabindex='0'], [role=img]")]
          .filter((e) => e.checkVisibility() && !(e.ariaLabel || e.labels?.length || e.innerText.trim() || e.title))
          .map((e) => e.outerHTML)"""
    )
    assert names == [], "everything that can be used or seen has a name"


def test_figure_and_features_can_be_saved(visit: Visit, tmp_path: Any) -> None:
    visit.open("picture=coffee&size=128&cores=16&at=0.5,0.5")
    with visit.page.expect_download() as download:
        visit.page.click("#figure")
    download.value.save_as(tmp_path / "figure.png")
    figure = Image.open(tmp_path / "figure.png")
    assert figure.size[0] > 1500
    assert len(figure.convert("RGB").resize((64, 64)).getcolors(4096)) > 200
    with visit.page.expect_download() as download:
        visit.page.click(".downloads .safetensors")
    assert download.value.suggested_filename == "veca-coffee-16-128.safetensors"


@pytest.mark.parametrize("visit", [PHONE], indirect=True)
def test_the_page_fits_a_phone(visit: Visit) -> None:
    visit.open("picture=coffee&size=128")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing has to be scrolled sideways"
    costs, controls = (visit.page.locator(selector).bounding_box() for selector in (".numbers", ".controls"))
    assert costs["y"] + costs["height"] < controls["y"], "the costs are seen without scrolling"
    visit.page.locator(FEATURES).tap()
    visit.until("document.querySelector('.similar span').textContent.includes(' to ')")
    visit.page.tap("#compare")
    visit.shown("coffee 32 512 2", pane=1)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    red, green, blue = visit.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert max(red, green, blue) < 64, "dark where dark is wished for"


def test_a_model_that_gives_nothing_finite_says_so(visit: Visit) -> None:
    visit.refusals.append("422")
    visit.open("picture=rocket&size=128&model=broken")
    visit.page.wait_for_selector("#problem:not([hidden])")
    assert "blocks.1.attn.qkv.weight" in visit.page.inner_text("#problem span")
    assert any("422" in text for text in visit.heard)
    visit.page.select_option(".pane select", "tiny")
    visit.shown("rocket 64 128 2")
    assert visit.page.is_hidden("#problem")


def test_an_overtaken_request_is_repeated(visit: Visit) -> None:
    asked: list[str] = []

    def overtake(route: Any) -> None:
        asked.append(route.request.url)
        if asked.count(route.request.url) == 1:
            route.fulfill(status=409, json={"problem": "This pane asked for something else meanwhile."})
        else:
            route.continue_()

    visit.page.route("**/api/view*", overtake)
    visit.open("picture=rocket&size=128&cores=8")
    visit.shown("rocket 8 128 2")
    assert len(asked) == 2


def test_dragging_asks_no_more_than_it_must(visit: Visit) -> None:
    visit.open("picture=rocket&size=256")
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url) if "/api/view" in request.url else None)
    visit.page.evaluate(
        """() => {
          const slider = document.querySelector(".size");
          for (let i = 0; i <= 10; i++) {
            slider.value = i;
            slider.dispatchEvent(new Event("input", { bubbles: true }));
          }
        }"""
    )
    visit.shown("rocket 64 1024 2")
    assert 1 <= len(set(asked)) <= 3, "what was passed over while dragging is not asked for"
    count = len(asked)
    visit.slide(".size", 2)
    visit.shown("rocket 64 256 2")
    assert len(asked) == count, "what was seen before is at hand"
