"""Processes that live through a test, whatever dies beside them."""

from collections.abc import Iterable

import psutil

from tests.cluster import Process


class Survivors:
    """The processes that are these from now on: others started in their place are none of them."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self._processes = {each.name: psutil.Process(each.pid) for each in processes}

    def check(self) -> None:
        """Raises AssertionError: one has ended, whether or not anybody has taken note of it."""
        for name, process in self._processes.items():
            is_there = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            assert is_there, f"{name} has ended"
