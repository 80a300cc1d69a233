"""Memory that another process can map."""

import mmap
import os

import pytest

from diptych.shared_bytes import SharedBytes


def test_another_mapping_sees_and_changes_the_same_bytes() -> None:
    shared = SharedBytes(8192)
    assert shared.fd is not None
    assert not any(shared.buffer[:])
    with mmap.mmap(shared.fd, 8192) as other:
        shared.buffer[4096] = 1
        assert other[4096] == 1
        other[0] = 2
    assert shared.buffer[0] == 2


def test_more_than_there_is_is_refused_at_once_and_leaves_no_file() -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="memory"):
        SharedBytes(2**46)
    SharedBytes(4096)
    assert len(os.listdir("/proc/self/fd")) == num_files
