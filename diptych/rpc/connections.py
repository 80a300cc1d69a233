"""How many connections of clients a process takes, of the files that it may have open."""

import resource
from typing import Final

_MOST: Final = 2**20  # where files have no bound

HTTP_SHARE: Final = 0.5  # each request under way has a connection of its own
GRPC_SHARE: Final = 0.25
PROBES_SHARE: Final = 1 / 16


def most_connections(share: float) -> int:
    """So many of one kind: what no kind has a share in is left to workers, files and processes."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if max_files == resource.RLIM_INFINITY else max(1, int(max_files * share))
