"""The explorer's state: models, images, cached results, and the queues that compute them, all bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request
from torch import Tensor

from veca.model import Veca
from veca.web.analysis import REFERENCE_SIZE, Analysis, analyse, model_input, reference_features
from veca.web.connections import Limits
from veca.web.costs import measure_dense, measure_veca
from veca.web.images import ImageStore, StoredImage
from veca.web.jobs import ByteCache, JobQueue, JobSteps, RequestError, T
from veca.web.schemas import SHORT_SIDES, MeasuredCost, MeasuredCosts, ViewSetting
from veca.web.security import address_of
from veca.web.uploads import UploadReceiver

MAX_JOBS = 32
MAX_RESULT_BYTES = 2**29
MAX_RESPONSES = 2
"""Responses built at once: each takes tens of megabytes, and built faster than sent they would pile up."""
MAX_DECODE_JOBS = 36


class Explorer:
    """Models run in one thread only, and images are decoded in another."""

    def __init__(self, models: Mapping[str, Veca], max_result_bytes: int, max_jobs: int, limits: Limits) -> None:
        self.models = dict(models)
        self.images = ImageStore()
        self._analyses: ByteCache[Analysis] = ByteCache(max_result_bytes, lambda analysis: analysis.nbytes)
        self._references: ByteCache[Tensor] = ByteCache(2**26, lambda features: features.nbytes)
        # Wrapped in a tuple, since None is a result too: the dense ViT without timm.
        self._measured: ByteCache[tuple[MeasuredCost | None]] = ByteCache(4096, lambda _: 1)
        self.model_queue = JobQueue("veca-model", max_jobs)
        self._decode_queue = JobQueue("veca-decode", MAX_DECODE_JOBS)
        self._uploads = UploadReceiver(limits)
        self._response_slots = asyncio.Semaphore(MAX_RESPONSES)

    def close(self) -> None:
        self.model_queue.close()
        self._decode_queue.close()

    def warm_up(self) -> None:
        """Run the model once, so that no client waits for the slow first pass of a process."""
        if self.images.samples:
            id, (name, model) = next(iter(self.images.samples)), next(iter(self.models.items()))
            image = self.images.get(id)
            assert image is not None
            setting = ViewSetting(id, name, max(model.config.budgets), REFERENCE_SIZE)
            self.model_queue.submit("warm-up", lambda: self._analyse(setting, image))

    def check(self, setting: ViewSetting) -> Veca:
        """The model of a valid setting; `RequestError` for what this server does not offer."""
        if setting.model not in self.models:
            raise RequestError(422, f"No model is called {setting.model!r}; there are {', '.join(self.models)}.")
        model = self.models[setting.model]
        for name, offered in (("cores", model.config.budgets), ("size", SHORT_SIDES)):
            if (value := getattr(setting, name)) not in offered:
                raise RequestError(422, f"{name}={value}: choose one of {', '.join(map(str, offered))}.")
        return model

    async def build_response(self, build: Callable[[], bytes]) -> bytes:
        """The bytes of a large response, built in a thread when it is its turn."""
        async with self._response_slots:
            return await asyncio.to_thread(build)

    async def upload(self, request: Request) -> StoredImage:
        async with self._uploads.receive(request, _client(request)) as data:
            # A key of its own: every upload is decoded, and `add` finds bytes that are already there.
            return await _run_job(self._decode_queue, request, object(), lambda: _once(partial(self.images.add, data)))

    async def image(self, request: Request, id: str) -> StoredImage:
        if stored := self.images.cache.get(id):
            return stored
        stored = await _run_job(self._decode_queue, request, id, lambda: _once(partial(self.images.get, id)))
        if stored is None:
            raise RequestError(404, "There is no such picture here any more: upload it again.")
        return stored

    async def analyse(self, request: Request, setting: ViewSetting, pane: str | None = None) -> Analysis:
        self.check(setting)
        if analysis := self._analyses.get(setting):
            return analysis
        image = await self.image(request, setting.picture)
        return await _run_job(self.model_queue, request, setting, lambda: self._analyse(setting, image), pane)

    async def measure(self, request: Request, setting: ViewSetting, pane: str | None = None) -> MeasuredCosts:
        """Time and memory, measured when the queue is empty."""
        self.check(setting)
        image = await self.image(request, setting.picture)
        pane = pane and f"{pane} measures"  # a view does not cancel a measurement of the same pane
        key = ("measure", setting)
        return await _run_job(self.model_queue, request, key, lambda: self._measure(setting, image), pane, later=True)

    def _analyse(self, setting: ViewSetting, image: StoredImage) -> JobSteps[Analysis]:
        if analysis := self._analyses.get(setting):
            return analysis
        model, reference_key = self.models[setting.model], (setting.picture, setting.model)
        reference = self._references.get(reference_key)
        if reference is None:
            reference = reference_features(model, image)
            self._references.put(reference_key, reference)
            yield  # a good moment to stop if the client is gone
        analysis = analyse(model, image, setting.cores, setting.size, reference, asdict(setting))
        self._analyses.put(setting, analysis)
        return analysis

    def _measure(self, setting: ViewSetting, image: StoredImage) -> JobSteps[MeasuredCosts]:
        model = self.models[setting.model]
        images = model_input(model, image, setting.size)
        key = setting.model, images.shape
        veca = yield from self._measure_once((*key, setting.cores), partial(measure_veca, model, images, setting.cores))
        dense = yield from self._measure_once((*key, "dense"), partial(measure_dense, model.config, images))
        assert veca is not None
        return MeasuredCosts(veca=veca, dense=dense)

    def _measure_once(self, key: Any, measure: Callable[[], JobSteps[Any]]) -> JobSteps[MeasuredCost | None]:
        cached = self._measured.get(key)
        if cached is None:
            cached = ((yield from measure()),)
            self._measured.put(key, cached)
        return cached[0]


async def _run_job(
    queue: JobQueue, request: Request, key: Any, make: Callable[[], JobSteps[T]], pane: str | None = None, **kwargs: Any
) -> T:
    """Run a job for the client of a request until it is done or the client has disconnected."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    host = request.client.host if request.client else ""
    pane = f"{host} {pane}" if pane else ""  # pages choose names for their panes: those of two machines may be equal
    return await queue.run(key, make, disconnected, client=_client(request), pane=pane, **kwargs)


def _client(request: Request) -> str:
    return address_of(request.client.host) if request.client else ""


def _once(call: Callable[[], T]) -> JobSteps[T]:
    """A job of one step."""
    return call()
    yield
