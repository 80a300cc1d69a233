"""What is told of a prompt comes once and whole, whatever becomes of who tells it."""

import math

import pytest

from diptych.errors import ModelChangedError, NoWorkerError, QueueTimeoutError
from diptych.v1 import common_pb2, prefill_pb2
from router.generation.answer import KVPath
from router.request import events
from router.request.prompt_told import PromptTold, ToldPart, WantedLogprobs, WantedStates
from tests.unit.router.request.world import PROMPT, TIMERS, World, worker

END = len(PROMPT)


def part(position: int, *values: float) -> common_pb2.PromptLogprobs:
    logprobs = [common_pb2.TokenLogprobs(logprob=value) for value in values]
    return common_pb2.PromptLogprobs(position=position, logprobs=logprobs)


class Told:
    """What came out, by position."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, told: ToldPart) -> None:
        assert isinstance(told, common_pb2.PromptLogprobs)
        assert told.position == 1 + len(self.values)
        self.values += [each.logprob for each in told.logprobs]


def world_that_tells() -> tuple[World, Told]:
    told = Told()
    world = World(told=WantedLogprobs(1, END, 2), prompt_sink=told)
    return world.begin(), told


def tell(world: World, position: int, *values: float) -> None:
    world.on(events.PromptTold(world.lease.sequence_id, part(position, *values)))


def test_nothing_is_told_twice_and_nothing_beyond_what_is_wanted() -> None:
    told = Told()
    state = PromptTold(WantedLogprobs(1, 5, 0), told)
    assert state.accept(part(1, 1, 2))
    assert state.accept(part(1, 9, 9)), "known"
    assert not state.accept(part(4, 4)), "3 is missing"
    assert state.missing == WantedLogprobs(3, 5, 0)
    assert state.accept(part(2, 9, 3, 4, 5))
    assert told.values == [1, 2, 3, 4]
    assert state.missing is None
    assert state.accept(part(1, 9))


@pytest.mark.parametrize(
    "wrong",
    [
        common_pb2.TokenLogprobs(logprob=math.nan),
        common_pb2.TokenLogprobs(logprob=math.inf),
        common_pb2.TokenLogprobs(top_token_ids=[1], top_logprobs=[math.nan]),
        common_pb2.TokenLogprobs(top_token_ids=[1, 2], top_logprobs=[-1]),
    ],
)
def test_log_probabilities_that_are_none_are_not_told(wrong: common_pb2.TokenLogprobs) -> None:
    told = Told()
    state = PromptTold(WantedLogprobs(1, 5, 0), told)
    least = common_pb2.TokenLogprobs(logprob=-math.inf)
    assert not state.accept(common_pb2.PromptLogprobs(position=1, logprobs=[least, wrong]))
    assert told.values == []
    assert state.missing == WantedLogprobs(1, 5, 0)
    assert state.accept(common_pb2.PromptLogprobs(position=1, logprobs=[least]))


@pytest.mark.parametrize("values", [(), (1, 2), (1, 2, 3, 4), (1, math.nan, 3), (1, 2, math.inf)])
def test_a_vector_of_another_length_or_without_a_number_is_not_told(
    values: tuple[float, ...],
) -> None:
    heard: list[ToldPart] = []
    state = PromptTold(WantedStates(common_pb2.POOLING_MEAN, 3), heard.append)
    assert not state.accept(prefill_pb2.PooledStates(values=values))
    assert state.missing is not None
    assert not heard
    right = prefill_pb2.PooledStates(values=[1, 2, 3])
    assert state.accept(right)
    assert heard == [right]


def test_only_a_prefill_worker_is_asked_even_for_a_prompt_that_decode_has_cached() -> None:
    told = Told()
    world = World(told=WantedLogprobs(1, END, 0), prompt_sink=told, believed_cached=("d1",)).begin()
    assert world.lease
    world.accept()
    tell(world, 1, 1, 2, 3, 4)
    world.reserve()
    world.grant()
    world.first()
    world.prove()
    assert world.started
    assert told.values == [1, 2, 3, 4]
    assert world.machine.attempt.kv_path is KVPath.DISAGGREGATED


def test_another_worker_tells_what_the_first_did_not() -> None:
    world, told = world_that_tells()
    world.accept()
    tell(world, 1, 1, 2)
    world.lose_lease(NoWorkerError("gone"))
    assert world.lease.worker == worker("p2")
    assert world.machine.untold == WantedLogprobs(3, END, 2)
    world.accept()
    tell(world, 3, 3, 4)
    assert world.machine.untold is None
    assert told.values == [1, 2, 3, 4]


@pytest.mark.parametrize("served", ["a", "b"])
def test_what_is_told_of_a_prompt_is_of_one_model(served: str) -> None:
    """Of what the first worker told the next one is not asked again."""
    world, told = world_that_tells()
    world.accept()
    tell(world, 1, 1, 2)
    world.served = served
    world.decodes.clear()
    world.lose_reservation()
    world.decodes.append("d2")
    world.pump(room_made=True)
    if served == "b":
        assert isinstance(world.outcome, ModelChangedError)
        assert told.values == [1, 2]
        world.check_nothing_is_held()
        return
    world.accept()
    tell(world, 3, 3, 4)
    assert told.values == [1, 2, 3, 4]
    assert world.machine.model_digest == "a"


def test_before_any_of_a_prompt_is_told_others_may_tell_all_of_it() -> None:
    world, told = world_that_tells()
    world.accept()
    world.served = "b"
    world.decodes.clear()
    world.lose_reservation()
    world.decodes.append("d2")
    world.pump(room_made=True)
    world.accept()
    tell(world, 1, 1, 2, 3, 4)
    assert told.values == [1, 2, 3, 4]
    assert world.machine.model_digest == "b"


def test_a_prompt_of_which_nothing_is_wanted_has_no_begin() -> None:
    told = Told()
    state = PromptTold(None, told)
    assert state.accept(part(1, 1))
    assert not state.has_begun
    state = PromptTold(WantedStates(common_pb2.POOLING_MEAN), lambda part: None)
    assert not state.has_begun
    assert state.accept(prefill_pb2.PooledStates(values=[1.0]))
    assert state.has_begun


def test_without_all_of_it_the_decode_worker_does_not_go_on_alone() -> None:
    """Its KV is whole, and would do for the tokens."""
    world, told = world_that_tells()
    world.bind()
    world.prove()
    tell(world, 1, 1)
    world.lose_lease()
    assert not world.started
    assert world.lease.worker == worker("p2")
    world.accept()
    tell(world, 2, 2, 3, 4)
    assert told.values == [1, 2, 3, 4]


def test_once_it_is_told_the_decode_worker_may_go_on_alone() -> None:
    world, _ = world_that_tells()
    world.bind()
    world.prove()
    tell(world, 1, 1, 2, 3, 4)
    world.lose_lease()
    assert world.started


def test_where_one_worker_is_all_it_is_told_that_others_were_not_before_it() -> None:
    """It waits for another one: what tells of a prompt does not decode the rest."""
    world = World(("w",), ("w",), told=WantedLogprobs(1, END, 2)).begin()
    world.pass_time(TIMERS.no_worker_s - 1.0)
    assert world.queued
    assert world.outcome is None
    world.pass_time(1.0)
    assert isinstance(world.outcome, NoWorkerError)
    assert "another decodes" in world.outcome.message
    world = World(("w",), ("w",), told=WantedLogprobs(1, END, 2), max_tokens=1)
    world.is_full = True
    world.begin().pass_time(TIMERS.no_worker_s)
    assert isinstance(world.outcome, QueueTimeoutError)


@pytest.mark.parametrize("position", [2, 4])
def test_a_worker_that_skips_some_is_left(position: int) -> None:
    world, told = world_that_tells()
    world.accept()
    tell(world, position, 9)
    assert world.lease.worker == worker("p2")
    assert told.values == []


def test_a_worker_that_draws_before_it_has_told_all_is_left() -> None:
    world, told = world_that_tells()
    world.bind()
    tell(world, 1, 1, 2, 3)
    world.first()
    assert world.emitted == []
    assert world.lease.worker == worker("p2")
    assert told.values == [1, 2, 3]
