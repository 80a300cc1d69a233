"""Which cores a worker may use, and how many of them are worth a thread."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from diptych.errors import ConfigurationError
from diptych.worker.config import parse_cpus

_CGROUP = Path("/sys/fs/cgroup")


def num_usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores this process may run on, and no more than its container's share of time is worth.

    More threads than that are stopped together whenever the share is used up.
    """
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    try:
        quota_us, period_us = map(int, _quota_and_period(cgroup))
        return max(1, min(num_cores, quota_us // period_us)) if quota_us > 0 else num_cores
    except (OSError, ValueError, ZeroDivisionError):  # no such limit ("max"), or not Linux
        return num_cores


def _quota_and_period(cgroup: Path) -> Sequence[str]:
    """Of this container, microseconds. Raises OSError, ValueError."""
    with suppress(FileNotFoundError):
        return (cgroup / "cpu.max").read_text().split()
    first = cgroup / "cpu"  # the first version of control groups, which some nodes still have
    return [(first / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]


def confine_to(cpus: str) -> None:
    """Keep every thread of this process, present and future, on these cores.

    Raises ConfigurationError: there are no such cores, or no way to do it here.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError("cpus: this system cannot confine a process to cores")
    try:
        for task in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # that thread has ended meanwhile
                os.sched_setaffinity(int(task.name), parse_cpus(cpus))
    except OSError as error:
        usable = sorted(os.sched_getaffinity(0))
        raise ConfigurationError(f"cpus: {cpus}: {error.strerror}; usable: {usable}") from None
