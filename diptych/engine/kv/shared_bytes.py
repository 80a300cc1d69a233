"""Memory that a child process can map: the KV pool, where its transport runs in a child."""

import ctypes
import mmap
import os

_PAGE_BYTES = 2 << 20  # a huge page
_MADV_COLLAPSE = 25  # Linux 6.1; Python has no name for it
_MAP_FIXED = 0x10


class SharedBytes:
    """Zeroed bytes behind a file without a name. Any thread; unmapped with its last user.

    ``buffer`` lies on huge pages where the system has them: with small ones, the
    processor spends a third of the time to read it on finding them. ``fd`` is None
    where the system has no such files: then only this process sees the bytes. Counts
    as ordinary memory of the process (a container's limit on /dev/shm does not apply).
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError or ValueError: there is not that much memory."""
        self.fd: int | None = None
        # The kernel checks anonymous memory against what there is, but not such a file.
        space = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = -ctypes.addressof(ctypes.c_char.from_buffer(space)) % _PAGE_BYTES
        self.buffer = memoryview(space)[begin : begin + num_bytes]
        if not hasattr(os, "memfd_create"):
            return
        self.fd = os.memfd_create("kv-pool")
        try:
            os.ftruncate(self.fd, num_bytes)
            _map(self.fd, self.buffer)
        except BaseException:
            os.close(self.fd)
            raise
        for page in range(0, num_bytes, _PAGE_BYTES):
            self.buffer[page] = 0  # what nobody touched cannot be collapsed
        _collapse(self.buffer)

    def __del__(self) -> None:
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)


def _collapse(buffer: memoryview) -> None:
    """Onto huge pages, unless the kernel is an older one, or has none.

    Python's own call holds the interpreter's lock, for seconds: nobody would hear a signal.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    libc.madvise(address, len(buffer), _MADV_COLLAPSE)


def _map(fd: int, buffer: memoryview) -> None:
    """Put a file's bytes in the place of a buffer's. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(address, len(buffer), rights, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
