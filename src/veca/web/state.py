"""The explorer's state: models, images and cached results, and the jobs that compute them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from veca.inspect.scaling import CallCost, measure_calls, measure_dense, random_image
from veca.model import Veca
from veca.web import analysis, schemas
from veca.web.analysis import DEFAULT_SIZE, Analysis, Reference
from veca.web.connections import Limits
from veca.web.folder import Folder
from veca.web.images import ImageStore, StoredImage, UploadReceiver
from veca.web.jobs import ByteCache, JobQueue, JobSteps, RequestError
from veca.web.searched import SearchedIndex

MEASURE, CHART, FOLDER = 1, 2, 3
"""How late jobs run that nobody waits for at once: see `JobQueue.submit`."""


def check_offered(name: str, value: float, offered: Sequence[float]) -> None:
    if value not in offered:
        raise RequestError(422, f"{name}={value:g}: choose one of {', '.join(f'{x:g}' for x in offered)}.")


class Explorer:
    """Models, images, cached results, and the queues that compute them: one thread runs models, another decodes."""

    def __init__(
        self,
        models: Mapping[str, Veca],
        max_jobs: int,
        limits: Limits,
        folder: Folder | None = None,
        index: SearchedIndex | None = None,
    ) -> None:
        self.models, self.folder, self.index = dict(models), folder, index
        self.images = ImageStore()
        self.uploads = UploadReceiver(limits)
        self.model_queue = JobQueue("veca-model", max_jobs)
        self.decode_queue = JobQueue("veca-decode", 36)
        # Responses built at once: each takes tens of megabytes, and built faster than sent they would pile up.
        self.response_slots = asyncio.Semaphore(2)
        self.analyses: ByteCache[Analysis] = ByteCache(2**29, lambda result: result.nbytes)
        self.layers: ByteCache[dict[str, NDArray[Any]]] = ByteCache(
            2**26, lambda arrays: sum(array.nbytes for array in arrays.values())
        )
        self._references: ByteCache[Reference] = ByteCache(2**26, lambda reference: reference.nbytes)
        # Wrapped in a tuple, since None is a result too: the dense ViT without timm.
        self._measured: ByteCache[tuple[CallCost | None]] = ByteCache(4096, lambda _: 1)

    def warm_up(self) -> None:
        """Run the model as the page will ask for it first: the first pass of a process is slow."""
        ids = [*(image.id for image in (self.folder.images if self.folder else ())), *self.images.samples]
        image = self.open_image(ids[0]) if ids else None
        if image is not None:
            name, model = next(iter(self.models.items()))
            setting = schemas.ViewSetting(image.id, name, max(model.config.budgets), DEFAULT_SIZE)
            self.model_queue.submit("warm-up", self.analyse(setting, image))

    def embed_folder(self) -> None:
        """Embed the images of the folder by every model, while nothing else is asked for."""
        for name, model in self.models.items() if self.folder else ():
            assert self.folder is not None
            self.model_queue.submit(("folder", name), self.folder.embed(name, model), later=FOLDER)

    def open_image(self, id: str) -> StoredImage | None:
        """An upload, a sample or an image of the folder or of the index; None: unknown or evicted."""
        if stored := self.images.get(id):
            return stored
        for source in (self.folder, self.index):
            if found := source and source.open(id):
                return self.images.store(found)
        return None

    def thumbnail(self, id: str) -> bytes | None:
        """A small JPEG of an image of the folder or of the index, if there is one."""
        return next((found for source in (self.folder, self.index) if source and (found := source.thumbnail(id))), None)

    def find_neighbours(self, name: str, image: StoredImage, count: int) -> JobSteps[schemas.Neighbours]:
        if self.folder is None:
            return schemas.Neighbours(neighbours=[], embedded=0, total=0)
        reference = yield from self.refer(name, image)
        nearest = self.folder.nearest(name, image.id, reference.cls, count)
        embedded = self.folder.count_embedded(name)
        return schemas.Neighbours(neighbours=nearest, embedded=embedded, total=len(self.folder))

    def check(self, setting: schemas.ViewSetting) -> Veca:
        """The model of a valid setting; `RequestError` for what this server does not offer."""
        config = self.find_model(setting.model).config
        check_offered("cores", setting.cores, config.budgets)
        check_offered("size", setting.size, schemas.SHORT_SIDES)
        check_offered("width", setting.width, config.widths)
        return self.models[setting.model]

    def find_model(self, name: str) -> Veca:
        if name not in self.models:
            raise RequestError(422, f"No model is called {name!r}; there are {', '.join(self.models)}.")
        return self.models[name]

    def analyse(self, setting: schemas.ViewSetting, image: StoredImage) -> JobSteps[Analysis]:
        if result := self.analyses.get(setting):
            return result
        model = self.models[setting.model]
        reference = yield from self.refer(setting.model, image)
        where = setting.cores, setting.size, setting.width
        result = analysis.analyse(model, image, *where, reference, asdict(setting))
        self.analyses.put(setting, result)
        return result

    def refer(self, name: str, image: StoredImage) -> JobSteps[Reference]:
        """What is fitted to an image once for a model."""
        reference = self._references.get((image.id, name))
        if reference is None:
            reference = Reference.fit(self.models[name], image)
            self._references.put((image.id, name), reference)
            yield  # a good moment to stop if the client is gone
        return reference

    def analyse_layer(
        self, setting: schemas.ViewSetting, number: int, image: StoredImage
    ) -> JobSteps[dict[str, NDArray[Any]]]:
        arrays = self.layers.get((setting, number))
        if arrays is None:
            result = yield from self.analyse(setting, image)
            arrays = analysis.analyse_layer(self.models[setting.model], result, number)
            self.layers.put((setting, number), arrays)
        return arrays

    def measure(self, setting: schemas.ViewSetting, image: StoredImage) -> JobSteps[schemas.MeasuredCosts]:
        images = analysis.model_input(self.models[setting.model], image, setting.size)
        veca = yield from self._measure(setting.model, images, setting.cores, setting.width)
        dense = yield from self._measure(setting.model, images)
        assert veca is not None
        return schemas.MeasuredCosts(
            veca=schemas.MeasuredCost(**veca._asdict()), dense=dense and schemas.MeasuredCost(**dense._asdict())
        )

    def time_lines(self, name: str, size: int) -> JobSteps[schemas.ScalingTimes]:
        """Seconds of a square image, for each line of the chart."""
        model = self.models[name]
        images, seconds = random_image(model, size), list[float | None]()
        for choice in analysis.scaling_choices(model.config):
            cost = yield from self._measure(name, images, *choice)
            seconds.append(cost and cost.seconds)
        return schemas.ScalingTimes(seconds=seconds)

    def _measure(
        self, name: str, images: Tensor, cores: int | None = None, width: float | None = None
    ) -> JobSteps[CallCost | None]:
        """The cost of a setting, measured once; without one, of the dense ViT: None where timm is not installed."""
        key = name, images.shape, cores, width
        cached = self._measured.get(key)
        if cached is None:
            model = self.models[name]
            if cores is None:
                cached = ((yield from measure_dense(model.config, images)),)
            else:
                run = partial(model, images, cores=cores, width=width)
                cached = ((yield from measure_calls([run], images.device)),)
            self._measured.put(key, cached)
        return cached[0]
