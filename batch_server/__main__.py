"""Runs the batch server: ``python -m batch_server``."""

import sys

from diptych.loading import end_at_interrupt, loading, open_standard_files

with loading():
    open_standard_files()
    end_at_interrupt()
    from batch_server.app import serve
    from batch_server.config import BatchServerConfig
    from diptych.process import main

if __name__ == "__main__":
    sys.exit(main(BatchServerConfig, serve))
