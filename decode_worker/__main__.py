"""``python -m decode_worker``."""

import sys

from diptych.loading import end_at_interrupt, loading, open_standard_files

with loading():
    open_standard_files()
    end_at_interrupt()
    from decode_worker.app import serve
    from decode_worker.config import DecodeWorkerConfig
    from diptych.process import main

sys.exit(main(DecodeWorkerConfig, serve))
