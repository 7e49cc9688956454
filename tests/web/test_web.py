"""The explorer's API: what it answers, what it refuses, and that neither can be had too much of."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fuzz_images
import fuzz_web
import httpx2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_tiny
from PIL import Image
from safetensors.numpy import load
from sample_images import encode, fractal_image
from starlette.testclient import TestClient
from typer.testing import CliRunner

import veca
from veca.cli.main import app as cli
from veca.data.index import ImageIndex
from veca.flops import dense_model_flops, model_flops
from veca.images import fit_image, normalize, open_image, to_tensor
from veca.inspect import core_maps, core_profiles, pca, scaling
from veca.report.page import DARK, LIGHT
from veca.web.app import create_app
from veca.web.folder import Folder
from veca.web.images import MAX_UPLOAD_BYTES, ImageStore
from veca.web.jobs import BusyError, ByteCache, DroppedError, JobQueue, JobSteps
from veca.web.security import SecurityMiddleware, names_of

PHOTO = encode(fractal_image(200, 160))
SETTING = {"model": "tiny", "cores": 16, "size": 128}


def connect(**options: object) -> TestClient:
    return TestClient(create_app({"tiny": make_tiny()}, warm=False, **options), base_url="http://localhost:8642")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with connect() as client:
        yield client


@pytest.fixture
def picture(client: TestClient) -> str:
    answer = client.post("/api/pictures", content=PHOTO)
    assert answer.status_code == 200
    return str(answer.json()["id"])


def problem(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"problem"}
    return str(answer.json()["problem"])


def given(client: TestClient) -> tuple[veca.Veca, torch.Tensor]:
    model = client.app.state.explorer.models["tiny"]  # type: ignore[attr-defined]
    fitted = fit_image(open_image(PHOTO), 128, "keep")
    return model, normalize(to_tensor(fitted))[None]


@torch.inference_mode()
def test_a_view_is_what_the_model_gives(client: TestClient, picture: str) -> None:
    model, images = given(client)
    answer = client.get("/api/view", params={"picture": picture, **SETTING})
    found = load(answer.content)
    out = model(images, cores=16)
    patches = out.patches[0].unflatten(0, out.grid)
    assert found["features"].shape == (*out.grid, 64) == (8, 10, 64)
    sent = torch.from_numpy(found["features"].astype(np.float32)).flatten(0, 1)
    exact = F.cosine_similarity(out.patches[0][:, None], out.patches[0][None], dim=-1)
    assert (F.cosine_similarity(sent[:, None], sent[None], dim=-1) - exact).abs().max() < 0.01
    np.testing.assert_allclose(found["places"], out.coordinates[:, 0], atol=1e-6)
    fitted = normalize(to_tensor(fit_image(open_image(PHOTO), 256, "keep")))[None]
    colours = pca(patches, like=model(fitted).patches[0])
    np.testing.assert_allclose(found["colours"].clip(0, 1), colours, atol=1e-5)
    header = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])
    assert json.loads(header["__metadata__"]["veca"])["cores"] == 16


@torch.inference_mode()
def test_a_layer_is_where_cores_look_and_patches_listen(client: TestClient, picture: str) -> None:
    model, images = given(client)
    found = load(client.get("/api/layer", params={"picture": picture, **SETTING, "layer": 2}).content)
    maps, profiles = core_maps(model, images, 16, [1])[0, 0], core_profiles(model, images, 16, [1])[0, 0]
    least, most, peak = (torch.from_numpy(found["ranges"][:, i]) for i in range(3))
    shown = torch.from_numpy(found["maps"]).float() / 255 * (most - least)[:, None, None] + least[:, None, None]
    assert ((shown - maps).abs() <= (most - least)[:, None, None] / 255).logical_or(maps > most[:, None, None]).all()
    torch.testing.assert_close(peak, (maps.amax((1, 2)) / maps.mean((1, 2))), rtol=1e-4, atol=1e-4)
    shares = torch.from_numpy(found["profiles"] / 255 * found["shares"][..., None])
    assert (shares - profiles).abs().max() < 0.003
    assert profiles.std() > 0.01, "shares all alike would prove nothing"


@pytest.mark.parametrize("form", ["npz", "safetensors"])
def test_features_come_as_a_file(client: TestClient, picture: str, form: str) -> None:
    model, images = given(client)
    answer = client.get("/api/features", params={"picture": picture, **SETTING, "format": form})
    assert answer.headers["content-disposition"].endswith(f'-16-128.{form}"')
    found = load(answer.content) if form == "safetensors" else np.load(io.BytesIO(answer.content), allow_pickle=False)
    with torch.inference_mode():
        out = model(images, cores=16)
    np.testing.assert_allclose(found["cls"], out.cls[0], atol=1e-5)
    np.testing.assert_allclose(found["patches"].reshape(-1, 64), out.patches[0], atol=1e-5)
    np.testing.assert_allclose(found["cores"], out.cores[0], atol=1e-5)


def test_a_width_is_a_setting_of_elastic_models() -> None:
    elastic = make_tiny(mlp_ratio=4.0, widths=(1, 0.25))
    app = create_app({"tiny": make_tiny(), "elastic": elastic}, warm=False)
    with TestClient(app, base_url="http://localhost:8642") as client:
        assert [model["widths"] for model in client.get("/api/about").json()["models"]] == [[1], [0.25, 1]]
        where = {"picture": client.post("/api/pictures", content=PHOTO).json()["id"], **SETTING, "width": 0.25}
        assert "width=0.25: choose one of 1." in problem(client.get("/api/view", params=where), 422)
        assert "width" in problem(client.get("/api/view", params={**where, "width": 2}), 422)
        where["model"] = "elastic"
        answer = client.get("/api/features", params={**where, "format": "safetensors"})
        assert answer.headers["content-disposition"].endswith('-16-0.25-128.safetensors"')
        with torch.inference_mode():
            out = elastic(given(client)[1], cores=16, width=0.25)
        np.testing.assert_allclose(load(answer.content)["patches"].reshape(-1, 64), out.patches[0], atol=1e-5)
        counts = client.get("/api/counts", params=where).json()
        assert counts["veca"]["gflops"] == model_flops(elastic.config, 128, 160, 16, 0.25) / 1e9
        assert client.get("/api/measures", params=where).json()["veca"]["seconds"] > 0


def test_costs_are_counted_and_measured(client: TestClient, picture: str) -> None:
    config = given(client)[0].config
    counts = client.get("/api/counts", params={"picture": picture, **SETTING}).json()
    assert counts["veca"] == {"tokens": 16 + 80, "gflops": model_flops(config, 128, 160, 16) / 1e9}
    assert counts["dense"] == {"tokens": 5 + 80, "gflops": dense_model_flops(config, 128, 160) / 1e9}
    measures = client.get("/api/measures", params={"picture": picture, **SETTING}).json()
    for who in ("veca", "dense"):
        assert 0 < measures[who]["seconds"] < 20
        assert 0.05 < measures[who]["mebibytes"] < 20
    assert client.get("/api/measures", params={"picture": picture, **SETTING}).json() == measures, "measured once"


def test_the_quality_of_a_setting_comes_from_the_table_of_the_weights() -> None:
    model = make_tiny()
    rows = [
        {"cores": 64, "size": 128, "gflops": 1.0, "quality": 1.0},
        {"cores": 16, "size": 128, "gflops": 0.9, "quality": 0.97},
    ]
    model.provenance = {"quality_cost": {"settings": rows}}
    app = create_app({"tiny": model}, warm=False)
    with TestClient(app, base_url="http://localhost:8642") as client:
        asked = {"picture": client.post("/api/pictures", content=PHOTO).json()["id"], **SETTING}
        qualities = [
            client.get("/api/counts", params={**asked, "cores": cores}).json()["quality"] for cores in (64, 16, 8)
        ]
    assert qualities == [1.0, 0.97, None]


def test_scaling_is_counted_at_once_and_timed_by_size() -> None:
    elastic = make_tiny(mlp_ratio=4.0, widths=(1, 0.25))
    app = create_app({"elastic": elastic}, warm=False)
    with TestClient(app, base_url="http://localhost:8642") as client:
        scaling = client.get("/api/scaling", params={"model": "elastic"}).json()
        choices = [(line["cores"], line["width"]) for line in scaling["lines"]]
        assert choices == [(64, 1), (8, 1), (64, 0.25), (None, None)]
        place = scaling["sizes"].index(512)
        counted = [line["gflops"][place] * 1e9 for line in scaling["lines"]]
        expected = [model_flops(elastic.config, 512, 512, *choice) for choice in choices[:3]]
        assert counted == pytest.approx([*expected, dense_model_flops(elastic.config, 512, 512)])
        assert scaling["timed_sizes"] == [256, 512, 768, 1024]
        asked = {"model": "elastic", "size": 256}
        times = client.get("/api/scaling/times", params=asked).json()
        assert all(0 < seconds < 20 for seconds in times["seconds"])
        assert len(times["seconds"]) == 4
        assert client.get("/api/scaling/times", params=asked).json() == times, "measured once"
        problem(client.get("/api/scaling/times", params={"model": "elastic", "size": 100}), 422)
        problem(client.get("/api/scaling", params={"model": "none"}), 422)


def test_classes_are_the_classifiers(client: TestClient, picture: str) -> None:
    model = make_tiny(num_classes=4)
    model.provenance = {"classes": ["ant", "bee", "cat", "dog"]}
    app = create_app({"sorting": model}, warm=False)
    with TestClient(app, base_url="http://localhost:8642") as sorting:
        assert sorting.get("/api/about").json()["models"][0]["classes"] == 4
        asked = {**SETTING, "picture": sorting.post("/api/pictures", content=PHOTO).json()["id"], "model": "sorting"}
        classes = sorting.get("/api/classes", params=asked).json()["classes"]
    with torch.inference_mode():
        odds = model(given(client)[1], cores=16).logits[0].softmax(-1)
    found = {each["name"]: each["probability"] for each in classes}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert [found[name] for name in ("ant", "bee", "cat", "dog")] == pytest.approx(odds.tolist(), abs=1e-5)
    assert client.get("/api/classes", params={"picture": picture, **SETTING}).json() == {"classes": []}


def test_neighbours_come_from_the_folder_without_its_path(tmp_path: Path) -> None:
    inner = tmp_path / "secret place"
    inner.mkdir()
    for i in range(4):
        (inner / f"photo {i}.jpg").write_bytes(encode(fractal_image(96 + 16 * i, 128), "JPEG"))
    (inner / "photo 4.jpg").write_bytes(b"no picture")
    folder, model = Folder(ImageIndex.build(str(tmp_path), progress=False)), make_tiny()
    app = create_app({"tiny": model}, folder=folder)
    with TestClient(app, base_url="http://localhost:8642") as client:
        about = client.get("/api/about")
        ids = {image["title"]: image["id"] for image in about.json()["folder"]}
        assert list(ids) == [f"photo {i}.jpg" for i in range(5)]
        asked: dict[str, Any] = {"picture": ids["photo 0.jpg"], "model": "tiny", "count": 2}
        deadline = time.monotonic() + 60
        while (answer := client.get("/api/neighbours", params=asked).json())["embedded"] < 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        unreadable = client.get(f"/api/pictures/{ids['photo 4.jpg']}/about")
        problem(unreadable, 404)
        assert not any("secret" in text or str(tmp_path) in text for text in (about.text, str(answer), unreadable.text))
        thumbnail = client.get(f"/api/pictures/{ids['photo 1.jpg']}?side=256")
        assert Image.open(io.BytesIO(thumbnail.content)).size == (112, 128)
    features = []
    for i in range(4):
        fitted = fit_image(open_image(inner / f"photo {i}.jpg"), 256, "keep")
        with torch.inference_mode():
            features.append(model(normalize(to_tensor(fitted))[None]).cls[0])
    cosines = F.cosine_similarity(torch.stack(features[1:]), features[0][None])
    best = cosines.topk(2)
    assert [each["title"] for each in answer["neighbours"]] == [f"photo {i + 1}.jpg" for i in best.indices]
    assert [each["similarity"] for each in answer["neighbours"]] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_colours_of_the_page_are_those_of_the_reports(client: TestClient) -> None:
    style = client.get("/colours.css").text
    light, dark = style.split("prefers-color-scheme: dark")
    assert all(f"--{name}: {value};" in light for name, value in LIGHT.items())
    assert all(f"--{name}: {value};" in dark for name, value in DARK.items())


def test_memory_counts_what_lives_at_once() -> None:
    def call() -> None:
        a = torch.ones(2**20)
        b = a + 1
        del a
        c = b * 2
        c.view(-1).add_(1)

    assert scaling.peak_tensor_bytes(call) == 2 * 4 * 2**20


def test_without_timm_the_dense_vit_is_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "find_spec", lambda name: None)
    with connect() as client:
        asked = {"picture": client.post("/api/pictures", content=PHOTO).json()["id"], **SETTING}
        measures = client.get("/api/measures", params=asked).json()
        assert measures["veca"]["seconds"] > 0
        assert measures["dense"] is None
        assert client.get("/api/counts", params=asked).json()["dense"]["gflops"] > 0


def test_pictures_keep_their_shape_and_long_ones_are_cut(client: TestClient) -> None:
    about = client.post("/api/pictures", content=encode(fractal_image(640, 200))).json()
    assert (about["width"], about["height"], about["cut"]) == (400, 200, True)
    shown = Image.open(io.BytesIO(client.get(f"/api/pictures/{about['id']}?side=100").content))
    assert (shown.format, shown.size) == ("JPEG", (100, 50))
    assert client.get(f"/api/pictures/{about['id']}/about").json() == about


def test_about_lists_samples_and_budgets(client: TestClient) -> None:
    about = client.get("/api/about").json()
    assert [sample["id"] for sample in about["samples"]] == ["astronaut", "chelsea", "coffee", "rocket"]
    assert client.get("/api/pictures/astronaut").headers["content-type"] == "image/jpeg"
    assert about["models"][0]["budgets"] == [8, 16, 24, 32, 40, 48, 56, 64]


def test_a_model_says_where_its_weights_come_from() -> None:
    distilled, random = make_tiny(), make_tiny()
    distilled.provenance = {"weights": "distilled", "teacher": {"name": "a-teacher"}}
    random.provenance = {"weights": "random"}
    app = create_app({"a": distilled, "b": random, "c": make_tiny()}, warm=False)
    with TestClient(app, base_url="http://localhost:8642") as client:
        told = [(model["random"], model["origin"]) for model in client.get("/api/about").json()["models"]]
    assert told == [(False, "distilled from a-teacher, not the paper's weights"), (True, "random weights"), (False, "")]


def test_a_model_that_gives_nothing_finite_says_so() -> None:
    broken, overflowing = make_tiny(), make_tiny()
    torch.nn.init.constant_(broken.blocks[1].attn.qkv.weight, torch.nan)
    torch.nn.init.constant_(overflowing.blocks[1].attn.qkv.weight, 1e38)
    app = create_app({"broken": broken, "overflowing": overflowing}, warm=True)
    with TestClient(app, base_url="http://localhost:8642") as client:
        asked = {"picture": client.post("/api/pictures", content=PHOTO).json()["id"], "cores": 16, "size": 128}
        asks: list[tuple[str, dict[str, str]]] = [
            ("view", {}), ("layer", {"layer": "1"}), ("features", {}), ("features", {"format": "npz"})
        ]  # fmt: skip
        for path, more in asks:
            answer = client.get(f"/api/{path}", params={**asked, **more, "model": "broken"})
            assert "hold NaN or infinity, the first blocks.1.attn.qkv.weight" in problem(answer, 422)
        answer = client.get("/api/view", params={**asked, "model": "overflowing"})
        assert "overflow in torch.float32" in problem(answer, 422)
        for path in ("counts", "measures"):
            assert client.get(f"/api/{path}", params={**asked, "model": "broken"}).status_code == 200


def test_without_samples_it_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veca.images.samples.find_spec", lambda name: None)
    with connect() as client:
        assert client.get("/api/about").json()["samples"] == []
        assert client.post("/api/pictures", content=PHOTO).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 415, "cannot be used"),
        (b"no picture", 415, "not one of JPEG"),
        (PHOTO[:500], 415, "cannot be used"),
        (fuzz_images.flat_png(30000, 30000), 413, "pixels"),
        (b"\0" * (MAX_UPLOAD_BYTES + 1), 413, "bytes"),
    ],
    ids=["empty", "text", "truncated", "bomb", "long"],
)
def test_bad_pictures_are_refused(client: TestClient, body: bytes, status: int, says: str) -> None:
    assert says in problem(client.post("/api/pictures", content=body), status)


def test_a_body_of_unknown_length_is_cut_off(client: TestClient) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 2**20
            yield b"\0" * 2**20

    assert "bytes" in problem(client.post("/api/pictures", content=chunks()), 413)


@pytest.mark.parametrize(
    ("path", "change", "status", "says"),
    [
        ("view", {"cores": 5}, 422, "choose one of 8, 16"),
        ("view", {"cores": 0}, 422, "cores"),
        ("view", {"cores": "many"}, 422, "cores"),
        ("view", {"size": 250}, 422, "choose one of 128"),
        ("view", {"size": 10**9}, 422, "size"),
        ("view", {"model": "/etc/passwd"}, 422, "there are tiny"),
        ("view", {"picture": "0" * 32}, 404, "upload it again"),
        ("view", {"picture": "../../etc/passwd"}, 422, "picture"),
        ("layer", {"layer": 4}, 422, "layers 1 to 3"),
        ("layer", {"layer": 0}, 422, "layer"),
        ("features", {"format": "pickle"}, 422, "format"),
    ],
)
def test_invalid_queries_are_refused_by_name(
    client: TestClient, picture: str, path: str, change: dict, status: int, says: str
) -> None:
    asked = {"picture": picture, **SETTING, **({"layer": 1} if path == "layer" else {}), **change}
    assert says in problem(client.get(f"/api/{path}", params=asked), status)


@pytest.mark.parametrize("path", fuzz_web.OUTSIDE)
def test_no_file_is_reachable(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (404, 422)
    assert "root:" not in answer.text


def test_responses_carry_security_headers(client: TestClient) -> None:
    for path in ("/", "/main.js", "/api/about", "/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_the_page_asks_nothing_of_other_machines(client: TestClient) -> None:
    for path in ("/", "/main.js", "/pane.js", "/draw.js", "/api.js", "/chart.js", "/explore.css"):
        text = client.get(path).text
        assert len(text) > 500
        assert "http://" not in text
        assert "https://" not in text


@pytest.mark.parametrize(
    "host", ["example.org", "127.0.0.1.example.org", "localhost.evil:8642", "", "[::1", "10.0.0.1"]
)
def test_other_host_names_are_not_answered(client: TestClient, host: str) -> None:
    assert "name" in problem(client.get("/api/about", headers={"host": host}), 421)


@pytest.mark.parametrize("host", ["localhost:8642", "127.0.0.1", "[::1]:8642", "LOCALHOST"])
def test_own_host_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/about", headers={"host": host}).status_code == 200


def test_a_server_for_all_addresses_is_asked_by_number_or_by_its_name() -> None:
    with connect(hosts=names_of("0.0.0.0") | {"veca.example.org"}, token="a" * 12) as client:
        for host, status in {"192.0.2.7:80": 401, "veca.example.org": 401, "rebound.example.org": 421}.items():
            problem(client.get("/api/about", headers={"host": host}), status)


@pytest.mark.parametrize(
    "headers", [{"origin": "https://example.org"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}]
)
def test_other_sites_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert "other sites" in problem(client.post("/api/pictures", content=PHOTO, headers=headers), 403)


def test_our_own_page_may_send_requests(client: TestClient) -> None:
    own = {"origin": "http://localhost:8642", "sec-fetch-site": "same-origin"}
    assert client.post("/api/pictures", content=PHOTO, headers=own).status_code == 200


def test_the_token_opens_the_page_and_the_api() -> None:
    with connect(token="correct-horse") as client:
        for path in ("/", "/main.js", "/api/about", "/openapi.json", "/?token=wrong", "/api/about?token=correct-horse"):
            problem(client.get(path), 401)
        for wrong in ("Bearer wrong", "Bearer", "Basic correct-horse"):
            problem(client.get("/api/about", headers={"authorization": wrong}), 401)
        assert client.get("/api/about", headers={"authorization": "Bearer correct-horse"}).status_code == 200
        entered = client.get("/?token=correct-horse", follow_redirects=False)
        assert (entered.status_code, entered.headers["location"]) == (303, "/")
        assert "HttpOnly" in entered.headers["set-cookie"]
        assert "SameSite=Lax" in entered.headers["set-cookie"]
        assert client.get("/api/about").status_code == 200, "the cookie is enough from then on"


def blocked(release: threading.Event, began: threading.Event | None = None) -> JobSteps[str]:
    if began:
        began.set()
    release.wait(10)
    yield
    return "done"


def quick(log: list[str], name: str) -> JobSteps[str]:
    log.append(name)
    return name
    yield


def test_a_full_server_says_so_and_recovers() -> None:
    with connect(max_jobs=1) as client:
        id = client.post("/api/pictures", content=PHOTO).json()["id"]
        release = threading.Event()
        held = client.app.state.explorer.model_queue.submit("hold", blocked(release))  # type: ignore[attr-defined]
        answer = client.get("/api/view", params={"picture": id, **SETTING})
        assert "busy" in problem(answer, 503)
        assert int(answer.headers["retry-after"]) > 0
        release.set()
        assert held.result(10) == "done"
        assert client.get("/api/view", params={"picture": id, **SETTING}).status_code == 200


def test_a_new_request_of_a_pane_cancels_its_last() -> None:
    with connect() as client, ThreadPoolExecutor() as threads:
        asked = {"picture": client.post("/api/pictures", content=PHOTO).json()["id"], **SETTING}
        worker, release = client.app.state.explorer.model_queue, threading.Event()  # type: ignore[attr-defined]
        worker.submit("hold", blocked(release))

        def ask(cores: int, pane: str) -> Future[httpx2.Response]:
            before = len(worker.jobs)
            headers = {"x-veca-pane": pane}
            answer = threads.submit(client.get, "/api/view", params={**asked, "cores": cores}, headers=headers)
            while len(worker.jobs) == before and not answer.done():
                threading.Event().wait(0.005)
            return answer

        other, stale = ask(8, "b"), ask(16, "a")
        newest = threads.submit(client.get, "/api/view", params={**asked, "cores": 24}, headers={"x-veca-pane": "a"})
        assert "something else" in problem(stale.result(10), 409)
        release.set()
        assert [future.result(10).status_code for future in (newest, other)] == [200, 200]


def test_too_many_requests_at_once_are_refused() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def arrive(guard: SecurityMiddleware, answers: list[Any]) -> None:
        async def send(message: Any) -> None:
            if "status" in message:
                answers.append((message["status"], (b"retry-after", b"1") in message["headers"]))

        scope = {"type": "http", "path": "/", "query_string": b"", "headers": [(b"host", b"localhost")]}
        await guard(scope, None, send)  # type: ignore[arg-type]

    async def crowd() -> list[Any]:
        guard, answers = SecurityMiddleware(app, {"localhost"}, max_requests=3), []
        for _ in range(2):
            await asyncio.gather(*(arrive(guard, answers) for _ in range(5)))
        return answers

    assert sorted(asyncio.run(crowd())) == [(200, False)] * 6 + [(503, True)] * 4


@pytest.fixture
def worker() -> Iterator[JobQueue]:
    worker = JobQueue("test", 8)
    yield worker
    worker.close()


def test_equal_requests_share_one_job(worker: JobQueue) -> None:
    release, log = threading.Event(), []
    worker.submit("hold", blocked(release))
    both = [worker.submit("same", quick(log, "same")) for _ in range(2)]
    release.set()
    assert [future.result(10) for future in both] == ["same", "same"]
    assert log == ["same"]


def test_what_a_pane_no_longer_wants_is_never_begun(worker: JobQueue) -> None:
    release, log = threading.Event(), []
    worker.submit("hold", blocked(release))
    stale = [worker.submit(i, quick(log, str(i)), pane="a") for i in range(3)]
    other = worker.submit("other", quick(log, "other"), pane="b")
    release.set()
    assert stale[2].result(10) == "2"
    assert other.result(10) == "other"
    assert [type(future.exception(10)) for future in stale[:2]] == [DroppedError] * 2
    assert log == ["2", "other"]


def test_what_two_wait_for_is_not_dropped_by_one(worker: JobQueue) -> None:
    release, log = threading.Event(), []
    worker.submit("hold", blocked(release))
    worker.submit("shared", quick(log, "shared"), pane="a")
    wanted = worker.submit("shared", quick(log, "shared"), pane="b")
    worker.submit("next", quick(log, "next"), pane="a")
    release.set()
    assert wanted.result(10) == "shared"


def test_a_client_that_left_ends_its_job_at_the_next_step(worker: JobQueue) -> None:
    began, release, steps = threading.Event(), threading.Event(), []

    def job() -> JobSteps[None]:
        yield from blocked(release, began)
        steps.append("after")

    async def leaving() -> None:
        async def gone() -> None:
            await asyncio.to_thread(began.wait, 10)

        with pytest.raises(DroppedError):
            await worker.run("job", job(), gone)

    asyncio.run(leaving())
    assert not worker.jobs
    release.set()
    assert worker.submit("last", quick(steps, "last")).result(10) == "last"
    assert steps == ["last"]


def test_a_client_that_left_as_its_pane_asked_anew_leaves_no_error_in_the_log(worker: JobQueue) -> None:
    release, log, logged = threading.Event(), list[str](), list[str]()
    worker.submit("hold", blocked(release))

    async def leaving() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(context["message"]))

        async def gone() -> None:  # the newer request comes after this, and before `run` has seen it
            loop.call_soon(loop.call_soon, lambda: worker.submit("new", quick(log, "new"), pane="a"))

        with pytest.raises(DroppedError):
            await worker.run("old", quick(log, "old"), gone, pane="a")
        await asyncio.sleep(0.05)
        gc.collect()  # asyncio logs the error of a future as it is deleted

    asyncio.run(leaving())
    release.set()
    assert worker.submit("last", quick(log, "last")).result(10) == "last"
    assert log == ["new", "last"]
    assert logged == []


def test_measuring_makes_way_for_other_jobs(worker: JobQueue) -> None:
    began, release, log = threading.Event(), threading.Event(), []

    def measuring() -> JobSteps[str]:
        yield from blocked(release, began)
        log.append("measured")
        return "measured"

    later = worker.submit("later", measuring(), later=True)
    assert began.wait(10)
    urgent = worker.submit("urgent", quick(log, "urgent"))
    release.set()
    assert (later.result(10), urgent.result(10)) == ("measured", "urgent")
    assert log == ["urgent", "measured"]


def test_an_error_reaches_the_waiter_and_the_queue_goes_on(worker: JobQueue) -> None:
    def failing() -> JobSteps[None]:
        raise RuntimeError("out of luck")
        yield

    with pytest.raises(RuntimeError, match="out of luck"):
        worker.submit("bad", failing()).result(10)
    assert worker.submit("good", quick([], "good")).result(10) == "good"


def test_the_queue_is_bounded(worker: JobQueue) -> None:
    release = threading.Event()
    for i in range(8):
        worker.submit(i, blocked(release))
    with pytest.raises(BusyError):
        worker.submit(9, blocked(release))
    assert worker.submit(3, blocked(release)), "one that is there already takes no place"
    release.set()


def test_caches_have_a_limit() -> None:
    kept: ByteCache[bytes] = ByteCache(100, len)
    for i in range(5):
        kept.put(i, bytes(40))
        kept.get(0)
    assert [i for i in range(5) if kept.get(i)] == [0, 4], "the last used stay"
    assert kept.bytes == 80
    pictures = ImageStore(max_bytes=3 * 200 * 160 + 1)
    first = pictures.add(PHOTO)
    pictures.add(encode(fractal_image(190, 160)))
    assert pictures.get(first.id) is None


def test_the_command_has_help_and_names_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner().invoke
    help = run(cli, ["explore", "--help"])
    assert all(option in help.output for option in ("--model", "--port", "--host", "--token"))
    assert "letters" in str(run(cli, ["explore", "--token", "short"]).exception)
    assert "choose another --port" in str(run(cli, ["explore", "--host", "192.0.2.1", "--port", "9"]).exception)
    monkeypatch.setitem(__import__("sys").modules, "fastapi", None)
    monkeypatch.delitem(__import__("sys").modules, "veca.web.app")
    assert "pip install 'veca[web]'" in str(run(cli, ["explore"]).exception)


@pytest.mark.parametrize("options", [[], ["--token", "correct-horse"]])
def test_other_hosts_need_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    veca.save(make_tiny(), tmp_path / "tiny")
    served: list[Any] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: served.append(server.config.app))
    command = ["explore", "--port", "0", "--device", "cpu", "--model", ",".join(2 * [str(tmp_path / "tiny")])]
    assert "token" not in CliRunner().invoke(cli, command).output
    said = CliRunner().invoke(cli, [*command, "--host", "0.0.0.0", *options])
    token = said.output.partition("?token=")[2].split()[0]
    assert token == options[1] if options else len(token) > 16
    with TestClient(served[0], base_url="http://localhost") as client:
        about = client.get("/api/about").json()
        assert [model["name"] for model in about["models"]] == ["tiny", "tiny′"]
    with TestClient(served[1], base_url="http://localhost") as client:
        problem(client.get("/api/about"), 401)
        assert client.get("/api/about", headers={"authorization": f"Bearer {token}"}).status_code == 200


def test_hostile_clients_do_not_bring_the_server_down(tmp_path: Path) -> None:
    veca.save(make_tiny(), tmp_path / "tiny")
    good = fuzz_images.originals(np.random.default_rng(0))
    cases = [*list(fuzz_images.odd_rest(good))[::4], *fuzz_images.nothing_like_a_picture(good)]
    report = fuzz_web.run(2, cases, 0, tmp_path, "--model", str(tmp_path / "tiny"), phases="fuzzing")
    assert not report.problems
    assert report.asked > 15
    assert report.answers[415] > 10
