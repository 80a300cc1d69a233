"""``python -m decode_worker``."""

import sys

from diptych.process import loading, main

with loading():
    from decode_worker.app import serve
    from decode_worker.config import DecodeWorkerConfig

sys.exit(main(DecodeWorkerConfig, serve))
