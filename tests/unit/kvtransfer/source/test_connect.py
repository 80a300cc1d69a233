"""How long a source that is asked how to read it waits for agents that are being rebuilt."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.errors import TransferInterruptedError
from diptych.timers import Timers
from diptych.v1 import common_pb2, kv_source_pb2
from kvtransfer.errors import TransportError
from kvtransfer.source.lease_table import LeaseTable
from kvtransfer.source.servicer import KVSourceServicer
from tests.virtual_time import run_virtually

TIMERS = Timers()
MEMORY = kv_source_pb2.MemoryDescriptor(agent_metadata=b"next")


class Agent:
    """A transport whose agent is back at a time of the loop."""

    def __init__(self, name: str, back_s: float) -> None:
        self.name = name
        self.back_s = back_s

    @property
    def ready(self) -> bool:
        return asyncio.get_running_loop().time() >= self.back_s

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor:
        if not self.ready:
            raise TransportError(f"{self.name} is being rebuilt")
        return MEMORY


class Endpoint:
    """As far as Connect asks for it."""

    incarnation = "source"
    layout = common_pb2.KVLayout(num_kv_heads=1)
    pool = kv_source_pb2.PoolPlace(memory_kind="DRAM")

    def __init__(self, *agents: Agent) -> None:
        self.transports = {agent.name: agent for agent in agents}
        self.thread = SimpleNamespace(call=self._call)

    async def _call(self, job: Callable[[], object]) -> object:
        return job()

    async def until_ready(self, agent: Agent, timeout_s: float) -> bool:
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, min(timeout_s, agent.back_s - now)))
        return agent.ready


class Answer:
    """Of one Connect, and when it came."""

    def __init__(self, *agents: Agent) -> None:
        self._endpoint = Endpoint(*agents)
        self.after_s = 0.0

    async def get(self) -> kv_source_pb2.ConnectResponse:
        servicer = KVSourceServicer(
            cast(Any, self._endpoint),
            LeaseTable(16, lambda _: 0),
            scratch=cast(Any, None),
            timers=TIMERS,
        )
        request = kv_source_pb2.ConnectRequest(
            layout=Endpoint.layout,
            pool=Endpoint.pool,
            transports=list(self._endpoint.transports),
        )
        try:
            return await servicer.Connect(request, cast(Any, None))
        finally:
            self.after_s = asyncio.get_running_loop().time()


@pytest.mark.parametrize("names", [("nixl",), ("nixl", "ucxx")])
def test_a_source_whose_agents_are_all_away_says_so_while_its_reader_still_listens(
    names: tuple[str, ...],
) -> None:
    """An answer that comes too late is a pair that failed: pulls under way do not wait for it."""
    answer = Answer(*(Agent(name, back_s=60.0) for name in names))
    with pytest.raises(TransferInterruptedError, match="is being rebuilt"):
        run_virtually(answer.get())
    assert 0 < answer.after_s <= TIMERS.lost_peer_s / 2


@pytest.mark.parametrize("back_s", [1.0, 2.0])
def test_an_agent_that_comes_back_in_time_is_told_of(back_s: float) -> None:
    answer = Answer(Agent("nixl", back_s))
    assert run_virtually(answer.get()).memory == MEMORY
    assert answer.after_s == back_s


def test_another_transport_has_its_turn_while_one_is_away() -> None:
    answer = Answer(Agent("nixl", back_s=60.0), Agent("inline", back_s=0.0))
    assert run_virtually(answer.get()).transport == "inline"
    assert answer.after_s <= TIMERS.lost_peer_s / 4
