"""The processes of a worker's other ranks, as the system knows them."""

import psutil


def ranks_of(pid: int) -> list[psutil.Process]:
    """Of the worker that runs in this process."""
    children = psutil.Process(pid).children()
    return [child for child in children if "diptych.worker.rank_main" in child.cmdline()]


def is_there(process: psutil.Process) -> bool:
    """Whether it still runs, or is stopped; what was not waited for yet is gone."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
