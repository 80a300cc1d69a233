"""What the HTTP API tells of the router: its metrics."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import Request

from router.frontend.admission import Admission
from router.frontend.cluster_view import ClusterView
from router.frontend.http.service import ServiceAnswers

REQUEST = Request({"type": "http", "headers": []})


class Slow(Collector):
    """Counts who reads it at the same time; nobody is done before ``may_end``."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun = threading.Event()
        self.num_scrapes = 0
        self.most_at_once = 0
        self._num_running = 0

    def collect(self) -> Iterator[Metric]:
        self.num_scrapes += 1
        self._num_running += 1
        self.most_at_once = max(self.most_at_once, self._num_running)
        self.begun.set()
        self.may_end.wait(10.0)
        self._num_running -= 1
        return iter(())


def answers(registry: CollectorRegistry | None) -> ServiceAnswers:
    admission, view = cast(Admission, SimpleNamespace()), cast(ClusterView, SimpleNamespace())
    return ServiceAnswers(admission, registry, lambda: True, view)


async def test_metrics_are_gathered_for_one_at_a_time() -> None:
    slow, registry = Slow(), CollectorRegistry(auto_describe=False)
    registry.register(slow)
    slow.num_scrapes = 0
    service = answers(registry)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(service.metrics(REQUEST))
        await asyncio.to_thread(slow.begun.wait, 10.0)
        slow.may_end.set()
    assert (slow.num_scrapes, slow.most_at_once) == (3, 1)


async def test_a_version_that_nobody_has_gets_the_plain_format() -> None:
    headers = [(b"accept", b"application/openmetrics-text; version=abc")]
    request = Request({"type": "http", "headers": headers})
    answer = await answers(CollectorRegistry()).metrics(request)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_metrics_may_be_left_to_their_own_port() -> None:
    with pytest.raises(HTTPException) as caught:
        await answers(None).metrics(REQUEST)
    assert caught.value.status_code == 404
