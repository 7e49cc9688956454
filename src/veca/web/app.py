"""The explorer's HTTP API, described at /openapi.json."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

import veca
from veca.errors import NonFiniteError
from veca.images import MAX_PIXELS, ImageError, ImageTooLargeError, nearest_sizes
from veca.inspect.projections import core_colours, heat_hex
from veca.model import Veca
from veca.report.page import render
from veca.utils.text import origin
from veca.web import analysis, schemas
from veca.web.analysis import DEFAULT_SIZE, Analysis
from veca.web.connections import LIMITS, Limits
from veca.web.folder import THUMBNAIL_SIDE, Folder
from veca.web.images import DISPLAY_SIZE, MAX_UPLOAD_BYTES, SAMPLE_TITLES, StoredImage
from veca.web.jobs import JobQueue, JobSteps, RequestError, T
from veca.web.schemas import OCTET_STREAM, SAFETENSORS, SHORT_SIDES, SettingQuery, binary_responses, error_responses
from veca.web.searched import SearchedIndex
from veca.web.security import LOOPBACK, SecurityMiddleware, address_of
from veca.web.state import CHART, MEASURE, Explorer, check_offered

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""Of the page's files, by suffix."""

router = APIRouter(prefix="/api")


def create_app(
    models: Mapping[str, Veca],
    *,
    hosts: set[str] | None = None,
    token: str | None = None,
    max_jobs: int = 32,
    warm: bool = True,
    limits: Limits = LIMITS,
    folder: Folder | None = None,
    index: SearchedIndex | None = None,
) -> FastAPI:
    """The explorer of `models`, answering under the names `hosts`; with `token`, only to those who present it.

    Neighbours of an image are looked for in `folder`, images like it or a region of it in `index`.
    """
    explorer = Explorer(models, max_jobs, limits, folder, index)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if warm:
            explorer.warm_up()
        explorer.embed_folder()
        yield
        for queue in (explorer.model_queue, explorer.decode_queue):
            queue.close()

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
    # The page's files are read once, here: no request names a file.
    for file in (files("veca.web") / "static").iterdir():
        if media_type := MEDIA_TYPES.get(file.name.rpartition(".")[2]):
            path = "/" if file.name == "index.html" else f"/{file.name}"
            _add_file(app, path, file.read_bytes(), media_type)
    _add_file(app, "/colours.css", render("colours.css").encode(), MEDIA_TYPES["css"])
    app.openapi_schema = _describe_values(app.openapi(), explorer)
    return app


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    app.router.routes.append(Route(path, Response(content, media_type=media_type), methods=["GET"]))


class Client:
    """One request to the explorer; jobs for it are dropped once its client has disconnected."""

    def __init__(self, request: Request) -> None:
        self.request, self.explorer = request, request.app.state.explorer
        host = request.client.host if request.client else ""
        self.host, self.address = host, address_of(host)

    async def run(self, queue: JobQueue, key: Any, steps: JobSteps[T], pane: str | None = None, **options: Any) -> T:
        async def disconnected() -> None:
            while (await self.request.receive())["type"] != "http.disconnect":
                pass

        # Pages choose names for their panes: those of two machines may be equal.
        pane = f"{self.host} {pane}" if pane else ""
        return await queue.run(key, steps, disconnected, client=self.address, pane=pane, **options)

    async def decode(self, key: Any, decode: Callable[..., T], *args: Any) -> T:
        def steps() -> JobSteps[T]:
            return decode(*args)
            yield

        return await self.run(self.explorer.decode_queue, key, steps())

    async def image(self, id: str) -> StoredImage:
        explorer = self.explorer
        stored = explorer.images.cache.get(id) or await self.decode(id, explorer.open_image, id)
        if stored is None:
            raise RequestError(404, "There is no such picture here any more: upload it again.")
        return stored

    async def respond(self, media_type: str, build: Callable[..., bytes], *args: Any, **headers: str) -> Response:
        """A large response, built in a thread when it is its turn."""
        async with self.explorer.response_slots:
            content = await asyncio.to_thread(build, *args)
        return Response(content, media_type=media_type, headers=headers)


async def _client(request: Request) -> Client:  # async: FastAPI calls others in a thread, where requests would queue
    return Client(request)


ClientDep = Annotated[Client, Depends(_client)]


async def _analyse(client: ClientDep, setting: SettingQuery, pane: schemas.PaneId = None) -> Analysis:
    explorer = client.explorer
    explorer.check(setting)
    if result := explorer.analyses.get(setting):
        return result
    image = await client.image(setting.picture)
    return await client.run(explorer.model_queue, setting, explorer.analyse(setting, image), pane)


AnalysisDep = Annotated[Analysis, Depends(_analyse)]


@router.get("/about", responses=error_responses())
async def get_about(client: ClientDep) -> schemas.About:
    """Models, sizes, samples and limits."""
    models = [
        schemas.ModelInfo(
            name=name,
            random=model.provenance.get("weights") == "random",
            origin=origin(model.provenance),
            layers=len(model.blocks),
            width=model.config.num_features,
            classes=model.config.num_classes,
            budgets=sorted(model.config.budgets),
            widths=sorted(model.config.widths),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
        )
        for name, model in client.explorer.models.items()
    ]
    return schemas.About(
        version=veca.__version__,
        device=str(next(iter(client.explorer.models.values())).norm.weight.device),
        models=models,
        sizes=list(SHORT_SIDES),
        samples=[schemas.SampleInfo(id=id, title=SAMPLE_TITLES.get(id, id)) for id in client.explorer.images.samples],
        folder=client.explorer.folder.images if client.explorer.folder else [],
        index=client.explorer.index.info if client.explorer.index else None,
        default_size=DEFAULT_SIZE,
        heat=heat_hex(torch.linspace(0, 1, 11)),
        core_colours=core_colours(11),
        most_bytes=MAX_UPLOAD_BYTES,
        most_pixels=MAX_PIXELS,
    )


BODY = {"required": True, "content": {OCTET_STREAM: {"schema": {"type": "string", "format": "binary"}}}}


@router.post("/pictures", responses=error_responses(408, 409, 413, 415), openapi_extra={"requestBody": BODY})
async def upload_image(client: ClientDep) -> schemas.ImageInfo:
    """Upload an image as the body: JPEG, PNG, WebP, AVIF, TIFF, GIF, BMP or PPM. The same bytes get the same id."""
    async with client.explorer.uploads.receive(client.request, client.address) as data:
        # A key of its own: every upload is decoded, and `add` finds bytes that are already there.
        return (await client.decode(object(), client.explorer.images.add, data)).info


@router.get("/pictures/{id}", responses=binary_responses("image/jpeg", "The image as analysed.", 404, 409, 422))
async def get_image(client: ClientDep, id: schemas.ImageId, side: schemas.MaxSide = DISPLAY_SIZE) -> Response:
    """An image, for display."""
    if side <= THUMBNAIL_SIDE and (thumbnail := client.explorer.thumbnail(id)):
        return Response(thumbnail, media_type="image/jpeg")
    return await client.respond("image/jpeg", (await client.image(id)).jpeg, side)


@router.get("/pictures/{id}/about", responses=error_responses(404, 409, 422))
async def get_image_info(client: ClientDep, id: schemas.ImageId) -> schemas.ImageInfo:
    """Whether an image is still held, and its size."""
    return (await client.image(id)).info


@router.get("/view", responses=binary_responses(SAFETENSORS, "colours, foreground, features, places.", 404, 409, 422))
async def get_view(client: ClientDep, result: AnalysisDep) -> Response:
    """Features of an image.

    Safetensors: `colours` (rows, columns, 3), the first principal components, fitted to the same image at 256 px with
    all cores: 0 to 1 between the 1st and 99th percentile there; `foreground` (rows, columns), above 0 where the first
    of them is on the side of Otsu's threshold that has fewer patches at the border; `features` (rows, columns, D) of
    int8, each patch scaled by its maximum; `places` (layers, cores, 2), the (x, y) of the cores in [-1, 1].
    """
    return await client.respond(SAFETENSORS, analysis.pack_view, result)


@router.get("/layer", responses=binary_responses(SAFETENSORS, "maps, ranges, profiles, shares.", 404, 409, 422))
async def get_layer(
    client: ClientDep, setting: SettingQuery, layer: schemas.LayerNumber, pane: schemas.PaneId = None
) -> Response:
    """Where cores look in one layer, and which cores each patch listens to.

    Safetensors: `maps` (cores, rows, columns) of bytes, `ranges` (cores, 3): the attention at 0 and at 255, and its
    peak over its mean; `profiles` (rows, columns, cores) of bytes, the share of each core in the update of a patch,
    relative to `shares` (rows, columns), the largest.
    """
    explorer = client.explorer
    if layer > (layers := explorer.check(setting).config.depth):
        raise RequestError(422, f"layer={layer}: {setting.model} has layers 1 to {layers}.")
    arrays = explorer.layers.get((setting, layer))
    if arrays is None:
        steps = explorer.analyse_layer(setting, layer, await client.image(setting.picture))
        # A pane asks for both at once: its view does not cancel its layer.
        pane = pane and f"{pane} layer"
        arrays = await client.run(explorer.model_queue, (setting, layer), steps, pane)
    # Small: needs no thread.
    return Response(analysis.pack_tensors(arrays, {**asdict(setting), "layer": layer}), media_type=SAFETENSORS)


@router.get("/classes", responses=error_responses(404, 409, 422))
async def get_classes(result: AnalysisDep) -> schemas.Classes:
    """The most probable classes of an image; none where the model has no classifier."""
    return schemas.Classes(classes=result.classes)


@router.get("/features", responses=binary_responses(OCTET_STREAM, "A file of features.", 404, 409, 422))
async def get_features(
    client: ClientDep, setting: SettingQuery, result: AnalysisDep, file_format: schemas.FileFormat = "safetensors"
) -> Response:
    """The features as a file, float32: `cls` (D), `cores` (C, D), `patches` (rows, columns, D), `coordinates`."""
    width = f"-{setting.width:g}" if setting.width != 1 else ""
    name = f"veca-{setting.picture[:12]}-{setting.cores}{width}-{setting.size}.{file_format}"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return await client.respond(OCTET_STREAM, analysis.pack_features, result, file_format, **headers)


@router.get("/counts", responses=error_responses(404, 409, 422))
async def get_counts(client: ClientDep, setting: SettingQuery) -> schemas.CountedCosts:
    """Tokens and GFLOPs of one image, counted: of VECA and of the dense ViT of the same size."""
    model = client.explorer.check(setting)
    image = (await client.image(setting.picture)).image
    scale = setting.size / min(image.size)  # the short side becomes `size`, both sides whole patches
    sides = nearest_sizes(image.height * scale, image.width * scale)
    return analysis.count_costs(model, *sides, setting.cores, setting.width)


@router.get("/measures", responses=error_responses(404, 409, 422))
async def get_measures(client: ClientDep, setting: SettingQuery, pane: schemas.PaneId = None) -> schemas.MeasuredCosts:
    """Time and memory of one image, measured on this machine once it is idle: of VECA and of the dense ViT."""
    explorer = client.explorer
    explorer.check(setting)
    steps = explorer.measure(setting, await client.image(setting.picture))
    pane = pane and f"{pane} measures"  # a view does not cancel a measurement of the same pane
    return await client.run(explorer.model_queue, ("measure", setting), steps, pane, later=MEASURE)


@router.get("/neighbours", responses=error_responses(404, 409, 422))
async def get_neighbours(
    client: ClientDep,
    id: schemas.PictureQuery,
    model: schemas.ModelName,
    count: schemas.NeighbourCount = 8,
    pane: schemas.PaneId = None,
) -> schemas.Neighbours:
    """The images of the folder whose global features are nearest; none where the explorer was started without one."""
    explorer = client.explorer
    explorer.find_model(model)
    steps, pane = explorer.find_neighbours(model, await client.image(id), count), pane and f"{pane} neighbours"
    return await client.run(explorer.model_queue, ("neighbours", id, model, count), steps, pane)


@router.get("/search", responses=error_responses(404, 409, 422))
async def search_index(
    client: ClientDep,
    id: schemas.PictureQuery,
    cores: schemas.QueryCores,
    width: schemas.QueryWidth = 1.0,
    box: schemas.BoxQuery = None,
    count: schemas.MatchCount = 20,
    pane: schemas.PaneId = None,
) -> schemas.IndexMatches:
    """The images of the index that are most like an image, or like a region of it."""
    explorer, index = client.explorer, client.explorer.index
    if index is None:
        raise RequestError(422, "There is no index to search; start the explorer with --index.")
    config = explorer.find_model(index.model).config
    check_offered("cores", cores, config.budgets)
    check_offered("width", width, config.widths)
    steps, pane = (
        index.search(await client.image(id), schemas.parse_box(box), count, cores, width),
        pane and f"{pane} search",
    )
    return await client.run(explorer.model_queue, ("search", id, box, count, cores, width), steps, pane)


@router.get("/scaling", responses=error_responses(422))
async def get_scaling(client: ClientDep, model: schemas.ModelName) -> schemas.Scaling:
    """GFLOPs against resolution, counted: of a model at its extreme settings and of the dense ViT of the same size."""
    return analysis.count_scaling(client.explorer.find_model(model).config)


@router.get("/scaling/times", responses=error_responses(409, 422))
async def get_scaling_times(
    client: ClientDep, model: schemas.ModelName, size: schemas.ShortSide, pane: schemas.PaneId = None
) -> schemas.ScalingTimes:
    """Seconds of a square image for each line of /api/scaling, measured on this machine once it is idle."""
    explorer = client.explorer
    explorer.find_model(model)
    check_offered("size", size, SHORT_SIDES)
    steps, pane = explorer.time_lines(model, size), pane and f"{pane} scaling"
    return await client.run(explorer.model_queue, ("scaling", model, size), steps, pane, later=CHART)


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
        "width": {"enum": sorted({width for config in configs for width in config.widths})},
        "layer": {"maximum": max(config.depth for config in configs)},
        "picture": {"examples": list(explorer.images.samples)[:1]},
    }
    for path in schema["paths"].values():
        for parameter in path.get("get", {}).get("parameters", ()):
            parameter["schema"] |= values.get(parameter["name"], {}) if parameter["in"] == "query" else {}
    return schema
