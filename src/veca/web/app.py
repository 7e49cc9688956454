"""The HTTP API under the page: typed, described at /openapi.json, and as useful to a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any

import torch
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import veca
from veca.errors import NonFiniteError
from veca.images import MAX_PIXELS, ImageError, ImageTooLargeError, nearest_sizes
from veca.inspect import heat
from veca.model import Veca
from veca.utils.text import origin
from veca.web import analysis
from veca.web.connections import LIMITS, Limits
from veca.web.costs import count
from veca.web.explorer import MOST_JOBS, MOST_RESULTS, SIZES, Explorer
from veca.web.images import MOST_BYTES, SHOWN, TITLES, Picture
from veca.web.jobs import BusyError, DroppedError, ProblemError
from veca.web.schemas import (
    ANY,
    SAFETENSORS,
    About,
    Asked,
    Counted,
    Counts,
    Form,
    Id,
    Layer,
    Measured,
    Measures,
    ModelAbout,
    Pane,
    PictureAbout,
    Sample,
    Side,
    binary,
    problems,
)
from veca.web.security import LOOPBACK, Guard

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Of the files of the page, by suffix."""

router = APIRouter(prefix="/api")


def create_app(
    models: Mapping[str, Veca],
    *,
    hosts: set[str] | None = None,
    token: str | None = None,
    kept: int = MOST_RESULTS,
    most_jobs: int = MOST_JOBS,
    warm: bool = True,
    limits: Limits = LIMITS,
) -> FastAPI:
    """The explorer of `models`, answering under the names `hosts`; with `token`, to those who know it."""
    explorer = Explorer(models, kept, most_jobs, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if warm:
            explorer.warm_up()
        yield
        explorer.close()

    app = FastAPI(
        title="veca explorer",
        version=veca.__version__,
        description="What a VECA does with a picture: upload one, then ask for views, layers, features and costs.",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers=HANDLERS,
    )
    app.state.explorer = explorer
    app.add_middleware(Guard, hosts=hosts or LOOPBACK, token=token)
    app.include_router(router)
    _serve_page(app)
    app.openapi_schema = _describe(app.openapi(), explorer)
    return app


def _explorer(request: Request) -> Explorer:
    return request.app.state.explorer


@router.get("/about", responses=problems())
async def about(request: Request) -> About:
    """Models, sizes, samples and limits."""
    explorer = _explorer(request)
    ramp = (heat(torch.linspace(0, 1, 11)) * 255).round().int().tolist()
    return About(
        version=veca.__version__,
        device=str(next(iter(explorer.models.values())).norm.weight.device),
        models=[_about_model(name, model) for name, model in explorer.models.items()],
        sizes=list(SIZES),
        samples=[Sample(id=id, title=TITLES.get(id, id)) for id in explorer.pictures.samples],
        heat=[f"#{bytes(colour).hex()}" for colour in ramp],
        most_bytes=MOST_BYTES,
        most_pixels=MAX_PIXELS,
    )


BODY = {"required": True, "content": {ANY: {"schema": {"type": "string", "format": "binary"}}}}


@router.post("/pictures", responses=problems(408, 409, 413, 415), openapi_extra={"requestBody": BODY})
async def upload(request: Request) -> PictureAbout:
    """Send a picture as the body: JPEG, PNG, WebP, AVIF, TIFF, GIF, BMP or PPM. The same bytes get the same id."""
    return _about_picture(await _explorer(request).upload(request))


@router.get("/pictures/{id}", responses=binary("image/jpeg", "The picture, as it is looked at.", 404, 409, 422))
async def picture(request: Request, id: Id, side: Side = SHOWN) -> Response:
    """A picture, for looking at."""
    explorer = _explorer(request)
    found = await explorer.picture(request, id)
    return Response(await explorer.make(partial(found.jpeg, side)), media_type="image/jpeg")


@router.get("/pictures/{id}/about", responses=problems(404, 409, 422))
async def picture_about(request: Request, id: Id) -> PictureAbout:
    """Whether a picture is still held, and its size."""
    return _about_picture(await _explorer(request).picture(request, id))


@router.get("/view", responses=binary(SAFETENSORS, "colours, features, places.", 404, 409, 422))
async def view(request: Request, setting: Asked, pane: Pane = None) -> Response:
    """Features of a picture.

    Safetensors: `colours` (rows, columns, 3) of bytes, the first principal components, fitted to the same picture
    at 256 px with all cores; `features` (rows, columns, D) of int8, each patch scaled by itself; `places` (layers,
    cores, 2), the (x, y) in [-1, 1] at which cores stand.
    """
    explorer = _explorer(request)
    found = await explorer.look(request, setting, pane)
    return Response(await explorer.make(partial(analysis.view, found)), media_type=SAFETENSORS)


@router.get("/layer", responses=binary(SAFETENSORS, "maps, ranges, profiles, shares.", 404, 409, 422))
async def layer(request: Request, setting: Asked, layer: Layer, pane: Pane = None) -> Response:
    """Where cores look in one layer, and which cores each patch listens to.

    Safetensors: `maps` (cores, rows, columns) of bytes, `ranges` (cores, 3): the attention at 0 and at 255, and its
    peak over its mean; `profiles` (rows, columns, cores) of bytes, the share of each core in what a patch hears, in
    parts of `shares` (rows, columns), the largest.
    """
    explorer = _explorer(request)
    layers = len(explorer.check(setting).blocks)
    if layer > layers:
        raise ProblemError(422, f"layer={layer}: {setting.model} has layers 1 to {layers}.")
    found = await explorer.look(request, setting, pane)
    return Response(analysis.layer(found, layer), media_type=SAFETENSORS)


@router.get("/features", responses=binary(ANY, "A file of features.", 404, 409, 422))
async def features(request: Request, setting: Asked, form: Form = "safetensors") -> Response:
    """The features as a file, float32: `cls` (D), `cores` (C, D), `patches` (rows, columns, D), `coordinates`."""
    explorer = _explorer(request)
    found = await explorer.look(request, setting)
    data = await explorer.make(partial(analysis.features, found, form))
    name = f"veca-{setting.picture[:12]}-{setting.cores}-{setting.size}.{form}"
    return Response(data, media_type=ANY, headers={"content-disposition": f'attachment; filename="{name}"'})


@router.get("/counts", responses=problems(404, 409, 422))
async def counts(request: Request, setting: Asked) -> Counts:
    """Tokens and GFLOPs of one picture, counted: of VECA and of the dense ViT of the same size."""
    explorer = _explorer(request)
    config = explorer.check(setting).config
    image = (await explorer.picture(request, setting.picture)).image
    scale = setting.size / min(image.size)
    ours, dense = count(config, *nearest_sizes(image.height * scale, image.width * scale), setting.cores)
    return Counts(veca=Counted(**ours._asdict()), dense=Counted(**dense._asdict()))


@router.get("/measures", responses=problems(404, 409, 422))
async def measures(request: Request, setting: Asked, pane: Pane = None) -> Measures:
    """Time and memory of one picture, measured here, when nothing else is to do: of VECA and of the dense ViT."""
    ours, dense = await _explorer(request).measure(request, setting, pane)
    return Measures(veca=Measured(**ours._asdict()), dense=Measured(**dense._asdict()))


def _about_model(name: str, model: Veca) -> ModelAbout:
    return ModelAbout(
        name=name,
        random=model.provenance.get("weights") == "random",
        origin=origin(model.provenance),
        layers=len(model.blocks),
        width=model.config.num_features,
        budgets=sorted(model.config.budgets),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _about_picture(picture: Picture) -> PictureAbout:
    return PictureAbout(id=picture.id, width=picture.image.width, height=picture.image.height, cut=picture.cut)


async def _told(request: Request, error: Any) -> Response:
    return JSONResponse({"problem": error.problem}, error.status, error.headers)


async def _mistaken(request: Request, error: Any) -> Response:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    return JSONResponse({"problem": f"{where}: {first['msg']}"}, 422)


async def _refused(request: Request, error: Any) -> Response:
    return JSONResponse({"problem": f"{error.detail}: see /openapi.json."}, error.status_code, error.headers)


async def _busy(request: Request, error: Any) -> Response:
    return JSONResponse({"problem": "The server is busy; try again in a moment."}, 503, {"retry-after": "1"})


async def _dropped(request: Request, error: Any) -> Response:
    return JSONResponse({"problem": "This pane asked for something else meanwhile."}, 409)


async def _unreadable(request: Request, error: Any) -> Response:
    reason = str(error).removeprefix("<bytes>: ")
    status = 413 if isinstance(error, ImageTooLargeError) else 415
    return JSONResponse({"problem": f"This picture cannot be used: {reason}"}, status)


async def _not_finite(request: Request, error: Any) -> Response:
    return JSONResponse({"problem": f"There is nothing to show: {error}."}, 422)


HANDLERS: dict[Any, Any] = {
    ProblemError: _told,
    RequestValidationError: _mistaken,
    HTTPException: _refused,
    BusyError: _busy,
    DroppedError: _dropped,
    ImageError: _unreadable,
    NonFiniteError: _not_finite,
}


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


def _serve_page(app: FastAPI) -> None:
    """The files of the page: read once, so that no request names one."""
    for file in (files("veca.web") / "static").iterdir():
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            app.add_api_route(path, _sender(file.read_bytes(), kind), methods=["GET"], include_in_schema=False)


def _sender(data: bytes, kind: str) -> Any:
    async def send() -> Response:
        return Response(data, media_type=kind)

    return send
