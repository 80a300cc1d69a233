"""nixl's agent inside the worker, as pools in GPU memory have it, with the library itself."""

import numpy as np

from kvtransfer.agents.base import AgentSettings, Region
from kvtransfer.agents.nixl import NixlAgent
from kvtransfer.agents.nixl_reads import NixlCopy, NixlPeer
from tests.integration.transfer_rig import (
    BLOCKS,
    LOCAL,
    NUM_TOKENS,
    config,
    open_reader,
    open_source,
)
from tests.waiting import until, within


async def test_a_pull_moves_exactly_the_bytes_before_and_after_the_agent_is_replaced() -> None:
    settings = config("nixl", nixl_process="inside")
    async with open_source(settings) as source, open_reader(settings) as reader:
        assert (await reader.connect(source)).transport == "nixl"
        (transport,) = reader.endpoint.transports.values()
        for lease_id in ("before", "after"):
            content = source.fill(BLOCKS)
            ticket = source.lease(lease_id, BLOCKS, NUM_TOKENS, "reader")
            source.leases.announce(lease_id, NUM_TOKENS)
            request = reader.request(source, ticket, NUM_TOKENS, LOCAL)
            async with within(10):
                await reader.pairs.open_pull(request).run()
            assert reader.content(LOCAL) == content
            await reader.endpoint.rebuild("nixl")
            assert not transport.retiring
            await until(lambda: transport.ready)


def test_closing_a_peer_leaves_another_of_the_same_agent_alone() -> None:
    """Before names were counted: NIXL_ERR_NOT_FOUND on the newer one."""
    memory = [np.arange(1 << 16, dtype=np.uint8), np.zeros(1 << 16, dtype=np.uint8)]
    regions = [Region(each.ctypes.data, 4096, 16) for each in memory]
    source, reader = (
        NixlAgent(AgentSettings(name, "cma,tcp,cuda_copy", "lo"), region)
        for name, region in zip(("source.1", "reader.1"), regions, strict=True)
    )
    older, newer = (NixlPeer(reader, source.metadata, regions[0]) for _ in range(2))
    older.close()
    block_ids = np.array([1], dtype=np.int32)
    copy = NixlCopy(newer, block_ids, block_ids, 4096)
    is_done = copy.post()
    while not is_done:
        source.serve()
        is_done = copy.poll()
    assert (memory[1][4096:8192] == memory[0][4096:8192]).all()
    newer.close()
    for agent in (reader, source):
        agent.close()
        assert agent.is_gone
