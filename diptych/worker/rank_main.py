"""The process of any rank but a worker's first: ``python -m diptych.worker.rank_main``.

Light until it is sure to end with the worker, whichever way that ends.
"""

import argparse
import os
from multiprocessing.connection import Connection

from kvtransfer.agents.parent import end_with_parent


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("parent-pid", "socket-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent(arguments.parent_pid)
    from diptych.worker.rank import follow  # which takes seconds to import

    code = follow(Connection(arguments.socket_fd))
    os._exit(code)  # nothing is left to do, and other ranks wait for its end


if __name__ == "__main__":
    main()
