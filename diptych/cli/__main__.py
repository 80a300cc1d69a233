"""``python -m diptych.cli``."""

import sys

from diptych.cli.main import main

sys.exit(main())
