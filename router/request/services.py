"""What all sessions of a router share."""

import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from router.cluster.members import Cluster
from router.config import RouterConfig
from router.placement.engine_seconds import RecentRates
from router.placement.output_lengths import OutputLengths
from router.placement.policy import Policy
from router.placement.waiting_room import WaitingRoom

Spawn = Callable[[Coroutine[Any, Any, None], str], None]
"""Runs a task, by that name, that outlives the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The router's parts that a session reaches; all live as long as the router."""

    config: RouterConfig
    cluster: Cluster
    policy: Policy
    room: WaitingRoom
    lengths: OutputLengths
    rates: RecentRates = field(default_factory=lambda: RecentRates(time.monotonic))
    incarnation: str
    sequence_ids: Iterator[int]
    spawn: Spawn
