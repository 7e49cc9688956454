"""A search index behind HTTP: `/similar` of `veca serve`, `/api/search` of the explorer."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from conftest import make_tiny
from PIL import Image
from sample_images import encode, smooth_image
from starlette.testclient import TestClient

from veca import Veca
from veca.embed import EmbedSettings
from veca.search import SearchError, SearchIndex, update_index
from veca.web.app import create_app
from veca.web.searched import open_searched
from veca.web.serve.app import create_service
from veca.web.serve.schemas import ServeSettings

SETTINGS = EmbedSettings(cores=16, size=64, fit="stretch", decode="pillow", dense=True, cells=2)
PHOTO = encode(smooth_image(3, 112, 96))
OTHER = encode(smooth_image(4, 100, 90), "JPEG")
BOX = (56, 0, 56, 48)


class Searched(NamedTuple):
    photos: Path
    index: Path
    model: Veca

    def query(self, *args: Any, **options: Any) -> list[Any]:
        return SearchIndex.open(self.index, model=self.model).query(*args, **options)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    folder = tmp_path_factory.mktemp("searched")
    photos, index, model = folder / "secret place", folder / "index", make_tiny()
    photos.mkdir()
    for seed in range(6):
        smooth_image(seed, 112, 96).save(photos / f"{seed}.png")
    smooth_image(6, 300, 50).save(photos / "long.png")
    update_index([photos], index, model=model, model_name="tiny", settings=SETTINGS, workers=0, progress=False)
    return Searched(photos, index, model)


def problem(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["problem"])


def serve(searched: Searched, **options: Any) -> TestClient:
    models = {"other": make_tiny(depth=2), "tiny": searched.model}
    app = create_service(models, ServeSettings(cores=16, size=64), **options)
    return TestClient(app, base_url="http://localhost:8643")


def explore(searched: Searched, **options: Any) -> TestClient:
    models = {"tiny": searched.model, "other": make_tiny(depth=2)}
    index = open_searched(searched.index, models)
    return TestClient(create_app(models, warm=False, index=index, **options), base_url="http://localhost:8642")


def test_similar_images_are_those_of_a_query(searched: Searched) -> None:
    with serve(searched, index=SearchIndex.open(searched.index)) as client:
        about = client.get("/about").json()["index"]
        assert about == {"model": "tiny", "images": 7, "regions": True, "cores": 16, "width": 1.0}
        files = [("a", PHOTO), ("b", OTHER)]
        both = client.post("/similar?top=4", files=files).json()
        assert {name: both[name] for name in ("model", "cores", "width")} == {"model": "tiny", "cores": 16, "width": 1}
        few = client.post("/similar?cores=8", content=PHOTO).json()
        part = client.post(f"/similar?box={','.join(map(str, BOX))}", content=PHOTO).json()
        assert "/similar" in client.get("/openapi.json").json()["paths"]
    expected = [searched.query(PHOTO, 4), searched.query(OTHER, 4), searched.query(PHOTO, cores=8)]
    expected.append(searched.query(PHOTO, box=BOX))
    for found, matches in zip([*both["images"], few["images"][0], part["images"][0]], expected, strict=True):
        assert [each["path"] for each in found] == [match.path for match in matches]
        assert [each["score"] for each in found] == pytest.approx([match.score for match in matches], abs=1e-3)
        for each, match in zip(found, matches, strict=True):
            assert each["box"] == (match.box and list(match.box))
            assert (each["width"], each["height"], each["missing"]) == (match.width, match.height, False)
    assert few["cores"] == 8
    assert few["images"][0][0]["score"] < both["images"][0][0]["score"], "the budget must matter"


def test_what_cannot_be_searched_by_is_told_why(searched: Searched) -> None:
    with serve(searched, index=SearchIndex.open(searched.index)) as client:
        for query, body, status, told in (
            ("?box=0,0,113,10", PHOTO, 422, "within the image, which has 112×96 pixels"),
            ("?box=5,5,0,5", PHOTO, 422, "within the image"),
            ("?box=1,2,3", PHOTO, 422, "box"),
            ("?box=-1,0,5,5", PHOTO, 422, "box"),
            ("?cores=17", PHOTO, 422, "choose one of 8, 16"),
            ("?top=0", PHOTO, 422, "top"),
            ("", PHOTO[:300], 415, "cannot be used"),
            ("", b"", 400, "empty"),
            ("?box=0,0,1,60000", encode(Image.new("1", (10, 60_000))), 200, ""),
        ):  # fmt: skip
            answer = client.post(f"/similar{query}", content=body)
            assert told in problem(answer, status) if told else answer.status_code == status
        told = problem(client.post("/similar?box=0,0,5,5", files=[("a", PHOTO), ("b", OTHER)]), 422)
        assert "A box is of one image, and there are 2" in told
        assert client.post("/similar", content=PHOTO).status_code == 200
    with serve(searched) as client:
        assert "start the server with --index" in problem(client.post("/similar", content=PHOTO), 422)
        assert client.get("/about").json()["index"] is None
    with pytest.raises(SearchError, match=r"is of the model tiny, which is none of other; .*--model tiny,other"):
        create_service({"other": make_tiny(depth=2)}, index=SearchIndex.open(searched.index))


def test_the_explorer_finds_shows_and_opens_images_of_an_index(searched: Searched) -> None:
    with explore(searched) as client:
        about = client.get("/api/about")
        assert about.json()["index"] == {"model": "tiny", "images": 7, "regions": True}
        picture = client.post("/api/pictures", content=PHOTO).json()["id"]
        answer = client.get("/api/search", params={"picture": picture, "cores": 16, "count": 3})
        found, expected = answer.json()["matches"], searched.query(PHOTO, 3)
        assert [each["title"] for each in found] == [Path(match.path).name for match in expected]
        assert [each["similarity"] for each in found] == pytest.approx([match.score for match in expected], abs=1e-3)
        assert [(each["box"], each["readable"]) for each in found] == [(None, True)] * 3
        thumbnail = client.get(f"/api/pictures/{found[0]['id']}?side=256").content
        assert Image.open(io.BytesIO(thumbnail)).size == (112, 96)
        assert client.get(f"/api/pictures/{found[1]['id']}/about").json()["width"] == 112
        asked = {"picture": picture, "cores": 8, "box": ",".join(map(str, BOX))}
        by_part, expected = client.get("/api/search", params=asked), searched.query(PHOTO, box=BOX, cores=8)
        parts = {each["title"]: each["box"] for each in by_part.json()["matches"]}
        assert list(parts) == [Path(match.path).name for match in expected]
        for match in expected:
            if (match.width, match.height) == (112, 96):
                x, y, width, height = match.box
                assert parts[Path(match.path).name] == pytest.approx([x / 112, y / 96, width / 112, height / 96])
        # Of the long image, 300×50, the explorer shows the 100 pixels in the middle: a half of its left or right cell
        assert parts["long.png"][2:] == pytest.approx([0.5, 0.5])
        assert not any("secret" in each.text for each in (about, answer, by_part))
        for query, told in ({"box": "0,0,113,10"}, "within the image"), ({"cores": 17}, "choose one of"):
            assert told in problem(client.get("/api/search", params=asked | query), 422)
    with TestClient(create_app({"tiny": searched.model}, warm=False), base_url="http://localhost:8642") as client:
        assert client.get("/api/about").json()["index"] is None
        picture = client.post("/api/pictures", content=PHOTO).json()["id"]
        answer = client.get("/api/search", params={"picture": picture, "cores": 16})
        assert "start the explorer with --index" in problem(answer, 422)


def test_an_image_of_an_index_that_is_gone_is_found_but_not_opened(searched: Searched) -> None:
    gone = searched.photos / "5.png"
    data = gone.read_bytes()
    gone.unlink()
    try:
        with explore(searched) as client:
            picture = client.post("/api/pictures", content=data).json()["id"]
            asked = {"picture": picture, "cores": 16, "count": 2}
            first, second = client.get("/api/search", params=asked).json()["matches"]
            assert (first["title"], first["readable"], second["readable"]) == ("5.png", False, True)
            problem(client.get(f"/api/pictures/{first['id']}/about"), 404)
    finally:
        gone.write_bytes(data)
