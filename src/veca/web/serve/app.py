"""The HTTP API of `veca serve`, described at /openapi.json."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

import torch
from fastapi import APIRouter, Depends, FastAPI, Request, Response

import veca
from veca.errors import VecaError
from veca.images import MAX_PIXELS
from veca.inspect.demo import top_classes
from veca.model import Veca
from veca.search.index import SearchIndex
from veca.utils.text import origin
from veca.web.app import EXCEPTION_HANDLERS
from veca.web.connections import LIMITS, Limits, create_server
from veca.web.images import MAX_UPLOAD_BYTES
from veca.web.jobs import DroppedError, RequestError
from veca.web.schemas import error_responses, parse_box
from veca.web.security import LOOPBACK, SecurityMiddleware, address_of
from veca.web.serve import schemas
from veca.web.serve.batching import MAX_FAILED_BATCHES
from veca.web.serve.formats import choose_format, split_body, write_features
from veca.web.serve.metrics import MetricsMiddleware
from veca.web.serve.schemas import MAX_REQUEST_IMAGES, MAX_SIZE, MEDIA_FORMATS, ServeSettings
from veca.web.serve.state import Service

T = TypeVar("T")
MAX_REQUESTS = 256
"""Worked on at once."""
SHUTDOWN_SECONDS = 60
DEFAULTS = ServeSettings()

service_router = APIRouter()


def create_service(
    models: Mapping[str, Veca],
    settings: ServeSettings = DEFAULTS,
    *,
    index: SearchIndex | None = None,
    hosts: set[str] | None = None,
    token: str | None = None,
    limits: Limits = LIMITS,
) -> FastAPI:
    """The API of `models`, on one device, answering under the names `hosts`; with `token`, only to those who send it.

    Only /health answers without the token. `index` is what /similar searches; it is of one of the models.
    """
    service = Service(models, settings, limits, index)
    service.warm_up()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="veca serve",
        version=veca.__version__,
        description="Features and classes of images and images like them, by VECA models.",
        docs_url=None,  # these pages load scripts from other sites
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.service = service
    app.include_router(service_router)
    app.add_middleware(
        SecurityMiddleware, hosts=hosts or LOOPBACK, token=token, max_requests=MAX_REQUESTS, public={"/health"}
    )
    # Last, so that it sees refused requests too.
    routes = {str(getattr(route, "path", "")) for route in (*service_router.routes, *app.routes)}
    app.add_middleware(MetricsMiddleware, metrics=service.metrics, routes=routes)
    app.openapi_schema = _describe_values(app.openapi(), service)
    return app


def run_service(app: FastAPI, listening: socket.socket) -> None:
    """Serve until a signal; requests that were accepted are answered first. An error where the model is broken."""
    service: Service = app.state.service
    server = create_server(app, shutdown_seconds=SHUTDOWN_SECONDS)
    service.batcher.on_broken = lambda: setattr(server, "should_exit", True)
    server.run(sockets=[listening])
    if service.batcher.broken:
        raise VecaError(f"{MAX_FAILED_BATCHES} batches in a row failed, see above; start the server again")


async def _service(request: Request) -> Service:  # async: FastAPI calls others in a thread, where requests would queue
    return request.app.state.service


ServiceDep = Annotated[Service, Depends(_service)]


@service_router.get("/about", responses=error_responses())
async def get_service_about(service: ServiceDep) -> schemas.ServiceAbout:
    """Models, the default setting, and limits."""
    models = [
        schemas.ServedModel(
            name=name,
            origin=origin(model.provenance),
            features=model.config.output_dim or model.config.num_features,
            classes=model.config.num_classes,
            budgets=sorted(model.config.budgets),
            widths=sorted(model.config.widths),
        )
        for name, model in service.models.items()
    ]
    settings, default, index = service.settings, next(iter(service.default.values())), None
    if service.index:
        query = service.resolve_query(None, None)
        images, regions = len(service.index), service.index.has_regions
        index = schemas.ServedIndex(
            model=query.model, images=images, regions=regions, cores=query.cores, width=query.width
        )
    return schemas.ServiceAbout(
        version=veca.__version__,
        device=str(service.device),
        precision=settings.precision,
        models=models,
        index=index,
        cores=default.cores,
        width=default.width,
        size=default.size,
        fit=default.fit,
        max_size=MAX_SIZE,
        max_images=MAX_REQUEST_IMAGES,
        max_bytes=MAX_UPLOAD_BYTES,
        max_pixels=MAX_PIXELS,
        max_batch=settings.max_batch,
        max_wait=settings.max_wait,
        queue=settings.queue,
    )


@service_router.post(
    "/embed",
    response_model=schemas.Embeddings,
    responses={**error_responses(400, 406, 408, 413, 415, 422), 200: {"content": schemas.EMBED_CONTENT}},
    openapi_extra=schemas.IMAGES_BODY,
)
async def embed_images(
    request: Request, service: ServiceDep, asked: schemas.ServeSettingQuery, features: schemas.FeaturesQuery = "cls",
    file_format: schemas.FormatQuery = None,
) -> Response:  # fmt: skip
    """Features of an image, or of several, as JSON, safetensors or npy.

    The arrays of safetensors and npy: `cls` (images, D), `cores` (images, C, D), `patches` (images, rows, columns, D).
    """
    form = choose_format(file_format, request.headers.get("accept", ""))
    kinds = list(dict.fromkeys(features.split(",")))
    setting = service.resolve(asked)
    if form == "npy" and len(kinds) > 1:
        raise RequestError(422, "npy holds one array: ask for one kind of features, or for safetensors.")
    async with _received(request, service, setting.size) as images:
        found = await _while_connected(request, service.compute(images, setting, cls_only=kinds == ["cls"]))
        async with service.responses:
            content = await asyncio.to_thread(write_features, kinds, found, form, setting._asdict())
    media_type = next(media_type for media_type, name in MEDIA_FORMATS.items() if name == form)
    return Response(content, media_type=media_type)


@service_router.post("/predict", responses=error_responses(400, 408, 413, 415, 422), openapi_extra=schemas.IMAGES_BODY)
async def predict_classes(
    request: Request, service: ServiceDep, asked: schemas.ServeSettingQuery, top: schemas.TopQuery = 5
) -> schemas.Predictions:
    """The most probable classes of an image, or of several, by a model that has a classifier."""
    setting = service.resolve(asked)
    model = service.models[setting.model]
    if not model.config.num_classes:
        able = [name for name, each in service.models.items() if each.config.num_classes]
        rule = f"those that have are {', '.join(able)}" if able else "serve one that has, as `veca finetune` makes"
        raise RequestError(422, f"{setting.model} has no classes; {rule}.")
    async with _received(request, service, setting.size) as images:
        found = await _while_connected(request, service.compute(images, setting, cls_only=True))
        classes = [top_classes(model, torch.from_numpy(each.logits)[None], top) for each in found]
    named = [[schemas.NamedProbability(name=name, probability=share) for name, share in each] for each in classes]
    return schemas.Predictions(model=setting.model, images=named)


@service_router.post("/similar", responses=error_responses(400, 408, 413, 415, 422), openapi_extra=schemas.IMAGES_BODY)
async def find_similar(request: Request, service: ServiceDep, asked: schemas.SimilarQueryDep) -> schemas.SimilarImages:
    """The images of the index that are most like an image, or like each of several; with a box, like a region of it."""
    setting = service.resolve_query(asked.cores, asked.width)
    box = parse_box(asked.box)
    async with _received(request, service, setting.size) as images:
        if box and len(images) > 1:
            raise RequestError(422, f"A box is of one image, and there are {len(images)}: send them one by one.")
        found = await _while_connected(request, service.search(images, setting, asked.top, box))
    lists = [[schemas.SimilarImage(**match._asdict()) for match in matches] for matches in found]
    return schemas.SimilarImages(model=setting.model, cores=setting.cores, width=setting.width, images=lists)


@service_router.get("/health", responses={503: {"model": schemas.Health, "description": "It takes no images."}})
async def get_health(service: ServiceDep, response: Response) -> schemas.Health:
    """Whether the server takes images; answered without a token."""
    response.status_code = 200 if service.ready else 503
    return schemas.Health(ready=service.ready, waiting=service.waiting)


@service_router.get("/metrics", responses={**error_responses(), 200: {"content": {"text/plain": {}}}})
async def get_metrics(service: ServiceDep) -> Response:
    """Metrics for Prometheus."""
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")


@asynccontextmanager
async def _received(request: Request, service: Service, size: int) -> AsyncIterator[list[bytes]]:
    """The images in the body of a request, which keep their places in the queue until the block ends."""
    address = address_of(request.client.host if request.client else "")
    async with service.uploads.receive(request, address) as body:
        images = split_body(body, request.headers.get("content-type", ""))
        with service.places(address, len(images), size):
            yield images


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DroppedError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


def _describe_values(schema: dict[str, Any], service: Service) -> dict[str, Any]:
    """The OpenAPI description with the values that this server accepts."""
    configs = [model.config for model in service.models.values()]
    values: dict[str, list[Any]] = {
        "model": list(service.models),
        "cores": sorted({budget for config in configs for budget in config.budgets}),
        "width": sorted({width for config in configs for width in config.widths}),
    }
    for path in schema["paths"].values():
        for parameter in path.get("post", {}).get("parameters", ()):
            if parameter["in"] == "query" and (offered := values.get(parameter["name"])):
                parameter["schema"] |= {"examples": offered[-1:]}
                parameter["description"] += f" One of {', '.join(map(str, offered))}."
    return schema
