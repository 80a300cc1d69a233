"""``python -m soft_worker``."""

import sys

from diptych.process import loading, main

with loading():
    from soft_worker.app import serve
    from soft_worker.config import SoftWorkerConfig

sys.exit(main(SoftWorkerConfig, serve))
