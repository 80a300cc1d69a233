"""``python -m decode_worker``."""

import sys

from decode_worker.app import serve
from decode_worker.config import DecodeWorkerConfig
from diptych.process import main

sys.exit(main(DecodeWorkerConfig, serve))
