"""How linear layers are kept: one list for settings, backends and the command line. No torch."""

from typing import Literal

Quantization = Literal["none", "int8"]  # of all linear layers, the head included
