"""The HTTP API under the page: typed, described at /openapi.json, and as useful to a script."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import veca
from veca.images import MAX_PIXELS, ImageError, ImageTooLargeError, nearest_sizes
from veca.inspect import heat
from veca.model import Veca
from veca.web import analysis
from veca.web.analysis import Analysis, analyse, input_of, reference
from veca.web.costs import Measure, count, measure_dense, measure_veca
from veca.web.guard import Guard
from veca.web.pictures import MOST_BYTES, TITLES, Picture, Pictures
from veca.web.work import BusyError, DroppedError, Kept, Steps, Worker

SIZES = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Short sides in pixels."""
MOST_JOBS = 32
MOST_UPLOADS = 4
"""Read at once; as many again wait eight times over."""
PATIENCE = 30.0
"""Seconds an upload may take."""
STATIC = {
    "": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SAFETENSORS = "application/vnd.safetensors"


class Problem(BaseModel):
    problem: str = Field(description="What is wrong, and what to do about it, for people.")


class ModelAbout(BaseModel):
    name: str
    random: bool = Field(description="Whether its weights are random, because none ship for it yet.")
    layers: int
    width: int
    budgets: list[int]
    parameters: int


class Sample(BaseModel):
    id: str
    title: str


class About(BaseModel):
    version: str
    device: str
    models: list[ModelAbout]
    sizes: list[int] = Field(description="Short sides in pixels.")
    samples: list[Sample]
    heat: list[str] = Field(description="The colour map of the maps, evenly spaced, from least to most.")
    most_bytes: int = Field(description="Of an upload.")
    most_pixels: int


class PictureAbout(BaseModel):
    id: str
    width: int
    height: int
    cut: bool = Field(description="Whether its ends were cut off, because it was longer than twice its width.")


class Counted(BaseModel):
    tokens: int
    gflops: float


class Counts(BaseModel):
    veca: Counted
    dense: Counted = Field(description="The DINOv3-shaped dense ViT of the same size.")


class Measured(BaseModel):
    seconds: float
    mebibytes: float = Field(description="The most that is held at once, above the weights.")


class Measures(BaseModel):
    veca: Measured
    dense: Measured


Id = Annotated[
    str, Path(pattern="^([a-z]{1,32}|[0-9a-f]{32})$", description="A sample's name, or what an upload gave.")
]
PictureId = Annotated[str, Query(alias="picture", pattern="^([a-z]{1,32}|[0-9a-f]{32})$", description="Its id.")]
Name = Annotated[str, Query(alias="model", max_length=256, description="One of those in /api/about.")]
Cores = Annotated[int, Query(ge=1, le=256, description="The budget: one the model was trained at.")]
Size = Annotated[int, Query(ge=16, le=SIZES[-1], description="The short side in pixels: one of those in /api/about.")]
LayerNumber = Annotated[int, Query(alias="layer", ge=1, le=1024, description="Counted from 1.")]
Pane = Annotated[
    str | None,
    Header(
        alias="X-Veca-Pane",
        pattern="^[0-9A-Za-z-]{1,64}$",
        description="Whoever asks: a new question of the same pane withdraws its last one.",
    ),
]

PROBLEMS: dict[int, str] = {
    401: "The token is missing or wrong.",
    403: "The request comes from another site.",
    404: "There is no such picture, any more or ever.",
    409: "The same pane asked for something else meanwhile.",
    413: "The picture has too many bytes or pixels.",
    415: "The picture cannot be read.",
    408: "The picture did not arrive in time.",
    421: "The server does not answer under this name.",
    422: "A parameter is not what it must be.",
    503: "Too much is asked at once; try again after the seconds in Retry-After.",
}


def problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Problem, "description": PROBLEMS[code]} for code in (401, 403, 421, *codes, 503)}


def binary(kind: str, description: str, *codes: int) -> dict[int | str, dict[str, Any]]:
    content = {kind: {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"content": content, "description": description}, **problems(*codes)}


class ProblemError(Exception):
    def __init__(self, status: int, problem: str, **headers: str) -> None:
        super().__init__(problem)
        self.status, self.problem, self.headers = status, problem, headers


class Explorer:
    """Models, pictures and what was found in them; the model is only ever asked from one thread."""

    def __init__(self, models: Mapping[str, Veca], kept: int = 2**29, most_jobs: int = MOST_JOBS) -> None:
        self.models = dict(models)
        self.pictures = Pictures()
        self.analyses: Kept[Analysis] = Kept(kept, lambda found: found.nbytes)
        self.references: Kept[Any] = Kept(2**26, lambda found: found.nbytes)
        self.measures: Kept[Measure] = Kept(4096, lambda found: 1)
        self.worker = Worker("veca-model", most_jobs)
        self.opener = Worker("veca-pictures", 9 * MOST_UPLOADS)

    def close(self) -> None:
        self.worker.close()
        self.opener.close()

    def model(self, name: str) -> Veca:
        if name not in self.models:
            raise ProblemError(422, f"No model is called {name!r}; there are {', '.join(self.models)}.")
        return self.models[name]

    def check(self, name: str, cores: int, size: int) -> Veca:
        model = self.model(name)
        if cores not in model.config.budgets:
            trained = ", ".join(map(str, model.config.budgets))
            raise ProblemError(422, f"cores={cores}: {name} was trained at budgets of {trained}; choose one of these.")
        if size not in SIZES:
            raise ProblemError(422, f"size={size}: choose one of {', '.join(map(str, SIZES))}.")
        return model

    def open(self, data: bytes) -> Steps[Picture]:
        return self.pictures.add(data)
        yield

    def find(self, id: str) -> Steps[Picture]:
        found = self.pictures.get(id)
        if found is None:
            raise ProblemError(404, "There is no such picture here any more: upload it again.")
        return found
        yield

    def look(self, picture: Picture, name: str, cores: int, size: int) -> Steps[Analysis]:
        key = (picture.id, name, cores, size)
        found = self.analyses.get(key)
        if found is None:
            model, like = self.models[name], self.references.get(key[:2])
            if like is None:
                like = reference(model, picture)
                self.references.put(key[:2], like)
                yield
            about = {"picture": picture.id, "model": name, "cores": cores, "size": size}
            found = analyse(model, picture, cores, size, like, about)
            self.analyses.put(key, found)
        return found

    def measure(self, picture: Picture, name: str, cores: int, size: int) -> Steps[Measures]:
        model = self.models[name]
        images = input_of(model, picture, size)
        grid = tuple(images.shape[-2:])
        found = {}
        for key, steps in (
            ((name, grid, cores), partial(measure_veca, model, images, cores)),
            ((name, grid, "dense"), partial(measure_dense, model.config, images)),
        ):
            known = self.measures.get(key)
            if known is None:
                known = yield from steps()
                self.measures.put(key, known)
            found[key[2]] = known
        return Measures(
            veca=Measured(**found[cores]._asdict()),
            dense=Measured(**found["dense"]._asdict()),
        )


async def _gone(request: Request) -> None:
    """Returns when the client is no longer there."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(
    models: Mapping[str, Veca],
    *,
    hosts: set[str] | None = None,
    token: str | None = None,
    kept: int = 2**29,
    most_jobs: int = MOST_JOBS,
    warm: bool = True,
) -> FastAPI:
    """The explorer of `models`, answering under the names `hosts`; with `token`, to those who know it."""
    explorer = Explorer(models, kept, most_jobs)
    uploads, queued = asyncio.Semaphore(MOST_UPLOADS), 0

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if warm and explorer.pictures.samples:
            id, (name, model) = next(iter(explorer.pictures.samples)), next(iter(explorer.models.items()))
            picture = explorer.pictures.get(id)
            assert picture is not None
            explorer.worker.submit("warm", lambda: explorer.look(picture, name, max(model.config.budgets), 256))
        yield
        explorer.close()

    app = FastAPI(
        title="veca explorer",
        version=veca.__version__,
        description="What a VECA does with a picture: upload one, then ask for views, layers, features and costs.",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.explorer = explorer
    app.add_middleware(Guard, hosts=hosts or {"localhost", "127.0.0.1", "::1"}, token=token)

    @app.exception_handler(ProblemError)
    async def told(request: Request, error: ProblemError) -> Response:
        return JSONResponse({"problem": error.problem}, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def mistaken(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return JSONResponse({"problem": f"{where}: {first['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return JSONResponse({"problem": f"{error.detail}: see /openapi.json."}, error.status_code, error.headers)

    @app.exception_handler(BusyError)
    async def busy(request: Request, error: BusyError) -> Response:
        return JSONResponse({"problem": "The server is busy; try again in a moment."}, 503, {"retry-after": "1"})

    @app.exception_handler(DroppedError)
    async def dropped(request: Request, error: DroppedError) -> Response:
        return JSONResponse({"problem": "This pane asked for something else meanwhile."}, 409)

    @app.exception_handler(ImageError)
    async def unreadable(request: Request, error: ImageError) -> Response:
        reason = str(error).removeprefix("<bytes>: ")
        status = 413 if isinstance(error, ImageTooLargeError) else 415
        return JSONResponse({"problem": f"This picture cannot be used: {reason}"}, status)

    async def picture_of(request: Request, id: str) -> Picture:
        if held := explorer.pictures.held(id):
            return held
        return await explorer.opener.run(("find", id), lambda: explorer.find(id), partial(_gone, request))

    async def look(request: Request, id: str, name: str, cores: int, size: int, pane: str | None) -> Analysis:
        explorer.check(name, cores, size)
        key = (id, name, cores, size)
        found = explorer.analyses.get(key)
        if found is None:
            picture = await picture_of(request, id)
            # Pages choose their own names; those of two machines must not meet.
            asking = f"{request.client.host if request.client else ''} {pane}" if pane else None
            found = await explorer.worker.run(
                key, lambda: explorer.look(picture, name, cores, size), partial(_gone, request), pane=asking
            )
        return found

    @app.get("/api/about", responses=problems())
    async def about() -> About:
        """Models, sizes, samples and limits."""
        return About(
            version=veca.__version__,
            device=str(next(iter(explorer.models.values())).norm.weight.device),
            models=[
                ModelAbout(
                    name=name,
                    random=model.provenance.get("weights") == "random",
                    layers=len(model.blocks),
                    width=model.config.num_features,
                    budgets=sorted(model.config.budgets),
                    parameters=sum(parameter.numel() for parameter in model.parameters()),
                )
                for name, model in explorer.models.items()
            ],
            sizes=list(SIZES),
            samples=[Sample(id=id, title=TITLES.get(id, id)) for id in explorer.pictures.samples],
            heat=[
                "#" + bytes((heat(torch.tensor(level / 10)) * 255).round().int().tolist()).hex() for level in range(11)
            ],
            most_bytes=MOST_BYTES,
            most_pixels=MAX_PIXELS,
        )

    body = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}

    @app.post(
        "/api/pictures", responses=problems(408, 413, 415), openapi_extra={"requestBody": {"required": True, **body}}
    )
    async def upload(request: Request) -> PictureAbout:
        """Send a picture as the body: JPEG, PNG, WebP, AVIF, TIFF, GIF, BMP or PPM. The same bytes get the same id."""
        nonlocal queued
        if queued >= 9 * MOST_UPLOADS:
            raise BusyError
        queued += 1
        try:
            async with uploads:
                data = await _read(request)
                picture = await explorer.opener.run(object(), lambda: explorer.open(data), partial(_gone, request))
        finally:
            queued -= 1
        return _about_picture(picture)

    @app.get("/api/pictures/{id}", responses=binary("image/jpeg", "The picture, as it is looked at.", 404, 409, 422))
    async def picture(
        request: Request, id: Id, side: Annotated[int, Query(ge=16, le=1024, description="Of the long side.")] = 1024
    ) -> Response:
        """A picture, for looking at."""
        found = await picture_of(request, id)
        return Response(await asyncio.to_thread(found.jpeg, side), media_type="image/jpeg")

    @app.get("/api/pictures/{id}/about", responses=problems(404, 409, 422))
    async def picture_about(request: Request, id: Id) -> PictureAbout:
        """Whether a picture is still held, and its size."""
        return _about_picture(await picture_of(request, id))

    @app.get("/api/view", responses=binary(SAFETENSORS, "colours, features, places.", 404, 409, 422))
    async def view(
        request: Request, picture: PictureId, model: Name, cores: Cores, size: Size, pane: Pane = None
    ) -> Response:
        """Features of a picture.

        Safetensors: `colours` (rows, columns, 3) of bytes, the first principal components, fitted to the same picture
        at 256 px with all cores; `features` (rows, columns, D) of int8, each patch scaled by itself; `places` (layers,
        cores, 2), the (x, y) in [-1, 1] at which cores stand.
        """
        found = await look(request, picture, model, cores, size, pane)
        return Response(await asyncio.to_thread(analysis.view, found), media_type=SAFETENSORS)

    @app.get("/api/layer", responses=binary(SAFETENSORS, "maps, ranges, profiles, shares.", 404, 409, 422))
    async def layer(
        request: Request, picture: PictureId, model: Name, cores: Cores, size: Size, layer: LayerNumber,
        pane: Pane = None,
    ) -> Response:  # fmt: skip
        """Where cores look in one layer, and which cores each patch listens to.

        Safetensors: `maps` (cores, rows, columns) of bytes, `ranges` (cores, 3): the attention at 0 and at 255, and its
        peak over its mean; `profiles` (rows, columns, cores) of bytes, the share of each core in what a patch hears, in
        parts of `shares` (rows, columns), the largest.
        """
        layers = len(explorer.model(model).blocks)
        if layer > layers:
            raise ProblemError(422, f"layer={layer}: {model} has layers 1 to {layers}.")
        found = await look(request, picture, model, cores, size, pane)
        return Response(analysis.layer(found, layer), media_type=SAFETENSORS)

    @app.get("/api/features", responses=binary("application/octet-stream", "A file of features.", 404, 409, 422))
    async def features(
        request: Request, picture: PictureId, model: Name, cores: Cores, size: Size,
        form: Annotated[Literal["npz", "safetensors"], Query(alias="format")] = "safetensors",
    ) -> Response:  # fmt: skip
        """The features as a file, float32: `cls` (D), `cores` (C, D), `patches` (rows, columns, D), `coordinates`."""
        found = await look(request, picture, model, cores, size, None)
        data = await asyncio.to_thread(analysis.features, found, form)
        name = f"veca-{picture[:12]}-{cores}-{size}.{form}"
        disposition = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(data, media_type="application/octet-stream", headers=disposition)

    @app.get("/api/counts", responses=problems(404, 409, 422))
    async def counts(request: Request, picture: PictureId, model: Name, cores: Cores, size: Size) -> Counts:
        """Tokens and GFLOPs of one picture, counted: of VECA and of the dense ViT of the same size."""
        config = explorer.check(model, cores, size).config
        image = (await picture_of(request, picture)).image
        scale = size / min(image.size)
        height, width = nearest_sizes(image.height * scale, image.width * scale)
        ours, dense = count(config, height, width, cores)
        return Counts(veca=Counted(**ours._asdict()), dense=Counted(**dense._asdict()))

    @app.get("/api/measures", responses=problems(404, 409, 422))
    async def measures(
        request: Request, picture: PictureId, model: Name, cores: Cores, size: Size, pane: Pane = None
    ) -> Measures:
        """Time and memory of one picture, measured here, when nothing else is to do: of VECA and of the dense ViT."""
        explorer.check(model, cores, size)
        found = await picture_of(request, picture)
        asking = f"{request.client.host if request.client else ''} {pane} measures" if pane else None
        return await explorer.worker.run(
            ("measures", picture, model, cores, size),
            lambda: explorer.measure(found, model, cores, size),
            partial(_gone, request), pane=asking, later=True,
        )  # fmt: skip

    _serve_static(app)
    app.openapi_schema = _describe(app.openapi(), explorer)
    return app


def _describe(schema: dict[str, Any], explorer: Explorer) -> dict[str, Any]:
    """The API's description, with the values that this server takes."""
    configs = [model.config for model in explorer.models.values()]
    known: dict[str, dict[str, Any]] = {
        "model": {"enum": list(explorer.models)},
        "size": {"enum": list(SIZES)},
        "cores": {"enum": sorted({budget for config in configs for budget in config.budgets})},
        "layer": {"maximum": max(config.depth for config in configs)},
        "picture": {"examples": list(explorer.pictures.samples)[:1]},
    }
    for path in schema["paths"].values():
        for parameter in path.get("get", {}).get("parameters", ()):
            parameter["schema"] |= known.get(parameter["name"], {}) if parameter["in"] == "query" else {}
    return schema


async def _read(request: Request) -> bytes:
    """The body, if it is not too long."""
    told = request.headers.get("content-length", "")
    too_long = ProblemError(
        413, f"The picture has more than {MOST_BYTES:,} bytes; send a smaller one.", connection="close"
    )
    if told.isdecimal() and int(told[:20]) > MOST_BYTES:
        raise too_long
    data = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MOST_BYTES:
                    raise too_long
    except ClientDisconnect:
        raise DroppedError from None
    except TimeoutError:
        problem = f"The picture did not arrive within {math.floor(PATIENCE)} seconds; send a smaller one."
        raise ProblemError(408, problem, connection="close") from None
    return bytes(data)


def _about_picture(picture: Picture) -> PictureAbout:
    return PictureAbout(id=picture.id, width=picture.image.width, height=picture.image.height, cut=picture.cut)


def _serve_static(app: FastAPI) -> None:
    """The page: read once, so that no request names a file."""
    folder = files("veca.web") / "static"
    for file in folder.iterdir():
        kind = STATIC.get("." + file.name.rpartition(".")[2])
        if file.name == "index.html":
            path, kind = "/", STATIC[""]
        elif kind:
            path = f"/{file.name}"
        else:
            continue
        app.add_api_route(path, _page(file.read_bytes(), kind), methods=["GET"], include_in_schema=False)


def _page(data: bytes, kind: str) -> Any:
    async def page() -> Response:
        return Response(data, media_type=kind)

    return page
