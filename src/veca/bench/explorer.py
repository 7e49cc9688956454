"""How quick the explorer is, and what a crowd does to it.

    python -m veca.bench.explorer page     # in Chromium: from the drop of a picture, or another budget, to the screen
    python -m veca.bench.explorer crowd    # over HTTP: 50 clients at once, each with pictures of its own
    python -m veca.bench.explorer shot docs/images/explorer.png    # a picture of the page

All start `veca explore` in a process of its own.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from veca.utils.files import atomic_path

DROP = """([bytes, name]) => new Promise((resolve) => {
  const carried = new DataTransfer();
  carried.items.add(new File([new Uint8Array(bytes)], name, { type: "image/jpeg" }));
  const start = performance.now();
  new PerformanceObserver((list, observer) => {
    const mark = list.getEntriesByName("veca-picture")[0];
    if (mark) { observer.disconnect(); requestAnimationFrame(() => resolve(mark.startTime - start)); }
  }).observe({ type: "mark" });
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true }));
})"""
SLIDE = """([selector, value]) => new Promise((resolve) => {
  const slider = document.querySelector(selector);
  slider.value = value;
  const start = performance.now();
  new PerformanceObserver((list, observer) => {
    const mark = list.getEntriesByName("veca-shown")[0];
    if (mark) { observer.disconnect(); resolve(mark.startTime - start); }
  }).observe({ type: "mark" });
  slider.dispatchEvent(new Event("input", { bubbles: true }));
})"""


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`veca explore` in a process of its own, and its port."""
    command = [sys.executable, "-m", "veca", "explore", "--port", "0", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert server.stdout
        try:
            line = server.stdout.readline()
            found = re.search(r":(\d+)/", line)
            if not found:
                server.wait(20)
                log.seek(0)
                raise RuntimeError(f"the server did not start: {line}{log.read()}")
            yield server, int(found[1])
        finally:
            server.terminate()
            server.wait(20)
            server.stdout.close()
            log.seek(0)
            if "Traceback" in (told := log.read()):
                print(told, file=sys.stderr)


def ask(
    port: int, method: str, path: str, body: bytes | None = None, timeout: float = 60
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Status, body and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        with suppress(OSError):  # refused before it was sent: the answer says why
            connection.send(body or b"")
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def peak_mib(server: subprocess.Popen[str]) -> float:
    """The most memory a process held, where Linux tells it."""
    status = Path(f"/proc/{server.pid}/status")
    return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024 if status.exists() else float("nan")


def photo(seed: int, width: int = 1600, height: int = 1200) -> bytes:
    """A JPEG unlike all others, about as large as a photograph's."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = rng.integers(-8, 9, smooth.shape, dtype=np.int16)
    data = io.BytesIO()
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=85)
    return data.getvalue()


def page(chromium: str, pictures: int, options: Sequence[str]) -> None:
    from playwright.sync_api import sync_playwright

    with serving(*options) as (server, port), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.goto(f"http://127.0.0.1:{port}/")
        opened.wait_for_selector("html[data-ready]")
        drops, changes, again = [], [], []
        for seed in range(pictures):
            drops.append(opened.evaluate(DROP, [list(photo(seed)), f"{seed}.jpg"]))
            budgets = range(int(opened.get_attribute(".cores", "max") or 0) - 1, -1, -1)
            changes += [opened.evaluate(SLIDE, [".cores", budget]) for budget in budgets]
            again += [opened.evaluate(SLIDE, [".cores", budget]) for budget in reversed(budgets)]
            opened.evaluate(SLIDE, [".cores", len(budgets)])
        browser.close()
        _show("first picture after the start, from the drop", drops[:1])
        _show("later pictures, from the drop", drops[1:])
        _show("a budget not seen before", changes)
        _show("a budget seen before", again)
        print(f"server: at most {peak_mib(server):.0f} MiB")


def shot(chromium: str, out: Path, options: Sequence[str]) -> None:
    from playwright.sync_api import sync_playwright

    with serving(*options) as (_, port), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1360, "height": 960})
        opened.goto(f"http://127.0.0.1:{port}/#picture=coffee&size=512&overlay=75&at=0.45,0.62")
        opened.wait_for_selector("html[data-ready]")
        cells = opened.locator(".numbers .dense td")
        while "s" not in cells.nth(0).inner_text():  # until it is measured
            time.sleep(0.1)
        picture = Image.open(io.BytesIO(opened.screenshot())).convert("RGB")
        browser.close()
    with atomic_path(out) as part:
        palette = picture.quantize(256)
        picture.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).save(part, "PNG", optimize=True)
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


def _show(what: str, milliseconds: Sequence[float]) -> None:
    if milliseconds:
        median, most = statistics.median(milliseconds), max(milliseconds)
        print(f"{what:45} {len(milliseconds):3} ×  median {median:6.0f} ms, at most {most:6.0f} ms")


def crowd(clients: int, seconds: float, options: Sequence[str]) -> None:
    answers: Counter[int] = Counter()
    waits: list[float] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        dice = np.random.default_rng(number)
        picture = photo(number, 800, 600)
        while time.perf_counter() < end:
            id = _told(port, "POST", "/api/pictures", picture, note)
            for _ in range(4):
                cores, size = 8 * int(dice.integers(1, 9)), int(dice.choice([128, 256, 384]))
                setting = f"picture={id}&model={model}&cores={cores}&size={size}"
                if id and time.perf_counter() < end:
                    _told(port, "GET", f"/api/view?{setting}", None, note)
                    _told(port, "GET", f"/api/layer?{setting}&layer={int(dice.integers(1, layers + 1))}", None, note)

    def note(status: int, took: float) -> None:
        with lock:
            answers[status] += 1
            if status == 200:
                waits.append(1000 * took)

    with serving(*options) as (server, port):
        first = json.loads(ask(port, "GET", "/api/about")[1])["models"][0]
        model, layers = first["name"], first["layers"]
        end = time.perf_counter() + seconds
        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alive = ask(port, "GET", "/api/about")[0] == 200
        codes = ", ".join(f"{count} × {code}" for code, count in sorted(answers.items()))
        print(f"{clients} clients, {seconds:.0f} s: {codes}; the server {'lives' if alive else 'is gone'}")
        _show("answers", waits)
        print(f"server: at most {peak_mib(server):.0f} MiB")
        if not alive or not set(answers) <= {200, 503}:
            raise SystemExit(1)


def _told(port: int, method: str, path: str, body: bytes | None, note: Any) -> str | None:
    """The id in the answer, if there is one; after a 503 there is a pause, as the answer asks."""
    began = time.perf_counter()
    status, answer, headers = ask(port, method, path, body)
    note(status, time.perf_counter() - began)
    if status == 503:
        time.sleep(float(headers["Retry-After"]))
    return json.loads(answer).get("id") if status == 200 and body else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("page", "crowd", "shot"))
    parser.add_argument("out", type=Path, nargs="?", default=Path("explorer.png"), help="of shot")
    parser.add_argument("--model", default="veca_tiny")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser")
    parser.add_argument("--pictures", type=int, default=6)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    options = ["--model", args.model]
    if args.what == "crowd":
        crowd(args.clients, args.seconds, options)
    elif args.chromium is None:
        parser.error("there is no Chromium here; name one with --chromium")
    elif args.what == "shot":
        shot(args.chromium, args.out, options)
    else:
        page(args.chromium, args.pictures, options)


if __name__ == "__main__":
    main()
