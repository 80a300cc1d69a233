"""``python -m router``."""

import gc
import sys

from diptych.loading import end_at_interrupt, loading, open_standard_files

with loading():
    open_standard_files()
    end_at_interrupt()
    from diptych.process import main
    from router.config import RouterConfig
    from router.processes import serve

_COLLECT_AFTER_OBJECTS = 10_000

if __name__ == "__main__":
    # A token leaves no cycles behind, but with 256 streams there are many young objects at any
    # time: to look at them after each 700 new ones took a tenth of this process's time.
    gc.set_threshold(_COLLECT_AFTER_OBJECTS)
    sys.exit(main(RouterConfig, serve))
