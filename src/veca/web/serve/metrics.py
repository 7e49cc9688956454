"""Metrics of `veca serve` for Prometheus, and the middleware that counts requests."""

import time
from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Those of one server, in a registry of their own."""

    def __init__(self, count_waiting: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "veca_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "veca_request_seconds", "Seconds from the headers of a request to the end of its response.", ["route"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.images = Counter("veca_images", "Images that the model was run on.", ["model"], registry=self.registry)
        self.batches = Histogram(
            "veca_batch_images", "Images of a forward pass.", buckets=_BATCHES, registry=self.registry
        )
        self.failures = Counter("veca_batch_failures", "Forward passes that failed.", registry=self.registry)
        waiting = Gauge("veca_queue_places", "Places taken in the queue of images.", registry=self.registry)
        waiting.set_function(count_waiting)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class MetricsMiddleware:
    """ASGI middleware that counts and times every request; paths that are no route are counted as "other"."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Collection[str]) -> None:
        self.app, self.metrics, self.routes = app, metrics, frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self.routes else "other"
        start, status = time.perf_counter(), "none"  # none: the client was gone before

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - start)
