"""Memory that another process can map."""

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest

from diptych.engine.kv.memory import HostKVMemory, MappedKVMemory
from diptych.engine.kv.shared_bytes import SharedBytes

HUGE_PAGE = 2 << 20


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


def test_memory_is_given_back() -> None:
    def mapped_kib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE >> 10

    before = mapped_kib()
    for _ in range(4):
        SharedBytes(8 * HUGE_PAGE)
    assert mapped_kib() - before < 8 << 10
