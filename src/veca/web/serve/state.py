"""What `veca serve` computes with: models, the pool that decodes, the batches, and places for images in its queue."""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from veca.errors import ArgumentError
from veca.images import PATCH, Fit, ImageError, ImageTooLargeError, normalize
from veca.images.load import crop_pixels, open_for_fit
from veca.inspect.maps import check_finite
from veca.kernels.onednn import PackedWeights
from veca.model import Veca
from veca.optimized import optimize, supports_fused, unfusable_reason
from veca.predict.predictor import PredictSettings, validated_settings
from veca.search.index import Match, PixelBox, SearchIndex
from veca.search.store import SearchError
from veca.utils.device import usable_cpus
from veca.utils.text import quoted
from veca.web.connections import Limits
from veca.web.images import UploadReceiver
from veca.web.jobs import BusyError, RequestError
from veca.web.serve.batching import Batcher
from veca.web.serve.formats import ServedFeatures
from veca.web.serve.metrics import Metrics
from veca.web.serve.schemas import MAX_SIZE, RequestedSetting, ServeSettings

MAX_FITTED_PIXELS = 2 * MAX_SIZE**2
"""Of an image as the model sees it: fit "keep" and "pad" make one side longer than `size`."""


class ServeSetting(NamedTuple):
    """How an image is embedded."""

    model: str
    cores: int
    width: float
    size: int
    fit: Fit


class BatchKey(NamedTuple):
    """What the images of a batch have in common."""

    model: str
    cores: int
    width: float
    cls_only: bool
    shape: tuple[int, ...]


class Service:
    """Models on one device, and the way of an image through the server: decoded in a pool, batched, run, returned."""

    def __init__(
        self, models: Mapping[str, Veca], settings: ServeSettings, limits: Limits, index: SearchIndex | None = None
    ) -> None:
        self.settings, self.index = settings, index
        self.index_model = index.use_one_of(models) if index else ""
        if index and (size := index.description.settings.size) > MAX_SIZE:
            raise ArgumentError(f"{index.folder}: its images have {size} px; at most {MAX_SIZE} can be served")
        self.models = {name: _prepare(model, settings) for name, model in models.items()}
        self.device = next(iter(self.models.values())).norm.weight.device
        on_cpu = self.device.type == "cpu"
        self._packed = {name: PackedWeights(model) if on_cpu else nullcontext() for name, model in self.models.items()}
        self.uploads = UploadReceiver(limits)
        self.metrics = Metrics(lambda: self.waiting)
        # On a CPU two batches at a time: where the last part of one is computed, the next has begun.
        self.batcher: Batcher[BatchKey, Tensor, ServedFeatures] = Batcher(
            self._run, self._batch_size, settings.max_wait / 1000, threads=2 if on_cpu else 1
        )
        self.responses = asyncio.Semaphore(2)  # built at once: those with patches take tens of megabytes each
        self._scanning = asyncio.Semaphore(1)
        # Threads of PyTorch's that wait for work spin: those of a decoding thread would take the CPU of the model.
        self._pool = _start_single_threads(usable_cpus(), "veca-decode")
        self._model_pool = _start_single_threads(torch.get_num_threads(), "veca-part") if on_cpu else None
        self._places: Counter[str] = Counter()  # taken by each address
        try:
            self.default = {name: self._default_setting(name) for name in self.models}
        except RequestError as error:
            raise ArgumentError(f"the default setting is none of the model's: {error.message}") from error
        self.size = next(iter(self.default.values())).size
        """Places in the queue and batches are counted in images of this size."""

    def warm_up(self) -> None:
        """Run every model and search once: the first pass of a process is slow. An error of the model is raised."""
        for setting in self.default.values():
            image = torch.zeros(3, setting.size, setting.size, dtype=torch.uint8)
            for future in self.batcher.submit(_batch_key(setting, True, image), [image]):
                future.result()
        if self.index:
            self.index.rank(torch.ones(self.index.description.dim), 1)

    def close(self) -> None:
        """Finish what was accepted."""
        self.batcher.close()
        self._pool.shutdown(cancel_futures=True)
        if self._model_pool:
            self._model_pool.shutdown()

    @property
    def ready(self) -> bool:
        """Whether it takes images."""
        return self.batcher.is_open and not self.batcher.broken

    @property
    def waiting(self) -> int:
        """Places taken in the queue."""
        return self._places.total()

    def resolve(self, asked: RequestedSetting) -> ServeSetting:
        """The whole setting of a request; `RequestError` for one that this server does not offer."""
        name = asked.model or next(iter(self.models))
        if name not in self.models:
            raise RequestError(422, f"No model is called {quoted(name)}; there are {', '.join(self.models)}.")
        self._check_budget(name, asked.cores, asked.width)
        default = self.default[name]
        cores, width = asked.cores or default.cores, asked.width or default.width
        return ServeSetting(name, cores, width, asked.size or default.size, asked.fit or default.fit)

    def resolve_query(self, cores: int | None, width: float | None) -> ServeSetting:
        """The setting of a query of the index, which may choose its budget."""
        if self.index is None:
            raise RequestError(422, "There is no index to search; start the server with --index.")
        self._check_budget(self.index_model, cores, width)
        s = self.index.description.settings
        return ServeSetting(self.index_model, cores or s.cores or 0, width or s.width or 1.0, s.size, s.fit)

    def _check_budget(self, name: str, cores: int | None, width: float | None) -> None:
        config = self.models[name].config
        for what, value, offered in (("cores", cores, config.budgets), ("width", width, config.widths)):
            if value is not None and value not in offered:
                choices = ", ".join(f"{each:g}" for each in sorted(offered))
                raise RequestError(422, f"{what}={value:g}: choose one of {choices}, those {name} was trained at.")

    def _default_setting(self, name: str) -> ServeSetting:
        """What requests get that choose nothing: as the server was started, or as the model was validated."""
        given, model = self.settings, self.models[name]
        trained, budgets = validated_settings(model) or PredictSettings(cores=32, size=256), model.config.budgets
        size = trained.size
        if trained.fit == "native" and trained.max_patches:
            size = math.isqrt(trained.max_patches) * PATCH
        wanted = trained.cores if given.cores == "auto" else given.cores
        cores = max(budgets) if wanted is None or (given.cores == "auto" and wanted not in budgets) else wanted
        self._check_budget(name, cores, given.width)
        width = given.width or trained.width or max(model.config.widths)
        if (size := given.size or size) > MAX_SIZE:
            raise RequestError(422, f"{name} was validated at {size} px, of at most {MAX_SIZE}; choose a --size.")
        return ServeSetting(name, cores, width, size, given.fit or trained.fit)

    @contextmanager
    def places(self, address: str, images: int, size: int) -> Iterator[None]:
        """Places in the queue for the images of a request; `BusyError` where there is no room."""
        settings = self.settings
        wanted = images * max(1, -(-(size**2) // self.size**2))
        if images == 1:  # the largest size is always taken
            wanted = min(wanted, settings.queue_per_client)
        if wanted > settings.queue_per_client:
            rule = f"{wanted} places of the queue; a request may take {settings.queue_per_client}"
            raise RequestError(413, f"{images} images of {size} px take {rule}: send fewer or smaller ones.")
        if self.waiting + wanted > settings.queue or self._places[address] + wanted > settings.queue_per_client:
            raise BusyError("The queue of images is full; try again in a moment.")
        self._places[address] += wanted
        try:
            yield
        finally:
            self._places[address] -= wanted
            if not self._places[address]:
                del self._places[address]

    async def decode(self, images: Sequence[bytes], load: Callable[[bytes], Tensor]) -> list[Tensor]:
        """The pixels of all images, or the `ImageError` of the first that cannot be used."""
        loop = asyncio.get_running_loop()
        tasks = [loop.run_in_executor(self._pool, load, data) for data in images]
        pixels = []
        try:
            for number, task in enumerate(tasks, start=1):
                try:
                    pixels.append(await task)
                except ImageError as error:
                    where = f"image {number} of {len(images)}: " if len(images) > 1 else ""
                    raise type(error)(where + str(error).removeprefix("<bytes>: ")) from error
        finally:
            for task in tasks:
                task.cancel()
        return pixels

    async def compute(self, images: Sequence[bytes], setting: ServeSetting, cls_only: bool) -> list[ServedFeatures]:
        """Features of all images of a request, in their order."""
        return await self._submit(setting, cls_only, await self.decode(images, partial(_load, setting)))

    async def search(
        self, images: Sequence[bytes], setting: ServeSetting, top: int, box: PixelBox | None
    ) -> list[list[Match]]:
        """The images of the index that are most like each image of a request, or like a region of it."""
        index = self.index
        assert index is not None
        dense = box is not None and index.has_regions
        found = await self._submit(setting, not dense, await self.decode(images, partial(_load_query, index, box)))
        features = [torch.from_numpy(each.patches.mean(0) if dense else each.cls) for each in found]
        # In a thread, one request at a time: a scan takes all CPUs
        async with self._scanning:
            return await asyncio.to_thread(lambda: [index.rank(each, top, by_region=dense) for each in features])

    async def _submit(self, setting: ServeSetting, cls_only: bool, pixels: Sequence[Tensor]) -> list[ServedFeatures]:
        queued = []
        for each in pixels:
            queued += self.batcher.submit(_batch_key(setting, cls_only, each), [each])
        futures = [asyncio.wrap_future(future) for future in queued]
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:
                future.cancel()

    def _batch_size(self, key: BatchKey) -> int:
        """As many patches as `max_batch` images of the default size have."""
        _, height, width = key.shape
        return max(1, self.settings.max_batch * self.size**2 // (height * width))

    def _run(self, key: BatchKey, pixels: list[Tensor]) -> list[ServedFeatures]:
        """A batch; on a CPU in parts, each by one thread: all threads in one layer would wait for those that decode."""
        pool, found = self._model_pool, list[ServedFeatures]()
        self.metrics.batches.observe(len(pixels))
        with self.metrics.failures.count_exceptions(), self._packed[key.model]:
            if pool is None or len(pixels) == 1:
                found = self._embed(key, pixels)
            else:
                step = -(-len(pixels) // torch.get_num_threads())
                parts = [pixels[start : start + step] for start in range(0, len(pixels), step)]
                for task in [pool.submit(copy_context().run, self._embed, key, part) for part in parts]:
                    found += task.result()
        self.metrics.images.labels(key.model).inc(len(pixels))
        return found

    @torch.inference_mode()
    def _embed(self, key: BatchKey, pixels: Sequence[Tensor]) -> list[ServedFeatures]:
        model = self.models[key.model]
        batch = normalize(torch.stack(list(pixels)).to(self.device))
        with torch.autocast(self.device.type, torch.bfloat16, self.settings.precision == "bfloat16"):
            out = model(batch, cores=key.cores, cls_only=key.cls_only, width=key.width)
        check_finite(model, out.cores, out.patches, *[out.logits] * (out.logits is not None))
        cores, patches = out.cores.float().cpu(), out.patches.float().cpu()
        logits = None if out.logits is None else out.logits.float().cpu()
        grid = key.shape[1] // PATCH, key.shape[2] // PATCH
        return [
            ServedFeatures(
                grid, cores[i, 0].numpy(), cores[i].numpy(), patches[i].numpy(),
                None if logits is None else logits[i].numpy(),
            )
            for i in range(len(pixels))
        ]  # fmt: skip


def _start_single_threads(count: int, name: str) -> ThreadPoolExecutor:
    """So many threads, in each of which PyTorch uses no others."""
    setting, barrier = torch.get_num_threads(), threading.Barrier(count)

    def start() -> None:
        torch.get_num_threads()  # a thread takes over the setting of the process when it first asks for it
        torch.set_num_threads(1)
        barrier.wait()

    pool = ThreadPoolExecutor(count, name, initializer=start)
    wait([pool.submit(torch.get_num_threads) for _ in range(count)])
    torch.set_num_threads(setting)  # for threads that start later
    return pool


def _prepare(model: Veca, settings: ServeSettings) -> Veca:
    """The model by fused kernels where the device has them, in eval mode."""
    if model.config.patch_size != PATCH:
        raise ArgumentError(f"the model has patches of {model.config.patch_size} pixels; images are cut into {PATCH}")
    device, dtype = model.norm.weight.device, getattr(torch, settings.precision)
    if supports_fused(model.config, device, dtype) and not unfusable_reason(model):
        return optimize(model, dtype=dtype, cuda_graphs=False)  # batches have any size: a graph would seldom be reused
    return model.eval()


def _batch_key(setting: ServeSetting, cls_only: bool, pixels: Tensor) -> BatchKey:
    return BatchKey(setting.model, setting.cores, setting.width, cls_only, tuple(pixels.shape))


def _load(setting: ServeSetting, data: bytes) -> Tensor:
    image, crop, _ = open_for_fit(data, setting.size, setting.fit, decoder="cpu")
    if crop.width * crop.height > MAX_FITTED_PIXELS:
        made = f"fit={setting.fit} at {setting.size} px makes it {crop.width}×{crop.height}"
        raise ImageTooLargeError(f"{made}; at most {MAX_FITTED_PIXELS:,} pixels are allowed. Use fit=crop or native")
    return crop_pixels(crop, image, "cpu")


def _load_query(index: SearchIndex, box: PixelBox | None, data: bytes) -> Tensor:
    try:
        return index.load_query(data, box, MAX_FITTED_PIXELS)
    except SearchError as error:  # a box that is not within the image
        raise RequestError(422, str(error)) from error
