"""Models, pictures and what was found in them: all the page asks for, with bounds on everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from starlette.requests import Request
from torch import Tensor

from veca.model import Veca
from veca.web.analysis import REFERENCE, Analysis, analyse, input_of, reference
from veca.web.connections import LIMITS, Limits
from veca.web.costs import Measure, measure_dense, measure_veca
from veca.web.images import Picture, Pictures
from veca.web.jobs import Kept, ProblemError, Steps, Worker
from veca.web.security import address_of
from veca.web.uploads import Uploads

SIZES = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Short sides in pixels."""
MOST_JOBS = 32
MOST_RESULTS = 2**29
"""Bytes of results that are kept."""
MOST_RESPONSES = 2
"""Responses that are made at once: each takes tens of megabytes, and made faster than sent they would pile up."""
MOST_OPENINGS = 36
"""Pictures that wait to be opened."""


class Setting(NamedTuple):
    picture: str
    model: str
    cores: int
    size: int


class Explorer:
    """The models are only ever asked from one thread, pictures only opened in another."""

    def __init__(
        self,
        models: Mapping[str, Veca],
        kept: int = MOST_RESULTS,
        most_jobs: int = MOST_JOBS,
        limits: Limits = LIMITS,
    ) -> None:
        self.models = dict(models)
        self.pictures = Pictures()
        self._analyses: Kept[Analysis] = Kept(kept, lambda found: found.nbytes)
        self._references: Kept[Tensor] = Kept(2**26, lambda found: found.nbytes)
        self._measures: Kept[Measure] = Kept(4096, lambda found: 1)
        self.worker = Worker("veca-model", most_jobs)
        self._opener = Worker("veca-pictures", MOST_OPENINGS)
        self._uploads = Uploads(limits)
        self._making = asyncio.Semaphore(MOST_RESPONSES)

    def close(self) -> None:
        self.worker.close()
        self._opener.close()

    def warm_up(self) -> None:
        """The first pass of a process takes longer than any other: let it be nobody's."""
        if self.pictures.samples:
            id, (name, model) = next(iter(self.pictures.samples)), next(iter(self.models.items()))
            setting = Setting(id, name, max(model.config.budgets), REFERENCE)
            picture = self.pictures.get(id)
            assert picture is not None
            self.worker.submit("warm", lambda: self._look(setting, picture))

    def check(self, setting: Setting) -> Veca:
        """The model of a setting that can be had."""
        _, name, cores, size = setting
        if name not in self.models:
            raise ProblemError(422, f"No model is called {name!r}; there are {', '.join(self.models)}.")
        budgets = self.models[name].config.budgets
        if cores not in budgets:
            trained = ", ".join(map(str, budgets))
            raise ProblemError(422, f"cores={cores}: {name} was trained at budgets of {trained}; choose one of these.")
        if size not in SIZES:
            raise ProblemError(422, f"size={size}: choose one of {', '.join(map(str, SIZES))}.")
        return self.models[name]

    async def make(self, response: Callable[[], bytes]) -> bytes:
        """The bytes of a large response, made in a thread when it is their turn."""
        async with self._making:
            return await asyncio.to_thread(response)

    async def upload(self, request: Request) -> Picture:
        client = _client(request)
        async with self._uploads.receive(request, client) as data:
            return await self._opener.run(object(), lambda: self._open(data), partial(_gone, request), client=client)

    async def picture(self, request: Request, id: str) -> Picture:
        if held := self.pictures.held(id):
            return held
        return await self._opener.run(
            ("find", id), lambda: self._find(id), partial(_gone, request), client=_client(request)
        )

    async def look(self, request: Request, setting: Setting, pane: str | None = None) -> Analysis:
        self.check(setting)
        if found := self._analyses.get(setting):
            return found
        picture = await self.picture(request, setting.picture)
        return await self.worker.run(
            setting, lambda: self._look(setting, picture), partial(_gone, request),
            client=_client(request), pane=_pane(request, pane),
        )  # fmt: skip

    async def measure(self, request: Request, setting: Setting, pane: str | None = None) -> tuple[Measure, Measure]:
        """Of VECA, and of the dense ViT; when nothing else is to do."""
        self.check(setting)
        picture = await self.picture(request, setting.picture)
        return await self.worker.run(
            ("measure", setting), lambda: self._measure(setting, picture), partial(_gone, request),
            client=_client(request), pane=_pane(request, pane and f"{pane} measures"), later=True,
        )  # fmt: skip

    def _open(self, data: bytes) -> Steps[Picture]:
        return self.pictures.add(data)
        yield

    def _find(self, id: str) -> Steps[Picture]:
        found = self.pictures.get(id)
        if found is None:
            raise ProblemError(404, "There is no such picture here any more: upload it again.")
        return found
        yield

    def _look(self, setting: Setting, picture: Picture) -> Steps[Analysis]:
        if found := self._analyses.get(setting):
            return found
        model, fitted = self.models[setting.model], (setting.picture, setting.model)
        like = self._references.get(fitted)
        if like is None:
            like = reference(model, picture)
            self._references.put(fitted, like)
            yield
        found = analyse(model, picture, setting.cores, setting.size, like, setting._asdict())
        self._analyses.put(setting, found)
        return found

    def _measure(self, setting: Setting, picture: Picture) -> Steps[tuple[Measure, Measure]]:
        model = self.models[setting.model]
        images = input_of(model, picture, setting.size)
        where = (setting.model, images.shape)
        ours = self._measures.get((where, setting.cores))
        if ours is None:
            ours = yield from measure_veca(model, images, setting.cores)
            self._measures.put((where, setting.cores), ours)
        dense = self._measures.get((where, "dense"))
        if dense is None:
            dense = yield from measure_dense(model.config, images)
            self._measures.put((where, "dense"), dense)
        return ours, dense


def _client(request: Request) -> str:
    return address_of(request.client.host) if request.client else ""


def _pane(request: Request, pane: str | None) -> str | None:
    """Pages choose names for their panes; those of two machines must not meet."""
    return pane and f"{request.client.host if request.client else ''} {pane}"


async def _gone(request: Request) -> None:
    """Returns when the client is no longer there."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
