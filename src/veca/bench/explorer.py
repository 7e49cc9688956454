"""Latency of the explorer's page in Chromium, load by many clients, and a screenshot for the docs."""

import http.client
import io
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from PIL import Image

from veca.bench.machine import child_environment
from veca.errors import ArgumentError, VecaError, needs_extra
from veca.utils.device import process_bytes
from veca.utils.files import atomic_path


def bench_explorer_page(model: str = "veca_tiny", images: int = 6, chromium: str | None = None) -> None:
    """Print milliseconds from opening the page, a dropped image or a moved slider until Chromium shows the result."""
    with serving("--model", model) as (server, port), open_browser_page(chromium, port) as page:
        opened = page.evaluate("performance.getEntriesByName('veca-picture')[0].startTime")
        size = page.locator(".settings output").last.inner_text()
        _wait_for_charts(page)  # measuring goes on while nothing else is asked for, and would be in the way
        drops, new_budgets, seen_budgets, layers = [], [], [], []
        # Functions that cause an event and return the milliseconds until its result is drawn. Not as a script tag,
        # which the content security policy of the page would refuse.
        page.evaluate(Path(__file__).with_suffix(".js").read_text())
        for seed in range(images):
            drops.append(page.evaluate("timers.dropImage", [list(synthetic_jpeg()), f"{seed}.jpg"]))
            budgets = range(int(page.get_attribute(".cores", "max") or 0) - 1, -1, -1)
            new_budgets += [page.evaluate("timers.moveSlider", [".cores", budget]) for budget in budgets]
            seen_budgets += [page.evaluate("timers.moveSlider", [".cores", budget]) for budget in reversed(budgets)]
            page.evaluate("timers.moveSlider", [".cores", len(budgets)])
            for layer in range(1, 1 + int(page.get_attribute("#layer", "max") or 0)):
                if layer != int(page.input_value("#layer")):
                    layers.append(page.evaluate("timers.moveSlider", ["#layer", layer]))
        print(f"{model} at {size}")
        _print_times("first picture, from opening the page", [opened])
        _print_times("first image, from the drop", drops[:1])
        _print_times("later images, from the drop", drops[1:])
        _print_times("a budget not seen before", new_budgets)
        _print_times("a budget seen before", seen_budgets)
        _print_times("another layer", layers)
        print(f"server: peak {peak_mib(server):.0f} MiB")


def bench_explorer_crowd(model: str = "veca_tiny", clients: int = 50, seconds: float = 20) -> None:
    """Send requests from many clients at once, each with images of its own; only 200 and 503 are right answers."""
    statuses, waits = list[int](), list[float]()

    def request(method: str, path: str, body: bytes | None = None) -> str | None:
        """The id of an uploaded image; after a 503 it pauses as the answer says."""
        start = time.perf_counter()
        status, answer, headers = ask(port, method, path, body)
        statuses.append(status)
        if status == 503:
            time.sleep(float(headers["Retry-After"]))
        if status != 200:
            return None
        waits.append(1000 * (time.perf_counter() - start))
        return json.loads(answer)["id"] if body else None

    def run_client(number: int) -> None:
        rng, image = random.Random(number), synthetic_jpeg(800, 600)
        while time.perf_counter() < end:
            id = request("POST", "/api/pictures", image)
            for _ in range(4):
                cores, size, layer = 8 * rng.randint(1, 8), rng.choice([128, 256, 384]), rng.randint(1, about["layers"])
                query = f"picture={id}&model={about['name']}&cores={cores}&size={size}"
                if id and time.perf_counter() < end:
                    request("GET", f"/api/view?{query}")
                    request("GET", f"/api/layer?{query}&layer={layer}")

    with serving("--model", model) as (server, port):
        about = json.loads(ask(port, "GET", "/api/about")[1])["models"][0]
        end = time.perf_counter() + seconds
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(run_client, range(clients)))
        statuses.append(ask(port, "GET", "/api/about")[0])  # it still answers
        codes = ", ".join(f"{count} × {code}" for code, count in sorted(Counter(statuses).items()))
        print(f"{clients} clients, {seconds:.0f} s: {codes}")
        _print_times("answers", waits)
        print(f"server: peak {peak_mib(server):.0f} MiB")
        if not set(statuses) <= {200, 503}:
            raise VecaError(f"the server answered {codes}; only 200 and 503 are right")


def screenshot_explorer(out: Path, model: str = "veca_tiny", chromium: str | None = None) -> None:
    """Write a PNG of the page with a sample image."""
    view = "#picture=coffee&size=512&overlay=75&at=0.45,0.62"
    with serving("--model", model) as (_, port), open_browser_page(chromium, port, view) as page:
        cells = page.locator(".numbers .dense td")
        while "s" not in cells.nth(0).inner_text():  # until the dense ViT has been timed
            time.sleep(0.1)
        _wait_for_charts(page)
        screenshot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    with atomic_path(out) as part:
        palette = screenshot.quantize(256)  # a much smaller file than true colour
        screenshot.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).save(part, "PNG", optimize=True)
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


@contextmanager
def serving(*options: str, verb: str = "explore") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`veca explore`, or another server, in a process of its own, and its port."""
    command = [sys.executable, "-m", "veca", verb, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment()) as server:
        try:
            line = server.stdout.readline() if server.stdout else ""
            port = re.search(r":(\d+)/", line)
            if not port:
                raise VecaError(f"the server did not start: {line or 'it says why above'}")
            yield server, int(port[1])
        finally:
            server.terminate()


@contextmanager
def open_browser_page(chromium: str | None, port: int, view: str = "") -> Iterator[Any]:
    """The explorer's page in headless Chromium, once it is ready."""
    with needs_extra("driving a browser needs", "dev"):
        from playwright.sync_api import sync_playwright

    chromium = chromium or shutil.which("chromium")
    if chromium is None:
        raise ArgumentError("there is no Chromium on the path; name one with --chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.goto(f"http://127.0.0.1:{port}/{view}")
        page.wait_for_selector("html[data-ready]")
        yield page
        browser.close()


def _wait_for_charts(page: Any) -> None:
    """Until every resolution has been timed."""
    title = page.locator(".charts text").first
    while "measuring" in title.text_content() or not page.locator(".charts circle").count():
        time.sleep(0.1)


def ask(
    port: int, method: str, path: str, body: bytes | None = None, timeout: float = 60
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Status, body and headers of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        # Step by step instead of `request`: a server may answer and close before all of the body was sent.
        connection.putrequest(method, path, skip_accept_encoding=True)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        with suppress(OSError):  # refused before all was sent: the response says why
            connection.send(body or b"")
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def peak_mib(server: subprocess.Popen[str]) -> float:
    """Peak resident memory of a server and of its worker process, added up; nan where there is no /proc."""
    try:
        return sum(process_bytes("VmHWM", pid) for pid in (server.pid, *worker_pids(server))) / 2**20
    except FileNotFoundError:
        return float("nan")


def worker_pids(server: subprocess.Popen[str]) -> list[int]:
    """The processes that a server runs in, where it has some of its own. Linux only: reads /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.pid:
                found.append(int(path.name))
    return found


def synthetic_jpeg(width: int = 1600, height: int = 1200) -> bytes:
    """A JPEG unlike all others, about as large as that of a photograph."""
    coarse = Image.frombytes("RGB", (32, 24), random.randbytes(32 * 24 * 3))
    smooth = coarse.resize((width, height), Image.Resampling.BICUBIC)
    grain = Image.effect_noise((width, height), 64).convert("RGB")
    data = io.BytesIO()
    Image.blend(smooth, grain, 0.1).save(data, "JPEG", quality=85)
    return data.getvalue()


def _print_times(what: str, milliseconds: Sequence[float]) -> None:
    if milliseconds:
        median, longest = statistics.median(milliseconds), max(milliseconds)
        print(f"{what:45} {len(milliseconds):3} ×  median {median:6.0f} ms, at most {longest:6.0f} ms")
