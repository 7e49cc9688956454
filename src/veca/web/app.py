"""The HTTP API under the page, described at /openapi.json and as useful to a script."""

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
from starlette.routing import Route

import veca
from veca.errors import NonFiniteError
from veca.images import MAX_PIXELS, ImageError, ImageTooLargeError, nearest_sizes
from veca.inspect.projections import heat_hex
from veca.model import Veca
from veca.utils.text import origin
from veca.web import schemas
from veca.web.analysis import pack_features, pack_layer, pack_view
from veca.web.connections import LIMITS, Limits
from veca.web.costs import count_costs
from veca.web.explorer import MAX_JOBS, MAX_RESULT_BYTES, Explorer
from veca.web.images import DISPLAY_SIZE, MAX_UPLOAD_BYTES, SAMPLE_TITLES
from veca.web.jobs import RequestError
from veca.web.schemas import OCTET_STREAM, SAFETENSORS, SHORT_SIDES, SettingQuery, binary_responses, error_responses
from veca.web.security import LOOPBACK, SecurityMiddleware

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""Of the page's files, by suffix."""

router = APIRouter(prefix="/api")


def create_app(
    models: Mapping[str, Veca],
    *,
    hosts: set[str] | None = None,
    token: str | None = None,
    max_result_bytes: int = MAX_RESULT_BYTES,
    max_jobs: int = MAX_JOBS,
    warm: bool = True,
    limits: Limits = LIMITS,
) -> FastAPI:
    """The explorer of `models`, answering under the names `hosts`; with `token`, only to those who present it."""
    explorer = Explorer(models, max_result_bytes, max_jobs, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if warm:
            explorer.warm_up()
        yield
        explorer.close()

    app = FastAPI(
        title="veca explorer",
        version=veca.__version__,
        description="What a VECA does with an image: upload one, then ask for views, layers, features and costs.",
        docs_url=None,  # these pages load scripts from other sites
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.explorer = explorer
    # Runs before everything else, also for the page's files and /openapi.json.
    app.add_middleware(SecurityMiddleware, hosts=hosts or LOOPBACK, token=token)
    app.include_router(router)
    _add_page_routes(app)
    app.openapi_schema = _describe_values(app.openapi(), explorer)
    return app


def _explorer(request: Request) -> Explorer:
    return request.app.state.explorer


@router.get("/about", responses=error_responses())
async def get_about(request: Request) -> schemas.About:
    """Models, sizes, samples and limits."""
    explorer = _explorer(request)
    models = [
        schemas.ModelInfo(
            name=name,
            random=model.provenance.get("weights") == "random",
            origin=origin(model.provenance),
            layers=len(model.blocks),
            width=model.config.num_features,
            budgets=sorted(model.config.budgets),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
        )
        for name, model in explorer.models.items()
    ]
    return schemas.About(
        version=veca.__version__,
        device=str(next(iter(explorer.models.values())).norm.weight.device),
        models=models,
        sizes=list(SHORT_SIDES),
        samples=[schemas.SampleInfo(id=id, title=SAMPLE_TITLES.get(id, id)) for id in explorer.images.samples],
        heat=heat_hex(torch.linspace(0, 1, 11)),
        most_bytes=MAX_UPLOAD_BYTES,
        most_pixels=MAX_PIXELS,
    )


BODY = {"required": True, "content": {OCTET_STREAM: {"schema": {"type": "string", "format": "binary"}}}}


@router.post("/pictures", responses=error_responses(408, 409, 413, 415), openapi_extra={"requestBody": BODY})
async def upload_image(request: Request) -> schemas.ImageInfo:
    """Upload an image as the body: JPEG, PNG, WebP, AVIF, TIFF, GIF, BMP or PPM. The same bytes get the same id."""
    return (await _explorer(request).upload(request)).info


@router.get("/pictures/{id}", responses=binary_responses("image/jpeg", "The image as analysed.", 404, 409, 422))
async def get_image(request: Request, id: schemas.ImageId, side: schemas.MaxSide = DISPLAY_SIZE) -> Response:
    """An image, for display."""
    explorer = _explorer(request)
    image = await explorer.image(request, id)
    return Response(await explorer.build_response(partial(image.jpeg, side)), media_type="image/jpeg")


@router.get("/pictures/{id}/about", responses=error_responses(404, 409, 422))
async def get_image_info(request: Request, id: schemas.ImageId) -> schemas.ImageInfo:
    """Whether an image is still held, and its size."""
    return (await _explorer(request).image(request, id)).info


@router.get("/view", responses=binary_responses(SAFETENSORS, "colours, features, places.", 404, 409, 422))
async def get_view(request: Request, setting: SettingQuery, pane: schemas.PaneId = None) -> Response:
    """Features of an image.

    Safetensors: `colours` (rows, columns, 3) of bytes, the first principal components, fitted to the same image
    at 256 px with all cores; `features` (rows, columns, D) of int8, each patch scaled by its maximum; `places` (layers,
    cores, 2), the (x, y) of the cores in [-1, 1].
    """
    explorer = _explorer(request)
    analysis = await explorer.analyse(request, setting, pane)
    return Response(await explorer.build_response(partial(pack_view, analysis)), media_type=SAFETENSORS)


@router.get("/layer", responses=binary_responses(SAFETENSORS, "maps, ranges, profiles, shares.", 404, 409, 422))
async def get_layer(
    request: Request, setting: SettingQuery, layer: schemas.LayerNumber, pane: schemas.PaneId = None
) -> Response:
    """Where cores look in one layer, and which cores each patch listens to.

    Safetensors: `maps` (cores, rows, columns) of bytes, `ranges` (cores, 3): the attention at 0 and at 255, and its
    peak over its mean; `profiles` (rows, columns, cores) of bytes, the share of each core in the update of a patch,
    relative to `shares` (rows, columns), the largest.
    """
    explorer = _explorer(request)
    layers = len(explorer.check(setting).blocks)
    if layer > layers:
        raise RequestError(422, f"layer={layer}: {setting.model} has layers 1 to {layers}.")
    analysis = await explorer.analyse(request, setting, pane)
    return Response(pack_layer(analysis, layer), media_type=SAFETENSORS)  # small: needs no thread


@router.get("/features", responses=binary_responses(OCTET_STREAM, "A file of features.", 404, 409, 422))
async def get_features(
    request: Request, setting: SettingQuery, file_format: schemas.FileFormat = "safetensors"
) -> Response:
    """The features as a file, float32: `cls` (D), `cores` (C, D), `patches` (rows, columns, D), `coordinates`."""
    explorer = _explorer(request)
    analysis = await explorer.analyse(request, setting)
    data = await explorer.build_response(partial(pack_features, analysis, file_format))
    name = f"veca-{setting.picture[:12]}-{setting.cores}-{setting.size}.{file_format}"
    return Response(data, media_type=OCTET_STREAM, headers={"content-disposition": f'attachment; filename="{name}"'})


@router.get("/counts", responses=error_responses(404, 409, 422))
async def get_counts(request: Request, setting: SettingQuery) -> schemas.CountedCosts:
    """Tokens and GFLOPs of one image, counted: of VECA and of the dense ViT of the same size."""
    explorer = _explorer(request)
    config = explorer.check(setting).config
    image = (await explorer.image(request, setting.picture)).image
    scale = setting.size / min(image.size)  # the short side becomes `size`, both sides whole patches
    return count_costs(config, *nearest_sizes(image.height * scale, image.width * scale), setting.cores)


@router.get("/measures", responses=error_responses(404, 409, 422))
async def get_measures(request: Request, setting: SettingQuery, pane: schemas.PaneId = None) -> schemas.MeasuredCosts:
    """Time and memory of one image, measured on this machine once it is idle: of VECA and of the dense ViT."""
    return await _explorer(request).measure(request, setting, pane)


async def _answer_error(request: Request, error: Any) -> Response:
    """What went wrong as {"problem": …} with the right status."""
    match error:
        case RequestError():
            status, message = error.status, error.message
        case RequestValidationError():
            first = error.errors()[0]
            status, message = 422, f"{'.'.join(str(part) for part in first['loc'][1:])}: {first['msg']}"
        case HTTPException():
            status, message = error.status_code, f"{error.detail}: see /openapi.json."
        case ImageError():  # the decoder names bytes without a file "<bytes>"
            status = 413 if isinstance(error, ImageTooLargeError) else 415
            message = f"This picture cannot be used: {str(error).removeprefix('<bytes>: ')}"
        case _:  # NonFiniteError
            status, message = 422, f"There is nothing to show: {error}."
    return JSONResponse({"problem": message}, status, getattr(error, "headers", None))


EXCEPTION_HANDLERS: dict[Any, Any] = dict.fromkeys(
    (RequestError, RequestValidationError, HTTPException, ImageError, NonFiniteError), _answer_error
)


def _describe_values(schema: dict[str, Any], explorer: Explorer) -> dict[str, Any]:
    """The OpenAPI description with the values that this server accepts."""
    configs = [model.config for model in explorer.models.values()]
    values: dict[str, dict[str, Any]] = {
        "model": {"enum": list(explorer.models)},
        "size": {"enum": list(SHORT_SIDES)},
        "cores": {"enum": sorted({budget for config in configs for budget in config.budgets})},
        "layer": {"maximum": max(config.depth for config in configs)},
        "picture": {"examples": list(explorer.images.samples)[:1]},
    }
    for path in schema["paths"].values():
        for parameter in path.get("get", {}).get("parameters", ()):
            parameter["schema"] |= values.get(parameter["name"], {}) if parameter["in"] == "query" else {}
    return schema


def _add_page_routes(app: FastAPI) -> None:
    """Serve the page's files, read once at the start: no request names a file."""
    for file in (files("veca.web") / "static").iterdir():
        if media_type := MEDIA_TYPES.get(file.name.rpartition(".")[2]):
            path = "/" if file.name == "index.html" else f"/{file.name}"
            app.router.routes.append(Route(path, Response(file.read_bytes(), media_type=media_type), methods=["GET"]))
