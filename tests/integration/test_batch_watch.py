"""A watch of a batch whose server breaks it off again and again, over real gRPC."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from diptych.client import BatchClient, BatchState
from diptych.client import retries as retries_of_clients
from diptych.errors import DiptychError, WorkerDrainingError
from diptych.rpc.server import Context, make_server
from diptych.v1 import batches_pb2 as public
from tests.waiting import within

SERVICE = public.DESCRIPTOR.services_by_name["Batches"].full_name


class Breaking:
    """Says how the batch is, and breaks off."""

    def __init__(self, num_completed: Callable[[int], int]) -> None:
        """``num_completed``: of the n-th watch, from 1 on."""
        self.num_asked = 0
        self.status = 0
        self._num_completed = num_completed

    async def watch(
        self, request: public.WatchBatchRequest, context: Context
    ) -> AsyncIterator[public.WatchBatchResponse]:
        self.num_asked += 1
        num_completed = self._num_completed(self.num_asked)
        batch = public.Batch(id=request.id, num_lines=9, num_completed=num_completed)
        batch.status = self.status  # type: ignore[assignment]
        yield public.WatchBatchResponse(batch=batch)
        if num_completed < batch.num_lines:
            raise WorkerDrainingError("it is over")


@asynccontextmanager
async def serving(servicer: Breaking) -> AsyncIterator[BatchClient]:
    server = make_server()
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.watch,
        request_deserializer=public.WatchBatchRequest.FromString,
        response_serializer=public.WatchBatchResponse.SerializeToString,
    )
    methods = grpc.method_handlers_generic_handler(SERVICE, {"WatchBatch": handler})
    server.add_generic_rpc_handlers((methods,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with BatchClient(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        await server.stop(0)


async def watch_into(seen: list[BatchState], client: BatchClient) -> None:
    async for state in client.watch("batch_a"):
        seen += [state]


async def test_a_status_that_has_no_name_here_is_told_as_unknown() -> None:
    """A newer server may have more of them."""
    servicer = Breaking(lambda n: 9)
    servicer.status = 99
    async with serving(servicer) as client, within(30):
        state = await anext(aiter(client.watch("batch_a")))
    assert (state.status, state.num_completed) == ("unknown", 9)


async def test_it_ends_where_the_batch_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries_of_clients, "_MAX_STILL_S", 1.0)
    servicer, seen = Breaking(lambda n: 3), list[BatchState]()
    async with serving(servicer) as client, within(30):
        with pytest.raises(DiptychError) as caught:
            await watch_into(seen, client)
    assert [state.num_completed for state in seen] == [3], "told once"
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.reason == WorkerDrainingError.reason
    assert caught.value.message.startswith(
        f"batch_a: its watch broke off {servicer.num_asked} times in "
    )
    assert caught.value.message.endswith(
        "in which the batch did not change, the last time with: it is over"
    )
    assert 2 < servicer.num_asked < 12, "the pauses grow"


async def test_it_goes_on_while_the_batch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries_of_clients, "_MAX_STILL_S", 1.0)
    async with serving(Breaking(lambda n: n)) as client, within(30):
        seen = [state.num_completed async for state in client.watch("batch_a")]
    assert seen == list(range(1, 10))
