"""`veca bench serve`: throughput of `veca serve` beside plain inference, and its answers under hostile uploads."""

import http.client
import io
import json
import math
import os
import random
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from veca.bench.explorer import peak_mib, serving, synthetic_jpeg, worker_pids
from veca.checkpoint.loading import load_or_random
from veca.errors import VecaError
from veca.images import normalize
from veca.images.load import load_pixels
from veca.model import Veca
from veca.utils.device import choose_device

SIZE, CORES, BATCH, IMAGES = 256, 32, 16, 32
_TOLERANCE = 1e-5
"""Relative error of features beyond which an answer is wrong: float32 in batches of another size."""


def bench_serve(
    model: str = "veca_tiny", clients: int = 32, seconds: float = 20, hostile: bool = False, kill: bool = False
) -> None:
    """Print images per second of plain batched inference and of a server with many clients, on this machine.

    Every client sends one JPEG of 640 × 480 per request, one after the other, and compares the features. With `hostile`
    a fifth of the requests are broken or malicious; with `kill` the worker process of the server is killed half-way.
    A wrong answer, or a status other than those expected, is an error. Plain inference is timed before and after.
    """
    device = choose_device()
    loaded = load_or_random(model, device=device).eval()
    jpegs = [synthetic_jpeg(640, 480) for _ in range(IMAGES)]
    pixels = torch.stack([load_pixels(data, SIZE, decoder="cpu")[0] for data in jpegs])
    with torch.inference_mode():
        exact = loaded(normalize(pixels.to(device)), cores=CORES, cls_only=True).cls.cpu()
    print(f"{model} at {SIZE} px, C = {CORES}, global feature, {device}")
    before, plain_cpu = _plain_rate(loaded, pixels.to(device), seconds / 2)
    with serving("--model", model, "--size", str(SIZE), "--cores", str(CORES), verb="serve") as (server, port):
        done = _Clients(port, jpegs, hostile)
        began, cpu = time.perf_counter(), _cpu_seconds(server)
        with _killed_half_way(server, done, seconds / 2 if kill else None):
            done.run(clients, began + seconds)
        elapsed = time.perf_counter() - began
        done.compare(exact)
        peak, cpu = max(done.peak, peak_mib(server)), (_cpu_seconds(server) - cpu) / max(1, done.statuses[200])
    after, _ = _plain_rate(loaded, pixels.to(device), seconds / 2)
    plain, served = (before + after) / 2, done.statuses[200] / elapsed
    print(f"plain inference, batches of {BATCH}: {before:.1f} images/s before, {after:.1f} after")
    codes = ", ".join(f"{count} × {code}" for code, count in sorted(done.statuses.items()))
    print(f"{clients} clients for {seconds:.0f} s: {codes}")
    share = 100 * served / plain
    print(f"served: {served:.1f} images/s, {share:.0f} % of plain inference; clients and server share the machine")
    if not (hostile or kill):
        both = f"plain inference {1000 * plain_cpu:.1f} ms, server {1000 * cpu:.1f} ms"
        print(f"CPU time per image, which other work hardly changes: {both}, {100 * plain_cpu / cpu:.0f} %")
    waits = sorted(done.waits)
    median, late = statistics.median(waits), waits[int(0.99 * (len(waits) - 1))]
    print(f"answers: median {median:.0f} ms, 99 % within {late:.0f} ms; largest error {done.error:.1e}")
    if done.killed_at is not None:
        print(f"worker killed: {done.cut} requests cut off, the next answer after {done.recovered_after:.1f} s")
    print(f"server: peak {peak:.0f} MiB")
    if done.wrong:
        raise VecaError(f"{len(done.wrong)} wrong answers, the first: {done.wrong[0]}")


@contextmanager
def _killed_half_way(server: subprocess.Popen[str], clients: "_Clients", after: float | None) -> Iterator[None]:
    """Kill the worker of a server so many seconds after the block has begun."""

    def kill() -> None:
        clients.peak, clients.killed_at = peak_mib(server), time.perf_counter()
        for pid in worker_pids(server):
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(after or 0, kill)
    if after is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _plain_rate(model: Veca, pixels: Tensor, seconds: float) -> tuple[float, float]:
    """Images per second of the model alone, in batches of decoded images, and CPU seconds per image."""
    batches = pixels.split(BATCH)
    with torch.inference_mode():
        images, end, cpu = -len(batches[0]), 0.0, 0.0  # the first batch is not counted
        while not end or time.perf_counter() < end:
            batch = batches[max(0, images) // BATCH % len(batches)]
            model(normalize(batch), cores=CORES, cls_only=True).cls.cpu()
            images += len(batch)
            if not end:
                end, cpu = time.perf_counter() + seconds, time.process_time()
        return images / (time.perf_counter() - end + seconds), (time.process_time() - cpu) / images


def _cpu_seconds(server: subprocess.Popen[str]) -> float:
    """CPU time of the worker of a server so far; nan where there is no /proc."""
    try:
        ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in worker_pids(server)]
        return sum(int(each[11]) + int(each[12]) for each in ticks) / os.sysconf("SC_CLK_TCK")
    except FileNotFoundError:
        return math.nan


class _Clients:
    """Many clients of one server, each with a connection of its own, and what they were answered."""

    def __init__(self, port: int, jpegs: list[bytes], hostile: bool) -> None:
        self.port, self.jpegs = port, jpegs
        self.hostile = list(_hostile_bodies(jpegs[0])) if hostile else []
        self.statuses: Counter[int] = Counter()
        self.waits: list[float] = []
        """Milliseconds of good answers."""
        self.answers: list[tuple[int, bytes]] = []
        """The image that was sent, and the answer."""
        self.wrong: list[str] = []
        self.error = 0.0
        self.killed_at: float | None = None
        self.cut, self.recovered_after = 0, math.nan
        self.peak = 0.0
        """MiB of the server until its worker was killed."""

    def run(self, clients: int, end: float) -> None:
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda number: self._run_client(random.Random(number), end), range(clients)))

    def _run_client(self, rng: random.Random, end: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while time.perf_counter() < end:
            number, broken = rng.randrange(len(self.jpegs)), bool(self.hostile) and rng.random() < 0.2
            body, content_type = rng.choice(self.hostile) if broken else (self.jpegs[number], "image/jpeg")
            began = time.perf_counter()
            try:
                connection.request("POST", "/embed", body, {"Content-Type": content_type})
                response = connection.getresponse()
                answer = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if self.killed_at is not None and math.isnan(self.recovered_after):
                    self.cut += 1
                elif not broken:  # one that is refused may be cut off while it is sent
                    self.wrong.append(f"{type(error).__name__}: {error}")
                continue
            self.statuses[response.status] += 1
            if response.status == 503:
                time.sleep(float(response.headers["Retry-After"]))
            elif response.status != 200 or broken:
                if not (broken and 400 <= response.status < 500):
                    self.wrong.append(f"{response.status} {answer[:200]!r}")
            else:
                now = time.perf_counter()
                self.waits.append(1000 * (now - began))
                if self.killed_at is not None and began > self.killed_at and math.isnan(self.recovered_after):
                    self.recovered_after = now - self.killed_at
                self.answers.append((number, answer))
        connection.close()

    def compare(self, exact: Tensor) -> None:
        """Compare all answers with the features of each image; after the run, whose time is the server's."""
        for number, answer in self.answers:
            found = torch.tensor(json.loads(answer)["images"][0]["cls"])
            error = float((found - exact[number]).norm() / exact[number].norm())
            self.error = max(self.error, error)
            if error > _TOLERANCE:
                self.wrong.append(f"features with a relative error of {error:.1e}")


def _hostile_bodies(jpeg: bytes) -> Iterator[tuple[bytes, str]]:
    """Bodies that a server must refuse, and their content types."""
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    form = "multipart/form-data; boundary=x"
    yield b"", "image/jpeg"
    yield random.randbytes(100_000), "image/jpeg"
    yield jpeg[: len(jpeg) // 2], "image/jpeg"
    yield jpeg[:200] + random.randbytes(1000), "image/jpeg"
    yield bomb.getvalue(), "image/png"
    yield b"--x\r\n\r\n" + jpeg, form
    yield b"--x\r\n\r\n" * 10_000 + b"--x--", form
    yield b"--x\r\n\r\n" + jpeg + b"\r\n--x\r\n\r\nnone\r\n--x--", form
    yield jpeg, "multipart/form-data"
