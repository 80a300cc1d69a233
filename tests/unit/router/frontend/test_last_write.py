"""An answer over gRPC that fails while a response is on its way to its client."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import pytest

from diptych.errors import WorkerLostError
from diptych.rpc.server import Context
from router.frontend.generator import Generator
from router.frontend.grpc import InferenceServicer
from router.generation.answer import Delta, GenerationEvent
from router.generation.request import GenerationRequest, TokenPrompt
from tests.virtual_time import run_virtually


class Call:
    """Stands for gRPC's context: a client takes a response after a while."""

    def __init__(self, taken_s: float) -> None:
        self._taken_s = taken_s
        self.num_written = 0

    async def write(self, message: object) -> None:
        await asyncio.sleep(self._taken_s)
        self.num_written += 1


class Failing:
    """Stands for the generator: one event, and its answer fails as that is written."""

    async def generate(
        self, request: GenerationRequest, *, give_up: Callable[[], None], **_: object
    ) -> AsyncGenerator[GenerationEvent, None]:
        asyncio.get_running_loop().call_later(0.01, give_up)
        yield Delta("a", [7], 0, [])
        raise WorkerLostError("gone")


def fail_while_written(taken_s: float) -> Call:
    generator, call, nothing = cast(Generator, Failing()), Call(taken_s), cast(Any, None)
    servicer = InferenceServicer(
        nothing, generator, nothing, nothing, nothing, max_request_bytes=1, handed=nothing
    )
    request = GenerationRequest(prompt=TokenPrompt((1,)), num_bytes=1)

    async def answer() -> None:
        with pytest.raises(WorkerLostError):
            await servicer._answer(request, None, (), cast(Context, call))

    run_virtually(answer())
    return call


def test_a_response_on_its_way_is_not_broken_off() -> None:
    """gRPC would send no status after it: its client would wait until its own deadline."""
    assert fail_while_written(taken_s=0.02).num_written == 1


def test_one_that_nobody_takes_is_given_up() -> None:
    assert fail_while_written(taken_s=3600.0).num_written == 0
