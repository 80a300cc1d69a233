"""What used this machine's cores during a measurement."""

import os
import time
from typing import NamedTuple

import psutil

_NUM_SHOWN = 8


class Use(NamedTuple):
    """CPU time by elapsed time: cores, on average.

    ``others_cores`` were used neither by this process nor by what it started, but by the
    kernel, the host, or processes that may have come and gone meanwhile; ``processes`` names
    only those that stayed.
    """

    elapsed_s: float
    cores_busy: float
    others_cores: float
    load_average: float
    processes: dict[str, float]  # the busiest


class MachineUse:
    """From its making until ``since``: CPU seconds of the machine and of its processes."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s = _busy_s()
        self._by_process = _by_process()

    def since(self) -> Use:
        elapsed_s = time.monotonic() - self._began_s
        cores_busy = (_busy_s() - self._busy_s) / elapsed_s
        now = _by_process()
        cores = {
            pid: (seconds - self._by_process.get(pid, ("", 0.0))[1]) / elapsed_s
            for pid, (_, seconds) in now.items()
        }
        own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        busiest = sorted(cores, key=lambda pid: -cores[pid])[:_NUM_SHOWN]
        return Use(
            elapsed_s=elapsed_s,
            cores_busy=cores_busy,
            others_cores=max(0.0, cores_busy - sum(cores.get(pid, 0.0) for pid in own)),
            load_average=os.getloadavg()[0],
            processes={
                f"{pid} {now[pid][0]}": round(cores[pid], 3) for pid in busiest if cores[pid] > 0
            },
        )


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _by_process() -> dict[int, tuple[str, float]]:
    """By pid: the start of the command, CPU seconds so far."""
    result = {}
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        command, times = process.info["cmdline"], process.info["cpu_times"]
        if command and times:
            result[process.pid] = (" ".join(command)[:80], times.user + times.system)
    return result
