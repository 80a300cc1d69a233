"""Memory that a child process can map: the KV pool, where its transport runs in a child."""

import contextlib
import mmap
import os


class SharedBytes:
    """Zeroed bytes behind a file without a name. Any thread; unmapped with its last user.

    ``fd`` is None where the system has no such files: then only this process sees
    the bytes. Counts as ordinary memory of the process (a container's limit on
    /dev/shm does not apply to it).
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError or ValueError: there is not that much memory."""
        self.fd: int | None = None
        # The kernel checks anonymous memory against what there is, but not such a file.
        anonymous = mmap.mmap(-1, num_bytes)
        if not hasattr(os, "memfd_create"):
            self.buffer = anonymous
            return
        anonymous.close()
        self.fd = os.memfd_create("kv-pool")
        try:
            os.ftruncate(self.fd, num_bytes)
            self.buffer = mmap.mmap(self.fd, num_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        with contextlib.suppress(OSError):  # the kernel may be built without
            self.buffer.madvise(mmap.MADV_HUGEPAGE)

    def __del__(self) -> None:
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)
