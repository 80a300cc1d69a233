"""Runs the batch server: ``python -m batch_server``."""

import sys

from diptych.process import loading, main

with loading():
    from batch_server.app import serve
    from batch_server.config import BatchServerConfig

if __name__ == "__main__":
    sys.exit(main(BatchServerConfig, serve))
