"""`veca serve`: features over HTTP, alone and in company, what it refuses, and how it ends."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from conftest import make_tiny, relative_error
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load
from sample_images import encode, fractal_image, smooth_image
from starlette.testclient import TestClient

import veca
from veca.bench.explorer import ask
from veca.bench.machine import child_environment
from veca.config import VecaConfig
from veca.errors import ArgumentError, NonFiniteError
from veca.images import normalize
from veca.images.load import load_pixels
from veca.web.connections import create_server, listen
from veca.web.jobs import BusyError
from veca.web.serve.app import create_service
from veca.web.serve.batching import MAX_FAILED_BATCHES, Batcher
from veca.web.serve.schemas import MAX_REQUEST_IMAGES, ServeSettings

PHOTO = encode(fractal_image(200, 160))
PHOTOS = [encode(smooth_image(seed, 90 + 10 * seed, 80), "JPEG") for seed in range(5)]
SMALL = ServeSettings(cores=16, size=64, max_batch=4, max_wait=20.0)
HOST = "http://localhost:8643"


def serve(settings: ServeSettings = SMALL, model: veca.Veca | None = None, **options: object) -> TestClient:
    app = create_service({"tiny": model or make_tiny(num_classes=7, widths=(1, 0.5))}, settings, **options)
    return TestClient(app, base_url=HOST)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with serve() as client:
        yield client


def expected(client: TestClient, data: bytes, size: int = 64, cores: int = 16, **options: object) -> veca.VecaOutput:
    """What the library gives for an image alone."""
    pixels, _ = load_pixels(data, size, str(options.pop("fit", "crop")), decoder="cpu")  # type: ignore[arg-type]
    with torch.inference_mode():
        return client.app.state.service.models["tiny"](normalize(pixels)[None], cores=cores, **options)  # type: ignore[attr-defined]


def problem(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"problem"}
    return str(answer.json()["problem"])


def as_form(images: list[bytes]) -> list[tuple[str, tuple[str, bytes]]]:
    return [("images", (f"{number}.jpg", data)) for number, data in enumerate(images)]


def test_features_are_those_of_the_library(client: TestClient) -> None:
    answer = client.post("/embed?features=cls,cores,patches", content=PHOTO).json()
    assert {name: answer[name] for name in ("model", "cores", "size", "fit")} == {
        "model": "tiny", "cores": 16, "size": 64, "fit": "crop"
    }  # fmt: skip
    (image,), out = answer["images"], expected(client, PHOTO)
    assert image["grid"] == [4, 4]
    for kind, exact in (("cls", out.cls[0]), ("cores", out.cores[0]), ("patches", out.patches[0])):
        assert relative_error(torch.tensor(image[kind]), exact) <= 1e-6, kind


def test_a_request_chooses_its_setting(client: TestClient) -> None:
    query = "cores=8&width=0.5&size=96&fit=keep&features=patches&format=npy"
    found = np.load(io.BytesIO(client.post(f"/embed?{query}", content=PHOTO).content), allow_pickle=False)
    out = expected(client, PHOTO, 96, 8, fit="keep", width=0.5)
    assert found.shape == (1, *out.grid, 64) == (1, 6, 8, 64)
    assert relative_error(torch.from_numpy(found).flatten(1, 2), out.patches) <= 1e-6
    assert relative_error(expected(client, PHOTO, 96, 8, fit="keep").patches, out.patches) > 1e-3, "width must matter"


def test_several_images_come_in_their_order_as_the_accept_header_says(client: TestClient) -> None:
    accept = {"accept": "application/vnd.safetensors"}
    answer = client.post("/embed?features=cls,patches", files=as_form(PHOTOS), headers=accept)
    assert answer.headers["content-type"] == accept["accept"]
    found = load(answer.content)
    assert found["patches"].shape == (5, 4, 4, 64)
    for row, data in zip(found["cls"], PHOTOS, strict=True):
        assert relative_error(torch.from_numpy(row), expected(client, data).cls[0]) <= 1e-6
    header = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])
    assert json.loads(header["__metadata__"]["veca"])["cores"] == 16


def test_features_are_the_same_whatever_the_company() -> None:
    with serve(ServeSettings(cores=16, size=64, max_batch=8, max_wait=1000.0)) as client:
        service = client.app.state.service  # type: ignore[attr-defined]
        settings = [(8, 64), (16, 64), (16, 96)]

        def request(number: int) -> tuple[int, torch.Tensor]:
            cores, size = settings[number % 3]
            data = PHOTOS[number % 5]
            answer = client.post(f"/embed?cores={cores}&size={size}", content=data)
            return number, torch.tensor(answer.json()["images"][0]["cls"])

        with ThreadPoolExecutor(24) as pool:
            found = list(pool.map(request, range(24)))
        metrics = {sample.name: sample.value for sample in _samples(service.metrics.render().decode())}
        assert metrics["veca_batch_images_sum"] == 25  # with that of the start
        assert metrics["veca_batch_images_count"] <= 1 + 1 + 1 + 3, "requests of equal setting share batches"
        for number, cls in found:
            cores, size = settings[number % 3]
            assert relative_error(cls, expected(client, PHOTOS[number % 5], size, cores).cls[0]) <= 1e-6


def test_classes_are_those_of_the_library(client: TestClient) -> None:
    answer = client.post("/predict?top=3", files=as_form(PHOTOS[:2]))
    for image, data in zip(answer.json()["images"], PHOTOS, strict=False):
        logits = expected(client, data).logits
        assert logits is not None
        best = logits[0].softmax(0).topk(3)
        assert [each["name"] for each in image] == [f"class {number}" for number in best.indices.tolist()]
        np.testing.assert_allclose([each["probability"] for each in image], best.values, rtol=1e-5)
    with serve(model=make_tiny()) as without:
        assert "has no classes" in problem(without.post("/predict", content=PHOTO), 422)


BOMB = encode(Image.new("1", (9000, 9000)))
FORM = {"content-type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    ("query", "body", "headers", "status", "told"),
    [
        ("", b"", {}, 400, "empty"),
        ("", b"no image", {}, 415, "cannot be used"),
        ("", PHOTO[:300], {}, 415, "cannot be used"),
        ("", BOMB, {}, 413, "pixels"),
        ("", b"x" * (2**25 + 1), {}, 413, "bytes"),
        ("", b"--x\r\n\r\nabc", FORM, 400, "does not end"),
        ("", b"--x\r\nabc\r\n--x--", FORM, 400, "no empty line"),
        ("", b"--x--", FORM, 400, "no parts"),
        ("", b"abc", {"content-type": "multipart/form-data"}, 400, "no boundary"),
        ("", b"--x\r\n\r\na\r\n" * (MAX_REQUEST_IMAGES + 1) + b"--x--", FORM, 413, f"more than {MAX_REQUEST_IMAGES}"),
        ("", b"--x\r\n\r\n" + PHOTO + b"\r\n--x\r\n\r\nbad\r\n--x--", FORM, 415, "image 2 of 2"),
        ("?cores=17", PHOTO, {}, 422, "choose one of 8, 16"),
        ("?width=0.3", PHOTO, {}, 422, "width=0.3: choose one of 0.5, 1"),
        ("?size=70", PHOTO, {}, 422, "multiple of 16"),
        ("?size=4096", PHOTO, {}, 422, "size"),
        ("?model=none", PHOTO, {}, 422, "there are tiny"),
        ("?features=all", PHOTO, {}, 422, "features"),
        ("?features=cls,cores&format=npy", PHOTO, {}, 422, "one array"),
        ("?size=1024&fit=keep", encode(fractal_image(600, 20)), {}, 413, "Use fit=crop"),
        ("", PHOTO, {"accept": "text/html"}, 406, "application/json"),
        ("", PHOTO, {"origin": "http://elsewhere.example"}, 403, "other sites"),
    ],
)  # fmt: skip
def test_what_cannot_be_embedded_is_told_why(
    client: TestClient, query: str, body: bytes, headers: dict[str, str], status: int, told: str
) -> None:
    assert told in problem(client.post(f"/embed{query}", content=body, headers=headers), status)
    assert client.post("/embed", content=PHOTO).status_code == 200


def test_grids_that_differ_make_no_array(client: TestClient) -> None:
    images = as_form([PHOTO, encode(fractal_image(160, 200))])
    query = "/embed?fit=keep&features=patches"
    assert "make no array" in problem(client.post(f"{query}&format=safetensors", files=images), 422)
    grids = [image["grid"] for image in client.post(query, files=images).json()["images"]]
    assert grids == [[4, 5], [5, 4]]


def test_the_token_opens_all_but_health_needs_none() -> None:
    with serve(token="secret-token") as client:
        assert "token" in problem(client.post("/embed", content=PHOTO), 401)
        assert "token" in problem(client.get("/metrics"), 401)
        assert client.get("/health").json() == {"ready": True, "waiting": 0}
        bearer = {"authorization": "Bearer secret-token"}
        assert client.post("/embed", content=PHOTO, headers=bearer).status_code == 200
        assert client.get("/health", headers={"host": "elsewhere.example"}).status_code == 421


def _samples(text: str) -> Iterator[Any]:
    return (sample for family in text_string_to_metric_families(text) for sample in family.samples)


def test_metrics_count_what_was_asked_and_done() -> None:
    with serve() as client:
        client.post("/embed", files=as_form(PHOTOS))
        client.post("/embed", content=b"bad")
        client.get("/of/no/route")
        answer = client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = {(each.name, *each.labels.values()): each.value for each in _samples(answer.text)}
        asked = {key[1:]: value for key, value in found.items() if key[0] == "veca_requests_total"}
        assert asked == {("/embed", "200"): 1, ("/embed", "415"): 1, ("other", "404"): 1}
        assert found["veca_images_total", "tiny"] == 6, "5 images, and that of the start"
        assert found["veca_request_seconds_count", "/embed"] == 2
        assert found["veca_queue_places",] == 0


def test_the_description_lists_what_the_server_accepts(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    embed = paths["/embed"]["post"]
    assert {"application/octet-stream", "multipart/form-data"} == set(embed["requestBody"]["content"])
    assert set(embed["responses"]["200"]["content"]) == {
        "application/json", "application/vnd.safetensors", "application/x-npy"
    }  # fmt: skip
    model = next(each for each in embed["parameters"] if each["name"] == "model")
    assert model["schema"]["examples"] == ["tiny"]
    about = client.get("/about").json()
    assert (about["cores"], about["size"], about["max_images"], about["models"][0]["classes"]) == (16, 64, 64, 7)


class Held:
    """A model whose batches wait until they are let go."""

    def __init__(self, app: Any) -> None:
        self.let_go, self.started, self.sizes = threading.Event(), threading.Event(), list[int]()
        self.batcher = app.state.service.batcher
        self.run, self.batcher.run = self.batcher.run, self

    def __call__(self, key: object, items: list[torch.Tensor]) -> object:
        self.sizes.append(len(items))
        self.started.set()
        assert self.let_go.wait(20)
        return self.run(key, items)


def until(condition: object) -> None:
    end = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_queue_answers_503_and_what_was_accepted_is_answered() -> None:
    with serve(ServeSettings(cores=16, size=64, queue=8)) as client, ThreadPoolExecutor(2) as pool:
        held, service = Held(client.app), client.app.state.service  # type: ignore[attr-defined]
        accepted = [pool.submit(client.post, "/embed", files=as_form(PHOTOS[:3])) for _ in range(2)]
        until(lambda: service.waiting == 6)
        answer = client.post("/embed", content=PHOTO)
        assert "queue of images is full" in problem(answer, 503), "one address may take three quarters"
        assert answer.headers["retry-after"] == "1"
        assert "7 places" in problem(client.post("/embed", files=as_form([PHOTO] * 7)), 413)
        assert "32 places" in problem(client.post("/embed?size=256", files=as_form([PHOTO] * 2)), 413)
        assert client.get("/health").json()["waiting"] == 6
        held.let_go.set()
        assert [each.result().status_code for each in accepted] == [200, 200]
        assert service.waiting == 0
        assert client.post("/embed", content=PHOTO).status_code == 200


def test_what_a_client_that_leaves_had_asked_for_is_not_computed() -> None:
    app = create_service({"tiny": make_tiny()}, SMALL)
    head = f"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(PHOTO)}\r\n\r\n"
    with listen("127.0.0.1", 0) as listening, ThreadPoolExecutor(2) as pool:
        port, server = listening.getsockname()[1], create_server(app)
        serving = pool.submit(server.run, sockets=[listening])
        try:
            assert ask(port, "GET", "/health")[0] == 200  # it has started
            held, service = Held(app), app.state.service
            first = pool.submit(ask, port, "POST", "/embed", PHOTO)
            until(held.started.is_set)
            with socket.create_connection(("127.0.0.1", port)) as leaving:
                leaving.sendall(head.encode() + PHOTO)
                until(lambda: len(service.batcher) == 1)
            until(lambda: service.waiting == 1)
            held.let_go.set()
            assert first.result()[0] == 200
            assert ask(port, "POST", "/embed", PHOTO)[0] == 200
            assert held.sizes == [1, 1]
        finally:
            server.should_exit = True
            serving.result(20)


def test_a_failing_model_gives_503_and_recovers_or_ends_the_server() -> None:
    ended = threading.Event()
    with serve() as client:
        batcher = client.app.state.service.batcher  # type: ignore[attr-defined]
        batcher.on_broken, good = ended.set, batcher.run

        def fail(key: object, items: object) -> object:
            raise RuntimeError("out of luck")

        for _ in range(2):  # a success in between starts the count anew
            batcher.run = fail
            for _ in range(MAX_FAILED_BATCHES - 1):
                answer = client.post("/embed", content=PHOTO)
                assert "The model failed (RuntimeError)" in problem(answer, 503)
                assert answer.headers["retry-after"] == "1"
            batcher.run = good
            assert client.post("/embed", content=PHOTO).status_code == 200
        assert not ended.is_set()
        batcher.run = fail
        for _ in range(MAX_FAILED_BATCHES):
            assert client.post("/embed", content=PHOTO).status_code == 503
        assert ended.wait(20)
        assert client.get("/health").status_code == 503


def test_features_that_are_not_finite_are_an_answer() -> None:
    model = make_tiny()
    with serve(model=model) as client:
        with torch.no_grad():
            model.norm.weight[0] = float("nan")
        assert "hold NaN or infinity" in problem(client.post("/embed", content=PHOTO), 422)
    with pytest.raises(NonFiniteError):
        serve(model=model)
    classifier = make_tiny(num_classes=7)
    with serve(model=classifier) as client:
        with torch.no_grad():
            classifier.head.weight[0] = float("inf")  # type: ignore[index]
        assert "hold NaN or infinity" in problem(client.post("/predict", content=PHOTO), 422)


def test_a_default_that_the_model_was_not_trained_at_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"cores=17: choose one of"):
        serve(ServeSettings(cores=17))


def test_a_fine_tuned_model_is_served_as_it_was_validated() -> None:
    model = make_tiny(num_classes=7)
    model.provenance = {"finetune": {"size": 96, "fit": "native", "max_patches": 25, "batch": 4}}
    with serve(ServeSettings(), model) as client:
        about = client.get("/about").json()
        assert [about[name] for name in ("cores", "size", "fit")] == [64, 80, "native"]
        (found,) = client.post("/predict?top=1", content=PHOTO).json()["images"]
        logits = expected(client, PHOTO, 80, 64, fit="native").logits
        assert found[0]["probability"] == pytest.approx(float(logits.softmax(1).max()), rel=1e-5)  # type: ignore[union-attr]
    with serve(ServeSettings(cores=8, size=64, fit="crop"), model) as client:
        assert [client.get("/about").json()[name] for name in ("cores", "size", "fit")] == [8, 64, "crop"]
    with pytest.raises(ArgumentError, match="validated at 2048 px, of at most 1024; choose a --size"):
        model.provenance = {"finetune": {"size": 2048, "batch": 4}}
        serve(ServeSettings(), model)


def batches_of(max_batch: int, max_wait: float, run: object) -> Batcher[str, int, int]:
    return Batcher(run, lambda _: max_batch, max_wait)  # type: ignore[arg-type]


def test_a_batch_has_items_of_one_key_in_their_order() -> None:
    seen, let_go = list[tuple[str, list[int]]](), threading.Event()

    def run(key: str, items: list[int]) -> list[int]:
        assert let_go.wait(20)
        seen.append((key, items))
        return [10 * item for item in items]

    batcher = batches_of(3, 0.0, run)
    futures = batcher.submit("first", [0])
    until(lambda: not len(batcher))
    for number in range(1, 8):
        futures += batcher.submit("ab"[number % 2], [number])
    gone = futures.pop(5)
    assert gone.cancel(), "dropped from the queue, as its client is gone"
    let_go.set()
    assert [future.result(20) for future in futures] == [0, 10, 20, 30, 40, 60, 70]
    assert seen == [("first", [0]), ("b", [1, 3, 7]), ("a", [2, 4, 6])]
    batcher.close()
    with pytest.raises(BusyError):
        batcher.submit("a", [1])


def test_an_item_waits_for_others_only_so_long_and_closing_finishes_what_is_queued() -> None:
    batcher = batches_of(3, 0.05, lambda key, items: [len(items)] * len(items))
    assert batcher.submit("a", [1])[0].result(20) == 1
    patient = batches_of(3, 1000.0, lambda key, items: [len(items)] * len(items))
    assert [each.result(20) for each in patient.submit("a", [1, 2, 3])] == [3, 3, 3]
    left: list[Future[int]] = patient.submit("a", [1, 2])
    patient.close()
    assert [each.result(0) for each in left] == [2, 2]


def test_a_process_serves_and_answers_what_it_accepted_after_sigterm(tmp_path: object) -> None:
    config = {"embed_dim": 64, "depth": 2, "num_heads": 2}
    veca.save(veca.Veca(VecaConfig.from_dict(config)), str(tmp_path))
    options = ["--model", str(tmp_path), "--port", "0", "--size", "64", "--max-wait", "1000"]
    command = [sys.executable, "-m", "veca", "serve", *options]
    environment = child_environment() | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        port = int(re.search(r":(\d+)/", server.stdout.readline())[1])  # type: ignore[index]

        def count_waiting() -> int:
            return json.loads(ask(port, "GET", "/health")[1])["waiting"]

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, port, "POST", "/embed", PHOTO)  # waits a second for company
            until(count_waiting)
            server.send_signal(signal.SIGTERM)
            status, body, _ = asked.result()
        assert status == 200
        assert len(json.loads(body)["images"][0]["cls"]) == 64
        assert server.wait(20) == 128 + signal.SIGTERM
