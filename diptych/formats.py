"""Where a model runs and how its numbers are kept: one list of names for settings, the command
line and what they choose in the engine. No torch.
"""

from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16"]  # of weights and arithmetic
KVDtypeName = Literal["float32", "bfloat16", "int8", "fp8"]
PrefillAttentionName = Literal["own", "flashinfer"]  # whose kernels, on GPUs
Quantization = Literal[
    "none", "int8", "int8-weights", "fp8"
]  # of all linear layers, the head included
