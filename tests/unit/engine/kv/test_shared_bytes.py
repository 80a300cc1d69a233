"""Memory that another process can map."""

import ctypes
import mmap
import os
import re
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych.engine.kv.memory import HostKVMemory, MappedKVMemory
from diptych.engine.kv.shared_bytes import SharedBytes

HUGE_PAGE = 2 << 20
PATIENCE_MS = 5000


def test_another_mapping_sees_and_changes_the_same_bytes() -> None:
    shared = SharedBytes(8192)
    assert shared.fd is not None
    assert not any(shared.buffer[:])
    with mmap.mmap(shared.fd, 8192) as other:
        shared.buffer[4096] = 1
        assert other[4096] == 1
        other[0] = 2
    assert shared.buffer[0] == 2


def test_who_is_given_a_pools_file_maps_it_and_closes_it() -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    pool = HostKVMemory(8192)
    assert pool.shared_fd is not None
    mapped = MappedKVMemory(os.dup(pool.shared_fd), 8192)
    pool.bytes[4096] = 7
    assert mapped.bytes[4096] == 7
    mapped.bytes[0] = 5
    assert pool.bytes[0] == 5
    del mapped, pool
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_more_than_there_is_is_refused_at_once_and_leaves_no_file() -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="memory"):
        SharedBytes(2**46)
    SharedBytes(4096)
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_lies_on_huge_pages() -> None:
    """Even where the system gives files none by itself; all but the end that fills no page."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1) or not has_huge_pages():
        pytest.skip("this system has no huge pages for files")
    shared = SharedBytes(3 * HUGE_PAGE + 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared.buffer))
    assert address % HUGE_PAGE == 0
    mapping = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")[2]
    found = re.search(r"ShmemPmdMapped: *(\d+) kB", mapping)
    assert found
    assert int(found[1]) << 10 == 3 * HUGE_PAGE
    assert not any(shared.buffer)


def has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


class Poll(ctypes.Structure):
    """One file to wait for."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class SlowCollapse:
    """In the place of madvise: in C, until another thread of Python has done something."""

    def __init__(self) -> None:
        self.argtypes: object = None
        self.poll: Callable[..., int] | None = None
        self.was_let_go_on: list[bool] = []
        self._has_begun = threading.Event()
        self._awaited, self._done = os.pipe()

    def __call__(self, address: int, num_bytes: int, advice: int) -> int:
        assert self.poll is not None
        file = Poll(self._awaited, select.POLLIN, 0)
        self._has_begun.set()
        self.was_let_go_on.append(self.poll(ctypes.byref(file), 1, PATIENCE_MS) == 1)
        return 0

    def let_go_on(self) -> None:
        self._has_begun.wait(PATIENCE_MS / 1000)
        os.write(self._done, b"x")

    def close(self) -> None:
        os.close(self._awaited)
        os.close(self._done)


def test_other_threads_run_while_pages_are_collapsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody hears a signal or a health check, for seconds."""
    collapse = SlowCollapse()

    def slow(loader: type[ctypes.CDLL]) -> Callable[..., ctypes.CDLL]:
        class Slow(loader):  # type: ignore[misc, valid-type]
            @property
            def madvise(self) -> SlowCollapse:
                collapse.poll = self.poll  # with that loader's way with the interpreter's lock
                return collapse

        return Slow

    for loader in (ctypes.CDLL, ctypes.PyDLL):
        monkeypatch.setattr(ctypes, loader.__name__, slow(loader))
    other = threading.Thread(target=collapse.let_go_on)
    other.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # the lock goes to another thread where it is let go, only
    try:
        SharedBytes(HUGE_PAGE)
    finally:
        sys.setswitchinterval(interval_s)
        other.join()
        collapse.close()
    assert collapse.was_let_go_on == [True]


def test_memory_is_given_back() -> None:
    def mapped_kib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE >> 10

    before = mapped_kib()
    for _ in range(4):
        SharedBytes(8 * HUGE_PAGE)
    assert mapped_kib() - before < 8 << 10
