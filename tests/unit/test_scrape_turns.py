"""What a scrape takes of the event loop. No sockets."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.process import ProcessConfig
from diptych.service_host import ServiceHost


@pytest.mark.parametrize("fails", [False, True])
async def test_a_scrape_takes_one_turn_of_the_loop(fails: bool) -> None:
    """Where each turn is long it would wait for every other one."""

    def read() -> float:
        if fails:
            raise ValueError("unreadable")
        return 7.0

    host = ServiceHost(ProcessConfig())
    host.metrics.read_gauge("read", "Read.", read)
    turns: Queue[Callable[[], None]] = Queue()
    loop = SimpleNamespace(call_soon_threadsafe=lambda run, *given: turns.put(partial(run, *given)))
    host.registry.loop = cast(Any, loop)
    with ThreadPoolExecutor(1) as threads:
        scrape = threads.submit(lambda: [metric.name for metric in host.registry.collect()])
        turns.get(timeout=10)()
        if fails:
            with pytest.raises(ValueError, match="unreadable"):
                scrape.result(10)
        else:
            assert "diptych_read" in scrape.result(10)
    assert turns.empty()
