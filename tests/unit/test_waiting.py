"""Time in which a machine stood still is nobody's delay."""

import asyncio
import time

import pytest

from tests.waiting import Patience, until, within


def test_what_a_running_machine_takes_counts() -> None:
    clock = [100.0]
    patience = Patience(1.0, lambda: clock[0])
    for _ in range(19):
        clock[0] += 0.05
        assert not patience.is_over()
    clock[0] += 0.06
    assert patience.is_over()


def test_time_in_which_the_machine_stood_still_does_not_count() -> None:
    clock = [100.0]
    patience = Patience(1.0, lambda: clock[0])
    clock[0] += 60.0
    assert not patience.is_over()
    for _ in range(17):
        clock[0] += 0.05
        assert not patience.is_over()
    clock[0] += 0.1
    assert patience.is_over()


async def test_a_wait_looks_first_and_says_what_did_not_happen() -> None:
    looks = [False, False, True]
    await until(lambda: looks.pop(0))
    assert not looks
    await until(lambda: True, within_s=0.0)
    with pytest.raises(AssertionError, match=r"not within 0.05 s: it rains"):
        await until(lambda: False, 0.05, "it rains")


async def test_a_block_has_its_time_and_that_in_which_the_machine_stood_still() -> None:
    async with within(0.2):
        time.sleep(0.3)  # noqa: ASYNC251 - as a machine that stands still does
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with within(0.05):
            await asyncio.Event().wait()
