"""A process that hangs falls silent; one whose parent stood still does not."""

import asyncio
import os
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress

import pytest

from diptych.timers import Timers
from router.heartbeat import Pulse, beat

TIMERS = Timers(heartbeat_s=1.0, lost_peer_s=3.0)


class Process:
    """Beats so many times between two looks of its parent."""

    def __init__(self, pulse: Pulse, beats: Iterable[int]) -> None:
        self._fd = pulse.fd
        self._beats: Iterator[int] = iter(beats)
        self.num_looks = 0

    async def sleep(self, time_s: float) -> None:
        assert time_s == TIMERS.heartbeat_s
        self.num_looks += 1
        os.write(self._fd, b"." * next(self._beats))


@pytest.mark.parametrize(
    ("beats", "num_looks"),
    [([0, 0, 0], 3), ([1, 0, 0, 1, 0, 0, 0], 7), ([0, 0, 9000, 0, 0, 1, 0, 0, 0], 9)],
)
async def test_it_is_silent_after_so_many_looks_without_a_beat(
    beats: list[int], num_looks: int
) -> None:
    with closing(Pulse()) as pulse:
        process = Process(pulse, beats)
        await pulse.until_silent(TIMERS, process.sleep)
        assert process.num_looks == num_looks


async def test_beats_come_until_nobody_reads_and_harm_nobody_then() -> None:
    pulse = Pulse()
    os.set_blocking(pulse.fd, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pulse.fd, b"." * 65536)  # a parent that hangs
    fd = os.dup(pulse.fd)
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(beat(fd, 0.0))
        await asyncio.sleep(0)
        pulse.close()  # and one that has ended
        for _ in range(3):
            await asyncio.sleep(0)
        assert not beating.done()
        beating.cancel()
    os.close(fd)


async def test_the_end_of_a_process_is_silence_too() -> None:
    pulse = Pulse()
    pulse.hand_over()

    async def at_once(_: float) -> None:
        await asyncio.sleep(0)

    await pulse.until_silent(TIMERS, at_once)
    pulse.close()


def test_neither_end_of_a_pulse_stays_open() -> None:
    """A router that starts its processes again and again would run out of files."""
    handed_over, closed = Pulse(), Pulse()
    reading, writing = os.dup(handed_over._reading), os.dup(closed.fd)
    handed_over.hand_over()
    assert os.read(reading, 1) == b"", "nobody can write"
    handed_over.close()
    closed.close()
    with pytest.raises(BrokenPipeError):
        os.write(writing, b".")
    os.close(reading)
    os.close(writing)
