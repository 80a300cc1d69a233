"""Which cores a worker may use, and how many of them are worth a thread."""

import os
from contextlib import suppress
from pathlib import Path

from diptych.errors import ConfigurationError
from diptych.worker.config import parse_cpus

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # quota and period of this container, microseconds


def num_usable_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Cores this process may run on, and no more than its container's share of time is worth.

    More threads than that are stopped together whenever the share is used up.
    """
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(num_cores, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no such limit ("max"), or not Linux
        return num_cores


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
