"""What `veca serve` computes with: models, the pool that decodes, the batches, and places for images in its queue."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from veca.errors import ArgumentError
from veca.images import PATCH, Fit, ImageError, ImageTooLargeError, normalize
from veca.images.load import crop_pixels, open_for_fit
from veca.inspect.maps import check_finite
from veca.model import Veca
from veca.optimized import optimize, supports_fused, unfusable_reason
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

    def __init__(self, models: Mapping[str, Veca], settings: ServeSettings, limits: Limits) -> None:
        self.settings, self.models = settings, {name: _prepare(model, settings) for name, model in models.items()}
        self.device = next(iter(self.models.values())).norm.weight.device
        self.uploads = UploadReceiver(limits)
        self.metrics = Metrics(lambda: self.waiting)
        self.batcher: Batcher[BatchKey, Tensor, ServedFeatures] = Batcher(
            self._run, self._batch_size, settings.max_wait / 1000
        )
        self.responses = asyncio.Semaphore(2)  # built at once: those with patches take tens of megabytes each
        self._pool = ThreadPoolExecutor(usable_cpus(), "veca-decode")
        self._places: Counter[str] = Counter()  # taken by each address
        try:
            self.default = {name: self.resolve(RequestedSetting(name)) for name in self.models}
        except RequestError as error:
            raise ArgumentError(f"the default setting is none of the model's: {error.message}") from error

    def warm_up(self) -> None:
        """Run every model once: the first pass of a process is slow. An error of the model is raised."""
        image = torch.zeros(3, self.settings.size, self.settings.size, dtype=torch.uint8)
        for setting in self.default.values():
            for future in self.batcher.submit(_batch_key(setting, True, image), [image]):
                future.result()

    def close(self) -> None:
        """Finish what was accepted."""
        self.batcher.close()
        self._pool.shutdown(cancel_futures=True)

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
        name, given = asked.model or next(iter(self.models)), self.settings
        if name not in self.models:
            raise RequestError(422, f"No model is called {quoted(name)}; there are {', '.join(self.models)}.")
        config = self.models[name].config
        cores = asked.cores or given.cores or max(config.budgets)
        width = asked.width or given.width or max(config.widths)
        for what, value, offered in (("cores", cores, config.budgets), ("width", width, config.widths)):
            if value not in offered:
                choices = ", ".join(f"{each:g}" for each in sorted(offered))
                raise RequestError(422, f"{what}={value:g}: choose one of {choices}, those {name} was trained at.")
        return ServeSetting(name, cores, width, asked.size or given.size, asked.fit or given.fit)

    @contextmanager
    def places(self, address: str, images: int, size: int) -> Iterator[None]:
        """Places in the queue for the images of a request; `BusyError` where there is no room."""
        settings = self.settings
        wanted = images * max(1, -(-(size**2) // settings.size**2))
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

    async def decode(self, images: Sequence[bytes], setting: ServeSetting) -> list[Tensor]:
        """The pixels of all images, or the `ImageError` of the first that cannot be used."""
        loop = asyncio.get_running_loop()
        tasks = [loop.run_in_executor(self._pool, _decode, data, setting) for data in images]
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
        return await self._submit(setting, cls_only, await self.decode(images, setting))

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
        return max(1, self.settings.max_batch * self.settings.size**2 // (height * width))

    @torch.inference_mode()
    def _run(self, key: BatchKey, pixels: list[Tensor]) -> list[ServedFeatures]:
        model = self.models[key.model]
        self.metrics.batches.observe(len(pixels))
        with self.metrics.failures.count_exceptions():
            batch = normalize(torch.stack(pixels).to(self.device))
            with torch.autocast(self.device.type, torch.bfloat16, self.settings.precision == "bfloat16"):
                out = model(batch, cores=key.cores, cls_only=key.cls_only, width=key.width)
            check_finite(model, out.cores, out.patches, *[out.logits] * (out.logits is not None))
            cores, patches = out.cores.float().cpu(), out.patches.float().cpu()
            logits = None if out.logits is None else out.logits.float().cpu()
        self.metrics.images.labels(key.model).inc(len(pixels))
        grid = key.shape[1] // PATCH, key.shape[2] // PATCH
        return [
            ServedFeatures(
                grid, cores[i, 0].numpy(), cores[i].numpy(), patches[i].numpy(),
                None if logits is None else logits[i].numpy(),
            )
            for i in range(len(pixels))
        ]  # fmt: skip


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


def _decode(data: bytes, setting: ServeSetting) -> Tensor:
    image, crop, _ = open_for_fit(data, setting.size, setting.fit, decoder="cpu")
    if crop.width * crop.height > MAX_FITTED_PIXELS:
        made = f"fit={setting.fit} at {setting.size} px makes it {crop.width}×{crop.height}"
        raise ImageTooLargeError(f"{made}; at most {MAX_FITTED_PIXELS:,} pixels are allowed. Use fit=crop or native")
    return crop_pixels(crop, image, "cpu")
