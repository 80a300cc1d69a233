"""``python -m soft_worker``."""

import sys

from diptych.loading import end_at_interrupt, loading, open_standard_files

with loading():
    open_standard_files()
    end_at_interrupt()
    from diptych.process import main
    from soft_worker.app import serve
    from soft_worker.config import SoftWorkerConfig

sys.exit(main(SoftWorkerConfig, serve))
