"""What used this machine's cores during a measurement."""

import os
import time

import psutil

_NUM_SHOWN = 8


class MachineUse:
    """From its making until ``since``: CPU seconds of the machine and of its processes."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s = _busy_s()
        self._by_process = _by_process()

    def since(self) -> dict[str, object]:
        """Cores busy on average, and the processes that used most of them.

        A process that began and ended meanwhile counts in ``cores_busy`` only.
        """
        elapsed_s = time.monotonic() - self._began_s
        shares = {
            name: round((seconds - self._by_process.get(name, 0.0)) / elapsed_s, 3)
            for name, seconds in _by_process().items()
        }
        busiest = sorted(shares, key=lambda name: -shares[name])[:_NUM_SHOWN]
        return {
            "cores_busy": (_busy_s() - self._busy_s) / elapsed_s,
            "load_average": os.getloadavg()[0],
            "processes": {name: shares[name] for name in busiest if shares[name]},
        }


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _by_process() -> dict[str, float]:
    """CPU seconds so far, by pid and the start of the command."""
    result = {}
    for process in psutil.process_iter(["pid", "cmdline", "cpu_times"]):
        command, times = process.info["cmdline"], process.info["cpu_times"]
        if command and times:
            result[f"{process.pid} {' '.join(command)[:80]}"] = times.user + times.system
    return result
