"""``python -m prefill_worker``."""

import sys

from diptych.process import loading, main

with loading():
    from prefill_worker.app import serve
    from prefill_worker.config import PrefillWorkerConfig

sys.exit(main(PrefillWorkerConfig, serve))
