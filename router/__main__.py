"""``python -m router``."""

import sys

from diptych.process import main
from router.app import serve
from router.config import RouterConfig

if __name__ == "__main__":
    sys.exit(main(RouterConfig, serve))
