"""``python -m prefill_worker``."""

import sys

from diptych.loading import end_at_interrupt, loading, open_standard_files

with loading():
    open_standard_files()
    end_at_interrupt()
    from diptych.process import main
    from prefill_worker.app import serve
    from prefill_worker.config import PrefillWorkerConfig

sys.exit(main(PrefillWorkerConfig, serve))
