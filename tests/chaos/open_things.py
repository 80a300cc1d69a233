"""File descriptors and tasks that the processes of a cluster have open."""

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from tests.cluster import Cluster

_LOOKED_S = 1.0
_MAX_MORE_FDS = 3  # a connection that is made anew meanwhile


class OpenThings(NamedTuple):
    """Of one process, at rest."""

    num_fds: int
    num_tasks: int  # of asyncio


async def open_things(cluster: Cluster) -> dict[str, OpenThings]:
    """By process: the least of each seen during a quiet second."""
    seen: dict[str, OpenThings] = {}
    deadline = time.monotonic() + _LOOKED_S
    while time.monotonic() < deadline:
        for process in cluster.processes:
            now = OpenThings(process.num_fds(), int(process.metric("diptych_asyncio_tasks")))
            before = seen.get(process.name, now)
            seen[process.name] = OpenThings(*map(min, before, now))
        await asyncio.sleep(0.1)
    return seen


def check_no_more(before: Mapping[str, OpenThings], after: Mapping[str, OpenThings]) -> None:
    """No process has more open than before, but for a few file descriptors."""
    for name, now in after.items():
        then = before[name]
        assert now.num_fds <= then.num_fds + _MAX_MORE_FDS, f"{name}: {then} -> {now}"
        assert now.num_tasks <= then.num_tasks, f"{name}: {then} -> {now}"
